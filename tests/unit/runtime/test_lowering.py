"""Messages that arrive together are taken together, unless they touch the same rows and heads."""

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_balance import Batch, Cluster, Model
from megatron_balance.compile.ping_pong import Cuts
from megatron_balance.compile.pipeline import compile_policies
from megatron_balance.cost.kernel import LAWS, TILE_TOKENS, KeyGrid, by_key_length
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.program import AttendGrad, Kind
from megatron_balance.runtime import bind, groups, recorder, transport
from megatron_balance.runtime.bind import ALIGN, _tensors_in, ship
from megatron_balance.runtime.lower import memory, messages, steps
from megatron_balance.runtime.pool import BufferPool
from tests.support.strategies import ALL_PLANNERS, EVERY_PATTERN, Case, plan

torch = pytest.importorskip("torch")


def message(peer: int, kind: Kind, rows: tuple[int, int], heads: tuple[int, int], buffer: int = 0) -> steps.PeerMessage:
    start, stop = rows
    run = steps.RowRun(0, stop - start, buffer, start, stop, None, 0, heads[1] - heads[0], heads[0])
    return steps.PeerMessage(peer, kind, steps.Packed((run,), run.count, run.num_heads, (None,)))


def test_messages_that_meet_no_earlier_one_are_taken_together() -> None:
    # Heads of other peers: gradients of queries with those of keys, which go elsewhere.
    kinds = (Kind.Q_GRAD, Kind.KV_GRAD)
    received = [message(peer, kind, (0, 10), (2 * peer, 2 * peer + 2)) for peer in (1, 2, 3) for kind in kinds]
    assert messages.arrivals(received) == ((0, 1, 2, 3, 4, 5),)
    # A key-value head that several ranks used: its gradients are added in order.
    rows = [(0, 10), (5, 15), (12, 20), (30, 40)]
    received = [message(peer, Kind.KV_GRAD, each, (0, 2)) for peer, each in enumerate(rows)]
    assert messages.arrivals(received) == ((0, 3), (1,), (2,))
    # Received inputs become buffers of their own and meet nothing.
    inputs = [(peer, kind) for peer in (1, 2) for kind in (Kind.Q, Kind.KV)]
    received = [steps.PeerMessage(peer, kind, steps.Packed((), 8, 2), peer) for peer, kind in inputs]
    assert messages.arrivals(received) == ((0, 2), (1, 3))
    # An exchange that sums on the way brings one peer's messages.
    summed = tuple(message(peer, Kind.KV_GRAD, (0, 10), (0, 2)) for peer in (1, 2, 3))
    members = (0, 0, "", "reduce_scatter", (0, 1, 2, 3), (), summed, 0, {}, {}, frozenset(), "")
    exchange = steps.ExchangeStep(*members, arrivals=messages.arrivals(summed))
    assert exchange.arrivals == ((0,), (1,), (2,))
    assert memory._taken_together(exchange, 1) == [(0,)]


# A proxy's thread on a transport that only writes down: order, look-ahead, what it counts, and what
# it says when a piece is lost.

FORM = memory.CallForm.of(memory.AttentionShape(1, 1, 4), torch.float32, "fp32")
ARRIVES, LEAVES = steps.Hop(0, "dispatch", 6, "dispatch", False), steps.Hop(5, "across", 8, "inter_node", True)


def relay_task(exchange: int, rows: int = 4) -> steps.RelayTask:
    """Rank 1 relays the first half of what rank 0 sends to rank 4: `rows` keys of one head."""
    route = steps.ProxyRoute("send_proxy", 0, 4, 0, 2, ARRIVES, LEAVES)
    return steps.RelayTask(exchange, exchange, 100 * exchange, ((Kind.KV, rows, 1),), route)


def relaying(relay_tasks: list[steps.RelayTask], trace: recorder.Trace | None = None) -> transport.Gloo:
    """A phase of rank 1 that only relays."""
    phase = steps.Phase((), Cuts(0, 0), (), relay_tasks=(tuple(relay_tasks),))
    return transport.Gloo(phase, FORM, groups.Groups(1, 8, tuple(range(8)), None), trace)


class Wire:
    """Stands in for gloo. `lost`: the tag of a message that never comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost: int | None = None) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.lost = lost
        for name in ("receive", "send"):
            monkeypatch.setattr(transport, name, lambda x, peer, tag, _, name=name: self.begin(name, x, peer, tag))
        monkeypatch.setattr(transport, "break_off", lambda _: self.log.append(("break off",)))

    def begin(self, name: str, x: Any, peer: int, tag: int) -> SimpleNamespace:
        self.log.append((name, peer, tag, x.nbytes))
        return SimpleNamespace(wait=lambda timeout: self.wait(timeout, tag))

    def wait(self, timeout: timedelta, tag: int) -> None:
        assert timeout > timedelta(0)
        if tag == self.lost:
            raise RuntimeError("Connection closed by peer")


def test_pieces_are_passed_on_in_order_with_receives_posted_ahead_and_a_lost_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Pieces are passed on in order with receives posted ahead.
    wire, trace = Wire(monkeypatch), recorder.Trace()
    passing = relaying([relay_task(exchange) for exchange in range(40)], trace)
    passing.end()
    sent, received = ([entry for entry in wire.log if entry[0] == what] for what in ("send", "receive"))
    assert sent == [("send", 5, 100 * i + 8, 64) for i in range(40)]
    assert received == [("receive", 0, 100 * i + 6, 64) for i in range(40)]
    assert 1 < wire.log.index(sent[0]) < 40
    assert passing.traffic == recorder.PhaseTraffic(relayed_bytes=40 * 64, inter_node_bytes_sent=40 * 64)
    legs = [(e.stream, e.op, e.leg, e.role) for e in trace[:2]]
    assert legs == [("dispatch", 0, "dispatch", "send_proxy"), ("inter_node", 0, "across", "send_proxy")]
    # A piece without bytes is not waited for.
    wire = Wire(monkeypatch)
    # 16 bytes: one piece of the two.
    tiny = relay_task(0)._replace(carried=((Kind.Q, 1, 1),))
    relaying([tiny, tiny._replace(route=tiny.route._replace(index=1))]).end()
    assert wire.log == [("receive", 0, 6, 16), ("send", 5, 8, 16)]
    # A lost piece is named and everything else broken off.
    wire = Wire(monkeypatch, lost=306)
    passing = relaying([relay_task(exchange) for exchange in range(6)])
    expected = (
        r"exchange 3, piece 0 of 2 from rank 0 to rank 4, as send proxy, rank 0 -> rank 1 -> rank 5: "
        r"it did not arrive: Connection closed by peer"
    )
    with pytest.raises(RuntimeError, match=expected):
        passing.end()
    assert wire.log[-1] == ("break off",)
    assert ("send", 5, 308, 64) not in wire.log
    with pytest.raises(RuntimeError, match="exchange 3"):
        passing.fail()


# Tables of a bound plan: one block, one copy, views where the tables were; all of them at bind.

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Held:
    name: str
    tables: tuple[Any, ...]


def test_a_shipment_is_one_aligned_block_and_one_copy(monkeypatch):
    # Shipped tables are the same objects in one aligned block.
    one, two = torch.arange(5, dtype=torch.int32), torch.arange(7, dtype=torch.int64)
    blocks, empty = torch.arange(12, dtype=torch.int32).reshape(3, 4), torch.empty(0, dtype=torch.int64)
    held = [one, two, blocks, empty]
    before = [x.clone() for x in held]
    num_bytes = ship([*held, one], CPU)
    assert all(map(torch.equal, held, before))
    assert {table.untyped_storage().data_ptr() for table in held} == {one.untyped_storage().data_ptr()}
    assert one.untyped_storage().nbytes() == num_bytes == 32 + 48 + 64
    assert all(table.data_ptr() % ALIGN == 0 for table in held if table.numel())
    # A shipment is one copy and nothing to ship none.
    copies, to = list[int](), torch.Tensor.to

    def counted(self, *args, **more):
        copies.append(self.nbytes)
        return to(self, *args, **more)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    assert ship([], CPU) == ship([torch.empty(0, dtype=torch.int32)], CPU) == 0
    assert copies == []
    assert [ship([torch.arange(n) for n in range(1, 40)], CPU)] == copies
    # Tables are found in tuples lists and dataclasses.
    a, b, c = (torch.arange(n) for n in (1, 2, 3))
    found = list(_tensors_in(([Held("x", (a, None))], (b, slice(0, 1), 3), {"not": "a table"}, c)))
    assert [x.numel() for x in found] == [1, 2, 3]


class PinnedMemory:
    # torch's allocator of pinned memory (CachingHostAllocator.h): blocks by the power of two above
    # their size, lent again when the copy out of them is over.

    def __init__(self):
        self.free, self.made, self.copying = defaultdict(int), 0, deque()

    def empty(self, num_bytes, *, dtype, pin_memory):
        assert pin_memory
        while len(self.copying) > 2:  # copies in flight
            self.free[self.copying.popleft()] += 1
        kind = (num_bytes - 1).bit_length()
        if self.free[kind]:
            self.free[kind] -= 1
        else:
            self.made += 1
        self.copying.append(kind)
        return torch.tensor([], dtype=dtype).new_empty(num_bytes)


def test_tables_of_ever_new_sizes_take_the_pinned_blocks_of_the_first_steps(monkeypatch):
    memory, pool, sizes = PinnedMemory(), BufferPool(), np.random.default_rng(3).integers(9_000, 40_000, 200)
    monkeypatch.setattr(torch, "empty", memory.empty)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *_, **__: x.clone())
    monkeypatch.setattr(bind, "connect", lambda *_: None)
    bound: Any = SimpleNamespace(groups=SimpleNamespace(buffers=pool), phases={}, peak_bytes=None)
    made = []
    for size in [40_000, *sizes]:
        bind.Prepared((bound,), [torch.arange(size)], torch.device("cuda")).ship()
        made.append(memory.made)
    assert made[:4] == [1, 2, 3, 3]
    assert made[-1] == 3
    before = pool.pinned_bytes(1)
    assert 2 * 8 * 40_000 <= before < 4 * 8 * 40_000
    assert pool.pinned_bytes(before + 1) == 4 * before  # the next class has room, too


CASE = Case(Batch((300, 90, 41, 17, 130, 6)), Cluster(4, 2), Model(8, 4, 8), 160, seed=5)
VARIED = (CASE, replace(CASE, remapped=True), replace(CASE, remapped=True, routing=(1, 1)))
WAYS = (("keep", "fp32"), ("replay", "bf16"))
EACH = [(planner, *way) for planner in EVERY_PATTERN for way in WAYS]
EACH += [(name, *WAYS[at % 2]) for at, name in enumerate(ALL_PLANNERS) if name not in EVERY_PATTERN]


@pytest.mark.parametrize(("planner", "policy", "wire"), EACH)
def test_all_tables_of_a_microbatch_are_one_copy_at_bind(planner, policy, wire):
    pytest.importorskip("triton")
    from tests.support.silent import count

    launches = set()
    for case in VARIED:
        for rank in (0, 3):
            found = count(plan(planner, case), rank, policy, wire, strided=rank > 0)
            assert (found.at_bind, found.in_layers) == (1, 0), (case, rank)
            launches |= set(found.launches)
    assert "add_rows" in launches


@pytest.mark.parametrize("planner", ["llama_all_gather", "te_ring", "ulysses"])
def test_a_backward_is_launched_as_often_as_its_cost_says(planner, monkeypatch):
    # Under a full mask every entry is under one mask, as every launch is for the cost model.
    from megatron_balance.runtime import kernels

    law = LAWS["flash_attn_3"]
    assert law.key_blocks is not None
    cheap = replace(law.key_blocks, launch_blocks=8, copy_blocks=0)
    monkeypatch.setitem(LAWS, "flash_attn_3", replace(law, key_blocks=cheap))
    kernel = kernels.VarlenKernel("flash_attn_3", SimpleNamespace())  # type: ignore[arg-type]
    bucketed, searched = kernels.by_key_length, []
    monkeypatch.setattr(kernels, "by_key_length", lambda *given: searched.append(1) or bucketed(*given))
    monkeypatch.setattr(bind, "choose_kernel", lambda *_, **__: kernel)
    lengths, cluster, shape = (3000, 70, 1300, 64, 200, 2500, 100, 90), Cluster(4, 2), (8, 4, 16)
    planned = plan(planner, Case(Batch(lengths), cluster, Model(*shape, attention="full"), None, 0))
    split = found = 0
    for rank in range(4):
        options = bind.BindOptions(memory.AttentionShape(*shape), groups.Groups(rank, 4, tuple(range(4)), None))
        bound = bind.prepare(planned, rank, options).bounds[0]
        launches = [step for step in bound.phases["backward"].steps if isinstance(step, steps.GradLaunch)]
        ops = compile_policies(planned, rank, ("keep",))[0].program.backward
        for step in launches:
            op = ops[step.op]
            assert isinstance(op, AttendGrad)
            pairs = as_array(op.pairs)
            num_q, num_k, heads, kv_heads = (
                pairs[:, stop] - pairs[:, start]
                for start, stop in (
                    (Pair.Q_START, Pair.Q_STOP),
                    (Pair.K_START, Pair.K_STOP),
                    (Pair.Q_HEAD_START, Pair.Q_HEAD_STOP),
                    (Pair.KV_HEAD_START, Pair.KV_HEAD_STOP),
                )
            )
            grid = KeyGrid.of(num_q, -(-num_k // TILE_TOKENS), heads, kv_heads)
            of = by_key_length(grid, np.zeros(len(pairs), dtype=np.int64), 1, cheap)[0]
            assert step.calls == len(set(of.tolist()))
            split += step.calls > 1
        found += len(launches)
    assert split
    assert len(searched) == found, "buckets of a launch are searched once"


@pytest.mark.parametrize("planner", ["te_ring", "random_shares", "random_task_table", "random_once_per_node"])
def test_every_table_that_a_step_holds_is_shipped(planner, monkeypatch):
    # Those that only the plain mover asks for, too: it may be named on a GPU.
    pytest.importorskip("triton")
    from megatron_balance.runtime import bind as binding
    from tests.support.silent import count

    real, held, kinds = binding._tables_of, [], set()

    def seen(phase):
        found = list(real(phase))
        for step in phase.steps:
            inside = {id(table) for table in _tensors_in(step)}
            held.append(inside <= {id(table) for table in found})
            kinds.update({type(step).__name__} if inside else ())
        return found

    monkeypatch.setattr(binding, "_tables_of", seen)
    for case in VARIED:
        for rank in (0, 3):
            count(plan(planner, case), rank, "replay", "fp32", strided=rank > 0)
    assert all(held)
    assert kinds == {"IssueStep", "FinishStep", "Launch", "GradLaunch"}

"""Received bytes as the plan predicts them, beside the buffers that the runtime counts."""

import ast
import gc
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_balance import Batch, Cluster, MicrobatchPlan, runtime
from megatron_balance.analysis.backward import microbatch_bytes
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir import model, program
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import choose_layers, choose_planner
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower import memory, regions
from megatron_balance.runtime.lower.steps import FinishStep, GradLaunch
from megatron_balance.runtime.pool import ALIGN, SLAB, BufferPool
from tests.support import by_hand
from tests.support.processes import ended
from tests.support.silent import ShapeKernel
from tests.support.strategies import EVERY_PATTERN
from tests.unit.compile.test_streams import Written

HEADS, KV_HEADS, DIM, RANKS = 8, 4, 64, 8
MODEL, CLUSTER = model.Model(HEADS, KV_HEADS, DIM), Cluster(RANKS, 4)
# Planners, and the rule of one whose other rule takes another comm pattern.
PLANNED = [*((name, "") for name in PLANNERS), ("zeppelin", "groups")]
IN_THE_SUITE = (*EVERY_PATTERN, "wlb_sharding", "knapformer")
CASES = [
    pytest.param((name, rule, moved), marks=() if name in IN_THE_SUITE else (pytest.mark.product,))
    for name, rule in PLANNED
    for moved in (False, True)
]
LENGTHS = (900, 4000, 333, 70, 1200, 2500, 64, 1500)


def count(plan: MicrobatchPlan, rank: int, policy: Policy) -> memory.PeakBytes:
    groups = Groups(rank, RANKS, tuple(range(RANKS)), None, buffers=BufferPool(cpu=True))
    shape = AttentionShape(HEADS, KV_HEADS, DIM)
    found = bind(plan, rank, shape, groups=groups, dtype=torch.bfloat16, policy=policy, kernel="plain").peak_bytes
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_bytes_are_those_that_the_runtime_counts(case):
    planner, rule, remapped = case
    try:
        plan = plan_of(planner, rule, remapped=remapped)
    except ConfigError as error:
        pytest.skip(str(error))
    predicted = microbatch_bytes([plan], MODEL)
    found = {policy: [count(plan, rank, policy) for rank in range(RANKS)] for policy in POLICIES}
    assert predicted.kept.tolist() == [each.kept_bytes for each in found["keep"]]
    assert all(each.kept_bytes == 0 for each in found["replay"])
    assert (predicted.replayed <= predicted.kept).all()
    # On the fullest rank gradients and messages on their way are estimated, within a factor of 1.7.
    for policy, held in (("keep", predicted.kept), ("replay", predicted.replayed)):
        needed = (held + predicted.working).max()
        assert 0.6 * needed < max(each.call_bytes for each in found[policy]) < 1.5 * needed


def plan_of(planner: str, rule: str, *, remapped: bool) -> MicrobatchPlan:
    options = {"tokens_per_rank": 2200} | ({"rule": rule} if rule else {})
    choice = choose_planner(planner, options, layers=choose_layers(planner, "always", remapped))
    return choice.plan(Batch(LENGTHS), CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL))


# Memory that calls share: when it is taken back, what is waited for first, and that the same calls
# need it only once.

CPU = torch.device("cpu")


def buffer(pool: BufferPool, num_bytes: int) -> Any:
    return pool.empty((num_bytes,), torch.uint8, CPU)


def address(x: Any) -> int:
    return x.untyped_storage().data_ptr()


def test_memory_comes_back_with_the_last_tensor_on_it_in_any_shape() -> None:
    # Memory comes back with the last tensor on it.
    pool = BufferPool(cpu=True)
    first = buffer(pool, 100)
    at, view = address(first), first[10:20].view(5, 2)
    del first
    assert address(buffer(pool, 100)) != at
    del view
    assert address(buffer(pool, 100)) == at
    # What autograd saves is in use.
    pool = BufferPool(cpu=True)
    x = pool.empty((8,), torch.float32, CPU).fill_(3.0)
    at, weight = address(x), torch.ones(8, requires_grad=True)
    y = x * weight
    del x
    gc.collect()
    for _ in range(20):
        assert address(pool.empty((8,), torch.float32, CPU).fill_(0.0)) != at
    y.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((8,), 3.0))
    del y
    assert address(buffer(pool, 32)) == at
    # Shapes and types and alignment.
    pool = BufferPool(cpu=True)
    held = [pool.empty((3, 5), dtype, CPU) for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64)]
    assert [(tuple(x.shape), x.is_contiguous(), x.data_ptr() % 16) for x in held] == [((3, 5), True, 0)] * 4
    assert pool.empty((0, 4), torch.float32, CPU).shape == (0, 4)
    assert pool.used_bytes == 4 * ALIGN
    for value, x in enumerate(held):
        x.fill_(value)
    assert [int(x.sum()) for x in held] == [0, 15, 30, 45]
    # Slabs are as large as a plan asks for.
    pool = BufferPool(cpu=True)
    pool.reserve(3 * SLAB)
    assert pool.held_bytes == 0
    parts = [buffer(pool, SLAB // 2) for _ in range(6)]
    assert (pool.num_slabs, pool.held_bytes) == (1, 3 * SLAB)
    parts.append(buffer(pool, 1))
    assert pool.num_slabs == 2
    large = buffer(pool, 7 * SLAB)
    assert (pool.num_slabs, large.numel()) == (3, 7 * SLAB)


@given(sizes=st.lists(st.tuples(st.integers(1, 5 * ALIGN), st.integers(0, 5)), min_size=1, max_size=40))
def test_the_same_calls_find_the_same_places(sizes: list[tuple[int, int]]) -> None:
    # Each buffer lives for some of the next ones. No two at once share a byte, and a second time
    # round takes no slab more.
    pool = BufferPool(cpu=True)
    places = []
    for _ in range(3):
        held: list[tuple[int, Any]] = []
        places.append([])
        for index, (num_bytes, life) in enumerate(sizes):
            held = [(until, x) for until, x in held if until > index]
            held.append((index + life, buffer(pool, num_bytes)))
            ends = sorted((address(x), address(x) + x.numel()) for _, x in held)
            assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
            places[-1].append(address(held[-1][1]))
        del held
    assert places[0] == places[1] == places[2]
    assert pool.num_slabs == 1
    assert pool.peak_bytes <= pool.held_bytes == SLAB


def test_what_another_stream_uses_is_used_again_last_and_waited_for_once() -> None:
    # What another stream uses is used again last and waited for.
    pool, waited = BufferPool(cpu=True), []
    whole = buffer(pool, SLAB // 2)
    sent = buffer(pool, SLAB // 4)
    later = buffer(pool, SLAB // 8)
    pool.used([sent[5:9], torch.empty(3)], pool.fence("stream", "sent", waited.append))
    pool.used([later], pool.fence("stream", "later", waited.append))
    at = address(sent)
    del sent, later
    # There is memory that no one has used.
    assert address(buffer(pool, SLAB // 8)) not in (at, address(whole))
    assert waited == []
    again = buffer(pool, SLAB // 4)  # there is none left of this size
    assert (address(again), waited) == (at, ["sent"])
    last = [buffer(pool, SLAB // 8) for _ in range(2)]
    assert waited == ["sent", "later"]
    assert (pool.num_slabs, len(last)) == (1, 2)
    # A fence that was passed is not waited for again.
    # Received, waited for and read: the memory is as free as any other.
    pool, waited = BufferPool(cpu=True), []
    received = pool.empty((SLAB // 2,), torch.uint8, CPU, received=True)
    early, late = (pool.fence("stream", name, waited.append) for name in ("early", "late"))
    pool.used([received], early)
    pool.passed.wait(late)
    pool.passed.wait(early)
    at = address(received)
    del received
    assert address(buffer(pool, SLAB // 2)) == at
    assert waited == ["late"]


def test_a_fence_is_for_who_needs_it_and_for_its_own_bytes_only() -> None:
    # Three buffers that other streams use are all the memory there is. What is received into one of
    # them is no matter of the compute stream, and the other two stay behind their fences.
    pool, waited = BufferPool(cpu=True), []
    held = [buffer(pool, SLAB // 4) for _ in range(3)] + [buffer(pool, SLAB // 4 - ALIGN), buffer(pool, ALIGN)]
    ends = [pool.fence(f"stream {at}", at, waited.append) for at in range(3)]
    for x, fence in zip(held, ends, strict=False):
        pool.used([x], fence)
    places = [address(x) for x in held]
    del x
    for _ in range(3):
        del held[0]
    received = pool.empty((SLAB // 4,), torch.uint8, CPU, received=True)
    assert (address(received), waited) == (places[0], [])
    assert pool.fences([received[3:5]]) == ends[:1]
    half = buffer(pool, SLAB // 8)
    assert (address(half), waited) == (places[1], [1])
    whole = buffer(pool, SLAB // 4)
    assert (address(whole), waited) == (places[1] + SLAB // 8, [1, 2])  # of both that were left
    del received  # no stream touched it: its fence stays
    assert (address(buffer(pool, SLAB // 4)), waited) == (places[0], [1, 2, 0])


def test_what_lies_in_one_piece_is_sent_without_a_copy_and_a_region_in_row_ranges() -> None:
    # What lies in one piece is sent without a copy.
    raw = torch.arange(64, dtype=torch.uint8)
    parts = [raw[16:21], raw[32:48].view(torch.float32), raw[48:60]]
    packed = memory.pack(parts)
    assert (packed.data_ptr(), packed.numel()) == (parts[0].data_ptr(), 44)
    assert memory._adjacent_bytes([parts[0], parts[2]]) is None
    assert memory._adjacent_bytes([parts[1], parts[0]]) is None
    assert memory.pack([parts[1], parts[0]]).tolist() == [*range(32, 48), *range(16, 21)]
    # A region lies in row ranges of the buffers that hold it.
    # (seq, start, stop, head_start, head_stop, buffer, row): s0[0:10) in two buffers, s1[4:8) split
    # by heads
    instances = np.array([(0, 0, 6, 0, 2, 0, 0), (0, 6, 10, 0, 2, 3, 0), (1, 4, 8, 0, 1, 1, 5), (1, 4, 8, 1, 2, 2, 0)])
    whole = regions.RegionIndex(instances[:2])
    found = whole.resolve(np.array([[0, 4, 9, 1, 2]]).T).T
    assert found.tolist() == [[0, 0, 2, 0, 1, 0, 4, 1], [0, 2, 3, 0, 1, 3, 0, 1]]
    split = regions.RegionIndex(instances).resolve(np.array([[1, 5, 7, 0, 2]]).T)
    assert split[regions.RowRange.BUFFER].tolist() == [1, 2]
    assert split[regions.RowRange.BUFFER_ROW].tolist() == [6, 1]
    assert split[regions.RowRange.HEAD].tolist() == [0, 1]
    with pytest.raises(InvalidProgramError, match=r"a rank does not hold all of s0\[9:11\) heads \[0:2\)"):
        whole.resolve(np.array([[0, 9, 11, 0, 2]]).T)


# The runtime's shelves: a protocol below, implementations on it, the choice above them.

ROOT = Path(str(runtime.__file__)).parent
OPTIONAL = ("megatron_balance.runtime.movers.triton.mover", "flash_attn", "flash_attn_interface", "transformer_engine")


def imported(path: Path) -> set[str]:
    """Names that a file imports, anywhere in it, with their modules."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_a_protocol_knows_no_implementation_and_no_implementation_the_choice() -> None:
    for shelf, choose in (("kernels", "choose_kernel"), ("movers", "choose_mover")):
        package = f"megatron_balance.runtime.{shelf}"
        assert hasattr(importlib.import_module(package), choose)
        assert not {name for name in imported(ROOT / shelf / "base.py") if name.startswith(package)}
        for path in (ROOT / shelf).rglob("*.py"):
            assert f"{package}.{choose}" not in imported(path), path
    # Optional libraries are imported by choosing them only.
    code = "import sys, megatron_balance.runtime.attention; print(*sys.modules)"
    out = ended([sys.executable, "-c", code], check=True, cwd=ROOT.parents[1]).stdout.split()
    assert "megatron_balance.runtime.movers" in out
    assert not set(OPTIONAL) & set(out)


# Sums of gradients: what a round of a ring moves through memory, counted; and what is kept as it
# comes.

EIGHT_RANKS, TOKENS, FOUR_HEADS, TWO_HEADS, EIGHT = 8, 64, 4, 2, 8
# Of one rank's keys and values, and of its queries, in bf16.
KV_BYTES, Q_BYTES = 2 * TOKENS * TWO_HEADS * EIGHT * 2, TOKENS * FOUR_HEADS * EIGHT * 2


class Moved(TorchDispatchMode):
    """Bytes that operators on gradients read and write: zeroing, copying, adding."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        match func.overloadpacket.__name__:
            case "zero_" | "fill_":
                self.num_bytes += sizes[0]
            case "copy_":
                self.num_bytes += sum(sizes)
            case "add_":
                self.num_bytes += sizes[0] + sum(sizes)
            case "index_add_":
                self.num_bytes += 3 * sizes[-1]
            case "_to_copy":
                self.num_bytes += sizes[0] + result.nbytes
        return result


def moved_a_round(wire: model.GradientWire) -> float:
    # Bytes that the sums of a round take on rank 7 of a ring, which attends to all rounds: those of
    # the backward less those of a ring that is a round shorter.
    found = []
    for ranks in (EIGHT_RANKS, EIGHT_RANKS - 1):
        plan = by_hand.pool("ring", (TOKENS * ranks,), ranks, heads=(FOUR_HEADS, TWO_HEADS))
        groups = Groups(0, ranks, tuple(range(ranks)), None, streams=Written())  # pyright: ignore[reportArgumentType]
        shape = AttentionShape(FOUR_HEADS, TWO_HEADS, EIGHT)
        bound = bind(plan, 0, shape, groups=groups, dtype=torch.bfloat16, kernel="plain", gradient_wire=wire)
        bound = replace(bound, kernel=ShapeKernel())
        q, k, v, dout = (
            torch.zeros(bound.num_tokens, h, EIGHT, dtype=torch.bfloat16)
            for h in (FOUR_HEADS, TWO_HEADS, TWO_HEADS, FOUR_HEADS)
        )
        out, lse, received = run_forward(bound, q, (k, v), 1.0)
        with Moved() as moved:
            run_backward(bound, dout, (q, k, v), (out, lse), received, 1.0)
        found.append(moved.num_bytes)
    return found[0] - found[1]


def test_a_round_of_a_ring_moves_each_gradient_once_and_keeps_the_first_of_its_buffer() -> None:
    # A round of a ring moves each gradient once.
    # Rank 0's last half of the queries attends in every round. Its dq is added to the total: read
    # in bf16, the total read and written in fp32. Its dk and dv are added to what the next rank
    # sent. Zeroing a total for every round, adding to it, and adding what was received, were 63,488
    # bytes here in place of 30,720.
    dq = 5 * Q_BYTES / 2
    assert moved_a_round("fp32") == dq + 5 * KV_BYTES
    assert moved_a_round("bf16") == dq + 3 * KV_BYTES, "as Transformer Engine's ring: three tensors in bf16"
    # A gradient is kept where it is the first of its buffer and all of it.
    plan = by_hand.pool("ring", (TOKENS * 4,), 4, heads=(FOUR_HEADS, TWO_HEADS))
    groups = Groups(0, 4, (0, 1, 2, 3), None, streams=Written())  # pyright: ignore[reportArgumentType]
    bound = bind(plan, 0, AttentionShape(FOUR_HEADS, TWO_HEADS, EIGHT), groups=groups, kernel="plain")
    steps = bound.phases["backward"].steps
    launches = [step for step in steps if isinstance(step, GradLaunch)]
    assert [len(step.dk_sums.kept) for step in launches] == [1, 1, 1, 1]
    assert [len(step.dk_sums.added.runs) for step in launches] == [0, 0, 0, 0]
    # Queries of the last chunk only, while the keys of later ranks are there.
    assert [len(step.dq_sums.kept) for step in launches] == [0, 0, 0, 0]
    received = [m for step in steps if isinstance(step, FinishStep) for m in step.exchange.receives]
    assert {m.kind for m in received} == {program.Kind.KV_GRAD}
    assert all(not m.sums.kept for m in received), "the launch came first"

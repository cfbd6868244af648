"""NCCL's communicators of a pool, on a stand-in: which, when they are made, how much each may take."""

from datetime import timedelta
from inspect import signature
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_balance.analysis.trace_format import COMPUTE, TrackSpan
from megatron_balance.config import CommunicationChoice
from megatron_balance.errors import ConfigError
from megatron_balance.planning.choice import load_config
from megatron_balance.runtime import cuda, groups, recorder
from megatron_balance.runtime.transport import Streamed

torch = pytest.importorskip("torch")


class Communicator(dist.ProcessGroup):
    """Arguments that `new_group` was called with."""

    def __init__(self, ranks: list[int], options: Any, timeout: Any) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportCallIssue]  the stub knows the form with a store only
        self.ranks, self.options, self.given_timeout = ranks, options, timeout
        self.log: list[str] = []

    def abort(self) -> None:
        self.log.append("abort")

    def _get_backend(self, _device: Any) -> Any:
        return SimpleNamespace(_group_start=lambda: self.log.append("start"), _group_end=lambda: self.log.append("end"))


class Nccl:
    """Writes down groups and first uses, in the order of the calls."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[tuple[str, Any]] = []

    def new_group(self, ranks: list[int], *, timeout: Any, backend: Any, pg_options: Any) -> Any:
        del backend
        group = Communicator(list(ranks), pg_options, timeout)
        self.log.append(("new", group))
        return group if self.rank in ranks else object()

    def all_reduce(self, _x: Any, group: Any) -> None:
        self.log.append(("first use", group))

    def new(self, rank: int | None = None) -> list[Communicator]:
        """Groups that were made, all or a rank's."""
        return [group for what, group in self.log if what == "new" and (rank is None or rank in group.ranks)]


@pytest.fixture
def make(monkeypatch):
    """`make_groups` of one rank on NCCL, and what NCCL was asked for."""

    def made(rank: int, pools: list[list[int]], ranks_per_node: int, **options: Any) -> tuple[groups.Groups, Nccl]:
        nccl = Nccl(rank)
        made = {"get_rank": lambda: rank, "get_backend": lambda: "nccl", "ProcessGroup": dist.ProcessGroup}
        options_of = lambda is_high_priority_stream: SimpleNamespace(  # noqa: E731
            high=is_high_priority_stream, config=SimpleNamespace(max_ctas=None)
        )
        calls = {"new_group": nccl.new_group, "all_reduce": nccl.all_reduce}
        stand_in = SimpleNamespace(**made, **calls, ProcessGroupNCCL=SimpleNamespace(Options=options_of))
        monkeypatch.setattr(groups, "dist", stand_in)
        monkeypatch.setattr(groups, "torch", SimpleNamespace(zeros=lambda *_, device: device, device=torch.device))
        return groups.make_groups(pools, ranks_per_node, **options), nccl

    return made


def test_a_rank_has_few_communicators_whatever_the_number_of_ranks(make):
    # Two for collectives (pool, node) and one for each of at most eight streams.
    for size, per_node, communicators in ((8, 4, 10), (64, 8, 10), (8, 8, 3), (8, 1, 3), (1, 1, 0)):
        made, nccl = make(0, [list(range(size))], per_node)
        assert len(nccl.new(0)) == communicators, (size, per_node)
        assert (made.streams is None) == (size == 1)
        assert (made.safe, make(0, [list(range(size))], per_node, safe=True)[0].safe) == (False, True)


def test_every_communicator_is_used_at_the_start_in_one_order_and_has_its_timeout(make):
    # Every communicator is used at the start by all its ranks and in one order.
    orders = []
    for rank in range(4):
        _, nccl = make(rank, [[0, 1, 2, 3]], 2)
        used = [group for what, group in nccl.log if what == "first use"]
        assert sorted(map(id, used)) == sorted(map(id, nccl.new(rank)))
        orders.append(([group.ranks for group in nccl.new()], [len(group.ranks) for group in used]))
    assert all(order == orders[0] for order in orders)
    created = [[group.ranks for group in make(rank, [[0, 2], [1, 3]], 1)[1].new()] for rank in range(4)]
    assert all(order == created[0] for order in created), "two pools make each other's groups"
    # Every communicator has the timeout it was given.
    # Torch's own would hold a job up for ten minutes where a rank is frozen.
    _, nccl = make(0, [list(range(8))], 4, timeout=timedelta(seconds=7))
    assert {group.given_timeout for group in nccl.new()} == {timedelta(seconds=7)}
    assert {group.options._timeout for group in nccl.new()} == {timedelta(seconds=7)}, "torch warns of another"


def test_a_rank_that_fails_aborts_all_its_communicators_in_one_nccl_group(make):
    made, nccl = make(0, [[0, 1, 2, 3], [4, 5, 6, 7]], 2)
    issued, log, mine = list[str](), list[str](), nccl.new(0)
    for group in mine:
        group.log = log
    transport = object.__new__(Streamed)
    transport.groups = made
    made.issues.put(made, lambda: issued.append("a later leg"), groups.Behind.LAUNCH)
    transport.fail()
    made.issues.flush()
    assert issued == [], "peers are gone: nothing more is issued"
    assert log == ["start", *["abort"] * len(mine), "end"]
    assert not any(group.log for group in nccl.new() if 0 not in group.ranks)
    groups.single().abort()  # there is nothing to abort


def test_limits_reach_the_communicators_of_their_link(make):
    limits = CommunicationChoice(inter_node_sms=4, intra_node_sms=12).sms
    whole, *nodes = make(0, [list(range(8))], 4, sms=limits)[1].new()
    assert whole.options.config.max_ctas == 4  # collectives of the pool cross nodes
    assert [node.options.config.max_ctas for node in nodes[:2]] == [12, 12]
    names = [name for name, _ in groups.stream_groups(8, 4)]
    for name, group in zip(names, nodes[2:], strict=True):
        assert group.options.config.max_ctas == (4 if name.startswith("inter_node") else 12), name
        assert group.options.high == name.startswith(("inter_node", "dispatch", "combine"))
    for pool, per_node, given, wanted in ((8, 4, {}, None), (4, 8, {"intra_node": 6, "inter_node": 2}, 6)):
        _, nccl = make(0, [list(range(pool))], per_node, sms=given)
        # Without limits NCCL chooses; one node's pool is limited as links inside a node.
        assert {group.options.config.max_ctas for group in nccl.new()} == {wanted}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_the_stand_in_asks_for_nothing_that_torchs_nccl_has_not():
    # Its options take no field that they do not know, and need no GPU.
    timeout = timedelta(seconds=7)
    options = groups._nccl_options("inter_node moved", {"inter_node": 4, "intra_node": 12}, timeout)
    assert (options.config.max_ctas, options.is_high_priority_stream, options._timeout) == (4, True, timeout)
    inside, own = groups._nccl_options("intra_node", {}), dist.ProcessGroupNCCL.Options()
    assert (inside.config.max_ctas, inside.is_high_priority_stream) == (own.config.max_ctas, False)
    assert {"ranks", "timeout", "backend", "pg_options"} <= signature(dist.new_group).parameters.keys()
    assert all(hasattr(dist.ProcessGroupNCCL, name) for name in ("_group_start", "_group_end"))
    assert all(hasattr(dist.ProcessGroup, name) for name in ("abort", "_get_backend"))


def test_what_stays_inside_a_node_has_a_communicator_of_the_node(make, monkeypatch):
    # What stays inside a node has a communicator of the node.
    # NCCL gives all pairs of a communicator the channels of the one that gets the fewest.
    for rank, node in ((0, [0, 1, 2, 3]), (6, [4, 5, 6, 7])):
        made, nccl = make(rank, [list(range(8))], 4)
        for name in groups.stream_names(8, 4):
            group = made.streams._groups[name]
            assert any(group is each for each in nccl.new())
            assert group.ranks == (list(range(8)) if name.startswith("inter_node") else node), name
    # Communicators inside nodes cover every node of several ranks.
    for size, per_node, inside in (
        (8, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (6, 4, [(0, 1, 2, 3), (4, 5)]),  # a smaller last node
        (5, 4, [(0, 1, 2, 3)]),  # a lone last rank
        (8, 0, [tuple(range(8))]),  # nodes are not known
    ):
        made = groups.stream_groups(size, per_node)
        assert [members for name, members in made if name == "dispatch moved"] == inside
        assert [members for name, members in made if name == "inter_node"] == [tuple(range(size))]
    # A stream has the priority of its communicator.
    made, _ = make(0, [list(range(8))], 4)
    names = groups.stream_names(8, 4)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: SimpleNamespace(priority=priority))
    for name in names:
        assert made.streams.of(name)._stream.priority == (-1 if cuda.has_high_priority(name) else 0)
    assert {cuda.has_high_priority(name) for name in names} == {False, True}


def test_the_section_is_checked(tmp_path):
    path = tmp_path / "run.yaml"

    def loaded(text: str) -> CommunicationChoice:
        path.write_text(f"planner: zeppelin\ncommunication: {text}\n")
        return load_config(path).communication

    for text, said in (
        ("{inter_node_sms: 0}", "communication.inter_node_sms: expected at least 1, got 0"),
        ("{inter_node_sm: 4}", "did you mean 'inter_node_sms'"),
        ("{intra_node_sms: many}", "communication.intra_node_sms: expected a whole number"),
        ("16", "communication: expected safe or keys such as inter_node_sms, got 16"),
        ("unsafe", "communication: expected safe or keys such as inter_node_sms, got 'unsafe'"),
    ):
        with pytest.raises(ConfigError, match=said):
            loaded(text)
    assert loaded("{inter_node_sms: 8}").sms == {"inter_node": 8}
    assert loaded("{inter_node_sms: 8}") == CommunicationChoice(inter_node_sms=8)
    assert loaded("safe") == CommunicationChoice(safe=True)


# The clock that traces of several ranks share.


@pytest.mark.parametrize("streamed", [False, True], ids=["host", "streams"])
def test_a_process_that_is_held_up_while_it_reads_clocks_is_not_late_in_the_trace(streamed: bool, monkeypatch) -> None:
    clock = SimpleNamespace(now=100.0)
    readings = count()

    def read(ahead_s: float = 0.0) -> float:
        clock.now += 0.5 if next(readings) in (1, 2, 5) else 1e-6
        return clock.now + ahead_s

    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=read, time=lambda: read(7000.0)))
    device_s = 50.0  # a clock of its own
    streams: Any = SimpleNamespace(
        now=lambda: (read(device_s),), timed=lambda _: None, seconds=lambda begin, end: end[0] - begin[0]
    )
    made = recorder.Recorder(0, streams if streamed else None)
    made.add(TrackSpan(0, COMPUTE, "", 0.0, 0.0), made.mark(), made.mark())
    (span,) = made.spans()
    assert made.began_unix_s + span.stop_s == pytest.approx(clock.now + 7000.0, abs=1e-5)

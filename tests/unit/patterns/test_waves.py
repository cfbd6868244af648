"""The pattern waves: what groups need of one another, in which wave, and what programs look like."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.compile.order import RunLaunches, Start
from megatron_balance.compile.pipeline import compile_policies, expand, layout
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import prove
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Fragment, Pair, Rows
from megatron_balance.ir.mask import CAUSAL, FULL
from megatron_balance.ir.plan import MicrobatchPlan, SharedZone, Zone
from megatron_balance.ir.program import Attend, Exchange, Merge
from megatron_balance.patterns.all_gather import GATHER_DOCUMENTS, GATHER_SEQUENCE
from megatron_balance.patterns.waves import ALIGN, Need, schedule
from megatron_balance.simulator.attention import attention_call
from tests.support import by_hand
from tests.support.by_hand import pool
from tests.support.flat_cost import flat_machine
from tests.unit.analysis.test_statistics import assert_figures_are_those_of_the_ops

# Sequence 0 in shares of 1, 2 and 3 sixths, zigzag; sequence 1 whole.
UNEVEN = ((0, 0, 0, 100), (0, 0, 1100, 1200), (1, 0, 100, 300), (1, 0, 900, 1100), (2, 0, 300, 900), (2, 1, 0, 50))


def zone(*fragments: tuple[int, int, int, int], size: int = 1, waves: int = 1, lead: int = 0) -> SharedZone:
    return SharedZone("shared", Rows.of(4, list(fragments)), size, waves, lead)


def plan(own: SharedZone, lengths: tuple[int, ...], num_ranks: int, heads: int = 4) -> MicrobatchPlan:
    return by_hand.plan(lengths, num_ranks, own, heads=(heads, heads))


def spread(tokens: int, num_ranks: int, size: int) -> tuple[tuple[int, int, int, int], ...]:
    # One sequence zigzag over groups in even shares, each group's chunks in runs on its ranks.
    groups = num_ranks // size
    step = tokens // (2 * groups)
    chunks = [(g, c * step, (c + 1) * step) for g in range(groups) for c in (g, 2 * groups - 1 - g)]
    runs = [np.linspace(a, b, size + 1).astype(int).tolist() for _, a, b in chunks]
    return tuple(
        (g * size + place, 0, run[place], run[place + 1])
        for (g, _, _), run in zip(chunks, runs, strict=True)
        for place in range(size)
    )


def test_waves_of_a_small_zone() -> None:
    # Shares of a zigzag are shares of its work.
    made = schedule(zone(*UNEVEN))
    pairs = []
    for tasks in made.tasks:
        rows = np.concatenate(tasks)
        rows = rows[rows[:, 0] == 0]
        own = (rows[:, 1] == rows[:, 3]) / 2  # causal squares
        pairs.append(int(((rows[:, 2] - rows[:, 1]) * (rows[:, 4] - rows[:, 3]) * (1 - own)).sum()))
    assert pairs == [120_000, 240_000, 360_000]
    # Keys of neighbouring sources are one piece.
    (_, wave), *_ = schedule(zone((0, 0, 30, 40), (1, 0, 0, 10), (2, 0, 10, 20), (1, 0, 20, 30))).tasks
    assert wave.tolist() == [[0, 30, 40, 0, 30]]
    # A group that needs nothing of others takes no part in waves.
    made = plan(zone((0, 0, 0, 8), (0, 0, 8, 16), (1, 1, 0, 6), size=1, waves=3), (16, 6), 2)
    assert not expand(made).forward or all(not isinstance(op, Exchange) for op in expand(made).forward)
    # Groups and waves are at least one.
    for wrong in (zone((0, 0, 0, 8), size=0), zone((0, 0, 0, 8), waves=0)):
        with pytest.raises(InvalidProgramError, match="expected one or more of each"):
            expand(plan(wrong, (8,), 2))


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_a_wave_brings_every_group_the_same_part_of_what_it_needs_of_every_other(waves: int) -> None:
    needs = schedule(zone(*UNEVEN, waves=waves)).needs
    for to in range(3):
        for source in range(3):
            rows = needs[(needs[:, Need.TO] == to) & (needs[:, Need.FROM] == source)]
            num_tokens = np.bincount(rows[:, Need.WAVE], rows[:, Need.STOP] - rows[:, Need.START], waves)
            assert np.ptp(num_tokens) <= ALIGN * len(rows) / waves, (to, source)
    # Of the first group's last chunk nobody needs anything, and it needs all others' keys, once.
    first = needs[needs[:, Need.TO] == 0]
    assert int((first[:, Need.STOP] - first[:, Need.START]).sum()) == 1000
    assert not (needs[needs[:, Need.FROM] == 0][:, Need.STOP] > 100).any()


def test_steps_and_ops_of_a_group_in_waves() -> None:
    # A group does its own work first and ends with outputs.
    made = plan(zone(*spread(64, 4, 2), size=2, waves=2), (64,), 4)
    verify(expand(made, "keep"))
    ops = compile_policies(made, 1, ["keep"])[0].program.forward
    kinds = [type(op).__name__ for op in ops]
    assert kinds == ["Exchange", "Attend", "Exchange", "Attend", "Merge", "Exchange", "Attend", "Merge", "Exchange"]
    assert [op.collective for op in ops if isinstance(op, Exchange)] == ["all_to_all", "p2p", "p2p", "all_to_all"]
    assert not [op for op in ops if not isinstance(op, Attend | Exchange | Merge)]
    # The next wave is under way before the launch that it hides behind.
    (compiled,) = compile_policies(plan(zone(*spread(64, 4, 1), waves=2), (64,), 4), 1, ["keep"])
    steps = [step for step in compiled.forward.steps if isinstance(step, Start | RunLaunches)]
    assert [type(step).__name__ for step in steps] == ["Start", "Start", "RunLaunches", "RunLaunches", "RunLaunches"]
    # The backward's gradients of a wave leave as soon as its launch is done, the last behind own work.
    steps = [step for step in compiled.backward.steps if isinstance(step, Start | RunLaunches)]
    assert [type(step).__name__ for step in steps] == ["RunLaunches", "Start", "RunLaunches", "Start", "RunLaunches"]


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("lead", [0, 100])
@pytest.mark.parametrize(("num_ranks", "per_node", "size"), [(4, 4, 1), (4, 2, 2), (8, 4, 4), (8, 2, 2)])
def test_both_engines_agree_on_waves(policy, num_ranks: int, per_node: int, size: int, lead: int) -> None:
    machine = flat_machine(num_ranks, per_node, launch=0.01, pair=1e-6)
    own = zone(*spread(960, num_ranks, size), size=size, waves=3, lead=lead)
    made = by_hand.plan((960,), num_ranks, own, ranks_per_node=per_node, heads=(4, 4))
    exact, rounds = (attention_call(made, machine, policy, None, engine) for engine in ("events", "rounds"))
    for a, b in zip(exact, rounds, strict=True):
        # Replayed keys and gradients take no NIC from one another in the round engine.
        assert b.end_s.max() == pytest.approx(a.end_s.max(), rel=0.03 if policy == "keep" else 0.1)
        assert b.compute_s == pytest.approx(a.compute_s, rel=1e-6)


@pytest.mark.parametrize(("size", "lead"), [(1, 0), (2, 0), (2, 128), (4, 256)])
def test_figures_of_waves_are_those_of_the_ops(size: int, lead: int) -> None:
    for mask in (CAUSAL, FULL):
        own = zone(*spread(2048, 8, size), size=size, waves=2, lead=lead if mask == CAUSAL else 0)
        assert_figures_are_those_of_the_ops(replace(plan(own, (2048,), 8), mask=mask), ranks_per_nic=1)
    with pytest.raises(InvalidProgramError, match="zone shared: a lead of 8 tokens under mask full; expected 0"):
        expand(replace(plan(zone(*UNEVEN, lead=8), (1200, 50), 3), mask=FULL))


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("waves", [1, 3])
def test_under_a_full_mask_a_group_needs_all_keys_of_others(waves: int, policy: Literal["keep", "replay"]) -> None:
    own = zone(*UNEVEN, waves=waves)
    made, needs = replace(plan(own, (1200, 50), 3), mask=FULL), schedule(own, FULL).needs
    for group, held in enumerate((200, 400, 600)):
        rows = needs[needs[:, Need.TO] == group]
        assert int((rows[:, Need.STOP] - rows[:, Need.START]).sum()) == 1200 - held
    assert schedule(own, FULL).num_waves == schedule(own).num_waves, "exchanges are numbered whatever the mask"
    verify(expand(made, policy))
    prove(made, policy)


# Even chunks: equal tokens without padding, whatever the lengths; the patterns over them.
CUTS = {"documents": GATHER_DOCUMENTS, "sequence": GATHER_SEQUENCE}
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
INDEX, START, STOP = 0, 2, 3  # of a table of chunks
each_pattern = pytest.mark.parametrize("pattern", ["gather_documents", "gather_sequence"])

lengths_of = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 40), st.integers(1, 3000)), max_size=12)
sizes = st.integers(1, 12)


def chunks_of(lengths: list[int], size: int, cut=GATHER_DOCUMENTS) -> Ints:
    # Rows (rank, place, start, stop).
    zone = Zone("pool", "any", tuple(range(size)), tuple(range(len(lengths))))
    made = cut.chunks(zone, np.array(lengths, dtype=np.int64))
    return np.column_stack([made.index, made.fragments])


def by_rank(lengths: list[int], size: int, cut=GATHER_DOCUMENTS) -> list[list[tuple[int, int, int]]]:
    # (place, start, stop) of each rank's chunks.
    table = chunks_of(lengths, size, cut)
    return [[(p, a, b) for i, p, a, b in table.tolist() if i == rank] for rank in range(size)]


@each_cut
@given(lengths=lengths_of, size=sizes)
def test_every_token_lies_once_and_ranks_differ_by_one_token_at_most(cut, lengths: list[int], size: int) -> None:
    table = chunks_of(lengths, size, cut)
    for place, length in enumerate(lengths):
        tokens = [token for _, p, a, b in table.tolist() if p == place for token in range(a, b)]
        assert sorted(tokens) == list(range(length))
    held = sums(table[:, INDEX], table[:, STOP] - table[:, START], size)
    more = sum(lengths) % size
    assert held.tolist() == [sum(lengths) // size + (rank < more) for rank in range(size)]
    assert table.tolist() == sorted(table.tolist()), "by rank, place and start"


def test_chunks_of_documents_and_of_a_packed_sequence_by_hand() -> None:
    # A document that 2g divides gives rank i chunks i and 2g minus 1 minus i.
    assert by_rank([16, 8], 2) == [[(0, 0, 4), (0, 12, 16), (1, 0, 2), (1, 6, 8)], [(0, 4, 12), (1, 2, 6)]]
    # What is left over lengthens high chunks first then low ones from document to document.
    # 3 ranks; 2 tokens over each: ranks 0, 1 (high chunks), then 2 (high) and 0 (low), then 1, 2 (low)
    assert by_rank([8, 8, 8], 3) == [
        [(0, 0, 1), (0, 6, 8), (1, 0, 2), (1, 7, 8), (2, 0, 1), (2, 7, 8)],
        [(0, 1, 2), (0, 4, 6), (1, 2, 3), (1, 6, 7), (2, 1, 3), (2, 6, 7)],
        [(0, 2, 4), (1, 3, 6), (2, 3, 6)],
    ]
    # Documents shorter than 2g tokens go to the ranks whose turn it is.
    assert by_rank([1, 2, 1], 4) == [[(0, 0, 1)], [(1, 1, 2)], [(1, 0, 1)], [(2, 0, 1)]]
    # A packed sequence is cut where its chunks end not where documents do.
    assert by_rank([6, 10], 2, GATHER_SEQUENCE) == [[(0, 0, 4), (1, 6, 10)], [(0, 4, 6), (1, 0, 6)]]


@given(lengths=st.lists(st.integers(64, 3000), min_size=1, max_size=12), size=st.integers(2, 8))
def test_documents_cut_each_on_its_own_give_ranks_nearly_equal_attention(lengths: list[int], size: int) -> None:
    # Pairs differ from the mean by less than the longest documents' rows of a token or two.
    table = chunks_of(lengths, size)
    stop, start = table[:, STOP], table[:, START]
    pairs = sums(table[:, INDEX], (stop * (stop + 1) - start * (start + 1)) // 2, size)
    assert abs(pairs - pairs.mean()).max() <= sum(lengths) + max(lengths)


@each_pattern
def test_one_gather_brings_what_several_ranks_hold_and_a_reduce_scatter_takes_its_gradients_back(pattern: str) -> None:
    program = expand(pool(pattern, (40, 1), 4), "keep")
    (gather,) = [op for op in program.forward if isinstance(op, Exchange)]
    (scatter,) = [op for op in program.backward if isinstance(op, Exchange)]
    assert (gather.collective, scatter.collective) == ("all_gather", "reduce_scatter")
    assert set(as_array(gather.transfers)[:, 1].tolist()) == {0}, "a sequence on one rank stays there"
    assert len([op for op in program.forward if isinstance(op, Attend)]) == 4


def test_middle_chunks_are_one_entry_and_ranks_hold_what_the_zones_order_says() -> None:
    # The middle chunks of the last rank are one entry of its kernel.
    program = expand(pool("gather_documents", (64,), 4))
    entries = [len(op.pairs) for op in program.forward if isinstance(op, Attend)]
    assert entries == [2, 2, 2, 1]
    (last,) = [as_array(op.pairs) for op in program.forward if isinstance(op, Attend) and op.rank == 3]
    assert last[:, Pair.Q_SPAN].tolist() == [[24, 40]]
    # Ranks in another order hold what the order says.
    zone = Zone("zone", "gather_documents", (2, 0, 1), (0,))
    made = by_hand.plan((7,), 3, zone)
    held = [sum(b - a for _, a, b in layout(made, rank)[:, : Fragment.WIDTH].tolist()) for rank in range(3)]
    assert held == [2, 2, 3], "one token more on the zone's first rank"
    (gather,) = [op for op in expand(made).forward if isinstance(op, Exchange)]
    assert gather.group == (0, 1, 2), "process groups are made in this order"

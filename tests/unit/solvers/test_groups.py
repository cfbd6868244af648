"""Groups of ranks: sizes, places, shares."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.errors import InfeasibleError
from megatron_balance.patterns.zigzag import Zigzag
from megatron_balance.planners.pipelines import deal, packed
from megatron_balance.simulator.pipeline import ChunkPass, run
from megatron_balance.solvers import makespan
from megatron_balance.solvers.dispatch import (
    Assigned,
    PipelineCost,
    _problem_of,
    _util_tokens,
    clock_s,
    dispatch,
    exact,
    greedy,
    microbatch_s,
    pack,
    slowest_s,
)
from megatron_balance.solvers.groups import arrange, blocks, needed, rank_tokens, sizes
from megatron_balance.solvers.makespan import MachinesProblem, _by_weights, _Stairs


def test_sizes_and_blocks_of_groups() -> None:
    wanted = {1: (1,), 2: (1, 2), 6: (1, 2, 4, 6), 8: (1, 2, 4, 8), 9: (1, 2, 4, 8, 9)}
    assert {num_ranks: sizes(num_ranks) for num_ranks in wanted} == wanted
    # The smallest size that holds a sequence is needed, and else the largest.
    assert [needed(length, 100, (1, 2, 4, 6)) for length in (1, 100, 101, 400, 401, 9999)] == [1, 1, 2, 4, 6, 6]
    # Blocks lie inside nodes if a node holds one; larger groups choose first.
    assert blocks(2, 6, 3) == [range(2), range(3, 5)]
    assert blocks(4, 12, 3) == [range(4), range(4, 8), range(8, 12)]
    assert blocks(6, 6, 3) == [range(6)]
    assert arrange([1, 4, 2, 1], 8, 4) == [(6,), (0, 1, 2, 3), (4, 5), (7,)]
    assert arrange([4, 1, 1], 6, 3) == [(0, 1, 2, 3), (4,), (5,)]
    assert arrange([], 4, 2) == []


@given(st.lists(st.integers(1, 8), max_size=8).filter(lambda own: sum(own) <= 16), st.sampled_from([1, 2, 4, 8, 16]))
def test_groups_are_disjoint_and_of_the_wanted_sizes(wanted: list[int], node_size: int) -> None:
    chosen = arrange(wanted, 16, node_size)
    assert [len(ranks) for ranks in chosen] == wanted
    taken = [rank for ranks in chosen for rank in ranks]
    assert len(set(taken)) == len(taken) == len(set(taken) & set(range(16)))
    assert all(list(ranks) == sorted(ranks) for ranks in chosen)


@given(length=st.integers(1, 500), size=st.integers(1, 16))
def test_no_rank_of_a_zigzag_holds_more_than_its_counted_tokens(length: int, size: int) -> None:
    cut = Zigzag.of(np.array([length]), np.array([0]), size)
    held = [sum(stop - start for _, start, stop in cut.fragments(i).tolist()) for i in range(size)]
    assert max(held) <= rank_tokens(length, size) <= max(held) + 1


# Dispatch to unequal pipelines, and packing into microbatches.

# Published 32B times of an A800 (Hetu, generate_strategy_32b.py), in seconds.
TP16 = PipelineCost(1.378e-9, 1.0244e-4, 0.1457, 1, 52000)
TP8 = PipelineCost(2.125e-9, 1.4141e-4, 0.1229, 1, 28000)
TP4 = PipelineCost(3.870e-9, 2.3900e-4, 0.1207, 1, 11000)
TP4_PP2 = PipelineCost(2.046e-9, 1.1830e-4, 0.0654, 2, 16000)
TP2_PP4 = PipelineCost(1.970e-9, 1.0656e-4, 0.0429, 4, 9000)
KINDS = (TP16, TP8, TP4, TP4_PP2, TP2_PP4)


def drawn(draw: np.random.Generator, most: int) -> list[int]:
    return np.clip(draw.lognormal(5.6, 1.32, int(draw.integers(1, most))), 1, 32768).astype(int).tolist()


def test_few_and_equal_sequences_and_the_program_is_never_worse_than_its_start() -> None:
    # The program is never worse than its start.
    lengths, pipelines = [9000, 5000, 4000, 3000, 3000, 800, 400], [TP8, TP4, TP4_PP2]
    ours = slowest_s(lengths, pipelines, dispatch(lengths, pipelines))
    assert slowest_s(lengths, pipelines, exact(lengths, pipelines)) <= ours
    with pytest.raises(InfeasibleError, match="30000 tokens, the best pipeline's MaxLen is 28000"):
        dispatch([5, 30000], [TP8, TP4])
    with pytest.raises(InfeasibleError, match="30000 tokens, the pipeline's MaxLen is 28000"):
        pack([5, 30000], TP8)
    # Few and equal sequences.
    four = [TP4] * 4
    assert [len(own) for own in dispatch([500] * 8, four)] == [2] * 4
    cost = PipelineCost(0.0, 1.0, 5.0, 2, 10)
    assert sorted(map(len, dispatch([4, 4], [cost] * 3))) == [0, 1, 1]
    assert cost.bound_s([4, 4, 4]) == 12 + 12 / 10 * 5 + (4 + 4 / 10 * 5 + 5), "c once a microbatch"
    assert cost.bound_s([]) == 0.0
    # One pipeline takes all.
    alone = [PipelineCost(1e-9, 1e-5, 5e-3, 4, 4096)]
    for count, filled in itertools.product((0, 1, 5, 400), (False, True)):
        assert dispatch([100] * count, alone, filled=filled) == (tuple(range(count)),)


@pytest.mark.parametrize("pipeline", KINDS, ids=str)
def test_microbatches_hold_every_sequence_once_and_fit(pipeline: PipelineCost) -> None:
    draw = np.random.default_rng(3)
    for _ in range(10):
        lengths = [min(length, pipeline.max_tokens) for length in drawn(draw, 60)]
        bins = pack(lengths, pipeline)
        assert sorted(seq for own in bins for seq in own) == list(range(len(lengths)))
        assert all(own and sum(lengths[seq] for seq in own) <= pipeline.max_tokens for own in bins)
        microbatches = [[lengths[seq] for seq in own] for own in bins]
        slowest = max(microbatch_s(own, pipeline) for own in microbatches)
        bound = (pipeline.stages - 1 + len(microbatches)) * slowest  # Eq. 1
        assert pipeline.bound_s(lengths) <= bound * (1 + 1e-9)
        assert clock_s(microbatches, pipeline) <= bound * (1 + 1e-9)


def test_the_program_packs_more_evenly_and_util_tokens_is_the_first_length_near_the_best() -> None:
    # The program packs more evenly within its nodes.
    # Items of 5, 4, 3, 3 and 3 s into two microbatches: the longest first leaves 10 and 8 s.
    # What a sequence takes whatever its length counts: 20 of one token take longer than one of 40.
    each = [PipelineCost(0.0, 1.0, 0.0, 1, 100, d=2.0)] * 2
    assert slowest_s([40, *[1] * 20], each, dispatch([40, *[1] * 20], each)) == 51
    pipeline, lengths = PipelineCost(0.0, 1.0, 5.0, 2, 10), [5, 4, 3, 3, 3]
    assert [sum(lengths[seq] for seq in own) for own in pack(lengths, pipeline)] == [8, 10]
    exactly = pack(lengths, pipeline, node_limit=20)
    assert sorted(sum(lengths[seq] for seq in own) for own in exactly) == [9, 9]
    # Three of 6 need three microbatches of 10, which the longest first finds; two hold none of them.
    assert pack([6, 6, 6], PipelineCost(0, 1, 100, 2, 10), node_limit=5) == ((0,), (1,), (2,))
    # The longest first needs four of 10 tokens, the program three.
    tight, one = [6, 5, 5, 4, 4, 3, 3], PipelineCost(0, 1, 1, 1, 10)
    assert (len(pack(tight, one)), len(pack(tight, one, node_limit=20))) == (4, 3)
    # A pipeline of one stage runs as few microbatches as hold its sequences.
    assert len(pack([6, 3, 3, 2, 2], PipelineCost(0, 1, 100, 1, 16))) == 1
    assert len(pack([6, 3, 3, 2, 2], PipelineCost(0, 1, 1e-3, 1, 8))) == 2
    # Util tokens is the first length near the best.
    util, per_token = _util_tokens(TP8), lambda length: (TP8.sequence_s(length) + TP8.c) / length
    best = min(map(per_token, range(1, TP8.max_tokens + 1, 7)))
    assert per_token(util) <= best / 0.85 * (1 + 1e-6) < per_token(util - 1) * (1 + 1e-6)


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (4, 2), (3, 7), (4, 4)])
def test_the_clock_is_the_simulators(stages: int, count: int) -> None:
    pipeline = PipelineCost(0.0, 1.0, 0.5, stages, 100)
    lengths = [[int(n)] for n in np.random.default_rng(count).integers(1, 90, count)]

    def each(stage: int, step: ChunkPass, begin: np.ndarray) -> np.ndarray:
        return begin + (lengths[step.microbatch][0] + 0.5) * (2 / 3 if step.backward else 1 / 3)

    clocks = run(stages, count, 1, 1, each, lambda _: np.zeros(1))
    assert clock_s(lengths, pipeline) == pytest.approx(clocks.total_s)


# Sequences to unlike pipelines: near the best, and no slower than the paper's way.


def drawn_pipelines(seed: int, mixed: bool) -> tuple[list[int], list[PipelineCost]]:
    """Sequences and pipelines. `mixed`: pipeline parallelism of 1, 2 and 4 side by side."""
    rng, pipelines = random.Random(seed), list[PipelineCost]()
    for _ in range(rng.choice([2, 3, 4, 8, 12])):
        ranks, stages = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4]) if mixed else 1
        a, b, c = 1e-9 * rng.uniform(0.9, 1.1) / ranks, 1e-5 / ranks, 5e-3 * rng.uniform(0.5, 1.5)
        pipelines.append(PipelineCost(a, b, c, stages, 4096 * ranks))
    most = max(pipeline.max_tokens for pipeline in pipelines)
    return skewed(rng, rng.choice([5, 9, 20, 50, 120]), 6, 1.3, most), pipelines


def skewed(rng: random.Random, count: int, mean: float, spread: float, most: int) -> list[int]:
    return [min(most, max(1, int(rng.lognormvariate(mean, spread)))) for _ in range(count)]


def lower_bound(problem: MachinesProblem) -> float:
    """Seconds that no assignment comes below, by weights and by stairs."""
    bound, weights = _by_weights(problem, rounds=80)
    stairs = _Stairs.of(problem, weights)
    return bound if stairs is None else stairs.least_s(bound)


def seconds(lengths: Sequence[int], pipelines: Sequence[PipelineCost], assigned: Assigned) -> float:
    """Seconds of the slowest pipeline, c spread over full microbatches as both ways have it."""
    problem, of = _problem_of(lengths, pipelines), np.zeros(len(lengths), dtype=np.int64)
    for at, seqs in enumerate(assigned):
        of[list(seqs)] = at
    return float(problem.seconds(of).max())


def test_weights_are_the_same_where_logarithms_round_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on processors with other vector instructions, where all ranks must plan alike.
    problems = [_problem_of(*drawn_pipelines(seed, mixed=True)) for seed in range(6)]
    before = [_by_weights(problem, rounds=80)[1].tolist() for problem in problems]
    for name in ("log", "exp"):
        exact = getattr(np, name)
        monkeypatch.setattr(np, name, lambda x, exact=exact: np.nextafter(exact(x), np.inf))
    assert [_by_weights(problem, rounds=80)[1].tolist() for problem in problems] == before


def least_of_all(lengths: Sequence[int], pipelines: Sequence[PipelineCost]) -> float:
    """Seconds of the best of all assignments."""
    problem = _problem_of(lengths, pipelines)
    every = np.array(list(itertools.product(range(len(pipelines)), repeat=len(lengths))))
    work = problem.work[problem.kind]
    total, largest = np.zeros((2, len(every), len(pipelines)))
    for at in range(len(pipelines)):
        own = np.where(every == at, work[at], 0.0)
        total[:, at], largest[:, at] = own.sum(axis=1), own.max(axis=1)
    return float((total + problem.behind * largest + problem.start_s * (largest > 0)).max(axis=1).min())


STAGED = [PipelineCost(1e-9, 1e-5, 5e-3, 2, 16384)] * 4
CASES = [drawn_pipelines(number, mixed=number % 3 == 0) for number in range(18)]


def test_every_sequence_of_a_makespan_goes_once_to_a_pipeline_that_holds_it_no_slower_than_by_algorithm_1() -> None:
    ratios = []
    for lengths, pipelines in CASES:
        found, theirs = dispatch(lengths, pipelines), greedy(lengths, pipelines, trials=20)
        for answer in (found, theirs):
            assert sorted(seq for seqs in answer for seq in seqs) == list(range(len(lengths)))
            for pipeline, seqs in zip(pipelines, answer, strict=True):
                assert all(lengths[seq] <= pipeline.max_tokens for seq in seqs)
        assert dispatch(lengths, pipelines) == found
        found_s = seconds(lengths, pipelines, found)
        assert lower_bound(_problem_of(lengths, pipelines)) <= found_s * (1 + 1e-9)
        ratios.append(found_s / seconds(lengths, pipelines, theirs))
    assert max(ratios) <= 1.001
    assert np.mean(ratios) < 0.995


def test_small_cases_are_as_good_as_all_assignments_and_none_comes_below_the_bound() -> None:
    ratios: list[float] = []
    for number in range(16):
        lengths, pipelines = drawn_pipelines(100 + number, mixed=number % 2 == 0)
        pipelines = sorted(pipelines, key=lambda each: -each.max_tokens)[:3]
        lengths = [min(length, pipelines[0].max_tokens) for length in lengths[:7]]
        least = least_of_all(lengths, pipelines)
        assert lower_bound(_problem_of(lengths, pipelines)) <= least * (1 + 1e-9)
        ratios.append(seconds(lengths, pipelines, dispatch(lengths, pipelines)) / least)
    assert max(ratios) <= 1.01
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 14


def test_of_many_sequences_only_some_pipelines_take_long_ones_and_microbatches_count() -> None:
    # Of many sequences only some pipelines with stages take long ones.
    # Each such pipeline waits for its longest microbatch again.
    lengths = skewed(random.Random(1), 400, 5.6, 1.5, 16384)
    problem = _problem_of(lengths, STAGED)
    plain = makespan.greedy(problem, np.argsort(-problem.work.min(axis=0), kind="stable").tolist())
    found = seconds(lengths, STAGED, dispatch(lengths, STAGED))
    assert found < 0.96 * problem.seconds(plain).max()
    assert lower_bound(problem) <= found < 1.004 * lower_bound(problem)
    assert _by_weights(problem, 80)[0] < 0.98 * found, "the bound by weights counts the longest sequence alone"
    # Unlike pipelines: machines open where those before are full, though one more long sequence
    # would still fit in.
    unlike = [(1, 2, 16384), *[(2, 4, 8192)] * 3, *[(4, 1, 2048)] * 4]
    pipelines = [PipelineCost(n * 1e-9, n * 1e-5, 5e-3, stages, most) for n, stages, most in unlike]
    lengths = skewed(random.Random(2), 400, 5.6, 1.5, 16384)
    found = seconds(lengths, pipelines, dispatch(lengths, pipelines))
    assert lower_bound(_problem_of(lengths, pipelines)) <= found < 1.01 * lower_bound(_problem_of(lengths, pipelines))
    # Dispatch counts the microbatches that packing makes.
    # Short sequences wait for a well-filled microbatch, too: even pipelines end sooner, packed.
    lengths = skewed(random.Random(1), 300, 6, 1.5, 16384)
    (plain, filled) = (dispatch(lengths, STAGED, filled=filled) for filled in (False, True))
    assert max(packed(lengths, STAGED, filled)[1]) < 0.99 * max(packed(lengths, STAGED, plain)[1])
    assert seconds(lengths, STAGED, plain) < seconds(lengths, STAGED, filled), "by Eq. 3 alone"
    assert deal(lengths, STAGED) == packed(lengths, STAGED, filled)


def test_stairs_open_a_machine_where_those_before_are_full() -> None:
    # Items of 4, 3, 2, 1, 1 and 1 s on two machines that count their largest again.
    work = np.array([[4.0, 3.0, 2.0, 1.0, 1.0, 1.0]])
    two = np.zeros(2, dtype=np.int64)
    problem = MachinesProblem(work, two, np.ones(2), np.zeros(2), np.array([6, 5, 4, 3, 2, 1]))
    stairs = _Stairs.of(problem, np.array([0.5]))
    assert stairs is not None
    # In 10 s the first has room for 10 - 4 s: the item of 3 s opens the second, which has 10 - 3.
    assert stairs.climb(10.0) == [(0, 0), (1, 1)]
    # In 11 s there is room for 4 + 3, and the item of 2 s opens the second.
    assert stairs.climb(11.0) == [(0, 0), (2, 1)]
    assert stairs.climb(9.4) is None
    assert lower_bound(problem) == pytest.approx(9.5, rel=1e-4)  # 12 s of items, 4 and 3 s again
    found = makespan.greedy(problem, range(6), stairs.climb(10.0), 10.0)
    assert found.tolist() == [0, 1, 1, 0, 1, 0]
    assert problem.seconds(found).tolist() == [10, 9]
    assert makespan.greedy(problem, range(6), [(0, 0), (5, 1)], 6.0).tolist()[:2] == [0, 1], "full ahead of its place"


def test_what_counts_again_may_be_more_than_an_item_works_or_all_the_time() -> None:
    # Where one item alone takes the time machines stay even.
    # Stairs would fill the second machine to the time of the first.
    sizes = np.array([1000, *[1] * 200])
    problem = MachinesProblem(sizes[None] / 100, np.zeros(3, dtype=np.int64), np.ones(3), np.zeros(3), sizes)
    loads = problem.seconds(makespan.assign(problem))
    assert loads.max() == pytest.approx(20.0)
    assert sorted(loads)[:2] == [pytest.approx(1.01), pytest.approx(1.01)]
    # What counts again may be more than an item works.
    # Items of 5 and 1 s, of which the second counts 3 s where it is the largest.
    kind = np.zeros(2, dtype=np.int64)
    problem = MachinesProblem(np.array([[5.0, 1.0]]), kind, np.ones(2), np.zeros(2), np.array([5, 1]), np.array([3.0]))
    assert problem.seconds(np.array([0, 1])).tolist() == [10, 4]
    assert problem.seconds(np.array([0, 0])).tolist() == [11, 0]
    found, seconds = makespan.in_turn(problem, np.array([[0, 1]]), None)
    assert (found.tolist(), seconds.tolist()) == ([[0, 1]], [[10, 4]])
    even = np.zeros(2, dtype=np.int64)
    makespan.improve(problem, even, 0.0)
    assert problem.seconds(even).max() == 10
    assert problem.seconds(makespan.greedy(problem, range(2))).max() == 10
    assert lower_bound(problem) == pytest.approx(10)


def alike(num_items: int) -> MachinesProblem:
    """Two machines of one kind, items of 3, 3, 2, 2 and 2 seconds, and then of none."""
    work = np.zeros((1, num_items))
    work[0, :5] = 3, 3, 2, 2, 2
    return MachinesProblem(work, np.zeros(2, dtype=np.int64), np.zeros(2), np.zeros(2), np.ones(num_items, np.int64))


def test_a_swap_makes_the_longest_first_even_and_even_machines_still_change() -> None:
    # A swap makes the longest first even.
    problem = alike(5)
    assert _Stairs.of(problem, np.array([0.5])) is None, "where nothing counts again there are no stairs"
    found = makespan.greedy(problem, range(5))
    assert problem.seconds(found).tolist() == [7, 5]
    makespan.improve(problem, found, 0.0)
    assert problem.seconds(found).tolist() == [6, 6]
    many = alike(makespan.FEW + 1)  # too many for the depth-first search
    assert many.seconds(makespan.assign(many, searches=1)).tolist() == [6, 6]
    # Machines that end together still change what is cheaper on the other.
    # The longest first ends even, with sequences where they cost more; no move or swap helps.
    lengths, pipelines = drawn_pipelines(403, mixed=False)
    problem = _problem_of(lengths, pipelines)
    even = makespan.greedy(problem, np.argsort(-problem.work.min(axis=0), kind="stable").tolist())
    makespan.improve(problem, even, 0.0)
    seconds_of = problem.seconds(even)
    assert seconds_of.max() < seconds_of.min() * 1.001
    assert problem.seconds(makespan.assign(problem)).max() < 0.997 * seconds_of.max()


def test_the_bound_is_that_of_the_best_weights_of_unlike_machines() -> None:
    # One kind does long items in less time, the other short ones: half a second each is the least.
    work = np.array([[1.0] * 4 + [2.0] * 4, [2.0] * 4 + [1.0] * 4]) / 8
    kind = np.array([0, 1])
    problem = MachinesProblem(work, kind, np.zeros(2), np.zeros(2), np.ones(8, dtype=np.int64))
    assert lower_bound(problem) == pytest.approx(0.5)
    slow = MachinesProblem(work * [[1.0], [3.0]], kind, np.zeros(2), np.zeros(2), problem.sizes)
    # All items on the first take 1.5 s; the second takes 2.25 of its 4 at 3/8 s.
    assert lower_bound(slow) == pytest.approx(0.9, rel=1e-3)

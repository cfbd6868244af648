"""Steps of several pipelines: text, JSON, fingerprint, each pipeline's own part, and their proof."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model, make_planner
from megatron_balance.analysis.step_memory import max_len
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import BalanceError, ConfigError, InfeasibleError
from megatron_balance.ir.step import EMPTY, Carry, Lengths, StepPlan, from_json, held_back, to_json
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners import pipelines
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.pipelines import deal
from megatron_balance.planning.choice import choose_planner
from megatron_balance.planning.strategies import with_proposed
from megatron_balance.solvers.dispatch import PipelineCost, dispatch, pack, slowest_s

MODEL = Model(4, 4, 8, num_layers=4)
CLUSTER = Cluster(8, 4)
CONTEXT = StepContext(CLUSTER, MODEL, AnalyticCost(CLUSTER, MODEL))
CAPACITY = 300

schemes = st.builds(Scheme, st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))
strategies = (
    st.lists(schemes, min_size=1, max_size=5)
    .map(lambda each: Strategy(tuple(sorted(each, key=lambda scheme: -scheme.tensor))))  # no TP group crosses nodes
    .filter(lambda strategy: strategy.num_ranks <= 8)
)
steps = st.lists(st.lists(st.integers(1, CAPACITY), max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
waits = st.dictionaries(st.integers(-9, -1), st.integers(1, CAPACITY), max_size=3).map(
    lambda found: Carry.of("", None, tuple(sorted(found.items())))
)


def planned(
    strategy: Strategy, lengths: tuple[tuple[int, ...], ...], carry: Carry = EMPTY
) -> tuple[StepPlan, tuple[int, ...]]:
    # A step under one strategy, and what its microbatches hold.
    options = {"strategies": [str(strategy)], "tokens_per_rank": CAPACITY}
    step, after = choose_planner("hydraulis", options).plan_step(lengths, CONTEXT, carry)
    assert after == EMPTY
    return step, tuple(CAPACITY * each.tensor * each.context for each in strategy.pipelines)


def assert_trained_or_held_back(
    step: StepPlan, lengths: Lengths, before: Carry, after: Carry, most: Sequence[int]
) -> None:
    # Each sequence once, and no microbatch holds more than the `most` of its pipeline.
    assert held_back(step, lengths, before.waiting) == after.waiting
    for own, most_tokens in zip(step.pipelines, most, strict=True):
        assert all(sum(step.plans[at].num_tokens for at in step.plans_of[m]) <= most_tokens for m in own)


@given(strategies, steps, waits)
def test_every_sequence_is_trained_once_in_a_microbatch_that_holds_it(
    strategy: Strategy, lengths: tuple[tuple[int, ...], ...], carry: Carry
) -> None:
    step, most = planned(strategy, lengths, carry)
    assert_trained_or_held_back(step, lengths, carry, EMPTY, most)
    assert len(step.num_microbatches) == len(strategy.pipelines)
    assert min(step.num_microbatches) >= 1
    assert planned(strategy, lengths, carry)[0] == step


@given(strategies, steps)
def test_a_step_of_pipelines_is_read_back_and_its_parts_are_its_own(
    strategy: Strategy, lengths: tuple[tuple[int, ...], ...]
) -> None:
    step, _ = planned(strategy, lengths)
    again = from_json(to_json(step))
    assert again == step
    assert again.fingerprint() == step.fingerprint()
    parts = [step.of_pipeline(pipeline) for pipeline in range(len(strategy.pipelines))]
    assert StepPlan.side_by_side(strategy, parts) == step
    assert [p for p, part in enumerate(parts) for _ in part.plans] == list(step.pipeline_of)


@given(strategies, steps, waits)
def test_full_microbatches_go_to_the_pipelines_in_turn(
    strategy: Strategy, lengths: tuple[tuple[int, ...], ...], carry: Carry
) -> None:
    options = {"strategy": str(strategy), "tokens_per_rank": CAPACITY}
    step, after = choose_planner("megatron", options).plan_step(lengths, CONTEXT, carry)
    most = min(CAPACITY * each.tensor * each.context for each in strategy.pipelines)
    assert_trained_or_held_back(step, lengths, carry, after, [most] * len(strategy.pipelines))
    filled = [sum(any(seqs for seqs in step.members[at]) for at in own) for own in step.pipelines]
    assert filled == sorted(filled, reverse=True)
    assert max(filled) - min(filled) <= 1
    tokens = [plan.num_tokens for plan in step.plans if plan.num_tokens]
    assert all(a + b > most for at, a in enumerate(tokens) for b in tokens[:at]), "two would fit in one"


def test_full_microbatches_of_a_training_job_are_those_of_its_layout() -> None:
    layout = replace(CONTEXT, strategy=Strategy((Scheme(), Scheme())), cluster=Cluster(2, 2), own_microbatches=False)
    choice = choose_planner("megatron", {"tokens_per_rank": CAPACITY})
    step, _ = choice.plan_step(((200, 200), (200, 90)), layout)
    assert step.num_microbatches == (2, 1)
    with pytest.raises(InfeasibleError, match=r"301 tokens .* holds 300; raise tokens_per_rank"):
        choice.plan_step(((301,),), layout)
    with pytest.raises(ConfigError, match="strategy: training runs the command line's layout"):
        choose_planner("megatron", {"strategy": "tp1-pp1-cp2"}).plan_step(((9,),), layout)
    with pytest.raises(ConfigError, match="tokens_per_rank: full microbatches need a limit"):
        choose_planner("megatron", {}).plan_step(((9,),), layout)


TWO = Strategy((Scheme(), Scheme()))


def test_which_pipeline_runs_a_microbatch_is_a_decision_and_others_are_refused() -> None:
    step, _ = planned(TWO, ((200, 200, 200, 200),))
    assert step.num_microbatches == (2, 2)
    other = replace(step, num_microbatches=(3, 1))
    alone = StepPlan(step.members, step.plans)
    context = replace(step, strategy=Strategy((Scheme(2), Scheme())))
    assert len({each.fingerprint() for each in (step, other, alone, context)}) == 4
    assert alone.pipelines == (range(4),)
    assert alone.of_pipeline(0) is alone
    # Microbatches that are not those of the pipelines are refused.
    step, _ = planned(TWO, ((200, 200, 200),))
    for numbers in ((3,), (3, 0), (2, 2)):
        with pytest.raises(ValueError, match=r"expected .*microbatches"):
            replace(step, num_microbatches=numbers)
    with pytest.raises(ValueError, match="expected plans over the 2 ranks of tp1-pp1-cp2"):
        replace(step, strategy=Strategy((Scheme(), Scheme(context=2))))
    # A pipeline without sequences has one microbatch without any.
    step, _ = planned(Strategy((Scheme(),) * 4), ((200, 100),))
    assert step.num_microbatches == (1, 1, 1, 1)
    assert sorted(len(seqs) for ((seqs,),) in zip(step.members, strict=True)) == [0, 0, 1, 1]


def test_what_is_lost_twice_there_or_cut_is_found() -> None:
    lengths = ((200, 150), (100, 50))
    step, most = planned(TWO, lengths)
    assert_trained_or_held_back(step, lengths, EMPTY, EMPTY, most)
    flat = list(chain.from_iterable(chain.from_iterable(step.members)))
    at = {seq: place for place, seq in enumerate(flat)}

    def instead(numbers: list[int]) -> StepPlan:
        left = iter(numbers)
        return replace(step, members=tuple(tuple(tuple(next(left) for _ in part) for part in m) for m in step.members))

    twice = flat.copy()
    twice[at[3]] = 0
    with pytest.raises(ValueError, match="each sequence at most once and whole; got s0 of "):
        held_back(instead(twice), lengths, ())
    swapped = flat.copy()
    swapped[at[0]], swapped[at[3]] = 3, 0
    with pytest.raises(ValueError, match="has another length"):
        held_back(instead(swapped), lengths, ())
    # A step as it was dealt, or nearly.
    whole = StepPlan.whole([make_planner("te_ring", Cluster(2, 2), MODEL)(each) for each in lengths])
    assert held_back(whole, lengths, ()) == ()
    with pytest.raises(ValueError, match="got s0 of 150 "):
        held_back(replace(whole, members=(((0, 0),), ((2, 3),))), lengths, ())
    with pytest.raises(ValueError, match="got s1 of 150 "):
        held_back(whole, ((200, 151), (100, 50)), ())


@pytest.mark.parametrize(
    ("given", "lengths", "message"),
    [
        (["tp8-pp1-cp1"], (9,), r"splits the 4 heads of custom 8 ways; choose a divisor of 4"),
        (["tp1-pp3-cp1"], (9,), r"splits the 4 layers of custom 3 ways"),
        (["9*tp1-pp1-cp1"], (9,), r"takes 9 ranks, and there are 8; use more ranks"),
        (["tp1-pp1-cp3+tp2-pp1-cp1"], (9,), r"the TP group of ranks 3 to 4 crosses nodes of 4 ranks; list pipelines"),
        (["2*tp1-pp1-cp3"], (9,), r"3 context-parallel ranks of a pipeline would lie unevenly on nodes of 4"),
        (["8*tp1-pp1-cp1"], (301,), r"a sequence of 301 tokens .* 8\*tp1-pp1-cp1, with the longest, holds 300; raise"),
        (["tp4-pp1-cp1", "tp1-pp4-cp3"], (9,), r"tp1-pp4-cp3 takes 12 ranks, and there are 8"),
        ("auto", (9,), r"strategies: auto: .simulate. and .compare. propose them for all their batches; elsewhere"),
        ("nowhere", (9,), r"strategies: nowhere: cannot be read \(No such file"),
        ({"node_limit": 0}, (9,), "node_limit: expected at least 1, got 0"),
        ({"microbatch_s": -1.0}, (9,), r"microbatch_s: expected at least 0\.0, got -1\.0"),
        ({"within": "wlb_sharding", "within_options": {"tokens_per_rank": 9}}, (9,), "an option of hydraulis itself"),
    ],
)  # fmt: skip
def test_bad_strategies_and_options_are_told_in_one_sentence(
    given: object, lengths: tuple[int, ...], message: str
) -> None:
    options = given if isinstance(given, dict) else {"strategies": given, "tokens_per_rank": CAPACITY}
    with pytest.raises(BalanceError, match=message):
        choose_planner("hydraulis", options).plan_step((lengths,), CONTEXT)


def test_the_best_candidate_is_found_and_those_that_cannot_win_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The best of drawn candidates is that of packing them all, also where another promised less.
    rng = random.Random(7)
    overtaken = 0
    for _ in range(40):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(2, 9))]
        candidates = [
            [PipelineCost(0, 1, 30 * rng.random(), rng.randint(1, 4), 64 + rng.randrange(40))] * rng.randint(1, 3)
            for _ in range(4)
        ]
        every = [max(deal(lengths, costs)[1]) for costs in candidates]
        least = [slowest_s(lengths, costs, dispatch(lengths, costs), PipelineCost.least_s) for costs in candidates]
        best, _, seconds = pipelines.fastest(lengths, candidates)
        assert seconds == every[best] == min(every)
        overtaken += best != least.index(min(least))
    assert overtaken > 0
    # Candidates that cannot win are not packed.
    # Packing all chooses as this; the first candidate ends before the least of the others.
    quick, slow = PipelineCost(0, 1, 1, 1, 100), PipelineCost(0, 3, 1, 2, 100)
    lengths, candidates = [60, 50, 40, 30], [[slow, slow], [quick, quick], [quick, slow]]
    every = [max(deal(lengths, costs)[1]) for costs in candidates]
    packed: list[PipelineCost] = []
    counted = {"pack": lambda own, cost, nodes: packed.append(cost) or pack(own, cost, nodes)}
    monkeypatch.setattr(pipelines, "dispatch", SimpleNamespace(**vars(pipelines.dispatch) | counted))
    best, made, seconds = pipelines.fastest(lengths, candidates)
    assert (best, seconds) == (every.index(min(every)), min(every)) == (1, every[1])
    assert sorted(seq for own in made for each in own for seq in each) == [0, 1, 2, 3]
    assert packed == [quick, quick]
    # Nothing that packs comes below the least.
    # Eq. 2 with c once for what stages wait for.
    cost = PipelineCost(0, 1, 100, 4, 10)
    lengths = [10]
    assert cost.least_s(lengths) == pipelines.pipeline_s([lengths], cost) < cost.bound_s(lengths)
    assert cost.least_s([]) == 0


def test_the_best_candidate_that_holds_the_longest_sequence_is_taken() -> None:
    options = {"strategies": ["8*tp1-pp1-cp1", "2*tp1-pp1-cp4"], "tokens_per_rank": CAPACITY}
    choice = choose_planner("hydraulis", options)
    # A tensor-parallel group may span two nodes.
    wide = replace(MODEL, num_heads=8, num_kv_heads=8)
    context = replace(CONTEXT, model=wide, cost=AnalyticCost(CLUSTER, wide))
    two_nodes = choose_planner("hydraulis", {"strategies": ["tp8-pp1-cp1"], "tokens_per_rank": 50})
    step, _ = two_nodes.plan_step(((390, 20),), context)
    assert sorted(plan.num_tokens for plan in step.plans) == [20, 390]
    # On links that take no time for weights.
    context = replace(CONTEXT, cluster=replace(CLUSTER, intra_bytes_per_s=1e18, nic_bytes_per_s=1e18))
    short = choice.plan_step(((200,) * 8,), context)[0]
    long = choice.plan_step(((900, 200, 200),), context)[0]
    assert (str(short.strategy), str(long.strategy)) == ("8*tp1-pp1-cp1", "2*tp1-pp1-cp4")
    # Microbatches that cost something themselves are fewer.
    options = {"strategies": ["2*tp1-pp2-cp2"], "tokens_per_rank": 10 * CAPACITY}
    steps = [
        choose_planner("hydraulis", {**options, "microbatch_s": each}).plan_step(((300,) * 16,), CONTEXT)[0]
        for each in (0.0, 10.0)
    ]
    assert [step.num_microbatches for step in steps] == [(2, 2), (1, 1)]


def test_a_microbatch_has_no_more_tokens_than_the_memory_of_its_pipelines_gpus_holds() -> None:
    # MaxLen limits packing, which pipelines take a sequence, and which candidates hold it.
    short, wide = Scheme(), Scheme(context=4)
    memory_bytes, model = 1e6, replace(MODEL, hidden_size=32, ffn_size=64, vocab_size=128)
    cluster = replace(CLUSTER, memory_bytes=memory_bytes)
    most = {each: max_len(each, model, memory_bytes, 8) for each in (short, wide)}
    assert 0 < most[short] < most[wide]
    context = StepContext(cluster, model, AnalyticCost(cluster, model))
    both, lengths = Strategy((wide, *[short] * 4)), (most[short] + 1, *[most[short] // 2 + 1] * 6)
    choice = choose_planner("hydraulis", {"strategies": ["8*tp1-pp1-cp1", str(both)]})
    step, _ = choice.plan_step((lengths,), context)
    assert step.strategy == both
    assert_trained_or_held_back(step, (lengths,), EMPTY, EMPTY, [most[each] for each in both.pipelines])
    with pytest.raises(InfeasibleError, match=r"a GPU's memory allows no more \(MaxLen\): use more tensor"):
        choice.plan_step(((most[wide] + 1,),), context)
    with pytest.raises(InfeasibleError, match=r"with the longest, holds 0; a GPU's memory"):
        choice.plan_step(((9,),), replace(context, cluster=replace(cluster, memory_bytes=1e3)))


@pytest.mark.parametrize(
    "solvers", [{"dispatching": "trials"}, {"dispatching": "ilp", "node_limit": 1}, {"packing": "ilp", "node_limit": 1}]
)
def test_the_papers_ways_to_dispatch_and_pack_are_options(
    solvers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    noted = {"pack": lambda own, cost, nodes: asked.append(f"pack {nodes}") or pack(own, cost, nodes)}
    for name in ("dispatch", "greedy", "exact"):
        ask = getattr(pipelines.dispatch, name)
        noted[name] = lambda *given, ask=ask, name=name, **more: asked.append(name) or ask(*given, **more)
    monkeypatch.setattr(pipelines, "dispatch", SimpleNamespace(**vars(pipelines.dispatch) | noted))
    lengths = ((200, 150, 100), (100, 50))
    options = {"strategies": ["tp1-pp2-cp2+2*tp1-pp1-cp2"], "tokens_per_rank": CAPACITY, **solvers}
    step, after = choose_planner("hydraulis", options).plan_step(lengths, CONTEXT)
    assert_trained_or_held_back(step, lengths, EMPTY, after, [2 * CAPACITY] * 3)
    by = {"trials": "greedy", "ilp": "exact"}.get(str(solvers.get("dispatching")), "dispatch")
    assert asked == [by, *[f"pack {1 if 'packing' in solvers else 0}"] * 3]


def test_options_of_the_planner_inside_a_microbatch() -> None:
    given = {"strategies": ["2*tp1-pp1-cp4"], "within": "wlb_sharding", "tokens_per_rank": CAPACITY}
    patterns: dict[str, set[str]] = {}
    for sharding in ("document", "sequence"):
        choice = choose_planner("hydraulis", {**given, "within_options": {"sharding": sharding}})
        step, _ = choice.plan_step(((290, 110, 200),), CONTEXT)
        patterns[sharding] = {zone.pattern for plan in step.plans for zone in plan.zones}
    assert patterns["document"] != patterns["sequence"]


def test_a_file_without_strategies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "strategies.txt"
    for content, message in ((b"# nothing yet\n\n", "names none"), (b"\0" * 9, "read .not text: has a NUL byte")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            choose_planner("hydraulis", {"strategies": str(path)}).plan_step(((9,),), CONTEXT)


def test_candidates_are_proposed_for_the_steps_at_hand() -> None:
    # `strategies: auto`: they hold what is there, within the capacity, and lie on the ranks.
    steps = [((900, 200, 200), (40,) * 20), ((100, 30) * 9,)]
    choice = with_proposed(choose_planner("hydraulis", {"strategies": "auto", "tokens_per_rank": 300}), steps, CONTEXT)
    assert choice.options.strategies
    for lengths in steps:
        step, _ = choice.plan_step(lengths, CONTEXT)
        assert step.strategy is not None
        assert str(step.strategy) in choice.options.strategies
        most = [300 * each.tensor * each.context for each in step.strategy.pipelines]
        assert_trained_or_held_back(step, lengths, EMPTY, EMPTY, most)
    auto = choose_planner("hydraulis", {"strategies": "auto", "tokens_per_rank": 300})
    with pytest.raises(InfeasibleError, match="a sequence of 2401 tokens fits no pipeline of 8 GPUs"):
        with_proposed(auto, [((2401,),)], CONTEXT)
    layout = replace(CONTEXT, strategy=TWO, cluster=Cluster(2, 2), own_microbatches=False)
    assert auto.plan_step(((9,),), layout)[0].strategy == TWO


def test_the_choice_counts_what_pull_and_push_leave_uncovered() -> None:
    # On links so slow that weights take longer than the step, it stays with the base layout.
    lengths = ((150,) * 16,)
    given = {"strategies": ["tp2-pp1-cp1+6*tp1-pp1-cp1", "4*tp2-pp1-cp1"], "tokens_per_rank": CAPACITY}
    slow, free = (replace(CLUSTER, intra_bytes_per_s=rate, nic_bytes_per_s=rate) for rate in (1e6, 1e18))

    def chosen(cluster: Cluster, **more: object) -> str:
        context = StepContext(cluster, MODEL, AnalyticCost(CLUSTER, MODEL))
        return str(choose_planner("hydraulis", {**given, **more}).plan_step(lengths, context, EMPTY)[0].strategy)

    assert chosen(free) == given["strategies"][0]
    assert chosen(slow) == given["strategies"][1]
    with pytest.raises(ConfigError, match=r"base: 2\*tp2-pp1-cp1: expected pipelines of one scheme on all 8 ranks"):
        chosen(CLUSTER, base="2*tp2-pp1-cp1")
    training = replace(CONTEXT, base=Strategy.parse("8*tp1-pp1-cp1"))
    with pytest.raises(ConfigError, match=r"base: 4\*tp2-pp1-cp1: training's is the command line's layout"):
        choose_planner("hydraulis", {**given, "base": "4*tp2-pp1-cp1"}).plan_step(lengths, training, EMPTY)

"""Steps of reinforcement learning: microbatches under a cap, for drivers without torch."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from megatron_balance import Cluster, Model, rl, verify
from megatron_balance.compile.proof.structure import verify_plans
from megatron_balance.config import load_cluster, load_model
from megatron_balance.errors import BalanceError, ConfigError, InfeasibleError, InvalidProgramError
from megatron_balance.ir import step as steps
from megatron_balance.ir.forest import Forest, Segment, document, num_tokens
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.step import StepPlan
from megatron_balance.solvers.microbatches import MicrobatchesProblem, deal

MODEL = Model(8, 2, 16, num_layers=4)
CLUSTER = Cluster(8, 4)


def planned(lengths: Sequence[int], cap: int | None = 100, groups: Any = None, **options: Any) -> StepPlan:
    return rl.plan_step(lengths, groups, options.pop("cluster", CLUSTER), MODEL, max_tokens=cap, **options)


def checked(step: StepPlan, lengths: Sequence[int], cap: int) -> None:
    # By the rows of every rank, which the planning of caps never looks at.
    verify_plans(step)
    spans: dict[int, list[tuple[int, int]]] = {}
    found_in: dict[int, set[int]] = {}
    for rank in range(step.plans[0].num_ranks):
        by_microbatch = rl.rows_of(step, rank)
        assert len(by_microbatch) == len(step.members)
        for microbatch, rows in enumerate(by_microbatch):
            assert sum(stop - start for _, start, stop in rows) <= cap
            for sample, start, stop in rows:
                spans.setdefault(sample, []).append((start, stop))
                found_in.setdefault(sample, set()).add(microbatch)
    assert sorted(spans) == list(range(len(lengths)))
    assert all(len(own) == 1 for own in found_in.values())
    for sample, own in spans.items():
        own.sort()
        assert [0, *(stop for _, stop in own)] == [*(start for start, _ in own), lengths[sample]]


def test_a_driver_imports_neither_torch_nor_numpy_and_plans_without_torch() -> None:
    code = (
        "import sys; from megatron_balance import Cluster, Model, rl; print({'torch', 'numpy'} & {*sys.modules});"
        "rl.plan_step([5, 9], None, Cluster(2, 2), Model(8, 2, 16), max_tokens=9); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:2] == ["set()", "False"]


# All drawn alike: four hundreds of ten in the suite.
@pytest.mark.parametrize(
    "first", [pytest.param(at, marks=[pytest.mark.product] if at >= 400 else []) for at in range(0, 1000, 100)]
)
def test_random_steps_pass_no_cap_and_have_each_sample_once_in_as_many_microbatches_on_all_ranks(first: int) -> None:
    refused = 0
    for seed in range(first, first + 100):
        draw = np.random.default_rng(seed)
        cluster = Cluster(int(draw.choice([1, 2, 4, 8])), 4) if draw.random() < 0.5 else CLUSTER
        cap = int(draw.integers(4, 200))
        lengths = np.clip(draw.lognormal(3, 1.3, draw.integers(0, 40)), 1, 2 * cap).astype(int).tolist()
        groups = draw.integers(0, 10, len(lengths)).tolist() if draw.random() < 0.3 else None
        options: dict[str, Any] = {"multiple_of": int(draw.integers(1, 4)), "cluster": cluster}
        if cluster.num_ranks == 8:
            options |= {"context": int(draw.choice([1, 2, 4])), "pipeline": int(draw.choice([1, 2]))}
        options["attend"] = draw.choice(["pool", "context"]).item()
        options["planner"] = "whole"
        if seed % 5 == 0:
            options |= {"planner": draw.choice(["te_ring", "zeppelin", "distca"]).item(), "attend": "pool"}
        else:
            options["meet"] = draw.choice(["layer", "step"]).item()
        try:
            step = planned(lengths, cap, groups, **options)
        except InfeasibleError:
            refused += 1
            continue
        checked(step, lengths, cap)
        assert len(step.members) % options["multiple_of"] == 0
        assert steps.from_json(steps.to_json(step)) == step
        of = {sample: m for m, parts in enumerate(step.members) for sample in chain.from_iterable(parts)}
        for sample, group in enumerate(groups or ()):
            assert groups is None or of[sample] == of[groups.index(group)]
    assert refused < 50


def test_samples_stay_whole_but_those_that_no_rank_holds_which_the_fewest_neighbours_share() -> None:
    step = planned([90, 150, 20, 80, 400], planner="whole")
    (plan,) = step.plans
    # 400 tokens on four ranks, 150 on two, one of which has room for 20.
    zones = {zone.seqs: zone.ranks for zone in plan.zones if isinstance(zone, Zone)}
    assert zones == {(4,): (0, 1, 2, 3), (1,): (4, 5), (2,): (4,), (0,): (6,), (3,): (7,)}
    verify(plan)
    # Where some have to be cut, who cuts is a planner that balances it, if nobody says otherwise.
    assert {plan.planner for plan in planned([90, 150, 20, 80, 400]).plans} == {"zeppelin"}
    assert {plan.planner for plan in planned([90, 20, 80]).plans} == {"whole"}


def test_microbatches_are_as_few_as_the_cap_allows_and_slow_samples_stand_together() -> None:
    # verl 0.8 and 0.9.0 make 7 microbatches of these, of which one has 14 tokens.
    one = Cluster(1, 1)
    assert [plan.lengths for plan in planned([7] * 8, 8, cluster=one).plans] == [(7,)] * 8
    assert len(planned([4] * 8, 8, cluster=one).plans) == 4
    # By seconds alone 5 + 4 + 4 and 6 leave no room for 7; by tokens 7 + 6 and 5 + 4 + 4 are full.
    assert len(planned([7, 6, 5, 4, 4], 13, cluster=one).plans) == 2
    # Two slow samples on two ranks: in one microbatch, for which both ranks wait once.
    step = planned([100, 30, 30, 30, 100, 30, 30], 100, cluster=Cluster(2, 2))
    assert len(step.members) == 2
    assert any({0, 4} <= set(chain.from_iterable(parts)) for parts in step.members)


def test_what_is_slow_stands_in_one_microbatch_and_what_is_not_fills_it_up() -> None:
    # On four places: 10 s on two, and beside it 3 s and 2 s, one after the other, delay nobody.
    wide = MicrobatchesProblem(np.array([1, 1, 1]), np.array([10.0, 2.0, 3.0]), np.array([2, 2, 2]), 4, 5)
    count, dealt = deal(wide, fewest=2)
    assert count == 2
    assert dealt == [(0, 0), (0, 2), (0, 2)]
    # 9 s on two; the slowest of the others are beside it.
    seconds, widths = np.array([1.0, 1.0, 8.0, 9.0, 7.0, 1.0, 1.0]), np.array([1, 1, 1, 2, 1, 1, 1])
    _, dealt = deal(MicrobatchesProblem(np.full(7, 5), seconds, widths, 4, 5))
    assert [microbatch for microbatch, _ in dealt] == [1, 1, 0, 0, 0, 1, 1]
    assert len(set(dealt)) == 7
    # Where one item takes 10 s the others fill its microbatch up to that.
    seconds = np.array([10.0, *[2.0] * 7])
    count, dealt = deal(MicrobatchesProblem(np.ones(8, np.int64), seconds, np.ones(8, np.int64), 2, 8), fewest=2)
    loads = np.zeros((2, 2))
    np.add.at(loads, tuple(zip(*dealt, strict=True)), seconds)
    assert (count, loads.tolist()) == (2, [[10.0, 10.0], [2.0, 2.0]])
    # Who was slower in one microbatch is not in the next.
    even = MicrobatchesProblem(np.full(4, 5), np.array([4.0, 3.0, 2.0, 1.0]), np.ones(4, dtype=np.int64), 2, 5)
    assert deal(even)[1] == [(0, 0), (0, 1), (1, 1), (1, 0)]


def test_ranks_that_meet_at_the_end_alone_are_evened_over_all_microbatches() -> None:
    found = dict.fromkeys(("layer", "step"), np.zeros(2))
    for seed in range(20):
        draw = np.random.default_rng(seed)
        seconds = draw.lognormal(0, 1.5, 96)
        tokens = (10 * seconds).astype(np.int64).clip(1, 100)
        problem = MicrobatchesProblem(tokens, seconds, np.ones(96, dtype=np.int64), 8, 100)
        for meet in found:
            count, dealt = deal(problem, 3, meet=meet)
            loads, held = np.zeros((count, 8)), np.zeros((count, 8), dtype=np.int64)
            np.add.at(loads, tuple(zip(*dealt, strict=True)), seconds)
            np.add.at(held, tuple(zip(*dealt, strict=True)), tokens)
            assert held.max() <= 100
            slowest = np.array([loads.max(axis=1).sum(), loads.sum(axis=0).max()])
            found[meet] = found[meet] + slowest / loads.sum(axis=0).mean()
    assert found["layer"][0] < 0.98 * found["step"][0]
    assert found["step"][1] < 0.98 * found["layer"][1]


def test_seconds_not_tokens_are_balanced_and_passes_without_a_backward_have_a_plan_of_their_own() -> None:
    # One sample of 64k attends as much as the others, of as many tokens, compute in all.
    lengths = [65536, *[1024] * 64]
    model = replace(MODEL, hidden_size=64, ffn_size=64)
    step = rl.plan_step(lengths, None, Cluster(2, 2), model, max_tokens=1 << 17)
    (plan,) = step.plans
    with_long = next(zone for zone in plan.zones if 0 in zone.seqs)
    assert len(with_long.seqs) < 10
    lengths += [1024] * 20
    both = rl.plan_step(lengths, None, Cluster(2, 2), model, max_tokens=1 << 16, forward_max_tokens=1 << 18)
    assert both.forward is not None
    assert (len(both.plans), len(both.forward.plans)) == (2, 1)
    assert both.forward.forward is None
    assert steps.from_json(steps.to_json(both)) == both
    assert both.fingerprint() != replace(both, forward=None).fingerprint()
    assert '"forward"' not in steps.to_json(step)
    with pytest.raises(ConfigError, match="not the plan of a step"):
        steps.from_json(steps.to_json(both).replace('"forward":{', '"forward":{"formal":1,"x":{', 1) + "}")


def test_trees_count_shared_tokens_once_and_keep_their_mask() -> None:
    tree = (Segment(40, -1), Segment(20, 0), Segment(30, 0))
    trees = (tree, document(60), tree, document(10))
    lengths = [num_tokens(each) for each in trees]
    for planner in ("whole", "te_ring", "distca"):
        step = planned(lengths, 100, cluster=Cluster(2, 2), trees=trees, planner=planner)
        checked(step, lengths, 100)
        for (samples,), plan in zip(step.members, step.plans, strict=True):
            if isinstance(plan.mask, Forest):
                assert plan.mask.trees == tuple(trees[sample] for sample in samples)
            verify(plan)
        assert any(isinstance(plan.mask, Forest) for plan in step.plans)
    windowed = replace(MODEL, attention="window_8")
    step = rl.plan_step(lengths, None, Cluster(2, 2), windowed, max_tokens=60, trees=trees, planner="whole")
    checked(step, lengths, 60)
    for plan in step.plans:
        verify(plan)
    with pytest.raises(ConfigError, match="trees of"):
        planned([91, 60, 90, 10], 100, trees=trees)


def test_groups_stay_on_the_same_ranks_and_windows_on_their_own() -> None:
    step = planned([60, 60, 60, 60, 10], 100, groups=["a", "b", "a", "b", "c"], planner="whole")
    of = {step.members[m][0][at]: (m, zone.ranks) for m, plan in enumerate(step.plans)
          for zone in plan.zones if isinstance(zone, Zone) for at in zone.seqs}  # fmt: skip
    assert of[0] == of[2]
    assert of[1] == of[3]
    assert len(of[0][1]) == 2
    windowed = rl.plan_step(
        [150, 20], None, CLUSTER, replace(MODEL, attention="window_8"), max_tokens=100, planner="whole"
    )
    checked(windowed, [150, 20], 100)
    verify(windowed.plans[0])


def test_without_a_cap_memory_says_how_much_a_rank_holds() -> None:
    model = replace(MODEL, num_layers=2, hidden_size=64, ffn_size=64, vocab_size=1000)
    small = replace(CLUSTER, memory_bytes=4e7)
    step = rl.plan_step([3000] * 64, None, small, model)
    more = rl.plan_step([3000] * 64, None, replace(small, memory_bytes=4e8), model)
    assert len(step.members) > len(more.members) >= 1


@pytest.mark.parametrize(
    ("lengths", "groups", "options", "message"),
    [
        ([5, 0], None, {}, "sequence 1 has 0 tokens"),
        ([5], ["a", "b"], {}, "groups of 2 samples, lengths of 1"),
        ([5], None, {"max_token": 3}, "did you mean 'max_tokens'"),
        ([5], None, {"max_tokens": 0}, "max_tokens: expected a whole number of at least 1"),
        ([5], None, {"context": 3}, "does not divide 8 GPUs"),
        ([5], None, {"attend": "all"}, "expected 'pool' or 'context'"),
        ([5], None, {"meet": "end"}, "expected 'layer' or 'step'"),
        ([5], None, {"planner": "zeppelin", "meet": "step"}, "lets ranks meet in every layer"),
        ([5], None, {"planner": "zepelin"}, "unknown planner"),
        ([5], None, {"planner": "zeppelin", "attend": "context"}, "cuts samples over all ranks"),
        ([7, 101], None, {"attend": "context"}, "sample 1 has 101 tokens.*at least 101.*attend='pool'"),
        ([7, 101], ["a", "b"], {"attend": "context", "max_tokens": 100}, "group b has 101 tokens"),
        ([9000], None, {"planner": "whole"}, "sample 0 has 9000 tokens; the 8 ranks.*at least 1126"),
        ([9000], None, {"planner": "te_ring"}, "sample 0 has 9000 tokens; 8 ranks.*at least 1125"),
    ],
)
def test_what_cannot_be_is_refused_by_name(lengths: Any, groups: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        rl.plan_step(lengths, groups, CLUSTER, MODEL, **{"max_tokens": 100, **options})


def test_a_plan_above_the_cap_is_named() -> None:
    step = planned([90, 80], 100)
    rl.check_caps(step, 90)
    with pytest.raises(InvalidProgramError, match=r"microbatch 0: rank \d holds 90 tokens; expected at most 89"):
        rl.check_caps(step, 89)


def test_dear_states_of_a_hybrid_model_are_no_want_of_room() -> None:
    # Training goes on with such a plan, and so does its driver.
    model, cluster = load_model("kimi-linear-48b-a3b"), load_cluster("h100").build(num_ranks=128, ranks_per_node=8)
    step = rl.plan_step([8192] * 128, None, cluster, model, max_tokens=9000, planner="te_ring")
    assert (len(step.members), step.plans[0].planner) == (1, "te_ring")


def test_workers_of_whole_samples_have_one_in_every_microbatch() -> None:
    # Beside a slow sample the plan puts all that has room, and has none for five places.
    step = planned([80, *[10] * 9], cluster=Cluster(2, 2), min_microbatches=4)
    rows = [rl.rows_of(step, rank) for rank in (0, 1)]
    assert [len(own) for rank in rows for own in rank].count(0) == 5
    found = list(chain.from_iterable(rl.whole_samples(step)))
    assert sorted(chain.from_iterable(found)) == list(range(10))
    assert sorted(map(len, found)) == [1] * 6 + [2, 2]
    with pytest.raises(InfeasibleError, match="3 samples for 4 microbatches on 2 ranks"):
        rl.whole_samples(planned([9, 9, 9], cluster=Cluster(2, 2), min_microbatches=4))
    cut = planned([150, 20], planner="whole")
    with pytest.raises(ConfigError, match=r"sample 0 is cut over .* 0 and 1; expected whole ones"):
        rl.whole_samples(cut)
    step = planned([150, 20, 30, 1], context=2, attend="context")
    assert sorted(chain.from_iterable(chain.from_iterable(rl.whole_samples(step, 2)))) == [0, 1, 2, 3]

"""Random forests: under every planner, once proved and equal to dense attention, and programs that
show anything else are refused.
"""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.compile import ping_pong
from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import compile_ranks, expand
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import prove, verify_issue_order
from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.compile.transpose import POLICIES
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.arrays import Rectangles, split
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Forest, Segment, Tree
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import from_json, to_json
from megatron_balance.ir.step import EMPTY, Carry
from megatron_balance.ir.text import parse, text
from megatron_balance.patterns.base import pairs_of
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.attention import attention_call, linear_s
from tests.support import forests
from tests.support.rendezvous import batches_of, group_calls, hanging
from tests.support.strategies import ALL_PLANNERS, Case

# Cases of each planner and comm pattern: 500 in all.
EACH = -(-500 // (len(ALL_PLANNERS) + len(forests.GATHERS)))


@pytest.mark.parametrize("planner", [*ALL_PLANNERS, *forests.GATHERS])
def test_every_planner_attends_along_paths(planner: str) -> None:
    rng = random.Random(planner)
    for _ in range(EACH):
        forest, case = forests.drawn(rng)
        plan = forests.planned(planner, forest, case)
        assert plan.mask in (forest, forest.without_window)
        plan = forests.with_layers(rng, plan)
        assert from_json(to_json(plan)) == plan
        program = prove(plan, rng.choice(POLICIES))
        assert parse(text(program)) == program
        assert forests.worst_of(program, forest) < 1e-12


@pytest.mark.parametrize("planner", ["distca", "zeppelin", "magi", "auto"])
def test_planners_that_price_trees_attend_along_the_paths_of_2000_segments(planner: str) -> None:
    rng, trees = random.Random(6), list[Tree]()
    while sum(map(len, trees)) < 2000:
        trees.append(forests.some_tree(rng, most=400, longest=5)[: 2000 - sum(map(len, trees))])
    forest = Forest(tuple(trees))
    assert max(map(len, trees)) > 200
    model = Model(2, 1, head_dim=4, hidden_size=32, ffn_size=64)
    plan = forests.planned(planner, forest, Case(Batch(forest.lengths, forest.trees), Cluster(4, 2), model, None, 0))
    assert forests.worst_of(prove(plan, "replay"), forest) < 1e-12


# 500 of rows and 500 of masks.
def test_a_program_that_shows_anything_else_is_refused() -> None:
    mutants = pytest.importorskip("tests.support.forest_mutants", reason="the executor's entries need torch")
    rng, found = random.Random(3), Counter[tuple[str, bool]]()
    while found.total() < 1000:
        forest, case = forests.drawn(rng)
        plan = forests.planned(rng.choice(["random_task_table", "te_ring", "gather_sequence"]), forest, case)
        program = expand(plan, None)
        assert mutants.as_shown(program, forest)
        others = list(mutants.of_masks(rng, forest, 10))
        made = [(how, replace(program, mask=other)) for how, other in others]
        for how, mutant in (*made, *mutants.of_rows(rng, program, 10)):
            try:
                verify(mutant)
            except InvalidProgramError:
                found[how, False] += 1
                continue
            found[how, True] += 1
            assert mutants.as_shown(mutant, mutant.mask), (how, text(mutant))
    kinds = {how for how, _ in found}
    assert len(kinds) == 12
    assert not [how for how in kinds if not found[how, False]], found
    assert sum(count for (_, accepted), count in found.items() if not accepted) > 400, found


def test_layers_under_a_window_have_the_trees_of_the_others():
    # Of a plan for layers without one: by path, not by position.
    rng = random.Random(4)
    for planner in ("te_ring", "random_task_table", "gather_sequence"):
        forest, case = forests.drawn(rng)
        forest, case = forest.without_window, replace(case, model=replace(case.model, attention="causal"))
        plan = forests.planned(planner, forest, case)
        assert under(plan, CAUSAL) is plan
        windowed, shown = under(plan, SlidingWindow(2)), replace(forest, window=2)
        assert windowed.mask == shown
        assert forests.worst_of(prove(windowed, "keep"), shown) < 1e-12
        assert under(plan, SlidingWindow(max(forest.lengths))) is plan


def test_nano_batches_of_trees_have_one_issue_order():
    rng = random.Random(5)
    for planner in (*ALL_PLANNERS, *forests.GATHERS):
        cases = [forests.drawn(rng) for _ in range(2)]
        cluster = Cluster(4, 2)
        plans = [forests.planned(planner, forest, replace(case, cluster=cluster)) for forest, case in cases]
        plans = [forests.with_layers(rng, plan) for plan in plans]
        compiled = [compile_ranks(plan, "replay") for plan in plans]
        phases = batches_of(plans, compiled, ping_pong.forward(2))
        for batches in phases:
            verify_issue_order(batches)
        assert not hanging([group_calls([*ahead, *back]) for ahead, back in zip(*phases, strict=True)])


SIBLINGS = """program lengths 8 heads 1 kv_heads 1 policy none mask forest_window_4
tree s0 4 2<0 2<0
owner r0 s0[0:8)
forward
attend r0
  q s0[0:4) over s0[0:4)
  q s0[4:6) over s0[1:4) s0[4:6)
  q s0[6:8) over s0[1:4) s0[6:8)
"""


def test_siblings_share_a_row_over_what_is_above_them_unless_a_window_ends_there():
    # A window ends at one distance along the path, so at another of positions for each sibling.
    joined = SIBLINGS.split("  q s0[4:6)", maxsplit=1)[0] + "".join(
        f"  q {queries} over {keys}\n"
        for queries, keys in (("s0[4:8)", "s0[1:4)"), ("s0[4:6)", "s0[4:6)"), ("s0[6:8)", "s0[6:8)"))
    )
    verify(parse(SIBLINGS))
    with pytest.raises(InvalidProgramError, match="a kernel would show what the mask hides"):
        verify(parse(joined))
    whole = joined.replace("_window_4", "").replace("[1:4)", "[0:4)")
    verify(parse(whole))
    with pytest.raises(InvalidProgramError, match="a kernel would show what the mask hides"):
        verify(parse(whole.replace("q s0[6:8) over s0[6:8)", "q s0[6:8) over s0[5:8)")))
    with pytest.raises(InvalidProgramError, match=r"its trees have .* tokens, the sequences"):
        verify(parse(whole.replace("2<0 2<0", "2<0 3<0")))


def test_a_plan_of_other_trees_is_refused_before_it_is_a_program():
    forest, case = forests.drawn(random.Random(2))
    plan = forests.planned("te_ring", forest, case)
    verify_plan(plan)
    with pytest.raises(InvalidProgramError, match=r"mask forest.*: trees of .* tokens, sequences of"):
        verify_plan(replace(plan, mask=replace(forest, trees=forest.trees[:-1])))


def test_trees_are_planned_by_their_own_lengths_and_never_lost():
    forest, case = forests.drawn(random.Random(1))
    context = StepContext(case.cluster, case.model, AnalyticCost(case.cluster, case.model), trees=forest.trees)
    choice = choose_planner("te_ring", {})
    step, _ = choice.plan_step((forest.lengths, ()), context)
    assert [plan.mask.without_window for plan in step.plans if plan.lengths] == [forest.without_window]
    with pytest.raises(ConfigError, match="has the length of its tree"):
        choice.plan_step((forest.lengths[:-1],), context)
    # A plain document that waited goes with them.
    step, left = choice.plan_step((forest.lengths,), context, Carry(waiting=((-1, 3),)))
    assert (step.members[0][0][-1], left) == (-1, EMPTY)
    assert step.plans[0].mask.without_window == Forest((*forest.trees, (Segment(3, -1),)))
    with pytest.raises(ConfigError, match="siblings"):
        choice.plan_step((forest.lengths,), replace(context, model=replace(case.model, attention="full")))


@pytest.mark.parametrize("pattern", ["te_ring", "gather_documents"])
def test_trees_are_priced_by_what_they_compute(pattern: str) -> None:
    # A full root of as many tokens takes longer than a causal one, leaves side by side less than in a
    # row; and the estimate is what is simulated.
    cluster, model = Cluster(4, 4), Model(32, 8, head_dim=128)
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    seconds: list[float] = []
    for tree in (
        (Segment(8192, -1), *(Segment(1024, 0) for _ in range(8))),
        (Segment(8192, -1), Segment(8192, 0)),
        (Segment(8192, -1, full=True), Segment(8192, 0)),
    ):
        case = Case(Batch((16384,), (tree,)), cluster, model, None, 0)
        plan = forests.planned(pattern, Forest((tree,)), case)
        on = machine.for_trees(plan.mask)
        calls = [attention_call(plan, on, "keep", linear_s(plan, on), engine) for engine in ("rounds", "events")]
        seconds.append(float(calls[0][0].end_s.max()))
        assert float(calls[1][0].end_s.max()) == pytest.approx(seconds[-1], rel=0.02)
        assert estimate(plan, machine).forward_s == pytest.approx(seconds[-1], rel=0.02)
    assert seconds[0] < seconds[1] < seconds[2]


def test_what_no_window_cuts_is_one_call_of_a_kernel_that_takes_one_window():
    # The first of four leaves goes on where the root ends. The other window ends in the root for all.
    lowering = pytest.importorskip("megatron_balance.runtime.lower.lowering", reason="entries need torch")
    tree = (Segment(20, -1), *(Segment(5, 0) for _ in range(4)))
    for window, cut in ((100, 0), (22, 3)):
        mask = Forest((tree,), window)
        rows = Rectangles(*(np.array([each]) for each in (0, 40, 0, 40)))
        _, cells = split(np.array([0]), rows, mask)
        pairs = pairs_of(np.column_stack([0 * cells.q_start, *cells[:2]]), np.column_stack(cells[2:]), [(0, 1, 0, 1)])
        fused = lowering._fuse(pairs.T, np.zeros(len(pairs), dtype=int), *pairs.T[[1, 5]], mask)
        windows = Counter(map(tuple, fused.windows.tolist()))
        assert windows[window - 1, 0] == 4, "each causally over its own"
        assert windows[window - 1, window - 1] == 3 - cut
        assert windows.total() == 7

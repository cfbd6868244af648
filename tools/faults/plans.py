"""Random steps for every planner: planned within a limit of processor time, or refused in words; the
structure of all plans checked, some small ones proved. And random plans on gloo against dense
attention.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.errors import ConfigError, InfeasibleError, InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import Carry, Layers, StepPlan
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import JointStages
from megatron_balance.planning.proofs import prove_step
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from tools.faults.cases import Outcome, SlowError, within

LIMIT_S = 20.0
"""Processor time of one step's planning."""
MOST_PROVED = 6000
"""Ranks x tokens of a step that is proved, at most."""
FIRST = 4000
"""Cases below are of the first drawing; those behind it are most of them small, and so many more."""
HEADS = ((1, 1), (2, 2), (4, 4), (3, 1), (4, 2), (8, 2), (6, 3), (8, 8), (8, 1))
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "distca": {
        "block": (1, 2, 3, 4, 8, 16, 128),
        "tolerance": (0.0, 0.02, 0.2),
        "shards": ("plain", "head_tail"),
        "servers": ("in_place", "in_place", "pool"),
        "empty_light_servers": (True, False),
    },
    "zeppelin": {"rule": ("waves", "groups", "groups", "paper"), "num_waves": (None, 1, 2, 3)},
    "flexsp": {"solver": ("greedy", "greedy", "highs"), "num_buckets": (1, 4, 16)},
    "knapformer": {"heads": ("equal", "uneven", "ring"), "tries": (1, 20, 200)},
    "megatron_dynamic": {"rules": ("dynamic", "hybrid")},
    "wlb_llm": {"packing": ("workload", "original", "fixed"), "thresholds": ((), (30,), (10, 60)), "window": (1, 1, 2)},
    "wlb_sharding": {"sharding": ("document", "sequence", "adaptive", "mixed")},
    "hybrid_dp": {"tolerance": (0.0, 0.05)},
    "hydraulis": {"within": ("te_ring", "llama_all_gather")},
    "magi": {"chunk_tokens": (None, 1, 128, 2048)},
    "usp": {"group_size": (None, 1)},
}


@dataclass(frozen=True)
class Drawing:
    """How cases are drawn. `ranks`: ceilings and how often each is taken; `longest`: ceilings of a
    length; `few`, `many`: ceilings of a list's lengths for up to 64 ranks and for more; `proved`:
    share of the cases whose plans are proved, if they are small; `order`: planners, case after case.
    """

    ranks: tuple[tuple[int, ...], tuple[float, ...]]
    longest: tuple[int, ...]
    few: tuple[int, ...]
    many: tuple[int, ...]
    microbatches: tuple[int, ...]
    proved: float
    order: tuple[str, ...]

    @staticmethod
    def of(number: int) -> Drawing:
        return EARLIER if number < FIRST else LATER


EARLIER = Drawing(
    ((8, 16, 64, 256, 1024), (60, 25, 10, 4, 1)),
    (3, 12, 40, 300, 300, 2000, 20000),
    (1, 3, 8, 8, 40),
    (8, 40, 200),
    (1, 1, 2, 3),
    0.1,
    tuple(name for name in PLANNERS if name not in ("usp", "magi")),  # which came later
)
_DEAR = ("auto", "flexsp")  # a case takes ten times as long as another planner's: half as many
LATER = Drawing(
    ((6, 16, 64, 256, 1024), (80, 17, 2.4, 0.5, 0.1)),
    (3, 12, 40, 40, 300, 300, 2000, 20000),
    (1, 2, 3, 5, 8, 12),
    (8, 40, 100),
    (1, 1, 1, 2),
    0.03,
    (*(name for name in PLANNERS if name not in _DEAR), *PLANNERS),
)


def drawn(number: int) -> tuple[PlanSpec, list[tuple[tuple[int, ...], ...]]]:
    """The spec of case `number`, and the lengths of a step or two."""
    draw, by = random.Random(f"plans {number}"), Drawing.of(number)
    name = by.order[number % len(by.order)]
    ranks, per_node = _cluster(draw, by)
    heads, kv_heads = draw.choice(HEADS)
    model = Model(heads, kv_heads, 4, num_layers=draw.choice((1, 4)), hidden_size=32, ffn_size=64)
    if "full" in PLANNERS[name].masks and draw.random() < 0.1:
        model = Model(heads, kv_heads, 4, hidden_size=32, ffn_size=64, attention="full")
    model = _windowed(model, number)
    steps = [_lengths(draw, ranks, by) for _ in range(draw.choice((1, 1, 2)))]
    options = {key: draw.choice(values) for key, values in OPTIONS.get(name, {}).items() if draw.random() < 0.6}
    most = max(sum(microbatch) for step in steps for microbatch in step)
    even = -(-max(most, 1) // ranks)
    options["tokens_per_rank"] = draw.choice((None, even, even + max(1, even // 10), 2 * even, 4 * even))
    routing = draw.choice(("never", "never", "always", "pays"))
    remap, remap_when = draw.random() < 0.4, draw.choice(("always", "pays"))
    for _ in range(2):  # of two options of the remap that are gone: what is drawn later stays what it was
        draw.choice((0, 1))
    layers = Layers(
        routing=routing,
        remap=remap,
        remap_when=remap_when,
        align=draw.choice((1, 1, 2, 4)),
        pieces=draw.choice((1, 2)),
        once_per_node=draw.random() < 0.5,
    )
    strategy = None
    if PLANNERS[name].pipelines:
        context = draw.choice([size for size in (1, 2, 4, per_node) if ranks % size == 0])
        strategy = str(Strategy((Scheme(1, 1, context),) * (ranks // context)))
    joint = None
    if PLANNERS[name].plan_owned is not None and ranks <= 32 and draw.random() < 0.2:
        joint = JointStages(Cluster(2 * ranks, per_node), 1)
    halves = draw.random() < 0.3 and strategy is None
    cluster = Cluster(ranks, per_node, ranks_per_nic=draw.choice((1, 1, 2)))
    return PlanSpec(name, cluster, model, layers, options, None, joint, halves, strategy), steps


def _windowed(model: Model, number: int) -> Model:
    """The model, in some cases with a sliding window, in all of its layers or in some; drawn apart, so
    that all else of a case is as it was without windows.
    """
    draw = random.Random(f"windows {number}")
    name = f"window_{draw.choice((1, 2, 5, 17, 64, 300))}"
    if model.attention != "causal" or draw.random() > 0.2:
        return model
    return replace(model, **{draw.choice(("attention", "other_attention")): name})


def _cluster(draw: random.Random, by: Drawing) -> tuple[int, int]:
    """Ranks, and of them on a node: 1 to 1,024, few more often than many."""
    most = draw.choices(*by.ranks)[0]
    ranks = draw.randint(1, most)
    return ranks, draw.choice([size for size in (1, 2, 3, 4, 6, 8, 16, ranks) if ranks % size == 0])


def _lengths(draw: random.Random, ranks: int, by: Drawing) -> tuple[tuple[int, ...], ...]:
    longest = draw.choice(by.longest)
    most = draw.choice(by.few if ranks <= 64 else by.many)
    microbatches = draw.choice(by.microbatches)
    shapes = (lambda: draw.randint(1, longest), lambda: max(1, int(longest * draw.random() ** 4)), lambda: 1)
    return tuple(
        tuple(draw.choice(shapes)() for _ in range(draw.randint(0 if draw.random() < 0.1 else 1, most)))
        for _ in range(microbatches)
    )


@contextmanager
def plans() -> Iterator[Callable[[int], Outcome]]:
    yield try_plan


def try_plan(number: int) -> Outcome:
    """Plan the steps of a case, the second with what the first carried."""
    spec, steps = drawn(number)
    try:
        with within(LIMIT_S):
            shall = random.Random(f"proved {number}").random() < Drawing.of(number).proved
            return Outcome(f"{spec.name}: {_planned(spec, steps, proves=shall)}")
    except (ConfigError, InfeasibleError) as error:
        said = str(error)
        return Outcome(f"{spec.name}: refused", "" if said and "\n" not in said else f"says {said!r}")
    except InvalidProgramError as error:
        return Outcome(f"{spec.name}: wrong", str(error) or "wrong")
    except SlowError as error:
        return Outcome(f"{spec.name}: slow", str(error))
    except Exception as error:  # a planner that raises anything else is a fault
        return Outcome(f"{spec.name}: raises", f"{type(error).__name__}: {error}")


def _planned(spec: PlanSpec, steps: list[tuple[tuple[int, ...], ...]], *, proves: bool) -> str:
    planner, carry = StepPlanner(spec), Carry()
    proved = False
    for lengths in steps:
        step, carry = planner.plan(lengths, carry)
        if proves and _size(step) <= MOST_PROVED:
            prove_step(step, masks=spec.model.masks)
            proved = True
    return "proved" if proved else "planned"


def _size(step: StepPlan) -> int:
    """Ranks times tokens of all plans of a step, and more for many sequences."""
    all_plans = (*step.plans, *(one.plan for ticks in step.ticks for one in ticks))
    return sum(plan.num_ranks * (plan.num_tokens + 50) for plan in all_plans)


@contextmanager
def on_gloo() -> Iterator[Callable[[int], Outcome]]:
    """Run random plans on four gloo ranks, forward and backward, against dense attention."""
    from tests.support.pool import Pool  # ranks are forked from a server that imports torch

    pool = Pool(timeout_s=120.0, num_ranks=4)
    try:
        yield lambda number: try_on_gloo(pool, number)
    finally:
        pool.close()


def try_on_gloo(pool: Any, number: int) -> Outcome:
    """One plan of a planner, product's or tests', under either policy, in fp64."""
    from megatron_balance.compile.pipeline import layout
    from megatron_balance.ir.columns import Rows
    from megatron_balance.reference import owned_rows
    from tests.support import dense, jobs
    from tests.support.dense import visible
    from tests.support.strategies import ALL_PLANNERS, Case, plan

    draw = random.Random(f"gloo {number}")
    name, ranks = ALL_PLANNERS[number % len(ALL_PLANNERS)], draw.choice((1, 2, 3, 4))
    heads, kv_heads = draw.choice(HEADS)
    mask = "full" if draw.random() < 0.2 else "causal"
    model = _windowed(Model(heads, kv_heads, 4, hidden_size=32, ffn_size=64, attention=mask), number)
    lengths = tuple(draw.choice((1, 3, draw.randint(1, 40), draw.randint(1, 200))) for _ in range(draw.randint(1, 6)))
    even = -(-sum(lengths) // ranks)
    routing = draw.choice((None, (1, 1), (2, 1)))
    per_node = draw.choice((2, 4)) if ranks == 4 else draw.choice((1, ranks))  # as the pool's groups have them
    cluster = Cluster(ranks, 2 if ranks == 4 else per_node)
    case = Case(
        Batch(lengths), cluster, model, draw.choice((None, even, 2 * even)), number, draw.random() < 0.5, routing
    )
    try:
        planned = plan(name, case)
    except (ConfigError, InfeasibleError):
        return Outcome(f"{name}: refused")
    runs = [jobs.Run("keep", "float64"), jobs.Run("replay", "float64")]
    try:
        per_rank = pool.run(jobs.attend, ranks, planned, 4, runs)
    except AssertionError as error:
        return Outcome(f"{name}: failed", str(error)[-400:])
    x = jobs.inputs(planned, 4)
    truth = dense.attention(x, visible(planned.mask))
    owned = [Rows.of(3, layout(planned, rank).tolist()) for rank in range(ranks)]
    for index, run in enumerate(runs):
        for value in ("out", "q_grad", "k_grad", "v_grad"):
            ours = [getattr(results[index], value) for results in per_rank]
            off = dense.worst(ours, [owned_rows(rows, getattr(truth, value)) for rows in owned])
            if off > 1e-9:
                return Outcome(f"{name}: differs", f"{run.policy} {value} by {off:.2e}")
    return Outcome(f"{name}: equal")

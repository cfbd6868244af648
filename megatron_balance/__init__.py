"""Plan, prove and run distributed attention for sequences of unequal length.

Importing this package imports neither torch nor NumPy; what a function needs is imported when it is
called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan

if TYPE_CHECKING:
    from megatron_balance.ir.arrays import Ints
    from megatron_balance.ir.step import Layers
    from megatron_balance.planning.choice import load_config

__version__ = "0.1.0"
__all__ = ["Batch", "Cluster", "MicrobatchPlan", "Model", "layout", "load_config", "make_planner", "simulate", "verify"]

_LAZY = {"load_config": "megatron_balance.planning.choice", "simulate": "megatron_balance.simulator"}

# See `megatron_balance.simulator.simulate`.
simulate: Callable[..., dict[str, Any]]


def __getattr__(name: str) -> Any:
    # PEP 562: what needs a configuration library or the simulator is imported when first asked for.
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def make_planner(
    name: str,
    cluster: Cluster,
    model: Model,
    layers: Layers | None = None,
    plan_costs: str | Path | None = None,
    **options: Any,
) -> Callable[[Batch | Sequence[int]], MicrobatchPlan]:
    """The planner `name` for a cluster and a model: a function from a batch, or from lengths in
    tokens, to a plan.

    `layers`: remapping and routing (`megatron_balance.ir.step.Layers`); not given: what the
    planner's own system does. `plan_costs`: file of a cost table measured by `megatron-balance
    profile` to plan by; not given: data sheets.

    Raises:
        ConfigError: no such planner or option, or an option of the wrong type; a cost table that
            cannot be read or is another model's.
    """
    from megatron_balance.compile.proof.structure import verify_plan
    from megatron_balance.planning.choice import choose_planner, planning_cost

    choice = choose_planner(name, options, "make_planner", layers)
    cost = planning_cost(cluster, model, plan_costs)

    def plan(batch: Batch | Sequence[int]) -> MicrobatchPlan:
        made = choice.plan(batch if isinstance(batch, Batch) else Batch(tuple(batch)), cluster, model, cost)
        verify_plan(made)
        return made

    return plan


def verify(plan: MicrobatchPlan, policy: Literal["keep", "replay"] = "keep") -> None:
    """Prove that the plan computes causal attention and its gradient exactly once, with the
    backward of `policy`, and that this is what its ranks run, issuing their exchanges in one order.

    Raises:
        InvalidProgramError: it does not, and names the op; or they do not, and names the ranks.
    """
    from megatron_balance.compile.proof.runs import prove

    prove(plan, policy)


def layout(plan: MicrobatchPlan, rank: int) -> Ints:
    """Where tokens lie: rows (sequence, start, stop) [N, 3] of a rank, in the order of its tokens.

    Raises:
        ConfigError: the plan has no such rank.
    """
    from megatron_balance.compile import pipeline
    from megatron_balance.errors import ConfigError
    from megatron_balance.ir.batch import whole

    if not isinstance(plan, MicrobatchPlan):
        raise ConfigError(f"expected the plan of a microbatch, got {type(plan).__name__}")
    at = whole(rank)
    if at is None or not 0 <= at < plan.num_ranks:
        raise ConfigError(f"rank {rank!r}: expected a rank of the plan, 0 to {plan.num_ranks - 1}")
    return pipeline.layout(plan, at)

"""What `simulate` and `compare` share: options of the machine and of the step, planning and simulating with progress."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron_balance.cli import inputs
from megatron_balance.cli.inputs import Inputs
from megatron_balance.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_balance.config import PlannerChoice
    from megatron_balance.core.plan import BatchPlan
    from megatron_balance.cost.base import MachineCost
    from megatron_balance.simulator.machine import Machine
    from megatron_balance.simulator.report import Perturbation
    from megatron_balance.simulator.step import Setup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Planned:
    """One planner's steps. `plan_ms`: planning a batch took on average."""

    name: str
    steps: tuple[BatchPlan, ...]
    plan_ms: float


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine and the kind of step that plans are simulated on. `group`: batches of a step."""

    given: Inputs
    machine: Machine
    setup: Setup
    perturbation: Perturbation
    group: int

    def plan(self, choice: PlannerChoice) -> Planned:
        """Plan all steps, for the cluster as its configuration has it; a system that makes microbatches of its own makes them."""
        given, cost = self.given, self.given.planning_cost()
        begin = time.perf_counter()
        groups = [given.batches[at : at + self.group] for at in range(0, len(given.batches), self.group)]
        steps = [choice.plan_step(group, given.cluster, given.model, cost) for group in progress(groups, f"{choice.name}: plan")]
        plan_ms = 1e3 * (time.perf_counter() - begin) / len(given.batches)
        return Planned(choice.name, tuple(steps), plan_ms)

    def simulate(self, planned: Planned) -> dict[str, Any]:
        """The figures of all steps (`simulator.report.summary`)."""
        from megatron_balance.simulator.report import simulate_plans, summary

        steps = [
            step
            for plan in progress(planned.steps, f"{planned.name}: simulate")
            for step in simulate_plans([plan], self.machine, self.setup, self.perturbation)
        ]
        return summary(steps)

    def imbalance(self, planned: Planned) -> dict[str, float]:
        """Largest over mean load of the ranks, mean over microbatches."""
        from megatron_balance.schedules.figures import figures

        found = [figures(plan, self.given.model)["imbalance"] for step in planned.steps for plan in step.microbatches]
        return {key: fmean(each[key] for each in found) for key in ("tokens", "attention")}

    def described(self) -> dict[str, Any]:
        """What was simulated, for JSON."""
        given = self.given
        return {
            "cluster": given.cluster.name,
            "model": given.model.name,
            "num_ranks": given.cluster.num_ranks,
            "gpus_per_rank": given.tensor_parallel,
            "assumed": given.assumed or None,
            "capacity_tokens_per_rank": given.tokens_per_rank,
        }

    def headline(self) -> str:
        """The same in words."""
        given = self.given
        cluster = given.cluster
        assumed = f" ({given.assumed})" if given.assumed else ""
        count = len(given.batches) // self.group
        tokens = fmean(batch.num_tokens for batch in given.batches)
        ranks = "ranks" if given.tensor_parallel == 1 else f"ranks of {given.tensor_parallel} GPUs"
        what = f"{cluster.num_ranks} {ranks} ({cluster.num_nodes} x {cluster.node_size}), {given.model.name} on {cluster.name}{assumed}"
        return f"{what}; {count} step{'s' * (count > 1)} of {self.group} x {tokens:,.0f} tokens"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the machine and of the step."""
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="simulate with a cost table measured by 'profile' (default: data sheets)"
    )
    parser.add_argument(
        "--slow", action="append", default=[], metavar="RANK=FACTOR", help="a rank that computes FACTOR times slower; repeatable"
    )
    parser.add_argument("--spread", type=float, default=0.0, metavar="S", help="simulate machines whose times are off by exp(N(0, S))")
    parser.add_argument("--draws", type=int, default=None, metavar="N", help="with --spread: how many of them (default 20)")
    parser.add_argument("--spread-seed", type=int, default=0, metavar="S", help="with --spread: seed (default 0)")
    parser.add_argument("--policy", choices=("keep", "replay"), help="hold received keys and values for the backward, or bring them again")
    parser.add_argument("--recompute", choices=("none", "full"), default="none", help="activation recomputation (default none)")
    parser.add_argument("--microbatches", type=int, default=1, metavar="M", help="batches of a step (default 1)")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="GPUs of a tensor-parallel group, which is a rank then; --ranks and the cluster's files count GPUs (default 1)",
    )
    parser.add_argument("--expert-parallel", type=int, default=1, metavar="E", help="ranks that share a layer's experts (default 1)")
    parser.add_argument("--pipeline", type=int, default=1, metavar="P", help="pipeline stages, each with the cluster's ranks (default 1)")
    parser.add_argument("--interleave", type=int, default=1, metavar="V", help="model chunks of a pipeline stage (default 1)")
    parser.add_argument("--no-overlap-sync", action="store_true", help="synchronise gradients after the last backward")
    parser.add_argument(
        "--transport",
        choices=("streams", "sockets"),
        default="streams",
        help="what carries transfers: streams as NCCL's (default), or sockets as gloo's on CPUs",
    )
    parser.add_argument(
        "--engine", choices=("auto", "events", "rounds"), default="auto", help="events: every transfer on its own; rounds: for many ranks"
    )


def read(args: argparse.Namespace) -> Inputs:
    """The inputs of a verb of the laboratory.

    Raises:
        BalanceError: an option that cannot be, or a batch that does not fit.
    """
    if args.tensor_parallel < 1:
        raise ConfigError(f"--tensor-parallel {args.tensor_parallel}: must be at least 1")
    given = inputs.read(args, args.tensor_parallel)
    for option, table in (("--costs", args.costs), ("--plan-costs", given.plan_costs)):
        if table is not None and args.tensor_parallel > 1:
            raise ConfigError(
                f"{option} {table} goes with --tensor-parallel 1: it was measured on one GPU, and a rank is {args.tensor_parallel} of them"
            )
    _check_experts(args.expert_parallel, given)
    return given


def _check_experts(ranks: int, given: Inputs) -> None:
    if ranks == 1:
        return
    model, cluster = given.model, given.cluster
    if not model.num_experts:
        raise ConfigError(f"--expert-parallel {ranks}: {model.name} has no experts; leave it out")
    here = min(ranks, cluster.node_size)
    if ranks < 1 or model.num_experts % ranks or cluster.num_ranks % ranks or ranks % here:
        raise ConfigError(
            f"--expert-parallel {ranks}: must divide the {model.num_experts} experts of {model.name} and the {cluster.num_ranks} ranks, "
            f"and fill nodes of {cluster.node_size} ranks if it is more than one"
        )


def bench(args: argparse.Namespace, given: Inputs) -> Bench:
    """The machine and the step that the options say.

    Raises:
        ConfigError: an option that cannot be.
    """
    from megatron_balance.simulator.machine import Machine
    from megatron_balance.simulator.report import Perturbation
    from megatron_balance.simulator.step import Setup

    if args.microbatches < 1 or len(given.batches) % args.microbatches:
        raise ConfigError(
            f"--microbatches {args.microbatches}: {len(given.batches)} batches do not make whole steps of so many; give a divisor"
        )
    if args.draws is not None and not args.spread:
        raise ConfigError(f"--draws {args.draws} goes with --spread S, such as 0.1")
    setup = Setup(
        policy=args.policy or given.config.backward,
        recompute=args.recompute,
        pipeline=args.pipeline,
        interleave=args.interleave,
        experts=args.expert_parallel,
        overlap_sync=not args.no_overlap_sync,
        engine=args.engine,
        transport=args.transport,
    )
    perturbation = Perturbation(args.spread, 20 if args.draws is None else args.draws, args.spread_seed)
    machine = Machine(given.cluster, given.model, _cost(args, given), _slowdown(args.slow, given.cluster.num_ranks))
    return Bench(given, machine, setup, perturbation, args.microbatches)


def _cost(args: argparse.Namespace, given: Inputs) -> MachineCost:
    if args.costs is None:
        from megatron_balance.cost.analytic import AnalyticCost

        return AnalyticCost(given.cluster, given.model, given.tensor_parallel)
    from megatron_balance.cost.measured import MeasuredCost
    from megatron_balance.cost.table import load_table

    return MeasuredCost(load_table(args.costs), given.cluster, given.model)


def _slowdown(given: Sequence[str], num_ranks: int) -> tuple[float, ...]:
    factors = [1.0] * num_ranks
    for entry in given:
        rank, _, factor = entry.partition("=")
        if not rank.isdigit() or int(rank) >= num_ranks:
            raise ConfigError(f"--slow {entry}: expected RANK=FACTOR with a rank from 0 to {num_ranks - 1}, such as 3=1.5")
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"--slow {entry}: expected RANK=FACTOR, such as 3=1.5") from None
        if not 0 < factors[int(rank)] < float("inf"):
            raise ConfigError(f"--slow {entry}: the factor must be more than 0")
    return tuple(factors) if given else ()


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """`items`, with a progress bar on stderr where there are several and someone looks."""
    if len(items) < 2:
        return items
    from tqdm import tqdm

    return cast("Iterable[T]", tqdm(items, desc=what, file=sys.stderr, disable=None, leave=False))


def console() -> Console:
    """Standard output; a pipe or a file has no width of its own."""
    from rich.console import Console

    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found.width = 120
    return found

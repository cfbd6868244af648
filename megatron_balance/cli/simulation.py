"""The bench that `simulate` and `compare` share: options of the machine and of the step, planning
and simulating with progress.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_balance.cli import inputs, output
from megatron_balance.cli.inputs import Inputs
from megatron_balance.errors import ConfigError, InfeasibleError

if TYPE_CHECKING:
    from megatron_balance.cost.experts import ExpertLoad
    from megatron_balance.ir.model import Model

if TYPE_CHECKING:
    from megatron_balance.analysis.change import Layouts
    from megatron_balance.analysis.machine import Machine
    from megatron_balance.analysis.step_memory import StepMemory
    from megatron_balance.cost.base import MachineCost
    from megatron_balance.ir.cluster import Cluster
    from megatron_balance.ir.step import StepPlan
    from megatron_balance.planning.choice import PingPong, PlannerChoice, Stages, StepMode
    from megatron_balance.simulator.report import Perturbation
    from megatron_balance.simulator.setup import Setup
    from megatron_balance.simulator.step import Step

PING_PONG: dict[str, PingPong] = {"auto": "auto", "true": True, "false": False}
MOST_MICROBATCHES = 1 << 16
"""Of a step."""

ROOM = 1.25
"""Capacity of a rank over its mean tokens in a microbatch of --global-tokens, so that planners have a
choice."""

PER_STAGE = 4
"""Microbatches of a pipeline stage in a step of --global-tokens, at least: stages then wait for a
quarter of what they work, at most."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One planner's steps, and how they run; `plan_ms`: of a batch, on average."""

    name: str
    mode: StepMode
    steps: tuple[StepPlan, ...]
    plan_ms: float
    context_parallel: int | None = None
    """Ranks of a replica, where the planner keeps replicas."""
    layouts: Layouts | None = None
    """The owner of weights, where the planner changes between strategies."""
    sizes: tuple[dict[str, Any], ...] = ()
    """Where nobody said `context_parallel`: every size that was simulated, ascending."""

    def described(self) -> dict[str, Any]:
        """The mode for JSON, by the keys of a configuration."""
        mode = {"ping_pong": self.mode.ping_pong, "pipeline": self.mode.pipeline}
        return {**mode, "context_parallel": self.context_parallel, "sizes": list(self.sizes)}

    def in_words(self) -> str:
        """The mode in words; empty where microbatches run whole, on one stage."""
        others = ", ".join(str(each["context_parallel"]) for each in self.sizes)
        fastest = f" (fastest of {others})" if len(self.sizes) > 1 else ""
        parts = [] if self.context_parallel is None else [f"context parallelism {self.context_parallel}{fastest}"]
        parts += ["microbatches as two nano-batches interleaved"] * self.mode.ping_pong
        parts += {
            "joint": ["all pipeline stages attending together"],
            "stages": ["each pipeline stage attending for itself"],
            None: [],
        }[self.mode.pipeline]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine and the kind of step that plans are simulated on."""

    # `group`: batches of a step. `pool`: the machine of all pipeline stages' ranks; `machine` where
    # there is one stage. `ping_pong`, `stages`: as the keys `ping_pong` and `pipeline` of a
    # configuration.

    given: Inputs
    machine: Machine
    setup: Setup
    perturbation: Perturbation
    group: int
    pool: Machine
    ping_pong: PingPong = False
    stages: Stages = "stages"
    price: float | None = None
    """Of a GPU-hour."""

    @property
    def num_gpus(self) -> int:
        return self.pool.cluster.num_ranks * self.given.tensor_parallel

    def mfu(self, found: dict[str, Any]) -> float:
        """A step's FLOPs over what its GPUs could compute by their data sheet meanwhile."""
        from megatron_balance.cost.modules import model_flops

        flops = model_flops(self.given.model, (n for batch in self.given.batches for n in batch.lengths))
        seconds = sum(batch.num_tokens for batch in self.given.batches) / found["tokens_per_s"]
        pool = self.pool.cluster
        return flops / (seconds * pool.num_ranks * pool.flops_per_s)

    def mode(self, choice: PlannerChoice) -> StepMode:
        """The mode in which a planner's steps run."""
        from megatron_balance.planning.choice import step_mode

        found = step_mode(choice, self.setup.pipeline, self.ping_pong, self.stages)
        if found.joint and self.given.model.other_layers:
            raise ConfigError(
                f"{self.given.model.name} has layers of two masks, and pipeline stages that attend together have one; "
                f"{choice.name} runs them with --stages stages"
            )
        return found

    def memory(self, mode: StepMode) -> StepMemory:
        """The memory of a step around its plans, as it is simulated."""
        from megatron_balance.simulator.setup import StageSetup, step_memory

        found = step_memory(StageSetup(self.machine, self.setup))
        return replace(found, asked="replay") if mode.joint else found

    def plan(self, choice: PlannerChoice) -> Planned:
        """Plan all steps; replicas have one size: where nobody says which, the fastest that fits."""
        from megatron_balance.solvers.groups import context_sizes, least_context

        given, options = self.given, choice.options
        if not choice.planner.replicas or options.strategy is not None or options.context_parallel is not None:
            return self._plan(choice)
        least = least_context([batch.lengths for batch in given.batches], given.cluster, options.tokens_per_rank)
        found: list[tuple[dict[str, Any], Planned]] = []
        refused: list[InfeasibleError] = []
        for size in (each for each in context_sizes(given.cluster) if each >= least):
            try:
                planned = self._plan(replace(choice, options=replace(options, context_parallel=size)))
                simulated = self.simulate(planned)
            except InfeasibleError as error:
                refused.append(error)
                continue
            fits = max(simulated["peak_bytes_per_rank"]) <= given.cluster.memory_bytes
            step_s = simulated["step_s"]["median"]
            found.append(({"context_parallel": size, "step_s": step_s, "fits": fits}, planned))
        if not found:
            raise refused[0]
        fastest = min(found, key=lambda each: (not each[0]["fits"], each[0]["step_s"]))[1]
        return replace(fastest, sizes=tuple(size for size, _ in found))

    def _plan(self, choice: PlannerChoice) -> Planned:
        from megatron_balance.compile.proof.structure import verify_plans
        from megatron_balance.ir.step import EMPTY
        from megatron_balance.planners.base import JointStages, StepContext
        from megatron_balance.planning.strategies import with_proposed

        given, mode = self.given, self.mode(choice)
        degrees = choice.planner.pipelines and (choice.given.get("strategies") or choice.given.get("strategy"))
        if degrees and given.tensor_parallel > 1:
            raise ConfigError(
                f"--tensor-parallel {given.tensor_parallel}: a strategy says the degrees of its pipelines; leave it out"
            )
        joint = JointStages(self.pool.cluster, self.setup.interleave) if mode.joint else None
        context = StepContext(
            given.cluster,
            given.model,
            given.planning_cost(),
            joint=joint,
            ping_pong=mode.ping_pong,
            memory=self.memory(mode),
        )
        groups = [given.batches[at : at + self.group] for at in range(0, len(given.batches), self.group)]
        lengths = [tuple(batch.lengths for batch in group) for group in groups]
        choice = with_proposed(choice, lengths, context)
        begin = time.perf_counter()
        steps: list[StepPlan] = []
        carry = EMPTY
        for group in output.progress(lengths, f"{choice.name}: plan"):
            step, carry = choice.plan_step(group, context, carry)
            steps.append(step)
        plan_ms = 1e3 * (time.perf_counter() - begin) / len(given.batches)
        for step in steps:
            verify_plans(step)
        context_parallel = choice.options.context_parallel if choice.planner.replicas else None
        layouts = None
        if choice.planner.layouts is not None:
            layouts = choice.planner.layouts(choice.options, given.cluster.num_ranks, None)
        return Planned(choice.name, mode, tuple(steps), plan_ms, context_parallel, layouts)

    def simulate(self, planned: Planned) -> dict[str, Any]:
        """The statistics of all steps (`simulator.report.summary`)."""
        # `step_with_host_s`: where devices wait for their hosts, too; None where the costs have no
        # prices of a host.
        from megatron_balance.simulator.report import summary

        found = summary(self._steps(planned, self.machine, self.pool))
        host, with_host = self.machine.cost.host, None
        if host.is_modelled:
            stage, pool = (replace(each, host=host) for each in (self.machine, self.pool))
            with_host = summary(self._steps(planned, stage, pool))["step_s"]
        return {**found, "step_with_host_s": with_host, **planned.described()}

    def _steps(self, planned: Planned, stage: Machine, pool: Machine) -> list[Step]:
        from megatron_balance.simulator.training import simulate_planned

        machines = list(zip(self.perturbation.machines(stage), self.perturbation.machines(pool), strict=True))
        setup = replace(self.setup, layouts=planned.layouts)
        return [
            simulate_planned(step, *each, setup)
            for step in output.progress(planned.steps, f"{planned.name}: simulate")
            for each in machines
        ]

    def imbalance(self, planned: Planned) -> dict[str, float]:
        """Largest over mean load of the ranks, mean over microbatches."""
        from megatron_balance.analysis.statistics import plan_statistics

        plans = {
            "tokens": [plan for step in planned.steps for plan in step.plans],
            "attention": [plan for step in planned.steps for plan in step.attention],
        }
        return {
            key: fmean(plan_statistics(plan, self.given.model)["imbalance"][key] for plan in found)
            for key, found in plans.items()
        }

    def bound_s(self) -> float:
        """Seconds of even computation of a step (`simulator.step`): the mean over the steps."""
        return fmean(self.bound_s_per_step())

    def bound_s_per_step(self) -> list[float]:
        from megatron_balance.simulator.step import bound_s

        batches = self.given.batches
        groups = [batches[at : at + self.group] for at in range(0, len(batches), self.group)]
        return [bound_s(tuple(b.lengths for b in group), self.machine, self.setup) for group in groups]

    def described(self) -> dict[str, Any]:
        given = self.given
        return {
            "bound_s": self.bound_s(),
            "bound_s_per_step": self.bound_s_per_step(),
            "cluster": given.cluster.name,
            "model": given.model.name,
            "num_ranks": given.cluster.num_ranks,
            "gpus_per_rank": given.tensor_parallel,
            "num_gpus": self.num_gpus,
            "price_per_gpu_hour": self.price,
            "assumed": given.assumed or None,
            "capacity_tokens_per_rank": given.tokens_per_rank,
        }

    def headline(self) -> str:
        given = self.given
        cluster = given.cluster
        assumed = f" ({given.assumed})" if given.assumed else ""
        count = len(given.batches) // self.group
        tokens = fmean(batch.num_tokens for batch in given.batches)
        ranks = "ranks" if given.tensor_parallel == 1 else f"ranks of {given.tensor_parallel} GPUs"
        what = (
            f"{cluster.num_ranks} {ranks} ({cluster.num_nodes} x {cluster.node_size}), {given.model.name} on "
            f"{cluster.name}{assumed}"
        )
        steps = f"{count} step{'s' * (count > 1)} of {self.group} x {tokens:,.0f} tokens"
        return f"{what}; {steps}; bound {self.bound_s():.3f} s: even computation, nothing moves"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the machine and of the step."""
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="simulate with a cost table measured by 'profile' (default: data sheets)",
    )
    parser.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="RANK=FACTOR",
        help="a rank that computes FACTOR times slower; repeatable",
    )
    parser.add_argument(
        "--spread", type=float, default=0.0, metavar="S", help="simulate machines whose times are off by exp(N(0, S))"
    )
    parser.add_argument(
        "--draws", type=int, default=None, metavar="N", help="with --spread: how many of them (default 20)"
    )
    parser.add_argument("--spread-seed", type=int, default=0, metavar="S", help="with --spread: seed (default 0)")
    parser.add_argument(
        "--policy",
        choices=("auto", "keep", "replay"),
        help="hold received keys and values for the backward, bring them again, or hold them in as many layers as fit "
        "memory (default auto)",
    )
    parser.add_argument(
        "--recompute", choices=("none", "full"), default="none", help="activation recomputation (default none)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="M",
        help="batches of a step (default 1; with --global-tokens: as many as the ranks need, and at least "
        f"{PER_STAGE} a pipeline stage)",
    )
    parser.add_argument(
        "--global-tokens",
        type=inputs.tokens,
        metavar="N",
        help="with --dataset: tokens of a step, in place of --tokens of each of its batches; --batches then counts "
        "steps",
    )
    parser.add_argument(
        "--price-per-gpu-hour", type=float, metavar="P", help="also say what saved GPU-hours cost, in any currency"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help=(
            "GPUs of a tensor-parallel group, which is a rank then; --ranks and the cluster's files count GPUs "
            "(default 1)"
        ),
    )
    _add_expert_options(parser)
    parser.add_argument(
        "--pipeline",
        type=int,
        default=1,
        metavar="P",
        help="pipeline stages, each with the cluster's ranks (default 1)",
    )
    parser.add_argument(
        "--interleave", type=int, default=1, metavar="V", help="model chunks of a pipeline stage (default 1)"
    )
    parser.add_argument("--no-overlap-sync", action="store_true", help="synchronise gradients after the last backward")
    parser.add_argument(
        "--transport",
        choices=("streams", "sockets"),
        default="streams",
        help="what carries transfers: streams as NCCL's (default), or sockets as gloo's on CPUs",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "events", "rounds"),
        default="auto",
        help="events: every transfer on its own; rounds: for many ranks",
    )


def add_mode_options(parser: argparse.ArgumentParser) -> None:
    """Options of how training would run the plans."""
    parser.add_argument(
        "--ping-pong",
        choices=tuple(PING_PONG),
        help="microbatches as two nano-batches interleaved, as the key ping_pong of a configuration "
        "(default auto: with planners made for it)",
    )
    parser.add_argument(
        "--stages",
        choices=("joint", "stages"),
        help="with --pipeline: all stages attend together, or each for itself under Megatron's schedule, as the key "
        "pipeline of a configuration (default: joint where the planner can)",
    )


def read(args: argparse.Namespace, lengths: Sequence[Sequence[int]] | None = None) -> Inputs:
    """The inputs of a simulating verb; `lengths`: of the batches, where they are known already."""
    inputs.check_positive(args, "tensor_parallel")
    if args.price_per_gpu_hour is not None and not 0 < args.price_per_gpu_hour < float("inf"):
        raise ConfigError(f"--price-per-gpu-hour {args.price_per_gpu_hour:g}: must be more than 0")
    shape = inputs.StepShape(
        tensor_parallel=args.tensor_parallel,
        pipeline=args.pipeline,
        interleave=args.interleave,
        experts=args.expert_parallel,
        recompute=args.recompute,
        microbatches=1 if args.microbatches is None else args.microbatches,
    )
    if args.microbatches is not None and args.microbatches > MOST_MICROBATCHES:
        raise ConfigError(f"--microbatches {args.microbatches}: expected at most {MOST_MICROBATCHES}")
    if args.global_tokens is not None:
        _deal_global(args, shape)
    if args.microbatches is None:
        args.microbatches = 1
    shape = replace(shape, microbatches=args.microbatches)  # those in flight at once take memory
    given = inputs.read(args, shape, lengths)
    given = replace(given, assumed=_with_places(given, shape))
    for option, table in (("--costs", args.costs), ("--plan-costs", given.plan_costs)):
        if table is not None and args.tensor_parallel > 1:
            raise ConfigError(
                f"{option} {table} goes with --tensor-parallel 1: it was measured on one GPU, and a rank is "
                f"{args.tensor_parallel} of them"
            )
    _check_experts(args.expert_parallel, given)
    _expert_load(args, given.model)  # raises
    for choice in given.planners:
        _check_replicas(choice, given)
    return given


def _with_places(given: Inputs, shape: inputs.StepShape) -> str:
    """The assumptions, with the layers of the fullest stage where not all have as many."""
    model, chunks = given.model, shape.pipeline * shape.interleave
    places = inputs.in_stages(model, chunks).num_layers
    if places == model.num_layers:
        return given.assumed
    note = f"{model.num_layers} layers in {chunks} chunks of at most {places // chunks}, as if all were full"
    return f"{given.assumed}; {note}" if given.assumed else note


def _deal_global(args: argparse.Namespace, shape: inputs.StepShape) -> None:
    """Say by --tokens, --microbatches and --batches what --global-tokens says."""
    # The fewest microbatches that leave ranks `ROOM`, and `PER_STAGE` of them a pipeline stage.
    total: int = args.global_tokens
    inputs.check_positive(args, "global_tokens")
    if args.tokens is not None:
        raise ConfigError(f"--tokens {args.tokens} and --global-tokens {total} are both given; use one")
    if args.dataset is None:
        raise ConfigError(f"--global-tokens {total} goes with --dataset NAME, which is not given")
    if args.microbatches is None:
        cluster, model = inputs.machine(args, shape.tensor_parallel)
        least = 1 if shape.pipeline == 1 else PER_STAGE * shape.pipeline
        each = args.tokens_per_rank or replace(shape, microbatches=least).capacity(cluster, model)
        needed = max(least, ceil(ROOM * total / (each * cluster.num_ranks)))
        args.microbatches = min(total, -(-needed // shape.pipeline) * shape.pipeline)
    args.tokens = total // max(1, args.microbatches)
    args.batches = (1 if args.batches is None else args.batches) * args.microbatches


def _check_replicas(choice: PlannerChoice, given: Inputs) -> None:
    """Reject replicas of a size that was asked for and does not hold the longest sequence."""
    from megatron_balance.solvers.groups import check_context, least_context

    options = choice.options
    if not choice.planner.replicas or options.strategy is not None or (asked := options.context_parallel) is None:
        return
    check_context(asked, given.cluster)
    lengths = [batch.lengths for batch in given.batches]
    longest = max(length for each in lengths for length in each)
    if longest > asked * options.tokens_per_rank:
        size = least_context(lengths, given.cluster, options.tokens_per_rank)
        raise InfeasibleError(
            f"context_parallel {asked}: the longest sequence has {longest:,} tokens, and {asked} ranks of "
            f"{options.tokens_per_rank:,} tokens hold {asked * options.tokens_per_rank:,}; use {size}, the fewest "
            "that hold it, or leave it out"
        )


def bench(args: argparse.Namespace, given: Inputs) -> Bench:
    """The machine and the step that the options say."""
    from megatron_balance.analysis.machine import Machine
    from megatron_balance.simulator.report import Perturbation
    from megatron_balance.simulator.setup import Setup

    if args.microbatches < 1 or len(given.batches) % args.microbatches:
        raise ConfigError(
            f"--microbatches {args.microbatches}: {len(given.batches)} batches do not make whole steps of so many; "
            "give a divisor"
        )
    if args.draws is not None and not args.spread:
        raise ConfigError(f"--draws {args.draws} goes with --spread S, such as 0.1")
    setup = Setup(
        policy=args.policy or given.config.backward,
        recompute=args.recompute,
        pipeline=args.pipeline,
        interleave=args.interleave,
        experts=args.expert_parallel,
        expert_load=_expert_load(args, given.model),
        overlap_sync=not args.no_overlap_sync,
        engine=args.engine,
        transport=args.transport,
    )
    perturbation = Perturbation(args.spread, 20 if args.draws is None else args.draws, args.spread_seed)
    slow = _slowdown(args.slow, given.cluster.num_ranks)
    given_stages = args.pipeline * args.interleave
    machine = Machine(
        given.cluster, inputs.in_stages(given.model, given_stages), _cost(args, given, given.cluster), slow
    )
    return Bench(
        given,
        machine,
        setup,
        perturbation,
        args.microbatches,
        _pool(args, given, slow),
        *_mode_keys(args, given),
        price=args.price_per_gpu_hour,
    )


def _pool(args: argparse.Namespace, given: Inputs, slow: tuple[float, ...]) -> Machine:
    """The ranks of all pipeline stages, stage by stage; a slow rank is so in every stage."""
    from megatron_balance.analysis.machine import Machine

    cluster = replace(given.cluster, num_ranks=args.pipeline * given.cluster.num_ranks)
    model = inputs.in_stages(given.model, args.pipeline * args.interleave)
    return Machine(cluster, model, _cost(args, given, cluster), slow * args.pipeline)


def _mode_keys(args: argparse.Namespace, given: Inputs) -> tuple[PingPong, Stages]:
    """How training would run the plans, by the command line, else the configuration."""
    if not hasattr(args, "stages"):
        return False, "stages"
    if args.stages is not None and args.pipeline == 1:
        raise ConfigError(f"--stages {args.stages} goes with --pipeline P of several stages")
    ping_pong = given.config.ping_pong if args.ping_pong is None else PING_PONG[args.ping_pong]
    return ping_pong, given.config.pipeline if args.stages is None else args.stages


def _cost(args: argparse.Namespace, given: Inputs, cluster: Cluster) -> MachineCost:
    if args.costs is None:
        from megatron_balance.cost.analytic import AnalyticCost

        return AnalyticCost(cluster, given.model, given.tensor_parallel)
    from megatron_balance.cost.measured import MeasuredCost
    from megatron_balance.cost.table import load_table

    return MeasuredCost(load_table(args.costs), cluster, given.model)


def _slowdown(given: Sequence[str], num_ranks: int) -> tuple[float, ...]:
    factors = [1.0] * num_ranks
    for entry in given:
        rank, _, factor = entry.partition("=")
        if not rank.isdigit() or int(rank) >= num_ranks:
            raise ConfigError(
                f"--slow {entry}: expected RANK=FACTOR with a rank from 0 to {num_ranks - 1}, such as 3=1.5"
            )
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"--slow {entry}: expected RANK=FACTOR, such as 3=1.5") from None
        if not 0 < factors[int(rank)] < float("inf"):
            raise ConfigError(f"--slow {entry}: the factor must be more than 0")
    return tuple(factors) if given else ()


def _add_expert_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument(
        "--expert-parallel", type=int, default=1, metavar="E", help="ranks that share a layer's experts (default 1)"
    )
    parser.add_argument(
        "--expert-counts",
        metavar="N,N,...",
        help="tokens counted of each expert of a layer: the busiest rank of those that share them decides "
        "(default: as many of each)",
    )
    parser.add_argument(
        "--expert-spread",
        type=float,
        metavar="S",
        help="how unlike documents are to experts: deviation of an expert's share between documents, over its mean "
        "(default 0)",
    )


def _check_experts(ranks: int, given: Inputs) -> None:
    """Reject ranks that cannot share a layer's experts."""
    if ranks == 1:
        return
    model, cluster = given.model, given.cluster
    if not model.num_experts:
        raise ConfigError(f"--expert-parallel {ranks}: {model.name} has no experts; leave it out")
    here = min(ranks, cluster.node_size)
    if ranks < 1 or model.num_experts % ranks or cluster.num_ranks % ranks or ranks % here:
        raise ConfigError(
            f"--expert-parallel {ranks}: must divide the {model.num_experts} experts of {model.name} and the "
            f"{cluster.num_ranks} ranks, and fill nodes of {cluster.node_size} ranks if it is more than one"
        )


def _expert_load(args: argparse.Namespace, model: Model) -> ExpertLoad | None:
    """The routing to experts that the options say; None: they say nothing."""
    from megatron_balance.cost.experts import ExpertLoad

    counts, spread = args.expert_counts, args.expert_spread
    if counts is None and spread is None:
        return None
    given = f"--expert-counts {counts}" if counts is not None else f"--expert-spread {spread:g}"
    if args.expert_parallel == 1:
        raise ConfigError(f"{given} goes with --expert-parallel E: without, every rank has all experts")
    try:
        numbers = [float(word) for word in (counts or "").split(",") if counts]
    except ValueError as error:
        raise ConfigError(
            f"--expert-counts {counts}: expected numbers with commas between, such as 120,80,96"
        ) from error
    found = ExpertLoad.counted(numbers, spread or 0.0) if numbers else ExpertLoad(spread=spread or 0.0)
    found.of_documents(1, model)  # raises where they do not fit the model
    return found

"""The bench that `simulate`, `compare` and `report` share: options of the machine and of the step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_balance.cli import inputs
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.lab.bench import Bench, Inputs

if TYPE_CHECKING:
    from megatron_balance.cost.base import MachineCost
    from megatron_balance.cost.modules import ExpertLoad
    from megatron_balance.ir.cluster import Cluster
    from megatron_balance.ir.model import Model
    from megatron_balance.planning.choice import PingPong, PlannerChoice, Stages

PING_PONG: dict[str, PingPong] = {"auto": "auto", "true": True, "false": False}
# Of a step.
MOST_MICROBATCHES = 1 << 16
# Capacity of a rank over its mean tokens in a microbatch of --global-tokens, so that planners have
# a choice.
ROOM = 1.25
# Microbatches of a pipeline stage in a step of --global-tokens, at least: stages then wait for a
# quarter of what they work, at most.
PER_STAGE = 4


def add_options(parser: argparse.ArgumentParser, *, modes: bool = True) -> None:
    """`modes`: in which mode steps run may be asked, too."""
    add = parser.add_argument
    measured = "simulate with a cost table measured by 'profile' (default: data sheets)"
    add("--costs", type=Path, metavar="FILE", help=measured)
    slow = "a rank that computes FACTOR times slower; repeatable"
    add("--slow", action="append", default=[], metavar="RANK=FACTOR", help=slow)
    add("--spread", type=float, default=0.0, metavar="S", help="simulate machines whose times are off by exp(N(0, S))")
    add("--draws", type=int, default=None, metavar="N", help="with --spread: how many of them (default 20)")
    add("--spread-seed", type=int, metavar="S", help="with --spread: seed (default 0)")
    add(
        "--policy",
        choices=("auto", "keep", "replay"),
        help="hold received keys and values for the backward, bring them again, or hold them in as many layers as fit "
        "memory (default auto)",
    )
    add("--recompute", choices=("none", "full"), default="none", help="activation recomputation (default none)")
    add(
        "--microbatches",
        type=int,
        metavar="M",
        help="batches of a step (default 1; with --global-tokens: as many as the ranks need, and at least "
        f"{PER_STAGE} a pipeline stage)",
    )
    add(
        "--global-tokens",
        type=inputs.tokens,
        metavar="N",
        help="with --dataset: tokens of a step, in place of --tokens of each of its batches; --batches then counts "
        "steps",
    )
    add("--price-per-gpu-hour", type=float, metavar="P", help="also say what saved GPU-hours cost, in any currency")
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="GPUs of a tensor-parallel group, which is a rank then; --ranks and the cluster's files count GPUs "
        "(default 1)",
    )
    sharing = "ranks that share a layer's experts (default 1)"
    add("--expert-parallel", type=int, default=1, metavar="E", help=sharing)
    add(
        "--expert-counts",
        metavar="N,N,...",
        help="tokens counted of each expert of a layer: the busiest rank of those that share them decides "
        "(default: as many of each)",
    )
    add(
        "--expert-spread",
        type=float,
        metavar="S",
        help="how unlike documents are to experts: deviation of an expert's share between documents, over its mean "
        "(default 0)",
    )
    stages = "pipeline stages, each with the cluster's ranks (default 1)"
    add("--pipeline", type=int, default=1, metavar="P", help=stages)
    add("--interleave", type=int, default=1, metavar="V", help="model chunks of a pipeline stage (default 1)")
    add("--no-overlap-sync", action="store_true", help="synchronise gradients after the last backward")
    carriers = "what carries transfers: streams as NCCL's (default), or sockets as gloo's on CPUs"
    add("--transport", choices=("streams", "sockets"), default="streams", help=carriers)
    engines = "events: every transfer on its own; rounds: for many ranks"
    add("--engine", choices=("auto", "events", "rounds"), default="auto", help=engines)

    if not modes:
        return
    add(
        "--ping-pong",
        choices=tuple(PING_PONG),
        help="microbatches as two nano-batches interleaved, as the key ping_pong of a configuration "
        "(default auto: with planners made for it)",
    )
    add(
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
    if args.microbatches is not None and args.microbatches > MOST_MICROBATCHES:
        raise ConfigError(f"--microbatches {args.microbatches}: expected at most {MOST_MICROBATCHES}")
    degrees = (args.tensor_parallel, args.pipeline, args.interleave, args.expert_parallel)
    shape = inputs.StepShape(*degrees, args.recompute)
    if args.global_tokens is not None:
        _deal_global(args, shape)
    args.microbatches = 1 if args.microbatches is None else args.microbatches
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
    from megatron_balance.analysis.machine import Machine
    from megatron_balance.simulator.setup import Setup
    from megatron_balance.simulator.step import Perturbation

    if args.microbatches < 1 or len(given.batches) % args.microbatches:
        raise ConfigError(
            f"--microbatches {args.microbatches}: {len(given.batches)} batches do not make whole steps of so many; "
            "give a divisor"
        )
    inputs.check_beside(args, bool(args.spread), "--spread S", "draws", "spread_seed")
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
    perturbation = Perturbation(args.spread, 20 if args.draws is None else args.draws, args.spread_seed or 0)
    slow = _slowdown(args.slow, given.cluster.num_ranks)
    # The ranks of all pipeline stages, stage by stage; a slow rank is so in every stage.
    pool = replace(given.cluster, num_ranks=args.pipeline * given.cluster.num_ranks)
    model = inputs.in_stages(given.model, args.pipeline * args.interleave)
    return Bench(
        given,
        Machine(given.cluster, model, _cost(args, given, given.cluster), slow),
        setup,
        perturbation,
        args.microbatches,
        Machine(pool, model, _cost(args, given, pool), slow * args.pipeline),
        inputs.progress,
        *_mode_keys(args, given),
        price=args.price_per_gpu_hour,
    )


def _mode_keys(args: argparse.Namespace, given: Inputs) -> tuple[PingPong, Stages]:
    """How training would run the plans, by the command line, else the configuration."""
    if "stages" not in args:
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
            ranks = f"a rank from 0 to {num_ranks - 1}"
            raise ConfigError(f"--slow {entry}: expected RANK=FACTOR with {ranks}, such as 3=1.5")
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"--slow {entry}: expected RANK=FACTOR, such as 3=1.5") from None
        if not 0 < factors[int(rank)] < float("inf"):
            raise ConfigError(f"--slow {entry}: the factor must be more than 0")
    return tuple(factors) if given else ()


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
    from megatron_balance.cost.modules import ExpertLoad

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

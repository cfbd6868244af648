"""`megatron-balance strategies`: pipelines of unlike degrees that suit a data set (Hydraulis).

For several longest lengths the strategy that takes least time, by dispatch and packing of sampled
batches. `--out` writes a file for option `strategies` of planner hydraulis.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_balance.cli import inputs
from megatron_balance.config import DEFAULT_CLUSTER, DEFAULT_MODEL, load_scheme_table, names
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_balance.ir.cluster import Cluster
    from megatron_balance.planning.strategies import SampledStrategy

BATCHES, SAMPLE_BATCHES = 20, 50
# GPUs of a proposal: more is a typing error.
MOST_RANKS = 1 << 16
HELP = "pipelines of unlike degrees that suit a data set"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    whose = "whose lengths: a known distribution, or a file or folder"
    add("--dataset", metavar="NAME|PATH", required=True, help=whose)
    add("--tokens", type=inputs.tokens, metavar="N", required=True, help="tokens of a step")
    add("--seq-length", type=inputs.tokens, metavar="L", help="cut longer documents to L tokens (default: none)")
    add("--batches", type=int, metavar="K", default=BATCHES, help=f"steps to rank by (default {BATCHES})")
    add("--seed", type=int, metavar="S", default=0, help="seed of the steps (default 0)")
    inputs.add_machine_options(parser)
    parser.set_defaults(cluster=DEFAULT_CLUSTER, model=DEFAULT_MODEL, config=None)
    schemes = f"times and memory by scheme, in place of a model's: one of {', '.join(names('scheme'))}, or a YAML"
    add("--schemes", metavar="NAME|FILE", help=schemes)
    add("--out", type=Path, metavar="FILE", help="write the strategies here, one a line")
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from megatron_balance.planning.choice import planning_cost
    from megatron_balance.planning.strategies import PredictedCosts, TableCosts, propose, rank
    from megatron_balance.workloads.lengths import draw

    alone = inputs.check(args)
    inputs.check_positive(args, "tokens", "seq_length", "batches")
    inputs.check_folder(args)
    if args.out and args.out.is_dir():
        raise ConfigError(f"--out {args.out}: is a folder; name a file in it")
    for option, given in (("--plan-costs", args.plan_costs), ("--model", args.model != DEFAULT_MODEL)):
        if args.schemes and given:
            raise ConfigError(f"--schemes and {option} are both given; use one")
    cluster, model = inputs.machine(args, 1)
    if cluster.num_ranks > MOST_RANKS:
        raise ConfigError(f"--ranks {cluster.num_ranks}: more than {MOST_RANKS}; propose for a part of the GPUs")
    most = args.seq_length or args.tokens

    def drawn(count: int, seed: int) -> list[list[int]]:
        return [[min(length, most) for length in batch] for batch in draw(args.dataset, args.tokens, count, seed)]

    batches = drawn(args.batches, args.seed)
    # The proposal sees the data set, the ranking the steps: lengths of both must be held.
    sample = [length for batch in (*batches, *drawn(SAMPLE_BATCHES, args.seed + 1)) for length in batch]
    if args.schemes:
        costs = TableCosts(load_scheme_table(args.schemes))
    else:
        costs = PredictedCosts(planning_cost(cluster, model, args.plan_costs), cluster, model)
    proposed = propose(sample, args.tokens, costs, cluster.num_ranks)
    found = rank(proposed, batches, costs, cluster.num_ranks)
    if args.out:
        inputs.write(args.out, _file(found, args))
    if alone:
        return 0
    if args.json:
        rows = [
            {**asdict(each), "strategy": str(each.strategy), "seconds": each.seconds if each.held_batches else None}
            for each in found
        ]
        print(json_text({"num_ranks": cluster.num_ranks, "batches": args.batches, "strategies": rows}))
    else:
        _show(found, args, cluster)
    return 0


def _file(found: Sequence[SampledStrategy], args: argparse.Namespace) -> str:
    source = args.schemes or args.plan_costs or f"{args.model} on {args.cluster}"
    head = f"# For option `strategies` of hydraulis: {args.dataset}, {args.tokens} tokens a step, by {source}.\n"
    return head + "".join(f"{each.strategy}  # up to {each.max_tokens} tokens\n" for each in found)


def _show(found: Sequence[SampledStrategy], args: argparse.Namespace, cluster: Cluster) -> None:
    console = inputs.console()
    by = args.schemes or f"{args.model} on {args.cluster}"
    console.print(
        f"{cluster.num_ranks} GPUs, {by}; {args.dataset}, {args.batches} step{'s' * (args.batches != 1)} of "
        f"{args.tokens:,} tokens; seconds: mean of forward and backward of the steps that a strategy holds"
    )
    columns = ("strategy", "longest sequence", "seconds", "steps held", "best of")
    table = inputs.table(None, columns, ("strategy",), "fold")
    for each in found:
        seconds = f"{each.seconds:.3f}" if each.held_batches else "-"
        cells = (f"{each.max_tokens:,}", seconds, f"{each.held_batches}", f"{each.best_share:.0%}")
        table.add_row(str(each.strategy), *cells)
    console.print(table)

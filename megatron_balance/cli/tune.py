"""`megatron-balance tune`: thresholds for documents that wait, from a sample of lengths: imbalance
against delay.

With --dataset, documents are dealt whole into samples of --tokens, as training deals them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron_balance.cli import inputs
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text
from megatron_balance.planners import PLANNERS

if TYPE_CHECKING:
    from megatron_balance.ir.step import Lengths
    from megatron_balance.planners.base import Trial


HELP = "thresholds for documents that wait"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("tuned", metavar="PLANNER", help=f"one of {', '.join(_tunable())}")
    inputs.add_options(parser)
    add("--microbatches", type=int, default=4, metavar="M", help="batches of a step (default 4)")
    add("--tensor-parallel", type=int, default=1, metavar="T", help="GPUs of a rank; --ranks counts GPUs (default 1)")
    add("--most-delay", type=float, default=0.5, metavar="D", help="mean steps that a token may wait (default 0.5)")
    add("--queues", type=int, default=3, metavar="N", help="most queues (default 3)")
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from megatron_balance.planners.base import StepContext

    if args.planner:
        raise ConfigError(f"--planner {args.planner[0]}: name the one planner to tune right behind 'tune'")
    if args.tuned not in _tunable():
        raise ConfigError(f"tune: planner {args.tuned!r} has nothing to tune; these have: {', '.join(_tunable())}")
    if args.microbatches < 1 or args.tensor_parallel < 1 or args.most_delay < 0:
        raise ConfigError(
            f"--microbatches {args.microbatches} --tensor-parallel {args.tensor_parallel} --most-delay "
            f"{args.most_delay:g}: expected at least 1, 1 and 0"
        )
    args.planner = [args.tuned]
    given = inputs.read(args, inputs.StepShape(tensor_parallel=args.tensor_parallel))
    (choice,) = given.planners
    assert choice.planner.tune is not None
    samples = [batch.lengths for batch in given.batches]
    if args.dataset is not None and args.tokens is not None:
        samples = _dealt_whole(args.dataset, args.tokens, len(samples), args.seed or 0)
    steps: list[Lengths] = [
        tuple(samples[at : at + args.microbatches])
        for at in range(0, len(samples) - args.microbatches + 1, args.microbatches)
    ]
    context = StepContext(given.cluster, given.model, given.planning_cost(), options=choice.options)
    trials = choice.planner.tune(steps, context, args.most_delay, args.queues)
    chosen = next(trial.thresholds for trial in trials if trial.chosen)
    if args.json:
        found = {"planner": choice.name, "steps": len(steps), "thresholds": chosen}
        print(json_text({**found, "trials": [asdict(trial) for trial in trials]}))
    else:
        _show(trials, len(steps))
        inputs.console().print(
            f"planner: {{thresholds: [{', '.join(map(str, chosen))}]}} has the fewest queues near the least imbalance "
            f"with a delay of at most {args.most_delay:g}"
        )
    return 0


def _tunable() -> list[str]:
    return [name for name, planner in PLANNERS.items() if planner.tune is not None]


def _dealt_whole(dataset: str, tokens: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Documents dealt whole into samples of at most `tokens`, as many as `count` full samples have."""
    # Where each batch is drawn for itself, the document that fills it is cut, often a long one.
    import numpy as np

    from megatron_balance.workloads.documents import pack
    from megatron_balance.workloads.lengths import draw

    (drawn,) = draw(dataset, count * tokens, 1, seed)
    documents = [min(length, tokens) for length in drawn]
    bounds = pack(np.array(documents, dtype=np.int64), tokens).tolist()
    return [tuple(documents[begin:end]) for begin, end in pairwise(bounds)]


def _show(trials: "Sequence[Trial]", num_steps: int) -> None:
    columns = ("queues", "thresholds", "imbalance", "delay, steps a token", "tokens delayed", "")
    title = f"{num_steps} steps; less imbalance for more delay"
    table = inputs.table(title, columns, ("thresholds", ""))
    for trial in trials:
        table.add_row(
            str(len(trial.thresholds)),
            ", ".join(map(str, trial.thresholds)) or "-",
            f"{trial.imbalance:.3f}",
            f"{trial.delay:.3f}",
            f"{trial.delayed:.1%}",
            "chosen" if trial.chosen else "",
        )
    inputs.console().print(table)

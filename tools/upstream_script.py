"""Megatron's own pretrain_gpt.py, unmodified: its losses alone on one rank, and under our launcher.

    python -m tools.upstream_script SCRIPT [--megatron PATH] [--planners zeppelin te_ring]
        [--ranks 2] [--context 1]

SCRIPT: `pretrain_gpt.py` of a checkout of Megatron-LM, beside the `gpt_builders.py` and
`model_provider.py` that it imports. PATH: that checkout, or the folder of `pip install --target PATH
--no-deps megatron-core==VERSION`; without it, the Megatron that is installed. Trains a small GPT on
CPUs on a weighted blend of two corpora, cut at documents (`--reset-position-ids`,
`--reset-attention-mask`, `--eod-mask-loss`), evaluated as it trains, with `data: script`. Prints a
line for each planner: the largest relative difference of a step's loss, and of an evaluation's.
Megatron prints seven digits. Exit code 1 if one is above 1e-6.

The ranks are replicas, with `--context` ranks each. A script that builds its layers itself (0.18.2)
needs Transformer Engine for more than one.

A checkout needs its compiled data set helpers: `make -C PATH/megatron/core/datasets`, with pybind11.
Its folder `tests` would hide ours: remove it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_balance.workloads.idx import CorpusWriter
from tests.megatron.conftest import DOCUMENT_LENGTHS, MODEL, RUN, VOCABULARY
from tests.support.megatron_run import Entry, Job, Result, Trainer
from tools.megatron_flags import LOCAL_LAYERS, command_line

TOLERANCE = 1e-6
STEPS = 6
FLAGS: dict[str, Any] = {
    "reset-position-ids": True,
    "reset-attention-mask": True,
    "eod-mask-loss": True,
    "split": "80,20,0",
    "train-iters": STEPS,
    "global-batch-size": 4,
    "eval-iters": 2,
    "eval-interval": 2,
}
ALONE: dict[str, Any] = {**LOCAL_LAYERS, "distributed-backend": "gloo", "balance-device": False}
"""Flags that `--balance-device cpu` sets, for a script that does not know it."""
TRAINED = re.compile(r"iteration +\d+/.*lm loss: (\S+)")
EVALUATED = re.compile(r"validation loss at iteration [^|]*\| lm loss value: (\S+)")


def write_corpora(folder: Path) -> list[Any]:
    """Two corpora whose documents end with the tokenizer's last id; words of a weighted blend."""
    for name, seed in (("first", 1), ("second", 2)):
        generator = np.random.default_rng(seed)
        with CorpusWriter(folder / name, "uint16") as writer:
            for length in itertools.islice(itertools.cycle(DOCUMENT_LENGTHS[::seed]), 200):
                tokens = generator.integers(0, VOCABULARY - 1, length + 1)
                tokens[-1] = VOCABULARY - 1
                writer.add_document(tokens.astype(np.uint16))
    return [0.7, folder / "first", 0.3, folder / "second"]


class Script:
    """Runs of one script, in one folder."""

    def __init__(self, script: Path, megatron: Path | None, folder: Path) -> None:
        self.trainer = Trainer(path=[] if megatron is None else [str(megatron)])
        self.script, self.folder = script, folder
        self.flags = {**FLAGS, "data-path": write_corpora(folder), "data-cache-path": folder / "cache"}

    def run(self, name: str, entry: Entry, num_ranks: int, flags: dict[str, Any]) -> Result:
        """The result of a run that did not fail.

        Raises:
            RuntimeError: it failed; the end of the first failing rank's log.
        """
        folder = self.folder / name
        folder.mkdir()
        argv = (str(self.script), *command_line(MODEL, RUN, self.flags, flags))
        beside = (str(self.script.parent),)
        result = self.trainer.run(Job(entry, num_ranks, argv, str(folder), deadline_s=600, path=beside))
        if result.failed is not None:
            raise RuntimeError(result.tail(result.failed))
        return result

    def losses(self, planner: str, num_ranks: int, context: int) -> tuple[list[float], list[float]]:
        """Losses of steps (from the log of steps) and of evaluations, under a planner."""
        keys = {"planner": {"name": planner}, "data": "script", "plan_ahead": False}
        config, log = self.folder / f"{planner}.yaml", self.folder / f"{planner}.log"
        config.write_text(yaml.safe_dump(keys))
        ours = {"balance-config": config, "balance-log": log, "context-parallel-size": context}
        result = self.run(planner, "launch", num_ranks, ours)
        steps = map(json.loads, (log / "steps.jsonl").read_text().splitlines())
        return [step["loss"] for step in steps], found(EVALUATED, result, num_ranks - 1)


def found(pattern: re.Pattern[str], result: Result, rank: int) -> list[float]:
    """The losses that a rank printed."""
    return [float(value) for value in pattern.findall(result.log(rank))]


def as_printed(losses: list[float]) -> list[float]:
    """Losses as Megatron prints them: its second line is the mean of the first two steps."""
    return [losses[0], (losses[0] + losses[1]) / 2, *losses[2:]]


def worst(got: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    assert wanted, "no loss was printed"
    return max(abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True))


def report(script: Script, planners: list[str], num_ranks: int, context: int) -> bool:
    """Print a line for each planner; whether all are as near as they should be."""
    alone = script.run("alone", "plain", 1, ALONE)
    steps, evaluations = found(TRAINED, alone, 0), found(EVALUATED, alone, 0)
    good = True
    for planner in planners:
        losses, evaluated = script.losses(planner, num_ranks, context)
        trained, held_out = worst(as_printed(losses), steps), worst(evaluated, evaluations)
        print(
            f"{planner:12} {num_ranks} ranks: {len(steps)} steps {trained:.1e}, {len(evaluations)} evaluations "
            f"{held_out:.1e}",
            flush=True,
        )
        good = good and max(trained, held_out) <= TOLERANCE
    return good


def main() -> int:
    """Print the lines of one script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--planners", nargs="+", default=["zeppelin", "te_ring"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=int, default=1)
    args = parser.parse_args()
    if not args.script.is_file():
        parser.error(f"{args.script}: expected pretrain_gpt.py of a checkout of Megatron-LM")
    with tempfile.TemporaryDirectory() as folder:
        megatron = args.megatron.resolve() if args.megatron else None
        script = Script(args.script.resolve(), megatron, Path(folder))
        try:
            return 0 if report(script, args.planners, args.ranks, args.context) else 1
        finally:
            script.trainer.close()


if __name__ == "__main__":
    sys.exit(main())

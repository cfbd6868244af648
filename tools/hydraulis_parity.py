"""Train under planner hydraulis in the layouts of docs/hydraulis.md, and compare with one rank.

    python -m tools.hydraulis_parity                 # all layouts, some minutes
    python -m tools.hydraulis_parity --steps 5 --ways "PP2 x DP4"

Real Megatron on the CPU. Largest differences over the steps, relative: of the loss, of the gradient
norm, and of every parameter's gradient, to its largest element (where the distributed optimizer leaves
a rank a part of each gradient, the norm alone); and how many steps ran unequal numbers of
microbatches, or had a pipeline without sequences. The suite runs two short ones
(tests/megatron/test_hydraulis.py).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.megatron.conftest import Run, at_once, started, train_with, write_corpus
from tests.megatron.test_hydraulis import CONFIG, LENGTHS, LONG
from tests.support.megatron_run import Trainer
from tests.support.pipeline_runs import worst_gradient

MOST = 1e-5
WAYS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "DP8": (8, {}),
    "TP2 x DP4": (8, {"tensor-model-parallel-size": 2, "sequence-parallel": True}),
    "PP2 x DP4": (8, {"pipeline-model-parallel-size": 2}),
    "CP2 x PP2 x DP2": (8, {"pipeline-model-parallel-size": 2, "context-parallel-size": 2}),
    "CP2 x DP2, distributed optimizer, overlapped": (
        4,
        {
            "context-parallel-size": 2,
            "use-distributed-optimizer": True,
            "overlap-grad-reduce": True,
            "overlap-param-gather": True,
        },
    ),
}
"""By name, ranks and flags."""


class Folders:
    """Temporary folders under one, as the fixtures of the tests ask for them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def mktemp(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=name, dir=self.root))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ways; 0 if all agree with one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--within", nargs="+", default=["te_ring", "zeppelin"])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)
    table = Table(
        "layout", "within", "loss", "gradient norm", "gradients", "unequal steps", "steps with an empty pipeline", "s"
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as root:
        folders: Any = Folders(Path(root))
        corpus = write_corpus(
            folders.mktemp("corpus") / "documents", list(itertools.islice(itertools.cycle(LENGTHS), 600))
        )
        trainer = Trainer()
        try:
            train = train_with(trainer, corpus, folders)
            flags = {**LONG, "num-layers": 2, "global-batch-size": 16, "train-iters": options.steps}
            loaded = started(train, folders.mktemp("checkpoint"), flags)
            one = train(1, "te_ring", at_once(loaded), entry="gaps", deadline_s=600)
            for way in options.ways:
                ranks, parallel = WAYS[way]
                for within in options.within:
                    planner = {"name": "hydraulis", "within": within}
                    given = {**loaded, "context-parallel-size": 1, **parallel}
                    run = train(ranks, planner, given, config=CONFIG, entry="gaps", deadline_s=600)
                    differences = [difference(run, one, name) for name in ("loss", "grad_norm")]
                    if "use-distributed-optimizer" not in parallel:
                        steps = run.column("step")
                        differences.append(max(worst_gradient(run.result.logs, one.result.logs, n) for n in steps))
                    worst = max(worst, *differences)
                    shown = [f"{each:.1e}" for each in differences]
                    row = (way, within, *shown, *["-"] * (3 - len(shown)), *_counted(run))
                    table.add_row(*row)
                    Console(stderr=True).print(*row)
        finally:
            trainer.close()
    Console().print(table)
    return 0 if worst <= MOST else 1


def difference(run: Run, one: Run, name: str) -> float:
    """The largest difference of a column from one rank's, relative."""
    assert run.column("step") == one.column("step"), "the runs have other steps"
    pairs = zip(run.column(name), one.column(name), strict=True)
    return max(abs(got - wanted) / abs(wanted) for got, wanted in pairs)


def _counted(run: Run) -> list[str]:
    numbers = run.column("pipelines")
    unequal = sum(len(set(each)) > 1 for each in numbers)
    empty = sum(step["num_sequences"] < len(step["pipelines"]) for step in run.steps)
    return [str(unequal), str(empty), f"{run.result.seconds:.0f}"]


if __name__ == "__main__":
    sys.exit(main())

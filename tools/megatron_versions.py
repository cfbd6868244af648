"""Parity of training on another Megatron: planners x layouts on CPU against one rank, same weights.

    python -m tools.megatron_versions PATH [--planners zeppelin te_ring] [--layouts dp cp tp pp ep]

PATH: a checkout of Megatron-LM, or the folder of `pip install --target PATH --no-deps
megatron-core==VERSION`. Prints one line a cell: the largest difference of a step's loss and gradient
norm, relative, and what the patches said of the version's sources. `--accept` accepts sources that
nobody reviewed, for this run only. Exit code 1 if a cell fails or differs by more than 1e-5.

Experts are compared with two ranks that hold all of them: 0.18 weakens the routers' losses by the
number of context-parallel ranks, which is its own and stays. A checkout needs its compiled data set
helpers: `make -C PATH/megatron/core/datasets`, with pybind11.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.megatron.conftest import DOCUMENT_LENGTHS, EXPERTS, MODEL, RUN, Run, write_corpus
from tests.support.megatron_run import Job, Trainer
from tools.megatron_flags import command_line

TOLERANCE = 1e-5
STEPS = 4
CORPUS_ROUNDS = 40
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"context-parallel-size": 1},
    "cp": {"context-parallel-size": 2},
    "tp": {"context-parallel-size": 1, "tensor-model-parallel-size": 2, "sequence-parallel": True},
    "pp": {"context-parallel-size": 1, "pipeline-model-parallel-size": 2},
    "ep": {"context-parallel-size": 2, "expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1},
}
SOURCES = re.compile(r"accepted_sources: (\{.*\})")


class Version:
    """Runs on one Megatron, in one folder."""

    def __init__(self, path: Path, folder: Path, *, accept: bool) -> None:
        self.trainer = Trainer(path=[str(path)])
        self.folder, self.accept = folder, accept
        self.accepted: dict[str, str] = {}
        self.corpus = write_corpus(folder / "documents", list(DOCUMENT_LENGTHS) * CORPUS_ROUNDS)

    def train(self, name: str, num_ranks: int, planner: str, flags: dict[str, Any]) -> Run:
        """A run of some steps; again, with the sources accepted that stopped it, if that is asked for.

        Raises:
            RuntimeError: it failed; the end of the first failing rank's log.
        """
        folder = self.folder / name
        folder.mkdir()
        config = {"planner": {"name": planner}, "plan_ahead": False, "accepted_sources": self.accepted}
        (folder / "balance.yaml").write_text(yaml.safe_dump(config))
        ours = {"balance-config": folder / "balance.yaml", "balance-log": folder / "log"}
        argv = command_line(MODEL, RUN, {"data-path": self.corpus, "train-iters": STEPS}, ours, flags)
        result = self.trainer.run(Job("pretrain_gpt", num_ranks, tuple(argv), str(folder)))
        if result.failed is not None:
            told = result.tail(result.failed)
            asked = SOURCES.search(told)
            if asked is None or not self.accept:
                raise RuntimeError(told)
            self.accepted |= json.loads(asked.group(1))
            return self.train(f"{name}+", num_ranks, planner, flags)
        return Run(result, tuple(map(json.loads, (folder / "log" / "steps.jsonl").read_text().splitlines())))


def differs(run: Run, reference: Run) -> float:
    """The largest relative difference of a loss or gradient norm over the steps."""
    pairs = [
        (got, wanted)
        for name in ("loss", "grad_norm")
        for got, wanted in zip(run.column(name), reference.column(name), strict=True)
    ]
    return max(abs(got - wanted) / abs(wanted) for got, wanted in pairs)


def table(version: Version, planners: list[str], layouts: list[str]) -> int:
    """Print the table; the number of cells that are not as they should be."""
    bad = 0
    references: dict[bool, tuple[Run, dict[str, Any]]] = {}
    for layout in layouts:
        experts = layout == "ep"
        model = EXPERTS if experts else {}
        if experts not in references:
            weights = version.folder / f"weights{int(experts)}"
            saved = {**model, "ckpt-format": "torch_dist", "micro-batch-size": RUN["global-batch-size"]}
            saving = {**saved, "save": weights, "save-interval": 1000, "train-iters": 1, "context-parallel-size": 1}
            version.train(f"save{int(experts)}", 1, "te_ring", saving)
            load = {**model, "ckpt-format": "torch_dist", "load": weights, "finetune": True}
            load |= {"no-load-optim": True, "no-load-rng": True}
            num_ranks = 2 if experts else 1
            alike = {**load, "context-parallel-size": num_ranks}
            one = version.train(f"one{int(experts)}", num_ranks, "te_ring", alike)
            references[experts] = one, load
        reference, load = references[experts]
        for planner in planners:
            try:
                run = version.train(f"{planner}-{layout}", 2, planner, {**load, **LAYOUTS[layout]})
                worst = differs(run, reference)
                told = f"{worst:.1e}"
                bad += worst > TOLERANCE
            except RuntimeError as error:
                bad += 1
                told = "failed: " + next(
                    (line for line in str(error).splitlines()[::-1] if line.startswith("error") or "Error" in line), ""
                )
            print(f"{planner:12} {layout:4} {told}", flush=True)
    for target, digest in version.accepted.items():
        print(f"accepted without review: {target} {digest}")
    return bad


def main() -> int:
    """Run the table for one Megatron."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--planners", nargs="+", default=["zeppelin", "te_ring", "distca"])
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--accept", action="store_true", help="accept sources that nobody reviewed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        version = Version(args.path.resolve(), Path(folder), accept=args.accept)
        try:
            return 1 if table(version, args.planners, args.layouts) else 0
        finally:
            version.trainer.close()


if __name__ == "__main__":
    sys.exit(main())

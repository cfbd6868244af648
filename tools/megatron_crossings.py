"""Parity of models that cross what planners and Megatron were tried with one by one, on CPUs.

    python -m tools.megatron_crossings [--models mla mla-window] [--planners te_ring ulysses]

A cell is a run of two steps on four ranks, beside one of the same model, weights and micro batches
where nothing is cut: one rank, or two tensor-parallel ones. A number is the largest difference of a
gradient of any parameter at the first step, relative to that parameter's largest; losses and
gradient norms of both steps are held to the same limit. Exit code 1 if one is above 1e-5.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_balance.planners import PLANNERS
from tests.megatron.conftest import (
    DOCUMENT_LENGTHS,
    EXPERTS,
    NUM_DOCUMENTS,
    Run,
    Train,
    started,
    train_with,
    write_corpus,
)
from tests.megatron.test_mla import FLAGS as MLA
from tests.megatron.test_parity import options_of, two_nodes
from tests.support.megatron_run import Result, Trainer
from tests.support.pipeline_runs import gradients
from tools.megatron_versions import REFUSED, SAID, RefusedError, differs

TOLERANCE = 1e-5
TP = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
MTP = {"mtp-num-layers": 2, "mtp-loss-scaling-factor": 0.5, "train-iters": 2}
WINDOW = {"window-size": "23,0"}
SOME_WINDOWS = {**WINDOW, "window-attn-skip-freq": 2}
SINKS = {"num-query-groups": 1, "softmax-type": "learnable", "train-iters": 2}
BY_SAMPLE = {**EXPERTS, "moe-router-load-balancing-type": "seq_aux_loss", "moe-aux-loss-coeff": 0.1, "train-iters": 2}
LATENT = {"latent_kv": True}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mla": ("MLA, 6 heads", MLA, {}),
    "mla-latent": ("the same, latents travel", MLA, LATENT),
    "mla-tp": ("MLA, 6 heads, TP 2", {**MLA, **TP}, {}),
    "mla-window": ("MLA, window in some layers", {**MLA, **SOME_WINDOWS}, {}),
    "mla-window-latent": ("the same, latents travel", {**MLA, **SOME_WINDOWS}, LATENT),
    "mla-mtp": ("MLA, MTP", {**MLA, **MTP}, {}),
    "mla-mtp-latent": ("the same, latents travel", {**MLA, **MTP}, LATENT),
    "mla-sinks": ("MLA, sinks", {**MLA, "softmax-type": "learnable"}, {}),
    "mtp-window": ("MTP, window", {**MTP, **WINDOW}, {}),
    "sinks": ("sinks, GQA 8:1", SINKS, {}),
    "sinks-tp": ("sinks, GQA 8:1, TP 2", {**SINKS, "num-query-groups": 2, "num-attention-heads": 16, **TP}, {}),
    "by-sample-tp": ("seq_aux_loss, TP 2", {**BY_SAMPLE, **TP}, {}),
}
"""By name: its title, flags, and keys of the configuration."""


class Folders:
    """Folders below one, as pytest's factory makes them."""

    def __init__(self, root: Path) -> None:
        """Make them below `root`."""
        self._root = root

    def mktemp(self, name: str) -> Path:
        """A new folder whose name begins with `name`."""
        return Path(tempfile.mkdtemp(prefix=name, dir=self._root))


def trained(result: Result) -> None:
    """Check that a run trained.

    Raises:
        RefusedError: our checks refuse it.
        RuntimeError: it failed; the end of its log.
    """
    if result.failed is None:
        return
    said = SAID.findall(result.log(result.failed))
    if result.codes[result.failed] == REFUSED and said:
        raise RefusedError(said[-1])
    raise RuntimeError(result.tail(result.failed))


class Crossings:
    """Runs of models and what each is compared with."""

    def __init__(self, train: Train, folders: Folders) -> None:
        """Train by `train`."""
        self._train, self._folders = train, folders
        self._uncut: dict[str, tuple[dict[str, Any], Run]] = {}

    def uncut(self, model: str) -> tuple[dict[str, Any], Run]:
        """Flags that begin from the model's weights, and the run where nothing is cut."""
        if model not in self._uncut:
            flags = MODELS[model][1]
            whole = {name: value for name, value in flags.items() if name not in TP}
            load = started(self._train, self._folders.mktemp("checkpoint"), whole)
            flags = {**load, **flags}
            ranks = flags.get("tensor-model-parallel-size", 1)
            run = self._train(ranks, "te_ring", {**flags, "context-parallel-size": 1}, entry="gaps")
            self._uncut[model] = flags, run
        return self._uncut[model]

    def cell(self, model: str, planner: str) -> float:
        """The largest difference of a gradient at the first step, or of a loss or norm if that is
        above the tolerance.

        Raises:
            RefusedError: our checks refuse it.
            RuntimeError: it failed; the end of its log.
        """
        flags, whole = self.uncut(model)
        context = 4 // flags.get("tensor-model-parallel-size", 1)
        config = {**two_nodes(4), "remap": planner == "zeppelin", **MODELS[model][2]}
        flags = {**flags, "context-parallel-size": context}
        run = self._train(4, options_of(planner), flags, config=config, entry="gaps", expect=trained)
        wanted, found = gradients(whole.result.logs, 1), gradients(run.result.logs, 1)
        worst = max(
            float(abs(got - all_of_it[0]).max() / abs(all_of_it[0]).max())
            for name, all_of_it in wanted.items()
            for got in found[name]
        )
        of_steps = differs(run, whole)
        return worst if of_steps <= TOLERANCE else max(worst, of_steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cells, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    some = ["te_ring", "zeppelin", "ulysses", "distca"]
    parser.add_argument("--planners", nargs="+", choices=tuple(PLANNERS), default=some)
    args = parser.parse_args(argv)
    print(f"| model | {' | '.join(args.planners)} |\n|---|{'---|' * len(args.planners)}")
    worst, refused = 0.0, list[str]()
    with tempfile.TemporaryDirectory() as name, contextlib.closing(Trainer()) as trainer:
        folders: Any = Folders(Path(name))
        lengths = list(itertools.islice(itertools.cycle(DOCUMENT_LENGTHS), NUM_DOCUMENTS))
        crossings = Crossings(train_with(trainer, write_corpus(Path(name) / "documents", lengths), folders), folders)
        for model in args.models:
            row: list[str] = []
            for planner in args.planners:
                try:
                    found = crossings.cell(model, planner)
                    worst = max(worst, found)
                    row.append(f"{found:.1e}")
                except RefusedError as error:
                    refused.append(f"- {MODELS[model][0]}, {planner}: {error}")
                    row.append("refused")
                print(model, planner, row[-1], file=sys.stderr, flush=True)
            print(f"| {MODELS[model][0]} | {' | '.join(row)} |", flush=True)
    print("\n".join(refused))
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

"""Train under planner hydraulis with candidates, and compare with one rank: real Megatron on 8 gloo
ranks, another strategy whenever the planner chooses one.

    python -m tools.hydraulis_running                     # 50 steps twice, some minutes
    python -m tools.hydraulis_running --ways "PP2 x DP4, tied" --steps 10

For every way: how often the strategy changed, how many steps each ran, the largest differences of
loss and gradient norm from one rank's, relative, and of any parameter's gradient, to its largest
element: in the first step under each candidate alone, and in any step, where weights differ by
rounding already. The first way runs twice, and must have the same bits. The suite has a short form
(tests/megatron/test_changes.py).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.megatron.conftest import Run, at_once, started, train_with, write_corpus
from tests.megatron.test_changes import LONG, SAMPLES, changes_of
from tests.megatron.test_parity import SLOW
from tests.support.megatron_run import Trainer
from tests.support.pipeline_runs import worst_gradient
from tools.hydraulis_parity import Folders, difference

MOST = 1e-5
LENGTHS = (*[1000] * 3, *[60] * 25, *[250] * 6, *[20] * 60)
"""Of documents, in a shuffled order: some steps have long ones."""
CONFIG = {"cluster": {"ranks_per_node": 8, "num_sms": 0, **SLOW, "intra_bytes_per_s": 1.5e6}}
"""Links so slow that tensor parallelism does not always pay."""
MIXED = (
    "2*tp1-pp2-cp1+tp2-pp1-cp2",
    "tp4-pp1-cp1+tp2-pp1-cp1+2*tp1-pp1-cp1",
    "tp1-pp1-cp4+2*tp1-pp2-cp1",
    "2*tp2-pp2-cp1",
)
"""The last one is the base layout of the first way."""


@dataclass(frozen=True)
class Way:
    """A base layout and its candidates. `planner`: more of the planner's options."""

    flags: Mapping[str, Any]
    strategies: tuple[str, ...]
    planner: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    """Flags of one rank, too."""
    layout: str = ""
    """The base layout, if it is a candidate."""


SEQUENCE_PARALLEL = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
SHORTER = {"seq-length": 512, "max-position-embeddings": 512, "global-batch-size": 8}
ZEPPELIN = {"within": "zeppelin", "within_options": {}}
WAYS: Mapping[str, Way] = {
    "TP2 x PP2 x DP2": Way({**SEQUENCE_PARALLEL, "pipeline-model-parallel-size": 2}, MIXED, ZEPPELIN, layout=MIXED[-1]),
    "TP2 x DP4, TP 3 and CP 5, ranks left over": Way(
        SEQUENCE_PARALLEL,
        ("tp3-pp1-cp1+tp1-pp1-cp5", "tp1-pp1-cp5+tp3-pp1-cp1", "tp3-pp2-cp1", "tp1-pp1-cp5+tp1-pp1-cp2"),
        {},
        {
            "num-attention-heads": 12,
            "num-query-groups": 12,
            "hidden-size": 48,
            "ffn-hidden-size": 96,
            "make-vocab-size-divisible-by": 48,
            **SHORTER,
        },
    ),
    "PP2 x DP4, tied": Way(
        {"pipeline-model-parallel-size": 2},
        ("2*tp1-pp2-cp1+tp2-pp1-cp2", "tp4-pp1-cp2", "tp2-pp2-cp2"),
        ZEPPELIN,
        {"untie-embeddings-and-output-weights": False, **SHORTER},
    ),
    "TP2 x DP4, in buckets": Way(
        {**SEQUENCE_PARALLEL, "overlap-grad-reduce": True, "ddp-bucket-size": 5000},
        ("4*tp2-pp1-cp1", "tp1-pp1-cp8"),
        {"overlap": False},
        SHORTER,
        "4*tp2-pp1-cp1",
    ),
    "DP8": Way({}, ("8*tp1-pp1-cp1", "tp1-pp1-cp8", "tp4-pp1-cp1+4*tp1-pp1-cp1"), {}, SHORTER, "8*tp1-pp1-cp1"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ways; 0 if all agree with one rank, and the first one's runs with each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(argv)
    console, failed = Console(width=160), False
    with tempfile.TemporaryDirectory() as root:
        folders: Any = Folders(Path(root))
        corpus = write_corpus(
            folders.mktemp("corpus") / "documents", list(itertools.islice(itertools.cycle(LENGTHS), 4000))
        )
        trainer = Trainer()
        try:
            train = train_with(trainer, corpus, folders)
            for number, name in enumerate(options.ways):
                way = WAYS[name]
                flags = {
                    **LONG,
                    "num-layers": 2,
                    "global-batch-size": SAMPLES,
                    "train-iters": options.steps,
                    **way.model,
                }
                loaded = started(train, folders.mktemp("checkpoint"), flags)
                one = train(1, "te_ring", at_once(loaded), entry="gradients", deadline_s=600)
                planner = {
                    "name": "hydraulis",
                    "tokens_per_rank": flags["seq-length"] // 4,
                    "microbatch_s": 1e-3,
                    **way.planner,
                }
                given = {**loaded, "context-parallel-size": 1, "use-distributed-optimizer": True, **way.flags}
                runs = [
                    train(
                        8,
                        {**planner, "strategies": list(way.strategies)},
                        given,
                        config=CONFIG,
                        entry=entry,
                        deadline_s=900,
                    )
                    for entry in ("gradients", *["pretrain_gpt"] * (number == 0))
                ]
                each = [
                    train(
                        8,
                        {**planner, "strategies": [strategy], "tokens_per_rank": flags["seq-length"]},
                        {**given, "train-iters": 1},
                        config=CONFIG,
                        entry="gradients",
                    )
                    for strategy in way.strategies
                    if strategy != way.layout
                ]
                failed |= not _told(console, name, runs, each, one)
        finally:
            trainer.close()
    return int(failed)


def _told(console: Console, name: str, runs: Sequence[Run], each: Sequence[Run], one: Run) -> bool:
    """Print what a way showed; whether it agrees. `each`: the first step, under one candidate each."""
    run = runs[0]
    used = Counter(run.column("strategy"))
    table = Table("strategy", "steps", "pull, MB", "push, MB", "pull, ms", "push, ms", title=name)
    for strategy, steps in sorted(used.items()):
        figures = [step["change"] for step in run.steps if step["strategy"] == strategy and step["change"]]
        moved = [
            f"{factor * sum(each[key] for each in figures) / len(figures):.2f}" if figures else "-"
            for key, factor in (("pull_bytes", 1e-6), ("push_bytes", 1e-6), ("pull_s", 1e3), ("push_s", 1e3))
        ]
        table.add_row(strategy, str(steps), *moved)
    console.print(table)
    loss, norm = (difference(run, one, of) for of in ("loss", "grad_norm"))
    gradient = max(worst_gradient(alone.result.logs, one.result.logs, 1) for alone in each)
    later = max(worst_gradient(run.result.logs, one.result.logs, step) for step in run.column("step"))
    same = all(again.column(of) == run.column(of) for again in runs[1:] for of in ("loss", "grad_norm", "fingerprint"))
    changes, seconds = changes_of(run), ", ".join(f"{each.result.seconds:.0f}" for each in runs)
    bits = "" if len(runs) == 1 else f", two runs {'are' if same else 'are NOT'} equal bit for bit"
    console.print(
        f"{len(run.steps)} steps, {changes} changes; largest differences: loss {loss:.1e}, gradient norm {norm:.1e}, "
        f"gradients from one checkpoint, by candidate, {gradient:.1e}, in any step {later:.1e}{bits}; {seconds} s"
    )
    return same and max(loss, norm, gradient) <= MOST


if __name__ == "__main__":
    sys.exit(main())

"""Train under planner hydraulis with candidates, and compare with one rank: real Megatron on 8 gloo
ranks, another strategy whenever the planner chooses one.

    python -m tools.hydraulis_running                     # 50 steps twice, some minutes
    python -m tools.hydraulis_running --ways "PP2 x DP4, tied" --steps 10

In bf16 products round, so that another layout has other digits. The yardstick there is what that makes
of Megatron's own model on the base layout, without candidates and without the distributed optimizer,
beside one rank. Candidates may differ from one rank by twice as much in each figure.

For every way: how often the strategy changed, how many steps each ran, the largest differences of
loss and gradient norm from one rank's, relative, and of any parameter's gradient, to its largest
element: in the first step under each candidate alone; in any step, where weights differ by rounding
already, which Adam makes much of; and in the worst of these when one rank goes on from the weights
that the run itself had before it. The first way runs twice, and must have the same bits. The suite
has a short form (tests/megatron/test_changes.py).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.megatron.conftest import Run, Train, at_once, started, train_with, write_corpus
from tests.megatron.test_changes import GOING_ON, LONG, SAMPLES, changes_of
from tests.megatron.test_parity import SLOW
from tests.support.megatron_run import Trainer
from tests.support.pipeline_runs import worst_gradient

MOST = 1e-5
DEADLINE_S = 1800
ALL_KINDS = (*[1000] * 2, *[500] * 4, *[400] * 4, *[250] * 7, *[20] * 6)
"""Of documents, in a shuffled order. Each of `MIXED` is the best for some steps: with one or two long
documents, with some of 250, with four of 400 to 500."""
LENGTHS = (*[1000] * 3, *[60] * 25, *[250] * 6, *[20] * 60)
"""Of documents of the shorter ways."""
INTRA = 1.5e6
"""Bytes a second in fp32, so few that tensor parallelism does not always pay."""
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

    lengths: tuple[int, ...] = LENGTHS
    """Of documents, in a shuffled order."""
    twice: bool = False
    """Whether to run again, for the same bits."""

    @property
    def bf16(self) -> bool:
        return bool(self.model.get("bf16"))

    @property
    def config(self) -> dict[str, Any]:
        """Of the run; links are as slow for bf16's messages as for fp32's."""
        links = {**SLOW, "intra_bytes_per_s": INTRA / (2 if self.bf16 else 1)}
        return {"cluster": {"ranks_per_node": 8, "num_sms": 0, **links}}


SEQUENCE_PARALLEL = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
SHORTER = {"seq-length": 512, "max-position-embeddings": 512, "global-batch-size": 8}
ZEPPELIN = {"within": "zeppelin", "within_options": {}}
WAYS: Mapping[str, Way] = {
    "TP2 x PP2 x DP2": Way(
        {**SEQUENCE_PARALLEL, "pipeline-model-parallel-size": 2},
        MIXED,
        ZEPPELIN,
        layout=MIXED[-1],
        lengths=ALL_KINDS,
        twice=True,
    ),
    "TP2 x PP2 x DP2, bf16": Way(
        {**SEQUENCE_PARALLEL, "pipeline-model-parallel-size": 2},
        MIXED,
        ZEPPELIN,
        {"bf16": True},
        layout=MIXED[-1],
        lengths=ALL_KINDS,
        twice=True,
    ),
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


class Folders:
    """Temporary folders under one, as the fixtures of the tests ask for them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def mktemp(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=name, dir=self.root))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ways; 0 if all agree with one rank, and the first one's runs with each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(argv)
    console, failed = Console(width=160), False
    with tempfile.TemporaryDirectory() as root:
        folders: Any = Folders(Path(root))
        trainer = Trainer()
        try:
            for name in options.ways:
                way = WAYS[name]
                documents = list(itertools.islice(itertools.cycle(way.lengths), 4000))
                train = train_with(trainer, write_corpus(folders.mktemp("corpus") / "documents", documents), folders)
                flags = {
                    **LONG,
                    "num-layers": 2,
                    "global-batch-size": SAMPLES,
                    "train-iters": options.steps,
                    **way.model,
                }
                loaded = started(train, folders.mktemp("checkpoint"), flags)
                one = train(1, "te_ring", at_once(loaded), entry="gradients", deadline_s=DEADLINE_S)
                given = {**loaded, "context-parallel-size": 1, "use-distributed-optimizer": True, **way.flags}
                run = functools.partial(_run, train, way)
                kept = {"save": folders.mktemp("kept"), "save-interval": 1, "dist-ckpt-optim-fully-reshardable": True}
                runs = [run({**given, **kept}, way.strategies)]
                runs += [run(given, way.strategies, entry="pretrain_gpt") for _ in range(way.twice)]
                each = [run(given, (one_of_them,), 1) for one_of_them in way.strategies if one_of_them != way.layout]
                compared = Compared.of(runs[0], each, one)
                compared = replace(compared, own=_from_own_weights(train, {**loaded, **kept}, runs[0], one))
                most = Compared(*[MOST] * 3, own=MOST)
                if way.bf16:
                    own = functools.partial(_run, train, way, {**given, "use-distributed-optimizer": False})
                    alone = Compared.of(own(()), [own((), 1)], one)
                    console.print(f"{name}: the base layout alone: {alone}")
                    most = replace(alone.times(2), own=2 * alone.later)
                failed |= not _told(console, name, runs, compared, most)
        finally:
            trainer.close()
    return int(failed)


def difference(run: Run, one: Run, name: str) -> float:
    """The largest difference of a column from one rank's, relative."""
    assert run.column("step") == one.column("step"), "the runs have other steps"
    pairs = zip(run.column(name), one.column(name), strict=True)
    return max(abs(got - wanted) / abs(wanted) for got, wanted in pairs)


def _run(
    train: Train,
    way: Way,
    given: Mapping[str, Any],
    strategies: Sequence[str],
    steps: int = 0,
    entry: Any = "gradients",
) -> Run:
    """A run with these candidates; `steps`: 1, a first one that holds all documents; 0: all steps."""
    planner = {
        "name": "hydraulis",
        "tokens_per_rank": int(given["seq-length"]) // (1 if steps or not strategies else 4),
        "microbatch_s": 1e-3,
        **way.planner,
        **({"strategies": list(strategies)} if strategies else {}),
    }
    flags = {**given, "train-iters": steps or given["train-iters"]}
    return train(8, planner, flags, config=way.config, entry=entry, deadline_s=DEADLINE_S)


def _from_own_weights(train: Train, given: Mapping[str, Any], run: Run, one: Run) -> float:
    """The largest difference of a gradient in the run's worst step but the first, from that of one
    rank with the weights and moments of the run (`given`: where it saved them after every step).
    """
    behind = run.column("step")[1:]
    if not behind:
        return 0.0
    worst = max(behind, key=lambda step: worst_gradient(run.result.logs, one.result.logs, step))
    again = {**GOING_ON, "load": given["save"], "ckpt-step": worst - 1, "exit-interval": worst, "save": None}
    flags = {**at_once(dict(given)), "use-distributed-optimizer": True, **again}
    alone = train(1, "te_ring", flags, entry="gradients", deadline_s=DEADLINE_S)
    assert alone.column("step") == [worst]
    return worst_gradient(run.result.logs, alone.result.logs, worst, 1)


@dataclass(frozen=True)
class Compared:
    """Largest relative differences from one rank: of loss and gradient norm in all steps; of a
    gradient in the first step under each candidate alone, in any step, and in the worst of these
    from the run's own weights.
    """

    loss: float
    norm: float
    gradient: float
    later: float = math.inf
    own: float = 0.0

    @classmethod
    def of(cls, run: Run, each: Sequence[Run], one: Run) -> Compared:
        """`each`: the first step, under one candidate each."""
        return cls(
            difference(run, one, "loss"),
            difference(run, one, "grad_norm"),
            max(worst_gradient(alone.result.logs, one.result.logs, 1) for alone in each),
            max(worst_gradient(run.result.logs, one.result.logs, step) for step in run.column("step")),
        )

    def times(self, factor: float) -> Compared:
        """All of them so many times larger."""
        return Compared(*(factor * each for each in astuple(self)))

    def within(self, limits: Compared) -> bool:
        """Whether each is at most its limit."""
        return all(mine <= limit for mine, limit in zip(astuple(self), astuple(limits), strict=True))

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, gradient norm {self.norm:.1e}, gradients from one checkpoint {self.gradient:.1e}, "
            f"in any step {self.later:.1e}, there from the run's own weights {self.own:.1e}"
        )


def _told(console: Console, name: str, runs: Sequence[Run], compared: Compared, most: Compared) -> bool:
    """Print what a way showed; whether it agrees."""
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
    same = all(again.column(of) == run.column(of) for again in runs[1:] for of in ("loss", "grad_norm", "fingerprint"))
    seconds = ", ".join(f"{each.result.seconds:.0f}" for each in runs)
    bits = "" if len(runs) == 1 else f"two runs {'are' if same else 'are NOT'} equal bit for bit; "
    empty = sum(step["num_sequences"] < len(step["pipelines"]) for step in run.steps)
    console.print(
        f"{len(run.steps)} steps, {changes_of(run)} changes, at least {empty} with empty pipelines; {bits}{seconds} s"
    )
    console.print(f"largest differences: {compared}")
    console.print(f"limits: {most}")
    return same and compared.within(most)


if __name__ == "__main__":
    sys.exit(main())

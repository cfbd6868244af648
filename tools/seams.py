"""Record what plans, programs, published tables and simulated steps are, and compare two records: for
changes of the house that must change none of them, or say which.

python -m tools.seams take BATCHES.json RECORD.json [--sample] [--only plans,programs]
python -m tools.seams compare BEFORE.json AFTER.json

plans: digests of fingerprints, by planner, mask and cluster, of each set of batches (sample: of two)
joined: the same for 8 and 16 batches in a row, on 512 and 1,024 ranks (sample: one set)
programs: digests of programs as text, forward and backward, by planner, mask, layers and policy, of
    20 batches (sample: 3)
landscape: steps of `tools.bench.landscape`, in seconds (sample: 3 sets on one cluster)
reproduce: rows of `reproduce --json` (sample: two tables)

BATCHES.json is that of `tools.bench.landscape`. A refusal is recorded as its kind of error. The
sample that the repository holds is `tools/seams.json`; a change that gains something replaces it in
its own commit, whose message shows both.
"""

import argparse
import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from megatron_balance.cli import main as command_line
from megatron_balance.compile.pipeline import expand
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import BalanceError
from megatron_balance.ir.step import StepPlan
from megatron_balance.ir.text import text
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from tools.bench import landscape

Record = dict[str, Any]
Batches = Mapping[str, Sequence[Sequence[int]]]
Job = tuple[str, Callable[[], Any]]

CLUSTERS = {"h200": "llama-7b", "h100": "llama3-8b", "a800": "llama-13b", "a800-ib": "llama-3b"}
"""Clusters, with the model that is planned for on each."""

MASKS = ("causal", "full", "window_1024")
LAYERS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "remapped and routed": {"remap": True, "remap_when": "always", "routing": "always"},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PLANNERS},
    **{f"zeppelin {rule}": ("zeppelin", {"rule": rule}) for rule in ("paper", "groups")},
}
SLOW = {"flexsp": 20, "auto": 60}
"""Planners that see only so many of a record's batches under each mask and cluster."""


def digest(told: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


class Recorder:
    """The jobs of a record, each a key and a function that gives its value."""

    def __init__(self, document: Mapping[str, Any], *, sample: bool) -> None:
        self.document, self.sample = document, sample
        self.batches: Batches = document["batches"]

    def ranks(self, name: str) -> int:
        return self.document["gpus"][name.split("/")[1]]

    def step(
        self, variant: str, mask: str, cluster: str, ranks: int, lengths: Sequence[int], layers: str = "as it comes"
    ) -> StepPlan:
        """The step of one microbatch.

        Raises:
            BalanceError: the planner refuses it.
        """
        built = load_cluster(cluster).build(num_ranks=ranks, ranks_per_node=self.document["gpus_per_node"])
        model = replace(load_model(CLUSTERS[cluster]), attention=mask)
        name, options = VARIANTS[variant]
        choice = choose_planner(name, options)
        if LAYERS[layers]:
            choice = replace(choice, layers=replace(choice.layers, **LAYERS[layers]))
        context = StepContext(built, model, AnalyticCost(built, model), own_microbatches=False, may_carry=False)
        step, _ = choice.plan_step((tuple(lengths),), context)
        return step

    def plans(self) -> Iterator[Job]:
        cells = list(product(VARIANTS, MASKS, CLUSTERS))
        for variant, mask, cluster in cells:
            yield (
                f"{variant} | {mask} | {cluster}",
                lambda of=(variant, mask, cluster): {
                    name: digest(
                        said(lambda one=one, name=name: self.step(*of, self.ranks(name), one).fingerprint())
                        for one in chosen
                    )
                    for name, chosen in self._some(of[0]).items()
                },
            )

    def _some(self, variant: str) -> Batches:
        """The batches that a planner sees."""
        if variant not in SLOW:
            return {name: batches[: 2 if self.sample else None] for name, batches in self.batches.items()}
        names = [name for name in self.batches if not self.sample or name.endswith("64k")]
        return {name: self.batches[name][: 1 if self.sample else SLOW[variant] // len(names)] for name in names}

    def joined(self) -> Iterator[Job]:
        names = [name for name in self.batches if name.endswith("256k")][: 1 if self.sample else None]
        for variant, mask, name, number in product(VARIANTS, MASKS, names, (8, 16)):
            if variant in ("flexsp", "auto"):
                continue
            lengths = tuple(chain.from_iterable(self.batches[name][:number]))
            ranks = number * self.ranks(name)
            yield (
                f"{variant} | {mask} | {name} | {ranks}",
                lambda of=(variant, mask, "h200", ranks, lengths): said(lambda: self.step(*of).fingerprint()),
            )

    def programs(self) -> Iterator[Job]:
        names = [name for name in self.batches if name.endswith("64k")]
        each = 1 if self.sample else 20 // len(names)
        for variant, mask, layers, policy, name in product(VARIANTS, MASKS, LAYERS, ("keep", "replay"), names):
            yield (
                f"{variant} | {mask} | {layers} | {policy} | {name}",
                lambda of=(variant, mask, layers, policy, name): digest(
                    said(lambda one=one: self._program(*of, one)) for one in self.batches[of[-1]][:each]
                ),
            )

    def _program(self, variant: str, mask: str, layers: str, policy: Any, name: str, lengths: Sequence[int]) -> str:
        step = self.step(variant, mask, "a800", self.ranks(name), lengths, layers)
        return digest(text(expand(plan, policy)) for plan in step.plans)

    def reproduce(self) -> Iterator[Job]:
        asked = [("zeppelin", "table2"), ("zeppelin", "fig5")] if self.sample else [(paper,) for paper in PAPERS]
        for words in asked:
            yield " ".join(words), lambda words=words: _rows(*words)

    def landscape(self) -> Iterator[Job]:
        cells = ["h200/llama-7b"] if self.sample else [f"{a}/{b}" for a in landscape.CLUSTERS for b in landscape.MODELS]
        names = [name for name in self.batches if not self.sample or name.endswith("128k")]
        for cell, name, label in product(cells, names, landscape.VARIANTS):
            if label == "flexsp" and self.sample:
                continue
            case = landscape.Case(cell, name, 0, label)
            yield f"{cell} | {name} | {label}", lambda case=case: _step_s(case, self.document)


PAPERS = ("zeppelin", "distca", "wlb_llm", "knapformer", "hydraulis")
PARTS = ("plans", "joined", "programs", "landscape", "reproduce")


def said(make: Callable[[], str]) -> str:
    """Call `make`; where a planner refuses, the kind of its error."""
    try:
        return make()
    except BalanceError as error:
        return type(error).__name__


def _rows(*words: str) -> dict[str, float]:
    """Our figure of each row of `reproduce`."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        command_line(["reproduce", *words, "--json"])
    return {f"{row['table']}: {row['name']}": row["ours"] for row in json.loads(told.getvalue())["rows"]}


def _step_s(case: landscape.Case, document: Mapping[str, Any]) -> Any:
    row = landscape.run(case, dict(document))
    return row.get("step_s", "refused")


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a record, under names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name} / {key}" if name else str(key))
    else:
        yield name, value


def compare(before: Record, after: Record) -> Iterator[str]:
    """Lines on all that differs, and how much of each part is equal."""
    for part in PARTS:
        old, new = (dict(flat(each.get(part, {}))) for each in (before, after))
        both = [name for name in old if name in new]
        changed = [name for name in both if old[name] != new[name]]
        for name in changed:
            a, b = old[name], new[name]
            ratio = f" ({b / a:.4f})" if isinstance(a, float) and isinstance(b, float) and a else ""
            yield f"{part}: {name}: {a} -> {b}{ratio}"
        numbers = [(old[name], new[name]) for name in both]
        ratios = [b / a for a, b in numbers if isinstance(a, float) and isinstance(b, float) and a]
        mean = f", mean ratio {fmean(ratios):.4f}, worst {max(ratios):.4f}" if ratios else ""
        only = (
            f"; {len(old) - len(both)} only before, {len(new) - len(both)} only after"
            if old.keys() != new.keys()
            else ""
        )
        yield f"{part}: {len(both) - len(changed)} of {len(both)} equal{mean}{only}"


def main(argv: Sequence[str] | None = None) -> int:
    """Take or compare. Exit code 1: two records differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    take = verbs.add_parser("take", help="record the tree as it is; goes on where a record stopped")
    take.add_argument("batches", type=Path)
    take.add_argument("record", type=Path)
    take.add_argument("--sample", action="store_true", help="the fixed sample, about ten minutes")
    take.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="of these, separated by commas")
    both = verbs.add_parser("compare", help="what differs between two records")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    given = parser.parse_args(argv)
    if given.verb == "compare":
        lines = list(compare(*(json.loads(path.read_text()) for path in (given.before, given.after))))
        print("\n".join(lines))
        return int(len(lines) > len(PARTS) or any(" only " in line for line in lines))
    recorder = Recorder(json.loads(given.batches.read_text()), sample=given.sample)
    record: Record = json.loads(given.record.read_text()) if given.record.exists() else {}
    for part in given.only.split(","):
        found = record.setdefault(part, {})
        jobs: list[Job] = list(getattr(recorder, part)())
        for number, (key, job) in enumerate(tqdm(jobs, part, file=sys.stderr)):
            if key not in found:
                found[key] = job()
                if number % 20 == 0:
                    _write(given.record, record)
        _write(given.record, record)
    return 0


def _write(path: Path, record: Record) -> None:
    path.write_text(json.dumps(record, indent=0) + "\n")


if __name__ == "__main__":
    sys.exit(main())

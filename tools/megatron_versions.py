"""Parity of training by Megatron version, planner and layout, on CPUs, against one rank of the same.

    python -m tools.megatron_versions PATH... --results cells.jsonl      # every planner, all layouts
    python -m tools.megatron_versions PATH --planners zeppelin te_ring --layouts dp pp
    python -m tools.megatron_versions --results cells.jsonl --show       # the table of what has run

PATH: a checkout of Megatron-LM, or the folder of `pip install --target PATH --no-deps
megatron-core==VERSION`; `installed` is what Python imports. `NAME=PATH` calls it NAME in the table, in
place of the version that it says it is. A cell is a training run of two or four ranks from the weights
of one rank's: the largest difference of a step's loss and gradient norm, relative. With `--results` a
cell is a line of JSON, and those that a file has are left out. `--accept` accepts sources that nobody
reviewed, for this run only; the table names them. Exit code 1 if a cell failed or differs by more than
1e-5; one that was refused, with a reason, is not a failure. `--cp-comm-type KIND` gives every run that
flag: plans say how keys travel, so no number depends on it.

Experts are compared with two ranks that hold all of them: 0.18 weakens the routers' losses by the
number of context-parallel ranks, which is its own and stays. Those two ranks have the planner
`te_ring`, or the cell's own where it makes microbatches of its own: a router's loss is that of a
microbatch, and so is that of further tokens. A checkout needs its compiled data set
helpers: `make -C PATH/megatron/core/datasets`, with pybind11.
"""

import argparse
import contextlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_balance.cli.doctor import source_version
from megatron_balance.planners import PLANNERS
from tests.megatron.conftest import EXPERTS, MODEL, RUN, Run, write_corpus
from tests.megatron.test_parity import two_nodes
from tests.support.megatron_run import Job, Trainer
from tools.megatron_flags import command_line

TOLERANCE = 1e-5
STEPS = 4
DOCUMENTS = (300, 140, 40, 20, 7, 1, 480)
CORPUS_ROUNDS = 40
INSTALLED = "installed"
OPTIONS: dict[str, dict[str, Any]] = {"zeppelin": {"slack": 1.0, "rule": "groups"}, "knapformer": {"topology": "g2n1"}}
"""So that sequences are cut: at their defaults these keep documents of this size whole."""
EXPERT_TP = {"expert-tensor-parallel-size": 1}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp": ("DP 2", 2, {"context-parallel-size": 1}),
    "cp": ("CP 2", 2, {"context-parallel-size": 2}),
    "tp": ("CP 2, TP 2", 4, {"context-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": True}),
    "pp": ("CP 2, PP 2", 4, {"context-parallel-size": 2, "pipeline-model-parallel-size": 2}),
    "ep": ("CP 2, EP 2", 2, {"context-parallel-size": 2, "expert-model-parallel-size": 2, **EXPERT_TP}),
    "seq": ("CP 2, EP 2, by sample", 2, {"context-parallel-size": 2, "expert-model-parallel-size": 2, **EXPERT_TP}),
    "mtp": ("CP 2, MTP 2", 2, {"context-parallel-size": 2}),
}
"""By name: its title, ranks and flags. Two ranks at least share every microbatch of the pool."""
MODELS: dict[str, dict[str, Any]] = {
    "ep": EXPERTS,
    "seq": {**EXPERTS, "moe-router-load-balancing-type": "seq_aux_loss"},
    "mtp": {"mtp-num-layers": 2, "mtp-loss-scaling-factor": 0.5},
}
"""By layout: flags of a model that is not the plain one."""
SOURCES = re.compile(r"accepted_sources: (\{.*\})")
SAID = re.compile(r"^error(?: \(rank \d+\))?: (.*)$", re.MULTILINE)
REFUSED = 2
"""Exit code of a run that a sentence of ours refuses."""
Cell = dict[str, Any]


class RefusedError(RuntimeError):
    """A run that our checks refuse; its text is the reason."""


def root_of(path: str) -> Path:
    """The folder that holds the package `megatron` which `path` stands for.

    Raises:
        SystemExit: there is none.
    """
    if path == INSTALLED:
        found = importlib.util.find_spec("megatron.core")
        if found is None or found.origin is None:
            raise SystemExit("installed: no megatron.core; give the folder of one")
        return Path(found.origin).parents[2]
    root = Path(path).resolve()
    if not (root / "megatron" / "core" / "package_info.py").exists():
        raise SystemExit(f"{path}: no megatron/core in it; expected a checkout, or a folder of pip install --target")
    return root


def version_of(root: Path) -> str:
    return source_version(root / "megatron" / "core") or "unknown"


class Version:
    """Runs on one Megatron, in one folder."""

    def __init__(self, root: Path, folder: Path, *, accept: bool, always: Mapping[str, Any]) -> None:
        """Start a server of training ranks that import Megatron from `root`.

        `always`: flags of every run.
        """
        self.trainer = Trainer(path=[str(root)])
        self.folder, self.accept, self.always = folder, accept, always
        self.accepted: dict[str, str] = {}
        self.corpus = write_corpus(folder / "documents", DOCUMENTS * CORPUS_ROUNDS)
        self._started: dict[str, dict[str, Any]] = {}
        self._references: dict[tuple[str, str], Run] = {}

    def train(self, name: str, num_ranks: int, planner: str, flags: dict[str, Any]) -> Run:
        """A run of some steps; again, with the sources accepted that stopped it, if that is asked for.

        Raises:
            RefusedError: our checks refuse it.
            RuntimeError: it failed; the end of the first failing rank's log.
        """
        folder = self.folder / name
        folder.mkdir()
        config = {
            "planner": {"name": planner, **OPTIONS.get(planner, {})},
            "plan_ahead": False,
            "sample_filling": "next_fit",
            "accepted_sources": self.accepted,
            **two_nodes(2),
        }
        (folder / "balance.yaml").write_text(yaml.safe_dump(config))
        ours = {"balance-config": folder / "balance.yaml", "balance-log": folder / "log"}
        argv = command_line(MODEL, RUN, {"data-path": self.corpus, "train-iters": STEPS}, ours, self.always, flags)
        result = self.trainer.run(Job("pretrain_gpt", num_ranks, tuple(argv), str(folder), deadline_s=900.0))
        if result.failed is None:
            return Run(result, tuple(map(json.loads, (folder / "log" / "steps.jsonl").read_text().splitlines())))
        told = result.log(result.failed)
        asked = SOURCES.search(told)
        if asked is not None and self.accept:
            self.accepted |= json.loads(asked.group(1))
            return self.train(f"{name}+", num_ranks, planner, flags)
        said = SAID.findall(told)
        if result.codes[result.failed] == REFUSED and said:
            raise RefusedError(said[-1])
        raise RuntimeError(told)

    def start(self, kind: str) -> dict[str, Any]:
        """Flags that begin from one rank's weights; `kind`: of `MODELS`, "" for the plain one."""
        if kind not in self._started:
            model = MODELS.get(kind, {})
            weights = self.folder / f"weights-{kind}"
            saved = {**model, "ckpt-format": "torch_dist", "micro-batch-size": RUN["global-batch-size"]}
            saving = {**saved, "save": weights, "save-interval": 1000, "train-iters": 1, "context-parallel-size": 1}
            self.train(f"save-{kind}", 1, "te_ring", saving)
            load = {**model, "ckpt-format": "torch_dist", "load": weights, "finetune": True}
            self._started[kind] = {**load, "no-load-optim": True, "no-load-rng": True}
        return self._started[kind]

    def reference(self, planner: str, kind: str) -> tuple[Run, dict[str, Any]]:
        """The run that a planner's are compared with, and the flags that begin from its weights."""
        load = self.start(kind)
        by_microbatch = PLANNERS[planner].plan_step is not None
        like = planner if kind and by_microbatch else "te_ring"
        if (kind, like) not in self._references:
            num_ranks = 2 if "num-experts" in MODELS.get(kind, {}) or (like == planner and by_microbatch) else 1
            alike = {**load, "context-parallel-size": num_ranks}
            self._references[kind, like] = self.train(f"one-{kind}-{like}", num_ranks, like, alike)
        return self._references[kind, like], load

    def cell(self, planner: str, layout: str) -> Cell:
        """The outcome of a planner on a layout: `difference`, `refused` or `failed`."""
        reference, load = self.reference(planner, layout if layout in MODELS else "")
        found: Cell = {"planner": planner, "layout": layout}
        try:
            _, num_ranks, flags = LAYOUTS[layout]
            run = self.train(f"{planner}-{layout}", num_ranks, planner, {**load, **flags})
        except RefusedError as error:
            return {**found, "refused": str(error)}
        except RuntimeError as error:
            lines = str(error).splitlines()
            return {**found, "failed": next((line for line in lines[::-1] if "Error" in line), lines[-1])}
        travelled = sum(sum(step["counters"]["kv_tokens_received"]) for step in run.steps)
        return {**found, "difference": differs(run, reference), "steps": len(run.steps), "kv_tokens": travelled}


def differs(run: Run, reference: Run) -> float:
    """The largest relative difference of a loss or gradient norm over the steps."""
    pairs = [
        (got, wanted)
        for name in ("loss", "grad_norm")
        for got, wanted in zip(run.column(name), reference.column(name), strict=True)
    ]
    return max(abs(got - wanted) / abs(wanted) for got, wanted in pairs)


def cells_of(
    root: Path, wanted: Sequence[tuple[str, str]], *, accept: bool, always: Mapping[str, Any]
) -> Iterator[Cell]:
    """The cells of one Megatron; `accept` and `always` as of `Version`."""
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as name:
        version = Version(root, Path(name), accept=accept, always=always)
        with contextlib.closing(version.trainer):
            for planner, layout in wanted:
                yield {**version.cell(planner, layout), "accepted": sorted(version.accepted)}


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a table a version, a row a planner, a column a layout; refusals and failures below.

    A star: no keys travelled between ranks, so attention was not cut there.
    """
    lines: list[str] = []
    for version in dict.fromkeys(cell["version"] for cell in cells):
        found = {(cell["planner"], cell["layout"]): cell for cell in cells if cell["version"] == version}
        layouts = [layout for layout in LAYOUTS if any(at == layout for _, at in found)]
        lines += [f"### megatron-core {version}", ""]
        lines += [
            f"| planner | {' | '.join(LAYOUTS[layout][0] for layout in layouts)} |",
            "|---|" + "---|" * len(layouts),
        ]
        for planner in dict.fromkeys(planner for planner, _ in found):
            told = [_told(found.get((planner, layout))) for layout in layouts]
            lines.append(f"| {planner} | {' | '.join(told)} |")
        lines.append("")
        for kind in ("refused", "failed"):
            reasons = dict.fromkeys(cell[kind] for cell in found.values() if kind in cell)
            for reason in reasons:
                where = [f"{planner} {layout}" for (planner, layout), cell in found.items() if cell.get(kind) == reason]
                lines.append(f"- {kind}, {', '.join(where)}: {reason}")
        accepted = sorted({target for cell in found.values() for target in cell["accepted"]})
        lines += [f"- accepted without review: {target}" for target in accepted]
        compared = [cell["difference"] for cell in found.values() if "difference" in cell]
        lines += [f"- {len(compared)} cells trained, the largest difference {max(compared, default=0.0):.1e}", ""]
    return "\n".join(lines)


def _told(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    if "difference" not in cell:
        return "refused" if "refused" in cell else "failed"
    return f"{cell['difference']:.1e}{'' if cell['kv_tokens'] else ' *'}"


def is_bad(cell: Cell) -> bool:
    return "failed" in cell or not cell.get("difference", 0.0) <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=[], metavar="PATH")
    parser.add_argument("--planners", nargs="+", choices=tuple(PLANNERS), default=list(PLANNERS))
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--results", type=Path, help="a line of JSON for each cell; cells that have one are left out")
    parser.add_argument("--show", action="store_true", help="run nothing; the table of --results")
    parser.add_argument("--accept", action="store_true", help="accept sources that nobody reviewed")
    parser.add_argument("--cp-comm-type", metavar="KIND", help="Megatron's flag, for every run")
    args = parser.parse_args(argv)
    if args.show == bool(args.paths) or (args.show and args.results is None):
        parser.error("expected the paths of some Megatrons, or --show with --results FILE")
    results: Path | None = args.results
    cells: list[Cell] = []
    if results is not None and results.exists():
        cells = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    for word in args.paths:
        name, _, path = word.rpartition("=")
        root = root_of(path)
        name = name or version_of(root)
        if args.cp_comm_type is not None:
            name += f", --cp-comm-type {args.cp_comm_type}"
        done = {(cell["planner"], cell["layout"]) for cell in cells if cell["version"] == name}
        wanted = [(planner, layout) for layout in args.layouts for planner in args.planners]
        missing = [each for each in wanted if each not in done]
        always = {"cp-comm-type": args.cp_comm_type}
        for found in cells_of(root, missing, accept=args.accept, always=always):
            cell = {"version": name, **found}
            cells.append(cell)
            print(cell["version"], cell["planner"], cell["layout"], _told(cell), file=sys.stderr, flush=True)
            if results is not None:
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cell) + "\n")
    print(table(cells))
    return int(any(map(is_bad, cells)))


if __name__ == "__main__":
    sys.exit(main())

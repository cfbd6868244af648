"""Accuracy of the simulator against attention calls on the emulated cluster, planner by planner.

measure: costs first, by microbenchmarks on the ranks, then the cases; leaves a folder. compare:
simulates what such folders have with the costs in them, and prints measured and simulated times, or
writes them to FILE.md and FILE.json. Such a FILE.json is read in place of a folder.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from megatron_balance.compile.transpose import POLICIES
from tools.bench.emulated.point import DATASETS, PAPER_TOKENS, RANKS_PER_NODE
from tools.bench.emulated.report import rows_on_lines
from tools.bench.simulated import piece, report
from tools.bench.simulated.cases import VARIANTS, Grid
from tools.emulated_cluster import check

ROOT = Path(__file__).resolve().parents[3]
OUT = ROOT / "out" / "bench-simulated"
SKIPPED = 77
USAGE_ERROR = 2
SHARE = 0.125
NOTE = "note.md"
"""The note of a folder's measurement."""
NAMES = tuple(variant.name for variant in VARIANTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 2 for wrong options; 77 where namespaces are not permitted."""
    options = _parser().parse_args(argv)
    return _measure(options) if options.verb == "measure" else _compare(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.simulated", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("measure", help="measure costs and cases on one number of NICs")
    one.add_argument("--nics", type=int, default=4, choices=(1, 2, 4), help="of a node (default 4)")
    one.add_argument(
        "--mbit",
        type=_numbers,
        default=(12.5, 25.0),
        help="rates of a NIC (default 12.5,25); links in a node: 8 times that",
    )
    one.add_argument(
        "--policies", type=_words, default=("keep",), help=f"of the backward: {', '.join(POLICIES)} (default keep)"
    )
    one.add_argument("--datasets", type=_words, default=DATASETS, help=f"(default {','.join(DATASETS)})")
    one.add_argument("--batches", type=int, default=1, help="of each data set (default 1)")
    one.add_argument(
        "--tokens", type=int, default=PAPER_TOKENS // 4, help=f"of a batch, {PAPER_TOKENS} divided by a whole number"
    )
    one.add_argument("--planners", type=_words, default=NAMES, help=f"of {', '.join(NAMES)} (default all)")
    one.add_argument("--seed", type=int, default=0, help="of the batches")
    one.add_argument("--repeats", type=int, default=3, help="of every call (default 3)")
    one.add_argument("--share", type=float, default=SHARE, help=f"of a core, for each rank's kernels (default {SHARE})")
    one.add_argument("--out", type=Path, help="folder (default out/bench-simulated/NICS-nics)")
    both = verbs.add_parser("compare", help="simulate what was measured")
    both.add_argument("folders", type=Path, nargs="+", help="of `measure`, or a FILE.json")
    both.add_argument("--write", type=Path, metavar="FILE", help="write FILE.md and FILE.json")
    both.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _numbers(words: str) -> tuple[float, ...]:
    return tuple(float(word) for word in words.split(","))


def _words(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.split(","))


def _measure(options: argparse.Namespace) -> int:
    for name, known in (("policies", POLICIES), ("datasets", DATASETS), ("planners", NAMES)):
        for word in getattr(options, name):
            if word not in known:
                print(f"error: --{name} {word}: unknown; known: {', '.join(known)}", file=sys.stderr)
                return USAGE_ERROR
    if PAPER_TOKENS % options.tokens or options.share * 2 * RANKS_PER_NODE > 2:
        print(
            f"error: --tokens must divide {PAPER_TOKENS}, and --share times 8 ranks fit on two cores", file=sys.stderr
        )
        return USAGE_ERROR
    reason = check()
    if reason is not None:
        print(f"SKIP: no emulated cluster on this machine: {reason}")
        return SKIPPED
    torch.set_num_threads(1)
    grid = Grid(
        options.mbit,
        options.policies,
        options.datasets,
        options.batches,
        options.tokens,
        options.seed,
        options.planners,
    )
    folder = options.out or OUT / f"{options.nics}-nics"
    piece.measure(grid, options.nics, options.repeats, options.share, folder)
    print(folder)
    return 0


def _compare(options: argparse.Namespace) -> int:
    rows = piece.all_rows([each for each in options.folders if each.is_dir()])
    lines = [report.line_of(row) for row in tqdm(rows, desc="simulated", unit="case", file=sys.stderr)]
    for written in (each for each in options.folders if not each.is_dir()):
        lines += report.from_body(json.loads(written.read_text()))
    if options.write:
        options.write.with_suffix(".md").write_text(_text(lines, options.folders))
        options.write.with_suffix(".json").write_text(rows_on_lines(report.body(lines)))
    if options.json:
        print(json.dumps(report.body(lines)))
        return 0
    console = Console(width=max(150, Console().width))
    table = Table()
    for at, heading in enumerate(report.HEADINGS):
        table.add_column(heading, justify="left" if at in (2, 3) else "right")
    for line in lines:
        table.add_row(*report.cells(line))
    console.print(table)
    for sentence in report.in_words(lines):
        console.print(sentence, highlight=False)
    return 0


def _text(lines: Sequence[report.Line], folders: Sequence[Path]) -> str:
    command = " ".join(["python -m tools.bench.simulated compare", *(folder.name for folder in folders)])
    notes = [(folder / NOTE).read_text().strip() for folder in folders if (folder / NOTE).exists()]
    words = [*report.EXPLANATION, *dict.fromkeys(notes), *report.in_words(lines)]
    parts = ["# Simulated against measured", f"`{command}`", *words, report.markdown(lines)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())

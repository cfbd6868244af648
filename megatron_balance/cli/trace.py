"""`megatron-balance trace`: join the traces that the ranks of a training step wrote (`trace_steps`)
into one file, with arrows from the rank that sends to the one that receives.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_balance.analysis import trace_format
from megatron_balance.analysis.trace_format import Trace
from megatron_balance.cli import inputs
from megatron_balance.errors import ConfigError
from megatron_balance.files import UnreadableError, read_json

HELP = "join the traces of a training step's ranks"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what --balance-log named, or its folder traces")
    parser.add_argument("--step", type=int, metavar="N", help="the step, where several were traced")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the joined trace, for ui.perfetto.dev ('-': stdout)"
    )


def run(args: argparse.Namespace) -> int:
    files = _files(args.folder)
    step = _chosen(args, sorted(files))
    traces = [_read(path) for path in files[step]]
    world = int(traces[0].facts.get("world_size", len(traces)))
    missing = sorted(set(range(world)) - {rank for trace in traces for rank in trace.names})
    if missing:
        raise ConfigError(
            f"{args.folder}: step {step} has no trace of ranks {', '.join(map(str, missing))} of {world}; gather the "
            "files of all nodes in one folder"
        )
    joined = trace_format.joined(traces)
    document = joined.document()
    inputs.write(args.out, json.dumps(document, allow_nan=False))
    if args.out != inputs.STDOUT:
        print(f"{args.out}: step {step}, {world} ranks, {len(joined.spans)} spans{_clocks(document['otherData'])}")
    return 0


def _clocks(facts: Mapping[str, Any]) -> str:
    """A remark on the clocks of ranks and nodes, where they disagree."""
    said = ""
    if facts["moved_s"]:
        said += f"; clocks of nodes moved by {1e3 * facts['moved_s']:.3f} ms, for nothing to arrive before it is sent"
    if facts["skew_s"]:
        said += f"; clocks of ranks differ by at least {1e3 * facts['skew_s']:.3f} ms"
    if "arrows_left_out" in facts:
        said += f"; arrows left out that would point back in time: {facts['arrows_left_out']}"
    return said


def _files(folder: Path) -> dict[int, list[Path]]:
    """The files of every step in a folder, or in its folder `traces`."""
    found: dict[int, list[Path]] = {}
    for path in sorted([*folder.glob("step-*.json"), *folder.glob("traces/step-*.json")]):
        step = trace_format.step_of(path.name)
        if step is not None:
            found.setdefault(step, []).append(path)
    if not found:
        how = "train with trace_steps: [N] in the configuration and --balance-log DIR, then name DIR"
        raise ConfigError(f"{folder}: no traces; {how}")
    return found


def _chosen(args: argparse.Namespace, steps: list[int]) -> int:
    if args.step is None and len(steps) == 1:
        return steps[0]
    known = ", ".join(map(str, steps))
    if args.step is None:
        raise ConfigError(f"{args.folder}: traces of steps {known}; choose one with --step N")
    if args.step not in steps:
        raise ConfigError(f"--step {args.step}: {args.folder} has traces of steps {known}")
    return args.step


def _read(path: Path) -> Trace:
    try:
        return trace_format.read(read_json(path), str(path))
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error}") from None

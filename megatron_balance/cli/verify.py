"""`megatron-balance verify`: prove a plan that `plan --out` wrote: every query meets every key it
may see exactly once.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_balance.cli import inputs
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.files import UnreadableError, json_text, read_json
from megatron_balance.ir.plan import FORMAT, MicrobatchPlan, from_body, to_json
from megatron_balance.ir.program import Program
from megatron_balance.ir.text import parse, text

HELP = "prove a plan written by 'plan --out', forward and backward"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="what 'plan --out' wrote")
    backward = "backward with received KV kept, or communicated again"
    parser.add_argument("--policy", choices=("keep", "replay"), default="keep", help=backward)
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    results = [_prove(entry, args.policy) for entry in read(args.plan)]
    failed = [number for number, result in enumerate(results) if not result["verified"]]
    if args.json:
        print(json_text({"verified": not failed, "policy": args.policy, "results": results}))
    for number, result in enumerate(results):
        name = f"{args.plan}" if len(results) == 1 else f"{args.plan}, plan {number}"
        if not result["verified"]:
            print(f"{name}: not verified: {result['error']}", file=sys.stderr)
        elif not args.json:
            written = "; the program written with it is right too" if result["program_checked"] else ""
            print(
                f"{name}: verified: {result['planner']} {result['fingerprint']}, {result['num_ops']} ops, backward "
                f"{args.policy}{written}"
            )
    return 1 if failed else 0


def _prove(entry: "_PlanEntry", policy: Policy) -> dict[str, Any]:
    num_ops, wrong = None, None
    try:
        num_ops = _prove_entry(entry, policy)
    except InvalidProgramError as error:
        wrong = str(error)
    return {
        "planner": entry.plan.planner,
        "fingerprint": entry.plan.fingerprint(),
        "verified": wrong is None,
        "num_ops": num_ops,
        "program_checked": entry.program is not None,
        "error": wrong,
    }


LIST_FORMAT = "megatron-balance plans 1"
MAX_PROGRAM_LINES = 20_000
# Beyond this the program of nearly every plan is longer than the file may hold, and building it
# only to count is slow.
MAX_PROGRAM_RANKS = 64


@dataclass(frozen=True, slots=True)
class _PlanEntry:
    """One plan of a file, with the fingerprint and the program written beside it."""

    plan: MicrobatchPlan
    fingerprint: str | None
    program: Program | None


def write(path: Path, plans: Sequence[MicrobatchPlan], policy: Policy) -> None:
    """Write plans, each with its fingerprint and program (forward, and backward by `policy`)."""
    entries = [
        json.loads(to_json(p))
        | {"fingerprint": p.fingerprint(), "policy": policy, "program": _program_lines(p, policy)}
        for p in plans
    ]
    document = entries[0] if len(entries) == 1 else {"format": LIST_FORMAT, "plans": entries}
    inputs.write(path, json.dumps(document, allow_nan=False) + "\n")


def _program_lines(plan: MicrobatchPlan, policy: Policy) -> list[str] | None:
    from megatron_balance.compile.pipeline import expand

    if plan.num_ranks > MAX_PROGRAM_RANKS:
        return None
    lines = text(expand(plan, policy)).splitlines()
    return lines if len(lines) < MAX_PROGRAM_LINES else None


def read(path: Path) -> list[_PlanEntry]:
    try:
        document: object = read_json(path)
    except OSError as error:
        writes = f"'megatron-balance plan --out {path}' writes one"
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {writes}") from None
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        writes = "'megatron-balance plan --out FILE' writes one"
        raise ConfigError(f"{path}: not a plan: holds a {type(document).__name__}; {writes}")
    body = cast("dict[str, Any]", document)
    several = body.get("format") == LIST_FORMAT and isinstance(body.get("plans"), list)
    entries: list[Any] = body["plans"] if several else [body]
    if not entries:
        raise ConfigError(f"{path}: holds no plans")
    names = [f"{path}: plan {number}" if len(entries) > 1 else str(path) for number in range(len(entries))]
    return list(map(_entry, entries, names))


def _entry(entry: Any, where: str) -> _PlanEntry:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object with format {FORMAT!r}")
    body = cast("dict[str, Any]", entry)
    fingerprint, lines = body.get("fingerprint"), body.get("program")
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise ConfigError(f"{where}: fingerprint: expected text, got {fingerprint!r:.60}")
    if lines is not None and (
        not isinstance(lines, list) or not all(isinstance(line, str) for line in cast("list[Any]", lines))
    ):
        raise ConfigError(f"{where}: program: expected a list of lines or null")
    try:
        plan = from_body(body)
        program = None if lines is None else parse("\n".join(cast("list[str]", lines)))
    except (ConfigError, InvalidProgramError) as error:
        raise ConfigError(f"{where}: {error}") from None
    return _PlanEntry(plan, fingerprint, program)


def prove(plan: MicrobatchPlan, policy: Policy) -> int:
    """Number of ops of the plan's program, proved forward and backward, and to be what ranks run."""
    from megatron_balance.compile.proof import runs

    program = runs.prove(plan, policy)
    return len(program.forward) + len(program.backward)


def _prove_entry(entry: _PlanEntry, policy: Policy) -> int:
    """Number of ops, after proving the plan by `policy` and the program as it is written."""
    plan, program = entry.plan, entry.program
    if entry.fingerprint is not None and entry.fingerprint != plan.fingerprint():
        raise InvalidProgramError(
            f"the fingerprint written is {entry.fingerprint}, that of the plan is {plan.fingerprint()}: the plan was "
            "changed"
        )
    num_ops = prove(plan, policy)
    if program is not None:
        from megatron_balance.compile.proof.meaning import verify
        from megatron_balance.compile.proof.runs import verify_runs

        _check_same(plan, program)
        verify(program)
        verify_runs(plan, program)
    return num_ops


def _check_same(plan: MicrobatchPlan, program: Program) -> None:
    """The program written is for this plan's sequences, heads and linear layout."""
    from megatron_balance.compile.pipeline import layout

    names = ("lengths", "num_heads", "num_kv_heads", "num_ranks")
    held = [(name, getattr(plan, name), getattr(program, name)) for name in names]
    for what, planned, written in held:
        if planned != written:
            raise InvalidProgramError(
                f"the program written is not the plan's: {what} {written!r:.80}, planned {planned!r:.80}"
            )
    for rank, owned in enumerate(program.owned):
        planned = [tuple(row) for row in layout(plan, rank).tolist()]
        if list(owned) != planned:
            raise InvalidProgramError(
                f"the program written is not the plan's: rank {rank} holds {list(owned)!r:.80}, planned {planned!r:.80}"
            )

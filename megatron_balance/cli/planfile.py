"""The file of `plan --out`: a plan, its fingerprint and, when it is not too long, its program as
text.

One batch is one object: the keys of `ir.plan.to_json` and `fingerprint`, `policy`, `program`
(lines, or null). Several batches are `{"format": ..., "plans": [...]}` of such objects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_balance.cli import output
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.files import UnreadableError, read_json
from megatron_balance.ir.plan import FORMAT, MicrobatchPlan, from_body, to_json
from megatron_balance.ir.program import Program
from megatron_balance.ir.text import parse, text

LIST_FORMAT = "megatron-balance plans 1"
MAX_PROGRAM_LINES = 20_000
MAX_PROGRAM_RANKS = 64
"""Beyond this the program of nearly every plan is longer than the file may hold, and building it
only to count is slow."""


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One plan of a file, with the fingerprint and the program written beside it."""

    plan: MicrobatchPlan
    fingerprint: str | None
    program: Program | None


def write(path: Path, plans: Sequence[MicrobatchPlan], policy: Policy) -> None:
    """Write plans, each with its fingerprint and program (forward, and backward by `policy`).

    Raises:
        ConfigError: the file cannot be written.
    """
    entries = [
        {
            **json.loads(to_json(p)),
            "fingerprint": p.fingerprint(),
            "policy": policy,
            "program": _program_lines(p, policy),
        }
        for p in plans
    ]
    document = entries[0] if len(entries) == 1 else {"format": LIST_FORMAT, "plans": entries}
    output.write(path, json.dumps(document, allow_nan=False) + "\n")


def _program_lines(plan: MicrobatchPlan, policy: Policy) -> list[str] | None:
    from megatron_balance.compile.pipeline import expand

    if plan.num_ranks > MAX_PROGRAM_RANKS:
        return None
    lines = text(expand(plan, policy)).splitlines()
    return lines if len(lines) < MAX_PROGRAM_LINES else None


def read(path: Path) -> list[PlanEntry]:
    """The plans of a file that `write` made.

    Raises:
        ConfigError: no such file, not such a file, or a program that cannot be read.
    """
    try:
        document: object = read_json(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; 'megatron-balance plan --out {path}' writes one"
        ) from None
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path}: not a plan: holds a {type(document).__name__}; 'megatron-balance plan --out FILE' writes one"
        )
    body = cast("dict[str, Any]", document)
    entries: list[Any] = (
        body["plans"] if body.get("format") == LIST_FORMAT and isinstance(body.get("plans"), list) else [body]
    )
    if not entries:
        raise ConfigError(f"{path}: holds no plans")
    return [
        _entry(entry, f"{path}: plan {number}" if len(entries) > 1 else str(path))
        for number, entry in enumerate(entries)
    ]


def _entry(entry: Any, where: str) -> PlanEntry:
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
    return PlanEntry(plan, fingerprint, program)


def prove(plan: MicrobatchPlan, policy: Policy) -> int:
    """Number of ops of the plan's program, after proving it, forward and backward, and that it is what
    the ranks run.

    Raises:
        InvalidProgramError: names the op or the region that is wrong, or ranks that would wait for
            one another.
    """
    from megatron_balance.compile.proof import runs

    program = runs.prove(plan, policy)
    return len(program.forward) + len(program.backward)


def prove_entry(entry: PlanEntry, policy: Policy) -> int:
    """Number of ops of the plan's program, after proving the plan by `policy` and the program as it
    is written.

    Raises:
        InvalidProgramError: what was written is not what was planned, or does not compute causal
            attention.
    """
    plan, program = entry.plan, entry.program
    if entry.fingerprint is not None and entry.fingerprint != plan.fingerprint():
        raise InvalidProgramError(
            f"the fingerprint written is {entry.fingerprint}, that of the plan is {plan.fingerprint()}: the plan was "
            "changed"
        )
    num_ops = prove(plan, policy)
    if program is not None:
        _check_same(plan, program)
        from megatron_balance.compile.proof.meaning import verify
        from megatron_balance.compile.proof.runs import verify_runs

        verify(program)
        verify_runs(plan, program)
    return num_ops


def _check_same(plan: MicrobatchPlan, program: Program) -> None:
    """The program written is for this plan's sequences, heads and linear layout."""
    from megatron_balance.compile.pipeline import layout

    for what, planned, written in (
        ("lengths", plan.lengths, program.lengths),
        ("num_heads", plan.num_heads, program.num_heads),
        ("num_kv_heads", plan.num_kv_heads, program.num_kv_heads),
        ("num_ranks", plan.num_ranks, program.num_ranks),
    ):
        if planned != written:
            raise InvalidProgramError(
                f"the program written is not the plan's: {what} {written!r:.80}, planned {planned!r:.80}"
            )
    for rank, owned in enumerate(program.owned):
        planned_rows = [tuple(int(v) for v in row) for row in layout(plan, rank)]
        if list(owned) != planned_rows:
            raise InvalidProgramError(
                f"the program written is not the plan's: rank {rank} holds {list(owned)!r:.80}, planned "
                f"{planned_rows!r:.80}"
            )

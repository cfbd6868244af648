"""The `steps.jsonl` of a training run, read with care: a run may have been killed, restarted, or
made by an older version.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_balance.errors import ConfigError
from megatron_balance.files import parse_json
from megatron_balance.lab.bench import Figures
from megatron_balance.lab.report import numbers

STEPS_FILE = "steps.jsonl"
BEGINNING = '{"step": '
"""Of every record. A line that begins so and is no JSON was cut short, not damaged."""

NUMBERS = (
    *(
        "loss",
        "grad_norm",
        "num_sequences",
        "num_tokens",
        "num_microbatches",
        "kv_tokens_received",
        "kv_tokens_received_inter_node",
    ),
    *("kernel_calls", "remapped_tokens", "routed_transfers", "plan_ms", "plan_wait_ms", "predicted_ms"),
)
"""Keys that a record may lack; a number, or null."""

LOADS = ("imbalance_before", "imbalance_after")
"""Keys that a record may lack: largest over mean load, of `tokens` and of `attention`."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run's steps in order, each once; `notes`: oddities of its file, and how they were read."""

    label: str
    path: str
    steps: tuple[Figures, ...]
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    def series(self, key: str) -> list[float | None]:
        """A number of every step; `imbalance_after.tokens` reaches into an object."""
        values: list[float | None] = []
        outer, _, inner = key.partition(".")
        for step in self.steps:
            value = step.get(outer)
            values.append(cast(Figures, value).get(inner) if inner and value is not None else value)
        return values

    def numbers(self, key: str) -> list[float]:
        """`series` without the steps that lack the key."""
        return [value for value in self.series(key) if value is not None]


def read(path: Path, option: str = "--steps") -> LoggedRun:
    """The run whose `--balance-log` folder or `steps.jsonl` this is."""
    file = path / STEPS_FILE if path.is_dir() else path
    if file.exists() and not file.is_file():
        raise ConfigError(f"{option} {path}: not a file; give the folder of --balance-log, or the steps.jsonl in it")
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        what = "holds no steps.jsonl" if path.is_dir() and not file.exists() else f"cannot be read: {error.strerror}"
        raise ConfigError(
            f"{option} {path}: {what}; give the folder of --balance-log, or the steps.jsonl in it"
        ) from None
    records, notes = _records(text, file)
    if not records:
        raise ConfigError(f"{option} {file}: has no steps; the run ended before its first one, or logged elsewhere")
    steps, repeated = _each_once(records)
    if repeated:
        notes.append(
            f"{numbers.count(repeated, 'step')} ran more than once, as after a restart from a checkpoint; the last "
            "time counts."
        )
    notes += _unsound(steps)
    missing = tuple(key for key in (*NUMBERS, *LOADS) if all(step.get(key) is None for step in steps))
    label = file.parent.name if file.name == STEPS_FILE and file.parent.name else file.stem
    return LoggedRun(label, str(file), tuple(steps), tuple(notes), missing)


def read_all(paths: Sequence[Path]) -> list[LoggedRun]:
    """Several runs, whose labels differ."""
    runs = [read(path) for path in paths]
    if len({Path(run.path).resolve() for run in runs}) < len(runs):
        raise ConfigError(f"--steps {paths[0]}: is given twice; a run is held against another one")
    if len({run.label for run in runs}) == len(runs):
        return runs
    return [LoggedRun(run.path, run.path, run.steps, run.notes, run.missing) for run in runs]


def _records(text: str, file: Path) -> tuple[list[Figures], list[str]]:
    records: list[Figures] = []
    notes: list[str] = []
    lines = text.split("\n")
    last = max((at for at, line in enumerate(lines) if line.strip()), default=-1)
    empty = sum(not line.strip() for line in lines[: last + 1])
    if empty:
        notes.append(f"{numbers.count(empty, 'empty line')} left out.")
    for at, line in enumerate(lines[: last + 1]):
        if not line.strip():
            continue
        where = f"{file}, line {at + 1}"
        try:
            loaded: Any = parse_json(line)
        except ValueError as error:
            if at == last and at == len(lines) - 1:  # no newline after it: the writer was stopped
                notes.append(
                    f"Line {at + 1}, the last, is incomplete, as when a run is killed while it writes; it is left out."
                )
                continue
            if line.startswith(BEGINNING):
                notes.append(
                    f"Line {at + 1} is incomplete, as when a run is killed while it writes, or its disk is full, and "
                    "another goes on; it is left out."
                )
                continue
            raise ConfigError(
                f"{where}: is damaged ({error}), got {line[:60]!r}; delete the line, or give another run"
            ) from None
        records.append(_checked(loaded, where))
    return records, notes


def _checked(loaded: Any, where: str) -> Figures:
    """One record, with numbers that are none as None."""
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where}: expected an object with the keys of a step, got {json.dumps(loaded)[:60]}")
    record = dict(cast(Figures, loaded))
    step, step_ms = record.get("step"), record.get("step_ms")
    if not isinstance(step, int) or isinstance(step, bool):
        raise ConfigError(
            f"{where}: expected the number of the step in the key 'step', {_got(record, 'step')}; is this a "
            "steps.jsonl?"
        )
    if not _is_number(step_ms) or not math.isfinite(cast(float, step_ms)) or cast(float, step_ms) <= 0:
        raise ConfigError(
            f"{where}: expected milliseconds in the key 'step_ms', {_got(record, 'step_ms')}; is this a steps.jsonl?"
        )
    for key in NUMBERS:
        record[key] = _number(record, key, f"{where}: {key}")
    for key in LOADS:
        record[key] = _loads(record, key, where)
    if not isinstance(record.get("planner", ""), str):
        raise ConfigError(f"{where}: planner: expected a name, {_got(record, 'planner')}")
    return record


def _loads(record: Figures, key: str, where: str) -> Figures | None:
    loads: Any = record.get(key)
    if loads is None:
        return None
    if not isinstance(loads, dict):
        raise ConfigError(f"{where}: {key}: expected an object with 'tokens' and 'attention', {_got(record, key)}")
    of_key = cast(Figures, loads)
    return {part: _number(of_key, part, f"{where}: {key}.{part}") for part in ("tokens", "attention")}


def _number(record: Figures, key: str, where: str) -> float | None:
    value = record.get(key)
    if value is None:
        return None
    if not _is_number(value):
        raise ConfigError(f"{where}: expected a number, {_got(record, key)}")
    return value if math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _got(record: Figures, key: str) -> str:
    return f"got {json.dumps(record[key])[:40]}" if key in record else "which is missing"


def _each_once(records: Sequence[Figures]) -> tuple[list[Figures], int]:
    """Records in order of step, the last of each, and the number of earlier ones dropped."""
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)], len(records) - len(by_step)


def _unsound(steps: Sequence[Figures]) -> list[str]:
    """Gaps, and losses that are not numbers."""
    notes: list[str] = []
    span = steps[-1]["step"] - steps[0]["step"] + 1
    if span > len(steps):
        notes.append(
            f"{numbers.count(span - len(steps), 'step')} between {steps[0]['step']} and {steps[-1]['step']} are not in "
            "the log."
        )
    lost = sum(step["loss"] is None for step in steps)
    if 0 < lost < len(steps):
        notes.append(
            f"{numbers.count(lost, 'step')} has no loss, or one that is not a finite number."
            if lost == 1
            else f"{lost} steps have no loss, or one that is not a finite number."
        )
    return notes


MOST_STEPS = 8
"""Steps of a run that are simulated, evenly spread over it."""


@dataclass(frozen=True, slots=True)
class RealBatches:
    """Steps of a run. `lengths`: of each microbatch, step by step; `microbatches`: of a step.

    `label`, `path`: of the run; `planner`: of its last step; `step_ms`: of these steps, the mean.
    """

    label: str
    path: Path
    lengths: tuple[tuple[int, ...], ...]
    microbatches: int
    steps: tuple[int, ...]
    num_steps: int
    planner: str
    step_ms: float

    def beside(self, name: str) -> str | None:
        """A file beside the run's log."""
        file = self.path.parent / name
        return str(file) if file.is_file() else None

    def sentence(self, planner: str, step_s: float) -> str:
        """A sentence on the steps that were simulated, and how far `planner` is from the clock."""
        measured = (
            f"; there they took {self.step_ms / 1e3:.3g} s in the mean (measured, {self.planner}), here {step_s:.3g} s "
            "(simulated)"
            if planner == self.planner
            else ""
        )
        return f"The batches are those of {len(self.steps)} of the {self.num_steps} steps of {self.label}{measured}."


def real_batches(path: Path) -> RealBatches:
    """The batches of a run: of its usual steps, `MOST_STEPS` evenly spread."""
    run = read(path, "--run")
    known = [step for step in run.steps if _is_lengths(step.get("lengths"))]
    if not known:
        raise ConfigError(
            f"--run {path}: its steps hold no lengths, as those of an earlier version; train some steps with this one, "
            "or report what was measured with --steps"
        )
    usual = Counter(len(step["lengths"]) for step in known).most_common(1)[0][0]
    known = [step for step in known if len(step["lengths"]) == usual]
    every = max(1, len(known) // MOST_STEPS)
    chosen = known[::every][:MOST_STEPS]
    return RealBatches(
        run.label,
        Path(run.path),
        tuple(tuple(each) for step in chosen for each in step["lengths"]),
        usual,
        tuple(step["step"] for step in chosen),
        len(run.steps),
        str(chosen[-1].get("planner") or ""),
        sum(step["step_ms"] for step in chosen) / len(chosen),
    )


def _is_lengths(given: Any) -> bool:
    """Whether this is a list of lists of tokens, with some in it."""
    if not isinstance(given, list) or not given:
        return False
    microbatches = cast("list[Any]", given)
    if not all(isinstance(each, list) for each in microbatches):
        return False
    every = [length for each in cast("list[list[Any]]", microbatches) for length in each]
    return bool(every) and all(type(length) is int and length > 0 for length in every)

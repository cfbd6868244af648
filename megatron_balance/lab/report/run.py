"""A training run, or two, as one JSON document: everything that its page says. Measured, but for what
the plans predicted.

Its `steps.jsonl` is read with care: a run may have been killed, restarted, or made by older code.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.files import parse_json
from megatron_balance.lab.bench import Figures
from megatron_balance.lab.report import page

STEPS_FILE = "steps.jsonl"
# Of every record. A line that begins so and is no JSON was cut short, not damaged.
BEGINNING = '{"step": '

# Keys that a record may lack; a number, or null.
NUMBERS = (
    *("loss", "grad_norm", "num_sequences", "num_tokens", "num_microbatches"),
    *("kv_tokens_received", "kv_tokens_received_inter_node"),
    *("kernel_calls", "remapped_tokens", "routed_transfers", "plan_ms", "plan_wait_ms", "predicted_ms"),
)

# Keys that a record may lack: largest over mean load, of `tokens` and of `attention`.
LOADS = ("imbalance_before", "imbalance_after")


@dataclass(frozen=True, slots=True)
class _LoggedRun:
    """A run's steps in order, each once; `notes`: oddities of its file, and how they were read."""

    label: str
    path: str
    steps: tuple[Figures, ...]
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    def series(self, key: str) -> list[float | None]:
        """A number of every step; `imbalance_after.tokens` reaches into an object."""
        outer, _, inner = key.partition(".")
        values = [step.get(outer) for step in self.steps]
        return [value.get(inner) if value else None for value in values] if inner else values

    def numbers(self, key: str) -> list[float]:
        """`series` without the steps that lack the key."""
        return [value for value in self.series(key) if value is not None]


def read(path: Path, option: str = "--steps") -> _LoggedRun:
    """The run whose `--balance-log` folder or `steps.jsonl` this is."""
    file = path / STEPS_FILE if path.is_dir() else path
    give = "give the folder of --balance-log, or the steps.jsonl in it"
    if file.exists() and not file.is_file():
        raise ConfigError(f"{option} {path}: not a file; {give}")
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        what = "holds no steps.jsonl" if path.is_dir() and not file.exists() else f"cannot be read: {error.strerror}"
        raise ConfigError(f"{option} {path}: {what}; {give}") from None
    records, notes = _records(text, file)
    if not records:
        raise ConfigError(f"{option} {file}: has no steps; the run ended before its first one, or logged elsewhere")
    # The last record of each step, in their order.
    by_step = {record["step"]: record for record in records}
    steps = [by_step[step] for step in sorted(by_step)]
    if repeated := len(records) - len(steps):
        notes.append(
            f"{page.count(repeated, 'step')} ran more than once, as after a restart from a checkpoint; the last "
            "time counts."
        )
    notes += _unsound(steps)
    missing = tuple(key for key in (*NUMBERS, *LOADS) if all(step.get(key) is None for step in steps))
    label = file.parent.name if file.name == STEPS_FILE and file.parent.name else file.stem
    return _LoggedRun(label, str(file), tuple(steps), tuple(notes), missing)


def _read_all(paths: Sequence[Path]) -> list[_LoggedRun]:
    """Several runs, whose labels differ."""
    runs = [read(path) for path in paths]
    if len({Path(run.path).resolve() for run in runs}) < len(runs):
        raise ConfigError(f"--steps {paths[0]}: is given twice; a run is held against another one")
    if len({run.label for run in runs}) == len(runs):
        return runs
    return [replace(run, label=run.path) for run in runs]


def _records(text: str, file: Path) -> tuple[list[Figures], list[str]]:
    records: list[Figures] = []
    notes: list[str] = []
    lines = text.split("\n")
    last = max((at for at, line in enumerate(lines) if line.strip()), default=-1)
    empty = sum(not line.strip() for line in lines[: last + 1])
    if empty:
        notes.append(f"{page.count(empty, 'empty line')} left out.")
    for at, line in enumerate(lines[: last + 1]):
        if not line.strip():
            continue
        where = f"{file}, line {at + 1}"
        try:
            loaded: Any = parse_json(line)
        except ValueError as error:
            stopped = at == last and at == len(lines) - 1  # no newline after it
            if stopped or line.startswith(BEGINNING):
                which, more = (", the last,", "") if stopped else ("", ", or its disk is full, and another goes on")
                how = f"as when a run is killed while it writes{more}; it is left out."
                notes.append(f"Line {at + 1}{which} is incomplete, {how}")
                continue
            got = f"got {line[:60]!r}; delete the line, or give another run"
            raise ConfigError(f"{where}: is damaged ({error}), {got}") from None
        records.append(_checked(loaded, where))
    return records, notes


def _checked(loaded: Any, where: str) -> Figures:
    """One record, with numbers that are none as None."""
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where}: expected an object with the keys of a step, got {json.dumps(loaded)[:60]}")
    record = dict(cast(Figures, loaded))
    step, step_ms = record.get("step"), record.get("step_ms")
    is_time = _is_number(step_ms) and 0 < cast(float, step_ms) < math.inf
    for key, right, wanted in (
        ("step", type(step) is int, "the number of the step"),
        ("step_ms", is_time, "milliseconds"),
    ):
        if not right:
            got = f"{_got(record, key)}; is this a steps.jsonl?"
            raise ConfigError(f"{where}: expected {wanted} in the key {key!r}, {got}")
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


def _unsound(steps: Sequence[Figures]) -> list[str]:
    """Gaps, and losses that are not numbers."""
    notes: list[str] = []
    span = steps[-1]["step"] - steps[0]["step"] + 1
    if span > len(steps):
        notes.append(
            f"{page.count(span - len(steps), 'step')} between {steps[0]['step']} and {steps[-1]['step']} are not in "
            "the log."
        )
    lost = sum(step["loss"] is None for step in steps)
    if 0 < lost < len(steps):
        have = "1 step has" if lost == 1 else f"{lost} steps have"
        notes.append(f"{have} no loss, or one that is not a finite number.")
    return notes


# Steps of a run that are simulated, evenly spread over it.
MOST_STEPS = 8


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
    if any("segments" in step for step in known):
        raise ConfigError(
            f"--run {path}: its steps have trees, of which the log says lengths alone; simulate them from --trees "
            "FILE, or report what was measured with --steps"
        )
    usual = Counter(len(step["lengths"]) for step in known).most_common(1)[0][0]
    known = [step for step in known if len(step["lengths"]) == usual]
    known = known[WARM_UP:] if len(known) >= 3 * WARM_UP else known
    count = min(MOST_STEPS, len(known))
    chosen = [known[at * (len(known) - 1) // max(1, count - 1)] for at in range(count)]
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
    if not isinstance(given, list) or not given:
        return False
    microbatches = cast("list[Any]", given)
    if not all(isinstance(each, list) for each in microbatches):
        return False
    every = [length for each in cast("list[list[Any]]", microbatches) for length in each]
    return bool(every) and all(type(length) is int and length > 0 for length in every)


# Points of a curve; longer runs are drawn as means of neighbouring steps.
MOST_POINTS = 1500

CURVES = (
    "step_ms",
    *NUMBERS,
    *(f"{when}.{what}" for when in ("imbalance_before", "imbalance_after") for what in ("tokens", "attention")),
)

# First steps of a run, which allocate and connect; left out of means if there are enough others.
WARM_UP = 2


def document(paths: Sequence[Path]) -> Figures:
    """The figures of one run, or of two side by side."""
    runs = _read_all(paths)
    described = {run.label: _described(run) for run in runs}
    compared = _compared(runs) if len(runs) > 1 else None
    limited = {label: _limits(each) for label, each in described.items()}
    return {
        "report": "trained",
        "kind": "measured",
        "answer": [*([compared["sentence"]] if compared else []), *(each["sentence"] for each in limited.values())],
        "runs": list(described.values()),
        "compared": compared,
        "limits": limited,
        "try_next": {label: _suggestions(each, limited[label]) for label, each in described.items()},
    }


def _described(run: _LoggedRun) -> Figures:
    """One run: means without the warm-up, and curves with it."""
    steady = replace(run, steps=run.steps[WARM_UP:] if len(run.steps) >= 3 * WARM_UP else run.steps)
    step_ms = steady.numbers("step_ms")
    tokens, losses = steady.numbers("num_tokens"), run.numbers("loss")
    num_ranks, config = _num_ranks(run), Path(run.path).parent / "config.yaml"
    return {
        "label": run.label,
        "path": run.path,
        "config": str(config) if config.is_file() else None,
        "num_ranks": num_ranks,
        "planners": dict(Counter(str(step.get("planner") or "unnamed") for step in run.steps)),
        "num_steps": len(run.steps),
        "first_step": run.steps[0]["step"],
        "last_step": run.steps[-1]["step"],
        "steady_steps": len(steady.steps),
        "notes": list(run.notes),
        "missing": list(run.missing),
        "step_ms": {name: float(np.percentile(step_ms, at)) for name, at in (("median", 50), ("p5", 5), ("p95", 95))},
        "tokens_per_s": 1e3 * sum(tokens) / sum(step_ms) if len(tokens) == len(step_ms) else None,
        "loss": {"first": losses[0], "last": losses[-1], "lowest": min(losses)} if losses else None,
        "means": {key: fmean(steady.numbers(key)) if steady.numbers(key) else None for key in CURVES},
        "follows": _follows(steady),
        "curves": _curves(run),
    }


def _num_ranks(run: _LoggedRun) -> int | None:
    """Ranks of the pool, from the counters of each rank."""
    counters = run.steps[-1].get("counters")
    if not isinstance(counters, dict):
        return None
    lengths = {len(cast("list[Any]", each)) for each in cast(Figures, counters).values() if isinstance(each, list)}
    return lengths.pop() if len(lengths) == 1 else None


def _curves(run: _LoggedRun) -> Figures:
    """Every curve [points], None where it has nothing; `steps_per_point` neighbours are one point."""
    each = -(-len(run.steps) // MOST_POINTS)
    groups = [range(at, min(len(run.steps), at + each)) for at in range(0, len(run.steps), each)]
    curves: Figures = {"steps_per_point": each, "step": [run.steps[group[-1]]["step"] for group in groups]}
    for key in CURVES:
        if key.split(".")[0] not in run.missing:
            values = run.series(key)
            curves[key] = [_mean([values[at] for at in group]) for group in groups]
    return curves


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


# What goes with what

# Steps below which nothing is said about what goes with what.
FEWEST = 8


def _follows(run: _LoggedRun) -> Figures:
    """Spearman's rank correlation of the time of a step with its other figures, where both vary."""
    correlations: Figures = {}
    step_ms = run.series("step_ms")
    for key in NAMES:
        pairs = [(a, b) for a, b in zip(step_ms, run.series(key), strict=True) if a is not None and b is not None]
        if len(pairs) >= FEWEST and len({b for _, b in pairs}) > 1 and len({a for a, _ in pairs}) > 1:
            a, b = (_ranked(values) for values in zip(*pairs, strict=True))
            correlations[key] = float(np.corrcoef(a, b)[0, 1])
    return correlations


def _ranked(values: Sequence[float]) -> np.ndarray:
    """The place of each value in order; equal ones share their mean place."""
    # The last of `count` equal values has place cumsum(count); the mean of their places is before it.
    _, place, count = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


# Two runs


def _compared(runs: Sequence[_LoggedRun]) -> Figures:
    """The second run against the first, on the steps that both have."""
    first, second = ({step["step"]: step for step in run.steps} for run in runs)
    common = sorted(first.keys() & second.keys())
    a, b = runs
    if not common:
        none = f"{a.label} and {b.label} have no step in common; they are not held against each other."
        return {"common_steps": 0, "sentence": none}
    steady = common[WARM_UP:] if len(common) >= 3 * WARM_UP else common
    times = [float(np.median([run[step]["step_ms"] for step in steady])) for run in (first, second)]
    ratio = times[0] / times[1]
    both = [(first[step]["loss"], second[step]["loss"]) for step in common]
    losses = [pair for pair in both if None not in pair]
    apart = max((abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in losses), default=None)
    seen = [
        [tuple(run[s].get(key) for key in ("num_tokens", "num_sequences")) for s in common] for run in (first, second)
    ]
    same = seen[0] == seen[1] and not any(None in each for each in seen[0])
    said = _versus(a, b, times, ratio)
    if apart is not None:
        said += f" The losses of a step differ by at most {apart:.1e} of themselves."
    if not same:
        said += " The two runs are not known to have seen the same sequences, so their times compare only on average."
    return {
        "kind": "measured",
        "common_steps": len(common),
        "median_step_ms": dict(zip((a.label, b.label), times, strict=True)),
        "times_as_fast": ratio,
        "largest_loss_difference": apart,
        "same_data": same,
        "sentence": said,
    }


def _versus(a: _LoggedRun, b: _LoggedRun, times: Sequence[float], ratio: float) -> str:
    """The faster one first."""
    fast, slow, near, far = (b, a, times[1], times[0]) if ratio >= 1 else (a, b, times[0], times[1])
    return (
        f"{fast.label} is {max(ratio, 1 / ratio):.2f} times as fast as {slow.label}: "
        f"{page.seconds(near / 1e3)} instead of {page.seconds(far / 1e3)} a step (medians, measured)."
    )


# Share of a step that waiting for plans may take before it is worth a word.
WAITS = 0.02
# Largest over mean load from which balance is worth a word.
UNEVEN = 1.1
# A prediction below this share of the step says little about it.
OFF = 0.5
# Rank correlation from which step time is said to follow something.
FOLLOWS = 0.6
# Share of received keys and values that come from other nodes, from which routing is worth a word.
CROSSING = 0.25

NAMES = {
    "kv_tokens_received_inter_node": "keys and values received from other nodes",
    "kv_tokens_received": "keys and values received from other ranks",
    "predicted_ms": "the computing that the plan predicted",
    "num_tokens": "the number of tokens",
    "num_sequences": "the number of sequences",
    "kernel_calls": "the number of attention kernel calls",
    "remapped_tokens": "the tokens that are remapped",
    "plan_wait_ms": "waiting for the plan",
}


def _limits(run: Figures) -> Figures:
    """A mean step's milliseconds by part, and a sentence on the largest."""
    means = run["means"]
    step_ms: float = means["step_ms"]
    wait = min(step_ms, means["plan_wait_ms"] or 0.0)
    predicted = min(step_ms - wait, means["predicted_ms"] or 0.0)
    uneven = _most(means, "imbalance_after")
    lost = predicted * (1 - 1 / uneven) if uneven else 0.0
    parts = {"plan_wait": wait, "imbalance": lost, "computing": predicted - lost, "rest": step_ms - wait - predicted}
    closest = max(run["follows"], key=lambda key: run["follows"][key], default=None)
    return {
        "kind": "measured",
        "step_ms": step_ms,
        "parts_ms": parts,
        "limit": max(parts, key=lambda part: parts[part]),
        "follows_most": closest,
        "sentence": _sentence(run, parts, closest),
    }


def _most(means: Figures, key: str) -> float | None:
    largest = [means[f"{key}.{part}"] for part in ("tokens", "attention") if means[f"{key}.{part}"] is not None]
    return max(largest, default=None)


def _sentence(run: Figures, parts: dict[str, float], closest: str | None) -> str:
    step_ms = sum(parts.values())
    largest = max(parts, key=lambda part: parts[part])
    share = f"{page.seconds(parts[largest] / 1e3)}, {page.percent(parts[largest] / step_ms)}"
    what = f"A step of {run['label']} took {page.seconds(step_ms / 1e3)} in the mean (measured)"
    match largest:
        case "plan_wait":
            return f"{what}, and waiting for plans limits it: {share} of it."
        case "computing" | "imbalance":
            computing = page.percent((parts["computing"] + parts["imbalance"]) / step_ms)
            but = f", most of that ({share}) waiting for the fullest rank" if largest == "imbalance" else ""
            return f"{what}. Computing limits it: by the plans' predictions (simulated) {computing} of it{but}."
        case _:
            if run["means"]["predicted_ms"] is None:
                return f"{what}; the log holds no prediction to hold it against." + _followed(run, closest)
            return (
                f"{what}. The plans predict {page.seconds((parts['computing'] + parts['imbalance']) / 1e3)} of "
                f"computing in it (simulated); the rest, {share} of it, is what they leave out (transfers, what "
                "surrounds the layers) or a machine that is slower than its configuration "
                "says." + _followed(run, closest)
            )


def _followed(run: Figures, closest: str | None) -> str:
    if closest is None or run["follows"][closest] < FOLLOWS:
        return ""
    agrees = f"rank correlation {run['follows'][closest]:.2f} over {page.count(run['steady_steps'], 'step')}"
    if closest == "predicted_ms":
        return f" From step to step the time follows that prediction ({agrees}): its order is right, its scale is not."
    return (
        f" From step to step the time follows {NAMES[closest]} most closely ({agrees}), which makes that the first "
        "suspect and proves nothing."
    )


def _suggestions(run: Figures, split: Figures) -> list[str]:
    """Suggestions for which the log gives reason; none of them was simulated or run."""
    means, parts, step_ms = run["means"], split["parts_ms"], split["step_ms"]
    sentences: list[str] = []
    wait = parts["plan_wait"] / step_ms
    if wait >= WAITS:
        sentences.append(
            "Plan ahead (`plan_ahead: true` in the configuration) or with a cheaper planner: steps waited "
            f"{page.seconds(parts['plan_wait'] / 1e3)} for plans in the mean, {page.percent(wait)} of a step "
            "(measured); that much could go."
        )
    uneven = _most(means, "imbalance_after")
    if uneven is not None and uneven >= UNEVEN:
        sentences.append(
            f"Balance better: the most loaded rank has {uneven:.2f} times the mean load (counted), so even loads would "
            f"save up to {page.percent(1 - 1 / uneven)} of what ranks compute. More capacity (`tokens_per_rank`) "
            "leaves a planner more choice."
        )
    crossing, received = means["kv_tokens_received_inter_node"], means["kv_tokens_received"]
    if crossing and received and crossing / received >= CROSSING:
        sentences.append(
            f"{page.percent(crossing / received)} of the received keys and values come from other nodes (counted): "
            "`routing: always` sends them over all NICs, and planners that keep sequences inside nodes send fewer."
        )
    predicted = means["predicted_ms"]
    if predicted is not None and predicted < OFF * step_ms:
        sentences.append(
            "Measure this machine with `megatron-balance profile`: the predictions (simulated) are "
            f"{page.percent(predicted / step_ms)} "
            "of the measured steps, and a cost table of its own (`plan_costs`) makes them its own."
        )
    sentences.append(_simulate(run))
    return sentences


def _simulate(run: Figures) -> str:
    config = f" --config {run['config']}" if run["config"] else ""
    ranks = f" --ranks {run['num_ranks']}" if run["num_ranks"] else ""
    tokens = run["means"]["num_tokens"]
    drawn = f" --tokens {round(tokens / (run['means']['num_microbatches'] or 1))}" if tokens else ""
    return (
        "Nothing was simulated for this page. To see by how much another planner, routing or NICs would help on "
        f"these very batches: `megatron-balance report --run {run['path']} --out next.html`; on others: "
        f"`megatron-balance report{config}{ranks} --dataset YOUR_CORPUS{drawn} --out next.html`."
    )

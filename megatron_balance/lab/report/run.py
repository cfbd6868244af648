"""A training run, or two, as one JSON document: everything that its page says.

Measured, but for what the plans predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np

from megatron_balance.lab.report import verdict, words
from megatron_balance.lab.report.cases import Figures
from megatron_balance.lab.report.steps import NUMBERS, LoggedRun, read_all

MOST_POINTS = 1500
"""Points of a curve; longer runs are drawn as means of neighbouring steps."""

CURVES = (
    "step_ms",
    *NUMBERS,
    *(f"{when}.{what}" for when in ("imbalance_before", "imbalance_after") for what in ("tokens", "attention")),
)

WARM_UP = 2
"""First steps of a run, which allocate and connect; left out of means if there are enough others.
"""


def document(paths: Sequence[Path]) -> Figures:
    """The figures of one run, or of two side by side.

    Raises:
        ConfigError: a file that is no run's.
    """
    runs = read_all(paths)
    described_runs = [described(run) for run in runs]
    compared = _compared(runs) if len(runs) > 1 else None
    limits = {run.label: verdict.limits(each) for run, each in zip(runs, described_runs, strict=True)}
    return {
        "report": "trained",
        "kind": "measured",
        "answer": [*([compared["sentence"]] if compared else []), *(limits[run.label]["sentence"] for run in runs)],
        "runs": described_runs,
        "compared": compared,
        "limits": limits,
        "try_next": {
            run.label: verdict.suggestions(each, limits[run.label])
            for run, each in zip(runs, described_runs, strict=True)
        },
    }


def described(run: LoggedRun) -> Figures:
    """One run: means without the warm-up, and curves with it."""
    steady = LoggedRun(run.label, run.path, run.steps[WARM_UP:] if len(run.steps) >= 3 * WARM_UP else run.steps, (), ())
    step_ms = steady.numbers("step_ms")
    tokens = steady.numbers("num_tokens")
    num_ranks = _num_ranks(run)
    return {
        "label": run.label,
        "path": run.path,
        "config": _config(run),
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
        "loss": _ends(run.numbers("loss")),
        "means": {key: fmean(steady.numbers(key)) if steady.numbers(key) else None for key in CURVES},
        "follows": follows(steady),
        "curves": _curves(run),
    }


def _config(run: LoggedRun) -> str | None:
    """The resolved configuration beside the log."""
    file = Path(run.path).parent / "config.yaml"
    return str(file) if file.is_file() else None


def _num_ranks(run: LoggedRun) -> int | None:
    """Ranks of the pool, from the counters of each rank."""
    counters = run.steps[-1].get("counters")
    if not isinstance(counters, dict):
        return None
    lengths = {len(cast("list[Any]", each)) for each in cast(Figures, counters).values() if isinstance(each, list)}
    return lengths.pop() if len(lengths) == 1 else None


def _ends(losses: Sequence[float]) -> Figures | None:
    return {"first": losses[0], "last": losses[-1], "lowest": min(losses)} if losses else None


def _curves(run: LoggedRun) -> Figures:
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

FOLLOWED = (
    "kv_tokens_received_inter_node",
    "kv_tokens_received",
    "predicted_ms",
    "num_tokens",
    "num_sequences",
    "kernel_calls",
    "remapped_tokens",
    "plan_wait_ms",
)

FEWEST = 8
"""Steps below which nothing is said about what goes with what."""


def follows(run: LoggedRun) -> Figures:
    """Spearman's rank correlation of the time of a step with its other figures, where both vary."""
    correlations: Figures = {}
    step_ms = run.series("step_ms")
    for key in FOLLOWED:
        pairs = [(a, b) for a, b in zip(step_ms, run.series(key), strict=True) if a is not None and b is not None]
        if len(pairs) >= FEWEST and len({b for _, b in pairs}) > 1 and len({a for a, _ in pairs}) > 1:
            a, b = (_ranked(values) for values in zip(*pairs, strict=True))
            correlations[key] = float(np.corrcoef(a, b)[0, 1])
    return correlations


def _ranked(values: Sequence[float]) -> np.ndarray:
    """The place of each value in order; equal ones share their mean place."""
    _, place, count = np.unique(np.array(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


# Two runs


def _compared(runs: Sequence[LoggedRun]) -> Figures:
    """The second run against the first, on the steps that both have."""
    first, second = ({step["step"]: step for step in run.steps} for run in runs)
    common = sorted(first.keys() & second.keys())
    a, b = runs
    if not common:
        return {
            "common_steps": 0,
            "sentence": f"{a.label} and {b.label} have no step in common; they are not held against each other.",
        }
    steady = common[WARM_UP:] if len(common) >= 3 * WARM_UP else common
    times = [float(np.median([run[step]["step_ms"] for step in steady])) for run in (first, second)]
    ratio = times[0] / times[1]
    losses = [
        (first[s]["loss"], second[s]["loss"])
        for s in common
        if first[s]["loss"] is not None and second[s]["loss"] is not None
    ]
    apart = max((abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in losses), default=None)
    same = all(first[s].get(key) == second[s].get(key) for s in common for key in ("num_tokens", "num_sequences"))
    return {
        "kind": "measured",
        "common_steps": len(common),
        "median_step_ms": dict(zip((a.label, b.label), times, strict=True)),
        "times_as_fast": ratio,
        "largest_loss_difference": apart,
        "same_data": same,
        "sentence": _versus(a, b, times, ratio) + _losses(apart) + _data(same),
    }


def _versus(a: LoggedRun, b: LoggedRun, times: Sequence[float], ratio: float) -> str:
    """The faster one first."""
    fast, slow, near, far = (b, a, times[1], times[0]) if ratio >= 1 else (a, b, times[0], times[1])
    return (
        f"{fast.label} is {words.times(max(ratio, 1 / ratio))} as fast as {slow.label}: {words.seconds(near / 1e3)} "
        "instead of "
        f"{words.seconds(far / 1e3)} a step (medians, measured)."
    )


def _losses(apart: float | None) -> str:
    return "" if apart is None else f" The losses of a step differ by at most {apart:.1e} of themselves."


def _data(same: bool) -> str:
    return (
        ""
        if same
        else " The two runs did not see the same sequences step by step, so their times compare only on average."
    )

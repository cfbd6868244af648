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

from megatron_balance.lab.bench import Figures
from megatron_balance.lab.report import numbers
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
    """The figures of one run, or of two side by side."""
    runs = read_all(paths)
    described_runs = [_described(run) for run in runs]
    compared = _compared(runs) if len(runs) > 1 else None
    limited = {run.label: limits(each) for run, each in zip(runs, described_runs, strict=True)}
    return {
        "report": "trained",
        "kind": "measured",
        "answer": [*([compared["sentence"]] if compared else []), *(limited[run.label]["sentence"] for run in runs)],
        "runs": described_runs,
        "compared": compared,
        "limits": limited,
        "try_next": {
            run.label: _suggestions(each, limited[run.label]) for run, each in zip(runs, described_runs, strict=True)
        },
    }


def _described(run: LoggedRun) -> Figures:
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
    # The last of `count` equal values has place cumsum(count); the mean of their places is before it.
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
        f"{fast.label} is {numbers.times(max(ratio, 1 / ratio))} as fast as {slow.label}: "
        f"{numbers.seconds(near / 1e3)} instead of {numbers.seconds(far / 1e3)} a step (medians, measured)."
    )


def _losses(apart: float | None) -> str:
    return "" if apart is None else f" The losses of a step differ by at most {apart:.1e} of themselves."


def _data(same: bool) -> str:
    return (
        ""
        if same
        else " The two runs did not see the same sequences step by step, so their times compare only on average."
    )


WAITS = 0.02
"""Share of a step that waiting for plans may take before it is worth a word."""

UNEVEN = 1.1
"""Largest over mean load from which balance is worth a word."""

OFF = 0.5
"""A prediction below this share of the step says little about it."""

FOLLOWS = 0.6
"""Rank correlation from which step time is said to follow something."""

CROSSING = 0.25
"""Share of received keys and values that come from other nodes, from which routing is worth a word.
"""

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


def limits(run: Figures) -> Figures:
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
    share = f"{numbers.seconds(parts[largest] / 1e3)}, {numbers.percent(parts[largest] / step_ms)}"
    what = f"A step of {run['label']} took {numbers.seconds(step_ms / 1e3)} in the mean (measured)"
    match largest:
        case "plan_wait":
            return f"{what}, and waiting for plans limits it: {share} of it."
        case "computing" | "imbalance":
            return (
                f"{what}. Computing limits it: by the plans' predictions (simulated) "
                f"{numbers.percent((parts['computing'] + parts['imbalance']) / step_ms)} of it."
            )
        case _:
            if run["means"]["predicted_ms"] is None:
                return f"{what}; the log holds no prediction to hold it against." + _followed(run, closest)
            return (
                f"{what}. The plans predict {numbers.seconds((parts['computing'] + parts['imbalance']) / 1e3)} of "
                f"computing in it (simulated); the rest, {share} of it, is what they leave out (transfers, what "
                "surrounds the layers) or a machine that is slower than its configuration "
                "says." + _followed(run, closest)
            )


def _followed(run: Figures, closest: str | None) -> str:
    if closest is None or run["follows"][closest] < FOLLOWS:
        return ""
    agrees = f"rank correlation {run['follows'][closest]:.2f} over {numbers.count(run['steady_steps'], 'step')}"
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
            f"{numbers.seconds(parts['plan_wait'] / 1e3)} for plans in the mean, {numbers.percent(wait)} of a step "
            "(measured); that much could go."
        )
    uneven = _most(means, "imbalance_after")
    if uneven is not None and uneven >= UNEVEN:
        sentences.append(
            f"Balance better: the most loaded rank has {uneven:.2f} times the mean load (counted), so even loads would "
            f"save up to {numbers.percent(1 - 1 / uneven)} of what ranks compute. More capacity (`tokens_per_rank`) "
            "leaves a planner more choice."
        )
    crossing, received = means["kv_tokens_received_inter_node"], means["kv_tokens_received"]
    if crossing and received and crossing / received >= CROSSING:
        sentences.append(
            f"{numbers.percent(crossing / received)} of the received keys and values come from other nodes (counted): "
            "`routing: always` sends them over all NICs, and planners that keep sequences inside nodes send fewer."
        )
    predicted = means["predicted_ms"]
    if predicted is not None and predicted < OFF * step_ms:
        sentences.append(
            "Measure this machine with `megatron-balance profile`: the predictions (simulated) are "
            f"{numbers.percent(predicted / step_ms)} "
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

"""The order of planners in a table, which of them is the best, and what it saves: one that a job can
run.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

APART = 0.03
"""Share by which the speedups of median steps and of all steps may differ without a word."""

BILLION = 1e9
"""Tokens for which GPU-hours and their cost are told."""

Row = Mapping[str, Any]
"""Figures of a planner or variant: `step_s`; `fits`, in memory; `hides`, its planning in a step."""


def named(row: Row) -> str:
    """The planner, with the size of its replicas where it keeps replicas."""
    size = row["context_parallel"]
    return row["planner"] if size is None else f"{row['planner']} (CP {size})"


def runs(row: Row) -> bool:
    """Whether a job can run these steps: they fit in memory, and planning hides behind them."""
    return row["fits"] and row["hides"]


def why_not(row: Row) -> str:
    """The reason why a job cannot run these steps; empty: it can."""
    if not row["fits"]:
        return "does not fit in memory"
    return "" if row["hides"] else "takes longer to plan than a step"


def standing(row: Row) -> tuple[bool, bool, float]:
    """The order: what a job can run, then what fits, then the rest; the fastest first."""
    return not runs(row), not row["fits"], row["step_s"]


def best_of(rows: Sequence[Row]) -> str | None:
    """The planner with the fastest steps of those that a job can run; None: there is none."""
    best = min(rows, key=standing)
    return best["planner"] if runs(best) else None


def gpu_hours(tokens_per_s: float, num_gpus: int) -> float:
    """GPU-hours of a billion tokens."""
    return num_gpus * BILLION / tokens_per_s / 3600


def hold_against(rows: Sequence[MutableMapping[str, Any]], base: Row) -> None:
    """Add to each row its speedup over `base`, of median steps and of all, and saved GPU-hours."""
    for row in rows:
        row["speedup"] = base["step_s"] / row["step_s"]
        row["mean_speedup"] = row["tokens_per_s"] / base["tokens_per_s"]
        row["gpu_hours_saved"] = base["gpu_hours"] - row["gpu_hours"]


def in_the_mean(row: Row) -> str:
    """A note on the speedup over all steps, where that of median steps says otherwise; else empty."""
    apart = abs(row["mean_speedup"] / row["speedup"] - 1)
    return (
        f"over all steps {row['mean_speedup']:.2f}x, over the median one {row['speedup']:.2f}x" if apart > APART else ""
    )


def saving(row: Row, base: Row, price: float | None) -> str:
    """A sentence on what `row` saves beside `base`; `price`: of a GPU-hour, in any currency."""
    hours, saved = row["gpu_hours"], row["gpu_hours_saved"]
    cannot, mean = why_not(base), in_the_mean(row)
    note = f"; {base['planner']} {cannot}, so no job spends them" if cannot else ""
    cost = "" if price is None else f", {price * saved:,.2f} at {price:g} an hour"
    return (
        f"{row['planner']} takes {hours:,.1f} GPU-hours for a billion tokens, {named(base)} "
        f"{base['gpu_hours']:,.1f}: {saved:,.1f} saved ({saved / base['gpu_hours']:.0%}{cost}); MFU {row['mfu']:.1%} "
        f"instead of {base['mfu']:.1%}{note}{f'; speedup {mean}' if mean else ''}"
    )

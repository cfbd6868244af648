"""The answer in a few sentences: what is fastest, what limits it, what to try next."""

from __future__ import annotations

from megatron_balance.lab.report import words
from megatron_balance.lab.report.cases import Figures
from megatron_balance.lab.report.standing import in_the_mean, named, runs, why_not
from megatron_balance.lab.report.tries import recommended

FIRST = 3
BOUGHT = 2
"""Number of suggestions that become sentences: changes that cost nothing, and machines to buy."""


def answer(
    rows: list[Figures], names: tuple[str, str], limits: Figures, tried: Figures, memory_bytes: float
) -> list[str]:
    """Sentences for readers of nothing else; `names`: of the baseline and of the best planner."""
    base, best = (next(row for row in rows if row["planner"] == name) for name in names)
    return [_fastest(base, best), *_room(best, memory_bytes), limits["sentence"], *suggestions(tried)[:1]]


def _fastest(base: Figures, best: Figures) -> str:
    today = named(base)
    if base is best:
        return (
            f"{today} takes {words.seconds(base['step_s'])} a step (simulated); there is no other planner to hold it "
            "against that fits in memory and plans within a step."
        )
    if not runs(best):
        return (
            f"No planner that was compared fits in memory and plans within a step; the nearest, {best['planner']}, "
            f"takes {words.seconds(best['step_s'])} a step (simulated)."
        )
    versus = f"{words.seconds(best['step_s'])} instead of {words.seconds(base['step_s'])} a step (simulated)"
    if best["speedup"] >= 1:
        cannot = f" {base['planner']} {why_not(base)}: no job takes its time." if why_not(base) else ""
        return f"{best['planner']} is {words.times(best['speedup'])} as fast as {today}: {versus}.{_mean(best)}{cannot}"
    return f"No planner that was compared beats {today}; the nearest, {best['planner']}, takes {versus}."


def _mean(row: Figures) -> str:
    return f" These are median steps; {in_the_mean(row)}." if in_the_mean(row) else ""


def _room(row: Figures, memory_bytes: float) -> list[str]:
    if row["fits"] and not row["hides"]:
        return [
            f"Its planning takes {words.seconds(row['plan_ms'] / 1e3)} a batch (measured), longer than the step: "
            "training would wait for it."
        ]
    if row["fits"]:
        return []
    return [
        f"It does not fit: a rank would need {words.size(row['peak_bytes'])} and has {words.size(memory_bytes)} "
        "(simulated). Its time is "
        "what a step would take if it did."
    ]


def suggestions(tried: Figures) -> list[str]:
    """Suggestions, best first, each with its gain: changes that cost nothing, then another machine."""
    own, bought = recommended(tried, ("planner", "step")), recommended(tried, ("machine",))
    sentences = [_suggestion(row, tried) for row in own[:FIRST]]
    if not own and tried["fits"]:
        rows = [row for row in tried["tries"] if row["where"] != "machine" and row["fits"]]
        sentences.append(
            f"None of the {len(rows)} other settings that were simulated and fit in memory makes a step of "
            f"{tried['planner']} more than 1 "
            "% faster."
        )
    if not own and not tried["fits"]:
        sentences.append(
            "None of the settings that were simulated fits in memory; use fewer tokens on a rank, or more ranks."
        )
    return [*sentences, *(_suggestion(row, tried) for row in bought[:BOUGHT])]


def _suggestion(row: Figures, tried: Figures) -> str:
    before, after = words.seconds(tried["step_s"]), words.seconds(row["step_s"])
    gain = f"{before} would become {after} a step, {words.times(row['times_as_fast'])} as fast (simulated)"
    if row["where"] == "machine":
        return f"With {row['name']}, {gain}."
    how = f" (`{row['options']}`)" if row["options"] else ""
    if not tried["fits"]:
        return f"To make it fit in memory: {row['name']}{how}; {gain}."
    return f"Try {row['name']}{how}: {gain}."

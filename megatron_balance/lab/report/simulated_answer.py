"""Sections of the simulated page: limits of the step, and variants to try next."""

from __future__ import annotations

from megatron_balance.lab.report import plots, words
from megatron_balance.lab.report.cases import Figures
from megatron_balance.lab.report.limits import COMPUTING, PARTS
from megatron_balance.lab.report.page import Bullets, Fold, HtmlTable, Item, Plot, Section, Text
from megatron_balance.lab.report.standing import standing

SHOWN_TRIES = 14
"""Variants that are drawn."""

SAME = 0.0005
"""A share of the step that is no difference."""


def limits(study: Figures) -> Section:
    """The parts of a step."""
    of_planners = study["limits"]
    caption = (
        "Grey, blue and green compute; everything else is what the step loses to something that could be better. "
        + " ".join(
            f"{name} loses {words.percent(1 - each['computing_s'] / each['step_s'])}."
            for name, each in of_planners.items()
        )
    )
    steps = next(iter(of_planners.values()))["num_steps"]
    parts = [part for part in PARTS if any(each["parts_s"][part] > 0 for each in of_planners.values())]
    rows = tuple(
        (
            PARTS[part],
            "computing" if part in COMPUTING else "loss",
            *(
                f"{words.seconds(each['parts_s'][part])} ({words.percent(each['parts_s'][part] / each['step_s'])})"
                for each in of_planners.values()
            ),
        )
        for part in parts
    )
    items: list[Item] = [
        Bullets(tuple(each["sentence"] for each in of_planners.values())),
        Plot("plot-limits", "What a step's seconds are lost to", caption, "simulated", *plots.limits(of_planners)),
        HtmlTable("the same as a table", ("part", "", *of_planners), rows, "simulated"),
        Text(
            f"Over the first {words.count(steps, 'step')}. One thing after another is made ideal, and charged what "
            "the step gains: no rank "
            "slower than the others, then transfers between nodes that take no time, then those inside nodes. What is "
            "left computes; what "
            "all ranks would take if they computed equally long is computing, and the rest is imbalance or waiting. "
            "Transfers that are "
            "hidden behind computing cost nothing."
        ),
    ]
    items += _kernels(study)
    return Section("limits", "What limits the step", tuple(items))


def _kernels(study: Figures) -> list[Item]:
    """A note where one planner computes the same attention much faster than the baseline."""
    base, best = (study["limits"][study[key]] for key in ("baseline", "shown"))
    slow, fast = base["parts_s"]["attention"], best["parts_s"]["attention"]
    if slow < 1.15 * fast:
        return []
    return [
        Text(
            f"The attention itself is the same work under every planner, but {base['planner']} computes "
            f"{words.seconds(slow)} for what "
            f"{best['planner']} computes in {words.seconds(fast)}: the smaller the pieces that sequences are cut "
            "into, the worse they fill "
            "a GPU."
        )
    ]


def what_next(study: Figures) -> Section:
    """Suggestions, and all that was tried."""
    tried = study["try_next"]
    rows = [row for row in tried["tries"] if abs(row["saves"]) >= SAME]
    best = study["shown"]
    items: list[Item] = [Bullets(tuple(tried["suggestions"]))]
    if rows:
        top = sorted(rows, key=standing)[:SHOWN_TRIES]
        caption = (
            f"Each bar is one change to {best} as it was asked for, simulated on the first "
            f"{words.count(tried['num_steps'], 'step')} "
            f"({words.seconds(tried['step_s'])} as it is): to the right a step takes less time, to the left more. "
            f"{'The best of all, ' if top[0]['saves'] > 0 else 'The nearest, '}{top[0]['name']}, takes "
            f"{words.seconds(top[0]['step_s'])}."
        )
        items.append(Plot("plot-next", "What a step would gain", caption, "simulated", *plots.gains(top)))
        table = HtmlTable(
            f"all that was simulated, beside {best} as it is",
            ("change", "options", "step", "times as fast", "memory at most"),
            tuple(
                (
                    row["name"],
                    f"`{row['options']}`" if row["options"] else "",
                    words.seconds(row["step_s"]),
                    f"{row['times_as_fast']:.2f}x",
                    f"{words.size(row['peak_bytes'])}{'' if row['fits'] else ' (too much)'}"
                    f"{'' if row['hides'] else '; planning does not hide'}",
                )
                for row in rows
            ),
            "simulated",
        )
        items.append(Fold(f"All {words.count(len(rows), 'change')} as a table", (table,)))
    same = [*tried["unchanged"], *(row["name"] for row in tried["tries"] if abs(row["saves"]) < SAME)]
    if same:
        items.append(Fold(f"{words.count(len(same), 'change')} made no difference", (Bullets(tuple(same)),)))
    if tried["impossible"]:
        reasons = tuple(f"{name}: {reason}" for name, reason in tried["impossible"].items())
        items.append(Fold(f"{words.count(len(reasons), 'change')} cannot be", (Bullets(reasons),)))
    return Section("next", "What to try next", tuple(items))

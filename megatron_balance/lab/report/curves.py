"""The plots of a training run, or of two, as Plotly figures: one colour a run, one curve a figure
of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_balance.lab.report.cases import Figures
from megatron_balance.lab.report.page import label
from megatron_balance.lab.report.plots import BLUE, GREY, ORANGE, RED, YELLOW, Figure, Json, axis, bars, layout, stacked

COLOURS = (RED, BLUE)

FEW = 40
"""Number of points up to which a curve marks them."""


def curve(runs: Sequence[Figures], key: str, title: str, *, log: bool = False) -> Figure:
    """One figure of every step."""
    data = [
        _line(run, key, run["label"], colour)
        for run, colour in zip(runs, COLOURS, strict=False)
        if key in run["curves"]
    ]
    return data, layout(
        330,
        xaxis=_step_axis(),
        yaxis=axis(title, type="log" if log else "linear", rangemode="normal" if log else "tozero"),
    )


def loss(runs: Sequence[Figures]) -> Figure:
    """The loss curve, which does not begin at zero."""
    data, common = curve(runs, "loss", "loss")
    return data, {**common, "yaxis": axis("loss")}


def imbalance(runs: Sequence[Figures]) -> Figure:
    """Before and after, attention over tokens."""
    data: list[Json] = []
    for at, what in enumerate(("attention", "tokens")):
        for run, colour in zip(runs, COLOURS, strict=False):
            for key, dash, word in (("imbalance_before", "dot", "before"), ("imbalance_after", "solid", "after")):
                if f"{key}.{what}" in run["curves"]:
                    line = _line(run, f"{key}.{what}", f"{run['label']}, {word}", colour, dash=dash)
                    data.append(
                        {
                            **line,
                            "legendgroup": f"{run['label']} {word}",
                            "showlegend": at == 0,
                            "yaxis": "y2" if at else "y",
                        }
                    )
    axes = {
        "yaxis": axis("attention, most/mean", domain=[0.56, 1.0]),
        "yaxis2": axis("tokens, most/mean", domain=[0.0, 0.44]),
    }
    return data, layout(470, xaxis={**_step_axis(), "anchor": "y2"}, **axes)


def keys_and_values(runs: Sequence[Figures]) -> Figure:
    """Received by a rank, mean over ranks; those of other nodes dotted."""
    data = _dashed(
        runs, ("kv_tokens_received", "solid", "all"), ("kv_tokens_received_inter_node", "dot", "from other nodes")
    )
    return data, layout(340, xaxis=_step_axis(), yaxis=axis("KV tokens, mean rank", rangemode="tozero"))


def planning(runs: Sequence[Figures]) -> Figure:
    """Milliseconds of planning, and those that a step waited for."""
    data = _dashed(runs, ("plan_ms", "dot", "planning"), ("plan_wait_ms", "solid", "waited for"))
    return data, layout(330, xaxis=_step_axis(), yaxis=axis("ms", rangemode="tozero"))


def _dashed(runs: Sequence[Figures], *curves: tuple[str, str, str]) -> list[Json]:
    """Lines of each run for those of the curves (key, dash, word) that its log has."""
    return [
        _line(run, key, f"{run['label']}, {word}", colour, dash=dash)
        for run, colour in zip(runs, COLOURS, strict=False)
        for key, dash, word in curves
        if key in run["curves"]
    ]


def predicted(runs: Sequence[Figures]) -> Figure:
    """Each step's measured time over the computing that its plan predicted."""
    data: list[Json] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(run["label"]),
            "x": run["curves"]["predicted_ms"],
            "y": run["curves"]["step_ms"],
            "text": [f"step {step}" for step in run["curves"]["step"]],
            "marker": {"color": colour, "size": 8, "opacity": 0.75},
            "hovertemplate": "%{text}: predicted %{x:.3g} ms, measured %{y:.4g} ms<extra></extra>",
        }
        for run, colour in zip(runs, COLOURS, strict=False)
        if "predicted_ms" in run["curves"]
    ]
    return data, layout(
        360,
        xaxis=axis("predicted computing, ms (simulated)", rangemode="tozero"),
        yaxis=axis("step, ms (measured)", rangemode="tozero"),
    )


PARTS = {
    "computing": ("computing, as predicted", BLUE),
    "imbalance": ("of that at most: waiting for the most loaded rank", ORANGE),
    "plan_wait": ("waiting for the plan", YELLOW),
    "rest": ("what predictions leave out", GREY),
}


def parts(of_runs: Figures) -> Figure:
    """The parts of a mean step, of each run."""
    names = [label(name) for name in of_runs]
    data = [
        bars(words, names, [each["parts_ms"][part] for each in of_runs.values()], colour, "%{y}: %{x:.4g} ms")
        for part, (words, colour) in PARTS.items()
    ]
    return data, stacked(names, 160, xaxis=axis("milliseconds of a step, mean"))


def _step_axis() -> Json:
    return axis("step", tickformat=",d")


def _line(run: Figures, key: str, name: str, colour: str, **line: Any) -> Json:
    steps = run["curves"]["step"]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) <= FEW else "lines",
        "name": label(name),
        "x": steps,
        "y": run["curves"][key],
        "line": {"color": colour, "width": 2, **line},
        "marker": {"size": 5},
        "hovertemplate": "step %{x}: %{y:,.5g}<extra>" + label(name) + "</extra>",
    }

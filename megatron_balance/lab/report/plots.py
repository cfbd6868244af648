"""The plots of a simulated report, as Plotly figures.

Colours are told apart by the colour-blind too (Okabe and Ito).
"""

from collections.abc import Sequence
from html import escape
from itertools import accumulate, cycle
from typing import Any

from megatron_balance.lab.bench import Figures
from megatron_balance.lab.report import study
from megatron_balance.lab.report.limits import PARTS
from megatron_balance.lab.report.study import ACTIVITIES

Json = dict[str, Any]
# Traces and layout.
Figure = tuple[list[Json], Json]
BLUE, ORANGE, GREEN, RED, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
PINK, YELLOW, GREY, SLATE = "#CC79A7", "#D9C300", "#8C96A3", "#5A6570"
PURPLE, BROWN, LIME = "#7A4B9A", "#A65628", "#B3DE69"
WHERE = dict(zip(study.KINDS, (RED, SKY, GREEN), strict=True))

# Phases of a step as they are drawn.
PHASES = {
    "outside attention": (("forward_linear", "backward_linear"), GREY),
    "attention forward, with its transfers": (("forward_attention",), SKY),
    "attention backward, with its transfers": (("backward_attention",), BLUE),
    "states of recurrent layers": (("forward_states", "backward_states"), ORANGE),
    "embedding and loss": (("head",), GREEN),
    "waiting": (("waiting",), RED),
    "gradients": (("gradient_sync",), PINK),
    "optimizer": (("optimizer",), YELLOW),
}

_PART_COLOURS = {
    "linear": GREY,
    "attention": BLUE,
    "head": GREEN,
    "optimizer": SLATE,
    "imbalance": ORANGE,
    "straggler": PURPLE,
    "nic": RED,
    "links": YELLOW,
    "remap": BROWN,
    "experts": "#44AA99",
    "bubble": LIME,
    "gradient_sync": PINK,
}

# Nodes that are told apart by lines.
_MOST_LINES = 32


def _label(text: str) -> str:
    """A name as Plotly shows it, which takes labels for HTML."""
    return escape(text, quote=False)


def _layout(height: int, **more: Any) -> Json:
    """Layout of a plot, with the parts that all plots share."""
    place = {"y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"}
    return {
        "height": height,
        "margin": {"l": 60, "r": 15, "t": 10, "b": 55},
        "legend": {"orientation": "h", **place, "traceorder": "normal"},
        "hovermode": "closest",
        "showlegend": True,
        **more,
    }


def _axis(title: str, **more: Any) -> Json:
    """An axis with its title, which never runs into the labels."""
    return {"title": {"text": title}, "automargin": True, **more}


def _bars(name: str, y: Sequence[Any], x: Sequence[float], colour: str, hover: str, **more: Any) -> Json:
    """A trace of horizontal bars; `hover`: the text at the pointer, before the trace's name."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": y,
        "x": x,
        "marker": {"color": colour},
        "hovertemplate": f"{hover}<extra>{name}</extra>",
        **more,
    }


def _stacked(names: Sequence[str], height: int, **more: Any) -> Json:
    """Layout of stacked bars, one row for each name, the first on top; `more` has the x axis."""
    return _layout(
        height + 44 * len(names), barmode="stack", yaxis=_axis("", autorange="reversed", type="category"), **more
    )


def lengths(histogram: Figures) -> Figure:
    bins = histogram["bins"]
    names = [length_range(each["from"], each["below"]) for each in bins]
    data: list[Json] = []
    of_bars = (("sequences", "sequences", GREY), ("tokens", "tokens", SKY), ("attention_pairs", "attention work", RED))
    for key, name, colour in of_bars:
        total = sum(each[key] for each in bins)
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": names,
                "y": [100 * each[key] / total for each in bins],
                "customdata": [each[key] for each in bins],
                "marker": {"color": colour},
                "hovertemplate": "%{x} tokens: %{y:.1f} % (%{customdata:,})<extra>" + name + "</extra>",
            }
        )
    return data, _layout(
        340, barmode="group", xaxis=_axis("length of the sequence, tokens", type="category"), yaxis=_axis("share, %")
    )


def length_range(low: int, high: int) -> str:
    """'4k-8k'."""
    return f"below {_k(high)}" if low == 0 else f"{_k(low)}-{_k(high)}"


def _k(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def planners(rows: Sequence[Figures]) -> Figure:
    """Phases of each planner's step, the fastest planner on top."""
    names = [_label(row["planner"]) for row in rows]
    data: list[Json] = []
    for name, (phases, colour) in PHASES.items():
        seconds = [sum(row["phases_s"].get(phase, 0.0) for phase in phases) for row in rows]
        if any(seconds):
            data.append(_bars(name, names, seconds, colour, "%{y}: %{x:.3f} s"))
    totals: list[float] = [sum(row["phases_s"].values()) for row in rows]
    beside = {"showarrow": False, "xanchor": "left", "xshift": 6}
    ends = [
        {"x": total, "y": name, "text": f"{row['speedup']:.2f}x", **beside}
        for row, name, total in zip(rows, names, totals, strict=True)
    ]
    return data, _layout(
        110 + 34 * len(rows),
        barmode="stack",
        annotations=ends,
        xaxis=_axis("seconds of a step, mean", range=[0, 1.12 * max(totals)]),
        yaxis=_axis("", autorange="reversed", type="category"),
    )


def ranks_of_sequences(placed: Figures) -> Figure:
    rows = placed["longest"]
    data: list[Json] = []
    for where, colour in WHERE.items():
        runs = [(at, a, b) for at, row in enumerate(rows) if row["where"] == where for a, b in row["rank_runs"]]
        if runs:
            trace = _bars(
                where,
                [at for at, _, _ in runs],
                [b - a + 1 for _, a, b in runs],
                colour,
                "%{customdata[0]} tokens, ranks %{customdata[1]}",
                base=[a - 0.5 for _, a, _ in runs],
                width=0.72,
                customdata=[[f"{rows[at]['length']:,}", f"{a}-{b}"] for at, a, b in runs],
            )
            data.append(trace)
    num_ranks, size = placed["num_ranks"], placed["ranks_per_node"]
    return data, _layout(
        120 + 17 * max(4, len(rows)),
        barmode="overlay",
        xaxis=_axis("rank", range=[-0.5, num_ranks - 0.5], tickformat=",d", showgrid=False),
        yaxis=_axis(
            "tokens",
            range=[len(rows) - 0.4, -0.6],
            tickvals=list(range(len(rows))),
            ticktext=[f"{row['length']:,}" for row in rows],
            tickfont={"size": 11},
            showgrid=False,
        ),
        shapes=_node_lines(num_ranks, size),
    )


def trees(drawn: Figures) -> Figure:
    """Bars of the segments along their paths, by the rank that holds them; a row for each path."""
    pieces, num_paths = drawn["pieces"], sum(tree["paths"] for tree in drawn["trees"])
    segments = [f"rank {rank}: segment {at} of tree {seq}" for seq, at, _, rank, *_ in pieces]
    ranks = {
        "cmin": 0,
        "cmax": drawn["num_ranks"] - 1,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": "rank"}},
    }
    data = _bars(
        "what a rank holds",
        [(top + bottom - 1) / 2 for *_, top, bottom in pieces],
        [to - begin for *_, begin, to, _, _ in pieces],
        SKY,
        "%{customdata}, from token %{base:,} of its path, %{x:,} tokens",
        base=[begin for *_, begin, _, _, _ in pieces],
        width=[bottom - top - 0.15 for *_, top, bottom in pieces],
        customdata=segments,
    )
    hatched = {"shape": ["/" if full else "" for _, _, full, *_ in pieces], "fgcolor": "white", "solidity": 0.15}
    line = {"width": 0.5, "color": "white"}
    data["marker"] = {"color": [piece[3] for piece in pieces], **ranks, "pattern": hatched, "line": line}
    firsts = [0, *accumulate(tree["paths"] for tree in drawn["trees"])][:-1]
    return [data], _layout(
        130 + round(num_paths * max(3, min(17, 900 / num_paths))),
        barmode="overlay",
        showlegend=False,
        xaxis=_axis("token of the path", rangemode="tozero"),
        yaxis=_axis(
            "",
            range=[num_paths - 0.4, -0.6],
            tickvals=firsts,
            ticktext=[f"tree {tree['seq']}" for tree in drawn["trees"]],
            showgrid=False,
            zeroline=False,
        ),
    )


def _node_lines(num_ranks: int, size: int) -> list[Json]:
    if num_ranks // size > _MOST_LINES:
        return []
    return [_upright(at - 0.5, "dot") for at in range(size, num_ranks, size)]


def _upright(x: float, dash: str) -> Json:
    """A line from the bottom of a plot to its top."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 1, "dash": dash}}


MEASURES = (
    ("attention_pairs_per_rank", "attention work"),
    ("tokens_per_rank", "tokens"),
    ("kv_tokens_received_per_rank", "KV tokens received"),
)


def loads(of_planners: Figures, shown: Sequence[str], num_ranks: int, size: int) -> Figure:
    """Loads of each rank; planners beside `shown` appear when clicked in the legend."""
    data: list[Json] = []
    ranks = list(range(num_ranks))
    colours = {shown[0]: RED, shown[-1]: BLUE} if len(shown) > 1 else {shown[0]: BLUE}
    others = cycle((GREEN, ORANGE, SKY, PINK, YELLOW, PURPLE, BROWN, LIME, SLATE, GREY))
    for name, each in of_planners.items():
        colour = colours[name] if name in colours else next(others)
        for at, (key, what) in enumerate(MEASURES):
            trace: Json = {
                "type": "scatter",
                "mode": "lines",
                "line": {"shape": "hvh", "width": 2, "color": colour},
                "name": _label(name),
                "legendgroup": name,
                "showlegend": at == 0,
                "x": ranks,
                "y": each[key],
                "xaxis": "x",
                "yaxis": "y" if at == 0 else f"y{at + 1}",
                "hovertemplate": "rank %{x}: %{y:,} " + what + "<extra>" + _label(name) + "</extra>",
            }
            data.append(trace if name in shown else {**trace, "visible": "legendonly"})
    axes = {
        f"yaxis{at + 1 if at else ''}": _axis(what, domain=[0.70 - 0.35 * at, 1.0 - 0.35 * at], rangemode="tozero")
        for at, what in enumerate(("pairs", "tokens", "KV tokens"))
    }
    return data, _layout(
        560, xaxis=_axis("rank", anchor="y3", tickformat=",d"), shapes=_node_lines(num_ranks, size), **axes
    )


def timeline(traced: Figures, most_ms: float) -> Figure:
    """Activities of some ranks over one layer; the axis ends at `most_ms`."""
    colours = dict(zip(ACTIVITIES, (GREY, BLUE, YELLOW, SKY, RED), strict=True))
    lane = dict(zip(ACTIVITIES, (-0.28, -0.28, -0.28, 0.0, 0.28), strict=True))
    place = {rank: at for at, rank in enumerate(traced["ranks"])}
    data: list[Json] = []
    for activity in ACTIVITIES:
        lanes = [each for each in traced["lanes"] if each["activity"] == activity]
        spans = [(place[each["rank"]], a, b) for each in lanes for a, b in each["spans_ms"]]
        if spans:
            trace = _bars(
                activity,
                [at + lane[activity] for at, _, _ in spans],
                [b - a for _, a, b in spans],
                colours[activity],
                "at %{base:.3f} ms for %{x:.3f} ms",
                base=[a for _, a, _ in spans],
                width=0.26,
            )
            data.append({**trace, "marker": {**trace["marker"], "line": {"width": 0}}})
    turn = traced["forward_ms"]
    return data, _layout(
        130 + 44 * len(place),
        barmode="overlay",
        xaxis=_axis("milliseconds from the beginning of the layer", range=[0, most_ms]),
        yaxis=_axis(
            "",
            range=[len(place) - 0.45, -0.55],
            tickvals=list(place.values()),
            ticktext=[f"rank {rank}" for rank in place],
            showgrid=False,
            zeroline=False,
        ),
        shapes=[_upright(turn, "dash")],
    )


def rank_seconds(microbatches: Sequence[Figures]) -> Figure:
    """Seconds of every rank, a bar of all its microbatches."""
    colours = cycle((BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW, GREY))
    traces = [
        {
            "type": "bar",
            "name": f"microbatch {number}",
            "x": list(range(len(row["rank_s"]))),
            "y": row["rank_s"],
            "marker": {"color": colour},
        }
        for (number, row), colour in zip(enumerate(microbatches), colours, strict=False)
    ]
    return traces, _layout(380, barmode="stack", bargap=0, xaxis=_axis("rank"), yaxis=_axis("s"))


def limits(of_planners: Figures) -> Figure:
    names = [_label(name) for name in of_planners]
    data: list[Json] = []
    for part, words in PARTS.items():
        seconds = [each["parts_s"][part] for each in of_planners.values()]
        if max(seconds) > 0:
            data.append(_bars(words, names, seconds, _PART_COLOURS[part], "%{y}: %{x:.3f} s"))
    return data, _stacked(names, 190, xaxis=_axis("seconds of a step, mean"))


def gains(rows: Sequence[Figures]) -> Figure:
    """Seconds that each variant saves, in % of the step."""
    colours = {"planner": BLUE, "step": GREEN, "machine": GREY}
    whose = {"planner": "the planner and its settings", "step": "the training step", "machine": "another machine"}
    names = [_label(row["name"]) + ("" if row["fits"] else " (too much memory)") for row in rows]
    data: list[Json] = []
    for where, colour in colours.items():
        own = [(name, 100 * row["saves"]) for name, row in zip(names, rows, strict=True) if row["where"] == where]
        if own:
            y, x = zip(*own, strict=True)
            hover = "%{y}: %{x:.1f} % less time<extra></extra>"
            data.append(_bars(whose[where], list(y), list(x), colour, "", hovertemplate=hover))
    return data, _layout(
        120 + 28 * len(rows),
        barmode="overlay",
        xaxis=_axis("seconds saved, % of the step as it is"),
        yaxis=_axis("", categoryorder="array", categoryarray=names, autorange="reversed", type="category"),
    )


COLOURS = (RED, BLUE)
# Number of points up to which a curve marks them.
FEW = 40


def _curve(runs: Sequence[Figures], key: str, title: str, **axis: Any) -> Figure:
    pairs = zip(runs, COLOURS, strict=False)
    data = [_line(run, key, run["label"], colour) for run, colour in pairs if key in run["curves"]]
    return data, _layout(330, xaxis=_step_axis(), yaxis=_axis(title, **axis))


def step_ms(runs: Sequence[Figures]) -> Figure:
    return _curve(runs, "step_ms", "ms of a step", type="linear", rangemode="tozero")


def loss(runs: Sequence[Figures]) -> Figure:
    """The loss curve, which does not begin at zero."""
    return _curve(runs, "loss", "loss")


def imbalance(runs: Sequence[Figures]) -> Figure:
    data: list[Json] = []
    for at, what in enumerate(("attention", "tokens")):
        for run, colour in zip(runs, COLOURS, strict=False):
            for key, dash, word in (("imbalance_before", "dot", "before"), ("imbalance_after", "solid", "after")):
                if f"{key}.{what}" in run["curves"]:
                    line = _line(run, f"{key}.{what}", f"{run['label']}, {word}", colour, dash=dash)
                    shown = {"showlegend": at == 0, "yaxis": "y2" if at else "y"}
                    data.append({**line, "legendgroup": f"{run['label']} {word}", **shown})
    axes = {
        "yaxis": _axis("attention, most/mean", domain=[0.56, 1.0]),
        "yaxis2": _axis("tokens, most/mean", domain=[0.0, 0.44]),
    }
    return data, _layout(470, xaxis={**_step_axis(), "anchor": "y2"}, **axes)


def keys_and_values(runs: Sequence[Figures]) -> Figure:
    """Received by a rank, mean over ranks; those of other nodes dotted."""
    crossing = ("kv_tokens_received_inter_node", "dot", "from other nodes")
    data = _dashed(runs, ("kv_tokens_received", "solid", "all"), crossing)
    return data, _layout(340, xaxis=_step_axis(), yaxis=_axis("KV tokens, mean rank", rangemode="tozero"))


def planning(runs: Sequence[Figures]) -> Figure:
    """Milliseconds of planning, and those that a step waited for."""
    data = _dashed(runs, ("plan_ms", "dot", "planning"), ("plan_wait_ms", "solid", "waited for"))
    return data, _layout(330, xaxis=_step_axis(), yaxis=_axis("ms", rangemode="tozero"))


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
            "name": _label(run["label"]),
            "x": run["curves"]["predicted_ms"],
            "y": run["curves"]["step_ms"],
            "text": [f"step {step}" for step in run["curves"]["step"]],
            "marker": {"color": colour, "size": 8, "opacity": 0.75},
            "hovertemplate": "%{text}: predicted %{x:.3g} ms, measured %{y:.4g} ms<extra></extra>",
        }
        for run, colour in zip(runs, COLOURS, strict=False)
        if "predicted_ms" in run["curves"]
    ]
    return data, _layout(
        360,
        xaxis=_axis("predicted computing, ms (simulated)", rangemode="tozero"),
        yaxis=_axis("step, ms (measured)", rangemode="tozero"),
    )


RUN_PARTS = {
    "computing": ("computing, as predicted", BLUE),
    "imbalance": ("of that at most: waiting for the most loaded rank", ORANGE),
    "plan_wait": ("waiting for the plan", YELLOW),
    "rest": ("what predictions leave out", GREY),
}


def parts(of_runs: Figures) -> Figure:
    names = [_label(name) for name in of_runs]
    data = [
        _bars(words, names, [each["parts_ms"][part] for each in of_runs.values()], colour, "%{y}: %{x:.4g} ms")
        for part, (words, colour) in RUN_PARTS.items()
    ]
    return data, _stacked(names, 160, xaxis=_axis("milliseconds of a step, mean"))


def _step_axis() -> Json:
    return _axis("step", tickformat=",d")


def _line(run: Figures, key: str, name: str, colour: str, **line: Any) -> Json:
    steps = run["curves"]["step"]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) <= FEW else "lines",
        "name": _label(name),
        "x": steps,
        "y": run["curves"][key],
        "line": {"color": colour, "width": 2, **line},
        "marker": {"size": 5},
        "hovertemplate": "step %{x}: %{y:,.5g}<extra>" + _label(name) + "</extra>",
    }

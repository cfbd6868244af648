"""The page of a training run, or of two side by side: words and plots around the figures of `run`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_balance.lab.bench import Figures
from megatron_balance.lab.report import page as html
from megatron_balance.lab.report import plots
from megatron_balance.lab.report.page import Bullets, Card, Cards, Fold, HtmlTable, Item, Kind, Plot, Section, Text
from megatron_balance.lab.report.plots import Figure
from megatron_balance.lab.report.run import NAMES


def page(document: Figures, library: str) -> str:
    """The HTML of a run's document; `library`: the source of plotly.js."""
    names = [run["label"] for run in document["runs"]]
    lead = (
        "Every step of this training run was planned: which GPU (rank) attends to which documents, and how their keys "
        "and values travel. This page is what the run logged about it, step by step: measured, but for what the plans "
        "predicted.",
    )
    sections = (
        _short(document),
        _ran(document),
        *(_section(document, curve) for curve in CURVES),
        _limits(document),
        _next(document),
        Section("made", "Where the numbers come from", [Bullets(KINDS)]),
    )
    return html.render(f"Training run: {html.listed(names)}", lead, sections, library)


def _each(document: Figures, sentence: Callable[[Figures], str]) -> str:
    return " ".join(filter(None, (sentence(run) for run in document["runs"])))


BOTH: tuple[Kind, ...] = ("measured", "simulated")
KINDS = (
    "measured: with a clock, or by the training itself, and written to the log of the run.",
    "exact: counted from the plans that ran.",
    "simulated: what the plans' cost model predicted of computing, before it ran.",
)


class _StepCurve(NamedTuple):
    """A section of one plot of every step, where a run's log has `key`. Its caption: `words`, then a
    `sentence` on each run.
    """

    id: str
    heading: str
    key: str
    title: str
    kind: Kind | tuple[Kind, ...]
    figure: Callable[[Sequence[Figures]], Figure]
    sentence: Callable[[Figures], str]
    words: str = ""


def _section(document: Figures, curve: _StepCurve) -> Section:
    runs, key = document["runs"], curve.key
    lacking = [run["label"] for run in runs if key in run["missing"]]
    caption = curve.words + _each(document, curve.sentence) + _behind(document, key)
    items: list[Item] = []
    if len(lacking) < len(runs):
        items.append(Plot(f"plot-{curve.id}", curve.title, caption, curve.kind, *curve.figure(runs)))
    if lacking:
        items.append(Text(f"The log of {html.listed(lacking)} has no `{key}`, so it is not shown here."))
    return Section(curve.id, curve.heading, items)


def _behind(document: Figures, key: str) -> str:
    """The end of a caption, on both runs or on the points of the curve."""
    if key == "loss":
        compared: Figures = document["compared"] or {}
        apart = compared.get("largest_loss_difference")
        said = " At the same step the two differ by at most {:.1e} of their value: balancing must not change the loss."
        return "" if apart is None else said.format(apart)
    points = max(run["curves"]["steps_per_point"] for run in document["runs"])
    return f" A point is the mean of {points} steps." if key == "step_ms" and points > 1 else ""


def _short(document: Figures) -> Section:
    cards: list[Card] = []
    for run in document["runs"]:
        step = run["step_ms"]
        low, high = (html.seconds(step[name] / 1e3) for name in ("p5", "p95"))
        note = f"5 % took less than {low}, 5 % more than {high}"
        cards.append(Card(f"a step of {run['label']}, median", html.seconds(step["median"] / 1e3), note, "measured"))
        if run["tokens_per_s"] is not None:
            cards.append(Card(f"tokens a second of {run['label']}", f"{run['tokens_per_s']:,.0f}", "", "measured"))
    for run in document["runs"]:
        if run["loss"] is not None:
            first, last = (f"{run['loss'][name]:.4g}" for name in ("first", "last"))
            cards.append(Card(f"last loss of {run['label']}", last, f"from {first}", "measured"))
    if document["compared"] and document["compared"]["common_steps"]:
        one, other = (run["label"] for run in document["runs"])
        ratio = f"{document['compared']['times_as_fast']:.2f}x"
        cards.append(Card(f"{other} over {one}", ratio, "median step of the steps of both", "measured"))
    return Section("short", "In short", (Cards(cards), Bullets(document["answer"])))


def _ran(document: Figures) -> Section:
    runs = document["runs"]

    of_step = (f"{what} of a step" for what in ("sequences", "tokens", "microbatches"))
    rows = list(zip(("log", "planner", "ranks", "steps", *of_step), *map(_facts, runs), strict=True))
    title = "the run" if len(runs) == 1 else "the runs"
    items: list[Item] = [
        HtmlTable(title, ("", *(run["label"] for run in runs)), rows, "measured"),
        Text(_each(document, _steady)),
    ]
    notes = [f"{run['label']}: {note}" for run in runs for note in run["notes"]]
    if notes:
        items += [Text("What was unusual about the log:"), Bullets(notes)]
    return Section("ran", "What ran", items)


def _facts(run: Figures) -> list[str]:
    planners = run["planners"]
    return [
        run["path"],
        ", ".join(name if len(planners) == 1 else f"{name} ({n} steps)" for name, n in planners.items()),
        "not in the log" if run["num_ranks"] is None else str(run["num_ranks"]),
        f"{run['num_steps']:,}: {run['first_step']:,} to {run['last_step']:,}",
        *(_mean(run, key) for key in ("num_sequences", "num_tokens", "num_microbatches")),
    ]


def _steady(run: Figures) -> str:
    left_out = run["num_steps"] - run["steady_steps"]
    warm = f", without the first {left_out}, in which a run allocates and connects" if left_out else ""
    return f"Means of {run['label']} are over {html.count(run['steady_steps'], 'step')}{warm}."


def _mean(run: Figures, key: str) -> str:
    value = run["means"][key]
    return "not in the log" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _loss(run: Figures) -> str:
    losses = run["loss"]
    if losses is None:
        return ""
    return (
        f"The loss of {run['label']} goes from {losses['first']:.4f} to {losses['last']:.4f}; its lowest is "
        f"{losses['lowest']:.4f}."
    )


def _time(run: Figures) -> str:
    step = run["step_ms"]
    return (
        f"Half the steps of {run['label']} took less than {html.seconds(step['median'] / 1e3)}, nine in ten "
        f"{html.seconds(step['p5'] / 1e3)} to {html.seconds(step['p95'] / 1e3)}."
    )


def _balance(run: Figures) -> str:
    before, after = run["means"]["imbalance_before.attention"], run["means"]["imbalance_after.attention"]
    if after is None:
        return ""
    was = "" if before is None else f" instead of the {before:.2f} times it would have had as the samples were dealt"
    return (
        f"In the mean step of {run['label']} the most loaded rank has {after:.2f} times the mean attention work{was}."
    )


def _traffic(run: Figures) -> str:
    received, crossing = run["means"]["kv_tokens_received"], run["means"]["kv_tokens_received_inter_node"]
    if received is None:
        return ""
    known = crossing is not None and received
    share = f", {html.percent(crossing / received)} of them from other nodes" if known else ""
    return f"A rank of {run['label']} receives the keys and values of {received:,.0f} tokens a step in the mean{share}."


def _planning(run: Figures) -> str:
    waited, took = run["means"]["plan_wait_ms"], run["means"]["plan_ms"]
    if waited is None:
        return ""
    planned = "" if took is None else f" Planning it took {html.seconds(took / 1e3)}."
    return (
        f"A step of {run['label']} waited {html.seconds(waited / 1e3)} for its plan in the mean, "
        f"{html.percent(waited / run['means']['step_ms'])} of its time.{planned}"
    )


def _predicted(run: Figures) -> str:
    predicted, step_ms = run["means"]["predicted_ms"], run["means"]["step_ms"]
    if not predicted:
        return ""
    how = run["follows"].get("predicted_ms")
    order = "" if how is None else f"; their order agrees with a rank correlation of {how:.2f}"
    return (
        f"{run['label']}: {html.seconds(predicted / 1e3)} predicted (simulated) and "
        f"{html.seconds(step_ms / 1e3)} measured in the mean, a ratio of {step_ms / predicted:,.3g}{order}."
    )


CURVES = (
    _StepCurve("loss", "Loss", "loss", "Loss of every step", "measured", plots.loss, _loss),
    _StepCurve("time", "Time of a step", "step_ms", "Time of every step", "measured", plots.step_ms, _time),
    _StepCurve(
        *("balance", "Balance, before and after", "imbalance_after"),
        *("The most loaded rank's load over the mean rank's", "exact", plots.imbalance, _balance),
        "Dotted: as Megatron dealt samples to data-parallel replicas; solid: as planned. 1.00 is perfect balance. ",
    ),
    _StepCurve(
        *("traffic", "Keys and values on the way", "kv_tokens_received"),
        *("Tokens whose keys and values a rank receives, one layer", "exact", plots.keys_and_values, _traffic),
    ),
    _StepCurve(
        *("planning", "Planning", "plan_wait_ms", "Planning, and waiting for it", "measured"),
        *(plots.planning, _planning),
    ),
    _StepCurve(
        *("predicted", "Predicted and measured", "predicted_ms", "Measured steps over predicted computing"),
        *(BOTH, plots.predicted, _predicted),
        "Each point is a step. What is predicted is computing alone, by the cost model of the configuration: no "
        "transfers, nothing around the layers. ",
    ),
)


def _limits(document: Figures) -> Section:
    of_runs = document["limits"]

    def cell(each: Figures, part: str) -> str:
        return (
            f"{html.seconds(each['parts_ms'][part] / 1e3)} ({html.percent(each['parts_ms'][part] / each['step_ms'])})"
        )

    rows = [(name, *(cell(each, part) for each in of_runs.values())) for part, (name, _) in plots.RUN_PARTS.items()]
    closest = [
        Fold(f"What the time of a step of {run['label']} goes with", (_correlations(run),))
        for run in document["runs"]
        if run["follows"]
    ]
    caption = (
        "Computing is what the plans predicted of the most loaded rank; the last part is measured time that "
        "no prediction accounts for."
    )
    items = (
        Bullets([each["sentence"] for each in of_runs.values()]),
        Plot("plot-limits", "What a mean step is made of", caption, BOTH, *plots.parts(of_runs)),
        HtmlTable("the same as a table", ("part", *of_runs), rows, BOTH),
        *closest,
    )
    return Section("limits", "What limits the step, as far as the log tells", items)


def _correlations(run: Figures) -> HtmlTable:
    ordered: Sequence[tuple[str, float]] = sorted(run["follows"].items(), key=lambda each: -each[1])
    rows = [(NAMES[key], f"{value:.2f}") for key, value in ordered]
    meaning = "1 goes up and down together, 0 has nothing to do with it; not a cause"
    caption = f"rank correlation with the time of a step: {meaning}"
    return HtmlTable(caption, ("figure of a step", "correlation"), rows, "measured")


def _next(document: Figures) -> Section:
    items: list[Item] = []
    for name, sentences in document["try_next"].items():
        if len(document["try_next"]) > 1:
            items.append(Text(f"{name}:"))
        items.append(Bullets(sentences))
    return Section("next", "What to try next", items)

"""Sections of the simulated page: placement of sequences, load of each rank, timelines."""

from __future__ import annotations

from megatron_balance.lab.report import plots, words
from megatron_balance.lab.report.cases import Figures
from megatron_balance.lab.report.page import HtmlTable, Item, Plot, Section, Text


def _shown(study: Figures) -> list[str]:
    """The baseline, and the best planner if it is another."""
    return list(dict.fromkeys((study["baseline"], study["shown"])))


def places(study: Figures) -> Section:
    """Zone by zone, and the longest sequences on their ranks."""
    items: list[Item] = [
        Text(
            "A planner may give a sequence to one rank, which then needs nobody; cut it over the ranks of one node, "
            "over fast links; or "
            "cut it across nodes, over their NICs. Of the first batch:"
        )
    ]
    for name in _shown(study):
        placed = study["placement"][name]
        items.append(_kinds(name, placed))
        drawn = len(placed["longest"])
        which = (
            "All sequences"
            if drawn == placed["num_sequences"]
            else f"The {drawn} longest of {words.count(placed['num_sequences'], 'sequence')}"
        )
        alone = next(kind for kind in placed["kinds"] if kind["where"] == "one rank")
        caption = (
            f"{which} from top to bottom, each as a bar over the ranks that share it; dotted lines are between nodes. "
            f"{_alone(alone, placed)}"
        )
        items.append(
            Plot(
                f"plot-places-{len(items)}",
                f"Who gets which sequence: {name}",
                caption,
                "exact",
                *plots.ranks_of_sequences(placed),
            )
        )
    return Section("places", "Where each sequence went", tuple(items))


def _alone(kind: Figures, placed: Figures) -> str:
    if not kind["sequences"]:
        return "Every sequence is shared by several ranks."
    return (
        f"{words.count(kind['sequences'], 'sequence')} of {placed['num_sequences']:,}, of up to "
        f"{words.tokens(kind['longest'])} tokens, "
        "stay on one rank."
    )


def _kinds(name: str, placed: Figures) -> HtmlTable:
    rows = tuple(
        (
            kind["where"],
            f"{kind['sequences']:,}",
            f"{kind['tokens']:,}",
            _span(kind["shortest"], kind["longest"]) if kind["sequences"] else "",
            _span(kind["fewest_ranks"], kind["most_ranks"]) if kind["sequences"] else "",
        )
        for kind in placed["kinds"]
    )
    moved = placed["remapped_tokens"]
    remap = f"; {words.tokens(moved)} tokens have another rank outside attention (the remap)" if moved else ""
    routed = "; transfers between nodes go over all NICs where that pays (routing)" if placed["routed"] else ""
    return HtmlTable(
        f"{name}{remap}{routed}", ("where", "sequences", "tokens", "lengths", "ranks of a sequence"), rows, "exact"
    )


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def loads(study: Figures) -> Section:
    """Before and after."""
    shown = _shown(study)
    cluster = study["asked"]["cluster"]
    sentences = [_load(study, name) for name in shown]
    others = (
        ""
        if len(study["load"]) == len(shown)
        else " The other planners are drawn when their names in the legend are clicked."
    )
    caption = f"{' '.join(sentences)} KV tokens are keys and values of others, which a rank has to receive.{others}"
    plot = plots.loads(study["load"], shown, cluster["num_ranks"], cluster["ranks_per_node"])
    names = " and ".join(
        f"{'before' if name == study['baseline'] and len(shown) > 1 else 'after'} ({name})" for name in shown
    )
    return Section(
        "loads",
        "The load of each rank, before and after",
        (
            Text(f"One layer of the first batch, {names}: a step waits for the rank with the most."),
            Plot(
                "plot-loads",
                "Attention work, tokens and received keys and values of each rank",
                caption,
                "exact",
                *plot,
            ),
        ),
    )


def _load(study: Figures, name: str) -> str:
    load = study["load"][name]
    received = load["kv_tokens_received_per_rank"]
    balance = load["imbalance"]
    return (
        f"With {name} the most loaded rank has {balance['attention']:.2f} times the mean attention work and "
        f"{balance['tokens']:.2f} times "
        f"the mean tokens, and a rank receives {words.tokens(sum(received) / len(received))} KV tokens in the mean."
    )


def timeline(study: Figures) -> Section:
    """One layer, or why there is none."""
    timelines = study["timeline"]
    if not timelines:
        return Section(
            "timeline", "One layer on the clock", (Text(f"There is no timeline. {study['timeline_left_out']}"),)
        )
    longest = max(each["total_ms"] for each in timelines.values())
    items: list[Item] = [
        Text(
            "One layer of the first batch, forward up to the dashed line and backward after it. Each rank has three "
            "lanes: what it "
            "computes, what it transfers inside its node, and what it transfers to and from other nodes. A gap in the "
            "first lane is a GPU "
            "that waits. All timelines have one scale; drag over a part to enlarge it, and double-click to see all of "
            "it again."
        )
    ]
    for at, (name, each) in enumerate(timelines.items()):
        share = each["computing_share"]
        some = (
            f"{len(each['ranks'])} of {study['asked']['cluster']['num_ranks']} ranks are shown, from the busiest to "
            "the least busy. " * (len(each["ranks"]) < study["asked"]["cluster"]["num_ranks"])
        )
        caption = (
            f"{name} takes {words.seconds(each['total_ms'] / 1e3)} for a layer, "
            f"{words.seconds(each['forward_ms'] / 1e3)} of it forward. A "
            f"rank computes {words.percent(share['mean'])} of that time in the mean, rank {share['most_rank']} "
            f"{words.percent(share['most'])} and rank {share['least_rank']} {words.percent(share['least'])}. {some}"
        ).strip()
        items.append(
            Plot(f"plot-timeline-{at}", f"One layer of {name}", caption, "simulated", *plots.timeline(each, longest))
        )
    return Section("timeline", "One layer on the clock", tuple(items))

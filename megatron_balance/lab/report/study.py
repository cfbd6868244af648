"""A simulated comparison of planners as one JSON document: everything that its page says."""

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_balance.analysis import trace_format
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Policy
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.analysis.trace_format import ATTENTION, COMPUTE, LINEAR, WAIT
from megatron_balance.compile.remap import fragments
from megatron_balance.ir import forest
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Held, Move
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.bench import (
    Bench,
    Figures,
    PlayedCase,
    best_of,
    in_the_mean,
    named,
    saving,
    shares_nothing,
    standing,
    why_not,
)
from megatron_balance.lab.report import limits, page
from megatron_balance.lab.report.limits import recommended
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context
from megatron_balance.planning.choice import PlannerChoice
from megatron_balance.simulator.timeline import MOST_RANKS, layer_trace


def study(
    bench: Bench, choices: Sequence[PlannerChoice], baseline: str, *, explicit: bool, lengths: str, costs: str
) -> Figures:
    """Compare all planners; of the baseline and the fastest other one (`shown`) also where everything
    goes, when, and what limits them. `best`: as in `compare`; None: no job can run any of them.

    `explicit`: the user named the planners. `lengths`: source of the lengths, in words; `costs`: the
    file of measured times, empty: data sheets.
    """
    played, left_out = bench.compare(choices, baseline, explicit=explicit)
    for each in played:
        further = {name: each.found[name] for name in ("phases_s", "utilisation", "peak_bytes_per_rank")}
        each.row.update(spread_s=each.found["step_s"], **further)
    base = next(each for each in played if each.name == baseline)
    best = _best(played, base)
    shown = [base] if best is base else [base, best]
    timelines, no_timeline = _timelines(shown, bench)
    cluster, model = bench.machine.cluster, bench.machine.model
    rows = sorted((each.row for each in played), key=standing)
    limiting = {each.name: limits.of(each.first_steps()) for each in bench.progress(shown, "what limits the step")}
    tried = limits.tried(bench.first_steps(), best.planned.choice)
    trees = _trees(bench, choices, shown)
    return {
        "report": "simulated",
        "kind": "simulated",
        "answer": [
            *answer(rows, (base.name, best.name), limiting[best.name], tried, cluster.memory_bytes),
            *([saving(best.row, base.row, bench.price) + "."] if best is not base and not why_not(best.row) else []),
            *([] if trees is None else trees["sentences"]),
        ],
        "asked": _described(bench, choices, lengths, costs),
        "lengths": length_histogram(bench.given.batches, model.mask),
        "trees": trees,
        "rows": rows,
        "baseline": base.name,
        "best": best_of(rows),
        "shown": best.name,
        "left_out": left_out,
        "placement": {each.name: placement(each.first_plan) for each in shown},
        "load": {each.name: _load(each.first_plan, model, cluster.ranks_per_nic) for each in played},
        "timeline": timelines,
        "timeline_left_out": no_timeline,
        "limits": limiting,
        "try_next": {**tried, "suggestions": _suggestions(tried)},
    }


def _best(played: Sequence[PlayedCase], base: PlayedCase) -> PlayedCase:
    """The fastest beside the baseline that a job can run, or the nearest to that."""
    # Where there is none: the baseline if a job can run it, else the fastest that fits if any does.
    others = [each for each in played if each is not base]
    if all(why_not(each.row) for each in others) and not why_not(base.row):
        return base
    return min(others, key=lambda each: standing(each.row), default=base)


def _timelines(shown: Sequence[PlayedCase], bench: Bench) -> tuple[Figures, str]:
    if bench.setup.transport == "sockets":
        return {}, "With --transport sockets ranks have no streams, which is what a timeline shows."
    if bench.machine.num_ranks > MOST_RANKS:
        most = f"is made for at most {MOST_RANKS} ranks; ask for fewer with --ranks."
        return {}, f"A timeline plays every transfer of every rank, and {most}"
    made = bench.progress(shown, "timeline")
    return {each.name: timeline(each.first_plan, bench.machine, bench.setup.drawn) for each in made}, ""


OF_CLUSTER = ("name", "num_ranks", "num_nodes", "ranks_per_nic", "flops_per_s", "memory_bytes")
OF_MODEL = ("name", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "kv_bytes_per_token")
OF_SETUP = ("policy", "recompute", "pipeline", "interleave", "experts", "overlap_sync")


def _described(bench: Bench, choices: Sequence[PlannerChoice], lengths: str, costs: str) -> Figures:
    """The question, for people who were not there."""
    machine, setup = bench.machine, bench.setup
    cluster, model = machine.cluster, machine.model
    return {
        "assumed": bench.given.assumed or None,
        "lengths": lengths,
        "planners": {choice.name: choice.options.tokens_per_rank for choice in choices},
        "cluster": {
            **{key: getattr(cluster, key) for key in OF_CLUSTER},
            "gpus_per_rank": bench.given.tensor_parallel,
            "ranks_per_node": cluster.node_size,
            "nic_bytes_per_s": machine.inter.bytes_per_s,
            "intra_bytes_per_s": machine.intra.bytes_per_s,
            "costs": costs,
            "kind": "measured" if costs else "published",
        },
        "model": {**{key: getattr(model, key) for key in OF_MODEL}, "kind": "exact"},
        "step": {
            **{key: getattr(setup, key) for key in OF_SETUP},
            "batches": bench.group,
            "slow_ranks": {str(rank): factor for rank, factor in enumerate(machine.slowdown) if factor != 1},
        },
    }


LOADS = (
    *("tokens_per_rank", "attention_pairs_per_rank", "kv_tokens_received_per_rank"),
    *("kv_tokens_received_inter_node_per_rank", "bytes_received_per_rank", "bytes_sent_per_nic", "imbalance"),
)


def _load(plan: MicrobatchPlan, model: Model, ranks_per_nic: int) -> Figures:
    loads = plan_statistics(plan, model, ranks_per_nic)
    return {"kind": "exact", "planner": plan.planner, **{key: loads[key] for key in LOADS}}


# Shorter sequences share a bin.
SMALLEST = 256


def length_histogram(batches: Sequence[Batch], mask: Mask) -> Figures:
    """Counts, tokens and (query, key) pairs that `mask` lets through, by length; exact."""
    lengths = np.array([length for batch in batches for length in batch.lengths], dtype=np.int64)
    pairs = np.array([pairs for batch in batches for pairs in _pairs(batch, mask)], dtype=np.int64)
    each = [batch.num_tokens for batch in batches]
    return {
        "kind": "exact",
        "num_batches": len(batches),
        "num_sequences": len(lengths),
        "num_tokens": int(lengths.sum()),
        "tokens_per_batch": {"mean": float(np.mean(each)), "min": min(each), "max": max(each)},
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "longest": int(lengths.max()),
        "bins": _bins(lengths, pairs),
    }


def _pairs(batch: Batch, mask: Mask) -> list[int]:
    """Of each sequence."""
    if batch.trees:
        return [forest.num_pairs(tree, mask.window_size) for tree in batch.trees]
    return mask.num_pairs(np.array(batch.lengths, dtype=np.int64)).tolist()


def _bins(lengths: Ints, pairs: Ints) -> list[Figures]:
    doublings = max(0, int(np.ceil(np.log2((lengths.max() + 1) / SMALLEST))))
    edges = [0, *(SMALLEST << at for at in range(doublings + 1))]
    # Bin `at` holds lengths of edges[at] and more, below edges[at + 1].
    place = np.searchsorted(edges, lengths, side="right") - 1
    counted = (np.ones_like(lengths), lengths, pairs)
    columns = (edges[:-1], edges[1:], *(sums(place, each, len(edges) - 1).tolist() for each in counted))
    names = ("from", "below", "sequences", "tokens", "attention_pairs")
    bins: list[Figures] = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    first = next(at for at, each in enumerate(bins) if each["sequences"])
    return bins[first:]


# Paths of the trees that are drawn, unless one tree alone has more.
DRAWN_PATHS = 48


def _trees(bench: Bench, choices: Sequence[PlannerChoice], shown: Sequence[PlayedCase]) -> Figures | None:
    """Figures of trees: what sharing saves beside the rollouts one by one, what balance saves beside
    the baseline, and where the first trees lie; None: there are none.
    """
    sharing = bench.sharing()
    if sharing is None:
        return None
    base, best = shown[0].row, shown[-1].row
    alone = bench.one_by_one(choices)
    return {
        "kind": "exact",
        "sharing": sharing,
        "one_by_one": alone,
        "sentences": [_shared(sharing, alone, best), _balanced(base, best)],
        "drawn": {
            each.name: drawn_trees(each.first_plan) for each in shown if isinstance(each.first_plan.mask, Forest)
        },
    }


def _shared(sharing: Figures, alone: Figures | None, best: Figures) -> str:
    if shares_nothing(sharing):
        return "Sharing: each tree is one path, which no two rollouts share."
    less = [sharing[f"flattened_{key}"] / sharing[key] for key in ("tokens", "attention_pairs")]
    said = (
        f"Sharing: {sharing['rollouts']:,} rollouts as trees are {less[0]:.2f} times fewer tokens and "
        f"{less[1]:.2f} times fewer pairs of tokens than one by one (exact)"
    )
    if alone is None:
        return f"{said}; one by one no planner here places them."
    room = "" if alone["fits"] else ", which needs more memory than a rank has"
    fitting = alone["fitting"]
    parts = (
        ""
        if alone["fits"] or fitting is None
        else (f"; in {fitting['microbatches']} microbatches, which fit, {page.seconds(fitting['step_s'])}")
    )
    return (
        f"{said}; a step of {best['planner']} takes {page.seconds(best['step_s'])}, one by one {named(alone)} takes "
        f"{page.seconds(alone['step_s'])}{room}: {alone['step_s'] / best['step_s']:.2f} times as fast{parts} "
        "(simulated)."
    )


def _balanced(base: Figures, best: Figures) -> str:
    rows = [base] if best is base else [base, best]
    loads = page.listed([f"{row['imbalance']['attention']:.2f} with {named(row)}" for row in rows])
    said = f"Balance: the busiest rank has this many times the mean attention work: {loads} (exact)"
    times = [f"a step takes {page.listed([page.seconds(row['step_s']) for row in rows])}"]
    whole = next((size for size in base["sizes"] if size["context_parallel"] == 1), None)
    if whole is not None:
        room = "" if whole["fits"] else ", which does not fit in memory"
        times.append(f"with every tree on one rank {page.seconds(whole['step_s'])}{room}")
    return f"{said}; {', '.join(times)} (simulated)."


def drawn_trees(plan: MicrobatchPlan) -> Figures:
    """Trees of a plan, the largest first, and the tokens of each segment that a rank has in attention.

    `pieces`: rows (seq, segment, 1 if it is full, rank, places on the path from and to, paths from and
    to); paths are counted over all trees that are drawn.
    """
    assert isinstance(plan.mask, Forest)
    table, trees = fragments(plan), plan.mask.trees
    drawn, pieces, paths = list[Figures](), list[list[int]](), 0
    for seq in sorted(range(len(trees)), key=lambda seq: -plan.lengths[seq]):
        of = Forest((trees[seq],)).segments
        # Paths that end before each segment, those that go through it behind them.
        ended = np.concatenate([[0], np.cumsum(of.end == of.stop)]) + paths
        if drawn and ended[-1] > DRAWN_PATHS:
            break
        drawn.append(
            {"seq": seq, "tokens": plan.lengths[seq], "segments": len(of.start), "paths": int(ended[-1]) - paths}
        )
        held = table[table[:, Held.SEQ] == seq]
        held = held[np.argsort(held[:, Held.START])]
        for at, (start, stop, end, shift, full) in enumerate(
            zip(of.start, of.stop, of.end, of.shift, of.full, strict=True)
        ):
            below = [int(ended[at]), int(ended[np.searchsorted(of.start, end)])]
            for row in held[(held[:, Held.START] < stop) & (held[:, Held.STOP] > start)]:
                first, last = max(start, row[Held.START]) - shift, min(stop, row[Held.STOP]) - shift
                pieces.append([seq, at, int(full), int(row[Held.RANK]), int(first), int(last), *below])
        paths = int(ended[-1])
    return {"kind": "exact", "num_trees": len(trees), "num_ranks": plan.num_ranks, "trees": drawn, "pieces": pieces}


KINDS = ("across nodes", "inside one node", "one rank")
# The longest sequences are listed one by one.
LISTED = 40


def placement(plan: MicrobatchPlan) -> Figures:
    """By kind of place: how many sequences and tokens; and the longest sequences with their ranks."""
    context = Context.of(plan)
    # Ranks that hold or attend some of a sequence, in order.
    rows = [
        (seq, plan.lengths[seq], _kind(ranks, plan.ranks_per_node), zone.name, ranks)
        for zone in plan.zones
        for seq, ranks in pattern_of(zone).sequences(zone, context)
    ]
    rows.sort(key=lambda row: (-row[1], row[0]))
    kinds: list[Figures] = []
    for kind in KINDS:
        held = [row for row in rows if row[2] == kind]
        lengths, counts = [row[1] for row in held] or [0], [len(row[4]) for row in held] or [0]
        kinds.append(
            {
                "where": kind,
                "sequences": len(held),
                "tokens": sum(lengths),
                "shortest": min(lengths),
                "longest": max(lengths),
                "fewest_ranks": min(counts),
                "most_ranks": max(counts),
            }
        )
    longest = [
        {"seq": seq, "length": length, "where": kind, "zone": zone, "num_ranks": len(ranks), "rank_runs": _runs(ranks)}
        for seq, length, kind, zone, ranks in rows[:LISTED]
    ]
    return {
        "kind": "exact",
        "planner": plan.planner,
        "num_sequences": len(plan.lengths),
        "num_ranks": plan.num_ranks,
        "ranks_per_node": min(plan.ranks_per_node, plan.num_ranks),
        "kinds": kinds,
        "longest": longest,
        "remapped_tokens": int(as_array(plan.moves)[:, Move.TOKENS].sum()),
        "routed": plan.routing is not None,
    }


def _runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    bounds: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if bounds and bounds[-1][1] == rank - 1:
            bounds[-1] = bounds[-1][0], rank
        else:
            bounds.append((rank, rank))
    return bounds


def _kind(ranks: list[int], ranks_per_node: int) -> str:
    if len(ranks) == 1:
        return KINDS[2]
    return KINDS[1] if ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node else KINDS[0]


# Ranks of a timeline.
SHOWN_RANKS = 8

ACTIVITIES = (
    *("outside attention", "attention", "packing and adding up"),
    *("transfers inside the node", "transfers between nodes"),
)

# Spans of one activity closer than this share of the whole are drawn as one.
_FINEST = 1 / 3000
Span = tuple[float, float]


def timeline(plan: MicrobatchPlan, machine: Machine, policy: Policy) -> Figures:
    """Spans in milliseconds of the busiest and least busy ranks and some between, both phases."""
    spans: dict[tuple[int, str], list[Span]] = {}
    busy = [0.0] * machine.num_ranks
    forward_ms = total_ms = 0.0
    for span in layer_trace(plan, machine, policy).spans:
        begin, end = 1e3 * span.start_s, 1e3 * span.stop_s
        total_ms = max(total_ms, end)
        if span.phase == "forward":
            forward_ms = max(forward_ms, end)
        if span.what == WAIT:
            continue
        activity = _activity(span)
        spans.setdefault((span.rank, activity), []).append((begin, end))
        if activity in ACTIVITIES[:3]:
            busy[span.rank] += end - begin
    ranks = _chosen(busy)
    lanes = [
        {"rank": rank, "activity": activity, "spans_ms": _merged(spans[rank, activity], total_ms * _FINEST)}
        for rank in ranks
        for activity in ACTIVITIES
        if (rank, activity) in spans
    ]
    return {
        "kind": "simulated",
        "planner": plan.planner,
        "forward_ms": forward_ms,
        "total_ms": total_ms,
        "ranks": ranks,
        "computing_share": {
            "mean": sum(busy) / len(busy) / total_ms,
            "most": max(busy) / total_ms,
            "least": min(busy) / total_ms,
            "most_rank": busy.index(max(busy)),
            "least_rank": busy.index(min(busy)),
        },
        "lanes": lanes,
    }


def _activity(span: trace_format.TrackSpan) -> str:
    """Transfers by the link they take; a routed one's legs in the node are inside it."""
    if span.track == COMPUTE:
        return {LINEAR: ACTIVITIES[0], ATTENTION: ACTIVITIES[1]}.get(span.what, ACTIVITIES[2])
    return ACTIVITIES[4] if span.track.startswith("inter_node") else ACTIVITIES[3]


def _chosen(busy: list[float]) -> list[int]:
    """Some ranks, the busiest and the least busy among them."""
    order = sorted(range(len(busy)), key=lambda rank: (-busy[rank], rank))
    if len(order) <= SHOWN_RANKS:
        return sorted(order)
    return sorted({order[round(at * (len(order) - 1) / (SHOWN_RANKS - 1))] for at in range(SHOWN_RANKS)})


def _merged(spans: list[Span], gap: float) -> list[list[float]]:
    """Spans in order, those that overlap or nearly touch as one."""
    merged: list[list[float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1] + gap:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [[round(begin, 6), round(end, 6)] for begin, end in merged]


FIRST = 3
# Number of suggestions that become sentences: changes that cost nothing, and machines to buy.
BOUGHT = 2


def answer(
    rows: list[Figures], names: tuple[str, str], limits: Figures, tried: Figures, memory_bytes: float
) -> list[str]:
    """Sentences for readers of nothing else; `names`: of the baseline and of the best planner."""
    base, best = (next(row for row in rows if row["planner"] == name) for name in names)
    return [_fastest(base, best), *_room(best, memory_bytes), limits["sentence"], *_suggestions(tried)[:1]]


def _fastest(base: Figures, best: Figures) -> str:
    today = named(base)
    if base is best:
        return (
            f"{today} takes {page.seconds(base['step_s'])} a step (simulated); there is no other planner to hold it "
            "against that fits in memory and plans within a step."
        )
    if why_not(best):
        return (
            f"No planner that was compared fits in memory and plans within a step; the nearest, {best['planner']}, "
            f"takes {page.seconds(best['step_s'])} a step (simulated)."
        )
    versus = f"{page.seconds(best['step_s'])} instead of {page.seconds(base['step_s'])} a step (simulated)"
    if best["speedup"] >= 1:
        cannot = f" {base['planner']} {why_not(base)}: no job takes its time." if why_not(base) else ""
        return f"{best['planner']} is {best['speedup']:.2f} times as fast as {today}: {versus}.{_mean(best)}{cannot}"
    return f"No planner that was compared beats {today}; the nearest, {best['planner']}, takes {versus}."


def _mean(row: Figures) -> str:
    return f" These are median steps; {in_the_mean(row)}." if in_the_mean(row) else ""


def _room(row: Figures, memory_bytes: float) -> list[str]:
    if row["fits"] and not row["hides"]:
        return [
            f"Its planning takes {page.seconds(row['plan_ms'] / 1e3)} a batch (measured), longer than the step: "
            "training would wait for it."
        ]
    if row["fits"]:
        return []
    return [
        f"It does not fit: a rank would need {page.size(row['peak_bytes'])} and has {page.size(memory_bytes)} "
        "(simulated). Its time is what a step would take if it did."
    ]


def _suggestions(tried: Figures) -> list[str]:
    """Suggestions, best first, each with its gain: changes that cost nothing, then another machine."""
    own, bought = recommended(tried, ("planner", "step")), recommended(tried, ("machine",))
    sentences = [_suggestion(row, tried) for row in own[:FIRST]]
    if not own:
        rows = [row for row in tried["tries"] if row["where"] != "machine" and row["fits"]]
        sentences.append(
            f"None of the {len(rows)} other settings that were simulated and fit in memory makes a step of "
            f"{tried['planner']} more than 1 % faster."
            if tried["fits"]
            else "None of the settings that were simulated fits in memory; use fewer tokens on a rank, or more ranks."
        )
    return [*sentences, *(_suggestion(row, tried) for row in bought[:BOUGHT])]


def _suggestion(row: Figures, tried: Figures) -> str:
    before, after = page.seconds(tried["step_s"]), page.seconds(row["step_s"])
    gain = f"{before} would become {after} a step, {row['times_as_fast']:.2f} times as fast (simulated)"
    if row["where"] == "machine":
        return f"With {row['name']}, {gain}."
    how = f" (`{row['options']}`)" if row["options"] else ""
    if not tried["fits"]:
        return f"To make it fit in memory: {row['name']}{how}; {gain}."
    return f"Try {row['name']}{how}: {gain}."

"""The page of a simulated comparison, for readers who have never seen the project: words and plots
around the figures of `study`.
"""

from megatron_balance.lab.bench import FLAT, Figures, named, standing
from megatron_balance.lab.report import page as html
from megatron_balance.lab.report import plots
from megatron_balance.lab.report.limits import COMPUTING, PARTS
from megatron_balance.lab.report.page import Bullets, Card, Cards, Fold, HtmlTable, Item, Plot, Section, Text


def page(study: Figures, library: str) -> str:
    """The HTML of a study; `library`: the source of plotly.js."""
    asked = study["asked"]
    cluster, model = asked["cluster"], asked["model"]
    title = (
        f"{model['name']} on {cluster['num_ranks'] * cluster['gpus_per_rank']} GPUs of {cluster['name']}: "
        "where a training step's time goes"
    )
    lead = (
        "Documents that a language model is trained on are of very different lengths, and attention over a document "
        "costs the square of its length. Who gets which document, and how its keys and values travel, decides how "
        "long the slowest GPU takes, for which all others wait. This page compares ways to decide it (planners) on a "
        "machine that was simulated, not run.",
    )
    trees = () if study["trees"] is None else (_trees,)
    parts = (_short, _question, _lengths, *trees, _planners, _places, _loads, _timeline, _limits, _what_next, _made)
    return html.render(title, lead, [part(study) for part in parts], library)


def _row(study: Figures, name: str) -> Figures:
    return next(row for row in study["rows"] if row["planner"] == name)


def _short(study: Figures) -> Section:
    best, limits = _row(study, study["shown"]), study["limits"][study["shown"]]
    base = _row(study, study["baseline"])
    part = limits["largest_loss"]
    step = f"a step of {best['planner']}{' (median)' if study['lengths']['num_batches'] > 1 else ''}"
    rate, before = f"{best['tokens_per_s']:,.0f} tokens a second", f"{html.seconds(base['step_s'])} before"
    loss = f"{PARTS[part]}, of a step of {best['planner']}"
    room = html.size(study["asked"]["cluster"]["memory_bytes"])
    found = (
        (step, html.seconds(best["step_s"]), rate),
        (f"speedup over {named(base)}", f"{best['speedup']:.2f}x", before),
        ("largest loss", html.percent(limits["parts_s"][part] / limits["step_s"]), loss),
        (
            *("memory of a rank, at most", html.size(best["peak_bytes"])),
            f"of {room}{'' if best['fits'] else ', so it does not fit'}",
        ),
    )
    cards = Cards([Card(*each, "simulated") for each in found])
    return Section("short", "In short", (cards, Bullets(study["answer"])))


def _question(study: Figures) -> Section:
    asked = study["asked"]
    cluster, model, step, lengths = asked["cluster"], asked["model"], asked["step"], study["lengths"]
    gpus, sharing = cluster["gpus_per_rank"], cluster["ranks_per_nic"]
    rank = "a rank is a GPU" if gpus == 1 else f"a rank is {gpus} GPUs (tensor parallelism)"
    nics = f"one NIC for every {sharing} ranks" if sharing > 1 else "one NIC for each rank"
    nodes = f"{html.count(cluster['num_nodes'], 'node')} of {cluster['ranks_per_node']}"
    source = f"measured: {cluster['costs']}" if cluster["costs"] else "data sheets"
    rows = [
        ("ranks", f"{cluster['num_ranks']:,}: {nodes}; {rank}"),
        ("between nodes", f"{nics}, {html.rate(cluster['nic_bytes_per_s'])} each way"),
        ("inside a node", f"{html.size(cluster['intra_bytes_per_s'])}/s a rank, each way"),
        ("arithmetic of a rank", f"{cluster['flops_per_s'] / 1e12:,.0f} Tflop/s at its peak, by its data sheet"),
        ("memory of a rank", html.size(cluster["memory_bytes"])),
        ("times are from", source),
    ]
    as_many = model["num_kv_heads"] == model["num_heads"]
    kv = "every query head has a key and value head" if as_many else f"{model['num_kv_heads']} key and value heads"
    of_model = [
        ("layers", f"{model['num_layers']}, of width {model['hidden_size']:,}"),
        ("attention heads", f"{model['num_heads']} of {model['head_dim']}; {kv}"),
        ("keys and values of a token", f"{html.size(model['kv_bytes_per_token'])} a layer"),
    ]
    batch = lengths["tokens_per_batch"]
    spread = f" ({batch['min']:,.0f} to {batch['max']:,.0f})" if batch["min"] != batch["max"] else ""
    count = html.count(lengths["num_batches"], "batch", "batches")
    capacities = sorted({f"{each:,.0f} tokens" for each in asked["planners"].values()})
    slow = [f"rank {rank} ({by:g} times)" for rank, by in step["slow_ranks"].items()]
    of_step = [
        ("lengths", asked["lengths"]),
        ("batches", f"{count} of {batch['mean']:,.0f} tokens{spread}; {step['batches']} in a step"),
        ("capacity of a rank", "; ".join(capacities)),
        ("kept for the backward", _kept(step)),
        ("pipeline", _pipeline(step)),
        ("slow ranks", html.listed(slow) or "none"),
        *([("experts", f"{step['experts']} ranks share a layer's")] if step["experts"] > 1 else []),
    ]
    nobody = f"Nobody said which model or cluster: {asked['assumed']}."
    items = (
        Text(nobody if asked["assumed"] else "Model and cluster were given."),
        HtmlTable(f"the cluster {cluster['name']}", ("", "what it has"), rows, cluster["kind"]),
        HtmlTable(f"the model {model['name']}", ("", "what it has"), of_model, "published"),
        HtmlTable("the training step", ("", "as asked"), of_step, "exact"),
    )
    return Section("question", "What was asked", items)


def _kept(step: Figures) -> str:
    received = {
        "keep": "keys and values that came from others are kept",
        "replay": "keys and values of others are received again",
        "auto": "keys and values that came from others are kept in as many layers as memory allows",
    }[step["policy"]]
    return f"{received}; all activations are {'recomputed' if step['recompute'] == 'full' else 'kept'}"


def _pipeline(step: Figures) -> str:
    if step["pipeline"] == 1:
        return "none: one stage"
    chunks = f", {step['interleave']} model chunks each" if step["interleave"] > 1 else ""
    return f"{step['pipeline']} stages{chunks}, each with as many ranks as the cluster has"


def _lengths(study: Figures) -> Section:
    histogram = study["lengths"]
    bins = histogram["bins"]
    totals = {key: sum(each[key] for each in bins) for key in ("sequences", "tokens", "attention_pairs")}
    heavy = max(bins, key=lambda each: each["attention_pairs"])
    share = {key: heavy[key] / totals[key] for key in totals}
    caption = (
        f"{html.count(histogram['num_sequences'], 'sequence')} of {histogram['shortest']:,.0f} to "
        f"{histogram['longest']:,.0f} tokens, half of them of {histogram['median']:,.0f} or "
        f"fewer. Sequences of {plots.length_range(heavy['from'], heavy['below'])} tokens are "
        f"{html.percent(share['sequences'])} of all, hold {html.percent(share['tokens'])} of the tokens and are "
        f"{html.percent(share['attention_pairs'])} of the attention work, which grows with the square of the "
        "length. Equal numbers of tokens are therefore not equal work."
    )
    rows = [
        (
            *(plots.length_range(each["from"], each["below"]), f"{each['sequences']:,}"),
            *(html.percent(each["sequences"] / totals["sequences"]), f"{each['tokens']:,}"),
            *(html.percent(each[key] / totals[key]) for key in ("tokens", "attention_pairs")),
        )
        for each in bins
    ]
    title = "Sequences, tokens and attention work by length"
    plot = Plot("plot-lengths", title, caption, "exact", *plots.lengths(histogram))
    columns = ("tokens of a sequence", "sequences", "of all", "tokens", "of all", "attention work")
    table = HtmlTable("by length", columns, rows, "exact")
    return Section("lengths", "How long the sequences are", (plot, Fold("The same as a table", (table,))))


def _trees(study: Figures) -> Section:
    trees, sharing = study["trees"], study["trees"]["sharing"]
    alone, rows = trees["one_by_one"], [_row(study, name) for name in _shown(study)]
    flat = [(f"one by one, {named(alone)}", alone, "flattened_")] if alone is not None else []
    steps = [*flat, *((f"as trees, {named(row)}", row, "") for row in rows)]
    cells = [
        (
            *(what, *(f"{sharing[of + key]:,}" for key in ("tokens", "attention_pairs"))),
            *(html.seconds(row["step_s"]), f"{row['imbalance']['attention']:.2f}"),
            f"{html.size(row['peak_bytes'])}{'' if row['fits'] else ' (too much)'}",
        )
        for what, row, of in steps
    ]
    columns = ("rollouts", "tokens", "attention work", "step", "attention, most/mean", "memory at most")
    items: list[Item] = [
        Text(
            f"A sequence is a tree: what {html.count(sharing['rollouts'], 'rollout')} have in common is there once, in "
            f"{html.count(sharing['trees'], 'tree')} of {html.count(sharing['segments'], 'segment')}. One by one is "
            f"each of them as a sequence of its own, by the faster of {html.listed(FLAT)}, if it is among the planners."
        ),
        Bullets(trees["sentences"]),
        HtmlTable("rollouts one by one, and as trees", columns, cells, ("exact", "simulated")),
    ]
    for at, (name, drawn) in enumerate(trees["drawn"].items()):
        number, every = len(drawn["trees"]), drawn["num_trees"]
        which = html.count(every, "tree") if number == every else f"The {number} largest of {every} trees"
        caption = (
            f"{which} of the first batch. A bar is what one rank holds of a segment in attention, its colour the "
            "rank; to the right the path goes on, and below one another lie the paths that part. Full segments, whose "
            "tokens see one another both ways, are hatched. Keys that another rank holds travel."
        )
        title = f"Where the trees lie: {name}"
        items.append(Plot(f"plot-trees-{at}", title, caption, "exact", *plots.trees(drawn)))
    return Section("trees", "What the trees share, and where they lie", items)


def _planners(study: Figures) -> Section:
    rows = study["rows"]
    best, base = _row(study, study["shown"]), named(_row(study, study["baseline"]))
    slowest = max(rows, key=lambda row: row["step_s"])
    caption = (
        "Each bar is a planner's step, by what the rank that is done last spends it on; behind it how many times as "
        f"fast as {base} the median step is. The first is {rows[0]['planner']} with "
        f"{html.seconds(rows[0]['step_s'])}; the slowest, {slowest['planner']}, takes "
        f"{html.seconds(slowest['step_s'])}."
    )
    loads = ("attention, most/mean", "tokens, most/mean")
    columns = ("planner", "step", "speedup", "tokens/s", "MFU", *loads, "planning", "memory at most")
    cells = [
        (
            *(named(row), _step(row), f"{row['speedup']:.2f}x", f"{row['tokens_per_s']:,.0f}"),
            *(html.percent(row["mfu"]), *(f"{row['imbalance'][key]:.2f}" for key in ("attention", "tokens"))),
            f"{html.seconds(row['plan_ms'] / 1e3)}{'' if row['hides'] else ' (does not hide)'}",
            f"{html.size(row['peak_bytes'])}{'' if row['fits'] else ' (too much)'}",
        )
        for row in rows
    ]
    order = f"planners that a job can run, fastest first, then the others; speedup over {base}"
    title = "Where the step's time goes, planner by planner"
    items: list[Item] = [
        Plot("plot-planners", title, caption, "simulated", *plots.planners(rows)),
        HtmlTable(order, columns, cells, ("simulated", "exact", "measured")),
        Text(
            "Steps are medians over all steps, with the 5 % fastest and slowest where they differ. Times and memory "
            "are simulated; most/mean is the most loaded rank's load over the mean, counted from the plans; planning "
            "is of one batch, timed where this page was made."
        ),
    ]
    if any(not row["hides"] for row in rows):
        items.append(Text("Where planning does not hide, it takes longer than the step that it should hide behind."))
    if not best["fits"]:
        items.append(Text("Where memory is too much, the time is what a step would take if it fitted."))
    items += [Text(f"{name} was left out: {reason}") for name, reason in study["left_out"].items()]
    return Section("planners", "Planners compared", items)


def _step(row: Figures) -> str:
    low, high = row["spread_s"]["p5"], row["spread_s"]["p95"]
    wide = f" ({html.seconds(low)} to {html.seconds(high)})" if high > 1.005 * low else ""
    return f"{html.seconds(row['step_s'])}{wide}"


def _made(study: Figures) -> Section:
    measured = study["asked"]["cluster"]["costs"]
    sheets = "data sheets and published microbenchmarks (docs/costs.md names each)"
    source = f"the measured cost table {measured}" if measured else sheets
    kinds = (
        f"simulated: the programs of the plans ran on clocks instead of GPUs, with times from {source}. Nothing was "
        "fitted to a training run.",
        "exact: counted from the lengths and the plans.",
        "measured: taken with a clock on a real machine; here, how long planning took where this page was made.",
        "published: from a data sheet or a paper.",
    )
    words = Fold("The words of this page", [HtmlTable("words", ("word", "what it means"), WORDS, "exact")])
    return Section("made", "Where the numbers come from, and what the words mean", (Bullets(kinds), words))


WORDS = (
    ("sequence", "one document; its tokens attend to one another and to no other document's"),
    ("batch, step", "what all ranks work on together; one or more batches make an optimizer step"),
    ("rank, node", "a GPU, or a few that work as one; a machine with several of them, joined by fast links"),
    ("NIC", "a network card; what leaves a node goes through one"),
    (
        "keys and values (KV)",
        "what other tokens of a sequence need of a token to attend to it; sent where a sequence is cut",
    ),
    ("attention work", "pairs of a token and one that it attends to, in the same sequence"),
    ("most / mean", "the most loaded rank's load over the mean; 1.00 is perfect balance"),
    (
        "planner",
        "what decides which rank attends to what; te_ring, which cuts every sequence over all ranks, is how it is "
        "usually done",
    ),
    ("routing", "a transfer between nodes is cut over all NICs of both, not only over its own rank's"),
    ("remap", "tokens move between ranks around attention, so that the rest of a layer has equally many on each"),
    ("forward, backward", "computing a layer's output, and its gradients"),
)

# Variants that are drawn.
SHOWN_TRIES = 14
# A share of the step that is no difference.
SAME = 0.0005


def _limits(study: Figures) -> Section:
    of_planners = study["limits"]
    caption = (
        "Grey, blue and green compute; everything else is what the step loses to something that could be better. "
        + " ".join(
            f"{name} loses {html.percent(1 - each['computing_s'] / each['step_s'])}."
            for name, each in of_planners.items()
        )
    )
    steps = next(iter(of_planners.values()))["num_steps"]
    parts = [part for part in PARTS if any(each["parts_s"][part] > 0 for each in of_planners.values())]

    def cell(each: Figures, part: str) -> str:
        return f"{html.seconds(each['parts_s'][part])} ({html.percent(each['parts_s'][part] / each['step_s'])})"

    kinds = {part: "computing" if part in COMPUTING else "loss" for part in parts}
    rows = [(PARTS[part], kinds[part], *(cell(each, part) for each in of_planners.values())) for part in parts]
    items: list[Item] = [
        Bullets([each["sentence"] for each in of_planners.values()]),
        Plot("plot-limits", "What a step's seconds are lost to", caption, "simulated", *plots.limits(of_planners)),
        HtmlTable("the same as a table", ("part", "", *of_planners), rows, "simulated"),
        Text(
            f"Over the first {html.count(steps, 'step')}. One thing after another is made ideal, and charged what "
            "the step gains: no rank slower than the others, then transfers between nodes that take no time, then "
            "those inside nodes. What is left computes; what all ranks would take if they computed equally long is "
            "computing, and the rest is imbalance or waiting. Transfers that are hidden behind computing cost nothing."
        ),
    ]
    # The same attention may take one planner much less than the baseline.
    base, best = (study["limits"][study[key]] for key in ("baseline", "shown"))
    slow, fast = base["parts_s"]["attention"], best["parts_s"]["attention"]
    if slow >= 1.15 * fast:
        items.append(
            Text(
                f"The attention itself is the same work under every planner, but {base['planner']} computes "
                f"{html.seconds(slow)} for what {best['planner']} computes in {html.seconds(fast)}: the smaller the "
                "pieces that sequences are cut into, the worse they fill a GPU."
            )
        )
    return Section("limits", "What limits the step", items)


def _what_next(study: Figures) -> Section:
    tried = study["try_next"]
    rows = [row for row in tried["tries"] if abs(row["saves"]) >= SAME]
    best = study["shown"]
    items: list[Item] = [Bullets(tried["suggestions"])]
    if rows:
        top = sorted(rows, key=standing)[:SHOWN_TRIES]
        caption = (
            f"Each bar is one change to {best} as it was asked for, simulated on the first "
            f"{html.count(tried['num_steps'], 'step')} "
            f"({html.seconds(tried['step_s'])} as it is): to the right a step takes less time, to the left more. "
            f"{'The best of all, ' if top[0]['saves'] > 0 else 'The nearest, '}{top[0]['name']}, takes "
            f"{html.seconds(top[0]['step_s'])}."
        )
        items.append(Plot("plot-next", "What a step would gain", caption, "simulated", *plots.gains(top)))
        cells = [
            (
                *(row["name"], f"`{row['options']}`" if row["options"] else ""),
                *(html.seconds(row["step_s"]), f"{row['times_as_fast']:.2f}x"),
                f"{html.size(row['peak_bytes'])}{'' if row['fits'] else ' (too much)'}"
                f"{'' if row['hides'] else '; planning does not hide'}",
            )
            for row in rows
        ]
        columns = ("change", "options", "step", "times as fast", "memory at most")
        table = HtmlTable(f"all that was simulated, beside {best} as it is", columns, cells, "simulated")
        items.append(Fold(f"All {html.count(len(rows), 'change')} as a table", (table,)))
    same = [*tried["unchanged"], *(row["name"] for row in tried["tries"] if abs(row["saves"]) < SAME)]
    if same:
        items.append(Fold(f"{html.count(len(same), 'change')} made no difference", (Bullets(same),)))
    if tried["impossible"]:
        reasons = [f"{name}: {reason}" for name, reason in tried["impossible"].items()]
        items.append(Fold(f"{html.count(len(reasons), 'change')} cannot be", (Bullets(reasons),)))
    return Section("next", "What to try next", items)


def _shown(study: Figures) -> list[str]:
    """The baseline, and the best planner if it is another."""
    return list(dict.fromkeys((study["baseline"], study["shown"])))


def _places(study: Figures) -> Section:
    items: list[Item] = [
        Text(
            "A planner may give a sequence to one rank, which then needs nobody; cut it over the ranks of one node, "
            "over fast links; or cut it across nodes, over their NICs. Of the first batch:"
        )
    ]
    for name in _shown(study):
        placed = study["placement"][name]
        items.append(_kinds(name, placed))
        drawn, every = len(placed["longest"]), placed["num_sequences"]
        longest = f"The {drawn} longest of {html.count(every, 'sequence')}"
        which = "All sequences" if drawn == every else longest
        alone = next(kind for kind in placed["kinds"] if kind["where"] == "one rank")
        caption = (
            f"{which} from top to bottom, each as a bar over the ranks that share it; dotted lines are between nodes. "
            f"{_alone(alone, placed)}"
        )
        title = f"Who gets which sequence: {name}"
        items.append(Plot(f"plot-places-{len(items)}", title, caption, "exact", *plots.ranks_of_sequences(placed)))
    return Section("places", "Where each sequence went", items)


def _alone(kind: Figures, placed: Figures) -> str:
    if not kind["sequences"]:
        return "Every sequence is shared by several ranks."
    return (
        f"{html.count(kind['sequences'], 'sequence')} of {placed['num_sequences']:,}, of up to "
        f"{kind['longest']:,.0f} tokens, stay on one rank."
    )


def _kinds(name: str, placed: Figures) -> HtmlTable:
    rows = [
        (
            *(kind["where"], f"{kind['sequences']:,}", f"{kind['tokens']:,}"),
            _span(kind["shortest"], kind["longest"]) if kind["sequences"] else "",
            _span(kind["fewest_ranks"], kind["most_ranks"]) if kind["sequences"] else "",
        )
        for kind in placed["kinds"]
    ]
    moved = placed["remapped_tokens"]
    remap = f"; {moved:,.0f} tokens have another rank outside attention (the remap)" if moved else ""
    routed = "; transfers between nodes go over all NICs where that pays (routing)" if placed["routed"] else ""
    columns = ("where", "sequences", "tokens", "lengths", "ranks of a sequence")
    return HtmlTable(f"{name}{remap}{routed}", columns, rows, "exact")


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _loads(study: Figures) -> Section:
    shown = _shown(study)
    cluster = study["asked"]["cluster"]
    sentences = [_load(study, name) for name in shown]
    hidden = " The other planners are drawn when their names in the legend are clicked."
    others = "" if len(study["load"]) == len(shown) else hidden
    caption = f"{' '.join(sentences)} KV tokens are keys and values of others, which a rank has to receive.{others}"
    plot = plots.loads(study["load"], shown, cluster["num_ranks"], cluster["ranks_per_node"])
    names = " and ".join(
        f"{'before' if name == study['baseline'] and len(shown) > 1 else 'after'} ({name})" for name in shown
    )
    told = Text(f"One layer of the first batch, {names}: a step waits for the rank with the most.")
    title = "Attention work, tokens and received keys and values of each rank"
    drawn = Plot("plot-loads", title, caption, "exact", *plot)
    return Section("loads", "The load of each rank, before and after", (told, drawn))


def _load(study: Figures, name: str) -> str:
    load = study["load"][name]
    received = load["kv_tokens_received_per_rank"]
    balance = load["imbalance"]
    return (
        f"With {name} the most loaded rank has {balance['attention']:.2f} times the mean attention work and "
        f"{balance['tokens']:.2f} times the mean tokens, and a rank receives "
        f"{sum(received) / len(received):,.0f} KV tokens in the mean."
    )


def _timeline(study: Figures) -> Section:
    timelines = study["timeline"]
    title = "One layer on the clock"
    if not timelines:
        return Section("timeline", title, [Text(f"There is no timeline. {study['timeline_left_out']}")])
    longest = max(each["total_ms"] for each in timelines.values())
    items: list[Item] = [
        Text(
            "One layer of the first batch, forward up to the dashed line and backward after it. Each rank has three "
            "lanes: what it computes, what it transfers inside its node, and what it transfers to and from other "
            "nodes. A gap in the first lane is a GPU that waits. All timelines have one scale; drag over a part to "
            "enlarge it, and double-click to see all of it again."
        )
    ]
    for at, (name, each) in enumerate(timelines.items()):
        share, drawn, every = each["computing_share"], len(each["ranks"]), study["asked"]["cluster"]["num_ranks"]
        some = f"{drawn} of {every} ranks are shown, from the busiest to the least busy. " * (drawn < every)
        caption = (
            f"{name} takes {html.seconds(each['total_ms'] / 1e3)} for a layer, "
            f"{html.seconds(each['forward_ms'] / 1e3)} of it forward. A "
            f"rank computes {html.percent(share['mean'])} of that time in the mean, rank {share['most_rank']} "
            f"{html.percent(share['most'])} and rank {share['least_rank']} {html.percent(share['least'])}. {some}"
        ).strip()
        plot = plots.timeline(each, longest)
        items.append(Plot(f"plot-timeline-{at}", f"One layer of {name}", caption, "simulated", *plot))
    return Section("timeline", title, items)

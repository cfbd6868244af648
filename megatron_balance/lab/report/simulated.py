"""The page of a simulated comparison, for readers who have never seen the project: words and plots
around the figures of `study`.
"""

from __future__ import annotations

from megatron_balance.lab.report import page as html
from megatron_balance.lab.report import plots, simulated_answer, simulated_ranks, words
from megatron_balance.lab.report.cases import Figures
from megatron_balance.lab.report.limits import PARTS
from megatron_balance.lab.report.page import Bullets, Card, Cards, Fold, HtmlTable, Item, Plot, Section, Text
from megatron_balance.lab.report.standing import named


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
        "costs the square of "
        "its length. Who gets which document, and how its keys and values travel, decides how long the slowest GPU "
        "takes, for which all "
        "others wait. This page compares ways to decide it (planners) on a machine that was simulated, not run.",
    )
    sections = (
        _short(study),
        _question(study),
        _lengths(study),
        _planners(study),
        simulated_ranks.places(study),
        simulated_ranks.loads(study),
        simulated_ranks.timeline(study),
        simulated_answer.limits(study),
        simulated_answer.what_next(study),
        _made(study),
    )
    return html.render(title, lead, sections, library)


def _row(study: Figures, name: str) -> Figures:
    return next(row for row in study["rows"] if row["planner"] == name)


def _short(study: Figures) -> Section:
    best, limits = _row(study, study["shown"]), study["limits"][study["shown"]]
    base = _row(study, study["baseline"])
    part = limits["largest_loss"]
    cards = [
        Card(
            f"a step of {best['planner']}{' (median)' if study['lengths']['num_batches'] > 1 else ''}",
            words.seconds(best["step_s"]),
            f"{words.tokens(best['tokens_per_s'])} tokens a second",
            "simulated",
        ),
        Card(
            f"speedup over {named(base)}",
            f"{best['speedup']:.2f}x",
            f"{words.seconds(base['step_s'])} before",
            "simulated",
        ),
        Card(
            "largest loss",
            words.percent(limits["parts_s"][part] / limits["step_s"]),
            f"{PARTS[part]}, of a step of {best['planner']}",
            "simulated",
        ),
        Card(
            "memory of a rank, at most",
            words.size(best["peak_bytes"]),
            f"of {words.size(study['asked']['cluster']['memory_bytes'])}"
            f"{'' if best['fits'] else ', so it does not fit'}",
            "simulated",
        ),
    ]
    return Section("short", "In short", (Cards(tuple(cards)), Bullets(tuple(study["answer"]))))


def _question(study: Figures) -> Section:
    asked = study["asked"]
    cluster, model, step, lengths = asked["cluster"], asked["model"], asked["step"], study["lengths"]
    rank = (
        "a rank is a GPU"
        if cluster["gpus_per_rank"] == 1
        else f"a rank is {cluster['gpus_per_rank']} GPUs (tensor parallelism)"
    )
    nics = (
        f"one NIC for every {cluster['ranks_per_nic']} ranks"
        if cluster["ranks_per_nic"] > 1
        else "one NIC for each rank"
    )
    source = f"measured: {cluster['costs']}" if cluster["costs"] else "data sheets"
    rows = [
        (
            "ranks",
            f"{cluster['num_ranks']:,}: {words.count(cluster['num_nodes'], 'node')} of {cluster['ranks_per_node']}; "
            f"{rank}",
        ),
        ("between nodes", f"{nics}, {words.rate(cluster['nic_bytes_per_s'])} each way"),
        ("inside a node", f"{words.size(cluster['intra_bytes_per_s'])}/s a rank, each way"),
        ("arithmetic of a rank", f"{cluster['flops_per_s'] / 1e12:,.0f} Tflop/s at its peak, by its data sheet"),
        ("memory of a rank", words.size(cluster["memory_bytes"])),
        ("times are from", source),
    ]
    kv = (
        "every query head has a key and value head"
        if model["num_kv_heads"] == model["num_heads"]
        else f"{model['num_kv_heads']} key and value heads"
    )
    of_model = [
        ("layers", f"{model['num_layers']}, of width {model['hidden_size']:,}"),
        ("attention heads", f"{model['num_heads']} of {model['head_dim']}; {kv}"),
        ("keys and values of a token", f"{words.size(model['kv_bytes_per_token'])} a layer"),
    ]
    batch = lengths["tokens_per_batch"]
    spread = f" ({words.tokens(batch['min'])} to {words.tokens(batch['max'])})" if batch["min"] != batch["max"] else ""
    of_step = [
        ("lengths", asked["lengths"]),
        (
            "batches",
            f"{words.count(lengths['num_batches'], 'batch', 'batches')} of {words.tokens(batch['mean'])} "
            f"tokens{spread}; {step['batches']} "
            "in a step",
        ),
        (
            "capacity of a rank",
            "; ".join(sorted({f"{words.tokens(each)} tokens" for each in asked["planners"].values()})),
        ),
        ("kept for the backward", _kept(step)),
        ("pipeline", _pipeline(step)),
        ("slow ranks", _slow(step)),
        *([("experts", f"{step['experts']} ranks share a layer's")] if step["experts"] > 1 else []),
    ]
    items: list[Item] = [
        Text(f"Nobody said which model or cluster: {asked['assumed']}.")
        if asked["assumed"]
        else Text("Model and cluster were given."),
        HtmlTable(f"the cluster {cluster['name']}", ("", "what it has"), tuple(rows), cluster["kind"]),
        HtmlTable(f"the model {model['name']}", ("", "what it has"), tuple(of_model), "published"),
        HtmlTable("the training step", ("", "as asked"), tuple(of_step), "exact"),
    ]
    return Section("question", "What was asked", tuple(items))


def _kept(step: Figures) -> str:
    received = {
        "keep": "keys and values that came from others are kept",
        "replay": "keys and values of others are received again",
        "auto": "keys and values that came from others are kept in as many layers as memory allows",
    }[step["policy"]]
    return (
        f"{received}; {'all activations are recomputed' if step['recompute'] == 'full' else 'all activations are kept'}"
    )


def _pipeline(step: Figures) -> str:
    if step["pipeline"] == 1:
        return "none: one stage"
    chunks = f", {step['interleave']} model chunks each" if step["interleave"] > 1 else ""
    return f"{step['pipeline']} stages{chunks}, each with as many ranks as the cluster has"


def _slow(step: Figures) -> str:
    return words.listed([f"rank {rank} ({factor:g} times)" for rank, factor in step["slow_ranks"].items()]) or "none"


def _lengths(study: Figures) -> Section:
    histogram = study["lengths"]
    bins = histogram["bins"]
    totals = {key: sum(each[key] for each in bins) for key in ("sequences", "tokens", "attention_pairs")}
    heavy = max(bins, key=lambda each: each["attention_pairs"])
    share = {key: heavy[key] / totals[key] for key in totals}
    caption = (
        f"{words.count(histogram['num_sequences'], 'sequence')} of {words.tokens(histogram['shortest'])} to "
        f"{words.tokens(histogram['longest'])} "
        f"tokens, half of them of {words.tokens(histogram['median'])} or fewer. Sequences of "
        f"{plots.length_range(heavy['from'], heavy['below'])} tokens are {words.percent(share['sequences'])} of all, "
        "hold "
        f"{words.percent(share['tokens'])} of the tokens and are {words.percent(share['attention_pairs'])} of the "
        "attention work, which "
        "grows with the square of the length. Equal numbers of tokens are therefore not equal work."
    )
    rows = tuple(
        (
            plots.length_range(each["from"], each["below"]),
            f"{each['sequences']:,}",
            words.percent(each["sequences"] / totals["sequences"]),
            f"{each['tokens']:,}",
            words.percent(each["tokens"] / totals["tokens"]),
            words.percent(each["attention_pairs"] / totals["attention_pairs"]),
        )
        for each in bins
    )
    plot = Plot(
        "plot-lengths", "Sequences, tokens and attention work by length", caption, "exact", *plots.lengths(histogram)
    )
    table = HtmlTable(
        "by length",
        ("tokens of a sequence", "sequences", "of all", "tokens", "of all", "attention work"),
        rows,
        "exact",
    )
    return Section("lengths", "How long the sequences are", (plot, Fold("The same as a table", (table,))))


def _planners(study: Figures) -> Section:
    rows = study["rows"]
    best, base = _row(study, study["shown"]), named(_row(study, study["baseline"]))
    slowest = max(rows, key=lambda row: row["step_s"])
    caption = (
        "Each bar is a planner's step, by what the rank that is done last spends it on; behind it how many times as "
        f"fast as {base} the "
        f"median step is. The first is {rows[0]['planner']} with {words.seconds(rows[0]['step_s'])}; the slowest, "
        f"{slowest['planner']}, takes {words.seconds(slowest['step_s'])}."
    )
    table = HtmlTable(
        f"planners that a job can run, fastest first, then the others; speedup over {base}",
        (
            "planner",
            "step",
            "speedup",
            "tokens/s",
            "MFU",
            "attention, most/mean",
            "tokens, most/mean",
            "planning",
            "memory at most",
        ),
        tuple(
            (
                named(row),
                _step(row),
                f"{row['speedup']:.2f}x",
                words.tokens(row["tokens_per_s"]),
                words.percent(row["mfu"]),
                f"{row['imbalance']['attention']:.2f}",
                f"{row['imbalance']['tokens']:.2f}",
                f"{words.seconds(row['plan_ms'] / 1e3)}{'' if row['hides'] else ' (does not hide)'}",
                f"{words.size(row['peak_bytes'])}{'' if row['fits'] else ' (too much)'}",
            )
            for row in rows
        ),
        ("simulated", "exact", "measured"),
    )
    items: list[Item] = [
        Plot(
            "plot-planners",
            "Where the step's time goes, planner by planner",
            caption,
            "simulated",
            *plots.planners(rows),
        ),
        table,
    ]
    items.append(
        Text(
            "Steps are medians over all steps, with the 5 % fastest and slowest where they differ. Times and memory "
            "are simulated; "
            "most/mean is the most loaded rank's load over the mean, counted from the plans; planning is of one "
            "batch, timed where this "
            "page was made."
        )
    )
    if any(not row["hides"] for row in rows):
        items.append(Text("Where planning does not hide, it takes longer than the step that it should hide behind."))
    if not best["fits"]:
        items.append(Text("Where memory is too much, the time is what a step would take if it fitted."))
    items += [Text(f"{name} was left out: {reason}") for name, reason in study["left_out"].items()]
    return Section("planners", "Planners compared", tuple(items))


def _step(row: Figures) -> str:
    low, high = row["spread_s"]["p5"], row["spread_s"]["p95"]
    wide = f" ({words.seconds(low)} to {words.seconds(high)})" if high > 1.005 * low else ""
    return f"{words.seconds(row['step_s'])}{wide}"


def _made(study: Figures) -> Section:
    measured = study["asked"]["cluster"]["costs"]
    source = (
        f"the measured cost table {measured}"
        if measured
        else "data sheets and published microbenchmarks (docs/costs.md names each)"
    )
    return Section(
        "made",
        "Where the numbers come from, and what the words mean",
        (
            Bullets(
                (
                    f"simulated: the programs of the plans ran on clocks instead of GPUs, with times from {source}. "
                    "Nothing was fitted to "
                    "a training run.",
                    "exact: counted from the lengths and the plans.",
                    "measured: taken with a clock on a real machine; here, how long planning took where this page was "
                    "made.",
                    "published: from a data sheet or a paper.",
                )
            ),
            *WORDS,
        ),
    )


WORDS: tuple[Item, ...] = (
    Fold(
        "The words of this page",
        (
            HtmlTable(
                "words",
                ("word", "what it means"),
                (
                    ("sequence", "one document; its tokens attend to one another and to no other document's"),
                    ("batch, step", "what all ranks work on together; one or more batches make an optimizer step"),
                    (
                        "rank, node",
                        "a GPU, or a few that work as one; a machine with several of them, joined by fast links",
                    ),
                    ("NIC", "a network card; what leaves a node goes through one"),
                    (
                        "keys and values (KV)",
                        "what other tokens of a sequence need of a token to attend to it; sent where a sequence is cut",
                    ),
                    ("attention work", "pairs of a token and one that it attends to, in the same sequence"),
                    ("most / mean", "the most loaded rank's load over the mean; 1.00 is perfect balance"),
                    (
                        "planner",
                        "what decides which rank attends to what; te_ring, which cuts every sequence over all ranks, "
                        "is how it is usually "
                        "done",
                    ),
                    ("routing", "a transfer between nodes is cut over all NICs of both, not only over its own rank's"),
                    (
                        "remap",
                        "tokens move between ranks around attention, so that the rest of a layer has equally many on "
                        "each",
                    ),
                    ("forward, backward", "computing a layer's output, and its gradients"),
                ),
                "exact",
            ),
        ),
    ),
)

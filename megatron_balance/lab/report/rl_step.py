"""The page of a planned step of reinforcement learning (`rl.plan_step`), with its passes."""

from typing import Any

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import linear_tokens, tokens_per_rank
from megatron_balance.ir.step import StepPlan
from megatron_balance.lab.bench import Figures
from megatron_balance.lab.report import page as html
from megatron_balance.lab.report import plots
from megatron_balance.lab.report.page import Bullets, Card, Cards, HtmlTable, Plot, Section
from megatron_balance.simulator.step import play_step

KINDS = (
    "simulated: seconds of every rank in the layers and the head of a microbatch, attention's waiting for keys of "
    "other ranks included; synchronised gradients, gathered weights and the optimizer are not in them.",
    "exact: counted from the plan.",
)


def document(step: StepPlan, machine: Machine) -> Figures:
    """By pass and microbatch, what it has and the seconds of every rank."""
    passes = [
        _pass("without a backward", step.forward or step, machine, backward=False),
        _pass("update", step, machine, backward=True),
    ]
    samples = html.count(sum(len(seqs) for parts in step.members for seqs in parts), "sample")
    own = "microbatches of their own" if step.forward is not None else "the microbatches of the update"
    tokens = sum(plan.num_tokens for plan in step.plans)
    answer = [
        f"{samples}, {tokens:,} tokens on {html.count(machine.num_ranks, 'rank')}; passes without a backward have "
        f"{own}."
    ]
    for each in passes:
        microbatches = html.count(len(each["microbatches"]), "microbatch", "microbatches")
        answer.append(
            f"Pass {each['name']}: {microbatches}, {html.seconds(each['step_s'])} where ranks meet in every layer, "
            f"{each['over_mean']:.2f} of the ranks' mean; at most {each['most_tokens']:,} tokens of one on a rank "
            "(simulated)."
        )
    return {
        "fingerprint": step.fingerprint(),
        "cluster": machine.cluster.name,
        "model": machine.model.name,
        "num_ranks": machine.num_ranks,
        "passes": passes,
        "answer": answer,
    }


def _pass(name: str, step: StepPlan, machine: Machine, *, backward: bool) -> Figures:
    played = play_step(step.plans, machine)
    seconds = np.zeros((len(step.plans), machine.num_ranks))
    for each in played.passes:
        if backward or not each.step.backward:
            seconds[each.step.microbatch] += played.layers_per_chunk * each.layer_s + each.head_s
    rows: list[dict[str, Any]] = [
        {
            "samples": sum(map(len, parts)),
            "tokens": plan.num_tokens,
            "most_tokens": int(np.maximum(tokens_per_rank(plan), linear_tokens(plan)).max()),
            "planner": plan.planner,
            "rank_s": own.tolist(),
        }
        for plan, parts, own in zip(step.plans, step.members, seconds, strict=True)
    ]
    step_s = float(seconds.max(axis=1).sum())
    mean_s = float(seconds.mean(axis=1).sum())
    most = max(row["most_tokens"] for row in rows)
    return {"name": name, "microbatches": rows, "step_s": step_s, "over_mean": step_s / mean_s, "most_tokens": most}


def page(found: Figures, library: str) -> str:
    """The HTML of a document; `library`: the source of plotly.js."""
    lead = (
        "A driver dealt the samples of a step of reinforcement learning into microbatches before any GPU worked. All "
        "its passes take them: log-probabilities and a reference run forward alone, updates forward and backward.",
    )
    cards = [
        Card(
            f"a pass {each['name']}", html.seconds(each["step_s"]), f"{each['over_mean']:.2f} of the mean", "simulated"
        )
        for each in found["passes"]
    ]
    sections = [
        Section("short", "In short", (Cards(cards), Bullets(found["answer"]))),
        *(_section(at, each) for at, each in enumerate(found["passes"])),
        Section("made", "Where the numbers come from", [Bullets((*KINDS, f"plan {found['fingerprint']}"))]),
    ]
    title = f"A step of reinforcement learning: {found['model']} on {found['num_ranks']} ranks of {found['cluster']}"
    return html.render(title, lead, sections, library)


def _section(at: int, found: Figures) -> Section:
    rows = [
        (
            str(number),
            row["planner"],
            f"{row['samples']:,}",
            f"{row['tokens']:,}",
            f"{row['most_tokens']:,}",
            html.seconds(max(row["rank_s"])),
            f"{max(row['rank_s']) * len(row['rank_s']) / sum(row['rank_s']):.2f}",
        )
        for number, row in enumerate(found["microbatches"])
    ]
    columns = ("microbatch", "planner", "samples", "tokens", "most on a rank", "slowest rank", "over the mean")
    data, layout = plots.rank_seconds(found["microbatches"])
    plot = Plot(
        f"pass-{at}",
        "Seconds of every rank, microbatch upon microbatch",
        f"The slowest rank of a microbatch takes {max(float(row[-1]) for row in rows):.2f} of the mean at most.",
        "simulated",
        data,
        layout,
    )
    table = HtmlTable("Its microbatches", columns, rows, ("exact", "simulated"))
    return Section(f"of-pass-{at}", f"The pass {found['name']}", (plot, table))

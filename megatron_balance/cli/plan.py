"""`megatron-balance plan`: place sequences on ranks, and say how even it is and what it moves."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from megatron_balance.cli import inputs, verify
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.files import json_text
from megatron_balance.lab.bench import Inputs

if TYPE_CHECKING:
    from megatron_balance.analysis.backward import Decision
    from megatron_balance.analysis.step_memory import StepMemory
    from megatron_balance.ir.plan import MicrobatchPlan
    from megatron_balance.planning.choice import PlannerChoice

PER_RANK = (
    ("tokens", "tokens_per_rank"),
    ("  in attention", "attention_tokens_per_rank"),
    ("attention pairs", "attention_pairs_per_rank"),
    ("KV tokens received", "kv_tokens_received_per_rank"),
    ("  of these, inter-node", "kv_tokens_received_inter_node_per_rank"),
    ("query tokens received", "query_tokens_received_per_rank"),
    ("partial outputs received", "partial_tokens_received_per_rank"),
    ("remapped tokens received", "remap_tokens_received_per_rank"),
)

HELP = "place sequences on ranks; print balance and comm pattern"


def add_options(parser: argparse.ArgumentParser) -> None:
    inputs.add_options(parser)
    proved = "prove that every query meets every key it may see exactly once, forward and backward"
    parser.add_argument("--verify", action="store_true", help=proved)
    written = "write the whole plan (-: and nothing else, to standard output); 'verify FILE' proves it"
    parser.add_argument("--out", type=Path, metavar="FILE", help=written)
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    alone = inputs.check(args)
    given = inputs.read(args)
    if args.out and len(given.planners) > 1:
        several = f"{len(given.planners)} are asked for; run plan once for each"
        raise ConfigError(f"--out {args.out} holds the plans of one planner, and {several}")
    runs = [_run_planner(choice, given, verify=args.verify) for choice in given.planners]
    if args.out:
        verify.write(args.out, [plan for plan, _ in runs[0]], _policies(given)[0])
    reports = [_report(choice, given, results) for choice, results in zip(given.planners, runs, strict=True)]
    if args.json:
        by_name = {report["planner"]: report for report in reports}
        several = {"num_ranks": given.cluster.num_ranks, "planners": by_name}
        print(json_text(reports[0] if len(reports) == 1 else several))
    elif not alone:
        _show(reports, given)
    return 1 if any(result["verified"] is False for results in runs for _, result in results) else 0


def _run_planner(choice: PlannerChoice, given: Inputs, *, verify: bool) -> list[tuple[MicrobatchPlan, dict[str, Any]]]:
    from megatron_balance.analysis.statistics import plan_statistics
    from megatron_balance.compile.proof.structure import verify_plan

    cost = given.planning_cost()
    results: list[tuple[MicrobatchPlan, dict[str, Any]]] = []
    for batch in inputs.progress(given.batches, choice.name):
        start = time.perf_counter()
        plan = choice.plan(batch, given.cluster, given.model, cost)
        plan_ms = 1e3 * (time.perf_counter() - start)
        if not verify:  # which proves more
            verify_plan(plan)
        result = {
            **plan_statistics(plan, given.model, given.cluster.ranks_per_nic),
            "plan_ms": plan_ms,
            "verified": _verified(plan, given, len(results)) if verify else None,
            "fingerprint": plan.fingerprint(),
            "note": plan.note or None,
            "backward": _decision_of(plan, given).described(),
        }
        results.append((plan, result))
    return results


def _verified(plan: MicrobatchPlan, given: Inputs, batch: int) -> bool:
    try:
        for policy in _policies(given):
            verify.prove(plan, policy)
    except InvalidProgramError as error:
        print(f"batch {batch}, {plan.planner}: not verified: {error}", file=sys.stderr)
        return False
    return True


def _policies(given: Inputs) -> tuple[Policy, ...]:
    """The policies that layers may have; with `auto` some keep and some replay."""
    return POLICIES if given.config.backward == "auto" else (given.config.backward,)


def _report(
    choice: PlannerChoice, given: Inputs, planned: list[tuple[MicrobatchPlan, dict[str, Any]]]
) -> dict[str, Any]:
    results = [result for _, result in planned]
    return {
        "planner": choice.name,
        "routing": choice.layers.routing,
        "remapping": choice.layers.remap,
        "num_ranks": given.cluster.num_ranks,
        "ranks_per_node": given.cluster.node_size,
        "cluster": given.cluster.name,
        "model": given.model.name,
        "assumed": given.assumed or None,
        "capacity_tokens_per_rank": given.tokens_per_rank,
        "memory": memory_lines([plan for plan, _ in planned], given),
        "results": results,
        "summary": _mean(results),
    }


def _mean(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean over batches of every scalar field, nested ones included."""
    summary: dict[str, Any] = {}
    for key, value in results[0].items():
        values = [result[key] for result in results]
        if isinstance(value, dict):
            if inner := _mean(cast("list[dict[str, Any]]", values)):
                summary[key] = inner
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            summary[key] = fmean(values)
    return summary


def _show(reports: Iterable[dict[str, Any]], given: Inputs) -> None:
    console = inputs.console(120)
    cluster = given.cluster
    node_word = "node" if cluster.num_nodes == 1 else "nodes"
    what = f"{given.model.name} on {cluster.name}"
    note = "" if not given.assumed else " assumed" if given.assumed.startswith(what) else f" ({given.assumed})"
    console.print(f"{cluster.num_ranks} ranks ({cluster.num_nodes} {node_word} x {cluster.node_size}), {what}{note}")
    sequences = fmean(len(batch.lengths) for batch in given.batches)
    tokens = fmean(batch.num_tokens for batch in given.batches)
    count = f"mean of {len(given.batches)} batches" if len(given.batches) > 1 else "1 batch"
    console.print(
        f"{count}: {_plain(sequences)} sequences, {_plain(tokens)} tokens; a rank holds up to {given.tokens_per_rank:,}"
    )
    for report in reports:
        title = f"{report['planner']}: per rank, one layer, forward"
        table = inputs.table(title, ("", "min", "mean", "max", "max / mean"), ("",))
        results = report["results"]
        for label, key in PER_RANK:
            each = [result[key] for result in results]
            if key != "attention_tokens_per_rank" or each != [result["tokens_per_rank"] for result in results]:
                _add_row(table, label, each)
        for label, key in (("MB received", "total"), ("  of these, inter-node", "inter_node")):
            _add_row(table, label, [result["bytes_received_per_rank"][key] for result in results], mega=True)
        sent = [[num_bytes for node in result["bytes_sent_per_nic"] for num_bytes in node] for result in results]
        _add_row(table, "MB sent by each NIC", sent, mega=True)
        console.print(table)
        for line in (*_layer_lines(report, results), *report["memory"]):
            console.print(line)
        for number, result in enumerate(results):
            if result["note"]:
                console.print(f"batch {number}: {result['note']}")
        console.print(
            f"planned in {report['summary']['plan_ms']:.2f} ms; {_verdict([result['verified'] for result in results])}"
        )


def _layer_lines(report: dict[str, Any], results: list[dict[str, Any]]) -> Iterable[str]:
    """Lines on the remap and the routing, where they do anything."""
    moved, routed = (fmean(r["remap"]["tokens_moved"] for r in results), fmean(r["routed_transfers"] for r in results))
    if moved:
        inter_node = fmean(r["remap"]["tokens_moved_inter_node"] for r in results)
        crossing = f"{_plain(inter_node)} of them on another node"
        yield f"remap: {_plain(moved)} tokens have another rank for attention, {crossing}"
    if routed:
        yield f"routing {report['routing']}: {_plain(routed)} transfers between nodes go over all NICs"


def _add_row(table: Any, label: str, batches: list[list[int]], *, mega: bool = False) -> None:
    """The mean over batches of each one's min, mean and max over ranks; rows of zeros are left out.
    `mega`: shown in millions.
    """
    low, mean, high = (fmean(f(ranks) for ranks in batches) for f in (min, fmean, max))
    if high or label in ("tokens", "attention pairs"):
        cells = [f"{value / 1e6:,.1f}" if mega else f"{value:,.0f}" for value in (low, mean, high)]
        table.add_row(label, *cells, f"{high / mean:.3f}" if mean else "-")


def _verdict(verified: list[bool | None]) -> str:
    if None in verified:
        return "not verified (--verify proves it)"
    return "verified" if all(verified) else f"NOT VERIFIED: {verified.count(False)} of {len(verified)}"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _memory(given: Inputs) -> StepMemory:
    """The memory of a plan as a step: one stage, nothing recomputed, the optimizer shared out."""
    from megatron_balance.analysis.step_memory import StepMemory

    return replace(StepMemory.one_stage(given.model, given.cluster.num_ranks), asked=given.config.backward)


def _decision_of(plan: MicrobatchPlan, given: Inputs) -> Decision:
    from megatron_balance.analysis.backward import microbatch_bytes

    return _memory(given).decide(microbatch_bytes([plan], given.model), given.cluster.memory_bytes)


def memory_lines(plans: Sequence[MicrobatchPlan], given: Inputs) -> list[str]:
    """The decision for the fullest of several steps, and what would fit if it does not."""
    from megatron_balance.analysis.backward import advice, microbatch_bytes

    plan, decision = max(((plan, _decision_of(plan, given)) for plan in plans), key=lambda each: each[1].peak_bytes)
    told = [decision.sentence()]
    if not decision.fits:
        told.append(advice(decision, [microbatch_bytes([plan], given.model)], given.model, _memory(given).stages))
    return told

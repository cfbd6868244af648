"""`megatron-balance compare`: planners side by side on the same batches: step time, speedup,
balance, memory.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from megatron_balance.cli import inputs, laboratory
from megatron_balance.errors import ConfigError
from megatron_balance.planners import PLANNERS

if TYPE_CHECKING:
    from megatron_balance.planning.choice import PlannerChoice

BASELINE = "te_ring"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the verb `compare`."""
    parser = subparsers.add_parser(
        "compare", help="planners side by side: step time, speedup, balance, memory", description=__doc__
    )
    inputs.add_options(parser)
    laboratory.add_options(parser)
    laboratory.add_mode_options(parser)
    parser.add_argument(
        "--baseline", metavar="NAME", help=f"speedups are over this planner (default {BASELINE}, else the first)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and simulate every batch by every planner: all there are, unless some are named.

    Raises:
        BalanceError: a user's mistake, or a batch that does not fit.
    """
    if not args.planner:
        args.planner = list(PLANNERS)
    given = laboratory.read(args)
    baseline = args.baseline or (BASELINE if BASELINE in args.planner else args.planner[0])
    if baseline not in args.planner:
        raise ConfigError(f"--baseline {baseline} is not among the planners of this run: {', '.join(args.planner)}")
    bench = laboratory.bench(args, given)
    rows, left_out = _rows(bench, given, explicit=len(args.planner) < len(PLANNERS))
    base = next((row for row in rows if row["planner"] == baseline), None)
    if base is None:
        raise ConfigError(f"--baseline {baseline} cannot plan this batch: {left_out[baseline]}")
    for row in rows:
        row["speedup"] = base["step_s"] / row["step_s"]
    if args.json:
        print(
            json.dumps(
                {"rows": rows, "baseline": baseline, "left_out": left_out, "kind": "simulated", **bench.described()}
            )
        )
    else:
        _show(rows, left_out, baseline, bench)
    return 0


def _rows(
    bench: laboratory.Bench, given: inputs.Inputs, *, explicit: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each planner; of planners that nobody named, one that cannot place the batch, or
    run as asked, is left out.
    """
    from megatron_balance.errors import InfeasibleError

    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for choice in given.planners:
        reason = None if explicit else _refusal(bench, choice)
        try:
            if reason is None:
                planned = bench.plan(choice)
                rows.append(row(bench, planned, bench.simulate(planned)))
        except InfeasibleError as error:
            if explicit:
                raise
            reason = str(error)
        if reason is not None:
            left_out[choice.name] = reason
    return rows, left_out


def _refusal(bench: laboratory.Bench, choice: PlannerChoice) -> str | None:
    """The reason for which a planner's plans cannot be run as asked; None: they can."""
    try:
        bench.mode(choice)
    except ConfigError as error:
        return str(error)
    return None


def row(bench: laboratory.Bench, planned: laboratory.Planned, found: dict[str, Any]) -> dict[str, Any]:
    """The row of a planner beside others; `found`: its simulated statistics. The speedup is known
    once all have a row.
    """
    peak = max(found["peak_bytes_per_rank"])
    return {
        "planner": planned.name,
        "step_s": found["step_s"]["median"],
        "step_with_host_s": None if found["step_with_host_s"] is None else found["step_with_host_s"]["median"],
        "tokens_per_s": found["tokens_per_s"],
        "speedup": 1.0,
        "over_bound": found["mean_step_s"] / bench.bound_s(),
        "imbalance": bench.imbalance(planned),
        "plan_ms": planned.plan_ms,
        "peak_bytes": peak,
        "fits": peak <= bench.given.cluster.memory_bytes,
        **planned.described(),
    }


def _show(rows: list[dict[str, Any]], left_out: dict[str, str], baseline: str, bench: laboratory.Bench) -> None:
    from rich.table import Table

    console = laboratory.console()
    console.print(bench.headline())
    table = Table(title=f"simulated; speedup over {baseline}", title_justify="left")
    for column in (
        "planner",
        "step s",
        "with hosts",
        "tokens/s",
        "speedup",
        "over bound",
        "imbalance: tokens",
        "attention",
        "plan ms",
        "peak GB",
        "runs as",
    ):
        table.add_column(column, justify="left" if column in ("planner", "runs as") else "right")
    for row in sorted(rows, key=lambda row: row["step_s"]):
        balance = row["imbalance"]
        with_host = "" if row["step_with_host_s"] is None else f"{row['step_with_host_s']:.3f}"
        cells = (f"{row['step_s']:.3f}", with_host, f"{row['tokens_per_s']:,.0f}", f"{row['speedup']:.2f}x")
        cells = (*cells, f"{row['over_bound']:.2f}")
        more = (
            f"{balance['tokens']:.3f}",
            f"{balance['attention']:.3f}",
            f"{row['plan_ms']:.1f}",
            f"{row['peak_bytes'] / 1e9:.1f}{'' if row['fits'] else ' !'}",
        )
        table.add_row(row["planner"], *cells, *more, _runs_as(row))
    console.print(table)
    if not all(row["fits"] for row in rows):
        memory = f"{bench.given.cluster.memory_bytes / 1e9:.0f} GB"
        replay = ", --policy auto" if bench.setup.policy == "keep" else ""
        console.print(f"! more than the {memory} of a rank: fewer tokens{replay} or --recompute full")
    for name, reason in left_out.items():
        console.print(f"{name} left out: {reason}")


def _runs_as(row: dict[str, Any]) -> str:
    """The mode of its steps, in a word or two."""
    stages = {"joint": ["stages attend together"], "stages": ["stages apart"], None: []}[row["pipeline"]]
    return ", ".join(["nano-batches interleaved"] * row["ping_pong"] + stages)

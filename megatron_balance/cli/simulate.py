"""`megatron-balance simulate`: how long a step takes on a cluster, where the time goes, and what
the ranks hold, without a GPU.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_balance.cli import inputs, simulation
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text
from megatron_balance.lab.bench import Bench, Planned

HELP = "step time, phases, memory and utilisation on a cluster"


def add_options(parser: argparse.ArgumentParser) -> None:
    inputs.add_options(parser)
    simulation.add_options(parser)
    traced = "write a Chrome/Perfetto trace of the first step (or of one layer of a full tick), all ranks"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=traced)
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    alone = inputs.check(args, "--trace")
    given = simulation.read(args)
    bench = simulation.bench(args, given)
    if args.trace and len(given.planners) > 1:
        several = f"{len(given.planners)} are asked for; run simulate once for each"
        raise ConfigError(f"--trace {args.trace} is of one planner, and {several}")
    if args.trace and args.transport == "sockets":
        raise ConfigError(
            "--trace has a lane for each stream, and --transport sockets has no streams; use --transport streams"
        )
    planned = [bench.plan(choice) for choice in given.planners]
    reports = {each.name: {"planner": each.name, **bench.simulate(each), **bench.described()} for each in planned}
    if args.trace:
        _write_trace(args.trace, bench, planned[0])
    if alone:
        return 0
    if args.json:
        print(json_text(next(iter(reports.values())) if len(reports) == 1 else {"planners": reports}))
    else:
        _show(reports, bench, {each.name: each.in_words() for each in planned})
    return 0


def _write_trace(path: Path, bench: Bench, planned: Planned) -> None:
    from megatron_balance.simulator.timeline import layer_trace, step_trace

    step = planned.steps[0]
    if planned.mode.ping_pong:
        raise ConfigError(
            f"--trace {path} is of microbatches that run whole, and {planned.name} runs two nano-batches interleaved; "
            "add --ping-pong false"
        )
    if step.strategy is not None:
        raise ConfigError(
            f"--trace {path} is of ranks that all run one pipeline, and {planned.name} runs strategy {step.strategy}; "
            "trace a training run (trace_steps), or another planner"
        )
    if planned.mode.joint:
        trace = layer_trace(step.fullest_tick().plan, bench.pool, "replay")
    else:
        trace = step_trace(step.plans, bench.machine, bench.setup)
    inputs.write(path, json.dumps(trace.document(), allow_nan=False), "--trace")


def _changed(changes: dict[str, float]) -> str:
    """The line on pulls and pushes; of each the seconds that links alone take."""
    pull, push = (
        f"{way} {changes[f'{way}_bytes'] / 1e9:.1f} GB in {changes[f'predicted_{way}_s']:.3f} s"
        for way in ("pull", "push")
    )
    count = int(changes["steps"])
    return f"{count} step{'s' * (count > 1)} of another strategy than the base layout: {pull}, {push}, by links alone"


def _show(reports: dict[str, dict[str, Any]], bench: Bench, runs: dict[str, str]) -> None:
    from rich.table import Table

    console = inputs.console()
    console.print(bench.headline())
    for name, report in reports.items():
        step, peak = report["step_s"], report["peak_bytes_per_rank"]
        spread = f" ({step['p5']:.3f} to {step['p95']:.3f})" if step["p5"] != step["p95"] else ""
        how = f", {runs[name]}" if runs[name] else ""
        console.print(
            f"{name}: {step['median']:.3f} s a step{spread}, {report['tokens_per_s']:,.0f} tokens/s, simulated{how}"
        )
        if report["step_with_host_s"] is not None:
            with_host = report["step_with_host_s"]["median"]
            console.print(f"{with_host:.3f} s a step where devices wait for what their hosts issue, too")
        table = Table("phase", "s", "share", title="where the slowest rank's time goes", title_justify="left")
        total = sum(report["phases_s"].values())
        for phase, seconds in report["phases_s"].items():
            if seconds:
                table.add_row(phase.replace("_", " "), f"{seconds:.4f}", f"{seconds / total:.1%}")
        console.print(table)
        if "changes" in report:
            console.print(_changed(report["changes"]))
        used = ", ".join(f"{part} {share:.1%}" for part, share in report["utilisation"].items())
        console.print(
            f"busy on average: {used}; memory at most {max(peak) / 1e9:.1f} GB, at least {min(peak) / 1e9:.1f} GB"
        )
        console.print(report["backward"]["sentence"])

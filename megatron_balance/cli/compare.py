"""`megatron-balance compare`: planners side by side on the same batches: step time, speedup,
balance, memory.
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.states import by_heads_s, exchanged_heads, states_cost
from megatron_balance.cli import inputs, simulation
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.files import json_text
from megatron_balance.lab.bench import Bench, PlayedCase, best_of, named, saving, standing
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice

# Planners that others are held against unless somebody says another: what most jobs run, and what
# papers compare with.
BASELINES = ("megatron", "te_ring")
HELP = "planners side by side: step time, speedup, balance, memory"


def add_options(parser: argparse.ArgumentParser) -> None:
    inputs.add_options(parser)
    simulation.add_options(parser)
    over = f"speedups are over this planner (default {', else '.join(BASELINES)}, else the first)"
    parser.add_argument("--baseline", metavar="NAME", help=over)
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Plan and simulate every batch by every planner: all there are, unless some are named."""
    if not args.planner:
        args.planner = list(PLANNERS)
    given = simulation.read(args)
    baseline = args.baseline or baseline_of(args.planner)
    if baseline not in args.planner:
        raise ConfigError(f"--baseline {baseline} is not among the planners of this run: {', '.join(args.planner)}")
    bench = simulation.bench(args, given)
    played, left_out = bench.compare(given.planners, baseline, explicit=len(args.planner) < len(PLANNERS))
    rows = sorted((each.row for each in played), key=standing)
    base = next(row for row in rows if row["planner"] == baseline)
    flat, by_heads = bench.one_by_one(given.planners), heads_exchanged(bench, given.planners)
    if args.json:
        found = {"rows": rows, "best": best_of(rows), "baseline": baseline, "left_out": left_out, "kind": "simulated"}
        found |= {} if flat is None else {"flattened": flat}
        found |= {} if by_heads is None else {"megatron_by_heads": by_heads}
        print(json_text({**found, "baseline_sizes": base["sizes"], **bench.described()}))
    else:
        _show(rows, left_out, base, bench)
        if sentence := of_states(played, bench.machine):
            inputs.console().print(sentence)
        if by_heads is not None:
            inputs.console().print(of_heads(by_heads, rows[0]))
        if flat is not None:
            inputs.console().print(_beside(flat, rows[0]))
    return 0


def heads_exchanged(bench: Bench, choices: Sequence[PlannerChoice]) -> dict[str, Any] | None:
    """Megatron's replicas whose recurrent layers exchange heads, of the fastest size; None: there are
    no such layers, no replicas were asked for, or their heads go to no size that holds the batch.
    """
    replicas = next((each for each in choices if each.planner.replicas), None)
    if replicas is None or bench.given.model.recurrent is None:
        return None
    with suppress(InfeasibleError):
        return bench.by_heads().play(replicas).row
    return None


def _beside(flat: dict[str, Any], best: dict[str, Any]) -> str:
    fits = "" if flat["fits"] else ", more than a rank's memory in one microbatch"
    return (
        f"the same rollouts one by one take {flat['step_s']:.3f} s by {flat['planner']} "
        f"({flat['peak_bytes'] / 1e9:.1f} GB a rank{fits}): trees by {best['planner']} are "
        f"{flat['step_s'] / best['step_s']:.2f}x as fast{_in_parts(flat, best)}"
    )


def _in_parts(flat: dict[str, Any], best: dict[str, Any]) -> str:
    """Rollouts one by one in as many microbatches as fit, to end a sentence; empty: one does."""
    fitting = flat["fitting"]
    if flat["fits"]:
        return ""
    if fitting is None:
        return "; in smaller microbatches they do not fit either"
    return (
        f"; in {fitting['microbatches']} microbatches, which fit, {fitting['step_s']:.3f} s by {fitting['planner']}: "
        f"{fitting['step_s'] / best['step_s']:.2f}x"
    )


def of_sizes(rows: Sequence[dict[str, Any]], base: dict[str, Any]) -> str:
    """A sentence on the baseline's smallest replicas, where larger ones are faster; else empty."""
    least = base["sizes"][0] if base["sizes"] else base
    if least["context_parallel"] == base["context_parallel"]:
        return ""
    best = next((row for row in rows if row["planner"] == best_of(rows) and row is not base), None)
    beside = "" if best is None else f": beside that, {best['planner']} is {least['step_s'] / best['step_s']:.2f}x"
    memory = "" if least["fits"] else ", which does not fit in memory"
    fastest = "the fastest of its sizes that fit" if base["fits"] else "its fastest size, though none fits"
    return (
        f"{base['planner']} is held against the others with CP {base['context_parallel']}, {fastest}; with CP "
        f"{least['context_parallel']}, the fewest ranks that hold the longest sequence, a step takes "
        f"{least['step_s']:.3f} s{memory}{beside}"
    )


def of_states(played: Sequence[PlayedCase], machine: Machine) -> str:
    """A sentence on recurrent layers: what their states take by each planner, and what sending all
    tokens by heads would, over as many ranks as heads go to; empty: there are none.
    """
    if (own := machine.model.recurrent) is None:
        return ""
    each: list[str] = []
    for case in played:
        states = states_cost(case.first_plan, machine)
        assert states is not None
        each.append(f"{case.row['planner']} {1e3 * float(states.seconds[0].max()):.2f}")
    heads = exchanged_heads(own)
    most = max(size for size in range(1, machine.num_ranks + 1) if heads % size == 0)
    by_heads = by_heads_s(own, machine, played[0].first_plan.num_tokens / machine.num_ranks, most)
    return (
        f"states in each of {own.layers} recurrent layers, forward, ms: {', '.join(each)}; sending all tokens by heads "
        f"instead takes {1e3 * by_heads:.2f} in groups of {most} ranks, the most that {heads} heads go to"
    )


def of_heads(by_heads: dict[str, Any], best: dict[str, Any]) -> str:
    """A sentence on the row of `heads_exchanged` beside the best one."""
    fits = "" if by_heads["fits"] else ", which does not fit in memory"
    return (
        "Megatron-core itself, whose recurrent layers exchange all tokens by heads, takes "
        f"{by_heads['step_s']:.3f} s a step with CP {by_heads['context_parallel']}{fits}: {best['planner']} is "
        f"{by_heads['step_s'] / best['step_s']:.2f}x as fast"
    )


def _of_errors(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence on how far simulated attention is from published figures."""
    known = {row["planner"]: row["published_error"] for row in rows if row["published_error"] is not None}
    each = ", ".join(f"{name} {error['forward']:.0f} and {error['backward']:.0f} %" for name, error in known.items())
    others = "" if len(known) == len(rows) else "none is published of the others" if known else "none is published"
    what = "off published H100 attention of packed documents, forward and backward (median)"
    return f"{what}: {'; '.join(filter(None, (each, others)))}"


def baseline_of(planners: Sequence[str]) -> str:
    """The one of `planners` that others are held against unless somebody says another."""
    return next((name for name in BASELINES if name in planners), planners[0])


def _show(rows: list[dict[str, Any]], left_out: dict[str, str], base: dict[str, Any], bench: Bench) -> None:
    console = inputs.console()
    console.print(bench.headline())
    middle = ("step s", "with hosts", "tokens/s", "speedup", "over bound", "MFU", "imbalance: tokens", "attention")
    columns = ("planner", *middle, "plan ms", "peak GB", "runs as")
    table = inputs.table(f"simulated; speedup over {named(base)}", columns, ("planner", "runs as"))
    for row in rows:
        balance = row["imbalance"]
        with_host = "" if row["step_with_host_s"] is None else f"{row['step_with_host_s']:.3f}"
        plan_ms, peak = f"{row['plan_ms']:.1f}", f"{row['peak_bytes'] / 1e9:.1f}"
        table.add_row(
            *(row["planner"], f"{row['step_s']:.3f}", with_host, f"{row['tokens_per_s']:,.0f}"),
            *(f"{row['speedup']:.2f}x", f"{row['over_bound']:.2f}", f"{row['mfu']:.1%}"),
            *(f"{balance['tokens']:.3f}", f"{balance['attention']:.3f}"),
            *(plan_ms + " ~" * (not row["hides"]), peak + " !" * (not row["fits"]), _runs_as(row)),
        )
    console.print(table)
    if not all(row["fits"] for row in rows):
        memory = f"{bench.given.cluster.memory_bytes / 1e9:.0f} GB"
        replay = ", --policy auto" if bench.setup.policy == "keep" else ""
        console.print(f"! more than the {memory} of a rank: fewer tokens{replay} or --recompute full")
    if not all(row["hides"] for row in rows):
        console.print("~ planning takes longer than the step, so training would wait for it")
    best = best_of(rows)
    none = "best: none; no planner here fits and plans within a step"
    console.print(none if best is None else f"best of those that run: {best}")
    if best not in (None, base["planner"]):
        console.print(saving(next(row for row in rows if row["planner"] == best), base, bench.price))
    for name, reason in left_out.items():
        console.print(f"{name} left out: {reason}")
    if sentence := of_sizes(rows, base):
        console.print(sentence)
    console.print(_of_errors(rows))


def _runs_as(row: dict[str, Any]) -> str:
    stages = {"joint": ["stages attend together"], "stages": ["stages apart"], None: []}[row["pipeline"]]
    replicas = [] if row["context_parallel"] is None else [f"CP {row['context_parallel']}"]
    return ", ".join(
        [*replicas, *filter(None, [row["found"]]), *["nano-batches interleaved"] * row["ping_pong"], *stages]
    )

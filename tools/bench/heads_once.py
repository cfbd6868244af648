"""Head exchanges as they are and once per node (`patterns.head_exchange_once`): simulated seconds,
bytes and calls of one layer's attention.

python -m tools.bench.heads_once [--cluster a800 --cluster h100] [--tokens 4096] [--all]
    [--between BATCHES.json]

One document of `--tokens` tokens a rank on 16, 32 and 64 ranks in nodes of 8, as `ulysses` lays it;
llama3-8b, its 32 query heads with 8, 4, 2 and 1 key-value heads. An attention call forward and
backward, received inputs kept and brought again, devices waiting for their hosts. `--all`: also what
is saved for documents of 8 to 1,024 tokens a rank, and what the layer `once_per_node` chooses.

`--between`: what waves and head rings, whose groups are nodes, could gain at most if keys crossed once
between them: zeppelin's steps (nine sets, one batch of each) with NICs that are as many times faster
between groups as ranks share a key-value head, and nothing that passes keys on; beside it the calls
that would, one more for each wave or round of a phase.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_balance.compile.batches import issued
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import NO_HOST
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.plan import MicrobatchPlan, SharedZone, Zone
from megatron_balance.ir.program import Policy
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.planning.layers import with_layers
from megatron_balance.simulator.attention import attention_call
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.training import simulate_planned

RANKS, KV_HEADS, PER_NODE = (16, 32, 64), (8, 4, 2, 1), 8
SHORT = (8, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Figures:
    """An attention call, both phases: milliseconds with hosts, megabytes of the busiest NIC one
    way.
    """

    keep_ms: float
    replay_ms: float
    nic_mb: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="append", help="only this one (default: a800 and h100); repeatable")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of a rank (default 4096)")
    parser.add_argument("--all", action="store_true", help="also short documents, by what is chosen")
    parser.add_argument("--between", type=Path, metavar="BATCHES.json", help="only: waves and head rings")
    options = parser.parse_args(argv)
    for name in options.cluster or ("a800", "h100"):
        if options.between is not None:
            print("\n".join(between(name, json.loads(options.between.read_text()))))
            continue
        print("\n".join(lines(name, options.tokens)))
        if options.all:
            print("\n".join(choices(name)))
    return 0


def lines(name: str, tokens_per_rank: int) -> Iterator[str]:
    """The table of a cluster."""
    yield from ("", f"{name}, {tokens_per_rank:,} tokens a rank", "")
    yield "| ranks | key-value heads | keep, ms | once | replay, ms | once | busiest NIC, MB | once | calls | once |"
    yield "|---:|---:|" + "---:|" * 8
    for num_ranks in RANKS:
        for kv_heads in KV_HEADS:
            machine = _machine(name, num_ranks, kv_heads)
            plain = _plan(machine, tokens_per_rank)
            both = [plain, _once(plain)]
            before, after = (figures(plan, machine) for plan in both)
            calls = [most_calls(plan) for plan in both]
            yield (
                f"| {num_ranks} | {kv_heads} | {before.keep_ms:.2f} | {after.keep_ms:.2f} | {before.replay_ms:.2f} | "
                f"{after.replay_ms:.2f} | {before.nic_mb:.0f} | {after.nic_mb:.0f} | {calls[0]} | {calls[1]} |"
            )


def choices(name: str) -> Iterator[str]:
    """Microseconds that the head exchange once per node saves, by length, and what is chosen."""
    yield from ("", f"{name}: microseconds saved, without hosts and with them; `+`: chosen", "")
    yield "| ranks | key-value heads | " + " | ".join(f"{tokens:,}" for tokens in SHORT) + " |"
    yield "|---:|---:|" + "---:|" * len(SHORT)
    for num_ranks in RANKS:
        for kv_heads in (8, 2):
            machine = _machine(name, num_ranks, kv_heads)
            bare = replace(machine, host=NO_HOST)
            cells: list[str] = []
            for tokens in SHORT:
                plain = _plan(machine, tokens)
                chosen = with_layers(plain, machine.cluster, machine.cost, Layers(once_per_node=True)) != plain
                saved = [
                    _seconds(plain, each, "keep") - _seconds(_once(plain), each, "keep") for each in (bare, machine)
                ]
                cells.append(" / ".join(f"{1e6 * each:.0f}" for each in saved) + (" +" if chosen else ""))
            yield f"| {num_ranks} | {kv_heads} | " + " | ".join(cells) + " |"


def between(name: str, document: dict[str, Any]) -> Iterator[str]:
    """The most that waves and head rings could gain, in the mean of the sets and in the best one."""
    yield from ("", f"{name}: part of the step", "")
    yield "| key-value heads | zeppelin | gain, at most | best set | calls |"
    yield "|---:|---|---:|---:|---:|"
    for kv_heads in KV_HEADS[1:]:
        for rule in ("waves", "groups"):
            gains: list[float] = []
            calls: list[float] = []
            for batches, lengths in document["batches"].items():
                machine = _machine(name, document["gpus"][batches.split("/")[1]], kv_heads)
                gain, call = _gain(machine, (tuple(lengths[0]),), {} if rule == "waves" else {"rule": rule})
                gains.append(gain)
                calls.append(call)
            cells = (f"{100 * each:.1f} %" for each in (fmean(gains), max(gains), fmean(calls)))
            yield f"| {kv_heads} | {rule} | " + " | ".join(cells) + " |"


def _gain(machine: Machine, lengths: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> tuple[float, float]:
    """Parts of a step: what faster NICs save between groups, and what calls take that pass keys on."""
    cluster, model, cost = machine.cluster, machine.model, machine.cost
    context = StepContext(cluster, model, cost, own_microbatches=False, may_carry=False)
    step, _ = choose_planner("zeppelin", options).plan_step(lengths, context)
    bare = replace(machine, host=NO_HOST)
    found = simulate_planned(step, bare, bare, Setup(policy="auto"))
    policy: Policy = "keep" if found.backward.keeping else "replay"
    faster = replace(cluster, nic_bytes_per_s=cluster.nic_bytes_per_s * PER_NODE / model.num_kv_heads)
    fast = Machine(faster, model, AnalyticCost(faster, model))
    plan = step.plans[0]
    saved_s = _seconds(plan, bare, policy) - _seconds(plan, fast, policy)
    calls = 0
    for zone in plan.zones:
        if isinstance(zone, SharedZone):
            calls += 2 * zone.waves
        elif isinstance(zone, Zone) and zone.group_size:
            calls += 2 * (len(zone.ranks) // zone.group_size - 1)
    calls_s = calls * (cost.call_s + cluster.intra_alpha_s)
    return saved_s * model.num_layers / found.step_s, calls_s * model.num_layers / found.step_s


def figures(plan: MicrobatchPlan, machine: Machine) -> Figures:
    """An attention call of a plan on a machine."""
    kept = attention_call(plan, machine, "keep")
    moved = np.sum([phase.bytes_moved for phase in kept], axis=0)[2 * machine.num_ranks :]
    return Figures(
        1e3 * _seconds(plan, machine, "keep"), 1e3 * _seconds(plan, machine, "replay"), float(moved.max()) / 1e6
    )


def most_calls(plan: MicrobatchPlan) -> int:
    """Group calls of the rank that issues most, forward and backward, inputs kept."""
    ranks = compile_ranks(plan, "keep")
    return max(
        sum(each)
        for each in zip(*(map(len, issued(ranks, plan.ranks_per_node, backward=b)) for b in (False, True)), strict=True)
    )


def _seconds(plan: MicrobatchPlan, machine: Machine, policy: Policy) -> float:
    return float(sum(phase.end_s.max() for phase in attention_call(plan, machine, policy)))


def _machine(name: str, num_ranks: int, kv_heads: int) -> Machine:
    cluster = load_cluster(name).build(num_ranks=num_ranks, ranks_per_node=PER_NODE)
    model = replace(load_model("llama3-8b"), num_kv_heads=kv_heads)
    cost = AnalyticCost(cluster, model)
    return Machine(cluster, model, cost, host=cost.host)


def _plan(machine: Machine, tokens_per_rank: int) -> MicrobatchPlan:
    ranks, model = tuple(range(machine.num_ranks)), machine.model
    lengths = (tokens_per_rank * len(ranks),)
    zone = Zone("pool", "head_exchange", ranks, (0,))
    return MicrobatchPlan("ulysses", lengths, len(ranks), PER_NODE, model.num_heads, model.num_kv_heads, (zone,))


def _once(plan: MicrobatchPlan) -> MicrobatchPlan:
    return replace(plan, zones=tuple(replace(zone, pattern="head_exchange_once") for zone in plan.zones))


if __name__ == "__main__":
    raise SystemExit(main())

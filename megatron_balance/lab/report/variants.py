"""Variants to try next: of the planner's settings, of the step and of the machine, each simulated,
with its gain.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.errors import BalanceError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.step import StepPlan
from megatron_balance.lab.bench import Bench, Figures, runs
from megatron_balance.lab.report.limits import mean_step_s, simulate
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice, choose_planner

WORTH = 0.01
"""A variant that saves less than this share of the step is not recommended."""

SCALES = (1.25, 1.5, 2.0)
"""Capacities of a rank that are tried, over the batch's mean tokens a rank and over the one in use.
"""

FASTER = 2.0
"""Factor by which parts of the machine are made faster."""

_SCALED_OPTIONS = ("tolerance",)
"""Options that weigh one thing against another: halved and doubled."""

Where = Literal["planner", "step", "machine"]
"""Kind of a variant: a setting of the planner, of the training step, or another machine."""


class _Case(NamedTuple):
    bench: Bench
    choice: PlannerChoice

    def with_machine(self, machine: Machine, **changes: float) -> _Case:
        """On another machine; `changes`: of the cluster that is planned for."""
        given = replace(self.bench.given, cluster=replace(self.bench.given.cluster, **changes))
        return self._replace(bench=replace(self.bench, given=given, machine=machine))


class _TriedOptions(NamedTuple):
    """A variant in words, and as options of the command line; empty: no option makes it."""

    where: Where
    name: str
    options: str
    case: _Case


def of(bench: Bench, choice: PlannerChoice) -> Figures:
    """Steps of all variants, fastest first, and those that are impossible or change nothing."""
    case, steps = _Case(bench, choice), bench.plan(choice).steps
    figures = simulate(steps, bench.machine, bench.setup)
    step_s = mean_step_s(figures)
    rows: list[Figures] = []
    impossible: dict[str, str] = {}
    unchanged: list[str] = []
    for each in bench.progress(list(candidates(case)), "what to try next"):
        try:
            row = _row(each, bench, steps, step_s)
        except BalanceError as error:
            impossible[each.name] = str(error)
            continue
        if row is None:
            unchanged.append(each.name)
        else:
            rows.append(row)
    rows.sort(key=lambda row: row["step_s"])
    return {
        "kind": "simulated",
        "planner": choice.name,
        "num_steps": len(steps),
        "step_s": step_s,
        "fits": max(figures["peak_bytes_per_rank"]) <= bench.machine.cluster.memory_bytes,
        "tries": rows,
        "impossible": impossible,
        "unchanged": unchanged,
    }


def _row(each: _TriedOptions, base: Bench, base_steps: Sequence[StepPlan], base_s: float) -> Figures | None:
    """The figures of a variant; None: it is the same plan on the same machine."""
    bench, begin = each.case.bench, time.perf_counter()
    steps = bench.plan(each.case.choice).steps
    planning_s = time.perf_counter() - begin
    same_machine = bench.machine is base.machine and bench.setup == base.setup
    if same_machine and [step.fingerprint() for step in steps] == [step.fingerprint() for step in base_steps]:
        return None
    figures = simulate(steps, bench.machine, bench.setup)
    step_s = mean_step_s(figures)
    peak = max(figures["peak_bytes_per_rank"])
    hides = planning_s <= len(steps) * step_s
    return {
        "where": each.where,
        "name": each.name,
        "options": each.options,
        "step_s": step_s,
        "times_as_fast": base_s / step_s,
        "saves": 1 - step_s / base_s,
        "peak_bytes": peak,
        "fits": peak <= bench.machine.cluster.memory_bytes,
        # Plans are made while the step before runs.
        "hides": hides,
    }


def recommended(tried: Figures, where: tuple[Where, ...]) -> list[Figures]:
    """Variants worth while that a job can run, fastest first; if the case does not fit, all."""
    rows = [row for row in tried["tries"] if row["where"] in where and runs(row)]
    return [row for row in rows if row["saves"] >= WORTH or not tried["fits"]]


# Variants


def candidates(case: _Case) -> Iterator[_TriedOptions]:
    yield from _other_planners(case)
    yield from _other_layers(case)
    yield from _other_options(case)
    yield from _other_capacities(case)
    yield from _other_steps(case)
    yield from _other_machines(case)


def _planner(case: _Case, name: str, options: str, choice: PlannerChoice) -> _TriedOptions:
    return _TriedOptions("planner", name, options, case._replace(choice=choice))


def _other_planners(case: _Case) -> Iterator[_TriedOptions]:
    """Variants with another planner: its own layers, with those settings that the user gave."""
    now, own = case.choice.layers, PLANNERS[case.choice.name].layers
    told = {
        each.name: getattr(now, each.name)
        for each in dataclasses.fields(now)
        if getattr(now, each.name) != getattr(own, each.name)
    }
    for name, planner in PLANNERS.items():
        if name != case.choice.name:
            layers = replace(planner.layers, **told)
            choice = choose_planner(name, {"tokens_per_rank": case.choice.options.tokens_per_rank}, layers=layers)
            yield _planner(case, f"the planner {name}", f"--planner {name}{_whole(case, name)}", choice)


def _whole(case: _Case, name: str) -> str:
    """Options for `simulate` to run the planner's microbatches and stages whole, as a report does."""
    nano_batches = " --ping-pong false" if PLANNERS[name].ping_pong else ""
    stages = " --stages stages" if case.bench.setup.pipeline > 1 and PLANNERS[name].joint else ""
    return nano_batches + stages


def _other_layers(case: _Case) -> Iterator[_TriedOptions]:
    choice = case.choice
    for when in ("always", "pays", "never"):
        if when != choice.layers.routing and case.bench.given.cluster.num_nodes > 1:
            layers = replace(choice.layers, routing=when)
            yield _planner(
                case,
                f"routing transfers between nodes over all NICs: {when}",
                f"--routing {when}",
                replace(choice, layers=layers),
            )
    if choice.layers.remap:
        off = replace(choice.layers, remap=False, remap_when="always")
        yield _planner(case, "no remap: tokens stay where they attend", "--no-remap", replace(choice, layers=off))
    if not choice.layers.remap or choice.layers.remap_when == "pays":
        on = replace(choice.layers, remap=True, remap_when="always")
        yield _planner(
            case, "a remap: equal tokens on all ranks outside attention", "--remap", replace(choice, layers=on)
        )


def _other_options(case: _Case) -> Iterator[_TriedOptions]:
    """Each option of the planner that has alternatives, one at a time."""
    choice = case.choice
    hints = get_type_hints(PLANNERS[choice.name].options)
    for field in dataclasses.fields(choice.options):
        if field.name in _FOLLOW_LAYERS:
            continue
        now = getattr(choice.options, field.name)
        for value in _alternatives(field.name, hints[field.name], now):
            text = (
                str(value).lower()
                if isinstance(value, bool)
                else f"{value:g}"
                if isinstance(value, float)
                else str(value)
            )
            try:
                other = choose_planner(choice.name, {**_told(choice), field.name: value}, layers=choice.layers)
            except (BalanceError, ValueError):
                continue  # a value that the planner does not take
            yield _planner(
                case, f"{choice.name} with {field.name} {text}", f"-o {choice.name}.{field.name}={text}", other
            )


_FOLLOW_LAYERS = ("routed", "remapped", "tokens_per_rank")


def _told(choice: PlannerChoice) -> Mapping[str, Any]:
    """Options that the user set, the capacity among them."""
    return {**choice.given, "tokens_per_rank": choice.options.tokens_per_rank}


def _alternatives(name: str, hint: Any, now: Any) -> list[Any]:
    """Other values that an option may take."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    closed = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    if closed:
        return [value for value in closed if value != now]
    if isinstance(now, bool):
        return [not now]
    if name in _SCALED_OPTIONS and isinstance(now, float) and now > 0:
        return [now / 2, now * 2]
    return []


def _other_capacities(case: _Case) -> Iterator[_TriedOptions]:
    """A rank that may hold less gives the planner less choice; one that may hold more, more."""
    now: int = case.choice.options.tokens_per_rank
    ranks = case.choice.num_holders(case.bench.given.cluster)
    fullest = max(batch.num_tokens for batch in case.bench.given.batches)
    for capacity in sorted(
        {*(int(-(-fullest * scale // ranks)) for scale in SCALES), *(int(now * scale) for scale in SCALES)} - {now}
    ):
        options = replace(case.choice.options, tokens_per_rank=capacity)
        name = f"{capacity:,} tokens on a rank at most, {capacity * ranks / fullest:.2f} times the mean"
        yield _planner(case, name, f"--tokens-per-rank {capacity}", replace(case.choice, options=options))


def _other_steps(case: _Case) -> Iterator[_TriedOptions]:
    bench, setup = case.bench, case.bench.setup

    def of(name: str, options: str, **changes: Any) -> _TriedOptions:
        return _TriedOptions(
            "step", name, options, case._replace(bench=replace(bench, setup=replace(setup, **changes)))
        )

    if bench.group > 1 and bench.group % 2 == 0:
        merged = _merged(bench)
        yield _TriedOptions(
            "step",
            f"{merged.group} microbatches a step of twice the tokens, not {bench.group}",
            f"--microbatches {merged.group}",
            case._replace(bench=merged),
        )
    if setup.policy == "auto":
        pass  # that is the best of both already
    elif setup.policy == "replay":
        yield of("received keys and values are kept for the backward", "--policy keep", policy="keep")
    else:
        yield of(
            "keys and values are received again in the backward, to save memory", "--policy replay", policy="replay"
        )
    if setup.recompute == "full":
        yield of("no recomputation of activations", "--recompute none", recompute="none")
    else:
        yield of("all activations are recomputed in the backward, to save memory", "--recompute full", recompute="full")
    if not setup.overlap_sync:
        yield of("gradients are synchronised beside the backward", "", overlap_sync=True)
    chunks = 2 * setup.interleave
    even = bench.machine.model.num_layers % (setup.pipeline * chunks) == 0 and bench.group % setup.pipeline == 0
    if setup.pipeline > 1 and even:
        yield of(f"{chunks} model chunks of each pipeline stage", f"--interleave {chunks}", interleave=chunks)


def _merged(bench: Bench) -> Bench:
    batches = bench.given.batches
    pairs = tuple(Batch(a.lengths + b.lengths) for a, b in zip(batches[::2], batches[1::2], strict=True))
    return replace(bench, given=replace(bench.given, batches=pairs), group=bench.group // 2)


def _other_machines(case: _Case) -> Iterator[_TriedOptions]:
    machine, cluster = case.bench.machine, case.bench.given.cluster

    def faster(name: str, factors: Factors, **changes: float) -> _TriedOptions:
        other = replace(machine, cost=PerturbedCost(machine.cost, factors))
        return _TriedOptions("machine", name, "", case.with_machine(other, **changes))

    half = 1 / FASTER
    if cluster.num_nodes > 1:
        nics = cluster.nic_bytes_per_s * FASTER
        yield faster(
            "NICs twice as fast",
            Factors(inter_node=half),
            nic_bytes_per_s=nics,
            inter_alpha_s=cluster.inter_alpha_s * half,
        )
    if cluster.node_size > 1:
        links = cluster.intra_bytes_per_s * FASTER
        yield faster(
            "links inside nodes twice as fast",
            Factors(intra_node=half),
            intra_bytes_per_s=links,
            intra_alpha_s=cluster.intra_alpha_s * half,
        )
    yield faster(
        "ranks that compute twice as fast",
        Factors(attention=half, linear=half),
        flops_per_s=cluster.flops_per_s * FASTER,
    )
    if any(factor > 1 for factor in machine.slowdown):
        yield _TriedOptions("machine", "no slow rank", "", case.with_machine(replace(machine, slowdown=())))

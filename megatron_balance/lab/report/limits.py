"""Limits of a step: its seconds, split by what would have to be better for them to go away.

One thing after another is idealised, and each is charged what the step gains: no rank slower than
the others; transfers between nodes that take no time; then those inside nodes, with the calls and
the processors that transfers take. What is left computes. What all ranks would take if they
computed equally long is computing; the rest of it is imbalance or, in a pipeline, waiting for other
stages. The order matters where two things hide behind each other: what would still be hidden costs
nothing.

The remap is charged what the layer gains if tokens are where attention needs them, and its
transfers are charged that much less.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.base import Contention, Floats
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.errors import BalanceError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import NO_MOVES, MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.lab.bench import Bench, Figures, PlayedCase, why_not
from megatron_balance.lab.report import page
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice, choose_planner
from megatron_balance.simulator.attention import BothPhases, attention_call, beside, by_mask, linear_s, mean_call
from megatron_balance.simulator.setup import StageSetup, settled
from megatron_balance.simulator.step import Perturbation, Setup, simulate_plans, summary

# Factor on the time of transfers that are to cost nothing.
_NO_TIME = 1e-9

PARTS = {
    "linear": "computing outside attention",
    "attention": "computing attention",
    "head": "embedding, logits and loss",
    "optimizer": "the optimizer",
    "imbalance": "imbalance between ranks",
    "straggler": "slow ranks",
    "nic": "transfers between nodes",
    "links": "transfers inside nodes",
    "remap": "the remap",
    "experts": "exchanging tokens between experts",
    "bubble": "waiting for other pipeline stages",
    "gradient_sync": "synchronising gradients",
}
COMPUTING = ("linear", "attention", "head", "optimizer")


class _FreeTransfers(PerturbedCost):
    """Transfers that take no time, no call and no processors."""

    @property
    def call_s(self) -> float:
        return 0.0

    @property
    def contention(self) -> Contention:
        return Contention(0, 0, 0)


def _simulate(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> Figures:
    """The summary of some steps on a machine that is as it was planned for."""
    return summary(simulate_plans(steps, machine, setup, Perturbation()))


def of(played: PlayedCase) -> Figures:
    """Seconds of a step by part, mean over steps, with a sentence on the largest."""
    machine, steps = played.bench.machine, played.steps
    setup = settled(steps[0].plans, StageSetup(machine, played.bench.setup))
    seconds = _parts(steps, machine, setup)
    step_s = sum(seconds.values())
    other = max((part for part in PARTS if part not in COMPUTING), key=lambda part: seconds[part])
    computing = sum(seconds[part] for part in COMPUTING)
    layer = _LayerLoads.of(played.first_plan, machine, setup)
    limit = "compute" if computing >= seconds[other] else other
    return {
        "kind": "simulated",
        "planner": played.name,
        "num_steps": len(steps),
        "step_s": step_s,
        "parts_s": seconds,
        "computing_s": computing,
        "limit": limit,
        "largest_loss": other,
        "busiest_nic": _busiest_nic(layer, machine),
        "computing_ranks": layer.spread(),
        "sentence": _sentence(played, seconds, (limit, other), layer).strip(),
    }


def _parts(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> dict[str, float]:
    """Seconds of each of `PARTS`; they add up to a step, mean over steps."""
    even = replace(machine, slowdown=())
    # In the order of the module's docstring; gradients are synchronised over the same links and
    # have a part of their own.
    machines = [machine, even, _without_transfers(even, inside=False), _without_transfers(even, inside=True)]
    idealised = [_simulate(steps, each, setup) for each in machines]
    sync = [each["phases_s"]["gradient_sync"] for each in idealised]
    slow, alone, no_nics, free = (each["mean_step_s"] - s for each, s in zip(idealised, sync, strict=True))
    phases = idealised[-1]["phases_s"]
    nic, links = max(0.0, alone - no_nics), max(0.0, no_nics - free)
    remap = min(nic + links, _remap_s(steps, even, setup))
    shrink = 1 - remap / (nic + links) if nic + links else 1.0
    linear, attention = _even_compute_s(steps, machines[-1], setup)
    experts = _experts_s(steps, machines[-1], setup, phases)
    inside = sum(phases[p] for p in ("forward_linear", "forward_attention", "backward_linear", "backward_attention"))
    waiting = phases["waiting"]
    bubble = waiting if setup.pipeline > 1 else 0.0
    lost = max(0.0, inside - linear - attention - experts)
    seconds = {
        "linear": linear,
        "attention": attention,
        "head": phases["head"],
        "optimizer": phases["optimizer"],
        "imbalance": lost + waiting - bubble,
        "straggler": max(0.0, slow - alone),
        "nic": nic * shrink,
        "links": links * shrink,
        "remap": remap,
        "experts": experts,
        "bubble": bubble,
        "gradient_sync": sync[0],
    }
    # Seconds by which idealising one thing made another worse count as imbalance, or reduce the
    # largest part.
    left = seconds["imbalance"] + idealised[0]["mean_step_s"] - sum(seconds.values())
    seconds["imbalance"] = max(0.0, left)
    largest = max(seconds, key=seconds.__getitem__)
    seconds[largest] += min(0.0, left)
    return seconds


def _without_transfers(machine: Machine, *, inside: bool) -> Machine:
    """The machine with transfers between nodes that take no time, and `inside` nodes too."""
    factors = Factors(inter_node=_NO_TIME, intra_node=_NO_TIME if inside else 1.0)
    cost = _FreeTransfers(machine.cost, factors) if inside else PerturbedCost(machine.cost, factors)
    return replace(machine, cost=cost)


def _call(plan: MicrobatchPlan, enter_s: tuple[Floats, Floats], machine: Machine, setup: Setup) -> BothPhases:
    each = by_mask(plan, machine)
    how = setup.drawn, enter_s, setup.engine, setup.transport
    call = mean_call([(attention_call(own, on, *how), share) for own, on, share in each])
    return beside(call, (plan,), machine, enter_s)


def _each_microbatch(steps: Sequence[StepPlan], setup: Setup, machine: Machine) -> list[tuple[MicrobatchPlan, float]]:
    """Every plan, and how often a stage runs it in a mean step: its layers."""
    layers = machine.model.num_layers / setup.pipeline
    return [(plan, layers / len(steps)) for step in steps for plan in step.plans]


def _even_compute_s(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> tuple[float, float]:
    """Seconds outside attention and in it, if all ranks computed equally long."""
    linear = attention = 0.0
    again = 2 if setup.recompute == "full" else 1
    for plan, times in _each_microbatch(steps, setup, machine):
        outside = linear_s(plan, machine)
        call = _call(plan, outside, machine, setup)
        linear += times * float((again * outside[0] + outside[1]).mean())
        attention += times * float((again * call.forward.compute_s + call.backward.compute_s).mean())
    return linear, attention


def _experts_s(steps: Sequence[StepPlan], machine: Machine, setup: Setup, phases: dict[str, float]) -> float:
    """Seconds of exchanging tokens with experts on other ranks, which hide behind nothing."""
    if setup.experts == 1:
        return 0.0
    without_exchange = _simulate(steps, machine, replace(setup, experts=1))["phases_s"]
    return sum(phases[phase] - without_exchange[phase] for phase in ("forward_linear", "backward_linear"))


def _remap_s(steps: Sequence[StepPlan], machine: Machine, setup: Setup) -> float:
    """Seconds that a step gains if each token were at the rank where it attends."""
    gained = 0.0
    for plan, times in _each_microbatch(steps, setup, machine):
        if plan.moves:
            enter_s = linear_s(plan, machine)
            with_moves, without = (
                sum(float(outcome.end_s.max()) for outcome in _call(each, enter_s, machine, setup))
                for each in (plan, replace(plan, moves=NO_MOVES))
            )
            gained += times * max(0.0, with_moves - without)
    return gained


@dataclass(frozen=True, slots=True)
class _LayerLoads:
    """A layer of a microbatch, both ways: seconds of ranks, bytes over each resource, seconds."""

    compute_s: Floats
    bytes_moved: Floats
    seconds: float

    @staticmethod
    def of(plan: MicrobatchPlan, machine: Machine, setup: Setup) -> "_LayerLoads":
        outside = linear_s(plan, machine)
        forward, backward = call = _call(plan, outside, machine, setup)
        return _LayerLoads(
            outside[0] + outside[1] + forward.compute_s + backward.compute_s,
            forward.bytes_moved + backward.bytes_moved,
            sum(float(outcome.end_s.max()) for outcome in call),
        )

    def spread(self) -> Figures:
        mean = float(self.compute_s.mean())
        return {
            "mean_s": mean,
            "most_s": float(self.compute_s.max()),
            "most_rank": int(self.compute_s.argmax()),
            "least_s": float(self.compute_s.min()),
            "least_rank": int(self.compute_s.argmin()),
            "imbalance": float(self.compute_s.max()) / mean if mean else 1.0,
        }


def _busiest_nic(layer: _LayerLoads, machine: Machine) -> Figures | None:
    """The NIC that most bytes of a layer go over, in one direction; None: none go between nodes."""
    first = 2 * machine.num_ranks
    loads = layer.bytes_moved[first:]
    if not loads.any():
        return None
    at = int(loads.argmax())
    outgoing, nic = at < machine.num_nics, at % machine.num_nics
    return {
        "node": nic // machine.nics.per_node,
        "nic": nic % machine.nics.per_node,
        "direction": "out" if outgoing else "in",
        "bytes": float(loads[at]),
        "mean_bytes": float(loads.mean()),
        "full_share": float(loads[at] / machine.capacity()[first + at] / layer.seconds),
    }


# In words


def _sentence(played: PlayedCase, seconds: dict[str, float], limits: tuple[str, str], layer: _LayerLoads) -> str:
    limit, other = limits
    step_s = sum(seconds.values())
    mean = f", in the mean of the first {len(played.steps)}" if len(played.steps) > 1 else ""
    what = f"A step of {played.name} takes {page.seconds(step_s)}{mean} (simulated)"
    lost = f"{page.seconds(seconds[other])}, {page.percent(seconds[other] / step_s)} of it"
    why = _why(other, played, layer)
    if limit != "compute":
        return f"{what}. What limits it most is {PARTS[other]}: {lost}, would go away without. {why}"
    computing = sum(seconds[part] for part in COMPUTING)
    share = (
        f"{page.seconds(computing)}, {page.percent(computing / step_s)} of it, is arithmetic that even perfect "
        "balance and links would leave"
    )
    if seconds[other] < 0.01 * step_s:
        return f"{what}. Computing limits it: {share}. Nothing else costs as much as one percent."
    return f"{what}. Computing limits it: {share}. The largest loss beside it is {PARTS[other]}: {lost}. {why}"


def _why(part: str, played: PlayedCase, layer: _LayerLoads) -> str:
    machine, spread = played.bench.machine, layer.spread()
    match part:
        case "nic" | "remap":
            nic = _busiest_nic(layer, machine)
            if nic is None:
                return ""
            return (
                f"In the first microbatch the busiest NIC is number {nic['nic']} of node {nic['node']}: "
                f"{page.size(nic['bytes'])} go {nic['direction']} over it in one layer, "
                f"{nic['bytes'] / nic['mean_bytes']:.2f} times the mean NIC's, and keep it full for "
                f"{page.percent(nic['full_share'])} of the layer."
            )
        case "straggler":
            slow = machine.slow()
            return (
                f"Rank {int(slow.argmax())} computes {float(slow.max()):.2f} times as long as it should, "
                "and all others wait for it."
            )
        case "imbalance":
            balance = played.row["imbalance"]
            return (
                f"In the first microbatch rank {spread['most_rank']} computes {spread['imbalance']:.2f} times as "
                f"long as the mean rank; over all batches the most loaded rank has {balance['attention']:.2f} times "
                f"the mean attention work and {balance['tokens']:.2f} times the mean tokens."
            )
        case "bubble":
            few = page.count(max(len(step.plans) for step in played.steps), "microbatch", "microbatches")
            return (
                f"A step has {few} for {played.bench.setup.pipeline} pipeline stages, which idle while the first comes "
                "in and the last goes out."
            )
        case "gradient_sync":
            return (
                "Every step has one, however many batches it has: more of them in a step (`--microbatches`) share it."
            )
        case _:
            return ""


# Variants to try next: of the planner's settings, of the step and of the machine, each simulated,
# with its gain.

# A variant that saves less than this share of the step is not recommended.
WORTH = 0.01
# Capacities of a rank that are tried, over the batch's mean tokens a rank and over the one in use.
SCALES = (1.25, 1.5, 2.0)
# Factor by which parts of the machine are made faster.
FASTER = 2.0
# Options that weigh one thing against another: halved and doubled.
_SCALED_OPTIONS = ("tolerance",)
# Kind of a variant: a setting of the planner, of the training step, or another machine.
Where = Literal["planner", "step", "machine"]


class _TriedOptions(NamedTuple):
    """A variant in words, and as options of the command line; empty: no option makes it."""

    bench: Bench
    choice: PlannerChoice
    where: Where = "planner"
    name: str = ""
    options: str = ""


def tried(bench: Bench, choice: PlannerChoice) -> Figures:
    """Steps of all variants, fastest first, and those that are impossible or change nothing."""
    case, steps = _TriedOptions(bench, choice), bench.plan(choice).steps
    figures = _simulate(steps, bench.machine, bench.setup)
    step_s = figures["mean_step_s"]
    rows: list[Figures] = []
    impossible: dict[str, str] = {}
    unchanged: list[str] = []
    for each in bench.progress(list(_candidates(case)), "what to try next"):
        try:
            row = _row(each, bench, steps, step_s)
        except BalanceError as error:
            impossible[each.name] = str(error)
            continue
        if row is None:
            unchanged.append(each.name)
        else:
            rows.append(row)
    return {
        "kind": "simulated",
        "planner": choice.name,
        "num_steps": len(steps),
        "step_s": step_s,
        "fits": max(figures["peak_bytes_per_rank"]) <= bench.machine.cluster.memory_bytes,
        "tries": sorted(rows, key=lambda row: row["step_s"]),
        "impossible": impossible,
        "unchanged": unchanged,
    }


def _row(each: _TriedOptions, base: Bench, base_steps: Sequence[StepPlan], base_s: float) -> Figures | None:
    """The figures of a variant; None: it is the same plan on the same machine."""
    bench, begin = each.bench, time.perf_counter()
    steps = bench.plan(each.choice).steps
    planning_s = time.perf_counter() - begin
    same_machine = bench.machine is base.machine and bench.setup == base.setup
    if same_machine and [step.fingerprint() for step in steps] == [step.fingerprint() for step in base_steps]:
        return None
    figures = _simulate(steps, bench.machine, bench.setup)
    step_s = figures["mean_step_s"]
    peak = max(figures["peak_bytes_per_rank"])
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
        "hides": planning_s <= len(steps) * step_s,
    }


def recommended(tried: Figures, where: tuple[Where, ...]) -> list[Figures]:
    """Variants worth while that a job can run, fastest first; if the case does not fit, all."""
    rows = [row for row in tried["tries"] if row["where"] in where and not why_not(row)]
    return [row for row in rows if row["saves"] >= WORTH or not tried["fits"]]


def _candidates(case: _TriedOptions) -> Iterator[_TriedOptions]:
    for of in (_other_planners, _other_layers, _other_options, _other_capacities, _other_steps, _other_machines):
        yield from of(case)


def _other_planners(case: _TriedOptions) -> Iterator[_TriedOptions]:
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
            option = f"--planner {name}{_whole(case, name)}"
            yield case._replace(name=f"the planner {name}", options=option, choice=choice)


def _whole(case: _TriedOptions, name: str) -> str:
    """Options for `simulate` to run the planner's microbatches and stages whole, as a report does."""
    nano_batches = " --ping-pong false" if PLANNERS[name].ping_pong else ""
    stages = " --stages stages" if case.bench.setup.pipeline > 1 and PLANNERS[name].joint else ""
    return nano_batches + stages


def _other_layers(case: _TriedOptions) -> Iterator[_TriedOptions]:
    choice = case.choice
    for when in ("always", "pays", "never"):
        if when != choice.layers.routing and case.bench.given.cluster.num_nodes > 1:
            name = f"routing transfers between nodes over all NICs: {when}"
            layers = replace(choice.layers, routing=when)
            yield case._replace(name=name, options=f"--routing {when}", choice=replace(choice, layers=layers))
    if choice.layers.remap:
        off = replace(choice.layers, remap=False, remap_when="always")
        name = "no remap: tokens stay where they attend"
        yield case._replace(name=name, options="--no-remap", choice=replace(choice, layers=off))
    if not choice.layers.remap or choice.layers.remap_when == "pays":
        on = replace(choice.layers, remap=True, remap_when="always")
        name = "a remap: equal tokens on all ranks outside attention"
        yield case._replace(name=name, options="--remap", choice=replace(choice, layers=on))


def _other_options(case: _TriedOptions) -> Iterator[_TriedOptions]:
    """Each option of the planner that has alternatives, one at a time."""
    choice = case.choice
    hints = get_type_hints(PLANNERS[choice.name].options)
    # Options that the user set, the capacity among them, which has tries of its own.
    told = {**choice.given, "tokens_per_rank": choice.options.tokens_per_rank}
    for field in dataclasses.fields(choice.options):
        if field.name == "tokens_per_rank":
            continue
        now = getattr(choice.options, field.name)
        for value in _alternatives(field.name, hints[field.name], now):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            text = text.lower() if isinstance(value, bool) else text
            try:
                other = choose_planner(choice.name, {**told, field.name: value}, layers=choice.layers)
            except (BalanceError, ValueError):
                continue  # a value that the planner does not take
            name, option = f"{choice.name} with {field.name} {text}", f"-o {choice.name}.{field.name}={text}"
            yield case._replace(name=name, options=option, choice=other)


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


def _other_capacities(case: _TriedOptions) -> Iterator[_TriedOptions]:
    """A rank that may hold less gives the planner less choice; one that may hold more, more."""
    now: int = case.choice.options.tokens_per_rank
    ranks = case.choice.num_holders(case.bench.given.cluster)
    fullest = max(batch.num_tokens for batch in case.bench.given.batches)
    tried = {capacity for by in SCALES for capacity in (int(-(-fullest * by // ranks)), int(now * by))}
    for capacity in sorted(tried - {now}):
        choice = replace(case.choice, options=replace(case.choice.options, tokens_per_rank=capacity))
        name = f"{capacity:,} tokens on a rank at most, {capacity * ranks / fullest:.2f} times the mean"
        yield case._replace(name=name, options=f"--tokens-per-rank {capacity}", choice=choice)


def _other_steps(case: _TriedOptions) -> Iterator[_TriedOptions]:
    bench, setup = case.bench, case.bench.setup

    def of(name: str, options: str, **changes: Any) -> _TriedOptions:
        other = replace(bench, setup=replace(setup, **changes))
        return case._replace(where="step", name=name, options=options, bench=other)

    if bench.group > 1 and bench.group % 2 == 0:
        pairs = zip(bench.given.batches[::2], bench.given.batches[1::2], strict=True)
        batches, group = tuple(Batch(a.lengths + b.lengths, a.trees + b.trees) for a, b in pairs), bench.group // 2
        merged = replace(bench, given=replace(bench.given, batches=batches), group=group)
        name = f"{group} microbatches a step of twice the tokens, not {bench.group}"
        yield case._replace(where="step", name=name, options=f"--microbatches {group}", bench=merged)
    # `auto` is the best of both already.
    if setup.policy == "replay":
        yield of("received keys and values are kept for the backward", "--policy keep", policy="keep")
    if setup.policy == "keep":
        name = "keys and values are received again in the backward, to save memory"
        yield of(name, "--policy replay", policy="replay")
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


def _other_machines(case: _TriedOptions) -> Iterator[_TriedOptions]:
    bench = case.bench
    machine, cluster = bench.machine, bench.given.cluster

    def on(name: str, other: Machine, **changes: float) -> _TriedOptions:
        # `changes`: of the cluster that is planned for.
        given = replace(bench.given, cluster=replace(cluster, **changes))
        return case._replace(where="machine", name=name, bench=replace(bench, given=given, machine=other))

    def faster(**factors: float) -> Machine:
        return replace(machine, cost=PerturbedCost(machine.cost, Factors(**factors)))

    half = 1 / FASTER
    if cluster.num_nodes > 1:
        nics = {"nic_bytes_per_s": cluster.nic_bytes_per_s * FASTER, "inter_alpha_s": cluster.inter_alpha_s * half}
        yield on("NICs twice as fast", faster(inter_node=half), **nics)
    if cluster.node_size > 1:
        links = {"intra_bytes_per_s": cluster.intra_bytes_per_s * FASTER, "intra_alpha_s": cluster.intra_alpha_s * half}
        yield on("links inside nodes twice as fast", faster(intra_node=half), **links)
    computing = faster(attention=half, linear=half)
    yield on("ranks that compute twice as fast", computing, flops_per_s=cluster.flops_per_s * FASTER)
    if any(factor > 1 for factor in machine.slowdown):
        yield on("no slow rank", replace(machine, slowdown=()))

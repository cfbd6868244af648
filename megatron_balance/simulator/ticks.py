"""A pipeline in ticks, all stages attending together (DistCA, section 4.1), on the clocks:
`planning.ticks` in place of 1F1B.

The machine has the ranks of all stages. In a tick every rank goes through the layers of one model
chunk, its own or, while its stage has nothing to do, as a server of the others' attention; ranks
that exchange anything enter and leave a layer together. Between two ticks a result travels to the
next stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_balance.analysis.backward import MicrobatchBytes, StepBytes, decide, microbatch_bytes, step_bytes
from megatron_balance.analysis.change import PipelineWork, base_sync_s, beside_bytes, change
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import OPTIMIZER_BYTES
from megatron_balance.analysis.rounds import in_step
from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.cost import parallel
from megatron_balance.cost.modules import num_parameters
from megatron_balance.cost.parallel import joined_nodes, wide_ranks
from megatron_balance.cost.perturbed import on_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan, Tick, TickPlan
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.planning.ticks import neighbour, passes_on
from megatron_balance.simulator.setup import PLAIN, Microbatch, Setup, StageSetup, added_s, parts_of, peaks
from megatron_balance.simulator.step import PHASES, Step, one_group, run_layer, simulate_step


@dataclass(frozen=True, slots=True)
class _TickTimes:
    """Times of a step in ticks.

    `end_s` [ticks]: when the last rank is through each tick. `compute_s` [ranks]: how long each
    rank computed in all.

    `phases_s` [ranks]: seconds of the layers' modules, of attention beside them (waiting inside a
    layer included) and of the loss; `done_s` [ranks]: when each rank is through the last tick;
    `bytes_moved` by resource (`Machine.resources`). Gradient synchronisation and optimizer are not
    in it (`_simulate_joint`).
    """

    end_s: Floats
    compute_s: Floats
    done_s: Floats
    phases_s: dict[str, Floats]
    bytes_moved: Floats

    @property
    def step_s(self) -> float:
        return float(self.end_s[-1])


def simulate_ticks(
    ticks: Sequence[TickPlan], machine: Machine, setup: Setup = PLAIN, second: Sequence[TickPlan] = ()
) -> _TickTimes:
    """Simulate the ticks of a step.

    `machine`: of all stages' ranks; `setup`: `interleave`, `recompute`, `interleaved`, `engine` and
    `transport` count; the policy is `replay`; `second`: the same ticks of the microbatches' second
    nano-batches, if they run as two. Raises ConfigError: no ticks, layers that stages do not share
    evenly, or nano-batches of other ticks.
    """
    if not ticks:
        raise ConfigError("a step needs at least one tick")
    if second and [one.tick for one in second] != [one.tick for one in ticks]:
        raise ConfigError("the nano-batches of a step's microbatches must be in the same ticks")
    return _TicksRun(machine, setup, len(ticks[0].tick.cells)).run(ticks, second)


_PHASES = {False: ("forward_linear", "forward_attention"), True: ("backward_linear", "backward_attention")}


class _TickPass(NamedTuple):
    """A tick's layers, by rank: seconds in all, of modules, of computation; bytes by resource."""

    seconds: Floats
    linear_s: Floats
    compute_s: Floats
    bytes_moved: Floats

    @property
    def attention_s(self) -> Floats:
        return self.seconds - self.linear_s

    def after(self, other: "_TickPass") -> "_TickPass":
        # `other`, then this pass.
        return _TickPass(*(own + first for own, first in zip(self, other, strict=True)))


class _TicksRun:
    def __init__(self, machine: Machine, setup: Setup, num_stages: int) -> None:
        self.machine, self.setup, self.num_stages = machine, setup, num_stages
        self.size, spare = divmod(machine.num_ranks, num_stages)
        chunks = num_stages * setup.interleave
        self.layers, rest = divmod(machine.model.num_layers, chunks)
        if setup.pipeline not in (1, num_stages):
            raise ConfigError(f"the ticks are of {num_stages} pipeline stages, the setup has {setup.pipeline}")
        if rest or spare:
            raise ConfigError(
                f"{machine.model.num_layers} layers of {machine.model.name} on {machine.num_ranks} ranks cannot be "
                f"cut into {chunks} chunks on {num_stages} pipeline stages"
            )
        self.known: dict[tuple[tuple[int | None, ...], bool], _TickPass] = {}

    def run(self, ticks: Sequence[TickPlan], second: Sequence[TickPlan]) -> _TickTimes:
        clock, busy, done = np.zeros((3, self.machine.num_ranks))
        phases = {name: np.zeros(self.machine.num_ranks) for name in (*_PHASES[False], *_PHASES[True], "head")}
        bytes_moved = np.zeros(len(self.machine.capacity()))
        ends: list[float] = []
        for number, one in enumerate(ticks):
            plans = [each.plan for each in (one, *second[number : number + 1])]
            layers = self._layers(one.tick, plans)
            head = self._head(one.tick, plans)
            clock = in_step(clock, one_group(plans)) + layers.seconds + head
            busy += layers.compute_s + head
            bytes_moved += layers.bytes_moved
            linear, attention = _PHASES[one.tick.backward]
            phases[linear] += layers.linear_s
            phases[attention] += layers.attention_s
            phases["head"] += head
            done = clock
            clock = self._passed_on(one.tick, plans, clock)
            ends.append(float(clock.max()))
        return _TickTimes(np.array(ends), busy, done, phases, bytes_moved)

    def _layers(self, tick: Tick, plans: Sequence[MicrobatchPlan]) -> _TickPass:
        # The layers of a tick, simulated once for the same microbatches.
        key = (tick.microbatches, tick.backward)
        if key not in self.known:
            forward, backward = self._both(plans)
            self.known[tick.microbatches, False] = forward
            again = self.setup.recompute == "full"
            self.known[tick.microbatches, True] = backward.after(forward) if again else backward
        return self.known[key]

    def _both(self, plans: Sequence[MicrobatchPlan]) -> list[_TickPass]:
        # Forward and backward. States of recurrent layers count with attention.
        stage, microbatch = StageSetup(self.machine, self.setup), tuple(plans) if len(plans) > 1 else plans[0]
        # those that share experts are ranks of one stage
        experts = [added_s(plan, stage, self.size) for plan in plans]
        layer = run_layer(microbatch, self.machine, self.setup, self.layers, experts, [("replay", 1.0)])
        return [
            _TickPass(*(self.layers * one for one in (seconds, own, call.compute_s + own, call.bytes_moved)))
            for seconds, own, call in zip(layer.seconds, layer.linear_s, layer.call, strict=True)
        ]

    def _head(self, tick: Tick, plans: Sequence[MicrobatchPlan]) -> Floats:
        # Seconds of the loss, on the ranks of the last stage's last chunk.
        seconds = np.zeros(self.machine.num_ranks)
        cell = tick.cells[-1]
        if cell is not None and cell.chunk == self.setup.interleave - 1:
            tokens = np.sum([linear_tokens(plan)[-self.size :] for plan in plans], axis=0).tolist()
            seconds[-self.size :] = [self.machine.cost.head_s(n, backward=tick.backward) for n in tokens]
        return seconds * self.machine.slow()

    def _passed_on(self, tick: Tick, plans: Sequence[MicrobatchPlan], clock: Floats) -> Floats:
        # Clocks [ranks] once every stage has what it waits for.
        tokens = np.sum([linear_tokens(plan) for plan in plans], axis=0).reshape(self.num_stages, self.size)
        before = clock.reshape(self.num_stages, self.size)
        after = before.copy()
        for stage in range(self.num_stages):
            source = neighbour(tick, stage)
            if passes_on(tick, source, self.setup.interleave) is not None:
                link = self.machine.inter if self.machine.cluster.num_nodes > 1 else self.machine.intra
                transfer = [parallel.stage_transfer_s(self.machine.model, n, link) for n in tokens[source].tolist()]
                after[stage] = np.maximum(after[stage], before[source] + transfer)
        return after.ravel()


def _simulate_joint(
    ticks: Sequence[Sequence[TickPlan]],
    microbatches: Sequence[Microbatch],
    stage: Machine,
    machine: Machine,
    setup: Setup,
) -> Step:
    """Simulate the step of these ticks.

    `ticks`: of the step; of each nano-batch, if microbatches run as two; `microbatches`: where their
    tokens are owned, over the ranks of a stage; `stage`: the machine of one stage's ranks; `machine`:
    that of all stages' ranks; `setup`: as for `simulate_ticks`; the policy is `replay`. Raises
    ConfigError: what `simulate_ticks` refuses.
    """
    first, *second = ticks
    times = simulate_ticks(first, machine, setup, *second)
    rank = int(times.done_s.argmax())
    phases = dict.fromkeys(PHASES, 0.0) | {name: float(seconds[rank]) for name, seconds in times.phases_s.items()}
    phases["waiting"] = max(0.0, times.step_s - sum(phases.values()))
    stage_setup = StageSetup(stage, setup)
    chunk = stage_setup.layers_per_chunk()
    last_s = float(np.diff(times.end_s, prepend=0.0)[-1]) / chunk
    phases["gradient_sync"] = stage_setup.sync_s(chunk * setup.interleave, last_s)
    phases["optimizer"] = stage_setup.optimizer_s()
    step_s = sum(phases.values())
    held = _step_bytes(ticks, microbatches, stage_setup)
    return Step(
        step_s,
        sum(plan.num_tokens for each in microbatches for plan in parts_of(each)),
        phases,
        peaks(held, 0),
        machine.utilisation(times.compute_s, times.bytes_moved, step_s),
        decide(held, "replay", machine.cluster.memory_bytes),
        attention_s={name: float(times.phases_s[f"{name}_attention"].max()) for name in ("forward", "backward")},
    )


def most_held(ticks: Sequence[TickPlan], stage: int) -> int:
    """The largest number of passes through model chunks whose activations a stage holds at once."""
    held = most = 0
    for each in ticks:
        if each.tick.cells[stage] is not None:
            held += -1 if each.tick.backward else 1
            most = max(most, held)
    return most


def _step_bytes(
    ticks: Sequence[Sequence[TickPlan]], microbatches: Sequence[Microbatch], stage_setup: StageSetup
) -> list[StepBytes]:
    # Predicted bytes of each stage's ranks, with what ticks bring and what is in flight.
    setup, model = stage_setup.setup, stage_setup.machine.model
    tokens = np.max([np.sum([linear_tokens(plan) for plan in parts_of(each)], axis=0) for each in microbatches], axis=0)
    brought = {
        each[0].tick.microbatches: microbatch_bytes([part.plan for part in each], model)
        for each in zip(*ticks, strict=True)
    }
    replayed, working = (
        np.max([getattr(each, name) for each in brought.values()], axis=0).reshape(setup.pipeline, len(tokens))
        for name in ("replayed", "working")
    )
    found: list[StepBytes] = []
    for at, stage in enumerate(stage_setup.stages()):
        # A tick's plan is replayed, none kept.
        microbatch = MicrobatchBytes(tokens, replayed[at], replayed[at], working[at])
        found.append(step_bytes([microbatch], model, replace(stage, in_flight=most_held(ticks[0], at))))
    return found


# A planned step as training would run it, on clocks: microbatches whole or as two nano-batches
# (docs/adr/0013), pipeline stages each for itself or attending together (docs/adr/0014), pipelines
# side by side (docs/adr/0023).


def simulate_planned(plan: StepPlan, stage: Machine, pool: Machine, setup: Setup) -> Step:
    """The step on the machine of one stage's ranks and of all stages' (equal where there is one).
    Raises ConfigError: layers or microbatches that the pipeline cannot be given evenly.
    """
    if plan.strategy is not None:
        return _simulate_strategy(plan, plan.strategy, stage, setup)
    microbatches: list[Microbatch] = [each[0] if len(each) == 1 else each for each in plan.microbatches]
    if plan.ticks:
        return _simulate_joint(plan.ticks, microbatches, stage, pool, setup)
    return simulate_step(microbatches, stage, setup)


# Phases in which all pipelines take part.
_MEETING = ("gradient_sync", "optimizer")

# Phases of a step whose weights came from another layout: what nothing covers of them.
_CHANGE = ("pull", "push")


def _simulate_strategy(plan: StepPlan, strategy: Strategy, gpus: Machine, setup: Setup) -> Step:
    # The step of a strategy's pipelines on a machine whose ranks are GPUs.
    #
    # Phases are those of the slowest pipeline, and of the slowest one where all meet. `peak_bytes`
    # is by GPU, 0 where the strategy leaves one over; with `setup.layouts` a GPU holds the weights
    # and gradients of its largest role.
    #
    # Raises:
    # ConfigError: degrees beside those of the strategy; slow ranks; layers that a pipeline cannot
    # be given evenly.
    if (setup.pipeline, setup.interleave, setup.experts) != (1, 1, 1) or gpus.slowdown:
        raise ConfigError(
            f"strategy {strategy} says the degrees of its pipelines, whose ranks are alike; leave out --pipeline, "
            "--interleave, --expert-parallel and --slow"
        )
    layouts, moved, beside = setup.layouts, dict[str, float](), np.zeros(gpus.num_ranks)
    if layouts is not None:
        beside = beside_bytes(layouts, strategy, gpus.model, gpus.num_ranks)
    steps = [
        _simulate_pipeline(
            plan.of_pipeline(pipeline), scheme, gpus, setup, float(beside[strategy.ranks_of(pipeline)].max())
        )
        for pipeline, scheme in enumerate(strategy.pipelines)
    ]
    own_s = [step.step_s - sum(step.phases_s[name] for name in _MEETING) for step in steps]
    slowest = max(range(len(steps)), key=own_s.__getitem__)
    phases = {**steps[slowest].phases_s, **{name: max(step.phases_s[name] for step in steps) for name in _MEETING}}
    if layouts is not None:
        phases |= dict.fromkeys(_CHANGE, 0.0)
        if strategy == layouts.base:  # its weights are gathered when its model runs, beside nothing
            phases["gradient_sync"] = sum(base_sync_s(layouts.base, gpus.model, gpus.cluster))
        else:
            found = change(layouts.base, strategy, gpus.model, gpus.cluster)
            works = [
                PipelineWork(scheme.pipeline, own, *step.layer_s)
                for scheme, own, step in zip(strategy.pipelines, own_s, steps, strict=True)
            ]
            uncovered = found.uncovered_s(works, overlap=layouts.overlap)
            phases |= {"gradient_sync": 0.0, **dict(zip(_CHANGE, uncovered, strict=True))}
            moved = found.traffic.described(gpus.cluster)
    step_s = sum(phases.values())
    ranks = [scheme.num_ranks for scheme in strategy.pipelines]
    held = [np.repeat(step.peak_bytes / s.tensor, s.tensor) for step, s in zip(steps, strategy.pipelines, strict=True)]
    held.append(np.zeros(gpus.num_ranks - strategy.num_ranks))
    peaks = np.concatenate(held) + beside
    if layouts is not None and strategy != layouts.base:
        # A GPU that is left over holds its part of the optimizer all the same.
        peaks[strategy.num_ranks :] += OPTIMIZER_BYTES * num_parameters(gpus.model) / gpus.num_ranks
    return Step(
        step_s,
        sum(step.num_tokens for step in steps),
        phases,
        peaks,
        {
            name: sum(n * each.utilisation[name] * each.step_s for n, each in zip(ranks, steps, strict=True))
            / (gpus.num_ranks * step_s)
            for name in steps[0].utilisation
        },
        max((step.backward for step in steps), key=lambda each: each.peak_bytes),
        steps[slowest].bubble_share,
        attention_s={name: max(step.attention_s[name] for step in steps) for name in steps[0].attention_s},
        change=moved,
    )


def _simulate_pipeline(step: StepPlan, scheme: Scheme, gpus: Machine, setup: Setup, beside: float) -> Step:
    # One pipeline's step; all GPUs share what the pipeline holds of the parameters. `beside`: bytes of
    # a GPU that its other roles take.
    free = replace(gpus.cluster, memory_bytes=max(1.0, gpus.cluster.memory_bytes - beside))
    wide = wide_ranks(joined_nodes(free, scheme.tensor), scheme.tensor)
    size = wide.node_size
    alike = max(scheme.context, wide.num_ranks // scheme.pipeline)
    alike -= alike % min(alike, size)
    own = replace(wide, num_ranks=scheme.context, ranks_per_node=min(scheme.context, size))
    shared = replace(wide, num_ranks=alike, ranks_per_node=min(alike, size))
    stage, everyone = (
        Machine(cluster, gpus.model, on_cluster(gpus.cost, cluster, scheme.tensor), host=gpus.host)
        for cluster in (own, shared)
    )
    microbatches: list[Microbatch] = [each[0] if len(each) == 1 else each for each in step.microbatches]
    return simulate_step(microbatches, stage, replace(setup, pipeline=scheme.pipeline), sharing=everyone)

"""A whole training step: layers around attention calls, the pipeline, gradient synchronisation and
the optimizer.

All layers are alike but for their masks, so one of each mask is simulated and counted as often as
there are; so are microbatches with the same plan. Ranks that exchange anything in a layer go
through the layers in step: their clock is that of the slowest. Ranks that do not, drift apart until
the gradients are synchronised. A microbatch given as two plans runs as two nano-batches interleaved
(`simulator.ping_pong`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from megatron_balance.analysis.backward import Decision
from megatron_balance.cost import parallel
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Policy
from megatron_balance.simulator import memory, ping_pong, pipeline
from megatron_balance.simulator.around import Around
from megatron_balance.simulator.attention import BothPhases, attention_call, coupled, linear_tokens, mean_call
from megatron_balance.simulator.events import Outcome
from megatron_balance.simulator.experts import added_s
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.masks import by_mask
from megatron_balance.simulator.pipeline import ChunkPass, PipelineClocks
from megatron_balance.simulator.setup import PLAIN, Microbatch, Setup, parts_of

PHASES = (
    "forward_linear",
    "forward_attention",
    "backward_linear",
    "backward_attention",
    "head",
    "waiting",
    "gradient_sync",
    "optimizer",
)


@dataclass(slots=True)
class Step:
    """One simulated step.

    `phases_s`: of the rank that is done last; they add up to `step_s`. `peak_bytes`: by rank, stage
    by stage. `backward`: how many layers keep what they received. `bubble_share`: idle time of the
    pipeline over its work, all stages (`PipelineClocks`); None: stages attend together, and idle
    ones serve.
    """

    step_s: float
    num_tokens: int
    phases_s: dict[str, float]
    peak_bytes: Floats
    utilisation: dict[str, float]
    backward: Decision
    bubble_share: float | None = None
    layer_s: tuple[float, float] = (0.0, 0.0)
    """Of a layer: forward of the first microbatch, backward of the last."""
    change: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes of the pull and the push of its strategy, and their seconds by links alone; empty where
    weights stay."""


@dataclass(slots=True)
class _LayerSeconds:
    """One layer of one microbatch, [num_ranks] each: seconds of the modules outside attention, and
    of the layer in all.
    """

    tokens: Ints
    forward_linear_s: Floats
    backward_linear_s: Floats
    forward_s: Floats
    backward_s: Floats
    head_s: tuple[Floats, Floats]
    group: Ints
    call: BothPhases


def simulate_step(
    plans: Sequence[Microbatch], machine: Machine, setup: Setup = PLAIN, sharing: Machine | None = None
) -> Step:
    """Simulate the step whose microbatches have these plans, in order.

    `sharing`: all ranks that hold the parameters of a stage, and so sum gradients and share the
    optimizer; None: those of `machine`.

    Raises:
        ConfigError: no microbatches, or one planned for other ranks; layers or microbatches that
            the pipeline cannot be given evenly.
    """
    if not plans:
        raise ConfigError("a step needs at least one microbatch")
    return _StepRun(plans, machine, setup, Around(sharing or machine, setup)).step()


class Played(NamedTuple):
    """A pass as it went, seconds by rank: when it began, each of its layers, what that spends on
    running the forward again, and the head (0 where this chunk has none).
    """

    stage: int
    step: ChunkPass
    begin_s: Floats
    layer_s: Floats
    again_s: Floats
    head_s: Floats


class PlayedStep(NamedTuple):
    """The passes of a step, and what comes after the last of them is done, at `done_s`."""

    passes: list[Played]
    layers_per_chunk: int
    done_s: float
    sync_s: float
    optimizer_s: float


def play_step(plans: Sequence[Microbatch], machine: Machine, setup: Setup = PLAIN) -> PlayedStep:
    """The passes of `simulate_step`, one by one. Errors as there."""
    run = _StepRun(plans, machine, setup, Around(machine, setup))
    passes: list[Played] = []
    done_s = run.clocks(passes).total_s
    num_layers = run.layers_per_chunk * setup.interleave
    sync_s = run.around.sync_s(num_layers, float(run.layers[-1].backward_s.max()))
    return PlayedStep(passes, run.layers_per_chunk, done_s, sync_s, run.around.optimizer_s())


class _StepRun:
    def __init__(self, plans: Sequence[Microbatch], machine: Machine, setup: Setup, around: Around) -> None:
        self.plans, self.machine, self.setup, self.around = plans, machine, setup, around
        self.chunks = setup.pipeline * setup.interleave
        self.layers_per_chunk, rest = divmod(machine.model.num_layers, self.chunks)
        if rest:
            raise ConfigError(
                f"{machine.model.num_layers} layers of {machine.model.name} cannot be cut into {self.chunks} pipeline "
                "chunks"
            )
        for plan in (plan for microbatch in plans for plan in parts_of(microbatch)):
            machine.check(plan)
        self.stages = memory.predicted(plans, self.around)
        self.decision = memory.decide(self.stages, setup.policy, machine.cluster.memory_bytes)
        self.shares = _shares(self.decision)
        known: dict[tuple[str, ...], _LayerSeconds] = {}
        self.layers: list[_LayerSeconds] = []
        for microbatch in plans:
            name = tuple(plan.fingerprint() for plan in parts_of(microbatch))
            if name not in known:
                known[name] = self._ping_pong(microbatch) if isinstance(microbatch, tuple) else self._layer(microbatch)
            self.layers.append(known[name])

    def _layer(self, plan: MicrobatchPlan) -> _LayerSeconds:
        machine, setup, cost = self.machine, self.setup, self.machine.cost
        tokens, slow = linear_tokens(plan), machine.slow()
        counts, place = np.unique(tokens, return_inverse=True)
        experts = added_s(plan, self.around)

        def of_tokens(seconds: list[float]) -> Floats:
            return np.array(seconds)[place] * slow

        forward = of_tokens([cost.layer_s(n) for n in counts.tolist()]) + experts.forward_s
        backward = of_tokens([cost.layer_s(n, backward=True) for n in counts.tolist()]) + experts.backward_s
        heads = tuple(of_tokens([cost.head_s(n, backward=b) for n in counts.tolist()]) for b in (False, True))
        calls = [
            (
                mean_call(
                    [
                        (attention_call(own, on, policy, (forward, backward), setup.engine, setup.transport), share)
                        for policy, share in self.shares
                    ]
                ),
                part,
            )
            for own, on, part in by_mask(plan, machine)
        ]
        call, group = mean_call(calls), coupled(plan)
        forward_s, backward_s = _layers_s(calls, group)
        if setup.recompute == "full":
            backward_s = backward_s + forward_s
        return _LayerSeconds(tokens, forward, backward, forward_s, backward_s, (heads[0], heads[1]), group, call)

    def _ping_pong(self, plans: Sequence[MicrobatchPlan]) -> _LayerSeconds:
        """The mean layer of a pipeline chunk of a microbatch in nano-batches, filling and draining
        included.
        """
        machine, setup, num_layers = self.machine, self.setup, self.layers_per_chunk
        experts = [added_s(plan, self.around) for plan in plans]
        mode = ping_pong.PingPongMode("keep", setup.interleaved, engine=setup.engine, transport=setup.transport)
        calls = [
            (
                mean_call(
                    [
                        (
                            BothPhases(*ping_pong.layers(own, on, num_layers, replace(mode, policy=policy), experts)),
                            share,
                        )
                        for policy, share in self.shares
                    ]
                ),
                part,
            )
            for own, on, part in _nano_batches_by_mask(plans, machine)
        ]
        passes = mean_call(calls)
        linear = np.sum([ping_pong.linear_s(plan, machine) for plan in plans], axis=0) + np.sum(experts, axis=0)
        tokens = np.sum([linear_tokens(plan) for plan in plans], axis=0)
        heads = tuple(
            np.array([machine.cost.head_s(n, backward=b) for n in tokens.tolist()]) * machine.slow()
            for b in (False, True)
        )
        groups = np.array([coupled(plan) for plan in plans])
        group = np.zeros_like(groups[0]) if (groups != groups[0]).any() else groups[0]
        forward_s, backward_s = (seconds / num_layers for seconds in _layers_s(calls, group))
        if setup.recompute == "full":
            backward_s = backward_s + forward_s
        attention = (
            Outcome(outcome.end_s, outcome.compute_s / num_layers - linear[b], outcome.bytes_moved / num_layers)
            for b, outcome in enumerate(passes)
        )
        return _LayerSeconds(
            tokens, linear[0], linear[1], forward_s, backward_s, (heads[0], heads[1]), group, BothPhases(*attention)
        )

    def step(self) -> Step:
        clocks = self.clocks()
        stages = clocks.done_s
        last = max(range(len(stages)), key=lambda stage: float(stages[stage].max()))
        rank = int(stages[last].argmax())
        phases = self._phases(last, rank)
        phases["waiting"] = max(0.0, float(stages[last][rank]) - sum(phases.values()))
        num_layers = self.layers_per_chunk * self.setup.interleave
        phases["gradient_sync"] = self.around.sync_s(num_layers, float(self.layers[-1].backward_s.max()))
        phases["optimizer"] = self.around.optimizer_s()
        step_s = sum(phases.values())
        return Step(
            step_s,
            sum(plan.num_tokens for each in self.plans for plan in parts_of(each)),
            phases,
            memory.peaks(self.stages, self.decision.keeping),
            self._utilisation(step_s),
            self.decision,
            clocks.bubble_share,
            (float(self.layers[0].forward_s.max()), float(self.layers[-1].backward_s.max())),
        )

    def clocks(self, passes: list[Played] | None = None) -> PipelineClocks:
        """Run the pipeline; note every pass in `passes`, if it is given."""
        setup, model = self.setup, self.machine.model
        last_stage, last_chunk = setup.pipeline - 1, setup.interleave - 1

        def each(stage: int, step: ChunkPass, ready: Floats) -> Floats:
            layer = self.layers[step.microbatch]
            layer_s = layer.backward_s if step.backward else layer.forward_s
            has_head = (stage, step.chunk) == (last_stage, last_chunk)
            head_s = layer.head_s[step.backward] * has_head
            begin_s = _together(ready, layer.group)
            if passes is not None:
                again_s = layer.forward_s * (step.backward and setup.recompute == "full")
                passes.append(Played(stage, step, begin_s, layer_s, again_s, head_s))
            return begin_s + self.layers_per_chunk * layer_s + head_s

        def transfer(microbatch: int) -> Floats:
            link = (
                self.machine.inter if self.machine.cluster.num_nodes > 1 or setup.pipeline > 1 else self.machine.intra
            )
            return np.array(
                [parallel.stage_transfer_s(model, n, link) for n in self.layers[microbatch].tokens.tolist()]
            )

        return pipeline.run(setup.pipeline, len(self.plans), setup.interleave, self.machine.num_ranks, each, transfer)

    def _phases(self, stage: int, rank: int) -> dict[str, float]:
        """Seconds of one rank's step by phase, without waiting."""
        times, again = self.layers_per_chunk * self.setup.interleave, self.setup.recompute == "full"
        phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for layer in self.layers:
            linear, backward_linear = float(layer.forward_linear_s[rank]), float(layer.backward_linear_s[rank])
            phases["forward_linear"] += times * linear
            phases["forward_attention"] += times * (float(layer.forward_s[rank]) - linear)
            phases["backward_linear"] += times * (backward_linear + again * linear)
            phases["backward_attention"] += times * (float(layer.backward_s[rank]) - backward_linear - again * linear)
            if stage == self.setup.pipeline - 1:
                phases["head"] += float(layer.head_s[0][rank] + layer.head_s[1][rank])
        return phases

    def _utilisation(self, step_s: float) -> dict[str, float]:
        """Share of the step that ranks compute, and that links and NICs are full, on average;
        synchronisation left out.
        """
        machine = self.machine
        ranks, times = machine.num_ranks, self.machine.model.num_layers / self.setup.pipeline
        busy, full = np.zeros(ranks), np.zeros(len(machine.capacity()))
        for layer in self.layers:
            again = 2 if self.setup.recompute == "full" else 1
            parts: list[tuple[Outcome, Floats, int]] = [
                (layer.call.forward, layer.forward_linear_s, again),
                (layer.call.backward, layer.backward_linear_s, 1),
            ]
            for outcome, linear, repeats in parts:
                busy += repeats * times * (outcome.compute_s + linear)
                full += repeats * times * outcome.bytes_moved / machine.capacity()
            busy += (layer.head_s[0] + layer.head_s[1]) / self.setup.pipeline
        return {
            "compute": float(busy.mean() / step_s),
            "link": float(full[: 2 * ranks].mean() / step_s),
            "nic": float(full[2 * ranks :].mean() / step_s),
        }


def _layers_s(calls: Sequence[tuple[BothPhases, float]], group: Ints) -> tuple[Floats, Floats]:
    """Seconds of the mean layer, forward and backward, where the ranks of a group go through layers of
    each mask in step; each call with its share of the layers.
    """

    def seconds(backward: bool) -> Floats:
        return np.sum([part * _together(call[backward].end_s, group) for call, part in calls], axis=0)

    return seconds(False), seconds(True)


def _nano_batches_by_mask(
    plans: Sequence[MicrobatchPlan], machine: Machine
) -> list[tuple[list[MicrobatchPlan], Machine, float]]:
    """The nano-batches under each mask of the model's layers, as if layers of one mask followed one
    another.
    """
    found = [by_mask(plan, machine) for plan in plans]
    return [([each.plan for each in alike], alike[0].machine, alike[0].share) for alike in zip(*found, strict=True)]


def _shares(decision: Decision) -> list[tuple[Policy, float]]:
    """The policies, each with the share of layers that it has."""
    keeping = decision.keeping / max(1, decision.layers)
    shares: list[tuple[Policy, float]] = [("keep", keeping), ("replay", 1 - keeping)]
    return [(policy, share) for policy, share in shares if share]


def _together(seconds: Floats, group: Ints) -> Floats:
    """The largest of each group's seconds, on all its ranks."""
    most = np.zeros(len(seconds))
    np.maximum.at(most, group, seconds)
    return most[group]

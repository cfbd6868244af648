"""A whole training step: layers around attention calls, the pipeline, gradient synchronisation and
the optimizer.

All layers are alike, so one is simulated and counted as often as there are; so are microbatches
with the same plan. Ranks that exchange anything in a layer go through the layers in step: their
clock is that of the slowest. Ranks that do not, drift apart until the gradients are synchronised. A
microbatch given as two plans runs as two nano-batches interleaved (`simulator.ping_pong`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis import memory
from megatron_balance.analysis.memory import Holding
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost import parallel
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.errors import ConfigError
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator import ping_pong, pipeline
from megatron_balance.simulator.around import Around
from megatron_balance.simulator.attention import Call, attention_call, coupled, linear_tokens
from megatron_balance.simulator.events import Outcome
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.pipeline import Clocks, Pass
from megatron_balance.simulator.received import most_in_a_round
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
    by stage. `bubble_share`: idle time of the pipeline over its work, all stages (`pipeline.Clocks`);
    None: stages attend together, and idle ones serve.
    """

    step_s: float
    num_tokens: int
    phases_s: dict[str, float]
    peak_bytes: Floats
    utilisation: dict[str, float]
    bubble_share: float | None = None


@dataclass(slots=True)
class _Layer:
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
    call: Call


def simulate_step(plans: Sequence[Microbatch], machine: Machine, setup: Setup = PLAIN) -> Step:
    """Simulate the step whose microbatches have these plans, in order.

    Raises:
        ConfigError: no microbatches, or one planned for other ranks; layers or microbatches that
            the pipeline cannot be given evenly.
    """
    if not plans:
        raise ConfigError("a step needs at least one microbatch")
    return _Run(plans, machine, setup).step()


class _Run:
    def __init__(self, plans: Sequence[Microbatch], machine: Machine, setup: Setup) -> None:
        self.plans, self.machine, self.setup, self.around = plans, machine, setup, Around(machine, setup)
        self.chunks = setup.pipeline * setup.interleave
        self.layers_per_chunk, rest = divmod(machine.model.num_layers, self.chunks)
        if rest:
            raise ConfigError(
                f"{machine.model.num_layers} layers of {machine.model.name} cannot be cut into {self.chunks} pipeline "
                "chunks"
            )
        known: dict[tuple[str, ...], _Layer] = {}
        self.layers: list[_Layer] = []
        for microbatch in plans:
            for plan in parts_of(microbatch):
                machine.check(plan)
            name = tuple(plan.fingerprint() for plan in parts_of(microbatch))
            if name not in known:
                known[name] = self._ping_pong(microbatch) if isinstance(microbatch, tuple) else self._layer(microbatch)
            self.layers.append(known[name])

    def _layer(self, plan: MicrobatchPlan) -> _Layer:
        machine, setup, cost = self.machine, self.setup, self.machine.cost
        tokens, slow = linear_tokens(plan), machine.slow()
        counts, place = np.unique(tokens, return_inverse=True)
        experts_s = self.around.experts_s(float(tokens.max()))

        def of_tokens(seconds: list[float]) -> Floats:
            return np.array(seconds)[place] * slow

        forward = of_tokens([cost.layer_s(n) for n in counts.tolist()]) + experts_s
        backward = of_tokens([cost.layer_s(n, backward=True) for n in counts.tolist()]) + experts_s
        heads = tuple(of_tokens([cost.head_s(n, backward=b) for n in counts.tolist()]) for b in (False, True))
        call = attention_call(plan, machine, setup.policy, (forward, backward), setup.engine, setup.transport)
        group = coupled(plan)
        forward_s, backward_s = (_together(outcome.end_s, group) for outcome in call)
        if setup.recompute == "full":
            backward_s = backward_s + forward_s
        return _Layer(tokens, forward, backward, forward_s, backward_s, (heads[0], heads[1]), group, call)

    def _ping_pong(self, plans: Sequence[MicrobatchPlan]) -> _Layer:
        """The mean layer of a pipeline chunk of a microbatch in nano-batches, filling and draining
        included.
        """
        machine, setup, num_layers = self.machine, self.setup, self.layers_per_chunk
        experts_s = [self.around.experts_s(float(linear_tokens(plan).max())) for plan in plans]
        mode = ping_pong.PingPongMode(setup.policy, setup.interleaved, engine=setup.engine, transport=setup.transport)
        passes = ping_pong.layers(plans, machine, num_layers, mode, experts_s)
        linear = np.sum([ping_pong.linear_s(plan, machine) for plan in plans], axis=0) + sum(experts_s)
        tokens = np.sum([linear_tokens(plan) for plan in plans], axis=0)
        heads = tuple(
            np.array([machine.cost.head_s(n, backward=b) for n in tokens.tolist()]) * machine.slow()
            for b in (False, True)
        )
        groups = np.array([coupled(plan) for plan in plans])
        group = np.zeros_like(groups[0]) if (groups != groups[0]).any() else groups[0]
        forward_s, backward_s = (_together(outcome.end_s, group) / num_layers for outcome in passes)
        if setup.recompute == "full":
            backward_s = backward_s + forward_s
        attention = (
            Outcome(outcome.end_s, outcome.compute_s / num_layers - linear[b], outcome.bytes_moved / num_layers)
            for b, outcome in enumerate(passes)
        )
        return _Layer(
            tokens, linear[0], linear[1], forward_s, backward_s, (heads[0], heads[1]), group, Call(*attention)
        )

    def step(self) -> Step:
        clocks = self._clocks()
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
            self._peak_bytes(),
            self._utilisation(step_s),
            clocks.bubble_share,
        )

    def _clocks(self) -> Clocks:
        setup, model = self.setup, self.machine.model
        last_stage, last_chunk = setup.pipeline - 1, setup.interleave - 1

        def each(stage: int, step: Pass, ready: Floats) -> Floats:
            layer = self.layers[step.microbatch]
            seconds = self.layers_per_chunk * (layer.backward_s if step.backward else layer.forward_s)
            if (stage, step.chunk) == (last_stage, last_chunk):
                seconds = seconds + layer.head_s[step.backward]
            return _together(ready, layer.group) + seconds

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

    def _peak_bytes(self) -> Floats:
        """By rank, the largest over microbatches; stage by stage."""
        model, setup = self.machine.model, self.setup
        holding = Holding(setup.policy, setup.recompute, len(self.plans))
        peak: list[Floats] = []
        for stage in range(setup.pipeline):
            most = np.zeros(self.machine.num_ranks)
            for each, layer in {
                id(layer): (each, layer) for each, layer in zip(self.plans, self.layers, strict=True)
            }.values():
                # of both nano-batches at once, also where they are replayed
                received = [self._received(plan) for plan in parts_of(each)]
                pairs = np.stack([layer.tokens, np.sum(received, axis=0)], 1)
                kinds, place = np.unique(pairs, axis=0, return_inverse=True)
                sizes = [
                    memory.rank_memory(model, held, got, self.around.sharding(stage), holding).total
                    for held, got in kinds.tolist()
                ]
                most = np.maximum(most, np.array(sizes)[place.reshape(-1)])
            peak.append(most)
        return np.concatenate(peak)

    def _received(self, plan: MicrobatchPlan) -> Ints:
        if self.setup.policy == "replay":
            return most_in_a_round(plan)
        counted = plan_statistics(plan, self.machine.model, self.machine.cluster.ranks_per_nic)
        return np.array(counted["kv_tokens_received_per_rank"]) + np.array(counted["remap_tokens_received_per_rank"])

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


def _together(seconds: Floats, group: Ints) -> Floats:
    """The largest of each group's seconds, on all its ranks."""
    most = np.zeros(len(seconds))
    np.maximum.at(most, group, seconds)
    return most[group]

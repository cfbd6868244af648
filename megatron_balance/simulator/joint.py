"""A step whose pipeline stages attend together, with what is around its ticks: its time, phases,
memory and utilisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_balance.analysis.backward import MicrobatchBytes, StepBytes, decide, microbatch_bytes, step_bytes
from megatron_balance.analysis.received import ReceivedBytes
from megatron_balance.ir.step import TickPlan
from megatron_balance.simulator.around import Around
from megatron_balance.simulator.attention import linear_tokens
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.memory import peaks, stages_of
from megatron_balance.simulator.setup import Microbatch, Setup, parts_of
from megatron_balance.simulator.step import PHASES, Step
from megatron_balance.simulator.ticks import TickTimes, simulate_ticks


def simulate_joint(
    ticks: Sequence[Sequence[TickPlan]],
    microbatches: Sequence[Microbatch],
    stage: Machine,
    machine: Machine,
    setup: Setup,
) -> Step:
    """Simulate the step of these ticks.

    Args:
        ticks: of the step; of each nano-batch, if microbatches run as two.
        microbatches: where their tokens are owned, over the ranks of a stage.
        stage: the machine of one stage's ranks.
        machine: that of all stages' ranks.
        setup: as for `simulate_ticks`; the policy is `replay`.

    Raises:
        ConfigError: what `simulate_ticks` refuses.
    """
    first, *second = ticks
    times = simulate_ticks(first, machine, setup, *second)
    rank = int(times.done_s.argmax())
    phases = dict.fromkeys(PHASES, 0.0) | {name: float(seconds[rank]) for name, seconds in times.phases_s.items()}
    phases["waiting"] = max(0.0, times.step_s - sum(phases.values()))
    around, chunk = Around(stage, setup), machine.model.num_layers // (setup.pipeline * setup.interleave)
    last_s = float(np.diff(times.end_s, prepend=0.0)[-1]) / chunk
    phases["gradient_sync"], phases["optimizer"] = around.sync_s(chunk * setup.interleave, last_s), around.optimizer_s()
    step_s = sum(phases.values())
    predicted = _predicted(ticks, microbatches, around)
    return Step(
        step_s,
        sum(plan.num_tokens for each in microbatches for plan in parts_of(each)),
        phases,
        peaks(predicted, 0),
        _utilisation(times, machine, step_s),
        decide(predicted, "replay", machine.cluster.memory_bytes),
    )


def most_held(ticks: Sequence[TickPlan], stage: int) -> int:
    """The largest number of passes through model chunks whose activations a stage holds at once."""
    held = most = 0
    for each in ticks:
        if each.tick.cells[stage] is not None:
            held += -1 if each.tick.backward else 1
            most = max(most, held)
    return most


def _predicted(
    ticks: Sequence[Sequence[TickPlan]], microbatches: Sequence[Microbatch], around: Around
) -> list[StepBytes]:
    """Predicted bytes of each stage's ranks: the largest microbatch, what ticks bring, and what is
    in flight.
    """
    setup, model = around.setup, around.machine.model
    tokens = np.max([np.sum([linear_tokens(plan) for plan in parts_of(each)], axis=0) for each in microbatches], axis=0)
    brought = {
        each[0].tick.microbatches: microbatch_bytes([part.plan for part in each], model).received
        for each in zip(*ticks, strict=True)
    }
    replayed, working = (
        np.max([getattr(each, name) for each in brought.values()], axis=0).reshape(setup.pipeline, len(tokens))
        for name in ("replayed", "working")
    )
    predicted: list[StepBytes] = []
    for at, stage in enumerate(stages_of(around)):
        received = ReceivedBytes(replayed[at], replayed[at], working[at])  # a tick's plan is replayed, none kept
        held = replace(stage, in_flight=most_held(ticks[0], at))
        predicted.append(step_bytes([MicrobatchBytes(tokens, received)], model, held))
    return predicted


def _utilisation(times: TickTimes, machine: Machine, step_s: float) -> dict[str, float]:
    full = times.bytes_moved / machine.capacity()
    links = 2 * machine.num_ranks
    return {
        "compute": float(times.compute_s.mean() / step_s),
        "link": float(full[:links].mean() / step_s),
        "nic": float(full[links:].mean() / step_s),
    }

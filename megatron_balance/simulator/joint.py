"""A step whose pipeline stages attend together, with what is around its ticks: its time, phases,
memory and utilisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.analysis import memory
from megatron_balance.analysis.memory import Holding
from megatron_balance.cost.base import Floats
from megatron_balance.ir.tick import TickPlan
from megatron_balance.simulator.around import Around
from megatron_balance.simulator.attention import linear_tokens
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.received import most_in_a_round
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
    return Step(
        step_s,
        sum(plan.num_tokens for each in microbatches for plan in parts_of(each)),
        phases,
        _peak_bytes(ticks, microbatches, around),
        _utilisation(times, machine, step_s),
    )


def most_held(ticks: Sequence[TickPlan], stage: int) -> int:
    """The largest number of passes through model chunks whose activations a stage holds at once."""
    held = most = 0
    for each in ticks:
        if each.tick.cells[stage] is not None:
            held += -1 if each.tick.backward else 1
            most = max(most, held)
    return most


def _peak_bytes(ticks: Sequence[Sequence[TickPlan]], microbatches: Sequence[Microbatch], around: Around) -> Floats:
    """Peak bytes of each rank, stage by stage: the largest microbatch, what ticks bring, and what
    is in flight.
    """
    setup, model = around.setup, around.machine.model
    tokens = np.max([np.sum([linear_tokens(plan) for plan in parts_of(each)], axis=0) for each in microbatches], axis=0)
    brought = {
        each[0].tick.microbatches: np.sum([most_in_a_round(part.plan) for part in each], axis=0)
        for each in zip(*ticks, strict=True)
    }
    received = np.max(list(brought.values()), axis=0).reshape(setup.pipeline, len(tokens))
    peak: list[float] = []
    for stage in range(setup.pipeline):
        holding = Holding("replay", setup.recompute, len(microbatches), most_held(ticks[0], stage) / setup.interleave)
        sharding = around.sharding(stage)
        peak += [
            memory.rank_memory(model, held, got, sharding, holding).total
            for held, got in zip(tokens.tolist(), received[stage].tolist(), strict=True)
        ]
    return np.array(peak)


def _utilisation(times: TickTimes, machine: Machine, step_s: float) -> dict[str, float]:
    full = times.bytes_moved / machine.capacity()
    links = 2 * machine.num_ranks
    return {
        "compute": float(times.compute_s.mean() / step_s),
        "link": float(full[:links].mean() / step_s),
        "nic": float(full[links:].mean() / step_s),
    }

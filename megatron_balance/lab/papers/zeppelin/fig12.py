"""Figure 12 and section 5.4.1: one attention call of the 3B model on 16 GPUs of cluster A, 64k
tokens, as traced by its authors.

The lengths of "multiple small sequences" are not printed. Assumed: one that fills a node, since a
ring of eight rounds is traced on rank 0, and four on the other node.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from megatron_balance.compile.order import LEGS
from megatron_balance.cost import kernel
from megatron_balance.cost.kernel import BLOCK_TILES, TILE_TOKENS
from megatron_balance.lab.papers.base import Effort, Ours, number, table
from megatron_balance.lab.papers.zeppelin.systems import TE, TE_ROUTED, ZEPPELIN, ZeppelinCase, ZeppelinSystem
from megatron_balance.simulator.attention import BothPhases, Outcome, attention_call, events
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.distributions import K

SINGLE = (64 * K,)
SEVERAL = (32 * K, 16 * K, 8 * K, 4 * K, 4 * K)
SEVERAL_ROUNDS = 8
ACROSS = 8
"""The rank that receives from the other node."""


def call_of(case: ZeppelinCase, system: ZeppelinSystem, lengths: Sequence[int]) -> BothPhases:
    """One attention call on the event engine, traced."""
    plan, enter = system.plans(case, lengths)[0], np.zeros(case.cluster.num_ranks)
    return events(plan, case.machine, "keep", (enter, enter), trace=True)


def leg_ms(outcome: Outcome, rank: int, leg: str, stream: str) -> float:
    """The usual time of a leg of the exchanges on a rank's stream."""
    took = [
        each.stop_s - each.start_s
        for each in outcome.occupied
        if (each.rank, each.name) == (rank, leg) and each.stream.startswith(stream)
    ]
    return 1e3 * median(took)


def serial_round_s(case: ZeppelinCase, num_tokens: float, longest: float, *, backward: bool = False) -> float:
    """Seconds of a routed round whose legs follow one another (Eq. 1), each after a thread block of
    attention.

    `num_tokens`: whose keys and values go round; `longest`: keys that a thread block goes through
    at most.
    """
    cluster, cost = case.cluster, case.cost
    nics = -(-cluster.node_size // cluster.ranks_per_nic)
    num_bytes = cost.kv_bytes(num_tokens) * (2 if backward else 1)  # gradients travel in fp32
    inside = cost.link(inter_node=False).time_s(num_bytes * (nics - 1) / nics)
    across = cost.link(inter_node=True).time_s(num_bytes / nics)
    block_s = cost.block_s(longest / TILE_TOKENS + BLOCK_TILES) * (kernel.backward_factor() if backward else 1.0)
    return 2 * inside + across + len(LEGS) * (cost.call_s + block_s)


def serial_routing_s(case: ZeppelinCase, lengths: Sequence[int]) -> float:
    """The step of TE's ring, routed, if a round's legs followed one another and the next round
    waited for them; in closed form.
    """
    plan, size = TE.plans(case, lengths)[0], case.cluster.num_ranks
    step = simulate_step((plan,), case.machine, case.setup)
    attention_s = 0.0
    for outcome, backward in zip(attention_call(plan, case.machine), (False, True), strict=True):
        computes = float(outcome.compute_s.max()) / size
        moves = serial_round_s(case, sum(lengths) / size, max(lengths) / size, backward=backward)
        attention_s += (size - 1) * max(computes, moves) + computes
    own_s = step.phases_s["forward_attention"] + step.phases_s["backward_attention"]
    return step.step_s - own_s + case.model.num_layers * attention_s


def ours(_: Effort) -> Ours:
    """The rounds of the three traces, and their sums."""
    case = ZeppelinCase("llama-3b", "a800", 16)
    ring, routed = call_of(case, TE, SINGLE), call_of(case, TE_ROUTED, SINGLE)
    several = call_of(case, ZEPPELIN, SEVERAL)
    size, tokens = case.cluster.num_ranks, SINGLE[0] / case.cluster.num_ranks
    a, b = "a) TE CP: inter-node transfer of a round", "b) routed: "
    yield f"{a}, forward", leg_ms(ring.forward, ACROSS, "direct", "inter_node")
    yield f"{a}, backward", leg_ms(ring.backward, ACROSS - 1, "direct", "inter_node")
    yield f"{b}inter-node leg of a round, forward", leg_ms(routed.forward, ACROSS, "across", "inter_node")
    nics = case.cluster.node_size // case.cluster.ranks_per_nic
    yield "b) the same, at least, by Eq. 1 from 2.18 ms", number("zeppelin", "fig12", "round_ms") / nics
    yield f"{b}a round, forward", 1e3 * float(routed.forward.end_s.max()) / size
    yield f"{b}a round whose legs follow one another", 1e3 * serial_round_s(case, tokens, tokens)
    for phase, outcome in zip(("forward", "backward"), several, strict=True):
        yield f"c) several sequences: a round on rank 0, {phase}", 1e3 * float(outcome.end_s[0]) / SEVERAL_ROUNDS
    # both phases, on rank 0
    total, zeppelin = (1e3 * float(call.forward.end_s[0] + call.backward.end_s[0]) for call in (ring, several))
    yield "a) TE CP: attention, forward and backward", total
    yield "c) several sequences: the same", zeppelin
    yield "a) over c)", total / zeppelin


TABLE = table("zeppelin", "fig12", ours)

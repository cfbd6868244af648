"""The bound: the seconds below which no plan can bring a step on a machine, and what a plan is
judged by.

All attention and all tokens are spread over the ranks to the last pair, nothing moves, nothing is
padded and nothing waits: every document is attended whole, by a kernel as wide as the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.ir.columns import Pair
from megatron_balance.ir.step import Lengths
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.masks import under_mask
from megatron_balance.simulator.setup import PLAIN, Setup


def bound_s(lengths: Lengths, machine: Machine, setup: Setup = PLAIN) -> float:
    """Seconds of a step's forward and backward: even computation over all ranks and pipeline stages.

    Args:
        lengths: of the step's documents in tokens, microbatch by microbatch.
        machine: of one pipeline stage's ranks.
        setup: `pipeline` and `recompute` count; what surrounds layers and head (optimizer,
            synchronisation, experts' exchange, bubbles) does not.
    """
    return sum(_microbatch_s(each, machine, setup) for each in lengths) / setup.pipeline


def _microbatch_s(lengths: Sequence[int], machine: Machine, setup: Setup) -> float:
    cost, model, ranks = machine.cost, machine.model, machine.num_ranks
    costs = [(under_mask(machine, mask).cost, share) for mask, share in model.mask_shares]
    pairs = np.zeros((len(lengths), Pair.WIDTH), dtype=np.int64)
    pairs[:, Pair.Q_STOP] = pairs[:, Pair.K_STOP] = lengths
    pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = model.num_heads, model.num_kv_heads
    tokens, launch = sum(lengths) / ranks, np.zeros(len(lengths), dtype=np.int64)
    forward, backward = (
        sum(share * float(each.attend_s(pairs, launch, 1, backward=b)[0]) for each, share in costs) / ranks
        + cost.layer_s(tokens, backward=b)
        for b in (False, True)
    )
    again = forward if setup.recompute == "full" else 0.0
    return model.num_layers * (forward + backward + again) + cost.head_s(tokens) + cost.head_s(tokens, backward=True)

"""Keys and values of others that a rank holds at once when a backward brings them again (policy
`replay`).
"""

from __future__ import annotations

import numpy as np

from megatron_balance.cost.base import Ints
from megatron_balance.ir.arrays import as_array, sums
from megatron_balance.ir.columns import Move
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context


def most_in_a_round(plan: MicrobatchPlan) -> Ints:
    """For each rank the most key-value tokens that one exchange of attention brings it; a ring's
    largest block [num_ranks].
    """
    context = Context.of(plan)
    most = np.zeros(plan.num_ranks, dtype=np.int64)
    for zone in plan.zones:
        pattern = pattern_of(zone)
        ranks = np.array(pattern.ranks(zone, plan.num_ranks))
        if len(ranks) > 1:
            most[ranks] = np.maximum(most[ranks], pattern.largest_exchange(zone, context))
    moves = as_array(plan.moves)
    return most + sums(moves[:, Move.SRC], moves[:, Move.TOKENS], plan.num_ranks)  # the remap's are held throughout

"""Bytes of received queries, keys and values that ranks hold, from the plan alone.

The runtime counts the same by its buffers (`runtime.lower.peak_bytes`); a test holds both against
one another for every planner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.statistics import received_load, tokens_per_rank
from megatron_balance.analysis.wire import Payload
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Move
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context

IN_USE_AND_ARRIVING = 2
"""Rounds whose keys and values a replayed backward holds at once."""
GRADIENT_ROUNDS, GRADIENT_COPIES = 8, 3
"""Blocks of a ring, and copies of all received keys and values, whose gradients are held at once:
accumulated, sent and arriving. Fitted to the buffers that the runtime counts."""


@dataclass(frozen=True, slots=True)
class ReceivedBytes:
    """Bytes by rank, int64 [num_ranks], of one attention call.

    `kept`: of all inputs that the forward received, with their heads: what a layer with policy keep
    holds until its backward. `replayed`: of those that a layer with policy replay holds at once in
    its backward. `working`: beside them, of the call while it runs: partial outputs, gradients and
    messages on their way.
    """

    kept: Ints
    replayed: Ints
    working: Ints

    def __add__(self, other: ReceivedBytes) -> ReceivedBytes:
        """Of two nano-batches, which are under way at once."""
        return ReceivedBytes(self.kept + other.kept, self.replayed + other.replayed, self.working + other.working)


def received_bytes(plan: MicrobatchPlan, model: Model) -> ReceivedBytes:
    """Received inputs of one layer of a microbatch.

    A remap hands queries, keys and values over before attention and they are used throughout: a
    replay holds them all, and beside them of every other exchange what is in use and what arrives.
    `kept` is exact but for the padding of messages. `working` is an estimate: gradients of owned
    rows, what goes and comes with each query that is attended elsewhere, and the gradients of keys
    and values on their way, at most `GRADIENT_ROUNDS` blocks of a ring or `GRADIENT_COPIES` of all
    that was received.
    """
    load, row_bytes = received_load(plan), Payload.of(model).whole()
    moves = as_array(plan.moves)
    given = sums(moves[:, Move.SRC], moves[:, Move.TOKENS], plan.num_ranks)
    taken = sums(moves[:, Move.DST], moves[:, Move.TOKENS], plan.num_ranks)
    handed = given * (plan.num_heads * row_bytes[Kind.Q] + plan.num_kv_heads * row_bytes[Kind.KV])
    queries, keys = (load.token_heads[kind] * row_bytes[kind] for kind in (Kind.Q, Kind.KV))
    kept, largest = queries + keys + handed, _largest_exchange(plan)
    of_rounds = IN_USE_AND_ARRIVING * largest * plan.num_kv_heads * row_bytes[Kind.KV]

    held = tokens_per_rank(plan) - given + taken
    served = load.token_heads[Kind.Q] + given * plan.num_heads
    sent = load.token_heads[Kind.OUT] + taken * plan.num_heads
    query_bytes = row_bytes[Kind.OUT_GRAD] + row_bytes[Kind.Q_GRAD]
    arriving = np.minimum(
        GRADIENT_ROUNDS * (largest + given) * plan.num_kv_heads,
        GRADIENT_COPIES * (load.token_heads[Kind.KV] + given * plan.num_kv_heads),
    )
    working = (
        held * (plan.num_heads * row_bytes[Kind.Q_GRAD] + plan.num_kv_heads * row_bytes[Kind.KV_GRAD])
        + (served + served // 2 + 2 * sent + held * plan.num_heads * (sent > 0)) * query_bytes
        + arriving * row_bytes[Kind.KV_GRAD]
    )
    return ReceivedBytes(kept, np.minimum(queries + of_rounds + handed, kept), working)


def most_in_a_round(plan: MicrobatchPlan) -> Ints:
    """For each rank the most key-value tokens that one exchange of attention brings it; a ring's
    largest block [num_ranks].
    """
    moves = as_array(plan.moves)
    handed = sums(moves[:, Move.SRC], moves[:, Move.TOKENS], plan.num_ranks)  # the remap's are held throughout
    return _largest_exchange(plan) + handed


def _largest_exchange(plan: MicrobatchPlan) -> Ints:
    context = Context.of(plan)
    most = np.zeros(plan.num_ranks, dtype=np.int64)
    for zone in plan.zones:
        pattern = pattern_of(zone)
        ranks = np.array(pattern.ranks(zone, plan.num_ranks))
        if len(ranks) > 1:
            most[ranks] = np.maximum(most[ranks], pattern.largest_exchange(zone, context))
    return most

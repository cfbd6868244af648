"""Bytes of received queries, keys and values that ranks hold, from the plan alone.

The runtime counts the same by its buffers (`runtime.lower.peak_bytes`); a test holds both against
one another for every planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.analysis.statistics import received_load, tokens_per_rank
from megatron_balance.analysis.wire import Payload
from megatron_balance.cost.base import Floats
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Move
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context

Counts: TypeAlias = Ints | Floats

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
    load, moves = received_load(plan), as_array(plan.moves)
    given = sums(moves[:, Move.SRC], moves[:, Move.TOKENS], plan.num_ranks)
    taken = sums(moves[:, Move.DST], moves[:, Move.TOKENS], plan.num_ranks)
    queries, keys, outputs = (load.token_heads[kind] for kind in (Kind.Q, Kind.KV, Kind.OUT))
    own, largest = tokens_per_rank(plan) - given + taken, largest_exchange(plan)
    loads = Loads(own, queries, keys, outputs, largest, given, taken)
    return loads.bytes((plan.num_heads, plan.num_kv_heads), Payload.of(model).whole().tolist())


class Loads(NamedTuple):
    """Counts of one attention call, arrays [num_ranks]: tokens that each rank owns; token-heads of
    queries and of keys that it receives, and of outputs that it sends home; the most token-heads of
    keys that one exchange brings (`CommPattern.largest_exchange`); tokens that a remap has it attend
    for others (`given`), and others for it (`taken`).
    """

    own: Counts
    queries: Counts
    keys: Counts
    outputs: Counts
    largest: Counts
    given: Counts
    taken: Counts

    def bytes(self, heads: tuple[int, int], row_bytes: Sequence[int]) -> ReceivedBytes:
        """Bytes of them. `heads`: of queries, and of keys and values; `row_bytes`: of a token and head
        by kind.
        """
        own, queries, keys, outputs, largest, given, taken = self
        num_heads, num_kv = heads
        handed = given * (num_heads * row_bytes[Kind.Q] + num_kv * row_bytes[Kind.KV])
        kept = queries * row_bytes[Kind.Q] + keys * row_bytes[Kind.KV] + handed
        of_rounds = IN_USE_AND_ARRIVING * largest * row_bytes[Kind.KV]
        replayed = np.minimum(queries * row_bytes[Kind.Q] + of_rounds + handed, kept)
        served, sent = queries + given * num_heads, outputs + taken * num_heads
        arriving = np.minimum(GRADIENT_ROUNDS * (largest + given * num_kv), GRADIENT_COPIES * (keys + given * num_kv))
        working = (
            own * (num_heads * row_bytes[Kind.Q_GRAD] + num_kv * row_bytes[Kind.KV_GRAD])
            + (1.5 * served + 2 * sent + own * num_heads * (sent > 0))
            * (row_bytes[Kind.OUT_GRAD] + row_bytes[Kind.Q_GRAD])
            + arriving * row_bytes[Kind.KV_GRAD]
        )
        return ReceivedBytes(*(each.astype(np.int64) for each in (kept, replayed, working)))


def largest_exchange(plan: MicrobatchPlan) -> Ints:
    """For each rank the most token-heads of keys that one exchange of attention's forward brings it,
    the remap's apart (`CommPattern.largest_exchange`): int64 [num_ranks].
    """
    context = Context.of(plan)
    most = np.zeros(plan.num_ranks, dtype=np.int64)
    for zone in plan.zones:
        pattern = pattern_of(zone)
        ranks = np.array(pattern.ranks(zone, plan.num_ranks))
        if len(ranks) > 1:
            most[ranks] = np.maximum(most[ranks], pattern.largest_exchange(zone, context))
    return most

"""Seconds of a layer below which a system's plans cannot come: whether it need be asked at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.analysis.estimate.zones import ZoneTimes, exchange_heads, most_heads
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.cost.base import ADD, MachineCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import FULL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Kind

# Tokens beside whose seconds fixed costs are nothing.
_MANY = 1e12

# Beyond so many nodes no plan of whole sequences was found within 7 % of the bound where exchanges
# make that a tenth more than even computation (24 batches on 512 and 1,024 ranks: 1.074 or more).
_FEW_NODES, _FILLED, _TRADES = 32, 1.07, 1.1

# Of the bisection for a bound.
_STEPS = 12


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a batch, forward and backward together. `attention_s`: of the whole batch on one
    rank, forward and backward; `linear_s`: of a rank's even share of the tokens, both.
    """

    lengths: Sequence[int]
    machine: Machine
    attention_s: tuple[float, float]
    linear_s: float

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        cluster: Cluster,
        model: Model,
        cost: MachineCost,
        memory: StepMemory | None = None,
    ) -> Bounds:
        """The bounds of a batch of these lengths; `memory`: of its machine."""
        machine, launch = Machine(cluster, model, cost, memory=memory), np.zeros(len(lengths), dtype=np.int64)
        pairs = machine.whole(np.array(lengths, dtype=np.int64))
        forward, backward = (float(cost.attend_s(pairs, launch, 1, backward=b)[0]) for b in (False, True))
        tokens = sum(lengths) / cluster.num_ranks
        return cls(lengths, machine, (forward, backward), sum(cost.layer_s(tokens, backward=b) for b in (False, True)))

    @property
    def _halos(self) -> bool:
        # Whether plans move no more than the keys in a window before a rank's tokens
        # (`compile.halo`): bounds by what a comm pattern moves, and by a rank's heads, do not hold
        # then.
        mask = self.machine.model.mask
        return isinstance(mask, SlidingWindow) and max(self.lengths, default=0) > mask.size

    def _pairs_s(self, num_pairs: float) -> tuple[float, float]:
        # Least seconds of pairs, forward and backward, in runs as long as can be.
        forward = self.machine.cost.attention_s(num_pairs)
        return forward, forward * self.attention_s[1] / max(self.attention_s[0], 1e-12)

    def even(self) -> float:
        """Of any plan: all computation even, nothing moves (as `simulator.step.bound_s`)."""
        return sum(self.attention_s) / self.machine.cluster.num_ranks + self.linear_s

    def rings(self) -> float:
        """Of plans of rings: a rank of the longest sequence's ring attends to its part of it and
        receives the keys of all the others, on however many ranks it is.
        """
        machine, longest = self.machine, max(self.lengths, default=0)
        cluster, kv_heads = machine.cluster, machine.model.num_kv_heads
        if self._halos:
            return self.even()
        parts = self._pairs_s(machine.model.mask.num_pairs(longest))
        ranks = np.arange(1, cluster.num_ranks + 1)
        crossing = max(1 / machine.intra.bytes_per_s, 1 / (machine.nics.per_node * machine.inter.bytes_per_s))
        byte_s = np.where(ranks > cluster.node_size, crossing, 1 / machine.intra.bytes_per_s)
        token_s = (ranks - 1) / ranks * longest * kv_heads * byte_s
        seconds = sum(
            np.maximum(part / ranks, token_s * machine.row_bytes[kind])
            for part, kind in zip(parts, (Kind.KV, Kind.KV_GRAD), strict=True)
        )
        return max(self.even(), float(np.min(seconds)) + self.linear_s)

    def pool_ring(self) -> float:
        """Of plans of one ring over all ranks: all keys pass all ranks, and each round launches,
        merges and adds up gradients of half the queries or more.
        """
        machine, num_ranks = self.machine, self.machine.cluster.num_ranks
        cost, rounds = machine.cost, num_ranks - 1
        shared = max(self.lengths, default=0) >= 2 * num_ranks  # shorter ones are on fewer ranks
        if self._halos:
            return self._zigzag_halos()
        if not shared or not rounds:
            return self.even()
        tokens = sum(n for n in self.lengths if n >= 2 * num_ranks) / num_ranks
        block, queries = tokens * machine.model.num_kv_heads, tokens / 2 * machine.model.num_heads
        around = cost.merge_s(tokens / 2), ADD * cost.pack_s(queries * machine.row_bytes[Kind.Q_GRAD])
        link, spread = (machine.inter, machine.nics.per_node) if machine.cluster.num_nodes > 1 else (machine.intra, 1)
        seconds = self.linear_s
        for attention_s, each_s, kind in zip(self.attention_s, around, (Kind.KV, Kind.KV_GRAD), strict=True):
            moved_s = rounds * (link.alpha_s + block * machine.row_bytes[kind] / (spread * link.bytes_per_s))
            seconds += max(attention_s / num_ranks + cost.launch_s(rounds) + rounds * each_s, moved_s)
        return max(self.even(), seconds)

    def even_tokens(self) -> float:
        """Of ranks with even tokens in a row: the end of the longest sequence sees most keys."""
        longest, mask = max(self.lengths, default=0), self.machine.model.mask
        # At least so much of its end lies on one rank.
        last = min(longest, sum(self.lengths) // (2 * self.machine.cluster.num_ranks))
        pairs = last * longest if mask == FULL else mask.num_pairs(longest) - mask.num_pairs(longest - last)
        return max(self.even(), sum(self._pairs_s(pairs)) + self.linear_s)

    def pool_gather(self) -> float:
        """Of plans in which all ranks gather all keys and values that several ranks hold, before they
        attend. Packed to one sequence, those of documents that lie in a chunk stay where they are, and
        those in the middle two, which are one rank's.
        """
        chunk = sum(self.lengths) / (2 * self.machine.cluster.num_ranks) + 1
        return self.even() if self._halos else self._gather(sum(n for n in self.lengths if n > chunk) - 2 * chunk)

    def pool_zigzag_gather(self) -> float:
        """As `pool_gather`, of plans that cut each sequence zigzag."""
        num_ranks = self.machine.cluster.num_ranks
        cut = sum(n for n in self.lengths if n >= 2 * num_ranks)  # shorter ones are on fewer ranks
        return self._zigzag_halos() if self._halos else self._gather(cut)

    def _gather(self, tokens: float) -> float:
        machine = self.machine
        cluster, row_bytes = machine.cluster, machine.row_bytes
        rate = machine.intra.bytes_per_s
        rate = min(rate, machine.nics.per_node * machine.inter.bytes_per_s) if cluster.num_nodes > 1 else rate
        token_bytes = machine.model.num_kv_heads * (row_bytes[Kind.KV] + row_bytes[Kind.KV_GRAD])
        return self.even() + max(0.0, tokens) * (1 - 1 / cluster.num_ranks) * token_bytes / rate

    def _zigzag_halos(self) -> float:
        # Under a window, of plans that cut each sequence zigzag over all ranks: before it attends,
        # a rank in the middle of both halves receives the keys before its two chunks.
        machine, ranks = self.machine, self.machine.cluster.num_ranks
        mask, place = machine.model.mask, ranks // 2
        assert isinstance(mask, SlidingWindow)
        cut = [n for n in self.lengths if n >= 2 * ranks]
        between = 2 * (ranks - 1 - place)  # chunks from its first to its second
        keys = sum(min(mask.size - 1, n * each // (2 * ranks)) for n in cut for each in (place, between))
        row_bytes = machine.row_bytes[Kind.KV] + machine.row_bytes[Kind.KV_GRAD]
        moved = keys * machine.model.num_kv_heads * row_bytes
        rate = max(machine.intra.bytes_per_s, machine.inter.bytes_per_s)
        return max(self.even(), self.even() * sum(cut) / max(1, sum(self.lengths)) + moved / rate)

    def pool_heads(self) -> float:
        """Of heads exchanged by all: the rank with most heads attends to all sequences."""
        model, num_ranks = self.machine.model, self.machine.cluster.num_ranks
        share = 1 / num_ranks if self._halos else most_heads(model, num_ranks)[0] / model.num_heads
        return max(self.even(), share * sum(self.attention_s) + self.linear_s)

    def whole_on_groups(self) -> float:
        """Of plans that have each sequence whole on one group that exchanges heads: of a size that
        divides the heads and is part of a node or some nodes, or all ranks. The least time in which
        every sequence could be attended to alone, and all computation and exchanges were even; on
        many nodes, where groups exchange much, `_FILLED` times that, which is measured, not proved.
        """
        machine, own = self.machine, np.array(self.lengths, dtype=np.float64)
        model, cluster, cost = machine.model, machine.cluster, machine.cost
        if not len(own) or self._halos:
            return self.even()
        node, most = cluster.node_size, min(cluster.num_ranks, model.num_heads)
        fitting = [size for size in range(1, most + 1) if node % size == 0 or size % node == 0]
        sizes = [*dict.fromkeys([*(size for size in fitting if model.num_heads % size == 0), cluster.num_ranks])]
        pairs, launch = machine.whole(np.array(self.lengths, dtype=np.int64)), np.arange(len(own))
        attention = sum(cost.attend_s(pairs, launch, len(own), backward=b) for b in (False, True))
        token_s = sum(cost.layer_s(_MANY, backward=b) for b in (False, True)) / _MANY
        heads = np.array([most_heads(model, size)[0] / model.num_heads for size in sizes])[:, None]
        exchange = np.array([self._exchange_s(size) for size in sizes])[:, None]
        alone = attention * heads + own * (token_s / np.array(sizes)[:, None] + exchange)
        shared = exchange * np.array(sizes)[:, None] * own / cluster.num_ranks

        def even(limit: float) -> float:
            # Seconds of even ranks, each sequence on the cheapest group within a limit.
            return self.even() + float(np.where(alone <= limit, shared, np.inf).min(axis=0).sum())

        low = max(self.even(), float(alone.min(axis=0).max()))
        high = even(low)
        for _ in range(_STEPS if high > low else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if even(middle) <= middle else (middle, high)
        many = cluster.num_nodes > _FEW_NODES and low > _TRADES * self.even()
        return _FILLED * low if many else low

    def _exchange_s(self, size: int) -> float:
        # Seconds a token of a group of `size` ranks in its exchanges of heads, latency left out.
        if size == 1:
            return 0.0
        machine, made = self.machine, ZoneTimes(np.arange(size), 0.0, slice(0, size))
        # What ranks of a node share may cross once, where that is chosen.
        once = machine.intra.bytes_per_s * machine.cluster.ranks_per_nic > machine.inter.bytes_per_s
        exchange_heads(made, range(size), _MANY, most_heads(machine.model, size), machine, once=once)
        seconds = 0.0
        for bulk in (made.inputs, made.outputs, made.output_grads, made.input_grads):
            assert bulk is not None
            packed, placed = (machine.pack_s(float(n)) for n in (bulk.packed_bytes, bulk.placed_bytes))
            seconds += float(bulk.seconds) + packed + placed * (ADD if bulk.adds else 1.0)
        return seconds / _MANY

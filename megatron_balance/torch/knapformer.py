"""KnapFormer's interface as its paper prints it (section 3.5), for packed sequences of any tensors.

    balancer = SequenceBalancer("g1n2+g2n1+g4n1")
    balancer.plan_routing(seq_lens, d_model)
    chunk_lens, x, features = balancer.route(packed, features)
    for block in blocks:                       # inside: pre_attn, attention, post_attn
        x = block(x, chunk_lens, features, balancer)
    seq_lens, out = balancer.reverse_route(x)

The plan is that of planner `knapformer`. Whoever wants another planner, labels or a loss scale takes
`megatron_balance.torch.SequenceBalancer`.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.compile.pipeline import layout
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.fits import GAMMA_H100_FLUX
from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.arrays import Ints, ranges
from megatron_balance.ir.batch import Batch, at_least
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.head_exchange import HeadExchange
from megatron_balance.planners.knapformer import KnapFormerOptions, Topology, parse, plan
from megatron_balance.runtime.attention import differentiable_once
from megatron_balance.torch.batch import exchanged
from megatron_balance.torch.ranks import device_of, shared, shared_pool
from megatron_balance.training.pool import Membership, Pool, TensorParallel
from megatron_balance.training.tokens import Sequences, TokenExchange, share_lengths


class GroupBalancer:
    """Balances packed sequences over groups of ranks, and exchanges heads inside a group.

    Ranks in one unit of the topology share their sequences; a unit smaller than the world repeats,
    each replica for itself. `plan_routing`, `route` and `reverse_route` are collective over the
    replica, `pre_attn` and `post_attn` over the rank's group; all in the backward too.
    """

    def __init__(self, topology: str, *, gamma: float = GAMMA_H100_FLUX, ranks_per_node: int | None = None) -> None:
        """Make the process groups, or share those of an equal balancer. Collective over the world.

        Args:
            topology: groups of a unit, such as `g1n2+g2n1+g4n1`.
            gamma: correction of attention's FLOPs in the work of a sequence (Eq. 2).
            ranks_per_node: as for `training.pool.make_pool`.
        """
        self.topology = parse(str(topology))
        if not isinstance(gamma, (int, float)) or not gamma >= 0:
            raise ConfigError(f"gamma: expected a number of at least 0, got {gamma!r}")
        if ranks_per_node is not None:
            ranks_per_node = at_least(1, "ranks_per_node", ranks_per_node)
        self.gamma = gamma
        if not dist.is_initialized():
            raise ConfigError("expected torch.distributed to be set up before the balancer; call init_process_group")
        world, rank = dist.get_world_size(), dist.get_rank()
        sizes = self.topology.repeated(world)
        unit = self.topology.num_ranks
        first = rank // unit * unit
        mine = Membership(tuple(range(first, first + unit)), replica=rank - first)
        self._pool: Pool = shared_pool(mine, ranks_per_node)
        self._device = device_of(None)
        self._group = shared(sizes, lambda: _group_of(rank, sizes))
        self._exchange: TokenExchange | None = None
        self._heads: _Heads | None = None
        self._seq_lens: list[int] = []
        self._chunk_lens: list[int] = []
        self._full_lens: list[int] = []

    def plan_routing(self, seq_lens: Sequence[int], d_model: int) -> MicrobatchPlan:
        """Share lengths and plan: the plan of the replica, in its own ranks. `seq_lens`: of the
        sequences that this rank loaded, in tokens; none is fine. `d_model`: channels of a token
        outside attention. DataError: lengths that are no whole numbers of 1 or more, on every rank.
        ConfigError: a `d_model` that is none.
        """
        d_model = at_least(1, "d_model", d_model)
        lengths: list[int] = []
        failure = None
        try:
            lengths = list(Batch(tuple(seq_lens)).lengths)
        except (ConfigError, TypeError) as error:
            failure = DataError(f"expected lengths of sequences, 1 token or more each: {error}")
        # The exchange of lengths takes sequences; it does not look at their rows.
        mine = [Sequences(torch.empty(0, 1, dtype=torch.int64), tuple(lengths))]
        shared = share_lengths(mine, failure, 1, self._pool, TensorParallel(), self._device)
        pool = self._pool
        cluster = Cluster(pool.size, pool.ranks_per_node, name="job")
        model = Model(1, 1, d_model, hidden_size=d_model, ffn_size=4 * d_model, gated_ffn=False, attention="full")
        options = KnapFormerOptions(topology=str(self.topology), gamma=self.gamma, heads="uneven")
        planned = plan(Batch(shared.lengths[0]), cluster, model, AnalyticCost(cluster, model), options)
        self._exchange = TokenExchange(shared, [planned], pool)
        self._seq_lens = lengths
        own = layout(planned, pool.rank)
        self._chunk_lens = (own[:, Fragment.STOP] - own[:, Fragment.START]).tolist()
        self._full_lens, self._heads = list(self._chunk_lens), None
        zone = next((zone for zone in planned.zones if isinstance(zone, Zone) and pool.rank in zone.ranks), None)
        if zone is not None:
            all_lengths = np.array(planned.lengths, dtype=np.int64)
            self._full_lens = all_lengths[list(zone.seqs)].tolist()
            if self._group is not None:
                pattern = cast("HeadExchange", pattern_of(zone))
                runs = pattern.runs(zone, all_lengths)
                self._heads = _Heads(runs, self._full_lens, zone, pool.rank, self._group)
        return planned

    def route(self, packed: Tensor, features: Sequence[Tensor] = ()) -> tuple[list[int], Tensor, list[Tensor]]:
        """Chunks to their ranks, differentiable: lengths of this rank's chunks, their rows [l'1 +
        l'2 + ..., ...], and those of each feature. A rank of an empty group has none.

        `packed` [l1 + l2 + ... + ln, ...]: the sequences of this rank; `features`: tensors of as
        many rows. ConfigError: nothing is planned, or rows that do not fit the plan.
        """
        exchange, total = self._planned(), sum(self._seq_lens)
        if not isinstance(features, Sequence):  # a tensor is one feature, in a list
            raise ConfigError(f"features: expected a list of tensors, got {type(features).__name__}")
        for x in (packed, *features):
            _check_rows(x, total, "the lengths in plan_routing")
        rows, *others = (exchanged(x, exchange.there, exchange.back) for x in (packed, *features))
        return list(self._chunk_lens), rows, others

    def reverse_route(self, balanced: Tensor) -> tuple[list[int], Tensor]:
        """The inverse of `route`: lengths and rows of the sequences that this rank loaded; same
        errors.
        """
        exchange = self._planned()
        _check_rows(balanced, sum(self._chunk_lens), "those of route")
        return list(self._seq_lens), exchanged(balanced, exchange.back, exchange.there)

    def pre_attn(
        self, packed_q: Tensor, packed_k: Tensor, packed_v: Tensor
    ) -> tuple[list[int], Tensor, Tensor, Tensor]:
        """Chunks with all heads, rows as from `route`, to whole sequences with this rank's heads,
        differentiable: lengths of the sequences of this rank's group, and q [T, H', D], k and v [T,
        G', D] of packed_q [T', H, D], packed_k and packed_v [T', G, D].

        H' is H over the group's ranks, G' likewise. In a group of one rank all is as it was. Where
        there are no sequences, let the output be made of queries, keys or values all the same
        (`q[:0]`): parameters before them need a gradient on every rank. ConfigError: nothing is
        planned, other rows, or heads that the group's ranks do not divide.
        """
        self._planned()
        parts = (packed_q, packed_k, packed_v)
        for x in parts:
            _check_rows(x, sum(self._chunk_lens), "those of route", heads=True)
        if self._heads is None:
            return list(self._full_lens), *_AllGradients.apply(*parts)
        heads = self._heads
        for name, x in zip("qkv", parts, strict=True):
            if x.shape[1] % heads.size:
                raise ConfigError(
                    f"{name} has {x.shape[1]} heads, which a group of {heads.size} ranks cannot share equally; choose "
                    "a topology whose groups divide the heads"
                )
        by_rank = [x.unflatten(1, (heads.size, -1)) for x in parts]
        counts = [x.shape[2] for x in by_rank]
        whole = exchanged(torch.cat(by_rank, dim=2), heads.to_heads, heads.to_tokens)
        q, k, v = whole.split(counts, dim=1)
        return list(self._full_lens), q, k, v

    def post_attn(self, packed_x: Tensor) -> tuple[list[int], Tensor]:
        """The inverse of `pre_attn`: whole sequences [T, H / ranks, D] to chunks [T', H, D]; same
        errors.
        """
        self._planned()
        _check_rows(packed_x, sum(self._full_lens), "those of pre_attn", heads=True)
        if self._heads is None:
            return list(self._chunk_lens), packed_x
        chunks = exchanged(packed_x, self._heads.to_tokens, self._heads.to_heads)
        return list(self._chunk_lens), chunks.flatten(1, 2)

    def _planned(self) -> TokenExchange:
        if self._exchange is None:
            raise ConfigError("expected a plan, got none; call plan_routing(seq_lens, d_model) for every batch first")
        return self._exchange


SequenceBalancer = GroupBalancer  # by the name that the paper gives it


def _check_rows(x: Tensor, rows: int, like: str, *, heads: bool = False) -> None:
    shape = list(x.shape) if isinstance(x, Tensor) else None
    if not shape or shape[0] != rows or (heads and len(shape) != 3):
        wanted = f"[{rows}, heads, head_dim]" if heads else f"{rows} rows"
        raise ConfigError(f"expected {wanted} as {like}, got {type(x).__name__ if shape is None else shape}")


def _group_of(rank: int, topology: Topology) -> dist.ProcessGroup | None:
    """The process group of a rank's group; None: it is alone. Collective over the world."""
    mine: dist.ProcessGroup | None = None
    for ranks in topology.groups():
        made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            mine = cast("dist.ProcessGroup | None", made)
    return mine


class _Heads:
    """Rows of a group: tokens of its ranks' chunks against whole sequences.

    `tokens` [G]: of each rank; `own`: of this one; `place` [T]: of each row of the chunks, rank by
    rank, its row in the whole sequences.
    """

    def __init__(
        self, runs: Sequence[Ints], lengths: Sequence[int], zone: Zone, rank: int, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.size = len(runs)
        self.tokens = [int((rows[:, Fragment.STOP] - rows[:, Fragment.START]).sum()) for rows in runs]
        self.own = self.tokens[zone.ranks.index(rank)]
        # By sequence of the batch, where it begins among the whole sequences of the group.
        first = np.zeros(max(zone.seqs) + 1, dtype=np.int64)
        first[list(zone.seqs)] = np.cumsum(lengths) - lengths
        rows = np.concatenate(list(runs))
        at = first[rows[:, Fragment.SEQ]]
        _, place = ranges(at + rows[:, Fragment.START], at + rows[:, Fragment.STOP])
        self.place = torch.from_numpy(place)

    def to_heads(self, chunks: Tensor) -> Tensor:
        """[own tokens, G, heads, D] to [tokens of all, heads, D]."""
        sent = chunks.transpose(0, 1).reshape(-1, *chunks.shape[2:]).contiguous()
        received = sent.new_empty(sum(self.tokens), *sent.shape[1:])
        dist.all_to_all_single(received, sent, self.tokens, [self.own] * self.size, group=self.group)
        # Received rank by rank; `place` puts chunks of one sequence behind each other.
        whole = torch.empty_like(received)
        whole[self.place.to(whole.device)] = received
        return whole

    def to_tokens(self, whole: Tensor) -> Tensor:
        """The inverse of `to_heads`."""
        sent = whole[self.place.to(whole.device)].contiguous()
        received = sent.new_empty(self.size * self.own, *sent.shape[1:])
        dist.all_to_all_single(received, sent, [self.own] * self.size, self.tokens, group=self.group)
        return received.unflatten(0, (self.size, self.own)).transpose(0, 1).contiguous()


class _AllGradients(torch.autograd.Function):
    """Queries, keys and values as they are; all have a gradient if one has."""

    # Attention of no sequences may use none of the keys. FSDP and DDP reduce the gradients that
    # there are, which must be those of the same parameters on all ranks.

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return grads  # zeros for an output that was not used

"""Head exchange: trade a slice of the tokens for a slice of the heads (DeepSpeed Ulysses)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, as_rows, laid
from megatron_balance.ir.columns import Fragment, Held
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import base
from megatron_balance.patterns.sends import Blocks, Call, Send, Sends, table_of


# The tokens of the zone, one sequence after the other, are divided into G near-equal runs, one a
# rank; with `chunk_exchange` every sequence is divided into G near-equal contiguous chunks instead
# (KnapFormer, section 3.3), and tokens left over are dealt round robin over the zone. Query heads
# are divided into G near-equal spans; a rank gets the key-value heads that its span needs, so with
# fewer of those than ranks (GQA) a key-value head goes to several ranks and its gradients are
# summed at the owner. With fewer query heads than ranks some ranks attend nothing.
class HeadSlice(NamedTuple):
    """Query heads and the key-value heads that they need."""

    head_start: int
    head_stop: int
    kv_start: int
    kv_stop: int


def run_of(rows: Ints, size: int, index: int) -> Ints:
    """Run `index` of `size` near-equal runs of the tokens of `rows` (seq, start, stop), in order."""
    ends = np.cumsum(rows[:, Fragment.STOP] - rows[:, Fragment.START])
    total = int(ends[-1]) if len(ends) else 0
    first, last = total * index // size, total * (index + 1) // size
    run = rows.copy()
    # A token's number in its row, and its position in the sequence, differ by the same throughout.
    shift = rows[:, Fragment.STOP] - ends
    run[:, Fragment.START] = np.maximum(rows[:, Fragment.START], first + shift)
    run[:, Fragment.STOP] = np.minimum(rows[:, Fragment.STOP], last + shift)
    return run[run[:, Fragment.START] < run[:, Fragment.STOP]]


def runs_of(rows: Ints, size: int) -> list[Ints]:
    return [run_of(rows, size, index) for index in range(size)]


class HeadShares(NamedTuple):
    """The heads that each place in a group attends with: slices, and their hulls, int64 [size]."""

    slices: tuple[tuple[HeadSlice, ...], ...]
    query_start: Ints
    query_stop: Ints
    kv_start: Ints
    kv_stop: Ints

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, num_heads: int, num_kv_heads: int, size: int) -> "HeadShares":
        # A slice maps its query heads evenly onto its key-value heads (one of these, or whole
        # groups), as kernels need.
        ratio = num_heads // num_kv_heads
        slices: list[tuple[HeadSlice, ...]] = []
        for i in range(size):
            a, b = num_heads * i // size, num_heads * (i + 1) // size
            own: list[HeadSlice] = []
            while a < b:
                whole = b // ratio * ratio
                if a % ratio == 0 and whole > a:
                    stop = whole
                else:
                    stop = min(b, (a // ratio + 1) * ratio)
                own.append(HeadSlice(a, stop, a // ratio, -(-stop // ratio)))
                a = stop
            slices.append(tuple(own))
        bounds = [
            (own[0].head_start, own[-1].head_stop, own[0].kv_start, own[-1].kv_stop) if own else (0,) * 4
            for own in slices
        ]
        return cls(tuple(slices), *np.array(bounds, dtype=np.int64).reshape(-1, 4).T)

    @property
    def queries(self) -> Ints:
        """Number of query heads of each place."""
        return self.query_stop - self.query_start

    @property
    def keys(self) -> Ints:
        """Number of key-value heads of each place."""
        return self.kv_stop - self.kv_start

    @property
    def attends(self) -> Bools:
        """Whether a place has any heads."""
        return self.query_start < self.query_stop

    # What the all-to-alls of `Trade` come to, in closed form. Ranks, and tokens that they hold
    # (`runs`): [groups, size].

    def bring(self, load: base.Load, ranks: Ints, runs: Ints) -> None:
        """Add what reaches the ranks."""
        attends = self.attends.astype(np.int64)
        others = (runs.sum(axis=1, keepdims=True) - runs) * attends
        load.bring(Kind.Q, ranks, others, self.queries)
        load.bring(Kind.KV, ranks, others, self.keys)
        # Every rank with heads sends its partial of each token; all together are all heads.
        load.tokens[Kind.OUT, ranks] += runs * (attends.sum() - attends)
        load.token_heads[Kind.OUT, ranks] += runs * (self.queries.sum() - self.queries)

    def traffic(self, runs: Ints) -> list[base.GroupTraffic]:
        """Group by group."""
        groups: list[base.GroupTraffic] = []
        for held in runs.astype(np.float64):
            inputs: dict[Kind, base.Floats] = {
                Kind.Q: np.multiply.outer(held, self.queries),
                Kind.KV: np.multiply.outer(held, self.keys),
            }
            outputs: dict[Kind, base.Floats] = {Kind.OUT: np.multiply.outer(self.queries, held)}
            groups.append(base.GroupTraffic(inputs, outputs, gathers=False))
        return groups

    def pairs(self, of_group: Ints) -> Ints:
        """Pairs of each rank [groups, size], in units of all heads; a group attends `of_group`."""
        # Cumulative rounding keeps the sum of the ranks' shares exact.
        stops = np.cumsum(self.queries)
        return np.diff(of_group[:, None] * stops // stops[-1], prepend=0)


@dataclass(frozen=True, slots=True)
class Trade:
    """All-to-alls inside groups: tokens for heads, and back.

    `ranks` [groups, size]: a rank's place is its column; `heads`: of each place. `place`: (group,
    place) of the rank that is asked for; None: all. `among`: whether transfers between two ranks are
    wanted.
    """

    ranks: Ints
    heads: HeadShares
    place: tuple[int, int] | None = None
    among: Callable[[Ints, Ints], Bools] | None = None

    def inputs(self, first: int, block: int) -> Ints:
        # `Send` rows of queries, keys and values to the ranks that attend; exchanges from `first`
        # on, a group each. Blocks are what each rank holds, rank by rank, from `block` on. A row of
        # every (group, src, dst): the block of src, the heads of dst.
        group, src, dst = self._ends(attends_at="dst")
        ends, of_run = (self.ranks[group, src], self.ranks[group, dst]), block + group * self.ranks.shape[1] + src
        kinds = (
            (Kind.Q, self.heads.query_start, self.heads.query_stop),
            (Kind.KV, self.heads.kv_start, self.heads.kv_stop),
        )
        both = [table_of(first + group, *ends, kind, start[dst], stop[dst], of_run, 0) for kind, start, stop in kinds]
        return np.stack(both, axis=1).reshape(-1, Send.WIDTH)

    def outputs(self, first: int, block: int) -> Ints:
        # Outputs back to the ranks that hold the tokens; as `inputs`.
        group, src, dst = self._ends(attends_at="src")
        ends, of_run = (self.ranks[group, src], self.ranks[group, dst]), block + group * self.ranks.shape[1] + dst
        heads = self.heads.query_start[src], self.heads.query_stop[src]
        return table_of(first + group, *ends, Kind.OUT, *heads, of_run, 0)

    def calls(self, first: int, tokens: Ints, *, moves: bool = False) -> dict[int, Call]:
        # Those of the groups in which anything moves; `tokens` [groups, size]: that are held.
        holds, attends = tokens > 0, self.heads.attends
        # Every holder sends to every rank with heads, but none to itself.
        num_pairs = holds.sum(axis=1) * attends.sum() - (holds & attends).sum(axis=1)
        wanted = np.flatnonzero(num_pairs).tolist()
        groups = wanted if self.place is None else [at for at in wanted if at == self.place[0]]
        return {first + at: Call("all_to_all", tuple(self.ranks[at].tolist()), moves) for at in groups}

    def _ends(self, *, attends_at: str) -> tuple[Ints, Ints, Ints]:
        # Three columns [transfers]: group, place that sends, place that receives; of all places of a
        # group with those that have heads (`attends_at`: on which side these are), or of one place.
        num_groups, size = self.ranks.shape
        attends = np.flatnonzero(self.heads.attends)
        if self.place is None:
            group, other, own = (each.ravel() for each in np.indices((num_groups, size, len(attends))))
            own = attends[own]
            src, dst = (own, other) if attends_at == "src" else (other, own)
            keep = src != dst
        else:  # to each other rank, and from it
            others: Ints = np.array([other for other in range(size) if other != self.place[1]], dtype=np.int64)
            mine = np.full_like(others, self.place[1])
            src, dst = np.stack([mine, others], axis=1).ravel(), np.stack([others, mine], axis=1).ravel()
            group, keep = np.full_like(src, self.place[0]), self.heads.attends[src if attends_at == "src" else dst]
        if self.among is not None:
            keep &= self.among(self.ranks[group, src], self.ranks[group, dst])
        return group[keep], src[keep], dst[keep]


class HeadExchange(base.CommPattern[Zone]):
    """Two all-to-alls around one launch: tokens become heads, then heads become tokens."""

    routing = "never"
    merges_remap = False
    traffic = base.GroupTraffic

    def ranks(self, zone: Zone, num_ranks: int) -> Sequence[int]:
        del num_ranks
        return zone.ranks

    def num_exchanges(self, zone: Zone) -> int:
        # There and back, where there are other ranks.
        return 2 if len(zone.ranks) > 1 else 0

    def place(self, zone: Zone, lengths: Ints, rank: int) -> Ints:
        return self.runs(zone, lengths)[zone.ranks.index(rank)]

    def runs(self, zone: Zone, lengths: Ints) -> list[Ints]:
        """Rows (seq, start, stop) of each rank."""
        place, rows = self.placed(zone, lengths)
        return np.split(rows, np.searchsorted(place, np.arange(1, len(zone.ranks))))

    def placed(self, zone: Zone, lengths: Ints) -> tuple[Ints, Ints]:
        """Place in the zone, ascending [n], and rows (seq, start, stop) [n, 3] of all its ranks."""
        seqs = np.array(zone.seqs, dtype=np.int64)
        rows = laid(lengths[seqs], _run_bounds(zone, lengths))
        rows[:, 1] = seqs[rows[:, 1]]
        return rows[:, 0], rows[:, 1:]

    def run_tokens(self, zone: Zone, lengths: Ints) -> Ints:
        return np.diff(_run_bounds(zone, lengths))

    def sends(self, zone: Zone, context: base.Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # Queries, keys and values there, outputs back.
        place = None if rank is None else (0, zone.ranks.index(rank))
        ranks, runs = np.array([zone.ranks]), self.run_tokens(zone, context.lengths)
        trade = Trade(ranks, _shares_of(zone, context), place, context.crosses if across else None)
        rows = np.concatenate([trade.inputs(0, 0), trade.outputs(1, 0)])
        calls = trade.calls(0, runs[None]) | trade.calls(1, runs[None], moves=True)
        return Sends(rows, lambda: runs, lambda: Blocks.of(self.runs(zone, context.lengths)), calls)

    def work(self, zone: Zone, context: base.Context, rank: int) -> Iterable[base.ZoneWork]:
        # Whole sequences with the rank's heads.
        whole, slices = _sequences(zone, context.lengths), _shares_of(zone, context).slices[zone.ranks.index(rank)]
        if slices:
            pairs = base.pairs_of(whole, whole[:, 1:], slices)
            yield base.ZoneWork(self.num_exchanges(zone) - 1, as_rows(pairs))

    # Placement

    def place_all(self, zones: Sequence[base.ZoneAt[Zone]], lengths: Ints, wanted: Bools) -> Ints:
        tables = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        for index, zone in zones:
            place, rows = self.placed(zone, lengths)
            rank = np.array(zone.ranks)[place]
            tables.append(base.held_rows(index, rank, rows)[wanted[rank]])
        return np.concatenate(tables)

    def tokens(self, zones: Sequence[Zone], context: base.Context) -> Ints:
        tokens = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            tokens[np.array(zone.ranks)] += self.run_tokens(zone, context.lengths)
        return tokens

    # Plan statistics and traffic between nodes

    def attended(self, zones: Sequence[Zone], context: base.Context) -> Ints:
        # Each rank attends all pairs with its share of the heads.
        pairs = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            total = int(context.mask.num_pairs(context.lengths[list(zone.seqs)]).sum())
            pairs[list(zone.ranks)] += _shares_of(zone, context).pairs(np.array([total]))[0]
        return pairs

    # Closed forms of what the table of sends says, which planning asks for often

    def receive(self, load: base.Load, zone: Zone, context: base.Context) -> None:
        # Add what both all-to-alls bring.
        runs = self.run_tokens(zone, context.lengths)[None]
        _shares_of(zone, context).bring(load, np.array([zone.ranks]), runs)

    def largest_exchange(self, zone: Zone, context: base.Context) -> Ints:
        # All keys and values of others with the heads of a rank.
        runs = self.run_tokens(zone, context.lengths)
        return (runs.sum() - runs) * _shares_of(zone, context).keys

    # Starting early

    def startable(self, zone: Zone) -> base.Startable:
        # The inputs and their replay, and the gradients of the outputs that came back.
        del zone
        return base.Startable(forward=(0,), gradients=(1,), replays=(0,))

    # Simulation

    def rounds(self, zone: Zone, context: base.Context) -> base.ZoneRounds:
        # An all-to-all, a launch and an all-to-all; on one rank the launch alone.
        size = len(zone.ranks)
        whole, shares = _sequences(zone, context.lengths), _shares_of(zone, context)
        places = np.repeat(np.arange(size), [len(own) for own in shares.slices])
        pairs = base.pairs_of(whole, whole[:, 1:], [each for own in shares.slices for each in own])
        launches = base.Launches(pairs, np.repeat(places, len(whole)), np.zeros(size), np.arange(size)[:, None])
        (traffic,) = shares.traffic(self.run_tokens(zone, context.lengths)[None])
        return base.ZoneRounds(np.array(zone.ranks), launches, traffic if size > 1 else None)


class ChunkExchange(HeadExchange):
    """Head exchange where every rank holds a contiguous chunk of each sequence."""

    def placed(self, zone: Zone, lengths: Ints) -> tuple[Ints, Ints]:
        size, seqs = len(zone.ranks), np.array(zone.seqs, dtype=np.int64)
        # [size + 1, S]: rank by rank, then sequence by sequence
        edges = _chunk_edges(lengths[seqs], size).T
        rows = np.stack([np.tile(seqs, size), edges[:-1].ravel(), edges[1:].ravel()], 1)
        place, some = np.repeat(np.arange(size), len(seqs)), rows[:, Fragment.START] < rows[:, Fragment.STOP]
        return place[some], rows[some]

    def run_tokens(self, zone: Zone, lengths: Ints) -> Ints:
        size = len(zone.ranks)
        whole, over = divmod(int(lengths[np.array(zone.seqs, dtype=np.int64)].sum()), size)
        return whole + (np.arange(size) < over)


def _chunk_edges(lengths: Ints, size: int) -> Ints:
    # Where the `size` contiguous chunks of each length begin and end: int64 [S, size + 1].
    # Tokens that `size` does not divide are dealt to the chunks round robin, from length to length,
    # so that the sums of all i-th chunks differ by one token at most.
    whole, over = np.divmod(lengths, size)
    first = ((np.cumsum(over) - over) % size)[:, None]
    last = first + over[:, None]
    chunk = np.arange(size + 1)
    dealt = np.clip(chunk - first, 0, over[:, None]) + np.minimum(chunk, np.maximum(last - size, 0))
    return whole[:, None] * chunk + np.minimum(dealt, over[:, None])


def _shares_of(zone: Zone, context: base.Context) -> HeadShares:
    return HeadShares.of(*context.heads, len(zone.ranks))


def _run_bounds(zone: Zone, lengths: Ints) -> Ints:
    # Tokens of the concatenated sequences at which the runs begin, and their number: int64 [G + 1].
    total = int(lengths[np.array(zone.seqs, dtype=np.int64)].sum())
    return total * np.arange(len(zone.ranks) + 1) // len(zone.ranks)


def _sequences(zone: Zone, lengths: Ints) -> Ints:
    # Whole sequences as rows (seq, start, stop).
    seqs = np.array(zone.seqs, dtype=np.int64)
    return np.stack([seqs, np.zeros_like(seqs), lengths[seqs]], 1)

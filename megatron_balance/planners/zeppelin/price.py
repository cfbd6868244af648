"""Seconds of a placement in uneven shares, forward and backward, without making its program.

A share p of a sequence cut zigzag is p of its work, p of that on keys of its own; the other keys
come from the groups that have them. Keys of a wave travel while the one before is attended,
gradients while the next is; a rank's exchange waits for its busier end. A lead (`patterns.waves`)
is what groups attend to while the heads of all other tokens are exchanged; a few around the one
that hides that are priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from math import inf, sqrt
from typing import NamedTuple, TypeVar

import numpy as np

from megatron_balance.analysis.states import piece_s
from megatron_balance.cost.base import ADD, LAUNCHES_OF_RUN, MachineCost
from megatron_balance.cost.kernel import TILE_TOKENS, law_of
from megatron_balance.ir.arrays import Bools, Floats
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.model import Model
from megatron_balance.patterns.waves import ALIGN
from megatron_balance.planners.zeppelin.shares import Shares, Trimmed
from megatron_balance.solvers.groups import Placement

# Numbers of waves that are priced.
WAVES = (1, 2, 3, 4, 6, 8)
# Leads that are tried, over the one whose work takes as long as the exchange of all else.
_LEADS = (0.75, 1.0, 1.5)
# Tokens of the sequence whose backward is compared with its forward.
_TYPICAL = 8192
# Bytes that a merge reads and writes, over those of the queries: three values in fp32 each.
_MERGED = 6.0
# Bytes of a gradient of keys and values over theirs: they travel in fp32.
_GRADIENT = 2.0
# Launches beside a group call: packing, in the backward also unpacking or adding.
_MOVES_OF_EXCHANGE = (1, 2)

# A number of one, or of many.
_Any = TypeVar("_Any", float, Floats)


@dataclass(slots=True)
class GroupCosts:
    """Seconds of work and traffic of groups of `size` ranks in a row."""

    cost: MachineCost
    cluster: Cluster
    model: Model
    size: int
    replays: bool = False
    """Whether backwards receive keys again, for want of memory."""
    backward: float = field(init=False)
    """Seconds of attention of a backward over those of its forward, beside `piece_s`."""
    piece_s: float = field(init=False)
    """Seconds of a backward a key that a piece of queries sees, all heads; 0: the kernel has no blocks
    of keys."""
    key_s: float = field(init=False)
    """Seconds a key of a lone thread block: a launch of few queries ends on its longest one."""
    linear_s: float = field(init=False)
    """Seconds a token of a rank in the linear modules, forward."""
    states_s: float = field(init=False)
    """Seconds a piece of a cut sequence on a rank for the states of recurrent layers, both passes."""
    heads: float = field(init=False)
    """Ranks of a group that the heads divide among evenly: what the rank with most heads has."""
    trades: tuple[tuple[float, float], tuple[float, float], tuple[float, float]] = field(init=False)
    """Of a group's all-to-alls, inside a node and between: fixed seconds; a token's before
    attention, and behind."""
    known: dict[int, float] = field(init=False, default_factory=dict[int, float])
    """Seconds of whole sequences with all heads on one rank, by length; groups of other sizes share
    it."""
    asked: tuple[Sequence[int], list[float]] = field(init=False, default=((), []))
    """The lengths that were asked for last, and their works."""

    def __post_init__(self) -> None:
        # Launches: a whole typical sequence, one tile of queries of one head over all keys, and pieces
        # of an eighth and a quarter of its queries, whose difference is without the blocks of keys.
        pairs = np.zeros((4, Pair.WIDTH), dtype=np.int64)
        pairs[:, Pair.Q_STOP] = pairs[:, Pair.K_STOP] = _TYPICAL
        pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = self.model.num_heads, self.model.num_kv_heads
        pairs[1, Pair.Q_START], pairs[1, Pair.Q_HEAD_STOP], pairs[1, Pair.KV_HEAD_STOP] = _TYPICAL - TILE_TOKENS, 1, 1
        pairs[2:, Pair.Q_START], pairs[2:, Pair.Q_STOP] = _TYPICAL, (_TYPICAL * 9 // 8, _TYPICAL * 5 // 4)
        launch = np.arange(4, dtype=np.int64)
        forward, backward = (self.cost.attend_s(pairs, launch, 4, backward=b).tolist() for b in (False, True))
        self.piece_s = 0.0
        if law_of(self.cluster.attention_kernel).key_blocks is not None:
            self.piece_s = max(0.0, 2 * backward[2] - backward[3] - self.cost.launch_s(1)) / _TYPICAL
        self.backward = (backward[0] - self.piece_s * _TYPICAL) / forward[0]
        self.key_s = max(0.0, forward[1] - self.cost.launch_s(1)) / _TYPICAL
        self.linear_s = self.cost.linear_s(1.0)
        self.states_s = piece_s(self.model, self.cluster, self.cost)
        self._share_heads()

    def _share_heads(self) -> None:
        self.heads = self.model.num_heads / -(-self.model.num_heads // self.size)
        size, node, cost = self.size, self.cluster.node_size, self.cost
        copies, here, nics = max(1.0, size / self.model.num_kv_heads), min(size, node), 1 / self.cluster.ranks_per_nic
        beyond = size - here
        inside_s = (here - 1) / size**2 * cost.intra_node_s(1.0, 0)
        across_s = beyond / size**2 * cost.inter_node_s(1.0, 0, nics)
        queries, keys = cost.query_bytes(1.0), copies * cost.kv_bytes(1.0)
        fixed = cost.intra_node_s(0.0, here - 1), cost.inter_node_s(0.0, beyond, nics)
        into, home = ((each * inside_s, each * across_s) for each in (queries + keys, queries))
        self.trades = fixed, into, home

    def of_size(self, size: int) -> GroupCosts:
        other = copy(self)
        other.size, other.asked = size, ((), [])
        other._share_heads()
        return other

    @property
    def num_groups(self) -> int:
        return self.cluster.num_ranks // self.size

    def bound_s(self, num_tokens: float, work: float) -> float:
        """Seconds that no placement without a lead comes below: all even, all hidden."""
        tokens = np.array([num_tokens / self.num_groups])
        trades = _Trades.of(tokens, self, None)
        again_s = trades.into_s if self.replays else 0.0
        exchange_s = trades.into_s + trades.home_s + trades.grads_s + trades.first_grads_s + again_s
        linear_s = tokens * self.linear_s / self.size
        both_s = self.both_s(work / self.num_groups, num_tokens / self.num_groups)
        return both_s + float((exchange_s + 3 * linear_s)[0])

    def even_s(self, num_tokens: float, work: float) -> float:
        """Seconds if all computation were even and nothing moved. `work`: of all sequences."""
        linear_s = num_tokens / self.cluster.num_ranks * self.linear_s
        return self.both_s(work / self.num_groups, num_tokens / self.num_groups) + 3 * linear_s

    def works_s(self, lengths: Sequence[int]) -> list[float]:
        if self.asked[0] is lengths:
            return self.asked[1]
        mask = self.model.mask
        for length in set(lengths) - self.known.keys():
            self.known[length] = self.cost.attention_s(mask.num_pairs(length), length)
        self.asked = lengths, [self.known[length] / self.heads for length in lengths]
        return self.asked[1]

    def layers_s(self, lengths: Sequence[int]) -> list[float]:
        """Seconds of a group for each whole sequence, both passes, linear modules included."""
        linear_s = 3 * self.linear_s / self.size
        works, tokens = np.array(self.works_s(lengths)), np.array(lengths, dtype=np.float64)
        return (self.both_s(works, tokens) + tokens * linear_s).tolist()

    def both_s(self, work: _Any, num_keys: _Any) -> _Any:
        """Seconds of attention of both passes; `num_keys` of its pieces of queries."""
        return work * (1 + self.backward) + num_keys * self.piece_s / self.heads

    def causal_s(self, num_tokens: float) -> float:
        """Seconds of a group for the attention of so many tokens to themselves, forward."""
        return self.cost.attention_s(num_tokens * (num_tokens + 1) / 2) / self.heads

    def lead_tokens(self, held: float) -> float:
        """The lead whose work takes as long as exchanging the rest of `held` tokens."""
        none_s, all_s = _trade_s(np.array([0.0, held]), self)[0].tolist()
        pair_s, token_s = self.causal_s(_TYPICAL) / _TYPICAL**2, (all_s - none_s) / held
        fixed_s = none_s + self.cost.call_s
        return (sqrt(token_s**2 + 4 * pair_s * (token_s * held + fixed_s)) - token_s) / (2 * pair_s)

    def keys_s(self, num_tokens: float, num_messages: float, *, across: bool | None = None) -> float:
        """Seconds in which a rank receives its heads' keys of other groups. `across`: nodes."""
        num_bytes = self.key_bytes * num_tokens
        if across is None:
            across = self.num_groups * self.size > self.cluster.node_size
        if not across:
            return self.cost.intra_node_s(num_bytes, num_messages)
        return self.cost.inter_node_s(num_bytes, num_messages, 1 / self.cluster.ranks_per_nic)

    @property
    def key_bytes(self) -> float:
        return self.cost.kv_bytes(1.0) * max(1.0, self.size / self.model.num_kv_heads) / self.size

    def trade_bytes(self, *, queries: bool) -> float:
        """Bytes of a token that a rank sends in its group: `queries`, or keys and values too."""
        keys = 0.0 if queries else self.cost.kv_bytes(1.0) * max(1.0, self.size / self.model.num_kv_heads)
        return (self.cost.query_bytes(1.0) + keys) * (self.size - 1) / self.size**2

    def pack_s(self, num_bytes: Floats) -> Floats:
        return num_bytes * (2 / self.cluster.memory_bytes_per_s)

    def merge_s(self, num_tokens: float) -> float:
        """Seconds of merging partial outputs of a group's tokens; summing gradients takes as long."""
        return _MERGED * self.cost.query_bytes(num_tokens) / self.size / self.cluster.memory_bytes_per_s


@dataclass(frozen=True, slots=True)
class PlacementPrice:
    """Seconds of a layer of a placement with so many waves and that lead. `exposed_s`: by how much
    uneven work, keys that are waited for and waves make it longer, without a lead.
    """

    seconds: float
    num_waves: int
    exposed_s: float
    lead: int = 0


def rings_s(placement: Placement, lengths: Sequence[int], costs: GroupCosts) -> float:
    """Seconds of a layer in rings of groups. `placement`: the groups of each sequence, in a row."""
    names: dict[tuple[int, ...], int] = {}
    # By identity first: hashing all groups for each sequence takes longer.
    ids = list(map(id, placement))
    alike = {
        key: names.setdefault(groups, len(names)) for key, groups in dict(zip(ids, placement, strict=True)).items()
    }
    ring = list(map(alike.__getitem__, ids))
    sizes = np.fromiter(map(len, names), np.float64, len(names))[ring]
    each = [np.bincount(ring, values / sizes).tolist() for values in (costs.works_s(lengths), lengths)]
    seconds, held = np.zeros((2, costs.num_groups))
    launch_s = costs.cost.launch_s(1)
    for groups, work, tokens in zip(names, *each, strict=True):
        first, last, rounds = groups[0], groups[-1], len(groups) - 1
        held[first : last + 1] += tokens
        if not rounds:
            seconds[first] += costs.both_s(work, tokens) + 2 * launch_s
            continue
        across = first * costs.size // costs.cluster.node_size != last * costs.size // costs.cluster.node_size
        keys_s = costs.keys_s(rounds * tokens, rounds, across=across)
        each_s = launch_s + costs.merge_s(tokens)
        # Keys of a round travel while those of the one before are attended, but for the last round.
        for round_s, link_s in (
            (work / len(groups) + each_s, keys_s),
            (
                work * costs.backward / len(groups) + tokens * costs.piece_s / costs.heads + each_s,
                (_GRADIENT + costs.replays) * keys_s,
            ),
        ):
            seconds[first : last + 1] += max(len(groups) * round_s, link_s + round_s)
    trades = _Trades.of(held, costs, None)
    exchange_s = (1 + costs.replays) * trades.into_s + trades.home_s + trades.grads_s + trades.first_grads_s
    return float((seconds + held * (3 * costs.linear_s / costs.size) + exchange_s).max())


class _Lead(NamedTuple):
    """Own work while the heads of all else are exchanged: tokens, those of them in the row that it
    cuts, whose rest sees them, too, and seconds [placements, groups].
    """

    tokens: Floats
    cut: Floats
    work: Floats


def cheapest(
    placed: Trimmed,
    costs: GroupCosts,
    waves: Sequence[int] = WAVES,
    *,
    capacity: float = inf,
    below_s: float = inf,
) -> tuple[int, PlacementPrice] | None:
    """The first of the cheapest placements within `capacity`; None: none is below `below_s`."""
    each = _layer_s(placed, costs, waves)
    each[placed.held.max(axis=1) > capacity] = inf
    at, wave = divmod(int(each.argmin()), len(waves))
    seconds = float(each[at, wave])
    if seconds >= below_s:
        return None
    bound_s = costs.bound_s(float(placed.held[at].sum()), float(placed.load[at].sum()))
    return at, PlacementPrice(seconds, waves[wave], seconds - bound_s)


def with_lead(
    price: PlacementPrice,
    lengths: Sequence[int],
    of: Sequence[dict[int, float]],
    costs: GroupCosts,
    waves: Sequence[int],
) -> PlacementPrice:
    """The price of a placement with the lead, and waves, that make it cheapest."""
    if costs.model.mask != CAUSAL:
        return price
    placed = Shares.begin(costs.works_s(lengths), lengths, costs.num_groups, of)
    enough, rows = costs.lead_tokens(sum(lengths) / costs.num_groups), _first_rows(lengths, of, costs.num_groups)
    # Also one that cuts no row of the group with most work.
    whole = [at for at in accumulate(rows[placed.load.index(max(placed.load))]) if at >= _LEADS[0] * enough]
    tried = [*(part * enough for part in _LEADS), *(-(-at // ALIGN) * ALIGN for at in whole[:1])]
    leads = [lead for lead in (int(each) // ALIGN * ALIGN for each in tried) if lead]
    if not leads:
        return price
    lead = _lead(rows, leads, costs)
    seconds = _layer_s(Trimmed.without([placed] * len(leads)), costs, waves, lead)
    at, wave = divmod(int(seconds.argmin()), len(waves))
    if seconds[at, wave] >= price.seconds:
        return price
    return replace(price, seconds=float(seconds[at, wave]), num_waves=waves[wave], lead=leads[at])


def _first_rows(lengths: Sequence[int], of: Sequence[dict[int, float]], num_groups: int) -> list[list[float]]:
    rows: list[list[float]] = [[] for _ in range(num_groups)]
    for length, own in zip(lengths, of, strict=True):
        if len(own) == 1:
            ((group, share),) = own.items()
            rows[group].append(length * share)
            continue
        # Has the middle chunk, others two apart.
        last = max(own)
        for group, share in own.items():
            rows[group].append(length * share / (1 if group == last else 2))
    return [sorted(own, reverse=True) for own in rows]


def _lead(rows_of: Sequence[Sequence[float]], leads: Sequence[int], costs: GroupCosts) -> _Lead:
    """Work of each group under leads of so many tokens (`patterns.waves.lead_cuts`)."""
    held, cut, work = np.zeros((3, len(leads), len(rows_of)))
    for (at, tokens), (group, rows) in product(enumerate(leads), enumerate(rows_of)):
        left = float(tokens)
        for row in rows:
            taken = min(row, left)
            left -= taken
            work[at, group] += costs.causal_s(taken)
            if not left:
                cut[at, group] = taken * (taken < row)
                break
        held[at, group] = tokens - left
    return _Lead(held, cut, work)


def _trade_s(num_tokens: Floats, costs: GroupCosts) -> tuple[Floats, Floats]:
    """Seconds of the all-to-alls before and after attention, forward, of groups of so many tokens."""
    if costs.size == 1:
        return np.zeros_like(num_tokens), np.zeros_like(num_tokens)
    (inside_s, across_s), into, home = costs.trades
    seconds: list[Floats] = []
    for inside, across in (into, home):
        each = inside_s + num_tokens * inside
        seconds.append(np.maximum(each, across_s + num_tokens * across) if across else each)
    return seconds[0], seconds[1]


class _KeyFlow(NamedTuple):
    """Of each group [placements, groups, 1]: seconds of keys on the links, forward; bytes that it
    sends and receives; others' keys, and work on them; seconds of their pieces in every wave; the
    most keys in a row, all at once and of one wave's share.
    """

    travel_s: Floats
    sent: Floats
    received: Floats
    keys: Floats
    far_s: Floats
    pieces_s: Floats
    whole: Floats
    part: Floats


def _layer_s(
    placed: Trimmed,
    costs: GroupCosts,
    waves: Sequence[int] = WAVES,
    lead: _Lead | None = None,
) -> Floats:
    """Seconds of a layer, forward and backward, of the slowest group [placements, waves]."""
    flow, met = _flow(placed, costs), _Met(placed)
    trades = _Trades.of(placed.held, costs, None if lead is None else lead.tokens)
    linear_s = placed.held * (costs.linear_s / costs.size)
    launch_s, numbers = costs.cost.launch_s(1), np.array(waves, dtype=np.float64)
    ahead_s = 0.0 if lead is None else lead.work[:, :, None] + launch_s
    # [placements, groups, 1]; waves broadcast along the last axis, [placements, groups, waves].
    own_s = placed.load[:, :, None] - flow.far_s + launch_s - (0.0 if lead is None else lead.work[:, :, None])
    waits = flow.far_s > 0
    merge_s, call_s = placed.held[:, :, None] * costs.merge_s(1.0), costs.keys_s(0, 1) + costs.cost.call_s
    # Keys of the own pieces of queries, of the lead's and of a wave's.
    piece_s, led = costs.piece_s / costs.heads, 0.0 if lead is None else lead.tokens[:, :, None]
    again = 0.0 if lead is None else lead.cut[:, :, None]
    blocks_s = piece_s * (placed.held[:, :, None] - led + again), piece_s * led, piece_s * flow.keys / numbers
    # A thread block walks its keys one by one: the longest row bounds a short launch.
    in_a_row = np.where(numbers > 1, flow.part / numbers, flow.whole)
    wave_s = np.maximum(flow.far_s / numbers + flow.pieces_s, in_a_row * costs.key_s) + launch_s
    each_s, back_s = (flow.travel_s * wide / numbers + call_s for wide in (1.0, _GRADIENT))
    packed_s, added_s = (costs.pack_s(wide * flow.sent) for wide in (1.0, _GRADIENT * ADD))

    ready = (linear_s + trades.into_s)[:, :, None]
    ready = np.maximum(ready + ahead_s, ready + trades.late_s[:, :, None])
    sent = met.latest(ready) + packed_s
    forward_s = wave_s + merge_s
    # Slowest is own work, the first wave's way and all work, or all ways and the last work.
    begin = np.maximum(
        np.maximum(ready + packed_s + own_s, sent + each_s), sent + numbers * (each_s - forward_s) + forward_s
    )
    ahead = np.where(waits, begin + numbers * forward_s, ready + own_s) + trades.home_s[:, :, None]

    ready = (2 * linear_s + trades.grads_s)[:, :, None]
    # Gradients of what was received are packed, in fp32, a wave's share each.
    backward_s = wave_s * costs.backward + blocks_s[2] + merge_s + costs.pack_s(_GRADIENT * flow.received) / numbers
    begin = ready
    if costs.replays:
        ready = ready + (trades.into_s + trades.late_s)[:, :, None]
        sent = met.latest(ready) + packed_s
        begin = np.maximum(
            ready + packed_s, np.maximum(sent + each_s, sent + numbers * (each_s - backward_s) + backward_s)
        )
    first_s = met.latest(ready) + backward_s + (each_s if costs.replays else 0.0)
    done = begin + numbers * backward_s
    own_s = own_s * costs.backward + blocks_s[0]
    behind = np.maximum(done + own_s, np.maximum(first_s + numbers * back_s, done + back_s)) + added_s
    # Groups without keys of others have no waves.
    behind = np.where(waits, behind, ready + own_s)
    behind = np.maximum(behind + ahead_s * costs.backward + blocks_s[1], behind + trades.late_grads_s[:, :, None])
    behind = behind + trades.first_grads_s[:, :, None]
    # A layer takes no less than hosts do to issue its attention beside the modules outside.
    ahead_s, behind_s, most_s = ahead.max(axis=1), behind.max(axis=1), linear_s.max(axis=1)[:, None]
    issued = _issue_s(waits, costs, numbers, has_lead=lead is not None)
    layer_s = np.maximum(ahead_s, most_s + issued[0]) + np.maximum(behind_s, 2 * most_s + issued[1])
    return layer_s + costs.states_s * _pieces(placed, costs.size) if costs.states_s else layer_s


def _pieces(placed: Trimmed, size: int) -> Floats:
    """Pieces of cut sequences on a rank of the group that has most [placements, 1]."""
    # Two chunks of a row but one of the last, in as many runs as the group has ranks.
    chunks = np.where(placed.place + 1 < placed.count, 2.0, placed.count > 1)
    index, shape = placed.placement * placed.load.shape[1] + placed.group, placed.load.shape
    of_group = np.bincount(index, chunks, shape[0] * shape[1]).reshape(shape)
    return (of_group.max(axis=1, keepdims=True) + size - 1) / size


def _issue_s(waits: Bools, costs: GroupCosts, numbers: Floats, *, has_lead: bool) -> tuple[Floats, Floats]:
    """Seconds in which a rank's host issues a layer's attention (as `simulator.phase`)."""
    waves = numbers * waits.any(axis=1)
    exchanges = waves + (2 + has_lead) * (costs.size > 1)
    runs, host = LAUNCHES_OF_RUN * (1 + has_lead + waves), costs.cost.host
    ahead, behind = (
        exchanges * host.call_s + (runs + moves * exchanges) * host.launch_s for moves in _MOVES_OF_EXCHANGE
    )
    return ahead, behind


class _Met:
    def __init__(self, placed: Trimmed) -> None:
        self.index = placed.placement * placed.load.shape[1] + placed.group
        self.first = np.flatnonzero(placed.place == 0)
        self.count = placed.count[self.first]

    def latest(self, when: Floats) -> Floats:
        """The latest of each group and those it shares a sequence with [placements, groups, 1]."""
        if not len(self.index):
            return when
        latest = when.flatten()
        of_seq = np.maximum.reduceat(latest[self.index], self.first)
        np.maximum.at(latest, self.index, np.repeat(of_seq, self.count))
        return latest.reshape(when.shape)


def _flow(placed: Trimmed, costs: GroupCosts) -> _KeyFlow:
    shape, share, count = placed.load.shape, placed.share, placed.count
    length, index = placed.lengths[placed.seq], placed.placement * shape[1] + placed.group

    def by_group(values: Floats) -> Floats:
        return np.bincount(index, weights=values, minlength=shape[0] * shape[1]).astype(np.float64).reshape(*shape, 1)

    def most_of_group(values: Floats) -> Floats:
        most = np.zeros(shape[0] * shape[1])
        np.maximum.at(most, index, values)
        return most.reshape(*shape, 1)

    others = length * (1 - share)
    # Tokens whose keys a group receives and sends; the busier of the two is what its links take. Under
    # a causal mask nobody needs the last chunks of the groups before its own.
    causal = costs.model.mask == CAUSAL
    received = by_group(others - length * placed.before / 2 if causal else others)
    sent = by_group(length * share / 2 * (count - 1 + placed.place) if causal else length * share * (count - 1))
    # Work on keys that it receives, and what a piece of keys for each source adds to it in every wave.
    work = placed.work[placed.seq] * share
    # That of thread blocks is of so many keys.
    block_tokens = law_of(costs.cluster.attention_kernel).block_tiles * TILE_TOKENS
    far, pieces = by_group(work * (1 - share)), by_group(work * (count - 1) * block_tokens / length)
    # The most keys in a row: all that come of a sequence, and all from two neighbouring sources.
    whole, part = most_of_group(others), most_of_group(np.minimum(others, length / count))
    each = costs.key_bytes
    return _KeyFlow(
        np.maximum(received, sent) * costs.keys_s(1.0, 0),
        sent * each,
        received * each,
        by_group(others),
        far,
        pieces,
        whole,
        part,
    )


class _Trades(NamedTuple):
    """Seconds of the groups' all-to-alls [placements, groups], packing included."""

    into_s: Floats
    late_s: Floats
    home_s: Floats
    grads_s: Floats
    late_grads_s: Floats
    first_grads_s: Floats

    @classmethod
    def of(cls, held: Floats, costs: GroupCosts, lead: Floats | None) -> _Trades:
        first = held if lead is None else np.minimum(lead, held)
        late = held - first
        both = [_trade_s(each, costs) for each in ((held,) if lead is None else (first, late))]
        (into_s, _), (late_s, _) = both[0], both[-1]
        calls = costs.cost.call_s * (costs.size > 1)
        out_s = _trade_s(held, costs)[1]
        inside, outside = (each * costs.trade_bytes(queries=q) for each, q in ((held, False), (held, True)))
        packed_s, placed_s = costs.pack_s(inside), costs.pack_s(outside)
        if lead is None:
            none = np.zeros_like(held)
            late_s, late_grads_s, first_grads_s = none, none, _GRADIENT * into_s
        else:
            late_s, late_grads_s, first_grads_s = late_s + calls, _GRADIENT * late_s + calls, _GRADIENT * into_s
        return cls(
            into_s + calls + packed_s,
            late_s,
            out_s + calls + 2 * placed_s,
            # An output comes with its gradient.
            _GRADIENT * (out_s + 2 * placed_s) + calls,
            late_grads_s,
            first_grads_s + calls + _GRADIENT * (1 + ADD) * packed_s,
        )

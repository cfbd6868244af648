"""Move attention from servers above the limit to those with headroom (DistCA, section 4.2): first
light servers are emptied, then the best part of the best item moves, and light work is shed for
what fits nowhere. Headroom: seconds of attention that a server may still take before it reaches the
limit.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.planners.distca.servers import Items, Parts, Piece, Servers, at_least, at_most

# Differences below this share of the mean load are none.
_ROUNDING = 1e-9
# Share by which the limit gives way where no cut at whole blocks fits; doubled up to the most.
_RAISE, _MOST_RAISE = 0.001, 0.005
# Share of the tolerance that a cut may leave unused, or take off a source in vain, for fewer
# bytes.
_SPARE = 0.25


@dataclass(frozen=True, slots=True)
class Rule:
    """`least_score`: seconds of attention per byte from which a migration is worth it."""

    limit: float
    tolerance: float
    least_score: float


class _Columns:
    """Arrays with a row for each piece of the servers above the limit, and some rows to spare."""

    def __init__(self, items: Items, size: int) -> None:
        self.items = items
        self.values = np.ones((4, size))
        self.wanted, self.block, self.least_keys, self.seconds = self.values
        self.block[:] = inf
        self.seq: Ints = np.zeros(size, dtype=np.int64)
        self.seqs: dict[int, int] = {}
        self._fitting = 0
        self.taken, self._resident = np.empty((2, size))
        self.fits = np.empty(size, dtype=bool)

    def only(self, rows: Ints, size: int) -> "_Columns":
        columns = _Columns(self.items.only(rows, size), size)
        columns.values[:, : len(rows)] = self.values[:, rows]
        columns.seqs, columns.seq[: len(rows)] = self.seqs, self.seq[rows]
        return columns

    def fitting(self, headroom: float) -> int:
        if self.block[self._fitting] > headroom:
            self._fitting = int(self.block.argmin())
        return self._fitting

    def at_hand(self, reach: Mapping[int, int]) -> Floats:
        """First keys of each row's sequence that are there; holds until the next call."""
        keys = np.zeros(len(self.seqs))
        for seq, count in reach.items():
            keys[self.seqs[seq]] = count
        return keys.take(self.seq, out=self._resident, mode="clip")


class Drain:
    """Migration from servers above the limit. `capped`: those that a cap keeps from the best."""

    def __init__(self, servers: Servers, rule: Rule) -> None:
        self.servers, self.rule, self.limit = servers, rule, rule.limit
        self.mean = float(servers.load.mean())
        sizes = servers.shards.sizes
        self._query_size, self._least_score = sizes.query / sizes.kv, rule.least_score * sizes.kv
        over: list[int] = np.flatnonzero(servers.load > self.limit).tolist()
        self.rows: list[tuple[int, Piece]] = []
        self.rows_of: dict[int, list[int]] = defaultdict(list)
        size = _rows(sum(len(servers.pieces[server]) for server in over))
        self.columns = _Columns(servers.shards.items(size), size)
        self.most_servers = len(over)
        self.capped: set[int] = set()
        for server in over:
            self._add(server, servers.pieces[server])

    def _add(self, server: int, pieces: list[Piece]) -> None:
        for piece in pieces:
            if len(self.rows) == len(self.columns.block):
                self._compact()
            row = len(self.rows)
            self.rows.append((server, piece))
            self.rows_of[server].append(row)
            self._set(row)

    def _compact(self) -> None:
        rows = np.flatnonzero(self.columns.block < inf)
        self.columns = self.columns.only(rows, _rows(len(rows)))
        self.rows = [self.rows[row] for row in rows.tolist()]
        self.rows_of.clear()
        for row, (server, _) in enumerate(self.rows):
            self.rows_of[server].append(row)
        self.most_servers = len(self.rows_of)

    def _set(self, row: int) -> None:
        servers, columns = self.servers, self.columns
        server, piece = self.rows[row]
        seconds = servers.seconds(piece)
        columns.items.set(row, servers.shards.bounds(piece), seconds)
        columns.seconds[row] = seconds
        columns.wanted[row] = min(seconds, float(servers.load[server]) - self.limit)
        columns.block[row] = servers.shards.lightest(piece)
        if servers.counted:
            columns.least_keys[row] = servers.shards.least_keys(piece)
        columns.seq[row] = columns.seqs.setdefault(servers.seq(piece), len(columns.seqs))

    def _update(self, server: int) -> None:
        surplus = float(self.servers.load[server]) - self.limit
        if surplus <= _ROUNDING * self.mean:
            self.columns.block[self.rows_of.pop(server, [])] = inf
            if 2 * len(self.rows_of) < self.most_servers:
                self._compact()
            return
        rows = self.rows_of[server]
        self.columns.wanted[rows] = np.minimum(self.columns.seconds[rows], surplus)

    def run(self) -> None:
        """Migrate until no server is above the limit."""
        load = self.servers.load
        # They have headroom, but for nothing that is worth it.
        closed: set[int] = set()
        times_shed, most_times_shed, useless = 0, len(load) // 8 + 8, True
        raised_by = _RAISE
        while self.rows_of:
            target = _lightest(load, closed)
            headroom = 0.0 if target in closed else self.limit - float(load[target])
            row = self.columns.fitting(headroom)
            block = float(self.columns.block[row])
            if headroom >= max(block, _ROUNDING * self.mean):
                filled = self._fill(target, headroom)
                if not filled:
                    closed.add(target)
                useless = useless and not (filled and times_shed)
                continue
            if self.rule.least_score > 0 and closed:
                return
            source = self.rows[row][0]
            if times_shed < most_times_shed and _shed_light_work(self.servers, self.limit, block, source):
                times_shed += 1
                self._update(source)
            else:
                closed = set(self.capped)
                self.limit *= 1 + raised_by
                raised_by = min(2 * raised_by, _MOST_RAISE)
                for server in list(self.rows_of):
                    self._update(server)
                times_shed, useless = (times_shed if useless else 0), True

    def _fill(self, target: int, headroom: float) -> bool:
        """Migrate the best part of the best item to a server; False: none is worth it."""
        scores = self._scores(target, headroom)
        while scores[best := int(scores.argmax())] > self._least_score:
            server, piece = self.rows[best]
            surplus = float(self.servers.load[server]) - self.limit
            low, high = self._cut(piece, target, surplus, headroom + _ROUNDING / 2 * self.mean)
            # no part at all where a block fits the headroom by rounding only
            if low < high and self.servers.allows(target, (piece[0], low, high)):
                self._migrate(best, low, high, target)
                return True
            scores[best] = 0.0
            self.capped.add(target)
        return False

    def _scores(self, target: int, headroom: float) -> Floats:
        """Seconds for each key's worth of bytes, of each row; 0 where no block fits the headroom."""
        columns, reach = self.columns, self.servers.reach[target]
        seconds = np.minimum(columns.wanted, headroom, out=columns.taken)
        known = columns.seqs.keys() & reach.keys()
        if known:
            resident = columns.at_hand({seq: reach[seq] for seq in known})
            queries, key_stop = columns.items.cheapest(seconds, resident)
            keys = np.subtract(key_stop, np.minimum(key_stop, resident, out=resident), out=resident)
            for seq in known & self.servers.beyond[target]:
                for _, stop in self.servers.held(target, seq):
                    if stop > reach[seq]:
                        rows = columns.seq == columns.seqs[seq]
                        keys[rows] = key_stop[rows] - self.servers.at_hand(target, seq, key_stop[rows])
        else:
            queries, keys = columns.items.cheapest(seconds)
        # In place: `cheapest` returns its buffers, and bytes count in keys' worth.
        queries *= self._query_size
        queries += keys
        # A part too light for a query of its own, whose keys are all there: no bytes, by rounding.
        seconds /= np.maximum(queries, _ROUNDING, out=queries)
        seconds *= np.less_equal(columns.block, headroom, out=columns.fits)
        if self.servers.counted:
            beyond = columns.least_keys > self.servers.keys_allowed(target)
            seconds[beyond & ~np.isin(columns.seq, [columns.seqs[seq] for seq in known])] = 0.0
        return seconds

    def _cut(self, piece: Piece, target: int, surplus: float, headroom: float) -> tuple[int, int]:
        """Bounds of the part that fills the headroom, or takes the surplus, for few bytes."""
        if min(surplus, headroom) >= self.servers.seconds(piece) * (1 - _ROUNDING):
            return piece[1], piece[2]
        parts, wasted, allowed = self._parts(piece, surplus, headroom)
        low, stop, _ = parts
        if len(low) == 1:
            return int(low[0]), stop
        costs = self.servers.num_bytes(piece, parts, target)
        costs[wasted > allowed] = inf
        best = int(costs.argmin())
        return int(low[best]), stop + best

    def _parts(self, piece: Piece, surplus: float, headroom: float) -> tuple[Parts, Floats, float]:
        """The parts to choose from, the seconds that each wastes, and how many are allowed."""
        shards, spare = self.servers.shards, _SPARE * self.rule.tolerance * self.mean
        if surplus <= headroom:
            parts = at_least(shards, piece, surplus)
            wasted = parts[2] - surplus
            tightest = float(wasted[wasted.argmin()])
            if tightest <= headroom - surplus:
                return parts, wasted, min(max(spare, tightest), headroom - surplus)
        parts = at_most(shards, piece, headroom)
        wasted = headroom - parts[2]
        allowed = max(spare, float(wasted[wasted.argmin()]))
        if allowed >= headroom:
            wasted[parts[2] <= 0] = inf
        return parts, wasted, allowed

    def _migrate(self, row: int, low: int, high: int, target: int) -> None:
        server, piece = self.rows[row]
        rest = self.servers.move(piece, low, high, server, target)
        self.columns.block[row] = inf
        self._update(server)
        if server in self.rows_of and rest:
            self.rows[row] = (server, rest[0])
            self._set(row)
            self._add(server, rest[1:])


def _lightest(load: Floats, closed: Collection[int]) -> int:
    if not closed:
        return int(load.argmin())
    left = load.copy()
    left[list(closed)] = inf
    return int(left.argmin())


def _rows(pieces: int) -> int:
    return pieces + pieces // 4 + 8


# Least load of giver and taker together over the limit: keys are saved where the taker is full
# then.
_FULL = 0.9


def empty_light_servers(servers: Servers, rule: Rule) -> None:
    """Move all tasks of light servers, lightest first, to the fullest that can take them."""
    load, mean = servers.load, float(servers.load.mean())
    surplus = np.maximum(load - rule.limit, 0.0)
    if not surplus.any():
        return
    keys = _keys_of_surplus(servers, surplus)
    order: list[int] = np.argsort(load, kind="stable").tolist()
    light = [(float(load[server]), -server) for server in order if 0 < load[server] < mean]
    takers = sorted(light)
    for _, name in light:
        # Which has grown if it took from another one.
        giver_load = float(load[-name])
        takers.pop(bisect_left(takers, (giver_load, name)))
        at = bisect_right(takers, (rule.limit - giver_load, 1)) - 1
        full = at >= 0 and takers[at][0] + giver_load >= _FULL * rule.limit
        if full and _pays(servers, -name, -takers[at][1], keys * servers.shards.sizes.kv * giver_load / mean, rule):
            taker = -takers.pop(at)[1]
            for piece in list(servers.pieces[-name]):
                servers.move(piece, piece[1], piece[2], -name, taker)
            insort(takers, (float(load[taker]), -taker))
        else:
            insort(takers, (giver_load, name))


def _keys_of_surplus(servers: Servers, surplus: Floats) -> float:
    over = np.flatnonzero(surplus).tolist()
    reach = [max(servers.shards.key_stop(piece) for piece in servers.pieces[server]) for server in over]
    return float(np.dot(reach, surplus[over]) / surplus.sum())


def _pays(servers: Servers, giver: int, taker: int, saved_bytes: float, rule: Rule) -> bool:
    """Whether moving all tasks of a server saves more bytes than it costs."""
    costs_bytes, sizes = 0.0, servers.shards.sizes
    most_bytes = min(saved_bytes, float(servers.load[giver]) / rule.least_score) if rule.least_score else saved_bytes
    for piece in servers.pieces[giver]:
        keys = servers.missing(taker, servers.seq(piece), servers.shards.key_stop(piece)) - servers.freed(giver, piece)
        costs_bytes += servers.shards.num_queries(piece) * sizes.query + keys * sizes.kv
        if costs_bytes >= most_bytes or not servers.allows(taker, piece):
            return False
    return True


# Servers with most headroom that are tried as givers; and how many if none of the first ones can.
_GIVERS, _MOST_GIVERS = 2, 32


def _shed_light_work(servers: Servers, limit: float, block: float, source: int) -> bool:
    """Move light work off a server so that a block of `block` seconds, on `source`, fits it;
    whether any moved.

    Another server with headroom takes the work, or the source in exchange for the block. Where no
    server can shed enough at once, one sheds as much as another can take.
    """
    load = servers.load
    by_headroom = _with_least_load(servers, _MOST_GIVERS)
    # Of the source, once it has given the block away.
    headroom_of = {source: block - float(load[source]) + limit}
    best: tuple[float, Piece, int, int, int, int] | None = None
    for looked_at, (giver, taker) in enumerate(_givers_and_takers(by_headroom)):
        if best is not None and looked_at >= _GIVERS:
            break
        headroom_of[taker] = limit - float(load[taker])
        need = block - (limit - float(load[giver]))
        takers = [(to, headroom_of[to]) for to in (taker, source) if to != giver and need <= headroom_of[to]]
        if not takers and looked_at:
            # The next ones have less headroom, and the same takers.
            break
        if not 0 < need < block:
            continue
        for bound, piece in _cheapest_first(servers, giver, need, takers) if takers else ():
            if best is not None and bound >= best[0]:
                break
            for costs, low, high, to in _light_parts(servers, piece, need, takers):
                if best is None or costs < best[0]:
                    best = (costs, piece, low, high, giver, to)
    if best is None:
        return _shed_most(servers, limit, by_headroom)
    servers.move(*best[1:])
    return True


def _givers_and_takers(by_headroom: Sequence[int]) -> Iterator[tuple[int, int]]:
    for giver in by_headroom[: len(by_headroom) if len(by_headroom) > 1 else 0]:
        yield giver, by_headroom[giver == by_headroom[0]]


def _with_least_load(servers: Servers, count: int) -> list[int]:
    load = servers.load
    if count < len(load):
        some = np.sort(np.argpartition(load, count)[:count])
        return some[np.argsort(load[some], kind="stable")].tolist()
    return np.argsort(load, kind="stable").tolist()


def _cheapest_first(
    servers: Servers, giver: int, need: float, takers: Sequence[tuple[int, float]]
) -> list[tuple[float, Piece]]:
    """The giver's pieces of at least `need` seconds, behind a lower bound on a part's bytes."""
    pieces: list[tuple[float, Piece]] = []
    for piece in servers.pieces[giver]:
        if servers.seconds(piece) >= need:
            unknown = not any(servers.seq(piece) in servers.reach[taker] for taker, _ in takers)
            pieces.append((servers.shards.least_bytes(piece, need, keys=unknown), piece))
    return sorted(pieces)


def _light_parts(
    servers: Servers, piece: Piece, need: float, takers: Sequence[tuple[int, float]]
) -> Iterator[tuple[float, int, int, int]]:
    """For each taker the cheapest part of at least `need` seconds that fits its headroom."""
    parts = low, stop, moved = at_least(servers.shards, piece, need)
    least = float(moved[moved.argmin()])
    for taker, headroom in takers:
        if least <= headroom:
            costs = servers.num_bytes(piece, parts, taker)
            costs[moved > headroom] = inf
            best = int(costs.argmin())
            bounds = int(low[best]), stop + best
            if servers.allows(taker, (piece[0], *bounds)):
                yield float(costs[best]), *bounds, taker


def _shed_most(servers: Servers, limit: float, by_headroom: Sequence[int]) -> bool:
    """Move as much as another server can take, where that leaves more headroom than any server has."""
    best: tuple[float, Piece, int, int, int, int] | None = None
    least_load = float(servers.load[by_headroom[0]])
    for looked_at, (giver, taker) in enumerate(_givers_and_takers(by_headroom)):
        if best is not None and looked_at >= _GIVERS:
            break
        headroom = (limit - float(servers.load[taker])) * (1 + _ROUNDING)
        for piece in servers.pieces[giver]:
            seconds, low, high = servers.seconds(piece), piece[1], piece[2]
            if seconds > headroom:
                if servers.shards.lightest(piece) > headroom:
                    continue
                starts, stop, moved = at_most(servers.shards, piece, headroom)
                most = int(moved.argmax())
                seconds, low, high = float(moved[most]), int(starts[most]), stop + most
            more = float(servers.load[giver]) - seconds < least_load - _ROUNDING * headroom
            if more and (best is None or seconds > best[0]) and servers.allows(taker, (piece[0], low, high)):
                best = (seconds, piece, low, high, giver, taker)
    if best is None:
        return False
    servers.move(*best[1:])
    return True

"""Communication-aware greedy scheduling (DistCA, section 4.2): surplus servers give shards to those
with headroom.

Headroom: seconds of attention that a server may still take before it reaches the limit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.ir.arrays import Ints
from megatron_balance.planners.distca.parts import Parts, at_hand, at_least, at_most, num_bytes
from megatron_balance.planners.distca.servers import Servers
from megatron_balance.planners.distca.shards import Items, Piece, TaskSizes
from megatron_balance.planners.distca.shedding import shed_light_work

_ROUNDING = 1e-9
"""Differences below this share of the mean load are none."""

_RAISE, _MOST_RAISE = 0.001, 0.005
"""Share by which the limit gives way where no cut at whole blocks fits under it; doubled each time,
up to the most.
"""

_SPARE = 0.25
"""Share of the tolerance that a cut may leave unused of a server's headroom, or take off a source
in vain, for fewer bytes.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of the greedy search.

    `least_score`: seconds of attention per byte from which a migration is worth it.
    """

    limit: float
    tolerance: float
    sizes: TaskSizes
    least_score: float


class _Columns:
    """Arrays with a row for each piece of the servers above the limit, and some rows to spare.

    `wanted`: seconds of the piece, or its server's surplus if that is less. `block`: seconds of the
    lightest block that can be cut from it; infinite once its server is not above the limit.
    `least_keys`: where there are caps, the fewest keys that any part of it needs. `seq`: the number
    of its sequence, of those in `seqs`. What a row without a piece says has no effect.
    """

    def __init__(self, items: Items, size: int) -> None:
        self.items = items
        self.values = np.ones((3, size))
        self.wanted, self.block, self.least_keys = self.values
        self.block[:] = inf
        self.seq: Ints = np.zeros(size, dtype=np.int64)
        self.seqs: dict[int, int] = {}
        self._fitting = 0
        self.taken, self._resident = np.empty((2, size))
        self.fits = np.empty(size, dtype=bool)

    def only(self, rows: Ints, size: int) -> _Columns:
        """A copy of some rows, in this order."""
        columns = _Columns(self.items.only(rows, size), size)
        columns.values[:, : len(rows)] = self.values[:, rows]
        columns.seqs, columns.seq[: len(rows)] = self.seqs, self.seq[rows]
        return columns

    def fitting(self, headroom: float) -> int:
        """A row whose block fits the headroom; if there is none, the one with the lightest block."""
        if self.block[self._fitting] > headroom:
            self._fitting = int(self.block.argmin())
        return self._fitting

    def at_hand(self, reach: Mapping[int, int]) -> Floats:
        """Number of first keys of each row's sequence that are there.

        The result holds until the next call and may be written to.
        """
        keys = np.zeros(len(self.seqs))
        for seq, count in reach.items():
            keys[self.seqs[seq]] = count
        return keys.take(self.seq, out=self._resident, mode="clip")


class Drain:
    """Migration from the servers above the limit.

    `capped`: servers that a cap keeps from taking what would be best.
    """

    def __init__(self, servers: Servers, rule: Rule) -> None:
        self.servers, self.rule, self.limit = servers, rule, rule.limit
        self.mean = float(servers.load.mean())
        self._query_size = rule.sizes.query / rule.sizes.kv
        self._least_score = rule.least_score * rule.sizes.kv
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
        """Leave out the rows that no longer count."""
        rows = np.flatnonzero(self.columns.block < inf)
        self.columns = self.columns.only(rows, _rows(len(rows)))
        self.rows = [self.rows[row] for row in rows.tolist()]
        self.rows_of.clear()
        for row, (server, _) in enumerate(self.rows):
            self.rows_of[server].append(row)
        self.most_servers = len(self.rows_of)

    def _set(self, row: int) -> None:
        """Fill a row."""
        servers, columns = self.servers, self.columns
        server, piece = self.rows[row]
        seconds = servers.seconds(piece)
        columns.items.set(row, servers.shards.bounds(piece), seconds)
        columns.wanted[row] = min(seconds, float(servers.load[server]) - self.limit)
        columns.block[row] = servers.shards.lightest(piece)
        if servers.counted:
            columns.least_keys[row] = servers.shards.least_keys(piece)
        columns.seq[row] = columns.seqs.setdefault(servers.seq(piece), len(columns.seqs))

    def _update(self, server: int) -> None:
        """Update the rows of a server to how far it is above the limit now."""
        surplus = float(self.servers.load[server]) - self.limit
        if surplus <= _ROUNDING * self.mean:
            self.columns.block[self.rows_of.pop(server, [])] = inf
            if 2 * len(self.rows_of) < self.most_servers:
                self._compact()
            return
        for row in self.rows_of[server]:
            self.columns.wanted[row] = min(self.servers.seconds(self.rows[row][1]), surplus)

    def run(self) -> None:
        """Migrate until no server is above the limit.

        Where no whole block fits under it, a server sheds light work; for about an eighth of the
        servers, and again if that was of any use. Then the limit gives way.
        """
        load = self.servers.load
        closed: set[int] = set()  # they have headroom, but for nothing that is worth it
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
            if times_shed < most_times_shed and shed_light_work(
                self.servers, self.limit, block, source, self.rule.sizes
            ):
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
        """Migrate the best part of the best item to a server with headroom.

        Returns False if none is worth it.
        """
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
        """Score of each row: seconds that migrate for each key's worth of bytes, at best; 0 where
        no block fits the headroom.
        """
        columns, reach = self.columns, self.servers.reach[target]
        seconds = np.minimum(columns.wanted, headroom, out=columns.taken)
        known = columns.seqs.keys() & reach.keys()
        if known:
            resident = columns.at_hand({seq: reach[seq] for seq in known})
            queries, key_stop = columns.items.cheapest(seconds, resident)
            keys = np.subtract(key_stop, np.minimum(key_stop, resident, out=resident), out=resident)
            for seq in known:
                for _, stop in self.servers.held(target, seq):
                    if stop > reach[seq]:
                        rows = columns.seq == columns.seqs[seq]
                        keys[rows] = key_stop[rows] - at_hand(self.servers, target, seq, key_stop[rows])
        else:
            queries, keys = columns.items.cheapest(seconds)
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
        """Bounds of the part of a piece at whole blocks that fills the headroom, or takes the
        surplus, most tightly for few bytes.
        """
        if min(surplus, headroom) >= self.servers.seconds(piece) * (1 - _ROUNDING):
            return piece[1], piece[2]
        parts, wasted, allowed = self._parts(piece, surplus, headroom)
        low, stop, _ = parts
        if len(low) == 1:
            return int(low[0]), stop
        costs = num_bytes(self.servers, piece, parts, target, self.rule.sizes)
        costs[wasted > allowed] = inf
        best = int(costs.argmin())
        return int(low[best]), stop + best

    def _parts(self, piece: Piece, surplus: float, headroom: float) -> tuple[Parts, Floats, float]:
        """The parts to choose from, the seconds that each takes too much or leaves unused, and how
        many are allowed.
        """
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
    """The server with the least load that is not closed; if all are, one of them."""
    if not closed:
        return int(load.argmin())
    left = load.copy()
    left[list(closed)] = inf
    return int(left.argmin())


def _rows(pieces: int) -> int:
    """Rows to make for a number of pieces: some more, as a cut from the middle of a piece leaves
    two.
    """
    return pieces + pieces // 4 + 8

"""Waves: all sequences that are cut over groups of ranks, attended in one schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir import arrays
from megatron_balance.ir.arrays import Ints, Rectangles, as_array, as_rows, num_pairs, ranges, sums, union
from megatron_balance.ir.arrays import key as key_of
from megatron_balance.ir.columns import Message, Pair, Placed, Value
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import CAUSAL, FOREST, MASKS, Mask
from megatron_balance.ir.plan import SharedZone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns import base, head_exchange
from megatron_balance.patterns.dispatch import ListedPattern
from megatron_balance.patterns.sends import Blocks, Call, Send, Sends, intersections, table_of

# Keys are divided between waves at multiples of a kernel's tile.
ALIGN = 128


class Need:
    """Columns of a table of what groups need: keys and values of one sequence, the wave they come
    in, and the groups, counted among those that hold anything, that need (`TO`) and hold them.
    """

    WIDTH = 6
    WAVE, TO, SEQ, START, STOP, FROM = range(6)
    SPAN = slice(2, 5)


# A ring (`patterns.head_ring`) works through one zone after another, and every
# rank of a zone holds an equal share of its sequences. Here a sequence is cut anywhere, over any
# groups (`ir.plan.SharedZone`), and all that a group attends, of whatever sequence, is one program:
#
# 1. An all-to-all gives every rank of a group all tokens of the group with a slice of the heads
#    (`patterns.head_exchange`). Groups of one rank need none.
# 2. Own work: a group's queries over the keys that it holds itself. With a `lead` it is in two parts,
#    each with an all-to-all of its own: the first tokens of the longest sequences, which are attended
#    while the all-to-all of all others is under way. In the backward the gradients of these others go
#    home behind that first part, which comes last there.
# 3. Waves: the keys of other groups come in parts, all of a wave in one exchange, each straight from
#    the rank of the same place in the group that holds them. A launch and a merge follow.
# 4. Outputs go back to the ranks that hold the tokens.
#
# A wave brings the same part of what every group needs of every other one. So no wave has a busier
# source than all of them together; were a wave to bring all keys of some sources, groups would wait
# in rows for the same ones, whatever the order. Keys of a wave are sent while the one before is
# attended (`compile.order`), and an exchange stands right before its first use, so that the
# gradients of the backward, which is the transpose, go home wave by wave behind the launches.
#
# Nothing but keys, values and their gradients crosses between groups, each once for every group
# that needs it; queries and outputs stay in their group. Keys leave for other groups behind both
# all-to-alls. Masks are causal or full, or of trees: then a group is sent the keys that it sees, and
# a wave is the same part of all that one group needs of another. A lead takes a causal one: then the
# first tokens that a group has of a sequence need none of its later ones, and no launch is cut into
# two that must be merged.
@dataclass(frozen=True, slots=True)
class Schedule:
    """A zone's groups and waves.

    `groups`: ids of the groups that hold anything, ascending. `runs` [groups][group size]: rows (seq,
    start, stop) of each rank; `parts`: the same of what the first all-to-all brings, and of what the
    second one does, if there are two; `tokens` [parts, groups, group size]: how many these are.
    `needs`: `Need` rows by wave. `tasks`: by group and launch, rows (seq, q_start, q_stop, k_start,
    k_stop); as many launches of own work as there are parts, then one behind each wave.
    """

    size: int
    groups: tuple[int, ...]
    runs: tuple[tuple[Ints, ...], ...]
    parts: tuple[tuple[tuple[Ints, ...], ...], ...]
    tokens: Ints
    needs: Ints
    tasks: tuple[tuple[Ints, ...], ...]

    @property
    def num_waves(self) -> int:
        return len(self.tasks[0]) - len(self.parts) if self.tasks else 0

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def trades(self) -> int:
        # Number of the first all-to-alls, of all groups and parts; their ids are part by part.
        return len(self.parts) * self.num_groups if self.size > 1 else 0

    @property
    def last(self) -> int:
        return self.trades + self.num_waves

    def ranks(self, index: int) -> tuple[int, ...]:
        # Ranks of the group number `index` of `groups`.
        first = self.groups[index] * self.size
        return tuple(range(first, first + self.size))

    def all_ranks(self) -> Ints:
        # Ranks of every group: int64 [groups, group size].
        return np.array(self.groups, dtype=np.int64)[:, None] * self.size + np.arange(self.size)

    def place_of(self, rank: int) -> tuple[int, int]:
        # (number of its group, place in it) of a rank.
        group, place = divmod(rank, self.size)
        return self.groups.index(group), place

    def run_tokens(self) -> Ints:
        # Tokens of each rank: int64 [groups, group size].
        return self.tokens.sum(axis=0)

    # Blocks: what each rank holds of each part, of all parts if there are two, and every need

    @property
    def num_runs(self) -> int:
        return self.num_groups * self.size * (3 if len(self.parts) > 1 else 1)

    def block_tokens(self) -> Ints:
        whole = [self.run_tokens().ravel()] if len(self.parts) > 1 else []
        return np.concatenate([self.tokens.ravel(), *whole, self.needs[:, Need.STOP] - self.needs[:, Need.START]])

    def blocks(self, index: int | None = None) -> Blocks:
        # Rows of every block, of runs only those of the group number `index` if there is one.
        parts = (*self.parts, self.runs) if len(self.parts) > 1 else self.parts
        counts = np.zeros((len(parts), self.num_groups, self.size), dtype=np.int64)
        rows: list[Ints] = []
        for at, part in enumerate(parts):
            for group in range(self.num_groups) if index is None else (index,):
                counts[at, group] = [len(run) for run in part[group]]
                rows += part[group]
        sizes = np.append(counts.ravel(), np.ones(len(self.needs), dtype=np.int64))
        begin = np.append(0, np.cumsum(sizes))
        return Blocks(np.concatenate([*rows, self.needs[:, Need.SPAN]]), begin)


@lru_cache(maxsize=64)
def schedule(zone: SharedZone, mask: Mask = CAUSAL) -> Schedule:
    """The schedule of a zone, which follows from its fragments and the mask; how many exchanges it
    has, from the fragments alone. Raises InvalidProgramError: groups of no rank, or no wave; a lead
    under a mask that is not causal.
    """
    size = zone.group_size
    if size < 1 or zone.waves < 1 or zone.lead < 0:
        raise InvalidProgramError(
            f"zone {zone.name}: groups of {size} ranks, {zone.waves} waves and a lead of {zone.lead} tokens; expected "
            "one or more of each, and a lead of 0 or more"
        )
    if zone.lead and mask != CAUSAL:
        raise InvalidProgramError(f"zone {zone.name}: a lead of {zone.lead} tokens under mask {mask.name}; expected 0")
    placed = as_array(zone.fragments)
    of_group = placed.copy()
    of_group[:, Placed.RANK] //= size
    held = union(of_group)
    groups, index = np.unique(held[:, Placed.RANK], return_inverse=True)
    held[:, Placed.RANK] = index.reshape(-1)
    placed = placed[np.argsort(placed[:, Placed.RANK], kind="stable")]
    of_group = np.searchsorted(groups, placed[:, Placed.RANK] // size)
    needs, num_waves = _needs(held, len(groups), zone.waves, mask)
    if isinstance(mask, Forest):
        needs = _seen_needs(held, len(groups), num_waves, mask)
    first = groups[:, None] * size + np.arange(size)
    runs = _by_rank(placed, first)
    if zone.lead and size > 1:
        cuts = lead_cuts(held, len(groups), zone.lead)
        halves = [side_of(placed, cuts[of_group, placed[:, Placed.SEQ]], ahead=ahead) for ahead in (True, False)]
        cut = cuts[held[:, Placed.RANK], held[:, Placed.SEQ]]
        held_in = [side_of(held, cut, ahead=ahead) for ahead in (True, False)]
        parts = tuple(_by_rank(rows, first) for rows in halves)
    else:
        parts, halves, held_in = (runs,), [placed], [held]
    num_ranks = (int(groups.max(initial=-1)) + 1) * size
    tokens = [sums(rows[:, Placed.RANK], rows[:, Placed.STOP] - rows[:, Placed.START], num_ranks) for rows in halves]
    tasks = _tasks(held_in, needs, len(groups), num_waves, mask)
    return Schedule(size, tuple(groups.tolist()), runs, parts, np.array(tokens)[:, first], needs, tasks)


def _by_rank(placed: Ints, ranks: Ints) -> tuple[tuple[Ints, ...], ...]:
    # Rows (seq, start, stop) of each of `ranks` [groups, group size]; `placed`: by rank.
    bounds = np.searchsorted(placed[:, Placed.RANK], [ranks, ranks + 1])
    rows = placed[:, Placed.FRAGMENT]
    return tuple(
        tuple(rows[a:b] for a, b in zip(starts, stops, strict=True))
        for starts, stops in zip(*bounds.tolist(), strict=True)
    )


def side_of(rows: Ints, cut: Ints, *, ahead: bool) -> Ints:
    """Rows (..., start, stop) up to `cut` [n], those `ahead` of it, or from there on."""
    own = rows.copy()
    if ahead:
        own[:, Placed.STOP] = np.minimum(own[:, Placed.STOP], cut)
    else:
        own[:, Placed.START] = np.maximum(own[:, Placed.START], cut)
    return own[own[:, Placed.START] < own[:, Placed.STOP]]


def lead_cuts(rows: Ints, num_groups: int, lead: int) -> Ints:
    """Up to which token each group has each sequence in its first part: int64 [groups, seqs].

    `rows`: (group, seq, start, stop), joined. The first part has the first row of the longest
    ones, `lead` tokens of a group altogether, the last of them cut at a multiple of a kernel's tile.
    """
    rows = rows[np.lexsort((rows[:, Placed.START], rows[:, Placed.SEQ], rows[:, Placed.RANK]))]
    before = rows[:-1, [Placed.RANK, Placed.SEQ]]
    first = rows[np.concatenate([[True], (rows[1:, [Placed.RANK, Placed.SEQ]] != before).any(axis=1)])[: len(rows)]]
    length = first[:, Placed.STOP] - first[:, Placed.START]
    order = np.lexsort((first[:, Placed.SEQ], -length, first[:, Placed.RANK]))
    first, length = first[order], length[order]
    group = first[:, Placed.RANK]
    so_far = np.cumsum(length) - length
    so_far -= so_far[np.searchsorted(group, group)]
    taken = np.clip(lead - so_far, 0, length)
    taken = np.where((taken < length) & (taken > ALIGN), taken // ALIGN * ALIGN, taken)
    cuts = np.zeros((num_groups, int(rows[:, Placed.SEQ].max(initial=-1)) + 1), dtype=np.int64)
    cuts[group, first[:, Placed.SEQ]] = np.where(taken > 0, first[:, Placed.START] + taken, 0)
    return cuts


def _needs(held: Ints, num_groups: int, num_waves: int, mask: Mask) -> tuple[Ints, int]:
    # `Need` rows by wave, and the number of waves in which anything would come under a full mask;
    # `held`: rows (group, seq, start, stop) of disjoint tokens.
    held = held[np.lexsort((held[:, Placed.START], held[:, Placed.SEQ]))]
    columns = (Placed.RANK, Placed.SEQ, Placed.START, Placed.STOP)
    group, seq, start, stop = (np.asarray(held[:, column], dtype=np.int64) for column in columns)
    # Of every run of queries, the runs of keys of its sequence in other groups, each once a group.
    first, behind = np.searchsorted(seq, seq), np.searchsorted(seq, seq, side="right")
    query, key = ranges(first, behind)
    other = group[query] != group[key]
    needed, inverse = np.unique(group[query[other]] * len(held) + key[other], return_inverse=True)
    to, key = np.divmod(needed, len(held))
    last = np.zeros(len(needed), dtype=np.int64)  # of the group's own runs
    np.maximum.at(last, inverse.reshape(-1), query[other])
    # The nearest next group first, so that messages leave in another order in each group.
    order = np.lexsort((start[key], seq[key], (group[key] - to) % num_groups, to))
    to, key, last = to[order], key[order], last[order]
    edges = _wave_edges((stop - start)[key], num_waves)
    rows = np.empty((num_waves, len(key), Need.WIDTH), dtype=np.int64)
    # Every second run begins with its end, so that neighbours meet and are one piece of keys.
    turned = (key - first[key]) % 2 == 0
    rows[:, :, Need.WAVE] = np.where(turned, np.arange(num_waves)[::-1, None], np.arange(num_waves)[:, None])
    rows[:, :, Need.TO], rows[:, :, Need.SEQ], rows[:, :, Need.FROM] = to, seq[key], group[key]
    rows[:, :, Need.START], rows[:, :, Need.STOP] = start[key] + edges[:, :-1].T, start[key] + edges[:, 1:].T
    filled = rows[:, :, Need.START] < rows[:, :, Need.STOP]
    waves = int(rows[:, :, Need.WAVE].max(initial=-1, where=filled)) + 1
    rows = rows[filled & (key < last)] if mask == CAUSAL else rows[filled]
    return rows[np.argsort(rows[:, Need.WAVE], kind="stable")], waves


def _wave_edges(tokens: Ints, num_waves: int) -> Ints:
    # Where so many `tokens` [n] are cut into waves [n, waves + 1].
    edges = tokens[:, None] * np.arange(num_waves + 1) // num_waves
    edges[:, 1:-1] = np.where(tokens[:, None] >= 2 * ALIGN * num_waves, edges[:, 1:-1] // ALIGN * ALIGN, edges[:, 1:-1])
    return edges


def _seen_needs(held: Ints, num_groups: int, num_waves: int, mask: Forest) -> Ints:
    # As `_needs`: of trees the keys that a group's queries see. All that goes from one group to
    # another is one line of tokens, which is cut into the waves.
    first, stop = arrays.keys_of(held[:, Placed.SEQ], held[:, Placed.START], held[:, Placed.STOP], mask)
    cells = arrays.split_rows(np.column_stack([held, first, stop]), Placed.SEQ, range(2, 6), mask)
    seen = union(cells[:, [Placed.RANK, Placed.SEQ, 4, 5]])
    need, source, both = intersections(seen[:, Placed.FRAGMENT], held[:, Placed.FRAGMENT])
    ends = np.column_stack([seen[need, Placed.RANK], held[source, Placed.RANK]])
    away = ends[:, 0] != ends[:, 1]
    (to, source), both = ends[away].T, both[away]
    order = np.lexsort((both[:, 1], both[:, 0], (source - to) % num_groups, to))
    to, source, both = to[order], source[order], both[order]
    length, flow = both[:, 2] - both[:, 1], to * num_groups + source
    _, begins, which = np.unique(flow, return_index=True, return_inverse=True)
    so_far = np.cumsum(length) - length
    so_far -= so_far[begins][which]
    edges = _wave_edges(sums(which, length, len(begins)), num_waves)[which]
    tables = [np.empty((0, Need.WIDTH), dtype=np.int64)]
    for wave in range(num_waves):
        begin, end = (np.clip(edges[:, wave + side] - so_far, 0, length) for side in (0, 1))
        columns = np.full(len(to), wave), to, both[:, 0], both[:, 1] + begin, both[:, 1] + end, source
        tables.append(np.column_stack(columns)[begin < end])
    return np.concatenate(tables)


def _tasks(
    held_in: Sequence[Ints], needs: Ints, num_groups: int, num_waves: int, mask: Mask
) -> tuple[tuple[Ints, ...], ...]:
    # Tasks by group and launch, as in `Schedule`; `held_in`: rows (group, seq, start, stop) of each
    # part, ascending.
    queries = np.concatenate(held_in)
    queries = queries[np.argsort(queries[:, Placed.RANK], kind="stable")]
    num_seqs = int(queries[:, Placed.SEQ].max(initial=-1)) + 1
    known = np.unique(queries[:, Placed.RANK] * num_seqs + queries[:, Placed.SEQ])

    def number(group: Ints, seq: Ints) -> Ints:
        return np.searchsorted(known, group * num_seqs + seq)

    launches: list[list[Ints]] = []
    for at, own in enumerate(held_in):
        keys = np.concatenate(held_in[: at + 1])
        of_query, of_key = (number(rows[:, Placed.RANK], rows[:, Placed.SEQ]) for rows in (own, keys))
        launches.append(_split(own, *_seen(own, of_query, keys, of_key, mask), np.arange(num_groups), mask))
    come = union(needs[:, [Need.WAVE, Need.TO, Need.SEQ, Need.START, Need.STOP]])
    of_query = number(queries[:, Placed.RANK], queries[:, Placed.SEQ])
    of_query = (np.arange(num_waves)[:, None] * len(known) + of_query).ravel()
    of_key = come[:, 0] * len(known) + number(come[:, 1], come[:, 2])
    every = np.tile(queries, (num_waves, 1))
    every[:, Placed.RANK] += np.repeat(np.arange(num_waves) * num_groups, len(queries))
    of_waves = np.arange(num_waves * num_groups)
    split = _split(every, *_seen(every, of_query, come[:, 1:], of_key, mask), of_waves, mask)
    launches += [split[wave * num_groups : (wave + 1) * num_groups] for wave in range(num_waves)]
    return tuple(zip(*launches, strict=True))


def _seen(queries: Ints, of_query: Ints, keys: Ints, of_key: Ints, mask: Mask) -> tuple[Ints, Ints]:
    # Numbers of queries, and spans of keys [n, 2] that have the same number (`of_query`, `of_key`)
    # and under a causal mask begin no later. Rows (group, seq, start, stop); keys of one number are
    # disjoint.
    order = np.lexsort((keys[:, Placed.START], of_key))
    starts, spans = key_of(of_key, keys[:, Placed.START])[order], keys[order, Placed.START :]
    begin = np.searchsorted(starts, key_of(of_query, 0))
    stop = key_of(of_query, queries[:, Placed.START]) + 1 if mask == CAUSAL else key_of(of_query + 1, 0)
    end = np.searchsorted(starts, stop)
    query, key = ranges(begin, end)
    return query, spans[key]


def _split(queries: Ints, query: Ints, spans: Ints, groups: Ints, mask: Mask) -> list[Ints]:
    # Rows (seq, q_start, q_stop, k_start, k_stop) of each of `groups`, by which `queries` ascend; of
    # trees cells.
    rows = np.concatenate([queries[query], spans], axis=1)
    rows = arrays.split_rows(rows, Placed.SEQ, range(2, 6), mask) if isinstance(mask, Forest) else rows
    bounds = np.searchsorted(rows[:, Placed.RANK], [groups, groups + 1]).tolist()
    return [rows[a:b, Placed.SEQ :] for a, b in zip(*bounds, strict=True)]


class _WavesPattern(ListedPattern[SharedZone]):
    """An all-to-all inside each group, own work, waves of other groups' keys, an all-to-all back."""

    routing = "never"
    merges_remap = False
    traffic = base.WaveTraffic

    def ranks(self, zone: SharedZone, num_ranks: int) -> Sequence[int]:
        # All ranks of the groups that hold anything.
        del num_ranks
        size = max(1, zone.group_size)
        groups = np.unique(as_array(zone.fragments)[:, Placed.RANK] // size)
        return (groups[:, None] * size + np.arange(size)).ravel().tolist()

    def num_exchanges(self, zone: SharedZone) -> int:
        # All-to-alls of each group of several ranks there and back, and the waves.
        own = schedule(zone)
        return own.last + (own.num_groups if own.size > 1 else 0)

    def sends(self, zone: SharedZone, context: base.Context, rank: int | None = None, *, across: bool = False) -> Sends:
        # The all-to-alls of each group, inputs in one part or two, and between them the waves.
        made, among = schedule(zone, context.mask), context.crosses if across else None
        place, heads = None if rank is None else made.place_of(rank), _heads(made, context)
        num_runs, whole, again = made.num_groups * made.size, made.run_tokens(), None
        blocks = partial(made.blocks, None if place is None else place[0])
        first, last = [np.empty((0, Send.WIDTH), dtype=np.int64)], list[Ints]()
        calls: dict[int, Call] = {}
        if made.size > 1:
            trade = head_exchange.Trade(made.all_ranks(), heads, place, among)
            for at, tokens in enumerate(made.tokens):
                first.append(trade.inputs(at * made.num_groups, at * num_runs))
                calls |= trade.calls(at * made.num_groups, tokens)
            of_whole = (len(made.tokens) if len(made.tokens) > 1 else 0) * num_runs
            last.append(trade.outputs(made.last, of_whole))
            calls |= trade.calls(made.last, whole, moves=True)
            # A replayed backward begins where the forward ended: there it makes the first all-to-alls
            # as one, and nothing where the forward made them.
            again = Sends(trade.inputs(made.last, of_whole), made.block_tokens, blocks, trade.calls(made.last, whole))
        waves = self._waves(made, heads, place)
        if among is not None:
            waves = waves[among(waves[:, Send.SRC], waves[:, Send.DST])]
        rows = np.concatenate([*first, waves, *last])
        return Sends(rows, made.block_tokens, blocks, calls, again, range(made.trades))

    def _waves(self, made: Schedule, heads: head_exchange.HeadShares, place: tuple[int, int] | None) -> Ints:
        # Keys from rank to rank, wave by wave; `place`: of the rank that is asked for.
        block, needs = np.arange(len(made.needs)) + made.num_runs, made.needs
        if place is not None:
            own = (needs[:, [Need.FROM, Need.TO]] == place[0]).any(axis=1)
            block, needs = block[own], needs[own]
        tables = [np.empty((0, Send.WIDTH), dtype=np.int64)]
        for at in np.flatnonzero(heads.attends).tolist():
            if place is None or place[1] == at:
                first = np.array(made.groups, dtype=np.int64) * made.size + at
                ends = first[needs[:, Need.FROM]], first[needs[:, Need.TO]]
                number = made.trades + needs[:, Need.WAVE]
                tables.append(table_of(number, *ends, Kind.KV, heads.kv_start[at], heads.kv_stop[at], block, 0))
        return np.concatenate(tables)

    def work(self, zone: SharedZone, context: base.Context, rank: int) -> Iterable[base.ZoneWork]:
        # Own work, then a launch and a merge behind each wave.
        if context.mask.name not in (*MASKS, FOREST):
            raise InvalidProgramError(
                f"zone {zone.name}: waves attend causally, fully or along paths, the plan's mask is {context.mask.name}"
            )
        made = schedule(zone, context.mask)
        index, place = made.place_of(rank)
        own, num_parts = _heads(made, context).slices[place], len(made.parts)
        for launch, tasks in enumerate(made.tasks[index] if own else ()):
            wave, pairs = launch - num_parts, as_rows(base.pairs_of(tasks[:, :3], tasks[:, 3:], own))
            if wave < 0:
                yield base.ZoneWork((launch + 1) * made.trades // num_parts, pairs)
                continue
            queries = np.unique(tasks[:, :3], axis=0)
            values = np.empty((len(queries), Value.WIDTH), dtype=np.int64)
            values[:, Value.KIND], values[:, Value.SPAN] = Kind.OUT, queries
            values[:, Value.HEAD_START], values[:, Value.HEAD_STOP] = own[0].head_start, own[-1].head_stop
            yield base.ZoneWork(made.trades + wave + 1, pairs, as_rows(values))

    # Plan statistics and traffic between nodes

    def attended(self, zones: Sequence[SharedZone], context: base.Context) -> Ints:
        # Each rank attends all pairs of its group with its share of the heads.
        attended = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            made = schedule(zone, context.mask)
            tasks = [np.concatenate(own) for own in made.tasks]
            pairs = [int(num_pairs(rows[:, 0], Rectangles(*rows.T[1:]), context.mask).sum()) for rows in tasks]
            attended[made.all_ranks()] += _heads(made, context).pairs(np.array(pairs))
        return attended

    # Closed forms of what the table of sends says, which planning asks for often

    def receive(self, load: base.Load, zone: SharedZone, context: base.Context) -> None:
        # Add what the all-to-alls and all waves bring.
        made = schedule(zone, context.mask)
        heads, needs, ranks = _heads(made, context), made.needs, made.all_ranks()
        if made.size > 1:
            heads.bring(load, ranks, made.run_tokens())
        come = sums(needs[:, Need.TO], needs[:, Need.STOP] - needs[:, Need.START], made.num_groups)
        load.bring(Kind.KV, ranks, come[:, None] * heads.attends, heads.keys)

    def largest_exchange(self, zone: SharedZone, context: base.Context) -> Ints:
        # Keys and values of the others of a group, in the larger part, or those of the largest
        # wave, with the heads of a rank.
        made = schedule(zone, context.mask)
        needs, shape = made.needs, (max(1, made.num_waves), made.num_groups)
        others = (made.tokens.sum(axis=2, keepdims=True) - made.tokens).max(axis=0)
        place = needs[:, Need.WAVE] * made.num_groups + needs[:, Need.TO]
        come = sums(place, needs[:, Need.STOP] - needs[:, Need.START], shape[0] * shape[1]).reshape(shape)
        return (np.maximum(others, come.max(axis=0)[:, None]) * _heads(made, context).keys).ravel()

    # Starting early

    def startable(self, zone: SharedZone) -> base.Startable:
        # The first all-to-alls, the gradients of what the last ones bring, and the replay of the
        # first in their place.
        made = schedule(zone)
        last = tuple(made.last + group for group in range(made.num_groups if made.size > 1 else 0))
        first = tuple(range(made.num_groups if made.size > 1 else 0))  # a launch may come before others
        return base.Startable(forward=first, gradients=last, replays=last)

    # Simulation

    def rounds(self, zone: SharedZone, context: base.Context) -> base.ZoneRounds:
        # Own launches and those of the waves; the all-to-alls of each group, and the messages of
        # each wave.
        made = schedule(zone, context.mask)
        heads = _heads(made, context)
        rows = Sends(self._waves(made, heads, None), made.block_tokens, made.blocks).messages()
        waves = tuple(rows[rows[:, Message.EXCHANGE] == made.trades + wave] for wave in range(made.num_waves))
        inside = heads.traffic(made.run_tokens()) if made.size > 1 else []
        late: list[base.GroupTraffic] = []
        if inside and len(made.parts) > 1:  # outputs of all tokens, inputs in two parts
            first, late = map(heads.traffic, made.tokens)
            inside = [replace(each, inputs=part.inputs) for each, part in zip(inside, first, strict=True)]
            late = [replace(each, outputs={}) for each in late]
        ranks = made.all_ranks().ravel()
        return base.ZoneRounds(ranks, _launches(made, heads), base.WaveTraffic(tuple(inside), waves, tuple(late)))


def _heads(made: Schedule, context: base.Context) -> head_exchange.HeadShares:
    return head_exchange.HeadShares.of(*context.heads, made.size)


def _launches(made: Schedule, heads: head_exchange.HeadShares) -> base.Launches:
    # Launches of all groups, own and by wave; those of places with as many heads are alike.
    alike, place = np.unique(np.stack([heads.queries, heads.keys], axis=1), axis=0, return_inverse=True)
    rounds = len(made.parts) + made.num_waves
    pairs: list[Ints] = [np.empty((0, Pair.WIDTH), dtype=np.int64)]
    launch: list[Ints] = [np.empty(0, dtype=np.int64)]
    shape = (len(made.groups), len(alike), rounds)
    for index, tasks in enumerate(made.tasks):
        for kind, (queries, keys) in enumerate(alike.tolist()):
            for at, rows in enumerate(tasks if queries else ()):
                pairs.append(base.pairs_of(rows[:, :3], rows[:, 3:], [(0, queries, 0, keys)]))
                number = int(np.ravel_multi_index((index, kind, at), shape))
                launch.append(np.full(len(rows), number, dtype=np.int64))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    merging = np.zeros(shape)
    merging[:, :, len(made.parts) :] = 1.0
    of_round = numbers[:, place.reshape(-1)].reshape(-1, rounds)
    return base.Launches(np.concatenate(pairs), np.concatenate(launch), merging.ravel(), of_round)


WAVES = _WavesPattern()

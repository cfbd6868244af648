"""The protocol of a comm pattern: everything that the rest of the package asks of a zone.

A pattern is one class in one file, with one line in `patterns.PATTERNS`. It must say which ranks
take part, where tokens lie (`place`), what ranks send one another (`num_exchanges`, `sends`), and
what one rank attends (`work`). All other questions have answers here that are selections of those;
a pattern overrides them where it knows a shorter way.
"""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Floats, Ints, Rectangles, as_array, keys_of, num_pairs, split_rows, sums
from megatron_balance.ir.columns import Fragment, Held, Message, Pair, RemoteHeld, Rows, Transfer, Value
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.ir.program import Attend, Collective, Exchange, Kind, Merge, Op
from megatron_balance.patterns.sends import Sends, intersections, messages_of


# `zone` may be any type that names its pattern: nothing here looks inside but the pattern itself.
class AnyZone(Protocol):
    """The part of a zone that does not depend on its pattern."""

    @property
    def name(self) -> str: ...
    @property
    def pattern(self) -> str: ...
    @property
    def seqs(self) -> tuple[int, ...]: ...


Z = TypeVar("Z", bound=AnyZone)

# Patterns that have programs of trees: that bring every rank all keys of its sequences, so that it
# attends whatever it sees; or those that its group sees.
_OF_TREES = ("all_gather", "gather_documents", "gather_sequence", "waves")

# A zone after its index in the plan.
ZoneAt: TypeAlias = tuple[int, Z]


@dataclass(frozen=True, slots=True)
class Context:
    """Facts of the microbatch around a zone.

    `lengths`: int64 [num_seqs]. For projections: `base` is the zone's first exchange id; `attends`:
    whether more than its exchanges is asked for; `replays`: whether the exchanges of a replayed
    backward are, where they differ from the forward's.
    """

    lengths: Ints
    num_heads: int
    num_kv_heads: int
    num_ranks: int
    ranks_per_node: int
    base: int = 0
    attends: bool = True
    replays: bool = True
    mask: Mask = CAUSAL

    @classmethod
    def of(cls, plan: MicrobatchPlan) -> "Context":
        """The context of a plan's zones; InvalidProgramError: a pattern has none for its mask."""
        if plan.mask.window_size or isinstance(plan.mask, Forest):
            able = () if plan.mask.window_size else _OF_TREES
            for zone in plan.zones:
                if not isinstance(zone, TaskTable) and zone.pattern not in able:
                    raise InvalidProgramError(
                        f"zone {zone.name}: comm pattern {zone.pattern} has no program under mask {plan.mask.name}; "
                        "expected task tables, which compile.halo makes of the zones of any plan"
                    )
        lengths = np.array(plan.lengths, dtype=np.int64)
        return cls(lengths, plan.num_heads, plan.num_kv_heads, plan.num_ranks, plan.ranks_per_node, mask=plan.mask)

    @property
    def heads(self) -> tuple[int, int]:
        """Numbers of query heads and of key-value heads."""
        return self.num_heads, self.num_kv_heads

    @property
    def all_heads(self) -> tuple[int, int, int, int]:
        """Query heads and key-value heads: start and stop each."""
        return 0, self.num_heads, 0, self.num_kv_heads

    def crosses(self, src: Ints, dst: Ints | int) -> Bools:
        """Whether transfers go from node to node."""
        return src // self.ranks_per_node != dst // self.ranks_per_node


@dataclass(frozen=True, slots=True)
class ZoneProgram:
    """One rank's ops of one zone and, for a replayed backward, exchanges by forward id."""

    ops: list[Op]
    replays: list[tuple[int, Exchange]] = field(default_factory=list[tuple[int, Exchange]])


class ZoneWork(NamedTuple):
    """Rows of a launch and of the merge behind it; exchanges numbered below `after` come before."""

    after: int
    pairs: Rows
    merges: Rows = Rows(Value.WIDTH)


@dataclass(frozen=True, slots=True)
class ZoneMessages:
    """Messages of one exchange of a zone: rows of `ir.columns.Message`, EXCHANGE counted from the
    zone's first.

    `collective` and `group` as in `ir.program.Exchange`. In an "all_gather" a row goes to all the
    others of `group`, and its DST is -1 (`each_pair` writes them out).
    """

    rows: Ints
    collective: Collective = "p2p"
    group: tuple[int, ...] = ()

    def each_pair(self) -> Ints:
        """The rows with one target each."""
        if self.collective != "all_gather":
            return self.rows
        size = len(self.group)
        rows = np.repeat(self.rows, size, axis=0)
        rows[:, Message.DST] = np.tile(self.group, len(self.rows))
        return rows[rows[:, Message.SRC] != rows[:, Message.DST]]


class Load:
    """Per rank, int64 [num_ranks], over the zones of a pattern: attention pairs, and what reaches a
    rank.

    `pairs`: visible pairs in units of all heads. `tokens` [kind]: tokens received, however many of
    their heads; `token_heads` [kind]: tokens times heads. Kinds: Q, KV, OUT.
    """

    def __init__(self, num_ranks: int) -> None:
        self.pairs = np.zeros(num_ranks, dtype=np.int64)
        self.tokens = np.zeros((len(Kind), num_ranks), dtype=np.int64)
        self.token_heads = np.zeros((len(Kind), num_ranks), dtype=np.int64)

    def bring(self, kind: Kind, ranks: Ints, num_tokens: Ints, heads: Ints | int) -> None:
        """Add tokens of one kind that reach distinct `ranks` with this number of their heads."""
        self.tokens[kind, ranks] += num_tokens
        self.token_heads[kind, ranks] += num_tokens * heads

    def receive(self, messages: ZoneMessages) -> None:
        """Add what the messages of an exchange bring."""
        rows, num_ranks = messages.rows, len(self.pairs)
        for kind in (Kind.Q, Kind.KV, Kind.OUT):
            own = rows[rows[:, Message.KIND] == kind]
            if not len(own):
                continue
            tokens = own[:, Message.TOKENS]
            amounts = np.stack([tokens, tokens * (own[:, Message.HEAD_STOP] - own[:, Message.HEAD_START])])
            if messages.collective == "all_gather":  # each brings the blocks of all others
                ranks, amounts = own[:, Message.SRC], amounts.sum(axis=1, keepdims=True) - amounts
            else:
                ranks = own[:, Message.DST]
            self.tokens[kind] += sums(ranks, amounts[0], num_ranks)
            self.token_heads[kind] += sums(ranks, amounts[1], num_ranks)

    def add(self, other: "Load") -> None:
        """Add the load of other zones."""
        self.pairs += other.pairs
        self.tokens += other.tokens
        self.token_heads += other.token_heads


class FirstHops(NamedTuple):
    """Transfers of first exchanges that the owner of what is sent makes, in the remap's exchange.

    `rows`: of `ir.columns.Transfer`, from the owner; `holders` [n]: the ranks that need not send
    them; `zones` [n]: indices of the zones whose first exchange has them no more.
    """

    rows: Ints
    holders: Ints
    zones: Ints

    def spared(self) -> Ints:
        """Messages of negative tokens, exchange 0: what holders send less in their first exchanges."""
        rows = messages_of(0, self.rows)
        rows[:, Message.SRC] = self.holders
        rows[:, Message.TOKENS] *= -1
        return rows


class Startable(NamedTuple):
    """Exchanges of a zone, counted from its first, that can start when a phase is entered.

    What they send lies at the owner and no launch and no other exchange comes before them, if the
    zone is the first of the phase. `forward`: exchanges of the forward; `gradients`: forward
    exchanges whose gradients can start in the backward; `replays`: those whose replay can.
    """

    forward: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    replays: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Launches:
    """Kernel launches of a zone. `pairs`: rows of `ir.columns.Pair`; `launch` [len(pairs)]: of
    which launch.

    `merging` [launches]: 1 where a forward launch merges its outputs into others; `of_round` [G,
    rounds]: which launch each rank runs in each round.
    """

    pairs: Ints
    launch: Ints
    merging: Floats
    of_round: Ints


@dataclass(frozen=True, slots=True)
class HopByHop:
    """Blocks that walk round the zone's ranks, a hop a round, beside the launches.

    `forward`, `backward` [G, G]: tokens of the block that began at a group index in its n-th hop
    (hop 0 is none), in the forward, and in a replayed backward, which turns the other way. A block
    of some of the heads counts as that part of its tokens.
    """

    forward: Ints | Floats
    backward: Ints | Floats


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """One collective of all the zone's ranks before the launch and one after it.

    `inputs`, `outputs`: by kind, tokens times heads [G, G] from the rank of a row to that of a
    column; a kind that is not there does not travel. `gathers`: all-gather, else all-to-all.
    `passed_on`: rows of `ir.columns.Message` of what goes on from rank to rank between the first
    collective and the launch.
    """

    inputs: Mapping[Kind, Floats]
    outputs: Mapping[Kind, Floats]
    gathers: bool
    passed_on: Ints = field(default_factory=lambda: np.empty((0, Message.WIDTH), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """`Message` rows to the launch and from it; inputs travel one exchange after the other."""

    inputs: Ints
    outputs: Ints


@dataclass(frozen=True, slots=True)
class HeadsThenHops:
    """Collectives inside groups of the zone's ranks, in a row, and hops from group to group between
    the first and the last of them.

    `groups`: the traffic inside each; `hops`: as in `HopByHop`, with a row for each rank of the zone
    and a hop for each group: from a rank to the one of the same place in the next group. In a ring
    groups have one rank and no traffic is listed for them. None: there is one group.
    """

    groups: tuple[GroupTraffic, ...]
    hops: HopByHop | None


@dataclass(frozen=True, slots=True)
class WaveTraffic:
    """Collectives inside groups of the zone's ranks, in a row, and between them keys from rank to
    rank, wave by wave.

    `groups`: the traffic inside each, none in groups of one rank; `late`: further inputs of each, if
    launch 0 does without them; `waves`: rows of `ir.columns.Message`. Own launches come before the
    waves, 0 and, with late inputs, 1; then one behind each wave.
    """

    groups: tuple[GroupTraffic, ...]
    waves: tuple[Ints, ...]
    late: tuple[GroupTraffic, ...] = ()


ZoneTraffic: TypeAlias = GroupTraffic | PointToPoint | HeadsThenHops | WaveTraffic


@dataclass(frozen=True, slots=True)
class ZoneRounds:
    """Launches and traffic of a zone, to be simulated round by round.

    `traffic` is None where nothing moves. Of several rounds only where it has hops or waves.
    """

    ranks: Ints
    launches: Launches
    traffic: ZoneTraffic | None


class CommPattern(ABC, Generic[Z]):
    """How the ranks of a zone meet queries, keys and outputs."""

    # Whether spreading transfers over all NICs of a node helps, where a lone transfer gains by it.
    # "pays": it leaves a node at one rank; "never": every rank uses its own NIC already; "by_load":
    # where the busiest NIC of `messages` gains more than passing on inside the node costs.
    routing: Literal["pays", "never", "by_load"] = "by_load"

    # Whether owners make first hops for holders (`first_hops`); not where the first exchange is a
    # collective.
    merges_remap: bool = True

    # Whether a replayed backward makes the forward's `first_hops` again.
    hops_again: bool = True

    # Whether `startable` holds for all zones in a row whose patterns say so, not for the first
    # only.
    starts_beside: bool = False

    # The form of `rounds(...).traffic`, where anything moves.
    traffic: type[ZoneTraffic] = PointToPoint

    # What a pattern must say

    @abstractmethod
    def ranks(self, zone: Z, num_ranks: int) -> Sequence[int]:
        """The ranks that take part, in order; `num_ranks`: of the plan."""

    @abstractmethod
    def place(self, zone: Z, lengths: Ints, rank: int) -> Ints:
        """Rows (seq, start, stop) of `rank`, in the order of its tokens."""

    @abstractmethod
    def num_exchanges(self, zone: Z) -> int:
        """Exchange ids that the zone uses in the forward."""

    @abstractmethod
    def sends(self, zone: Z, context: Context, rank: int | None = None, *, across: bool = False) -> Sends:
        """The table of what all ranks send one another, or of what `rank` sends and is sent, in the
        order of a program's rows. `across`: what stays inside a node may be left out.
        """

    @abstractmethod
    def work(self, zone: Z, context: Context, rank: int) -> Iterable[ZoneWork]:
        """Launches and merges of `rank`, in order."""

    # Programs

    def project(self, zone: Z, context: Context, rank: int) -> ZoneProgram:
        """The ops of `rank`: each exchange right before the work that needs it."""
        sends = self.sends(zone, context, rank) if self.num_exchanges(zone) else None
        exchanges = {} if sends is None else sends.exchanges(context.base)
        coming, ops = deque(exchanges.items()), list[Op]()
        for part in self.work(zone, context, rank) if context.attends else ():
            while coming and coming[0][0] < part.after:
                ops.append(coming.popleft()[1])
            ops += [Attend(rank, part.pairs)] if part.pairs else []
            ops += [Merge(rank, part.merges)] if part.merges else []
        ops += [op for _, op in coming]
        if sends is None or not context.replays:
            return ZoneProgram(ops)
        return ZoneProgram(ops, sends.replays(context.base, exchanges))

    # Placement

    def place_all(self, zones: Sequence[ZoneAt[Z]], lengths: Ints, wanted: Bools) -> Ints:
        """`Held` rows of the ranks that are `wanted` [num_ranks]; of one rank and zone in order."""
        tables: list[Ints] = [np.empty((0, Held.WIDTH), dtype=np.int64)]
        for index, zone in zones:
            ranks = [rank for rank in self.ranks(zone, len(wanted)) if wanted[rank]]
            tables += [held_rows(index, rank, self.place(zone, lengths, rank)) for rank in ranks]
        return np.concatenate(tables)

    def tokens(self, zones: Sequence[Z], context: Context) -> Ints:
        """Tokens that the zones place on each rank: int64 [num_ranks]."""
        table = self.place_all(list(enumerate(zones)), context.lengths, np.ones(context.num_ranks, dtype=bool))
        return sums(table[:, Held.RANK], table[:, Held.STOP] - table[:, Held.START], context.num_ranks)

    def sequences(self, zone: Z, context: Context) -> Iterator[tuple[int, list[int]]]:
        """Each sequence with the ranks that hold or attend some of it, ascending."""
        held = self.place_all([(0, zone)], context.lengths, np.ones(context.num_ranks, dtype=bool))
        ranks: defaultdict[int, set[int]] = defaultdict(set)
        for rank, seq in held[:, [Held.RANK, Held.SEQ]].tolist():
            ranks[seq].add(rank)
        for rank in self.ranks(zone, context.num_ranks):
            for part in self.work(zone, context, rank):
                for seq in np.unique(as_array(part.pairs)[:, Pair.SEQ]).tolist():
                    ranks[seq].add(rank)
        yield from ((seq, sorted(ranks[seq])) for seq in zone.seqs)

    # Plan statistics and traffic between nodes

    def load(self, zones: Sequence[Z], context: Context) -> Load:
        """Attention pairs and received tokens of the zones, over all ranks of the plan."""
        load = Load(context.num_ranks)
        load.pairs += self.attended(zones, context)
        for zone in zones:
            if self.num_exchanges(zone):
                self.receive(load, zone, context)
        return load

    def receive(self, load: Load, zone: Z, context: Context) -> None:
        """Add what the forward's exchanges bring."""
        for each in self.messages(zone, context):
            load.receive(each)

    def attended(self, zones: Sequence[Z], context: Context) -> Ints:
        """Visible pairs of each rank, in units of all heads: int64 [num_ranks]."""
        pairs = np.zeros(context.num_ranks, dtype=np.int64)
        for zone in zones:
            for rank in self.ranks(zone, context.num_ranks):
                pairs[rank] += _pairs_of(self.work(zone, context, rank), context)
        return pairs

    def messages(self, zone: Z, context: Context, *, across: bool = False) -> list[ZoneMessages]:
        """Messages of the forward's exchanges; `across`: those inside a node may be left out."""
        sends = self.sends(zone, context, across=across)
        rows = sends.messages()
        together = np.isin(rows[:, Message.EXCHANGE], list(sends.calls))
        found = [ZoneMessages(rows[~together])] if not together.all() else []
        number = rows[:, Message.EXCHANGE]
        for at, call in sends.calls.items():
            own = rows[number == at] if len(sends.calls) > 1 else rows[together]
            found += [ZoneMessages(own, call.collective, call.group)] if len(own) else []
        return found

    def largest_exchange(self, zone: Z, context: Context) -> Ints:
        """The most keys and values, in tokens times heads, that one exchange of the forward brings
        each rank of the zone: int64 [G]. What a rank holds itself is not brought.
        """
        tables = [np.empty((0, Message.WIDTH), dtype=np.int64), *(e.each_pair() for e in self.messages(zone, context))]
        rows = np.concatenate(tables)
        rows = rows[rows[:, Message.KIND] == Kind.KV]
        heads, shape = rows[:, Message.HEAD_STOP] - rows[:, Message.HEAD_START], (-1, context.num_ranks)
        steps = 1 + int(rows[:, Message.EXCHANGE].max(initial=0))
        place = rows[:, Message.EXCHANGE] * context.num_ranks + rows[:, Message.DST]
        brought = sums(place, heads * rows[:, Message.TOKENS], steps * context.num_ranks).reshape(shape)
        return brought.max(axis=0)[np.array(self.ranks(zone, context.num_ranks))]

    # The remap

    def first_senders(self, zone: Z, rank: int, num_ranks: int) -> Ints:
        """Ranks that may send to `rank` in the first exchange something that another rank owns."""
        del rank
        return np.array(self.ranks(zone, num_ranks) if self.merges_remap else (), dtype=np.int64)

    def first_hops(self, zones: Sequence[ZoneAt[Z]], context: Context, remote: Ints) -> FirstHops:
        """Transfers of the zones' first exchanges that owners make for holders, so that a hop is
        saved.

        `remote`: rows of `ir.columns.RemoteHeld`. What is owned by the target is not among them: it
        stays in the zone's exchange, since the target has handed it over.
        """
        hops = [_NO_FIRST_HOPS]
        for index, zone in zones if self.merges_remap else ():
            own = remote[remote[:, RemoteHeld.ZONE] == index]
            if not len(own):
                continue
            number, rows = self.sends(zone, context).transfers()
            rows = rows[number == 0]
            sides = (rows, Transfer.SRC, Transfer.SEQ), (own, RemoteHeld.HOLDER, RemoteHeld.SEQ)
            keys = np.concatenate([table[:, [rank, seq]] for table, rank, seq in sides])
            key = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)  # of a rank and a sequence
            wanted = np.column_stack([key[: len(rows)], rows[:, [Transfer.START, Transfer.STOP]]])
            held = np.column_stack([key[len(rows) :], own[:, [RemoteHeld.START, RemoteHeld.STOP]]])
            row, region, both = intersections(wanted, held)
            sent = rows[row]
            sent[:, [Transfer.START, Transfer.STOP]] = both[:, [Fragment.START, Fragment.STOP]]
            sent[:, Transfer.SRC] = own[region, RemoteHeld.OWNER]
            moved = sent[:, Transfer.SRC] != sent[:, Transfer.DST]
            region = region[moved]
            hops.append(FirstHops(sent[moved], own[region, RemoteHeld.HOLDER], own[region, RemoteHeld.ZONE]))
        return FirstHops(*(np.concatenate(columns) for columns in zip(*hops, strict=True)))

    # Starting early, routing, coupling

    def startable(self, zone: Z) -> Startable:
        """Exchanges that can start before anything else of the zone."""
        del zone
        return Startable()

    def crosses_nodes(self, zone: Z, context: Context) -> bool:
        """Whether anything may go from node to node."""
        return len({rank // context.ranks_per_node for rank in self.ranks(zone, context.num_ranks)}) > 1

    def reaches_out(self, zone: Z, rank: int, ranks_per_node: int) -> bool:
        """Whether `rank` may exchange anything with other nodes."""
        del zone, rank, ranks_per_node
        return True

    def num_tasks(self, zone: Z, rank: int) -> int:
        """Tasks that the planner listed for `rank`; 0 where the pattern says who attends to what."""
        del zone, rank
        return 0

    def coupled(self, zone: Z, context: Context) -> Iterable[tuple[int, int]]:
        """Pairs of ranks that wait for one another."""
        first, *others = self.ranks(zone, context.num_ranks)
        return ((first, other) for other in others) if zone.seqs else ()

    # Simulation

    def rounds(self, zone: Z, context: Context) -> ZoneRounds:
        """Launches and traffic, to be simulated zone by zone."""
        ranks = np.array(self.ranks(zone, context.num_ranks))
        pairs, launch = [np.empty((0, Pair.WIDTH), dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for place, rank in enumerate(ranks.tolist()):
            own = [as_array(part.pairs) for part in self.work(zone, context, rank)]
            pairs += own
            launch += [np.full(len(rows), place) for rows in own]
        return self.one_round(zone, context, np.concatenate(pairs), np.concatenate(launch))

    def one_round(self, zone: Z, context: Context, pairs: Ints, launch: Ints) -> ZoneRounds:
        """One launch of each rank, with all inputs before it and all outputs behind it."""
        ranks, rows = np.array(self.ranks(zone, context.num_ranks)), self.sends(zone, context).messages()
        is_output = rows[:, Message.KIND] == Kind.OUT
        launches = Launches(pairs, launch, np.zeros(len(ranks)), np.arange(len(ranks))[:, None])
        return ZoneRounds(ranks, launches, PointToPoint(rows[~is_output], rows[is_output]))


_NO_FIRST_HOPS = FirstHops(np.empty((0, Transfer.WIDTH), dtype=np.int64), *np.empty((2, 0), dtype=np.int64))


def _pairs_of(work: Iterable[ZoneWork], context: Context) -> int:
    total = 0
    for part in work:
        rows = as_array(part.pairs)
        each = num_pairs(rows[:, Pair.SEQ], Rectangles(*rows[:, Pair.SPANS].T), context.mask)
        total += int((each * (rows[:, Pair.Q_HEAD_STOP] - rows[:, Pair.Q_HEAD_START])).sum())
    return total // context.num_heads


def prefix_pairs(fragments: Ints, context: Context) -> Ints:
    """Pairs of fragments, each over all keys that the mask shows of the sequence, all heads; of trees
    the cells.
    """
    seq, start, stop = fragments.T
    first, last = keys_of(seq, start, stop, context.mask)
    keys = np.column_stack([first, np.minimum(last, context.lengths[seq])])
    pairs = pairs_of(fragments, keys, [context.all_heads])
    return split_rows(pairs, Pair.SEQ, Pair.SPANS, context.mask) if isinstance(context.mask, Forest) else pairs


def pairs_of(queries: Ints, keys: Ints, slices: Sequence[Sequence[int]]) -> Ints:
    """`Pair` rows: queries (seq, start, stop) over keys (start, stop), by slice of the heads."""
    # A slice: query heads and key-value heads, start and stop each.
    # [slices, n, columns]: slices go along the first axis, pairs along the second
    pairs = np.empty((len(slices), len(queries), Pair.WIDTH), dtype=np.int64)
    pairs[:, :, Pair.QUERY_SPAN], pairs[:, :, Pair.K_SPAN] = queries, keys
    heads = np.array(slices, dtype=np.int64).reshape(-1, 1, 4)
    pairs[:, :, Pair.Q_HEADS], pairs[:, :, Pair.KV_HEADS] = heads[:, :, :2], heads[:, :, 2:]
    return pairs.reshape(-1, Pair.WIDTH)


def held_rows(zone: int, ranks: Ints | int, fragments: Ints) -> Ints:
    """`Held` rows of `fragments` (seq, start, stop) of the zone with this index."""
    rows = np.zeros((len(fragments), Held.WIDTH), dtype=np.int64)
    rows[:, Held.RANK], rows[:, Held.FRAGMENT], rows[:, Held.ZONE] = ranks, fragments, zone
    return rows

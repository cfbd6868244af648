"""The sequences that ranks read, as rows of integers, the lengths of all that a pool read, and the
nano-batches in which they are trained; their tokens to the ranks that compute them, and results back,
one exchange a step and direction; and the rows that one rank computes, with positions and padding.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, repeat, zip_longest
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.compile.pipeline import layout
from megatron_balance.compile.remap import layouts
from megatron_balance.errors import BalanceError, ConfigError, DataError, InvalidProgramError
from megatron_balance.ir.arrays import Ints, ranges
from megatron_balance.ir.columns import Fragment, Placed
from megatron_balance.ir.forest import Forest, Segment, Tree, document, over
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Members, Trees, Waiting, dealt
from megatron_balance.training.pool import Pool, StrategyRanks, TensorParallel, least_and_most


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of one microbatch, one after another without padding, on the host."""

    # [T, C] int64: a row a token; its columns are the adapter's.
    rows: Tensor
    # In tokens, summing to T.
    lengths: tuple[int, ...]
    # Of each sequence; empty: all are plain documents.
    trees: tuple[Tree, ...] = ()

    @classmethod
    def of(cls, documents: Sequence[Tensor], num_columns: int = 1, trees: Sequence[Tree] = ()) -> Sequences:
        """Documents [n], or [n, C] for C columns, of integers; none is fine."""
        rows = [each.reshape(-1, num_columns).long() for each in documents]
        whole = torch.cat([torch.empty(0, num_columns, dtype=torch.int64), *rows])
        return cls(whole, tuple(map(len, rows)), tuple(trees))

    def sizes(self) -> list[int]:
        """Of each sequence, the segments of its tree; 0: it is a plain document."""
        pairs = zip(self.trees, self.lengths, strict=True) if self.trees else ()
        return [0 if tree == document(length) else len(tree) for tree, length in pairs] or [0] * len(self.lengths)


def to_bits(values: Tensor) -> Tensor:
    """The bits of `values` as float32, in int64: a column that arrives exactly."""
    return values.float().view(torch.int32).long()


def from_bits(bits: Tensor) -> Tensor:
    """The float32 numbers whose bits `to_bits` gave."""
    return bits.to(torch.int32).view(torch.float32)


_FAILED = -1  # in place of a rank's first number: it could not read

# Numbers before a rank's counts, each as the least and the most over its tensor-parallel ranks:
# microbatches of a step, and two halves of the plan's fingerprint.
_HEADER = 6
_NOT_PLANNED = -1  # in place of both halves of a fingerprint


@dataclass(frozen=True, slots=True)
class PoolLengths:
    """The sequences that the pool read in one step."""

    # Of all sequences of each microbatch, replica by replica.
    lengths: tuple[tuple[int, ...], ...]
    # [sequences] of each microbatch: the pool rank that holds each.
    owners: tuple[Ints, ...]
    # By global rank, the fingerprint of the plan that it made before.
    announced: Mapping[int, str] = field(default_factory=dict[int, str])
    # As `lengths`, the trees of the sequences; empty: all of the step are plain documents.
    trees: Trees = ()

    def of(self, at: int) -> PoolLengths:
        """One microbatch."""
        return PoolLengths(self.lengths[at : at + 1], self.owners[at : at + 1], trees=self.trees[at : at + 1])


def share_lengths(  # noqa: PLR0913  what was read, what was made of it, and whom to tell
    mine: Sequence[Sequences],
    failure: Exception | None,
    num_microbatches: int,
    pool: Pool,
    tensor_parallel: TensorParallel,
    device: torch.device,
    *,
    fingerprint: str = "",
) -> PoolLengths:
    """Share the lengths and the trees of all sequences. Collective over the joint pool and the
    tensor-parallel group, whose rank 0 shares, and hands on.

    `mine`: by microbatch, what this rank read; empty where its microbatches do not count.
    `failure`: the reason why it could not read, told to the others before it is raised.
    `num_microbatches`: of a step, on this rank. `fingerprint`: of the plan that it made for the
    step; empty: none yet.

    Raised on every rank, so that none waits for another: DataError: a rank could not read, or
    stages read different microbatches. ConfigError: ranks that run different numbers of
    microbatches.
    """
    table = torch.empty(0)
    peers = [tensor_parallel.group] if tensor_parallel.group is not None and tensor_parallel.size > 1 else []
    header = chain.from_iterable(least_and_most((num_microbatches, *_halves(fingerprint)), peers, device))
    if tensor_parallel.is_source:
        counts = [len(m.lengths) for m in mine]
        row = [*header, *counts, *(length for m in mine for length in m.lengths), *_tree_numbers(mine)]
        if failure is not None:
            # The header stands before the counts so that a failure needs no collective of its own.
            row = [_FAILED] * _HEADER
        width = torch.tensor([len(row)], dtype=torch.int64, device=device)
        joint = pool.joint
        if joint.size > 1:  # a pool of one has no process group
            dist.all_reduce(width, op=dist.ReduceOp.MAX, group=joint.pool)
        padded = torch.zeros(int(width), dtype=torch.int64)
        padded[: len(row)] = torch.tensor(row, dtype=torch.int64)
        table = padded[None].to(device)
        if joint.size > 1:
            # [joint ranks, widest row]: header, counts by microbatch, lengths, trees. Rows are padded
            # with zeros.
            table = torch.empty(joint.size, int(width), dtype=torch.int64, device=device)
            dist.all_gather(list(table.unbind()), padded.to(device), group=joint.pool)
    if tensor_parallel.size > 1:
        # Only a source has the table; its tensor-parallel peers do not know how wide it is.
        size = torch.tensor([table.numel()], dtype=torch.int64, device=device)
        dist.broadcast(size, tensor_parallel.source, group=tensor_parallel.group)
        table = table if tensor_parallel.is_source else torch.empty(int(size), dtype=torch.int64, device=device)
        dist.broadcast(table, tensor_parallel.source, group=tensor_parallel.group)
    rows = table.cpu().numpy().reshape(pool.joint.size, -1)
    # Rows of the other stages say the same as those of the first one, which is checked here.
    _check_read(rows, failure, pool)
    announced = {pool.joint.ranks[rank]: _announced(row) for rank, row in enumerate(rows[:, 2:_HEADER].tolist())}
    return _split_by_microbatch(rows[: pool.size, _HEADER:], num_microbatches, pool, announced)


def _tree_numbers(mine: Sequence[Sequences]) -> list[int]:
    """Of each sequence the segments of its tree, then all segments; nothing where there are none."""
    sizes = [size for m in mine for size in m.sizes()]
    if not any(sizes):
        return []
    # Padding says 0 segments, so documents of ranks that give no trees are plain ones.
    trees = [tree for m in mine for tree, size in zip(m.trees, m.sizes(), strict=False) if size]
    return [*sizes, *(int(number) for tree in trees for segment in tree for number in segment)]


def _halves(fingerprint: str) -> tuple[int, int]:
    return (int(fingerprint[:8], 16), int(fingerprint[8:], 16)) if fingerprint else (_NOT_PLANNED, _NOT_PLANNED)


def _announced(halves: Sequence[int]) -> str:
    """The fingerprint of one rank and its tensor-parallel peers."""
    least, most = halves[::2], halves[1::2]
    if least != most:
        return "others than its tensor-parallel peers"
    return "" if _NOT_PLANNED in least else "".join(f"{half:08x}" for half in least)


def _check_read(rows: Ints, failure: Exception | None, pool: Pool) -> None:
    failed = [pool.joint.ranks[rank] for rank in np.flatnonzero(rows[:, 0] == _FAILED)]
    if failed:
        if isinstance(failure, BalanceError):
            raise failure
        if failure is not None:
            own = pool.joint.ranks[pool.joint.rank]
            raise DataError(f"rank {own} could not read its microbatches: {_chain_of(failure)}") from failure
        raise DataError(f"ranks {failed} could not read their microbatches; the error of each of them says why")
    _check_numbers(rows[:, :2], pool)
    # Stage by stage in the joint pool, so these are the first and the last stage's pool.
    first, last = rows[: pool.size, _HEADER:], rows[-pool.size :, _HEADER:]
    if not np.array_equal(first, last):
        differing = [pool.joint.ranks[rank] for rank in np.flatnonzero((first != last).any(axis=1))]
        raise DataError(
            f"ranks {differing} and their peers on the last pipeline stage read different samples; give all ranks the "
            "same data set"
        )


def _chain_of(error: BaseException) -> str:
    """An error and its causes, the first cause last, each with the line that raised it."""
    told: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.extract_tb(seen.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        told.append(f"{type(seen).__name__}: {' '.join(str(seen).split())}{where}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return ", caused by ".join(told)


def _check_numbers(numbers: Ints, pool: Pool) -> None:
    if (numbers == numbers[0, 0]).all():
        return
    by_number: dict[str, list[int]] = {}
    for rank, (fewest, most) in enumerate(numbers.tolist()):
        of = str(fewest) if fewest == most else f"{fewest} to {most} (with their tensor-parallel ranks)"
        by_number.setdefault(of, []).append(pool.joint.ranks[rank])
    told = ", ".join(f"ranks {ranks} run {number}" for number, ranks in by_number.items())
    raise ConfigError(
        f"every rank must run the same number of microbatches in a step, but {told}; give all ranks as many (Megatron: "
        "start all ranks with the same --global-batch-size, --micro-batch-size and --rampup-batch-size)"
    )


def _split_by_microbatch(rows: Ints, num_microbatches: int, pool: Pool, announced: Mapping[int, str]) -> PoolLengths:
    lengths: list[list[int]] = [[] for _ in range(num_microbatches)]
    owners: list[list[int]] = [[] for _ in range(num_microbatches)]
    trees: list[list[Tree]] = [[] for _ in range(num_microbatches)]
    for reader in pool.readers:
        # counts [num_microbatches] of the reader, then its lengths, microbatch by microbatch, then
        # the number of segments of each sequence, likewise, then all segments.
        numbers = iter(rows[reader].tolist())
        counts = list(islice(numbers, num_microbatches))
        read = [list(islice(numbers, count)) for count in counts]
        sizes = [list(islice(numbers, count)) for count in counts]
        for m, count in enumerate(counts):
            lengths[m] += read[m]
            owners[m] += [reader] * count
            for length, size in zip_longest(read[m], sizes[m], fillvalue=0):
                segments = (islice(numbers, 3) for _ in range(size))
                tree = tuple(Segment(tokens, parent, bool(full)) for tokens, parent, full in segments)
                trees[m].append(tree or document(length))
    shared = tuple(np.array(each, dtype=np.int64) for each in owners)
    given = any(over(CAUSAL, each) != CAUSAL for each in trees)
    return PoolLengths(tuple(map(tuple, lengths)), shared, announced, tuple(map(tuple, trees)) if given else ())


@dataclass(frozen=True, slots=True, eq=False)
class Recalled:
    """Sequences of earlier steps that a step trains."""

    # Their numbers and lengths.
    waiting: Waiting = ()
    # The pool rank that read each again.
    owners: tuple[int, ...] = ()
    # By number, rows [n, C] of those that this rank read.
    rows: tuple[tuple[int, Tensor], ...] = ()
    # Of each its tree; empty: all are plain documents.
    trees: tuple[Tree, ...] = ()


NOTHING = Recalled()


def by_nano_batch(
    mine: Sequence[Sequences], shared: PoolLengths, members: Members, rank: int, recalled: Recalled = NOTHING
) -> tuple[list[Sequences], PoolLengths]:
    """Sequences read here and in the pool, with each nano-batch as a microbatch of its own: two of
    one microbatch take turns at the link (ping-pong; DistCA, section 4.1). `mine`: by microbatch as
    read, or empty on ranks whose microbatches do not count. `members`: by microbatch and
    nano-batch, numbers of sequences; below 0 those of `recalled`, of earlier steps.
    """
    chosen = list(chain.from_iterable(members))
    if all(len(each) == 1 for each in members) and tuple(chosen) == dealt(shared.lengths):
        return list(mine), shared
    # The sequences of the step as one table: those just read by their number, then those of earlier
    # steps.
    num_read = sum(map(len, shared.lengths))
    place = {number: num_read + at for at, (number, _) in enumerate(recalled.waiting)}
    lengths = np.array([*chain.from_iterable(shared.lengths), *(n for _, n in recalled.waiting)], dtype=np.int64)
    owners = np.concatenate([np.empty(0, dtype=np.int64), *shared.owners, np.array(recalled.owners, dtype=np.int64)])
    trees: list[Tree] = []
    if shared.trees or recalled.trees:
        trees += chain.from_iterable(shared.trees or (map(document, of) for of in shared.lengths))
        trees += recalled.trees or (document(length) for _, length in recalled.waiting)
    again = dict(recalled.rows)
    reads = bool(mine) or bool(again)
    width = next((each.shape[1] for each in (*(each.rows for each in mine), *again.values())), 1)
    # Rows [T, C] in the same order as the table's sequences of this rank.
    rows = torch.cat(
        [
            torch.empty(0, width, dtype=torch.int64),
            *(each.rows for each in mine),
            *(again[number] for number, _ in recalled.waiting if number in again),
        ]
    )
    # [sequences]: whether this rank holds the rows.
    here = owners == rank if reads else np.zeros(len(owners), dtype=np.bool_)
    own = np.where(here, lengths, 0)
    first = np.cumsum(own) - own
    assert len(rows) == own.sum(), f"{len(rows)} rows were read here, sequences of this rank have {own.sum()} tokens"
    read: list[Sequences] = []
    apart_lengths: list[tuple[int, ...]] = []
    apart_owners: list[Ints] = []
    apart_trees: list[tuple[Tree, ...]] = []
    for seqs in chosen:
        # Places in the table; numbers below 0 are those of earlier steps.
        at = np.array([seq if seq >= 0 else place[seq] for seq in seqs], dtype=np.int64)
        apart_lengths.append(tuple(lengths[at].tolist()))
        apart_owners.append(owners[at])
        if trees:
            apart_trees.append(tuple(trees[seq] for seq in at.tolist()))
        if reads:
            taken = at[here[at]]
            # [tokens]: rows of the chosen sequences, one behind the other.
            tokens = ranges(first[taken], first[taken] + lengths[taken])[1]
            read.append(Sequences(rows[torch.from_numpy(tokens)], tuple(lengths[taken].tolist())))
    return read, PoolLengths(tuple(apart_lengths), tuple(apart_owners), trees=tuple(apart_trees))


class _Routes(NamedTuple):
    """Rows between two orders: as ranks read them, and as the plans' layouts have them."""

    # To each pool rank.
    send_counts: list[int]
    # [rows read here]: which of them go out, destination by destination.
    sent: Ints
    receive_counts: list[int]
    # [rows of this rank's layouts]: of each, its place in what arrives, source by source.
    place: Ints


class TokenExchange:
    """The rows of a step on their way through the pool: there (`to_ranks`) and back (`back`)."""

    def __init__(
        self,
        shared: PoolLengths,
        plans: Sequence[MicrobatchPlan],
        pool: Pool | StrategyRanks,
        pipelines: Sequence[int] | None = None,
    ) -> None:
        """Look up the layouts of this rank. `shared`: a microbatch for each of `plans`.
        `pipelines`: by plan, whose ranks of the pool it is over (`Pool.ranks_of`); None: the whole
        pool's. InvalidProgramError: a plan of other trees than its sequences are.
        """
        for plan, trees in zip(plans, shared.trees or repeat(()), strict=False):
            _check_trees(plan, trees)
        self._shared = shared
        self._plans = plans
        self._pool = pool
        ranks = {pipeline: pool.ranks_of(pipeline) for pipeline in set(pipelines or (pool.pipeline,))}
        of_plans = tuple(pipelines or (pool.pipeline,) * len(plans))
        self._ranks = [ranks[each] for each in of_plans]
        holders = {pipeline: pool.holders_of(pipeline) for pipeline in ranks}
        self._holders = [holders[each] for each in of_plans]
        # By microbatch: rows (seq, start, stop) of this rank, in order.
        self.layouts: list[Ints] = [
            # Of another pipeline's plan this rank has no row.
            layout(plan, ranks.index(pool.rank)) if pool.rank in ranks else np.empty((0, Fragment.WIDTH), np.int64)
            for plan, ranks in zip(plans, self._ranks, strict=True)
        ]
        # By microbatch: tokens of this rank.
        self.counts = [int((rows[:, Fragment.STOP] - rows[:, Fragment.START]).sum()) for rows in self.layouts]

    def to_ranks(
        self, mine: Sequence[Sequences], num_columns: int, tensor_parallel: TensorParallel, device: torch.device
    ) -> list[Tensor]:
        """Rows [T, C] int64 of this rank by microbatch, in the order of its layouts; zeros on a
        pipeline stage that has no use for tokens. Collective over the pool (under a strategy: all
        ranks) and the tensor-parallel group. `mine`: as read here; empty where microbatches do not
        count.
        """
        rows = torch.zeros(sum(self.counts), num_columns, dtype=torch.int64, device=device)
        # A tensor-parallel source receives, and its peers take the rows from it; the middle stages
        # of a pipeline keep zeros.
        if self._pool.exchanges(tensor_parallel):
            read = torch.cat([torch.empty(0, num_columns, dtype=torch.int64), *(each.rows for each in mine)])
            arrived = self.there(read.to(device))
            rows = arrived if self._is_holder else rows
        if self._pool.has_tokens and tensor_parallel.size > 1 and len(rows):
            dist.broadcast(rows, tensor_parallel.source, group=tensor_parallel.group)
        return list(rows.split(self.counts))

    @property
    def _is_holder(self) -> bool:
        return any(self._pool.rank in row for rows in self._holders for row in rows)

    def local(self, rows: Sequence[Tensor], own: Sequence[int], multiple: int) -> LocalMicrobatch:
        """This rank's rows of a microbatch, of the nano-batches `own` of what `to_ranks` gave."""
        assembled = [assemble(rows[at], self.layouts[at], multiple, self._plans[at].mask) for at in own]
        return interleave(assembled, multiple)

    def there(self, read: Tensor) -> Tensor:
        """Values [rows read here, ...] of all microbatches to the ranks of the layouts: [rows of
        this rank's layouts, ...]. One dtype and form on all ranks. Collective over the pool; not
        differentiable.
        """
        routes = self._routes
        # [rows sent, ...]: gathered, so that destinations are contiguous.
        sent = read[torch.from_numpy(routes.sent).to(read.device)].contiguous()
        received = read.new_empty(len(routes.place), *read.shape[1:])
        received = self._all_to_all(sent, received, routes.receive_counts, routes.send_counts)
        return received[torch.from_numpy(routes.place).to(read.device)].contiguous()

    def back(self, given: Tensor) -> Tensor:
        """The inverse of `there`, over a pool: [rows of our layouts, ...] to [rows read here, ...]."""
        routes = self._routes
        sent = torch.empty_like(given, memory_format=torch.contiguous_format)
        # Scattered, as the inverse of the gather in `there`.
        sent[torch.from_numpy(routes.place).to(given.device)] = given
        received = given.new_empty(len(routes.sent), *given.shape[1:])
        received = self._all_to_all(sent, received, routes.send_counts, routes.receive_counts)
        read = torch.empty_like(received)
        read[torch.from_numpy(routes.sent).to(given.device)] = received
        return read

    def _all_to_all(self, sent: Tensor, received: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
        if self._pool.size == 1:  # a pool of one has no process group
            return sent
        with self._pool.groups.inside("gathering results"):
            dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self._pool.groups.pool)
        return received

    @cached_property
    def _routes(self) -> _Routes:
        # Both ends derive the same order from the plan and the shared lengths, so no counts are
        # exchanged.
        return _Routes(*self._sends(), *self._receives())

    def _sends(self) -> tuple[list[int], Ints]:
        """Numbers of rows to send to each pool rank, and rows read here, by destination."""
        rank, size, shared = self._pool.rank, self._pool.size, self._shared
        if not self._pool.reads:
            return [0] * size, np.empty(0, dtype=np.int64)
        counts = np.zeros(size, dtype=np.int64)
        read, destinations = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        starts = _starts(shared, rank)
        for plan, copies, owners, start in zip(self._plans, self._holders, shared.owners, starts, strict=True):
            rows = layouts(plan)
            # rows [spans, Placed.WIDTH]: the layouts of all ranks; those of sequences that were
            # read here stay.
            rows = rows[owners[rows[:, Placed.SEQ]] == rank]
            # [spans]: the row at which the sequence begins among all that this rank read.
            first = start[rows[:, Placed.SEQ]]
            # row [tokens]: the span of each token; tokens: its row among those read here.
            row, tokens = ranges(first + rows[:, Placed.START], first + rows[:, Placed.STOP])
            for ranks in copies:
                read.append(tokens)
                # ranks [plan ranks] to pool ranks, picked by the span's rank of the plan.
                destinations.append(np.array(ranks, dtype=np.int64)[rows[row, Placed.RANK]])
                counts += np.bincount(destinations[-1], minlength=size)
        # Stable: rows for one destination keep the order of microbatch and layout, on which the
        # receiver counts.
        order = np.argsort(np.concatenate(destinations), kind="stable")
        return counts.tolist(), np.concatenate(read)[order]

    def _receives(self) -> tuple[list[int], Ints]:
        """Numbers of rows to receive from each pool rank, and the place of each layout row in them."""
        none = np.empty(0, dtype=np.int64)
        if not self._is_holder:
            return [0] * self._pool.size, none
        # [spans of this rank's layouts], over all microbatches: the pool rank that read each.
        sources = np.concatenate(
            [
                none,
                *(
                    owners[rows[:, Fragment.SEQ]]
                    for owners, rows in zip(self._shared.owners, self.layouts, strict=True)
                ),
            ]
        )
        sizes = np.concatenate([none, *(rows[:, Fragment.STOP] - rows[:, Fragment.START] for rows in self.layouts)])
        # Spans arrive source by source; from one source in the order of microbatch and layout.
        order = np.argsort(sources, kind="stable")
        arrives = np.empty(len(order), dtype=np.int64)
        # Of each span, in the order of the layouts, the row at which it arrives.
        arrives[order] = np.cumsum(sizes[order]) - sizes[order]
        counts = np.bincount(sources, weights=sizes, minlength=self._pool.size).astype(np.int64)
        return counts.tolist(), ranges(arrives, arrives + sizes)[1]


def _check_trees(plan: MicrobatchPlan, trees: Sequence[Tree]) -> None:
    """Refuse a plan whose mask is not that of `trees`; lengths alone would agree, and siblings see
    one another.
    """
    planned, dealt_ones = (mask.trees if isinstance(mask, Forest) else () for mask in (plan.mask, over(CAUSAL, trees)))
    if planned != dealt_ones:
        seqs = [seq for seq, (a, b) in enumerate(zip_longest(planned, dealt_ones)) if a != b]
        raise InvalidProgramError(
            f"plan {plan.fingerprint()} of planner {plan.planner} has mask {plan.mask.name}, and sequences {seqs[:4]} "
            "were dealt as other trees than it was made for: their branches would see one another"
        )


def _starts(shared: PoolLengths, rank: int) -> list[Ints]:
    """By microbatch and sequence: the row of its first token, of all that `rank` read."""
    result: list[Ints] = []
    base = 0
    for lengths, owners in zip(shared.lengths, shared.owners, strict=True):
        # Sequences of other ranks count for nothing: their starts are meaningless.
        own = np.where(owners == rank, np.array(lengths, dtype=np.int64), 0)
        ends = np.cumsum(own) + base
        result.append(ends - own)
        base += int(own.sum())
    return result


@dataclass(frozen=True, slots=True, eq=False)
class LocalMicrobatch:
    """Rows of this rank in the plan's order, padding rows last."""

    # [T, C] int64, zeros where padded.
    rows: Tensor
    # [T] int64: of each token in its own sequence, or on its path in a tree.
    positions: Tensor
    # [T]: True where a row belongs to no sequence.
    padding: Tensor
    # Those that `interleave` brought into these rows; empty: it runs whole.
    nano_batches: tuple[LocalMicrobatch, ...] = ()


def assemble(rows: Tensor, layout: Ints, multiple: int, mask: Mask = CAUSAL) -> LocalMicrobatch:
    """Pad rows [T, C], which lie as `layout` (seq, start, stop), to a multiple of `multiple`.
    `mask`: of the plan; under a forest positions are along the paths of its trees.
    """
    # A rank without tokens still takes part in every collective of a layer, so it computes masked
    # padding.
    padding = padded(len(rows), multiple) - len(rows)
    row, places = ranges(layout[:, Fragment.START], layout[:, Fragment.STOP])
    if isinstance(mask, Forest):
        of = mask.segments
        places -= of.shift[of.at(layout[row, Fragment.SEQ], places)]
    positions = torch.from_numpy(places).to(rows.device)
    assert len(positions) == len(rows), f"the exchange brought {len(rows)} tokens, the layout has {len(positions)}"
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    positions = torch.nn.functional.pad(positions, (0, padding))
    return LocalMicrobatch(rows, positions, torch.arange(len(rows), device=rows.device) >= len(rows) - padding)


def padded(num_tokens: int, multiple: int) -> int:
    """Rows of a rank that holds so many tokens: the next positive multiple of `multiple`."""
    return max(1, -(-num_tokens // multiple)) * multiple


def interleave(nano_batches: Sequence[LocalMicrobatch], shares: int) -> LocalMicrobatch:
    """One microbatch of its nano-batches' rows: share by share of the tensor-parallel ranks that
    split them, and in each share nano-batch by nano-batch. `shares`: 1: rows are not split.
    """
    if len(nano_batches) == 1:
        return nano_batches[0]

    def joined(name: str) -> Tensor:
        columns = [getattr(each, name) for each in nano_batches]
        # Sequence parallelism splits the rows of a microbatch evenly over the tensor-parallel
        # ranks, and each of these must hold its share of every nano-batch: [shares, rows of a
        # share, ...].
        return torch.cat([column.view(shares, -1, *column.shape[1:]) for column in columns], dim=1).flatten(0, 1)

    return LocalMicrobatch(joined("rows"), joined("positions"), joined("padding"), tuple(nano_batches))

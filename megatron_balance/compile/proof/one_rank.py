"""Prove what one rank does, from its own program and those of the ranks that it exchanges with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_balance.compile.order import Start, is_moved
from megatron_balance.compile.pipeline import CompiledRank, compile_ranks
from megatron_balance.compile.proof.meaning import ProgramTables, State
from megatron_balance.compile.proof.runs import check_same, verify_routes, verify_steps
from megatron_balance.compile.proof.structure import misplaced, verify_plan
from megatron_balance.compile.remap import layouts
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Ints, as_array, concat, numbered, ranges, trim_pairs
from megatron_balance.ir.columns import Fragment, Pair, Placed, Route, Rows, Transfer
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange, Kind, Op, Policy, Program, RankProgram

# In which no partial output travels.
PATTERNS = frozenset({"ring", "waves"})


class NotAloneError(InvalidProgramError):
    """A rank whose part may hold, but cannot be proved without all the others."""


def provable(plan: MicrobatchPlan) -> bool:
    """Whether ranks of a plan can be proved one by one, but for some collectives."""
    return all(zone.pattern in PATTERNS for zone in plan.zones)


# The program of a ring of G ranks has G x G launches, so its whole proof (`proof.runs`) takes G x G
# steps. One rank's part takes G, and if every rank proves its own, the whole is proved:
#
# * Order. Starts of a rank's exchanges rise by the key of `compile.order`, and two ranks that
#   share an exchange have the same key for it. So of all exchanges that have not met, the one with
#   the least key has all its ranks: nobody waits for ever.
# * What a rank is brought is what the other rank's program sends, row by row; that the sender has it
#   is part of the sender's own proof, from exchanges with smaller ids only.
# * Outputs and gradients of queries travel only when they are complete, so a rank that is brought one
#   may take it as such. Each is complete at its owner in the end, in one piece, and lies nowhere
#   else: so each query meets its keys at one rank, and that rank proves that it meets each of them
#   once.
# * Partial gradients of keys travel as they are. They are added up, handed on whole, and lie with
#   their owner alone in the end; so nothing of them is lost, and no part is in them twice.
#
# Where outputs travel before they are complete (`provable`), or collectives demand that ranks send
# or are sent the same, a rank cannot be proved alone.
def prove_rank(plan: MicrobatchPlan, rank: int, policy: Policy | None, *, passing: bool = True) -> None:
    """Prove the part of `rank` in a plan that is `provable`; if this holds of every rank, the plan
    holds. `passing`: as in `compile.order`.

    Raises:
        InvalidProgramError: it does not hold; names the planner, the op or the ranks.
        NotAloneError: it uses a collective other than all_to_all.
    """
    verify_plan(plan)
    (proved,) = compile_ranks(plan, policy, target="proof", ranks=(rank,))
    (runs,) = compile_ranks(plan, policy, passing=passing, ranks=(rank,))
    peers = peers_of(runs.program)
    programs = dict(zip(peers, (each.program for each in compile_ranks(plan, policy, ranks=peers)), strict=True))
    verify_owned(plan, proved.program)
    verify_rank(proved.program, (plan.lengths, plan.num_heads, plan.num_kv_heads), plan.num_ranks, policy)
    for phase in ("forward", "backward"):
        ours = getattr(proved.program, phase)
        check_same(rank, phase, ours, getattr(runs.program, phase))
    verify_routes(plan, runs.program)
    verify_peers(runs.program, programs)
    verify_own_steps(runs, plan, backward=policy is not None)


def verify_owned(plan: MicrobatchPlan, program: RankProgram) -> None:
    """Check that every token has one owner, and that the rank takes those that it owns.

    Raises:
        InvalidProgramError: it does not, or some token has none or several.
    """
    table = layouts(plan)
    if len(misplaced(table, plan.lengths)) or len(np.unique(table[:, Placed.SEQ])) != len(plan.lengths):
        raise InvalidProgramError("layout: each token has exactly one owner, and some have none, or several")
    own = table[table[:, Placed.RANK] == program.rank][:, Placed.FRAGMENT]
    if own.tolist() != as_array(program.owned).tolist():
        raise InvalidProgramError(f"rank {program.rank} owns other tokens than in the layout of all ranks")


def verify_rank(
    program: RankProgram, shape: tuple[tuple[int, ...], int, int], num_ranks: int, policy: str | None
) -> None:
    """Prove the ops of one rank, with what the others bring taken as promised.

    `shape`: lengths of the sequences, query heads, key-value heads.

    Raises:
        InvalidProgramError: names the op, its text and what is wrong.
    """
    lengths, num_heads, num_kv_heads = shape
    nothing = Rows(Fragment.WIDTH)
    owned = tuple(program.owned if rank == program.rank else nothing for rank in range(num_ranks))
    alone = Program(
        lengths,
        num_heads,
        num_kv_heads,
        owned,
        program.forward,
        program.backward,
        policy,
        program.remap_in,
        program.mask,
    )
    _OwnState(alone, program.rank).prove()


class _OwnState(State):
    """The values that one rank holds, while its ops run one after the other."""

    def __init__(self, program: Program, rank: int) -> None:
        self.rank = rank
        super().__init__(program)

    def computed(self, tables: ProgramTables) -> Bools:
        # As in `State`: the query atoms that this rank attends for.
        marks = np.zeros(self.atoms.num_token_atoms, dtype=bool)
        queries = trim_pairs(tables.pairs, self.program.mask)[:, Pair.Q_SPAN]
        _, atom = ranges(*self.atoms.tokens(tables.pairs[:, Pair.SEQ], *queries.T))
        marks[atom] = True
        return marks

    def check_owners(self) -> None:
        # `verify_owned` has looked at what all ranks own.
        pass

    def brings_copies(self, rows: Ints) -> bool:
        # As in `State`, to this rank.
        return super().brings_copies(rows[rows[:, Transfer.DST] == self.rank])

    def incomplete(self, kind: Kind, want: Ints) -> Bools:
        if kind == Kind.KV_GRAD:
            return self.parts[kind][self.owned_index] != 1
        return super().incomplete(kind, want)

    def check_ops(self, ops: Sequence[Op]) -> None:
        # As in `State`, and that they are this rank's.
        super().check_ops(ops)
        for which, op in enumerate(ops):
            if not isinstance(op, Exchange) and op.rank != self.rank:
                raise self.error(which, f"it is an op of rank {op.rank} in the program of rank {self.rank}")

    def check_rows(self, phase: str, op: Exchange) -> Ints:
        if op.collective not in ("p2p", "all_to_all"):
            raise NotAloneError(f"{op.collective} in exchange {op.id} is proved of all its ranks at once, not of one")
        return super().check_rows(phase, op)

    def ends(self, kind: Kind, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        # As in `State`: what this rank sends, and what it is brought.
        sent, brought = (rows[rows[:, side] == self.rank] for side in (Transfer.SRC, Transfer.DST))
        (row, there), (other, here) = (
            self.index(np.full(len(own), self.rank), kind, own[:, Transfer.REGION]) for own in (sent, brought)
        )
        return sent[row], there, brought[other], here

    def check_given(self, kind: Kind, there: Ints, rows: Ints) -> None:
        if kind != Kind.KV_GRAD:
            whole = (self.parts[kind][there] == 1) & (self.count[kind][there] == self._whole(there))
            self.require(whole, rows, "it is sent before it is complete, so that no rank can be proved alone")

    def arriving(self, kind: Kind, there: Ints, here: Ints) -> Ints:
        # What comes is complete, but for gradients of keys, whose contributions are not counted.
        del there
        return np.zeros(len(here), dtype=np.int64) if kind == Kind.KV_GRAD else self._whole(here)

    def _whole(self, places: Ints) -> Ints:
        cell = np.searchsorted(self.places.base, places, side="right") - 1
        seq = self.places.cells[cell] // self.places.num_ranks
        atom = (places - self.places.base[cell] + self.places.first[seq]) // self.num_heads
        return (self.key_last - self.key_first)[atom]


def peers_of(program: RankProgram) -> list[int]:
    """The ranks that a rank's exchanges name, without itself."""
    exchanges = [op for op in (*program.forward, *program.backward) if isinstance(op, Exchange)]
    ends = concat([op.transfers for op in exchanges], Transfer.WIDTH)[:, Transfer.ENDS]
    ways = concat([op.routes for op in exchanges], Route.WIDTH)[:, Route.STATIONS]
    groups = np.array(sorted({rank for op in exchanges for rank in op.group}), dtype=np.int64)
    named: list[int] = np.unique(np.concatenate([ends.ravel(), ways.ravel(), groups])).tolist()
    return [rank for rank in named if rank != program.rank]


def verify_peers(own: RankProgram, others: Mapping[int, RankProgram]) -> None:
    """Check that a rank and each of those that it exchanges with list the same transfers between
    them, in one order, on the same ways, and the same collectives and traffic classes.

    `others`: programs by rank, of all that `own` names.

    Raises:
        InvalidProgramError: they do not; names two ranks and an exchange.
    """
    for phase in ("forward", "backward"):
        ours = _Listed.of(getattr(own, phase))
        for rank, other in others.items():
            mine, yours = ours.shared(rank), _Listed.of(getattr(other, phase)).shared(own.rank)
            odd = [_first_difference(one, two) for one, two in zip(mine[:2], yours[:2], strict=True)]
            odd += [at for at in sorted(mine[2] | yours[2]) if mine[2].get(at) != yours[2].get(at)]
            for at in odd:
                if at is not None:
                    raise InvalidProgramError(
                        f"ranks {own.rank} and {rank}: {phase} exchange {at} is not the same transfers, ways, "
                        "collective and traffic class on both"
                    )


class _Listed(NamedTuple):
    """All that a rank lists in one phase: `rows` [n] of (id, *`Transfer`), `routes` [m] of (id,
    *`Route`), and by id what the ranks of an exchange call it by: whether it moves, its collective
    and group.
    """

    rows: Ints
    routes: Ints
    calls: dict[int, tuple[bool, str, tuple[int, ...]]]

    @classmethod
    def of(cls, ops: Sequence[Op]) -> _Listed:
        exchanges = [op for op in ops if isinstance(op, Exchange)]
        rows = _with_ids([(op.id, op.transfers) for op in exchanges], Transfer.WIDTH)
        routes = _with_ids([(op.id, op.routes) for op in exchanges], Route.WIDTH)
        moved = set(rows[is_moved(rows[:, 1 + Transfer.KIND]), 0].tolist())
        calls = {op.id: (op.moves or op.id in moved, op.collective, op.group) for op in exchanges}
        return cls(rows, routes, calls)

    def shared(self, rank: int) -> tuple[Ints, Ints, dict[int, tuple[bool, str, tuple[int, ...]]]]:
        # Rows by id and ends, routes, and calls that concern `rank`, too.
        way = self.routes[(self.routes[:, 1:][:, Route.STATIONS] == rank).any(axis=1)]
        ends = _ends(self.rows, (1 + Transfer.SRC, 1 + Transfer.DST))
        chosen = (self.rows[:, 1:][:, Transfer.ENDS] == rank).any(axis=1)
        chosen |= np.isin(ends, _ends(way, (1 + Route.SRC, 1 + Route.DST)))
        routes = self.routes[np.isin(_ends(self.routes, (1 + Route.SRC, 1 + Route.DST)), ends[chosen])]
        rows = self.rows[chosen]
        rows = rows[np.lexsort((rows[:, 1 + Transfer.DST], rows[:, 1 + Transfer.SRC], rows[:, 0]))]
        ids = set(rows[:, 0].tolist())
        calls = {at: call for at, call in self.calls.items() if at in ids or rank in call[2]}
        return rows, np.unique(routes, axis=0), calls


_BITS = 20  # more than a rank takes


def _ends(rows: Ints, columns: tuple[int, int]) -> Ints:
    return rows[:, 0] << 2 * _BITS | rows[:, columns[0]] << _BITS | rows[:, columns[1]]


def _with_ids(tables: Sequence[tuple[int, Rows]], width: int) -> Ints:
    rows, ids = numbered(tables, width)
    return np.column_stack([ids, rows])


def _first_difference(mine: Ints, yours: Ints) -> int | None:
    # The id of the first exchange of which two tables have different rows; None: they are equal.
    if mine.shape == yours.shape and (mine == yours).all():
        return None
    for one, other in zip(mine.tolist(), yours.tolist(), strict=False):
        if one != other:
            return min(one[0], other[0])
    longer = mine if len(mine) > len(yours) else yours
    return int(longer[min(len(mine), len(yours)), 0])


def verify_own_steps(runs: CompiledRank, plan: MicrobatchPlan, *, backward: bool) -> None:
    """Check the steps of a rank: nothing is read before it is there, and exchanges start in the order
    that all ranks keep to.

    Raises:
        InvalidProgramError: they are not; names the ops.
    """
    program = runs.program
    for ops, order in ((program.forward, runs.forward), (program.backward, runs.backward))[: 1 + backward]:
        verify_steps(ops, order.steps, program.rank, plan.mask)
        started = [ops[step.op] for step in order.steps if isinstance(step, Start)]
        exchanges = [op for op in started if isinstance(op, Exchange)]
        keys = [
            order.issue.key(op.id, moved=op.moves or bool(is_moved(as_array(op.transfers)[:, Transfer.KIND]).any()))
            for op in exchanges
        ]
        for (one, before), (other, behind) in pairwise(zip(exchanges, keys, strict=True)):
            if before >= behind:
                raise InvalidProgramError(
                    f"rank {program.rank} starts exchange {one.id} before exchange {other.id}; in the order of all "
                    "ranks it comes behind it"
                )

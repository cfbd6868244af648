"""Programs with one thing changed: what is accepted must compute the same."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_balance import reference
from megatron_balance.compile.join import join, split
from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.proof.meaning import verify, verify_rank
from megatron_balance.compile.proof.runs import peers_of, provable, verify_peers, verify_runs
from megatron_balance.errors import BalanceError, ConfigError, InfeasibleError, InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, Merge, Op, Policy, Program, RankProgram
from tools.faults.cases import Outcome, SlowError, within
from tools.faults.plans import HEADS

LIMIT_S = 30.0
_STATIONS = (Route.SRC, Route.DST, Route.SEND_PROXY, Route.RECEIVE_PROXY)
PER_PLAN = 25
"""Mutants of one plan."""


@contextmanager
def mutants() -> Iterator[Callable[[int], Outcome]]:
    def one(number: int) -> Outcome:
        found = program_of(number // PER_PLAN)
        return Outcome("refused by the planner") if found is None else try_mutant(number, *found)

    yield one


@lru_cache(maxsize=1)
def program_of(number: int) -> tuple[MicrobatchPlan, Program] | None:
    """A small program of any planner, product's or tests'; None: the planner refused."""
    from tests.support.strategies import ALL_PLANNERS, Case, plan

    draw = random.Random(f"mutants {number}")
    name, ranks = ALL_PLANNERS[number % len(ALL_PLANNERS)], draw.randint(2, 6)
    heads, kv_heads = draw.choice(HEADS)
    lengths = tuple(draw.choice((1, 2, draw.randint(1, 12), draw.randint(1, 50))) for _ in range(draw.randint(1, 4)))
    cluster = Cluster(ranks, draw.choice([size for size in (1, 2, 3, ranks) if ranks % size == 0]))
    mask = "full" if draw.random() < 0.2 else "causal"
    model = Model(heads, kv_heads, 4, hidden_size=32, ffn_size=64, attention=mask)
    routing = draw.choice((None, (1, 1), (2, 1)))
    case = Case(Batch(lengths), cluster, model, None, number, draw.random() < 0.5, routing)
    policy: Policy = draw.choice(("keep", "replay"))
    try:
        planned = plan(name, case)
    except (ConfigError, InfeasibleError):
        return None
    return planned, expand(planned, policy)


def try_mutant(number: int, planned: MicrobatchPlan, program: Program) -> Outcome:
    """Change one thing of the program, and ask both proofs; the reference judges what they accept."""
    kind, mutant = changed(program, random.Random(f"mutant {number}"))
    if mutant == program:
        return Outcome("no change")
    try:
        with within(LIMIT_S):
            try:
                verify(mutant)
            except InvalidProgramError:
                return Outcome(f"{kind}: refused")
            same = _computes_the_same(program, mutant)
            try:
                verify_runs(planned, mutant)
            except InvalidProgramError:
                return Outcome(
                    f"{kind}: refused by what runs",
                    "" if same else "the proof of the program accepted what computes something else",
                )
    except SlowError as error:
        return Outcome(f"{kind}: slow", str(error))
    except Exception as error:  # a proof that raises anything else is a fault
        return Outcome(f"{kind}: raises", f"{type(error).__name__}: {error}")
    return Outcome(f"{kind}: accepted", "" if same else "accepted, and computes something else")


@contextmanager
def by_ranks() -> Iterator[Callable[[int], Outcome]]:
    """Change program after program of plans whose ranks can be proved one by one."""

    def one(number: int) -> Outcome:
        found = program_of(number // PER_PLAN)
        if found is None or not provable(found[0]):
            return Outcome("none of this planner")
        return try_by_ranks(number, found[1])

    yield one


def try_by_ranks(number: int, program: Program) -> Outcome:
    """Change a program: what the proof of the whole refuses, some rank's must refuse, too."""
    kind, mutant = changed(program, random.Random(f"rank {number}"))
    if refused_by_a_rank(program):
        return Outcome("not alone")
    by_a_rank = refused_by_a_rank(mutant)
    try:
        verify(of_parts(mutant))
    except (InvalidProgramError, IndexError) as error:
        if not by_a_rank and same_but_for_ids(mutant):
            return Outcome(f"{kind}: the same but for ids")
        return Outcome(f"{kind}: refused", "" if by_a_rank else f"no rank refuses: {error}")
    return Outcome(f"{kind}: accepted, {'refused by a rank' if by_a_rank else 'by all ranks, too'}")


def refused_by_a_rank(program: Program) -> bool:
    """Whether the proof of some rank refuses its part of a program, or the program has no parts."""
    shape = (program.lengths, program.num_heads, program.num_kv_heads)
    try:
        parts = split(program)
        for each in parts:
            verify_rank(each, shape, program.num_ranks, program.policy)
            verify_peers(each, {rank: parts[rank] for rank in peers_of(each)})
    except (InvalidProgramError, IndexError):
        return True
    return False


def same_but_for_ids(program: Program) -> bool:
    """Whether the parts are those of a program that holds, in which exchanges of ranks that have
    nothing to do with one another share an id.

    A rank uses ids to tell its own exchanges apart, in their order, and to find them again at the
    ranks that are in them (a message's tag). So other ids that rise as before on each rank, and are
    equal on all ranks of an exchange, change nothing that any rank does. `told_apart` gives such ids:
    what shares one has no rank in common, so no rank could take one for the other.
    """
    shape = (program.lengths, program.num_heads, program.num_kv_heads, program.policy)
    try:
        verify(join(told_apart(split(program)), *shape))
    except (InvalidProgramError, IndexError):
        return False
    return True


def told_apart(parts: list[RankProgram]) -> list[RankProgram]:
    """The parts with an id of its own for each exchange; what shares an id and a rank is one exchange,
    and the ids of the remap stay.
    """
    forward, backward = (_least_ranks([getattr(each, phase) for each in parts]) for phase in ("forward", "backward"))

    def renumbered(part: RankProgram, ops: Sequence[Op], least: Mapping[tuple[int, int], int]) -> Iterator[Op]:
        kept = part.remap_in + 1  # ids up to it mean a remap
        for op in ops:
            if isinstance(op, Exchange) and op.id > kept:
                yield replace(op, id=kept + (op.id - kept) * len(parts) + least[op.id, part.rank])
            else:
                yield op

    return [
        replace(
            part,
            forward=tuple(renumbered(part, part.forward, forward)),
            backward=tuple(renumbered(part, part.backward, backward)),
        )
        for part in parts
    ]


def _least_ranks(parts: Sequence[Sequence[Op]]) -> dict[tuple[int, int], int]:
    """By id and rank, the least of all ranks that are linked to it by exchanges of this id."""
    least: dict[tuple[int, int], int] = {}
    linked: list[tuple[int, set[int]]] = []
    for rank, ops in enumerate(parts):
        for op in ops:
            if isinstance(op, Exchange):
                ends = (end for row in op.transfers for end in row[Transfer.ENDS])
                ways = (row[at] for row in op.routes for at in _STATIONS)
                linked.append((op.id, {rank, *op.group, *ends, *ways}))
    changed = True
    for at, ranks in linked:
        least.update({(at, rank): rank for rank in ranks})
    while changed:
        changed = False
        for at, ranks in linked:
            lowest = min(least[at, rank] for rank in ranks)
            changed |= any(least[at, rank] != lowest for rank in ranks)
            least.update({(at, rank): lowest for rank in ranks})
    return least


def of_parts(program: Program) -> Program:
    """The program that the parts of all ranks make: without routes of what nobody moves, say."""
    return join(split(program), program.lengths, program.num_heads, program.num_kv_heads, program.policy)


def _computes_the_same(program: Program, mutant: Program) -> bool:
    from tests.support import dense

    x = dense.draw(program.lengths, program.num_heads, program.num_kv_heads)
    truth = reference.run(program, x.q, x.k, x.v, x.scale, x.dout)
    try:
        ours = reference.run(mutant, x.q, x.k, x.v, x.scale, x.dout)
    except (BalanceError, IndexError, KeyError, ValueError, AssertionError):
        return False
    return all(
        dense.worst(getattr(ours, name), getattr(truth, name)) < 1e-9 for name in ("out", "q_grad", "k_grad", "v_grad")
    )


def changed(program: Program, draw: random.Random) -> tuple[str, Program]:
    phase = draw.choice(("forward", "backward"))
    ops: list[Any] = list(getattr(program, phase))
    if not ops:
        return "none", program
    at = draw.randrange(len(ops))
    op = ops[at]
    how = draw.choice(("drop", "swap", "twice", "number", "number", "number", "row", "row", "field", "field"))
    if how == "drop":
        del ops[at]
    elif how == "twice":
        ops.insert(at, op)
    elif how == "swap":
        other = draw.randrange(len(ops))
        ops[at], ops[other] = ops[other], op
    elif how == "field":
        ops[at] = _other_field(op, program, draw)
    else:
        ops[at] = _other_rows(op, how, draw)
    return how, replace(program, **{phase: tuple(ops)})


def _tables(op: Any) -> list[str]:
    match op:
        case Exchange():
            return ["transfers", *(["routes"] if op.routes else [])]
        case Attend() | AttendGrad():
            return ["pairs"]
        case Merge():
            return ["values"]
    raise AssertionError(op)


def _other_rows(op: Any, how: str, draw: random.Random) -> Any:
    """The op with another number in a row, or a row less, or twice, or in another place."""
    name = draw.choice(_tables(op))
    rows = [list(row) for row in getattr(op, name)]
    if not rows:
        return op
    width, row = len(rows[0]), draw.randrange(len(rows))
    if how == "number":
        rows[row][draw.randrange(width)] += draw.choice((-1, 1, -1, 1, 2, -5, 1000, -1000))
    else:
        what = draw.choice(("drop", "twice", "move"))
        if what == "drop":
            del rows[row]
        elif what == "twice":
            rows.insert(row, list(rows[row]))
        else:
            rows.insert(draw.randrange(len(rows)), rows.pop(row))
    return replace(op, **{name: Rows.of(width, rows)})


def _other_field(op: Any, program: Program, draw: random.Random) -> Any:
    """The op with another id, group or rank."""
    if isinstance(op, Exchange):
        if draw.random() < 0.6 or not op.group:
            return replace(op, id=op.id + draw.choice((-1, 1, 7)))
        group = list(op.group)
        group[draw.randrange(len(group))] = draw.randrange(program.num_ranks)
        return replace(op, group=tuple(group))
    return replace(op, rank=draw.randrange(program.num_ranks))

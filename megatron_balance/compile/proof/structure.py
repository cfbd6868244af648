"""Check the structure of a plan, before it is a program, in about the time of sorting it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array, key, key_bounds, key_position, key_seq, ranges, run_bounds
from megatron_balance.ir.columns import Move, Placed, Task
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, SharedZone, TaskTable, Zone
from megatron_balance.ir.step import StepPlan
from megatron_balance.patterns import PATTERNS

# Every plan of a training job goes through this, in the planning process. That the program of a
# plan computes what it shall is proved by `compile.proof.meaning`, which takes longer.

# Complaints of one plan that its error lists.
MOST_NAMED = 4


def verify_plans(step: StepPlan) -> None:
    """Check the structure of all plans of a step, those of its ticks included, by `verify_plan`."""
    for plan in (*step.plans, *(one.plan for ticks in step.ticks for one in ticks)):
        verify_plan(plan)


def verify_plan(plan: MicrobatchPlan) -> None:
    """Check that a plan names ranks, sequences and patterns that are there, and every query, with
    its keys, once. Raises InvalidProgramError: it does not; names the planner and what is wrong.
    """
    wrong: list[str] = []
    for complaint in _complaints(plan):
        wrong.append(complaint)
        if len(wrong) == MOST_NAMED:
            break
    if wrong:
        raise InvalidProgramError(f"plan of {plan.planner}: " + "; ".join(wrong))


def _complaints(plan: MicrobatchPlan) -> Iterator[str]:
    ranks, per_node = plan.num_ranks, plan.ranks_per_node
    if min(ranks, per_node, plan.num_heads, plan.num_kv_heads) < 1:
        yield f"{ranks} ranks, {per_node} a node, {plan.num_heads} heads, {plan.num_kv_heads} of keys: at least 1 each"
        return
    if ranks % min(per_node, ranks) or plan.num_heads % plan.num_kv_heads:
        yield f"{ranks} ranks in nodes of {per_node}, {plan.num_heads} heads over {plan.num_kv_heads}: no whole number"
    shortest = min(plan.lengths, default=1)
    if shortest < 1:
        yield f"sequence {plan.lengths.index(shortest)} has length {shortest}"
        return
    if isinstance(plan.mask, Forest) and plan.mask.lengths != plan.lengths:
        trees, lengths = (list(of[:MOST_NAMED]) for of in (plan.mask.lengths, plan.lengths))
        yield f"mask {plan.mask.name}: trees of {trees} tokens, sequences of {lengths}"
        return
    placed = list(chain.from_iterable(zone.seqs for zone in plan.zones))
    if placed and not 0 <= min(placed) <= max(placed) < len(plan.lengths):
        outside = next(seq for seq in placed if not 0 <= seq < len(plan.lengths))
        at, zone = next((at, zone) for at, zone in enumerate(plan.zones) if outside in zone.seqs)
        yield f"zone {at} ({zone.name}): there is no sequence {outside}"
        return
    for at, zone in enumerate(plan.zones):
        if zone.pattern not in PATTERNS:
            yield f"zone {at} ({zone.name}): there is no comm pattern {zone.pattern!r}"
        for complaint in _of_zone(zone, ranks) if isinstance(zone, Zone) else _of_fragments(zone, plan):
            yield f"zone {at} ({zone.name}): {complaint}"
    # All that are placed are there: as many, and as many different ones, are each of them once.
    if not len(placed) == len(set(placed)) == len(plan.lengths):
        counts = Counter(placed)
        lost = next(seq for seq in range(len(plan.lengths)) if counts[seq] != 1)
        yield f"sequence {lost} is in {counts[lost]} zones"
    yield from _of_layers(plan)


def _of_zone(zone: Zone, num_ranks: int) -> Iterator[str]:
    if not zone.ranks or len(set(zone.ranks)) < len(zone.ranks):
        yield "no ranks, or one twice"
    elif not 0 <= min(zone.ranks) <= max(zone.ranks) < num_ranks:
        yield f"ranks {min(zone.ranks)} to {max(zone.ranks)}, there are {num_ranks}"
    if zone.group_size < 0 or (zone.group_size and len(zone.ranks) % zone.group_size):
        yield f"groups of {zone.group_size} in {len(zone.ranks)} ranks"


def _of_fragments(zone: TaskTable | SharedZone, plan: MicrobatchPlan) -> Iterator[str]:
    fragments = as_array(zone.fragments)
    holders = fragments[:, Placed.RANK]
    if not len(fragments):  # of an empty batch
        if isinstance(zone, TaskTable) and len(zone.tasks):
            yield "tasks without fragments"
        return
    if holders.min() < 0 or holders.max() >= plan.num_ranks:
        yield "a fragment on a rank that is not there"
        return
    wrong = misplaced(fragments, plan.lengths)
    if len(wrong):
        _, seq, start, stop = wrong[0].tolist()
        yield f"tokens [{start}:{stop}) of sequence {seq} overlap, are empty, or leave some out"
        return
    if isinstance(zone, TaskTable):
        yield from _of_tasks(as_array(zone.tasks), zone.seqs, plan)


def misplaced(placed: Ints, lengths: Sequence[int]) -> Ints:
    """`Placed` rows that overlap, are empty, or leave out tokens of the sequences that they are of."""
    by_place = placed[np.lexsort((placed[:, Placed.START], placed[:, Placed.SEQ]))]
    seqs, starts, stops = (by_place[:, column] for column in (Placed.SEQ, Placed.START, Placed.STOP))
    first = np.append(True, seqs[1:] != seqs[:-1])
    last = np.append(first[1:], True)
    begins = np.where(first, 0, np.append(0, stops[:-1]))
    return by_place[(starts >= stops) | (starts != begins) | (last & (stops != np.array(lengths)[seqs]))]


def _of_tasks(tasks: Ints, seqs: Sequence[int], plan: MicrobatchPlan) -> Iterator[str]:
    # Complaints about queries without all keys that they see, or with some twice.
    lengths, held = np.array(plan.lengths), np.array(seqs)
    if len(tasks) and not 0 <= tasks[:, Task.RANK].min() <= tasks[:, Task.RANK].max() < plan.num_ranks:
        yield "a task on a rank that is not there"
    seq, (k_start, k_stop) = tasks[:, Task.SEQ], tasks[:, Task.KEYS].T
    q_start, q_stop = tasks[:, Task.Q_START], tasks[:, Task.Q_STOP]
    if not np.isin(seq, held).all():
        yield "a task of a sequence that it does not hold"
        return
    empty = (q_start >= q_stop) | (k_start >= k_stop) | (q_start < 0) | (q_stop > lengths[seq])
    if empty.any():
        yield f"a task of sequence {seq[empty][0]} has no queries or no keys there"
        return
    begin, end = key_bounds(tasks[:, Task.QUERY])
    edges = np.unique(np.concatenate([begin, end, key(held, 0), key(held, lengths[held])]))
    own, low, high = key_seq(edges[:-1]), key_position(edges[:-1]), key_position(edges[1:])  # of runs of queries
    row, run = ranges(edges.searchsorted(begin), edges.searchsorted(end))  # each task's runs
    order = np.lexsort((k_start[row], run))
    row, run = row[order], run[order]
    first, needed = plan.mask.keys(own, low)[0], np.minimum(plan.mask.keys(own, high - 1)[1], lengths[own])
    seen = k_start[row] < needed[run]  # of others the mask hides all
    row, run = row[seen], run[seen]
    bounds = run_bounds(run[1:] != run[:-1], len(run))
    found = np.full((2, len(own)), -1)
    found[0, run[bounds[:-1]]], found[1, run[bounds[:-1]]] = k_start[row[bounds[:-1]]], k_stop[row[bounds[1:] - 1]]
    wrong = (found[0] < 0) | (found[0] > first) | (found[1] < needed)
    wrong &= low < lengths[own]  # what lies between the end of a sequence and the next is none
    wrong[run[1:][(run[1:] == run[:-1]) & (k_start[row[1:]] != k_stop[row[:-1]])]] = True
    for at in np.flatnonzero(wrong)[:1].tolist():
        keys = [(int(k_start[task]), int(k_stop[task])) for task in row[run == at][:MOST_NAMED]]
        yield (
            f"queries [{low[at]}:{high[at]}) of sequence {own[at]} have keys {keys}, not {first[at]} to {needed[at]}"
        )


def _of_layers(plan: MicrobatchPlan) -> Iterator[str]:
    moves = as_array(plan.moves)
    if len(moves):
        pairs = moves[:, [Move.SRC, Move.DST]]
        if pairs.min() < 0 or pairs.max() >= plan.num_ranks or (pairs[:, 0] == pairs[:, 1]).any():
            yield "the remap moves to a rank that is not there, or from a rank to itself"
        if moves[:, Move.TOKENS].min() < 1 or moves[:, Move.TOKENS].sum() > plan.num_tokens:
            yield f"the remap moves {int(moves[:, Move.TOKENS].sum())} tokens of {plan.num_tokens}"
    routing = plan.routing
    if routing is None:
        return
    if min(routing.ranks_per_nic, routing.min_tokens, routing.pieces) < 1:
        yield f"{routing}: at least 1 each"
    outside = [at for at in routing.zones if at != REMAP and not 0 <= at < len(plan.zones)]
    if outside:
        yield f"routing of zone {outside[0]}, there are {len(plan.zones)}"

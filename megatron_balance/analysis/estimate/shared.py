"""Seconds of a zone in waves (`patterns.waves`) by closed forms.

The rank with most heads of each group is priced, launch by launch and wave by wave.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.analysis.estimate.times import (
    Bulk,
    PricedMachine,
    WaveTimes,
    ZoneTimes,
    by_rank,
    exchange_heads,
    index_of,
)
from megatron_balance.cost.base import ADD, Floats, Ints
from megatron_balance.cost.kernel import distinct_rows
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.plan import SharedZone
from megatron_balance.ir.program import Kind
from megatron_balance.patterns.base import Context
from megatron_balance.patterns.head_exchange import head_counts, head_slices
from megatron_balance.patterns.waves import Need, Schedule, schedule


def shared_zone(zone: SharedZone, context: Context, machine: PricedMachine) -> ZoneTimes:
    """A zone whose groups of ranks exchange heads and attend in waves.

    Raises:
        InvalidProgramError: groups of no rank, or no wave.
    """
    made = schedule(zone, context.mask)
    size, groups = made.size, len(made.groups)
    ranks = (np.array(made.groups)[:, None] * size + np.arange(size)).ravel()
    runs = made.run_tokens().astype(np.float64)
    times = ZoneTimes(ranks, runs.ravel(), index_of(ranks.tolist()), rounds=groups)
    queries, keys = head_counts(head_slices(context.num_heads, context.num_kv_heads, size))
    heads = int(queries.max()), int(keys.max())
    times.waves = WaveTimes(_launch_seconds(made, heads, machine), *_waves(made, heads[1], machine))
    if size > 1:
        _exchanges(times, times.waves, made, heads, machine)
    needs = made.needs
    come = [by_rank(own[:, Need.TO], own[:, Need.STOP] - own[:, Need.START], groups) for own in _by_wave(made)]
    others = (made.tokens.sum(axis=2) * (1 - 1 / size)).max(axis=0)
    largest = np.max([others, *come], axis=0) * heads[1]
    received = by_rank(needs[:, Need.TO], needs[:, Need.STOP] - needs[:, Need.START], groups) * heads[1]
    times.query_heads, times.kv_heads, times.sent = (
        np.broadcast_to(np.repeat(each, size) if isinstance(each, np.ndarray) else each, len(ranks))
        for each in (times.query_heads, times.kv_heads + received, times.sent)
    )
    times.largest = np.repeat(largest, size).astype(np.float64)
    return times


def _exchanges(
    times: ZoneTimes, waves: WaveTimes, made: Schedule, heads: tuple[int, int], machine: PricedMachine
) -> None:
    """The all-to-alls of groups of several ranks, inputs in one part or two."""
    group = times.ranks[: made.size].tolist()
    by_part = made.tokens
    exchange_heads(times, group, by_part.sum(axis=(0, 2)).astype(np.float64), heads, machine)
    _pack_alike(times)
    if len(by_part) == 1:
        return
    by_part = by_part.max(axis=2).astype(np.float64) * made.size  # as if all held what the fullest does
    first, late = (ZoneTimes(times.ranks, 0.0, times.at) for _ in by_part)
    for each, num_tokens in zip((first, late), by_part, strict=True):
        exchange_heads(each, group, num_tokens, heads, machine, inputs_only=True)
        _pack_alike(each)
    assert late.inputs is not None
    assert late.input_grads is not None
    times.inputs, times.input_grads = first.inputs, first.input_grads
    waves.own, waves.late = 2, (late.inputs, late.input_grads)


def _pack_alike(times: ZoneTimes) -> None:
    """Let all groups pack and place as much as the fullest one."""
    for bulk in (times.inputs, times.outputs, times.output_grads, times.input_grads):
        if bulk is not None:
            bulk.packed_bytes, bulk.placed_bytes = (float(np.max(n)) for n in (bulk.packed_bytes, bulk.placed_bytes))


def _by_wave(made: Schedule) -> list[Ints]:
    bounds = np.searchsorted(made.needs[:, Need.WAVE], np.arange(made.num_waves + 1))
    return [made.needs[a:b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def _launch_seconds(made: Schedule, heads: tuple[int, int], machine: PricedMachine) -> tuple[Floats, Floats]:
    """Of each group, own work and each wave [groups, own + waves], forward with merges, and backward
    with the sums of gradients.
    """
    own = len(made.parts)
    shape = len(made.groups), own + made.num_waves
    counts = [len(rows) for tasks in made.tasks for rows in tasks]
    rows = np.concatenate([rows for tasks in made.tasks for rows in tasks])
    launch, count = np.repeat(np.arange(len(counts)), counts), len(counts)
    pairs = np.zeros((len(rows), Pair.WIDTH), dtype=np.int64)
    pairs[:, Pair.QUERY_SPAN], pairs[:, Pair.K_SPAN] = rows[:, :3], rows[:, 3:]
    pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = heads
    forward, backward = (machine.cost.attend_s(pairs, launch, count, backward=b) for b in (False, True))
    queries = distinct_rows(pairs[:, Pair.QUERY], launch, count)
    keys = distinct_rows(pairs[:, Pair.KEY], launch, count)
    num_bytes = queries * machine.row_bytes[Kind.Q_GRAD] + keys * machine.row_bytes[Kind.KV_GRAD]
    merges = [
        machine.cost.merge_s(tokens) if tokens else 0.0 for tokens in (queries / machine.model.num_heads).tolist()
    ]
    forward = forward.reshape(shape)
    forward[:, own:] += np.array(merges).reshape(shape)[:, own:]
    sums = np.array([ADD * machine.pack_s(each) for each in num_bytes.tolist()])
    return forward, backward.reshape(shape) + sums.reshape(shape)


def _waves(made: Schedule, kv_heads: int, machine: PricedMachine) -> tuple[list[Bulk], list[Bulk], list[Ints]]:
    """Keys of each wave, their gradients, and the groups [n, 2] that exchange anything in it."""
    nics, size = machine.nics, made.size
    first = np.array(made.groups, dtype=np.int64) * size
    node, nic = nics.node(first), nics.nic(first)
    sharing = min(size, machine.cluster.ranks_per_nic)
    there: list[Bulk] = []
    back: list[Bulk] = []
    partners: list[Ints] = []
    for rows in _by_wave(made):
        src, dst = rows[:, Need.FROM], rows[:, Need.TO]
        token_heads = (rows[:, Need.STOP] - rows[:, Need.START]) * kv_heads
        across = (node[src] != node[dst]) | (size > machine.cluster.node_size)
        busy, totals = np.zeros((2, len(first))), np.zeros((2, len(first)))  # in token-heads, but for the links
        for way, end in enumerate((src, dst)):
            totals[way] = by_rank(end, token_heads, len(first))
            inside = by_rank(end, token_heads * ~across, len(first)) / machine.intra.bytes_per_s
            between = by_rank(nic[end], token_heads * across * sharing, int(nic.max(initial=0)) + 1)
            busy[way] = np.maximum(inside, between[nic] / machine.inter.bytes_per_s)
        alpha = machine.inter.alpha_s if across.any() else machine.intra.alpha_s
        longest = busy.max(axis=0)
        for kind, bulks, (out, into) in ((Kind.KV, there, totals), (Kind.KV_GRAD, back, totals[::-1])):
            each = machine.row_bytes[kind]
            seconds = np.where(totals.sum(axis=0) > 0, each * longest + alpha, 0.0)
            bulks.append(Bulk(seconds, each * out, each * into if kind == Kind.KV_GRAD else 0.0, adds=True))
        partners.append(np.column_stack(np.divmod(np.unique(src * len(first) + dst), len(first))))
    return there, back, partners

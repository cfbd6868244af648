"""All ranks of a program in one process, NumPy fp64: the judge of the executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias, assert_never

import numpy as np

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Bools, Floats, Ints
from megatron_balance.ir.columns import Pair, Rows
from megatron_balance.ir.forest import Forest, path_positions
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.program import (
    KEY_SIDE,
    MOVED,
    Attend,
    AttendGrad,
    Exchange,
    Kind,
    Merge,
    Op,
    Program,
    is_remap_move,
)
from megatron_balance.ir.text import KIND_NAMES, op_lines

Region: TypeAlias = tuple[int, int, int, int, int]  # seq, start, stop, head_start, head_stop
Slices: TypeAlias = tuple[slice, slice]  # tokens of the batch, heads


@dataclass(frozen=True)
class Result:
    """Outputs and gradients of all ranks, put together: one array per sequence.

    `out` [L, H, V] and `q_grad` [L, H, D], `lse` [L, H] (natural log of the summed exponentials of
    scaled scores), `k_grad` [L, G, D] and `v_grad` [L, G, V]. Gradients are None after a forward
    alone.
    """

    out: tuple[Floats, ...]
    lse: tuple[Floats, ...]
    q_grad: tuple[Floats, ...] | None = None
    k_grad: tuple[Floats, ...] | None = None
    v_grad: tuple[Floats, ...] | None = None


def run(  # noqa: PLR0913  a call's tensors and how they are scored
    program: Program,
    q: Sequence[Floats],
    k: Sequence[Floats],
    v: Sequence[Floats],
    scale: float,
    dout: Sequence[Floats] | None = None,
    *,
    softcap: float = 0.0,
) -> Result:
    """Outputs of the program and, given `dout`, its gradients.

    One per sequence: q [L, H, D], dout [L, H, V], k [L, G, D], v [L, G, V]; scale multiplies the
    scores; `softcap`: if not 0, what is left of them is softcap * tanh(score / softcap).

    Raises InvalidProgramError: an op reads what its rank does not hold, or an output is not
    complete at its owner.
    """
    if not program.lengths:
        gradients = () if dout is not None else None
        return Result((), (), gradients, gradients, gradients)
    machine = _ReferenceRanks(program, (q[0].shape[2], v[0].shape[2]), (scale, softcap))
    machine.place(Kind.Q, _concat(q))
    machine.place(Kind.KV, np.concatenate([_concat(k), _concat(v)], axis=2))
    machine.execute("forward", program.forward)
    final = machine.collect(Kind.OUT)
    out, lse = final[..., :-1], final[..., -1]
    if dout is None:
        return Result(machine.by_sequence(out), machine.by_sequence(lse))
    if program.policy is None:
        raise InvalidProgramError("the program is forward only (policy none); gradients need one made by `transpose`")
    if program.policy == "replay":
        machine.forget_received()
    machine.place(Kind.OUT_GRAD, np.concatenate([_concat(dout), final], axis=2))
    machine.execute("backward", program.backward)
    q_grad, kv_grad = machine.collect(Kind.Q_GRAD), machine.collect(Kind.KV_GRAD)
    k_grad, v_grad = np.split(kv_grad, [machine.head_dim], axis=2)
    return Result(*(machine.by_sequence(table) for table in (out, lse, q_grad, k_grad, v_grad)))


def owned_rows(owned: Rows, values: Sequence[Floats]) -> Floats:
    """The rows of per-sequence `values` that a rank holds, in its order: [tokens of the rank, ...]."""
    parts = [values[seq][start:stop] for seq, start, stop in owned]
    return np.concatenate([np.empty((0, *values[0].shape[1:])), *parts]) if len(values) else np.empty((0,))


def _concat(values: Sequence[Floats]) -> Floats:
    return np.concatenate([np.asarray(x, dtype=np.float64) for x in values])


# It takes every op at its word and shares nothing with the executor's lowering. For each kind of
# value a rank holds one table over all tokens and heads, with marks of what is there; reading what
# is not there is an error. Partials are kept apart until a Merge joins them. Clear rather than
# fast: meant for some thousand tokens.
#
# Shapes: T tokens of the whole batch (the sequences one after the other), H query heads, G key-
# value heads, D width of queries and keys, V of values and outputs.
class _Table:
    """Values of one kind that one rank holds: `values` [T, heads, width] where `there` [T, heads]."""

    def __init__(self, num_tokens: int, num_heads: int, width: int) -> None:
        self.values: Floats = np.zeros((num_tokens, num_heads, width))
        self.there: Bools = np.zeros((num_tokens, num_heads), dtype=bool)

    def put(self, at: Slices, values: Floats) -> None:
        self.values[at] = values
        self.there[at] = True


class _ReferenceRanks:
    """Values of all ranks, by kind and rank: one table (`copied`), or several by age (`partials`)."""

    def __init__(self, program: Program, widths: tuple[int, int], scoring: tuple[float, float]) -> None:
        self.program = program
        self.head_dim, self.value_dim = widths
        self.scale, self.softcap = scoring
        self.ratio = program.num_heads // program.num_kv_heads
        self.base = np.concatenate([[0], np.cumsum(program.lengths)]).astype(int).tolist()
        self.num_tokens = self.base[-1]
        self.copied: dict[Kind, list[_Table]] = {}
        self.partials: dict[Kind, list[list[_Table]]] = {kind: [[] for _ in program.owned] for kind in MOVED}
        self.now = ""

    # Regions and tables

    def slices(self, region: Region) -> Slices:
        seq, start, stop, head_start, head_stop = region
        return slice(self.base[seq] + start, self.base[seq] + stop), slice(head_start, head_stop)

    def owned(self, kind: Kind, rank: int) -> list[Slices]:
        return [
            self.slices((seq, start, stop, 0, self.num_heads(kind))) for seq, start, stop in self.program.owned[rank]
        ]

    def num_heads(self, kind: Kind) -> int:
        return self.program.num_kv_heads if kind in KEY_SIDE else self.program.num_heads

    def width(self, kind: Kind) -> int:
        # Numbers of one token and head: keys with values, outputs with LSE, output gradients with
        # the output and its LSE.
        dim, value_dim = self.head_dim, self.value_dim
        return {
            Kind.Q: dim,
            Kind.KV: dim + value_dim,
            Kind.OUT: value_dim + 1,
            Kind.OUT_GRAD: 2 * value_dim + 1,
            Kind.Q_GRAD: dim,
            Kind.KV_GRAD: dim + value_dim,
        }[kind]

    def table(self, kind: Kind) -> _Table:
        return _Table(self.num_tokens, self.num_heads(kind), self.width(kind))

    def by_sequence(self, values: Floats) -> tuple[Floats, ...]:
        return tuple(np.split(values, self.base[1:-1]))

    def place(self, kind: Kind, values: Floats) -> None:
        # Give every rank the rows of `values` [T, heads, width] that are owned there.
        self.copied[kind] = [self.table(kind) for _ in self.program.owned]
        for rank, held in enumerate(self.copied[kind]):
            for at in self.owned(kind, rank):
                held.put(at, values[at])

    def forget_received(self) -> None:
        for kind in (Kind.Q, Kind.KV):
            for rank, held in enumerate(self.copied[kind]):
                held.there[:] = False
                for at in self.owned(kind, rank):
                    held.there[at] = True

    def collect(self, kind: Kind) -> Floats:
        # The one partial of every owner region, put together over the ranks: [T, heads, width].
        self.now = f"the end, when {KIND_NAMES[kind]} should be complete"
        whole = self.table(kind)
        for rank in range(self.program.num_ranks):
            for at in self.owned(kind, rank):
                whole.put(at, self.take(kind, rank, at))
        if not whole.there.all():
            raise self.error(f"{int((~whole.there.all(axis=1)).sum())} tokens have no owner")
        return whole.values

    def take(self, kind: Kind, rank: int, at: Slices) -> Floats:
        # Remove and return the one partial of `at` that `rank` holds; a gradient that nobody
        # contributed to is zero.
        held = self.partials[kind][rank]
        counts = sum((t.there[at].astype(int) for t in held), np.zeros((1, 1), dtype=int))
        if counts.max(initial=0) > 1:
            raise self.error(f"rank {rank} holds {counts.max()} partials of {KIND_NAMES[kind]} there, not merged")
        if kind == Kind.OUT and counts.min(initial=1) < 1:
            raise self.error(f"rank {rank} holds no partial of {KIND_NAMES[kind]} there")
        values = np.zeros_like(self.table(kind).values[at])
        for part in held:
            values += np.where(part.there[at][..., None], part.values[at], 0.0)
            part.there[at] = False
        self.partials[kind][rank] = [t for t in held if t.there.any()]
        return values

    # Ops

    def execute(self, phase: Literal["forward", "backward"], ops: Sequence[Op]) -> None:
        for index, op in enumerate(ops):
            lines = op_lines(op, self.program.num_heads, self.program.num_kv_heads)
            self.now = "\n".join([f"{phase} op {index}:", *islice(lines, 6)])
            match op:
                case Exchange():
                    self.exchange(op, forward=phase == "forward")
                case Attend():
                    self.attend(op)
                case AttendGrad():
                    self.attend_grad(op)
                case Merge():
                    self.merge(op)
                case _:
                    assert_never(op)

    def exchange(self, op: Exchange, *, forward: bool) -> None:
        # All transfers at once: everything is read before anything arrives.
        arrivals: list[tuple[Kind, int, Slices, Floats]] = []
        given_up: list[tuple[Kind, int, Slices]] = []
        for code, seq, start, stop, head_start, head_stop, src, dst in op.transfers:
            kind, at = Kind(code), self.slices((seq, start, stop, head_start, head_stop))
            values = self.take(kind, src, at) if kind in MOVED else self.read(kind, src, at)
            arrivals.append((kind, dst, at, values))
            if is_remap_move(op.id, self.program.remap_in, forward=forward) and kind not in MOVED:
                given_up.append((kind, src, at))
        for kind, src, at in given_up:
            self.copied[kind][src].there[at] = False
        for kind, dst, at, values in arrivals:
            if kind in MOVED:
                self.partials[kind][dst].append(self.table(kind))
                self.partials[kind][dst][-1].put(at, values)
            else:
                self.copied[kind][dst].put(at, values)

    def read(self, kind: Kind, rank: int, at: Slices) -> Floats:
        held = self.copied[kind][rank]
        if not held.there[at].all():
            raise self.error(f"rank {rank} does not hold all of {KIND_NAMES[kind]} there")
        return held.values[at].copy()

    def merge(self, op: Merge) -> None:
        for code, *region in op.values:
            seq, start, stop, head_start, head_stop = region
            kind, at = Kind(code), self.slices((seq, start, stop, head_start, head_stop))
            held = self.partials[kind][op.rank]
            parts = [(t.values[at].copy(), t.there[at].copy()) for t in held if t.there[at].any()]
            values = self.table(kind).values[at]
            there = np.zeros(values.shape[:2], dtype=bool)
            for more, where in parts:
                both = there & where
                joined = _merge_outputs(values, more) if kind == Kind.OUT else values + more
                values = np.where(both[..., None], joined, np.where(where[..., None], more, values))
                there |= where
            if not there.all():
                raise self.error(f"rank {op.rank} holds no partial of some of {KIND_NAMES[kind]} there")
            for table in held:
                table.there[at] = False
            merged = self.table(kind)
            merged.put(at, values)
            self.partials[kind][op.rank] = [*(t for t in held if t.there.any()), merged]

    def attend(self, op: Attend) -> None:
        partial = self.table(Kind.OUT)
        for block in self.blocks(op):
            scores, v = self.scores(block, op.rank), self.keys(block, op.rank)[1]
            lse: Floats = np.logaddexp.reduce(scores, axis=2, initial=-np.inf)
            weights = np.exp(scores - np.where(block.seeing, lse, 0.0)[..., None])
            values = np.concatenate([weights @ v, lse[..., None]], axis=2)
            _scatter(partial, block.queries, block.heads, values, block.seeing)
        self.partials[Kind.OUT][op.rank].append(partial)

    def attend_grad(self, op: AttendGrad) -> None:
        q_partial, kv_partial = self.table(Kind.Q_GRAD), self.table(Kind.KV_GRAD)
        for block in self.blocks(op):
            scores, (k, v), q = self.scores(block, op.rank), self.keys(block, op.rank), self.queries(block, op.rank)
            final = self.gather(Kind.OUT_GRAD, op.rank, block.queries, block.heads, block.seeing)
            dout, out, lse = np.split(final, [self.value_dim, 2 * self.value_dim], axis=2)
            weights = np.exp(scores - lse)
            grad = weights * (dout @ v.swapaxes(1, 2) - (dout * out).sum(axis=2, keepdims=True)) * self.scale
            if self.softcap:
                grad *= 1 - (np.maximum(scores, -self.softcap) / self.softcap) ** 2
            _scatter(q_partial, block.queries, block.heads, grad @ k, block.seeing)
            kv_grad = np.concatenate([grad.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ dout], axis=2)
            # The query heads of a key-value head add up.
            for head, kv_head in enumerate((block.heads // self.ratio).tolist()):
                one, seen = kv_grad[head : head + 1], block.seen[head : head + 1]
                _scatter(kv_partial, block.keys, np.array([kv_head]), one, seen)
        self.partials[Kind.Q_GRAD][op.rank].append(q_partial)
        self.partials[Kind.KV_GRAD][op.rank].append(kv_partial)

    # What an attention op reads

    def blocks(self, op: Attend | AttendGrad) -> list[_Tile]:
        # The op's pairs, one block per sequence: all its queries by all its keys, and the pairs
        # that are asked for and visible.
        blocks: list[_Tile] = []
        for seq in sorted({row[Pair.SEQ] for row in op.pairs}):
            rows = [row for row in op.pairs if row[Pair.SEQ] == seq]
            queries, heads, keys = (
                np.unique(np.concatenate([np.arange(*row[columns]) for row in rows]))
                for columns in (Pair.Q_SPAN, Pair.Q_HEADS, Pair.K_SPAN)
            )
            wanted = np.zeros((len(heads), len(queries), len(keys)), dtype=bool)
            for _, q0, q1, h0, h1, k0, k1, g0, g1 in rows:
                if h0 // self.ratio < g0 or (h1 - 1) // self.ratio >= g1:
                    raise self.error(f"query heads [{h0}:{h1}) do not belong to key-value heads [{g0}:{g1})")
                wanted[
                    np.ix_((heads >= h0) & (heads < h1), (queries >= q0) & (queries < q1), (keys >= k0) & (keys < k1))
                ] = True
            wanted &= visible(self.program.mask, seq, queries, keys)
            blocks.append(_Tile(self.base[seq] + queries, heads, self.base[seq] + keys, wanted))
        return blocks

    def gather(self, kind: Kind, rank: int, tokens: Ints, heads: Ints, needed: Bools) -> Floats:
        # Values [heads, tokens, width] that `rank` holds; `needed` [heads, tokens] says which the
        # op really reads.
        held = self.copied[kind][rank]
        if (needed & ~held.there[np.ix_(tokens, heads)].T).any():
            raise self.error(f"rank {rank} does not hold all of {KIND_NAMES[kind]} that it needs")
        return held.values[np.ix_(tokens, heads)].swapaxes(0, 1)

    def queries(self, block: _Tile, rank: int) -> Floats:
        return self.gather(Kind.Q, rank, block.queries, block.heads, block.seeing)

    def keys(self, block: _Tile, rank: int) -> tuple[Floats, Floats]:
        # Keys and values [query heads, keys, D], each key-value head repeated for its query heads.
        both = self.gather(Kind.KV, rank, block.keys, block.heads // self.ratio, block.seen)
        k, v = np.split(both, [self.head_dim], axis=2)
        return k, v

    def scores(self, block: _Tile, rank: int) -> Floats:
        # Scaled scores [heads, queries, keys]; minus infinity where the op does not ask or the
        # query may not see.
        scores = self.queries(block, rank) @ self.keys(block, rank)[0].swapaxes(1, 2) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        return np.where(block.wanted, scores, -np.inf)

    def error(self, complaint: str) -> InvalidProgramError:
        return InvalidProgramError(f"reference: {complaint}, at {self.now}")


@dataclass(frozen=True)
class _Tile:
    """`queries`, `keys`: token rows of the batch; `heads`; `wanted` [heads, queries, keys]."""

    queries: Ints
    heads: Ints
    keys: Ints
    wanted: Bools

    @property
    def seeing(self) -> Bools:
        # Queries that see some key, [heads, queries]: the others take no part.
        return np.logical_or.reduce(self.wanted, axis=2)

    @property
    def seen(self) -> Bools:
        # Keys that some query sees, [heads, keys]: the others take no part.
        return np.logical_or.reduce(self.wanted, axis=1)


def visible(mask: Mask, seq: int, queries: Ints, keys: Ints) -> Bools:
    """Whether each query of a sequence sees each key, [queries, keys], by the mask's runs alone."""
    if not isinstance(mask, Forest):
        first, stop = mask.keys(np.full(len(queries), seq), queries)
        return (keys >= first[:, None]) & (keys < stop[:, None])
    # A key is seen by what lies below it and, if its segment is full, by all of that.
    first, stop = mask.queries(np.full(len(keys), seq), keys)
    shown = (queries[:, None] >= first) & (queries[:, None] < stop)
    place = np.array(path_positions(mask.trees[seq]))
    return shown & (place[queries][:, None] - place[keys] < mask.window) if mask.window else shown


def _merge_outputs(one: Floats, two: Floats) -> Floats:
    lse = np.logaddexp(one[..., -1], two[..., -1])
    out = sum(x[..., :-1] * np.exp(x[..., -1] - lse)[..., None] for x in (one, two))
    return np.concatenate([out, lse[..., None]], axis=-1)


def _scatter(table: _Table, tokens: Ints, heads: Ints, values: Floats, where: Bools) -> None:
    # Add `values` [heads, tokens, width] to the table where `where` [heads, tokens].
    head, token = np.nonzero(where)
    table.values[tokens[token], heads[head]] += values[head, token]
    table.there[tokens[token], heads[head]] = True

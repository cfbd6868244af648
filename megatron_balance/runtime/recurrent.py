"""Recurrent layers by a plan: their rows stay where the plan has them, states go from piece to piece.

`recurrent_layer` runs a recurrence, `causal_convolution` the short convolution before it; both are
differentiable and collective: every rank of the pool calls them in one order, also without tokens.
Shapes: T rows of this rank in the order of its linear layout, H heads, D channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_balance.compile.recurrent import carries_map, pieces
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, as_array, key, ranges
from megatron_balance.ir.columns import Fragment, Neighbours, Placed, Rows, Transfer
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import STATE_KINDS, RecurrentKind, RecurrentOp, RecurrentProgram
from megatron_balance.ir.segments import PathEnds
from megatron_balance.runtime.attention import differentiable_once
from megatron_balance.runtime.cuda import Streams
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels.recurrence import AffineRecurrence
from megatron_balance.runtime.lower.memory import as_bytes, wide_dtype
from megatron_balance.runtime.transport import receive, send

_Span: TypeAlias = tuple[int, int, int]  # seq, start, stop
_OfHeads: TypeAlias = tuple[_Span, int, int]  # head_start, head_stop
# Beyond those of attention's exchanges, which may be under way.
_TAG = 1 << 30
STREAM = "recurrent"
_NO_ROWS = Exchange(0, Rows(Transfer.WIDTH))


class _Part(NamedTuple):
    """A summary of some heads, as it is sent: with M or without."""

    span: _Span
    head_start: int
    head_stop: int
    with_map: bool


class _StateExchange(NamedTuple):
    """This rank's part of an exchange: what it sends and receives, by peer and in order."""

    id: int
    sends: dict[int, list[_Part]]
    receives: dict[int, list[_Part]]


class _Join(NamedTuple):
    """A value `made` of two. `siblings`: gradients of two branches, which are added."""

    one: _Span
    two: _Span
    made: _Span
    head_start: int
    head_stop: int
    siblings: bool


_StateOp: TypeAlias = _StateExchange | list[_Join]


@dataclass(frozen=True)
class RecurrentBound:
    """One rank's part of a recurrent program.

    `pieces`: its own; of each `before`, where the path to it ends, and `end`, where what lies below
    its segment does. `order`: its rows, in the order of pieces. `wire`: the type in which states
    travel; None: that in which they are kept. `received`: bytes of the last call, by exchange.
    """

    groups: Groups
    program: RecurrentProgram
    pieces: tuple[_Span, ...]
    before: tuple[int, ...]
    end: tuple[int, ...]
    order: Tensor
    halo: "_HaloTable"
    forward: tuple[_StateOp, ...]
    backward: tuple[_StateOp, ...]
    wire: torch.dtype | None = None
    received: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def sizes(self) -> list[int]:
        return [stop - start for _, start, stop in self.pieces]

    def behind(self, at: int) -> _Span | None:
        """Tokens that read the state behind piece number `at`; None: it is the last of its path."""
        seq, _, stop = self.pieces[at]
        return (seq, stop, self.end[at]) if stop < self.end[at] else None

    def check(self, *tensors: Tensor) -> None:
        """ConfigError: tensors that have not this rank's rows."""
        for x in tensors:
            if len(x) != len(self.order):
                raise ConfigError(f"an input has {len(x)} rows, the plan gives this rank {len(self.order)}")

    def exchange(self, number: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send and receive contiguous tensors by rank, and wait for them."""
        groups, tag = self.groups, _TAG + number
        self.received[number] = sum(x.nbytes for x in receives.values())
        if groups.streams is not None:
            self._on_stream(groups.streams, sends, receives)
            return
        under_way = [receive(x, peer, tag, groups) for peer, x in receives.items()]
        under_way += [send(x, peer, tag, groups) for peer, x in sends.items()]
        for each in under_way:
            each.wait(groups.timeout)

    def _on_stream(self, streams: Streams, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        # One all-to-all of all ranks, also of those with nothing to send, behind what attention has in
        # its queue: so communicators are called in one order on all ranks. The host does not wait.
        groups, stream = self.groups, streams.of(STREAM)
        sizes = [
            [each[rank].nbytes if rank in each else 0 for rank in range(groups.size)] for each in (sends, receives)
        ]
        parts = [as_bytes(sends[rank]) for rank in sorted(sends)]
        packed = torch.cat([torch.empty(0, dtype=torch.uint8, device=self.order.device), *parts])
        raw = packed.new_empty(sum(sizes[1]))
        ready = streams.now()
        arrived: list[Any] = []

        def call() -> list[dist.Work]:
            work = dist.all_to_all_single(raw, packed, sizes[1], sizes[0], group=groups.pool, async_op=True)
            return [cast("dist.Work", work)]

        def issue() -> None:
            stream.wait(ready)
            for x in (packed, raw):
                stream.uses(x)
            stream.call(call)
            arrived.append(stream.record())

        groups.issues.put(arrived, issue)
        groups.issues.through(arrived)
        streams.wait(arrived[0])
        for rank, part in zip(sorted(receives), raw.split([size for size in sizes[1] if size]), strict=True):
            receives[rank].copy_(part.view(receives[rank].dtype).view_as(receives[rank]))


@dataclass(frozen=True)
class _HaloTable:
    """`index` [pieces * (W - 1)]: where halo rows are in (a row of zeros, own rows, received ones).
    `kept` [rows]: which outputs of a convolution of all pieces, each behind its halo, are of one piece
    alone. By peer: own rows that are sent; number of rows that come, in this order. `ids`: of the
    exchanges; None: no rank has any.
    """

    index: Tensor
    kept: Tensor
    sends: dict[int, Tensor]
    receives: dict[int, int]
    ids: tuple[int, int] | None


def bind_recurrent(
    program: RecurrentProgram, groups: Groups, device: torch.device | str = "cpu", wire: torch.dtype | None = None
) -> RecurrentBound:
    """Look up once what this rank of the pool does in every call of a program, on tensors of `device`.

    `wire`: as of `RecurrentBound`. ConfigError: the pool has another number of ranks.
    """
    if program.num_ranks != groups.size:
        raise ConfigError(f"the program is for {program.num_ranks} ranks, the pool has {groups.size}")
    every, paths = pieces(program.owned, program.trees), program.paths
    mine = every[every[:, Placed.RANK] == groups.rank][:, Placed.FRAGMENT]
    own = as_array(program.owned[groups.rank])
    piece, token = ranges(mine[:, Fragment.START], mine[:, Fragment.STOP])
    rows = torch.from_numpy(_rows_at(own, mine[piece, Fragment.SEQ], token)).to(device)
    table = _halo_table(program, mine, own, groups.rank, device)
    forward, backward = (tuple(_of_rank(ops, groups.rank, paths)) for ops in (program.forward, program.backward))
    first = mine[:, Fragment.SEQ], mine[:, Fragment.START]
    ends = tuple(paths.before(*first).tolist()), tuple(paths.end[paths.at(*first)].tolist())
    return RecurrentBound(
        groups, program, tuple(map(tuple, mine.tolist())), *ends, rows, table, forward, backward, wire
    )


def _of_rank(ops: Sequence[RecurrentOp], rank: int, paths: PathEnds) -> Iterator[_StateOp]:
    for op in ops:
        if isinstance(op, Exchange):
            rows = as_array(op.transfers)
            if not np.isin(rows[:, Transfer.KIND], STATE_KINDS).any():
                continue
            own = (rows[:, Transfer.ENDS] == rank).any(axis=1)
            sends: dict[int, list[_Part]] = {}
            receives: dict[int, list[_Part]] = {}
            for row, with_map in zip(rows[own].tolist(), carries_map(rows[own]).tolist(), strict=True):
                _, seq, start, stop, head_start, head_stop, src, dst = row
                peer, to = (dst, sends) if src == rank else (src, receives)
                to.setdefault(peer, []).append(_Part((seq, start, stop), head_start, head_stop, with_map))
            yield _StateExchange(op.id, sends, receives)
        elif op.rank == rank:
            rows = as_array(op.rows)
            seq = rows[:, Neighbours.SEQ]
            before, of_first = (paths.before(seq, rows[:, at]) for at in (Neighbours.MIDDLE, Neighbours.START))
            forward = rows[:, Neighbours.KIND] == RecurrentKind.SUMMARY
            table = np.column_stack([rows, np.where(forward, before, rows[:, Neighbours.MIDDLE]), before == of_first])
            yield [
                _Join((s, start, end), (s, middle, stop), (s, start, stop), first, last, bool(siblings))
                for _, s, start, middle, stop, first, last, end, siblings in table.tolist()
            ]


def _rows_at(held: Ints, seq: Ints, token: Ints) -> Ints:
    """The row of each token among those of `held`, `Fragment` rows one behind the other."""
    size, start = held[:, Fragment.STOP] - held[:, Fragment.START], key(held[:, Fragment.SEQ], held[:, Fragment.START])
    order = np.argsort(start)
    at = order[np.searchsorted(start, key(seq, token), side="right", sorter=order) - 1]
    return (np.cumsum(size) - size)[at] + token - held[at, Fragment.START]


def _halo_table(program: RecurrentProgram, mine: Ints, own: Ints, rank: int, device: torch.device | str) -> _HaloTable:
    """`mine`: the rank's pieces, `own`: its layout, `Fragment` rows."""
    there, back = (
        next(
            (op for op in ops if isinstance(op, Exchange) and any(row[Transfer.KIND] == kind for row in op.transfers)),
            _NO_ROWS,
        )
        for kind, ops in ((RecurrentKind.ROWS, program.forward), (RecurrentKind.ROWS_GRAD, program.backward))
    )
    moved = as_array(there.transfers)
    sent, come = (moved[moved[:, side] == rank] for side in (Transfer.SRC, Transfer.DST))
    come = come[np.argsort(come[:, Transfer.SRC], kind="stable")]
    row, token = ranges(sent[:, Transfer.START], sent[:, Transfer.STOP])
    place, peer = _rows_at(own, sent[row, Transfer.SEQ], token), sent[row, Transfer.DST]
    counts = come[:, Transfer.STOP] - come[:, Transfer.START]
    receives = {src: int(counts[come[:, Transfer.SRC] == src].sum()) for src in come[:, Transfer.SRC].tolist()}
    # Token by token back along the path: row 0 is before the first of all, others behind it.
    held = np.concatenate([own, come[:, Transfer.SPAN]])
    seq, token = mine[:, Fragment.SEQ], mine[:, Fragment.START].copy()
    index, live = np.zeros((len(mine), program.halo), dtype=np.int64), np.arange(len(mine))
    for at in reversed(range(program.halo)):
        token[live] = program.paths.before(seq[live], token[live]) - 1
        live = live[token[live] >= 0]
        index[live, at] = 1 + _rows_at(held, seq[live], token[live])
    # Behind the halos of pieces before its own come outputs that are of two pieces.
    number = np.repeat(np.arange(len(mine)), mine[:, Fragment.STOP] - mine[:, Fragment.START])
    kept = np.arange(len(number)) + program.halo * number

    def on_device(rows: Ints) -> Tensor:
        return torch.from_numpy(rows).to(device)

    return _HaloTable(
        on_device(index.ravel()),
        on_device(kept),
        {dst: on_device(place[peer == dst]) for dst in dict.fromkeys(sent[:, Transfer.DST].tolist())},
        receives,
        (there.id, back.id) if there.transfers else None,
    )


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, bound: RecurrentBound) -> Tensor:
    """The causal convolution [T, D] of every channel, each sequence by itself.

    x [T, D]; weight [D, W], the token's own tap last; bias [D]. The gradients of weight and bias are
    of this rank's rows: the sum over the pool is the whole one.

    ConfigError: rows or width are not the program's.
    """
    bound.check(x)
    if weight.shape[1] != bound.program.halo + 1:
        raise ConfigError(f"the convolution is {weight.shape[1]} wide, the program is for {bound.program.halo + 1}")
    halo = _Halo.apply(x, bound)
    if not bound.pieces:
        # A rank without rows: nothing, that depends on all, so that its backward takes part.
        return x * weight.sum() + halo.sum() + (0 if bias is None else bias)
    rows = x.index_select(0, bound.order).split(bound.sizes)
    padded = torch.cat([part for piece, before in zip(rows, halo, strict=True) for part in (before, piece)])
    out = functional.conv1d(padded.T[None], weight[:, None], bias, groups=len(weight))[0].T
    return out.new_zeros(x.shape).index_copy(0, bound.order, out.index_select(0, bound.halo.kept))


class _Halo(torch.autograd.Function):
    """Rows before each piece of this rank: x [T, D] -> [pieces, W - 1, D]; zeros before a sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: RecurrentBound) -> Tensor:
        table, halo = bound.halo, bound.program.halo
        got = {peer: x.new_empty(rows, x.shape[1]) for peer, rows in table.receives.items()}
        sent = {peer: x.index_select(0, rows) for peer, rows in table.sends.items()}
        if table.ids is not None:
            bound.exchange(table.ids[0], sent, got)
        ctx.bound = bound
        every = torch.cat([x.new_zeros(1, x.shape[1]), x, *got.values()])
        return every.index_select(0, table.index).view(len(bound.pieces), halo, x.shape[1])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bound: RecurrentBound = ctx.bound
        table, width, own = bound.halo, grad.shape[2], len(bound.order)
        sizes = [1, own, *table.receives.values()]
        every = grad.new_zeros(sum(sizes), width).index_add_(0, table.index, grad.reshape(-1, width))
        _, dx, *theirs = every.split(sizes)
        got = {peer: grad.new_empty(len(rows), width) for peer, rows in table.sends.items()}
        if table.ids is not None:
            bound.exchange(table.ids[1], dict(zip(table.receives, theirs, strict=True)), got)
        for peer, rows in table.sends.items():
            dx = dx.index_add(0, rows, got[peer])
        return dx, None


def recurrent_layer(recurrence: AffineRecurrence, bound: RecurrentBound, *inputs: Tensor) -> Tensor:
    """Outputs [T, H, V] of a recurrence over `inputs` [T, H, ...], each sequence by itself.

    States are kept, and travel unless the program was bound with a `wire`, in fp32, or fp64 where the
    inputs are fp64.

    ConfigError: the inputs have not the program's rows and heads.
    """
    bound.check(*inputs)
    if inputs[0].shape[1] != bound.program.num_heads:
        raise ConfigError(f"the inputs have {inputs[0].shape[1]} heads, the program {bound.program.num_heads}")
    return _RecurrentLayer.apply(recurrence, bound, *inputs)


class _RecurrentLayer(torch.autograd.Function):
    # The state before a piece is an input of it and the state behind it an output, so no gradient
    # goes through summaries: a piece gives the gradient of its first state, and is given that of its
    # last.

    @staticmethod
    def forward(ctx: Any, recurrence: AffineRecurrence, bound: RecurrentBound, *inputs: Tensor) -> Tensor:
        dtype = wide_dtype(inputs[0].dtype)
        rows = [x.index_select(0, bound.order) for x in inputs]
        with _as_given(inputs):
            outs, states, maps = _forward(recurrence, bound, rows, dtype)
        ctx.recurrence, ctx.bound, ctx.dtype, ctx.maps = recurrence, bound, dtype, tuple(maps)
        ctx.save_for_backward(*inputs, *states, *maps.values())  # no copies of rows in another order
        ctx.num_inputs = len(inputs)
        out = torch.cat(outs)
        return torch.empty_like(out).index_copy_(0, bound.order, out).to(inputs[0].dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        bound: RecurrentBound = ctx.bound
        recurrence: AffineRecurrence = ctx.recurrence
        saved = ctx.saved_tensors
        rows = [x.index_select(0, bound.order) for x in saved[: ctx.num_inputs]]
        states = saved[ctx.num_inputs : ctx.num_inputs + len(bound.pieces)]
        maps = dict(zip(ctx.maps, saved[ctx.num_inputs + len(bound.pieces) :], strict=True))
        with _as_given(rows):
            grads = _backward(recurrence, bound, rows, (states, maps), dout.index_select(0, bound.order).to(ctx.dtype))
        return (None, None, *(torch.empty_like(x).index_copy_(0, bound.order, x) for x in grads))


def _as_given(tensors: Sequence[Tensor]) -> torch.autocast:
    # Autocast would multiply states in a narrow type.
    return torch.autocast(tensors[0].device.type, enabled=False)


def _forward(
    recurrence: AffineRecurrence, bound: RecurrentBound, rows: Sequence[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], dict[_OfHeads, Tensor]]:
    """Output of each piece, the state before it, and M that the backward takes."""
    summaries, parts = _Summaries(recurrence, bound, rows, dtype), _by_piece(rows, bound, dtype)
    zero = rows[0].new_zeros(rows[0].shape[1], *summaries.shapes[1], dtype=dtype)
    outs: dict[_Span, Tensor] = {}
    for at, (piece, part) in enumerate(zip(bound.pieces, parts, strict=True)):
        if not piece[1] or bound.behind(at) is not None:
            outs[piece], state = recurrence.run(part, zero)  # a first piece's output; others run again
            summaries.put(piece, 0, recurrence.map_of(part) if piece[1] else None, state)
    summaries.execute(bound.forward)
    spans = [(seq, 0, before) for (seq, _, _), before in zip(bound.pieces, bound.before, strict=True)]
    states = [summaries.state(span) if span[2] else zero for span in spans]
    for piece, part, state in zip(bound.pieces, parts, states, strict=True):
        if piece[1]:
            outs[piece] = recurrence.run(part, state)[0]
    none = [] if bound.pieces else [recurrence.run([x.to(dtype) for x in rows], zero)[0]]
    return [*(outs[piece] for piece in bound.pieces), *none], states, summaries.maps(bound.backward)


def _backward(
    recurrence: AffineRecurrence,
    bound: RecurrentBound,
    rows: Sequence[Tensor],
    kept: tuple[Sequence[Tensor], Mapping[_OfHeads, Tensor]],
    dout: Tensor,
) -> list[Tensor]:
    """Gradients of the rows. `kept`: states before pieces, and M, of the forward."""
    states, maps = kept
    summaries, douts = _Summaries(recurrence, bound, rows, dout.dtype, maps), dout.split(bound.sizes)
    runs: list[tuple[list[Tensor], Tensor, Tensor]] = []
    parts = _by_piece(rows, bound, dout.dtype)
    for piece, part, state, of in zip(bound.pieces, parts, states, douts, strict=True):
        leaves = [x.detach().requires_grad_() for x in part]
        first = state.detach().requires_grad_()
        with torch.enable_grad():
            out, last = recurrence.run(leaves, first)
        runs.append((leaves, out, last))
        if piece[1]:
            (dstate,) = torch.autograd.grad(out, first, of, retain_graph=True)
            summaries.put(piece, 0, None, dstate)
    summaries.execute(bound.backward)
    grads = [torch.zeros_like(x) for x in rows]
    for at, (leaves, out, last) in enumerate(runs):
        behind = bound.behind(at)
        ends = [] if behind is None else [summaries.state(behind)]
        found = torch.autograd.grad([out, last][: 1 + len(ends)], leaves, [douts[at], *ends], allow_unused=True)
        for grad, x in zip(grads, found, strict=True):
            if x is not None:
                grad.split(bound.sizes)[at].copy_(x)
    return grads


class _Summaries:
    """Summaries that this rank holds, forward or, with the forward's `maps`, backward."""

    def __init__(
        self,
        recurrence: AffineRecurrence,
        bound: RecurrentBound,
        rows: Sequence[Tensor],
        dtype: torch.dtype,
        maps: Mapping[_OfHeads, Tensor] | None = None,
    ) -> None:
        self.recurrence, self.bound, self.given = recurrence, bound, maps
        self.shapes = recurrence.shapes(rows)
        self.like = rows[0].new_empty(0, dtype=dtype)
        # By tokens: first head, M where it is there, state of some heads.
        self.held: dict[_Span, list[tuple[int, Tensor | None, Tensor]]] = {}

    def put(self, span: _Span, head_start: int, m: Tensor | None, state: Tensor) -> None:
        self.held.setdefault(span, []).append((head_start, m, state))

    def of_heads(self, span: _Span, head_start: int, head_stop: int) -> tuple[Tensor | None, Tensor]:
        """M, where it is there, and the state, of heads that came together or of a whole piece."""
        for first, m, state in self.held[span]:
            if first <= head_start and head_stop <= first + len(state):
                own = slice(head_start - first, head_stop - first)
                return None if m is None else m[own], state[own]
        raise AssertionError(f"heads [{head_start}:{head_stop}) of {span} came in parts")

    def state(self, span: _Span) -> Tensor:
        """The state of all heads, as composers sent it."""
        return torch.cat([state for _, _, state in sorted(self.held[span], key=lambda part: part[0])])

    def maps(self, backward: Sequence[_StateOp]) -> dict[_OfHeads, Tensor]:
        """M that the backward's joins take."""
        found: dict[_OfHeads, Tensor] = {}
        for join in (join for op in backward if isinstance(op, list) for join in op):
            if join.siblings:
                continue
            m, _ = self.of_heads(join.one, join.head_start, join.head_stop)
            assert m is not None, "the first piece of a sequence gives no gradient to another"
            found[join.one, join.head_start, join.head_stop] = m.clone()  # without what came in the same memory
        return found

    def execute(self, ops: Sequence[_StateOp]) -> None:
        for op in ops:
            if isinstance(op, _StateExchange):
                self.exchange(op)
            else:
                for join in op:
                    self.join(join)

    def join(self, join: _Join) -> None:
        first, last = join.head_start, join.head_stop
        one, two = (self.of_heads(span, first, last) for span in (join.one, join.two))
        if self.given is None:
            assert two[0] is not None, "only the first piece of a sequence has no M"
            state = self.recurrence.apply(two[0], one[1]) + two[1]
        elif join.siblings:
            state = one[1] + two[1]
        else:
            state = self.recurrence.apply(self.given[join.one, first, last], two[1], transposed=True) + one[1]
        self.put(join.made, first, None, state)

    def exchange(self, op: _StateExchange) -> None:
        wire = self.bound.wire or self.like.dtype
        sends = {
            peer: torch.cat([x for of in parts for x in self.sent(of)]).to(wire) for peer, parts in op.sends.items()
        }
        sizes = {peer: [size for part in parts for size in self.numbers(part)] for peer, parts in op.receives.items()}
        receives = {peer: self.like.new_empty(sum(each), dtype=wire) for peer, each in sizes.items()}
        self.bound.exchange(op.id, sends, receives)
        for peer, parts in op.receives.items():
            tensors = iter(receives[peer].to(self.like.dtype).split(sizes[peer]))
            for span, head_start, head_stop, with_map in parts:
                heads = head_stop - head_start
                m = next(tensors).view(heads, *self.shapes[0]) if with_map else None
                self.put(span, head_start, m, next(tensors).view(heads, *self.shapes[1]))

    def sent(self, part: _Part) -> Iterator[Tensor]:
        m, state = self.of_heads(part.span, part.head_start, part.head_stop)
        if part.with_map:
            assert m is not None, "a piece behind the first has M"
            yield m.reshape(-1)
        yield state.reshape(-1)

    def numbers(self, part: _Part) -> list[int]:
        heads = part.head_stop - part.head_start
        return [heads * prod(shape) for shape in (self.shapes if part.with_map else self.shapes[1:])]


def _by_piece(rows: Sequence[Tensor], bound: RecurrentBound, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.to(dtype).split(bound.sizes) for x in rows), strict=True)) if bound.pieces else []

"""All ranks of a recurrent program in one process, NumPy fp64: the judge of recurrent layers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import TypeAlias, assert_never

import numpy as np

from megatron_balance.compile.recurrent import pieces
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.forest import Tree, document
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import Compose, RecurrentKind, RecurrentOp, RecurrentProgram
from megatron_balance.ir.text import recurrent_lines

_Piece: TypeAlias = tuple[int, int, int, int]  # rank, seq, start, stop
_Value: TypeAlias = tuple[RecurrentKind, int, int, int]  # kind, seq, start, stop


@dataclass(frozen=True)
class Recurrence:
    """Inputs of a recurrence over the L tokens of one sequence, or their gradients.

    `q`, `k`, `decay` [L, H, K], `v` [L, H, V], `write`, `erase` [L, H]. Each head has a state S [K,
    V], at first zero. A token makes T = diag(decay) S, then S = T - erase k (k^T T) + write k v^T,
    and its output is q^T S. Gated DeltaNet (arXiv:2412.06464, section 3) has write = erase = beta
    and one decay a head; Kimi Delta Attention (arXiv:2510.26692, section 3) has a decay for each
    channel; Mamba-2 (arXiv:2405.21060, section 7) erases nothing and writes by its step size.
    """

    q: Floats
    k: Floats
    v: Floats
    decay: Floats
    write: Floats
    erase: Floats

    def at(self, tokens: slice | Ints) -> "Recurrence":
        return Recurrence(*(getattr(self, each.name)[tokens] for each in fields(self)))


@dataclass(frozen=True)
class RecurrentResult:
    """Outputs [L, H, V] and gradients of the inputs of each sequence, gradient of the taps."""

    out: tuple[Floats, ...]
    grads: tuple[Recurrence, ...] = ()
    taps_grad: Floats | None = None


def run_recurrent(
    program: RecurrentProgram, inputs: Sequence[Recurrence], taps: Floats, dout: Sequence[Floats] | None = None
) -> RecurrentResult:
    """Outputs of a recurrent layer by the program and, given `dout`, its gradients.

    One a sequence: `inputs`, `dout` [L, H, V]. `taps` [halo + 1, H, V]: of the causal convolution that
    every channel of v goes through first, the token's own tap last.

    Raises InvalidProgramError: an op or a piece reads what its rank does not hold, or a rank keeps a
    gradient of another's rows.
    """
    ranks = _RecurrentRanks(program, inputs, taps, dout)
    ranks.execute(program.forward)
    out = tuple(np.zeros_like(each.v) for each in inputs)
    for piece in ranks.pieces:
        _, seq, start, stop = piece
        out[seq][start:stop] = ranks.run(piece)[0]
    if dout is None:
        return RecurrentResult(out)
    ranks.execute(program.backward)
    ranks.finish()
    kept = [rank for rank, grads in enumerate(ranks.row_grads) if grads]
    if kept:
        raise InvalidProgramError(f"reference: rank {kept[0]} keeps gradients of rows of other ranks")
    return RecurrentResult(out, tuple(ranks.grads), ranks.taps_grad)


# It takes every op at its word and shares nothing with a runtime. What a rank computes of its own
# pieces is made when an op or a piece first reads it, of what the rank holds by then.
class _RecurrentRanks:
    def __init__(
        self, program: RecurrentProgram, inputs: Sequence[Recurrence], taps: Floats, dout: Sequence[Floats] | None
    ) -> None:
        self.program, self.inputs, self.taps, self.dout = program, inputs, taps, dout
        self.pieces: list[_Piece] = [
            (rank, seq, start, stop) for rank, seq, start, stop in pieces(program.owned, program.trees).tolist()
        ]
        # By sequence, of each token the one before it on its path, -1: it is the first; and where all
        # that lies below its segment ends.
        self.above, self.end = zip(*map(_path, program.trees or map(document, program.lengths)), strict=True)
        owned = ((seq, token, rank) for rank, seq, start, stop in self.pieces for token in range(start, stop))
        self.owner = {(seq, token): rank for seq, token, rank in owned}
        # By rank: rows of others; values by head, a summary with its M where it has one; gradients of
        # rows of others.
        self.rows: list[dict[tuple[int, int], Floats]] = [{} for _ in program.owned]
        self.values: list[dict[tuple[_Value, int], tuple[Floats | None, Floats]]] = [{} for _ in program.owned]
        self.row_grads: list[dict[tuple[int, int], Floats]] = [{} for _ in program.owned]
        self.grads = [Recurrence(*(np.zeros_like(getattr(x, each.name)) for each in fields(x))) for x in inputs]
        self.taps_grad = np.zeros_like(taps)
        self.finished = False
        self.now = "the end"

    # Ops

    def execute(self, ops: Sequence[RecurrentOp]) -> None:
        for op in ops:
            self.now = "\n".join(islice(recurrent_lines(op, self.program.num_heads), 6))
            match op:
                case Exchange():
                    for row in op.transfers:
                        self.transfer(*row)
                case Compose():
                    for kind, seq, start, middle, stop, head_start, head_stop in op.rows:
                        for head in range(head_start, head_stop):
                            self.compose(op.rank, (RecurrentKind(kind), seq, start, stop), middle, head)
                case _:
                    assert_never(op)
        self.now = "the end of the phase"

    def transfer(self, kind: int, seq: int, start: int, stop: int, head_start: int, head_stop: int, *ends: int) -> None:
        src, dst = ends
        match RecurrentKind(kind):
            case RecurrentKind.ROWS:
                for token in range(start, stop):
                    self.rows[dst][seq, token] = self.row(src, seq, token)
            case RecurrentKind.ROWS_GRAD:
                self.finish()
                for token in range(start, stop):
                    if (seq, token) not in self.row_grads[src]:
                        raise self.error(src, f"the gradient of row {token} of sequence {seq}")
                    self.grads[seq].v[token] += self.row_grads[src].pop((seq, token))
            case RecurrentKind.SUMMARY | RecurrentKind.SUMMARY_GRAD as of:
                for head in range(head_start, head_stop):
                    value = (of, seq, start, stop)
                    self.values[dst][value, head] = self.value(src, value, head)

    def compose(self, rank: int, made: _Value, middle: int, head: int) -> None:
        kind, seq, start, stop = made
        before = self.above[seq][middle] + 1
        siblings = before == self.above[seq][start] + 1
        one = self.value(rank, (kind, seq, start, before if kind == RecurrentKind.SUMMARY else middle), head)
        two = self.value(rank, (kind, seq, middle, stop), head)
        if kind == RecurrentKind.SUMMARY_GRAD and siblings:
            self.values[rank][made, head] = (None, one[1] + two[1])
            return
        if kind == RecurrentKind.SUMMARY_GRAD:
            m = self.map_of(rank, (RecurrentKind.SUMMARY, seq, start, middle), head)
            self.values[rank][made, head] = (None, one[1] + m.T @ two[1])
            return
        m = self.map_of(rank, (kind, seq, middle, stop), head)
        self.values[rank][made, head] = (None if one[0] is None else m @ one[0], m @ one[1] + two[1])

    # What ranks hold

    def value(self, rank: int, value: _Value, head: int) -> tuple[Floats | None, Floats]:
        kind, seq, start, stop = value
        own = (rank, seq, start, stop)
        if (value, head) not in self.values[rank]:
            if own not in self.pieces:
                raise self.error(rank, f"{kind.name} s{seq}[{start}:{stop}) of head {head}")
            for at, of_head in enumerate(zip(*self.made_of(kind, own), strict=True)):
                self.values[rank][value, at] = of_head
        return self.values[rank][value, head]

    def map_of(self, rank: int, value: _Value, head: int) -> Floats:
        found = self.value(rank, value, head)[0]
        if found is None:
            raise self.error(rank, f"M of tokens [{value[2]}:{value[3]}) of sequence {value[1]}")
        return found

    def made_of(self, kind: RecurrentKind, piece: _Piece) -> tuple[Sequence[Floats | None], Sequence[Floats]]:
        # The values of all heads of a rank's own piece.
        _, _, start, _ = piece
        x = self.inputs_of(piece)
        heads, width = x.k.shape[1:]
        empty = np.zeros((heads, width, x.v.shape[2]))
        if kind == RecurrentKind.SUMMARY_GRAD:
            return [None] * heads, list(self.back(piece, empty)[1])
        eye = np.tile(np.eye(width), (heads, 1, 1))
        maps = _run(replace(x, v=np.zeros_like(x.k)), eye)[1][-1] if start else [None] * heads
        return list(maps), list(_run(x, empty)[1][-1])

    def row(self, rank: int, seq: int, token: int) -> Floats:
        if token < 0:
            return np.zeros_like(self.taps[0])
        if self.owner[seq, token] == rank:
            return self.inputs[seq].v[token]
        if (seq, token) not in self.rows[rank]:
            raise self.error(rank, f"row {token} of sequence {seq}")
        return self.rows[rank][seq, token]

    def window(self, piece: _Piece) -> Floats:
        rank, seq, _, stop = piece
        return np.array([self.row(rank, seq, token) for token in [*self.halo(piece), *range(piece[2], stop)]])

    def halo(self, piece: _Piece) -> list[int]:
        # Tokens before a piece on its path, the last one last.
        _, seq, token, _ = piece
        tokens = [token := self.above[seq][token] if token >= 0 else -1 for _ in range(self.program.halo)]
        return tokens[::-1]

    def inputs_of(self, piece: _Piece) -> Recurrence:
        _, seq, start, stop = piece
        window = self.window(piece)
        v = sum(tap * window[at : at + stop - start] for at, tap in enumerate(self.taps))
        return replace(self.inputs[seq].at(slice(start, stop)), v=np.asarray(v))

    # Pieces

    def of_heads(self, piece: _Piece, value: _Value) -> Floats:
        return np.array([self.value(piece[0], value, head)[1] for head in range(self.program.num_heads)])

    def run(self, piece: _Piece) -> tuple[Floats, list[Floats]]:
        _, seq, start, _ = piece
        x = self.inputs_of(piece)
        state = np.zeros((*x.k.shape[1:], x.v.shape[2]))
        before = self.above[seq][start] + 1
        return _run(x, self.of_heads(piece, (RecurrentKind.SUMMARY, seq, 0, before)) if start else state)

    def back(self, piece: _Piece, dstate: Floats) -> tuple[Recurrence, Floats]:
        _, seq, start, stop = piece
        assert self.dout is not None, "the backward needs the gradient of the output"
        return _run_back(self.inputs_of(piece), self.run(piece)[1], self.dout[seq][start:stop], dstate)

    def finish(self) -> None:
        # The gradients of all pieces' inputs, once.
        if not self.finished:
            self.finished = True
            for piece in self.pieces:
                self.finish_piece(piece)

    def finish_piece(self, piece: _Piece) -> None:
        rank, seq, start, stop = piece
        end = self.end[seq][start]
        dstate = np.zeros((*self.inputs[seq].k.shape[1:], self.taps.shape[2]))
        if stop < end:
            dstate = self.of_heads(piece, (RecurrentKind.SUMMARY_GRAD, seq, stop, end))
        grads, _ = self.back(piece, dstate)
        window, tokens = self.window(piece), [*self.halo(piece), *range(start, stop)]
        for each in fields(grads):
            if each.name != "v":
                getattr(self.grads[seq], each.name)[start:stop] = getattr(grads, each.name)
        for at, tap in enumerate(self.taps):
            self.taps_grad[at] += (grads.v * window[at : at + stop - start]).sum(axis=0)
            for token, dv in zip(tokens[at:], grads.v, strict=False):
                if token >= 0 and self.owner[seq, token] == rank:
                    self.grads[seq].v[token] += tap * dv
                elif token >= 0:
                    self.row_grads[rank][seq, token] = self.row_grads[rank].get((seq, token), 0.0) + tap * dv

    def error(self, rank: int, what: str) -> InvalidProgramError:
        return InvalidProgramError(f"reference: rank {rank} does not have {what}, at {self.now}")


def _path(tree: Tree) -> tuple[list[int], list[int]]:
    above, starts = list[int](), list[int]()
    for length, parent, _ in tree:
        starts.append(len(above))
        last = starts[parent] + tree[parent].length - 1 if parent >= 0 else -1
        above += [last, *range(len(above), len(above) + length - 1)]
    end = list[int]()
    for at, (length, _, _) in enumerate(tree):
        below = {at}
        for other in range(at + 1, len(tree)):
            if tree[other].parent in below:
                below.add(other)
        end += [starts[max(below)] + tree[max(below)].length] * length
    return above, end


def _run(x: Recurrence, state: Floats) -> tuple[Floats, list[Floats]]:
    # Outputs [L, H, V], and the states [H, K, V] before the first token and behind each.
    states, out = [state], np.zeros((len(x.q), *state.shape[::2]))
    for at, (q, k, v, decay, write, erase) in enumerate(zip(x.q, x.k, x.v, x.decay, x.write, x.erase, strict=True)):
        decayed = decay[..., None] * states[-1]
        change = write[:, None] * v - erase[:, None] * _dot(k, decayed)
        states.append(decayed + k[..., None] * change[:, None])
        out[at] = _dot(q, states[-1])
    return out, states


def _run_back(x: Recurrence, states: Sequence[Floats], dout: Floats, dstate: Floats) -> tuple[Recurrence, Floats]:
    # Gradients of the inputs and of the first state; `dstate`: of the last one.
    grads = Recurrence(*(np.zeros_like(getattr(x, each.name)) for each in fields(x)))
    for at in reversed(range(len(dout))):
        q, k, v, decay, write, erase = (getattr(x, each.name)[at] for each in fields(x))
        dstate = dstate + q[..., None] * dout[at][:, None]
        grads.q[at] = (states[at + 1] * dout[at][:, None]).sum(axis=2)
        decayed = decay[..., None] * states[at]
        read, dchange = _dot(k, decayed), _dot(k, dstate)  # k^T T; gradient of write v - erase k^T T
        grads.v[at] = write[:, None] * dchange
        grads.write[at], grads.erase[at] = (v * dchange).sum(axis=1), -(read * dchange).sum(axis=1)
        dread = -erase[:, None] * dchange
        change = write[:, None] * v - erase[:, None] * read
        grads.k[at] = (dstate * change[:, None]).sum(axis=2) + (decayed * dread[:, None]).sum(axis=2)
        ddecayed = dstate + k[..., None] * dread[:, None]
        grads.decay[at] = (ddecayed * states[at]).sum(axis=2)
        dstate = decay[..., None] * ddecayed
    return grads, dstate


def _dot(vector: Floats, state: Floats) -> Floats:
    # [H, K] by [H, K, V]: [H, V].
    return np.einsum("hk,hkv->hv", vector, state)

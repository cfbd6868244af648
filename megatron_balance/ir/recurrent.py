"""The program of recurrent layers: how the state gets from piece to piece of a sequence.

A *piece* is a longest run of tokens of a sequence on one rank; its rows there may lie apart. Over
the tokens [start, stop) a recurrence is an affine map of its state, S' = M S + U, and the maps of
neighbours compose. Outside the program, every rank computes the map of each of its pieces, runs
each from the state before it, and in the backward gives the gradient of that state. The program
hands these on; one serves all recurrent layers of a plan that have as many heads.

| kind | value of tokens [start, stop) |
|---|---|
| ROWS | inputs of the short convolution before the recurrence, all channels (heads [0, 1)) |
| SUMMARY | M and U; from the begin of a sequence U alone, which is the state behind them |
| ROWS_GRAD | the gradient of ROWS by what the rank that sends it made of them |
| SUMMARY_GRAD | V of dS = M^T dS' + V, where dS is the gradient of the state before them, dS' behind |

SUMMARY_GRAD [start, length) is the whole gradient of a state. M does not travel again: who composes
in the backward has it from the forward. No gradient goes through M and U themselves, since the
gradients of all states come from those behind them.

Of trees (`ir.forest`) a piece is of one segment, and what is before it is so along its path
(`segments.PathEnds`). SUMMARY [0, stop) is the state behind the path that ends there. All that lies
below a segment stands right behind it, so siblings are neighbours, too: SUMMARY_GRAD of two is the
sum.

`Exchange` and its `Transfer` rows are attention's (`ir.program`): what is sent is copied, but for
ROWS_GRAD, which its owner adds up. `Compose` makes the value of [start, stop) of those of [start,
middle) and [middle, stop), row by row, so that a row may take what the one before it made.

    recurrent lengths 8 heads 2 halo 3
    owner r0 s0[0:4) s0[6:8)
    owner r1 s0[4:6)
    forward
    exchange 0
      r0 <- r1 rows s0[4:6)
      r1 <- r0 rows s0[1:4)
    exchange 1
      r0 <- r1 summary s0[4:6) h[0:1)
      r1 <- r0 summary s0[0:4) h[1:2)
    compose r0
      summary s0[0:4) + s0[4:6) h[0:1)
    ...

Heads are written where a region has not all of them; trees, as attention's, behind the first line.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias, assert_never

from megatron_balance.ir.columns import Fragment, Neighbours, Rows, Transfer
from megatron_balance.ir.forest import Segment, Tree, checked
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.text import parse_tree, tree_lines, wrong

if TYPE_CHECKING:
    from megatron_balance.ir.segments import PathEnds


class RecurrentKind(IntEnum):
    """Kind of the values of a region; numbers behind those of attention (`ir.program.Kind`)."""

    ROWS = 6
    SUMMARY = 7
    ROWS_GRAD = 8
    SUMMARY_GRAD = 9


FORWARD_KINDS = (RecurrentKind.ROWS, RecurrentKind.SUMMARY)
STATE_KINDS = (RecurrentKind.SUMMARY, RecurrentKind.SUMMARY_GRAD)


@dataclass(frozen=True, slots=True)
class Compose:
    """Make one value of two neighbouring ones on `rank`, row by row (`Neighbours`)."""

    rank: int
    rows: Rows


RecurrentOp: TypeAlias = Exchange | Compose


# A class beside `Program`: attention's key-value heads, policy, mask and remap mean nothing here, and
# the four ops of attention are a closed set for all its readers, none of which runs a Compose.
@dataclass(frozen=True, slots=True)
class RecurrentProgram:
    """All ranks' ops of one recurrent layer, in one global order.

    `owned[rank]`: that rank's linear layout, `Fragment` rows in the order of its tokens. `halo`:
    rows before a token that the convolution reads, its width less one. `trees`: of the sequences;
    none: all are documents.
    """

    lengths: tuple[int, ...]
    num_heads: int
    halo: int
    owned: tuple[Rows, ...]
    forward: tuple[RecurrentOp, ...]
    backward: tuple[RecurrentOp, ...]
    trees: tuple[Tree, ...] = ()

    @property
    def paths(self) -> "PathEnds":
        from megatron_balance.ir.segments import PathEnds  # NumPy, which data do not import

        return PathEnds.of(self.lengths, self.trees)

    @property
    def num_ranks(self) -> int:
        return len(self.owned)


_NAMES: dict[int, str] = {
    RecurrentKind.ROWS: "rows",
    RecurrentKind.SUMMARY: "summary",
    RecurrentKind.ROWS_GRAD: "drows",
    RecurrentKind.SUMMARY_GRAD: "dsummary",
}
_KINDS = {name: kind for kind, name in _NAMES.items()}
# At most 18 digits: more do not fit 64 bits.
_N = r"(\d{1,18})"
_HEADS = rf"(?: h\[{_N}:{_N}\))?"
_HEADER = re.compile(rf"recurrent lengths((?: \d{{1,18}})*) heads {_N} halo {_N}")
_OWNER = re.compile(rf"owner r{_N}((?: s\d+\[\d+:\d+\))*)")
_SPAN = re.compile(rf"s{_N}\[{_N}:{_N}\)")
_OP = re.compile(r"exchange \d{1,18}|compose r\d{1,18}")
_TRANSFER = re.compile(rf"r{_N} <- r{_N} (\w+) {_SPAN.pattern}{_HEADS}")
_NEIGHBOURS = re.compile(rf"(\w+) s{_N}\[{_N}:{_N}\) \+ s\2\[\4:{_N}\){_HEADS}")


def recurrent_text(program: RecurrentProgram) -> str:
    """The program as text that `parse_recurrent` reads back."""
    lengths = " ".join(["recurrent lengths", *map(str, program.lengths)])
    lines = [f"{lengths} heads {program.num_heads} halo {program.halo}", *tree_lines(program.trees)]
    for rank, owned in enumerate(program.owned):
        lines.append(" ".join([f"owner r{rank}", *(f"s{s}[{a}:{b})" for s, a, b in owned)]))
    for name, ops in (("forward", program.forward), ("backward", program.backward)):
        lines += [name, *chain.from_iterable(recurrent_lines(op, program.num_heads) for op in ops)]
    return "\n".join(lines) + "\n"


def recurrent_lines(op: RecurrentOp, num_heads: int) -> Iterator[str]:
    """Header and rows of one op."""

    def heads(kind: int, first: int, last: int) -> str:
        return "" if (first, last) == (0, _whole(kind, num_heads)) else f" h[{first}:{last})"

    match op:
        case Exchange():
            yield f"exchange {op.id}"
            for kind, seq, start, stop, h0, h1, src, dst in op.transfers:
                yield f"  r{dst} <- r{src} {_name(kind)} s{seq}[{start}:{stop}){heads(kind, h0, h1)}"
        case Compose():
            yield f"compose r{op.rank}"
            for kind, seq, start, middle, stop, h0, h1 in op.rows:
                both = f"s{seq}[{start}:{middle}) + s{seq}[{middle}:{stop})"
                yield f"  {_name(kind)} {both}{heads(kind, h0, h1)}"
        case _:
            assert_never(op)


def _name(kind: int) -> str:
    # Of a kind that is not there, for what complains of it, its number.
    return _NAMES.get(kind, f"kind_{kind}")


def _whole(kind: int, num_heads: int) -> int:
    # Heads of a region that has all of them.
    return num_heads if kind in STATE_KINDS else 1


def parse_recurrent(source: str) -> RecurrentProgram:
    """The program that `recurrent_text` wrote; InvalidProgramError names a line that is not so."""
    lines = [(n, line.strip()) for n, line in enumerate(source.splitlines(), 1) if line.strip()]
    number, line = lines[0] if lines else (1, "")
    head = _HEADER.fullmatch(line)
    if head is None:
        raise wrong(number, line, "expected 'recurrent lengths ... heads H halo N'")
    num_heads = int(head[2])
    owned: list[Rows] = []
    trees: list[list[Segment]] = []
    phases: dict[str, list[tuple[str, list[tuple[int, ...]]]]] = {"forward": [], "backward": []}
    ops = phases["forward"]
    for number, line in lines[1:]:
        word, rows = ops[-1] if ops else ("", [])
        if line.startswith("tree ") and not owned:
            trees.append(parse_tree(line, number, len(trees)))
        elif (owner := _OWNER.fullmatch(line)) is not None and int(owner[1]) == len(owned):
            owned.append(Rows.of(Fragment.WIDTH, [tuple(map(int, span)) for span in _SPAN.findall(owner[2])]))
        elif line in phases:
            ops = phases[line]
        elif _OP.fullmatch(line) is not None:
            ops.append((line, []))
        elif word.startswith("exchange") and (row := _TRANSFER.fullmatch(line)) is not None and row[3] in _KINDS:
            dst, src, name, seq, start, stop, *heads = row.groups()
            rows.append(
                (_KINDS[name], *map(int, (seq, start, stop)), *_heads(name, heads, num_heads), int(src), int(dst))
            )
        elif word.startswith("compose") and (row := _NEIGHBOURS.fullmatch(line)) is not None and row[1] in _KINDS:
            name, seq, start, middle, stop, *heads = row.groups()
            rows.append((_KINDS[name], *map(int, (seq, start, middle, stop)), *_heads(name, heads, num_heads)))
        else:
            raise wrong(
                number,
                line,
                "expected the next owner, forward, backward, 'exchange N' with rows 'rD <- rS kind sN[a:b)', or "
                "'compose rN' with rows 'kind sN[a:b) + sN[b:c)'",
            )
    forward, backward = (tuple(_op(word, rows) for word, rows in ops) for ops in phases.values())
    lengths = tuple(map(int, head[1].split()))
    return RecurrentProgram(lengths, num_heads, int(head[3]), tuple(owned), forward, backward, checked(trees))


def _op(header: str, rows: list[tuple[int, ...]]) -> RecurrentOp:
    name, number = header.split()
    if name == "exchange":
        return Exchange(int(number), Rows.of(Transfer.WIDTH, rows))
    return Compose(int(number[1:]), Rows.of(Neighbours.WIDTH, rows))


def _heads(name: str, listed: Sequence[str | None], num_heads: int) -> tuple[int, int]:
    first, last = listed
    return (int(first), int(last)) if first and last else (0, _whole(_KINDS[name], num_heads))

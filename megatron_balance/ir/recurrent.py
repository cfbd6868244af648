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

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from megatron_balance.ir.columns import Rows
from megatron_balance.ir.forest import Tree
from megatron_balance.ir.program import Exchange

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

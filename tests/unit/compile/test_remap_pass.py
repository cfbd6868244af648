"""The remap as a pass: what small programs look like with one, and that they still compute
attention."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.compile.pipeline import Projector, expand, project
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Move, Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Exchange, Kind
from megatron_balance.ir.text import parse, text
from tests.support import by_hand

LAYOUT = np.array([[0, 0, 4], [1, 2, 5], [0, 8, 9]])


def moves(*rows: tuple[int, int, int]) -> Rows:
    return Rows.of(Move.WIDTH, rows)


def two_zones(*moved: tuple[int, int, int], pattern: str = "ring") -> MicrobatchPlan:
    """Sequence 0 over ranks 0 and 1, sequence 1 on rank 1, sequence 2 on rank 2; rank 3 has
    nothing."""
    zones = (by_hand.zone("intra_node", pattern, (0, 1), (0,)), by_hand.local(1, 1), by_hand.local(2, 2))
    return by_hand.plan((16, 10, 6), 4, *zones, ranks_per_node=2, moves=moved)


def test_inputs_come_first_and_outputs_go_back_last() -> None:
    program = expand(by_hand.plan((4,), 2, by_hand.local(0, 0), moves=[(0, 1, 1)]))
    expected = """\
program lengths 4 heads 2 kv_heads 1 policy none remap_in 1
owner r0 s0[0:2) s0[2:3)
owner r1 s0[3:4)
forward
exchange 0 p2p
  r0 <- r1 q s0[3:4)
  r0 <- r1 kv s0[3:4)
attend r0
  q s0[0:2) over s0[0:2)
  q s0[2:4) over s0[0:2) s0[2:4)
exchange 1 p2p
  r1 <- r0 out s0[3:4)
backward
"""
    assert text(program) == expected
    verify(program)


def test_what_a_home_has_handed_over_it_no_longer_holds() -> None:
    source = text(expand(two_zones((2, 3, 2))))
    kept = source.replace("attend r2\n", "attend r3\n  q s2[4:6) over s2[4:6)\nattend r2\n")
    assert kept != source
    with pytest.raises(InvalidProgramError, match="rank does not hold Q"):
        verify(parse(kept))


def test_the_home_makes_the_first_hop_of_a_ring() -> None:
    """Rank 1 holds s0[4:12); of these the last are owned by rank 3, which sends them to rank 0,
    too: one transfer, not two."""
    plan = two_zones((1, 3, 14))
    assert Projector(plan).attention_layout(1).tolist() == [[0, 4, 8], [0, 8, 12], [1, 0, 5], [1, 5, 10]]
    remap_in = expand(plan).forward[0]
    assert isinstance(remap_in, Exchange)
    sent_on = [row for row in remap_in.transfers if row[6:] == (3, 0)]
    assert [row[:4] for row in sent_on] == [(Kind.KV, 0, 8, 12)]
    first_hop = [
        row for op in expand(plan).forward[1:] if isinstance(op, Exchange) for row in op.transfers if row[6:] == (1, 0)
    ]
    assert [row[:4] for row in first_hop if row[0] == Kind.KV] == [(Kind.KV, 0, 4, 8)]


def test_a_first_hop_that_is_away_altogether_saves_an_exchange() -> None:
    plan = two_zones((1, 3, 18))
    ids = [op.id for op in project(plan, 0).forward if isinstance(op, Exchange)]
    from_one = [
        row for op in project(plan, 0).forward if isinstance(op, Exchange) for row in op.transfers if row[6] == 1
    ]
    assert from_one == []
    assert ids == [0, 1]  # it still sends its own block to rank 1
    alone = two_zones((0, 3, 8), (1, 3, 18))
    assert [op.id for op in expand(alone).forward if isinstance(op, Exchange)] == [0, 2]


def test_a_token_at_home_where_it_hops_to_takes_the_long_way() -> None:
    """Rank 0 has handed s0[8:12) over to rank 1, so only rank 1 can bring it back."""
    plan = two_zones((1, 0, 14))
    hops = [
        row for op in expand(plan).forward[1:] if isinstance(op, Exchange) for row in op.transfers if row[0] == Kind.KV
    ]
    assert (Kind.KV, 0, 8, 12, 0, 1, 1, 0) in hops
    verify(expand(plan, "keep"))

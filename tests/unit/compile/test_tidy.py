from __future__ import annotations

import pytest

from megatron_balance.compile.tidy import tidy
from megatron_balance.ir.text import parse, text
from tests.support import programs

UNTIDY = """\
program lengths 8 heads 4 kv_heads 2 policy none
owner r0 s0[0:4)
owner r1 s0[4:8)
forward
exchange 0 p2p
exchange 1 p2p
  r1 <- r0 kv s0[2:4)
  r1 <- r0 kv s0[0:1) h[0:1)
  r1 <- r0 kv s0[1:2) h[0:1)
  r1 <- r0 kv s0[0:2) h[1:2)
  r1 <- r0 kv s0[3:3)
attend r0
  q s0[0:4) over s0[0:2) s0[2:4)
  q s0[0:2) over s0[2:4)
attend r1
  q s0[4:6) over s0[0:4)
  q s0[6:8) over s0[0:4)
  q s0[4:6) over s0[4:6)
  q s0[6:8) over s0[4:8)
attend r1
  q s0[4:5) over s0[6:8)
merge r0
backward
"""

TIDY = """\
program lengths 8 heads 4 kv_heads 2 policy none
owner r0 s0[0:4)
owner r1 s0[4:8)
forward
exchange 1 p2p
  r1 <- r0 kv s0[2:4)
  r1 <- r0 kv s0[0:2) h[0:1)
  r1 <- r0 kv s0[0:2) h[1:2)
attend r0
  q s0[0:4) over s0[0:4)
attend r1
  q s0[4:6) over s0[0:6)
  q s0[6:8) over s0[0:8)
backward
"""


def test_empty_ops_and_rows_go_and_neighbours_become_one() -> None:
    assert text(tidy(parse(UNTIDY))) == TIDY


@pytest.mark.parametrize("source", [TIDY, *programs.ALL.values()])
def test_what_is_tidy_stays(source: str) -> None:
    once = tidy(parse(source))
    assert tidy(once) == once


def test_regions_that_do_not_touch_or_overlap_stay_apart() -> None:
    apart = """\
program lengths 8 4 heads 1 kv_heads 1 policy none
owner r0 s0[0:8) s1[0:4)
owner r1
owner r2
forward
exchange 0 p2p
  r1 <- r0 kv s0[0:2)
  r1 <- r0 kv s0[3:5)
  r1 <- r0 kv s0[4:6)
  r1 <- r0 q s0[2:3)
  r2 <- r0 kv s0[2:3)
  r1 <- r0 kv s1[2:3)
backward
"""
    assert text(tidy(parse(apart))) == apart

"""Programs under a mask that is not causal: `verify` and `reference` ask the mask, and nothing else
in them knows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance import reference
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.program import Program
from megatron_balance.ir.text import parse, text
from tests.support import dense
from tests.support.masks import visible
from tests.support.programs import with_backward

FULL = """program lengths 8 3 heads 2 kv_heads 1 policy none mask full
owner r0 s0[0:4) s1[0:3)
owner r1 s0[4:8)
forward
exchange 0 p2p
  r1 <- r0 kv s0[0:4)
  r0 <- r1 kv s0[4:8)
attend r0
  q s0[0:4) over s0[0:4) s0[4:8)
  q s1[0:3) over s1[0:3)
attend r1
  q s0[4:8) over s0[0:4) s0[4:8)
backward
"""
# Queries 4 to 6 see keys 2 and 3 with a window of 3 (4: 2, 3, 4; 5: 3, 4, 5; 6: 4, 5, 6): the last
# one needs none of rank 0's.
WINDOW = """program lengths 8 3 heads 2 kv_heads 1 policy none
owner r0 s0[0:4) s1[0:3)
owner r1 s0[4:8)
forward
exchange 0 p2p
  r1 <- r0 kv s0[2:4)
attend r0
  q s0[0:4) over s0[0:4)
  q s1[0:3) over s1[0:3)
attend r1
  q s0[4:8) over s0[2:4) s0[4:8)
backward
"""
# The partial outputs of queries 4 and 5 over the keys of rank 0 come from there, and are merged.
WINDOW_BY_OUTPUTS = """program lengths 8 heads 2 kv_heads 1 policy none
owner r0 s0[0:4)
owner r1 s0[4:8)
forward
exchange 0 p2p
  r0 <- r1 q s0[4:6)
attend r0
  q s0[0:8) over s0[0:4)
attend r1
  q s0[4:8) over s0[4:8)
exchange 1 p2p
  r1 <- r0 out s0[4:6)
merge r1
  out s0[4:6)
backward
"""


def window(source: str) -> Program:
    return replace(parse(source), mask=SlidingWindow(3))


def assert_equals_dense(program: Program) -> None:
    x = dense.draw(program.lengths, program.num_heads, program.num_kv_heads)
    ours = reference.run(program, x.q, x.k, x.v, x.scale, x.dout)
    theirs = dense.attention(x, visible(program.mask))
    for name in ("out", "q_grad", "k_grad", "v_grad"):
        assert dense.worst(getattr(ours, name), getattr(theirs, name)) < 1e-12, name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "program", [parse(FULL), window(WINDOW), window(WINDOW_BY_OUTPUTS)], ids=["full", "window", "outputs"]
)
def test_other_masks_are_proved_and_equal_dense_attention(program: Program, policy: Policy) -> None:
    both = with_backward(program, policy)
    verify(program)
    verify(both)
    assert_equals_dense(both)


def test_text_names_a_mask_that_is_not_causal() -> None:
    assert parse(FULL).mask.name == "full"
    assert text(parse(FULL)) == FULL
    assert text(parse(text(with_backward(parse(FULL), "keep")))) == text(with_backward(parse(FULL), "keep"))
    with pytest.raises(InvalidProgramError, match=r"line 1: expected 'program lengths .*\[mask M\]'"):
        parse(FULL.replace("mask full", "mask half"))


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        # A causal program leaves out keys that the full mask shows, and the other way round.
        (
            parse(FULL.replace("s0[0:4) s0[4:8)\n  q s1", "s0[0:4)\n  q s1").replace("  r0 <- r1 kv s0[4:8)\n", "")),
            "never completes OUT",
        ),
        (parse(FULL.replace(" mask full", "")), "no query of it may see any key of it"),
        # A key too few, a key too many, a query that sees nothing of it.
        (window(WINDOW.replace("[2:4)", "[3:4)")), "never completes OUT"),
        (window(WINDOW.replace("kv s0[2:4)", "kv s0[3:4)")), "rank does not hold KV"),
        (
            window(WINDOW.replace("s0[2:4) s0[4:8)", "s0[2:4) s0[4:8)\n  q s0[6:8) over s0[2:4)")),
            "no query of it may see any key of it",
        ),
        (window(WINDOW.replace("kv s0[2:4)", "kv s0[0:4)")), None),  # more than is needed travels, as with causal masks
        (
            window(WINDOW_BY_OUTPUTS.replace("out s0[4:6)", "out s0[4:7)").replace("q s0[4:6)", "q s0[4:7)")),
            "no partial output of it",
        ),
        (parse(WINDOW), "never completes OUT"),
    ],
)
def test_verify_finds_what_a_mask_shows_and_a_program_misses(program: Program, complaint: str | None) -> None:
    if complaint is None:
        verify(program)
        return
    with pytest.raises(InvalidProgramError, match=complaint):
        verify(program)


def test_the_reference_refuses_what_the_mask_does_not_show() -> None:
    program = window(WINDOW_BY_OUTPUTS.replace("out s0[4:6)", "out s0[4:7)").replace("q s0[4:6)", "q s0[4:7)"))
    x = dense.draw(program.lengths, program.num_heads, program.num_kv_heads)
    with pytest.raises(InvalidProgramError, match="holds no partial of out"):
        reference.run(program, x.q, x.k, x.v, x.scale)

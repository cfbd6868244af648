"""Programs as text, and backward programs as text."""

from __future__ import annotations

import pytest

from megatron_balance.compile.proof.meaning import verify
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.program import Attend, Exchange, Kind
from megatron_balance.ir.text import parse, text
from tests.support import programs
from tests.support.programs import with_backward


@pytest.mark.parametrize("name", programs.ALL)
def test_a_small_program_reads_and_prints_the_same(name: str) -> None:
    assert text(parse(programs.ALL[name])) == programs.ALL[name]


def test_a_program_is_read_as_rows_of_numbers() -> None:
    program = parse(programs.HEADS)
    exchange, first, second, _ = program.forward
    assert isinstance(exchange, Exchange)
    assert isinstance(first, Attend)
    assert isinstance(second, Attend)
    assert (program.lengths, program.num_heads, program.num_kv_heads, program.policy) == ((3,), 2, 2, None)
    assert [list(owned) for owned in program.owned] == [[(0, 0, 2)], [(0, 2, 3)]]
    assert (exchange.collective, exchange.group) == ("all_to_all", (0, 1))
    assert next(iter(exchange.transfers)) == (Kind.Q, 0, 0, 2, 1, 2, 0, 1)
    assert list(second.pairs) == [(0, 0, 3, 1, 2, 0, 3, 1, 2)]


def test_blank_lines_and_trailing_spaces_do_not_matter() -> None:
    assert parse("\n" + programs.PREFIX.replace("\n", "  \n\n")) == parse(programs.PREFIX)


def test_heads_are_written_only_where_some_are_missing() -> None:
    whole = programs.HEADS.replace("r1 <- r0 q s0[0:2) h[1:2)", "r1 <- r0 q s0[0:2) h[0:2)")
    assert "r1 <- r0 q s0[0:2)\n" in text(parse(whole))


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("program lengths 8", "programme lengths 8", r"line 1: expected 'program lengths"),
        ("owner r1", "owner r2", r"line 3: owners are listed in order; expected r1"),
        ("owner r1 s0[4:8)", "owner", r"line 3: owners are listed in order; expected r1, got 'owner'"),
        ("owner r1 s0[4:8)", "owner r1 s0[4-8)", r"line 3: expected a region like s0\[0:8\)"),
        ("forward\n", "forward\n  r1 <- r0 kv s0[0:4)\n", r"line 5: a row belongs to an exchange"),
        ("exchange 0 p2p", "exchange 0 broadcast", r"line 5: expected owner, forward, backward, exchange"),
        ("exchange 0 p2p", "exchange p2p", r"line 5: expected owner"),
        ("exchange 0 p2p", "exchange 0 all_to_all 0 1", r"line 5: expected a rank like r0, got '0'"),
        ("r1 <- r0 kv", "r1 <- r0 keys", r"line 6: expected 'rD <- rS kind sN\[a:b\)'"),
        ("r1 <- r0 kv", "r1 -> r0 kv", r"line 6: expected 'rD <- rS"),
        ("r1 <- r0 kv s0[0:4)", f"r1 <- r0 kv s0[0:{2**63})", r"line 6: expected numbers of at most 18 digits, got"),
        ("attend r0", "attends r0", r"line 7: expected owner"),
        ("q s0[0:4) over s0[0:4)", "s0[0:4) over s0[0:4)", r"line 8: expected 'q sN\[a:b\) over"),
        ("q s0[0:4) over s0[0:4)", "q s0[0:4)", r"line 8: expected 'q sN\[a:b\) over"),
        ("q s0[0:4) over s0[0:4)", "q s0[0:4) over s1[0:4)", r"line 8: a query attends only to its own sequence"),
        (
            "q s0[0:4) over s0[0:4)",
            "q s0[0:4) over s0[0:4) and more",
            r"line 8: expected regions like s0\[0:8\) behind 'over'",
        ),
        ("backward", "merge r0\n  outs s0[0:4)\nbackward", r"line 12: expected one of q, kv, out"),
    ],
)
def test_a_line_that_is_not_of_this_form_is_refused_with_its_number(right: str, wrong: str, complaint: str) -> None:
    assert right in programs.PREFIX
    with pytest.raises(InvalidProgramError, match=complaint):
        parse(programs.PREFIX.replace(right, wrong, 1))


# What a backward program must be: source, policy, the lines behind "backward".
BACKWARDS = [
    pytest.param(
        programs.PREFIX,
        "keep",
        """\
attend_grad r0
  q s0[0:4) over s0[0:4)
attend_grad r1
  q s0[4:8) over s0[0:4) s0[4:8)
exchange 1 p2p
  r0 <- r1 dkv s0[0:4)
merge r0
  dkv s0[0:4)
""",
        id="gradients of received keys go back to the owner and are summed",
    ),
    pytest.param(
        programs.PREFIX,
        "replay",
        """\
exchange 0 p2p
  r1 <- r0 kv s0[0:4)
attend_grad r0
  q s0[0:4) over s0[0:4)
attend_grad r1
  q s0[4:8) over s0[0:4) s0[4:8)
exchange 1 p2p
  r0 <- r1 dkv s0[0:4)
merge r0
  dkv s0[0:4)
""",
        id="a replay brings the keys again",
    ),
    pytest.param(
        programs.DISPATCH,
        "replay",
        """\
exchange 1 p2p
  r1 <- r0 dout s0[2:4)
exchange 2 p2p
  r1 <- r0 q s0[2:4)
  r1 <- r0 kv s0[0:2)
attend_grad r0
  q s0[0:2) over s0[0:2)
  q s0[2:4) over s0[2:4)
attend_grad r1
  q s0[2:4) over s0[0:2)
exchange 3 p2p
  r0 <- r1 dq s0[2:4)
  r0 <- r1 dkv s0[0:2)
merge r0
  dq s0[2:4)
  dkv s0[0:2)
""",
        id="the gradient of a partial output goes where the partial came from",
    ),
    pytest.param(
        programs.TWO_LAUNCHES,
        "keep",
        """\
attend_grad r0
  q s0[2:4) over s0[0:2)
attend_grad r0
  q s0[0:4) over s0[2:4)
  q s0[0:2) over s0[0:2)
merge r0
  dq s0[2:4)
  dkv s0[0:2)
""",
        id="launches are reversed; what a query cannot see has no gradient to merge",
    ),
    pytest.param(
        programs.HEADS,
        "keep",
        """\
exchange 1 all_to_all r0 r1
  r1 <- r0 dout s0[0:2) h[1:2)
  r0 <- r1 dout s0[2:3) h[0:1)
attend_grad r0
  q s0[0:3) h[0:1) over s0[0:3) h[0:1)
attend_grad r1
  q s0[0:3) h[1:2) over s0[0:3) h[1:2)
exchange 3 all_to_all r0 r1
  r1 <- r0 dq s0[2:3) h[0:1)
  r1 <- r0 dkv s0[2:3) h[0:1)
  r0 <- r1 dq s0[0:2) h[1:2)
  r0 <- r1 dkv s0[0:2) h[1:2)
""",
        id="heads go back as they came, and nothing is merged",
    ),
    pytest.param(
        programs.CHAIN,
        "keep",
        """\
attend_grad r2
  q s0[4:6) over s0[0:2) s0[2:4) s0[4:6)
exchange 1 p2p
  r1 <- r2 dkv s0[0:2)
  r1 <- r2 dkv s0[2:4)
attend_grad r1
  q s0[2:4) over s0[0:2) s0[2:4)
merge r1
  dkv s0[0:4)
exchange 3 p2p
  r0 <- r1 dkv s0[0:2)
attend_grad r0
  q s0[0:2) over s0[0:2)
merge r0
  dkv s0[0:2)
""",
        id="a gradient is merged before it leaves a rank that passed the keys on",
    ),
]


@pytest.mark.parametrize(("source", "policy", "expected"), BACKWARDS)
def test_the_backward_is_derived_from_the_forward(source: str, policy: str, expected: str) -> None:
    program = with_backward(parse(source), policy)  # pyright: ignore[reportArgumentType]
    printed = text(program)
    assert printed.split("backward\n", 1)[1] == expected
    assert f"policy {policy}" in printed.splitlines()[0]
    assert parse(printed) == program
    verify(program)


def test_a_replay_of_keys_that_were_only_passed_on_is_found_out() -> None:
    """Rank 1 passed on keys that it has dropped since: such a schedule must name its own replay
    (RankProgram.replays)."""
    with pytest.raises(
        InvalidProgramError, match=r"backward op 0: KV s0\[0:2\).* from rank 1 to rank 2: the source does not hold it"
    ):
        verify(with_backward(parse(programs.CHAIN), "replay"))

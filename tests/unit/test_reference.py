"""The judge itself: right on programs written by hand, and strict about what a rank holds."""

import numpy as np
import pytest

from megatron_balance import reference
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.text import parse, text
from tests.support import dense, programs
from tests.support.programs import with_backward

NAMES = ("out", "q_grad", "k_grad", "v_grad")


def run(source: str, *, backward: bool = True) -> tuple[reference.Result, dense.Dense]:
    program = parse(source)
    x = dense.draw(program.lengths, program.num_heads, program.num_kv_heads, head_dim=5)
    return reference.run(program, x.q, x.k, x.v, x.scale, x.dout if backward else None), dense.attention(x)


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((n, "keep") for n in programs.ALL), ("prefix", "replay"), ("dispatch", "replay"), ("heads", "replay")],
)
def test_a_program_written_by_hand_equals_dense_attention(name: str, policy: str) -> None:
    ours, theirs = run(text(with_backward(parse(programs.ALL[name]), policy)))  # pyright: ignore[reportArgumentType]
    for what in NAMES:
        assert dense.worst(getattr(ours, what), getattr(theirs, what)) < 1e-13
    ours, theirs = run(programs.ALL[name], backward=False)
    assert dense.worst(ours.out, theirs.out) < 1e-13
    assert ours.q_grad is None


def test_dense_gradients_are_the_slope_of_the_output_and_the_lse_its_logarithm() -> None:
    # The lse is the logarithm of the summed scores.
    program = parse(programs.DISPATCH)
    x = dense.draw(program.lengths, 1, 1)
    lse = reference.run(program, x.q, x.k, x.v, x.scale).lse[0]
    scores = x.q[0][:, 0] @ x.k[0][:, 0].T * x.scale
    for query in range(4):
        assert lse[query, 0] == pytest.approx(np.log(np.exp(scores[query, : query + 1]).sum()), abs=1e-12)
    # Dense gradients are the slope of the output.
    # The yardstick against finite differences, so that judge and judged do not share a mistake.
    x = dense.draw((6,), 4, 2, head_dim=3, seed=1)
    grads = dense.attention(x)
    step = 1e-6
    for name, grad in (("q", grads.q_grad), ("k", grads.k_grad), ("v", grads.v_grad)):
        table = getattr(x, name)[0]
        for index in [(0, 0, 0), (3, 1, 2), (5, 1, 1)]:
            losses = []
            for sign in (1, -1):
                table[index] += sign * step
                losses.append(float((dense.attention(x).out[0] * x.dout[0]).sum()))
                table[index] -= sign * step
            assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(grad[0][index], rel=1e-6, abs=1e-8)


BACK = text(with_backward(parse(programs.DISPATCH), "replay"))
CHAIN_BACK, PREFIX_BACK = (text(with_backward(parse(each), "keep")) for each in (programs.CHAIN, programs.PREFIX))


QUERIES = "exchange 2 p2p\n  r1 <- r0 q s0[2:4)\n  r1 <- r0 kv s0[0:2)\n"


@pytest.mark.parametrize(
    ("source", "right", "wrong", "complaint"),
    [
        (programs.DISPATCH, "  r1 <- r0 kv s0[0:2)\n", "", r"rank 1 does not hold all of kv that it needs"),
        (programs.DISPATCH, "  r1 <- r0 q s0[2:4)\n", "", r"rank 1 does not hold all of q that it needs"),
        (programs.DISPATCH, "merge r0\n  out s0[2:4)\n", "", r"rank 0 holds 2 partials of out there, not merged"),
        (programs.DISPATCH, "out s0[2:4)\nmerge", "out s0[0:4)\nmerge", r"rank 1 holds no partial of out there"),
        (programs.DISPATCH, "merge r0", "merge r1", r"rank 1 holds no partial of some of out there"),
        (programs.PREFIX, "owner r1 s0[4:8)", "owner r1 s0[5:8)", r"rank 1 does not hold all of q that it needs"),
        (programs.PREFIX, "r0 kv s0[0:4)", "r0 kv s0[4:8)", r"rank 0 does not hold all of kv there, at forward op 0:"),
        (BACK, "policy replay", "policy none", r"the program is forward only"),
        (BACK, "exchange 1 p2p\n  r1 <- r0 dout s0[2:4)\n", "", r"rank 1 does not hold all of dout that it needs"),
        (BACK, QUERIES, "", r"rank 1 does not hold all of q that it needs"),
        (CHAIN_BACK, "merge r1\n  dkv s0[0:4)\n", "", r"rank 1 holds 2 partials of dkv there, not merged"),
    ],
)
def test_reading_what_is_not_there_is_an_error(source: str, right: str, wrong: str, complaint: str) -> None:
    assert right in source
    with pytest.raises(InvalidProgramError, match=complaint):
        run(source.replace(right, wrong, 1))


def test_what_programs_leave_out_is_not_there_and_home_rows_follow_the_home() -> None:
    # A program that computes something else gives something else and nothing zero.
    # A program that computes something else gives something else.
    # Without rank 1's rectangle the last two queries see half of their keys: no error, but not dense
    # attention.
    rank_0_alone = programs.DISPATCH.replace("exchange 1 p2p\n  r0 <- r1 out s0[2:4)\nmerge r0\n  out s0[2:4)\n", "")
    ours, theirs = run(rank_0_alone, backward=False)
    assert dense.worst([ours.out[0][:2]], [theirs.out[0][:2]]) < 1e-13
    assert dense.worst(ours.out, theirs.out) > 1e-2
    # A gradient to which nobody contributed is zero and may travel.
    before = "r0 <- r1 dkv s0[0:4)\n"
    travelling = f"{before}exchange 3 p2p\n  r0 <- r1 dq s0[0:2)\nmerge r0\n  dq s0[0:2)\n"
    ours, theirs = run(PREFIX_BACK.replace(before, travelling))
    assert dense.worst(ours.q_grad or (), theirs.q_grad) < 1e-13
    # Home rows follow the order of the home.
    values = [np.arange(4.0)[:, None], 10 + np.arange(3.0)[:, None]]
    owned = reference.owned_rows(Rows.of(3, [(1, 1, 3), (0, 2, 4), (0, 0, 1)]), values)
    assert owned[:, 0].tolist() == [11, 12, 2, 3, 0]
    assert reference.owned_rows(Rows(3), values).shape == (0, 1)
    program = parse("program lengths heads 2 kv_heads 1 policy keep\nowner r0\nforward\nbackward\n")
    assert reference.run(program, [], [], [], 1.0, []) == reference.Result((), (), (), (), ())

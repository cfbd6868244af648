"""Recurrent layers: the program of a small layout, its bytes, what the proof and the parser refuse."""

from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_balance import Cluster, Model, make_planner
from megatron_balance.analysis.recurrent import SummarySizes, bytes_moved
from megatron_balance.compile.proof.recurrent import verify_recurrent
from megatron_balance.compile.recurrent import compile_recurrent, program_of
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.recurrent import Compose
from megatron_balance.ir.text import parse_recurrent, text
from megatron_balance.recurrent_reference import Recurrence, run_recurrent
from tests.support import recurrent

# Rank 0 has the begin and the end of a sequence, rank 1 what is between.
PROGRAM = """\
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
compose r1
  summary s0[0:4) + s0[4:6) h[1:2)
exchange 2
  r1 <- r0 summary s0[0:4) h[0:1)
  r0 <- r1 summary s0[0:6) h[1:2)
backward
exchange 3
  r0 <- r1 dsummary s0[4:6) h[0:1)
  r1 <- r0 dsummary s0[6:8) h[1:2)
compose r1
  dsummary s0[4:6) + s0[6:8) h[1:2)
compose r0
  dsummary s0[4:6) + s0[6:8) h[0:1)
exchange 4
  r1 <- r0 dsummary s0[6:8) h[0:1)
  r0 <- r1 dsummary s0[4:8) h[1:2)
exchange 5
  r1 <- r0 drows s0[4:6)
  r0 <- r1 drows s0[1:4)
"""


def test_a_small_layout_has_this_program():
    owned = [Rows.of(3, [(0, 0, 4), (0, 6, 8)]), Rows.of(3, [(0, 4, 6)])]
    program = program_of((8,), owned, 2, 3)
    assert text(program) == PROGRAM
    assert parse_recurrent(PROGRAM) == program


@pytest.mark.parametrize(
    ("line", "other", "wrong"),
    [
        ("r1 <- r0 rows s0[1:4)", "r1 <- r0 rows s0[0:3)", r"op 0 .*no piece reads.*s0\[0:3\)"),
        ("r1 <- r0 rows s0[1:4)", "r1 <- r0 rows s0[2:4)", r"rank 1: ROWS s0\[1:2\), of a piece: not there"),
        ("r1 <- r0 rows s0[1:4)", "r1 <- r0 rows s0[1:4) h[0:2)", "op 0 .*heads that are not there"),
        ("r1 <- r0 summary s0[0:4) h[1:2)", "r1 <- r0 summary s0[0:4)", "op 1 .*has already"),
        ("r1 <- r0 summary s0[0:4) h[1:2)", "r1 <- r0 summary s0[0:3) h[1:2)", r"op 1 .*not there.*\n.*\n.*s0\[0:3\)"),
        ("  summary s0[0:4) + s0[4:6) h[0:1)", "  summary s0[0:4) + s0[4:5) h[0:1)", "op 2 .*not there"),
        ("r1 <- r0 summary s0[0:4) h[0:1)", "r1 <- r0 summary s0[0:6) h[0:1)", r"rank 1: SUMMARY s0\[0:4\)"),
        (
            "  r0 <- r1 summary s0[0:6)",
            "  r1 <- r0 summary s0[0:6) h[0:1)\n  r0 <- r1 summary s0[0:6)",
            "op 4 .*nobody uses",
        ),
        ("r0 <- r1 summary s0[0:6) h[1:2)", "r0 <- r0 summary s0[0:6) h[1:2)", "op 4 .*from a rank to itself"),
        ("r0 <- r1 summary s0[0:6) h[1:2)", "r2 <- r1 summary s0[0:6) h[1:2)", "op 4 .*rank that is not there"),
        ("r1 <- r0 dsummary s0[6:8) h[1:2)", "r1 <- r0 summary s0[6:8) h[1:2)", "op 5 .*other phase"),
        ("r1 <- r0 dsummary s0[6:8) h[0:1)", "r1 <- r0 dsummary s0[6:9) h[0:1)", "op 8 .*tokens"),
        ("r1 <- r0 drows s0[4:6)", "r1 <- r0 drows s1[4:6)", "op 9 .*sequence"),
        ("r1 <- r0 drows s0[4:6)\n", "", r"rank 1: ROWS_GRAD s0\[4:5\), of a piece: not there"),
        ("r0 <- r1 drows s0[1:4)", "r0 <- r1 drows s0[1:4)\n  r0 <- r1 drows s0[1:2)", "op 9 .*has already"),
        ("exchange 5", "exchange 4", "op 9 .*ids must rise"),
        ("owner r1 s0[4:6)", "owner r1 s0[4:5)", "each token of each sequence has exactly one owner"),
    ],
)
def test_the_proof_refuses_a_change_and_names_it(line, other, wrong):
    assert line in PROGRAM
    changed = parse_recurrent(PROGRAM.replace(line, other, 1).replace("  \n", ""))
    with pytest.raises(InvalidProgramError, match=f"(?s){wrong}"):
        verify_recurrent(changed)


# Rows that come with the summaries come too late: these are made of the convolution's outputs.
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_rows_in_the_round_of_the_states_are_refused(phase):
    program = parse_recurrent(PROGRAM)
    ops = getattr(program, phase)
    rows, states = (ops[0], ops[1]) if phase == "forward" else (ops[-1], ops[-2])
    both = replace(states, transfers=Rows(8, rows.transfers.data + states.transfers.data))
    ops = tuple(both if op is states else op for op in ops if op is not rows)
    with pytest.raises(InvalidProgramError, match="not there when it is taken"):
        verify_recurrent(replace(program, **{phase: ops}))


def test_who_composes_in_the_backward_has_the_map_from_the_forward():
    # The other head's composers: rank 0 has gradients of both parts, but was sent no M of the first.
    forward, backward = PROGRAM.split("backward")
    swapped = backward.replace("h[0:1)", "h[_:1)").replace("h[1:2)", "h[0:1)").replace("h[_:1)", "h[1:2)")
    with pytest.raises(InvalidProgramError, match=r"(?s)op 7 \(Compose\): not there.*h\[1:2\)"):
        verify_recurrent(parse_recurrent(f"{forward}backward{swapped}"))


@pytest.mark.parametrize(
    ("line", "other", "wrong"),
    [
        ("recurrent lengths 8", "program lengths 8", "1: expected"),
        ("owner r1", "owner r2", "3: owners are listed in order; expected r1"),
        ("rows s0[4:6)", "kv s0[4:6)", "6: expected"),
        ("summary s0[0:4) + s0[4:6)", "summary s0[0:4) + s0[5:6)", "12: expected"),
        ("exchange 0\n", "", "5: a row belongs to an exchange or compose"),
    ],
)
def test_a_line_that_is_not_of_the_form_is_named(line, other, wrong):
    with pytest.raises(InvalidProgramError, match=f"line {wrong}"):
        parse_recurrent(PROGRAM.replace(line, other, 1))


def test_the_reference_is_the_recurrence_and_its_gradient_is_autograds():
    torch = pytest.importorskip("torch")
    for kind in recurrent.KINDS:
        (x,), taps, (dout,) = recurrent.draw(kind, (23,), 2, 3, 0)
        leaves = {each.name: torch.tensor(getattr(x, each.name)).requires_grad_() for each in fields(Recurrence)}
        weight = torch.tensor(taps).requires_grad_()
        padded = torch.cat([torch.zeros(3, 2, 2), leaves["v"]])
        v = torch.stack([weight[at] * padded[at : at + 23] for at in range(4)]).sum(dim=0)
        state, out = torch.zeros(2, 3, 2, dtype=torch.float64), []
        for t in range(23):
            k, state = leaves["k"][t], leaves["decay"][t][..., None] * state
            read = torch.einsum("hk,hkv->hv", k, state)
            change = leaves["write"][t][:, None] * v[t] - leaves["erase"][t][:, None] * read
            state = state + torch.einsum("hk,hv->hkv", k, change)
            out.append(torch.einsum("hk,hkv->hv", leaves["q"][t], state))
        torch.stack(out).backward(torch.tensor(dout))
        got = recurrent.alone([x], taps, [dout])
        assert np.abs(got.out[0] - torch.stack(out).detach().numpy()).max() < 1e-12
        assert got.taps_grad is not None
        assert np.abs(got.taps_grad - weight.grad.numpy()).max() < 1e-12
        for name, leaf in leaves.items():
            assert np.abs(getattr(got.grads[0], name) - leaf.grad.numpy()).max() < 1e-12, name


# With decays near 1; a default of Gated DeltaNet forgets within some tokens, and would hide this.
@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_a_state_that_is_lost_is_seen_at_the_end_of_a_sequence(kind):
    (x,), taps, (dout,) = recurrent.draw(kind, (200,), 1, 0, 1)
    whole, tail = recurrent.alone([x], taps, [dout]), recurrent.alone([x.at(slice(60, 200))], taps, [dout[60:]])
    assert np.abs(whole.out[0][190:] - tail.out[0][130:]).max() > 0.01


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_there_are_two_rounds_of_states_however_many_ranks_share_a_sequence(num_ranks):
    model = Model(8, 2, 16)
    plan = make_planner("te_ring", Cluster(num_ranks, min(num_ranks, 8)), model)((num_ranks * 20,))
    program = compile_recurrent(plan, 4, 3)
    for ops in (program.forward, program.backward):
        moved = bytes_moved(ops, SummarySizes(map=9, state=6, channels=5))
        assert len(np.unique(moved[:, 0])) == 3


def test_few_heads_of_many_sequences_are_composed_on_different_ranks():
    owned = [
        Rows.of(3, [span for seq in range(6) for span in ((seq, 0, 2), (seq, 4, 6))]),
        Rows.of(3, [(seq, 2, 4) for seq in range(6)]),
    ]
    program = program_of((6,) * 6, owned, 1, 0)
    composed = {op.rank: len(op.rows) for op in program.forward if isinstance(op, Compose)}
    assert composed == {0: 3, 1: 3}


def test_bytes_are_those_of_maps_states_and_rows():
    # Of one head of rank 1's piece U and M, of rank 0's first one U alone; three and two rows. M does
    # not travel in the backward, nor behind a state.
    program = parse_recurrent(PROGRAM)
    sizes = SummarySizes(map=9, state=6, channels=5, state_bytes=4, row_bytes=2)
    assert bytes_moved(program.forward, sizes).tolist() == [
        [0, 0, 1, 3 * 5 * 2],
        [0, 1, 0, 2 * 5 * 2],
        [1, 0, 1, 6 * 4],
        [1, 1, 0, (6 + 9) * 4],
        [2, 0, 1, 6 * 4],
        [2, 1, 0, 6 * 4],
    ]
    assert bytes_moved(program.backward, sizes).tolist() == [
        [number, src, dst, amount]
        for number, of in ((3, (24, 24)), (4, (24, 24)), (5, (2 * 5 * 2, 3 * 5 * 2)))
        for (src, dst), amount in zip(((0, 1), (1, 0)), of, strict=True)
    ]


def test_the_reference_says_what_a_rank_does_not_have():
    program = parse_recurrent(PROGRAM)
    x, taps, dout = recurrent.draw("kda", (8,), 2, 3, 0)
    for phase, ops, wrong in (
        ("forward", program.forward[1:], "row 1 of sequence 0"),
        ("forward", program.forward[:-1], r"SUMMARY s0\[0:4\) of head 0"),
        ("backward", program.backward[:-1], "keeps gradients of rows"),
    ):
        with pytest.raises(InvalidProgramError, match=wrong):
            run_recurrent(replace(program, **{phase: ops}), x, taps, dout)

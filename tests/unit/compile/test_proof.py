"""Every complaint of `verify`, each from a program that is wrong in one place."""

from dataclasses import replace

import pytest

from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan, Routing, SharedZone, TaskTable, Zone
from megatron_balance.ir.text import parse, text
from tests.support.programs import ALL, CHAIN, DISPATCH, PREFIX, TWO_LAUNCHES, with_backward

PREFIX_BACK = text(with_backward(parse(PREFIX), "keep"))
DISPATCH_BACK = text(with_backward(parse(DISPATCH), "replay"))
TWO_LAUNCHES_BACK = text(with_backward(parse(TWO_LAUNCHES), "keep"))
CHAIN_BACK = text(with_backward(parse(CHAIN), "keep"))
GATHER = PREFIX.replace("exchange 0 p2p", "exchange 0 all_gather r0 r1")
GATHER_OF_THREE = """\
program lengths 3 heads 1 kv_heads 1 policy none
owner r0 s0[0:1)
owner r1 s0[1:2)
owner r2 s0[2:3)
forward
exchange 0 all_gather r0 r1 r2
  r1 <- r0 kv s0[0:1)
  r2 <- r0 kv s0[0:1)
  r0 <- r1 kv s0[1:2)
  r2 <- r1 kv s0[1:2)
attend r0
  q s0[0:1) over s0[0:1)
attend r1
  q s0[1:2) over s0[0:2)
attend r2
  q s0[2:3) over s0[0:3)
backward
"""
GATHER_OF_THREE_BACK = text(with_backward(parse(GATHER_OF_THREE), "keep"))
GQA = """\
program lengths 2 heads 4 kv_heads 2 policy none
owner r0 s0[0:2)
forward
attend r0
  q s0[0:2) h[0:2) over s0[0:2) h[0:1)
  q s0[0:2) h[2:3) over s0[0:2) h[1:2)
  q s0[0:2) h[3:4) over s0[0:2) h[1:2)
backward
"""


@pytest.mark.parametrize(
    "source",
    [
        *(*ALL.values(), PREFIX_BACK, DISPATCH_BACK, TWO_LAUNCHES_BACK, CHAIN_BACK),
        *(GATHER, GATHER_OF_THREE, GATHER_OF_THREE_BACK, GQA),
    ],
)
def test_the_programs_that_the_others_are_made_of_are_right(source: str) -> None:
    verify(parse(source))


def complaint(source: str, right: str, wrong: str) -> str:
    # The complaint of `verify` after the last `right` became `wrong`.
    assert right in source
    before, _, after = source.rpartition(right)
    with pytest.raises(InvalidProgramError) as caught:
        verify(parse(before + wrong + after))
    return str(caught.value)


# By program: what becomes wrong, the wrong words, and the complaint.
WRONG = {
    PREFIX: [
        (
            "heads 2 kv_heads 1",
            "heads 3 kv_heads 2",
            "expected key-value heads that divide the query heads, got 2 and 3",
        ),
        ("lengths 8", "lengths 8 0", "sequence 1 has length 0"),
        ("policy none", "policy recompute", "unknown policy 'recompute'; known: keep, replay"),
        ("r1 <- r0 kv s0[0:4)", "r1 <- r0 kv s3[0:4)", "names sequence 3, but there are 1"),
        ("r1 <- r0 kv s0[0:4)", "r1 <- r0 kv s0[0:9)", "region s0[0:9) is empty or outside its sequence"),
        ("r1 <- r0 kv s0[0:4)", "r1 <- r0 kv s0[4:4)", "region s0[4:4) is empty or outside its sequence"),
        ("r1 <- r0 kv s0[0:4)", "r1 <- r0 kv s0[0:4) h[0:2)", "heads that the model has not"),
        ("owner r1 s0[4:8)", "owner r1 s0[5:8)", "layout: sequence 0, tokens [4:5) lie on 0 ranks"),
        ("owner r1 s0[4:8)", "owner r1 s0[3:8)", "layout: sequence 0, tokens [3:4) lie on 2 ranks"),
        ("exchange 0 p2p\n  r1 <- r0 kv s0[0:4)\n", "exchange 0 p2p\n", "forward op 0: it moves nothing"),
        ("backward", "attend r1\nbackward", "forward op 3: it attends nothing"),
        ("backward", "merge r1\nbackward", "forward op 3: it merges nothing"),
        ("attend r0", "attend r2", "forward op 1: it names a rank that is not there; there are 2"),
        ("exchange 0 p2p", "exchange 0 all_to_all r0 r1 r2", "forward op 0: it names a rank that is not there"),
        ("r1 <- r0", "r0 <- r0", "forward op 0: a transfer is from a rank to itself"),
        ("r1 <- r0", "r9 <- r0", "names a rank that is not there"),
        ("r0 kv s0[0:4)", "r0 dkv s0[0:4)", "moves a kind of value that does not belong into the forward"),
        ("kv s0[0:4)\n", "kv s0[4:8)\n", "from rank 0 to rank 1: the source does not hold it"),
        (
            "  r1 <- r0 kv s0[0:4)\n",
            "  r1 <- r0 kv s0[0:4)\n  r1 <- r0 kv s0[2:3)\n",
            "a rank receives the same value twice",
        ),
        ("attend r0", "exchange 1 p2p\n  r1 <- r0 kv s0[0:4)\nattend r0", "the target holds it already"),
        (
            "attend r0",
            "exchange 1 p2p\n  r0 <- r1 kv s0[4:8)\nattend r0",
            "forward op 1: nothing that it brings is ever used",
        ),
        ("exchange 0 p2p", "exchange 0 all_to_all r0", "all_to_all reaches beyond its group"),
        ("attend r0", "attend_grad r0", "AttendGrad does not belong into the forward"),
        ("q s0[4:8) over s0[0:4)", "q s0[3:8) over s0[0:4)", "q s0[3:8) over [0:4): rank does not hold Q"),
        (
            "attend r0\n  q s0[0:4) over s0[0:4)",
            "attend r0\n  q s0[0:4) over s0[0:4)\n  q s0[2:4) over s0[0:1)",
            "it computes some pair twice",
        ),
        ("backward", "attend r0\n  q s0[2:4) over s0[0:1)\nbackward", "some of it is computed twice"),
        (
            "attend r0\n  q s0[0:4) over s0[0:4)",
            "attend r0\n  q s0[0:2) over s0[2:4)",
            "no query of it may see any key of it",
        ),
        (
            "q s0[4:8) over s0[0:4) s0[4:8)",
            "q s0[4:8) over s0[4:8)",
            "forward op 0: nothing that it brings is ever used",
        ),
        (
            "q s0[4:8) over s0[0:4) s0[4:8)",
            "q s0[4:8) over s0[1:4) s0[4:8)",
            "forward: rank 1 never completes OUT of s0[4:8)",
        ),
    ],
    PREFIX_BACK: [
        ("policy keep", "policy none", "has a backward but no policy"),
        (
            "r0 <- r1 dkv s0[0:4)",
            "r0 <- r1 out s0[0:4)",
            "moves a kind of value that does not belong into the backward",
        ),
        ("attend_grad r0", "attend r0", "Attend does not belong into the backward"),
        (
            "exchange 1 p2p\n  r0 <- r1 dkv s0[0:4)\nmerge r0\n  dkv s0[0:4)\n",
            "",
            "backward: rank 0 never completes KV_GRAD of s0[0:4)",
        ),
        ("attend_grad r0\n  q s0[0:4) over s0[0:4)\n", "", "there are not two partials to merge"),
    ],
    DISPATCH: [
        ("r0 <- r1 out s0[2:4)", "r0 <- r1 out s0[1:4)", "the source holds no partial output of it"),
        (
            "  r0 <- r1 out s0[2:4)\n",
            "  r0 <- r1 out s0[2:4)\n  r0 <- r1 out s0[2:3)\n",
            "a partial is given away twice",
        ),
        (
            "exchange 1 p2p\n  r0 <- r1 out s0[2:4)\nmerge r0\n  out s0[2:4)\n",
            "",
            "forward: rank 0 never completes OUT of s0[2:4)",
        ),
    ],
    GATHER_OF_THREE: [("  r0 <- r1 kv s0[1:2)\n", "", "all_gather, but rank 1 does not send the same to all")],
    GATHER_OF_THREE_BACK: [
        ("  r1 <- r0 dkv s0[1:2)\n", "", "reduce_scatter, but rank 1 is not sent the same by all"),
        (
            "  r0 <- r1 dkv s0[0:1)\n",
            "  r0 <- r1 dkv s0[0:1)\n  r0 <- r1 dout s0[0:1)\n",
            "reduce_scatter of values that are not sums of gradients",
        ),
    ],
    GQA: [
        (
            "h[2:3) over s0[0:2) h[1:2)",
            "h[2:3) over s0[0:2) h[0:1)",
            "its query heads do not map evenly onto its key-value heads",
        )
    ],
    TWO_LAUNCHES: [
        (
            "merge r0\n  out s0[2:4)\n",
            "",
            "forward: rank 0 never completes OUT of s0[2:4): it has 2 of 2 parts of the sequence in 2 partials",
        ),
        ("out s0[2:4)", "out s0[1:4)", "OUT s0[1:4) heads [0:1): there are not two partials to merge"),
        ("out s0[2:4)", "kv s0[2:4)", "merges KV, which has no partials"),
    ],
    CHAIN_BACK: [
        (
            "merge r1\n  dkv s0[0:4)\n",
            "",
            "from rank 1 to rank 0: the source holds several partials of it that are not merged",
        )
    ],
    DISPATCH_BACK: [("  r0 <- r1 dq s0[2:4)\n", "", "there are not two partials to merge")],
}


@pytest.mark.parametrize(("source", "row"), [(source, row) for source, rows in WRONG.items() for row in rows])
def test_what_is_wrong_is_named(source: str, row: tuple[str, str, str]) -> None:
    right, wrong, expected = row
    assert expected in complaint(source, right, wrong)


def test_a_third_partial_before_a_merge_is_refused() -> None:
    # At most one partial may wait when an op leaves another, so that no merge can be dropped
    # unnoticed.
    said = complaint(
        TWO_LAUNCHES.replace("merge r0\n  out s0[2:4)\n", ""),
        "q s0[2:4) over s0[0:2)\n",
        "q s0[2:4) over s0[0:1)\nattend r0\n  q s0[2:4) over s0[1:2)\n",
    )
    assert "rank 0 holds several partials of OUT that are not merged" in said


def test_an_unconsumed_partial_is_refused() -> None:
    # Everything is complete at the owner, but rank 1 keeps a zero gradient that came from nowhere.
    said = complaint(
        CHAIN_BACK, "merge r0\n  dkv s0[0:2)\n", "merge r0\n  dkv s0[0:2)\nexchange 5 p2p\n  r1 <- r2 dkv s0[0:2)\n"
    )
    assert "backward: rank 1 ends with an unconsumed partial KV_GRAD of s0[0:2)" in said


def test_a_replayed_backward_must_bring_its_inputs_again() -> None:
    said = complaint(PREFIX_BACK, "policy keep", "policy replay")
    assert "q s0[4:8) over [0:4): rank does not hold KV" in said


def test_a_complaint_shows_the_op_as_text() -> None:
    said = complaint(PREFIX, "kv s0[0:4)\n", "kv s0[4:8)\n")
    assert said.endswith("exchange 0 p2p\n  r1 <- r0 kv s0[4:8)")


def test_a_program_without_sequences_or_without_ranks_is_right() -> None:
    verify(parse("program lengths heads 2 kv_heads 1 policy keep\nowner r0\nowner r1\nforward\nbackward\n"))
    verify(parse("program lengths heads 2 kv_heads 1 policy none\nforward\nbackward\n"))


# The structure of plans: what cannot be is refused before a program is made of it.

RING = MicrobatchPlan("by hand", (40, 9), 4, 2, 4, 2, (Zone("pool", "ring", (0, 1, 2, 3), (0, 1)),))
FRAGMENTS = ((0, 0, 0, 20), (1, 0, 20, 40))
TASKS = ((0, 0, 0, 20, 0, 20), (1, 0, 20, 40, 0, 20), (0, 0, 20, 40, 20, 40))


def table(
    tasks: tuple[tuple[int, ...], ...] = TASKS, fragments: tuple[tuple[int, ...], ...] = FRAGMENTS
) -> MicrobatchPlan:
    zone = TaskTable("attention", Rows.of(4, fragments), Rows.of(6, tasks))
    return replace(RING, lengths=(40,), zones=(zone,))


def test_the_plans_that_are_broken_below_hold_together() -> None:
    verify_plan(RING)
    verify_plan(table())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(RING, num_ranks=0), "0 ranks, 2 a node"),
        (replace(RING, ranks_per_node=3), "4 ranks in nodes of 3"),
        (replace(RING, num_kv_heads=3), "4 heads over 3"),
        (replace(RING, lengths=(40, 0)), "sequence 1 has length 0"),
        (replace(RING, zones=(replace(RING.zones[0], pattern="rink"),)), "no comm pattern 'rink'"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 2, 3), (0,)),)), "sequence 1 is in 0 zones"),
        (replace(RING, zones=RING.zones * 2), "sequence 0 is in 2 zones"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 2, 3), (0, 1, 7)),)), "there is no sequence 7"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 2, 4), (0, 1)),)), "ranks 0 to 4, there are 4"),
        (replace(RING, zones=(Zone("pool", "ring", (0, 1, 1), (0, 1)),)), "no ranks, or one twice"),
        (replace(RING, zones=(Zone("pool", "head_ring", (0, 1, 2, 3), (0, 1), 3),)), "groups of 3 in 4 ranks"),
        (replace(RING, moves=Rows.of(3, [(0, 4, 1)])), "a rank that is not there"),
        (replace(RING, moves=Rows.of(3, [(1, 1, 1)])), "from a rank to itself"),
        (replace(RING, moves=Rows.of(3, [(0, 1, 50)])), "50 tokens of 49"),
        (replace(RING, routing=Routing(0, (0,))), "at least 1 each"),
        (replace(RING, routing=Routing(1, (1,))), "routing of zone 1, there are 1"),
        (table(fragments=((0, 0, 0, 20), (1, 0, 21, 40))), r"tokens \[21:40\) of sequence 0"),
        (table(fragments=((0, 0, 0, 20), (1, 0, 19, 40))), r"tokens \[19:40\) of sequence 0"),
        (table(fragments=((0, 0, 0, 20), (1, 0, 20, 39))), r"tokens \[20:39\) of sequence 0"),
        (table(fragments=((0, 0, 0, 20), (9, 0, 20, 40))), "on a rank that is not there"),
        (table(fragments=()), "tasks without fragments"),
        (table((*TASKS, (1, 0, 40, 40, 0, 40))), "no queries or no keys"),
        (table((*TASKS, (1, 0, 40, 41, 0, 40))), "no queries or no keys there"),
        (table((*TASKS, (1, 1, 0, 9, 0, 9))), "a task of a sequence that it does not hold"),
        (
            table((TASKS[0], (1, 0, 20, 40, 0, 19), TASKS[2])),
            r"queries \[20:40\) of sequence 0 have keys \[\(0, 19\), \(20",
        ),
        (table(TASKS[:2]), r"queries \[20:40\) of sequence 0 have keys"),
        (table((*TASKS, TASKS[0])), r"queries \[0:20\) of sequence 0 have keys"),
        (table((*TASKS[1:], (4, 0, 0, 20, 0, 20))), "a task on a rank that is not there"),
        (
            replace(RING, lengths=(40,), zones=(SharedZone("w", Rows.of(4, [(0, 0, 0, 39)]), 2, 1),)),
            r"tokens \[0:39\) of sequence 0",
        ),
    ],
)
def test_what_cannot_be_is_named(broken: MicrobatchPlan, message: str) -> None:
    with pytest.raises(InvalidProgramError, match=f"plan of by hand: .*{message}"):
        verify_plan(broken)

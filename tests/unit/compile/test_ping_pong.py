"""Turns of two nano-batches, and where a phase is cut. That interleaved programs meet in one order on
all ranks, the contract suite proves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_balance.compile import ping_pong
from megatron_balance.compile.order import IssueOrder, RunLaunches, issue_orders, order
from megatron_balance.compile.ping_pong import Cuts, Segment, cut_segments
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Attend, Exchange, Op
from tests.support import by_hand

# A document of 8 tokens on each of two ranks; rank 1 attends for the later half of rank 0's.
DISPATCH = by_hand.plan(
    (8, 4),
    2,
    by_hand.task_table([(0, 0, 0, 8), (1, 1, 0, 4)], [(0, 0, 0, 4, 0, 4), (1, 0, 4, 8, 0, 8), (1, 1, 0, 4, 0, 4)]),
    ranks_per_node=1,
)


def programs_of(planned: MicrobatchPlan, policy: Policy, *, backward: bool) -> list[Sequence[Op]]:
    programs = [compiled.program for compiled in compile_ranks(planned, policy)]
    return [program.backward if backward else program.forward for program in programs]


def shown(segments: Sequence[Segment]) -> str:
    return " ".join(
        f"{'AB'[segment.nano_batch]}{segment.part[0] if segment.part != 'end' else 'E'}{segment.layer}"
        for segment in segments
    )


# Turns


def test_parts_of_two_halves_take_turns() -> None:
    assert shown(ping_pong.forward(2)) == "Al0 As0 Bl0 Bs0 Aa0 Ba0 AE0 Al1 As1 BE0 Bl1 Bs1 Aa1 Ba1 AE1 Al2 BE1 Bl2"
    assert shown(ping_pong.one_by_one(1)) == "Al0 As0 Aa0 AE0 Bl0 Bs0 Ba0 BE0 Al1 Bl1"
    assert shown(ping_pong.forward(0)) == "Al0 Bl0"
    assert shown(ping_pong.backward(ping_pong.forward(1))) == "Bl1 Bs0 Al1 As0 Ba0 Aa0 BE0 Bl0 AE0 Al0"


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_every_exchange_has_work_of_the_other_half_beside_it(num_layers: int) -> None:
    """Between a start and what waits for it, forward and backward, the other nano-batch computes;
    one after the other, nothing does."""
    segments = ping_pong.forward(num_layers)
    for phase in (segments, ping_pong.backward(segments)):
        for nano_batch in (0, 1):
            own = [
                (at, segment)
                for at, segment in enumerate(phase)
                if segment.nano_batch == nano_batch and segment.part != "linear"
            ]
            assert [segment.part for _, segment in own] == ["start", "attend", "end"] * num_layers
            for (begin, first), (end, second) in pairwise(own):
                if first.part == "end":
                    continue
                beside = [
                    segment.part
                    for segment in phase[begin:end]
                    if segment.nano_batch != nano_batch and segment.part in ("linear", "attend")
                ]
                assert beside, (nano_batch, first, second)
    single = ping_pong.one_by_one(num_layers)
    assert sorted(single) == sorted(segments)
    for nano_batch in (0, 1):
        at = [
            i
            for i, segment in enumerate(single)
            if segment.nano_batch == nano_batch and segment.part in ("start", "attend", "end")
        ]
        assert all(b - a == 1 for a, b in pairwise(at) if single[a].part != "end")


# Cuts


def cut_text(ops: Sequence[Op], rank: int, may_start: frozenset[int]) -> str:
    steps = order(ops, rank, issue=IssueOrder(first=may_start))
    where = cut_segments(ops, steps, may_start)
    words = [f"{type(step).__name__.lower().removesuffix('launches')}{_id(ops[step.op])}" for step in steps]
    return " | ".join(
        " ".join(part) for part in (words[: where.attend], words[where.attend : where.end], words[where.end :])
    )


def _id(op: Op) -> str:
    return f" {op.id}" if isinstance(op, Exchange) else ""


def test_a_dispatch_is_cut_behind_what_goes_out_and_before_what_comes_home() -> None:
    ahead = issue_orders(DISPATCH, "replay")
    forward, backward = (programs_of(DISPATCH, "replay", backward=b) for b in (False, True))
    assert cut_text(forward[1], 1, ahead.forward.first) == "start 0 | finish 0 run start 1 | finish 1"
    # Rank 0 only sends and computes its own: it could ask for what comes back to the owner at once,
    # but the others send that in their second part.
    assert cut_text(forward[0], 0, ahead.forward.first) == "start 0 | start 1 run | finish 0 finish 1"
    assert (
        cut_text(backward[1], 1, ahead.backward.first) == "start 1 start 2 | finish 1 finish 2 run start 3 | finish 3"
    )
    kept = programs_of(DISPATCH, "keep", backward=True)
    ahead = issue_orders(DISPATCH, "keep")
    assert cut_text(kept[1], 1, ahead.backward.first) == "start 1 | finish 1 run start 3 | finish 3"


def test_what_has_no_exchanges_is_attended_in_the_second_part() -> None:
    assert cut_segments((), (), frozenset({0})) == Cuts(0, 0)
    ops: list[Op] = [Attend(0, Rows.of(9, [(0, 0, 4, 0, 2, 0, 4, 0, 1)]))]
    assert cut_segments(ops, (RunLaunches(0),), frozenset({0})) == Cuts(0, 1)


def test_a_batch_of_no_sequences_has_nothing_to_start() -> None:
    nothing = replace(DISPATCH, lengths=(), zones=())
    assert issue_orders(nothing, "keep") == (IssueOrder(), IssueOrder())
    assert Batch(()).num_tokens == 0

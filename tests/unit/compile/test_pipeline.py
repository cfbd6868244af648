"""The pass list: every pass can be watched, and all readers passes by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.compile.order import issue_orders, order
from megatron_balance.compile.pipeline import PASSES, compile_policies, compile_ranks, expand, in_order, project
from megatron_balance.compile.pipeline import Pass as CompilerPass
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.transpose import POLICIES, Policy, transpose
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Merge, Program
from megatron_balance.ir.text import parse, text

PLAN = MicrobatchPlan(
    planner="test",
    lengths=(96, 24),
    num_ranks=4,
    ranks_per_node=2,
    num_heads=2,
    num_kv_heads=1,
    zones=(Zone("pool", "ring", (0, 1, 2, 3), (0,)), Zone("local", "ring", (3,), (1,))),
    moves=Rows.of(3, [(3, 0, 6), (3, 1, 6), (3, 2, 6)]),
    routing=Routing(1, (REMAP, 0)),
)


def test_the_passes_are_in_this_order() -> None:
    assert [each.name for each in PASSES] == ["project", "remap", "route", "transpose", "order"]


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_the_whole_program_is_printed_and_proved_after_each_pass(policy: Policy | None) -> None:
    seen: dict[str, Program] = {}

    def after(step: CompilerPass, program: Program) -> None:
        assert parse(text(program)) == program
        verify(program)
        seen[step.name] = program

    assert expand(PLAN, policy, after) == expand(PLAN, policy) == seen["order"]
    assert list(seen) == [each.name for each in PASSES]
    # Each pass adds what its name says.
    assert (seen["project"].remap_in, seen["remap"].remap_in) == (0, 1)
    assert "via" not in text(seen["remap"])
    assert "via" in text(seen["route"])
    assert seen["project"].backward == seen["route"].backward == ()
    assert bool(seen["transpose"].backward) == (policy is not None)
    assert any(isinstance(op, Merge) for op in seen["transpose"].backward) == (policy is not None)


def test_passes_do_nothing_that_a_plan_does_not_ask_for() -> None:
    seen: list[str] = []
    expand(replace(PLAN, moves=Rows(3), routing=None), None, lambda _, program: seen.append(text(program)))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_one_ranks_program_is_the_one_of_the_whole(policy: Policy) -> None:
    for rank, of_all in enumerate(compile_ranks(PLAN, policy)):
        (compiled,) = compile_policies(PLAN, rank, [policy])
        assert compiled.program == of_all.program
        assert compiled.program == transpose(project(PLAN, rank, replays=policy == "replay"), policy, merges=False)
        orders = issue_orders(PLAN, policy)
        for phase, ops, issue in zip(
            (compiled.forward, compiled.backward),
            (compiled.program.forward, compiled.program.backward),
            orders,
            strict=True,
        ):
            assert phase.steps == order(ops, rank, issue=issue)
            assert phase.issue == issue
        assert in_order(compiled.program, orders) == replace(compiled, remap_merge=None)


def test_a_phase_that_will_not_run_has_no_steps() -> None:
    (forward,) = compile_policies(PLAN, 0, ["replay"], phases=("forward",))
    assert forward.program.backward == forward.backward.steps == ()
    (backward,) = compile_policies(PLAN, 0, ["replay"], phases=("backward",))
    assert backward.forward.steps == ()
    assert backward.backward == compile_policies(PLAN, 0, ["replay"])[0].backward
    (proof,) = compile_ranks(PLAN, "replay", target="proof", ranks=(0,))
    assert proof.forward.steps == proof.backward.steps == ()


def test_comm_patterns_of_whole_sequences_have_no_program_under_a_window() -> None:
    pytest.importorskip("torch")
    from megatron_balance.runtime.bind import AttentionShape, bind
    from megatron_balance.runtime.groups import Groups

    groups = Groups(0, PLAN.num_ranks, tuple(range(PLAN.num_ranks)), None)
    with pytest.raises(InvalidProgramError, match=r"pattern ring has no program under mask window_3; .* compile\.halo"):
        bind(replace(PLAN, mask=SlidingWindow(3)), 0, AttentionShape(2, 1, 4), groups=groups)

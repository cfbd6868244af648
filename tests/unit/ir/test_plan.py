import json
from dataclasses import replace

import pytest

from megatron_balance.compile.proof.meaning import verify
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone, from_json, to_json
from megatron_balance.ir.program import Attend, Exchange, Kind
from megatron_balance.ir.step import EMPTY, Carry, StepPlan, text
from megatron_balance.ir.step import from_json as step_from_json
from megatron_balance.ir.step import to_json as step_to_json
from megatron_balance.ir.text import parse
from megatron_balance.ir.text import text as program_text
from megatron_balance.planners.base import JointStages, StepContext
from megatron_balance.planning.choice import choose_planner
from tests.support import programs
from tests.support.programs import with_backward

PLAN = MicrobatchPlan(
    "by_hand",
    lengths=(9, 4),
    num_ranks=2,
    ranks_per_node=2,
    num_heads=4,
    num_kv_heads=2,
    zones=(
        Zone("intra-node", "ring", (0, 1), (0,)),
        TaskTable("tiles", fragments=Rows.of(4, [(1, 1, 0, 4)]), tasks=Rows.of(6, [(0, 1, 0, 4, 0, 4)])),
    ),
)


def test_the_fingerprint_is_the_same_on_every_host() -> None:
    # Written down once: a change here means that ranks of different versions would disagree.
    assert PLAN.fingerprint() == "58947843542b29dd"


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, lengths=(9, 5)),
        replace(PLAN, zones=PLAN.zones[::-1]),
        replace(PLAN, zones=(replace(PLAN.zones[0], ranks=(1, 0)), PLAN.zones[1])),
        replace(PLAN, num_kv_heads=4),
    ],
)
def test_the_fingerprint_differs_when_a_decision_differs(other: MicrobatchPlan) -> None:
    assert other.fingerprint() != PLAN.fingerprint()
    assert StepPlan.whole((other,)).fingerprint() != StepPlan.whole((PLAN,)).fingerprint()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("no json", r"not a plan: "),
        ("[1, 2]", r"not a plan of this version: .*, got None"),
        ('{"format": "something else"}', r"expected format 'megatron-balance plan 3', got 'something else'"),
        (json.dumps({"format": "megatron-balance plan 3"}), r"damaged plan: KeyError: 'planner'"),
        (
            to_json(PLAN).replace('"lengths":[9,4]', '"lengths":[9,4.5]'),
            r"damaged plan: .*expected a list of whole numbers",
        ),
        (to_json(PLAN).replace("[1,1,0,4]", "[1,1,0]"), r"damaged plan: .*3 columns, expected 4"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_the_reason(source: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        from_json(source)


# The plan of a step: JSON and text, a fingerprint of every decision; a carry is plain data.

STAGE, ALL, MODEL = Cluster(2, 2), Cluster(4, 2), Model(4, 2, 16)
STEP = ((300, 140, 72), (512,))


def planned(*, joint: bool = False, ping_pong: bool = False) -> StepPlan:
    stages = JointStages(ALL) if joint else None
    context = StepContext(STAGE, MODEL, AnalyticCost(STAGE, MODEL), joint=stages, ping_pong=ping_pong)
    return choose_planner("distca", {"block": 16}).plan_step(STEP, context)[0]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_a_step_is_read_back_from_its_json(joint: bool, ping_pong: bool) -> None:
    step = planned(joint=joint, ping_pong=ping_pong)
    assert step_from_json(step_to_json(step)) == step
    assert step_from_json(step_to_json(step)).fingerprint() == step.fingerprint()


def test_members_and_ticks_are_decisions() -> None:
    whole = planned()
    other = replace(whole, members=((((0, 1, 3)),), ((2,),)))
    assert whole.is_dealt()
    assert not other.is_dealt()
    assert (
        len(
            {
                whole.fingerprint(),
                other.fingerprint(),
                planned(joint=True).fingerprint(),
                planned(ping_pong=True).fingerprint(),
            }
        )
        == 4
    )


def test_the_text_has_a_line_for_each_nano_batch_and_each_tick() -> None:
    step = planned(joint=True, ping_pong=True)
    lines = text(step).splitlines()
    assert lines[0] == f"step {step.fingerprint()}, 2 microbatches"
    assert [line.split()[:2] for line in lines[1:5]] == [["microbatch", each] for each in ("0.0", "0.1", "1.0", "1.1")]
    assert lines[1].endswith("300 tokens: s0")
    assert lines[4].endswith("0 tokens"), "one sequence makes no second half, but its stages attend with the others"
    assert lines[5].startswith("tick 0.0 forward")
    assert lines[5].endswith(": m0.c0 -")
    assert len(lines) == 5 + sum(map(len, step.ticks))


def test_a_plan_for_other_sequences_than_its_members_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one plan for each nano-batch"):
        replace(planned(), members=(((0, 1),), ((2, 3),)))


@pytest.mark.parametrize(
    "damaged", ["", "[]", '{"format": "megatron-balance step 0"}', '{"format": "megatron-balance step 1"}']
)
def test_what_is_no_step_is_refused(damaged: str) -> None:
    with pytest.raises(ConfigError, match="plan of a step"):
        step_from_json(damaged)


def test_a_carry_is_plain_data_and_equal_however_its_keys_are_ordered() -> None:
    carry = Carry.of("delays", {"held": [5, 3], "since": 7})
    assert Carry.from_json(carry.to_json()) == carry == Carry.of("delays", {"since": 7, "held": (5, 3)})
    assert carry.value() == {"held": [5, 3], "since": 7}
    assert Carry.from_json(EMPTY.to_json()) == EMPTY
    assert EMPTY.is_empty
    with pytest.raises(TypeError):
        Carry.of("delays", {1, 2})
    with pytest.raises(ConfigError, match="not a planner's carry"):
        Carry.from_json("held back: 3")


# Programs as text, and backward programs as text.


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
    assert "r1 <- r0 q s0[0:2)\n" in program_text(parse(whole))


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
    printed = program_text(program)
    assert printed.split("backward\n", 1)[1] == expected
    assert f"policy {policy}" in printed.splitlines()[0]
    assert parse(printed) == program
    verify(program)


def test_a_replay_of_keys_that_were_only_passed_on_is_found_out() -> None:
    # Rank 1 passed on keys that it has dropped since: such a schedule must name its own replay
    # (RankProgram.replays).
    with pytest.raises(
        InvalidProgramError, match=r"backward op 0: KV s0\[0:2\).* from rank 1 to rank 2: the source does not hold it"
    ):
        verify(with_backward(parse(programs.CHAIN), "replay"))

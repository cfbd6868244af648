"""Batch, cluster, model, strategy, mask, arrays, and plans: JSON, text and fingerprints."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import Batch, Cluster, Model
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir import arrays
from megatron_balance.ir.arrays import as_array, as_rows, concat, key
from megatron_balance.ir.columns import Fragment, Pair, Rows
from megatron_balance.ir.mask import CAUSAL, FULL, Mask, SlidingWindow, kind_of, mask_named
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone, from_json, to_json
from megatron_balance.ir.program import Attend, Exchange, Kind
from megatron_balance.ir.step import EMPTY, Carry, StepPlan
from megatron_balance.ir.step import from_json as step_from_json
from megatron_balance.ir.step import to_json as step_to_json
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.ir.text import parse
from megatron_balance.ir.text import text as program_text
from megatron_balance.planners.base import JointStages, StepContext
from megatron_balance.planning.choice import choose_planner
from tests.support import programs
from tests.support.dense import visible
from tests.support.programs import with_backward


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Batch((4, 0)), r"sequence 1 has 0 tokens; every sequence needs at least 1"),
        (lambda: Batch((-3,)), r"sequence 0 has -3 tokens"),
        (lambda: Batch((2.0,)), r"sequence 0 has length 2.0; a length is a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: Batch((True,)), r"sequence 0 has length True"),
        (lambda: Cluster(6, 4), r"6 ranks are not divisible by 4 ranks per node"),
        (lambda: Cluster(0, 1), r"at least one rank"),
        (lambda: Cluster(4, 0), r"at least one rank"),
        (lambda: Model(6, 4, 8), r"num_kv_heads 4 does not divide num_heads 6"),
        (lambda: Model(0, 1, 8), r"num_heads: expected a whole number of at least 1, got 0"),
    ],
)
def test_inputs_that_cannot_be_are_refused_by_name(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_lengths_are_integers_of_any_library() -> None:
    wanted = Batch((3, 4))
    assert Batch(tuple(np.array([3, 4], dtype=np.int32))) == wanted
    assert [type(length) for length in Batch(tuple(np.array([3, 4]))).lengths] == [int, int]
    torch = pytest.importorskip("torch")
    assert Batch(tuple(torch.tensor([3, 4]))) == wanted
    with pytest.raises(ConfigError, match="a length is a whole number"):
        Batch(tuple(torch.tensor([3.0])))


def test_ranks_are_numbered_node_by_node() -> None:
    cluster = Cluster(8, 4)
    assert (cluster.num_nodes, cluster.node_size) == (2, 4)
    assert [cluster.node(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(cluster.ranks_of(1)) == [4, 5, 6, 7]
    # A cluster smaller than a node is one node.
    cluster = Cluster(3, 8)
    assert (cluster.num_nodes, cluster.node_size) == (1, 3)
    assert list(cluster.ranks_of(0)) == [0, 1, 2]


def test_linear_flops_count_projections_and_a_gated_mlp() -> None:
    model = Model(num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=32, ffn_size=64)
    q_and_o, k_and_v, mlp = 2 * 32 * 32, 2 * 32 * 16, 3 * 32 * 64
    assert model.linear_flops_per_token == 2 * (q_and_o + k_and_v + mlp)


# Strategies: text, ranks, nodes.
def test_a_strategy_is_read_and_printed() -> None:
    strategy = Strategy.parse("tp4-pp1-cp1+2*tp1-pp2-cp1")
    assert strategy.pipelines == (Scheme(4), Scheme(1, 2), Scheme(1, 2))
    assert (str(strategy), strategy.num_ranks) == ("tp4-pp1-cp1+2*tp1-pp2-cp1", 8)
    assert [strategy.ranks_of(pipeline) for pipeline in range(3)] == [range(4), range(4, 6), range(6, 8)]
    assert str(Strategy.parse("tp1-pp1-cp1+tp1-pp1-cp1")) == "2*tp1-pp1-cp1"


TEXTS = ("", "tp4", "tp4-pp1-cp0", "0*tp1-pp1-cp1", "tp1-pp1-cp1+", " tp1-pp1-cp1", "tp1-pp1-cp1*2", "2*")


@pytest.mark.parametrize("text", [*TEXTS, "99999999*tp1-pp1-cp1"])
def test_another_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*such as '") as caught:
        Strategy.parse(text)
    assert "\n" not in str(caught.value)


def test_a_tp_group_lies_inside_a_node_unless_it_is_larger() -> None:
    Strategy.parse("tp16-pp1-cp1+tp8-pp1-cp1+2*tp2-pp2-cp1").check(num_ranks=33, node_size=8)  # one left over
    for wrong in ("tp1-pp1-cp1+tp8-pp1-cp1", "2*tp6-pp1-cp1", "tp8-pp1-cp1+tp12-pp1-cp1", "tp1-pp1-cp1+tp16-pp1-cp1"):
        with pytest.raises(ConfigError, match="crosses nodes of 8"):
            Strategy.parse(wrong).check(num_ranks=64, node_size=8)
    with pytest.raises(ConfigError, match="takes 9 ranks, and there are 8"):
        Strategy.parse("9*tp1-pp1-cp1").check(num_ranks=8, node_size=8)


def test_a_rank_has_one_seat_in_megatrons_order_tp_cp_pp() -> None:
    strategy = Strategy.parse("tp2-pp1-cp1+tp2-pp3-cp2")
    seats = [strategy.seat(rank) for rank in range(14)]
    places = [(seat.pipeline, seat.first, seat.stage, seat.context, seat.tensor) for seat in seats if seat]
    expected = [(0, 0, 0, 0, tp) for tp in range(2)]
    expected += [(1, 2, pp, cp, tp) for pp in range(3) for cp in range(2) for tp in range(2)]
    assert places == expected
    assert seats == list(strategy.seats())
    assert strategy.seat(14) is None


# Masks: the run of keys of each query, and everything that follows from it.
MASKS = (CAUSAL, FULL, SlidingWindow(3))
LENGTH = 9


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
def test_queries_is_the_inverse_of_keys_and_pairs_are_counted(mask: Mask) -> None:
    # Queries is the inverse of keys.
    shown = visible(mask)(LENGTH)
    seq, keys = np.zeros(LENGTH, dtype=np.int64), np.arange(LENGTH)
    first, stop = mask.queries(seq, keys)
    queries = np.arange(LENGTH)[:, None]
    assert (((queries >= first) & (queries < stop)) == shown).all()
    assert [mask.queries(0, key) for key in range(LENGTH)] == list(zip(first.tolist(), stop.tolist(), strict=True))
    # Pairs are counted.
    assert all(mask.num_pairs(length) == visible(mask)(length).sum() for length in range(LENGTH))
    # Pairs of rectangles are counted.
    spans = [(a, b) for a in range(LENGTH) for b in range(a, LENGTH + 1)]
    rows = np.array([(*q, *k) for q in spans for k in spans])
    counted = [int(shown[a:b, c:d].sum()) for a, b, c, d in rows.tolist()]
    assert arrays.num_pairs(0 * rows[:, 0], arrays.Rectangles(*rows.T), mask).tolist() == counted
    # A rectangle is trimmed to what the mask shows of it.
    spans = [(a, b) for a, b in spans if a < b]
    rows = np.array([(0, q0, q1, 0, 1, k0, k1, 0, 1) for q0, q1 in spans for k0, k1 in spans])
    for row, got, seen in zip(
        rows.tolist(), arrays.trim_pairs(rows, mask).tolist(), arrays.sees(rows, mask).tolist(), strict=True
    ):
        (q0, q1), (k0, k1) = row[Pair.Q_SPAN], row[Pair.K_SPAN]
        block = shown[q0:q1, k0:k1]
        queries, keys = np.flatnonzero(block.any(axis=1)) + q0, np.flatnonzero(block.any(axis=0)) + k0
        assert seen == bool(len(queries))
        if seen:
            assert (got[Pair.Q_SPAN], got[Pair.K_SPAN]) == ([queries[0], queries[-1] + 1], [keys[0], keys[-1] + 1])
        else:
            assert got[Pair.Q_START] >= got[Pair.Q_STOP]
            assert got[Pair.K_START] >= got[Pair.K_STOP]


def test_masks_are_found_by_name() -> None:
    assert [mask_named(mask.name) for mask in MASKS] == list(MASKS)
    assert [kind_of(mask) for mask in MASKS] == ["causal", "full", "window"]
    with pytest.raises(ConfigError, match="unknown mask 'half'; known: causal, full, window_KEYS"):
        mask_named("half")
    for name in ("window", "window_0", "window_-3", "window_07"):
        with pytest.raises(ConfigError, match=f"unknown mask '{name}'"):
            mask_named(name)
    with pytest.raises(ConfigError, match="at least 1 key, got 0"):
        SlidingWindow(0)


def test_a_plan_names_a_mask_that_is_not_causal() -> None:
    zone = Zone("pool", "ring", (0,), (0,))
    plan = MicrobatchPlan("test", (4,), 1, 1, 1, 1, (zone,))
    assert '"mask"' not in to_json(plan)
    others = [replace(plan, mask=mask) for mask in (FULL, SlidingWindow(3), SlidingWindow(30))]
    assert [from_json(to_json(each)) for each in others] == others
    assert len({each.fingerprint() for each in (plan, *others)}) == 4


# Arithmetic on token intervals, against sets of tokens.
def draw(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 20, count)
    return np.column_stack([rng.integers(0, 3, count), start, start + rng.integers(0, 6, count)])


def tokens(row: np.ndarray) -> set[tuple[int, int]]:
    seq, start, stop = row.tolist()
    return {(seq, at) for at in range(start, stop)}


def test_arithmetic_on_token_intervals() -> None:
    # Overlaps are all pairs that share a token.
    for seed in range(30):
        wanted, held = draw(seed, seed % 7), draw(seed + 100, seed % 11)
        held = held[held[:, Fragment.START] < held[:, Fragment.STOP]]
        row, found = arrays.overlaps(wanted, held)
        expected = [
            (i, j) for i, one in enumerate(wanted) for j, other in enumerate(held) if tokens(one) & tokens(other)
        ]
        assert sorted(zip(row.tolist(), found.tolist(), strict=True)) == expected
        assert (np.diff(row) >= 0).all()
        # Of disjoint intervals the bounds hold those that overlap and no others.
        wanted, held = draw(seed, 5), arrays.union(draw(seed + 100, 6))
        for one, first, last in zip(wanted, *arrays.overlap_bounds(wanted, held), strict=True):
            expected = [j for j, other in enumerate(held) if tokens(one) & tokens(other)]
            assert list(range(first, last)) == expected
        # A union is disjoint and a token held twice is found.
        rows = draw(seed, seed % 9)
        held = [token for row in rows for token in tokens(row)]
        twice = {token for token in held if held.count(token) > 1}
        for joined, expected in ((arrays.union(rows), set(held)), (arrays.held_twice(rows), twice)):
            assert [t for row in joined for t in sorted(tokens(row))] == sorted(expected), "in order, none twice"
            touching = [a[0] == b[0] and a[2] == b[1] for a, b in zip(joined, joined[1:], strict=False)]
            assert not any(touching), "touching ones are one"


def test_rows_are_compared_by_content_and_are_the_same_table_as_arrays() -> None:
    # Rows are compared and hashed by content.
    assert Rows.of(2, [(1, 2)]) == Rows.of(2, [[1, 2]])
    assert hash(Rows.of(2, [(1, 2)])) == hash(Rows.of(2, [(1, 2)]))
    assert Rows.of(2, [(1, 2)]) != Rows.of(1, [(1,), (2,)])
    # A row of another width is refused.
    with pytest.raises(ValueError, match=r"row \(1, 2\) has 2 columns, expected 3"):
        Rows.of(3, [(1, 2)])
    # Rows and arrays are the same table.
    rows = Rows.of(2, [(1, 2), (3, 4)])
    table = as_array(rows)
    assert table.tolist() == [[1, 2], [3, 4]]
    assert not table.flags.writeable
    assert as_rows(table[:, ::-1]) == Rows.of(2, [(2, 1), (4, 3)])
    assert concat([rows, Rows(2), rows], 2).tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    # A key is taken apart again.
    seq, position = np.array([0, 3, 70_000]), np.array([5, 0, 1 << 39])
    assert arrays.key_seq(key(seq, position)).tolist() == seq.tolist()
    assert arrays.key_position(key(seq, position)).tolist() == position.tolist()


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


def test_the_fingerprint_is_the_same_on_every_host_and_differs_when_a_decision_differs() -> None:
    # Written down once: a change here means that ranks of different versions would disagree.
    assert PLAN.fingerprint() == "58947843542b29dd"
    for other in (
        replace(PLAN, lengths=(9, 5)),
        replace(PLAN, zones=PLAN.zones[::-1]),
        replace(PLAN, zones=(replace(PLAN.zones[0], ranks=(1, 0)), PLAN.zones[1])),
        replace(PLAN, num_kv_heads=4),
    ):
        assert other.fingerprint() != PLAN.fingerprint()
        assert StepPlan.whole((other,)).fingerprint() != StepPlan.whole((PLAN,)).fingerprint()


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("no json", r"not a plan: "),
        ("[1, 2]", r"not a plan of this version: .*, got None"),
        ('{"format": "something else"}', r"expected format 'megatron-balance plan 3', got 'something else'"),
        (json.dumps({"format": "megatron-balance plan 3"}), r"damaged plan: KeyError: 'planner'"),
        (to_json(PLAN).replace("[9,4]", "[9,4.5]"), r"damaged plan: .*expected a list of whole numbers"),
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


def test_a_step_is_read_back_from_its_json_and_members_and_ticks_are_decisions() -> None:
    steps = [planned(joint=joint, ping_pong=ping_pong) for joint in (False, True) for ping_pong in (False, True)]
    for step in steps:
        assert step_from_json(step_to_json(step)) == step
        assert step_from_json(step_to_json(step)).fingerprint() == step.fingerprint()
    other = replace(steps[0], members=((((0, 1, 3)),), ((2,),)))
    assert steps[0].is_dealt()
    assert not other.is_dealt()
    assert len({step.fingerprint() for step in (*steps, other)}) == 5
    with pytest.raises(ValueError, match="expected one plan for each nano-batch"):
        replace(steps[0], members=(((0, 1),), ((2, 3),)))


def test_what_is_no_step_is_refused() -> None:
    for damaged in ("", "[]", '{"format": "megatron-balance step 0"}', '{"format": "megatron-balance step 1"}'):
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


def test_blank_lines_do_not_matter_and_heads_are_written_only_where_some_are_missing() -> None:
    assert parse("\n" + programs.PREFIX.replace("\n", "  \n\n")) == parse(programs.PREFIX)
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
        ("over s0[0:4)", "over s0[0:4) and more", r"line 8: expected regions like s0\[0:8\) behind 'over'"),
        ("backward", "merge r0\n  outs s0[0:4)\nbackward", r"line 12: expected one of q, kv, out"),
    ],
)
def test_a_line_that_is_not_of_this_form_is_refused_with_its_number(right: str, wrong: str, complaint: str) -> None:
    assert right in programs.PREFIX
    with pytest.raises(InvalidProgramError, match=complaint):
        parse(programs.PREFIX.replace(right, wrong, 1))


# What a backward program must be: source, policy, the lines behind "backward".
BACKWARDS = {
    "gradients of received keys go back to the owner and are summed": (
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
    ),
    "the gradient of a partial output goes where the partial came from": (
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
    ),
    "launches are reversed; what a query cannot see has no gradient to merge": (
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
    ),
    "heads go back as they came, and nothing is merged": (
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
    ),
    "a gradient is merged before it leaves a rank that passed the keys on": (
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
    ),
}


@pytest.mark.parametrize(("source", "policy", "expected"), BACKWARDS.values(), ids=BACKWARDS)
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

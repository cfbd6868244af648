"""Every complaint of the proofs, each from a program, plan or rank that is wrong in one place."""

import random
from dataclasses import replace

import pytest

from megatron_balance import Batch, Cluster, Model
from megatron_balance.compile.join import split
from megatron_balance.compile.order import BY_ID, Finish
from megatron_balance.compile.pipeline import compile_ranks, expand
from megatron_balance.compile.proof import runs
from megatron_balance.compile.proof.meaning import NotAloneError, verify
from megatron_balance.compile.proof.runs import provable, verify_own_steps, verify_owned, verify_peers, verify_steps
from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Route, Rows, Transfer
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, SharedZone, TaskTable, Zone
from megatron_balance.ir.program import Exchange, Program
from megatron_balance.ir.text import parse, text
from tests.support.programs import ALL, CHAIN, DISPATCH, PREFIX, TWO_LAUNCHES, with_backward
from tests.support.strategies import Case, plan
from tools.faults import mutants

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


def test_the_programs_and_plans_that_are_broken_below_are_right() -> None:
    backwards = (PREFIX_BACK, DISPATCH_BACK, TWO_LAUNCHES_BACK, CHAIN_BACK, GATHER_OF_THREE_BACK)
    for source in (*ALL.values(), *backwards, GATHER, GATHER_OF_THREE, GQA):
        verify(parse(source))
    verify_plan(RING)
    verify_plan(table())


def complaint(source: str, right: str, wrong: str) -> str:
    # The complaint of `verify` after the last `right` became `wrong`.
    assert right in source
    before, _, after = source.rpartition(right)
    with pytest.raises(InvalidProgramError) as caught:
        verify(parse(before + wrong + after))
    return str(caught.value)


NEVER_USED, NO_PARTIALS = "nothing that it brings is ever used", "there are not two partials to merge"
RECEIVED, ATTENDED = "  r1 <- r0 kv s0[0:4)\n", "attend r0\n  q s0[0:4) over s0[0:4)"
SEEN = "q s0[4:8) over s0[0:4) s0[4:8)"
OUT_HOME, GRAD_HOME = "  r0 <- r1 out s0[2:4)\n", "  r0 <- r1 dkv s0[0:1)\n"
MERGED = "exchange 1 p2p\n  r0 <- r1 out s0[2:4)\nmerge r0\n  out s0[2:4)\n"
SUMMED = "exchange 1 p2p\n  r0 <- r1 dkv s0[0:4)\nmerge r0\n  dkv s0[0:4)\n"
# By program: what becomes wrong, the wrong words, and the complaint.
WRONG = {
    PREFIX: [
        ("heads 2 kv_heads 1", "heads 3 kv_heads 2", "key-value heads that divide the query heads, got 2 and 3"),
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
        (RECEIVED, RECEIVED + "  r1 <- r0 kv s0[2:3)\n", "a rank receives the same value twice"),
        ("attend r0", f"exchange 1 p2p\n{RECEIVED}attend r0", "the target holds it already"),
        ("attend r0", "exchange 1 p2p\n  r0 <- r1 kv s0[4:8)\nattend r0", f"forward op 1: {NEVER_USED}"),
        ("exchange 0 p2p", "exchange 0 all_to_all r0", "all_to_all reaches beyond its group"),
        ("attend r0", "attend_grad r0", "AttendGrad does not belong into the forward"),
        ("q s0[4:8) over s0[0:4)", "q s0[3:8) over s0[0:4)", "q s0[3:8) over [0:4): rank does not hold Q"),
        (ATTENDED, ATTENDED + "\n  q s0[2:4) over s0[0:1)", "it computes some pair twice"),
        ("backward", "attend r0\n  q s0[2:4) over s0[0:1)\nbackward", "some of it is computed twice"),
        (ATTENDED, "attend r0\n  q s0[0:2) over s0[2:4)", "no query of it may see any key of it"),
        (SEEN, "q s0[4:8) over s0[4:8)", f"forward op 0: {NEVER_USED}"),
        (SEEN, "q s0[4:8) over s0[1:4) s0[4:8)", "forward: rank 1 never completes OUT of s0[4:8)"),
    ],
    PREFIX_BACK: [
        ("policy keep", "policy none", "has a backward but no policy"),
        ("r1 dkv s0[0:4)", "r1 out s0[0:4)", "moves a kind of value that does not belong into the backward"),
        ("attend_grad r0", "attend r0", "Attend does not belong into the backward"),
        (SUMMED, "", "backward: rank 0 never completes KV_GRAD of s0[0:4)"),
        ("attend_grad r0\n  q s0[0:4) over s0[0:4)\n", "", NO_PARTIALS),
    ],
    DISPATCH: [
        ("r0 <- r1 out s0[2:4)", "r0 <- r1 out s0[1:4)", "the source holds no partial output of it"),
        (OUT_HOME, OUT_HOME + "  r0 <- r1 out s0[2:3)\n", "a partial is given away twice"),
        (MERGED, "", "forward: rank 0 never completes OUT of s0[2:4)"),
    ],
    GATHER_OF_THREE: [("  r0 <- r1 kv s0[1:2)\n", "", "all_gather, but rank 1 does not send the same to all")],
    GATHER_OF_THREE_BACK: [
        ("  r1 <- r0 dkv s0[1:2)\n", "", "reduce_scatter, but rank 1 is not sent the same by all"),
        (GRAD_HOME, GRAD_HOME + "  r0 <- r1 dout s0[0:1)\n", "reduce_scatter of values that are not sums of gradients"),
    ],
    GQA: [("h[2:3) over s0[0:2) h[1:2)", "h[2:3) over s0[0:2) h[0:1)", "do not map evenly onto its key-value heads")],
    TWO_LAUNCHES: [
        (
            "merge r0\n  out s0[2:4)\n",
            "",
            "forward: rank 0 never completes OUT of s0[2:4): it has 2 of 2 parts of the sequence in 2 partials",
        ),
        ("out s0[2:4)", "out s0[1:4)", "OUT s0[1:4) heads [0:1): there are not two partials to merge"),
        ("out s0[2:4)", "kv s0[2:4)", "merges KV, which has no partials"),
    ],
    CHAIN_BACK: [("merge r1\n  dkv s0[0:4)\n", "", "the source holds several partials of it that are not merged")],
    DISPATCH_BACK: [("  r0 <- r1 dq s0[2:4)\n", "", NO_PARTIALS)],
}


@pytest.mark.parametrize(("source", "row"), [(source, row) for source, rows in WRONG.items() for row in rows])
def test_what_is_wrong_is_named(source: str, row: tuple[str, str, str]) -> None:
    right, wrong, expected = row
    assert expected in complaint(source, right, wrong)


def test_partials_replays_and_empty_programs() -> None:
    # A third partial before a merge is refused.
    # At most one partial may wait when an op leaves another, so that no merge can be dropped
    # unnoticed.
    said = complaint(
        TWO_LAUNCHES.replace("merge r0\n  out s0[2:4)\n", ""),
        "q s0[2:4) over s0[0:2)\n",
        "q s0[2:4) over s0[0:1)\nattend r0\n  q s0[2:4) over s0[1:2)\n",
    )
    assert "rank 0 holds several partials of OUT that are not merged" in said
    # An unconsumed partial is refused.
    # Everything is complete at the owner, but rank 1 keeps a zero gradient that came from nowhere.
    said = complaint(
        CHAIN_BACK, "merge r0\n  dkv s0[0:2)\n", "merge r0\n  dkv s0[0:2)\nexchange 5 p2p\n  r1 <- r2 dkv s0[0:2)\n"
    )
    assert "backward: rank 1 ends with an unconsumed partial KV_GRAD of s0[0:2)" in said
    # A replayed backward must bring its inputs again.
    said = complaint(PREFIX_BACK, "policy keep", "policy replay")
    assert "q s0[4:8) over [0:4): rank does not hold KV" in said
    # A complaint shows the op as text.
    said = complaint(PREFIX, "kv s0[0:4)\n", "kv s0[4:8)\n")
    assert said.endswith("exchange 0 p2p\n  r1 <- r0 kv s0[4:8)")
    # A program without sequences or without ranks is right.
    verify(parse("program lengths heads 2 kv_heads 1 policy keep\nowner r0\nowner r1\nforward\nbackward\n"))
    verify(parse("program lengths heads 2 kv_heads 1 policy none\nforward\nbackward\n"))


# The structure of plans: what cannot be is refused before a program is made of it.
RING = MicrobatchPlan("by hand", (40, 9), 4, 2, 4, 2, (Zone("pool", "ring", (0, 1, 2, 3), (0, 1)),))
FRAGMENTS = ((0, 0, 0, 20), (1, 0, 20, 40))
SHARED = SharedZone("w", Rows.of(4, [(0, 0, 0, 39)]), 2, 1)
TASKS = ((0, 0, 0, 20, 0, 20), (1, 0, 20, 40, 0, 20), (0, 0, 20, 40, 20, 40))


def table(
    tasks: tuple[tuple[int, ...], ...] = TASKS, fragments: tuple[tuple[int, ...], ...] = FRAGMENTS
) -> MicrobatchPlan:
    zone = TaskTable("attention", Rows.of(4, fragments), Rows.of(6, tasks))
    return replace(RING, lengths=(40,), zones=(zone,))


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
        (replace(RING, zones=(replace(RING.zones[0], seqs=(0, 0)),)), "sequence 0 is in 2 zones"),
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
        (table((TASKS[0], (1, 0, 20, 40, 0, 19), TASKS[2])), r"\[20:40\) of sequence 0 have keys \[\(0, 19\), \(20"),
        (table(TASKS[:2]), r"queries \[20:40\) of sequence 0 have keys"),
        (table((*TASKS, TASKS[0])), r"queries \[0:20\) of sequence 0 have keys"),
        (table((*TASKS[1:], (4, 0, 0, 20, 0, 20))), "a task on a rank that is not there"),
        (replace(RING, lengths=(40,), zones=(SHARED,)), r"tokens \[0:39\) of sequence 0"),
    ],
)
def test_what_cannot_be_is_named(broken: MicrobatchPlan, message: str) -> None:
    with pytest.raises(InvalidProgramError, match=f"plan of by hand: .*{message}"):
        verify_plan(broken)


# Other ids, proxies, rows and steps than those of the plan are refused by the proof of what runs.
CASE = Case(Batch((90, 40, 33, 7)), Cluster(4, 2), Model(4, 2, 4, 32, 64), 50, seed=5, remapped=True, routing=(1, 1))
PLANNED = plan("te_ring", CASE)


def exchanges(program: Program) -> list[tuple[str, int, Exchange]]:
    phases = ("forward", "backward")
    return [
        (phase, at, op) for phase in phases for at, op in enumerate(getattr(program, phase)) if isinstance(op, Exchange)
    ]


def with_op(program: Program, phase: str, at: int, op: Exchange) -> Program:
    ops = list(getattr(program, phase))
    ops[at] = op
    return replace(program, **{phase: tuple(ops)})


def refused(program: Program) -> bool:
    # Whether the program, or that it is what the ranks run, is refused.
    try:
        verify(program)
        runs.verify_runs(PLANNED, program)
    except InvalidProgramError:
        return True
    return False


@pytest.mark.parametrize("policy", ["keep", "replay"])
def test_every_changed_exchange_id_and_proxy_is_refused(policy) -> None:
    program = runs.prove(PLANNED, policy)
    found = exchanges(program)
    for phase, at, op in found:
        for by in (-1, 1, 100):
            assert refused(with_op(program, phase, at, replace(op, id=op.id + by))), (phase, at, by)
    routed = [each for each in found if each[2].routes]
    assert len(routed) > 3
    for phase, at, op in routed:
        for row, column in ((0, 3), (-1, 4)):  # send proxy, receive proxy
            routes = [list(each) for each in op.routes]
            routes[row][column] ^= 1  # the other rank of that node
            changed = with_op(program, phase, at, replace(op, routes=Rows.of(Route.WIDTH, routes)))
            assert refused(changed), (phase, at, row, column)
            with pytest.raises(InvalidProgramError, match="expected proxies"):  # by the plan's routing alone
                runs.verify_routes(PLANNED, changed)


def test_what_ranks_and_program_agree_on_is_held_against_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    # Proxies that ranks and program agree on are held against the plan.
    program, ranks = expand(PLANNED, "keep"), compile_ranks(PLANNED, "keep")
    monkeypatch.setattr(runs, "compile_ranks", lambda *_, **__: ranks)
    runs.verify_runs(PLANNED, program)
    in_pieces = replace(PLANNED, routing=Routing(1, (REMAP, 0), pieces=2))
    with pytest.raises(InvalidProgramError, match="expected proxies"):
        runs.verify_runs(in_pieces, program)

    # A projection that lost a row is refused.
    def lossy(*_args, **_options):
        first = ranks[1]
        at, op = next((at, op) for at, op in enumerate(first.program.forward) if isinstance(op, Exchange))
        ops = list(first.program.forward)
        ops[at] = replace(op, transfers=Rows.of(Transfer.WIDTH, list(op.transfers)[1:]))
        return [ranks[0], replace(first, program=replace(first.program, forward=tuple(ops))), *ranks[2:]]

    monkeypatch.setattr(runs, "compile_ranks", lossy)
    with pytest.raises(InvalidProgramError, match="rank 1: forward op"):
        runs.verify_runs(PLANNED, program)
    # Steps of either phase and the issue order are part of the proof.
    for phase in ("forward", "backward"):
        order = getattr(ranks[1], phase)
        late = next(at for at, step in enumerate(order.steps) if isinstance(step, Finish))
        moved = [*order.steps[:late], *order.steps[late + 1 :], order.steps[late]]
        wrong = replace(ranks[1], **{phase: order._replace(steps=moved)})
        monkeypatch.setattr(runs, "compile_ranks", lambda *_, wrong=wrong, **__: [ranks[0], wrong, *ranks[2:]])
        with pytest.raises(InvalidProgramError, match="rank 1: op"):
            runs.verify_runs(PLANNED, program)
    met: list[int] = []
    monkeypatch.setattr(runs, "compile_ranks", lambda *_, **__: ranks)
    monkeypatch.setattr(runs, "verify_issue_order", lambda calls: met.append(len(calls)))
    runs.verify_runs(PLANNED, program)
    assert met == [PLANNED.num_ranks] * 2


def test_steps_in_another_order_are_refused() -> None:
    ranks = compile_ranks(PLANNED, "keep")
    for rank, each in enumerate(ranks):
        verify_steps(each.program.forward, each.forward.steps, rank, PLANNED.mask)
    ops, steps = ranks[0].program.forward, list(ranks[0].forward.steps)
    late = [at for at, step in enumerate(steps) if isinstance(step, Finish)]
    assert late
    for at in late[:3]:
        moved = [*steps[:at], *steps[at + 1 :], steps[at]]
        with pytest.raises(InvalidProgramError, match="rank 0: op"):
            verify_steps(ops, moved, 0, PLANNED.mask)
    with pytest.raises(InvalidProgramError, match="has no step"):
        verify_steps(ops, steps[: late[0]] + steps[late[0] + 1 :], 0, PLANNED.mask)


# The proof of one rank: what holds of all ranks is accepted of each, and what the whole proof
# refuses some rank refuses, too.
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "megatron_dynamic"])
def test_each_rank_of_a_plan_that_holds_is_proved(planner: str, mask: str) -> None:
    case = replace(CASE, model=replace(CASE.model, attention=mask))
    asked: list[tuple[Case, tuple[Policy | None, ...]]] = [
        (case, ("keep", "replay", None)),
        (replace(case, remapped=False), ("replay",)),
        (replace(case, routing=None), ("keep",)),
    ]
    for each, policies in asked:
        planned = plan(planner, each)
        assert provable(planned)
        for rank in range(4):
            for policy in policies:
                runs.prove_rank(planned, rank, policy)


def test_collectives_and_outputs_in_parts_are_not_proved_of_one_rank() -> None:
    case = replace(CASE, remapped=False, routing=None, tokens_per_rank=None)
    assert not provable(plan("distca, small blocks", case))
    with pytest.raises(NotAloneError, match="all its ranks at once"):
        runs.prove_rank(plan("llama_all_gather", case), 0, "keep")


def test_what_the_whole_proof_refuses_some_rank_refuses() -> None:
    refused = 0
    for policy in ("keep", "replay"):
        program = expand(PLANNED, policy)
        assert not mutants.refused_by_a_rank(program)
        for number in range(18):
            _, mutant = mutants.changed(program, random.Random(f"{policy} {number}"))
            try:
                verify(mutants.of_parts(mutant))
            except (InvalidProgramError, IndexError):
                refused += 1
                assert mutants.refused_by_a_rank(mutant), (policy, number)
    assert refused > 18


def test_ranks_that_list_other_transfers_or_collectives_between_them_are_refused() -> None:
    ranks = {rank: each.program for rank, each in enumerate(compile_ranks(PLANNED, "replay"))}
    own = ranks[1]
    peers = {rank: ranks[rank] for rank in runs.peers_of(own)}
    assert set(peers) == {0, 2, 3}
    verify_peers(own, peers)
    for phase in ("forward", "backward"):
        ops = list(getattr(own, phase))
        at, op = [(at, op) for at, op in enumerate(ops) if isinstance(op, Exchange) and len(op.transfers) > 1][-1]
        rows = [list(row) for row in op.transfers]
        routes = [list(row) for row in op.routes]
        for changed in (
            replace(op, transfers=Rows.of(8, rows[1:])),
            replace(op, transfers=Rows.of(8, [*rows, rows[0]])),
            replace(op, id=op.id + 1000),
            *([replace(op, routes=Rows.of(5, routes[1:]))] if routes else []),
        ):
            with pytest.raises(InvalidProgramError, match=f"ranks 1 and .*{phase} exchange"):
                verify_peers(replace(own, **{phase: (*ops[:at], changed, *ops[at + 1 :])}), peers)
    # An exchange of another traffic class or collective is refused.
    (at, op), *_ = [(at, op) for at, op in enumerate(ranks[1].forward) if isinstance(op, Exchange)]
    for changed in (replace(op, moves=True), replace(op, collective="all_to_all", group=(0, 1, 2, 3))):
        forward = (*ranks[1].forward[:at], changed, *ranks[1].forward[at + 1 :])
        with pytest.raises(InvalidProgramError, match=f"ranks 1 and .*forward exchange {op.id}"):
            verify_peers(replace(own, forward=forward), peers)


def test_tokens_ops_and_orders_of_another_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exchanges that start in another order than everybody elses are refused.
    (own,) = compile_ranks(PLANNED, "replay", ranks=(2,))
    verify_own_steps(own, PLANNED, backward=True)
    other = replace(own, backward=own.backward._replace(issue=BY_ID))
    with pytest.raises(InvalidProgramError, match="rank 2 starts exchange"):
        verify_own_steps(other, PLANNED, backward=True)
    # Ops of another rank are refused.
    program = expand(PLANNED, "keep")
    one, other = split(program)[:2]
    shape = (program.lengths, program.num_heads, program.num_kv_heads)
    with pytest.raises(InvalidProgramError, match="an op of rank 1 in the program of rank 0"):
        runs.verify_rank(replace(one, forward=other.forward), shape, 4, "keep")
    # Ids that do not rise are refused without a plan.
    (_, _, first), (phase, at, second), *_ = exchanges(program)
    with pytest.raises(InvalidProgramError, match="ids must rise"):
        verify(with_op(program, phase, at, replace(second, id=first.id)))
    # Tokens of another layout are refused.
    ranks = {rank: each.program for rank, each in enumerate(compile_ranks(PLANNED, "replay"))}
    verify_owned(PLANNED, ranks[0])
    with pytest.raises(InvalidProgramError, match="rank 1 owns other tokens"):
        verify_owned(PLANNED, replace(ranks[0], rank=1))
    whole = runs.layouts(PLANNED)
    for table in (whole[1:], whole[[0, *range(len(whole))]]):
        monkeypatch.setattr(runs, "layouts", lambda _, table=table: table)
        with pytest.raises(InvalidProgramError, match="exactly one owner"):
            verify_owned(PLANNED, ranks[0])

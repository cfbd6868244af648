"""A step that fails says where in the plan it was, and a rank that fails tells those that wait."""

import itertools
import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import SEVERAL, single
from megatron_balance.runtime.kernels.base import PlainKernel
from tests.support import jobs, processes, routed
from tests.support.pool import NUM_RANKS, WORLDS, Pool, RankError
from tests.support.strategies import Case, plan

torch = pytest.importorskip("torch")


def test_a_failing_step_is_logged_with_its_place_in_the_plan(caplog, monkeypatch):
    plan = make_planner("te_ring", Cluster(1, 1), Model(num_heads=2, num_kv_heads=1, head_dim=4))([5])
    bound = bind(plan, 0, AttentionShape(2, 1, 4), groups=single(), kernel="plain")
    monkeypatch.setattr(PlainKernel, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    inputs = [torch.zeros(5, heads, 4) for heads in (2, 1, 1)]
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="out of memory"):
        balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR] == [
        f"rank 0 of 1, forward step 0 of 1 of the plan {plan.fingerprint()}: attention of zone 'pool' in 1 kernel calls"
    ]


BOOM = ("in_the_model", "in_the_backward", "in_a_collective_of_the_user", "in_knapformer", "leaves_the_balancer")
BOOM += ("leaves_an_evaluation", "goes_on_from_attention")


@pytest.fixture(scope="module")
def ended() -> dict[str, list[tuple[int, str]]]:
    # By job of `failing_ranks`: exit code and output of each rank.
    command, root = [sys.executable, "-m", "tests.support.failing_ranks"], Path(__file__).resolve().parents[2]
    ran = processes.ended(command, cwd=root, timeout=280, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        *((job, "rank 1 failed (ValueError: boom)") for job in BOOM),
        ("refused", "rank 1 failed (ConfigError: q: expected [rows, heads, head_dim]"),
        ("masked", "rank 1 failed (ConfigError: LlamaAttention asks for an attention mask that hides tokens;"),
        ("goes_on_from_the_model", "rank 1 waits in the exchange of a step's lengths, rank "),
        ("killed", "rank 1 of 3 does not answer: ended, or frozen"),
        ("exits", "rank 1 came to its end before the others"),
    ],
)
def test_ranks_that_wait_for_one_that_failed_end_soon_and_name_it(
    ended: dict[str, list[tuple[int, str]]], job: str, reason: str
) -> None:
    # gloo's own timeout is 200 s there.
    if job == "masked":
        pytest.importorskip("transformers")
    ranks = ended[job]
    for rank in (0, 2):
        code, said = ranks[rank]
        assert code == 1, said
        assert reason in said
        (seconds,) = re.findall(r"^seconds ([\d.]+)$", said, re.MULTILINE)
        # who exits lets go of the others with its process, which takes its time on a busy machine
        assert float(seconds) < (60 if job == "exits" else 15)
    codes = {"leaves_the_balancer": 0, "leaves_an_evaluation": 0, "killed": 9, "exits": 3}
    assert ranks[1][0] == codes.get(job, 1), ranks[1]


@pytest.mark.parametrize("job", ["caught", "caught_by_all", "ends_first"])
def test_an_error_that_is_caught_and_an_end_that_comes_early_end_nobody(
    ended: dict[str, list[tuple[int, str]]], job: str
) -> None:
    for code, said in ended[job]:
        assert code == 0, said
        # torch warns of hosts without a name
        lines = [line for line in said.splitlines() if "hostname of the client socket" not in line]
        assert lines[0].startswith("seconds"), "nothing is said"


# Ranks that planned differently hear it, all of them, before anyone waits in an exchange.


def plans(num_ranks: int) -> list:
    case = Case(Batch((50, 7, 3)), Cluster(num_ranks, num_ranks), Model(4, 2, 8), None, seed=0)
    return [plan("te_ring", case)] * num_ranks


def test_ranks_hear_whether_and_who_differs(pool: Pool) -> None:
    for num_ranks in (1, 2, 8):
        assert pool.run(jobs.compare_plans, num_ranks, plans(num_ranks)) == ["agreed"] * num_ranks
    mixed = plans(4)
    mixed[2] = replace(mixed[2], lengths=(50, 8, 3))
    (heard,) = set(pool.run(jobs.compare_plans, 4, mixed))
    assert f"3 of 4 ranks have plan {mixed[0].fingerprint()}, but rank 2 has {mixed[2].fingerprint()}" in heard
    assert "same configuration" in heard
    # where no two agree, all but the first are named
    mixed = [replace(p, lengths=(50 + rank, 7, 3)) for rank, p in enumerate(plans(3))]
    (heard,) = set(pool.run(jobs.compare_plans, 3, mixed))
    assert "rank 1 has" in heard
    assert "rank 2 has" in heard


def test_tensor_parallel_peers_that_plan_otherwise_are_an_error_on_every_rank(pool: Pool) -> None:
    (ours, _) = plans(2)
    other = replace(ours, lengths=(50, 8, 3))

    def answers(*plans_: MicrobatchPlan) -> list[str]:
        return pool.run(jobs.compare_with_peers, NUM_RANKS, plans_)[: len(plans_)]

    assert answers(ours, ours, ours, ours) == ["agreed"] * 4
    for said in answers(ours, ours, other, other):
        assert "their tensor-parallel peers have others" in said
    for rank, said in enumerate(answers(ours, other, ours, ours)):
        assert ("rank 1 has" in said) == (rank < 2)
        assert "ranks planned differently" in said


A, B = "00000000fffffffe", "0123456789abcdef"


@pytest.mark.parametrize(
    ("announced", "heard"),
    [
        ([A] * NUM_RANKS, A),
        ([""] * NUM_RANKS, ""),
        ([A, A, A, A, B, B, A, A], f"3 of 4 ranks have plan {A}, but rank 4 has {B}"),
        ([A, A, A, A, A, B, A, A], f"3 of 4 ranks have plan {A}, but rank 4 has others than its tensor-parallel peers"),
        ([A, A, "", "", A, A, A, A], f"3 of 4 ranks have plan {A}, but rank 2 has none"),
    ],
)
def test_a_plan_made_before_reading_is_compared_with_the_lengths(pool: Pool, announced: list[str], heard: str) -> None:
    # In two pools of every other rank; neighbours are tensor-parallel peers.
    answers = pool.run(jobs.announce, NUM_RANKS, announced, 2)
    # those of the pool of odd ranks with the ranks of the other one
    (answer,) = {each.replace("rank 5", "rank 4").replace("rank 3", "rank 2") for each in answers}
    assert heard in answer
    assert bool(answer) == bool(heard)


# For whom a rank's calls wait, and the rates of links, on gloo.

LATE, LATE_S = 2, 0.5
MODEL = Model(num_heads=4, num_kv_heads=4, head_dim=4)


@pytest.mark.parametrize(("planner", "source"), [("te_ring", LATE), ("ulysses", SEVERAL)])
def test_a_rank_that_comes_late_is_who_the_others_wait_for(pool: Pool, planner: str, source: int) -> None:
    plan = make_planner(planner, Cluster(4, 2), MODEL)([64])
    ranks = pool.run(routed.late, 4, plan, LATE, LATE_S)
    next_one = ranks[(LATE + 1) % 4]
    assert next_one.waited_s[source] > 0.8 * LATE_S, "what the late rank sends goes there"
    assert sum(ranks[LATE].waited_s.values()) < 0.5 * LATE_S, "the others were there before it"
    assert all(each.attended_s > 0 for each in ranks)
    assert max(each.attended_s for each in ranks) < 0.5 * LATE_S, "waiting is no attention"


def test_links_are_measured_whatever_ranks_they_join(pool: Pool) -> None:
    links = [*itertools.permutations(range(4), 2)]
    for ranks_per_node in (2, 0):
        for rates in pool.run(routed.rates, 4, links, ranks_per_node):
            assert list(rates) == links
            assert all(1e6 < rate < 1e12 for rate in rates.values()), rates


# The pool itself: a test that hangs or fails on one rank must say where.


def test_every_world_has_its_ranks_and_a_failing_one_is_named_with_its_traceback(pool: Pool) -> None:
    for size in WORLDS:
        assert pool.run(jobs.add_ranks, size) == [size * (size - 1) // 2] * size
    with pytest.raises(RankError, match=r"rank 2 of 4 failed:[\s\S]*in fail_on[\s\S]*asked to fail"):
        pool.run(jobs.fail_on, 4, 2)
    assert pool.run(jobs.add_ranks, 4) == [6] * 4, "the next job runs"


def test_a_hanging_rank_is_named_with_its_stack_and_groups_that_some_ranks_make_are_an_error() -> None:
    impatient = Pool(timeout_s=20.0)
    try:
        with pytest.raises(RankError, match=r"new_group_of_two made process groups on 2 of 8 ranks; make them on all"):
            impatient.run(jobs.new_group_of_two, 2)
        assert impatient.run(jobs.add_ranks, 2) == [1, 1]
        impatient.timeout_s = 1.0
        with pytest.raises(RankError, match=r"ranks \[1\] did not answer in time[\s\S]*in hang_on"):
            impatient.run(jobs.hang_on, 2, 1)
    finally:
        impatient.close()

"""Steps of reinforcement learning by a driver's plan give the losses and gradients of one rank."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from megatron_balance.workloads.normalisations import NORMALISATIONS
from tests.support import rl_jobs, rl_libraries, verl_engines, verl_jobs
from tests.support.pool import Pool
from tests.support.rl_jobs import Case


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    ranks = Pool(timeout_s=120.0, num_ranks=4)
    yield ranks
    ranks.close()


CASES = [
    Case(),
    Case(cap=100, planner="zeppelin"),
    Case(cap=150, forward_cap=400, planner="distca"),
    Case(trees=True, cap=200),
    Case(trees=True, cap=250, planner="distca"),
]
MODELS = [
    Case(cap=150, planner="zeppelin", model="Llama", fsdp=True),
    Case(trees=True, cap=200, model="Qwen3", fsdp=True),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MODELS, marks=pytest.mark.product)], ids=len)
def test_the_passes_of_a_step_are_those_of_one_rank_and_look_up_each_plan_once(world: Pool, cases: list[Case]) -> None:
    alone_of = {name: rl_jobs.alone(name) for name in {case.model for case in cases}}
    ranks = world.run(rl_jobs.train, 4, cases)
    for at, case in enumerate(cases):
        runs, expected = [rank[at] for rank in ranks], alone_of[case.model]
        for run in runs:
            for (loss, gradients), (whole, alone) in zip(run.epochs, expected, strict=True):
                assert loss == pytest.approx(whole, rel=1e-12)
                for mine, theirs in zip(gradients, alone, strict=True):
                    assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-11
            # two passes without a backward and two epochs
            assert run.bound == sum(run.microbatches)
            assert run.forests == case.trees
        assert max(runs[0].microbatches) > 1
        assert (runs[0].microbatches[1] > 0) == (case.forward_cap is not None)
        if not case.trees:
            assert sum(run.clipped for run in runs) > 50


def test_normalisations_are_the_published_losses_on_ranks_that_share_groups_or_have_no_sample(world: Pool) -> None:
    asked = [(how, case) for how in (*NORMALISATIONS, "gspo") for case in (Case(cap=200), Case(cap=400, trees=True))]
    ranks = world.run(rl_jobs.normalise, 4, asked)
    alone = {how: rl_jobs.normalised_alone(how) for how, _ in asked}
    for gradients in ranks:
        for (how, _), found in zip(asked, gradients, strict=True):
            for mine, theirs in zip(found, alone[how], strict=True):
                assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-11, how


def test_steps_and_samples_that_cannot_be_are_refused_on_every_rank(world: Pool) -> None:
    for told in world.run(rl_jobs.tell, 4):
        assert {expected: said for expected, said in told.items() if expected not in said} == {}


def assert_alone(ranks: list[Any]) -> None:
    rows, whole, alone = verl_jobs.alone()
    for rank, (results, _, gradients, same) in enumerate(ranks):
        own = [n for n in range(len(rows)) if max(0, n - 3) % 4 == rank]
        assert same
        assert len(results) == len(own)
        for found, number in zip(results, own, strict=True):
            for mine, theirs in zip(found, rows[number], strict=True):
                assert float((mine - theirs).abs().max()) < 2e-5
        for mine, theirs in zip(gradients, alone, strict=True):
            assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-5
    assert sum(loss for _, loss, *_ in ranks) / 4 == pytest.approx(whole, rel=1e-5)


def test_verls_megatron_engine_with_plans_moves_samples_and_brings_their_results_back(world: Pool) -> None:
    ranks = world.run(verl_jobs.call_megatron, 4, 125)
    assert_alone([given for given, *_ in ranks])
    for _, tokens, told in ranks:
        assert len(tokens) == 2 * 2  # an update and a pass without a backward
        assert max(tokens) <= 125
        for said, word in zip(told, ("distillation_only", "force_group_size", "fixed size"), strict=True):
            assert word in said
    held = [sum(tokens[:2]) for _, tokens, _ in ranks]
    assert sum(held) == sum(verl_jobs.LENGTHS)


def test_verls_engine_with_plans_gives_the_results_losses_and_gradients_of_one_rank(world: Pool) -> None:
    ranks = world.run(verl_jobs.call, 4, [70, 400])  # one is cut
    for at, cut in enumerate((True, False)):
        assert_alone([rank[at][:-1] for rank in ranks])
        for *_, synced in (rank[at] for rank in ranks):
            # gradients are reduced behind the last microbatch alone
            assert synced == [False] * (len(synced) - 1) + [True]
            assert (len(synced) > 1) == cut
    for rank in ranks:
        for told, said in zip(
            rank[-1], ("use_fused_kernels", "multi_modal_inputs", "a temperature", "ulysses"), strict=True
        ):
            assert said in told


@pytest.mark.product
def test_verls_own_worker_and_losses_train_by_our_engine_as_on_one_rank() -> None:
    # In an environment of verl's (docs/rl.md); one rank has verl's own engine.
    pytest.importorskip("verl")
    found: list[Any] = []
    for ranks, vendor, cap in ((1, verl_engines.THEIRS, 1 << 20), (4, verl_engines.OURS, 128)):
        pool = Pool(timeout_s=900.0, num_ranks=ranks)
        found += pool.run(verl_engines.train, ranks, vendor, cap)
        pool.close()
    alone, *world = found
    for rank, (logps, logged, gradients) in enumerate(world):
        assert len(gradients) == verl_engines.STEPS * verl_engines.EPOCHS
        for mine, theirs in zip(logps, alone[0], strict=True):
            assert float((mine - theirs[rank::4]).abs().max()) < 1e-5
        for mine, theirs in zip(logged, alone[1], strict=True):
            for name in ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name
        for mine, theirs in zip(chain(*gradients), chain(*alone[2]), strict=True):
            assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-5
    assert min(max(each["actor/pg_clipfrac"]) for each in alone[1]) > 0.1


def test_openrlhfs_buffers_give_their_samples_to_the_ranks_of_the_plan_and_count_as_before(world: Pool) -> None:
    ranks = world.run(rl_libraries.buffered, 4, 100, 32)
    given = [rl_libraries.experienced(rank, 16 + rank % 2) for rank in range(4)]  # the last of two is none's step
    for step in range(2):
        wanted = [each for own in given for each in own[step * 8 : step * 8 + 8]]
        found = [steps[step] for steps, *_ in ranks]
        assert len({len(microbatches) for microbatches in found}) == 1
        batches = [each for microbatches in found for each in microbatches]
        assert all(each and sum(length for _, length, _ in each) <= 100 for each in batches)
        numbers = sorted(number for each in batches for number, *_ in each)
        assert numbers == sorted(int(each.sequences[0, 0]) for each in wanted)
        count = sum(int(each.action_mask.sum()) for each in wanted)
        first = len(ranks[0][0][0]) * step
        for _, (_, tokens, samples), _ in ranks:
            assert set(tokens[first : first + len(found[0])]) == {count}
            assert set(samples[first : first + len(found[0])]) == {32}
    assert sum(sum(scales) for _, (scales, *_), _ in ranks) == pytest.approx(2 * 4)
    moved = {
        number // 100 == rank for rank, (steps, *_) in enumerate(ranks) for each in steps[0] for number, *_ in each
    }
    assert moved == {True, False}
    assert all("a sample has" in said for *_, said in ranks)

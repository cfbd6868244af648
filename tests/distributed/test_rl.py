"""Steps of reinforcement learning by a driver's plan give the losses and gradients of one rank."""

from collections.abc import Iterator

import pytest

from megatron_balance.workloads.normalisations import NORMALISATIONS
from tests.support import rl_jobs
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


def test_the_passes_of_a_step_are_those_of_one_rank_and_look_up_each_plan_once(world: Pool) -> None:
    expected = rl_jobs.alone()
    ranks = world.run(rl_jobs.train, 4, CASES)
    for at, case in enumerate(CASES):
        runs = [rank[at] for rank in ranks]
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

"""`reproduce hydraulis`: the systems that its figures compare; rows are held by tests/golden."""

import pytest

from megatron_balance.analysis.change import base_sync_s
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.lab.papers import hydraulis
from megatron_balance.lab.papers.base import Effort
from megatron_balance.planning.strategies import costs_of


@pytest.fixture(autouse=True, scope="module")
def few_batches():
    # Strategies are ranked on few batches here, on more where the figures are made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydraulis, "RANK_BATCHES", 2)
        patch.setattr(hydraulis, "SAMPLE_BATCHES", 10)
        yield
    hydraulis.candidates.cache_clear()


def test_the_candidates_hold_the_context_and_the_choice_is_the_fastest() -> None:
    known = hydraulis.costs(hydraulis.AUTHORS, "32b")
    assert (
        max(cost.max_tokens for cost in costs_of(hydraulis.candidates(hydraulis.AUTHORS, hydraulis.B32)[0], known, 64))
        >= hydraulis.B32.longest
    )
    (batch,) = hydraulis.B32.batches(1)
    strategy, best_s, _ = hydraulis.chosen(hydraulis.AUTHORS, hydraulis.B32, batch)
    assert strategy in hydraulis.candidates(hydraulis.AUTHORS, hydraulis.B32)
    assert best_s == max(hydraulis.seconds(hydraulis.AUTHORS, hydraulis.B32, strategy, batch))
    assert best_s <= max(hydraulis.seconds(hydraulis.AUTHORS, hydraulis.B32, hydraulis.HOMOGENEOUS, batch))


def test_microbatches_to_the_context_length_dealt_in_turn() -> None:
    assert hydraulis.full([3, 9, 5, 2, 1], 10) == [[9, 1], [5, 3, 2]]
    pipelines = costs_of(hydraulis.HOMOGENEOUS, hydraulis.costs(hydraulis.AUTHORS, "32b"), 64)
    cost = pipelines[0]
    found = hydraulis.megatron(hydraulis.AUTHORS, hydraulis.B32, hydraulis.HOMOGENEOUS, [32768] * 5)
    one_s = (cost.a * 32768 + cost.b) * 32768 + cost.c
    assert found == pytest.approx((2 * one_s, one_s, one_s, one_s))
    assert hydraulis.gap(found) == pytest.approx(0.5)


def test_hotspa_trains_each_range_of_lengths_under_its_own_strategy() -> None:
    job = hydraulis.TrainedCase("13b", 16)
    cost, narrow = (hydraulis.costs(hydraulis.AUTHORS, "13b").pipeline(Scheme(tensor), 16) for tensor in (4, 2))
    one_s = (cost.a * 9000 + cost.b) * 9000 + cost.c
    short_s = (narrow.a * 4000 + narrow.b) * 4000 + narrow.c
    found = hydraulis.hotspa(hydraulis.AUTHORS, job, hydraulis.HOTSPA["13b", 16, hydraulis.LONG], [9000, 4000])
    assert found == pytest.approx(one_s + short_s)


def test_whole_steps_count_exchanges_of_all_systems_and_propagation_those_of_none() -> None:
    # Figure 13 charged HotSPa alone, and by the paper's own seconds.
    job, (batch,) = hydraulis.TrainedCase("32b", 64, 100_000), hydraulis.TrainedCase("32b", 64, 100_000).batches(1)
    switches_s = hydraulis.exchanged_s(job, hydraulis.HOTSPA["32b", 64, hydraulis.LONG])
    assert 1 < switches_s < 2.21  # published, which bytes over links alone do not reach
    own = Strategy.parse("4*tp8-pp2-cp1")
    cluster, model = hydraulis.cluster_and_model("32b")
    assert hydraulis.exchanged_s(job, [str(own)]) == sum(base_sync_s(own, model, cluster))
    alone, whole = (
        hydraulis.step_s(hydraulis.AUTHORS, job, "4*tp8-pp1-cp2", [batch], whole=each) for each in (False, True)
    )  # HotSPa alone: the authors have no coefficients for CP
    assert whole[0] - alone[0] == pytest.approx(switches_s)
    assert whole[1] > alone[1]


def test_deepspeed_computes_a_part_of_the_heads_and_waits_for_weights() -> None:
    job = hydraulis.TrainedCase("7b", 16, longest=32_000)
    long = [32_000] * 2
    one_s = hydraulis.deepspeed(job, 8, long, recompute=False)
    assert hydraulis.deepspeed(job, 8, [*long, *long], recompute=False) == pytest.approx(2 * one_s)
    assert 1.2 < hydraulis.deepspeed(job, 8, long, recompute=True) / one_s < 1.4
    half_s = hydraulis.deepspeed(job, 4, long, recompute=False)
    assert 1.7 < half_s / one_s < 2.1
    # A sequence of one token waits for the weights alone, which no narrower replica shortens.
    short_s = [hydraulis.deepspeed(job, degree, [1], recompute=False) for degree in (4, 8)]
    assert short_s[0] == pytest.approx(short_s[1], rel=0.05)
    assert short_s[0] > 0.1 * one_s


def test_algorithm_1_is_never_ahead_of_the_ideal(monkeypatch) -> None:
    monkeypatch.setattr(hydraulis, "SOURCES", (hydraulis.AUTHORS,))
    monkeypatch.setattr(hydraulis, "NODES", 1)
    monkeypatch.setattr(hydraulis, "B32", hydraulis.TrainedCase("32b", 64, 40_000))
    least, most, ours = hydraulis.PAPER.tables["fig20"].rows(Effort(1))
    assert 1 <= least.ours <= most.ours < 1.1
    assert 1 <= ours.ours <= most.ours

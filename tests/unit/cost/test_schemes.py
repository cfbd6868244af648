"""Latency of a sequence under a parallel scheme, and its quadratic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.strategy import Scheme
from megatron_balance.planners.pipelines import check_scheme, fit_scheme, sequence_s

MODEL = load_model("llama-7b")
CLUSTER = load_cluster("a800-ib").build()
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)


def analytic(cluster: Cluster, tensor_parallel: int) -> AnalyticCost:
    return AnalyticCost(cluster, MODEL, tensor_parallel)


def time_s(scheme: Scheme, length: int) -> float:
    wide = wide_ranks(CLUSTER, scheme.tensor)
    return sequence_s(scheme, MODEL, wide, analytic(wide, scheme.tensor), length)


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(8), Scheme(4, 4), Scheme(2, 2, 4), Scheme(1, 1, 16)], ids=str)
def test_a_quadratic_meets_every_length_closely(scheme: Scheme) -> None:
    fitted = fit_scheme(scheme, MODEL, CLUSTER, analytic, LENGTHS)
    assert fitted.a > 0
    for length in LENGTHS:
        assert fitted.time_s(length) == pytest.approx(time_s(scheme, length), rel=0.12)


def test_one_rank_takes_its_layers_and_the_logits() -> None:
    cost, length = analytic(CLUSTER, 1), 8192
    attention = sum(float(cost.attend_s(*_causal(length), 1, backward=b)[0]) for b in (False, True))
    rest = sum(cost.layer_s(length, backward=b) for b in (False, True))
    head = sum(cost.head_s(length, backward=b) for b in (False, True))
    assert time_s(Scheme(), length) == pytest.approx(32 * (attention + rest) + head)


def _causal(length: int):
    import numpy as np

    return np.array([[0, 0, length, 0, 32, 0, length, 0, 32]]), np.zeros(1, dtype=np.int64)


def test_more_ranks_take_less_time_each_and_never_less_than_their_share() -> None:
    whole = time_s(Scheme(), 65536)
    for scheme in (Scheme(8), Scheme(1, 8), Scheme(1, 1, 8)):
        assert whole / 8 < time_s(scheme, 65536) * 1.05 < whole / 4


def test_a_ring_across_nodes_waits_for_its_nics_where_sequences_are_short() -> None:
    # On 16 ranks each round moves keys and values of 128 tokens for a sequence of 2048.
    assert time_s(Scheme(context=16), 2048) > time_s(Scheme(context=8), 2048)


def test_a_longer_sequence_takes_longer_under_every_scheme() -> None:
    for scheme in (Scheme(), Scheme(4, 2, 2)):
        times = [time_s(scheme, length) for length in range(1000, 1300, 7)]
        assert all(b >= a for a, b in zip(times, times[1:], strict=False))


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (Scheme(8), {"num_heads": 52, "num_kv_heads": 52}, "tp8-pp1-cp1 splits the 52 heads of llama-7b 8 ways"),
        (Scheme(8), {"num_kv_heads": 4}, r"the 4 key-value heads \(query groups\) of llama-7b 8 ways"),
        (Scheme(13), {"num_heads": 52, "num_kv_heads": 52}, "the padded vocabulary of llama-7b, 32000 tokens, 13 ways"),
        (Scheme(1, 5), {}, "the 32 layers of llama-7b 5 ways; choose a divisor of 32"),
    ],
    ids=["heads", "query groups", "vocabulary", "layers"],
)
def test_what_a_scheme_cannot_split_is_named(scheme: Scheme, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_scheme(scheme, replace(MODEL, **changes))
    # 50,257 tokens are padded to 50,304, which 8 divides.
    check_scheme(Scheme(8, 2), replace(MODEL, vocab_size=50_257))


def test_a_scheme_says_its_name_and_size() -> None:
    assert (str(Scheme(2, 4, 8)), Scheme(2, 4, 8).num_ranks) == ("tp2-pp4-cp8", 64)
    with pytest.raises(ConfigError, match="tensor parallelism 3 does not divide"):
        fit_scheme(Scheme(3), MODEL, CLUSTER, analytic, LENGTHS)

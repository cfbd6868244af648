"""Latency of a sequence under a parallel scheme, and its quadratic."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import ExpertLoad, expert_part
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme
from megatron_balance.model_config import pretrained
from megatron_balance.planners.pipelines import check_scheme, cost_of_scheme, sequence_s
from tests.support.deepseek import DEEPSEEK_V3

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
    fitted = cost_of_scheme(scheme, MODEL, CLUSTER, analytic, LENGTHS[-1] // 4)
    assert fitted.a > 0
    for length in LENGTHS:
        assert fitted.sequence_s(length) + fitted.c == pytest.approx(time_s(scheme, length), rel=0.12)


def test_one_rank_takes_its_layers_and_the_logits() -> None:
    with pytest.raises(ConfigError, match="tensor parallelism 3 does not divide"):
        cost_of_scheme(Scheme(3), MODEL, CLUSTER, analytic, 4096)
    cost, length = analytic(CLUSTER, 1), 8192
    causal = np.array([[0, 0, length, 0, 32, 0, length, 0, 32]])
    attention = sum(float(cost.attend_s(causal, np.zeros(1, dtype=np.int64), 1, backward=b)[0]) for b in (False, True))
    rest = sum(cost.layer_s(length, backward=b) for b in (False, True))
    head = sum(cost.head_s(length, backward=b) for b in (False, True))
    assert time_s(Scheme(), length) == pytest.approx(32 * (attention + rest) + head)


def test_more_ranks_take_less_time_each_and_longer_sequences_more() -> None:
    # More ranks take less time each and never less than their share.
    whole = time_s(Scheme(), 65536)
    for scheme in (Scheme(8), Scheme(1, 8), Scheme(1, 1, 8)):
        assert whole / 8 < time_s(scheme, 65536) * 1.05 < whole / 4
    # A ring across nodes waits for its NICs where sequences are short.
    # On 16 ranks each round moves keys and values of 128 tokens for a sequence of 2048.
    assert time_s(Scheme(context=16), 2048) > time_s(Scheme(context=8), 2048)
    # A longer sequence takes longer under every scheme.
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


# Uneven routing of tokens to experts: shares of documents, and the busiest rank of a group.

MOE = Model(8, 8, 64, hidden_size=512, ffn_size=1024, num_experts=8, experts_per_token=2)


def test_even_routing_gives_the_busiest_rank_its_groups_mean_and_counted_experts_theirs():
    tokens = np.array([[100.0, 60.0], [0.0, 240.0]])
    assert ExpertLoad().busiest(tokens, MOE, 4).tolist() == pytest.approx([40.0, 60.0])
    # Counted experts make their rank the busiest.
    load = ExpertLoad.counted([30, 10, 10, 10, 10, 10, 10, 10])
    assert load.shares[0] == pytest.approx(0.3)
    assert load.busiest(np.array([[1000.0]]), MOE, 8) == pytest.approx([300.0])
    assert load.busiest(np.array([[1000.0]]), MOE, 4) == pytest.approx([400.0])  # a rank with two of the experts


def test_a_group_with_all_documents_is_busier_than_one_of_none_and_less_than_one_of_few():
    load, rng = ExpertLoad(spread=1.0), np.random.default_rng(5)
    lengths = rng.integers(500, 1500, size=64).astype(np.float64)
    mixed = np.tile(lengths / 8, (8, 1))
    few = np.zeros((8, 64), dtype=np.float64)
    few[np.arange(64) // 8, np.arange(64)] = lengths
    even = lengths.sum() / 8 / 8
    assert even < load.busiest(mixed, MOE, 8).max() < 0.9 * load.busiest(few, MOE, 8).mean()
    assert load.busiest(few, MOE, 8).tolist() == ExpertLoad(spread=1.0).busiest(few, MOE, 8).tolist()


def test_documents_deviate_by_the_spread_and_visit_no_expert_twice():
    for spread, found in ((0.0, 0.0), (0.25, 0.25), (0.5, 0.5)):
        shares = ExpertLoad(spread=spread).of_documents(5000, MOE)
        assert shares.sum(axis=1) == pytest.approx(np.ones(5000))
        assert 8 * shares.std(axis=0).mean() == pytest.approx(found, rel=0.03)
    assert np.isfinite(
        ExpertLoad(spread=np.sqrt(7) * (1 - 1e-5)).of_documents(100, replace(MOE, experts_per_token=1))
    ).all()
    with pytest.raises(ConfigError, match="experts_per_token 0 of 8 experts"):
        replace(MOE, experts_per_token=0)
    apart = ExpertLoad(spread=1.7).of_documents(5000, MOE)
    assert apart.sum(axis=1) == pytest.approx(np.ones(5000))
    assert apart.max() == pytest.approx(0.5)


def test_experts_take_their_part_of_the_products_and_a_rank_reads_the_weights_of_its_own_alone():
    hidden, ffn = 512, 1024
    mlp, rest = 2 * 3 * hidden * ffn * 2, 2 * 4 * hidden * hidden + 2 * hidden * 8
    assert expert_part(MOE) == pytest.approx(mlp / (mlp + rest))
    # A rank reads the weights of its own experts alone.
    # DeepSeek-V3's on an H800: reading all 256 and the shared one takes 6.76 ms, computing the nine
    # that each of 4,096 tokens visits 4.10.
    cluster = load_cluster("h800").build(num_ranks=64)
    expert = 3 * 7168 * 2048
    computing_s, reading_s = 4096 * 9 * 2 * expert / (0.8 * 989e12), 257 * expert * 2 / 3.35e12
    assert (1e3 * computing_s, 1e3 * reading_s) == pytest.approx((4.10, 6.76), abs=0.01)
    model = Model(**pretrained(DEEPSEEK_V3))
    for backward in (False, True):
        alone, shared = (
            AnalyticCost(cluster, replace(model, expert_split=ranks)).layer_s(4096, backward=backward)
            for ranks in (1, 64)
        )
        assert alone - shared == pytest.approx((1 + backward) * (reading_s - computing_s))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ExpertLoad.counted([1, -1]), "must be 0 or more"),
        (lambda: ExpertLoad.counted([0, 0]), "one of them more"),
        (lambda: ExpertLoad.counted([]), "one of them more"),
        (lambda: ExpertLoad.counted([float("nan")]), "one of them more"),
        (lambda: ExpertLoad(spread=-0.1), "spread of experts' shares -0.1"),
        (lambda: ExpertLoad(spread=float("nan")), "spread of experts' shares nan"),
        (lambda: ExpertLoad((0.5, 0.6)), "sum to 1"),
        (lambda: ExpertLoad.counted([1, 1]).of_documents(1, MOE), "shares of 2 experts; the model has 8"),
        (lambda: ExpertLoad.counted([3, 0, 0, 0, 1, 0, 0, 0]).of_documents(1, MOE), "none has more than 0.5"),
        (lambda: ExpertLoad(spread=1.8).of_documents(1, MOE), "below 1.73"),
    ],
)
def test_loads_that_cannot_be_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()

"""Hybrid models of Transformers train, balanced, as with each document alone."""

import logging
from collections.abc import Iterator

import pytest

from megatron_balance.compile.transpose import POLICIES
from tests.support import hybrid_jobs
from tests.support.hybrid_jobs import Hybrid
from tests.support.pool import Pool

pytest.importorskip("transformers")
log = logging.getLogger(__name__)
RANKS = 4
# Every kind of layer, both forms of checkpointing and both policies of the backward, sharded and not,
# several microbatches; attention beside Mamba in a layer.
WAYS = [
    Hybrid("qwen3_next", sharded=True, again="not reentrant"),
    *(Hybrid("kimi_linear", "te_ring", accumulate=2, backward=each) for each in POLICIES),
    Hybrid("nemotron_h", "distca", again="reentrant"),
    Hybrid("falcon_h1", "flexsp", sharded=True, again="reentrant", backward="replay"),
    Hybrid("lfm2", "knapformer"),
]
OTHERS = [
    Hybrid("qwen3_5_text", "te_ring", sharded=True, again="not reentrant"),
    Hybrid("olmo_hybrid", "knapformer"),
    Hybrid("granitemoehybrid", "auto", accumulate=3),
    Hybrid("bamba", "llama_all_gather"),
    Hybrid("falcon_h1", "ulysses"),
]
MODELS = sorted({way.model for way in (*WAYS, *OTHERS)})
LONG = [Hybrid(name, steps=50, sharded=True, again="not reentrant", marks=(24, 49)) for name in MODELS]


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    ranks = Pool(timeout_s=240.0, num_ranks=RANKS)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("ways", [WAYS, pytest.param(OTHERS, marks=pytest.mark.product)], ids=["first", "others"])
def test_losses_and_gradients_are_those_of_each_document_alone(world: Pool, ways: list[Hybrid]) -> None:
    assert_alike(world, ways)


@pytest.mark.product
@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("way", LONG, ids=lambda way: way.model)
def test_fifty_steps_train_as_one_rank_alone(way: Hybrid, num_ranks: int) -> None:
    ranks = Pool(timeout_s=900.0, num_ranks=num_ranks)
    assert_alike(ranks, [way])
    ranks.close()


def assert_alike(world: Pool, ways: list[Hybrid]) -> None:
    num_ranks = world.num_ranks
    wanted = [hybrid_jobs.alone(way.model, num_ranks, way.steps, way.accumulate, way.marks) for way in ways]
    for rank, found in enumerate(world.run(hybrid_jobs.train, num_ranks, ways, wanted)):
        for way, (loss, gradient, cut) in zip(ways, found, strict=True):
            log.info("%s on %d ranks: loss %.1e, gradient %.1e", way.model, num_ranks, loss, gradient)
            assert max(loss, gradient) < 1e-5, (rank, way)
            assert cut, "no document was cut, so that no state travelled"


BRANCHES = [
    Hybrid("qwen3_next", sharded=True, again="not reentrant"),
    Hybrid("nemotron_h", "distca"),
    Hybrid("falcon_h1", "te_ring", again="reentrant"),
]
MORE_BRANCHES = [
    *(Hybrid(name, "distca") for name in ("kimi_linear", "lfm2", "olmo_hybrid", "bamba")),
    *(Hybrid(name, "zeppelin", sharded=True) for name in ("granitemoehybrid", "qwen3_5_text", "nemotron_h")),
]


@pytest.mark.parametrize("ways", [BRANCHES, pytest.param(MORE_BRANCHES, marks=pytest.mark.product)], ids=len)
def test_rollouts_as_trees_are_those_of_each_by_itself(world: Pool, ways: list[Hybrid]) -> None:
    wanted = [hybrid_jobs.each_alone(way.model, RANKS) for way in ways]
    for found in world.run(hybrid_jobs.branches, RANKS, ways, wanted):
        for way, (loss, gradient, cut) in zip(ways, found, strict=True):
            log.info("%s, rollouts as trees: loss %.1e, gradient %.1e", way.model, loss, gradient)
            assert max(loss, gradient) < 1e-5, way
            assert cut, "no tree was cut, so that no state travelled"


def test_what_a_plan_does_not_reach_is_refused_by_name(world: Pool) -> None:
    for jamba, rwkv, lost, none, cache, trees in world.run(hybrid_jobs.refuse, RANKS):
        assert jamba.startswith("JambaMambaMixer of JambaModel is Mamba-1, which mixes tokens past any plan")
        assert rwkv.startswith("RwkvSelfAttention of RwkvForCausalLM is RWKV, which mixes tokens past any plan")
        assert lost == "Lfm2ShortConv runs in a forward with a batch and was not handed it; hand keywords through"
        assert none.startswith("Lfm2ShortConv did not call causal_conv1d_fn and mixed tokens past the plan")
        assert cache.startswith("expected no cache of states beside a batch, got one")
        assert trees.startswith("expected causal segments for recurrent layers, got full ones")


def test_a_check_by_behaviour_finds_what_mixes_documents_and_what_loses_states(world: Pool) -> None:
    for figures, told in world.run(hybrid_jobs.check, RANKS):
        assert [each.leak for each in figures] == [0, 0]
        assert max(each.alone for each in figures) < 1e-5
        *lost, forwards, backwards = told
        assert all("of the largest off those of it alone: a layer loses" in each for each in lost), lost
        for each in (forwards, backwards):
            assert each.startswith("Lfm2ForCausalLM: outputs of a document change by ")
            assert ", first in model.layers.2.feed_forward (Invented): it mixes tokens past the plan" in each


# Without recurrent layers: latents, soft-capped scores.
UNLIKE = [
    Hybrid("deepseek_v3", "te_ring", accumulate=2),
    Hybrid("gemma2", again="not reentrant"),
    Hybrid("deepseek_v2", "distca", sharded=True, again="reentrant"),
]
MORE = [
    Hybrid("glm4_moe_lite", "ulysses"),
    *(Hybrid(each, steps=50, marks=(24, 49)) for each in ("deepseek_v3", "gemma2")),
]


@pytest.mark.parametrize("ways", [UNLIKE, pytest.param(MORE, marks=pytest.mark.product)], ids=["first", "others"])
def test_latents_and_soft_capped_scores_train_as_each_document_alone(world: Pool, ways: list[Hybrid]) -> None:
    assert_alike(world, ways)

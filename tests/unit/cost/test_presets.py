"""Every shipped cluster and model can be priced, and says where its constants come from."""

from __future__ import annotations

import re

import pytest

from megatron_balance.analysis.memory import rank_memory
from megatron_balance.config import CONFIGS, load_cluster, load_model, names
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import layer_modules
from megatron_balance.ir.cluster import Cluster

STRUCTURE = (
    "name",
    "num_ranks",
    "ranks_per_node",
    "ranks_per_nic",
)  # what a cluster is made of stands in the file's first lines


@pytest.mark.parametrize("name", names("cluster"))
def test_every_constant_of_a_cluster_has_its_source_beside_it(name: str) -> None:
    text = (CONFIGS / "cluster" / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    above = ""
    for line in text.splitlines():
        key, comment = line.partition(":")[0], re.search(r"# (.+)", line)
        if key in Cluster.__dataclass_fields__ and key not in STRUCTURE:
            assert (comment and len(comment[1]) > 3) or above.startswith("#"), line
        above = line


@pytest.mark.parametrize("name", names("model"))
def test_every_model_says_where_its_sizes_come_from(name: str) -> None:
    assert (CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("model_name", names("model"))
@pytest.mark.parametrize("cluster_name", names("cluster"))
def test_every_pair_of_presets_can_be_priced(cluster_name: str, model_name: str) -> None:
    cluster, model = load_cluster(cluster_name).build(), load_model(model_name)
    cost = AnalyticCost(cluster, model)
    seconds = [cost.attention_s(1e6, 1024), cost.linear_s(1), cost.layer_s(1024), cost.layer_s(1024, backward=True)]
    seconds += [cost.head_s(1024), cost.optimizer_s(1e6), cost.merge_s(1), cost.intra_node_s(1), cost.inter_node_s(1)]
    assert all(0 < second < 1e3 for second in seconds)
    assert rank_memory(model, 1024, 1024).total > 0


@pytest.mark.parametrize("name", names("model"))
def test_the_modules_flops_are_those_that_the_model_states(name: str) -> None:
    model = load_model(name)
    router = 2 * model.hidden_size * model.num_experts
    assert sum(module.flops for module in layer_modules(model)) == pytest.approx(model.linear_flops_per_token + router)


def test_the_models_of_the_five_papers_are_there() -> None:
    papers = {
        "zeppelin": ("llama-3b", "llama-7b", "llama-13b", "llama-30b", "moe-8x550m"),
        "wlb-llm": ("llama-550m", "llama-7b", "llama-30b", "llama-70b"),
        "distca": ("llama3-8b", "llama-34b"),
        "hydraulis": ("llama-7b", "llama-13b", "llama2-32b"),
        "knapformer": ("flux-12b",),
    }
    assert {model for models in papers.values() for model in models} <= set(names("model"))


def test_flux_has_knapformers_flops() -> None:
    # Eq. 1: 24 l d^2 outside attention, 4 l^2 d in it.
    flux = load_model("flux-12b")
    assert flux.linear_flops_per_token == 24 * 3072**2
    assert flux.attention_flops_per_pair == 4 * 3072


def test_distcas_34b_has_the_flops_that_its_appendix_counts() -> None:
    # Appendix A counts one key-value projection of its width 2048, not two: 2 h (2 h + h_kv + 3 i)
    # = 1320 x 2^20.
    model = load_model("llama-34b")
    assert model.linear_flops_per_token - 2 * 8192 * 2048 == pytest.approx(1320 * 2**20, rel=1e-3)


def test_the_kernels_long_rate_is_the_published_one() -> None:
    # FlashAttention-2 on Hopper, heads of 128: 370 TFLOP/s; on the A100 73 % of 312.
    pairs = float(1 << 32)
    for name, tflops in (("h200", 370), ("a800", 0.73 * 312), ("h100", 648)):
        model = load_model("llama-7b")
        seconds = AnalyticCost(load_cluster(name).build(), model).attention_s(pairs)
        assert pairs * model.attention_flops_per_pair / seconds / 1e12 == pytest.approx(tflops, rel=2e-3)

"""Every shipped cluster and model can be priced, and says where its constants come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_balance.analysis.memory import rank_memory
from megatron_balance.config import CONFIGS, load_cluster, load_model, names
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import layer_modules
from megatron_balance.errors import ConfigError
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
        if (key in Cluster.__dataclass_fields__ and key not in STRUCTURE) or line.startswith(" "):
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
    # An H100, heads of 128, at 16k (FlashAttention-3, Figure 5); 73 % of 312 TFLOP/s on the A100.
    hopper = {"flash_attn": 370, "torch_varlen": 370, "te_fused": 595, "flash_attn_3": 648}
    rates = {"a800": {"flash_attn": 0.73 * 312}, "h100": hopper, "h200": hopper, "h800": hopper}
    pairs, model = float(1 << 32), load_model("llama-7b")
    for name, by_kernel in rates.items():
        for kernel, tflops in by_kernel.items():
            cluster = load_cluster(name).build().with_kernel(kernel)
            seconds = AnalyticCost(cluster, model).attention_s(pairs)
            assert pairs * model.attention_flops_per_pair / seconds / 1e12 == pytest.approx(tflops, rel=2e-3)


def test_a_preset_is_priced_at_the_kernel_that_auto_takes_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compute capability of its GPUs, with torch and Transformer Engine installed."""
    torch = pytest.importorskip("torch")
    from megatron_balance.runtime import kernels

    image = ("te_fused", "torch_varlen")
    capabilities = {"a800": (8, 0), "a800-ib": (8, 0), "h100": (9, 0), "h200": (9, 0), "h800": (9, 0)}
    for name, capability in capabilities.items():
        monkeypatch.setattr(kernels, "capability_of", lambda _, capability=capability: capability)
        device = torch.device("cuda")
        served = [k for k in kernels.automatic(device) if not kernels.KERNELS[k].refusal(device, torch.bfloat16, 128)]
        cluster = load_cluster(name).build()
        chosen = next(kernel for kernel in served if kernel in image)
        assert cluster.with_kernel(chosen) == cluster, (name, chosen)


def test_a_rate_is_a_share_of_a_known_kernel_and_the_kernel_has_one(tmp_path: Path) -> None:
    for text, said in (
        ("attention_rates: {flash_atn: 0.4}", r"attention_rates.flash_atn.*: expected 'flash_attn', 'flash_attn_3'"),
        ("attention_rates: {flash_attn: 40}", r"attention_rates.flash_attn: expected a share of the peak.*got 40"),
        ("attention_kernel: flash_attn_4", r"attention_kernel: flash_attn_4 has no rate; .*flash_attn, te_fused"),
        ("attention_kernel: fast", r"attention_kernel: expected 'flash_attn', .*got 'fast'"),
    ):
        file = tmp_path / "cluster.yaml"
        file.write_text(f"base: h200\n{text}\n")
        with pytest.raises(ConfigError, match=said):
            load_cluster(str(file)).build()
    file.write_text("base: h200\nattention_efficiency: 0.25\n")
    assert load_cluster(str(file)).build().attention_share == 0.25, "a number of one's own wins"
    file.write_text("base: h200\nattention_kernel: flash_attn\n")
    assert load_cluster(str(file)).build().attention_share == 0.374

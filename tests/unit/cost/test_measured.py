"""Costs from a measured table: exact at its points, sound between and beyond them, read strictly."""

import copy
import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model
from megatron_balance.analysis.memory import rank_memory
from megatron_balance.config import CONFIGS, load_cluster, load_model, names
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Host
from megatron_balance.cost.measured import MeasuredCost, _PairGrid, _split_masks
from megatron_balance.cost.modules import layer_modules, model_flops
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.cost.table import BesideTable, HostTable, LinkTable, load_table, save_table
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Rectangles, num_pairs
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.forest import checked
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from tests.support.cost_table import BEFORE, LAUNCH_S, K, Q, causal_s, full_s, made

MODEL = Model(
    num_heads=8, num_kv_heads=2, head_dim=16, hidden_size=128, ffn_size=320, vocab_size=257, bytes_per_element=4
)
CLUSTER = Cluster(8, 4, num_sms=0)

TABLE = made()
COST = MeasuredCost(TABLE, CLUSTER, MODEL)


def attend(*pairs: list[int], backward: bool = False, cost: MeasuredCost = COST) -> float:
    rows = np.array(pairs, dtype=np.int64)
    return float(cost.attend_s(rows, np.zeros(len(rows), dtype=np.int64), 1, backward=backward)[0])


def pair(q_start: int, q_stop: int, k_start: int, k_stop: int) -> list[int]:
    return [0, q_start, q_stop, 0, 8, k_start, k_stop, 0, 2]


@pytest.mark.parametrize("q", Q)
@pytest.mark.parametrize("second", range(3))
def test_times_at_the_grids_points_are_those_measured(q: int, second: int) -> None:
    k, before, row = K[second], BEFORE[second], Q.index(q)
    assert attend(pair(k, k + q, 0, k)) == pytest.approx(LAUNCH_S + TABLE.attention.full_s[row][second])
    causal = attend(pair(before, before + q, 0, before + q))
    assert causal == pytest.approx(LAUNCH_S + TABLE.attention.causal_s[row][second])
    backward = attend(pair(k, k + q, 0, k), backward=True)
    assert backward == pytest.approx(2 * LAUNCH_S + TABLE.attention.full_backward_s[row][second])


@given(q=st.integers(16, 1024), k=st.integers(32, 4096), before=st.integers(0, 4096))
def test_times_inside_the_grid_are_exact_for_a_kernel_of_a_constant_and_its_pairs(q: int, k: int, before: int) -> None:
    assert attend(pair(k, k + q, 0, k)) == pytest.approx(LAUNCH_S + full_s(q, k))
    assert attend(pair(before, before + q, 0, before + q)) == pytest.approx(LAUNCH_S + causal_s(q, before))


def test_beyond_the_grid_the_edges_rate_goes_on_and_below_it_the_smallest_entry_counts() -> None:
    assert attend(pair(8192, 8192 + 2048, 0, 8192)) == pytest.approx(LAUNCH_S + 4 * full_s(1024, 4096))
    twice = (2048 * 4096 + 2048 * 2049 / 2) / (1024 * 4096 + 1024 * 1025 / 2)
    assert attend(pair(4096, 6144, 0, 6144)) == pytest.approx(LAUNCH_S + twice * causal_s(1024, 4096))
    # Below the grid nothing is cheaper than its smallest entry.
    assert attend(pair(100, 101, 0, 1)) == pytest.approx(LAUNCH_S + full_s(16, 32))
    # Heads that an entry leaves out are not paid.
    nano_batch = [0, 512, 640, 0, 4, 0, 512, 0, 1]
    assert attend(nano_batch) == pytest.approx(LAUNCH_S + full_s(128, 512) / 2)
    wide = MeasuredCost(TABLE, CLUSTER, dataclasses.replace(MODEL, num_heads=16))
    assert wide.attention_s(1e6, 1 << 20) == pytest.approx(2 * COST.attention_s(1e6, 1 << 20))
    # Launches are told apart and empty ones are free.
    rows = np.array([pair(0, 128, 0, 128), pair(512, 640, 0, 512)], dtype=np.int64)
    found = COST.attend_s(rows, np.array([2, 2]), 4)
    assert found.tolist() == pytest.approx([0, 0, LAUNCH_S + causal_s(128, 0) + full_s(128, 512), 0])
    # Regions without a visible pair are no entry.
    assert attend(pair(0, 10, 50, 60)) == 0.0


def test_a_region_that_is_neither_full_nor_causal_is_two_entries() -> None:
    neither = pair(100, 400, 50, 300)
    split = _split_masks(np.array([neither]))
    assert [values.tolist() for values in split[False]] == [[100], [250]]
    assert [values.tolist() for values in split[True]] == [[200], [50]]
    assert attend(neither) == pytest.approx(LAUNCH_S + full_s(100, 250) + causal_s(200, 50))


def test_the_entries_of_a_region_see_as_many_keys_as_the_region() -> None:
    generator = np.random.default_rng(3)
    rows = [
        [0, *sorted(generator.choice(99, 2, False)), 0, 8, *sorted(generator.choice(99, 2, False)), 0, 2]
        for _ in range(300)
    ]
    pairs = np.array(rows, dtype=np.int64)
    for mask in (CAUSAL, SlidingWindow(7), SlidingWindow(60)):
        (full_q, keys), (q, before) = _split_masks(pairs, mask)[False], _split_masks(pairs, mask)[True]
        columns = (Pair.Q_START, Pair.Q_STOP, Pair.K_START, Pair.K_STOP)
        visible = num_pairs(pairs[:, Pair.SEQ], Rectangles(*(pairs[:, column] for column in columns)), mask)
        beyond = full_q * keys + q * before + q * (q + 1) // 2 - visible
        # The mean of the keys that a window's queries see is rounded up.
        assert (beyond >= 0).all()
        assert (beyond < (np.maximum(full_q, 1) if mask != CAUSAL else 1)).all()


@given(length=st.integers(1, 9000), start=st.integers(0, 3000), backward=st.booleans())
def test_an_extra_token_never_takes_less_time(length: int, start: int, backward: bool) -> None:
    stops = start + length, start + length + 1
    times = [attend(pair(start, stop, 0, stop), backward=backward) for stop in stops]
    assert times[1] >= times[0] * (1 - 1e-12)
    planned = [COST.attention_s(tokens * (tokens + 1) / 2, tokens) for tokens in (length, length + 1)]
    assert planned[1] >= planned[0] * (1 - 1e-12)


def test_noise_in_the_table_does_not_make_more_work_faster() -> None:
    grid = _PairGrid((1, 2, 4), (1, 2), ((1.0, 2.0), (0.5, 3.0), (4.0, 3.5)), lambda q, k: q * k)
    points = [(q, k) for q in (1.0, 2.0, 4.0) for k in (1.0, 2.0)]
    found = grid.time_s(np.array([q for q, _ in points]), np.array([k for _, k in points]))
    assert found.tolist() == [1.0, 2.0, 1.0, 3.0, 4.0, 4.0]


def test_lines_are_fitted_to_the_other_figures() -> None:
    assert COST.layer_s(256) == pytest.approx(1e-5 + 256e-6)
    assert COST.layer_s(256, backward=True) == pytest.approx(3e-5 + 512e-6)
    assert COST.linear_s(256) == pytest.approx(256e-6)
    assert COST.merge_s(100) == pytest.approx(1e-6 + 1e-6)
    assert COST.pack_s(50000) == pytest.approx(2e-6 + 5e-6)
    assert COST.merge_s(0) == COST.pack_s(0) == COST.layer_s(0) == 0.0
    assert COST.launch_s(3) == pytest.approx(3 * (LAUNCH_S + 1e-6))
    assert COST.optimizer_s(100) == pytest.approx(100 * 15 * 1e-10)
    assert COST.head_s(10) > 0
    # Another models layer takes its share of the FLOPs.
    wide = MeasuredCost(TABLE, CLUSTER, dataclasses.replace(MODEL, hidden_size=256))
    assert wide.linear_s(100) == pytest.approx(2 * COST.linear_s(100))
    # A measured machine can be perturbed like any other.
    cost = PerturbedCost(COST, Factors(linear=2.0))
    assert cost.layer_s(256) == pytest.approx(2 * COST.layer_s(256))
    assert cost.attention_s(1e6, 128) == COST.attention_s(1e6, 128)
    # A tensor parallel group splits what was measured.
    two = MeasuredCost(TABLE, wide_ranks(CLUSTER, 2), MODEL, 2)
    region = np.array([pair(512, 640, 0, 512)])
    assert two.attend_s(region, np.zeros(1, dtype=np.int64), 1)[0] == pytest.approx(LAUNCH_S + full_s(128, 512) / 2)
    shared = AnalyticCost(wide_ranks(CLUSTER, 2), MODEL, 2).tensor_parallel_s(256)
    assert two.layer_s(256) == pytest.approx(1e-5 + 128e-6 + shared)
    assert two.link(inter_node=False).bytes_per_s == 2 * COST.link(inter_node=False).bytes_per_s
    # A table for another head dim is refused.
    with pytest.raises(ConfigError, match=r"head dim 16, m has 64; measure one with 'megatron-balance profile --model"):
        MeasuredCost(TABLE, CLUSTER, dataclasses.replace(MODEL, head_dim=64, name="m"))


def test_measured_links_and_hosts_win_over_the_clusters(tmp_path: Path) -> None:
    link = LinkTable("inter_node", "gloo", (1000, 1000000), (1e-3 + 1e-4, 1e-3 + 1e-1))
    cost = MeasuredCost(made((link,)), CLUSTER, MODEL)
    assert cost.inter_node_s(1e6) == pytest.approx(1e-3 + 0.1)
    assert cost.intra_node_s(1e6) == pytest.approx(CLUSTER.intra_alpha_s + 1e6 / CLUSTER.intra_bytes_per_s)
    assert (cost.call_s, COST.call_s > 0) == (0.0, True)
    cluster = dataclasses.replace(CLUSTER, host_call_s=3e-5, host_launch_s=2e-5)
    assert MeasuredCost(TABLE, cluster, MODEL).host == Host(3e-5, 2e-5)
    path = tmp_path / "table.json"
    table = dataclasses.replace(made((link,)), host=HostTable(4e-5, 1e-5, 1e-6))
    save_table(table, path)
    assert load_table(path) == table
    assert MeasuredCost(load_table(path), cluster, MODEL).host == Host(4e-5, 1e-5, 1e-6)


def changed(*path: str | int, to: Any = ..., drop: bool = False) -> dict[str, Any]:
    # The table's JSON with one value changed, dropped, or added.
    content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(TABLE)))
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    if drop:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return copy.deepcopy(content)


LINK = {"name": "inter", "backend": "gloo", "sizes": [1, 2], "seconds": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (changed("attention", "launch_s", drop=True), "attention.launch_s: missing"),
        (changed("attention", "lunch_s", to=1.0), "attention.lunch_s: unknown key, did you mean 'launch_s'?"),
        (changed("attention", "full_s", 1, 2, to=-1.0), "attention.full_s[1][2]: expected positive seconds, got -1.0"),
        (changed("attention", "full_s", 1, 2, to="x"), 'attention.full_s[1][2]: expected a number, got "x"'),
        (changed("attention", "full_s", 1, to=[1.0]), "full_s[1]: expected 3 times, one for each size, got 1"),
        (
            changed("attention", "causal_s", to=[[1.0]]),
            "attention.causal_s: expected 3 rows, one for each entry of q_tokens, got 1",
        ),
        (changed("attention", "q_tokens", to=[9, 8, 10]), "q_tokens: expected whole numbers from 1 on in rising order"),
        (changed("attention", "k_tokens", to=[4]), "attention.k_tokens: at least 2 sizes are needed, got [4]"),
        (changed("attention", "q_tokens", 0, to=16.5), "attention.q_tokens[0]: expected a whole number, got 16.5"),
        (changed("attention", "backward_launch_s", to=-1e-6), "backward_launch_s: expected seconds of at least 0"),
        (changed("merge", "seconds", 0, to=0.0), "merge.seconds[0]: expected positive seconds, got 0.0"),
        (changed("layer", "gated_ffn", to=1), "layer.gated_ffn: expected true or false, got 1"),
        (changed("format", to="old"), "format: expected 'megatron-balance cost table 1', got 'old'"),
        (changed("links", to=[LINK]), "links[0].name: unknown link 'inter', did you mean 'inter_node'?"),
        (changed("source", to=[]), "source: expected an object, got []"),
        (changed("pack", to=3), "pack: expected an object, got 3"),
        ([], "the file: expected an object, got []"),
    ],
)
def test_a_bad_table_is_refused_by_file_and_key(tmp_path: Path, content: Any, sentence: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        load_table(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    no_table = {"{": "not a cost table in JSON", '{"format": 1, "format": 2}': "key 'format' is given twice"}
    for text, sentence in no_table.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            load_table(path)
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        load_table(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_table(TABLE, tmp_path / "no" / "folder.json")


def test_kernels_take_as_much_longer_beside_transfers_as_was_measured(tmp_path: Path) -> None:
    table = made(beside=BesideTable(1.1, 1.25))
    save_table(table, tmp_path / "costs.json")
    assert load_table(tmp_path / "costs.json") == table
    contention = MeasuredCost(table, CLUSTER, MODEL).contention
    assert contention.slowdown(intra=True, inter=False) == pytest.approx(1.1, rel=1e-5)
    assert contention.slowdown(intra=False, inter=True) == pytest.approx(1.25, rel=1e-5)
    assert contention.slowdown(intra=False, inter=False) == 1.0
    assert COST.contention == AnalyticCost(CLUSTER, MODEL).contention
    with pytest.raises(ConfigError, match=r"inter_node: expected a factor of at least 1, got 0\.9"):
        BesideTable(1.0, 0.9)


def test_what_planners_count_of_the_way_to_experts_is_told_by_every_cost() -> None:
    model = dataclasses.replace(MODEL, num_experts=4, experts_per_token=2, expert_split=4.0)
    for without, counted in (
        (MeasuredCost(TABLE, CLUSTER, model), MeasuredCost(TABLE, CLUSTER, model, exchanges=True)),
        (AnalyticCost(CLUSTER, model), AnalyticCost(CLUSTER, model, exchanges=True)),
    ):
        factors = Factors(linear=1.5)
        for plain, cost in ((without, counted), (PerturbedCost(without, factors), PerturbedCost(counted, factors))):
            way_s = cost.experts_s(3000.0) - cost.experts_s(1000.0)  # without the fixed part
            assert way_s == pytest.approx(cost.linear_s(2000.0) - plain.linear_s(2000.0))
            assert (way_s > 0, plain.experts_s(1000.0)) == (True, 0.0)


# Every shipped cluster and model can be priced, and says where its constants come from.

# What a cluster is made of stands in the file's first lines.
STRUCTURE = ("name", "num_ranks", "ranks_per_node", "ranks_per_nic")


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
def test_every_model_says_where_its_sizes_come_from_has_its_flops_and_can_be_priced_on_every_cluster(name: str) -> None:
    assert (CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8").startswith("# ")
    model = load_model(name)
    router, own = 2 * model.hidden_size * model.num_experts, model.recurrent
    # Modules are those of the mean layer, a hybrid model's linear FLOPs those of a layer that attends
    # and its part of the others.
    flops = sum(module.flops for module in layer_modules(model)) * (1 if own is None else model.num_layers)
    attending, routing = (1, 1) if own is None else (own.attention_layers, own.mlp_layers)
    assert flops == pytest.approx(model.linear_flops_per_token * attending + router * routing)
    assert rank_memory(model, 1024, 1024).total > 0
    for cluster in names("cluster"):
        cost = AnalyticCost(load_cluster(cluster).build(), model)
        seconds = [cost.attention_s(1e6, 1024), cost.linear_s(1), cost.layer_s(1024), cost.layer_s(1024, backward=True)]
        seconds += [cost.head_s(1024), cost.optimizer_s(1e6), cost.merge_s(1)]
        seconds += [cost.intra_node_s(1), cost.inter_node_s(1)]
        assert all(0 < second < 1e3 for second in seconds), cluster


def test_models_have_the_flops_that_papers_count() -> None:
    # Also where launches make keys and values of latents that travel.
    latents = Model(16, 16, 192, 4, 2048, 1024, value_dim=128, latent_rank=512, latent_rope=64)
    assert latents.latent_flops > 0
    alike, batches = replace(latents, latent_travels=True), [Batch((512,))]
    assert model_flops(alike, batches) == pytest.approx(model_flops(latents, batches))
    # Trees count what they show: none of the pairs of two branches of 255 tokens.
    plain, tree = (512, 40), checked([[(2, -1, False), (255, 0, False), (255, 0, False)], [(40, -1, False)]])
    fewer = model_flops(latents, [Batch(plain)]) - model_flops(latents, [Batch(plain, tree)])
    pairs = 255 * 255
    assert fewer == pytest.approx(3 * pairs * latents.num_layers * latents.attention_flops_per_pair)
    # KnapFormer, Eq. 1: 24 l d^2 outside attention, 4 l^2 d in it.
    flux = load_model("flux-12b")
    assert flux.linear_flops_per_token == 24 * 3072**2
    assert flux.attention_flops_per_pair == 4 * 3072
    # Distcas 34b has the FLOPs that its appendix counts.
    # Appendix A counts one key-value projection of its width 2048, not two: 2 h (2 h + h_kv + 3 i)
    # = 1320 x 2^20.
    model = load_model("llama-34b")
    assert model.linear_flops_per_token - 2 * 8192 * 2048 == pytest.approx(1320 * 2**20, rel=1e-3)
    # The models of the five papers are there.
    papers = {
        "zeppelin": ("llama-3b", "llama-7b", "llama-13b", "llama-30b", "moe-8x550m"),
        "wlb-llm": ("llama-550m", "llama-7b", "llama-30b", "llama-70b"),
        "distca": ("llama3-8b", "llama-34b"),
        "hydraulis": ("llama-7b", "llama-13b", "llama2-32b"),
        "knapformer": ("flux-12b",),
    }
    assert {model for models in papers.values() for model in models} <= set(names("model"))


def test_the_kernels_long_rate_is_the_published_one() -> None:
    # An H100, heads of 128, at 16k (FlashAttention-3, Figure 5; the third library's own rate of today,
    # MagiAttention's kernel chart); 73 % of 312 TFLOP/s on the A100.
    hopper = {"flash_attn": 370, "torch_varlen": 370, "te_fused": 595, "flash_attn_3": 702}
    rates = {"a800": {"flash_attn": 0.73 * 312}, "h100": hopper, "h200": hopper, "h800": hopper}
    pairs, model = float(1 << 32), load_model("llama-7b")
    for name, by_kernel in rates.items():
        for kernel, tflops in by_kernel.items():
            cluster = load_cluster(name).build().with_kernel(kernel)
            seconds = AnalyticCost(cluster, model).attention_s(pairs)
            assert pairs * model.attention_flops_per_pair / seconds / 1e12 == pytest.approx(tflops, rel=2e-3)


def test_a_preset_is_priced_at_the_kernel_that_auto_takes_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    # By the compute capability of its GPUs, with torch and Transformer Engine installed.
    torch = pytest.importorskip("torch")
    from megatron_balance.runtime import kernels

    image = ("te_fused", "torch_varlen")
    capabilities = {"a800": (8, 0), "a800-ib": (8, 0), "h100": (9, 0), "h200": (9, 0), "h800": (9, 0)}
    for name, capability in capabilities.items():
        monkeypatch.setattr(kernels, "capability_of", lambda _, capability=capability: capability)
        device = torch.device("cuda")
        served = [k for k in kernels._preferred(device) if not kernels.KERNELS[k].refusal(device, torch.bfloat16, 128)]
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

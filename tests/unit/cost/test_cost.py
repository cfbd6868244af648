"""Costs against hand-worked numbers, of kernels, links, collectives, schemes and experts."""

from dataclasses import replace
from operator import mul

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Cluster, Model
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost import fits, kernel, parallel
from megatron_balance.cost.analytic import CALL_S, LAUNCH_S, AnalyticCost
from megatron_balance.cost.base import Link, MachineCost, remap_s
from megatron_balance.cost.modules import ExpertLoad, expert_part
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Rectangles, num_pairs
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.strategy import Scheme
from megatron_balance.model_config import pretrained
from megatron_balance.planners.pipelines import check_scheme, cost_of_scheme, stage_cluster, stages_around
from megatron_balance.solvers.dispatch import PipelineCost
from tests.support.deepseek import DEEPSEEK_V3

CLUSTER = Cluster(
    16,
    8,
    intra_bytes_per_s=400e9,
    nic_bytes_per_s=50e9,
    flops_per_s=1000e12,
    attention_efficiency=0.5,
    linear_efficiency=0.8,
    memory_bytes_per_s=4e12,
    num_sms=100,
    intra_alpha_s=3e-6,
    inter_alpha_s=10e-6,
)
MODEL = Model(num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, ffn_size=14336)
COST = AnalyticCost(CLUSTER, MODEL)
TILE_S = 4 * 128 * 128 * 128 / 500e12


def causal(length: int, start: int = 0) -> list[int]:
    # One pair of regions: queries [start, start + length) of a sequence over all keys up to them,
    # all heads.
    return [0, start, start + length, 0, 32, 0, start + length, 0, 8]


def attend(cost: MachineCost, *pairs: list[int], backward: bool = False) -> float:
    rows = np.array(pairs, dtype=np.int64)
    return float(cost.attend_s(rows, np.zeros(len(rows), dtype=np.int64), 1, backward=backward)[0])


def test_attention_takes_four_flops_a_pair_and_channel_in_whole_tiles_of_padded_heads() -> None:
    assert COST.attention_s(1e9) == pytest.approx(1e9 * 4 * 32 * 128 / 500e12)
    # Head dims that the kernel pads cost the padded size.
    narrow = AnalyticCost(CLUSTER, replace(MODEL, head_dim=100))
    assert narrow.attention_s(1e9) == pytest.approx(COST.attention_s(1e9))
    # Short runs of queries and keys fill whole tiles and cost a thread block each.
    tile = kernel.TILE_TOKENS
    long, whole, nano_batch = (COST.attention_s(1e6, run) for run in (1 << 30, tile, tile / 2))
    assert long == pytest.approx(COST.attention_s(1e6), rel=1e-6)
    assert whole == pytest.approx((1 + kernel.BLOCK_TILES) * 128 / 129 * long)
    assert nano_batch == pytest.approx(128**2 / (64 * 65) * (1 + kernel.BLOCK_TILES) * long)


def test_a_launch_takes_its_tiles_and_thread_blocks() -> None:
    # A launch takes its tiles and thread blocks over the whole GPU.
    # 32 blocks of 128 queries see 1, 2, ... 32 tiles of keys.
    assert attend(COST, causal(4096)) == pytest.approx(LAUNCH_S + 32 * (32 * 33 / 2 + 32 * kernel.BLOCK_TILES) * TILE_S)
    # One block of queries takes as long as its own sm needs.
    alone = [0, 8192, 8320, 0, 1, 0, 8192, 0, 1]
    assert attend(COST, alone) == pytest.approx(LAUNCH_S + (64 + kernel.BLOCK_TILES) * TILE_S * 100)
    on_cpu = AnalyticCost(replace(CLUSTER, num_sms=0), MODEL)
    assert attend(on_cpu, alone) == pytest.approx(LAUNCH_S + (64 + kernel.BLOCK_TILES) * TILE_S)
    # Backward has five products for two at a lower rate.
    forward, backward = (attend(COST, causal(4096), backward=b) - LAUNCH_S for b in (False, True))
    assert backward / forward == pytest.approx(2.5 * 73 / 63)
    assert kernel.law_of(None).backward_factor == pytest.approx(2.5 * 73 / 63)
    # Launches are told apart and empty ones are free.
    rows = np.array([causal(4096), causal(2048), causal(4096)], dtype=np.int64)
    found = COST.attend_s(rows, np.array([2, 0, 2]), 4)
    one, two = attend(COST, causal(2048)), attend(COST, causal(4096))
    assert found.tolist() == pytest.approx([one, 0.0, 2 * two - LAUNCH_S, 0.0])
    assert COST.attend_s(np.empty((0, 9), dtype=np.int64), np.empty(0, dtype=np.int64), 2).tolist() == [0.0, 0.0]
    # Launches cost each the same.
    assert COST.launch_s(7) == pytest.approx(7 * LAUNCH_S)


def test_a_layer_takes_its_products_what_is_read_and_written_and_at_least_its_weights() -> None:
    flops = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    elements = 10 * 4096 + 2 * (4096 + 1024) + 3 * 14336
    per_token = flops / 800e12 + 2 * elements / 4e12
    assert COST.linear_s(100) == pytest.approx(100 * per_token)
    assert COST.layer_s(8192) == pytest.approx(8192 * per_token)
    # Few tokens take as long as reading the weights.
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert COST.layer_s(1) == pytest.approx(2 * weights / 4e12, rel=0.01)
    # Backward of a layer has twice the products.
    assert COST.layer_s(8192, backward=True) / COST.layer_s(8192) == pytest.approx(2, rel=0.05)
    # Bytes of tokens.
    assert COST.kv_bytes(10) == 10 * 2 * 8 * 128 * 2
    assert COST.query_bytes(10) == 10 * 32 * 128 * 2
    assert COST.pack_s(4e9) == pytest.approx(2 * 4e9 / 4e12)
    assert COST.merge_s(1000) == pytest.approx(1000 * 3 * 32 * 129 * 4 / 4e12)
    assert COST.optimizer_s(1e9) == pytest.approx(30e9 / 4e12)


def test_a_message_costs_alpha_and_its_bytes_over_as_many_nics() -> None:
    assert COST.intra_node_s(4e9) == pytest.approx(3e-6 + 0.01)
    assert COST.inter_node_s(4e9, num_messages=3) == pytest.approx(30e-6 + 0.08)
    assert COST.link(inter_node=True).time_s(4e9, 3) == COST.inter_node_s(4e9, 3)
    assert COST.link(inter_node=False).time_s(4e9) == COST.intra_node_s(4e9)
    # More NICs move bytes faster and half a NIC slower.
    assert COST.inter_node_s(4e9, num_nics=8) == pytest.approx(10e-6 + 0.01)
    assert COST.inter_node_s(4e9, num_nics=0.5) == pytest.approx(10e-6 + 0.16)
    # Routing is zeppelins equation 1.
    # n / 4 over each NIC, and 3 n / 4 through the node at either end.
    expected = 2 * (3e-6 + 0.75 * 4e9 / 400e9) + 10e-6 + 1e9 / 50e9
    assert COST.routed_s(4e9, num_nics=4) == pytest.approx(expected)
    assert COST.routed_s(4e9, num_nics=1) == pytest.approx(COST.inter_node_s(4e9) + 6e-6)


def test_transfers_take_sms_from_kernels_and_wait_for_thread_blocks() -> None:
    contention = COST.contention  # 400 GB/s: 16 NVLinks, two channels each
    assert (contention.intra_sms, contention.inter_sms) == (32, 2)
    # 12 links by a datasheet's rate and as NCCL counts them.
    assert [type(contention).of_links(132, rate).intra_sms for rate in (300e9, 247.2e9)] == [24, 24]
    assert contention.slowdown(intra=False, inter=True) == pytest.approx(100 / 98)
    assert contention.slowdown(intra=True, inter=True) == pytest.approx(100 / 66)
    assert contention.slowdown(intra=False, inter=False) == 1.0
    # A transfer waits for one thread block or for nearly the whole kernel.
    contention = COST.contention
    assert contention.wait_s(2e-3, 1e-4, prioritised=True) == 1e-4
    assert contention.wait_s(2e-3, 1e-4, prioritised=False) == pytest.approx(1.9e-3)
    assert contention.wait_s(5e-5, 1e-4, prioritised=True) == 5e-5
    assert AnalyticCost(replace(CLUSTER, num_sms=0), MODEL).contention.wait_s(2e-3, 1e-4, prioritised=False) == 0.0


def test_a_tensor_parallel_group_is_one_wide_rank_that_pays_for_its_own_communication() -> None:
    wide = parallel.wide_ranks(CLUSTER, 2)
    assert (wide.num_ranks, wide.node_size, wide.flops_per_s, wide.nic_bytes_per_s) == (8, 4, 2000e12, 100e9)
    two = AnalyticCost(wide, MODEL, 2)
    assert two.attention_s(1e9) == pytest.approx(COST.attention_s(1e9) / 2)
    # Two all-gathers and two reduce-scatters, each of half the tokens' hidden states from the one
    # other GPU.
    shared = 4 * (CALL_S + 3e-6 + 8192 * 4096 * 2 / 2 / 400e9)
    assert two.layer_s(8192) == pytest.approx(COST.layer_s(8192) / 2 + shared)
    assert two.contention == COST.contention
    # Two ranks that share a NIC have it to themselves as one wide rank.
    wide = parallel.wide_ranks(replace(CLUSTER, ranks_per_nic=2), 2)
    assert (wide.ranks_per_nic, wide.nic_bytes_per_s) == (1, 50e9)
    # Tensor parallelism that does not fit a node is refused.
    with pytest.raises(ConfigError, match="tensor parallelism 3 does not divide h's nodes of 8 ranks"):
        parallel.wide_ranks(Cluster(16, 8, name="h"), 3)
    with pytest.raises(ConfigError, match="one must divide the other"):
        parallel.wide_ranks(Cluster(24, 24, ranks_per_nic=3), 2)


def test_a_perturbed_cost_scales_each_part_and_a_remap_takes_the_fullest_link() -> None:
    # A perturbed cost scales each part by its own factor.
    cost = PerturbedCost(COST, Factors(attention=1.5, linear=2.0, intra_node=3.0, inter_node=4.0))
    assert attend(cost, causal(4096)) == pytest.approx(1.5 * attend(COST, causal(4096)))
    assert cost.layer_s(100, backward=True) == pytest.approx(2 * COST.layer_s(100, backward=True))
    assert cost.intra_node_s(1e6) == pytest.approx(3 * COST.intra_node_s(1e6))
    assert cost.inter_node_s(1e6) == pytest.approx(4 * COST.inter_node_s(1e6))
    assert cost.link(inter_node=False).time_s(1e6) == pytest.approx(cost.intra_node_s(1e6))
    assert cost.link(inter_node=True).time_s(1e6) == pytest.approx(cost.inter_node_s(1e6))
    assert Factors.draw(0.1, 3) == Factors.draw(0.1, 3) != Factors.draw(0.1, 4)
    assert Factors.draw(0.0, 3) == Factors()
    # A remap takes the fullest or emptiest ranks link and the NICs of such a node.
    token_bytes = 2 * KV_BYTES  # query, key, value and output, all of one size here
    assert remap_s([1000.0] * 16, SHARED_NICS, REMAP_COST) == 0
    inside = [1600.0, 700, 700, *[1000.0] * 13]
    assert remap_s(inside, SHARED_NICS, REMAP_COST) == pytest.approx(2 * 2e-6 + 600 * token_bytes / 400e9)
    across = [*[1100.0] * 8, *[900.0] * 8]
    over_nics = 2 * 9e-6 + 800 * token_bytes / 4 / 50e9
    assert remap_s(across, SHARED_NICS, REMAP_COST) == pytest.approx(2 * 2e-6 + 100 * token_bytes / 400e9 + over_nics)


@given(length=st.integers(1, 20000), start=st.integers(0, 5000), backward=st.booleans())
def test_an_extra_token_never_takes_less_time(length: int, start: int, backward: bool) -> None:
    shorter, longer = (attend(COST, causal(each, start), backward=backward) for each in (length, length + 1))
    assert longer >= shorter
    pairs = length * (length + 1) / 2
    assert COST.attention_s(pairs + length + 1, length + 1) >= COST.attention_s(pairs, length) * (1 - 1e-12)
    assert COST.layer_s(length + 1, backward=backward) >= COST.layer_s(length, backward=backward)
    assert COST.head_s(length + 1, backward=backward) > COST.head_s(length, backward=backward)


# The seconds of a remap
EVEN_HEADS = Model(32, 32, 128)
SHARED_NICS = Cluster(
    16, 8, intra_bytes_per_s=400e9, nic_bytes_per_s=50e9, ranks_per_nic=2, intra_alpha_s=2e-6, inter_alpha_s=9e-6
)
REMAP_COST = AnalyticCost(SHARED_NICS, EVEN_HEADS)
KV_BYTES = 2 * 32 * 128 * 2  # of a token


# Tiles of the attention kernel, counted by closed forms, against counting them one by one.
def counted(pair: list[int]) -> tuple[int, int, int, int]:
    # Tiles, thread blocks, tiles of the longest one, visible pairs; the slow way.
    _, q_start, q_stop, _, _, k_start, k_stop, _, _ = pair
    blocks: list[int] = []
    for first in range(q_start, q_stop, 128):
        last = min(first + 128, q_stop) - 1
        blocks.append(-(-max(0, min(last + 1, k_stop) - k_start) // 128))
    visible = sum(max(0, min(q + 1, k_stop) - k_start) for q in range(q_start, q_stop))
    return sum(blocks), len(blocks), max(blocks), visible


def test_tiles_are_those_that_one_by_one_counting_finds() -> None:
    generator = np.random.default_rng(7)
    rows: list[list[int]] = []
    for _ in range(400):
        q, k = sorted(generator.integers(0, 700, 2).tolist()), sorted(generator.integers(0, 700, 2).tolist())
        rows.append([0, q[0], q[1] + 1, 0, 4, k[0], k[1] + 1, 0, 1])
    pairs = np.array(rows)
    columns = (Pair.Q_START, Pair.Q_STOP, Pair.K_START, Pair.K_STOP)
    visible = num_pairs(pairs[:, Pair.SEQ], Rectangles(*(pairs[:, column] for column in columns)), CAUSAL)
    found = np.stack([*kernel.tiles(pairs), visible], axis=1)
    assert found.tolist() == [list(counted(row)) for row in rows]


@pytest.mark.parametrize("size", [1, 5, 128, 129, 300])
def test_tiles_that_a_window_hides_whole_are_left_out(size: int) -> None:
    # Of the queries of a rank and the keys that its halo has (`compile.halo`).
    generator = np.random.default_rng(size)
    rows: list[list[int]] = []
    wanted: list[list[int]] = []
    for _ in range(200):
        start, stop = sorted(generator.integers(0, 900, 2).tolist())
        stop, first = stop + 1, max(0, start - size + 1)
        rows.append([0, start, stop, 0, 4, first, stop, 0, 1])
        blocks = [
            -(-(min(q + 128, stop) - first) // 128) - (max(q - size + 1, first) - first) // 128
            for q in range(start, stop, 128)
        ]
        wanted.append([sum(blocks), len(blocks), max(blocks)])
    found = np.stack(kernel.tiles(np.array(rows), SlidingWindow(size)), axis=1)
    assert found[:, :2].tolist() == [row[:2] for row in wanted]
    assert (found[:, 2] >= [row[2] for row in wanted]).all()
    assert (found[:, 2] <= [row[2] + 1 for row in wanted]).all()


def test_padding_a_head_dim_copies_every_operand_and_result_once() -> None:
    # Two queries over three keys, named twice, one of two key heads; heads of 100 become 104.
    pair = (0, 5, 7, 0, 2, 4, 7, 0, 1)
    pairs = np.array([pair, pair])
    launch = np.zeros(2, dtype=np.int64)
    rows = 2 * 2 + 3 * 1
    for dims, backward, elements in (
        ((100, 100), False, 2 * (100 + 104) * rows),
        ((100, 100), True, 4 * (100 + 104) * rows),
        ((104, 104), True, 0),
        ((192, 128), False, (192 + 128) * rows),  # v and out
    ):
        assert kernel.padding_elements(pairs, launch, 1, dims, backward=backward).tolist() == [elements]
    cluster, model = Cluster(1, 1, memory_bytes_per_s=1e9), Model(2, 1, 100)
    costs = [AnalyticCost(cluster, model, pads=pads).attend_s(pairs, launch, 1)[0] for pads in (True, False)]
    assert costs[0] - costs[1] == pytest.approx(2 * 204 * rows * 2 / 1e9)
    # Head dims are padded to the next kernel.
    assert [kernel.padded_head_dim(dim) for dim in (16, 64, 100, 128, 129)] == [32, 64, 128, 128, 160]


# Least squares without negative coefficients.
def test_a_curve_and_a_link_are_found_again_also_in_noise() -> None:
    # A quadratic is found again.
    rows = [[n**2, n, 1.0] for n in (128, 512, 2048, 8192, 32768)]
    truth = (2e-9, 3e-6, 4e-3)
    seconds = [sum(map(mul, row, truth)) for row in rows]
    assert fits.least_squares(rows, seconds, what="curve") == pytest.approx(truth, rel=1e-6)
    # Columns that say the same are fitted by one of them.
    assert fits.least_squares([[2.0, 4.0], [3.0, 6.0]], [4.0, 6.0], what="twice") == (2.0, 0.0)
    # No coefficient is negative whatever the noise.
    a, b, c = fits.least_squares([[n**2, n, 1.0] for n in (1, 2, 3, 4)], [1.0, 3.9, 9.2, 15.8], what="curve")
    assert a > 0
    assert min(b, c) >= 0
    assert 9 * a + 3 * b + c == pytest.approx(9, rel=0.05)
    # A links alpha and rate are found again.
    sizes = [1e3, 1e5, 1e7]
    link = fits.fit_link(sizes, [2e-5 + size / 25e9 for size in sizes])
    assert (link.alpha_s, link.bytes_per_s) == pytest.approx((2e-5, 25e9))
    # A rate is found even where noise hides it.
    link = fits.fit_link([1e3, 2e3], [2e-3, 1.9e-3])
    assert link.alpha_s >= 0
    assert 0 < link.bytes_per_s < float("inf")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fits.fit_link([5, 5], [1, 1]), "at least 2 different message sizes"),
        (lambda: fits.fit_link([1, 2], [0, 1]), "must be positive seconds"),
    ],
)
def test_too_little_to_fit_is_refused(call, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()


# Collectives and what surrounds a plan, against formulas worked by hand.
INTRA, INTER = Link(1e-6, 100e9), Link(10e-6, 25e9)
NODE, NODES = parallel.CollectiveGroup(8, 8, INTRA, INTER), parallel.CollectiveGroup(16, 8, INTRA, Link(10e-6, 100e9))
SPREAD = parallel.CollectiveGroup(4, 1, INTRA, INTER)


def test_collectives_go_at_the_pace_of_their_slowest_step() -> None:
    # A ring takes one step for every other rank.
    assert parallel.all_gather_s(1e6, NODE) == pytest.approx(7 * (1e-6 + 1e-5))
    # A ring over nodes goes at the pace of its slowest step.
    slow = parallel.CollectiveGroup(16, 8, INTRA, INTER)
    assert parallel.all_gather_s(1e6, slow) == pytest.approx(15 * (10e-6 + 1e6 / 25e9))
    assert parallel.all_gather_s(1e6, SPREAD) == pytest.approx(3 * (10e-6 + 1e6 / 25e9))
    # An all to all goes over the links inside and the NICs at once.
    inside = 7 * (1e-6 + 1e6 / 100e9)
    away = 8 * (10e-6 + 8 * 1e6 / 100e9)
    assert parallel.all_to_all_s(16e6, NODES) == pytest.approx(max(inside, away))
    assert parallel.all_to_all_s(8e6, NODE) == pytest.approx(7 * (1e-6 + 1e-5))
    # NICs reach less of their rate in it, where a cluster says so.
    reached = parallel.group_of(Cluster(16, 8, all_to_all_efficiency=0.8), 16, 8).efficiency
    assert parallel.all_to_all_s(16e6, replace(NODES, efficiency=reached)) == pytest.approx(8 * (10e-6 + 1e7 / 100e9))
    # One rank has nothing to wait for.
    alone = parallel.CollectiveGroup(1, 1, INTRA, INTER)
    assert parallel.all_gather_s(1e9, alone) == parallel.all_to_all_s(1e9, alone) == 0.0
    # A groups NICs are those of its ranks on a node.
    cluster = Cluster(16, 8, nic_bytes_per_s=25e9, ranks_per_nic=2)
    assert parallel.group_of(cluster, 16, 8).inter.bytes_per_s == 100e9
    assert parallel.group_of(cluster, 2, 1).inter.bytes_per_s == 25e9
    assert parallel.group_of(cluster, 2, 1, busy_nics=True).inter.bytes_per_s == 12.5e9
    with pytest.raises(ConfigError, match="9 ranks on a node: custom has 8"):
        parallel.group_of(cluster, 18, 9)
    with pytest.raises(ConfigError, match="a group of 9 ranks cannot have 8 on each node"):
        parallel.group_of(cluster, 9, 8)


def test_gradients_experts_and_stages_hand_on_what_they_must() -> None:
    # Gradients are summed in fp32 and weights gathered in bf16.
    assert parallel.gradient_sync_s(8e6, NODE) == pytest.approx(7 * (2e-6 + (4e6 + 2e6) / 100e9))
    # Experts are reached by two all-to-alls.
    moe = Model(8, 8, 64, hidden_size=512, num_experts=8, experts_per_token=2)
    cluster = Cluster(8, 8)
    group = parallel.group_of(cluster, 8, 8, busy_nics=True)
    both_ways_s = 2 * parallel.all_to_all_s(100 * 2 * 512 * 2, group)
    assert parallel.experts_s(moe, 100, cluster, 8) == pytest.approx(both_ways_s)
    assert parallel.experts_s(replace(moe, num_experts=0), 100, cluster, 8) == 0.0
    # A stage hands on hidden states.
    handed_on_s = parallel.stage_transfer_s(replace(moe, num_experts=0), 1000, INTER)
    assert handed_on_s == pytest.approx(10e-6 + 1000 * 512 * 2 / 25e9)


# The cost of a pipeline of a parallel scheme.
LLAMA = load_model("llama-7b")
A800 = load_cluster("a800-ib").build()


def pipeline_cost(scheme: Scheme, max_tokens: int = 32768) -> PipelineCost:
    return cost_of_scheme(scheme, stage_machine(scheme), max_tokens)


def stage_machine(scheme: Scheme) -> Machine:
    wide = wide_ranks(A800, scheme.tensor)
    cluster = stage_cluster(wide, scheme.context)
    memory = StepMemory(LLAMA, tuple(stages_around(scheme, LLAMA, wide.num_ranks)))
    return Machine(cluster, LLAMA, AnalyticCost(cluster, LLAMA, scheme.tensor), memory=memory)


def test_one_rank_takes_its_layers_and_the_logits_and_more_ranks_less_time_each() -> None:
    length = 8192
    cost, alone = stage_machine(Scheme()).cost, pipeline_cost(Scheme())
    causal = np.array([[0, 0, length, 0, 32, 0, length, 0, 32]])
    attention = sum(float(cost.attend_s(causal, np.zeros(1, dtype=np.int64), 1, backward=b)[0]) for b in (False, True))
    rest = sum(cost.layer_s(length, backward=b) for b in (False, True))
    head = sum(cost.head_s(length, backward=b) for b in (False, True))
    assert alone.sequence_s(length) + alone.c == pytest.approx(32 * (attention + rest) + head, rel=0.02)
    # More ranks take less time each and never less than their share.
    whole = alone.sequence_s(32768)
    for scheme in (Scheme(8), Scheme(1, 8), Scheme(1, 1, 8)):
        assert whole / 8 < pipeline_cost(scheme).sequence_s(32768) * 1.05 < whole / 4
    # A ring across nodes waits for its NICs where sequences are short.
    over_nodes, inside = (pipeline_cost(Scheme(context=ranks)) for ranks in (16, 8))
    assert over_nodes.sequence_s(2048) + over_nodes.c > inside.sequence_s(2048) + inside.c
    # A ring cuts the shortest sequence, too.
    assert inside.d > alone.d


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
        check_scheme(scheme, replace(LLAMA, **changes))
    # 50,257 tokens are padded to 50,304, which 8 divides.
    check_scheme(Scheme(8, 2), replace(LLAMA, vocab_size=50_257))


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


def test_documents_deviate_by_the_spread_and_a_group_of_all_is_busier_than_one_of_none():
    for spread, found in ((0.0, 0.0), (0.25, 0.25), (0.5, 0.5)):
        shares = ExpertLoad(spread=spread).of_documents(5000, MOE)
        assert shares.sum(axis=1) == pytest.approx(np.ones(5000))
        assert 8 * shares.std(axis=0).mean() == pytest.approx(found, rel=0.03)
    near_limit = ExpertLoad(spread=np.sqrt(7) * (1 - 1e-5)).of_documents(100, replace(MOE, experts_per_token=1))
    assert np.isfinite(near_limit).all()
    with pytest.raises(ConfigError, match="experts_per_token 0 of 8 experts"):
        replace(MOE, experts_per_token=0)
    apart = ExpertLoad(spread=1.7).of_documents(5000, MOE)
    assert apart.sum(axis=1) == pytest.approx(np.ones(5000))
    assert apart.max() == pytest.approx(0.5)
    # A group with all documents is busier than one of none and less than one of few.
    load, rng = ExpertLoad(spread=1.0), np.random.default_rng(5)
    lengths = rng.integers(500, 1500, size=64).astype(np.float64)
    mixed = np.tile(lengths / 8, (8, 1))
    few = np.zeros((8, 64), dtype=np.float64)
    few[np.arange(64) // 8, np.arange(64)] = lengths
    even = lengths.sum() / 8 / 8
    assert even < load.busiest(mixed, MOE, 8).max() < 0.9 * load.busiest(few, MOE, 8).mean()
    assert load.busiest(few, MOE, 8).tolist() == ExpertLoad(spread=1.0).busiest(few, MOE, 8).tolist()


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

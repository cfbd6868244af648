"""DistCA (core attention disaggregation): its figures and tables beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf
from statistics import fmean

import numpy as np

from megatron_balance.analysis.memory import Holding, Sharding, rank_memory
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.cost.base import Ints
from megatron_balance.cost.parallel import all_gather_s
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.papers.base import Effort, Ours, number, paper
from megatron_balance.lab.papers.distca_systems import (
    DATASETS,
    ROUNDS,
    TENSOR,
    TOLERANCE,
    DistcaCase,
    deal,
    degrees,
    distca_s,
    document_s,
    flexsp_s,
    group_on,
    layer_s,
    megatron_s,
    per_document,
    wlb_by_config,
    wlb_s,
)
from megatron_balance.simulator.attention import linear_s
from megatron_balance.simulator.ping_pong import PingPongMode
from megatron_balance.workloads.distributions import K
from megatron_balance.workloads.lengths import Lengths

TOKENS_PER_NODE = 128 * K


def _fig3(_: Effort) -> Ours:
    """Share of gathering keys and values in a layer's time and memory (8B, documents of 32K)."""
    for degree in (2, 4, 8, 16, 32):
        case = DistcaCase("8B", degree, degree * TOKENS_PER_NODE, 32 * K)
        share = per_document([32 * K] * (case.num_tokens // (32 * K)), degree)
        gather_s = all_gather_s(case.cost.kv_bytes(float(TOKENS_PER_NODE)), group_on(case, degree))
        yield f"{degree} nodes: all-gather", gather_s / layer_s(case, share)[0]
        sharding, others = Sharding(TENSOR, optimizer=degree), case.num_tokens - TOKENS_PER_NODE
        held = rank_memory(case.model, TOKENS_PER_NODE, others, sharding, Holding())
        yield f"{degree} nodes: gathered keys", held.received / held.total


def _fig4(effort: Effort) -> Ours:
    """Documents dealt to replicas by work, without limit and within memory (8B, chunks of 512K)."""
    # Without context parallelism. The memory's limit is the most tokens of a rank over the mean
    # that balance asks for, as printed.
    for replicas in effort.progress([2, 4, 8], "fig4"):
        case = DistcaCase("8B", replicas, replicas * 512 * K, 512 * K)
        tokens: list[float] = []
        idle: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            work = [document_s(case, n) for n in batch]
            loads: list[list[float]] = []
            for limit in (inf, number("distca", "fig4", "diverges") * case.tokens_per_rank):
                bins = deal(work, [float(n) for n in batch], replicas, limit)
                if bins is not None:
                    loads.append([sum(work[i] for i in each) for each in bins])
                    if limit == inf:
                        tokens.append(max(sum(batch[i] for i in each) for each in bins) / case.tokens_per_rank)
            idle.append((max(loads[-1]) - fmean(loads[-1]), max(loads[-1])))
        name = f"data parallelism {replicas}"
        yield f"{name}: most tokens over the mean", fmean(tokens)
        yield f"{name}: idle", sum(idle_s for idle_s, _ in idle) / sum(all_s for _, all_s in idle)


def fig5(effort: Effort) -> Ours:
    """Rate of the kernel on 32K tokens in shards of one length, contexts drawn, over that at 4K."""
    case, generator = DistcaCase("8B", 8, 1024 * K, 128 * K), np.random.default_rng(0)
    rates: dict[int, float] = {}
    for length in (32, 64, 128, 256, 512, 1024, 4096):
        count = 32 * K // length
        each: list[float] = []
        for _ in range(effort.batches):
            pairs = np.zeros((count, Pair.WIDTH), dtype=np.int64)
            stop = length + generator.integers(0, 32 * K, count)
            pairs[:, Pair.Q_START], pairs[:, Pair.Q_STOP], pairs[:, Pair.K_STOP] = stop - length, stop, stop
            pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = case.model.num_heads, case.model.num_kv_heads
            seconds = case.cost.attend_s(pairs, np.zeros(count, dtype=np.int64), 1)[0]
            each.append(float((length * (stop - length + (length + 1) / 2)).sum() / seconds))
        rates[length] = fmean(each)
    return ((f"shards of {n}", rate / rates[4096]) for n, rate in rates.items())


def _fig6(effort: Effort) -> Ours:
    """Documents dealt to replicas and cut in their groups (8B, 64 GPUs, chunks of 512K)."""
    case = DistcaCase("8B", 8, 1024 * K, 512 * K)
    samples: dict[int, list[float]] = {degree: [] for degree in degrees(8)}
    for batch in case.batches("pretrain", effort.batches):
        by_degree: dict[int, float] = {}
        for config, seconds in wlb_by_config(case, batch).items():
            by_degree[config.degree] = min(seconds, by_degree.get(config.degree, inf))
        for degree, seconds in by_degree.items():
            samples[degree].append(case.num_tokens / seconds / 8 / TENSOR)
    for degree, each in samples.items():
        yield f"DP {8 // degree}, CP {degree}", fmean(each) if each else 0.0, f"{len(each)} batches fit"


# Appendix A: into how many shards a document may be cut before its keys no longer hide behind the
# layers outside attention.
BYTES_PER_S = 50e9
MFU = 0.5
FLOPS_PER_S = 990e12


def _bound(token_s: float, model: Model, kv_tensors: int) -> float:
    """The largest s for which l h_q + l h_kv (s + 1) / 2 travels within the time of l tokens."""
    # h_kv counts `kv_tensors` tensors.
    size_q = model.num_heads * model.head_dim * model.bytes_per_element
    size_kv = kv_tensors * model.num_kv_heads * model.head_dim * model.bytes_per_element
    return 2 * (token_s * BYTES_PER_S - size_q) / size_kv - 1


def _appendix_a(_: Effort) -> Ours:
    model = DistcaCase("34B", 8, 512 * K, 128 * K).model
    hidden, kv_hidden, inner = model.hidden_size, model.num_kv_heads * model.head_dim, model.ffn_size
    flops = 2.0 * hidden * (2 * hidden + kv_hidden + 3 * inner)
    both = 2.0 * hidden * (2 * hidden + 2 * kv_hidden + 3 * inner)
    token_s, both_s = (each / (MFU * FLOPS_PER_S) for each in (flops, both))
    yield "FLOPs of a token outside attention", flops
    yield "seconds of a token", token_s
    yield "shards, by the printed formula", _bound(token_s, model, 1)
    yield "shards, keys and values both counted", _bound(both_s, model, 2)


# Figures 9 and 10 and section 6.2: speedup over Megatron, FlexSP and WLB-LLM without pipelines, on
# the grid of Table 4; over Megatron and WLB-LLM with pipelines, on that of Table 5.
Sizes = Mapping[tuple[str, int], Sequence[int]]
"""Batch size by number of nodes, by model and MaxDocLen in K."""

TABLE_4: Sizes = {
    ("8B", 128): (8, 16, 32),
    ("8B", 256): (4, 8, 16),
    ("8B", 512): (2, 4, 8),
    ("34B", 128): (4, 8, 16),
    ("34B", 256): (2, 4, 8),
    ("34B", 512): (2, 4, 8),
}

TABLE_5: Sizes = {
    ("8B", 128): (32, 64, 128),
    ("8B", 256): (16, 32, 32),
    ("8B", 512): (8, 8, 16),
    ("34B", 128): (32, 64, 128),
    ("34B", 256): (16, 32, 32),
    ("34B", 384): (8, 8, 16),
}

NODES = {"8B": (8, 16, 32), "34B": (8, 16, 32)}
NODES_5 = {"8B": (8, 16, 32), "34B": (16, 32, 64)}
STAGES = (1, 2, 4)
"""Of Figure 10's pipelines."""

GREEDY = "FlexSP's groups, greedy"
Seconds = Callable[[DistcaCase, Sequence[int]], float]
Speedups = dict[tuple[DistcaCase, str], dict[str, float]]
"""By configuration and data set, DistCA's speedup over each of the others; infinite: one that does not
fit the memory."""


def grid(sizes: Sizes, nodes: Mapping[str, Sequence[int]], stages: tuple[int, ...] = (1,)) -> list[DistcaCase]:
    return [
        DistcaCase(model, num_nodes, size * longest * K, longest * K, stages)
        for (model, longest), by_nodes in sizes.items()
        for num_nodes, size in zip(nodes[model], by_nodes, strict=True)
    ]


def _speedups(effort: Effort, name: str, cases: Sequence[DistcaCase], others: Mapping[str, Seconds]) -> Speedups:
    """Mean time over mean time, with both data sets."""
    found: Speedups = {}
    for case, dataset in effort.progress(list(product(cases, DATASETS)), name):
        batches = case.batches(dataset, effort.batches)
        ours_s = fmean(distca_s(case, batch) for batch in batches)
        found[case, dataset] = {
            of: fmean(each(case, batch) for batch in batches) / ours_s for of, each in others.items()
        }
    return found


def _cells(found: Speedups) -> Ours:
    for (case, dataset), each in found.items():
        cell = f"{case.model_name}, {case.max_doc // K}K, {8 * case.num_nodes} GPUs, {DATASETS[dataset]}"
        yield from ((f"{cell}: over {system}", ratio) for system, ratio in each.items() if ratio < inf)


def fig9(effort: Effort) -> Ours:
    others: dict[str, Seconds] = {"Megatron": megatron_s, GREEDY: flexsp_s, "WLB-ideal": wlb_s}
    found = _speedups(effort, "fig9", grid(TABLE_4, NODES), others)
    for system in others:
        finite = [each[system] for each in found.values() if each[system] < inf]
        left = len(found) - len(finite)
        yield (
            f"over {system}, largest",
            max(finite),
            f"without {left} configurations that do not fit the memory" if left else "",
        )
        yield f"over {system}, mean", fmean(finite)
    yield from _cells(found)


def fig10(effort: Effort) -> Ours:
    """Speedups with pipelines, model by model."""
    others: dict[str, Seconds] = {"Megatron": megatron_s, "WLB-ideal": wlb_s}
    found = _speedups(effort, "fig10", grid(TABLE_5, NODES_5, STAGES), others)
    for model, system in product(NODES_5, others):
        finite = [each[system] for (case, _), each in found.items() if case.model_name == model and each[system] < inf]
        yield f"{model}: over {system}, largest", max(finite)
        yield f"{model}: over {system}, mean", fmean(finite)
    yield from _cells(found)


# Appendix E, Tables 6 and 7: splitting and merging of tensors, and the bandwidth that hides all
# exchanges.
TABLE_6 = (("8B", 8), ("8B", 16), ("8B", 32), ("34B", 16), ("34B", 32), ("34B", 64))
"""Model and nodes."""

TABLE_7 = (
    *(("8B", 2, 8, 0.15), ("8B", 4, 16, 0.05), ("8B", 8, 32, 0.05)),
    *(("34B", 2, 8, 0.10), ("34B", 4, 16, 0.05), ("34B", 8, 32, 0.05)),
)
"""Model, batch size, nodes, tolerance."""


def received(plan: MicrobatchPlan, case: DistcaCase) -> tuple[Ints, Ints]:
    """Bytes that reach each rank in a layer's forward pass: queries, keys and values; outputs."""
    report = plan_statistics(plan, case.model)
    of_token = int(case.cost.query_bytes(1))
    queries, keys = (np.array(report[f"{what}_tokens_received_per_rank"], dtype=np.int64) for what in ("query", "kv"))
    outputs = np.array(report["partial_tokens_received_per_rank"], dtype=np.int64)
    return queries * of_token + keys * int(case.cost.kv_bytes(1)), outputs * of_token


def table6(effort: Effort) -> Ours:
    """Share of the time of all layers that splitting and merging take, tokens as in Table 4."""
    for model, nodes in effort.progress(list(TABLE_6), "table6"):
        per_node = TABLE_4[model, 128][0] * 128 * K // 8
        case = DistcaCase(model, nodes, nodes * per_node, 128 * K)
        # A pass over all of a rank's tensors forward, and one over their gradients backward.
        of_all = (per_node * (case.cost.query_bytes(1) + case.cost.kv_bytes(1)), per_node * case.cost.query_bytes(1))
        shares: list[list[float]] = []
        for batch in case.batches("pretrain", effort.batches):
            seconds = sum(case.passes_s(batch))
            parts = [received(nano_batch, case) for nano_batch in case.ping_pong(batch)]
            # Out of the sender's tensors and into the receiver's.
            travels = [2 * sum(part[i].sum() for part in parts) / nodes for i in (0, 1)]
            layers = 2 * case.model.num_layers
            shares.append([100 * layers * case.cost.pack_s(each) / seconds for each in (*of_all, *travels)])
        for what, each in zip(
            ("QKV", "O", "QKV, what travels", "O, what travels"), zip(*shares, strict=True), strict=True
        ):
            yield f"{model}, {nodes} nodes: {what}", fmean(each)


def table7(effort: Effort) -> Ours:
    """Bytes per second and GPU that hide all exchanges, documents of up to 512K."""
    for model, size, nodes, tolerance in effort.progress(list(TABLE_7), "table7"):
        case = DistcaCase(model, nodes, size * 512 * K, 512 * K)
        rates: list[tuple[float, float]] = []
        for batch in case.batches("pretrain", effort.batches):
            nano_batches = case.ping_pong(batch, tolerance)
            if len(nano_batches) == 2:
                both = [_rates(case, nano_batches[i], nano_batches[1 - i]) for i in (0, 1)]
                rates.append((max(each for each, _ in both), max(each for _, each in both)))
        name = f"{model}, {nodes} nodes, tolerance {tolerance:g}"
        outside, covered = (fmean(each) / 1e9 for each in zip(*rates, strict=True))
        yield name, outside
        yield f"{name}, beside attention too", covered


def _rates(case: DistcaCase, moving: MicrobatchPlan, computing: MicrobatchPlan) -> tuple[float, float]:
    """Bytes per second and GPU, beside the modules outside attention, and beside attention too."""
    inputs, outputs = received(moving, case)
    pairs = np.array(plan_statistics(computing, case.model)["attention_pairs_per_rank"], dtype=np.float64)
    outside = linear_s(computing, case.machine)[0]
    meanwhile = outside + np.array([case.cost.attention_s(n) for n in pairs.tolist()])
    most = float((inputs + outputs).max()) / TENSOR
    return most / float(outside.min()), most / float(meanwhile.min())


# Figure 11: latency with hidden exchanges, with exchanges of one byte ("Signal"), and on a single
# stream; Figure 12: what the tolerance costs in time and saves in bytes. 8B and 34B on 8 and 16
# nodes, Pretrain, documents of up to 128K.
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
TOKENS = {"8B": 1024 * K, "34B": 512 * K}
SIGNAL = PingPongMode(engine="rounds", signal=True)
SINGLE = PingPongMode(engine="rounds", interleaved=False)


def _panels() -> list[DistcaCase]:
    """The four panels; the tokens are those of 8 nodes, twice as many on 16."""
    return [DistcaCase(model, nodes, TOKENS[model] * nodes // 8, 128 * K) for model in TOKENS for nodes in (8, 16)]


def _fig11(effort: Effort) -> Ours:
    """Both ablations over DistCA as it is, for each panel."""
    for case in effort.progress(_panels(), "fig11"):
        batches = case.batches("pretrain", effort.batches)
        whole, signal, single = (
            fmean(sum(case.passes_s(batch, TOLERANCE, way)) for batch in batches) for way in (ROUNDS, SIGNAL, SINGLE)
        )
        name = f"{case.model_name}, {case.num_nodes} nodes"
        yield f"{name}: DistCA over Signal", whole / signal
        yield f"{name}: lost on a single stream, at least", single / whole - 1
        yield f"{name}: lost on a single stream, at most", single / whole - 1


def _measure(case: DistcaCase, batches: list[Lengths], tolerance: float) -> tuple[float, float]:
    """Seconds of the layers, and the mean bytes that a rank receives in a layer's forward pass."""
    seconds: list[float] = []
    received: list[float] = []
    for batch in batches:
        statistics = (plan_statistics(nano_batch, case.model) for nano_batch in case.ping_pong(batch, tolerance))
        seconds.append(sum(case.passes_s(batch, tolerance)))
        received.append(sum(fmean(each["bytes_received_per_rank"]["total"]) for each in statistics))
    return fmean(seconds), fmean(received)


def _fig12(effort: Effort) -> Ours:
    """Bytes and time relative to tolerance 0, for every panel."""
    for case in effort.progress(_panels(), "fig12"):
        batches = case.batches("pretrain", effort.batches)
        base_s, base_bytes = _measure(case, batches, 0.0)
        for tolerance in TOLERANCES[1:]:
            seconds, received = _measure(case, batches, tolerance)
            label = f"{case.model_name}, {case.num_nodes} nodes, tolerance {tolerance:g}"
            yield f"{label}: bytes saved", 1 - received / base_bytes
            yield f"{label}: time", seconds / base_s


PAPER = paper(
    "distca",
    "DistCA: Efficient Long-context Language Model Training by Core Attention Disaggregation",
    {
        "fig3": _fig3,
        "fig4": _fig4,
        "fig5": fig5,
        "fig6": _fig6,
        "fig9": fig9,
        "fig10": fig10,
        "fig11": _fig11,
        "fig12": _fig12,
        "appendixa": _appendix_a,
        "table6": table6,
        "table7": table7,
    },
)

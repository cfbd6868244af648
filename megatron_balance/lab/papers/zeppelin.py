"""Zeppelin (arXiv 2509.21841, EuroSys 2026): what its text, tables and captions print beside ours.

What is only drawn has no number. Where ours differ by more than 20 %,
docs/reproduce-zeppelin.md says why.

`keep` is the policy of all systems: Transformer Engine's backward ring brings keys and values again
and carries their gradients, both in bf16 (section 5.4.1: 4.41 ms a round, twice the forward's). Our
gradients travel in fp32, so holding the keys and values moves the same bytes.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any, cast

import numpy as np

from megatron_balance.compile.order import LEGS
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost import kernel
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats, Link
from megatron_balance.cost.kernel import BLOCK_TILES, TILE_TOKENS
from megatron_balance.cost.modules import ExpertLoad
from megatron_balance.cost.parallel import all_to_all_s, group_of, wide_ranks
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import When
from megatron_balance.lab.papers.base import Effort, Ours, Published, SimulatedCase, number, paper
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.baselines import redundant_pairs
from megatron_balance.planning.choice import choose_layers, choose_planner
from megatron_balance.simulator.attention import BothPhases, Outcome, attention_call, events, linear_s
from megatron_balance.simulator.step import Setup, simulate_step
from megatron_balance.workloads.distributions import DISTRIBUTIONS, Bins, K
from megatron_balance.workloads.lengths import Lengths, draw

TOKENS_PER_GPU = 4 * K
DATASETS = {"arxiv": "ArXiv", "github": "GitHub", "prolong64k": "ProLong64k"}
SEED = 0


@dataclass(frozen=True)
class ZeppelinCase(SimulatedCase):
    """A model on GPUs, 4k tokens each; `tensor`: GPUs of a group, `experts`: ranks that share them."""

    model_name: str
    cluster_name: str
    num_gpus: int
    tensor: int = 1
    experts: int = 1
    expert_load: ExpertLoad | None = None

    @cached_property
    def cost(self) -> AnalyticCost:
        model = load_model(self.model_name)
        machine = load_cluster(self.cluster_name).build(num_ranks=self.num_gpus)
        cluster = wide_ranks(machine.with_kernel("flash_attn"), self.tensor)  # 2.4.3, section 5
        return AnalyticCost(cluster, model, self.tensor, pads=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of a batch, the total context length."""
        return self.num_gpus * TOKENS_PER_GPU

    @property
    def setup(self) -> Setup:
        return Setup(policy="keep", experts=self.experts, expert_load=self.expert_load)

    def batches(self, dataset: str, count: int) -> list[Lengths]:
        """Documents until the context is full, the last one cut."""
        return draw(dataset, self.num_tokens, count, SEED)


@dataclass(frozen=True, slots=True)
class _ZeppelinSystem:
    """A planner with its options and the layers around it."""

    name: str
    planner: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    routing: When | None = None
    remap: bool | None = None

    def plans(self, case: ZeppelinCase, lengths: Sequence[int]) -> tuple[MicrobatchPlan, ...]:
        """The microbatches of a step: one, unless the system makes its own."""
        choice = choose_planner(
            self.planner, self.options, layers=choose_layers(self.planner, self.routing, self.remap)
        )
        return choice.plan_step((tuple(lengths),), StepContext(case.cluster, case.model, case.cost))[0].plans

    def step_s(self, case: ZeppelinCase, lengths: Sequence[int]) -> float:
        return simulate_step(self.plans(case, lengths), case.machine, case.setup).step_s


TE = _ZeppelinSystem("TE CP", "te_ring")
TE_ROUTED = _ZeppelinSystem("TE CP, routed", "te_ring", routing="always")
LLAMA = _ZeppelinSystem("LLaMA CP", "llama_all_gather")
HYBRID = _ZeppelinSystem("Hybrid DP", "hybrid_dp")
PRINTED: dict[str, Any] = {"rule": "paper"}
ENGINE = _ZeppelinSystem("Zeppelin's engine", "zeppelin", PRINTED, routing="never", remap=False)
ENGINE_ROUTED = _ZeppelinSystem("engine and routing", "zeppelin", PRINTED, routing="always", remap=False)
ZEPPELIN = _ZeppelinSystem("Zeppelin", "zeppelin", PRINTED, routing="always", remap=True)
OURS = _ZeppelinSystem("zeppelin, rule groups", "zeppelin", {"rule": "groups"})
DEFAULT = _ZeppelinSystem("zeppelin, default", "zeppelin")


def tokens_per_s(system: _ZeppelinSystem, case: ZeppelinCase, batches: Sequence[Lengths]) -> float:
    return sum(map(sum, batches)) / sum(system.step_s(case, lengths) for lengths in batches)


def _table2(_: Effort) -> Ours:
    """The sum of each row, and shares that are not 0; printed are the numbers that we draw from."""
    for dataset, name in DATASETS.items():
        bins = cast("Bins", DISTRIBUTIONS[dataset])
        total = sum(bins.shares)
        yield f"{name}: sum of the row", sum(share / total for share in bins.shares), Published(round(total, 6))
        for (low, high), share in zip(pairwise(bins.edges), bins.shares, strict=True):
            if share:
                span = "< 1k" if high == K else f"{low // K}k - {high // K}k"
                yield f"{name}: {span}", share / total, Published(share)


# Figure 12 and section 5.4.1: one attention call of the 3B model on 16 GPUs of cluster A, 64k
# tokens, as traced by its authors.
#
# The lengths of "multiple small sequences" are not printed. Assumed: one that fills a node, since a
# ring of eight rounds is traced on rank 0, and four on the other node.
SINGLE = (64 * K,)
SEVERAL = (32 * K, 16 * K, 8 * K, 4 * K, 4 * K)
SEVERAL_ROUNDS = 8
# The rank that receives from the other node.
ACROSS = 8


def _call_of(case: ZeppelinCase, system: _ZeppelinSystem, lengths: Sequence[int]) -> BothPhases:
    """One attention call on the event engine, traced."""
    plan, enter = system.plans(case, lengths)[0], np.zeros(case.cluster.num_ranks)
    return events(plan, case.machine, "keep", (enter, enter), trace=True)


def _leg_ms(outcome: Outcome, rank: int, leg: str, stream: str) -> float:
    """The usual time of a leg of the exchanges on a rank's stream."""
    took = [
        each.stop_s - each.start_s
        for each in outcome.occupied
        if (each.rank, each.what) == (rank, leg) and each.track.startswith(stream)
    ]
    return 1e3 * median(took)


def serial_round_s(case: ZeppelinCase, num_tokens: float, longest: float, *, backward: bool = False) -> float:
    """Seconds of a routed round whose legs follow one another (Eq. 1), each after a thread block."""
    # `num_tokens`: whose keys and values go round; `longest`: keys that a block goes through at
    # most.
    cluster, cost = case.cluster, case.cost
    nics = -(-cluster.node_size // cluster.ranks_per_nic)
    num_bytes = cost.kv_bytes(num_tokens) * (2 if backward else 1)  # gradients travel in fp32
    inside = cost.link(inter_node=False).time_s(num_bytes * (nics - 1) / nics)
    across = cost.link(inter_node=True).time_s(num_bytes / nics)
    block_s = cost.block_s(longest / TILE_TOKENS + BLOCK_TILES)
    block_s *= kernel.law_of(None).backward_factor if backward else 1.0
    return 2 * inside + across + len(LEGS) * (cost.call_s + block_s)


def serial_routing_s(case: ZeppelinCase, lengths: Sequence[int]) -> float:
    """The step of TE's ring, routed, if legs followed one another and rounds waited for them."""
    plan, size = TE.plans(case, lengths)[0], case.cluster.num_ranks
    step = simulate_step((plan,), case.machine, case.setup)
    attention_s = 0.0
    for outcome, backward in zip(attention_call(plan, case.machine), (False, True), strict=True):
        computes = float(outcome.compute_s.max()) / size
        moves = serial_round_s(case, sum(lengths) / size, max(lengths) / size, backward=backward)
        attention_s += (size - 1) * max(computes, moves) + computes
    own_s = step.phases_s["forward_attention"] + step.phases_s["backward_attention"]
    return step.step_s - own_s + case.model.num_layers * attention_s


def _fig12(_: Effort) -> Ours:
    """The rounds of the three traces, and their sums."""
    case = ZeppelinCase("llama-3b", "a800", 16)
    ring, routed = _call_of(case, TE, SINGLE), _call_of(case, TE_ROUTED, SINGLE)
    several = _call_of(case, ZEPPELIN, SEVERAL)
    size, tokens = case.cluster.num_ranks, SINGLE[0] / case.cluster.num_ranks
    a, b = "a) TE CP: inter-node transfer of a round", "b) routed: "
    yield f"{a}, forward", _leg_ms(ring.forward, ACROSS, "direct", "inter_node")
    yield f"{a}, backward", _leg_ms(ring.backward, ACROSS - 1, "direct", "inter_node")
    yield f"{b}inter-node leg of a round, forward", _leg_ms(routed.forward, ACROSS, "across", "inter_node")
    nics = case.cluster.node_size // case.cluster.ranks_per_nic
    yield "b) the same, at least, by Eq. 1 from 2.18 ms", number("zeppelin", "fig12", "round_ms") / nics
    yield f"{b}a round, forward", 1e3 * float(routed.forward.end_s.max()) / size
    yield f"{b}a round whose legs follow one another", 1e3 * serial_round_s(case, tokens, tokens)
    for phase, outcome in zip(("forward", "backward"), several, strict=True):
        yield f"c) several sequences: a round on rank 0, {phase}", 1e3 * float(outcome.end_s[0]) / SEVERAL_ROUNDS
    # both phases, on rank 0
    total, zeppelin = (1e3 * float(call.forward.end_s[0] + call.backward.end_s[0]) for call in (ring, several))
    yield "a) TE CP: attention, forward and backward", total
    yield "c) several sequences: the same", zeppelin
    yield "a) over c)", total / zeppelin


# Figure 3 and section 2.3: where the cost of attention goes, by length of sequence.
#
# Two nodes of 8 A800, 64k tokens.
#
# The figure draws shares for six data sets and prints one number: redundant attention and
# communication reach 60 % for sequences below 1k in StackExchange, whose lengths are not printed.
# `commoncrawl` (620 tokens a document on average) stands in for it. The model is not named; 3B is
# taken, which the paper traces on the same two nodes (section 5.4.1). Forward and backward are
# added.
RANGES = {"< 1k": (0, K), "1k - 4k": (K, 4 * K), "4k - 16k": (4 * K, 16 * K), "16k - 64k": (16 * K, 64 * K)}
STAND_IN = "commoncrawl"
SHOWN = {**DATASETS, STAND_IN: "CommonCrawl"}


# Columns of shares of the cost of attention [..., 3]: needed; across sequences, so in vain; and
# waiting for other ranks.
VAIN, WAITING = 1, 2


def _fig3(effort: Effort) -> Ours:
    """Shares that packing wastes, and that even splitting waits, by data set and range of lengths."""
    case = ZeppelinCase("llama-3b", "a800", 16)
    packed: dict[str, dict[str, Floats]] = {}
    split: dict[str, dict[str, Floats]] = {}
    for dataset in effort.progress(list(SHOWN), "fig3"):
        batches = case.batches(dataset, effort.batches)
        packed[dataset] = _by_range(batches, [_packing_shares(case, lengths) for lengths in batches])
        split[dataset] = _by_range(batches, [_even_shares(case, lengths) for lengths in batches])
    worst = packed[STAND_IN]["< 1k"]
    yield "a) packing, < 1k, many short sequences: in vain or waiting", float(worst[VAIN] + worst[WAITING])
    for dataset, label in SHOWN.items():
        for name, share in packed[dataset].items():
            yield f"a) packing, {label} {name}: in vain", float(share[VAIN])
            yield f"a) packing, {label} {name}: waiting", float(share[WAITING])
    for dataset, label in SHOWN.items():
        for name, share in split[dataset].items():
            yield f"b) even CP, {label} {name}: waiting", float(share[WAITING])


def _packing_shares(case: ZeppelinCase, lengths: Sequence[int]) -> Floats:
    """Each sequence's part where all are one causal sequence: by pairs, waiting by tokens."""
    computing, waiting = _call_s(case, (sum(lengths),))
    needed = np.array([CAUSAL.num_pairs(n) for n in lengths], dtype=np.float64)
    redundant = np.array(redundant_pairs(lengths), dtype=np.float64)
    pair_s = computing / float((needed + redundant).sum())
    return np.column_stack([needed * pair_s, redundant * pair_s, np.array(lengths) * waiting / sum(lengths)])


def _even_shares(case: ZeppelinCase, lengths: Sequence[int]) -> Floats:
    """Each sequence's part where every one is split evenly over all ranks."""
    computing, waiting = _call_s(case, lengths)
    size = 2 * case.cluster.num_ranks
    work = np.array([case.cost.attention_s(CAUSAL.num_pairs(n), max(1.0, n / size)) for n in lengths])
    needed = computing * work / work.sum()
    return np.column_stack([needed, np.zeros(len(lengths)), np.array(lengths) * waiting / sum(lengths)])


def _call_s(case: ZeppelinCase, lengths: Sequence[int]) -> tuple[float, float]:
    """Seconds of an attention call that ranks compute (their mean), and the rest."""
    call = attention_call(TE.plans(case, lengths)[0], case.machine)
    computing = sum(float(outcome.compute_s.mean()) for outcome in call)
    return computing, sum(float(outcome.end_s.max()) for outcome in call) - computing


def _by_range(batches: Sequence[Lengths], shares: Sequence[Floats]) -> dict[str, Floats]:
    """Summed over the sequences of each range, as shares of all."""
    lengths, each = np.concatenate(batches), np.concatenate(shares)
    within = {name: (low < lengths) & (lengths <= high) for name, (low, high) in RANGES.items()}
    return {name: each[own].sum(axis=0) / each.sum() for name, own in within.items()}


# Figure 5: where attention on one GPU takes as long as moving the keys and values, which bounds the
# three zones.
#
# The figure draws three curves and prints no boundary, nor which model it is. Ours are closed forms
# of the cost model.
FIG5_MODELS = {"3B": "llama-3b", "7B": "llama-7b"}
ZONES = ("local", "intra-node", "inter-node")


def _boundary(case: ZeppelinCase, link: Link) -> int:
    """The shortest sequence whose attention takes as long as its keys and values on `link`."""
    length = TILE_TOKENS
    while case.cost.attention_s(CAUSAL.num_pairs(length), length) < link.time_s(case.cost.kv_bytes(length)):
        length += TILE_TOKENS
    return length


def _fig5(_: Effort) -> Ours:
    """The boundaries, and how the tokens of each data set fall into the zones."""
    cases = {label: ZeppelinCase(model, "a800", 16) for label, model in FIG5_MODELS.items()}
    for label, case in cases.items():
        intra, inter = (case.cost.link(inter_node=inter) for inter in (False, True))
        doubled = Link(intra.alpha_s, 2 * intra.bytes_per_s)
        yield f"{label}: local / intra-node, NVLink at 400 GB/s", _boundary(case, doubled)
        yield f"{label}: local / intra-node, at 200 GB/s", _boundary(case, intra)
        yield f"{label}: intra-node / inter-node, a NIC at 200 Gb/s", _boundary(case, inter)
    case = cases["7B"]
    limits = [_boundary(case, case.cost.link(inter_node=inter)) for inter in (False, True)]
    for dataset, label in DATASETS.items():
        shares = _token_shares(cast("Bins", DISTRIBUTIONS[dataset]), limits)
        yield from ((f"{label}: in the {zone} zone of 7B", each) for zone, each in zip(ZONES, shares, strict=True))


def _token_shares(bins: Bins, limits: Sequence[int]) -> list[float]:
    """The share of a distribution's tokens in sequences up to each limit, and above the last one."""
    edges = [float(bins.edges[0]), *(float(limit) for limit in limits), float(bins.edges[-1])]
    tokens = [_tokens(low, high, bins) for low, high in pairwise(edges)]
    return [each / sum(tokens) for each in tokens]


def _tokens(low: float, high: float, bins: Bins) -> float:
    """Tokens in documents of `low` to `high`, in proportion; lengths are even inside a bin."""
    start, stop = np.array(bins.edges[:-1]), np.array(bins.edges[1:])
    first, last = np.clip(start, low, high), np.clip(stop, low, high)
    return float((np.array(bins.shares) * (last**2 - first**2) / 2 / (stop - start)).sum())


# Figure 8 and section 5.1: speedup over Transformer Engine's ring for four models, three data sets
# and three context lengths.
#
# What is not printed and assumed: the MoE model runs on cluster A, eight ranks share a layer's
# experts; a context of 64k with tensor parallelism 2 is on 16 GPUs all the same ("4k per GPU"), so
# a tensor-parallel group holds 8k tokens.
CONTEXTS = (64 * K, 128 * K, 256 * K)
SYSTEMS = (TE, LLAMA, HYBRID, ZEPPELIN, OURS, DEFAULT)

# Routing to experts: documents that prefer some, and as much as two of eight experts a token allow;
# an expert that all prefer.
UNEVEN = {
    "documents apart by 1": ExpertLoad(spread=1.0),
    "documents apart by 1.73": ExpertLoad(spread=1.73),
    "one expert 3 times as busy": ExpertLoad.counted((3, 1, 1, 1, 1, 1, 1, 1)),
}


# Models of the figure as the paper labels them, on the GPUs that the first context fills.
MOE = "8x550M"
MODELS = {
    "7B": ZeppelinCase("llama-7b", "a800", 16),
    "13B": ZeppelinCase("llama-13b", "a800", 16, tensor=2),
    "30B": ZeppelinCase("llama-30b", "h200", 16, tensor=2),
    MOE: ZeppelinCase("moe-8x550m", "a800", 16, experts=8),
}
# Label of a model, context length, data set.
Cell = tuple[str, int, str]


def _speedups(case: ZeppelinCase, batches: list[Lengths]) -> dict[str, float]:
    """Throughput of every system over that of TE's ring."""
    seconds = {system.name: sum(system.step_s(case, lengths) for lengths in batches) for system in SYSTEMS}
    return {name: seconds[TE.name] / each for name, each in seconds.items()}


def _fig8(effort: Effort) -> Ours:
    """Each cell of the grid, then what the text says of all."""
    by_cell: dict[Cell, dict[str, float]] = {}
    uneven: dict[str, list[dict[str, float]]] = {label: [] for label in UNEVEN}
    for model, context in effort.progress(list(product(MODELS, CONTEXTS)), "fig8"):
        case = replace(MODELS[model], num_gpus=context // TOKENS_PER_GPU)
        for dataset in DATASETS:
            batches = case.batches(dataset, effort.batches)
            by_cell[model, context, dataset] = _speedups(case, batches)
            if (model, context) == (MOE, CONTEXTS[0]):
                for label, load in UNEVEN.items():
                    uneven[label].append(_speedups(replace(case, expert_load=load), batches))
    for (model, context, dataset), each in by_cell.items():
        cell = f"{model}, {context // K}k, {DATASETS[dataset]}"
        yield cell, each[ZEPPELIN.name]
        yield f"{cell}: zeppelin, default", each[DEFAULT.name]
    yield from _summary(by_cell)
    yield from _claims(by_cell)
    for label, found in uneven.items():
        for system in (ZEPPELIN, DEFAULT) if found else ():
            yield f"8x550M, 64k, {label}: LLaMA CP over {system.name}", _ahead(found, LLAMA.name, system.name)


def _ahead(found: Sequence[Mapping[str, float]], system: str, over: str) -> float:
    """One system's mean speedup over another's."""
    return fmean(each[system] for each in found) / fmean(each[over] for each in found)


def _summary(by_cell: Mapping[Cell, Mapping[str, float]]) -> Ours:
    cells = list(by_cell.values())
    names = {"Zeppelin": ZEPPELIN, "zeppelin with rule groups": OURS, "zeppelin by default": DEFAULT}
    for name, system in names.items():
        yield f"{name} over TE CP, mean", fmean(each[system.name] for each in cells)
        yield f"{name} over TE CP, largest", max(each[system.name] for each in cells)
    yield "zeppelin by default over Zeppelin, smallest", min(each[DEFAULT.name] / each[ZEPPELIN.name] for each in cells)
    for system in (HYBRID, LLAMA):
        yield f"{system.name} over TE CP, mean", fmean(each[system.name] for each in cells)


def _claims(by_cell: Mapping[Cell, Mapping[str, float]]) -> Ours:
    """Claims of the text without a number, each as a ratio that should be above or below 1."""

    def mean(model: str, dataset: str | None = None) -> float:
        return fmean(each[ZEPPELIN.name] for (m, _, d), each in by_cell.items() if m == model and dataset in (None, d))

    def ahead(system: str, over: str, context: int) -> float:
        return _ahead([each for (m, at, _), each in by_cell.items() if (m, at) == (MOE, context)], system, over)

    longest, shortest = CONTEXTS[-1], CONTEXTS[0]
    others = (TE.name, LLAMA.name, HYBRID.name)
    yield "7B: speedup on ArXiv over that on GitHub", mean("7B", "arxiv") / mean("7B", "github")
    yield "speedup of 13B over that of 7B, mean", mean("13B") / mean("7B")
    yield "8x550M, 64k: LLaMA CP over Zeppelin", ahead(LLAMA.name, ZEPPELIN.name, shortest)
    yield "8x550M, 256k: Zeppelin over LLaMA CP", ahead(ZEPPELIN.name, LLAMA.name, longest)
    best = min(
        each[ZEPPELIN.name] / max(each[name] for name in others)
        for (model, context, _), each in by_cell.items()
        if (model, context) != (MOE, shortest)
    )
    yield "Zeppelin over the best of the others, smallest", best


# Table 3 and section 5.4.2: the range over ranks of what a step's forward and backward take. 7B,
# four nodes of cluster C, 128k tokens.
#
# The lengths are not printed. "The Balanced distribution samples sequences from each bucket in
# Table 2": here the upper end of each bucket up to 64k, which add up to 127k, and 1k more. "One
# very long sequence and several short ones": here 112k, which needs four nodes (all ranks of the
# table take as long), and four of 4k. Of a rank's parts each is its own time, without waiting for
# slower ranks of other zones; parts of a layer are counted as often as there are layers.
BALANCED = (64 * K, 32 * K, 16 * K, 8 * K, 4 * K, 2 * K, K, K)
SKEWED = (112 * K, *(4 * K,) * 4)

PARTS = (
    *("forward", "forward, attention", "forward, linear modules", "forward, remapping"),
    *("forward, sequence partition", "backward"),
)

REPEATS = 5


def _table3(_: Effort) -> Ours:
    """The smallest and the largest rank of every row, then closed forms of the paper's own way."""
    case = ZeppelinCase("llama-7b", "h200", 32)
    of_batch = {"balanced": _parts(case, BALANCED), "skewed": _parts(case, SKEWED)}
    for part in PARTS:
        for name, parts in of_batch.items():
            yield f"{name}: {part}, smallest", 1e3 * float(parts[part].min())
            yield f"{name}: {part}, largest", 1e3 * float(parts[part].max())
    layers, size, longest = case.model.num_layers, case.cluster.num_ranks, max(SKEWED)
    group = group_of(case.cluster, size, case.cluster.node_size, busy_nics=True)
    everywhere_s = 2 * layers * (case.cost.call_s + all_to_all_s(0.0, group))
    kernels_s = case.cost.attention_s(longest**2 / size / 2, longest / size)
    round_s = max(kernels_s / size, serial_round_s(case, longest / size, longest / size))
    yield "balanced: forward, remapping, as an all-to-all of all ranks", 1e3 * everywhere_s
    yield "skewed: forward, attention, rounds in series", 1e3 * layers * size * round_s


def _parts(case: ZeppelinCase, lengths: Sequence[int]) -> dict[str, Floats]:
    """Seconds of each part by rank; planning by repetition."""
    plans, planning = list[MicrobatchPlan](), list[float]()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        plans = [ZEPPELIN.plans(case, lengths)[0]]
        planning.append(time.perf_counter() - begin)
    plan, layers = plans[0], case.model.num_layers
    call = attention_call(replace(plan, moves=Rows.of(3, [])), case.machine)
    linear, linear_back = linear_s(plan, case.machine)
    remap = _remap_s(case, plan)
    seconds = {
        "forward, attention": call.forward.end_s,
        "forward, linear modules": linear,
        "forward, remapping": remap,
        "backward": call.backward.end_s + linear_back + remap,
    }
    parts = {name: layers * each for name, each in seconds.items()}
    parts["forward"] = parts["forward, attention"] + parts["forward, linear modules"] + parts["forward, remapping"]
    return {**parts, "forward, sequence partition": np.array(planning)}


def _remap_s(case: ZeppelinCase, plan: MicrobatchPlan) -> Floats:
    """Seconds by rank of a layer's remap in one phase, both ways."""
    # Links and NICs carry a rank's tokens side by side, both directions at once, so the longest of
    # the four counts.
    size, cost = case.cluster.num_ranks, case.cost
    token_bytes = cost.kv_bytes(1) + 2 * cost.query_bytes(1)
    seconds = np.zeros(size)
    src, dst, tokens = as_array(plan.moves).T
    crosses = case.machine.crosses(src, dst)
    for inter in (False, True):
        link, chosen = cost.link(inter_node=inter), crosses == inter
        for ranks in (src, dst):
            moved = np.zeros(size)
            np.add.at(moved, ranks[chosen], tokens[chosen] * token_bytes)
            seconds = np.maximum(
                seconds, np.where(moved > 0, 2 * (cost.call_s + link.alpha_s) + moved / link.bytes_per_s, 0.0)
            )
    return seconds


# Throughput of 3B on cluster A, 4k tokens a GPU.
#
# Figure 9 and section 5.2: as GPUs and context grow together; Figure 10: cluster B beside cluster A
# on 32 GPUs (assumed, which is not printed); Figure 11 and section 5.3: what routing, the attention
# engine and remapping add to Transformer Engine's ring.
SCALES = (16, 32, 64, 128)
SMALL = SCALES[:2]
FIG9_SYSTEMS = (TE, LLAMA, HYBRID, ZEPPELIN, DEFAULT)
# Tokens per second by data set and number of GPUs, then by system.
RatesByCase = Mapping[tuple[str, int], Mapping[str, float]]


def _fig9(effort: Effort) -> Ours:
    """Throughput by scale, growth from the smallest to the largest scale, and the text's claims."""
    cases = {scale: ZeppelinCase("llama-3b", "a800", scale) for scale in SCALES}
    by_case: dict[tuple[str, int], dict[str, float]] = {}
    for dataset, scale in effort.progress(list(product(DATASETS, SCALES)), "fig9"):
        batches = cases[scale].batches(dataset, effort.batches)
        by_case[dataset, scale] = {system.name: tokens_per_s(system, cases[scale], batches) for system in FIG9_SYSTEMS}
    for (dataset, scale), rates in by_case.items():
        yield from ((f"{DATASETS[dataset]}, {scale} GPUs: {name}", rate) for name, rate in rates.items())
    for dataset, label in DATASETS.items():
        for name in by_case[dataset, SCALES[0]]:
            yield f"{label}: growth of {name}", _growth(by_case, dataset, name)

    def smallest(of: str, *over: str) -> float:
        return min(rates[of] / max(rates[name] for name in over) for rates in by_case.values())

    yield "LLaMA CP over TE CP, smallest", smallest(LLAMA.name, TE.name)
    hybrid = max(rates[HYBRID.name] / rates[LLAMA.name] for (_, scale), rates in by_case.items() if scale in SMALL)
    yield "Hybrid DP over LLaMA CP on 16 and 32 GPUs, largest", hybrid
    best = smallest(ZEPPELIN.name, TE.name, LLAMA.name, HYBRID.name)
    yield "Zeppelin over the best of the others, smallest", best
    slower = _growth(by_case, "github", ZEPPELIN.name) / _growth(by_case, "arxiv", ZEPPELIN.name)
    yield "growth of Zeppelin on GitHub over that on ArXiv", slower


def _growth(by_case: RatesByCase, dataset: str, name: str) -> float:
    return by_case[dataset, SCALES[-1]][name] / by_case[dataset, SCALES[0]][name]


CLUSTERS = {"A": "a800", "B": "h800"}


def _fig10(effort: Effort) -> Ours:
    """Speedups on both clusters, and what the text says of them."""
    cases = {name: ZeppelinCase("llama-3b", cluster, 32) for name, cluster in CLUSTERS.items()}
    for dataset, label in effort.progress(list(DATASETS.items()), "fig10"):
        rate: dict[tuple[str, str], float] = {}
        for name, case in cases.items():
            batches = case.batches(dataset, effort.batches)
            for system in (TE, ZEPPELIN, DEFAULT):
                rate[name, system.name] = tokens_per_s(system, case, batches)
        speedup = {name: rate[name, ZEPPELIN.name] / rate[name, TE.name] for name in CLUSTERS}
        for name in CLUSTERS:
            yield f"{label}: Zeppelin over TE CP on {name}", speedup[name]
        for name in CLUSTERS:
            yield f"{label}: zeppelin, default, over TE CP on {name}", rate[name, DEFAULT.name] / rate[name, TE.name]
        yield f"{label}: speedup on A over that on B", speedup["A"] / speedup["B"]
        yield f"{label}: throughput on B over that on A", rate["B", ZEPPELIN.name] / rate["A", ZEPPELIN.name]


VARIANTS = {
    "attention engine alone": ENGINE,
    "engine and routing": ENGINE_ROUTED,
    "engine, routing and remapping": ZEPPELIN,
    "zeppelin, rule groups": OURS,
    "zeppelin, default": DEFAULT,
}


def _fig11(effort: Effort) -> Ours:
    """Each variant's speedup over TE's ring, by data set."""
    case = ZeppelinCase("llama-3b", "a800", 32)
    for dataset, label in effort.progress(list(DATASETS.items()), "fig11"):
        batches = case.batches(dataset, effort.batches)
        base = tokens_per_s(TE, case, batches)
        yield f"{label}: routing alone", tokens_per_s(TE_ROUTED, case, batches) / base
        serial_s = sum(serial_routing_s(case, lengths) for lengths in batches)
        yield f"{label}: routing alone, rounds in series", sum(map(sum, batches)) / serial_s / base
        speedup = {name: tokens_per_s(system, case, batches) / base for name, system in VARIANTS.items()}
        yield from ((f"{label}: {name}", each) for name, each in speedup.items())
        remap = speedup["engine, routing and remapping"] / speedup["engine and routing"]
        yield f"{label}: what remapping adds", remap


PAPER = paper(
    "zeppelin",
    "Zeppelin (arXiv 2509.21841)",
    {
        "fig3": _fig3,
        "fig5": _fig5,
        "table2": _table2,
        "fig8": _fig8,
        "fig9": _fig9,
        "fig10": _fig10,
        "fig11": _fig11,
        "fig12": _fig12,
        "table3": _table3,
    },
)

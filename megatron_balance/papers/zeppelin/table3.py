"""Table 3 and section 5.4.2: the range over ranks of what a step's forward and backward take. 7B,
four nodes of cluster C, 128k tokens.

The lengths are not printed. "The Balanced distribution samples sequences from each bucket in Table
2": here the upper end of each bucket up to 64k, which add up to 127k, and 1k more. "One very long
sequence and several short ones": here 112k, which needs four nodes (all ranks of the table take as
long), and four of 4k. Of a rank's parts each is its own time, without waiting for slower ranks of
other zones; parts of a layer are counted as often as there are layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.cost.collectives import all_to_all_s, group_of
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.rows import Rows
from megatron_balance.papers.base import Effort, PaperTable, Row, published
from megatron_balance.papers.zeppelin.fig12 import SERIAL_NOTE, serial_round_s
from megatron_balance.papers.zeppelin.systems import ZEPPELIN, ZeppelinCase
from megatron_balance.simulator.attention import attention_call, linear_tokens
from megatron_balance.workloads.distributions import K

BALANCED = (64 * K, 32 * K, 16 * K, 8 * K, 4 * K, 2 * K, K, K)
SKEWED = (112 * K, *(4 * K,) * 4)
PUBLISHED = {
    "forward": (published(316, 817), published(1000, 1002)),
    "forward, attention": (published(161, 670), published(801, 854)),
    "forward, linear modules": (published(93, 97), published(91, 105)),
    "forward, remapping": (published(14, 16), published(14, 45)),
    "forward, sequence partition": (published(3, 10), published(3, 12)),
    "backward": (published(422, 1108), published(1605, 1608)),
}
REMAPS_MS, SKEWED_MS = published(14, 801)
LENGTHS_NOTE = "lengths are not printed; balanced: 64k, 32k, 16k, 8k, 4k, 2k, 1k, 1k; skewed: 112k and four of 4k"
PLAN_NOTE = "planning a batch once, on this machine's CPU"
ALL_TO_ALL_NOTE = "the latencies of a pairwise all-to-all alone, there and back, without a byte"
REPEATS = 5


def rows(_: Effort) -> list[Row]:
    """The smallest and the largest rank of every row of the table, for both distributions."""
    case = ZeppelinCase("llama-7b", "h200", 32)
    of_batch = {"balanced": _parts(case, BALANCED), "skewed": _parts(case, SKEWED)}
    table: list[Row] = []
    for part, printed in PUBLISHED.items():
        for (name, parts), bounds in zip(of_batch.items(), printed, strict=True):
            ours = parts[part]
            partition = part == "forward, sequence partition"
            note = PLAN_NOTE if partition else LENGTHS_NOTE
            for which, value, mine in zip(("smallest", "largest"), bounds, (ours.min(), ours.max()), strict=True):
                table.append(
                    Row(
                        f"{name}: {part}, {which}",
                        value,
                        1e3 * float(mine),
                        "ms",
                        "measured" if partition else "simulated",
                        note=note,
                    )
                )
    return [*table, *_closed_forms(case)]


def _closed_forms(case: ZeppelinCase) -> list[Row]:
    """Closed forms for the paper's own way of communicating, where ours differs."""
    layers, group = (
        case.model.num_layers,
        group_of(case.cluster, case.cluster.num_ranks, case.cluster.node_size, busy_nics=True),
    )
    everywhere_s = 2 * layers * (case.cost.call_s + all_to_all_s(0.0, group))
    size, longest = case.cluster.num_ranks, max(SKEWED)
    kernels_s = case.cost.attention_s(longest**2 / size / 2, longest / size)
    round_s = max(kernels_s / size, serial_round_s(case, longest / size, longest / size))
    return [
        Row(
            "balanced: forward, remapping, as an all-to-all of all ranks",
            REMAPS_MS,
            1e3 * everywhere_s,
            "ms",
            "exact",
            note=ALL_TO_ALL_NOTE,
        ),
        Row(
            "skewed: forward, attention, rounds in series",
            SKEWED_MS,
            1e3 * layers * size * round_s,
            "ms",
            "exact",
            note=SERIAL_NOTE,
        ),
    ]


def _parts(case: ZeppelinCase, lengths: Sequence[int]) -> dict[str, Floats]:
    """Seconds of each part by rank; planning by repetition."""
    plans, planning = list[MicrobatchPlan](), list[float]()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        plans = [ZEPPELIN.plans(case, lengths)[0]]
        planning.append(time.perf_counter() - begin)
    plan, layers = plans[0], case.model.num_layers
    call = attention_call(replace(plan, moves=Rows.of(3, [])), case.machine)
    tokens = linear_tokens(plan).tolist()
    linear, linear_back = (
        np.array([case.cost.layer_s(n, backward=backward) for n in tokens]) for backward in (False, True)
    )
    remap = remap_s(case, plan)
    seconds = {
        "forward, attention": call.forward.end_s,
        "forward, linear modules": linear,
        "forward, remapping": remap,
        "backward": call.backward.end_s + linear_back + remap,
    }
    parts = {name: layers * each for name, each in seconds.items()}
    parts["forward"] = parts["forward, attention"] + parts["forward, linear modules"] + parts["forward, remapping"]
    return {**parts, "forward, sequence partition": np.array(planning)}


def remap_s(case: ZeppelinCase, plan: MicrobatchPlan) -> Floats:
    """Seconds by rank of a layer's remap in one phase: queries, keys and values one way, outputs
    back.

    Links and NICs carry a rank's tokens side by side, both directions at once, so the longest of
    the four counts.
    """
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


TABLE = PaperTable("range over ranks: 7B, 32 GPUs of cluster C, 128k tokens", rows)

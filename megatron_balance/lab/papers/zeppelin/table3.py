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

from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.cost.base import Floats
from megatron_balance.cost.parallel import all_to_all_s, group_of
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.zeppelin.fig12 import serial_round_s
from megatron_balance.lab.papers.zeppelin.systems import ZEPPELIN, ZeppelinCase
from megatron_balance.simulator.attention import attention_call
from megatron_balance.workloads.distributions import K

BALANCED = (64 * K, 32 * K, 16 * K, 8 * K, 4 * K, 2 * K, K, K)
SKEWED = (112 * K, *(4 * K,) * 4)
PARTS = (
    *("forward", "forward, attention", "forward, linear modules", "forward, remapping"),
    *("forward, sequence partition", "backward"),
)
REPEATS = 5


def ours(_: Effort) -> Ours:
    """The smallest and the largest rank of every row of the table, for both distributions; then closed
    forms for the paper's own way of communicating, where ours differs.
    """
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


TABLE = table("zeppelin", "table3", ours)

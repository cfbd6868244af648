"""The operating point of DistCA's experiments, scaled down: batches, model, and how fast the NICs
are for the computation beside them.

DistCA has documents no longer than a few ranks' tokens, several contexts in a batch (Table 4), and
four query heads for a key-value head (Table 2). Its Table 7 gives the bandwidth that hides all
exchanges: the largest transfer over the shortest computation beside it. The 8B model needs 41.3
GB/s of the 50 GB/s that a GPU has; here the NICs have as much more than what the batches need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable
from megatron_balance.patterns import dispatch
from megatron_balance.patterns.rows import messages_of
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.ping_pong import linear_s
from megatron_balance.simulator.tables import Tables
from megatron_balance.solvers.nano_batches import nano_batches
from megatron_balance.workloads.lengths import Lengths
from tools.bench.emulated.batches import DATASETS, draw_batches
from tools.bench.emulated.point import BYTES_PER_ELEMENT, FFN_SIZE, GOODPUT, SCALE, Kernels, Point

CONTEXTS = 4
"""In a batch: documents are no longer than a quarter of it, two ranks' tokens."""
HEADS, KV_HEADS, HEAD_DIM = 4, 1, 32
"""As many elements as the other benchmarks' two heads of 64, and the 8B model's queries for a key.
"""
MARGIN = 50 / 41.3
"""Bandwidth there is over bandwidth needed (Table 7, 8B on 8 nodes)."""
NICS = 4

FLAGS: dict[str, Any] = {
    "num-attention-heads": HEADS,
    "kv-channels": HEAD_DIM,
    "group-query-attention": True,
    "num-query-groups": KV_HEADS,
}


def batches(count: int, seed: int) -> dict[str, list[Lengths]]:
    """By data set, batches of `CONTEXTS` contexts each."""
    found: dict[str, list[Lengths]] = {}
    for name in DATASETS:
        contexts = draw_batches(name, count * CONTEXTS, seed, SCALE * CONTEXTS)
        found[name] = [
            tuple(n for context in contexts[at : at + CONTEXTS] for n in context)
            for at in range(0, len(contexts), CONTEXTS)
        ]
    return found


def model(num_layers: int) -> Model:
    """The model that is trained, as planners and the simulator are told of it."""
    return Model(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_layers=num_layers,
        hidden_size=HEADS * HEAD_DIM,
        ffn_size=FFN_SIZE,
        gated_ffn=True,
        name="bench",
        bytes_per_element=BYTES_PER_ELEMENT,
        vocab_size=256,
    )


def machine(point: Point, num_layers: int) -> Machine:
    """The emulated cluster at this point."""
    keys = {name: value for name, value in point.cluster(NICS).items() if name != "base"}
    cluster = ClusterChoice({**load_cluster("emulated").given, **keys}).build()
    of = model(num_layers)
    return Machine(cluster, of, AnalyticCost(cluster, of))


def point(kernels: Kernels, drawn: Sequence[Lengths], num_layers: int) -> Point:
    """The point at which NICs have `MARGIN` times the bandwidth that these batches need."""
    needed = needed_bytes_per_s(drawn, machine(Point.of(kernels), num_layers))
    return Point(kernels, round(8 * MARGIN * needed / GOODPUT))


def needed_bytes_per_s(drawn: Sequence[Lengths], on: Machine) -> float:
    """Of a NIC, so that every exchange of every batch fits beside what runs meanwhile (DistCA,
    Table 7), forward.
    """
    return max(_needed(lengths, on) for lengths in drawn)


def _needed(lengths: Lengths, on: Machine) -> float:
    planner = choose_planner("distca", {})
    plans = [
        planner.plan(Batch(tuple(lengths[i] for i in nano_batch)), on.cluster, on.model, on.cost)
        for nano_batch in nano_batches(lengths)
    ]
    linear = [float(linear_s(plan, on)[0].min()) for plan in plans]
    attention = [float(_attention_s(plan, on).min()) for plan in plans]
    (in_a, out_a), (in_b, out_b) = (_busiest_nic(plan, on) for plan in plans)
    return max(in_a / linear[1], in_b / attention[0], out_a / attention[1], out_b / linear[0])


def _attention_s(plan: MicrobatchPlan, on: Machine) -> Floats:
    tables = Tables(plan, on)
    return np.sum([table.forward_s[:, 0] for table in tables.zones], axis=0)


def _busiest_nic(plan: MicrobatchPlan, on: Machine) -> tuple[float, float]:
    """Bytes of the busiest NIC, in or out, of both exchanges."""
    (zone,) = plan.zones
    assert isinstance(zone, TaskTable), "distca plans a task table"
    there, back = (
        _nic_bytes(as_array(rows), on) for rows in dispatch.transfers(zone, plan.num_heads, plan.num_kv_heads)
    )
    return there, back


def _nic_bytes(rows: Ints, on: Machine) -> float:
    parcels = on.payload.parcels(messages_of(0, rows))
    across = on.crosses(parcels.src, parcels.dst)
    src, dst, num_bytes = parcels.src[across], parcels.dst[across], parcels.direct[across]
    return float(max(on.nics.sums(src, num_bytes).max(initial=0), on.nics.sums(dst, num_bytes).max(initial=0)))

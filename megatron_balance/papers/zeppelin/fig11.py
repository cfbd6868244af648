"""Figure 11 and section 5.3: what routing, the attention engine and remapping add to Transformer
Engine's ring. 3B, 32 GPUs, cluster A.
"""

from __future__ import annotations

from megatron_balance.papers.base import Effort, Ours, table
from megatron_balance.papers.zeppelin.fig12 import serial_routing_s
from megatron_balance.papers.zeppelin.systems import (
    DATASETS,
    DEFAULT,
    ENGINE,
    ENGINE_ROUTED,
    OURS,
    TE,
    TE_ROUTED,
    ZEPPELIN,
    ZeppelinCase,
    tokens_per_s,
)

VARIANTS = {
    "attention engine alone": ENGINE,
    "engine and routing": ENGINE_ROUTED,
    "engine, routing and remapping": ZEPPELIN,
    "zeppelin, rule cost": OURS,
    "zeppelin, default": DEFAULT,
}


def ours(effort: Effort) -> Ours:
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


TABLE = table("zeppelin", "fig11", ours)

"""CPU time and memory of a rank's link for a 32B model on 1,024 ranks, against its budget of 0.2 s
and 50 MB, once per strategy; and of its exchange, which is the link, cut by slots and nodes, with the
places of all rectangles. The shards of the base layout (`owned`) are made once per run, and are not in
it.

    python -m tools.bench.link [--ranks 1024] [--json]
    python -m tools.bench.link --slots      # seconds of a pull on 64 A800s, at once and slot by slot
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_balance.analysis.link import (
    Base,
    Buffer,
    Parameter,
    ParameterTable,
    Twins,
    WeightPiece,
    link,
    links_s,
    num_slots,
    slots_of_pieces,
    through_nodes,
    traffic,
    volume,
)
from megatron_balance.config import load_cluster
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.training.weights import Apart, WeightExchange

LAYERS, HIDDEN, FFN, VOCABULARY = 60, 6656, 17920, 30592
BUCKET = 40_000_000
"""Elements after which Megatron closes a bucket."""
BUDGET_S, BUDGET_BYTES = 0.2, 50e6


def parameters() -> ParameterTable:
    """A 32B model: 60 layers of 6,656, gated fc1 of twice 17,920."""
    listed = [Parameter("embedding", VOCABULARY, HIDDEN, "first", 0)]
    for layer in range(LAYERS):
        listed += [
            Parameter(f"{layer}.norm_qkv", HIDDEN, 1, layer, parts=True),
            Parameter(f"{layer}.qkv", 3 * HIDDEN, HIDDEN, layer, 0),
            Parameter(f"{layer}.proj", HIDDEN, HIDDEN, layer, 1),
            Parameter(f"{layer}.norm_fc1", HIDDEN, 1, layer, parts=True),
            Parameter(f"{layer}.fc1", 2 * FFN, HIDDEN, layer, 0, blocks=2),
            Parameter(f"{layer}.fc2", HIDDEN, FFN, layer, 1),
        ]
    listed += [Parameter("norm", HIDDEN, 1, "last", parts=True), Parameter("output", VOCABULARY, HIDDEN, "last", 0)]
    return ParameterTable.of(listed, LAYERS)


def base(model: ParameterTable, scheme: Scheme, replicas: int, bucket: int = BUCKET) -> Base:
    """A base layout whose buffers are filled backwards in buckets, as Megatron fills them."""
    shards = scheme.context * replicas
    numbers, stages, _ = model.stages(np.arange(len(model)), scheme.pipeline)
    buffers: list[Buffer] = []
    for stage in range(scheme.pipeline):
        mine = numbers[stages == stage][::-1]
        starts: list[int] = []
        buckets, at = [0], 0
        for number in mine.tolist():
            at = -(-at // 64) * 64
            starts.append(at)
            at += int(model.shape[number].prod()) // (scheme.tensor if model.cut[number] >= 0 else 1)
            if at - buckets[-1] >= bucket or number == mine[-1]:
                at = -(-at // (128 * shards)) * 128 * shards
                buckets.append(at)
        buffers.append(Buffer(stage, mine, np.array(starts), np.array(buckets)))
    return Base(scheme, replicas, tuple(buffers))


def slots() -> None:
    """Print what links alone take for a pull, from weights that <16,1,1> x 4 owns."""
    model, cluster = parameters(), load_cluster("a800-ib").build()
    ranks, per_node = cluster.num_ranks, cluster.node_size
    for text in ("tp16-pp1-cp1+6*tp8-pp1-cp1", "tp8-pp1-cp1+14*tp4-pp1-cp1"):
        strategy = Strategy.parse(text)
        twins = Twins.of(strategy, ranks, per_node)
        for name, bucket in (("buckets of 40M", BUCKET), ("one bucket", 1 << 60)):
            layout = base(model, Scheme(16), ranks // 16, bucket)
            whole = link(layout, layout.owned(model), strategy, model)
            parts = [part.pull for part in through_nodes(whole, model, twins, None)]
            at = [slots_of_pieces(pieces, WeightPiece.DST, strategy, model) for pieces in parts]

            def seconds(chosen: Sequence[Ints], parts: Sequence[Ints] = parts) -> float:
                ways = [volume(pieces[which], 2, ranks, per_node) for pieces, which in zip(parts, chosen, strict=True)]
                return links_s(ways[0] + ways[1], cluster, handed_on=True)

            count = num_slots(strategy, model.num_layers) + 2
            apart = sum(seconds([np.flatnonzero(of == slot) for of in at]) for slot in range(count))
            at_once = seconds([np.arange(len(of)) for of in at])
            print(f"{text}, {name}: at once {at_once:.2f} s, in {count} slots {apart:.2f} s")


@dataclass(frozen=True)
class Peer:
    """A rank of a group that no process is in."""

    of: int
    ranks: int

    def rank(self) -> int:
        return self.of

    def size(self) -> int:
        return self.ranks


def measured(scheme: Scheme, strategy: Strategy, ranks: int) -> dict[str, object]:
    """Figures of a few ranks' changes from a base layout of this scheme."""
    model = parameters()
    layout = base(model, scheme, ranks // scheme.num_ranks)
    start = time.process_time()
    owned = layout.owned(model)
    once = {"owned_cpu_seconds": round(time.process_time() - start, 4), "owned_mb": round(owned.nbytes / 1e6, 1)}

    def exchange(rank: int, apart: Apart) -> WeightExchange:
        group: Any = Peer(rank, ranks)
        return WeightExchange.of((layout, owned, model), strategy, group, torch.device("cpu"), apart)

    ways: dict[str, tuple[Callable[[int], object], ...]] = {
        "link": (lambda rank: link(layout, owned, strategy, model, rank),),
        "exchange": tuple(
            functools.partial(exchange, apart=apart) for apart in (Apart(), Apart(slots=True, ranks_per_node=8))
        ),
    }
    found: dict[str, object] = {"base": str(scheme), "strategy": str(strategy), "ranks": ranks}
    within = True
    for name, each in ways.items():
        chosen = list(itertools.product(each, (0, ranks // 2 - 1, ranks - 1)))
        # The least of three says what it takes where other processes share the machine.
        seconds = max(min(_cpu_s(make, rank) for _ in range(3)) for make, rank in chosen)
        peak = max(_peak(make, rank) for make, rank in chosen)
        found |= {f"{name}_cpu_seconds": round(seconds, 4), f"{name}_peak_mb": round(peak / 1e6, 1)}
        within &= seconds <= BUDGET_S and peak <= BUDGET_BYTES
    moved = [
        2 * int(traffic(mine.pull, ranks)[rank, 1]) + 4 * int(traffic(mine.push, ranks)[rank, 0])
        for rank in (0, ranks // 2 - 1, ranks - 1)
        for mine in (link(layout, owned, strategy, model, rank),)
    ]
    return {**found, "pulled_and_pushed_gb": round(max(moved) / 1e9, 2), **once, "within": within}


def _cpu_s(make: Callable[[int], object], rank: int) -> float:
    start = time.process_time()
    make(rank)
    return time.process_time() - start


def _peak(make: Callable[[int], object], rank: int) -> int:
    tracemalloc.start()
    make(rank)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    """Measure a few ranks of several strategies, and print the worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--slots", action="store_true")
    args = parser.parse_args()
    if args.slots:
        slots()
        return
    ranks: int = args.ranks
    results = [
        measured(scheme, strategy, ranks)
        for scheme in (Scheme(8, 2), Scheme(8))
        for strategy in (
            Strategy((Scheme(8, 2),) * (ranks // 16)),
            Strategy((Scheme(16),) * (ranks // 64) + (Scheme(8),) * (ranks // 32) + (Scheme(4, 2),) * (ranks // 16)),
            Strategy((Scheme(2, 2),) * (ranks // 4)),
        )
    ]
    for result in results:
        print(json.dumps(result) if args.json else "  ".join(f"{key} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()

"""WLB-LLM's choice of sharding against measured kernels: is the predicted better one the better
one?

python tools/bench/sharding.py [--ranks 4] [--tokens 8192] [--microbatches 50] [--repeats 5]
    [--dataset wlb] [--costs TABLE.json] [--json]

Microbatches are one context of the data set each, at a scale at which a CPU runs them: a context of
131,072 tokens is shortened to `--tokens`, its documents with it. Each is planned by `wlb_sharding`
with every sharding, with costs that this machine's `profile` has measured (`--costs`: a table from
an earlier run, written there if there is none yet). What runs are the launches of every rank, as
the executor lowers them, forward and backward, on the CPU's own flash attention, in one thread. All
plans of a microbatch are measured in turn, in every repeat anew; a rank's time is the median of its
repeats, in seconds of this thread, and a microbatch's is that of its slowest rank. Predicted over
measured is of kernels alone; the choice weighs what is gathered, too, over the links of an H200's
node, which is next to nothing beside kernels on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from megatron_balance.config import load_cluster
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.table import CostTable, load_table, save_table
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.patterns.base import Context
from megatron_balance.planners.wlb_sharding import SHARDINGS, WlbShardingOptions, kernel_s, plan
from megatron_balance.profiling.cost_table import profile
from megatron_balance.profiling.options import ProfileOptions
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.steps import GradLaunch, Launch
from megatron_balance.workloads.lengths import draw

MODEL = Model(num_heads=2, num_kv_heads=2, head_dim=64, hidden_size=128, ffn_size=256, bytes_per_element=4)
CONTEXT = 131_072
GRID = ProfileOptions(
    q_tokens=(4, 16, 32, 64, 128, 256, 512, 1024, 2048),
    k_tokens=(4, 32, 128, 512, 2048, 8192),
    before_tokens=(0, 32, 128, 512, 2048, 8192),
    layer_tokens=(128, 512),
    pack_bytes=(1 << 14, 1 << 18),
    repeats=5,
)
FIXED = ("document", "sequence")


@dataclass(slots=True)
class Timed:
    """The launches of one plan: by rank, calls and the seconds that they took."""

    planned: MicrobatchPlan
    predicted_s: float
    calls: list[list[Callable[[], object]]]
    seconds: list[list[float]]

    def measure(self) -> None:
        """Run every rank's launches once."""
        for calls, seconds in zip(self.calls, self.seconds, strict=True):
            begin = time.thread_time()
            for call in calls:
                call()
            seconds.append(time.thread_time() - begin)

    @property
    def measured_s(self) -> float:
        """Of the slowest rank; the median of its repeats."""
        return max(median(each) for each in self.seconds)


class Bench:
    """Plans and their launches on shared operands."""

    def __init__(self, cluster: Cluster, cost: MeasuredCost, num_tokens: int) -> None:
        self.cluster, self.cost = cluster, cost
        generator = torch.Generator().manual_seed(1)
        shape = (num_tokens, MODEL.num_heads, MODEL.head_dim)
        self.operands = [torch.randn(shape, generator=generator) / 8 for _ in range(5)]
        self.lse = torch.randn(shape[:2], generator=generator) + 8

    def timed(self, lengths: Sequence[int], sharding: Any) -> Timed:
        """The plan of a sharding and its launches."""
        options = WlbShardingOptions(sharding=sharding)
        planned = plan(Batch(tuple(lengths)), self.cluster, MODEL, self.cost, options)
        zones = [zone for zone in planned.zones if isinstance(zone, Zone)]
        predicted_s = float(kernel_s(zones, Context.of(planned), self.cost).max())
        ranks = range(self.cluster.num_ranks)
        return Timed(planned, predicted_s, [self._calls(planned, rank) for rank in ranks], [[] for _ in ranks])

    def _calls(self, planned: MicrobatchPlan, rank: int) -> list[Callable[[], object]]:
        size = self.cluster.num_ranks
        shape = AttentionShape(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
        bound = bind(planned, rank, shape, groups=Groups(rank, size, tuple(range(size)), None))
        kernel, scale = bound.kernel, MODEL.head_dim**-0.5
        q, k, v, dout, out = self.operands
        calls: list[Callable[[], object]] = []
        for step in (*bound.forward.steps, *bound.backward.steps):
            if isinstance(step, Launch):
                calls.append(lambda e=step.entries: kernel.forward(e, q, k, v, scale))
            elif isinstance(step, GradLaunch):
                calls.append(lambda e=step.entries: kernel.backward(e, (dout, out, self.lse), q, k, v, scale))
        return calls


def main(argv: Sequence[str] | None = None) -> int:
    """Print what each sharding takes, and how near the choice is to the better of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch, about")
    parser.add_argument("--microbatches", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dataset", default="wlb")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, help="a cost table; measured and written if there is none")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    cluster = load_cluster("h200").build(num_ranks=options.ranks, ranks_per_node=options.ranks)
    bench = Bench(cluster, MeasuredCost(_table(options.costs), cluster, MODEL), 2 * options.tokens)
    scale = CONTEXT // options.tokens
    batches = [
        tuple(max(1, length // scale) for length in lengths)
        for lengths in draw(options.dataset, CONTEXT, options.microbatches, options.seed)
    ]
    timed = [{sharding: bench.timed(lengths, sharding) for sharding in SHARDINGS} for lengths in batches]
    for _ in range(options.repeats):
        for each in timed:
            for own in {run.planned: run for run in each.values()}.values():
                own.measure()
    result = summary(timed) | {"torch": torch.__version__, "load": Path("/proc/loadavg").read_text().split()[0]}
    print(json.dumps(result) if options.json else _text(result))
    return 0


def _table(path: Path | None) -> CostTable:
    if path is not None and path.exists():
        return load_table(path)
    table = profile(MODEL, "cpu", GRID, lambda points, *_: iter(points))
    if path is not None:
        save_table(table, path)
    return table


def summary(timed: Sequence[dict[str, Timed]]) -> dict[str, Any]:
    """Mean milliseconds of each sharding, wins, and the choice over the better of the two."""
    by_plan = [{run.planned: run.measured_s for run in each.values() if run.seconds[0]} for each in timed]
    ms = {s: [1e3 * of[each[s].planned] for each, of in zip(timed, by_plan, strict=True)] for s in SHARDINGS}
    better = [min(a, b) for a, b in zip(*(ms[s] for s in FIXED), strict=True)]
    right = [chosen == best for chosen, best in zip(ms["adaptive"], better, strict=True)]
    return {
        "microbatches": len(timed),
        "mean_ms": {sharding: fmean(values) for sharding, values in ms.items()},
        "better_ms": fmean(better),
        "document_wins": sum(a < b for a, b in zip(ms["document"], ms["sequence"], strict=True)),
        "right": sum(right),
        "adaptive_over_better": fmean(ms["adaptive"]) / fmean(better),
        "mixed_over_better": fmean(ms["mixed"]) / fmean(better),
        "predicted_over_measured": {s: _ratio(timed, ms[s], s) for s in SHARDINGS},
    }


def _ratio(timed: Sequence[dict[str, Timed]], ms: Sequence[float], sharding: str) -> float:
    return median(1e3 * each[sharding].predicted_s / own for each, own in zip(timed, ms, strict=True))


def _text(result: dict[str, Any]) -> str:
    lines = ["sharding    mean ms   predicted / measured, median"]
    for sharding in SHARDINGS:
        ratio = result["predicted_over_measured"][sharding]
        lines.append(f"{sharding:10}{result['mean_ms'][sharding]:9.2f}{ratio:12.3f}")
    count = result["microbatches"]
    wins = result["document_wins"]
    return "\n".join(
        [
            *lines,
            f"{'better':10}{result['better_ms']:9.2f}",
            f"document is faster in {wins} of {count} microbatches, sequence in {count - wins}; "
            f"the choice is the faster one in {result['right']}",
            f"adaptive over the better of the two {result['adaptive_over_better']:.4f}, mixed "
            f"{result['mixed_over_better']:.4f}",
            f"torch {result['torch']}, load average {result['load']}",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""Ways in which multi-latent attention's keys and values travel: of every head, both as wide as the
wider; of every head, each as wide as it is; or the latent, of which receivers make them again.
Layers of DeepSeek-V3's shape in one ring, simulated.

python -m tools.bench.latent [--cluster h100] [--json]
python -m tools.bench.latent --decide te_ring distca zeppelin    # predicted, as `latent_kv: pays` does

With the latent, the seconds of projecting what was received up (and, backward, of the two products of
its gradients, and of projecting up once more where keys are not kept) are added to a layer in full:
they hide nothing and nothing hides them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_balance.analysis.wire import Payload
from megatron_balance.config import load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Kind
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import choose_planner
from megatron_balance.planning.predicted import predict
from megatron_balance.planning.step_planner import PlanSpec
from megatron_balance.simulator.attention import attention_call
from megatron_balance.simulator.machine import Machine

HEADS, NOPE, ROPE, VALUES, LATENT = 128, 128, 64, 128, 512
"""DeepSeek-V3 (arXiv 2412.19437, section 4.2): heads, and widths of a head's keys without rotary
embedding, of the rotary key that all heads share, of values, and of the latent."""
MODEL = Model(HEADS, HEADS, NOPE + ROPE, 61, 7168, 2048, name="deepseek-v3", value_dim=VALUES, num_experts=256,
              experts_per_token=9, vocab_size=129280)  # fmt: skip
V3 = replace(MODEL, latent_rank=LATENT, latent_rope=ROPE, query_rank=1536)
LATENT_V3 = replace(V3, num_kv_heads=1, latent_travels=True)
DECIDED_TOKENS = 4096
"""A rank, where planners are compared."""
UP_FLOPS = 2.0 * LATENT * HEADS * (NOPE + VALUES)
"""Of projecting one token's latent up to the keys and values of all heads."""
BACKWARD = 3.0
"""Times that, backward: the gradient of the latent, that of the weights, and the projection again."""
MS = ("kv_ms", "latent_ms")
WAYS = ("one width", "two widths", "latent")


@dataclass(frozen=True, slots=True)
class Setting:
    """A ring of `ranks` ranks, each `tensor` GPUs wide, that hold `tokens` each."""

    ranks: int
    tensor: int
    tokens: int


SETTINGS = tuple(
    Setting(ranks, tensor, tokens)
    for ranks, tensor in ((8, 1), (16, 1), (32, 1), (8, 8))
    for tokens in (2048, 4096, 8192, 16384)
)


def layer_s(way: str, setting: Setting, cluster: Cluster, planner: str) -> float:
    """Seconds of the attention of one layer, forward and backward, of one document over the ring."""
    model = MODEL.share(setting.tensor)
    cost = AnalyticCost(cluster, replace(model, value_dim=None) if way == "one width" else model)
    machine = Machine(cluster, cost.model, cost)
    batch = Batch((setting.ranks * setting.tokens,))
    plan = choose_planner(planner, {"tokens_per_rank": setting.tokens}).plan(batch, cluster, cost.model, cost)
    again = 0.0
    if way == "latent":
        received = setting.tokens * (setting.ranks - 1)
        again = (1 + BACKWARD) * received * UP_FLOPS / setting.tensor
        again /= cluster.flops_per_s * cluster.linear_efficiency
        object.__setattr__(machine, "payload", _of_latent(machine.payload, model))
    seconds = sum(float(phase.end_s.max()) for phase in attention_call(plan, machine))
    return seconds + again


def _of_latent(payload: Payload, model: Model) -> Payload:
    """The bytes of latents and of their gradients, spread over the heads."""
    narrow, wide = (np.ceil((LATENT + ROPE) * n / model.num_kv_heads) for n in (2, 4))
    rows = [*payload.row_bytes]
    more = [*payload.more_bytes]
    for kind, num_bytes in ((Kind.KV, narrow), (Kind.KV_GRAD, wide)):
        rows[kind], more[kind] = int(num_bytes), 0
    return Payload(tuple(rows), tuple(more))


def measure(name: str, planner: str) -> list[dict[str, Any]]:
    """A row for each setting: milliseconds of a layer's attention by what travels."""
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        per_node = max(1, 8 // setting.tensor)
        cluster = load_cluster(name).build(num_ranks=setting.ranks, ranks_per_node=per_node)
        times = {way: 1e3 * layer_s(way, setting, cluster, planner) for way in WAYS}
        rows.append({"ranks": setting.ranks, "tensor": setting.tensor, "tokens": setting.tokens, "ms": times})
    return rows


def decisions(name: str, planners: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each number of ranks, documents and planner: predicted milliseconds of a layer."""
    rows: list[dict[str, Any]] = []
    for ranks in (16, 64):
        total, draw = ranks * DECIDED_TOKENS, random.Random(1)
        mixed: list[int] = []
        while sum(mixed) < total:
            longest = min(65536, total - sum(mixed))
            mixed.append(min(longest, max(64, int(draw.lognormvariate(7.5, 1.6)))))
        cluster = load_cluster(name).build(num_ranks=ranks, ranks_per_node=8)
        for documents, lengths in (("one", (total,)), ("log-normal", tuple(mixed))):
            for planner in planners:
                room = PLANNERS[planner].room is not None
                given = {"tokens_per_rank": DECIDED_TOKENS * 3 // 2 if room else DECIDED_TOKENS}
                each = (PlanSpec(planner, cluster, m, PLANNERS[planner].layers, given) for m in (V3, LATENT_V3))
                heads, latent = (1e3 * predict(spec, (lengths,)).layer_s for spec in each)
                rows.append(
                    {"ranks": ranks, "documents": documents, "planner": planner, "kv_ms": heads, "latent_ms": latent}
                )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--planner", default="te_ring")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--decide", nargs="+", choices=sorted(PLANNERS), metavar="PLANNER")
    options = parser.parse_args(argv)
    if options.decide:
        found = decisions(options.cluster, options.decide)
        if options.json:
            print(json.dumps({"cluster": options.cluster, "rows": found}))
            return 0
        print("| ranks | documents | planner | keys and values | latents |\n|---|---|---|---:|---:|")
        for row in found:
            cells = row["ranks"], row["documents"], f"`{row['planner']}`", *(f"{row[k]:,.1f} ms" for k in MS)
            print(f"| {' | '.join(map(str, cells))} |")
        return 0
    rows = measure(options.cluster, options.planner)
    if options.json:
        print(json.dumps({"cluster": options.cluster, "planner": options.planner, "rows": rows}))
        return 0
    print("| ring | tokens a rank | one width ms | two widths ms | latent ms | two widths over latent |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        one, two, latent = (row["ms"][way] for way in WAYS)
        ring = f"{row['ranks']} ranks" + (f" of {row['tensor']} GPUs" if row["tensor"] > 1 else "")
        print(f"| {ring} | {row['tokens']:,} | {one:.2f} | {two:.2f} | {latent:.2f} | {two / latent:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The cost table of this device, as `megatron-balance profile` measures it.

Written, read back, and its largest points.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.table import AttentionTable, CostTable, load_table, save_table
from megatron_balance.ir.model import Model
from megatron_balance.profiling.cost_table import QUICK, ProfileOptions, profile
from tools.gpu.rows import Context, Figure, Row

BUDGET_S = 45.0

POINTS = Figure("cost table: points of attention measured, written, read back and priced", "points")
FORWARD = Figure("attention kernel, largest entry without a mask, forward", "TFLOP/s", speed=True)
BACKWARD = Figure("attention kernel, largest entry without a mask, backward", "TFLOP/s", speed=True)
LAUNCH = Figure("attention kernel, fixed part of a launch, forward", "us", speed=True)
LAYER = Figure("norms, projections and MLP of a layer, forward", "TFLOP/s", speed=True)
MERGE = Figure("merge of two fp32 partials", "GB/s", speed=True)
FIGURES = (POINTS, FORWARD, BACKWARD, LAUNCH, LAYER, MERGE)

FILE = "costs.json"
"""Where later parts find the table."""
MODELS = {"cuda": "llama-7b", "cpu": "gpt-tiny"}
BACKWARD_OVER_FORWARD = 2.5
"""Matrix products of a flash backward (five) over those of its forward (two)."""
GRIDS = {
    "cuda": ProfileOptions(k_tokens=(32, 128, 512, 2048, 8192, 32768), before_tokens=(0, 128, 512, 2048, 8192, 28672)),
    "cpu": replace(
        QUICK,
        q_tokens=(16, 64),
        k_tokens=(16, 128),
        before_tokens=(0, 128),
        layer_tokens=(16, 256),
        pack_bytes=(4096, 65536),
        repeats=2,
    ),
}


def measure(context: Context) -> Iterator[Row]:
    model = load_model(MODELS[context.device])
    table = profile(model, context.device, GRIDS[context.device], _silent)
    with tempfile.TemporaryDirectory() as folder:
        path = (
            Path(folder, "table.json")
            if context.prefix is None
            else context.prefix.with_name(f"{context.prefix.name}-cost-table.json")
        )
        save_table(table, path)
        save_table(table, context.state / FILE)
        MeasuredCost(load_table(path), load_cluster("h200").build(), model)
    yield POINTS.measured(
        _points(table.attention), f"kernel {table.attention.kernel}, {model.name}, {table.attention.dtype}"
    )
    if context.on_gpu:
        yield from _speeds(table, model)


def _speeds(table: CostTable, model: Model) -> Iterator[Row]:
    attention, layer, merge = table.attention, table.layer, table.merge
    flops = model.attention_flops_per_pair * attention.q_tokens[-1] * attention.k_tokens[-1]
    size = f"{attention.q_tokens[-1]} queries, {attention.k_tokens[-1]} keys"
    yield FORWARD.measured(flops / attention.full_s[-1][-1] / 1e12, size)
    yield BACKWARD.measured(BACKWARD_OVER_FORWARD * flops / attention.full_backward_s[-1][-1] / 1e12, size)
    yield LAUNCH.measured(1e6 * attention.launch_s)
    width, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = model.hidden_size * (2 * width + 2 * kv + (3 if model.gated_ffn else 2) * model.ffn_size)
    yield LAYER.measured(2 * weights * layer.tokens[-1] / layer.forward_s[-1] / 1e12, f"{layer.tokens[-1]} tokens")
    # Two partials are read and one is written, with their LSE.
    moved = 3 * 4 * model.num_heads * (model.head_dim + 1) * merge.sizes[-1]
    yield MERGE.measured(
        moved / merge.seconds[-1] / 1e9, f"{merge.sizes[-1]} tokens; torch's operators, {model.num_heads} heads"
    )


def _points(attention: AttentionTable) -> int:
    return len(attention.q_tokens) * (len(attention.k_tokens) + len(attention.before_tokens))


def _silent(points: Iterable[Callable[[], None]], _count: int, _what: str) -> Iterator[Callable[[], None]]:
    return iter(points)

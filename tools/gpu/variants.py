"""Every variant of the Triton kernels, built before anything is timed: a process a type and head dim.

Where `tools/gpu/bare prepare --compiled` carried them along, nothing is compiled here.
"""

import multiprocessing
import time
from collections.abc import Iterator

from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 45.0
SETS = (("bfloat16", 64), ("float32", 64), ("bfloat16", 128), ("float32", 4), ("float32", 8))
"""(type, head dim) that the other parts launch; the last two: Megatron's and PyTorch's small GPTs."""

BUILT = {
    each: Figure(f"Triton variants of {each[0]} at head dim {each[1]}", "variants", Target("at least", 1), speed=True)
    for each in SETS
}
SECONDS = Figure("all of them, side by side", "s", speed=True)
FIGURES = (*BUILT.values(), SECONDS)


def measure(context: Context) -> Iterator[Row]:
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(len(SETS)) as pool:
        pending = {each: pool.apply_async(built, each) for each in SETS}
        for each, answer in pending.items():
            try:
                count, seconds = answer.get(context.left_s() - 1.0)
                yield BUILT[each].measured(count, f"{seconds:.1f} s")
            except Exception as error:
                yield BUILT[each].failed(f"{type(error).__name__}: {str(error)[-300:]}")
    yield SECONDS.measured(time.monotonic() - began)


def built(dtype: str, head_dim: int) -> tuple[int, float]:
    """Build the variants of one type and head dim: how many, and seconds."""
    import torch

    from megatron_balance.runtime.lower.memory import AttentionShape
    from megatron_balance.runtime.movers.triton.variants import build

    began = time.monotonic()
    count = build(torch.device("cuda"), getattr(torch, dtype), AttentionShape(2, 2, head_dim), "fp32")
    torch.cuda.current_stream().synchronize()
    return count, time.monotonic() - began

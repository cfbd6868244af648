"""Host time of launches and of a layer, and 200 batches of ever new lengths.

No kernel may be compiled and no device memory asked for once the first of them are through.
"""

import random
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import Groups, single
from megatron_balance.runtime.movers import choose_mover
from tools.gpu import kernels
from tools.gpu.rows import Context, Device, Figure, Row, Target

BUDGET_S = 30.0
SMALL = kernels.Shape(2048, 8, 8, 2, 64)
MERGES = tuple(f"merge of {n} partials" for n in kernels.PARTIALS)
HOST = {name: Figure(f"{name}: host time of a call", "us", speed=True) for name in (*kernels.MOVES, *MERGES)}
RATIO = Figure("host time of a layer's attention over its kernels' time", "", Target("at most", 0.5), speed=True)
BATCHES = {"cuda": 200, "cpu": 8}
WARM = {"cuda": 50, "cpu": 4}
LONGEST = {"cuda": 4000, "cpu": 40}
COMPILED = Figure("kernels compiled by ever new lengths, once warm", "kernels", Target("equal", 0), speed=True)
ASKED = Figure("device memory asked for by ever new lengths, once warm", "cudaMalloc", Target("equal", 0), speed=True)
FINITE = Figure("batches of ever new lengths with results that are no numbers", "batches", Target("equal", 0))
FIGURES = (*HOST.values(), RATIO, FINITE, COMPILED, ASKED)
HEADS, HEAD_DIM = (8, 4), 128
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
LAYER_HEADS = (32, 8)
LAYER_LENGTHS = (3000, 2000, 1200, 800, 500, 300, 200, 100, 60, 32)
"""A rank's 8k tokens in documents as a batch has them."""


def measure(context: Context) -> Iterator[Row]:
    device = torch.device(context.device)
    pool = single()  # of a whole job, as in training
    if context.on_gpu:
        mover = choose_mover("triton", device)
        for case in kernels.cases(SMALL, device):
            yield HOST[case.name].measured(1e6 * host_s(case.run(mover)), "the least of 5 means of 100 calls")
        step = step_of(bound(LAYER_LENGTHS, LAYER_HEADS, context.device, pool), context.device)
        of_host, of_gpu = host_s(step, 10), kernels.gpu_s(step, 3)
        yield RATIO.measured(of_host / of_gpu, f"{1e6 * of_host:.0f} us over {1e6 * of_gpu:.0f} us")
    yield from _ever_new(context, pool)


def host_s(call: Callable[[], object], calls: int = 100) -> float:
    """Seconds of the host in a call, the least of five means; the device catches up between them."""
    call()
    means: list[float] = []
    for _ in range(5):
        torch.cuda.current_stream().synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - begin) / calls)
    torch.cuda.current_stream().synchronize()
    return min(means)


def _ever_new(context: Context, pool: Groups) -> Iterator[Row]:
    from triton import knobs

    compiled: list[str] = []

    def note(*, fn: Any, **_: Any) -> bool:
        compiled.append(fn.name)
        return False  # go on and compile

    knobs.runtime.jit_cache_hook = note  # this process ends with its part
    draw = random.Random(3)
    marks: list[tuple[int, int]] = []
    seconds: list[float] = []
    wrong = 0
    for _ in range(BATCHES[context.device]):
        most = draw.choice((5, LONGEST[context.device] // 10, LONGEST[context.device]))
        lengths = tuple(draw.randint(1, most) for _ in range(draw.randint(1, 9)))
        begin = time.perf_counter()
        results = step_of(bound(lengths, HEADS, context.device, pool), context.device)()
        seconds.append(time.perf_counter() - begin)
        wrong += not all(bool(x.isfinite().all()) for x in results)
        asked = torch.cuda.memory_stats()["num_device_alloc"] if context.on_gpu else 0
        marks.append((len(compiled), asked))
    yield FINITE.measured(wrong, f"of {len(marks)}")
    if context.on_gpu:
        warm = marks[WARM["cuda"] - 1]
        note_s = (
            f"after the first {WARM['cuda']} of {len(marks)}; median {1e3 * median(seconds):.1f} ms to bind and run"
        )
        yield COMPILED.measured(marks[-1][0] - warm[0], f"{warm[0]} before; {', '.join(sorted(set(compiled)))}")
        yield ASKED.measured(marks[-1][1] - warm[1], note_s)


def bound(lengths: tuple[int, ...], heads: tuple[int, int], device: Device, pool: Groups) -> Bound:
    """A plan for one rank, as training binds it: two zones have every other document each, so rows are
    packed for both, and put back.
    """
    seqs = tuple(range(len(lengths)))
    zones = tuple(Zone(name, "ring", (0,), each) for name, each in (("even", seqs[::2]), ("odd", seqs[1::2])) if each)
    plan = MicrobatchPlan("by_hand", lengths, 1, 1, *heads, zones)
    return bind(plan, 0, AttentionShape(*heads, HEAD_DIM), groups=pool, device=device, dtype=DTYPES[device])


def step_of(bound: Bound, device: Device) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward of one attention call, on tensors that are there already: all results."""
    heads, kv_heads = bound.shape.num_heads, bound.shape.num_kv_heads
    q, k, v = (
        torch.randn(bound.num_tokens, h, HEAD_DIM, device=device, dtype=DTYPES[device], requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    grad = torch.ones_like(q)

    def step() -> tuple[torch.Tensor, ...]:
        out = balanced_attention(q, k, v, bound)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    return step

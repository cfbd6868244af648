"""The Triton kernels: equal to their plain twins, and as fast as their bytes.

Fragments of mixed length are packed into another order, unpacked, packed into a message's bytes,
added and merged, at the heads of a model of 7B with grouped keys (32, 8, 128). Speeds are shares of
the bandwidth of a plain copy measured in the same run; bytes are what must be read and written
once, indices not counted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.memory import AttentionShape, CallForm, layout, unpack
from megatron_balance.runtime.lower.steps import Packed, RowRun
from megatron_balance.runtime.movers import choose_mover
from megatron_balance.runtime.movers.base import Mover, PlainMover, RowMove, Sent, Space
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 50.0
PARTIALS = (2, 4, 8)
_AHEAD_CYCLES = 4_000_000
"""About two milliseconds of work that goes first, so that all calls of a sample are queued."""
LAST_PLACE = 2.0**-7
"""Of bf16, in parts of a value."""
SHARE = Target("at least", 0.9)
MOVES = ("pack q, k and v", "unpack q, k and v", "pack a message's bytes", "add gradients of q, k and v")


def _equal(name: str, limit: float) -> Figure:
    target = Target("at most", limit) if limit else Target("equal", 0.0)
    return Figure(f"{name}: largest difference from the plain twin", "of the largest value", target)


EQUAL = {name: _equal(name, 2e-6 if name.startswith("add") else 0.0) for name in MOVES}
# The interpreter cuts off where hardware and torch round, so a converted value may be a whole last
# place away.
EQUAL |= {f"merge of {n} partials": _equal(f"merge of {n} partials", 2 * LAST_PLACE) for n in PARTIALS}
COPY = Figure("plain copy", "GB/s read and written", speed=True)
SPEED = {name: Figure(f"{name}: share of the copy's bandwidth", "", SHARE, speed=True) for name in EQUAL}
FIGURES = (*EQUAL.values(), COPY, *SPEED.values())


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens in `fragments` of mixed length, and heads.

    `tokens` x 8 KiB of queries are far more than a cache holds on a GPU.
    """

    tokens: int
    fragments: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


GPU_SHAPE, CPU_SHAPE = Shape(32768, 64, 32, 8, 128), Shape(70, 5, 4, 2, 16)


@dataclass(frozen=True, slots=True)
class Case:
    """A move to check and to time: `run` with a mover makes `results`; it must touch `num_bytes`."""

    name: str
    num_bytes: int
    run: Callable[[Mover], Callable[[], Any]]
    results: Callable[[], list[Tensor]]


def measure(context: Context) -> Iterator[Row]:
    """Rows of the moves, then of the merges."""
    if not context.on_gpu and (fault := interpreter_fault()):
        yield from (figure.not_measured(fault) for figure in EQUAL.values())
        return
    device = torch.device(context.device)
    shape = GPU_SHAPE if context.on_gpu else CPU_SHAPE
    fast, plain = choose_mover("triton", device), PlainMover()
    copied = 0.0
    if context.on_gpu:
        copied = _copy_bytes_per_s(1 << 29)
        yield COPY.measured(copied / 1e9)
    for case in cases(shape, device):
        expected = _after(case, plain)
        yield EQUAL[case.name].measured(difference(_after(case, fast), expected))
        if context.on_gpu:
            seconds = gpu_s(case.run(fast))
            yield SPEED[case.name].measured(
                case.num_bytes / seconds / copied, f"{seconds * 1e6:.0f} us, {case.num_bytes / 1e6:.0f} MB"
            )


def interpreter_fault() -> str:
    """The reason why Triton's interpreter cannot run here; "" if it can."""
    of_triton, of_numpy = (tuple(map(int, each.split(".")[:2])) for each in (version("triton"), version("numpy")))
    fails = of_triton < (3, 7) and of_numpy > (2, 3)
    return f"the interpreter of Triton {version('triton')} needs NumPy 2.3, here is {version('numpy')}" if fails else ""


def _after(case: Case, mover: Mover) -> list[Tensor]:
    case.run(mover)()
    return [x.clone() for x in case.results()]


def difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, of the largest value of its tensor; infinite where one is not finite."""
    worst = 0.0
    for a, b in zip(results, expected, strict=True):
        apart = float((a.float() - b.float()).abs().max()) / max(1e-30, float(b.float().abs().max()))
        worst = max(worst, apart) if np.isfinite(apart) else float("inf")
    return worst


def cases(shape: Shape, device: torch.device) -> Iterator[Case]:
    """Made one after the other: each holds a gigabyte."""
    order = shuffled(shape)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    packed = [packed_rows(order, h, device) for h in heads]
    generator = torch.Generator(device).manual_seed(1)

    def values(num_heads: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape.tokens, num_heads, shape.head_dim, generator=generator, device=device).to(dtype)

    sources = [values(h, torch.bfloat16) for h in heads]
    targets = [torch.zeros_like(x) for x in sources]
    num_bytes = 2 * sum(x.nbytes for x in sources)
    fills = [RowMove(p, (x,), y) for p, x, y in zip(packed, sources, targets, strict=True)]
    yield Case(MOVES[0], num_bytes, lambda mover: lambda: mover.fill(fills), lambda: targets)
    places = [RowMove(p, (y,), x) for p, x, y in zip(packed, sources, targets, strict=True)]
    yield Case(MOVES[1], num_bytes, lambda mover: lambda: mover.place(places), lambda: targets)
    form = CallForm.of(AttentionShape(*heads[:2], shape.head_dim), torch.bfloat16, "fp32")
    carried = [(Kind.Q, shape.tokens, heads[0]), (Kind.KV, shape.tokens, heads[1])]
    raw = torch.zeros(layout(tuple(carried), form).num_bytes, dtype=torch.uint8, device=device)
    (q,), (kv,) = unpack(raw, carried, form)
    messages = [RowMove(p, (x,), y) for p, x, y in zip(packed, sources, (q, kv[0], kv[1]), strict=True)]
    yield Case(MOVES[2], num_bytes, lambda mover: lambda: mover.fill(messages), lambda: [raw])
    yield _adding(sources, packed)
    for num in PARTIALS:
        yield _merging(shape, num, values)


def _adding(sources: list[Tensor], packed: list[Packed]) -> Case:
    totals = [torch.zeros(x.shape, device=x.device) for x in sources]
    adds = [RowMove(p, (y,), x) for p, x, y in zip(packed, sources, totals, strict=True)]
    num_bytes = sum(x.nbytes for x in sources) + 2 * sum(y.nbytes for y in totals)

    def run(mover: Mover) -> Callable[[], None]:
        for total in totals:
            total.zero_()
        return lambda: mover.add(adds)

    return Case(MOVES[3], num_bytes, run, lambda: totals)


def _merging(shape: Shape, num: int, values: Callable[[int, torch.dtype], Tensor]) -> Case:
    """Partials of all queries merged into the final type: read once, written once."""
    rows = packed_rows(np.arange(shape.tokens), shape.num_heads, None)
    outs = [values(shape.num_heads, torch.bfloat16) for _ in range(num)]
    lses = [values(shape.num_heads, torch.float32)[:, :, 0].contiguous() for _ in range(num)]
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    sizes = {0: (shape.tokens, shape.num_heads)}
    space = Space(
        sizes,
        (),
        shape.head_dim,
        torch.bfloat16,
        torch.float32,
        lambda s, dtype: torch.empty(s, dtype=dtype, device=out.device),
        num,
    )

    def run(mover: Mover) -> Callable[[], Any]:
        held = mover.partials(space)
        for index, (x, y) in enumerate(zip(outs, lses, strict=True)):
            # The plain twin goes on in the first one's memory.
            held.add(rows, (index > 0,), x, y.clone())
        return lambda: held.send([Sent(rows, out, lse)])

    num_bytes = (num + 1) * (out.nbytes + lse.nbytes)
    return Case(f"merge of {num} partials", num_bytes, run, lambda: [out, lse])


def shuffled(shape: Shape) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The tokens of fragments of mixed length, the fragments in another order."""
    random = np.random.default_rng(7)
    cuts = np.sort(random.choice(np.arange(1, shape.tokens), shape.fragments - 1, replace=False))
    fragments = np.split(np.arange(shape.tokens), cuts)
    return np.concatenate([fragments[i] for i in random.permutation(len(fragments))])


def packed_rows(rows: np.ndarray[Any, np.dtype[np.int64]], num_heads: int, device: torch.device | None) -> Packed:
    """These rows of one buffer, all heads."""
    count = len(rows)
    if (rows == np.arange(count)).all():
        return Packed((RowRun(0, count, 0, 0, count, None, 0, num_heads, 0),), count, num_heads, (None,), direct=True)
    run = RowRun(0, count, 0, int(rows[0]), int(rows[0]) + count, rows, 0, num_heads, 0)
    return Packed((run,), count, num_heads, (torch.from_numpy(rows).to(device),), direct=False)


def gpu_s(call: Callable[[], object], calls: int = 10, samples: int = 7) -> float:
    """Median over samples of the mean of some calls, after one that warms up (and compiles)."""
    call()
    samples_s: list[float] = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_AHEAD_CYCLES)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        samples_s.append(begin.elapsed_time(end) / 1e3 / calls)
    return median(samples_s)


def _copy_bytes_per_s(num_bytes: int) -> float:
    """Bytes read and written a second by a plain copy of so many bytes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / gpu_s(lambda: target.copy_(source))

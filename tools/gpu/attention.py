"""Attention kernels: as fast as one dense call, as exact as one flash call.

Many fragments in one launch, in bf16.

Every attention kernel that is installed is held against the plain formula. A CPU has its own flash
kernel for the small checks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_balance.cost.kernel import TILE_TOKENS, law_of
from megatron_balance.ir.forest import Forest
from megatron_balance.runtime.kernels import KERNELS, choose_kernel
from megatron_balance.runtime.kernels.base import Entries, Kernel, PlainKernel
from megatron_balance.runtime.lower.steps import Packed
from megatron_balance.runtime.movers import choose_mover
from megatron_balance.runtime.movers.base import RowMove, Space
from tools.gpu.kernels import gpu_s, packed_rows
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 40.0
HEADS, KV_HEADS, DIM = 32, 8, 128
FRAGMENTS, LEAST, TOKENS = 64, 128, 32768
CHUNKS = 4
RESULTS = ("out", "dq", "dk", "dv")
DIMS = (64, 96, 128)
_ROWS = ((0, 33), (33, 34), (34, 104), (104, 134))
_ONE_EACH = ((0, 1), (1, 2), (2, 3))
CASES = {
    "full and causal entries": Entries(
        ((0, 33), (40, 41), (50, 120), (120, 150)),
        ((12, 45), (0, 1), (2, 119), (119, 150)),
        (True, False, True, False),
        _ROWS,
    ),
    # FlashAttention swaps groups and queries there, LSE included.
    "entries of one query": Entries(_ONE_EACH, ((0, 120), (120, 121), (40, 150)), (True, False, True), _ONE_EACH),
    "windows": Entries(_ROWS, ((0, 37), (30, 34), (30, 104), (100, 134)), (False,) * 4, _ROWS, ((4, 0), (3, 0)) * 2),
}
Four = tuple[Tensor, Tensor, Tensor, Tensor]

ON_A_GPU = tuple(name for name, offer in KERNELS.items() if offer.devices == ("cuda",))
AGAINST_PLAIN = {
    name: Figure(
        f"{name}: largest difference from the plain formula, forward and backward",
        "of the largest value",
        Target("at most", 2e-2),
    )
    for name in ("cpu_flash", *ON_A_GPU)
}
LAUNCHES = Figure(f"launches for {FRAGMENTS} fragments of mixed length", "", Target("equal", 1.0))
PHASES = ("forward", "backward")
RATES = {
    (name, phase): Figure(f"{name}: {FRAGMENTS} sequences of one length, {phase}", "TFLOP/s", speed=True)
    for name in ON_A_GPU
    for phase in PHASES
}
SHARE = {
    phase: Figure(
        f"{FRAGMENTS} fragments in one launch, {phase}: share of a dense call's throughput",
        "",
        Target("at least", 0.95),
        speed=True,
    )
    for phase in PHASES
}
EMPTY = {
    name: Figure(f"{name}: an SM's time for a block of a backward's grid that has no work", "us", speed=True)
    for name in ON_A_GPU
    if law_of(name).key_blocks
}
"""The one price of attention that is estimated (docs/costs.md)."""
WIDE, DOCUMENTS = 16384, 256
CUDNN = Figure("cuDNN behind torch, variable lengths: forward over the chosen kernel's rate", "times", speed=True)
CUDNN_APART = Figure("cuDNN behind torch, variable lengths: largest difference from it", "of the largest", speed=True)
TREES = Figure(
    "rollouts as trees: largest difference from TRL's tree attention, forward and backward",
    "of the largest value",
    Target("at most", 2e-2),
)
WAYS = {"one launch": "one launch over fragments", f"{CHUNKS} partials": f"keys in {CHUNKS} parts, merged"}
ERROR = {
    (way, name): Figure(f"bf16 {name}, {shown}: error against fp64, of one flash call's", "", Target("at most", 1.1))
    for way, shown in WAYS.items()
    for name in RESULTS
}
FIGURES = (
    *EMPTY.values(),
    *AGAINST_PLAIN.values(),
    TREES,
    LAUNCHES,
    *RATES.values(),
    *SHARE.values(),
    CUDNN,
    CUDNN_APART,
    *ERROR.values(),
)


def measure(context: Context) -> Iterator[Row]:
    """Rows of the kernels that are here, then of the one that is chosen by itself."""
    device = torch.device(context.device)
    if context.on_gpu:
        yield from _empty_blocks(device)
    for name, figure in AGAINST_PLAIN.items():
        offer = KERNELS[name]
        if device.type not in offer.devices:
            yield figure.not_measured(f"does not serve {device.type}")
        elif reason := offer.refusal(device, torch.bfloat16, 64) or offer.fault():
            yield figure.not_measured(reason)
        else:
            worst = {
                (what, dim): apart_from_plain(choose_kernel(name, device, torch.bfloat16, dim), dim, entries, device)
                for what, entries in CASES.items()
                for dim in DIMS
                if not offer.refusal(device, torch.bfloat16, dim, windows=bool(entries.windows))
            }
            what, dim = max(worst, key=lambda case: worst[case])
            yield figure.measured(worst[what, dim], f"{len(worst)} cases; the worst is {what} at head dim {dim}")
    lengths = mixed_lengths(FRAGMENTS, LEAST, TOKENS)
    kernel = choose_kernel("auto", device, torch.bfloat16, DIM)
    yield _beside_trl(kernel, device)
    if context.on_gpu:
        yield LAUNCHES.measured(kernel.launches(kernel.prepare(squares(lengths), device)), kernel.name)
        yield from _throughput(kernel.name, batches(lengths), device)
    else:
        yield LAUNCHES.not_measured(f"{kernel.name} takes a call for each entry")
    rows, heads, dim = (4096, 8, 128) if context.on_gpu else (512, 2, 32)
    yield from _errors(kernel, (rows, heads, dim), device)
    if context.on_gpu:
        yield from _cudnn(kernel, lengths, device)  # last: nothing here has called it before


def _empty_blocks(device: torch.device) -> Iterator[Row]:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    for name, figure in EMPTY.items():
        offer, blocks = KERNELS[name], law_of(name).key_blocks
        if reason := offer.refusal(device, torch.bfloat16, DIM) or offer.fault():
            yield figure.not_measured(reason)
        elif blocks is not None:
            found_s = empty_s(choose_kernel(name, device, torch.bfloat16, DIM), num_sms, device)
            yield figure.measured(1e6 * found_s, f"priced at {1e6 * blocks.empty_s:g}")


def empty_s(kernel: Kernel, num_sms: int, device: torch.device) -> float:
    """Seconds that an SM spends on a block without work: what the backward of short documents takes
    more where its launch is told that the longest has `WIDE` keys.
    """
    prepared = kernel.prepare(squares([TILE_TOKENS] * DOCUMENTS), device)
    (group,) = prepared.groups
    wide = replace(prepared, groups=(replace(group, at=replace(group.at, max_k=WIDE)),))
    x = _inputs((TILE_TOKENS * DOCUMENTS, HEADS, KV_HEADS, DIM), torch.bfloat16, device)
    out, lse = kernel.forward(prepared, *x, DIM**-0.5)
    final = (torch.ones_like(out), out, lse)
    short_s, wide_s = (
        gpu_s(lambda each=each: kernel.backward(each, final, *x, DIM**-0.5)) for each in (prepared, wide)
    )
    return (wide_s - short_s) * num_sms / (HEADS * DOCUMENTS * (WIDE // TILE_TOKENS - 1))


def _beside_trl(kernel: Kernel, device: torch.device) -> Row:
    needs = "needs a GPU, trl 1.16, and kernels-community/flash-attn3 in the cache of the package kernels"
    if device.type != "cuda":
        return TREES.not_measured(needs)
    try:
        from trl.experimental.async_grpo import packing

        packing._flash_attn()
    except Exception as error:  # not installed, or nothing in the cache and no network
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        return TREES.not_measured(f"{needs}: {told}")
    return TREES.measured(apart_from_trl(kernel, packing, device), f"{kernel.name}, against flash-attn3 of the hub")


def apart_from_trl(kernel: Kernel, packing: Any, device: torch.device, heads: int = 8, dim: int = DIM) -> float:
    """By how much outputs and gradients of drawn rollouts differ from those of TRL's `tree_attention`,
    of each tensor's largest; `packing`: TRL's module.
    """
    random, row = torch.Generator().manual_seed(3), packing.TreeRow()
    for prompt in (torch.randint(0, 9, (200,), generator=random), torch.randint(0, 9, (60,), generator=random)):
        for size in (70, 33, 1):
            turn = torch.cat([prompt, torch.randint(0, 9, (size,), generator=random)])
            for tokens in (turn, torch.cat([turn, torch.randint(0, 9, (20,), generator=random)])):
                none = torch.zeros(len(tokens))
                of_trl = {"completion_mask": none, "old_log_probs": none, "advantage": 0.0, "group_id": 0}
                row.add({"input_ids": tokens, **of_trl})
    packed = {name: each.to(device) for name, each in row.pack().items() if name.startswith(("position", "tree"))}
    longest = dict(
        zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), packed.pop("tree_max_seqlens").tolist(), strict=True)
    )
    forest = Forest.from_position_ids(packed.pop("position_ids").tolist())
    shape = (sum(forest.lengths), heads, dim)
    q, k, v, grad = (torch.randn(shape, generator=random).to(device, torch.bfloat16) for _ in range(4))
    given = [each.clone().requires_grad_() for each in (q, k, v)]
    by_heads = (each.transpose(0, 1)[None] for each in given)
    out = packing.tree_attention(torch.nn.Module(), *by_heads, None, **packed, **longest, scaling=dim**-0.5)[0][0]
    theirs = [out.detach(), *torch.autograd.grad(out, given, grad)]
    # A launch of the segments' own keys, then those of segments above, each of them once a launch.
    start, launches = 0, defaultdict[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]](list)
    for tree in forest.trees:
        spans = list(pairwise(accumulate((each.length for each in tree), initial=start)))
        start, times = spans[-1][1], Counter[tuple[int, int]]()
        for at, span in enumerate(spans):
            level, above = 0, at
            while above >= 0:
                launches[level, times[level, above]].append((span, spans[above]))
                times[level, above] += 1
                level, above = level + 1, tree[above].parent
    parts = list[Entries]()
    for (level, _), entries in sorted(launches.items()):
        queries, keys = zip(*entries, strict=True)
        parts.append(Entries(queries, keys, (level == 0,) * len(entries), queries))
    ours = _by_entries(kernel, parts, (q, k, v), grad)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def squares(lengths: list[int]) -> Entries:
    """Causal entries, one after the other."""
    ends = np.cumsum(lengths).tolist()
    spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return Entries(spans, spans, (True,) * len(spans), spans)


def mixed_lengths(count: int, least: int, total: int) -> list[int]:
    """Lengths of at least `least` that add up to `total`, most of them short and a few long."""
    weights = np.random.default_rng(3).lognormal(0.0, 1.2, count)
    lengths = least + np.floor(weights / weights.sum() * (total - count * least)).astype(int)
    lengths[-1] += total - int(lengths.sum())
    return lengths.tolist()


def batches(lengths: list[int]) -> dict[str, Entries]:
    """Launches to time: as many sequences of one length with as many pairs, `lengths`, short documents
    of as many tokens, and a rank's first and last quarter of each length, in a ring of two.
    """
    equal, ends = round((sum(n * n for n in lengths) / len(lengths)) ** 0.5), np.cumsum(lengths).tolist()
    spans, keys = [], []
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        quarter = (stop - start) // 4
        spans += [(start, start + quarter), (stop - quarter, stop)]
        keys += [(start, start + quarter), (start, stop)]
    packed = [0, *accumulate(stop - start for start, stop in spans)]
    halves = Entries(tuple(spans), tuple(keys), (True,) * len(spans), tuple(pairwise(packed)))
    return {
        "one length": squares([equal] * len(lengths)),
        "fragments": squares(lengths),
        f"documents of {LEAST} tokens": squares([LEAST] * (sum(lengths) // LEAST)),
        "half chunks": halves,
    }


def num_pairs(entries: Entries) -> int:
    """Pairs of a query and a key that an entry computes: causal at the bottom right, or full."""
    sizes = (((b - a), (d - c)) for (a, b), (c, d) in zip(entries.q, entries.k, strict=True))
    return sum(n * m - causal * n * (n - 1) // 2 for (n, m), causal in zip(sizes, entries.causal, strict=True))


def _throughput(chosen: str, launches: dict[str, Entries], device: torch.device) -> Iterator[Row]:
    """Rates of each library that is here, and what fragments take of the chosen one's."""
    shares = list[Row]()
    for name in ON_A_GPU:
        offer = KERNELS[name]
        if reason := offer.refusal(device, torch.bfloat16, DIM) or offer.fault():
            yield from (RATES[name, phase].not_measured(reason) for phase in PHASES)
            continue
        kernel = choose_kernel(name, device, torch.bfloat16, DIM)
        rates = {what: _rates(kernel, entries, device) for what, entries in launches.items()}
        (first, dense), *others = rates.items()
        for phase in PHASES:
            note = ", ".join(f"{what} {of[phase]:.0f}" for what, of in others)
            yield RATES[name, phase].measured(dense[phase], note)
            if name == chosen:
                share = rates["fragments"][phase] / dense[phase]
                shares.append(SHARE[phase].measured(share, f"{name}, over {first}"))
    yield from shares


def _rates(kernel: Kernel, entries: Entries, device: torch.device) -> dict[str, float]:
    """TFLOP/s, forward and backward."""
    x = _inputs((max(stop for _, stop in entries.k), HEADS, KV_HEADS, DIM), torch.bfloat16, device)
    prepared = kernel.prepare(entries, device)
    out, lse = kernel.forward(prepared, *x, DIM**-0.5)
    final = (torch.ones_like(out), out, lse)
    forward_s = gpu_s(lambda: kernel.forward(prepared, *x, DIM**-0.5))
    backward_s = gpu_s(lambda: kernel.backward(prepared, final, *x, DIM**-0.5))
    # Two products of 2 FLOPs a pair forward, five backward.
    forward_tflops = 4 * HEADS * DIM * num_pairs(entries) / 1e12
    return {"forward": forward_tflops / forward_s, "backward": 2.5 * forward_tflops / backward_s}


def _cudnn(kernel: Kernel, lengths: list[int], device: torch.device) -> Iterator[Row]:
    """Whether cuDNN's attention behind torch, published as faster than FlashAttention-2, takes the
    lengths of a batch: a candidate for `kernel: auto`.
    """
    entries, tokens = squares(lengths), sum(lengths)
    q, k, v = _inputs((tokens, HEADS, HEADS, DIM), torch.bfloat16, device)
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device)
    sizes, how = (ends, ends, max(lengths), max(lengths)), {"scale": DIM**-0.5}

    def call() -> Tensor:
        return torch.ops.aten._cudnn_attention_forward(q, k, v, None, *sizes, True, 0.0, True, False, **how)[0]

    try:
        ours, theirs = kernel.prepare(entries, device), call()
    except RuntimeError as error:
        yield from (figure.not_measured(str(error).splitlines()[0]) for figure in (CUDNN, CUDNN_APART))
        return
    of_kernel = gpu_s(lambda: kernel.forward(ours, q, k, v, DIM**-0.5))
    yield CUDNN.measured(of_kernel / gpu_s(call), f"{kernel.name}, {len(lengths)} lengths, {HEADS} heads of {DIM}")
    out = kernel.forward(ours, q, k, v, DIM**-0.5)[0].float()
    yield CUDNN_APART.measured(float((theirs.float() - out).abs().max() / out.abs().max()))


def apart_from_plain(kernel: Kernel, dim: int, entries: Entries, device: torch.device) -> float:
    """The largest difference of outputs, LSE and gradients, of the largest value; grouped keys."""
    inputs = _inputs((150, 4, 2, dim), torch.bfloat16, device)
    rows = max(stop for _, stop in entries.dout)
    grad = torch.randn(rows, 4, dim, device=device, generator=torch.Generator(device).manual_seed(5)).to(torch.bfloat16)
    results = []
    for one, (q, k, v) in ((kernel, inputs), (PlainKernel(), [x.double() for x in inputs])):
        prepared = one.prepare(entries, device)
        out, lse = one.forward(prepared, q, k, v, 0.125)
        results.append((out, lse, *one.backward(prepared, (grad.to(out.dtype), out, lse), q, k, v, 0.125)))
    return max(float((a.double() - b.double()).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def _inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, kv_heads, dim = shape
    generator = torch.Generator(device).manual_seed(2)
    q, k, v = (
        torch.randn(rows, h, dim, generator=generator, device=device).to(dtype) for h in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def _errors(kernel: Kernel, shape: tuple[int, int, int], device: torch.device) -> Iterator[Row]:
    """Errors (root mean square) of our ways to compute one causal sequence, over those of one call."""
    rows, heads, dim = shape
    x = _inputs((rows, heads, heads // 2, dim), torch.bfloat16, device)
    grad = torch.randn(rows, heads, dim, device=device, generator=torch.Generator(device).manual_seed(6)).to(
        torch.bfloat16
    )
    exact = _one_call(PlainKernel(), rows, tuple(t.double() for t in x), grad.double())
    flash = [_error(a, b) for a, b in zip(_one_call(kernel, rows, x, grad), exact, strict=True)]
    ways = {"one launch": _fragments(kernel, rows, x, grad), f"{CHUNKS} partials": _merged(kernel, rows, x, grad)}
    for way, results in ways.items():
        for name, one, ours, truth in zip(RESULTS, flash, results, exact, strict=True):
            yield ERROR[way, name].measured(_error(ours, truth) / one, f"one {kernel.name} call: {one:.2e}")


def _error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def _one_call(kernel: Kernel, rows: int, x: tuple[Tensor, ...], grad: Tensor) -> Four:
    (q, k, v), prepared = x, kernel.prepare(squares([rows]), grad.device)
    out, lse = kernel.forward(prepared, q, k, v, q.shape[2] ** -0.5)
    return out, *kernel.backward(prepared, (grad, out, lse), q, k, v, q.shape[2] ** -0.5)


def _fragments(kernel: Kernel, rows: int, x: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Four:
    """The queries in pieces of mixed length, each over all of its keys: entries of one launch."""
    ends = np.cumsum(mixed_lengths(8, rows // 16, rows)).tolist()
    spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return _by_entries(
        kernel, [Entries(spans, tuple((0, stop) for stop in ends), (True,) * len(spans), spans)], x, grad
    )


def _merged(kernel: Kernel, rows: int, x: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Four:
    """The keys in parts, as rounds of a ring bring them: a partial of each, merged."""
    bounds = [rows * i // CHUNKS for i in range(CHUNKS + 1)]
    parts = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        q, k, causal = [(start, stop)], [(start, stop)], [True]
        if stop < rows:
            q, k, causal = [*q, (stop, rows)], [*k, (start, stop)], [True, False]
        parts.append(Entries(tuple(q), tuple(k), tuple(causal), tuple(q)))
    return _by_entries(kernel, parts, x, grad)


def _by_entries(kernel: Kernel, parts: list[Entries], x: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Four:
    """Run launches as the executor does: partials merged by LSE, gradients summed in fp32."""
    device, scale, heads = x[0].device, x[0].shape[2] ** -0.5, (x[0].shape[1], x[1].shape[1])
    mover = choose_mover("auto", device)
    sizes = {0: (len(x[0]), heads[0])}
    space = Space(
        sizes,
        (0,),
        x[0].shape[2],
        x[0].dtype,
        torch.float32,
        lambda s, dtype: torch.empty(s, dtype=dtype, device=device),
    )
    partials = mover.partials(space)
    launches = [(part, kernel.prepare(part, device), _packed(part.q, heads[0], device)) for part in parts]
    for _, prepared, packed in launches:
        partials.add(packed, (True,) * len(packed.runs), *kernel.forward(prepared, *x, scale))
    out, lse = partials.final()
    totals = [torch.zeros(t.shape, device=device) for t in x]
    for part, prepared, packed in launches:
        grads = kernel.backward(prepared, (grad, out, lse), *x, scale)
        keys = _packed(part.k, heads[1], device)
        mover.add(
            [RowMove(p, (t,) * len(p.runs), g) for p, g, t in zip((packed, keys, keys), grads, totals, strict=True)]
        )
    dq, dk, dv = (t.to(x[0].dtype) for t in totals)
    return out, dq, dk, dv


def _packed(spans: tuple[tuple[int, int], ...], num_heads: int, device: torch.device) -> Packed:
    return packed_rows(np.concatenate([np.arange(a, b) for a, b in spans]), num_heads, device)

"""Random plans of every planner over the product's own streams and communicators, against fp64.

Remapped, routed, of both policies, some as two nano-batches: those of `tools.faults rendezvous`, a
third of them under sliding windows, drawn ahead by `tools/gpu/bare prepare` so that no second on a
GPU goes to planning. Every other one runs in fp32 with the plain formula, whose error is so small
that a race shows, and half of them with sinks that learn.
"""

import lzma
import pickle
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import layout
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.mask import Mask, SlidingWindow
from megatron_balance.ir.plan import MicrobatchPlan
from tools.faults import rendezvous
from tools.gpu import ranks
from tools.gpu.ranks import Place
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 75.0
SHARES = {2: 0.2, 4: 0.4, 8: 0.4}
"""Of the time, by number of ranks."""
CLOSE_S = 4.0
"""Of each share, for the plan under way at its end and for the ranks to leave."""
FEW = 12
"""Plans of each number of ranks where none were drawn ahead."""
SMALL = 700
"""Tokens of the longest document without a GPU."""
HEAD_DIM = 64
WINDOWED, WINDOWS = 1 / 3, (1, 2, 5, 17, 64)
"""Of all plans, those under a window; and its keys."""
ALLOWED = {"bfloat16": 0.02, "float32": 2e-5}
"""Error by type, of the largest value: bf16 rounds inputs, partials and results to a 256th each."""
NOTHING = 1e-9
DRAWN = Path(__file__).resolve().parents[2] / ".gpu" / "plans.pkl.xz"

WORST = {
    size: Figure(
        f"random plans on {size} ranks: largest error of outputs and gradients against fp64",
        "of what the type allows",
        Target("at most", 1.0),
    )
    for size in SHARES
}
RAN = {size: Figure(f"random plans on {size} ranks that ran", "plans", Target("at least", 1)) for size in SHARES}
FIGURES = tuple(figure for size in SHARES for figure in (WORST[size], RAN[size]))


@dataclass(frozen=True)
class Drawn:
    """Plans that run together (two: nano-batches), with the policy of their backward."""

    planner: str
    plans: tuple[MicrobatchPlan, ...]
    policy: Policy

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max((length for plan in self.plans for length in plan.lengths), default=0)


def draw(counts: Mapping[int, int]) -> dict[int, list[Drawn]]:
    """Draw plans by number of ranks, `counts` of each, the same every time; a third of them under
    windows, which cut some of their documents.
    """
    found: dict[int, list[Drawn]] = {size: [] for size in counts}
    number = 0
    while any(len(found[size]) < count for size, count in counts.items()):
        program = rendezvous.drawn(number)
        size = program.plans[0].num_ranks
        if len(found.get(size, ())) < counts.get(size, 0):
            rng, planned = random.Random(f"windows {number}"), program.plans
            if rng.random() < WINDOWED:
                mask = SlidingWindow(rng.choice(WINDOWS))
                planned = tuple(under(each, mask) for each in planned)
            found[size].append(Drawn(program.planner, planned, program.policy))
        number += 2  # the odd ones are of 16 ranks and more
    return found


def save(drawn: dict[int, list[Drawn]], path: Path) -> None:
    path.write_bytes(lzma.compress(pickle.dumps(drawn), preset=6))


def load(path: Path) -> dict[int, list[Drawn]]:
    """Those that `save` wrote, for this very tree: a pickle of our own."""
    return pickle.loads(lzma.decompress(path.read_bytes()))


def measure(context: Context) -> Iterator[Row]:
    drawn = load(DRAWN) if DRAWN.exists() else draw(dict.fromkeys(context.worlds, FEW))
    if not context.on_gpu:  # every rank makes the truth of all documents, by scores of all pairs
        drawn = {size: [each for each in own if each.longest <= SMALL] or own[:1] for size, own in drawn.items()}
    # A kit's plans take whatever they are given; without a GPU a part may take longer than its budget.
    whole, left = sum(SHARES[size] for size in context.worlds), min(BUDGET_S, context.left_s())
    for size in SHARES.keys() - set(context.worlds):
        for figure in (WORST[size], RAN[size]):
            yield figure.not_measured(f"{context.ranks} ranks here")
    for size in context.worlds:
        until = time.monotonic() + SHARES[size] / whole * left - CLOSE_S
        given, most_s = (drawn[size], until), context.left_s() - 2.0
        ended = ranks.run_ranks(_rank, size, given, context, seconds=most_s)
        if not ended.well:
            for figure in (WORST[size], RAN[size]):
                yield figure.failed(f"{ended.hung} ranks hung, exit codes {ended.codes}: {ended.said}")
            continue
        found = ended.results()
        bad = [each for rank in found for each in rank["bad"]]
        slowest = max(rank["slowest_s"] for rank in found)
        note = f"slowest {slowest:.2f} s; above it: {'; '.join(bad[:3]) or 'none'}"
        yield WORST[size].measured(max(rank["worst"] for rank in found), note)
        yield RAN[size].measured(found[0]["ran"], f"of {len(drawn[size])}, {'NCCL' if context.on_gpu else 'gloo'}")


def _rank(place: Place, drawn: Sequence[Drawn], until: float) -> dict[str, Any]:
    """Run plans, at least one, until rank 0 says that the time is over (`time.monotonic`, which all
    processes share).
    """
    import torch
    import torch.distributed as dist

    ranks.join(place)
    pools: dict[int, Any] = {}
    worst, slowest, ran, bad = 0.0, 0.0, 0, list[str]()
    for number, each in enumerate(drawn):
        over = torch.tensor([float(ran > 0 and time.monotonic() > until)], device=place.device)
        dist.broadcast(over, 0)
        if over.item():
            break
        per_node = each.plans[0].ranks_per_node
        if per_node not in pools:
            pools[per_node] = ranks.groups(place, per_node)
        dtype = ("bfloat16", "float32")[number % 2]
        print(f"plan {number} of {each.planner}, {each.policy}, {dtype}", flush=True)  # where ranks hang, the last
        began = time.monotonic()
        error = worst_error(place, pools[per_node], each, dtype, number) / ALLOWED[dtype]
        worst, slowest, ran = max(worst, error), max(slowest, time.monotonic() - began), ran + 1
        if error > 1.0:
            bad.append(f"plan {number}, {each.planner}, {each.policy}, {dtype}, rank {place.rank}: {error:.3g}")
    ranks.leave()
    return {"worst": worst, "slowest_s": slowest, "ran": ran, "bad": bad}


def worst_error(place: Place, pool: Any, drawn: Drawn, dtype: str, seed: int) -> float:
    """The largest error of this rank's outputs and gradients, each of its tensor's largest value;
    infinite where one is not finite. `seed`: of the values; of every four, two have sinks.
    """
    import torch

    from megatron_balance.runtime.bind import AttentionShape, bind

    first = drawn.plans[0]
    shape = AttentionShape(first.num_heads, first.num_kv_heads, HEAD_DIM)
    how: Any = {"device": place.device, "dtype": getattr(torch, dtype)}
    kernel = "plain" if dtype == "float32" else "auto"
    bounds = [
        bind(plan, place.rank, shape, groups=pool, policy=drawn.policy, kernel=kernel, nano_batch=at, **how)
        for at, plan in enumerate(drawn.plans)
    ]
    generator = torch.Generator(place.device).manual_seed(seed)
    heads = (first.num_heads, first.num_kv_heads, first.num_kv_heads, first.num_heads)
    drawn_values = [
        [
            [torch.randn(length, h, HEAD_DIM, generator=generator, device=place.device).to(how["dtype"]) for h in heads]
            for length in plan.lengths
        ]
        for plan in drawn.plans
    ]
    owned = [layout(plan, place.rank).tolist() for plan in drawn.plans]

    def rows(at: int, which: int) -> Any:
        parts = [drawn_values[at][seq][which][start:stop] for seq, start, stop in owned[at]]
        return torch.cat([torch.empty(0, heads[which], HEAD_DIM, **how), *parts])

    leaves = [[rows(at, which).requires_grad_() for which in range(3)] for at in range(len(bounds))]
    flat = [leaf for of_plan in leaves for leaf in of_plan]
    sink = None
    if seed % 4 > 1:
        sink = torch.linspace(-3.0, 4.0, heads[0], device=place.device, requires_grad=True)  # below scores, and above
        flat.append(sink)
    outs = _attended(leaves, bounds, sink)
    grads = torch.autograd.grad(outs, flat, [rows(at, 3) for at in range(len(bounds))])
    worst, of_sink = 0.0, [torch.zeros(0, heads[0], dtype=torch.float64, device=place.device)]
    for at, (plan, values) in enumerate(zip(drawn.plans, drawn_values, strict=True)):
        truth = [_dense([x.double() for x in each], sink, plan.mask) for each in values]
        for which, ours in enumerate((outs[at].detach(), *grads[3 * at : 3 * at + 3])):
            wanted = [truth[seq][which][start:stop] for seq, start, stop in owned[at]]
            if wanted:
                largest = max(float(each[which].abs().max()) for each in truth)
                worst = max(worst, _apart(ours, torch.cat(wanted), largest))
        of_sink += [truth[seq][4][start:stop] for seq, start, stop in owned[at]]
    if sink is not None:
        each = torch.cat(of_sink)
        # Terms of both signs: their sum is about as large as the root of the sum of their squares.
        worst = max(worst, _apart(grads[-1], each.sum(0), float(each.square().sum(0).sqrt().max())))
    return worst


def _apart(ours: Any, wanted: Any, largest: float) -> float:
    """The largest difference, of `largest`, or of 1 where that is but rounding: queries of a single
    key have no gradient. Infinite where one is not finite.
    """
    error = float((ours.double() - wanted).abs().max()) / (largest if largest > NOTHING else 1.0)
    return error if error == error else float("inf")  # noqa: PLR0124  not a number


def _attended(leaves: Sequence[Sequence[Any]], bounds: Sequence[Any], sink: Any) -> list[Any]:
    """Outputs; of two nano-batches as a layer of them runs."""
    from megatron_balance.runtime.attention import AttentionCall, balanced_attention

    if len(bounds) == 1:
        q, k, v = leaves[0]
        return [balanced_attention(q, k, v, bounds[0], sink=sink)]
    calls = [AttentionCall(bound, sink=sink) for bound in bounds]
    for call, (q, k, v) in zip(calls, leaves, strict=True):
        call.start(q, k, v)
    for call in calls:
        call.attend()
    return [call.end() for call in calls]


def _dense(given: Sequence[Any], sink: Any, mask: Mask) -> tuple[Any, ...]:
    """Output and gradients (q, k, v; [T, H], each query's sink) of attention of q [T, H, D], k and
    v [T, G, D] and the output's gradient. `sink` [H]: the score of one more key, whose value is zero;
    or None.
    """
    import torch

    q, k, v = (x.requires_grad_() for x in given[:3])
    groups, device = q.shape[1] // k.shape[1], q.device
    sinks = torch.full(q.shape[:2], float("-inf"), dtype=q.dtype, device=device)
    if sink is not None:
        sinks[:] = sink.detach()
    sinks.requires_grad_()
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
    at = np.arange(len(q))
    first, stop = (each[:, None] for each in mask.keys(0, at))
    hidden = torch.from_numpy((at < first) | (at >= stop)).to(device)
    scores = scores.masked_fill(hidden, float("-inf"))
    whole = torch.logaddexp(scores.logsumexp(-1), sinks.T)
    out = torch.einsum("hqk,khd->qhd", (scores - whole[..., None]).exp(), values)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), given[3]))

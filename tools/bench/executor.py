"""Cost of the executor: its Python time against the budget, and te_ring against a ring written by
hand with the same kernels.

python tools/bench/executor.py [--ranks 4] [--tokens 4096] [--repeats 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from own_time import ours
from ranks import run
from torch import Tensor

from megatron_balance import Cluster, Model, make_planner
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import Groups, make_groups

HEADS, KV_HEADS, DIM = 8, 2, 32
MODEL = Model(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
BUDGET_CALL_US, BUDGET_OP_US = 200.0, 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run both benchmarks on forked gloo ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the one sequence of the ring comparison")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    run(options.ranks, lambda rank: _job(rank, options))
    return 0


def _job(rank: int, options: argparse.Namespace) -> None:
    groups = make_groups([list(range(options.ranks))])
    result = {"python_time": _python_time(groups, options.repeats), "ring": _ring(groups, options)}
    if rank:
        return
    if options.json:
        print(json.dumps(result))
        return
    for row in result["python_time"]:
        print(
            f"{row['phase']:9} {row['sequences']} sequences, {row['steps']:2} steps: our Python {row['our_us']:7.0f} "
            "us a call "
            f"(spread {row['spread_us']:.0f}), "
            f"budget {row['budget_us']:.0f} us, ratio {row['our_us'] / row['budget_us']:.2f}"
        )
    ring = result["ring"]
    print(
        f"ring of {options.ranks}, {options.tokens} tokens, forward + backward: executor {ring['executor_ms']:.1f} ms, "
        f"by hand {ring['by_hand_ms']:.1f} ms, "
        f"median of the paired ratios {ring['ratio']:.3f} (from {ring['ratio_min']:.3f} to {ring['ratio_max']:.3f}), "
        "target <= 1.05"
    )


def _tensors(bound: Bound) -> list[Tensor]:
    torch.manual_seed(bound.rank)
    return [torch.randn(bound.num_tokens, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _python_time(groups: Groups, repeats: int) -> list[dict[str, Any]]:
    """Time in our own code of one call, tiny tensors, calls into torch not counted."""
    return [row for lengths in ([144], [64, 48, 32]) for row in _python_time_of(lengths, groups, repeats)]


def _python_time_of(lengths: list[int], groups: Groups, repeats: int) -> list[dict[str, Any]]:
    plan = make_planner("te_ring", Cluster(groups.size, groups.size), MODEL)(lengths)
    bound = bind(plan, groups.rank, AttentionShape(HEADS, KV_HEADS, DIM), groups=groups)
    inputs = _tensors(bound)
    rows: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(repeats + 1):
        forward_us, out = ours(lambda: balanced_attention(inputs[0], inputs[1], inputs[2], bound))
        backward_us, _ = ours(out.sum().backward)
        rows["forward"].append(forward_us)
        rows["backward"].append(backward_us)
    found = []
    for phase, times in rows.items():
        steps = len(getattr(bound, phase).steps)
        warm = times[1:]
        budget = BUDGET_CALL_US + BUDGET_OP_US * steps
        spread = max(warm) - min(warm)
        found.append(
            {
                "phase": phase,
                "sequences": len(lengths),
                "steps": steps,
                "our_us": statistics.median(warm),
                "spread_us": spread,
                "budget_us": budget,
            }
        )
    return found


def _ring(groups: Groups, options: argparse.Namespace) -> dict[str, float]:
    """Executor and hand-written ring, alternating; medians of the slowest rank's time."""
    plan = make_planner("te_ring", Cluster(groups.size, groups.size), MODEL)([options.tokens])
    bound = bind(plan, groups.rank, AttentionShape(HEADS, KV_HEADS, DIM), groups=groups)
    inputs = _tensors(bound)
    scale = 1 / math.sqrt(DIM)
    by_hand = _ByHand(groups, inputs[0].shape[0], scale)
    dout = torch.ones_like(inputs[0])

    def executor() -> list[Tensor]:
        out = balanced_attention(inputs[0], inputs[1], inputs[2], bound, scale)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    def hand() -> list[Tensor]:
        q, k, v = (x.detach() for x in inputs)
        out, lse, blocks = by_hand.forward(q, k, v)
        return [out, *by_hand.backward(dout, q, out, lse, blocks)]

    for a, b in zip(executor(), hand(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    times: dict[str, list[float]] = {"executor": [], "hand": []}
    for turn in range(2 * options.repeats):
        first, second = (executor, hand) if turn % 2 else (hand, executor)
        for call in (first, second):
            times["executor" if call is executor else "hand"].append(_slowest(call))
    ratios = [a / b for a, b in zip(times["executor"], times["hand"], strict=True)]
    return {
        "executor_ms": 1e3 * statistics.median(times["executor"]),
        "by_hand_ms": 1e3 * statistics.median(times["hand"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _slowest(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


class _ByHand:
    """A zigzag ring for one sequence whose length 2 x ranks divides, with the next block in flight
    during each round.
    """

    def __init__(self, groups: Groups, rows: int, scale: float) -> None:
        self.rank, self.size, self.pool = groups.rank, groups.size, groups.pool
        self.nano_batch, self.scale = rows // 2, scale

    def rounds(self, t: int) -> tuple[slice, slice, bool]:
        """Query rows, key rows and mask of round t."""
        source = (self.rank - t) % self.size
        if t == 0:
            return slice(None), slice(None), True
        return (
            (slice(None), slice(0, self.nano_batch), False)
            if source < self.rank
            else (slice(self.nano_batch, None), slice(None), False)
        )

    def exchange(self, block: Tensor, forward: bool) -> tuple[Tensor, list[dist.Work]]:
        step = 1 if forward else -1
        received = torch.empty_like(block)
        ops = [
            dist.P2POp(dist.isend, block, (self.rank + step) % self.size, self.pool),
            dist.P2POp(dist.irecv, received, (self.rank - step) % self.size, self.pool),
        ]
        return received, dist.batch_isend_irecv(ops)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        blocks = [torch.stack([k, v])]
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        for t in range(self.size):
            if t + 1 < self.size:
                received, works = self.exchange(blocks[t], forward=True)
            q_rows, k_rows, causal = self.rounds(t)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(x.transpose(0, 1)[None] for x in (q[q_rows], blocks[t][0, k_rows], blocks[t][1, k_rows])),
                0.0,
                causal,
                scale=self.scale,
            )
            new = torch.logaddexp(lse[q_rows], part_lse[0].T)
            out[q_rows] = (
                out[q_rows] * (lse[q_rows] - new).exp()[..., None]
                + part[0].transpose(0, 1) * (part_lse[0].T - new).exp()[..., None]
            )
            lse[q_rows] = new
            if t + 1 < self.size:
                for work in works:
                    work.wait()
                blocks.append(received)
        return out, lse, blocks

    def backward(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, blocks: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq = torch.zeros_like(q)
        works: list[dist.Work] = []
        arriving: Tensor | None = None
        for t in range(self.size - 1, -1, -1):
            q_rows, k_rows, causal = self.rounds(t)
            part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(
                    x.transpose(0, 1)[None]
                    for x in (dout[q_rows], q[q_rows], blocks[t][0, k_rows], blocks[t][1, k_rows], out[q_rows])
                ),
                lse[q_rows].T[None],
                0.0,
                causal,
                scale=self.scale,
            )
            dq[q_rows] += part[0][0].transpose(0, 1)
            grad = torch.zeros_like(blocks[t])
            grad[0, k_rows], grad[1, k_rows] = part[1][0].transpose(0, 1), part[2][0].transpose(0, 1)
            for work in works:
                work.wait()
            if arriving is not None:
                grad += arriving
            if t:
                arriving, works = self.exchange(grad, forward=False)
        return dq, grad[0], grad[1]


if __name__ == "__main__":
    sys.exit(main())

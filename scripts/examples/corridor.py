"""The whole corridor on one screen: lengths, plan, program, proof, bind, forward, backward.

Five documents of very different lengths are planned for two nodes of two ranks, proved, and attended
to by the four ranks over gloo. Loss and gradients equal those of dense attention, each document alone.
docs/architecture.md walks through this file. On CPU:

    torchrun --standalone --nproc-per-node 4 scripts/examples/corridor.py [--planner te_ring]

Letters in shapes: T tokens of the batch, t those of a rank, L those of a document, H query heads, G
key-value heads, D width of a head.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_balance import Model
from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.config import load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.text import text
from megatron_balance.planners import PLANNERS
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import make_groups
from megatron_balance.training.plans import check_agreement

LENGTHS = (600, 250, 70, 33, 9)
RANKS_PER_NODE = 2
MODEL = Model(num_heads=4, num_kv_heads=2, head_dim=8)


class Inputs(NamedTuple):
    """Projections of a layer for the whole batch, and a weight that makes a loss of its output."""

    q: Tensor  # [T, H, D]
    k: Tensor  # [T, G, D]
    v: Tensor  # [T, G, D]
    weight: Tensor  # [T, H, D]; loss = sum(weight * attention(q, k, v))


def draw() -> Inputs:
    """Inputs, alike on every rank. In training a rank has only its own rows."""
    generator = torch.Generator().manual_seed(0)
    heads = (MODEL.num_heads, MODEL.num_kv_heads, MODEL.num_kv_heads, MODEL.num_heads)
    shapes = [(sum(LENGTHS), num, MODEL.head_dim) for num in heads]
    return Inputs(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def plan_and_prove(planner: str, num_ranks: int) -> MicrobatchPlan:
    """1. Lengths to a plan: which ranks share which documents, by which comm pattern. 2. The plan to a
    program: what every rank sends, receives, attends to and merges. 3. The proof.

    Pure functions of the lengths: every rank runs them and gets the same.
    """
    cluster = load_cluster("h200").build(num_ranks=num_ranks, ranks_per_node=RANKS_PER_NODE)
    cost = AnalyticCost(cluster, MODEL)  # seconds of kernels and links by their data sheets
    entry = PLANNERS[planner]
    assert entry.plan is not None, f"{planner} plans whole steps; take one that plans a microbatch"
    plan = entry.plan(Batch(LENGTHS), cluster, MODEL, cost, entry.options())
    # Of all ranks, for the proof and to be read; `bind` compiles for one rank alone.
    program = expand(plan, "keep")
    # Every query meets every key that its mask shows, once, and every gradient comes home.
    verify(program)
    print_once(f"{plan}\n\n{text(program)}")
    return plan


def own_rows(bound: Bound) -> Tensor:
    """[t]: where the tokens of this rank lie in the batch, documents one behind the other."""
    starts = [sum(LENGTHS[:seq]) for seq in range(len(LENGTHS))]
    # A row of `owned` is a fragment of a document; the rows are in the order of the rank's tokens.
    fragments = bound.owned[:, [Fragment.SEQ, Fragment.START, Fragment.STOP]].tolist()
    parts = [torch.arange(starts[seq] + start, starts[seq] + stop) for seq, start, stop in fragments]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def attend_by_plan(plan: MicrobatchPlan, x: Inputs) -> tuple[Tensor, Tensor, Inputs]:
    """4. Bind: look up this rank's rows, messages and launches, once for all layers. 5. Forward and
    backward: one call that autograd knows.

    Returns:
        The rows [t], the loss of this rank's rows, and gradients [t, ...] of its q, k and v.
    """
    groups = make_groups([range(dist.get_world_size())], RANKS_PER_NODE)
    check_agreement(plan.fingerprint(), groups)  # ranks that planned differently would wait for ever
    shape = AttentionShape(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
    bound = bind(plan, groups.rank, shape, groups=groups, dtype=torch.float64, policy="keep")
    rows = own_rows(bound)
    q, k, v = (whole[rows].requires_grad_() for whole in (x.q, x.k, x.v))
    loss = (x.weight[rows] * balanced_attention(q, k, v, bound)).sum()
    loss.backward()
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return rows, loss.detach(), Inputs(q.grad, k.grad, v.grad, x.weight[rows])


def attend_densely(x: Inputs) -> tuple[Tensor, Inputs]:
    """Loss and gradients [T, ...] of each document alone, by PyTorch's own attention."""
    q, k, v = (whole.clone().requires_grad_() for whole in (x.q, x.k, x.v))
    outputs: list[Tensor] = []
    for one in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True):
        a, b, c = (tensor.transpose(0, 1) for tensor in one)  # heads first: [H, L, D], [G, L, D] twice
        out = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    loss = (x.weight * torch.cat(outputs)).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return loss.detach(), Inputs(dq, dk, dv, x.weight)


def print_once(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--planner", default="zeppelin", choices=[name for name, each in PLANNERS.items() if each.plan])
    planner = parser.parse_args().planner
    dist.init_process_group("gloo")
    x = draw()
    plan = plan_and_prove(planner, dist.get_world_size())
    rows, loss, grads = attend_by_plan(plan, x)
    dense_loss, dense_grads = attend_densely(x)
    dist.all_reduce(loss)  # the sum over all ranks' rows
    pairs = list(zip(grads, dense_grads, strict=True))
    apart = torch.cat([loss.new_zeros(1), *((ours - whole[rows]).abs().flatten() for ours, whole in pairs)]).max()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    print_once(f"loss {loss:.9f}, dense {dense_loss:.9f}; gradients differ by {apart:.1e} at most")
    assert torch.allclose(loss, dense_loss, rtol=1e-12)
    assert apart < 1e-12
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Attention over latents on the pool's ranks, beside keys and values of the same latents."""

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.compile.pipeline import layout
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.reference import owned_rows
from megatron_balance.runtime.attention import balanced_attention, latent_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.kernels.latent import keys_and_values
from tests.support.pool import World

HEADS, DIM, VALUES, LATENT = 4, 6, 3, (5, 2)
SHAPE = AttentionShape(HEADS, 1, DIM, VALUES, LATENT)
DTYPE = torch.float64
Arrays = list[np.ndarray]


def both(
    world: World, plan: MicrobatchPlan, of_heads: MicrobatchPlan, policy: Policy
) -> tuple[list[Arrays], list[int]]:
    """Output and gradients (queries, latents, weight summed over the pool) of attention over latents
    and over their keys and values; and the bytes that each received.

    `of_heads`: the plan for keys and values of every head.
    """
    rng = np.random.default_rng(3)
    num_weights = HEADS * (DIM - LATENT[1] + VALUES)
    values = {
        "q": [rng.standard_normal((n, HEADS, DIM)) for n in plan.lengths],
        "latent": [rng.standard_normal((n, 1, sum(LATENT))) for n in plan.lengths],
        "dout": [rng.standard_normal((n, HEADS, VALUES)) for n in plan.lengths],
    }
    weight = rng.standard_normal((num_weights, LATENT[0]))
    found: list[Arrays] = []
    received: list[int] = []
    for latent in (True, False):
        planned = plan if latent else of_heads
        owned = Rows.of(3, layout(planned, world.rank).tolist())
        q, c, dout = (torch.from_numpy(owned_rows(owned, of)).to(DTYPE) for of in values.values())
        shape = SHAPE if latent else AttentionShape(HEADS, HEADS, DIM, VALUES)
        bound = bind(planned, world.rank, shape, groups=world.groups, dtype=DTYPE, policy=policy)
        leaves = [x.clone().requires_grad_() for x in (q, c, torch.from_numpy(weight).to(DTYPE))]
        if latent:
            out = latent_attention(leaves[0], leaves[1], leaves[2], bound)
        else:
            k, v = keys_and_values(leaves[1], leaves[2], SHAPE)
            out = balanced_attention(leaves[0], k, v.contiguous(), bound)
        once = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        again = torch.autograd.grad(out, leaves, dout)
        dq, dc, dw = ((a + b) / 2 for a, b in zip(once, again, strict=True))
        if world.groups.pool is not None:
            dist.all_reduce(dw, group=world.groups.pool)
        found.append([x.detach().numpy() for x in (out, dq, dc, dw)])
        received.append(bound.counters.bytes_received_forward + bound.counters.bytes_received_backward)
    return found, received

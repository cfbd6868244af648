"""What ranks do when pipeline stages attend together: one layer a stage, forward and backward in ticks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_balance.core.plan import MicrobatchPlan
from megatron_balance.core.rows import Rows
from megatron_balance.core.tick import TickPlan
from megatron_balance.reference import Floats, at_home
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.joint import BackwardSlot, joint_attention, serve
from megatron_balance.schedules import layout
from tests.support.jobs import inputs
from tests.support.pool import World

Values = tuple[Floats, Floats, Floats, Floats]
"""Output and gradients of q, k and v, this rank's rows."""


def attend_in_ticks(world: World, ticks: Sequence[TickPlan], plans: Sequence[MicrobatchPlan], head_dim: int) -> dict[int, Values]:
    """By microbatch, what this rank has of its stage's attention, in fp64. A stage's inputs are those of seed `stage`."""
    size = plans[0].num_ranks
    stage, rank = divmod(world.rank, size)
    shape = AttentionShape(plans[0].num_heads, plans[0].num_kv_heads, head_dim)
    under_way: dict[int, tuple[BackwardSlot, list[torch.Tensor], torch.Tensor, torch.Tensor]] = {}
    found: dict[int, Values] = {}
    for one in ticks:
        bound = bind(one.plan, world.rank, shape, groups=world.groups, dtype=torch.float64, policy="replay")
        cell, scale = one.tick.cells[stage], head_dim**-0.5
        if cell is None:
            serve(bound, torch.float64, torch.device("cpu"), scale, backward=one.tick.backward)
        elif one.tick.backward:
            slot, leaves, out, dout = under_way.pop(cell.microbatch)
            slot.bound = bound
            grads = torch.autograd.grad(out, leaves, dout)
            q_grad, k_grad, v_grad = (grad.numpy() for grad in grads)
            found[cell.microbatch] = (out.detach().numpy(), q_grad, k_grad, v_grad)
        else:
            plan = plans[cell.microbatch]
            x = inputs(plan, head_dim, stage)
            home = Rows.of(3, layout(plan, rank).tolist())
            q, k, v, dout = (torch.from_numpy(at_home(home, values)) for values in (x.q, x.k, x.v, x.dout))
            leaves, slot = [each.requires_grad_() for each in (q, k, v)], BackwardSlot()
            under_way[cell.microbatch] = slot, leaves, joint_attention(q, k, v, bound, slot, x.scale), dout
    return found

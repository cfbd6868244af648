"""Ranks of which one comes late to a call: what each of them waited for, and how fast links are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.training.stragglers import Link, link_rates
from tests.support.pool import World


@dataclass(frozen=True)
class Waited:
    """`HostTimes` of one forward."""

    attended_s: float
    waited_s: dict[int, float]


def late(world: World, plan: MicrobatchPlan, head_dim: int, rank: int, seconds: float) -> Waited:
    """A forward to which one rank comes late."""
    bound = bind(plan, world.rank, AttentionShape(plan.num_heads, plan.num_kv_heads, head_dim), groups=world.groups)
    heads = (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    inputs = [torch.zeros(bound.num_tokens, n, head_dim) for n in heads]
    times = world.groups.host_times
    balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    times.clear()
    if world.rank == rank:
        time.sleep(seconds)
    balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    found = Waited(times.attended_s, dict(times.waited_s))
    times.clear()
    return found


def rates(world: World, links: Sequence[Link], ranks_per_node: int) -> dict[Link, float]:
    """The rates of links."""
    return link_rates(links, world.groups, ranks_per_node)

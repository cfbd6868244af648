"""Attention calls by a plan, as the ranks of the tests make them."""

import importlib
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import Groups, make_groups
from tools.emulated_cluster import Controller, NicBytes

# a process's first backward imports it: once here, not in every rank
importlib.import_module("torch.fx.experimental.symbolic_shapes")

CALLS = 2


@dataclass(frozen=True)
class Carried:
    # Calls of a plan: bytes of every NIC in one forward and in one backward (on rank 0), and what
    # this rank counted in all calls.
    #
    # A segment that is sent again, because the cores were taken, only adds: of several calls, a
    # NIC's lowest counts are these.
    forward: tuple[NicBytes, ...]
    backward: tuple[NicBytes, ...]
    counters: dict[str, int]


def nic_bytes(
    rank: int, controller: Controller, plans: Sequence[MicrobatchPlan], head_dim: int, policy: Policy
) -> list[Carried]:
    # Forward and backward calls of every plan.
    groups = _join(plans[0])
    found: list[Carried] = []
    for plan in plans:
        bound, inputs = _bound(plan, rank, groups, head_dim, policy)
        forward: list[tuple[NicBytes, ...]] = []
        backward: list[tuple[NicBytes, ...]] = []
        for _ in range(CALLS):
            counts = [_counted(rank, controller)]
            out = balanced_attention(inputs[0], inputs[1], inputs[2], bound)
            counts.append(_counted(rank, controller))
            torch.autograd.grad(out, inputs, torch.ones_like(out))
            counts.append(_counted(rank, controller))
            forward.append(_difference(counts[0], counts[1]))
            backward.append(_difference(counts[1], counts[2]))
        found.append(Carried(_lowest(forward), _lowest(backward), asdict(bound.counters)))
    dist.barrier()
    dist.destroy_process_group()
    return found


def killed(
    rank: int, _controller: Controller, plan: MicrobatchPlan, head_dim: int, victim: int, after_s: float
) -> None:
    # One call, in the middle of which a rank dies.
    groups = _join(plan)
    bound, inputs = _bound(plan, rank, groups, head_dim, "keep")
    dist.barrier()
    if rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    balanced_attention(inputs[0], inputs[1], inputs[2], bound)


def _join(plan: MicrobatchPlan) -> Groups:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return make_groups([list(range(plan.num_ranks))], plan.ranks_per_node)


def _bound(
    plan: MicrobatchPlan, rank: int, groups: Groups, head_dim: int, policy: Policy
) -> tuple[Bound, list[torch.Tensor]]:
    bound = bind(plan, rank, AttentionShape(plan.num_heads, plan.num_kv_heads, head_dim), groups=groups, policy=policy)
    heads = (plan.num_heads, plan.num_kv_heads, plan.num_kv_heads)
    return bound, [torch.zeros(bound.num_tokens, n, head_dim, requires_grad=True) for n in heads]


def _counted(rank: int, controller: Controller) -> tuple[NicBytes, ...]:
    # The counters while no rank sends.
    dist.barrier()
    counted = controller.nic_bytes() if rank == 0 else ()
    dist.barrier()
    return counted


def _difference(before: tuple[NicBytes, ...], after: tuple[NicBytes, ...]) -> tuple[NicBytes, ...]:
    return tuple(
        NicBytes(a.node, a.nic, b.sent - a.sent, b.received - a.received) for a, b in zip(before, after, strict=True)
    )


def _lowest(calls: Sequence[tuple[NicBytes, ...]]) -> tuple[NicBytes, ...]:
    return tuple(
        NicBytes(of_nic[0].node, of_nic[0].nic, min(nic.sent for nic in of_nic), min(nic.received for nic in of_nic))
        for of_nic in zip(*calls, strict=True)
    )

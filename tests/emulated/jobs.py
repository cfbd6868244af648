"""Jobs of the ranks in the tests."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance import MicrobatchPlan
from megatron_balance.compile.transpose import Policy
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import Groups, make_groups
from tools.emulated_cluster import Controller, NicBytes

# a process's first backward imports it: once here, not in every rank
importlib.import_module("torch.fx.experimental.symbolic_shapes")

LEAD_S, REPEATS = 0.05, (2, 12)


@dataclass(frozen=True)
class Transfers:
    # Transfers that start together, each of as many bytes; repeated until they took no more than
    # `wanted_s`, but only so often.
    #
    # `rates`: what the links are set to first (NIC, intra), in bit/s.
    pairs: tuple[tuple[int, int], ...]
    wanted_s: float
    rates: tuple[int, int | None] | None = None


@dataclass(frozen=True)
class Measured:
    # One repetition: seconds from the common start to the last transfer's end, this rank's payload,
    # and on rank 0 all NICs' bytes.
    seconds: float
    equal: bool
    nics: tuple[NicBytes, ...]


def transfers(rank: int, controller: Controller, cases: tuple[Transfers, ...], num_bytes: int) -> list[list[Measured]]:
    # The repetitions of every case; payloads are compared with what was sent.
    #
    # What else runs on the cores can only lengthen a transfer, so the shortest repetition is the
    # link's.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured: list[list[Measured]] = []
    for case in cases:
        if rank == 0 and case.rates is not None:
            controller.reshape(*case.rates)
        repetitions = [_transfer(rank, controller, case, num_bytes)]
        # (at least, at most)
        while len(repetitions) < REPEATS[repetitions[-1].seconds > case.wanted_s]:
            repetitions.append(_transfer(rank, controller, case, num_bytes))
        measured.append(repetitions)
    dist.barrier()
    dist.destroy_process_group()
    return measured


def _transfer(rank: int, controller: Controller, case: Transfers, num_bytes: int) -> Measured:
    # A prime period: a part that is shifted or swapped is seen.
    pattern = torch.arange(251, dtype=torch.uint8).repeat(num_bytes // 251 + 1)[:num_bytes]
    receives = [(torch.zeros(num_bytes, dtype=torch.uint8), src) for src, dst in case.pairs if dst == rank]
    dist.barrier()
    before = controller.nic_bytes() if rank == 0 else ()
    start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)  # all ranks share this machine's clock
    time.sleep(max(0.0, float(start) - time.monotonic()))
    # Receives first: gloo asks for what it receives on the same connection, behind what is being
    # sent on it.
    works = [dist.irecv(received, src) for received, src in receives]
    works += [dist.isend(pattern, dst) for src, dst in case.pairs if src == rank]
    for work in works:
        assert work is not None
        work.wait()
    seconds = torch.tensor([time.monotonic() - float(start)], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    after = controller.nic_bytes() if rank == 0 else ()
    equal = all(torch.equal(received, pattern) for received, _ in receives)
    return Measured(float(seconds), equal, _difference(before, after))


def describe(_rank: int, _controller: Controller) -> dict[str, Any]:
    # The environment that torchrun would give, the host's name, what the rank and a program that it
    # starts may do (the lines about privileges of their status), and whether the rank could raise
    # its priority.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    may = {"own": privileges(Path("/proc/self/status").read_text()), "program": privileges(child)}
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -11)
    except PermissionError:
        raised = False
    else:
        raised = True
    return {"host": os.uname().nodename, **may, "raised": raised, **{name: os.environ[name] for name in names}}


def privileges(status: str) -> dict[str, int]:
    # The capability sets and NoNewPrivs of a process's status.
    lines = (line.split() for line in status.splitlines() if line.startswith(("Cap", "NoNewPrivs")))
    return {name.rstrip(":"): int(word, 16) for name, word in lines}


def fail_on(rank: int, _controller: Controller, failing: int, code: int | None) -> None:
    # One rank fails, with a traceback or an exit code; the others would go on for ever.
    if rank == failing:
        if code is not None:
            sys.exit(code)
        raise ValueError("asked to fail")
    time.sleep(3600)


def hang_on(rank: int, _controller: Controller, hanging: int) -> None:
    # One rank never ends.
    if rank == hanging:
        time.sleep(3600)


def ask_for_no_rate_and_leave_a_process_behind(_rank: int, controller: Controller) -> str:
    # The launcher's answer to a rate of 0; a child outlives its rank.
    if os.fork() == 0:
        time.sleep(3600)
    try:
        controller.reshape(0, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# Attention calls by a plan

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
    rank: int, controller: Controller, plans: Sequence[MicrobatchPlan], width: int, policy: Policy
) -> list[Carried]:
    # Forward and backward calls of every plan.
    groups = _join(plans[0])
    found: list[Carried] = []
    for plan in plans:
        bound, inputs = _bound(plan, rank, groups, width, policy)
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


def killed(rank: int, _controller: Controller, plan: MicrobatchPlan, width: int, victim: int, after_s: float) -> None:
    # One call, in the middle of which a rank dies.
    groups = _join(plan)
    bound, inputs = _bound(plan, rank, groups, width, "keep")
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
) -> tuple[Bound, list[Tensor]]:
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
    both = zip(before, after, strict=True)
    return tuple(NicBytes(a.node, a.nic, b.sent - a.sent, b.received - a.received) for a, b in both)


def _lowest(calls: Sequence[tuple[NicBytes, ...]]) -> tuple[NicBytes, ...]:
    counts = (
        (nics[0], [nic.sent for nic in nics], [nic.received for nic in nics]) for nics in zip(*calls, strict=True)
    )
    return tuple(NicBytes(nic.node, nic.nic, min(sent), min(received)) for nic, sent, received in counts)

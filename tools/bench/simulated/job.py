"""In a rank: links measured as they are shaped, and every case's attention call, forward and
backward, by the executor.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_balance.cost.table import CostTable, LinkTable
from megatron_balance.profiling.cost_table import model_scale
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import Groups, make_groups
from tools.bench.emulated import device
from tools.bench.emulated.point import NUM_RANKS, RANKS_PER_NODE
from tools.bench.simulated.calibrate import Pace, Pacer, host_s, keep_memory, measure_links, paced
from tools.bench.simulated.cases import MODEL, Case, rates_of, topology_of
from tools.bench.simulated.paced import PacedKernel
from tools.bench.together import from_common_start
from tools.emulated_cluster import Controller

PACE_S, PACED_EVERY = 0.4, 13
"""Seconds for which the ranks' pace is timed, forward and backward, and after how many calls again.
"""

# which torch imports in a process's first backward
importlib.import_module("torch.fx.experimental.symbolic_shapes")


class Seconds(NamedTuple):
    """One repetition, until the last rank was done."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A case on one rank. `late_share`: of the kernels' time, how much launches came late, since
    the cores were at something else.
    """

    links: tuple[LinkTable, ...]
    pace: Pace
    late_share: float
    repeats: tuple[Seconds, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """The job of every rank. `share`: of a core, for each rank's kernels. `done`: called on rank 0
    after each call.
    """

    cases: Sequence[Case]
    table: CostTable
    repeats: int
    share: float
    done: Callable[[str], None]

    def __call__(self, rank: int, controller: Controller) -> list[Measured]:
        """As `tools.emulated_cluster.run` calls it: all cases, in their order."""
        torch.set_num_threads(1)
        keep_memory()
        dist.init_process_group("gloo")
        groups = make_groups([list(range(NUM_RANKS))], RANKS_PER_NODE)
        found: list[Measured] = []
        for _, of_rate in groupby(self.cases, lambda case: case.mbit):
            cases = list(of_rate)
            dist.barrier()
            if rank == 0:
                topology = topology_of(cases[0].nics, cases[0].mbit)
                controller.reshape(topology.nic_bits_per_s, topology.intra_bits_per_s)
            dist.barrier()
            found += self._at_one_rate(cases, groups, rank)
        dist.barrier()
        dist.destroy_process_group()
        return found

    def _at_one_rate(self, cases: Sequence[Case], groups: Groups, rank: int) -> list[Measured]:
        links, around_s, kernel = measure_links(), host_s(groups, self.share), paced(self.share)
        pacer = Pacer(self.table, self.share, rates_of(cases[0].nics, cases[0].mbit))
        calls = [_Call(case, groups, kernel) for case in cases]
        for call in calls:  # connections, memory and the times of launches are there after that
            call.run()
            call.repeats.clear()
        for repeat in range(self.repeats):
            # in an order that rotates, so that what passes on the machine meets all
            for at in range(len(calls)):
                if at % PACED_EVERY == 0:
                    pacer.sample(PACE_S)
                call = calls[(at + repeat) % len(calls)]
                call.run()
                if rank == 0:
                    self.done(f"{call.case.mbit:g} Mbit/s, {call.case.planner}")
        return [Measured(links, pacer.pace(around_s), kernel.late_share, tuple(call.repeats)) for call in calls]


class _Call:
    """A case bound to this rank, its inputs, and what was measured."""

    def __init__(self, case: Case, groups: Groups, kernel: PacedKernel) -> None:
        self.case = case
        self.repeats: list[Seconds] = []
        shape = AttentionShape(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
        bound = bind(case.plan, groups.rank, shape, groups=groups, policy=case.policy)
        self.bound = replace(bound, kernel=kernel)
        generator = torch.Generator().manual_seed(groups.rank)
        size = (self.bound.num_tokens, MODEL.num_heads, MODEL.head_dim)
        self.q, self.k, self.v, self.dout = (torch.randn(size, generator=generator) / 8 for _ in range(4))

    def run(self) -> None:
        """One repetition; the threads of transfers are preferred to all else."""
        device.prefer_transfers()
        scale, inputs = model_scale(MODEL), (self.q, self.k, self.v)
        (out, lse, received), forward_s = from_common_start(
            lambda: run_forward(self.bound, inputs[0], inputs[1:], scale)
        )
        final = (out, lse)
        _, backward_s = from_common_start(lambda: run_backward(self.bound, self.dout, inputs, final, received, scale))
        self.repeats.append(Seconds(forward_s, backward_s))

"""This rank's pool in Megatron's terms, one per data-parallel x context-parallel group."""

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_balance.training import pool
from megatron_balance.training.pool import Attends, Membership, Pool, TensorParallel


def make_pool(
    ranks_per_node: int | None,
    sms: Mapping[str, int] | None = None,
    *,
    attends: Attends = "pool",
    safe: bool = False,
    timeout: timedelta,
) -> Pool:
    """Make the process groups of all pools, and return this rank's pool. Collective over the world,
    once, after Megatron's own groups. Arguments and errors as for `training.pool.make_pool`.
    """
    replicated = cast("dist.ProcessGroup", mpu.get_data_parallel_group(with_context_parallel=True))
    stages = cast("dist.ProcessGroup", mpu.get_pipeline_model_parallel_group())
    mine = Membership(
        pool=tuple(dist.get_process_group_ranks(replicated)),
        replica=mpu.get_data_parallel_rank(),
        reads=mpu.get_context_parallel_rank() == 0,
        stage=mpu.get_pipeline_model_parallel_rank(),
        stages=tuple(dist.get_process_group_ranks(stages)),
    )
    found = pool.make_pool(mine, ranks_per_node, sms, attends=attends, safe=safe, timeout=timeout)
    # Megatron lists the groups with its own, so that --distributed-timeout-seconds-after-init
    # counts for them too.
    state: Any = parallel_state
    known: list[dist.ProcessGroup | None] = state._global_process_group_list
    own = [group for groups in (found.groups, found.joint, found.attention) for group in groups.process_groups()]
    known += [group for group in dict.fromkeys(own) if group not in known]
    return found


def ranks_on_a_node() -> int:
    """Ranks of the job on each node, by host name. Collective (world). ConfigError: as `node_size`."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return pool.node_size(hosts, range(len(hosts)))


def schedule_groups() -> ProcessGroupCollection:
    """The groups that a schedule takes where it is given none."""
    required = ["tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(required_pgs=required)


def tensor_parallel() -> TensorParallel:
    group = cast("dist.ProcessGroup", mpu.get_tensor_model_parallel_group())
    return TensorParallel(group, mpu.get_tensor_model_parallel_src_rank())


def job_device() -> torch.device:
    """The device of this rank's tensors."""
    # Asked of a tensor: with `--balance-device cpu` those made on "cuda" are on the CPU.
    return torch.empty(0, device="cuda").device

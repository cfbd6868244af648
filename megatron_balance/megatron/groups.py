"""This rank's pool in Megatron's terms, one per data-parallel x context-parallel group, and the
machine that it lies on.
"""

import datetime
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.profiling import hardware
from megatron_balance.strict_yaml import parse_yaml
from megatron_balance.training import pool
from megatron_balance.training.pool import Attends, Membership, Pool, TensorParallel

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of one rank of its node: a cluster YAML, or the reason why there is none."""

    text: str = ""
    failure: str = ""


def _read_machine() -> Reading:
    try:
        today = datetime.datetime.now(datetime.UTC).date()
        return Reading(hardware.cluster_yaml(hardware.read_node(), "machine", today))
    except ConfigError as error:
        return Reading(failure=str(error))


def cluster_of_machine(
    given: ClusterChoice | None, reads: Callable[[], Reading] = _read_machine
) -> ClusterChoice | None:
    """The cluster that the machine says it is, in sizes `given`; None: unknown. Collective (world)."""
    mine = reads()
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return cluster_of(given, everyone)


def cluster_of(given: ClusterChoice | None, readings: Sequence[Reading]) -> ClusterChoice | None:
    """Rank 0's cluster if all readings are alike, else the least of each number, which counts."""
    failed = next(((rank, each.failure) for rank, each in enumerate(readings) if each.failure), None)
    if failed is not None:
        log.warning(
            "rank %d cannot read its machine: %s; plans are made for a default machine. Set 'cluster:' or "
            "--balance-cluster",
            *failed,
        )
        return given
    machines = [
        dict(load_cluster(parse_yaml(text, "machine.yaml"), Path("machine.yaml"), "").given)
        for text in dict.fromkeys(each.text for each in readings)
    ]
    keys = machines[0]
    differ = sorted(key for key in keys if any(other.get(key) != keys[key] for other in machines))
    if differ:
        log.warning("nodes are not alike in %s; plans are made for the least of each", ", ".join(differ))
    for key in differ:
        numbers = [each[key] for each in machines if isinstance(each.get(key), (int, float))]
        # More ranks on a NIC is less for each.
        keys[key] = keys[key] if not numbers else max(numbers) if key == "ranks_per_nic" else min(numbers)
    sizes = {} if given is None else dict(given.given)
    # The job says how many ranks there are; ranks_per_node only where somebody set it.
    of_machine = {key: value for key, value in keys.items() if key not in ("num_ranks", "ranks_per_node")}
    choice = ClusterChoice(of_machine | sizes)
    log.info("cluster from the machine: %s", ", ".join(f"{key} {value}" for key, value in choice.given.items()))
    return choice

"""The machine that a job lies on, as its ranks read it: nvidia-smi's GPUs, links and NICs."""

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.profiling import hardware
from megatron_balance.strict_yaml import parse_yaml

log = logging.getLogger(__name__)


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


def cluster_of_machine(given: ClusterChoice | None) -> ClusterChoice | None:
    """The cluster that the machine says it is, in sizes `given`; None: unknown. Collective (world)."""
    mine = _read_machine()
    everyone = [mine]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return cluster_of(given, everyone)


def cluster_of(given: ClusterChoice | None, readings: Sequence[Reading]) -> ClusterChoice | None:
    """Rank 0's cluster if all readings are alike, else the least of each number, which counts."""
    failed = next(((rank, each.failure) for rank, each in enumerate(readings) if each.failure), None)
    if failed is not None:
        log.warning(
            "rank %d cannot read its machine: %s; plans are made for a default machine. Set 'cluster' "
            "(Megatron: or --balance-cluster)",
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

"""The cluster as the machine itself says it, where no configuration names one: 'doctor
--write-cluster' at the start of training.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_balance.config import ClusterChoice, parse_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.profiling import hardware

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of one rank of its node: a cluster YAML, or the reason why there is none."""

    text: str = ""
    failure: str = ""


def read() -> Reading:
    """This node's hardware."""
    try:
        today = datetime.datetime.now(datetime.UTC).date()
        return Reading(hardware.cluster_yaml(hardware.read_node(), "machine", today))
    except ConfigError as error:
        return Reading(failure=str(error))


def cluster_of_machine(given: ClusterChoice | None, reads: Callable[[], Reading] = read) -> ClusterChoice | None:
    """The cluster that the machine says it is, with the sizes that are given; None: it cannot be
    read. Collective over the world, once; all ranks get the same.
    """
    mine = reads()
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return agreed(given, everyone)


def agreed(given: ClusterChoice | None, readings: Sequence[Reading]) -> ClusterChoice | None:
    """The cluster of all ranks' readings: rank 0's, if they are alike; else the least of each
    number, since the slowest is waited for.
    """
    failed = next(((rank, each.failure) for rank, each in enumerate(readings) if each.failure), None)
    if failed is not None:
        log.warning(
            "rank %d cannot read its machine: %s; plans are made for a default machine. Set 'cluster:' or "
            "--balance-cluster",
            *failed,
        )
        return given
    read = [dict(parse_cluster(text, "machine.yaml").given) for text in dict.fromkeys(each.text for each in readings)]
    keys = read[0]
    differ = sorted(key for key in keys if any(other.get(key) != keys[key] for other in read))
    if differ:
        log.warning("nodes are not alike in %s; plans are made for the least of each", ", ".join(differ))
    for key in differ:
        numbers = [each[key] for each in read if isinstance(each.get(key), (int, float))]
        # More ranks on a NIC is less for each.
        keys[key] = keys[key] if not numbers else max(numbers) if key == "ranks_per_nic" else min(numbers)
    sizes = {} if given is None else dict(given.given)
    # The job says how many ranks there are; ranks_per_node only where somebody set it.
    of_machine = {key: value for key, value in keys.items() if key not in ("num_ranks", "ranks_per_node")}
    choice = ClusterChoice(of_machine | sizes)
    log.info("cluster from the machine: %s", ", ".join(f"{key} {value}" for key, value in choice.given.items()))
    return choice

"""Whether this machine permits what an emulated cluster needs, found by building a small one."""

from __future__ import annotations

from tools.emulated_cluster.cluster import EmulatedCluster
from tools.emulated_cluster.errors import ClusterError
from tools.emulated_cluster.sandbox import in_sandbox
from tools.emulated_cluster.topology import Topology

_SMALL = Topology(num_nodes=1, ranks_per_node=2, nics_per_node=1, nic_bits_per_s=1_000_000, intra_bits_per_s=8_000_000)
"""With a shared NIC and shaped fast links: every kind of device, queue and setting is in it."""


def check() -> str | None:
    """Why no emulated cluster can be built here; None if one can."""

    def build() -> None:
        with EmulatedCluster(_SMALL, "check"):
            pass

    try:
        in_sandbox(build)
    except ClusterError as error:
        return str(error)
    return None

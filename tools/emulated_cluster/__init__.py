"""A cluster on one machine: nodes and NICs as network namespaces with shaped links. See
docs/emulated-cluster.md.
"""

from tools.emulated_cluster.cluster import EmulatedCluster
from tools.emulated_cluster.launch import Controller, RankError, Result, Target, check, run
from tools.emulated_cluster.linux import ClusterError
from tools.emulated_cluster.topology import NicBytes, Topology

__all__ = [
    "ClusterError",
    "Controller",
    "EmulatedCluster",
    "NicBytes",
    "RankError",
    "Result",
    "Target",
    "Topology",
    "check",
    "run",
]

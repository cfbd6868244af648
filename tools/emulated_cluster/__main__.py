"""Nodes and NICs on one machine: network namespaces with shaped links, for training commands of
ours.

check   say whether this machine permits it: prints OK, or SKIP with the reason and exits with 77
run     build a cluster, run a command on its ranks, tear all down, print the bytes of every NIC
up      build a cluster that stands until `down` (needs root); `run --tag` uses it
down    remove a standing cluster, and nothing else
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_balance.errors import BalanceError, ConfigError
from tools.emulated_cluster import command as commands
from tools.emulated_cluster.cluster import EmulatedCluster, checked_tag, remove
from tools.emulated_cluster.launch import RankError, Result, check, run
from tools.emulated_cluster.topology import NicBytes, Topology

SKIPPED = 77
USAGE_ERROR = 2
RANK_FAILED = 1
LOGS = Path("out") / "emulated-cluster"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if a rank failed, 2 if there is no cluster to run on, 77 if `check` says no."""
    # so that what is under way is torn down
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = _parser().parse_args(argv)
    try:
        return options.verb(options)
    except RankError as error:
        print(f"error: {error}", file=sys.stderr)
        return RANK_FAILED
    except BalanceError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.emulated_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("check", help="OK, or SKIP: reason").set_defaults(verb=_check)
    up = verbs.add_parser("up", help="build a standing cluster")
    _add_topology(up)
    up.add_argument("--tag", required=True, help="namespaces are named TAG-...; 1 to 12 lower-case letters and digits")
    up.set_defaults(verb=_up)
    down = verbs.add_parser("down", help="remove a standing cluster")
    down.add_argument("--tag", required=True, help="the tag given to `up`")
    down.set_defaults(verb=_down)
    run_ = verbs.add_parser(
        "run", help="run a command on every rank", usage="%(prog)s [options] -- (-m MODULE | SCRIPT.py) [ARGUMENT ...]"
    )
    _add_topology(run_)
    run_.add_argument("--tag", help="use the standing cluster of this tag; its topology is as it was built")
    run_.add_argument("--logs", type=Path, default=LOGS, help=f"folder for every rank's output (default {LOGS})")
    run_.add_argument("--show", type=int, default=0, metavar="RANK", help="rank whose output is shown (default 0)")
    run_.add_argument(
        "--deadline-s", type=float, default=3600.0, help="end the job after so many seconds (default 3600)"
    )
    run_.add_argument("--json", type=Path, metavar="FILE", help="also write seconds and the bytes of every NIC here")
    run_.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run_.set_defaults(verb=_run)
    return parser


def _add_topology(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=2, help="nodes (default 2)")
    parser.add_argument("--ranks-per-node", type=int, default=4, help="ranks of each node (default 4)")
    parser.add_argument(
        "--nics", type=int, help="NICs of each node, shared evenly by its ranks (default: one for each rank)"
    )
    parser.add_argument(
        "--nic-mbit", type=float, default=100.0, help="rate of a NIC in Mbit/s, either direction (default 100)"
    )
    parser.add_argument(
        "--intra-mbit", type=float, help="rate of a rank's intra-node link in Mbit/s (default: unshaped)"
    )


def _topology(options: argparse.Namespace) -> Topology:
    return Topology(
        num_nodes=options.nodes,
        ranks_per_node=options.ranks_per_node,
        nics_per_node=options.ranks_per_node if options.nics is None else options.nics,
        nic_bits_per_s=round(options.nic_mbit * 1e6),
        intra_bits_per_s=None if options.intra_mbit is None else round(options.intra_mbit * 1e6),
    )


def _check(_options: argparse.Namespace) -> int:
    reason = check()
    print("OK" if reason is None else f"SKIP: {reason}")
    return 0 if reason is None else SKIPPED


def _up(options: argparse.Namespace) -> int:
    cluster = EmulatedCluster(_topology(options), options.tag)
    if os.geteuid() != 0:
        raise ConfigError("up: a cluster that stands needs root; `run` without --tag does not")
    cluster.up()
    print(f"{_summary(cluster.topology)}. A shell as rank 0: ip netns exec {cluster.tag}-n0r0 bash")
    return 0


def _down(options: argparse.Namespace) -> int:
    removed = remove(checked_tag(options.tag))
    print(f"removed {len(removed)} namespaces")
    return 0


def _run(options: argparse.Namespace) -> int:
    where = EmulatedCluster.standing(options.tag) if options.tag else _topology(options)
    topology = where if isinstance(where, Topology) else where.topology
    command = commands.parse(options.command)
    if not 0 <= options.show < topology.world_size:
        raise ConfigError(f"--show {options.show}: choose a rank from 0 to {topology.world_size - 1}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: the ranks share the cores
    command.preload()
    result = run(where, command, options.logs, deadline_s=options.deadline_s, show=options.show)
    print(_report(topology, result), flush=True)
    if options.json is not None:
        nics = [dataclasses.asdict(nic) for nic in result.nic_bytes]
        options.json.write_text(
            json.dumps({"seconds": result.seconds, "topology": dataclasses.asdict(topology), "nics": nics}) + "\n"
        )
    return 0


def _summary(topology: Topology) -> str:
    intra = "unshaped" if topology.intra_bits_per_s is None else f"{topology.intra_bits_per_s / 1e6:g} Mbit/s"
    return (
        f"{topology.num_nodes} nodes x {topology.ranks_per_node} ranks, {topology.nics_per_node} NICs a node at "
        f"{topology.nic_bits_per_s / 1e6:g} Mbit/s, intra-node links {intra}"
    )


def _report(topology: Topology, result: Result) -> str:
    rows = [("node", "NIC", "sent MB", "received MB"), *map(_row, result.nic_bytes)]
    table = "\n".join(f"{node:>4} {nic:>4} {sent:>12} {received:>12}" for node, nic, sent, received in rows)
    return f"{_summary(topology)}: {result.seconds:.1f} s; every rank's output is in {result.logs}\n{table}"


def _row(nic: NicBytes) -> tuple[str, str, str, str]:
    return str(nic.node), str(nic.nic), f"{nic.sent / 1e6:.3f}", f"{nic.received / 1e6:.3f}"


if __name__ == "__main__":
    sys.exit(main())

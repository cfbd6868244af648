"""A cluster of network namespaces: set up, reshaped, counted, torn down."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from types import TracebackType

from megatron_balance.errors import ConfigError
from tools.emulated_cluster import linux, wiring
from tools.emulated_cluster.linux import ClusterError
from tools.emulated_cluster.topology import NicBytes, Topology

_SYSCTL = Path("/proc/sys")
_BATCH_TIMEOUT_S = 60.0


class EmulatedCluster:
    """Namespaces named `<tag>-...` in the current mount namespace; a context manager that sets them
    up and tears them down.

    Needs the right to make them: root, or a sandbox (`tools.emulated_cluster.run` and `check` make
    one by themselves).
    """

    def __init__(self, topology: Topology, tag: str) -> None:
        """Describe a cluster; nothing is created yet.

        Raises:
            ConfigError: a tag that is not 1 to 12 lower-case letters and digits.
        """
        self.topology = topology
        self.tag = checked_tag(tag)

    @classmethod
    def standing(cls, tag: str) -> EmulatedCluster:
        """The cluster that `up` left under this tag.

        Raises:
            ClusterError: there is none.
        """
        fabric = f"{checked_tag(tag)}-{wiring.FABRIC}"
        if not (linux.NAMESPACES / fabric).exists():
            raise ClusterError(
                f"no emulated cluster with the tag {tag!r} stands; make one with `up --tag {tag}`, or leave the tag out"
            )
        with linux.entered(fabric):
            found = re.search(r"alias (\S+)", _call(["ip", "link", "show", "dev", "fabric"]))
        if found is None:
            raise ClusterError(
                f"namespace {fabric} is no whole emulated cluster; remove what is left of it with `down --tag {tag}`"
            )
        return cls(Topology.parse(found[1]), tag)

    def __enter__(self) -> EmulatedCluster:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Build the cluster; one of the same tag is torn down first, and a half-built one is torn
        down before this raises.

        Raises:
            ClusterError: `ip`, `tc` or the kernel refused.
        """
        self.down()
        try:
            self._build()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove this tag's namespaces, and their links with them; nothing else, and no error if
        there are none.
        """
        remove(self.tag)

    def reshape(self, nic_bits_per_s: int, intra_bits_per_s: int | None) -> None:
        """Change the rates of the standing links; connections stay open.

        Raises:
            ConfigError: a rate that no link has.
            ClusterError: `tc` refused.
        """
        self.topology = self.topology.at_rates(nic_bits_per_s, intra_bits_per_s)
        self._shape()

    def disturb(self, node: int, nic: int, bits_per_s: int, queue_bytes: int = wiring.QUEUE_BYTES) -> None:
        """Change what one NIC sends, until `reshape`: its rate, and how many bytes may wait; packets
        that come on top of these are lost.

        Raises:
            ClusterError: `tc` refused.
        """
        for name, commands in wiring.sending(self.topology, node, nic, bits_per_s, queue_bytes).items():
            self._batch("tc", name, commands)

    def dropped(self, node: int, nic: int) -> int:
        """Packets that one NIC should have sent and the kernel dropped, as `tc` counts them."""
        namespace, device = wiring.nic_device(self.topology, node, nic)
        with linux.entered(self._name(namespace)):
            found = re.search(r"dropped (\d+)", _call(["tc", "-s", "qdisc", "show", "dev", device]))
        if found is None:
            raise ClusterError(f"tc shows no count of dropped packets for NIC {nic} of node {node}")
        return int(found[1])

    def nic_bytes(self) -> tuple[NicBytes, ...]:
        """Bytes that every NIC has carried since the cluster is up, by node and NIC."""
        counts: list[NicBytes] = []
        for node in range(self.topology.num_nodes):
            for nic in range(self.topology.nics_per_node):
                namespace, device = wiring.nic_device(self.topology, node, nic)
                with linux.entered(self._name(namespace)):
                    counts.append(NicBytes(node, nic, *_device_bytes(device)))
        return tuple(counts)

    def enter(self, rank: int) -> None:
        """Move this process into a rank's namespace, with the host name `n<node>`; call it before
        any thread exists.

        Raises:
            ClusterError: the cluster does not stand, or this process may not enter it.
        """
        linux.enter(self._name(wiring.rank_name(self.topology, rank)))
        os.unshare(os.CLONE_NEWUTS)
        # programs tell nodes apart by host name
        socket.sethostname(wiring.node_name(self.topology.node(rank)))

    def _name(self, namespace: str) -> str:
        return f"{self.tag}-{namespace}"

    def _build(self) -> None:
        topology = self.topology
        names = wiring.namespaces(topology)
        _batch("ip", [f"netns add {self._name(name)}" for name in names])
        ranks = {wiring.rank_name(topology, rank) for rank in range(topology.world_size)}
        for name in names:
            with linux.entered(self._name(name)):
                _set(wiring.QUIET_SETTINGS | (wiring.RANK_SETTINGS if name in ranks else {}))
        _batch("ip", wiring.cables(topology, self.tag))
        for name, commands in wiring.interfaces(topology).items():
            self._batch("ip", name, commands)
        self._shape()

    def _shape(self) -> None:
        for name, commands in wiring.packet_sizes(self.topology).items():
            self._batch("ip", name, commands)
        for name, commands in wiring.shaping(self.topology).items():
            self._batch("tc", name, commands)
        # The alias is how a later process learns what stands here; it goes with the namespace, as
        # no file would.
        self._batch("ip", wiring.FABRIC, [f"link set dev fabric alias {self.topology.text()}"])

    def _batch(self, program: str, namespace: str, commands: list[str]) -> None:
        with linux.entered(self._name(namespace)):
            _batch(program, commands)


def checked_tag(tag: str) -> str:
    if not re.fullmatch(r"[a-z0-9]{1,12}", tag):
        raise ConfigError(f"tag {tag!r}: choose 1 to 12 lower-case letters and digits; namespaces are named after it")
    return tag


def remove(tag: str) -> list[str]:
    """Remove the namespaces of this tag, if any; their names."""
    ours = re.compile(rf"{checked_tag(tag)}-({wiring.FABRIC}|n\d+(r\d+)?)")
    found = sorted(name for name in _names() if ours.fullmatch(name))
    if found:
        _batch("ip", [f"netns del {name}" for name in found])
    return found


def _names() -> list[str]:
    return os.listdir(linux.NAMESPACES) if linux.NAMESPACES.is_dir() else []


def _batch(program: str, commands: list[str]) -> None:
    _call([program, "-batch", "-"], "\n".join(commands) + "\n")


def _call(command: list[str], text: str = "") -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_BATCH_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise ClusterError(f"{command[0]}: {error.strerror}; install iproute2") from error
    if done.returncode:
        raise ClusterError(_refusal(command[0], done.stderr, text.splitlines()))
    return done.stdout


def _refusal(program: str, stderr: str, commands: list[str]) -> str:
    # iproute2 says why, then `Command failed -:LINE`
    why = next((line for line in stderr.splitlines() if line.strip()), "no reason given")
    at = re.search(r"Command failed -:(\d+)", stderr)
    return f"{program} {commands[int(at[1]) - 1]}: {why}" if at else f"{program}: {why}"


def _set(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        file = _SYSCTL / name
        if file.exists():  # no net/ipv6 where the kernel has none
            try:
                file.write_text(value)
            except OSError as error:
                raise ClusterError(f"sysctl {name} = {value}: {error.strerror}") from error


def _device_bytes(device: str) -> tuple[int, int]:
    """Bytes sent and received by an interface of the namespace this thread is in."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            received, *_, sent = [int(count) for count in counts.split()][:9]
            return sent, received
    raise ClusterError(f"interface {device} is gone; the cluster was torn down meanwhile")

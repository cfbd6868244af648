"""Read a node's hardware from the machine: GPUs, NVLinks, NICs and the NIC nearest to each GPU;
write it as a cluster YAML, which all ranks of a job agree on.

Sources: `nvidia-smi` (names, memory, `topo -m`), /sys/class/infiniband (rate and state of each
port) and, for machines without InfiniBand or RoCE, /sys/class/net. Where `topo -m` says nothing of
a NIC, its place on the PCI bus decides (/sys/bus/pci).
"""

import datetime
import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from megatron_balance.config import ClusterChoice, load_cluster
from megatron_balance.cost.base import NVLINK_BYTES_PER_S
from megatron_balance.errors import ConfigError
from megatron_balance.strict_yaml import parse_yaml

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60
# How `nvidia-smi topo -m` says that two devices are connected, nearest first: one PCI switch,
# several, a host bridge, a NUMA node, the link between processors.
NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
# Generations with NVLinks of their own, by a GPU's name; others are as Ampere's, as NCCL has it.
GENERATIONS = {"Hopper": re.compile(r"\bG?H\d"), "Blackwell": re.compile(r"\bG?B\d")}
# What NCCL counts on of a port: 48, 24 and 12 GB/s of 400, 200 and 100 Gb/s (June 2026,
# graph/search.cc, speedArrayInter).
PORT_SHARE = 0.96
# The preset with a GPU's compute rates, by a word of its name; an A100 computes as an A800. Cards of
# the same chip with another rate have none: the PCIe and NVL forms of an H100.
PRESETS = {"H200": "h200", "H100": "h100", "H800": "h800", "A800": "a800", "A100": "a800"}
OTHER_FORMS = re.compile(r"H[12]00\b.*\b(PCIe|NVL)\b|\bGH200")
Run = Callable[[Sequence[str]], "str | None"]  # runs a program; its output, or None if it is not there or fails


@dataclass(frozen=True, slots=True)
class _Gpu:
    """`pci`: address on the bus, lower case, or ''."""

    name: str
    memory_bytes: int
    pci: str


@dataclass(frozen=True, slots=True)
class _Nic:
    """A device with a port that is up. `rate`: as written; `layer`: InfiniBand, Ethernet, net."""

    name: str
    bytes_per_s: float
    rate: str
    layer: str
    source: str
    pci: str


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `nearest`: by GPU, the names of the NICs that are nearest to it, and how near."""

    gpus: tuple[_Gpu, ...]
    nvlinks: int
    nics: tuple[_Nic, ...]
    nearest: tuple[tuple[tuple[str, ...], str], ...]

    @property
    def used_nics(self) -> tuple[_Nic, ...]:
        """NICs that are nearest to some GPU, as NCCL uses them. Others serve storage and the like."""
        used = {name for names, _ in self.nearest for name in names}
        return tuple(nic for nic in self.nics if nic.name in used)


def read_node(root: Path = Path("/"), run: Run | None = None) -> Node:
    """This machine. Raises ConfigError where it has no NVIDIA GPU."""
    run = run or _run
    listed = run(["nvidia-smi", "--query-gpu=name,memory.total,pci.bus_id", "--format=csv,noheader,nounits"])
    gpus = _parse_gpus(listed or "")
    if not gpus:
        raise ConfigError(
            "--write-cluster: nvidia-smi lists no GPU here; run it on a node of the cluster, inside the job's "
            "container if there is one"
        )
    links, nvlinks = _parse_topology(run(["nvidia-smi", "topo", "-m"]) or "")
    nics = _read_infiniband(root) or _read_ethernet(root)
    nearest = tuple(_nearest(gpu, nics, links.get(f"GPU{index}", {}), root) for index, gpu in enumerate(gpus))
    return Node(gpus, nvlinks, nics, nearest)


def _parse_gpus(text: str) -> tuple[_Gpu, ...]:
    """GPUs of nvidia-smi's CSV of name, memory.total (MiB) and pci.bus_id."""
    gpus: list[_Gpu] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            if not cells[1].isdigit():
                raise ConfigError(f"nvidia-smi does not say the memory of {cells[0]} (got {cells[1]!r})")
            gpus.append(_Gpu(cells[0], int(cells[1]) << 20, _pci(cells[2])))
    return tuple(gpus)


def _pci(address: str) -> str:
    """0000:1b:00.0 of 00000000:1B:00.0: the domain has eight digits there and four in /sys."""
    match = re.fullmatch(r"[0-9a-f]*([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", address.lower())
    return match[1] if match else ""


# By two devices (GPU0, ..., names of NICs), how `nvidia-smi topo -m` says they are connected.
Links = Mapping[str, Mapping[str, str]]


def _parse_topology(text: str) -> tuple[Links, int]:
    """The matrix of `nvidia-smi topo -m`, NICs by the names of its legend; and the NVLinks between two
    GPUs, the fewest of any pair (0: none). What is no such matrix has no links.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    device = re.compile(r"(GPU|NIC)\d+$|mlx5_\w+$|[a-z]+_\d+$")
    header = next(
        (
            words
            for words in map(str.split, lines)
            if words and words[0] == "GPU0" and len(words) > 1 and words[1] != "X"
        ),
        list[str](),
    )
    columns: list[str] = []
    for word in header:
        if not device.match(word):
            break  # CPU Affinity and what follows
        columns.append(word)
    legend = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", "\n".join(lines), re.MULTILINE))
    links: dict[str, dict[str, str]] = {}
    for words in map(str.split, lines):
        if len(words) > len(columns) and words[0] in columns and "X" in words[1 : len(columns) + 1]:
            cells = zip(columns, words[1:], strict=False)
            links[legend.get(words[0], words[0])] = {legend.get(column, column): cell for column, cell in cells}
    gpus = [name for name in links if re.fullmatch(r"GPU\d+", name)]
    pairs = [links[a].get(b, "") for a in gpus for b in gpus if a != b]
    return links, min((int(text[2:]) if re.fullmatch(r"NV\d+", text) else 0 for text in pairs), default=0)


def _read_infiniband(root: Path) -> tuple[_Nic, ...]:
    """InfiniBand and RoCE devices with an active port, by name, with the sum of these ports' rates."""
    nics: list[_Nic] = []
    for device in _listed(root / "sys/class/infiniband"):
        ports = [port for port in _listed(device / "ports") if "ACTIVE" in _text(port / "state")]
        rates = [(port, _text(port / "rate")) for port in ports]
        total = sum(_parse_rate(rate) for _, rate in rates)
        if total > 0:
            layer = _text(ports[0] / "link_layer") or "InfiniBand"
            source = f"/sys/class/infiniband/{device.name}/ports/{ports[0].name}/rate"
            nics.append(_Nic(device.name, total, rates[0][1], layer, source, _device_pci(device)))
    return tuple(nics)


def _parse_rate(text: str) -> float:
    """Bytes per second of a rate such as '400 Gb/sec (4X NDR)'; 0 if it is none."""
    match = re.match(r"\s*([0-9.]+)\s*Gb/sec", text)
    return float(match[1]) * 1e9 / 8 if match else 0.0


def _read_ethernet(root: Path) -> tuple[_Nic, ...]:
    """Physical network devices that are up and know their speed, of those the fastest."""
    nics: list[_Nic] = []
    for device in _listed(root / "sys/class/net"):
        speed, source = _text(device / "speed"), f"/sys/class/net/{device.name}/speed"
        if (device / "device").exists() and _text(device / "operstate") == "up" and speed.isdigit() and int(speed) > 0:
            rate = int(speed) * 1e6 / 8
            nics.append(_Nic(device.name, rate, f"{speed} Mbit/s", "net", source, _device_pci(device)))
    fastest = max((nic.bytes_per_s for nic in nics), default=0.0)
    return tuple(nic for nic in nics if nic.bytes_per_s == fastest)


def _nearest(gpu: _Gpu, nics: Sequence[_Nic], row: Mapping[str, str], root: Path) -> tuple[tuple[str, ...], str]:
    """NICs nearest to a GPU, and how near: by its row of the topology, else on the PCI bus."""
    said = {nic.name: row[nic.name] for nic in nics if row.get(nic.name) in NEAR}
    if said:
        nearest = min(said.values(), key=NEAR.index)
        return tuple(name for name, how in said.items() if how == nearest), nearest
    shared = {nic.name: _common(_bus_path(root, gpu.pci), _bus_path(root, nic.pci)) for nic in nics}
    deepest = max(shared.values(), default=0)
    return tuple(name for name, depth in shared.items() if depth == deepest), "by PCI bus" if deepest else "any"


def _bus_path(root: Path, pci: str) -> tuple[str, ...]:
    """The bridges from the root of the PCI bus down to a device; () if it is not known."""
    link = root / "sys/bus/pci/devices" / pci
    return Path(os.path.realpath(link)).relative_to(Path(os.path.realpath(root))).parts if pci and link.exists() else ()


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Bridges that two ways have in common, with the host bridge; other folders are not counted."""
    same = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        same += one.count(":") > 0
    return same


def _device_pci(device: Path) -> str:
    link = device / "device"
    return Path(os.path.realpath(link)).name if link.exists() else ""


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # absent, or a device that is down refuses to say
        return ""


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def cluster_yaml(node: Node, name: str, today: datetime.date) -> str:
    """The node as a cluster section, every key with what it was read from; `megatron-balance plan
    --cluster FILE` reads it. ConfigError: GPUs that are not alike.
    """
    kinds = sorted({(gpu.name, gpu.memory_bytes) for gpu in node.gpus})
    if len(kinds) > 1:
        raise ConfigError(
            f"--write-cluster: the GPUs of this node are not alike: {kinds}; plans take ranks as equal, so no file is "
            "written"
        )
    gpu = node.gpus[0]
    count = len(node.gpus)
    known = next((preset for word, preset in PRESETS.items() if word in gpu.name), None)
    preset = None if OTHER_FORMS.search(gpu.name) else known
    lines = [
        f"# {count} x {gpu.name}, as 'megatron-balance doctor --write-cluster' read them on {today}. num_ranks is "
        "this node's."
    ]
    if preset is not None:
        lines.append(f"base: {preset:<18} # compute rates and alphas, by the GPU's name")
    else:
        lines.append(
            f"# No preset has the compute rates of {gpu.name}: the default preset's count; 'megatron-balance profile' "
            "measures yours."
        )
    lines += [
        f"name: {name}",
        _line("num_ranks", str(count), "this node alone; in training the job says how many"),
        _line("ranks_per_node", str(count), "GPUs that nvidia-smi lists"),
        _line("memory_bytes", f"{gpu.memory_bytes / 1e9:.1f}e9", "nvidia-smi --query-gpu=memory.total"),
        *_intra_lines(node),
        *_nic_lines(node),
    ]
    return "\n".join(lines) + "\n"


def _intra_lines(node: Node) -> list[str]:
    if len(node.gpus) == 1:
        return ["# intra_bytes_per_s: one GPU has no link inside its node."]
    if not node.nvlinks:
        return [
            "# intra_bytes_per_s: nvidia-smi topo -m shows no NVLink between some GPUs; 'megatron-balance profile "
            "--links' measures it"
        ]
    name = node.gpus[0].name
    rate = NVLINK_BYTES_PER_S[next((each for each, named in GENERATIONS.items() if named.search(name)), "Ampere")]
    return [
        _line(
            "intra_bytes_per_s",
            _number(node.nvlinks * rate),
            f"nvidia-smi topo -m: NV{node.nvlinks}, {rate / 1e9:g} GB/s a link, one direction, as NCCL counts on",
        )
    ]


def _nic_lines(node: Node) -> list[str]:
    nics, count = node.used_nics, len(node.gpus)
    if not nics:
        return [
            "# nic_bytes_per_s: no active InfiniBand or RoCE port and no network device that knows its speed; jobs of "
            "one node only."
        ]
    slow = min(nics, key=lambda nic: nic.bytes_per_s)
    shares, several = ceil(count / len(nics)), max(1, len(nics) // count)
    unlike = len({nic.bytes_per_s for nic in nics}) > 1
    note = f"{slow.source}: {slow.rate}, {slow.layer}"
    note += (f", of {several} a GPU" if several > 1 else "") + (", the slowest" if unlike else "")
    nearest = f"{count} GPUs, {len(nics)} NIC{'s' * (len(nics) > 1)} nearest to them"
    note += f"; NCCL counts on {PORT_SHARE:.0%}"
    lines = [_line("nic_bytes_per_s", _number(PORT_SHARE * slow.bytes_per_s * several), note)]
    lines.append(_line("ranks_per_nic", str(shares), nearest))
    lines += [f"# GPU {index}: {', '.join(names)} ({how})" for index, (names, how) in enumerate(node.nearest)]
    idle = [nic.name for nic in node.nics if nic not in nics]
    return [*lines, f"# Not nearest to any GPU, so not counted: {', '.join(idle)}"] if idle else lines


def _line(key: str, value: str, source: str) -> str:
    return f"{f'{key}: {value}':<24} # {source}"


def _number(value: float) -> str:
    return f"{value / 1e9:g}e9"


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of one rank of its node: a cluster YAML, or the reason why there is none."""

    text: str = ""
    failure: str = ""


def _read_machine() -> Reading:
    try:
        today = datetime.datetime.now(datetime.UTC).date()
        return Reading(cluster_yaml(read_node(), "machine", today))
    except ConfigError as error:
        return Reading(failure=str(error))


def cluster_of_machine(given: ClusterChoice | None) -> ClusterChoice | None:
    """The cluster that the machine says it is, in sizes `given`; None: unknown. Collective (world)."""
    import torch.distributed as dist  # doctor reads a node without torch

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

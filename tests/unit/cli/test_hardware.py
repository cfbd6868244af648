"""`doctor --write-cluster`: what nvidia-smi and /sys say of a node, as a cluster file that loads;
on made-up nodes of known kinds.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from megatron_balance.config import load_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.profiling import hardware

TODAY = datetime.date(2026, 1, 31)
AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


def topology(num_gpus: int, link: str, nics: dict[str, dict[int, str]], *, legend: bool = True) -> str:
    """Text of `nvidia-smi topo -m`: tabs, an underlined header, a legend. `nics`: by name, how near
    to which GPU.
    """
    gpus = [f"GPU{i}" for i in range(num_gpus)]
    shown = [f"NIC{i}" for i in range(len(nics))] if legend else list(nics)
    lines = ["\x1b[4m\t" + "\t".join([*gpus, *shown, *AFFINITY]) + "\x1b[0m"]
    near = list(nics.values())
    for i, gpu in enumerate(gpus):
        cells = [" X " if i == j else link for j in range(num_gpus)] + [
            at.get(i, "NODE" if i < num_gpus / 2 else "SYS") for at in near
        ]
        lines.append("\t".join([gpu, *cells, "0-55,112-167" if i < num_gpus / 2 else "56-111,168-223", "0", "", "N/A"]))
    for i, nic in enumerate(shown):
        cells = [near[i].get(j, "SYS") for j in range(num_gpus)] + [
            " X " if i == j else "NODE" for j in range(len(nics))
        ]
        lines.append("\t".join([nic, *cells]))
    lines += [
        "",
        "Legend:",
        "",
        "  X    = Self",
        "  PIX  = Connection traversing at most a single PCIe bridge",
        "  NV#  = Connection of # NVLinks",
        "",
    ]
    if legend:
        lines += ["NIC Legend:", "", *(f"  NIC{i}: {name}" for i, name in enumerate(nics)), ""]
    return "\n".join(lines)


def gpus(name: str, count: int, memory_mib: int) -> str:
    return "".join(f"{name}, {memory_mib}, 00000000:{0x1B + 4 * i:02X}:00.0\n" for i in range(count))


def infiniband(
    root: Path, name: str, rate: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand", pci: str = ""
) -> None:
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    for file, text in (("rate", rate), ("state", state), ("link_layer", layer)):
        (port / file).write_text(text + "\n")
    if pci:
        place = root / "sys/devices" / pci
        place.mkdir(parents=True, exist_ok=True)
        (root / "sys/class/infiniband" / name / "device").symlink_to(place)
        at_bus(root, pci)


def at_bus(root: Path, pci: str) -> None:
    """The device at the end of the way `pci` from a root port, and its entry on the bus."""
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (root / "sys/devices" / pci).mkdir(parents=True, exist_ok=True)
    (bus / Path(pci).name).symlink_to(root / "sys/devices" / pci)


def read(root: Path, listed: str, topo: str | None) -> hardware.Node:
    return hardware.read_node(root, lambda command: topo if "topo" in command else listed)


def loaded(node: hardware.Node, tmp_path: Path):
    text = hardware.cluster_yaml(node, "ours", TODAY)
    (tmp_path / "ours.yaml").write_text(text)
    return load_cluster(str(tmp_path / "ours.yaml")).build(), text


@pytest.fixture
def dgx_h100(tmp_path):
    """8 H100, a NIC of 400 Gb/s behind each one's switch, and two of storage on a host bridge; one
    more port is down.
    """
    compute = {f"mlx5_{n}": {gpu: "PXB"} for gpu, n in enumerate((0, 3, 4, 5, 6, 9, 10, 11))}
    storage: dict[str, dict[int, str]] = {"mlx5_1": {}, "mlx5_7": {}}
    for name in compute:
        infiniband(tmp_path, name, "400 Gb/sec (4X NDR)")
    for name in storage:
        infiniband(tmp_path, name, "200 Gb/sec (4X HDR)", layer="Ethernet")
    infiniband(tmp_path, "mlx5_2", "10 Gb/sec (1X SDR)", state="1: DOWN")
    nics = dict(sorted({**compute, **storage, "mlx5_2": {}}.items()))
    return read(tmp_path, gpus("NVIDIA H100 80GB HBM3", 8, 81559), topology(8, "NV18", nics))


def test_a_dgx_h100_has_a_nic_a_gpu(dgx_h100, tmp_path):
    cluster, text = loaded(dgx_h100, tmp_path)
    assert (cluster.num_ranks, cluster.ranks_per_node, cluster.ranks_per_nic) == (8, 8, 1)
    assert (cluster.intra_bytes_per_s, cluster.nic_bytes_per_s) == (450e9, 50e9)
    assert cluster.memory_bytes == pytest.approx(81559 * 2**20, rel=1e-3)
    assert cluster.flops_per_s == load_cluster("h100").build().flops_per_s
    assert "# nvidia-smi topo -m: NV18, 25 GB/s a link, one direction" in text
    assert "# /sys/class/infiniband/mlx5_0/ports/1/rate: 400 Gb/sec (4X NDR), InfiniBand" in text
    assert "# GPU 1: mlx5_3 (PXB)" in text
    assert "Not nearest to any GPU, so not counted: mlx5_1, mlx5_7" in text
    assert "mlx5_2" not in text


def test_an_a800_with_four_nics_shares_each_between_two_gpus(tmp_path):
    nics = {f"mlx5_bond_{n}": {2 * n: "PXB", 2 * n + 1: "PXB"} for n in range(4)}
    for name in nics:
        infiniband(tmp_path, name, "200 Gb/sec (2X NDR)", layer="Ethernet")
    cluster, text = loaded(read(tmp_path, gpus("NVIDIA A800-SXM4-80GB", 8, 81920), topology(8, "NV8", nics)), tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s, cluster.intra_bytes_per_s) == (2, 25e9, 200e9)
    assert cluster.flops_per_s == 312e12
    assert "# 8 GPUs, 4 NICs nearest to them" in text


def test_an_h200_hgx_whose_columns_bear_the_devices_own_names(tmp_path):
    nics = {f"mlx5_{n}": {n: "PIX"} for n in range(8)}
    for name in nics:
        infiniband(tmp_path, name, "400 Gb/sec (4X NDR)", layer="Ethernet")
    node = read(tmp_path, gpus("NVIDIA H200", 8, 143771), topology(8, "NV18", nics, legend=False))
    cluster, text = loaded(node, tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s) == (1, 50e9)
    assert cluster.memory_bytes == pytest.approx(150.8e9)
    assert text.splitlines()[1].startswith("base: h200 ")


def test_two_nics_a_gpu_add_up_and_the_slowest_counts(tmp_path):
    nics = {f"mlx5_{n}": {n // 2: "PIX"} for n in range(4)}
    for name in nics:
        infiniband(tmp_path, name, "100 Gb/sec (4X EDR)" if name == "mlx5_3" else "200 Gb/sec (4X HDR)")
    cluster, text = loaded(read(tmp_path, gpus("NVIDIA A100-SXM4-40GB", 2, 40960), topology(2, "NV12", nics)), tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s, cluster.intra_bytes_per_s) == (1, 25e9, 300e9)
    assert "of 2 a GPU, the slowest" in text


def test_without_a_nic_the_fastest_network_device_counts_and_is_shared(tmp_path):
    for name, speed, state, physical in (
        ("eth0", "1000", "up", True),
        ("eth1", "25000", "up", True),
        ("docker0", "100000", "up", False),
        ("eth2", "40000", "down", True),
    ):
        device = tmp_path / "sys/class/net" / name
        device.mkdir(parents=True)
        (device / "speed").write_text(speed)
        (device / "operstate").write_text(state)
        if physical:
            (device / "device").mkdir()
    cluster, text = loaded(read(tmp_path, gpus("NVIDIA L40S", 4, 46068), topology(4, "PHB", {})), tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s) == (4, 25e9 / 8)
    assert "/sys/class/net/eth1/speed: 25000 Mbit/s" in text
    assert "shows no NVLink between some GPUs" in text
    assert "No preset has the compute rates of NVIDIA L40S" in text


def test_a_node_without_any_network_says_so_and_loads(tmp_path):
    cluster, text = loaded(read(tmp_path, gpus("NVIDIA H200", 1, 143771), topology(1, "", {})), tmp_path)
    assert (cluster.num_ranks, cluster.num_nodes) == (1, 1)
    assert "no active InfiniBand or RoCE port" in text
    assert "one GPU has no link inside its node" in text


def test_where_the_topology_says_nothing_the_pci_bus_decides(tmp_path):
    """Two root ports, a switch behind each, with two GPUs and a NIC behind either."""
    for at, pci in enumerate(("0000:1b:00.0", "0000:1f:00.0", "0000:23:00.0", "0000:27:00.0")):
        at_bus(tmp_path, f"pci0000:{at // 2}0/0000:{at // 2}0:01.0/0000:0{at}:00.0/{pci}")
    infiniband(tmp_path, "mlx5_0", "200 Gb/sec (4X HDR)", pci="pci0000:10/0000:10:01.0/0000:0a:00.0/0000:a0:00.0")
    infiniband(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)", pci="pci0000:00/0000:00:01.0/0000:0b:00.0/0000:b0:00.0")
    node = read(tmp_path, gpus("NVIDIA H100 80GB HBM3", 4, 81559), None)
    assert [names for names, _ in node.nearest] == [("mlx5_1",), ("mlx5_1",), ("mlx5_0",), ("mlx5_0",)]
    assert loaded(node, tmp_path)[0].ranks_per_nic == 2


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML: Unknown Error", "\tGPU0\nGPU0\t X "])
def test_what_is_no_matrix_has_no_links(text):
    assert hardware.parse_topology(text)[1] == 0


def test_unlike_gpus_are_refused(tmp_path):
    listed = gpus("NVIDIA H100 80GB HBM3", 1, 81559) + gpus("NVIDIA H200", 1, 143771)
    with pytest.raises(ConfigError, match="not alike"):
        hardware.cluster_yaml(read(tmp_path, listed, None), "ours", TODAY)


def test_the_verb_writes_a_file_that_plans(dgx_h100, tmp_path, monkeypatch, run):
    monkeypatch.setattr(hardware, "read_node", lambda: dgx_h100)
    path = tmp_path / "cluster.yaml"
    document = run.json("doctor --json --write-cluster", path)
    assert document["cluster"]["nic_bytes_per_s"] == 50e9
    assert len(document["node"]["gpus"]) == 8
    table = run.printed("plan --planner zeppelin --lengths 4000,100 --tokens-per-rank 1024 --cluster", path)
    assert table.startswith("8 ranks (1 node x 8), llama-7b on cluster")
    assert "the file is there already" in run.error("doctor --write-cluster", path)


def test_users_mistakes_are_one_line(tmp_path, run, monkeypatch):
    assert "ends in .yaml" in run.error("doctor --write-cluster", tmp_path / "cluster.json")
    monkeypatch.setattr(hardware, "_run", lambda _command: None)
    assert "nvidia-smi lists no GPU here" in run.error("doctor --write-cluster", tmp_path / "cluster.yaml")

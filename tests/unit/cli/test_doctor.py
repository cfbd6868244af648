"""`megatron-balance doctor`: what is missing is said with the command that mends it."""

import datetime
import importlib.metadata
from pathlib import Path
from typing import get_args

import pytest

from megatron_balance.cli import doctor
from megatron_balance.config import load_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.planning.choice import Run
from megatron_balance.profiling import hardware


@pytest.fixture
def stack(monkeypatch):
    # The distributions this machine appears to have; torch is never started.
    def have(torch: dict[str, object] | None = None, **versions: str) -> dict[str, doctor.Check]:
        def version(distribution: str) -> str:
            if distribution in versions:
                return versions[distribution]
            raise importlib.metadata.PackageNotFoundError(distribution)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(doctor, "_probe_torch", lambda: torch or {})
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
        return {check.name: check for check in doctor.examine()}

    return have


def test_nothing_installed_names_a_mend_for_every_part_below_the_table(stack, run):
    checks = stack()
    missing = [check for check in checks.values() if check.status == "missing"]
    assert {"numpy", "torch", "megatron-core", "nccl", "flash-attn", "gurobi", "psutil"} <= {
        check.name for check in missing
    }
    assert all(check.mend for check in checks.values() if check.status != "ok")
    # Commands are below the table whole and on a line of their own.
    said = run.printed("doctor")
    table, below = said.split("to mend what is not ok:\n")
    assert "pip install" not in table
    told = dict(line.strip().split("  ", 1) for line in below.splitlines() if line.startswith("  "))
    mends = {check.name: check.mend for check in checks.values() if check.mend}
    assert {name: command.strip() for name, command in told.items()} == mends
    assert "megatron-balance[gurobi]" in said


def test_before_python_312_training_needs_another_python_and_no_command_that_brings_nothing(stack, monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 11, 7))
    checks = stack()
    for part in ("python for Megatron", "torch", "gloo", "megatron-core"):
        assert checks[part].mend.startswith("python3.12 -m venv"), checks[part]
    assert "pip leaves torch and megatron-core out of [train] without a word" in checks["torch"].mend


def test_what_is_there_but_wrong_says_why(stack, monkeypatch):
    # Another Megatron is wrong and the pin is said.
    check = stack(**{"megatron-core": "0.17.1"})["megatron-core"]
    assert (check.status, check.found, check.wanted) == ("wrong", "0.17.1", "0.19.x or 0.18.2")
    assert check.mend == "pip install --no-deps megatron-core==0.19.2"
    # A torch that does not import says why.
    old = stack(torch={"torch": "2.7.1+cu128"})["torch"]
    assert (old.status, old.found, old.wanted) == ("wrong", "2.7.1+cu128", ">= 2.8")
    check = stack(torch={"error": "ImportError: libcudart.so.13: cannot open shared object file"})["torch"]
    assert check.status == "wrong"
    assert "libcudart" in check.found


def test_namespaces_are_probed_in_another_process(stack, monkeypatch):
    refusals = {"raise SystemExit('not permitted')": "not permitted", "import os; os.abort()": "ended with code -6"}
    for probe, told in refusals.items():
        monkeypatch.setattr(doctor, "NAMESPACE_PROBE", probe)
        check = stack()["network namespaces"]
        assert (check.status, check.found) == ("wrong", f"refused: {told}")


def test_a_whole_cpu_stack_is_ready_to_train_but_not_on_a_gpu(stack, run):
    versions = dict.fromkeys(("numpy", "pydantic", "PyYAML", "tqdm", "rich", "psutil"), "1.0")
    checks = stack(
        torch={"torch": "2.13.0", "cuda": "13.0", "gpus": [], "gloo": True, "nccl": "2.29.7"},
        **versions,
        **{"megatron-core": "0.19.2"},
    )
    assert checks["gpu"].status == "missing"
    ready = run.json("doctor --json")["ready"]
    expected_to_train = checks["python for Megatron"].status == "ok"
    assert ready == {"plan": True, "train": expected_to_train, "train_on_gpu": False}


def test_a_configuration_gets_its_memory_and_the_decision_in_a_sentence(stack, run, tmp_path):
    stack()
    config = tmp_path / "run.yaml"
    config.write_text(
        "planner: te_ring\nmodel: llama-7b\n"
        "cluster: {base: a800, num_ranks: 16}\ndataset: {name: arxiv, tokens: 65536}\n"
    )
    code, out, _ = run("doctor", "--config", config)
    assert code == 0
    # Kept keys and values of 15 x 4k tokens are too much for 80 GB beside the model.
    assert "backward: keep in " in out
    assert " of 80.0 GB on rank 0 (all keep: " in out


def test_a_megatron_on_the_path_without_metadata_is_there(monkeypatch):
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert doctor._core_version() == importlib.metadata.version("megatron-core")


def test_attention_kernels_are_listed_and_broken_ones_say_why(stack):
    offered = {"plain": ["cpu", "cuda", "ok"], "flash_attn_3": ["cuda", "build it"]}
    checks = stack(torch={"torch": "2.13.0", "kernels": offered})
    assert (checks["kernel plain"].status, checks["kernel plain"].found) == ("ok", "serves cpu and cuda")
    assert (checks["kernel flash_attn_3"].status, checks["kernel flash_attn_3"].mend) == ("missing", "build it")
    # A kernel that is there and broken says why and auto says what it takes.
    fault = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda"
    torch = {
        "torch": "2.13.0",
        "kernels": {"flash_attn": ["cuda", "build it"]},
        "kernel_faults": {"flash_attn": fault},
        "kernel_auto": "torch_varlen",
    }
    checks = stack(torch=torch)
    broken = checks["kernel flash_attn"]
    assert (broken.status, broken.found, broken.mend) == ("wrong", fault, "build it")
    assert (checks["kernel: auto"].status, checks["kernel: auto"].found) == ("ok", "torch_varlen")
    none = stack(torch={**torch, "kernel_auto": "none: no attention kernel for torch.bfloat16"})["kernel: auto"]
    assert (none.status, none.found) == ("wrong", "none: no attention kernel for torch.bfloat16")


def test_the_probe_and_the_configuration_know_every_kernel():
    # The probe asks the registry of kernels.
    pytest.importorskip("torch")
    kernels = pytest.importorskip("megatron_balance.runtime.kernels").KERNELS
    probe = doctor._probe_torch()
    assert probe["kernels"] == {n: [*o.devices, "ok" if o.installed else o.mend] for n, o in kernels.items()}
    assert probe["kernel_auto"] in kernels
    # The configuration knows every kernel.
    assert set(get_args(Run.model_fields["kernel"].annotation)) == {"auto", *kernels}


def test_what_differs_is_asked_of_a_folder_with_a_reviewed_megatron(run, tmp_path):
    assert "expected a folder with megatron/core in it" in run.error("doctor --patches --reviewed", tmp_path)
    assert "belongs to --patches" in run.error("doctor --reviewed", tmp_path)
    assert "--patches and --config: each goes alone" in run.error("doctor --patches --config x.yaml")


# `doctor --write-cluster`: what nvidia-smi and /sys say of a node, as a cluster file that loads; on
# made-up nodes of known kinds.
TODAY = datetime.date(2026, 1, 31)
AFFINITY = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


def topology(num_gpus: int, link: str, nics: dict[str, dict[int, str]], *, legend: bool = True) -> str:
    # Text of `nvidia-smi topo -m`: tabs, an underlined header, a legend. `nics`: by name, how near
    # to which GPU.
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
    lines += ["", "Legend:", "", "  X    = Self", "  NV#  = Connection of # NVLinks", ""]
    if legend:
        lines += ["NIC Legend:", "", *(f"  NIC{i}: {name}" for i, name in enumerate(nics)), ""]
    return "\n".join(lines)


def gpus(name: str, count: int, memory_mib: int) -> str:
    return "".join(f"{name}, {memory_mib}, 00000000:{0x1B + 4 * i:02X}:00.0\n" for i in range(count))


def infiniband(root: Path, name: str, rate: str, state="4: ACTIVE", layer="InfiniBand", pci: str = "") -> None:
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
    # The device at the end of the way `pci` from a root port, and its entry on the bus.
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
    # 8 H100, a NIC of 400 Gb/s behind each one's switch, and two of storage on a host bridge; one
    # more port is down.
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
    preset = load_cluster("h100").build()
    assert (cluster.intra_bytes_per_s, cluster.nic_bytes_per_s) == (preset.intra_bytes_per_s, preset.nic_bytes_per_s)
    assert cluster.memory_bytes == pytest.approx(81559 * 2**20, rel=1e-3)
    assert cluster.flops_per_s == preset.flops_per_s
    assert "# nvidia-smi topo -m: NV18, 20.6 GB/s a link, one direction" in text
    assert "# /sys/class/infiniband/mlx5_0/ports/1/rate: 400 Gb/sec (4X NDR), InfiniBand; NCCL counts on 96%" in text
    assert "# GPU 1: mlx5_3 (PXB)" in text
    assert "Not nearest to any GPU, so not counted: mlx5_1, mlx5_7" in text
    assert "mlx5_2" not in text


def test_nodes_whose_nics_are_shared_named_by_their_devices_or_add_up(tmp_path):
    # Four NICs of an A800 are shared each between two GPUs.
    nics = {f"mlx5_bond_{n}": {2 * n: "PXB", 2 * n + 1: "PXB"} for n in range(4)}
    for name in nics:
        infiniband(tmp_path / "a800", name, "200 Gb/sec (2X NDR)", layer="Ethernet")
    listed, topo = gpus("NVIDIA A800-SXM4-80GB", 8, 81920), topology(8, "NV8", nics)
    cluster, text = loaded(read(tmp_path / "a800", listed, topo), tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s, cluster.intra_bytes_per_s) == (2, 24e9, 160e9)
    assert cluster.flops_per_s == 312e12
    assert "# 8 GPUs, 4 NICs nearest to them" in text
    # Columns of an H200 HGX bear the devices' own names.
    nics = {f"mlx5_{n}": {n: "PIX"} for n in range(8)}
    for name in nics:
        infiniband(tmp_path / "h200", name, "400 Gb/sec (4X NDR)", layer="Ethernet")
    listed, topo = gpus("NVIDIA H200", 8, 143771), topology(8, "NV18", nics, legend=False)
    cluster, text = loaded(read(tmp_path / "h200", listed, topo), tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s) == (1, 48e9)
    assert cluster.memory_bytes == pytest.approx(150.8e9)
    assert text.splitlines()[1].startswith("base: h200 ")
    # Two NICs a GPU add up, and the slowest counts.
    nics = {f"mlx5_{n}": {n // 2: "PIX"} for n in range(4)}
    for name in nics:
        rate = "100 Gb/sec (4X EDR)" if name == "mlx5_3" else "200 Gb/sec (4X HDR)"
        infiniband(tmp_path / "a100", name, rate)
    listed, topo = gpus("NVIDIA A100-SXM4-40GB", 2, 40960), topology(2, "NV12", nics)
    cluster, text = loaded(read(tmp_path / "a100", listed, topo), tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s, cluster.intra_bytes_per_s) == (1, 24e9, 240e9)
    assert "of 2 a GPU, the slowest" in text


def test_without_a_nic_the_fastest_network_device_counts_and_is_shared(tmp_path):
    devices = [("eth0", "1000", "up", True), ("eth1", "25000", "up", True), ("docker0", "100000", "up", False)]
    for name, speed, state, physical in (*devices, ("eth2", "40000", "down", True)):
        device = tmp_path / "sys/class/net" / name
        device.mkdir(parents=True)
        (device / "speed").write_text(speed)
        (device / "operstate").write_text(state)
        if physical:
            (device / "device").mkdir()
    cluster, text = loaded(read(tmp_path, gpus("NVIDIA L40S", 4, 46068), topology(4, "PHB", {})), tmp_path)
    assert (cluster.ranks_per_nic, cluster.nic_bytes_per_s) == (4, 24e9 / 8)
    assert "/sys/class/net/eth1/speed: 25000 Mbit/s" in text
    assert "shows no NVLink between some GPUs" in text
    assert "No preset has the compute rates of NVIDIA L40S" in text
    # A node without any network says so, and loads.
    cluster, text = loaded(read(tmp_path / "alone", gpus("NVIDIA H200", 1, 143771), topology(1, "", {})), tmp_path)
    assert (cluster.num_ranks, cluster.num_nodes) == (1, 1)
    assert "no active InfiniBand or RoCE port" in text
    assert "one GPU has no link inside its node" in text


def test_where_the_topology_says_nothing_the_pci_bus_decides(tmp_path):
    # Two root ports, a switch behind each, with two GPUs and a NIC behind either.
    for at, pci in enumerate(("0000:1b:00.0", "0000:1f:00.0", "0000:23:00.0", "0000:27:00.0")):
        at_bus(tmp_path, f"pci0000:{at // 2}0/0000:{at // 2}0:01.0/0000:0{at}:00.0/{pci}")
    infiniband(tmp_path, "mlx5_0", "200 Gb/sec (4X HDR)", pci="pci0000:10/0000:10:01.0/0000:0a:00.0/0000:a0:00.0")
    infiniband(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)", pci="pci0000:00/0000:00:01.0/0000:0b:00.0/0000:b0:00.0")
    node = read(tmp_path, gpus("NVIDIA H100 80GB HBM3", 4, 81559), None)
    assert [names for names, _ in node.nearest] == [("mlx5_1",), ("mlx5_1",), ("mlx5_0",), ("mlx5_0",)]
    assert loaded(node, tmp_path)[0].ranks_per_nic == 2


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA B200"])
def test_another_form_of_a_known_chip_has_no_rates_of_it_and_fewer_nics_than_gpus_are_shared(name, tmp_path):
    nics = {f"mlx5_{n}": {n: "PIX"} for n in range(6)}
    for nic in nics:
        infiniband(tmp_path, nic, "400 Gb/sec (4X NDR)")
    cluster, text = loaded(read(tmp_path, gpus(name, 8, 81559), topology(8, "NV18", nics)), tmp_path)
    assert "base:" not in text
    assert f"No preset has the compute rates of {name}" in text
    assert cluster.ranks_per_nic == 2, "two GPUs share a NIC where six serve eight"
    assert cluster.intra_bytes_per_s == (18 * 40.1e9 if "B200" in name else 18 * 20.6e9)
    with pytest.raises(ConfigError, match="does not say the memory"):
        read(tmp_path, gpus(name, 1, 81559).replace("81559", "[N/A]"), None)


def test_unlike_gpus_are_refused_and_what_is_no_matrix_has_no_links(tmp_path):
    listed = gpus("NVIDIA H100 80GB HBM3", 1, 81559) + gpus("NVIDIA H200", 1, 143771)
    with pytest.raises(ConfigError, match="not alike"):
        hardware.cluster_yaml(read(tmp_path, listed, None), "ours", TODAY)
    for text in ("", "Failed to initialize NVML: Unknown Error", "\tGPU0\nGPU0\t X "):
        assert hardware._parse_topology(text)[1] == 0


def test_the_verb_writes_a_file_that_plans_and_mistakes_are_one_line(dgx_h100, tmp_path, monkeypatch, run):
    assert "ends in .yaml" in run.error("doctor --write-cluster", tmp_path / "cluster.json")
    monkeypatch.setattr(hardware, "_run", lambda _command: None)
    assert "nvidia-smi lists no GPU here" in run.error("doctor --write-cluster", tmp_path / "cluster.yaml")
    monkeypatch.setattr(hardware, "read_node", lambda: dgx_h100)
    path = tmp_path / "cluster.yaml"
    document = run.json("doctor --json --write-cluster", path)
    assert document["cluster"]["nic_bytes_per_s"] == 48e9
    assert len(document["node"]["gpus"]) == 8
    table = run.printed("plan --planner zeppelin --lengths 4000,100 --tokens-per-rank 1024 --cluster", path)
    assert table.startswith("8 ranks (1 node x 8), llama-7b on cluster")
    assert "the file is there already" in run.error("doctor --write-cluster", path)

"""`megatron-balance doctor`: what of the stack is here, what is missing, and the command that mends
it.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from megatron_balance.cli import inputs
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text

# The least that the extra `train` takes, and the version that it installs.
TORCH = (2, 8)
MEGATRON_CORE = "0.19.2"
# The advice about training on a Python that Megatron does not run on.
TRAIN_ELSEWHERE = (
    "python3.12 -m venv .venv && .venv/bin/pip install 'megatron-balance[train]'  # before 3.12 pip leaves torch and "
    "megatron-core out of [train] without a word"
)
# Versions, or their beginnings, whose sources the patches were reviewed against.
MEGATRON_REVIEWED = ("0.18.2", "0.19.")
Need = Literal["plan", "train", "gpu", "optional"]
Status = Literal["ok", "missing", "wrong"]

# Run in a process of its own: importing torch takes seconds and gigabytes that `plan` never pays
# for.
TORCH_PROBE = """
import json, torch
import torch.distributed as d
from megatron_balance.errors import ConfigError
from megatron_balance.runtime.kernels import KERNELS, choose_kernel
cuda = torch.cuda.is_available()
faults = {name: offer.fault() for name, offer in KERNELS.items()}
try:
    auto = choose_kernel("auto", torch.device("cuda" if cuda else "cpu"), torch.bfloat16, 128).name
except ConfigError as error:
    auto = f"none: {error}"
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "gloo": d.is_available() and d.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if d.is_available() and d.is_nccl_available() else None,
    "kernels": {name: [*offer.devices, offer.mend if faults[name] else "ok"] for name, offer in KERNELS.items()},
    "kernel_faults": {name: fault for name, fault in faults.items() if fault and fault != "not installed"},
    "kernel_auto": auto,
}))
"""
NAMESPACE_PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
flags = 0x40000000 | (0 if os.geteuid() == 0 else 0x10000000)  # CLONE_NEWNET, and CLONE_NEWUSER for who is not root
raise SystemExit(0 if libc.unshare(flags) == 0 else os.strerror(ctypes.get_errno()))
"""
PROBE_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the stack; `mend` is a command or a sentence."""

    name: str
    needed_for: Need
    status: Status
    found: str
    wanted: str
    mend: str


HELP = "what of the stack is here and what is missing"


def add_options(parser: argparse.ArgumentParser) -> None:
    inputs.add_json(parser)
    add = parser.add_argument
    read = (
        "read this node's GPUs, links and NICs into a cluster YAML, for --cluster and for cluster: in a configuration"
    )
    add("--write-cluster", type=Path, metavar="FILE", help=read)
    memory = "also predict the memory of a step of this configuration, and how its backward would run"
    add("--config", type=Path, metavar="FILE", help=memory)
    listed = (
        "list the functions of the installed Megatron that are patched or relied on, and whether they were reviewed"
    )
    add("--patches", action="store_true", help=listed)
    install = f"pip install --target DIR --no-deps megatron-core=={MEGATRON_CORE}"
    differs = f"with --patches: show what differs from a reviewed version, {install}"
    add("--reviewed", type=Path, metavar="DIR", help=differs)


def run(args: argparse.Namespace) -> int:
    """Look at every part of the stack; 0 also when parts are missing: not everybody needs all."""
    if args.reviewed is not None and not args.patches:
        raise ConfigError("--reviewed DIR: belongs to --patches; give both")
    given = {"--patches": args.patches, "--write-cluster": args.write_cluster, "--config": args.config}
    alone = [option for option, value in given.items() if value]
    if len(alone) > 1 or (args.patches and args.json):
        raise ConfigError(f"{' and '.join(alone)}: each goes alone{', --patches without --json' * args.json}")
    if args.patches:
        return _patches(args.reviewed)
    if args.write_cluster is not None:
        return _write_cluster(args.write_cluster, as_json=args.json)
    told = _memory_lines(args.config) if args.config is not None else []
    checks = examine()
    needs = {"plan": ("plan",), "train": ("plan", "train"), "train_on_gpu": ("plan", "train", "gpu")}
    ready = {
        purpose: all(check.status == "ok" for check in checks if check.needed_for in needed)
        for purpose, needed in needs.items()
    }
    if args.json:
        document = {"ready": ready, "checks": [asdict(check) for check in checks]}
        print(json_text(document | ({"memory": told} if told else {})))
    else:
        _show(checks, ready)
        for line in told:
            print(line)
    return 0


def _memory_lines(config: Path) -> list[str]:
    """The predicted peak of the fullest batch, and the decision for its backward."""
    from megatron_balance.cli import plan

    parser = argparse.ArgumentParser()
    inputs.add_options(parser)
    given = inputs.read(parser.parse_args(["--config", str(config)]))
    (choice,) = given.planners
    cost = given.planning_cost()
    plans = [choice.plan(batch, given.cluster, given.model, cost) for batch in given.batches]
    return [f"{config}, planner {choice.name} on {given.cluster.name}:", *plan.memory_lines(plans, given)]


def _patches(reviewed: Path | None) -> int:
    if _core_version() is None:
        raise ConfigError(f"--patches: no Megatron here; pip install --no-deps megatron-core=={MEGATRON_CORE}")
    if reviewed is not None and not (reviewed / "megatron" / "core").is_dir():
        raise ConfigError(f"--reviewed {reviewed}: expected a folder with megatron/core in it")
    report = [sys.executable, "-W", "ignore", "-m", "megatron_balance.patches.report"]
    given = [] if reviewed is None else ["--reviewed", str(reviewed.absolute())]
    return subprocess.run([*report, *given], check=False).returncode


def _write_cluster(path: Path, *, as_json: bool) -> int:
    from megatron_balance.config import load_cluster
    from megatron_balance.profiling import hardware

    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--write-cluster {path}: a cluster is named by a file that ends in .yaml")
    if path.exists():
        raise ConfigError(f"--write-cluster {path}: the file is there already; remove it or name another")
    node = hardware.read_node()
    text = hardware.cluster_yaml(node, path.stem, datetime.datetime.now(datetime.UTC).date())
    inputs.write(path, text, "--write-cluster")
    keys = dict(load_cluster(str(path.absolute())).given)
    if as_json:
        print(json_text({"file": str(path), "cluster": keys, "node": asdict(node)}))
    else:
        print(f"{text}written to {path}")
    return 0


def examine() -> list[Check]:
    return [*_planning(), *_training(), *_optional()]


def _planning() -> list[Check]:
    version = platform.python_version()
    mend = "install Python 3.12 and make an environment with it: python3.12 -m venv .venv"
    python = _check("python", "plan", version if sys.version_info >= (3, 11) else None, ">= 3.11", mend, version)
    packages = ("numpy", "pydantic", "PyYAML", "tqdm", "rich")
    return [python, *(_package(each.lower(), each, "plan", f"pip install {each.lower()}") for each in packages)]


def _training() -> list[Check]:
    version = platform.python_version()
    new_enough = sys.version_info >= (3, 12)
    # On an older one pip would leave both out without a word: the extra asks for them from 3.12 on.
    mend_torch = "pip install 'megatron-balance[train]'" if new_enough else TRAIN_ELSEWHERE
    mend_core = f"pip install --no-deps megatron-core=={MEGATRON_CORE}" if new_enough else TRAIN_ELSEWHERE
    torch = _probe_torch()
    core = _core_version()
    core_status: Status = "missing" if core is None else "ok" if core.startswith(MEGATRON_REVIEWED) else "wrong"
    core_mend = "" if core_status == "ok" else mend_core
    broken = str(torch.get("error", "")) if torch else ""
    found = cast("str | None", torch.get("torch"))
    if found is not None and tuple(map(int, found.split(".")[:2])) < TORCH:
        broken, found = found, None
    gpus = ", ".join(sorted(set(cast("list[str]", torch.get("gpus", [])))))
    cuda_mend = "install torch from https://pytorch.org for your CUDA"
    return [
        _check("python for Megatron", "train", version if new_enough else None, ">= 3.12", TRAIN_ELSEWHERE, version),
        _check("torch", "train", found, f">= {TORCH[0]}.{TORCH[1]}", mend_torch, broken),
        _check("gloo", "train", "built into torch" if torch.get("gloo") else None, "in torch", mend_torch),
        Check("megatron-core", "train", core_status, core or "", "0.19.x or 0.18.2", core_mend),
        _package("psutil", "psutil", "train", "pip install psutil"),
        _check("cuda", "gpu", torch.get("cuda"), "a CUDA build of torch", cuda_mend),
        _check("gpu", "gpu", gpus or None, "at least one", "check the driver: nvidia-smi"),
        _check("nccl", "gpu", torch.get("nccl"), "in torch", "install a CUDA build of torch"),
        _package("triton", "triton", "gpu", "pip install triton"),
        *_kernels(torch),
    ]


def _kernels(torch: dict[str, Any]) -> list[Check]:
    """The kernels that `kernel:` may name, and the one that `auto` takes for bf16 and heads of 128."""
    checks: list[Check] = []
    offered, faults = torch.get("kernels", {}), torch.get("kernel_faults", {})
    for name, (*devices, said) in offered.items():
        here, fault = said == "ok", faults.get(name, "")
        found = f"serves {' and '.join(devices)}" if here else fault
        status: Status = "ok" if here else "wrong" if fault else "missing"
        checks.append(Check(f"kernel {name}", "optional", status, found, "installed", "" if here else said))
    auto = str(torch.get("kernel_auto", ""))
    if auto:
        reason = auto.removeprefix("none: ") if auto.startswith("none: ") else ""
        status = "wrong" if reason else "ok"
        checks.append(Check("kernel: auto", "optional", status, auto, "one that serves bf16", reason))
    return checks


def _optional() -> list[Check]:
    engine = "--no-build-isolation 'megatron-balance[te]'  # with CUDA 12: [te_cu12]"
    parts = {
        "transformer-engine": ("transformer-engine", engine),
        "apex": ("apex", "--no-build-isolation git+https://github.com/NVIDIA/apex@25.09"),
        "flash-attn": ("flash-attn", "--no-build-isolation flash-attn"),
        "gurobi": ("gurobipy", "'megatron-balance[gurobi]'"),
        "highs": ("scipy", "'megatron-balance[highs]'"),
        "plotly": ("plotly", "'megatron-balance[report]'"),
        "pyarrow": ("pyarrow", "'megatron-balance[data]'"),
    }
    if sys.version_info < (3, 14):
        parts["zstandard"] = ("zstandard", "zstandard")
    checks = [_package(name, package, "optional", f"pip install {what}") for name, (package, what) in parts.items()]
    return [*checks, _namespaces()]


def _namespaces() -> Check:
    """Whether nodes can be emulated by network namespaces here."""
    name, wanted = "network namespaces", "permitted, with ip and tc"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if sys.platform != "linux":
        return Check(name, "optional", "missing", sys.platform, wanted, "emulated clusters need Linux")
    try:
        probe = _probe(NAMESPACE_PROBE)
        said = probe.stderr.strip().splitlines()[-1:] or [f"ended with code {probe.returncode}"]
        refused = said if probe.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        refused = [str(error)]
    if refused:
        mend = "run as root, or in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        return Check(name, "optional", "wrong", f"refused: {refused[0]}", wanted, mend)
    if tools:
        found = f"permitted, but no {' and no '.join(tools)}"
        return Check(name, "optional", "missing", found, wanted, "apt-get install iproute2")
    return Check(name, "optional", "ok", "permitted", wanted, "")


def _probe(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)


def _probe_torch() -> dict[str, Any]:
    """torch's report on this machine; {}: not installed, {"error": ...}: cannot be imported."""
    if _version("torch") is None:
        return {}
    try:
        probe = _probe(TORCH_PROBE)
        probe.check_returncode()
        return cast("dict[str, Any]", json.loads(probe.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        return {"error": (error.stderr.strip().splitlines() or ["import torch failed"])[-1]}
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}


def _package(name: str, distribution: str, needed_for: Need, mend: str) -> Check:
    wanted = "any version" if needed_for == "optional" else "installed"
    return _check(name, needed_for, _version(distribution), wanted, mend)


def _check(name: str, needed_for: Need, found: str | None, wanted: str, mend: str, otherwise: str = "") -> Check:
    """`found` is None when the part is not usable; `otherwise` then says what is there instead."""
    if found is None:
        return Check(name, needed_for, "wrong" if otherwise else "missing", otherwise, wanted, mend)
    return Check(name, needed_for, "ok", found, wanted, "")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _core_version() -> str | None:
    """Of Megatron-core, also where it is on the path without metadata, as in images."""
    found = _version("megatron-core")
    if found is not None or importlib.util.find_spec("megatron") is None:
        return found
    core = importlib.util.find_spec("megatron.core")
    return None if core is None or core.origin is None else source_version(Path(core.origin).parent)


def source_version(core: Path) -> str | None:
    """The version that a folder `megatron/core` says of itself; None: it says none."""
    info = core / "package_info.py"
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    said = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?", text, re.MULTILINE))
    return ".".join(said[name] for name in ("MAJOR", "MINOR", "PATCH")) + said.get("PRE_RELEASE", "") if said else None


def _show(checks: list[Check], ready: dict[str, bool]) -> None:
    console = inputs.console(140)
    columns = ("part", "for", "status", "found", "wanted")
    table = inputs.table("What this machine has", columns, columns, "fold")
    for check in checks:
        table.add_row(check.name, check.needed_for, check.status, check.found, check.wanted)
    console.print(table)
    told = [check for check in checks if check.mend]
    if told:  # below the table, each on a line of its own, however long: commands are copied from here
        print("to mend what is not ok:")
        width = max(len(check.name) for check in told)
        for check in told:
            print(f"  {check.name:<{width}}  {check.mend}")
    for purpose, yes in ready.items():
        console.print(f"ready to {purpose.replace('_', ' ')}: {'yes' if yes else 'no'}")

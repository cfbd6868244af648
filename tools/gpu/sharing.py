"""Several ranks on one GPU over NCCL: `tools/gpu/share --ranks-per-gpu 4 -- python train.py ...`.

It starts the command once a rank, as torchrun does, with what NCCL needs to put several ranks on one
device: a library from 2.30 on, loaded before torch's own, and the variables below. A script that runs
so shows that its values are right, that its calls are issued in one order and that nothing hangs. It
says nothing of speed: ranks take turns on the GPU, and transfers stay inside its memory.

Ways to share: with NVIDIA's MPS kernels of all ranks run at once; without it the GPU gives each
process a slice of time, so a transfer waits for its peer's slice (milliseconds), which is slow and
safe. Messages go from one rank's memory to the other's (peer-to-peer), else through the host's.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.gpu.rows import Context

LEAST = (2, 30, 0)
"""The first NCCL that takes several ranks on one device."""
GRACE_S = 30.0
"""For the others to end by themselves once a rank has failed."""

BASE: Mapping[str, str] = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # multicast is between devices
    # All ranks' kernels must fit the device together: 8 ranks with 4 streams and 2 blocks each take
    # 64 of 132 multiprocessors. It overrides what a communicator asks for.
    "NCCL_MAX_CTAS": "2",
    "NCCL_BUFFSIZE": str(1 << 20),  # of each channel of each rank
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "VERSION",  # torch goes on naming the version that it was built with
}


@dataclass(frozen=True)
class Way:
    """A way to share a GPU. `environment`: beside `BASE`."""

    name: str
    environment: dict[str, str] = field(default_factory=dict[str, str])
    mps: bool = False


WAYS = (
    Way("MPS, peer-to-peer", mps=True),
    Way("MPS, host memory", {"NCCL_P2P_DISABLE": "1"}, mps=True),
    Way("time slices, peer-to-peer"),
    Way("time slices, peer-to-peer without cuMem", {"NCCL_CUMEM_ENABLE": "0"}),
    Way("time slices, host memory", {"NCCL_P2P_DISABLE": "1"}),
)
"""In the order of preference."""


def environment(way: Way | None, state: Path, ranks_per_gpu: int) -> dict[str, str]:
    """Variables of a rank that shares a GPU in this way; None: a GPU is its own, or there is none."""
    if way is None:
        return {}
    # With a share of the multiprocessors each, no rank's kernels can take the place of another's.
    share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks_per_gpu)}
    return {**BASE, **way.environment, **(share | mps_environment(state) if way.mps else {})}


def keep(ways: Sequence[Way], state: Path) -> None:
    """Note the ways that work, the best first, for later parts."""
    (state / "ways.json").write_text(json.dumps([asdict(way) for way in ways]))


def chosen(context: Context, *, mps: bool = True) -> Way | None:
    """The best way that works; None where ranks share nothing. `mps`: whether it may be MPS, whose
    server outlives no client that is killed.

    Raises RuntimeError: no way is known to work.
    """
    if not context.on_gpu or context.ranks_per_gpu == 1:
        return None
    kept = context.state / "ways.json"
    ways = [Way(**each) for each in json.loads(kept.read_text())] if kept.exists() else []
    for way in ways:
        if mps or not way.mps:
            return way
    raise RuntimeError("no way of sharing this GPU is known to work (part links)")


def version(library: Path) -> tuple[int, int, int]:
    """Version of an NCCL library. OSError, AttributeError: it is none."""
    number = ctypes.c_int()
    ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(number))
    return _version(number.value)


def loaded() -> str:
    """Version of the NCCL that this process calls, such as 2.32.3; empty: none is loaded for all."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    except AttributeError:
        return ""
    return ".".join(map(str, _version(number.value)))


def _version(number: int) -> tuple[int, int, int]:
    return number // 10000, number // 100 % 100, number % 100


def torchs_own() -> Path | None:
    """The NCCL library that torch's wheel brings."""
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = found.submodule_search_locations if found is not None else None
    path = Path(folders[0], "lib", "libnccl.so.2") if folders else None
    return path if path is not None and path.exists() else None


def refusal(library: Path | None) -> str:
    """Why ranks cannot share a GPU over this library, and what to do; empty: they can."""
    least = ".".join(map(str, LEAST[:2]))
    todo = (
        "Unpack libnccl.so.2 of a newer wheel (pip download --no-deps 'nvidia-nccl-cu13>=2.31') and name it with --nccl"
    )
    if library is None:
        return f"no NCCL library found; several ranks on a GPU need one from {least} on. {todo}"
    try:
        found = version(library)
    except (OSError, AttributeError) as error:
        return f"{library}: not an NCCL library ({error}). {todo}"
    if found < LEAST:
        return f"{library} is NCCL {'.'.join(map(str, found))}; several ranks on a GPU need {least} or later. {todo}"
    return ""


def mps_environment(state: Path) -> dict[str, str]:
    """Where clients find a daemon of our own."""
    return {"CUDA_MPS_PIPE_DIRECTORY": f"{state}/mps", "CUDA_MPS_LOG_DIRECTORY": f"{state}/mps-log"}


def start_mps(state: Path) -> bool:
    """Whether an MPS daemon of our own runs. It changes no setting of the GPU; `stop_mps` ends it."""
    control = _mps_control()
    if control is None:
        return False
    variables = mps_environment(state)
    for folder in variables.values():
        Path(folder).mkdir(exist_ok=True)
    return subprocess.run([control, "-d"], env=_bare() | variables, check=False, timeout=20).returncode == 0


def stop_mps(state: Path) -> None:
    """End the daemon, where one was started."""
    control = _mps_control()
    if control is not None and (state / "mps").exists():
        variables = mps_environment(state)
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([control], input="quit\n", text=True, env=_bare() | variables, check=False, timeout=20)


def _bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def _mps_control() -> str | None:
    folders = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/nvidia/bin"])
    return shutil.which("nvidia-cuda-mps-control", path=folders)


def free_port() -> int:
    """A port for rank 0's store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def place(rank: int, num_ranks: int, ranks_per_gpu: int, port: int) -> dict[str, str]:
    """The launcher's variables of one rank of this machine: neighbours share a GPU."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank // ranks_per_gpu),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command as the ranks of this machine.

    Returns:
        The exit code of the rank that failed first, or 0.
    """
    parser = argparse.ArgumentParser(
        prog="tools/gpu/share", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks-per-gpu", type=int, required=True, metavar="N", help="ranks on each GPU")
    parser.add_argument("--gpus", type=int, default=1, metavar="G", help="GPUs of this machine (default: 1)")
    parser.add_argument("--nccl", type=Path, metavar="FILE", help="libnccl.so.2 from 2.30 on (default: torch's own)")
    parser.add_argument("--way", type=int, default=2, choices=range(len(WAYS)), help=_ways())
    parser.add_argument("--state", type=Path, default=Path.cwd() / "out" / "share", help="folder of an MPS daemon")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each rank runs")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("expected a command behind --, such as: -- python train.py")
    if options.ranks_per_gpu < 1 or options.gpus < 1:
        parser.error(f"--ranks-per-gpu {options.ranks_per_gpu}, --gpus {options.gpus}: expected at least 1")
    library: Path | None = options.nccl or torchs_own()
    said = refusal(library)
    if library is None or said:
        sys.exit(f"error: {said}")
    way = WAYS[options.way]
    options.state.mkdir(parents=True, exist_ok=True)
    if way.mps and not start_mps(options.state):
        sys.exit(f"error: --way {options.way}: nvidia-cuda-mps-control does not start here; take --way 2")
    num_ranks, port = options.ranks_per_gpu * options.gpus, free_port()
    shared = {
        **os.environ,
        **environment(way, options.state, options.ranks_per_gpu),
        "LD_PRELOAD": str(library.absolute()),
    }
    try:
        return _watch(
            [
                subprocess.Popen(command, env=shared | place(rank, num_ranks, options.ranks_per_gpu, port))
                for rank in range(num_ranks)
            ]
        )
    finally:
        if way.mps:
            stop_mps(options.state)


def _ways() -> str:
    return "; ".join(f"{number}: {way.name}" for number, way in enumerate(WAYS)) + " (default: 2)"


def _watch(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all; once one has failed the others have `GRACE_S`."""
    failed, until = 0, float("inf")
    try:
        while None in (codes := [rank.poll() for rank in ranks]):
            if any(codes) and not failed:
                failed, until = next(filter(None, codes)), time.monotonic() + GRACE_S
            if time.monotonic() > until:
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
            rank.wait()
    code = failed or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

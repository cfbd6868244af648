"""All that one GPU can show, on a machine that has one and no network, in two calls.

    tools/gpu/bare prepare [--compiled]   # here: makes .gpu/, to be carried there with the tree
    tools/gpu/bare first                  # there: does it hold, is it right; at most 500 seconds
    tools/gpu/bare second                 # there: is it fast; at most 260 seconds

Here: a clone with its .venv, and a network. There: Linux on x86-64, an H100 or H200, Python 3.12,
torch 2.11, Triton 3.6, NumPy 2.5. Eight ranks share the GPU over real NCCL. Each step has a limit of
its own and fails alone. Rows are appended to out/bare/rows.jsonl as they come, and at the end stand
in docs/measurements/<gpu>-first.json and <gpu>-second.json (or, both, in the folder that --out
names). Without a GPU the same steps run small, on gloo and in Triton's interpreter, and leave only
their rows.
"""

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / ".gpu"
NCCL, WHEELS, COMPILED = "libnccl-sm_90.so.2.xz", "wheels", "compiled.tar.xz"
"""Files of `KIT`; the plans' name is `tools.gpu.plans.DRAWN`."""
RANKS = 8
UNPACK_S, CLOSE_S = 12.0, 3.0
"""Of a call's limit, for its start and for its end."""


@dataclass(frozen=True)
class Call:
    """One call: its steps (parts of the suite) in order, and seconds that all may take together."""

    steps: tuple[str, ...]
    limit_s: float


CALLS = {
    # What cannot be learned without several ranks comes first; the variants before it, since a part
    # that compiled would measure that.
    "first": Call(
        ("variants", "links", "plans", "pretrain", "failing", "order", "fsdp2", "recurrent", "kernels", "attention"),
        500.0,
    ),
    "second": Call(("shapes", "training", "syncs", "profile", "step", "sanitizer"), 260.0),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing failed and no target was missed."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu/bare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=["prepare", *CALLS])
    parser.add_argument("--compiled", action="store_true", help="prepare: Triton's kernels too, compiled for sm_90")
    parser.add_argument("--out", type=Path, metavar="DIR", help="first, second: where rows and documents go")
    parser.add_argument("--steps", type=lambda text: text.split(","), metavar="A,B", help="only these of the call")
    parser.add_argument("--limit-s", type=float, metavar="S", help="seconds of the call (default: 500, 260)")
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="N", help=f"that share the GPU (default: {RANKS})")
    options = parser.parse_args(argv)
    if options.call == "prepare":
        from tools.gpu.prepare import prepare

        return prepare(KIT, compiled=options.compiled)
    call = CALLS[options.call]
    for step in options.steps or ():
        if step not in call.steps:
            parser.error(f"--steps {step}: not a step of {options.call}; choose of {', '.join(call.steps)}")
    return run(call, options)


def run(call: Call, options: argparse.Namespace) -> int:
    """Unpack what was carried, and run the steps of a call.

    What they print but their rows goes to stderr.
    """
    began = time.monotonic()
    work = Path(tempfile.gettempdir()) / "megatron-balance-gpu"
    rows = (options.out or ROOT / "out" / "bare").absolute() / "rows.jsonl"
    work.mkdir(exist_ok=True)
    rows.parent.mkdir(parents=True, exist_ok=True)
    gpu = has_gpu()
    unpacked = _row_of_unpacking(work, gpu=gpu)
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(unpacked) + "\n")
    limit_s = (options.limit_s or call.limit_s) - (time.monotonic() - began) - CLOSE_S
    words = ["--parts", ",".join(options.steps or call.steps), "--ranks-per-gpu", str(options.ranks)]
    words += ["--limit-s", str(limit_s), "--rows", str(rows), "--name", options.call]
    words += ["--command", f"tools/gpu/bare {options.call}"]
    if gpu and options.out is not None:
        words += ["--out", str(options.out.absolute())]
    if gpu and (work / "libnccl.so.2").exists():
        words += ["--nccl", str(work / "libnccl.so.2")]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu.run", *words], cwd=ROOT, env=_environment(work), check=False
    )
    return done.returncode or int(unpacked["ok"] is False)


def has_gpu() -> bool:
    """Whether the driver lists a GPU; torch is not imported for it."""
    found = shutil.which("nvidia-smi")
    return found is not None and subprocess.run([found, "-L"], capture_output=True, check=False).returncode == 0


def _environment(work: Path) -> dict[str, str]:
    """Of all steps."""
    paths = [str(work / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(work / "compiled"),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _row_of_unpacking(work: Path, *, gpu: bool) -> dict[str, object]:
    """Unpack, and say how that went in the form of a row (`tools.gpu.rows.Row`)."""
    begin, ok, note = time.monotonic(), None, ""
    try:
        note = unpack(KIT, work, nccl=gpu)
    except (OSError, lzma.LZMAError, subprocess.CalledProcessError) as error:
        ok, note = False, f"{type(error).__name__}: {error}"
    seconds = None if note.startswith("no ") else round(time.monotonic() - begin, 1)
    kind = "not measured" if seconds is None else "measured"
    return {"name": "unpacking", "value": seconds, "unit": "s", "target": "", "kind": kind, "ok": ok, "note": note}


def unpack(kit: Path, work: Path, *, nccl: bool) -> str:
    """Put a kit's wheels, NCCL and compiled kernels to where the steps look for them, once.

    Returns what was found.
    """
    if not kit.is_dir():
        return f"no {kit.name}/ here (tools/gpu/bare prepare): the packages that are installed are taken"
    ready = work / "ready"
    stamp = ",".join(f"{file.name} {file.stat().st_size}" for file in sorted(kit.rglob("*")) if file.is_file())
    if ready.exists() and ready.read_text() == stamp:
        return "there already"
    ready.unlink(missing_ok=True)
    found: list[str] = []
    if nccl and (kit / NCCL).exists():
        with lzma.open(kit / NCCL) as packed, (work / "libnccl.so.2").open("wb") as whole:
            shutil.copyfileobj(packed, whole, 1 << 22)
        found.append("NCCL")
    wheels = sorted(map(str, (kit / WHEELS).glob("*.whl")))
    if wheels:
        shutil.rmtree(work / "site", ignore_errors=True)
        install = ["install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
        subprocess.run(
            [sys.executable, "-m", "pip", *install, "--target", str(work / "site"), *wheels],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found.append(f"{len(wheels)} wheels")
    if (kit / COMPILED).exists():
        shutil.unpack_archive(kit / COMPILED, work / "compiled", "xztar")
        found.append("compiled kernels")
    ready.write_text(stamp)
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())

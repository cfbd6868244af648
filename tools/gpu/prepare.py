"""Make `.gpu/` for a machine that has a GPU and no network: `tools/gpu/bare prepare`.

Wheels, an NCCL that takes several ranks on one GPU, random plans and, if asked for, Triton's kernels
compiled for Hopper. Nothing of it is committed: git ignores the folder.
"""

import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from tools.gpu import plans
from tools.gpu.bare import COMPILED, NCCL, ROOT, WHEELS
from tools.gpu.variants import SETS

PACKAGES = ("megatron-core", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions")
"""Packages of .venv that are carried: the machine's image lacks them, or has another version."""
NCCL_WHEEL = "nvidia-nccl-cu13>=2.31"
TRITON = "triton==3.6.0"
"""The machine's: a compiled kernel is found again by Triton's sources."""
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 18, 17)), "manylinux2014_x86_64", "any")
COUNTS = {2: 300, 4: 400, 8: 300}
"""Random plans by number of ranks."""
LIMIT_BYTES = 64 << 20
"""Of the tree and `.gpu` together."""
SM = 90
FAT_MAGIC = 0xBA55ED50


def prepare(kit: Path, *, compiled: bool) -> int:
    """Make `kit`; what is there already is kept. 1 if it is too large to be carried."""
    kit.mkdir(exist_ok=True)
    todo = [("wheels", _wheels), ("NCCL", _nccl), ("plans", _plans)]
    todo += [("compiled kernels", _compiled)] if compiled else []
    for name, make in tqdm(todo, unit="part", file=sys.stderr, disable=None):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            made = make(kit, Path(work))
        sys.stderr.write(f"{name}: {made}, {time.monotonic() - begin:.0f} s\n")
    ours = sum(file.stat().st_size for file in kit.rglob("*") if file.is_file())
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout  # fmt: skip
    files = [ROOT / os.fsdecode(name) for name in listed.split(b"\0") if name]
    tree = sum(file.lstat().st_size for file in files if file.is_symlink() or file.exists())
    print(f"{kit.name}/ has {ours / 2**20:.1f} MiB, the tree {tree / 2**20:.1f} MiB; together at most 64")
    return int(ours + tree > LIMIT_BYTES)


def _wheels(kit: Path, work: Path) -> str:
    wanted = [f"{name}=={version(name)}" for name in PACKAGES]
    stamp = kit / WHEELS / "packages.txt"
    if not stamp.exists() or stamp.read_text().split() != wanted:
        shutil.rmtree(kit / WHEELS, ignore_errors=True)
        _download(wanted, kit / WHEELS)
        stamp.write_text("\n".join(wanted))
    del work
    return ", ".join(wanted)


def _nccl(kit: Path, work: Path) -> str:
    """NCCL's library with the code of one architecture, and its licence beside it."""
    if not (kit / NCCL).exists():
        _download([NCCL_WHEEL], work)
        (wheel,) = work.glob("nvidia_nccl*.whl")
        with zipfile.ZipFile(wheel) as archive:
            data = bytearray(archive.read("nvidia/nccl/lib/libnccl.so.2"))
            (licence,) = (name for name in archive.namelist() if name.lower().endswith("license.txt"))
            (kit / "NCCL-LICENSE.txt").write_bytes(archive.read(licence))
        kept, gone = keep_architecture(data, SM)
        with lzma.open(kit / "part", "wb", preset=3) as packed:
            packed.write(data)
        (kit / "part").rename(kit / NCCL)
        (kit / "NCCL-VERSION.txt").write_text(f"{wheel.name}: {kept} pieces of sm_{SM} kept, {gone} bytes cleared\n")
    return (kit / "NCCL-VERSION.txt").read_text().strip()


def keep_architecture(library: bytearray, sm: int) -> tuple[int, int]:
    """Clear the GPU code of all other architectures in a shared library; nothing moves, and cleared
    bytes compress to none.

    Returns:
        How many pieces of code are left, and how many bytes were cleared.

    Raises:
        ValueError: there is none of `sm`.
    """
    # A fat binary: magic (4 bytes), version (2), size of this header (2), size of what follows (8).
    # An entry of it: kind and version (2 each), size of its header (4), of its code (8); at 28 the
    # architecture (4).
    kept = gone = at = 0
    magic = struct.pack("<I", FAT_MAGIC)
    while (at := library.find(magic, at)) >= 0:
        header, size = struct.unpack_from("<2xHQ", library, at + 4)
        entry, end = at + header, at + header + size
        if header != 16 or end > len(library):  # bytes that only look like one
            at += len(magic)
            continue
        while entry < end:
            own_header, own_size = struct.unpack_from("<IQ", library, entry + 4)
            begin = entry + own_header
            if struct.unpack_from("<I", library, entry + 28)[0] == sm:
                kept += 1
            else:
                library[begin : begin + own_size] = bytes(own_size)
                gone += own_size
            entry = begin + own_size
        at = end
    if not kept:
        raise ValueError(f"no GPU code of sm_{sm} in this library")
    return kept, gone


def _plans(kit: Path, work: Path) -> str:
    path = kit / plans.DRAWN.name
    sources = (*(ROOT / "megatron_balance").rglob("*.py"), Path(plans.__file__))
    newest = max(file.stat().st_mtime for file in sources)
    if not path.exists() or path.stat().st_mtime < newest:  # a plan is an object of today's classes
        plans.save(plans.draw(COUNTS), work / path.name)
        shutil.move(work / path.name, path)
    return f"{sum(COUNTS.values())} on {', '.join(map(str, COUNTS))} ranks"


def _compiled(kit: Path, work: Path) -> str:
    """Kernels that `tools.gpu.variants` builds, compiled by the machine's Triton: it needs no GPU."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(work / "site"), TRITON]
    subprocess.run(pip, check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(work / "site"), str(ROOT)]),
        "TRITON_CACHE_DIR": str(work / "cache"),
    }
    program = "from tools.gpu.prepare import compile_for_hopper as c; import sys; c(sys.argv[1], int(sys.argv[2]))"

    def compile_set(one: tuple[str, int]) -> None:
        subprocess.run([sys.executable, "-c", program, *map(str, one)], cwd=ROOT, env=environment, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_set, SETS))
    shutil.make_archive(str(work / "compiled"), "xztar", work / "cache")
    shutil.move(work / "compiled.tar.xz", kit / COMPILED)
    return f"{len(SETS)} sets by {TRITON}"


def compile_for_hopper(dtype: str, head_dim: int) -> None:
    """Fill Triton's cache with the variants of one type and head dim, as a launch on sm_90 would."""
    import torch

    from megatron_balance.runtime.lower.memory import AttentionShape
    from megatron_balance.runtime.movers.triton.variants import compile_all, variants
    from tools.gpu.compiled import for_hopper

    for_hopper()
    cpu = torch.device("cpu")
    compile_all(variants(cpu, getattr(torch, dtype), AttentionShape(2, 2, head_dim), "fp32"), cpu)


def _download(wanted: Sequence[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        "-d",
        str(folder),
    ]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *words, *wanted], check=True)

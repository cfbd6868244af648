"""Every variant of the Triton kernels that a call can launch, compiled for a Hopper GPU without one.

    python -m tools.gpu.compiled                          # with the Triton that is installed
    pip install --no-deps --target DIR triton==3.6.0
    PYTHONPATH=DIR:. python -m tools.gpu.compiled         # with another

Writes the rows of this Triton's version into docs/measurements/compiled-kernels.json: registers a
thread, spilled bytes, and accesses of device memory by width. Faults end it with 1. A test fails
where the table is not of today's kernels.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, get_args

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from megatron_balance.ir.model import GradientWire
from megatron_balance.runtime.lower.memory import AttentionShape
from megatron_balance.runtime.movers.triton import kernels
from megatron_balance.runtime.movers.triton.variants import Compiling, Variant, variants

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "docs/measurements/compiled-kernels.json"
# Head dims of models that are trained (100: LLaMA-3B's), two that are hard, and multi-latent
# attention: DeepSeek's, whose latent of 512 + 64 travels, and a narrow one.
SHAPES = (
    *(AttentionShape(8, 2, dim) for dim in (4, 16, 24, 32, 33, 40, 50, 64, 80, 96, 100, 128, 192, 256)),
    AttentionShape(8, 1, 192, 128, (512, 64)),
    AttentionShape(8, 1, 48, 32, (96, 16)),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_REGISTERS = 168  # a thread: three programs of 128 threads on a multiprocessor
_ACCESS_BYTES = 16
_PATTERNS = (  # of `Code` from `wide_loads` on, in PTX
    r"ld\.global[.\w]*\.v4\.b32",
    r"st\.global[.\w]*\.v4\.b32",
    r"(?:ld|st)\.global[.\w]*\.b16",
    r"\batom\b|\bred\b",
    r"mul\.wide|mul\.lo\.s64|mad\.wide|mad\.lo\.s64|shl\.b64",
)


class Hopper:
    """As much of Triton's driver as compiling takes."""

    def get_current_target(self) -> GPUTarget:
        """Compute capability 9.0."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Any."""
        return device


def for_hopper() -> None:
    """Compile for a Hopper GPU from now on, in this process."""
    triton.runtime.driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]


class Code(NamedTuple):
    """Figures of what was compiled."""

    # A thread.
    registers: int
    spilled_bytes: int
    # Instructions that access device memory: 16 bytes, and one bf16 or fp16.
    wide_loads: int
    wide_stores: int
    narrow: int
    atomics: int
    # Multiplications into 64 bits.
    wide_offsets: int


def compiled(one: Variant) -> Code:
    """Compile a variant."""
    kernel = Compiling(one.kernel)
    one.launch(kernel=kernel)
    assert kernel.made is not None
    made: Mapping[str, Any] = kernel.made.asm
    return Code(*_usage(made["cubin"]), *(len(re.findall(pattern, made["ptx"])) for pattern in _PATTERNS))


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of spilled ones, by the tool that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        asked = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2]) + int(found[3])


def faults(name: str, code: Code) -> list[str]:
    """The faults of the code of a variant."""
    found = [f"{code.spilled_bytes} bytes of registers are spilled"] if code.spilled_bytes else []
    if code.registers > MOST_REGISTERS:
        found.append(f"{code.registers} registers a thread, at most {MOST_REGISTERS}")
    if code.atomics:
        found.append(f"{code.atomics} atomic accesses")
    if not code.wide_offsets:
        found.append("offsets of 32 bits")
    source, target, rows, cols, vec, warps = tile(name)
    if code.narrow and vec > 1:
        found.append(f"{code.narrow} accesses of single elements")
    if vec * min(source, target) == _ACCESS_BYTES:
        for what, made, size in (("loads", code.wide_loads, source), ("stores", code.wide_stores, target)):
            expected = rows * cols * size // (_ACCESS_BYTES * 32 * warps)
            if made < expected:
                found.append(f"{made} {what} of 16 bytes, of a tile {expected}")
    return found


def tile(name: str) -> tuple[int, ...]:
    """Of a variant: bytes of a source's and a target's element, rows and columns of a program,
    elements of an access, warps.
    """
    found = re.fullmatch(r"\w+ (\w+) to (\w+), \d+ places, (\d+) x (\d+) by (\d+), (\d) warps", name)
    assert found is not None, name
    return (*(getattr(torch, each).itemsize for each in found.groups()[:2]), *map(int, found.groups()[2:]))


def grid(shapes: Iterable[AttentionShape] = SHAPES) -> dict[str, Variant]:
    """All variants by name."""
    asked = [(dtype, shape, wire) for shape in shapes for dtype in DTYPES for wire in get_args(GradientWire)]
    return {one.name: one for each in asked for one in variants(torch.device("cpu"), *each)}


def source() -> str:
    """A hash of the kernels' source without comments and docstrings."""
    tree = ast.parse(Path(kernels.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def read() -> dict[str, Any]:
    """The table: by version of Triton, `source`, seconds of compiling, and `Code` by variant."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def measure(found: Mapping[str, Variant], threads: int) -> Iterator[tuple[str, Code | str]]:
    """Compile variants; the code of each, or why there is none."""

    def tried(one: Variant) -> Code | str:
        try:
            return compiled(one)
        except Exception as error:  # whatever Triton raises is the finding
            return next(iter(str(error).splitlines()), type(error).__name__)

    with ThreadPoolExecutor(threads) as pool:
        yield from zip(found, pool.map(tried, found.values()), strict=True)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="compile variants with this in their name, and write nothing")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    for_hopper()
    found = {name: one for name, one in grid().items() if args.only in name}
    rows: dict[str, Code] = {}
    failed = 0
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        for name, code in measure(found, args.threads):
            wrong = [f"does not compile: {code}"] if isinstance(code, str) else faults(name, code)
            failed += bool(wrong)
            print(name, "" if isinstance(code, str) else code._asdict(), *wrong, sep="; ", flush=True)
            if not isinstance(code, str):
                rows[name] = code
    seconds = perf_counter() - begin
    print(f"Triton {triton.__version__}: {len(found)} variants in {seconds:.0f} s, {failed} with faults")
    if not (failed or args.only or args.check):
        kinds = {"source": source(), "seconds": round(seconds), "columns": Code._fields}
        table = {**read(), triton.__version__: {**kinds, "variants": {name: list(rows[name]) for name in sorted(rows)}}}
        TABLE.write_text(_text(table), encoding="utf-8")
    return int(failed > 0)


def _text(table: Mapping[str, Any]) -> str:
    """JSON with a line for each variant."""
    return (
        re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(table, indent=1))
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())

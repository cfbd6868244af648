"""The Triton mover's launches compiled for a Hopper GPU, with no GPU here: their PTX, as JSON."""

# Only the driver is stood in for; the arguments go through Triton's own specialisation, as they
# would for a launch.

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from megatron_balance import Batch, Cluster, Model
from megatron_balance.runtime.movers.base import RowMove
from megatron_balance.runtime.movers.triton import kernels, mover
from tests.support.strategies import Case, plan
from tests.support.triton_twins import packed_of, space_of
from tools.gpu_model import record, stand_ins

SHAPE = {"q": (300, 32, 128), "kv": (300, 8, 128)}
MERGED_DIMS = (16, 32, 64, 80, 128, 192, 256)


class Hopper:
    # As much of a driver as compiling takes.
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Compiled:
    # A kernel that is compiled instead of launched.
    def __init__(self, kernel: Any, found: dict[str, str]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            self.found[self.kernel.fn.__name__] = self.kernel.run(*args, grid=grid, warmup=True, **constants).asm["ptx"]

        return launch


def compiled() -> None:
    triton.runtime.driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    found: dict[str, str] = {}
    for name in ("copy_rows", "add_rows", "merge_rows"):
        setattr(mover, name, Compiled(getattr(kernels, name), found))
    moved = mover.TritonMover(torch.device("cpu"))
    rows = [*range(0, 300, 2), *range(1, 300, 2)]
    fills, places = [], []
    for shape in (SHAPE["q"], SHAPE["kv"], SHAPE["kv"]):
        packed = packed_of([(0, rows, 0, shape[1], 0)], shape[1])
        source = torch.zeros(shape, dtype=torch.bfloat16)
        fills.append(RowMove(packed, (source,), torch.zeros_like(source)))
        places.append(RowMove(packed, (torch.zeros(shape),), source))
    moved.fill(fills)
    moved.add(places)
    space = space_of({0: SHAPE["q"][:2]}, (), 128, torch.bfloat16, torch.float32)
    held = moved.partials(space)
    for _ in range(3):
        held.add(fills[0].packed, (True,), fills[0].own, torch.zeros(SHAPE["q"][:2]))
    held.final()
    kernels_of_calls = {name: counted(ptx) for name, ptx in found.items()}
    merges = {dim: merged(moved, dim, found) for dim in MERGED_DIMS}
    print(json.dumps({"kernels": kernels_of_calls, "merges": merges}))  # noqa: T201  read by the test that started this process


def merged(moved: mover.TritonMover, dim: int, found: dict[str, str]) -> dict[str, int] | str:
    # Counts of a merge of heads of `dim` elements, or why it does not compile.
    part = mover.partial_of(torch.zeros((1, 1, dim), dtype=torch.bfloat16), torch.zeros((1, 1)))
    try:
        mover._merge_parts(moved, [part] * 2, torch.empty((1, 1, dim), dtype=torch.bfloat16), torch.empty((1, 1)))
    except RuntimeError as error:
        return str(error)
    return counted(found["merge_rows"])


def counted(ptx: str) -> dict[str, int]:
    # `narrow_data`: accesses of single bf16 values; `wide_offsets`: multiplications into 64 bits.
    patterns = {
        "wide_loads": r"ld\.global[.\w]*\.v4\.b32",
        "wide_stores": r"st\.global[.\w]*\.v4\.b32",
        "narrow_data": r"(ld|st)\.global[.\w]*\.b16",
        "atomics": r"\batom\b|\bred\b",
        "wide_offsets": r"mul\.wide|mul\.lo\.s64|mad\.wide|mad\.lo\.s64|shl\.b64",
    }
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


HEAD_DIM = 128
PLANNERS = ("zeppelin", "distca", "ulysses", "random_task_table", "random_zones")
CASES = [
    Case(Batch((90, 40, 33, 7)), Cluster(4, 2), Model(*heads, HEAD_DIM, 512, 64), 50, 5, layered, routing)
    for heads, layered, routing in (((4, 2), True, (1, 1)), ((8, 8), False, None))
]


def variants() -> None:
    # Those that calls launch, and those built at the start; nothing is compiled.
    triton.runtime.driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        seen.add((fn.name, key))
        return True  # do not compile

    class Looked(stand_ins.TritonLaunch):
        # A launch that is recorded, and looked up among the compiled ones.
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            noted, kernel = super().__getitem__(grid), getattr(kernels, self.name)

            def launch(*args: Any, **constants: Any) -> None:
                kernel.run(*args, grid=grid, warmup=True, **constants)
                noted(*args, **constants)

            return launch

    found: dict[str, Any] = {}
    with mock.patch.object(knobs.runtime, "jit_cache_hook", note), mock.patch.object(stand_ins, "TritonLaunch", Looked):
        for dtype in (torch.bfloat16, torch.float32):
            seen.clear()
            launches = mover.build(torch.device("cpu"), dtype, HEAD_DIM)
            built = set(seen)
            seen.clear()
            for at, planner in enumerate(PLANNERS):
                for case, policy in zip(CASES, ("keep", "replay"), strict=True):
                    plans = [plan(planner, each) for each in (case, replace(case, batch=Batch((64, 21))))]
                    way = record.Way(policy, num_layers=1 + at % 2, head_dim=HEAD_DIM, dtype=dtype)
                    record.record(plans, 1 + 2 * (at % 2), way)
            counts = {"built": len(built), "launches of the start": launches, "launched": len(seen)}
            found[str(dtype)] = {**counts, "launched but not built": sorted(seen - built)}
    print(json.dumps(found))  # noqa: T201  read by the test that started this process


if __name__ == "__main__":
    variants()
    compiled()

"""The Triton mover's launches compiled for a Hopper GPU (`tools.gpu.compiled`), as JSON."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs

from megatron_balance import Batch, Cluster, Model
from megatron_balance.ir.model import GradientWire
from megatron_balance.runtime.lower.memory import AttentionShape
from megatron_balance.runtime.movers.triton import kernels
from megatron_balance.runtime.movers.triton.variants import Compiling, Variant, compile_all
from megatron_balance.runtime.movers.triton.variants import variants as ahead
from tests.support.strategies import Case, plan
from tools.gpu.compiled import Code, faults, for_hopper, grid, measure, read, source, tile
from tools.gpu_model import record, stand_ins


def nothing(**_: Any) -> None:
    pass


def broken(**_: Any) -> None:
    raise ZeroDivisionError


def compiled() -> None:
    # One variant of each kernel, tile and size of an element, by the threads of a job's start.
    for_hopper()
    chosen: dict[object, Variant] = {}
    for name, one in grid().items():
        chosen[one.kernel.fn.__name__, tile(name)] = one
    compile_all(list(chosen.values()), torch.device("cpu"), 2)
    made = measure({one.name: one for one in chosen.values()}, 2)
    named = list[str]()
    try:
        compile_all([Variant("merge_rows of nothing", kernels.merge_rows, broken)] * 3, torch.device("cpu"))
    except ZeroDivisionError as error:
        named = error.__notes__
    devices = list[str]()
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=3),
        mock.patch.object(torch.cuda, "device", lambda device: devices.append(str(device)) or nullcontext()),
    ):
        compile_all([Variant("nothing", kernels.merge_rows, nothing)] * 2, torch.device("cuda"))
    wrong = {name: [code] if isinstance(code, str) else faults(name, code) for name, code in made}
    rows = [(name, Code(*row)) for of in read().values() for name, row in of["variants"].items()]
    wrong |= {f"table: {name}": faults(name, code) for name, code in rows}
    # As Triton 3.6 compiled it, and a tile of 64 elements a thread.
    bad = Code(registers=224, spilled_bytes=0, wide_loads=6, wide_stores=0, narrow=16, atomics=0, wide_offsets=30)
    seen = faults("merge_rows bfloat16 to bfloat16, 5 places, 16 x 128 by 8, 4 warps", bad)
    found = {"compiled": wrong, "seen": seen, "grid": sorted(grid()), "source": source(), "triton": triton.__version__}
    print(json.dumps({**found, "named": named, "devices": devices}))  # noqa: T201  read by the test that started this process


HEAD_DIM = 128
PLANNERS = ("zeppelin", "distca", "ulysses", "random_task_table", "random_zones")
CASES = [
    Case(Batch((31, 14, 11, 3)), Cluster(4, 2), Model(*heads, HEAD_DIM, 512, 64), 18, 5, layered, routing)
    for heads, layered, routing in (((4, 2), True, (1, 1)), ((8, 8), False, None))
]

WAYS: tuple[tuple[torch.dtype, GradientWire], ...] = (
    (torch.bfloat16, "fp32"),
    (torch.bfloat16, "bf16"),
    (torch.float32, "fp32"),
)


def variants() -> None:
    # Those that calls launch, and those built at the start; nothing is compiled.
    for_hopper()
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
        for dtype, wire in WAYS:
            seen.clear()
            built_ahead = ahead(torch.device("cpu"), dtype, AttentionShape(4, 2, HEAD_DIM), wire)
            for one in built_ahead:
                one.launch(kernel=Compiling(one.kernel))
            built = set(seen)
            seen.clear()
            for at, planner in enumerate(PLANNERS):
                for case, policy in zip(CASES, ("keep", "replay"), strict=True):
                    plans = [plan(planner, each) for each in (case, replace(case, batch=Batch((22, 7))))]
                    way = record.Way(policy, num_layers=1 + at % 2, head_dim=HEAD_DIM, dtype=dtype, gradient_wire=wire)
                    record.record(plans, 1 + 2 * (at % 2), way)
            counts = {"built": len(built), "variants": len(built_ahead), "launched": len(seen)}
            apart = {"launched but not built": sorted(seen - built), "built but not launched": sorted(built - seen)}
            found[f"{dtype} {wire}"] = {**counts, **apart}
    print(json.dumps(found))  # noqa: T201  read by the test that started this process


if __name__ == "__main__":
    variants()
    compiled()

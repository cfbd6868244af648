"""Variants of the Triton kernels that calls launch, and those built at the start, as JSON."""

# For a Hopper GPU; nothing is compiled.

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs

from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.runtime.movers.triton import kernels, mover
from tests.support.strategies import Case, plan
from tests.support.triton_ptx import Hopper
from tools.gpu_model import stand_ins
from tools.gpu_model.record import Way, record

HEAD_DIM = 128
PLANNERS = ("zeppelin", "distca", "ulysses", "random_task_table", "random_zones")
CASES = [
    Case(
        Batch((90, 40, 33, 7)),
        Cluster(4, 2),
        Model(*heads, HEAD_DIM, 512, 64),
        50,
        5,
        layered,
        (1, 1) if layered else None,
    )
    for heads, layered in (((4, 2), True), ((8, 8), False))
]


def main() -> None:
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
                    way = Way(policy, num_layers=1 + at % 2, head_dim=HEAD_DIM, dtype=dtype)
                    record(plans, 1 + 2 * (at % 2), way)
            found[str(dtype)] = {
                "built": len(built),
                "launches of the start": launches,
                "launched": len(seen),
                "launched but not built": sorted(seen - built),
            }
    print(json.dumps(found))  # noqa: T201  read by the test that started this process


if __name__ == "__main__":
    main()

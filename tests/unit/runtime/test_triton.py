"""Triton kernels against their twins, on CPU; what is compiled for Hopper, all of it at the start."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ended

pytest.importorskip("triton")
pytest.importorskip("torch")

from tools.gpu.kernels import interpreter_fault

REPOSITORY = Path(__file__).resolve().parents[3]


def in_child(code: str, *, interpreted: bool) -> list[Any]:
    # JSON documents that some code prints, one a line. Triton decides at import whether it
    # interprets, so what needs one or the other runs in a process of its own.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1" if interpreted else "0"}
    ran = ended([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, timeout=240)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def for_hopper() -> list[Any]:
    """Findings of `triton_ptx`: variants, before anything is compiled, and the code."""
    both = "from tests.support import triton_ptx; triton_ptx.variants(); triton_ptx.compiled()"
    found = in_child(both, interpreted=False)
    assert len(found) == 2
    return found


def test_kernels_equal_their_twins() -> None:
    if fault := interpreter_fault():
        pytest.skip(fault)
    (found,) = in_child("from tests.support import triton_twins; triton_twins.main()", interpreted=True)
    asked = "fill place add partials shared sums added_at_once apart sent empty built"
    assert found == dict.fromkeys(asked.split(), True)


def test_a_variant_of_each_tile_compiles_for_hopper_and_the_table_is_of_todays_kernels(for_hopper: list[Any]) -> None:
    found, table = for_hopper[1], json.loads((REPOSITORY / "docs/measurements/compiled-kernels.json").read_text())
    assert {name: wrong for name, wrong in found["compiled"].items() if wrong} == {}
    assert found["seen"] == [
        "224 registers a thread, at most 168",
        "16 accesses of single elements",
        "0 stores of 16 bytes, of a tile 2",
    ]
    assert found["devices"] == ["cuda:3"] * 2  # threads begin on device 0
    assert found["named"] == ["while Triton compiled merge_rows of nothing"]
    again = "python -m tools.gpu.compiled"
    assert {version: of["source"] for version, of in table.items()} == dict.fromkeys(table, found["source"]), again
    # The oldest torch that pyproject.toml admits, 2.8, brings 3.4.0.
    assert {found["triton"], "3.4.0"} <= table.keys(), again
    for of in table.values():
        assert sorted(of["variants"]) == found["grid"], again


def test_every_variant_that_a_call_launches_is_built_at_the_start_and_few_others(for_hopper: list[Any]) -> None:
    # Forward and backward of five planners, routed, remapped and not, in bf16 and fp32.
    assert len(for_hopper[0]) == 3
    for found in for_hopper[0].values():
        assert found["launched but not built"] == []
        assert found["built"] == found["variants"] <= 18
        # More partials than these plans have become an accumulator; sums move two or eight at a time.
        assert len(found["built but not launched"]) <= 4

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

REPOSITORY = Path(__file__).resolve().parents[3]
# Of heads that are merged (`triton_ptx.MERGED_DIMS`).
DIMS = ("16", "32", "64", "80", "128", "192", "256")


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
    (found,) = in_child("from tests.support import triton_twins; triton_twins.main()", interpreted=True)
    asked = "fill place add partials shared sums added_at_once apart sent empty"
    assert found == dict.fromkeys(asked.split(), True)


def test_hopper_code_has_accesses_of_16_bytes_and_no_atomics_and_merges_heads_of_any_size(
    for_hopper: list[Any],
) -> None:
    found, merges = for_hopper[1]["kernels"], for_hopper[1]["merges"]
    assert set(found) == {"copy_rows", "add_rows", "merge_rows"}
    assert [dim for dim, counts in merges.items() if isinstance(counts, str)] == [], merges
    assert {dim: counts["narrow_data"] for dim, counts in merges.items()} == dict.fromkeys(DIMS, 0)
    for counts in found.values():
        assert min(counts["wide_loads"], counts["wide_stores"], counts["wide_offsets"]) > 0, found
        assert counts["narrow_data"] == counts["atomics"] == 0, found


def test_every_variant_that_a_call_launches_is_built_at_the_start(for_hopper: list[Any]) -> None:
    # Forward and backward of five planners, routed, remapped and not, in bf16 and fp32.
    assert len(for_hopper[0]) == 2
    for found in for_hopper[0].values():
        assert found["launched but not built"] == []
        assert found["built"] == found["launches of the start"] <= 20
        assert found["launched"] >= 8

"""Triton's kernels against their plain twins, by the interpreter on CPU; what the compiler makes of
them for Hopper, without one; and that it makes all of it before the first step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

REPOSITORY = Path(__file__).resolve().parents[3]
DIMS = ("16", "32", "64", "80", "128", "192", "256")
"""Of heads that are merged (`triton_ptx.MERGED_DIMS`)."""


def in_child(module: str, *, interpreted: bool) -> subprocess.CompletedProcess[str]:
    """Triton decides at import whether it interprets, so what needs one or the other runs in a
    process of its own.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1" if interpreted else "0"}
    return subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_kernels_equal_their_twins() -> None:
    ran = in_child("tests.support.triton_twins", interpreted=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "fill": True,
        "place": True,
        "add": True,
        "partials": True,
        "shared": True,
        "sums": True,
        "added_at_once": True,
        "apart": True,
        "sent": True,
        "empty": True,
    }


def test_hopper_code_has_accesses_of_16_bytes_and_no_atomics_and_merges_heads_of_any_size() -> None:
    ran = in_child("tests.support.triton_ptx", interpreted=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
    compiled = json.loads(ran.stdout.splitlines()[-1])
    found, merges = compiled["kernels"], compiled["merges"]
    assert set(found) == {"copy_rows", "add_rows", "merge_rows"}
    assert [dim for dim, counts in merges.items() if isinstance(counts, str)] == [], merges
    assert {dim: counts["narrow_data"] for dim, counts in merges.items()} == dict.fromkeys(DIMS, 0)
    for name, counts in found.items():
        assert counts["wide_loads"] > 0, name
        assert counts["wide_stores"] > 0, name
        assert counts["narrow_data"] == 0, name
        assert counts["atomics"] == 0, name
        assert counts["wide_offsets"] > 0, f"{name} computes no 64-bit offset"


def test_every_variant_that_a_call_launches_is_built_at_the_start() -> None:
    """Forward and backward of five planners, routed, remapped and not, in bf16 and fp32."""
    ran = in_child("tests.support.triton_variants", interpreted=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
    for found in json.loads(ran.stdout.splitlines()[-1]).values():
        assert found["launched but not built"] == []
        assert found["built"] == found["launches of the start"] <= 20
        assert found["launched"] >= 8

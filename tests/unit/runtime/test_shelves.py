"""The runtime's shelves: a protocol below, implementations on it, the choice above them."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from megatron_balance import runtime
from megatron_balance.errors import InvalidProgramError
from megatron_balance.runtime.lower.regions import RegionIndex, RowRange

ROOT = Path(str(runtime.__file__)).parent
OPTIONAL = ("megatron_balance.runtime.movers.triton.mover", "flash_attn", "flash_attn_interface", "transformer_engine")


def imported(path: Path) -> set[str]:
    """Names that a file imports, anywhere in it, with their modules."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


@pytest.mark.parametrize(("shelf", "choose"), [("kernels", "choose_kernel"), ("movers", "choose_mover")])
def test_a_protocol_knows_no_implementation_and_no_implementation_the_choice(shelf: str, choose: str) -> None:
    package = f"megatron_balance.runtime.{shelf}"
    assert hasattr(importlib.import_module(package), choose)
    assert not {name for name in imported(ROOT / shelf / "base.py") if name.startswith(package)}
    for path in (ROOT / shelf).rglob("*.py"):
        assert f"{package}.{choose}" not in imported(path), path


def test_optional_libraries_are_imported_by_choosing_them_only() -> None:
    code = "import sys, megatron_balance.runtime.attention; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT.parents[1]
    ).stdout.split()
    assert "megatron_balance.runtime.movers" in out
    assert not set(OPTIONAL) & set(out)


# (seq, start, stop, head_start, head_stop, buffer, row): s0[0:10) in two buffers, s1[4:8) split by
# heads
INSTANCES = [(0, 0, 6, 0, 2, 0, 0), (0, 6, 10, 0, 2, 3, 0), (1, 4, 8, 0, 1, 1, 5), (1, 4, 8, 1, 2, 2, 0)]


def test_a_region_lies_in_row_ranges_of_the_buffers_that_hold_it() -> None:
    whole = RegionIndex(np.array(INSTANCES[:2]))
    assert whole.resolve(np.array([[0, 4, 9, 1, 2]]).T).T.tolist() == [
        [0, 0, 2, 0, 1, 0, 4, 1],
        [0, 2, 3, 0, 1, 3, 0, 1],
    ]
    split = RegionIndex(np.array(INSTANCES)).resolve(np.array([[1, 5, 7, 0, 2]]).T)
    assert split[RowRange.BUFFER].tolist() == [1, 2]
    assert split[RowRange.BUFFER_ROW].tolist() == [6, 1]
    assert split[RowRange.HEAD].tolist() == [0, 1]
    with pytest.raises(InvalidProgramError, match=r"a rank does not hold all of s0\[9:11\) heads \[0:2\)"):
        whole.resolve(np.array([[0, 9, 11, 0, 2]]).T)

"""The contracts of the layers, which scripts/test.sh holds, can fail; heavy libraries come late."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]


FORBIDDEN = {
    "Imports point down": ("ir/batch.py", "megatron_balance.planners"),
    "The vocabulary needs the standard library only": ("ir/batch.py", "numpy"),
    "The library torch only": ("planners/baselines.py", "torch"),
    "Planners do not know one another": ("planners/baselines.py", "megatron_balance.planners.zeppelin"),
    "The library megatron only": ("cli/plan.py", "megatron.core"),
    "Planning imports no configuration library": ("patterns/zigzag.py", "yaml"),
}
"""By contract, a file and an import in it that breaks it."""


def test_forbidden_imports_are_caught(tmp_path):
    """All in one copy of the package; each is found by its own contract."""
    pytest.importorskip("importlinter", reason="import-linter comes with the extra 'dev'")
    shutil.copytree(
        TOP / "megatron_balance", tmp_path / "megatron_balance", ignore=shutil.ignore_patterns("__pycache__", "configs")
    )
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    for module, name in FORBIDDEN.values():
        with (tmp_path / "megatron_balance" / module).open("a") as file:
            file.write(f"\nimport {name}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = result.stdout.partition("Broken contracts")[2]
    _, *headed = re.split(r"^(?=.+\n-{9,}$)", broken, flags=re.MULTILINE)
    for contract, (module, name) in FORBIDDEN.items():
        (section,) = [text for text in headed if text.startswith(contract)]
        edge = f"megatron_balance.{module.removesuffix('.py').replace('/', '.')} -> {name.removesuffix('.core')} (l."
        assert edge in " ".join(section.split()), (contract, result.stdout)


LATE = """
import sys

def loaded(*names):
    return [name for name in sys.modules if name.startswith(names)]

import megatron_balance
assert not loaded("torch", "numpy", "pydantic", "yaml"), "the package"
from megatron_balance.cli import main
plan = "plan --planner zeppelin --lengths 4096,80 --ranks 4".split()
assert main([*plan, "--json"]) == 0
assert not loaded("torch", "rich", "megatron.", "megatron_balance.simulator"), "a plan"
assert main([*plan, "--verify"]) == 0
import megatron_balance.analysis.wire, megatron_balance.workloads.idx, megatron_balance.workloads.lengths
assert not loaded("torch", "megatron."), "a table, bytes on the wire, lengths"
"""


def test_planning_imports_late_what_it_may_not_need():
    done = subprocess.run(
        [sys.executable, "-c", LATE], cwd=TOP, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr

"""The layers of the architecture hold, and the contract that says so can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter comes with the extra 'dev'")

TOP = Path(__file__).resolve().parents[3]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_imports_point_down():
    result = lint(TOP)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("ir/span.py", "import megatron_balance.planners", "Imports point down"),
        ("ir/span.py", "import numpy", "The vocabulary needs the standard library only"),
        ("planners/whole_pool.py", "import torch", "The library torch only"),
        ("planners/whole_pool.py", "import megatron_balance.planners.zeppelin", "Planners do not know one another"),
        ("cli/plan.py", "import megatron.core", "The library megatron only"),
        ("patterns/ring.py", "import yaml", "Planning imports no configuration library"),
    ],
)
def test_forbidden_import_is_caught(tmp_path, module, line, contract):
    shutil.copytree(
        TOP / "megatron_balance", tmp_path / "megatron_balance", ignore=shutil.ignore_patterns("__pycache__", "configs")
    )
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    with (tmp_path / "megatron_balance" / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert any(contract in row and "BROKEN" in row for row in result.stdout.splitlines()), result.stdout

"""The layers of the architecture hold, and the contract that says so can fail."""

from __future__ import annotations

import re
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


FORBIDDEN = {
    "Imports point down": ("ir/batch.py", "megatron_balance.planners"),
    "The vocabulary needs the standard library only": ("ir/batch.py", "numpy"),
    "The library torch only": ("planners/whole_pool.py", "torch"),
    "Planners do not know one another": ("planners/whole_pool.py", "megatron_balance.planners.zeppelin"),
    "The library megatron only": ("cli/plan.py", "megatron.core"),
    "Planning imports no configuration library": ("patterns/ring.py", "yaml"),
}
"""By contract, a file and an import in it that breaks it."""


def test_forbidden_imports_are_caught(tmp_path):
    """All in one copy of the package; each is found by its own contract."""
    shutil.copytree(
        TOP / "megatron_balance", tmp_path / "megatron_balance", ignore=shutil.ignore_patterns("__pycache__", "configs")
    )
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    for module, name in FORBIDDEN.values():
        with (tmp_path / "megatron_balance" / module).open("a") as file:
            file.write(f"\nimport {name}\n")
    result = lint(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = result.stdout.partition("Broken contracts")[2]
    _, *headed = re.split(r"^(?=.+\n-{9,}$)", broken, flags=re.MULTILINE)
    for contract, (module, name) in FORBIDDEN.items():
        (section,) = [text for text in headed if text.startswith(contract)]
        edge = f"megatron_balance.{module.removesuffix('.py').replace('/', '.')} -> {name.removesuffix('.core')} (l."
        assert edge in " ".join(section.split()), (contract, result.stdout)

"""No test lies where pytest does not look, and no source where the linter does not: both pass over
folders of some names (dist, build, venv) without a word."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tools.size_report import working_tree

ROOT = Path(__file__).resolve().parents[3]
PYTHON_FILES = [file for file in working_tree() if file.suffix == ".py"] if (ROOT / ".git").exists() else []
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")


def test_pytest_passes_over_no_folder_of_tests(request: pytest.FixtureRequest) -> None:
    tests = [file for file in PYTHON_FILES if file.parts[0] == "tests"]
    passed_over = request.config.getini("norecursedirs")
    assert "dist" in passed_over, "where pytest looks is no longer what this test thinks"
    folders = {part for file in tests for part in file.parts[:-1]}
    assert "distributed" in folders
    assert [name for name in folders if any(fnmatch(name, pattern) for pattern in passed_over)] == []
    named = [file for file in tests if file.name.endswith("_test.py")]
    assert named == [], "pytest would take these for tests; ours are called test_*.py"


def test_the_linter_reads_every_source() -> None:
    read = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert sorted({ROOT / file for file in PYTHON_FILES} - set(map(Path, read))) == []

"""No test lies where pytest does not look, and no source where the linter does not: both pass over
folders of some names (dist, build, venv) without a word."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
).stdout.splitlines()


def folders(files: list[str]) -> set[str]:
    """Names of all folders above the files."""
    return {part for file in files for part in Path(file).parts[:-1]}


def test_pytest_passes_over_no_folder_of_tests(request: pytest.FixtureRequest) -> None:
    tests = [file for file in FILES if file.startswith("tests/")] or [
        str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py")
    ]
    passed_over = request.config.getini("norecursedirs")
    assert "dist" in passed_over, "where pytest looks is no longer what this test thinks"
    assert [name for name in folders(tests) if any(fnmatch(name, pattern) for pattern in passed_over)] == []
    named = [file for file in tests if Path(file).name.endswith("_test.py")]
    assert named == [], "pytest would take these for tests; ours are called test_*.py"


@pytest.mark.skipif(not FILES, reason="no git checkout")
def test_the_linter_reads_every_source() -> None:
    read = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    seen = {str(Path(file).relative_to(ROOT)) for file in read}
    assert [file for file in FILES if (ROOT / file).exists() and file not in seen] == []

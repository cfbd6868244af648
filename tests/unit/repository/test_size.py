"""The repository's size: every total is held at what was reached (tools/budgets.yaml)."""

import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

from tests.support.processes import ended
from tools.size_report import PARTS, budgets, figures, over, shape_of, table, twice, working_tree

# Share of a budget that may be unused.
SLACK = 0.01


def test_budgets_are_kept_and_lowered_to_what_was_reached():
    found = figures(working_tree())
    sys.stdout.write("\n".join(table(found, None)))
    wrong = over(found, budgets())
    assert not wrong, "cut elsewhere, or raise tools/budgets.yaml in this commit and say for what:\n" + "\n".join(wrong)
    lavish = [
        f"{name}: {found[name]:g} of {limit:g}"
        for name, limit in budgets().items()
        if abs(limit - found[name]) > max(1, SLACK * limit) and not over(found, {name: limit})
    ]
    assert not lavish, "tools/budgets.yaml allows more than is needed; lower it:\n" + "\n".join(lavish)
    assert {f"{part} lines" for part in PARTS} <= budgets().keys()


def test_a_file_is_counted_as_the_report_says_and_an_underscore_makes_no_other_name():
    # A file is counted as the report says.
    shape = shape_of(
        '"""One.\n# no comment\n"""\n\nfrom a import (\n    b,\n)\n\n# alone\nx = 1  # beside\n\n\n'
        'def _f(y):\n    """Two.\n    """\n    return b(y)\n\n\ndef g(y, z=2):\n    return b(z, y)\n\n\n'
        "class C:\n    pass\n"
    )
    assert (shape.lines, shape.comments, shape.docstrings, shape.imports) == (24, 1, 5, 3)
    assert (shape.public, shape.private, shape.classes) == (["g", "C"], ["_f"], ["C"])
    assert (shape.handed_on, shape.functions) == (["_f"], [4, 2])
    # An underscore before an imported name is not private and names are told apart without it.
    sources = {
        PurePosixPath("megatron_balance/a.py"): "class _Run:\n    pass\n\n\ndef _f():\n    pass\n",
        PurePosixPath("megatron_balance/b.py"): "from megatron_balance.a import _f\n\n\nclass Run:\n    pass\n",
        PurePosixPath("tools/c.py"): "class Run:\n    pass\n",
        PurePosixPath("docs/d.md"): "three words here\n",
        PurePosixPath("other.md"): "not counted\n",
    }
    found = figures(sources)
    assert (found["public names"], found["class names used twice"], found["docs words"]) == (2, 1, 3)
    assert twice(sources) == {"Run": ["megatron_balance/a.py", "megatron_balance/b.py"]}
    assert over(found, {"docs words": 2, "comments percent": 1, "public names": 2}) == [
        "docs words: 3, and the budget is at most 2",
        "comments percent: 0, and the budget is at least 1",
    ]


# No test lies where pytest does not look, and no source where the linter does not: both pass over
# folders of some names (dist, build, venv) without a word.

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_pytest_passes_over_no_folder_of_tests_and_the_linter_reads_every_source(request) -> None:
    files = [file for file in working_tree() if file.suffix == ".py"]
    tests = [file for file in files if file.parts[0] == "tests"]
    passed_over = request.config.getini("norecursedirs")
    assert "dist" in passed_over, "where pytest looks is no longer what this test thinks"
    folders = {part for file in tests for part in file.parts[:-1]}
    assert "distributed" in folders
    assert [name for name in folders if any(fnmatch(name, pattern) for pattern in passed_over)] == []
    named = [file for file in tests if file.name.endswith("_test.py")]
    assert named == [], "pytest would take these for tests; ours are called test_*.py"
    shown = ended([sys.executable, "-m", "ruff", "check", "--show-files", "."], cwd=ROOT, check=True).stdout
    assert sorted({ROOT / file for file in files} - set(map(Path, shown.splitlines()))) == []


# The contracts of the layers, which scripts/test.sh holds, can fail; heavy libraries come late.


# By contract, a file and an import in it that breaks it.
FORBIDDEN = {
    "Imports point down": ("ir/batch.py", "megatron_balance.planners"),
    "The vocabulary needs the standard library only": ("ir/batch.py", "numpy"),
    "The library torch only": ("planners/baselines.py", "torch"),
    "Planners do not know one another": ("planners/baselines.py", "megatron_balance.planners.zeppelin"),
    "The library megatron only": ("cli/plan.py", "megatron.core"),
    "Planning imports no configuration library": ("patterns/zigzag.py", "yaml"),
}


def test_forbidden_imports_are_caught_and_planning_imports_late_what_it_may_not_need(tmp_path):
    # Forbidden imports are caught.
    # All in one copy of the package; each is found by its own contract.
    pytest.importorskip("importlinter", reason="import-linter comes with the extra 'dev'")
    copy, left_out = tmp_path / "megatron_balance", shutil.ignore_patterns("__pycache__", "configs")
    shutil.copytree(ROOT / "megatron_balance", copy, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, name in FORBIDDEN.values():
        with (copy / module).open("a") as file:
            file.write(f"\nimport {name}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]
    result = ended(command, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    broken = result.stdout.partition("Broken contracts")[2]
    _, *headed = re.split(r"^(?=.+\n-{9,}$)", broken, flags=re.MULTILINE)
    for contract, (module, name) in FORBIDDEN.items():
        (section,) = [text for text in headed if text.startswith(contract)]
        edge = f"megatron_balance.{module.removesuffix('.py').replace('/', '.')} -> {name.removesuffix('.core')} (l."
        assert edge in " ".join(section.split()), (contract, result.stdout)
    # Planning imports late what it may not need.
    done = ended([sys.executable, "-c", LATE], cwd=ROOT)
    assert done.returncode == 0, done.stderr


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

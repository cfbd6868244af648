"""Prose: how a docstring may begin, and how wide a page is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("megatron_balance", "patches", "tests", "tools", "scripts")
OPENINGS = ("Nothing", "What", "Who", "Which", "So many", "The same")
"""First words of a docstring that name neither what is done nor what is returned."""

WIDTH = 100
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.parent.name != "measurements" and page.name != "CHANGELOG.md"
    ),
]


def docstrings(source: str) -> list[tuple[int, str]]:
    """(line, text) of every docstring: of the module, of classes and functions, and under an
    assignment."""
    texts = []
    below: list[ast.AST] = [ast.parse(source)]
    for node in below:  # grows: blocks of statements, whose expressions hold no docstring
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        below += (each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr))
        opens = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for before, statement in zip([None, *body], body, strict=False):
            if (before is None and opens) or isinstance(before, (ast.Assign, ast.AnnAssign)):
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts.append((statement.lineno, value.value))
    return texts


def refused(text: str) -> bool:
    """True if a docstring begins with one of the refused openings."""
    return re.match(rf"\s*(?:{'|'.join(OPENINGS)})\b", text) is not None


def test_openings_that_are_refused():
    wrong = ["Nothing, if a plan can run.", "So many layers.", "The same of rows."]
    right = ["Whole rows of a table.", "Reject arguments under which a plan cannot run."]
    assert [text for text in wrong + right if refused(text)] == wrong


def test_docstrings_of_values_are_seen_too():
    assert docstrings('"""A."""\nX = 1\n"""B."""\ndef f():\n    """C."""\n    "not one"\n') == [
        (1, "A."),
        (3, "B."),
        (5, "C."),
    ]


def test_docstrings_say_what_is_done_or_returned():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if refused(text)
    ]
    assert not wrong, "begin with an imperative, or with a noun phrase for what is returned:\n" + "\n".join(wrong)


def prose(page: Path) -> list[tuple[int, str]]:
    """(number, line) of a page's lines outside code fences and tables."""
    lines, fenced = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("|"):
            lines.append((number, line))
    return lines


def test_prose_fits_the_width():
    """Links count by their text."""
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in prose(page)
        if len(re.sub(r"\]\([^)]*\)", "]", line)) > WIDTH
    ]
    assert not wide, f"more than {WIDTH} characters; break these lines:\n" + "\n".join(wide)

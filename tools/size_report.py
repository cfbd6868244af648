"""Lists files over 500 lines and functions over 50, to be argued with, not failed: `python
tools/size_report.py`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50


def python_files(top: Path) -> list[Path]:
    """Python files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=top,
        capture_output=True,
        text=True,
        check=True,
    )
    return [top / name for name in sorted(set(listed.stdout.splitlines())) if (top / name).is_file()]


def long_functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Name, first line and number of lines of functions that are too long."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.name, node.lineno, lines


def main() -> int:
    top = Path(__file__).resolve().parent.parent
    files = python_files(top)
    total = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        num_lines = text.count("\n")
        total += num_lines
        name = file.relative_to(top)
        if num_lines > MAX_FILE_LINES:
            print(f"{name}: {num_lines} lines; is it still one thing?")
        for function, line, lines in long_functions(ast.parse(text)):
            print(f"{name}:{line}: {function} has {lines} lines")
    print(f"{len(files)} files, {total} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())

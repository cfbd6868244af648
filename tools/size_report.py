"""Size and shape of the repository: lines, words and names of each part, and what a change adds.

python -m tools.size_report [--against main] [--rooms] [--json]

lines: of Python files, without those that hold only a comment, and of YAML in the package, but for
    published numbers (lab/papers/)
words: of Markdown in docs/, README.md and CONTRIBUTING.md
public names: classes and functions of modules (no methods) without a leading underscore; with one,
    too, where another file imports them
class names used twice: names that, leading underscores taken off, stand for several classes
handed on: functions whose body is one call with just their own parameters
imports, comments, docstrings: percent of lines

`tools/budgets.yaml` says how much of each there may be, and `tests/unit/repository/test_size.py` holds
the repository to it. There is no limit on a file or on a function: with one, code flees into many
small files.
"""

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from statistics import median

import yaml

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ROOT / "tools" / "budgets.yaml"
PARTS = {"package": "megatron_balance", "patches": "patches", "tests": "tests", "tools": "tools", "scripts": "scripts"}
"""Of each part, its folder."""

COUNTED = (".py", ".md", ".yaml")
PROSE = ("docs/", "README.md", "CONTRIBUTING.md")
AT_LEAST = ("comments percent",)
"""Figures of which more is better."""

Sources = Mapping[PurePosixPath, str]


@dataclass
class Shape:
    """Counts of one Python file."""

    lines: int = 0
    comments: int = 0
    docstrings: int = 0
    imports: int = 0
    functions: list[int] = field(default_factory=list)
    public: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    handed_on: list[str] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)


@cache
def num_comments(source: str) -> int:
    """Lines that hold only a comment."""
    marked = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
    if not marked:
        return 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None:
            marked.difference_update(range(node.lineno + 1, node.end_lineno + 1))  # inside a text of several lines
    return len(marked)


def num_lines(source: str) -> int:
    return source.count("\n") - num_comments(source)


@cache
def shape_of(source: str) -> Shape:
    tree = ast.parse(source)
    shape = Shape(lines=source.count("\n"), comments=num_comments(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            shape.imports += _length(node)
            shape.imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            shape.functions.append(_length(node))
            if _hands_on(node):
                shape.handed_on.append(node.name)
        elif isinstance(node, ast.ClassDef):
            shape.classes.append(node.name)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            shape.docstrings += _length(node.body[0])
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            (shape.private if node.name.startswith("_") else shape.public).append(node.name)
    return shape


def _length(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _hands_on(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function only calls another with its own parameters, in their order."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or not isinstance(body[0].value, ast.Call):
        return False
    call, own = body[0].value, [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    given = [each.id for each in call.args if isinstance(each, ast.Name)]
    if own and own[0] in ("self", "cls"):
        own = own[1:]
    return bool(own) and not call.keywords and len(given) == len(call.args) and given == own


def figures(sources: Sources) -> dict[str, float]:
    """All figures of a tree, by the names that `budgets.yaml` has.

    `sources`: texts of Python and Markdown files by path.
    """
    found: dict[str, float] = {}
    for part, folder in PARTS.items():
        own = [text for path, text in sources.items() if path.suffix == ".py" and path.parts[0] == folder]
        found[f"{part} lines"] = sum(map(num_lines, own))
        if part == "package":
            found |= _of_package([shape_of(text) for text in own])
            data = [(path.parts, text) for path, text in sources.items() if path.suffix == ".yaml"]
            found["package lines"] += sum(
                text.count("\n") for (first, *rest), text in data if first == folder and rest[:2] != ["lab", "papers"]
            )
    prose = (text for path, text in sources.items() if path.suffix == ".md" and str(path).startswith(PROSE))
    found["docs words"] = sum(len(text.split()) for text in prose)
    return found


def _of_package(shapes: Sequence[Shape]) -> dict[str, float]:
    total = sum(each.lines for each in shapes)
    imported = set[str]().union(*(each.imported for each in shapes))
    public = sum(len(each.public) + sum(name in imported for name in each.private) for each in shapes)
    names = Counter(name.lstrip("_") for each in shapes for name in each.classes)
    lengths = sorted(length for each in shapes for length in each.functions)
    return {
        "files": len(shapes),
        "median file": median([each.lines for each in shapes] or [0]),
        "p90 function": lengths[int(len(lengths) * 0.9)] if lengths else 0,
        "public names": public,
        "class names used twice": sum(count > 1 for count in names.values()),
        "handed on": sum(len(each.handed_on) for each in shapes),
        "imports percent": round(100 * sum(each.imports for each in shapes) / max(1, total), 2),
        "comments percent": round(100 * sum(each.comments for each in shapes) / max(1, total), 2),
        "docstrings percent": round(100 * sum(each.docstrings for each in shapes) / max(1, total), 2),
    }


def twice(sources: Sources) -> dict[str, list[str]]:
    """Class names of the package that stand for several classes, and the files of each."""
    where: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        if path.suffix == ".py" and path.parts[0] == PARTS["package"]:
            for name in shape_of(text).classes:
                where[name.lstrip("_")].append(str(path))
    return {name: paths for name, paths in sorted(where.items()) if len(paths) > 1}


def rooms(sources: Sources) -> dict[str, int]:
    """Lines of each room, comments left out, the largest first."""
    lines = Counter[str]()
    for path, text in sources.items():
        if path.suffix == ".py":
            shape = shape_of(text)
            lines[str(PurePosixPath(*path.parts[:2]) if path.parts[2:] else path.parent)] += (
                shape.lines - shape.comments
            )
    return dict(lines.most_common())


def working_tree() -> dict[PurePosixPath, str]:
    """Texts of the files that git knows or would add."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", *map("*{}".format, COUNTED)).splitlines()
    return {
        PurePosixPath(name): (ROOT / name).read_text(encoding="utf-8")
        for name in sorted(set(listed))
        if (ROOT / name).is_file()
    }


def committed(revision: str) -> dict[PurePosixPath, str]:
    """Texts of the files of a commit."""
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        return {
            PurePosixPath(member.name): archive.extractfile(member).read().decode("utf-8")  # pyright: ignore[reportOptionalMemberAccess]
            for member in archive.getmembers()
            if member.isfile() and member.name.endswith(COUNTED)
        }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def budgets() -> dict[str, float]:
    """The most that there may be of each figure; of comments, the least."""
    return yaml.safe_load(BUDGETS.read_text(encoding="utf-8"))


def over(found: Mapping[str, float], allowed: Mapping[str, float]) -> list[str]:
    """A sentence for each budget that is not kept."""
    return [
        f"{name}: {found[name]:g}, and the budget is at {'least' if name in AT_LEAST else 'most'} {limit:g}"
        for name, limit in allowed.items()
        if (found[name] < limit if name in AT_LEAST else found[name] > limit)
    ]


def table(now: Mapping[str, float], before: Mapping[str, float] | None) -> Iterable[str]:
    allowed = budgets()
    for name, number in now.items():
        limit = f"  (budget {allowed[name]:g})" if name in allowed else ""
        change = "" if before is None else f"  {number - before[name]:+g}"
        yield f"{name:24} {number:>10g}{change}{limit}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1: a budget is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--against", metavar="REVISION", help="print the change since this commit, too")
    parser.add_argument("--rooms", action="store_true", help="lines of each room, and class names used twice")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    sources = working_tree()
    now = figures(sources)
    before = figures(committed(given.against)) if given.against else None
    if given.json:
        print(json.dumps({"now": now, "before": before, "rooms": rooms(sources), "twice": twice(sources)}, indent=1))
    else:
        print("\n".join(table(now, before)))
        if given.rooms:
            print("\n".join(f"{lines:7}  {room}" for room, lines in rooms(sources).items()))
            print("\n".join(f"{name}: {', '.join(paths)}" for name, paths in twice(sources).items()))
    wrong = over(now, budgets())
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

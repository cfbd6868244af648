"""Report on the patches in the Megatron that is installed here: `megatron-balance doctor --patches`.

    python -m megatron_balance.patches.report [--reviewed DIR]

Reads source files and runs none of Megatron's code but its imports. With DIR, the folder of a
reviewed version (`pip install --target DIR --no-deps megatron-core==0.19.2`), it prints what every
source that was not reviewed changes against that version.
"""

import argparse
import ast
import difflib
import sys
from pathlib import Path

from megatron_balance.errors import PatchError
from megatron_balance.patches import Patch, source_digest


def _find_source(root: Path, target: str) -> str:
    """The source of a target, "package.module:qualname", under the folder that holds the package,
    looked up where a module imports it from. PatchError: there is none.
    """
    module, _, qualname = target.partition(":")
    path = root.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        raise PatchError(f"{target}: no file {path}")
    text = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.stmt | None = None
    for name in qualname.split("."):
        found = _defined(body, name)
        if isinstance(found, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            base = package.rsplit(".", found.level - 1)[0] if found.level else ""
            return _find_source(root, f"{'.'.join(filter(None, (base, found.module)))}:{qualname}")
        if not isinstance(found, ast.ClassDef | ast.FunctionDef):
            raise PatchError(f"{target}: {path} defines no {name}")
        body = found.body
    assert isinstance(found, ast.ClassDef | ast.FunctionDef)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : found.end_lineno])


def _defined(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(
            alias.asname is None and alias.name == name for alias in node.names
        ):
            return node
        if isinstance(node, ast.If | ast.Try):
            inside = _defined([*node.body, *node.orelse], name)
            if inside is not None:
                return inside
    return None


def lines(patches: tuple[Patch, ...], here: Path, reviewed: Path | None) -> list[str]:
    """One line a target, and the difference from `reviewed` below each that was not reviewed."""
    told: list[str] = []
    for patch in patches:
        try:
            source = _find_source(here, patch.target)
        except PatchError as error:
            told.append(f"missing     {error} ({patch.role})")
            continue
        if patch.role == "wrapped":
            told.append(f"wrapped     {patch.target}: fits any source")
            continue
        digest = source_digest(source)
        if digest in patch.reviewed:
            told.append(f"reviewed    {patch.target}: {digest}, as in {patch.reviewed[digest]}")
            continue
        told.append(f"unreviewed  {patch.target}: {digest} ({patch.role})")
        if reviewed is not None:
            before = _find_source(reviewed, patch.target).splitlines()
            told += difflib.unified_diff(before, source.splitlines(), "reviewed", "here", lineterm="", n=2)
    return told


def main(argv: list[str] | None = None) -> int:
    """Print the report; exit code 1 if a source that numbers depend on was not reviewed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviewed", type=Path, metavar="DIR")
    reviewed = parser.parse_args(argv).reviewed
    import megatron.core

    from megatron_balance.patches.selection import every

    here = Path(str(megatron.core.__file__)).parents[2]
    told = lines(every(), here, reviewed)
    sys.stdout.write("\n".join([f"megatron-core {megatron.core.__version__} in {here}", *told]) + "\n")
    return 1 if any(line.startswith(("unreviewed", "missing")) and "(numbers)" in line for line in told) else 0


if __name__ == "__main__":
    sys.exit(main())

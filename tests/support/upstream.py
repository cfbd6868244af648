"""Other projects' files that `scripts/setup_env.sh` unpacked, and signatures read from them."""

# Signatures are read, not imported: their packages need a GPU, and libraries of their own.

import ast
import copy
import inspect
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "upstream"
TRANSFORMER_ENGINE, FLASH_ATTN_4 = "transformer_engine-2.17.1", "flash_attn_4-4.0.0b11"
FLA, MAMBA, LIGER = "fla_core-0.6.0", "mamba_ssm-2.3.2.post1", "liger_kernel-0.8.5"
# Stands for a default that is an expression.
NOT_LITERAL = "..."


def folder(wheel: str) -> Path:
    # The folder of a wheel; the test skips where the wheel could not be had.
    if not (FOLDER / wheel).is_dir():
        pytest.skip(f"{wheel} is not unpacked in {FOLDER}: scripts/setup_env.sh fetches it from the package index")
    return FOLDER / wheel


def parsed(wheel: str, path: str) -> ast.Module:
    # A file of a wheel; the test skips where the wheel could not be had.
    return ast.parse((folder(wheel) / path).read_text(encoding="utf-8"))


def found(module: ast.Module, name: str) -> ast.AST:
    # A function or class by name, `Class.method` too, or the value of a top-level name.
    #
    # Raises: AssertionError: it is not there.
    body: list[ast.stmt] = module.body
    node: ast.AST | None = None
    for part in name.split("."):
        node = next((n for n in body if getattr(n, "name", None) == part or _assigned(n) == part), None)
        assert node is not None, f"{name} is gone"
        body = getattr(node, "body", [])
    return node.value if isinstance(node, ast.Assign) else node  # pyright: ignore[reportReturnType]


def _assigned(node: ast.stmt) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else None


def signature(module: ast.Module, name: str) -> inspect.Signature:
    # A function's parameters, defaults that are literals with their values.
    function = found(module, name)
    assert isinstance(function, ast.FunctionDef), name
    given = copy.deepcopy(function.args)
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    given.defaults = [_literal(each) for each in given.defaults]
    given.kw_defaults = [each and _literal(each) for each in given.kw_defaults]
    return inspect.signature(eval(ast.unparse(ast.Lambda(given, ast.Constant(None)))))


def _literal(default: ast.expr) -> ast.expr:
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.Constant(NOT_LITERAL)
    return default


def keys(module: ast.Module, name: str) -> set[str]:
    # String keys of a top-level dictionary, and the attributes among its keys by their last name.
    value = found(module, name)
    assert isinstance(value, ast.Dict), name
    return {ast.unparse(key).strip("'\"") for key in value.keys if key is not None}

"""The digest of a function's source: of what it does, not of how it is written down."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

_NOT_CODE = ("kind", "type_comment", "type_ignores")
"""Fields of the syntax tree that say how something was written."""


@functools.cache  # finding a source reads its whole file
def digest_of(function: Callable[..., Any]) -> str:
    """`source_digest` of a function that Python can find the source of.

    Raises:
        OSError, TypeError: it cannot.
    """
    return source_digest(inspect.getsource(function))


def source_digest(source: str) -> str:
    """First 12 hex digits of the sha256 of a function's syntax tree.

    Comments, docstrings, layout and quotes do not count. It is the same in every version of Python
    that reads the same tree.
    """
    return hashlib.sha256(_canonical(ast.parse(textwrap.dedent(source))).encode()).hexdigest()[:12]


def _canonical(node: object) -> str:
    if isinstance(node, list):
        return f"[{', '.join(map(_canonical, node))}]"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _NOT_CODE}
    documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if documented and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    told = (f"{name}={_canonical(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({', '.join(told)})"

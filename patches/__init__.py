"""Replacements in Megatron-LM and Transformer Engine at run time, one module per target.

A patch is the last resort, after a subclass, a layer spec and a documented hook (docs/adr: seams
before patches). Every module here ends in `PATCHES`; `applied` checks the source of every target
against the source we reviewed before it changes any, and undoes all of them on exit.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron_balance.errors import PatchError

log = logging.getLogger(__name__)

Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

REVIEWED = "megatron-core 0.19.2"
"""The version whose sources the digests belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One replacement.

    `target` is "package.module:qualname". `wrap` is given the original and returns the replacement,
    so that the original stays callable. `digest` is `source_digest` of the original as reviewed.
    `why` says why no hook of Megatron does.
    """

    target: str
    wrap: Wrap
    digest: str
    why: str


def read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Change nothing: only the source must be the reviewed one; it is relied on elsewhere."""
    return original


def source_digest(source: str) -> str:
    """First 12 hex digits of the sha256 of a function's source, indentation and all."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


@contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[None]:
    """Apply all patches inside the block; none if the source of any target is not the one reviewed.

    Raises:
        PatchError: a target that is missing, patched twice, or whose source differs; names it.
    """
    originals = [(patch, *_find(patch)) for patch in patches]
    targets = [patch.target for patch in patches]
    if len(set(targets)) < len(targets):
        twice = sorted({t for t in targets if targets.count(t) > 1})
        raise PatchError(f"{', '.join(twice)}: patched twice; put the two changes into one wrap")
    undo: list[tuple[Any, str, Any]] = []
    try:
        for patch, owner, name, original in originals:
            kept = vars(owner)[
                name
            ]  # a staticmethod or classmethod object where there is one, which getattr would unwrap
            replacement = patch.wrap(original)
            setattr(owner, name, staticmethod(replacement) if isinstance(kept, staticmethod) else replacement)
            undo.append((owner, name, kept))
            log.info("patched %s: %s", patch.target, patch.why)
        yield
    finally:
        for owner, name, kept in reversed(undo):
            setattr(owner, name, kept)


def _find(patch: Patch) -> tuple[Any, str, Callable[..., Any]]:
    module, _, qualname = patch.target.partition(":")
    *parents, name = qualname.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)
        source = inspect.getsource(original)
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise PatchError(
            f"{patch.target}: not found ({error}). Install {REVIEWED}, whose sources were reviewed"
        ) from error
    if name not in vars(owner):
        raise PatchError(f"{patch.target}: inherited, not defined there; patch the class that defines it")
    if (digest := source_digest(source)) != patch.digest:
        raise PatchError(
            f"{patch.target}: its source is not the one reviewed (digest {digest}, reviewed {patch.digest} of "
            f"{REVIEWED}). "
            f"Nothing was patched. Install {REVIEWED}, or review the new source and change the digest in patches/"
        )
    return owner, name, original

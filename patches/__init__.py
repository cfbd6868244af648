"""Replacements in Megatron-LM and Transformer Engine at run time.

A patch is the last resort, after a subclass, a layer spec and a documented hook (docs/adr: seams
before patches). `training_loop`, `layers` and `machine` hold them, by what needs them; `selection`
names those of a run. `applied` checks all of them before it changes any, and undoes all on exit.
"""

import ast
import functools
import hashlib
import importlib
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from megatron_balance.errors import PatchError

log = logging.getLogger(__name__)

Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


# How much a patch relies on the source of its target. `numbers`: what is trained depends on it;
# only reviewed sources, and those that the configuration accepts. `wrapped`: the replacement calls
# the original, whatever it does; only its parameters count. `observed`: nothing that is trained
# depends on it; another source is a warning, and one that is missing is left out.
Role: TypeAlias = Literal["numbers", "wrapped", "observed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One replacement."""

    # "package.module:qualname".
    target: str
    # Why no hook of Megatron does.
    why: str
    # Is given the original and returns the replacement, so that the original stays callable; None:
    # it stays, and its source is relied on elsewhere.
    wrap: Wrap | None = None
    role: Role = "numbers"
    # The versions of Megatron-core by `source_digest` of the sources that were read.
    reviewed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # The names that a wrapper hands on or reads.
    parameters: tuple[str, ...] = ()


def handed_on(change: Callable[[Any], Any]) -> Wrap:
    """A wrap that gives `change` of what the original returns."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(original(*args, **kwargs))

        return changed

    return wrap


def followed_by(then: Callable[[Any, Mapping[str, Any]], None]) -> Wrap:
    """A wrap that calls `then` behind the original, with its result and its arguments by name."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def both(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then(result, signature.bind(*args, **kwargs).arguments)
            return result

        return both

    return wrap


class _Found(NamedTuple):
    patch: Patch
    owner: Any
    name: str
    original: Callable[..., Any]


@contextmanager
def applied(
    patches: Sequence[Patch], accepted: Mapping[str, str] = MappingProxyType({}), source: str = "the configuration"
) -> Iterator[tuple[str, ...]]:
    """Apply all patches inside the block; none if one of them does not fit. Yields the targets
    whose source was accepted without review: `accepted` has digests by target, `source` names its
    file.

    PatchError: targets that are missing, patched twice, have other parameters, or a source that was
    neither reviewed nor accepted; names all of them.
    """
    targets = [patch.target for patch in patches]
    if len(set(targets)) < len(targets):
        twice = sorted({t for t in targets if targets.count(t) > 1})
        raise PatchError(f"{', '.join(twice)}: patched twice; put the two changes into one wrap")
    found, unreviewed, fault = _check(patches, accepted, source)
    if fault is not None:
        raise PatchError(fault)
    undo: list[tuple[Any, str, Any]] = []
    try:
        for patch, owner, name, original in found:
            if patch.wrap is not None:
                # A staticmethod or classmethod object where there is one, which getattr would unwrap.
                kept = vars(owner)[name]
                replacement = patch.wrap(original)
                setattr(owner, name, staticmethod(replacement) if isinstance(kept, staticmethod) else replacement)
                undo.append((owner, name, kept))
            log.info("patched %s: %s", patch.target, patch.why)
        yield unreviewed
    finally:
        for owner, name, kept in reversed(undo):
            setattr(owner, name, kept)


def fault_of(
    patches: Sequence[Patch], accepted: Mapping[str, str] = MappingProxyType({}), source: str = "the configuration"
) -> str | None:
    """The reasons for which `applied` would refuse these patches, in one sentence; None: none."""
    return _check(patches, accepted, source, tell=False)[2]


def _check(
    patches: Sequence[Patch], accepted: Mapping[str, str], source: str, *, tell: bool = True
) -> tuple[list[_Found], tuple[str, ...], str | None]:
    """The targets, those accepted without review, and why not all can be patched; `tell`: a log."""
    warn = log.warning if tell else log.debug
    found: list[_Found] = []
    unreviewed: list[str] = []
    faults: list[str] = []
    unknown: dict[str, str] = {}
    for patch in patches:
        try:
            at = _find(patch)
        except PatchError as error:
            if patch.role == "observed":
                warn("%s; left out, since no number depends on it", error)
            else:
                faults.append(str(error))
            continue
        found.append(at)
        digest = "" if patch.role == "wrapped" else _digest_of(at.original)
        if patch.role == "wrapped" or digest in patch.reviewed:
            continue
        if patch.role == "observed":
            warn("%s: its source (%s) is not one that was reviewed; no number depends on it", patch.target, digest)
        elif accepted.get(patch.target) == digest:
            unreviewed.append(patch.target)
            warn("%s: its source (%s) was not reviewed; %s accepts it", patch.target, digest, source)
        else:
            unknown[patch.target] = digest
            reviewed = ", ".join(f"{known} of {version}" for known, version in patch.reviewed.items())
            faults.append(f"{patch.target}: its source has digest {digest}, reviewed were {reviewed}")
    fault = None
    if faults:
        fault = f"this Megatron differs from what was reviewed, nothing was patched: {'; '.join(faults)}"
        fault += _advice(unknown, source) if unknown else ""
    return found, tuple(unreviewed), fault


def _advice(unknown: Mapping[str, str], source: str) -> str:
    keys = ", ".join(f'"{target}": "{digest}"' for target, digest in unknown.items())
    return (
        ". See what changed with 'megatron-balance doctor --patches', and install a reviewed version or accept the "
        f"changes in {source}: accepted_sources: {{{keys}}}"
    )


def _find(patch: Patch) -> _Found:
    """The target of a patch; PatchError: there is none, it is inherited, or it lacks a parameter."""
    module, _, qualname = patch.target.partition(":")
    *parents, name = qualname.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, name)
        _digest_of(original)
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise PatchError(f"{patch.target}: not found ({error})") from error
    if name not in vars(owner):
        raise PatchError(f"{patch.target}: inherited, not defined there; patch the class that defines it")
    taken = inspect.signature(original).parameters
    missing = [each for each in patch.parameters if each not in taken]
    if missing:
        raise PatchError(f"{patch.target}: expected a parameter {', '.join(missing)}, it takes {', '.join(taken)}")
    return _Found(patch, owner, name, original)


_NOT_CODE = ("kind", "type_comment", "type_ignores")  # fields of the syntax tree that say how something was written


@functools.cache  # finding a source reads its whole file
def _digest_of(function: Callable[..., Any]) -> str:
    """`source_digest` of a function; OSError, TypeError: Python does not find its source."""
    return source_digest(inspect.getsource(function))


def source_digest(source: str) -> str:
    """First 12 hex digits of the sha256 of a function's syntax tree: of what it does, not of comments,
    docstrings, layout or quotes. It is the same in every version of Python that reads the same tree.
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

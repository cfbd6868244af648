"""Patches: reviewed sources only, all or nothing, undone on exit."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest

from megatron_balance.errors import PatchError
from megatron_balance.patches import REVIEWED, Patch, applied, source_digest

pytestmark = pytest.mark.megatron

MODULES = (
    "arguments",
    "checkpoint_args",
    "context_parallel_groups",
    "data_iterator",
    "dataset_helpers",
    "forward_backward",
    "moe_aux_loss",
    "moe_splits",
    "ping_pong",
    "pretrain",
    "stage_transfers",
    "te_attention",
    "torch_norm",
    "training_log",
)
FOLDER = Path(__file__).resolve().parents[2] / "patches"


def patches() -> list[Patch]:
    return [patch for name in MODULES for patch in importlib.import_module(f"megatron_balance.patches.{name}").PATCHES]


def victim(value: int) -> int:
    return value + 1


def other_victim(value: int) -> int:
    return value + 2


class Owner:
    @staticmethod
    def static(value: int) -> int:
        return value + 3


def patch_of(function: object, qualname: str, digest: str | None = None) -> Patch:
    source = inspect.getsource(function)  # pyright: ignore[reportArgumentType]
    return Patch(
        target=f"{__name__}:{qualname}",
        wrap=lambda original: lambda value: 10 * original(value),
        digest=digest or source_digest(source),
        why="a test",
    )


def test_every_module_of_the_folder_is_listed() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "selection")) == sorted(
        MODULES
    )


def test_the_pinned_megatron_is_the_reviewed_one() -> None:
    assert f"megatron-core {importlib.metadata.version('megatron-core')}" == REVIEWED


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.target)
def test_the_digest_is_that_of_the_pinned_source(patch: Patch) -> None:
    assert source_digest(source_of(patch.target)) == patch.digest
    assert len(patch.why) > 20


def source_of(target: str) -> str:
    """Source of a target; read from the file where the class cannot be made without Transformer
    Engine.
    """
    module_name, _, qualname = target.partition(":")
    module = importlib.import_module(module_name)
    if "transformer_engine" not in module_name:
        return inspect.getsource(functools.reduce(getattr, qualname.split("."), module))
    text = Path(str(module.__file__)).read_text()
    class_name, name = qualname.split(".")
    owner = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    function = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert not function.decorator_list
    return "".join(text.splitlines(keepends=True)[function.lineno - 1 : function.end_lineno])


def test_a_patch_holds_inside_the_block_and_is_undone_after_it() -> None:
    before = victim
    with applied([patch_of(victim, "victim"), patch_of(Owner.static, "Owner.static")]):
        assert victim(1) == 20
        assert Owner.static(1) == Owner().static(1) == 40
    assert victim is before
    assert Owner.static(1) == Owner().static(1) == 4


def test_a_patch_is_undone_when_the_block_fails() -> None:
    with pytest.raises(RuntimeError, match="inside"), applied([patch_of(victim, "victim")]):
        raise RuntimeError("inside")
    assert victim(1) == 2


def test_another_source_is_refused_by_name_and_nothing_is_patched() -> None:
    stale = patch_of(other_victim, "other_victim", digest="0123456789ab")
    with pytest.raises(PatchError, match=r"other_victim.*0123456789ab"), applied([patch_of(victim, "victim"), stale]):
        pytest.fail("the block must not run")
    assert victim(1) == 2


def test_a_missing_target_is_refused_by_name() -> None:
    gone = Patch(target=f"{__name__}:Owner.gone", wrap=lambda original: original, digest="0" * 12, why="a test")
    with pytest.raises(PatchError, match=r"Owner\.gone"), applied([gone]):
        pytest.fail("the block must not run")


def test_one_target_is_patched_once() -> None:
    with pytest.raises(PatchError, match="patched twice"), applied([patch_of(victim, "victim")] * 2):
        pytest.fail("the block must not run")

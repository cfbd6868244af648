"""Megatron's compiled dataset helpers, which its wheel ships without their Makefile."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

from megatron_balance.patches import Patch

log = logging.getLogger(__name__)


def skip_when_compiled(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """`compile_helpers` only where there is a Makefile, or no compiled module."""

    @functools.wraps(compile_helpers)
    def checked() -> None:
        spec = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
        folder = Path(compile_helpers.__code__.co_filename).parent
        if spec is None or (folder / "Makefile").exists():
            compile_helpers()
        else:
            log.info("dataset helpers are compiled already and there is no Makefile beside them; not running make")

    return checked


PATCHES = (
    Patch(
        target="megatron.core.datasets.utils:compile_helpers",
        wrap=skip_when_compiled,
        role="observed",
        reviewed={"834469025eba": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why="the wheel has helpers_cpp compiled but no Makefile, so Megatron would stop at start-up",
    ),
)

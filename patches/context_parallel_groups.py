"""Process groups of plans: a pool for each data-parallel x context-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron import session
from megatron_balance.patches import Patch, read


def with_pools(initialize_model_parallel: Callable[..., Any]) -> Callable[..., Any]:
    """`initialize_model_parallel`, after which every rank is in its pool's groups."""

    @functools.wraps(initialize_model_parallel)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = initialize_model_parallel(*args, **kwargs)
        session.current().make_pools()
        return result

    return initialize


PATCHES = (
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        wrap=with_pools,
        role="wrapped",
        why=(
            "Megatron's context-parallel groups are fixed slices of the world; a plan's rings run over any ranks of a "
            "pool, and "
            "groups must be made by all ranks at once, right after Megatron's own"
        ),
    ),
    Patch(
        target="megatron.core.parallel_state:update_pg_timeout",
        wrap=read,
        role="observed",
        reviewed={"8803be35dab8": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why="it sets the timeout of all groups in Megatron's list, to which `megatron.groups` adds those of the pools",
    ),
)

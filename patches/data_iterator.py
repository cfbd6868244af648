"""Data iterators that deliver whole documents, so that a plan knows where each sequence begins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron.documents import choose_provider
from megatron_balance.patches import Patch


def from_documents(build_iterators: Callable[..., Any]) -> Callable[..., Any]:
    """`build_train_valid_test_data_iterators` over our document data set if there is a corpus."""

    @functools.wraps(build_iterators)
    def build(build_train_valid_test_datasets_provider: Callable[..., Any]) -> Any:
        return build_iterators(choose_provider(build_train_valid_test_datasets_provider))

    return build


PATCHES = (
    Patch(
        target="megatron.training.training:build_train_valid_test_data_iterators",
        wrap=from_documents,
        role="wrapped",
        parameters=("build_train_valid_test_datasets_provider",),
        why=(
            "a script's own provider joins documents inside samples of fixed length; a planner needs whole sequences "
            ""
            "and their lengths"
        ),
    ),
)

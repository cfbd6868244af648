"""Data iterators that deliver whole documents, so that a plan knows where each sequence begins."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron import session
from megatron_balance.megatron.data import DocumentBlend, DocumentDataset, make_provider, names_corpus
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


log = logging.getLogger(__name__)


def choose_provider(given: Callable[..., Any]) -> Callable[..., Any]:
    """Our document provider if the command line names a corpus, else `given`; the log says why."""
    job = session.current()
    kept = job.config.data == "script"
    replace = names_corpus(job.args) and not kept
    job.script_data.kept = not replace and getattr(given, "func", given).__module__ != DocumentDataset.__module__
    provider: Callable[..., Any] = make_provider(job.config.documents, job.config.sample_filling) if replace else given
    named = getattr(given, "__qualname__", None) or repr(given)
    if not replace:
        log.warning(
            "data: %s of the script is kept, since %s; a sequence begins where its position_ids are 0 (with "
            "--reset-position-ids at every document), and batches cannot be planned ahead",
            named,
            "the configuration says so" if kept else "no --data-path is given",
        )
    elif getattr(given, "func", given).__module__ != DocumentDataset.__module__:
        log.warning(
            "data: %s of the script is replaced by whole documents of the corpora (%s)", named, job.config.documents
        )

    def build(*args: Any, **kwargs: Any) -> Any:
        train, valid, test = provider(*args, **kwargs)
        job.train_data = train if isinstance(train, (DocumentDataset, DocumentBlend)) else None
        if job.script_data.kept and train is not None:  # model chunks in the middle have none
            job.script_data.dataset = train
        return train, valid, test

    if getattr(provider, "is_distributed", False):
        build.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    return build

"""The data set provider of a run: ours wherever there is a corpus, the script's own otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_balance.megatron import session
from megatron_balance.megatron.corpora import CORPUS_OPTIONS
from megatron_balance.megatron.data import DocumentBlend, DocumentDataset, make_provider

log = logging.getLogger(__name__)


def names_corpus(args: Any) -> bool:
    """Whether the command line names a corpus, in any way."""
    return any(getattr(args, name, None) for name in CORPUS_OPTIONS)


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

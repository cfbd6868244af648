"""The laboratory: published numbers beside ours, and the page of a report."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """Items one after another, with a progress bar where someone looks."""

    def __call__(self, items: Sequence[T], what: str, /) -> Iterable[T]: ...

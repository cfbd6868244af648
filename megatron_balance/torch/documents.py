"""Documents, rollouts and trees as a user gives them, as rows of integers that travel in the pool.

A row is a token: its id, its label, and the bytes of whatever else the document has for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import index
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_balance.errors import BalanceError, DataError
from megatron_balance.ir import forest
from megatron_balance.ir.forest import Tree, checked, num_tokens
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import Sequences
from megatron_balance.workloads.rollouts import IGNORED, Rollouts, as_trees

# Token ids [n], or a tuple of them and of other tensors per token: (tokens, labels, others [n,
# ...]). Whatever `torch.as_tensor` takes is a tensor here.
Document: TypeAlias = Any
# What a microbatch is a list of; with weights, rollouts are a tuple (rollouts, weights).
Of: TypeAlias = Literal["documents", "trees", "rollouts"]
TOKEN, LABEL = range(2)  # columns of a row; those of other tensors follow
WORD = 8  # bytes of a column


@dataclass(frozen=True, slots=True)
class Form:
    """Types, and shapes for one token, of the tensors behind tokens and labels; equal on all ranks."""

    others: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def columns(self) -> list[int]:
        """Of each tensor, the number of its columns."""
        return [-(-_bytes(*each) // WORD) for each in self.others]

    @property
    def num_columns(self) -> int:
        """Of a row: C."""
        return LABEL + 1 + sum(self.columns)

    def others_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The other tensors [T, ...] of rows [T, C]."""
        made: list[Tensor] = []
        parts = rows[:, LABEL + 1 :].split(self.columns, dim=1)
        for (dtype, shape), part in zip(self.others, parts, strict=True):
            held = part.contiguous().view(torch.uint8)[:, : _bytes(dtype, shape)].contiguous()
            made.append(held.view(getattr(torch, dtype)).reshape(len(rows), *shape))
        return tuple(made)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return getattr(torch, dtype).itemsize * prod(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A document as tensors: ids and labels int64 [n], others [n, ...]; on the host. `tree`: its
    segments; None: it is a plain one.
    """

    tokens: Tensor
    labels: Tensor
    others: tuple[Tensor, ...] = ()
    tree: Tree | None = None

    @property
    def form(self) -> Form:
        return Form(tuple((str(x.dtype).removeprefix("torch."), tuple(x.shape[1:])) for x in self.others))

    def rows(self) -> Tensor:
        """Rows [n, C]."""
        columns = [torch.stack([self.tokens, self.labels], dim=1)]
        for x in self.others:
            held = x.reshape(len(x), prod(x.shape[1:])).contiguous().view(torch.uint8)
            words = -(-held.shape[1] // WORD)
            columns.append(
                F.pad(held, (0, words * WORD - held.shape[1])).flatten().view(torch.int64).view(len(x), words)
            )
        return torch.cat(columns, dim=1)


def _parts_of(document: Document, *, shift_labels: bool) -> Parts:
    """The tensors of a document. Labels are the token ids, unless others are given; with
    `shift_labels` the label of a token is the next one's, and that of the last `IGNORED`; else they
    are those of the model's outputs, and must be given. DataError: it is none.
    """
    given = document if isinstance(document, tuple) else (document,)
    if not given:
        raise DataError("expected token ids [n] or a tuple that begins with them, got an empty tuple")
    try:
        tokens, *rest = (torch.as_tensor(each).detach().cpu() for each in given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"expected tensors of integers, got {type(document).__name__}: {error}") from None
    if tokens.ndim != 1 or not len(tokens) or not _is_integer(tokens):
        raise DataError(
            f"expected token ids [n] of integers, at least one, got {tuple(tokens.shape)} of {tokens.dtype}; give each "
            "document by itself and without padding, and leave out empty ones"
        )
    lengths = [len(each) if each.ndim else 0 for each in rest]
    if any(length != len(tokens) for length in lengths):
        raise DataError(
            f"expected tensors with one entry for each of {len(tokens)} tokens, got {lengths}; a document is a tuple "
            "(tokens, labels, others ...)"
        )
    if not rest and not shift_labels:
        raise DataError("expected (tokens, labels, ...) with shift_labels=False, got tokens alone; give labels too")
    labels = rest[0] if rest else tokens
    if labels.ndim != 1 or not _is_integer(labels):
        raise DataError(f"expected labels [n] of integers, got {tuple(labels.shape)} of {labels.dtype}")
    labels = F.pad(labels[1:].long(), (0, 1), value=IGNORED) if shift_labels else labels.long()
    return Parts(tokens.long(), labels, tuple(rest[1:]))


def _is_integer(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex() and values.dtype != torch.bool


def _read(microbatches: Sequence[Sequence[Document]], *, shift_labels: bool) -> list[list[Parts]]:
    """The documents of each microbatch. Raises DataError with the number of what is none."""
    made: list[list[Parts]] = []
    for microbatch in microbatches:
        if isinstance(microbatch, (Tensor, np.ndarray, str, bytes, Mapping)) or not isinstance(microbatch, Iterable):
            raise DataError(f"expected a list of documents, got a {type(microbatch).__name__}; put it into a list")
        made.append([])
        for at, document in enumerate(microbatch):
            try:
                made[-1].append(_parts_of(document, shift_labels=shift_labels))
            except DataError as error:
                raise DataError(f"document {at}: {error}") from None
    return made


def sequences(parts: Sequence[Sequence[Parts]], form: Form | None) -> list[Sequences]:
    """By microbatch, the documents' rows, of the columns that the ranks agreed on."""
    width = (form or Form()).num_columns
    return [
        Sequences.of(
            [each.rows() for each in of],
            width,
            [each.tree or forest.document(len(each.tokens)) for each in of] if any(each.tree for each in of) else (),
        )
        for of in parts
    ]


def _is_full(kind: Any) -> bool:
    if isinstance(kind, str) and kind not in ("causal", "full"):
        raise DataError(f'expected "causal", "full" or whether a segment is full, got {kind!r}')
    return kind == "full" if isinstance(kind, str) else bool(kind)


def _read_trees(trees: Sequence[Document]) -> list[Parts]:
    """Trees (tokens, labels, segments, others ...). DataError with the number of what is none."""
    made: list[Parts] = []
    for at, given in enumerate(trees):
        try:
            if not isinstance(given, tuple) or len(given) < 3:
                raise DataError("expected a tuple (tokens, labels, segments, others ...)")
            tokens, labels, segments, *others = given
            parts = _parts_of((tokens, labels, *others), shift_labels=False)
            (tree,) = checked([[(int(length), int(parent), _is_full(kind)) for length, parent, kind in segments]])
            if num_tokens(tree) != len(parts.tokens):
                raise DataError(f"segments of {num_tokens(tree)} tokens, and {len(parts.tokens)} tokens")
        except (BalanceError, TypeError, ValueError) as error:
            raise DataError(f"tree {at}: {error}") from None
        made.append(replace(parts, tree=tree))
    return made


def _read_rollouts(rollouts: Sequence[Any], weights: Sequence[Any] | None) -> tuple[Rollouts, list[Parts]]:
    """Rollouts and their trees; with `weights` the rows' are the one further tensor (float64).
    DataError: they are none.
    """
    if isinstance(rollouts, (Tensor, np.ndarray, str, bytes, Mapping)) or not isinstance(rollouts, Sequence):
        raise DataError(f"expected a list of rollouts, got a {type(rollouts).__name__}; put it into a list")
    made = as_trees([each.cpu() if isinstance(each, Tensor) else each for each in rollouts])
    return made, _trees_of(made, weights)


def _trees_of(made: Rollouts, weights: Sequence[Any] | None) -> list[Parts]:
    """Of each tree of rollouts its tensors; as `_read_rollouts`."""
    columns = [torch.from_numpy(made.tokens), torch.from_numpy(made.labels)]
    if weights is not None:
        given = [each.detach().cpu() if isinstance(each, Tensor) else each for each in weights]
        columns.append(torch.from_numpy(made.weights(given)))
    sizes = list(map(num_tokens, made.trees))
    parts = zip(*(column.split(sizes) for column in columns), made.trees, strict=True)
    return [Parts(ids, labels, tuple(others), tree) for ids, labels, *others, tree in parts]


def read_samples(samples: Mapping[int, Any], *, shift_labels: bool) -> tuple[dict[int, Parts], dict[int, Rollouts]]:
    """By number, the samples of a planned step (`SequenceBalancer.from_plan`), and of those that are
    rollouts these. DataError with the number of what is none.
    """
    if not isinstance(samples, Mapping):
        raise DataError(f"expected samples by their number in the plan, in a dict, got a {type(samples).__name__}")
    parts: dict[int, Parts] = {}
    rollouts: dict[int, Rollouts] = {}
    for key, given in samples.items():
        number = index(key)
        try:
            made, *weights = given if isinstance(given, tuple) and given else (given,)
            if not isinstance(made, Rollouts):
                parts[number] = _parts_of(given, shift_labels=shift_labels)
                continue
            if len(made.trees) != 1 or len(weights) > 1:
                raise DataError(
                    f"expected as_trees of the rollouts of one tree, or a tuple of that and weights, got "
                    f"{len(made.trees)} trees and {len(weights)} more"
                )
            rollouts[number], (parts[number],) = made, _trees_of(made, weights[0] if weights else None)
        except DataError as error:
            raise DataError(f"sample {number}: {error}") from None
    if rollouts and len(rollouts) != len(parts):
        raise DataError(f"expected rollouts alone, or none, got {len(rollouts)} of {len(parts)} samples")
    return parts, rollouts


def read_as(
    of: Of, microbatches: Sequence[Sequence[Document]], *, shift_labels: bool
) -> tuple[list[list[Parts]], list[Rollouts]]:
    """The documents of each microbatch; of rollouts, these as trees, too. DataError: it is none."""
    if of == "documents":
        return _read(microbatches, shift_labels=shift_labels), []
    if of == "trees":
        return [_read_trees(trees) for trees in microbatches], []
    given: list[tuple[Any, ...]] = [each if isinstance(each, tuple) else (each, None) for each in microbatches]
    if any(len(each) != 2 for each in given):
        raise DataError("expected a list of rollouts, or a tuple (rollouts, weights), for each microbatch")
    made = [_read_rollouts(*each) for each in given]
    return [parts for _, parts in made], [rollouts for rollouts, _ in made]


def check_form(documents: Sequence[Sequence[Parts]], form: Form | None) -> Form | None:
    """The form of this rank's documents, or `form` where it has none; DataError where they differ."""
    for microbatch in documents:
        for at, document in enumerate(microbatch):
            form = form or document.form
            if document.form != form:
                raise DataError(
                    f"document {at}: expected for each token, behind token and label, {_told(form)}, as the documents "
                    f"before it; got {_told(document.form)}"
                )
    return form


def agree_form(mine: Form | None, pool: Pool) -> Form | None:
    """The form of all ranks' documents; None: unknown yet. Collective. DataError: forms differ."""
    forms: list[Form | None] = [mine] * pool.size
    if pool.size > 1:
        dist.all_gather_object(forms, mine, group=pool.groups.pool)
    return same_form(forms, pool)


def same_form(forms: Sequence[Form | None], pool: Pool) -> Form | None:
    """The form that ranks of a pool have; None: none has any. DataError: forms differ."""
    known = {form: pool.groups.ranks[rank] for rank, form in reversed(list(enumerate(forms))) if form is not None}
    if len(known) > 1:
        told = ", ".join(f"rank {rank} has {_told(form)}" for form, rank in known.items())
        raise DataError(f"expected documents with the same tensors for each token on all ranks, but {told}")
    return next(iter(known), None)


def _told(form: Form) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for dtype, shape in form.others) or "nothing"

"""Positions in Transformers' models: those of a token in its document, not of a row on its rank.

Most models rotate by `position_ids`, or look them up, and need nothing. The others take something
from the row that they compute, which here holds pieces of documents: a table by its longest
position (`dynamic` and `longrope` RoPE), positions counted from the padding token on (RoBERTa's
kind), a temperature by row number (Llama 4). Those that can be had for each document by itself are;
`treated` refuses the rest.

The modules that need it are given another `forward` when a model is made with balanced attention
(`watch`). It finds the batch by the memory of its `position_ids`, the one thing of a batch that
reaches them through an unmodified model; on any other positions it is the module's own.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import disable

from megatron_balance.errors import ConfigError
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.forest import Forest
from megatron_balance.torch.batch import BalancedBatch, in_backward

_batches: WeakValueDictionary[int, BalancedBatch] = WeakValueDictionary()  # by the address of their `position_ids`

# Of each batch, the models that took its positions by document: their `MARK`s.
_models: WeakKeyDictionary[BalancedBatch, set[object]] = WeakKeyDictionary()
MARK = "balanced_model"  # attribute of all modules of a treated model: its `_Treated`


class _Treated:
    """A treated model. `batch`: of the forward that runs, or ran last, while somebody holds it."""

    batch: Callable[[], BalancedBatch | None] | None = None

    def __reduce__(self) -> "tuple[type[_Treated], tuple[()]]":  # models are copied and saved; batches are not
        return _Treated, ()


def begin_forward(model: nn.Module, batch: BalancedBatch | None) -> None:
    """Note the batch of a forward of a model; None: it has none."""
    if mark := getattr(model, MARK, None):
        mark.batch = None if batch is None else ref(batch)


def running(module: nn.Module) -> BalancedBatch | None:
    """The batch of the forward in which a module attends; None: of none."""
    # For models that hand no keywords through to it (StableLM, Nemotron). Computed again in a
    # backward: none, since the model may have run on another batch.
    mark = getattr(module, MARK, None)
    if mark is None or mark.batch is None or in_backward():
        return None
    return mark.batch()


def announce(batch: BalancedBatch) -> None:
    """Let the modules of a model know the batch by its positions."""
    _batches[batch.position_ids.data_ptr()] = batch


@cache
def watch(attention: str, prepare: Callable[[nn.Module], None]) -> None:
    """Prepare every model that is made with this attention from now on, or is set to it."""
    from transformers import PreTrainedModel

    def then_prepare(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def of_model(model: Any, *args: Any, **named: Any) -> Any:
            found = method(model, *args, **named)
            if attention in (found, getattr(model.config, "_attn_implementation", None)):
                prepare(model)
            return found

        return of_model

    # a constructor ends with one; set_attn_implementation calls the other, though looked up before
    for name in ("post_init", "_check_and_adjust_attn_implementation"):
        if not hasattr(PreTrainedModel, name):
            raise ConfigError(f"expected transformers 5.23, whose PreTrainedModel has {name}; this one's has it not")
        setattr(PreTrainedModel, name, then_prepare(getattr(PreTrainedModel, name)))


def treat(model: nn.Module) -> None:
    """Give modules that take positions from the row another `forward`. Safe to call twice."""
    mark = _Treated()
    for module in model.modules():
        setattr(module, MARK, mark)
        if "forward" in vars(module):
            continue
        if hasattr(module, "original_max_seq_len") and any(_by_length(rope) for _, rope in _ropes(module.config)):
            module.forward = partial(_rotate, module)
        elif _counts_from_padding(kind_of(module)):
            module.forward = partial(_embed, module)


def treated(module: nn.Module, query: Tensor, batch: BalancedBatch) -> Tensor:
    """Queries [1, H, T, D] of an attention module, with the temperature of their positions.
    ConfigError, on all ranks alike: positions of this model are those of the row.
    """
    name, config, file = type(module).__name__, getattr(module, "config", None), _file(kind_of(module))
    if getattr(module, MARK, None) not in _models.get(batch, ()):
        _check_untreated(name, config, file, batch)
    if _takes_no_positions(file):
        raise ConfigError(
            f"{name}: its model takes no position_ids: it numbers the rows that a rank holds, which are pieces of "
            "documents. Use a model that takes them"
        )
    if getattr(config, "token_dropout", False):
        raise ConfigError(
            f"{name}: token_dropout scales by the share of masked tokens of a row, which holds pieces of documents; "
            "set token_dropout=False"
        )
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    row = torch.arange(batch.num_rows, device=query.device)
    floor_scale, attn_scale = float(module.floor_scale), float(module.attn_scale)  # pyright: ignore[reportArgumentType]
    right, of_row = (
        torch.log1p(((at.float() + 1) / floor_scale).floor()) * attn_scale + 1 for at in (batch.position_ids, row)
    )
    return (query * (right / of_row)[:, None]).to(query.dtype)


# Tables of frequencies by the length of a document


def _ropes(config: object) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """The parameters of each RoPE of a configuration, by its type of layers; None: of all."""
    said = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(said, Mapping):
        return
    nested = {kind: rope for kind, rope in said.items() if isinstance(rope, Mapping)}
    yield from nested.items() if nested else ((None, said),)


def _type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type")))


def _by_length(rope: Mapping[str, Any]) -> bool:
    """Whether Transformers gives a longer row other frequencies, or another scale (Phi-3.5 MoE)."""
    return "dynamic" in _type(rope) or _type(rope) == "longrope" or "long_mscale" in rope


def _original_length(config: object, rope: Mapping[str, Any]) -> int:
    """Tokens of a document up to which its table is the original one, as Transformers has it."""
    said = None if "dynamic" in _type(rope) else rope.get("original_max_position_embeddings")
    found = getattr(config, "max_position_embeddings", None) if said is None else said
    if not isinstance(found, int):
        raise ConfigError(
            f"{type(config).__name__}: RoPE {_type(rope)} changes with a document's length, and the "
            "configuration does not say from which on; give original_max_position_embeddings"
        )
    return found


def _check_untreated(name: str, config: object, file: object, batch: BalancedBatch) -> None:
    longest = batch.longest
    for _, rope in _ropes(config):
        if _by_length(rope) and longest > (original := _original_length(config, rope)):
            raise ConfigError(
                f"{name}: RoPE {_type(rope)} has another table for documents above {original} tokens, the "
                f"longest here has {longest}, and the module that rotates was not seen to take each document's own; "
                "call hf.register(model)"
            )
    if _embeds_from_padding(file):
        raise ConfigError(
            f"{name}: its model counts positions from the padding token on, and its embedding was not seen to count "
            "those of each document; call hf.register(model)"
        )


@disable
def _rotate(rotary: Any, x: Tensor, position_ids: Tensor, *kind: str, **named: Any) -> Any:
    """The `forward` of a rotary module: each document by the table of its own length."""
    forward = type(rotary).forward
    batch = _batches.get(position_ids.data_ptr())
    layers = named.get("layer_type", kind[0] if kind else None)
    rope = dict(_ropes(rotary.config)).get(layers, {})
    if batch is None or position_ids.shape[-1] != batch.num_rows or not _by_length(rope):
        return forward(rotary, x, position_ids, *kind, **named)
    original = _original_length(rotary.config, rope)
    if batch.longest > original and isinstance(batch.plan.mask, Forest):
        raise ConfigError(
            f"RoPE {_type(rope)} has another table for documents above {original} tokens, and a row that rollouts of "
            f"several lengths share has none; the longest path here has {batch.longest} tokens. Give shorter "
            "rollouts, or each as a document"
        )
    lengths = np.maximum(np.array(batch.plan.lengths), original)
    if "dynamic" not in _type(rope):
        lengths = np.minimum(lengths, original + 1)  # two tables
    pieces = batch.layout()
    tables = np.full(batch.num_rows, original)
    tables[: batch.num_tokens] = np.repeat(
        lengths[pieces[:, Fragment.SEQ]], pieces[:, Fragment.STOP] - pieces[:, Fragment.START]
    )
    rotations: dict[Tensor, Any] = {}
    for table in np.unique(tables):
        rows = torch.from_numpy(np.flatnonzero(tables == table)).to(position_ids.device)
        last = position_ids.new_full((*position_ids.shape[:-1], 1), int(table) - 1)
        positions = torch.cat([position_ids[..., rows], last], dim=-1)
        rotations[rows] = forward(_unused(rotary), x, positions, *kind, **named)
    _models.setdefault(batch, set()).add(getattr(rotary, MARK))
    if isinstance(next(iter(rotations.values())), Tensor):
        return _joined(rotations, batch.num_rows)
    return tuple(
        _joined(dict(zip(rotations, parts, strict=True)), batch.num_rows)
        for parts in zip(*rotations.values(), strict=True)
    )


def _joined(rotations: Mapping[Tensor, Tensor], num_rows: int) -> Tensor:
    """Rotations [..., n + 1, D] of rows, without the last, as [..., T, D]."""
    first = next(iter(rotations.values()))
    whole = first.new_empty(*first.shape[:-2], num_rows, first.shape[-1])
    for rows, rotation in rotations.items():
        whole[..., rows, :] = rotation[..., :-1, :]
    return whole


def _unused(rotary: Any) -> Any:
    """A copy of a rotary module as it was before its first call, which other calls do not see."""
    made = copy.copy(rotary)
    made._buffers = {name: buffer.clone() for name, buffer in rotary._buffers.items()}
    for prefix in [""] if isinstance(rotary.rope_type, str) else [f"{kind}_" for kind in rotary.rope_type]:
        original = getattr(rotary, f"{prefix}original_inv_freq")
        made.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
        setattr(made, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
    return made


# Positions that an embedding counts


@cache
def _counts_from_padding(kind: type) -> bool:
    """Whether a class embeds positions that it counts from the padding token on (RoBERTa)."""
    counts = "create_position_ids_from_input_ids"
    if not issubclass(kind, nn.Module) or not (hasattr(kind, counts) or hasattr(_file(kind), counts)):
        return False
    return "Embeddings" in kind.__name__ and "position_ids" in inspect.signature(kind.forward).parameters


@disable
def _embed(embeddings: Any, *args: Any, **named: Any) -> Tensor:
    """The `forward` of an embedding that counts from the padding token on: by document."""
    call = inspect.signature(type(embeddings).forward).bind(embeddings, *args, **named)
    given = call.arguments.get("position_ids")
    batch = None if given is None else _batches.get(given.data_ptr())
    if batch is not None:
        # as Transformers counts them: padding tokens are passed over, and are at the padding's own
        counts = (batch.tokens != embeddings.padding_idx).long()
        call.arguments["position_ids"] = (batch.cumulative(counts) * counts + embeddings.padding_idx)[None]
        _models.setdefault(batch, set()).add(getattr(embeddings, MARK))
    return type(embeddings).forward(*call.args, **call.kwargs)


# What a model is made of, by the file of its attention


def kind_of(module: nn.Module) -> type:
    """The class of a module, under those that FSDP makes of it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch."))


def _file(kind: type) -> object:
    return sys.modules.get(kind.__module__)


def _classes(file: object) -> list[type]:
    return [each for each in vars(file).values() if isinstance(each, type)] if file else []


@cache
def _embeds_from_padding(file: object) -> bool:
    """Whether the models of a file have such an embedding."""
    return any(_counts_from_padding(each) for each in _classes(file))


@cache
def _takes_no_positions(file: object) -> bool:
    """Whether the models of a file take token ids, and none of them positions."""
    from transformers import PreTrainedModel

    models = [each for each in _classes(file) if issubclass(each, PreTrainedModel)]
    taken = [inspect.signature(each.forward).parameters.keys() for each in models]
    return any("input_ids" in each for each in taken) and not any("position_ids" in each for each in taken)

"""Balanced attention in Transformers' models, unmodified: registered by name.

model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=hf.register())
logits = model(**hf.inputs(batch)).logits[0]
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.compiler import disable

from megatron_balance.errors import ConfigError
from megatron_balance.ir.forest import Segment
from megatron_balance.ir.mask import CAUSAL, FULL, Mask, SlidingWindow
from megatron_balance.model_config import OWN_HEADS
from megatron_balance.torch import mixers, positions
from megatron_balance.torch.balancer import SequenceBalancer
from megatron_balance.torch.batch import BalancedBatch, balanced_attention
from megatron_balance.torch.leaks import LeakCheck, Leaks
from megatron_balance.torch.losses import LigerLoss, Losses, TokenLosses, liger_loss, token_losses
from megatron_balance.torch.settings import check_layer

NAME = "balanced"  # of the attention, as `attn_implementation` takes it
LOSSES = "balanced_losses"  # keyword of a forward that gives losses in place of logits

# Mask functions of Transformers: what their size is called, if they have one, and they in words.
LIMITS = {
    "sliding_window_overlay": ("sliding_window", "a sliding window"),
    "chunked_overlay": ("chunk_size", "attention inside chunks"),
    "sliding_window_bidirectional_overlay": ("sliding_window", "a window to both sides"),
    "or_masks": ("", "a union of masks, as of a prefix or of images"),
}

# Arguments of a forward that say where documents lie in a row, as collators without padding do.
OWN_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

# Arguments of Transformers' attention that change it, and that balanced attention does not have.
UNLIKE = ("position_bias", "head_mask", "indices", "block_indices", "sinks")


def register(model: torch.nn.Module | None = None) -> str:
    """Register the attention with Transformers, and return its name. Safe to call twice.

    Models that are made with the name, or set to it, refuse it where they take their attention from a
    table of their own (GPT-J, Falcon), refuse labels beside `inputs`, and take the positions of each
    document where they would take those of a rank's row (`positions`).

    Args:
        model: one that came by it otherwise.

    Raises:
        ConfigError: Transformers is missing, or too old to have an interface for attention.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ConfigError(
            f"expected transformers 5.0 or later, with its AttentionInterface: {error}; pip install "
            "megatron-balance[hf]"
        ) from None
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _asked_mask)
    positions.watch(NAME, _prepare)
    if model is not None:
        _prepare(model)
    return NAME


def _prepare(model: torch.nn.Module) -> None:
    """Make a model that has balanced attention ready for it. Safe to call twice."""
    _check_tables(type(model))
    positions.treat(model)
    mixers.treat(model)
    try:
        head: Any = cast("Any", model).get_output_embeddings()
    except AttributeError:  # asked in a constructor, or of a model without one
        head = None
    if isinstance(head, torch.nn.Linear) and "forward" not in vars(head):
        setattr(head, "forward", partial(_head, head))  # noqa: B010  of this module alone
    if _begin_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin_forward, with_kwargs=True)
    for inside in model.modules():
        if hasattr(inside, "post_init") and _ask_again not in inside._forward_pre_hooks.values():
            inside.register_forward_pre_hook(_ask_again, with_kwargs=True)


def _check_tables(model: type) -> None:
    """Refuse a model that finds the class of its attention by name, in a dict of its module."""
    for module in (sys.modules.get(base.__module__) for base in model.__mro__):
        for table, held in vars(module).items() if module else ():
            if isinstance(held, dict) and "eager" in held and NAME not in held:
                raise ConfigError(
                    f"{model.__name__} takes its attention from {table}, which knows {', '.join(map(str, held))}, and "
                    "not from Transformers' AttentionInterface, so it cannot be balanced; use a model that does"
                )


def _head(head: torch.nn.Linear, hidden: Tensor) -> Tensor | TokenLosses | LigerLoss:
    """The forward of a model's head: logits, or what `inputs(batch, losses=...)` asks for."""
    batch = positions.running(head)
    if batch is None or not batch.as_losses:
        return type(head).forward(head, hidden)
    made = liger_loss if batch.as_losses == "liger" else token_losses
    return made(hidden, head.weight, batch.labels, bias=head.bias)


def _begin_forward(model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    if NAME in given:
        if given.get("labels") is not None and given.get("shift_labels") is None:
            raise ConfigError(_OwnLoss.why)
        if any(map(_are_masks, (*args, given.get("attention_mask")))):
            raise ConfigError(f"expected no attention masks beside a batch, got a dict of them. {_NO_MASK}")
        _check_positions(model, args, given)  # pyright: ignore[reportCallIssue]
        given[NAME].as_losses = given.get(LOSSES, False)
    positions.begin_forward(model, given.get(NAME))


_AROUND = "asked_around"  # of a layer: what the model around its own asked for


def _ask_again(
    model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a model ask for its mask though the one around it (PaliGemma) handed it one: for masks it
    takes tensors alone.
    """
    del model
    asked = given.get("attention_mask")
    return (args, {**given, "attention_mask": None, _AROUND: asked}) if isinstance(asked, _MaskRequest) else None


def _are_masks(given: object) -> bool:
    # A dict of masks by kind of layer, but for what a model that has another one inside hands it
    # (Gemma 3), which are our own.
    return isinstance(given, Mapping) and {_MaskRequest} != set(map(type, given.values()))


@disable
def _check_positions(model: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    takes = inspect.signature(type(model).forward)
    if "position_ids" in takes.parameters and takes.bind(model, *args, **given).arguments.get("position_ids") is None:
        raise ConfigError(
            f"{type(model).__name__} was called with a batch and without position_ids, and would number the rows that "
            "a rank holds, which are pieces of documents; call model(**hf.inputs(batch)), or give "
            "position_ids=batch.position_ids[None]"
        )


class _ForwardInputs(dict[str, Any]):
    """Arguments of a forward: each time they are unpacked, the batch expects its attention."""

    def keys(self) -> KeysView[str]:
        self[NAME].begin_forward()
        return super().keys()

    def __iter__(self) -> Iterator[str]:  # else Python unpacks a dict without a call of its methods
        return super().__iter__()


class _Refusing:
    """A value that a model hands through untouched: computing with it is an error."""

    why = ""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise ConfigError(cls.why)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("_") else ConfigError(self.why)

    def __getitem__(self, _: object) -> Any:
        raise ConfigError(self.why)


class _OwnLoss(_Refusing):
    """Divisor of Transformers' own losses."""

    why = (
        "expected no labels in the model's forward, got some: Transformers would shift batch.labels, which are "
        "shifted, and average over this rank's tokens. Leave labels out, and take the logits: "
        'F.cross_entropy(logits.float(), batch.labels, reduction="sum") and batch.mean_loss'
    )


class _MaskRequest(_Refusing):
    """The mask that a model asked for, on its way to `attend`.

    `limits`: by what hides or shows other keys than `mask`, the longest document in which it does
    not; 0: it does in all. `hides`: whether an attention mask of the user hides a token. `blocks`
    [T]: rows of blocks that see themselves both ways, besides.
    """

    why = (
        "the model computes with its attention mask, so it attends by itself and past the plan; use one that takes "
        "its attention from Transformers' AttentionInterface"
    )

    def __init__(self, mask: Mask, limits: dict[str, int], *, hides: bool, blocks: Tensor | None) -> None:
        self.mask, self.limits, self.hides, self.blocks = mask, limits, hides, blocks

    def with_that_of(self, around: "_MaskRequest | None") -> "_MaskRequest":
        """This one and what the model around asked for, which has no other mask but its blocks."""
        if around is None:
            return self
        limits = around.limits if self.blocks is None else around.limits | {"blocks of its own": 0}
        hides = self.hides or around.hides
        return _MaskRequest(self.mask, self.limits | limits, hides=hides, blocks=around.blocks)


def inputs(batch: BalancedBatch, *, losses: Losses = False) -> dict[str, Any]:
    """Arguments of a model's forward: a batch of one row, without a cache of keys and values.
    Whoever gives the model `labels` beside them gets an error: its own loss would be another.

    `losses`: the output's `logits` are `TokenLosses` of the batch's labels, made by chunks of rows;
    "liger": a `LigerLoss`, made by Liger's kernel. ConfigError: no batch; in the forward, a model that
    computes with its logits, or no such kernel.
    """
    if not isinstance(batch, BalancedBatch):
        raise ConfigError(f"expected the BalancedBatch that the balancer returned, got {type(batch).__name__}")
    if losses not in get_args(Losses):
        raise ConfigError(f'losses: expected True, False or "liger", got {losses!r}')
    positions.announce(batch)
    return _ForwardInputs(
        {
            "input_ids": batch.tokens[None],
            "position_ids": batch.position_ids[None],
            "use_cache": False,
            "num_items_in_batch": _OwnLoss(),
            NAME: batch,
            **({LOSSES: losses} if losses else {}),
        }
    )


def check(model: torch.nn.Module, balancer: SequenceBalancer) -> Leaks:
    """Check that documents stay apart in a model, whatever its layers are called, and that each is as
    alone: once at a job's start where a model has layers that nobody reviewed.

    Collective over the ranks that share the model's gradients. It runs small documents of its own,
    of which some change, before and behind the one looked at. The model is as before behind it.

    Raises:
        ConfigError: a document's logits change with another one's, and the module in which they first
            do (on CPUs not by one bit, elsewhere beyond rounding); they are not those of it alone.
    """
    whole: Any = getattr(model, "module", model)  # of DDP
    config = whole.config.get_text_config()
    # Low ids are of padding, high ones of images.
    tokens = range(4, max(12, min(config.vocab_size, 1000)))

    def outputs(**given: Any) -> Tensor:
        out = model(**{**given, "use_cache": False})
        return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0]

    def alone(document: Tensor) -> Tensor:
        with attention_of(whole, "eager"):
            return outputs(input_ids=document[None])

    return LeakCheck(model, balancer, lambda batch: outputs(**inputs(batch)), alone, tokens).run()


@contextmanager
def attention_of(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Give the parts of a model that have balanced attention another one."""
    configs = [getattr(part, "config", None) for part in model.modules()]
    held: dict[int, Any] = {id(of): of for of in configs if getattr(of, "_attn_implementation", None) == NAME}
    try:
        for of in held.values():
            of._attn_implementation = name
        yield
    finally:
        for of in held.values():
            of._attn_implementation = NAME


def image_segments(token_type_ids: Iterable[int]) -> list[Segment]:
    """Segments of a document for `SequenceBalancer.trees`: text, and blocks of tokens of type 1, which
    see themselves both ways (Gemma 3's images). Give the model the types of the rows: they are a
    further tensor of the trees, `token_type_ids=batch.others[0][None]`.
    """
    runs = [(len(list(run)), bool(image)) for image, run in groupby(kind == 1 for kind in token_type_ids)]
    return [Segment(length, at - 1, image) for at, (length, image) in enumerate(runs)]


def prefix_segments(token_type_ids: Iterable[int]) -> list[Segment]:
    """As `image_segments`, where tokens of type 0 at a document's beginning see themselves both ways
    (PaliGemma's image and prompt). ConfigError: one stands behind others; the model would show it
    to the beginning, too, which no tree does.
    """
    types = list(token_type_ids)
    prefix = next((at for at, kind in enumerate(types) if kind), len(types))
    if 0 in types[prefix:]:
        raise ConfigError(
            f"expected tokens of type 0 at the beginning alone, got one at {types.index(0, prefix)} behind another "
            f"type at {prefix}: the model shows all of type 0 to one another, wherever they are"
        )
    lengths = ((prefix, True), (len(types) - prefix, False))
    return [Segment(length, at - 1, full) for at, (length, full) in enumerate(each for each in lengths if each[0])]


@disable
def _asked_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor = 0,
    **_: Any,
) -> _MaskRequest:
    """The mask that a model asks for, in place of a tensor: the plan knows what every query sees.

    It is refused, if need be, by the layer that takes it: models ask for masks that none takes.
    """
    mask: Mask = CAUSAL
    limits: dict[str, int] = {}
    blocks: Tensor | None = None
    if q_length != kv_length or (not isinstance(q_offset, Tensor) and q_offset):
        limits[f"a mask of {kv_length} keys for {q_length} queries"] = 0
    # by name: the causal mask comes before the window that makes it smaller
    for part, made_with in sorted(_parts(mask_function), key=lambda part: part[0]):
        size = made_with.get(LIMITS.get(part, ("", ""))[0], 0)
        match part:
            case "blockwise_overlay":
                blocks = made_with["block_sequence_ids"][0] >= 0
            case _ if part in _CAUSAL:
                pass  # documents are apart in the plan, too
            case "bidirectional_mask_function":
                mask = FULL
            case "sliding_window_overlay" if mask == CAUSAL and size > 0:
                mask = SlidingWindow(size)
            case _:
                limits[f"{LIMITS.get(part, ('', part))[1]}{f' ({size} tokens)' if size else ''}"] = size
    hides = attention_mask is not None and not bool(attention_mask.all())
    return _MaskRequest(mask, limits, hides=hides, blocks=blocks)


_CAUSAL = ("causal_mask_function", "packed_sequence_mask_function")


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of the mask functions that all must show a key, and what each was made with."""
    name = getattr(function, "__qualname__", type(function).__name__).partition(".")[0]
    ours = getattr(function, "__module__", "") == "transformers.masking_utils"
    held = dict(inspect.getclosurevars(function).nonlocals) if ours else {}
    if ours and name in ("and_masks", "or_masks"):
        members = [list(_parts(each)) for each in held["mask_functions"]]
        # Blocks beside a causal mask (Gemma 3's images) are the full segments of trees.
        named = [{part for part, _ in member} for member in members]
        beside = all(_CAUSAL[0] in each <= {*_CAUSAL} or each == {"blockwise_overlay"} for each in named)
        yield from chain.from_iterable(members) if name == "and_masks" or beside else [(name, held)]
    elif ours and name == "remap_positions_for_packed_sequence":
        yield from _parts(held["mask_function"])
    else:
        yield (name if ours else f"{name} of {getattr(function, '__module__', 'unknown')}"), held


@disable
def attend(  # noqa: PLR0913  Transformers' signature
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _MaskRequest | None,
    *,
    balanced: BalancedBatch | None = None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention in Transformers' shapes.

    Query [1, H, T, D], key and value [1, G, T, D]; returns [1, T, H, D].

    Raises:
        ConfigError: the model was called without the batch, or asks for what a plan does not have:
            dropout, a mask of its own or another than the plan's, positions that
            are those of a row.
    """
    name = type(module).__name__
    if balanced is None:
        balanced = positions.running(module)
    if balanced is None:
        raise ConfigError(
            f"{name} was called without a batch; call model(**hf.inputs(batch)), and under checkpointing use a model "
            "that hands keywords through to its attention"
        )
    calls: int | None = getattr(module, mixers.CALLS, None)
    check_layer(module, balanced.accept, hybrid=calls is not None)
    window: int | None = given.get("sliding_window")
    causal = given["is_causal"] if given.get("is_causal") is not None else getattr(module, "is_causal", None)
    wrong: dict[str, str] = {}
    longest = balanced.longest
    if isinstance(attention_mask, _MaskRequest):
        asked = attention_mask.with_that_of(given.get(_AROUND))
        causal = asked.mask != FULL
        of_mask = asked.mask.size if isinstance(asked.mask, SlidingWindow) else None
        if window is not None and window != of_mask and min(window, of_mask or window) < longest:
            wrong[f"a window of {window} tokens, and in its mask of {of_mask or 'all'}"] = _SAY_ONE
        window = of_mask
        for words, size in asked.limits.items():
            if size < longest:
                wrong[words] = f"Give it documents of at most {size} tokens" if size else _NO_OTHER
        if asked.blocks is not None:
            wrong |= _unlike_blocks(asked.blocks, balanced, _model_type(module))
        if asked.hides:  # maybe on this rank alone: the others hear of it by the roll call
            wrong["an attention mask that hides tokens"] = _NO_MASK
    elif attention_mask is not None:
        wrong["an attention mask"] = _NO_MASK
    wrong |= _unlike(balanced, window, causal, given)
    if wrong:
        raise ConfigError(
            f"{name} asks for {', '.join(wrong)}; balanced attention is {balanced.plan.mask.name} attention within "
            f"each document. {'; '.join(dict.fromkeys(wrong.values()))}"
        )
    layers = calls or getattr(getattr(module, "config", None), "num_hidden_layers", None)
    if window is not None and window >= longest:
        window = None  # it shows whole documents
    query = positions.treated(module, query, balanced)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    # Of other families a layer with other heads is of another model than the plan's: refused.
    own = _model_type(module).startswith(OWN_HEADS)
    scored: Any = {"window": window, "sink": given.get("s_aux"), "softcap": given.get("softcap") or 0.0}
    return balanced_attention(q, k, v, balanced, scaling, **scored, layers=layers, own_heads=own), None


def _unlike_blocks(blocks: Tensor, balanced: BalancedBatch, model_type: str) -> dict[str, str]:
    tokens = slice(balanced.num_tokens)  # types of padding are 0
    if not torch.equal(blocks[tokens], balanced.in_full_segments[tokens]):
        return {"blocks that see themselves both ways, other than the full segments of its trees": _AS_SEGMENTS}
    if balanced.has_several_blocks and not model_type.startswith(_A_BLOCK_EACH):
        return {"one block of all tokens of a type, which are several full segments of a tree": _NOT_APART}
    return {}


def _model_type(module: torch.nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "model_type", ""))


# Families in which every image is a block by itself; in others those of one type are a block.
_A_BLOCK_EACH = ("gemma3", "gemma4")
_NOT_APART = "Give it documents with one such run of tokens each (hf.prefix_segments)"
_NO_MASK = "Leave out attention_mask: documents have no padding, and the plan keeps them apart"
_OWN_DOCUMENTS = "Leave out what says where documents lie: a batch's rows are pieces of documents of all ranks"
_NO_OTHER = "Leave out what asks for it, such as token types, images, a cache, or a mask function of your own"
_AS_SEGMENTS = "Give balancer.trees the segments of the same token types (hf.image_segments, hf.prefix_segments)"
_SAY_ONE = "Set one sliding_window, and layer_types to match"
_OF_MODEL = "Leave out Settings.mask, so that plans are made for the model's own mask"


def _unlike(balanced: BalancedBatch, window: int | None, causal: bool | None, given: dict[str, Any]) -> dict[str, str]:
    """Features that a layer asks for and the plan does not have, each with what to do."""
    mask, longest = balanced.plan.mask, balanced.longest
    planned = mask.window_size or None
    shown, of_plan = (None if each is None or each >= longest else each for each in (window, planned))
    whole = "attention without a window"
    asked = {
        "dropout": (given.get("dropout"), "Set attention_dropout=0 in the model's configuration"),
        f"a sliding window of {shown} tokens": (shown and shown != of_plan and (planned or mask == FULL), _OF_MODEL),
        whole: (of_plan is not None and shown is None, _OF_MODEL),
        "attention that is not causal": (
            mask != FULL and causal is False,
            'Give the balancer Settings(mask="full", shift_labels=False)',
        ),
        "causal attention, and the batch is planned for another mask": (
            mask == FULL and causal is True,
            'Leave out Settings(mask="full")',
        ),
        **{name: (given.get(name) is not None, "No kernel here has it; use another model") for name in UNLIKE},
        **{name: (given.get(name) is not None, _OWN_DOCUMENTS) for name in OWN_DOCUMENTS},
    }
    return {what: hint for what, (is_asked, hint) in asked.items() if is_asked}

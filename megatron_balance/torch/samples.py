"""Trainers that call their model on padded samples (pairs, groups): what it computes is dealt.

The samples of a call lose their padding and are dealt to the ranks, the model runs on rows, and what
the trainer reads of its output comes back by sample, padded as it was.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_balance import rl
from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.batch import at_least
from megatron_balance.torch import hf
from megatron_balance.torch.balancer import SequenceBalancer
from megatron_balance.torch.batch import BalancedBatch
from megatron_balance.workloads.rollouts import IGNORED

# Of the output of TRL's fused head, [samples, tokens - 1].
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# What these trainers hand the model beside; the last is of pairs, and no model reads it.
_GIVEN = ("input_ids", "attention_mask", "labels", "use_cache", "fused_lm_head", "margin")


def unwrapped(model: Any) -> Any:
    """The model in one of PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def dealt(balancer: SequenceBalancer, documents: Any, *, training: bool) -> BalancedBatch:
    """The rows of a trainer's documents. ConfigError: a planner that lets some wait."""
    if not training:
        return balancer.evaluate(documents)
    batch = balancer(documents)
    if balancer.planned is not None and (held := balancer.planned.ledger.held):
        raise ConfigError(
            "expected a planner that trains every document in its step, since the trainer has counted it, got "
            f"{len(held)} documents that wait; raise tokens_per_rank, or take another planner"
        )
    return batch


class _PlannedCalls:
    """As `dealt`, by plans of a driver's `rl.plan_step` under a cap of tokens. Calls with the same
    samples (a reference, the iterations of an update) have one plan, looked up once.
    """

    def __init__(self, balancer: SequenceBalancer, max_tokens: int, most_held: int) -> None:
        self._balancer, self._max_tokens, self._most_held = balancer, max_tokens, most_held
        self._held: dict[tuple[str, ...], BalancedBatch] = {}

    def __call__(self, documents: Sequence[tuple[Tensor, Tensor]], *, training: bool) -> BalancedBatch:
        """The rows of samples. ConfigError: they need more than one microbatch."""
        del training  # the update's batches serve all passes
        balancer, pool = self._balancer, self._balancer.pool
        every: list[Any] = [(_content(documents), [len(ids) for ids, _ in documents])] * pool.size
        if pool.size > 1:
            with pool.groups.inside("the exchange of a call's lengths"):
                dist.all_gather_object(every, every[0], group=pool.groups.pool)
        key = tuple(content for content, _ in every)
        if key not in self._held:
            spec, lengths = balancer.spec, [length for _, of in every for length in of]
            given: dict[str, Any] = {"planner": spec.name, "options": spec.options, "plan_costs": spec.plan_costs}
            step = rl.plan_step(lengths, None, spec.cluster, spec.model, max_tokens=self._max_tokens, **given)
            if len(step.members) > 1:
                raise ConfigError(
                    f"expected samples of one call that fit under max_tokens {self._max_tokens}, got {sum(lengths)} "
                    f"tokens on {pool.size} ranks, which need {len(step.members)} microbatches; lower "
                    "per_device_train_batch_size and accumulate more, or raise max_tokens"
                )
            first = sum(len(of) for _, of in every[: pool.rank])
            self._held[key] = balancer.from_plan(step, dict(enumerate(documents, start=first))).update[0]
            while len(self._held) > self._most_held:
                del self._held[next(iter(self._held))]
        return self._held[key]


@dataclass(slots=True)
class Remainder:
    """An uneven last batch, which every rank reads whole: each sample is computed once, for all ranks,
    so that the mean over a rank's samples, which trainers take, is that over all of them.
    """

    pool: Any
    expected: bool = False  # the next call may be its
    found: bool = False  # in the last call

    def parts(self, documents: Sequence[tuple[Tensor, Tensor]]) -> list[int] | None:
        """Where each rank's samples begin, and the end, if all ranks have the same ones; else None."""
        self.found = False
        if self.expected:
            with self.pool.groups.inside("the exchange of a call's samples"):
                every: list[Any] = [None] * self.pool.size
                dist.all_gather_object(every, _content(documents), group=self.pool.groups.pool)
            self.found = len(set(every)) == 1
        # Batches that are equal by chance on all ranks may be computed once as well.
        count, size = len(documents), self.pool.size
        return [count * rank // size for rank in range(size + 1)] if self.found else None


class _ForAll(torch.autograd.Function):
    """Rows of all ranks' parts; gradients of all ranks go back to the rank of a row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: slice, count: int, pool: Any) -> Tensor:
        ctx.place, ctx.pool = place, pool
        made = rows.new_zeros(count, *rows.shape[1:])
        made[place] = rows
        return _summed(made, pool)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(grads[0].clone(), ctx.pool)[ctx.place], None, None, None


def _summed(rows: Tensor, pool: Any) -> Tensor:
    with pool.groups.inside("the exchange of a remainder's results"):
        dist.all_reduce(rows, group=pool.groups.pool)
    return rows


def _content(documents: Sequence[tuple[Tensor, Tensor]]) -> str:
    return sha256(b"".join(each.cpu().numpy().tobytes() for of in documents for each in of)).hexdigest()


def begin(trainer: Any, *, scores: bool, max_tokens: int | None = None) -> Remainder:
    """Deal what a trainer's models compute. `scores`: of sequences, in place of log-probabilities.
    `max_tokens`: by plans under this cap (`rl.plan_step`).
    """
    remainder = Remainder(trainer.balancer.pool)
    deal = partial(dealt, trainer.balancer)
    if max_tokens is not None:
        slices = getattr(trainer.args, "steps_per_generation", None) or 1
        deal = _PlannedCalls(trainer.balancer, at_least(1, "max_tokens", max_tokens), slices + 1)
    reference = getattr(trainer, "ref_model", None)
    for model in (trainer.model, None if reference is None else trainer.accelerator.unwrap_model(reference)):
        if model is not None:
            _SampleCalls(model, deal, remainder, scores=scores)
    # A rank that calls the model once more than others waits for them, and they here for it: both are
    # calls of the pool, so it is said.
    inside, accelerator = trainer.balancer.pool.groups.inside, trainer.accelerator
    for name in ("gather", "backward"):
        setattr(accelerator, name, _told(getattr(accelerator, name), inside, name))
    prepare = accelerator.prepare_model

    def prepared(*args: Any, **given: Any) -> Any:
        model = prepare(*args, **given)
        if isinstance(model, DistributedDataParallel):  # it sends buffers before the model is called
            model.forward = _told(model.forward, inside, "model call")
        return model

    accelerator.prepare_model = prepared
    return remainder


def _told(
    method: Callable[..., Any], inside: Callable[[str], AbstractContextManager[None]], name: str
) -> Callable[..., Any]:
    @wraps(method)
    def told(*args: Any, **given: Any) -> Any:
        with inside(f"the trainer's {name}"):
            return method(*args, **given)

    return told


@dataclass(frozen=True, slots=True)
class _PaddedSamples:
    """Samples [n, tokens] as a trainer pads them, before or behind their tokens.

    `labels` are those of the tokens themselves, `mask` shows what is no padding.
    """

    ids: Tensor
    labels: Tensor
    mask: Tensor

    @classmethod
    def read(cls, given: dict[str, Any]) -> "_PaddedSamples":
        """Those of a model's call. ConfigError: more than tokens. DataError: padding inside of them,
        labels that are none of theirs.
        """
        if beyond := [name for name in given if name not in _GIVEN]:
            raise ConfigError(
                f"expected {', '.join(_GIVEN)} in the trainer's call of its model, got {', '.join(beyond)}; a model "
                "balanced here takes tokens alone"
            )
        ids: Tensor = given["input_ids"]
        mask = given.get("attention_mask")
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        labels = given.get("labels")
        labels = torch.full_like(ids, IGNORED) if labels is None else labels
        if bool((F.pad(mask, (1, 0)).int().diff(dim=1) > 0).sum(1).gt(1).any()):
            raise DataError("expected samples padded before or behind their tokens, got an attention_mask with gaps")
        if bool(((labels[:, 1:] != IGNORED) & ~(mask[:, 1:] & mask[:, :-1])).any()):
            raise DataError(
                "expected labels of tokens that stand behind others of their sample, got some of padding, or of a "
                "sample's first token; leave the prompt before the completion"
            )
        return cls(ids, labels, mask)

    def documents(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens of each sample that has any, and the labels of their outputs."""
        tokens = [(ids[kept], labels[kept]) for ids, labels, kept in zip(self.ids, self.labels, self.mask, strict=True)]
        return [(ids, F.pad(labels[1:], (0, 1), value=IGNORED)) for ids, labels in tokens if len(ids)]

    def padded(self, rows: Tensor) -> Tensor:
        """Results [n, tokens, ...] of rows, the samples one behind the other; 0 where padding is."""
        made = rows.new_zeros(*self.mask.shape, *rows.shape[1:])
        made[self.mask] = rows
        return made


class _SampleCalls:
    """Hooks on a model: calls with padded samples become calls with the rows of this rank.

    Calls of another kind, and generation, run with the attention that the model had.
    """

    def __init__(self, model: Any, deal: Callable[..., BalancedBatch], remainder: Remainder, *, scores: bool) -> None:
        self._model, self._dealt, self._remainder = unwrapped(model), deal, remainder
        self._own = self._model.config._attn_implementation
        self._model.set_attn_implementation(hf.register())
        hf.register(self._model)
        self._around = ExitStack()  # of a call that is not dealt
        self._call: tuple[_PaddedSamples, BalancedBatch, list[int] | None] | None = None
        self._scores = scores
        self._scored: Tensor | None = None  # scores of rows, of which the model gives one row's alone
        model.register_forward_pre_hook(self._deal, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._return, always_call=True)
        if scores:
            self._model.score.register_forward_hook(self._keep)
        elif hasattr(self._model, "generate"):
            self._model.generate = self._plain(self._model.generate)

    def _plain(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(generate)
        def plain(*args: Any, **given: Any) -> Any:
            with hf.attention_of(self._model, self._own):
                return generate(*args, **given)

        return plain

    def _deal(self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        self._call = self._scored = None
        if hf.NAME in given:
            return None  # rows already, as of `hf.check`
        if not (self._scores or given.get("fused_lm_head")):
            self._around.enter_context(hf.attention_of(self._model, self._own))
            return None
        if args:
            raise ConfigError("expected a trainer that calls its model with keywords alone, got arguments by place")
        samples = _PaddedSamples.read(given)
        documents = samples.documents()
        if (parts := self._remainder.parts(documents)) is not None:
            rank = self._remainder.pool.rank
            own = documents[parts[rank] : parts[rank + 1]]
            parts = [sum(len(ids) for ids, _ in documents[:first]) for first in parts]
        else:
            own = documents
        # a reference model has no backward, and waits for nothing
        batch = self._dealt(own, training=torch.is_grad_enabled())
        self._call = samples, batch, parts
        made = {**hf.inputs(batch)}
        # the head would divide by it a loss that these trainers do not read
        del made["num_items_in_batch"]
        if not self._scores:
            made |= {"shift_labels": batch.labels[None], "fused_lm_head": True}
        return (), made

    def _keep(self, _: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
        if self._call is not None:
            self._scored = out

    def _return(self, _: nn.Module, __: tuple[Any, ...], out: Any) -> Any:
        self._around.close()
        call, self._call = self._call, None
        if call is None or out is None:  # none: the call failed
            return None
        samples = call[0]
        if self._scores:
            scored, self._scored = self._scored, None
            assert scored is not None
            by_sample = self._by_sample(scored, *call)
            return type(out)(logits=by_sample[torch.arange(len(by_sample)), self._last(samples)])
        values = {name: each[0] for name in PER_TOKEN if (each := getattr(out, name)) is not None}
        kind = torch.promote_types(torch.float32, values["log_probs"].dtype)
        # all side by side: one exchange, and one in the backward
        stacked = torch.stack([each.to(kind) for each in values.values()], dim=-1)
        by_sample = self._by_sample(stacked, *call)[:, :-1].unbind(-1)
        # no views, which FSDP2 cannot watch
        found = {
            name: made.to(each.dtype, copy=True) for (name, each), made in zip(values.items(), by_sample, strict=True)
        }
        return type(out)(**found, label_mask=samples.labels[:, 1:] != IGNORED)

    def _by_sample(
        self, values: Tensor, samples: _PaddedSamples, batch: BalancedBatch, parts: list[int] | None
    ) -> Tensor:
        rows = batch.in_order(batch.gather_rows(values))
        if parts is not None:
            pool = self._remainder.pool
            rows = cast("Tensor", _ForAll.apply(rows, slice(*parts[pool.rank :][:2]), parts[-1], pool))
        return samples.padded(rows)

    def _last(self, samples: _PaddedSamples) -> Tensor:
        """The place of each sample's score: as Transformers has it, its last token but padding's."""
        pad = self._model.config.get_text_config().pad_token_id
        places = torch.arange(samples.ids.shape[1], device=samples.ids.device)
        last = (places * (samples.ids != pad)).argmax(-1)
        if not bool(samples.mask.gather(1, last[:, None]).all()):
            raise DataError(
                f"expected padding of pad_token_id {pad}, at which the model looks for a sample's last token, got "
                "another where attention_mask is 0"
            )
        return last

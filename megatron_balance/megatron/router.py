"""Megatron's router of experts for planned microbatches: its losses, and rows of no sequence.

Its load-balancing loss multiplies the probability of each expert with the number of tokens sent
there, both over all tokens of a microbatch, so the losses of two nano-batches do not add up to it.
They go through a layer one after the other (`megatron.ping_pong`): the first one keeps the scores
and routing that its losses are made of; the second one's call takes the losses over both, once, in
place of Megatron's. The gradient reaches the first nano-batch through the scores that it kept,
before the backward has come to it.
"""

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.core_attention import BalancedSeqParams


@dataclass(slots=True)
class _RouterValues:
    """Values of a layer's nano-batches so far; `last`: it is routed now; `balanced`: by loss."""

    last: bool = False
    logits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    balanced: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


class BalancedRouter(TopKRouter):
    """Megatron's router, whose losses are taken over all nano-batches of a microbatch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = _RouterValues()
        self._by_nano_batch = False
        self._num_samples = 0
        self._padding: Tensor | None = None
        # Parameters of what is routed now, where a loss asks for the samples of its rows.
        self.of_microbatch: BalancedSeqParams | None = None
        # Where experts are recomputed (`--recompute-modules moe`), those of all microbatches whose
        # backward is to come, in the order of forwards, as a pipeline's backwards come too.
        self.to_recompute: deque[BalancedSeqParams] | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None, **of_version: Any) -> tuple[Tensor, Tensor]:
        """Probabilities and map [T, experts] of logits [T, 1, experts]; `padding_mask` [T, 1]."""
        self._padding = None if padding_mask is None else padding_mask.reshape(-1)
        return super().routing(logits, padding_mask, **of_version)

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and map [T, experts], balanced over all ranks that share the microbatch."""
        if not self.training:
            return super().sinkhorn_load_balancing(logits)
        # Megatron's balances the rows of a rank, so routes would depend on what a plan put there.
        with torch.no_grad():
            balanced = _sinkhorn_of_pool(logits.float(), self._padding, self.tp_dp_cp_group)
            chosen = torch.topk(balanced, k=self.topk, dim=1).indices
        single = self.topk == 1
        scores = torch.sigmoid(logits) if single else torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, value=True)
        return scores * routing_map, routing_map

    @contextmanager
    def routing_nano_batch(self, number: int, num_nano_batches: int) -> Iterator[None]:
        """Route nano-batch `number` of a microbatch inside the block; they come in order."""
        if number == 0:
            self._kept = _RouterValues()
        self._kept.last = number == num_nano_batches - 1
        self._by_nano_batch = True
        try:
            yield
        finally:
            self._by_nano_batch = False
            # Their layer's losses were taken: values of one layer are not kept for the next.
            if self._kept.last:
                self._kept = _RouterValues()

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Logits [T, experts]; behind those of the last nano-batch lies the z-loss of all."""
        counts = self.config.moe_z_loss_coeff is not None and self.training and torch.is_grad_enabled()
        if not self._by_nano_batch or not counts:
            return super().apply_z_loss(logits, padding_mask)
        assert padding_mask is not None, "nano-batches say which rows are padding"
        self._kept.logits.append((logits, padding_mask))
        if not self._kept.last:
            return logits
        return super().apply_z_loss(*_concatenated(self._kept.logits))[-len(logits) :]

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        # Megatron masks [T, experts] with [T] as if that were a row.
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
        **of_version: Any,
    ) -> Tensor:
        apply = functools.partial(super()._apply_aux_loss, **of_version)
        return self._balanced("aux_loss", apply, (probs, scores_for_aux_loss, routing_map), with_padding_mask)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._balanced(
            "global_aux_loss",
            super()._apply_global_aux_loss,
            (probs, scores_for_aux_loss, routing_map),
            with_padding_mask,
        )

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
        **_of_version: Any,
    ) -> Tensor:
        """Probabilities [T, experts], behind which lies the loss of every sample of the microbatch."""
        if not self.get_aux_loss_coeff("seq_aux_loss"):
            return probs
        given = self.of_microbatch if self.to_recompute is None else self.to_recompute.popleft()
        assert given is not None, "the layer was told what it routes (`tell_samples`)"
        assert given.samples is not None, "rows of a planned microbatch say their samples"
        samples = given.samples
        if self.config.sequence_parallel:
            samples = samples.chunk(self.tp_group.size())[self.tp_group.rank()]
        self._num_samples = given.num_samples
        # So that nano-batches keep routing and samples together: [T, experts + 1].
        wide = torch.cat([routing_map, samples[:, None]], dim=1)
        return self._balanced("seq_aux_loss", self._by_sample, (probs, scores_for_aux_loss, wide), with_padding_mask)

    def _by_sample(self, probs: Tensor, scores: Tensor, wide: Tensor, with_padding_mask: bool) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        routed, samples = wide[:, :-1].to(scores.dtype), wide[:, -1]
        # [samples, experts]: tokens sent to each expert, over all ranks that share the microbatch.
        counts = routed.new_zeros(self._num_samples, routed.shape[1]).index_add_(0, samples, routed)
        dist.all_reduce(counts, group=self.tp_dp_cp_group)
        per_sample = counts.sum(1, keepdim=True) / self.topk
        share = counts / per_sample.clamp(min=1)
        # Megatron takes the loss over the tokens of a sample, and the mean over samples; here every
        # sample counts by its tokens, which is the same for samples of as many.
        weighted = (scores * share[samples]).sum() * (coefficient * routed.shape[1] / self.topk)
        total = per_sample.sum().clamp(min=1)
        attach = self.attach_and_log_load_balancing_loss
        # Megatron's branch dev would sum the count over the group; there it may be given as a whole.
        named = "aux_loss_scale_num_tokens"
        whole = {named: total} if named in inspect.signature(attach).parameters else {}
        return attach(
            probs,
            coefficient,
            weighted / total,
            "seq_load_balancing_loss",
            self.tp_dp_cp_group,
            needs_dp_avg=False,
            valid_token_count=total / self.tp_cp_group.size(),
            **whole,
        )

    def _balanced(
        self, name: str, apply: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor], with_padding_mask: bool
    ) -> Tensor:
        """Probabilities [T, experts], behind those of the last nano-batch a loss of all."""
        # `given`: probabilities, scores and routing.
        probs, scores, routing_map = given
        if not self._by_nano_batch or not self.get_aux_loss_coeff(name):
            return apply(probs, scores, routing_map, with_padding_mask)
        seen = self._kept.balanced.setdefault(name, [])
        seen.append((scores, routing_map))
        return apply(probs, *_concatenated(seen), with_padding_mask) if self._kept.last else probs


def _concatenated(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    firsts, seconds = zip(*pairs, strict=True)
    return torch.cat(firsts), torch.cat(seconds)


SINKHORN_TOLERANCE = 1e-4  # mean change of the factors of experts, below which Megatron's iteration ends
SINKHORN_EPSILON = 1e-8


def _sinkhorn_of_pool(logits: Tensor, padding: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Megatron's `sinkhorn` of logits [T, experts] fp32 over the rows of all ranks of `group`; this
    rank's part. Collective. `padding` [T]: True for rows that count nowhere.
    """
    cost = torch.exp(logits)
    if padding is not None:
        cost = cost.masked_fill(padding[:, None], 0)
    experts = logits.shape[1]
    counted = torch.full((1,), float(len(logits)), device=logits.device) if padding is None else (~padding).sum()[None]
    rows = _sum_in_order(counted.float(), group).clamp(min=1)
    of_expert = cost.new_ones(experts)
    change = float("inf")
    # Every rank adds up the same sums in the same order, so all end at the same iteration.
    # Megatron's reads the change on the host, too.
    while change > SINKHORN_TOLERANCE:
        of_row = 1 / rows / ((of_expert * cost).sum(1) + SINKHORN_EPSILON)
        before = of_expert
        of_expert = 1 / experts / (_sum_in_order((of_row[:, None] * cost).sum(0), group) + SINKHORN_EPSILON)
        change = float((before - of_expert).abs().mean())
    return of_expert * cost * of_row[:, None]


def _sum_in_order(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum [n] over the ranks of a group of `values` [n], of the same bits on every rank."""
    if group.size() == 1:
        return values
    # Gathered and then summed: an all-reduce may add in another order on each rank.
    parts = values.new_empty(group.size() * len(values))
    dist.all_gather_into_tensor(parts, values.contiguous(), group=group)
    return parts.view(group.size(), -1).sum(0)


def give_router(mlp: Any) -> None:
    """Change what a layer spec says of its MLP: experts behind Megatron's own router get ours."""
    submodules = (
        mlp.keywords.get("submodules") if isinstance(mlp, functools.partial) else getattr(mlp, "submodules", None)
    )
    if isinstance(submodules, MoESubmodules) and submodules.router is TopKRouter:
        submodules.router = BalancedRouter


def check_router(router: Any, name: str) -> None:
    """Reject a router that is not ours where Megatron's would route by what shares a rank."""
    if not isinstance(router, TopKRouter) or isinstance(router, BalancedRouter):
        return
    if router.routing_type == "sinkhorn" or router.get_aux_loss_coeff("seq_aux_loss"):
        raise ConfigError(
            f"{name} is Megatron's own router, which balances the tokens of a rank; with sinkhorn or seq_aux_loss, "
            "build the model "
            "from its model config (pretrain's first argument) instead of a model_provider of the script's own"
        )


def share_losses(model: torch.nn.Module) -> None:
    """Let routers take `aux_loss` over all replicas' tokens of a microbatch, which plans mix."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._apply_aux_loss = functools.partial(_over_replicas, module, module._apply_aux_loss)


def _over_replicas(router: Any, apply: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    # There alone: by this group's size Megatron weights `global_aux_loss`, which is over all as it is.
    own, router.tp_cp_group = router.tp_cp_group, router.tp_dp_cp_group
    try:
        return apply(*args, **kwargs)
    finally:
        router.tp_cp_group = own


def tell_samples(model: torch.nn.Module) -> None:
    """Let every layer's router know the parameters of what it routes, in forward and recomputation."""
    for layer in model.modules():
        if isinstance(layer, TransformerLayer) and isinstance(router_of(layer), BalancedRouter):
            layer.register_forward_pre_hook(_tell, with_kwargs=True)
            if cast(Any, layer.mlp).moe_layer_recompute:
                router_of(layer).to_recompute = deque()


def _tell(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001  a hook's
    router = router_of(layer)
    router.of_microbatch = kwargs["packed_seq_params"]
    # In recomputation the layer's hook does not run: what it told in the forward is taken in order.
    if router.to_recompute is not None and layer.training and torch.is_grad_enabled():
        router.to_recompute.append(router.of_microbatch)


def hand_padding_on(model: torch.nn.Module) -> None:
    """Let the layers of a hybrid model that predict further tokens know the padding of their rows."""
    # Megatron through 0.20 gives it to the others alone, and its experts would count padding.
    for module in model.modules():
        further = vars(module)["_modules"].get("mtp")
        if further is not None and hasattr(module, "mtp_pattern"):
            held = _HeldPadding()
            module.register_forward_pre_hook(held.hold, with_kwargs=True)
            further.register_forward_pre_hook(held.give, with_kwargs=True)


class _HeldPadding:
    def hold(self, _module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.padding_mask: Tensor | None = kwargs.get("padding_mask")

    def give(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {"padding_mask": self.padding_mask, **kwargs}


def router_of(layer: Any) -> Any:
    """The router of a layer's experts, ours or not; None: it has none."""
    return layer.mlp.router if isinstance(layer.mlp, MoELayer) else None

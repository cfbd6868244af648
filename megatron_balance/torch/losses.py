"""Log-probabilities, entropies and the loss of rows, without their logits in memory.

The head is applied to some rows at a time, forward, and again backward. What it gives is what
`F.cross_entropy(logits.float(), labels)` computes of all logits at once.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.attention import differentiable_once
from megatron_balance.workloads.rollouts import IGNORED

CHUNK = 1024  # rows whose logits are in memory at a time
LIGER = ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")  # of liger-kernel 0.8.5
LIGER_DEVICES = ("cuda",)
Losses: TypeAlias = Literal[False, True, "liger"]  # in place of logits: none, in chunks, by Liger's kernel


class TokenLosses(NamedTuple):
    """Log-probabilities [T] of the rows' labels, 0 where a row has none, and entropies [T] of their
    distributions; fp32 (fp64 of fp64). Both have gradients.
    """

    log_probs: Tensor
    entropies: Tensor

    @property
    def loss(self) -> Tensor:
        """The sum over the labels that count, as `BalancedBatch.mean_loss` takes it."""
        return -self.log_probs.sum()

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError(
            "the model computes with its logits behind its head (a soft cap, a scale), and of losses=True gets "
            "log-probabilities in place of them; take its logits, in hf.inputs(batch)"
        )

    __truediv__ = __mul__ = __rmul__ = _refuse  # pyright: ignore[reportAssignmentType]


class LigerLoss(NamedTuple):
    """The sum over the labels that count, as `TokenLosses.loss`: all that Liger's kernel gives."""

    loss: Tensor

    @property
    def log_probs(self) -> NoReturn:
        raise ConfigError("Liger's kernel gives the loss alone; for log-probabilities and entropies take losses=True")

    entropies = log_probs
    __truediv__ = __mul__ = __rmul__ = TokenLosses._refuse  # pyright: ignore[reportAssignmentType]


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> TokenLosses:
    """Log-probabilities and entropies of rows by a linear head.

    Args:
        hidden: [T, C], or [1, T, C].
        weight: [V, C], of the type of `hidden` (of autocast's both are made). A parameter that FSDP2
            has sharded is gathered, and its gradient averaged over the ranks, as FSDP2 does.
        labels: [T], of the outputs already, as `BalancedBatch.labels`; -100: none.
        bias: [V].
        temperature: logits are divided by it.
        chunk: rows whose logits are in memory at a time.

    Raises:
        ConfigError: other shapes or types; a temperature or a chunk that is not above 0.
    """
    if not temperature > 0 or chunk < 1:
        raise ConfigError(f"expected a temperature and a chunk above 0, got {temperature} and {chunk}")
    rows, weight, bias, ranks = _operands(hidden, weight, labels, bias)
    with torch.autocast(rows.device.type, enabled=False):
        return TokenLosses(*_InChunks.apply(rows, weight, bias, labels, (1 / temperature, chunk, ranks)))


def liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None) -> LigerLoss:
    """As `token_losses`, by Liger's kernel, which makes the gradients in the forward. ConfigError: as
    there; tensors that are on no GPU; liger-kernel is not installed.
    """
    rows, weight, bias, ranks = _operands(hidden, weight, labels, bias)
    if rows.device.type not in LIGER_DEVICES:
        raise ConfigError(f'losses="liger": expected tensors on a GPU, got {rows.device}; take losses=True')
    try:
        kernel = getattr(import_module(LIGER[0]), LIGER[1])
    except ImportError as error:
        raise ConfigError(f'losses="liger": {error}; install liger-kernel, or take losses=True') from None
    for each in (weight, bias) if ranks > 1 else ():
        if each is not None and each.requires_grad:
            each.register_hook(lambda grad: grad / ranks)
    with torch.autocast(rows.device.type, enabled=False):
        return LigerLoss(kernel(rows, weight, labels, bias, reduction="sum", accum_dtype=torch.float32))


def _operands(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Rows, a head and a bias, whole and of one type; how many ranks average their gradients."""
    rows = hidden[0] if hidden.ndim == 3 and len(hidden) == 1 else hidden
    if rows.ndim != 2 or weight.ndim != 2 or rows.shape[1] != weight.shape[1] or labels.shape != rows.shape[:1]:
        raise ConfigError(
            f"expected hidden states [T, C], a head [V, C] and labels [T], got {list(hidden.shape)}, "
            f"{list(weight.shape)} and {list(labels.shape)}"
        )
    device = rows.device.type
    ranks = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
    weight, bias = _gathered(weight), None if bias is None else _gathered(bias)
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        rows, weight, bias = rows.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    if rows.dtype != weight.dtype:
        raise ConfigError(f"expected hidden states and a head of one type, got {rows.dtype} and {weight.dtype}")
    return rows, weight, bias, ranks


def _gathered(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight
    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


class _InChunks(torch.autograd.Function):
    """`how`: what logits are multiplied by, rows of a chunk, ranks whose gradients are averaged."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: tuple[float, int, int]
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, entropies, lses = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for at, logits in _logits(hidden, weight, bias, how):
            lse = lses[at] = logits.logsumexp(-1)
            own = logits.gather(1, labels[at].clamp(min=0)[:, None])[:, 0]
            log_probs[at] = (own - lse).masked_fill(labels[at] == IGNORED, 0.0)
            logs = logits.sub_(lse[:, None])
            entropies[at] = -torch.einsum("tv,tv->t", logs.exp(), logs)
        ctx.save_for_backward(hidden, weight, bias, labels, lses, entropies)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lses, entropies = ctx.saved_tensors
        scale, _, ranks = ctx.how
        found = [
            torch.zeros_like(x, dtype=lses.dtype) if asked else None
            for x, asked in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        of_hidden, of_weight, of_bias = found
        for at, logits in _logits(hidden, weight, bias, ctx.how):
            logs = logits.sub_(lses[at][:, None])
            probs = logs.exp()
            grad = torch.zeros_like(probs)
            if of_log_probs is not None:
                of_label = of_log_probs[at].masked_fill(labels[at] == IGNORED, 0.0)[:, None]
                grad.addcmul_(probs, of_label, value=-1)
                grad.scatter_add_(1, labels[at].clamp(min=0)[:, None], of_label)
            if of_entropies is not None:
                grad.addcmul_(probs, logs.add_(entropies[at][:, None]).mul_(of_entropies[at][:, None]), value=-1)
            grad = grad.mul_(scale).to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[at] = grad @ weight
            if of_weight is not None and of_weight.dtype == grad.dtype:
                of_weight.addmm_(grad.T, hidden[at])
            elif of_weight is not None:
                of_weight += grad.T @ hidden[at]
            if of_bias is not None:
                of_bias += grad.sum(0)
        for x in (of_weight, of_bias):
            if x is not None and ranks > 1:
                x.div_(ranks)
        typed = (x if x is None else x.to(like.dtype) for x, like in zip(found, (hidden, weight, bias), strict=True))
        return *typed, None, None


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[float, int, int]
) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows, and their logits in the type of sums."""
    scale, chunk, _ = how
    for start in range(0, len(hidden), chunk):
        at = slice(start, min(start + chunk, len(hidden)))
        logits = F.linear(hidden[at], weight, bias)
        yield at, logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scale)

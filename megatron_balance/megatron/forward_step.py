"""Our forward step: one planned microbatch, and a loss that is exact for any placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers

from megatron_balance.megatron.data import LABEL, LOSS_MASK, TOKEN
from megatron_balance.megatron.packed import BalancedSeqParams
from megatron_balance.runtime.attention import BackwardSlot
from megatron_balance.runtime.bind import Bound
from megatron_balance.training.binding import LayerBounds
from megatron_balance.training.microbatch import LocalMicrobatch
from megatron_balance.training.sequences import from_bits

SPIKE = 10.0  # times the largest loss seen, as in Megatron's own scripts


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """This rank's rows of one microbatch as Megatron's models take them; padding rows last.

    All [1, T] and in the plan's row order. `padding_mask`: True where a row belongs to no sequence.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    padding_mask: torch.Tensor
    params: BalancedSeqParams

    def with_plans(self, bounds: Sequence[Bound], slots: Sequence[BackwardSlot]) -> PlannedMicrobatch:
        """The microbatch with other plans and slots for its backward, both by nano-batch."""
        whole = self.params
        params = [
            dataclasses.replace(each, bound=bound, backward=slot)
            for each, bound, slot in zip(whole.nano_batches or (whole,), bounds, slots, strict=True)
        ]
        joined = dataclasses.replace(whole, nano_batches=tuple(params)) if whole.nano_batches else params[0]
        return dataclasses.replace(self, params=joined)


def planned_microbatch(local: LocalMicrobatch, bounds: Sequence[LayerBounds | None]) -> PlannedMicrobatch:
    """A microbatch in Megatron's shapes.

    `bounds`: its plans by nano-batch, None where they come later.
    """
    params = [
        BalancedSeqParams(qkv_format="sbhd", layers=bound, position_ids=nano_batch.positions)
        for nano_batch, bound in zip(local.nano_batches or (local,), bounds, strict=True)
    ]
    if local.nano_batches:
        positions = torch.cat([nano_batch.positions for nano_batch in local.nano_batches])
        params = [BalancedSeqParams(qkv_format="sbhd", position_ids=positions, nano_batches=tuple(params))]
    rows = local.rows[None]
    return PlannedMicrobatch(
        tokens=rows[..., TOKEN].contiguous(),
        labels=rows[..., LABEL].contiguous(),
        loss_mask=from_bits(rows[..., LOSS_MASK]),
        position_ids=local.positions[None],
        padding_mask=local.padding[None],
        params=params[0],
    )


Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def forward_step(
    data_iterator: Iterator[PlannedMicrobatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """Token losses [1, T] of the next microbatch, and the function that sums them."""
    args: Any = get_args()
    timers: Any = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next(data_iterator)
    timers("batch-generator").stop()
    extra: dict[str, Any] = {"padding_mask": _padding_mask(batch, model, args)} if args.num_experts is not None else {}
    losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.params, **extra)
    return losses, partial(summed_loss, batch.loss_mask)


def _padding_mask(batch: PlannedMicrobatch, model: torch.nn.Module, args: Any) -> torch.Tensor:
    """The padding [1, T] as a model chunk takes it.

    With sequence parallelism the chunk that embeds tokens splits it over the tensor-parallel ranks;
    the others (0.19.2) take it for that of their own rows.
    """
    if not args.sequence_parallel or get_attr_wrapped_model(model, "pre_process"):
        return batch.padding_mask
    return batch.padding_mask.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)[
        mpu.get_tensor_model_parallel_rank()
    ]


def summed_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Loss:
    """Sum of the token losses, number of tokens that count, and both for the report.

    With `--calculate-per-token-loss` Megatron divides the gradient by the tokens of the whole step,
    so the sum over ranks and microbatches is exact however the tokens are placed.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    _validate(loss / num_tokens.clamp(min=1))
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1).float()])}


def _validate(loss: torch.Tensor) -> None:
    """Run the checks of Megatron's own forward step on the loss of a token.

    They replay the step when a value is not a number or leaps: sums would leap with the number of
    tokens that a plan places on a rank.
    """
    args: Any = get_args()
    state: Any = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            message = f"found {what} in local forward loss calculation"
            state.validate_result(result=loss, rejection_func=rejected, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        leaps = partial(state.is_unexpectedly_large, threshold=SPIKE, context="loss")
        state.validate_result(result=loss, rejection_func=leaps, message="Spiky loss", tolerance=0.0, fatal=False)

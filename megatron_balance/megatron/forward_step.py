"""Our forward step: the microbatches of a step, bound as the schedule asks for them, and a loss
that is exact for any placement.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_balance.compile.pipeline import BOTH_PHASES, PhaseName
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.megatron import session
from megatron_balance.megatron.core_attention import Ahead, BalancedSeqParams, CountedMask
from megatron_balance.megatron.data import LABEL, LOSS_MASK, POSITION, TOKEN, column
from megatron_balance.megatron.flags import averages_evaluation, layers_by_pattern
from megatron_balance.runtime.attention import BackwardSlot
from megatron_balance.runtime.bind import Bound, Counters
from megatron_balance.training.binding import Binder, MaskBounds, bind_layers, policies_of
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.tokens import LocalMicrobatch, PoolLengths, from_bits

SPIKE = 10.0  # times the largest loss seen, as in Megatron's own scripts
LOSS = "lm loss"


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """This rank's rows of one microbatch as Megatron's models take them, in the plan's order."""

    # All [1, T], padding rows last.
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    # True where a row belongs to no sequence.
    padding_mask: torch.Tensor
    params: BalancedSeqParams

    def with_plans(self, bounds: Sequence[Bound], slots: Sequence[BackwardSlot]) -> "PlannedMicrobatch":
        """The microbatch with other plans and slots for its backward, both by nano-batch."""
        whole = self.params
        params = [
            dataclasses.replace(each, bound=bound, backward=slot)
            for each, bound, slot in zip(whole.nano_batches or (whole,), bounds, slots, strict=True)
        ]
        joined = dataclasses.replace(whole, nano_batches=tuple(params)) if whole.nano_batches else params[0]
        return dataclasses.replace(self, params=joined)


def planned_microbatch(
    local: LocalMicrobatch,
    bounds: Sequence[MaskBounds | None],
    counts: torch.Tensor | None = None,
    num_samples: int = 0,
) -> PlannedMicrobatch:
    """A microbatch in Megatron's shapes. `bounds`: its plans by nano-batch, None where they come
    later. `counts`: sums of its masks by depth, where further tokens are predicted. `num_samples`:
    of the pool, where rows say theirs in their last column; else 0.
    """

    # With "thd" Megatron would derive positions from cu_seqlens and its static context-parallel group.
    def of(part: LocalMicrobatch, positions: torch.Tensor, **more: Any) -> BalancedSeqParams:
        samples = part.rows[:, -1] if num_samples else None
        return BalancedSeqParams("sbhd", position_ids=positions, samples=samples, num_samples=num_samples, **more)

    parts = local.nano_batches or (local,)
    params = [of(part, part.positions, layers=bound) for part, bound in zip(parts, bounds, strict=True)]
    if local.nano_batches:
        params = [of(local, torch.cat([part.positions for part in parts]), nano_batches=tuple(params))]
    rows = local.rows[None]
    tokens, labels = rows[..., TOKEN].contiguous(), rows[..., LABEL].contiguous()
    loss_mask, positions = from_bits(rows[..., LOSS_MASK]), local.positions[None]
    if counts is not None:
        params[0].ahead = _ahead(rows, (tokens, positions, labels, loss_mask), counts)
    return PlannedMicrobatch(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=positions,
        padding_mask=local.padding[None],
        params=params[0],
    )


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _ahead(rows: torch.Tensor, own: Columns, counts: torch.Tensor) -> Ahead:
    """Values ahead of rows [1, T, C]; `own`: their tokens, positions, labels and loss mask."""
    depths = range(1, len(counts))
    tokens, positions, labels, loss_mask = own
    # Megatron weights a rank's share of the loss by the counts of that rank, so every mask says
    # that it has the mean one, and is scaled to make up for it.
    mean = counts[0] / mpu.get_data_parallel_world_size(with_context_parallel=True)
    weighted = [from_bits(rows[..., column(at, LOSS_MASK)]) * (counts[0] / counts[at].clamp(min=1)) for at in depths]
    return Ahead(
        tokens=(tokens, *(rows[..., column(at, TOKEN)].contiguous() for at in depths)),
        positions=(positions, *(rows[..., column(at, POSITION)].contiguous() for at in depths)),
        labels=(labels, *(rows[..., column(at, LABEL)].contiguous() for at in depths)),
        masks=((mean / loss_mask.numel()).expand_as(loss_mask), *(CountedMask.of(mask, mean) for mask in weighted)),
        count=mean,
    )


Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def forward_step(
    data_iterator: Iterator[PlannedMicrobatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """Token losses [1, T] of the next microbatch, and the function that sums them."""
    job, timers = session.current(), get_model_config(model).timers
    args = job.args
    if timers is not None:
        timers("batch-generator", log_level=2).start()
    batch = next(data_iterator)
    if timers is not None:
        timers("batch-generator").stop()
    extra: dict[str, Any] = {"padding_mask": _padding_mask(batch, model, args)} if args.num_experts is not None else {}
    if batch.params.ahead is not None:
        extra["loss_mask"] = batch.params.ahead.masks[0]
    losses = model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.params, **extra)
    # Evaluation is the mean of replicas' microbatches, as in Megatron.
    if averages_evaluation(args) and not model.training:
        return losses, partial(_loss_of_replicas, batch, args.micro_batch_size)
    return losses, partial(checked_loss, batch.loss_mask)


def _padding_mask(batch: PlannedMicrobatch, model: torch.nn.Module, args: Any) -> torch.Tensor:
    # With sequence parallelism the chunk that embeds tokens splits the padding over the
    # tensor-parallel ranks; the others (0.19.2) take it for that of their own rows.
    # A hybrid model never does.
    splits = get_attr_wrapped_model(model, "pre_process") and not layers_by_pattern(args)
    if not args.sequence_parallel or splits:
        return batch.padding_mask
    return batch.padding_mask.chunk(mpu.get_tensor_model_parallel_world_size(), dim=1)[
        mpu.get_tensor_model_parallel_rank()
    ]


def summed_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Loss:
    """Sum of the token losses, number of tokens that count, and both for the report."""
    # With `--calculate-per-token-loss` Megatron divides the gradient by the tokens of the whole
    # step, so the sum over ranks and microbatches is exact however the tokens are placed.
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1).float())
    num_tokens = loss_mask.sum().detach().to(torch.int)
    return loss, num_tokens, {LOSS: torch.cat([loss.detach().view(1), num_tokens.view(1).float()])}


def checked_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> Loss:
    """`summed_loss`, with the checks of the loss that this run's arguments ask for."""
    found = summed_loss(loss_mask, losses)
    _validate(found[0] / found[1].clamp(min=1))
    return found


def _loss_of_replicas(batch: PlannedMicrobatch, micro_batch_size: int, losses: torch.Tensor) -> Loss:
    """`checked_loss`, whose report has sum and tokens [replicas, 2] by the replica that read them."""
    loss, num_tokens, _ = checked_loss(batch.loss_mask, losses)
    samples = batch.params.samples
    assert samples is not None, "rows say their samples where evaluation asks for them"
    mask = batch.loss_mask.view(-1).float()
    # [T, (loss, 1)] summed by sample, then by the replica that read it.
    each = torch.stack([losses.detach().view(-1).float() * mask, mask], dim=1)
    by_sample = each.new_zeros(batch.params.num_samples, 2).index_add_(0, samples, each)
    return loss, num_tokens, {LOSS: by_sample.view(-1, micro_batch_size, 2).sum(1)}


def _validate(loss: torch.Tensor) -> None:
    """Run the checks of Megatron's own forward step on the loss of a token."""
    # They replay the step when a value is not a number or leaps: sums would leap with the number of
    # tokens that a plan places on a rank.
    args = session.current().args
    if not args.check_for_nan_in_loss_and_grad and not args.check_for_spiky_loss:
        return
    state: Any = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            message = f"found {what} in local forward loss calculation"
            state.validate_result(result=loss, rejection_func=rejected, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        factor = getattr(state, "spiky_loss_factor", SPIKE)  # Megatron-Bridge keeps its own there
        leaps = partial(state.is_unexpectedly_large, threshold=factor, context="loss")
        state.validate_result(result=loss, rejection_func=leaps, message="Spiky loss", tolerance=0.0, fatal=False)


MakeLocal: TypeAlias = Callable[[int], LocalMicrobatch]


class Microbatches:
    """This rank's microbatches, for all its model chunks, each bound when it is first asked for."""

    def __init__(
        self,
        job: session.Session,
        planned: PlannedStep,
        local: MakeLocal,
        own: Sequence[range],
        counts: torch.Tensor | None = None,
        *,
        forward_only: bool,
    ) -> None:
        """Take the plans, `own` by microbatch; `local` makes this rank's rows of a microbatch;
        `counts`: sums over the pool of their loss masks, where further tokens are predicted.
        """
        place = job.place(planned.step.strategy)
        assert place is not None, "a rank that is left over runs no microbatch"
        self._job = job
        self._binder = job.binder(place.attention, place.shape)
        # Evaluation keeps nothing for a backward that does not come.
        self.decision = None if forward_only else job.keeping().decide(planned)
        self._phases: tuple[PhaseName, ...] = ("forward",) if forward_only else BOTH_PHASES
        self._planned = planned
        self._own = own
        self._local = local
        self._counts, self._num_samples = counts, job.num_samples
        self._bound: dict[int, PlannedMicrobatch] = {}
        self._chunks = 0
        self._asked = [0] * len(own)
        self.counters: list[Counters] = []
        if not forward_only:  # of a step that was expected and did not come
            job.bind_ahead.forget_all_but(
                self._binder.key(plan, policies_of(self.decision), nano_batch, self._phases)
                for of in own
                for nano_batch, at in enumerate(of)
                for plan in self._binder.plans(planned.plans[at]).values()
            )
        for of in own[1:]:
            self._expect(self._binder, planned.plans, of)

    def trained(self, shared: PoolLengths) -> None:
        """Log the training step that ran; then look up the first microbatch of the next one."""
        self._job.steps.ran(self._planned, shared, self.counters, self.decision)
        plans = self._job.planner(False)
        # The host waits for the device now and then until the next step begins: time to look up its
        # first microbatch.
        self._job.bind_ahead.submit(lambda: self._expect_next(plans.coming()))

    def _expect_next(self, coming: StepPlan | None) -> None:
        if coming is None or coming.ticks:
            return
        place = self._job.place(coming.strategy)
        if place is not None:
            first = coming.pipelines[place.pipeline].start
            binder = self._job.binder(place.attention, place.shape)
            self._expect(binder, coming.plans, coming.plans_of[first])

    def _expect(self, binder: Binder, plans: Sequence[MicrobatchPlan], which: Sequence[int]) -> None:
        for nano_batch, at in enumerate(which):
            for plan in binder.plans(plans[at]).values():
                binder.expect(plan, policies_of(self.decision), nano_batch, self._phases)

    def of_chunk(self) -> Iterator[PlannedMicrobatch]:
        """All microbatches in order, for one model chunk. Every chunk's is made before any is used."""
        self._chunks += 1
        return map(self._take, range(len(self._asked)))

    def _take(self, index: int) -> PlannedMicrobatch:
        if index not in self._bound:
            self._bound[index] = self._bind(index)
        self._asked[index] += 1
        return self._bound.pop(index) if self._asked[index] == self._chunks else self._bound[index]

    def _bind(self, index: int) -> PlannedMicrobatch:
        plans = self._planned.plans
        bounds = [
            bind_layers(self._binder, plans[at], self.decision, nano_batch, self._phases, number=at)
            for nano_batch, at in enumerate(self._own[index])
        ]
        self.counters += [bound.counters for layers in bounds for bound in layers.bounds]
        counts = None if self._counts is None else self._counts[index]
        made = planned_microbatch(self._local(index), bounds, counts, self._num_samples)
        if not self._job.sums_loss:
            return made
        # Megatron divides by the tokens of all microbatches and ranks: one of all counts as one.
        one = torch.tensor(float(index == 0 and self._job.pool.rank == 0), device=made.loss_mask.device)
        return dataclasses.replace(made, loss_mask=CountedMask.of(made.loss_mask, one))

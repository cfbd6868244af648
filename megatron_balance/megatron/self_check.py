"""One step forward with the plan and without, on a tiny batch, before training.

With: the same path as a training step, from samples to the loss. Without: every rank holds the whole
batch, and attends document by document with torch's own attention. Nothing is trained, counted or
drawn from the corpus.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import get_model_config

from megatron_balance.errors import SelfCheckError
from megatron_balance.megatron.data import PADDING, unpack
from megatron_balance.megatron.forward_step import (
    LOSS,
    PlannedMicrobatch,
    forward_step,
    mask_counts,
    planned_microbatch,
)
from megatron_balance.training.microbatch import assemble

log = logging.getLogger(__name__)

Forward = Callable[[Any, int], list[dict[str, torch.Tensor]]]
"""Losses of a forward over an iterator, of so many microbatches."""
TOLERANCE = {torch.float32: 1e-5}
HALF_TOLERANCE = 1e-2
"""Relative difference of losses that is rounding; the second with weights of another type."""


def tiny_samples(num_replicas: int, batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Samples of all replicas [num_replicas * batch, S] with documents of several lengths.

    `length`: what a sample can hold at most.
    """
    lengths = [each for each in (29, 12, 2, 1) if each <= length // 2] or [1]
    size = sum(lengths)
    positions = torch.cat([torch.arange(each) for each in lengths]).repeat(num_replicas * batch, 1)
    tokens = torch.arange(num_replicas * batch * size).view(-1, size) * 7919 % max(1, vocabulary - 1)
    last = torch.nn.functional.pad(positions[:, 1:], (0, 1)) == 0
    labels = torch.roll(tokens, -1, dims=1).masked_fill(last, 0)
    assert PADDING not in positions, "a tiny sample has no padding"
    return {"tokens": tokens, "labels": labels, "loss_mask": (~last).float(), "position_ids": positions}


def check(
    job: Any, planned: Forward, alone: Callable[[Sequence[PlannedMicrobatch]], Any], chunks: Sequence[Any]
) -> None:
    """Compare the losses of a tiny batch. Collective over the world.

    Args:
        job: the session.
        planned: of raw microbatches, as a training step runs them.
        alone: of microbatches that every rank holds whole.
        chunks: of the model.

    Raises:
        SelfCheckError: they differ by more than rounding.
    """
    args, pool = job.args, job.pool
    batch, number = args.micro_batch_size, pool.num_stages
    length = min(args.seq_length, args.max_position_embeddings)
    samples = tiny_samples(pool.num_replicas, batch, length, args.padded_vocab_size or args.vocab_size or 2)
    own = {name: values[pool.replica * batch :][:batch] for name, values in samples.items()}
    with _nothing_counted(chunks):
        with_plan = _loss(planned(iter([own] * number), number), summed=True)
        whole = [_whole(job, samples) for _ in range(number)]
        without = _loss(alone(whole), summed=False)
    compare(with_plan, without, getattr(args, "curr_iteration", 0) + 1, job)


def compare(with_plan: float, without: float, step: int, job: Any) -> None:
    """Compare two losses, of which a stage that computes none has NaN for both.

    Raises:
        SelfCheckError: they differ, here or on another rank.
    """
    difference = abs(with_plan - without) / max(abs(without), 1e-30)
    tolerance = TOLERANCE.get(job.dtype, HALF_TOLERANCE)
    device = torch.empty(0, device="cuda").device
    known = torch.tensor([with_plan, without, difference], dtype=torch.float64, device=device)
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        known.fill_(-math.inf)
    known = torch.nan_to_num(known, nan=math.inf, neginf=-math.inf)
    dist.all_reduce(known, op=dist.ReduceOp.MAX)
    with_plan, without, difference = known.tolist()
    told = f"self-check before step {step}: a tiny batch has loss {with_plan:.7g} with the plan of "
    told += f"{job.config.planner.name} and {without:.7g} without, a relative difference of {difference:.1e}"
    if not difference <= tolerance:
        raise SelfCheckError(
            f"{told}; expected at most {tolerance:.0e}. Nothing was trained. See whether this Megatron is one that was "
            "reviewed ('megatron-balance doctor --patches'), try another planner or kernel, or set self_check: false"
        )
    log.info("%s", told)


def _loss(stored: Sequence[Mapping[str, torch.Tensor]], *, summed: bool) -> float:
    """Loss per token of what a forward stored, NaN where that is nothing; `summed`: over the pool."""
    total = torch.zeros(2, device="cuda")
    for each in stored:
        total += each[LOSS].detach().view(-1, 2).sum(0)
    if summed:
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    loss, tokens = total.tolist()
    return loss / tokens if tokens else math.nan


def _whole(job: Any, samples: Mapping[str, torch.Tensor]) -> PlannedMicrobatch:
    """All samples of the pool as one microbatch of this rank, which attends for itself."""
    sequences = unpack(samples, job.depths, 0 if job.num_samples else None)
    device = torch.empty(0, device="cuda").device
    layout = np.array([(seq, 0, length) for seq, length in enumerate(sequences.lengths)], dtype=np.int64)
    local = assemble(sequences.rows.to(device), layout, job.row_multiple)
    counts = mask_counts([local.rows], job.depths)[0] if job.depths else None
    microbatch = planned_microbatch(local, [None], counts, job.num_samples)
    microbatch.params.alone = sequences.lengths
    return microbatch


@contextmanager
def _nothing_counted(chunks: Sequence[Any]) -> Iterator[None]:
    """Evaluate, without timers and Megatron's own checks of values, which would count this."""
    machine: Any = get_rerun_state_machine()
    mode, training = machine.get_mode(), [chunk.training for chunk in chunks]
    timers = [get_model_config(chunk).timers for chunk in chunks]
    # Which values leap is judged by those before, and counted in this mode too.
    seen = {name: dict(getattr(machine, name)) for name in ("large_value_counts", "max_values")}
    machine.set_mode(RerunMode.DISABLED)
    for chunk in chunks:
        chunk.eval()
        get_model_config(chunk).timers = None
    try:
        with torch.no_grad():
            yield
    finally:
        machine.set_mode(mode)
        vars(machine).update(seen)
        for chunk, was, kept in zip(chunks, training, timers, strict=True):
            chunk.train(was)
            get_model_config(chunk).timers = kept


def run_alone(inner: Callable[..., Any], whole: Sequence[PlannedMicrobatch], model: Any, kwargs: dict[str, Any]) -> Any:
    """Megatron's schedule over microbatches that every rank holds whole; its stored losses."""
    chunks = len(model) if isinstance(model, list) else 1
    iterators = [iter(whole) for _ in range(chunks)]
    return inner(
        forward_step_func=forward_step,
        data_iterator=iterators if chunks > 1 else iterators[0],
        model=model,
        num_microbatches=len(whole),
        forward_only=True,
        **kwargs,
    )

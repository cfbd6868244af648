"""Transfers between pipeline stages whose shapes come from the plan: Megatron's way to know them
(`variable_seq_lengths`) sends each shape ahead of its tensor and synchronises the device.

A transfer does not say which microbatch it brings; the order does. Across the border between two
stages hidden states go forward, and their gradients come back, in the order of one list of
microbatches (`Crossings`), which follows from the schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_balance.errors import ConfigError
from megatron_balance.training.tokens import padded

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class StageShapes:
    """Shapes of the hidden states between pipeline stages, by microbatch: [rows, 1, hidden size]."""

    rows: tuple[int, ...]
    hidden_size: int

    @classmethod
    def of_step(cls, tokens: Sequence[Sequence[int]], multiple: int, config: Any) -> StageShapes:
        """The shapes of a step. `tokens`: by microbatch and nano-batch, of this rank; `multiple`:
        of which the rows of a nano-batch are one; `config`: Megatron's, of the model.
        """
        shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return cls(tuple(sum(padded(n, multiple) for n in of) // shares for of in tokens), config.hidden_size)

    def __getitem__(self, microbatch: int) -> Shape:
        return self.rows[microbatch], 1, self.hidden_size


@dataclass(frozen=True, slots=True)
class Crossings:
    """The microbatches that cross the borders of a stage, in order, once for each model chunk.
    Stages form a ring: the last one hands on to the first one's next chunk.
    """

    with_previous: tuple[int, ...]
    with_next: tuple[int, ...]

    @classmethod
    def of_passes(cls, passes: Sequence[tuple[int, int]], stage: int, num_stages: int, num_chunks: int) -> Crossings:
        """The crossings of `passes`, (microbatch, chunk) in the order of every stage's forwards."""
        # The first stage is handed nothing for the first chunk, and the last hands on nothing of
        # the last.
        all_of_them = tuple(m for m, _ in passes)
        inside = tuple(m for m, chunk in passes if chunk < num_chunks - 1)
        return cls(inside if stage == 0 else all_of_them, inside if stage == num_stages - 1 else all_of_them)

    @classmethod
    def of_schedule(
        cls, num_microbatches: int, stage: int, num_stages: int, num_chunks: int, chunk_group: int
    ) -> Crossings:
        """The crossings in Megatron's own schedules, one forward, one backward, and interleaved.
        `chunk_group`: `microbatch_group_size_per_vp_stage`.
        """
        make_table: Any = schedules.get_schedule_table
        table: Sequence[tuple[int, int]] = make_table(num_microbatches, num_chunks, chunk_group)
        return cls.of_passes(table, stage, num_stages, num_chunks)


class PlannedTransfers(P2PCommunicator):
    """Megatron's communicator, told the shape of everything that it receives, for one step."""

    def __init__(self, group: dist.ProcessGroup, config: Any, shapes: StageShapes, crossings: Crossings) -> None:
        """Make a step's communicator over `group`, this rank's pipeline; `config`: Megatron's, of
        the model.
        """
        told = copy.copy(config)
        told.variable_seq_lengths = True
        # It works round a race in batch_isend_irecv that torch no longer has (pytorch/pytorch#82450,
        # torch 1.13): a request's wait makes the stream wait for the transfer.
        told.batch_p2p_sync = False
        super().__init__(group, told)
        self.expect(shapes, crossings)

    def expect(self, shapes: StageShapes, crossings: Crossings) -> None:
        """Take a step's shapes, of what is received and of what is sent."""
        # Hidden states come from the stage before and go to the one behind; gradients the other
        # way, in the same order.
        self._received = _Due(shapes, crossings.with_previous), _Due(shapes, crossings.with_next)
        self._sent = _Due(shapes, crossings.with_previous), _Due(shapes, crossings.with_next)

    @classmethod
    def of_pipeline(cls, config: Any, shapes: StageShapes, crossings: Crossings) -> PlannedTransfers:
        return cls(cast("dist.ProcessGroup", mpu.get_pipeline_model_parallel_group()), config, shapes, crossings)

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Shapes of what comes from the previous and from the next stage; empty: nothing does."""
        # Every stage plans every microbatch, and ranks at one place in the pools of their stages
        # hold the same rows, so nothing needs to be asked.
        for due, tensor in zip(self._sent, (tensor_send_prev, tensor_send_next), strict=True):
            if tensor is not None:
                due.check(tensor.shape)
        previous, following = self._received
        return previous.take() if recv_prev else (), following.take() if recv_next else ()


class _Due:
    def __init__(self, shapes: StageShapes, microbatches: Iterable[int]) -> None:
        self._shapes = shapes
        self._left: Iterator[int] = iter(microbatches)

    def take(self) -> Shape:
        return self._shapes[self._next()]

    def check(self, shape: Sequence[int]) -> None:
        """Reject a tensor that the neighbouring stage does not expect."""
        microbatch = self._next()
        if tuple(shape) != self._shapes[microbatch]:
            raise ConfigError(
                f"microbatch {microbatch} leaves this pipeline stage as {list(shape)}, but its plan says "
                f"{list(self._shapes[microbatch])} (rows, 1, hidden size); a stage must keep the rows it was given"
            )

    def _next(self) -> int:
        found = next(self._left, None)
        assert found is not None, "a pipeline schedule moves more than its order of passes says"
        return found


def given_group(p2p_communicator: Any) -> dist.ProcessGroup | None:
    """The group of a communicator that a script hands to `pretrain`; ConfigError: it is another
    than Megatron's plain one.
    """
    if p2p_communicator is None:
        return None
    if type(p2p_communicator) is not P2PCommunicator:
        raise ConfigError(
            f"the schedule was handed a p2p_communicator of type {type(p2p_communicator).__name__}; planned "
            "microbatches go through P2PCommunicator alone: leave it out"
        )
    return p2p_communicator.pp_group

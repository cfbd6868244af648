"""Pipeline schedules as data: in which order each stage runs its forwards and backwards, and a
clock that follows them.

One forward, one backward (1F1B) and its interleaved form, several model chunks a stage (Narayanan
et al., 2021, section 2.2), as in Megatron-core's schedules.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats


@dataclass(frozen=True, slots=True)
class ChunkPass:
    """A forward or backward of one microbatch through one model chunk of a stage."""

    backward: bool
    microbatch: int
    chunk: int = 0


def order(num_stages: int, stage: int, num_microbatches: int, num_chunks: int = 1) -> list[ChunkPass]:
    """The passes of a stage, in order. Raises ConfigError: an interleaved schedule of microbatches
    that do not come in whole groups of `num_stages`.
    """
    if num_chunks > 1 and num_microbatches % num_stages:
        raise ConfigError(
            f"interleave {num_chunks}: {num_microbatches} microbatches are not a multiple of {num_stages} pipeline "
            "stages; use a multiple, or interleave 1"
        )
    total = num_microbatches * num_chunks
    if num_chunks == 1:
        ahead = min(num_stages - stage - 1, total)
    elif num_microbatches == num_stages:
        ahead = total
    else:
        ahead = (num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages
    forwards = [_pass(index, num_stages, num_chunks, backward=False) for index in range(total)]
    backwards = [_pass(index, num_stages, num_chunks, backward=True) for index in range(total)]
    steady = [each for pair in zip(forwards[ahead:], backwards, strict=False) for each in pair]
    return [*forwards[:ahead], *steady, *backwards[total - ahead :]]


def _pass(index: int, num_stages: int, num_chunks: int, *, backward: bool) -> ChunkPass:
    # The n-th forward, or backward, of a stage.
    #
    # Groups of `num_stages` microbatches go through all chunks, backwards through the last chunk
    # first.
    group, place = divmod(index, num_stages * num_chunks)
    chunk, member = divmod(place, num_stages)
    return ChunkPass(backward, group * num_stages + member, num_chunks - 1 - chunk if backward else chunk)


# (stage, pass, when its input is there and the stage free [num_ranks]) -> when it is done.
Run = Callable[[int, ChunkPass, Floats], Floats]


@dataclass(frozen=True, slots=True)
class PipelineClocks:
    """A pipeline that has run; by stage, [num_ranks] each.

    `done_s`: when each rank was done. `busy_s`: how long it ran passes, waiting for ranks of its own
    stage included.
    """

    done_s: tuple[Floats, ...]
    busy_s: tuple[Floats, ...]

    @property
    def total_s(self) -> float:
        """Seconds at which the last rank of the last stage is done."""
        return float(max(clock.max() for clock in self.done_s))

    @property
    def bubble_share(self) -> float:
        """Idle time over work, of all stages: waiting for neighbours, transfers, and the end. Where
        all passes are alike: (p - 1) / (v m) (Narayanan et al., section 2.2).
        """
        work_s = float(np.sum(self.busy_s))
        return self.total_s * sum(map(len, self.busy_s)) / work_s - 1 if work_s else 0.0


def run(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    num_ranks: int,
    each: Run,
    transfer: Callable[[int], Floats],
) -> PipelineClocks:
    """The clocks of all stages once they are done with all passes.

    `transfer(microbatch)`: seconds [num_ranks] from stage to stage.
    """
    orders = [order(num_stages, stage, num_microbatches, num_chunks) for stage in range(num_stages)]
    clock = [np.zeros(num_ranks) for _ in range(num_stages)]
    busy = [np.zeros(num_ranks) for _ in range(num_stages)]
    done: dict[tuple[bool, int, int], Floats] = {}
    at = [0] * num_stages
    last = num_stages * num_chunks - 1
    moved = True
    while moved:
        moved = False
        for stage in range(num_stages):
            while at[stage] < len(orders[stage]):
                step = orders[stage][at[stage]]
                transfer_s = transfer(step.microbatch) if num_stages > 1 else np.zeros(num_ranks)
                ready = _ready(step, step.chunk * num_stages + stage, last, done, transfer_s)
                if ready is None:
                    break
                begin = np.maximum(clock[stage], ready)
                clock[stage] = each(stage, step, begin)
                busy[stage] += clock[stage] - begin
                done[step.backward, step.chunk * num_stages + stage, step.microbatch] = clock[stage]
                at[stage] += 1
                moved = True
    assert at == [len(own) for own in orders], "a pipeline schedule that waits for itself"
    return PipelineClocks(tuple(clock), tuple(busy))


def _ready(
    step: ChunkPass, place: int, last: int, done: dict[tuple[bool, int, int], Floats], transfer_s: Floats
) -> Floats | float | None:
    # Seconds at which the input of a pass is there; None: not known yet.
    #
    # `place`: of its chunk among all chunks of the model.
    if not step.backward and place == 0:
        return 0.0
    if step.backward and place == last:
        return done.get((False, last, step.microbatch))
    before = done.get((step.backward, place + 1 if step.backward else place - 1, step.microbatch))
    return None if before is None else before + transfer_s

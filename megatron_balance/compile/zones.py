"""The queue and the zone of every op of a rank's program, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

from megatron_balance.compile.transpose import forward_id
from megatron_balance.ir.program import Attend, AttendGrad, Exchange, RankProgram


class OpZones(NamedTuple):
    """By op: its queue, and the name of its zone."""

    queues: list[int]
    zones: list[str]


def places(program: RankProgram, *, backward: bool) -> OpZones:
    """The places of a phase's ops.

    In the backward, launches are the forward ones in reverse; an exchange belongs to the forward
    exchange that it comes from.
    """
    return _backward(program) if backward else _forward(program)


def _forward(program: RankProgram) -> OpZones:
    queues = [queue for queue, (_, count) in enumerate(program.queues) for _ in range(count)]
    names = [name for name, count in program.queues for _ in range(count)]
    return OpZones(queues, names) if names else OpZones([0] * len(program.forward), [""] * len(program.forward))


def _backward(program: RankProgram) -> OpZones:
    forward = list(zip(*_forward(program), strict=True))
    launches = [place for op, place in zip(program.forward, forward, strict=True) if isinstance(op, Attend)][::-1]
    exchanges = {op.id: place for op, place in zip(program.forward, forward, strict=True) if isinstance(op, Exchange)}
    found: list[tuple[int, str]] = []
    remaining = iter(launches)
    place = launches[0] if launches else (0, "")
    for op in program.backward:
        if isinstance(op, AttendGrad):
            place = next(remaining)
        found.append(exchanges.get(forward_id(op.id, program), place) if isinstance(op, Exchange) else place)
    return OpZones([queue for queue, _ in found], [name for _, name in found])

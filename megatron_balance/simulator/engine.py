"""The event engine: one phase of one attention call on clocks, with every stream and every
transfer.

The rules are the executor's: those of CUDA streams (transport "streams") or those of gloo
("sockets").
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.simulator import host
from megatron_balance.simulator.emulated.sockets import Sockets
from megatron_balance.simulator.events import Outcome
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.phase import SimulatedPhase
from megatron_balance.simulator.streams import StreamsPhase

Transport: TypeAlias = Literal["streams", "sockets"]
TRANSPORTS: tuple[Transport, ...] = ("streams", "sockets")


def play(
    phase: SimulatedPhase, machine: Machine, enter_s: Floats, transport: Transport = "streams", *, trace: bool = False
) -> Outcome:
    """Run a phase; `enter_s` [num_ranks]: when each rank enters it. `trace`: note what every stream
    does.
    """
    kind = StreamsPhase if transport == "streams" else Sockets
    outcome = kind(phase, machine, enter_s, trace=trace).run()
    if not machine.host.is_modelled:
        return outcome
    issued = host.issue_s(phase, machine.host)
    late = host.behind(np.array([max(each, default=0.0) for each in issued]), outcome.end_s)
    if not late.any():
        return outcome
    again = kind(phase, machine, enter_s, trace=trace)
    again.issued_s = [each if behind else None for each, behind in zip(issued, late.tolist(), strict=True)]
    return again.run()

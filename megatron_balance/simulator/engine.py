"""The event engine: one phase of one attention call on clocks, with every stream and every
transfer.

The rules are the executor's: those of CUDA streams (transport "streams") or those of gloo
("sockets").
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from megatron_balance.cost.base import Floats
from megatron_balance.simulator.emulated.sockets import Sockets
from megatron_balance.simulator.events import Outcome
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.phase import Phase
from megatron_balance.simulator.streams import Streams

Transport: TypeAlias = Literal["streams", "sockets"]
TRANSPORTS: tuple[Transport, ...] = ("streams", "sockets")


def play(
    phase: Phase, machine: Machine, enter_s: Floats, transport: Transport = "streams", *, trace: bool = False
) -> Outcome:
    """Run a phase; `enter_s` [num_ranks]: when each rank enters it. `trace`: note what every stream
    does.
    """
    return (Streams if transport == "streams" else Sockets)(phase, machine, enter_s, trace=trace).run()

"""Transports of exchanges: a protocol (`base`), implementations, and the choice."""

from __future__ import annotations

from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.lower.parcels import CallForm
from megatron_balance.runtime.lower.steps import Phase
from megatron_balance.runtime.trace import Trace
from megatron_balance.runtime.transport.base import Transport
from megatron_balance.runtime.transport.gloo import Gloo
from megatron_balance.runtime.transport.streams import Streamed


def open_transport(
    phase: Phase, form: CallForm, groups: Groups, trace: Trace | None, *, timed: bool = False
) -> Transport:
    """Open the pool's transport for one run of a phase. Relaying for other ranks begins at once.

    `trace`: what this rank passes on is recorded there, if there is one; `timed`: and, where there are
    streams, by their events what every exchange takes on them (`runtime.recorder`).
    """
    if groups.streams is not None:
        return Streamed(phase, form, groups, trace, timed=timed)
    return Gloo(phase, form, groups, trace)

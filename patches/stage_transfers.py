"""Megatron's pipeline schedules and communicator, whose order of transfers we rely on."""

from __future__ import annotations

from megatron_balance.patches import Patch, read

_ORDER = "which microbatch a transfer brings follows from its place in the schedule (megatron/stage_transfers.py)"
_ASKS = "our communicator is a subclass that answers `_communicate_shapes`; it relies on when this asks, and for what"

ONE_CHUNK = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        wrap=read,
        reviewed={
            "43c05abb1b63": "0.19.x",
            "818d94bd60e8": "0.18.2",
            "29c981e03dad": "0.20 of 2026-08",
            "05f1a63af1f3": "dev of 2026-08",
        },
        why=_ORDER,
    ),
)
INTERLEAVED = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        wrap=read,
        reviewed={
            "00baf040c63b": "0.19.x",
            "b59fc2244c30": "0.18.2",
            "3063902f8600": "0.20 of 2026-08",
            "e863b2040726": "dev of 2026-08",
        },
        why=_ORDER,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_schedule_table",
        wrap=read,
        reviewed={"a7b63a2b60a2": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why=_ORDER,
    ),
)
COMMUNICATOR = (
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        wrap=read,
        reviewed={"3fb54290a618": "0.19.x, 0.18.2, 0.20 of 2026-08", "62138313f9ad": "dev of 2026-08"},
        why=_ASKS,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        wrap=read,
        reviewed={"572ea46b0de6": "0.19.x, 0.18.2, 0.20 of 2026-08"},
        why=_ASKS,
    ),
)
PATCHES = (*ONE_CHUNK, *INTERLEAVED, *COMMUNICATOR)

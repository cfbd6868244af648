"""Megatron's pipeline schedules and communicator, whose order of transfers we rely on."""

from __future__ import annotations

from megatron_balance.patches import Patch, read

_ORDER = "which microbatch a transfer brings follows from its place in the schedule (megatron/stage_transfers.py)"
_ASKS = "our communicator is a subclass that answers `_communicate_shapes`; it relies on when this asks, and for what"

PATCHES = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        wrap=read,
        digest="772d6b7d8182",
        why=_ORDER,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        wrap=read,
        digest="091263d1c27e",
        why=_ORDER,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_schedule_table",
        wrap=read,
        digest="158bd2492372",
        why=_ORDER,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        wrap=read,
        digest="a902480caa75",
        why=_ASKS,
    ),
    Patch(
        target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes",
        wrap=read,
        digest="64129c790b8b",
        why=_ASKS,
    ),
)

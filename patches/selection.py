"""The patches that a training entry and its job apply: only those that the job uses.

Import this where the device is known: the modules of the patches import Megatron, which looks at it
then.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from megatron_balance.megatron import cpu
from megatron_balance.megatron.flags import balances_by_sample
from megatron_balance.patches import (
    Patch,
    arguments,
    checkpoint_args,
    context_parallel_groups,
    data_iterator,
    dataset_helpers,
    forward_backward,
    moe_aux_loss,
    moe_routing,
    moe_splits,
    mtp,
    ping_pong,
    pretrain,
    stage_transfers,
    strategies,
    te_attention,
    torch_norm,
    training_log,
)

ENTRY = (arguments, pretrain)
ALWAYS = (context_parallel_groups, data_iterator, forward_backward, training_log, checkpoint_args, dataset_helpers)
SOMETIMES = (
    stage_transfers,
    ping_pong,
    moe_aux_loss,
    moe_routing,
    mtp,
    te_attention,
    moe_splits,
    torch_norm,
    strategies,
)


def for_script() -> tuple[Patch, ...]:
    """The patches around an unmodified script, whose parser and call of `pretrain` we cannot write
    ourselves.
    """
    return tuple(patch for module in ENTRY for patch in module.PATCHES)


def for_loop(args: Any, *, joint: bool, nano_batches: bool) -> tuple[Patch, ...]:
    """The patches of a job whose loop is not Megatron's `pretrain`; arguments as of `for_job`."""
    return for_job(args, joint=joint, nano_batches=nano_batches, always=())


def for_job(
    args: Any, *, joint: bool, nano_batches: bool, changes: bool = False, always: Sequence[ModuleType] = ALWAYS
) -> tuple[Patch, ...]:
    """The patches of a job on this machine.

    Args:
        args: Megatron's, validated.
        joint: whether all pipeline stages attend together, under a schedule of ours.
        nano_batches: whether microbatches may run as two nano-batches.
        changes: whether training changes between strategies.
        always: modules of the patches that every such job has.
    """
    from megatron_balance.megatron.entry import te_available

    experts, on_cpu = args.num_experts is not None, cpu.installed()
    used = {
        moe_aux_loss: experts,
        mtp: bool(args.mtp_num_layers),
        te_attention: te_available(),
        moe_splits: on_cpu and experts,
        torch_norm: on_cpu and args.sequence_parallel,
    }
    chosen = (*always, *(module for module, is_used in used.items() if is_used))
    patches = [patch for module in chosen for patch in module.PATCHES]
    if changes:
        patches += strategies.PATCHES
    if args.pipeline_model_parallel_size > 1 or changes:
        patches += stage_transfers.COMMUNICATOR
        if not joint:
            interleaved = args.virtual_pipeline_model_parallel_size is not None
            patches += stage_transfers.INTERLEAVED if interleaved else stage_transfers.ONE_CHUNK
    if experts and args.moe_router_load_balancing_type == "sinkhorn":
        patches += moe_routing.SINKHORN
    if balances_by_sample(args):
        patches += moe_routing.BY_SAMPLE
    if nano_batches:
        patches += ping_pong.LAYERS
        patches += ping_pong.ROUTER if experts else ()
    return tuple(patches)


def every() -> tuple[Patch, ...]:
    """All patches there are, of every kind of job."""
    return tuple(patch for module in (*ENTRY, *ALWAYS, *SOMETIMES) for patch in module.PATCHES)

"""The patches that a training entry and its job apply: only those that the job uses."""

from __future__ import annotations

from typing import Any

from megatron_balance.patches import Patch


def for_entry(script: bool) -> tuple[Patch, ...]:
    """The patches before the arguments are known.

    Args:
        script: an unmodified script runs, whose parser and call of `pretrain` we cannot write
            ourselves.
    """
    # Imported here: these modules import Megatron, which looks at the device while it is imported.
    from megatron_balance.patches import arguments, pretrain

    return (*arguments.PATCHES, *pretrain.PATCHES) if script else ()


def for_job(args: Any, *, joint: bool, ping_pong: bool) -> tuple[Patch, ...]:
    """The patches of a job on this machine.

    Args:
        args: Megatron's, validated.
        joint: whether all pipeline stages attend together, under a schedule of ours.
        ping_pong: whether microbatches may run as two nano-batches.
    """
    from megatron_balance.megatron import cpu
    from megatron_balance.megatron.entry import te_available
    from megatron_balance.patches import (
        checkpoint_args,
        context_parallel_groups,
        data_iterator,
        dataset_helpers,
        forward_backward,
        moe_aux_loss,
        moe_splits,
        stage_transfers,
        te_attention,
        torch_norm,
        training_log,
    )
    from megatron_balance.patches import ping_pong as nano_batches

    experts, on_cpu = args.num_experts is not None, cpu.installed()
    chosen = [context_parallel_groups, data_iterator, forward_backward, training_log, checkpoint_args, dataset_helpers]
    chosen += [module for module, used in (
        (moe_aux_loss, experts),
        (te_attention, te_available()),
        (moe_splits, on_cpu and experts),
        (torch_norm, on_cpu and args.sequence_parallel),
    ) if used]  # fmt: skip
    patches = [patch for module in chosen for patch in module.PATCHES]
    if args.pipeline_model_parallel_size > 1:
        patches += stage_transfers.COMMUNICATOR
        if not joint:
            interleaved = args.virtual_pipeline_model_parallel_size is not None
            patches += stage_transfers.INTERLEAVED if interleaved else stage_transfers.ONE_CHUNK
    if ping_pong:
        patches += nano_batches.LAYERS
        patches += nano_batches.ROUTER if experts else ()
    return tuple(patches)


def every() -> tuple[Patch, ...]:
    """All patches there are, of every kind of job."""
    from megatron_balance.patches import (
        arguments,
        checkpoint_args,
        context_parallel_groups,
        data_iterator,
        dataset_helpers,
        forward_backward,
        moe_aux_loss,
        moe_splits,
        ping_pong,
        pretrain,
        stage_transfers,
        te_attention,
        torch_norm,
        training_log,
    )

    modules = [arguments, pretrain, context_parallel_groups, data_iterator, forward_backward, training_log]
    modules += [checkpoint_args, dataset_helpers, stage_transfers, ping_pong, moe_aux_loss, te_attention]
    return tuple(patch for module in (*modules, moe_splits, torch_norm) for patch in module.PATCHES)

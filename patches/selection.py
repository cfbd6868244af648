"""The patches that a training entry applies."""

from __future__ import annotations

from megatron_balance.patches import Patch


def for_training(script: bool) -> tuple[Patch, ...]:
    """All patches of a run on this machine.

    Args:
        script: an unmodified script runs, whose parser and call of `pretrain` we cannot write
            ourselves.
    """
    # Imported here: these modules import Megatron, which looks at the device while it is imported.
    from megatron_balance.megatron import cpu
    from megatron_balance.megatron.entry import te_available
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

    modules = [context_parallel_groups, data_iterator, forward_backward, training_log, checkpoint_args]
    modules += [dataset_helpers, moe_aux_loss, ping_pong, stage_transfers]
    if script:
        modules += [arguments, pretrain]
    if te_available():
        modules.append(te_attention)
    if cpu.installed():
        modules += [moe_splits, torch_norm]
    return tuple(patch for module in modules for patch in module.PATCHES)

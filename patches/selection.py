"""The patches that a training entry and its job apply: only those that the job uses.

Import this where the device is known: the modules of the patches import Megatron, which looks at it
then.
"""

from typing import Any

from megatron_balance.megatron import cpu
from megatron_balance.megatron.flags import balances_by_sample, is_hybrid
from megatron_balance.patches import Patch, layers, machine, training_loop


def for_job(
    args: Any,
    *,
    joint: bool,
    nano_batches: bool,
    changes: bool = False,
    always: tuple[Patch, ...] = (*training_loop.LOOP, *machine.HELPERS),
) -> tuple[Patch, ...]:
    """The patches of a job on this machine, of Megatron's validated `args`. `joint`: all pipeline
    stages attend together, under a schedule of ours; `nano_batches`: microbatches may run as two;
    `changes`: training changes between strategies; `always`: none where the loop is not Megatron's
    `pretrain`.
    """
    from megatron_balance.megatron.entry import te_available

    experts, on_cpu = args.num_experts is not None, cpu.installed()
    pipelines = args.pipeline_model_parallel_size > 1 or changes
    interleaved = pipelines and args.virtual_pipeline_model_parallel_size is not None
    used = (
        (True, always),
        (experts, layers.AUX_LOSS),
        (bool(args.mtp_num_layers), layers.MTP),
        (te_available(), layers.TE_ATTENTION),
        (is_hybrid(args), layers.MIXERS),
        (on_cpu and experts, machine.SPLITS),
        (on_cpu and args.sequence_parallel, machine.NORM),
        (changes, training_loop.STRATEGIES),
        (pipelines, training_loop.COMMUNICATOR),
        (pipelines and not joint, training_loop.INTERLEAVED if interleaved else training_loop.ONE_CHUNK),
        (experts and args.moe_router_load_balancing_type == "sinkhorn", layers.SINKHORN),
        (balances_by_sample(args), layers.BY_SAMPLE),
        (nano_batches, layers.PING_PONG),
        (nano_batches and experts, layers.PING_PONG_ROUTER),
    )
    return tuple(patch for is_used, patches in used if is_used for patch in patches)


def every() -> tuple[Patch, ...]:
    """All patches there are, of every kind of job."""
    return (*training_loop.PATCHES, *layers.PATCHES, *machine.PATCHES)

"""Refusals of flags that cannot work in one way of running: stages that attend together, replicas that
are pipelines of their own, another strategy each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Strategy
from megatron_balance.megatron.arguments import balances_by, given, reasons_in

UNEQUAL_STAGES = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)

ON_THE_HOST = ("optimizer_cpu_offload", "offload_optimizer_states", "chunked_optimizer_state_offload")

JOINT_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: any(getattr(args, name, None) for name in UNEQUAL_STAGES),
        "--pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers "
        "and --account-for-* "
        "give stages different numbers of layers, so they would attend at different times",
    ),
    (
        lambda args: bool(
            args.num_layers % (args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1))
        ),
        "--num-layers is not a multiple of pipeline stages x model chunks, so stages would attend at different times",
    ),
    (
        lambda args: (
            args.virtual_pipeline_model_parallel_size is not None
            and getattr(args, "microbatch_group_size_per_vp_stage", None)
            not in (None, args.pipeline_model_parallel_size)
        ),
        "--microbatch-group-size-per-virtual-pipeline-stage must be the number of pipeline stages",
    ),
    (
        given("mtp_num_layers"),
        "--mtp-num-layers puts more layers onto the last stage, so stages would attend at different times",
    ),
    (
        lambda args: bool(args.window_size) and args.window_attn_skip_freq is not None,
        "--window-attn-skip-freq gives layers different masks, and stages attend together in different layers",
    ),
    (
        given("defer_embedding_wgrad_compute"),
        "--defer-embedding-wgrad-compute belongs to Megatron's own schedules; leave it out",
    ),
    (given("moe_paged_stash"), "--moe-paged-stash belongs to Megatron's own schedules; leave it out"),
)
"""Flags that cannot work where all pipeline stages attend together."""


def check_joint_arguments(args: argparse.Namespace) -> None:
    """Reject arguments under which pipeline stages cannot attend together.

    Raises:
        ConfigError: names every flag that cannot work.
    """
    reasons = reasons_in(JOINT_REFUSALS, args)
    if reasons:
        raise ConfigError(f"pipeline stages cannot attend together: {'; '.join(reasons)}; or set 'pipeline: stages'")


PIPELINE_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: args.virtual_pipeline_model_parallel_size is not None,
        "interleaved model chunks (--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank) "
        "take microbatches in groups of the pipeline's size, and a pipeline runs any number of its own; leave them out",
    ),
    (
        lambda args: args.num_experts is not None and _experts_of_several(args),
        "--expert-model-parallel-size shares experts between replicas, which would have to meet in every layer of "
        "every microbatch, and each runs a number of its own; choose ranks of experts x expert tensor parallelism that "
        "divide those of tensor x context parallelism",
    ),
    (
        balances_by("global_aux_loss"),
        "--moe-router-load-balancing-type global_aux_loss counts over all replicas in every microbatch, and each runs "
        "a number of its own; use aux_loss",
    ),
    (
        given("mtp_num_layers"),
        "--mtp-num-layers weights its loss by counts over all replicas in every microbatch, and each runs a number of "
        "its own; leave it out",
    ),
    (
        balances_by("sinkhorn"),
        "--moe-router-load-balancing-type sinkhorn balances over all replicas in every microbatch, and each runs a "
        "number of its own; use aux_loss",
    ),
)
"""Flags that cannot work where every replica is a pipeline with microbatches of its own."""


def _experts_of_several(args: Any) -> bool:
    """Whether the ranks that share a layer's experts belong to several replicas."""
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return bool(
        args.tensor_model_parallel_size * args.context_parallel_size % (tensor * args.expert_model_parallel_size)
    )


def check_pipeline_arguments(args: argparse.Namespace, planner: str) -> None:
    """Reject arguments under which replicas cannot be pipelines with microbatches of their own.

    Raises:
        ConfigError: names every flag that cannot work.
    """
    reasons = reasons_in(PIPELINE_REFUSALS, args)
    if reasons:
        raise ConfigError(f"planner {planner}: {'; '.join(reasons)}")


STRATEGY_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: args.softmax_type == "learnable",
        "--softmax-type learnable: Megatron does not say of sinks how tensor-parallel ranks share them, which a "
        "strategy with another number of those must know",
    ),
    (
        lambda args: not args.use_distributed_optimizer,
        "--use-distributed-optimizer is missing: its shards own weights and gradients under every strategy",
    ),
    (
        lambda args: args.overlap_param_gather,
        "--overlap-param-gather works on the command line's layout alone; leave it out",
    ),
    (
        lambda args: args.num_experts is not None,
        "--num-experts: experts are not cut by strategies; train a dense model",
    ),
    (
        given("multi_latent_attention"),
        "--multi-latent-attention: its down-projections are on every tensor-parallel rank, which the exchange of "
        "weights does not know; leave it out",
    ),
    (given("mtp_num_layers"), "--mtp-num-layers: its layers have no place in a strategy's stages; leave it out"),
    (lambda args: args.fp8 is not None, "--fp8-format: weights of roles are not quantised; use bf16"),
    (
        lambda args: args.hidden_dropout > 0,
        "--hidden-dropout must be 0: Megatron seeds dropout by the layout's tensor-parallel ranks",
    ),
    (
        given("use_precision_aware_optimizer"),
        "--use-precision-aware-optimizer keeps no fp32 weights to be pulled; leave it out",
    ),
    (
        lambda args: any(getattr(args, name, None) for name in ON_THE_HOST),
        "--optimizer-cpu-offload, --offload-optimizer-states and --chunked-optimizer-state-offload keep what owners "
        "would pull on the host; leave them out",
    ),
    (
        lambda args: any(getattr(args, name, None) for name in UNEQUAL_STAGES),
        "--pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers "
        "and --account-for-*: stages of roles have equal numbers of layers; leave them out",
    ),
    (
        lambda args: (args.num_distributed_optimizer_instances or 1) > 1,
        "--num-distributed-optimizer-instances must be 1: each weight has one owner",
    ),
    (
        given("use_tp_pp_dp_mapping"),
        "--use-tp-pp-dp-mapping: owners are looked up in Megatron's own order of ranks; leave it out",
    ),
    (
        lambda args: (
            bool(args.check_weight_hash_across_dp_replicas_interval or args.save_params_interval)
            or bool(args.log_params_norm)
        ),
        "--check-weight-hash-across-dp-replicas-interval, --save-params-interval and --log-params-norm read weights of "
        "a model that is brought up to date only when it runs or is saved; leave them out",
    ),
    (
        lambda args: bool(args.save_wgrads_interval or args.save_dgrads_interval or args.save_activations_interval),
        "--save-wgrads-interval, --save-dgrads-interval and --save-activations-interval read a model that need not "
        "have run in the step; leave them out",
    ),
    (
        lambda args: args.optimizer not in (None, "adam", "sgd"),
        "--optimizer must be adam or sgd: others keep whole matrices together",
    ),
)
"""Flags that cannot work where training changes between strategies."""


def check_strategy_arguments(args: argparse.Namespace, strategies: Sequence[Strategy]) -> None:
    """Reject arguments and strategies with which training cannot change from step to step.

    Raises:
        ConfigError: names every flag that cannot work, and of each strategy what does not divide.
    """
    reasons = reasons_in(STRATEGY_REFUSALS, args)
    for strategy in strategies:
        reasons += [f"{strategy}: {reason}" for reason in _not_cut(args, strategy)]
    if reasons:
        raise ConfigError(f"strategies: {'; '.join(reasons)}")


def _not_cut(args: argparse.Namespace, strategy: Strategy) -> list[str]:
    """The reasons why the ranks or the model cannot be cut by a strategy."""
    reasons: list[str] = []
    if strategy.num_ranks > args.world_size:
        reasons.append(f"takes {strategy.num_ranks} ranks, and there are {args.world_size}; use fewer or smaller ones")
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    counts = (
        (args.num_attention_heads, "attention heads (--num-attention-heads)"),
        (groups, "query groups (--num-query-groups)"),
        (args.ffn_hidden_size, "the FFN's size (--ffn-hidden-size)"),
    )
    for scheme in dict.fromkeys(strategy.pipelines):
        reasons += [
            f"TP {scheme.tensor} does not divide {count}, {what}" for count, what in counts if count % scheme.tensor
        ]
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        padded = args.padded_vocab_size or -(-(args.vocab_size or 0) // multiple) * multiple
        if padded % scheme.tensor:
            wanted = lcm(args.make_vocab_size_divisible_by, scheme.tensor)
            reasons.append(
                f"TP {scheme.tensor} does not divide the padded vocabulary, {padded}; pad it with "
                f"--make-vocab-size-divisible-by {wanted}"
            )
        if args.num_layers % scheme.pipeline:
            reasons.append(f"PP {scheme.pipeline} does not divide the {args.num_layers} layers (--num-layers)")
    return reasons

"""Our options on Megatron's command line, and refusals of flags that cannot work with any plan.

Flags that one way of running alone cannot take are in `way_arguments`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from megatron_balance.errors import ConfigError

Device: TypeAlias = Literal["cpu", "cuda"]
DEVICE_OPTION = "--balance-device"

CPU_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "cp_comm_type": ["all_gather"],
}
"""Defaults of Megatron's flags with `--balance-device cpu`.

Its own need a GPU or Transformer Engine. How keys travel is the plan's, so `cp_comm_type` changes
nothing; Megatron's branch dev builds local layers under no other one.
"""


DEFAULTS: dict[str, Any] = {
    "calculate_per_token_loss": True,
    "attention_dropout": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}
"""Defaults of Megatron's flags wherever plans run: without them none could. The log says so."""


def device_of(argv: Sequence[str]) -> Device:
    """The device that the command line asks for.

    Read without Megatron's parser, before Megatron is imported.

    Raises:
        ConfigError: neither cpu nor cuda.
    """
    device = "cuda"
    for at, word in enumerate(argv):
        if word == DEVICE_OPTION:
            device = argv[at + 1] if at + 1 < len(argv) else ""
        elif word.startswith(f"{DEVICE_OPTION}="):
            device = word.partition("=")[2]
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"{DEVICE_OPTION} {device}: choose cpu or cuda")
    return device


def add_balance_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's parser with our group, and with defaults that work on a CPU if that is the device.

    Some of Megatron's own texts have a bare percent sign, at which `--help` would end in an error.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\(\w+\)[dfrs])", "%%", action.help)
    group = parser.add_argument_group("balance")
    group.add_argument(
        "--balance-config", metavar="FILE", default=None, help="YAML that names the planner and its options."
    )
    group.add_argument(
        "--balance-planner",
        metavar="NAME",
        default=None,
        help="A planner or a file of configs/planner, in place of the configuration's.",
    )
    group.add_argument(
        "--balance-cluster",
        metavar="NAME|FILE",
        default=None,
        help="A machine of configs/cluster or a YAML, in place of the configuration's and of what the machine says.",
    )
    group.add_argument(
        DEVICE_OPTION,
        choices=("cpu", "cuda"),
        default="cuda",
        help="cpu runs without a GPU, for tests and demonstrations (slow, and says so).",
    )
    group.add_argument(
        "--balance-log", metavar="DIR", default=None, help="Write steps.jsonl and the resolved configuration here."
    )
    from megatron_balance.megatron import cpu

    parser.set_defaults(**DEFAULTS)
    if cpu.installed():
        parser.set_defaults(**CPU_DEFAULTS)
    return parser


FP8_ROWS: dict[str, int] = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""By `--fp8-recipe`, the number of which the rows of a linear layer's input must be a multiple.

The products take 16 rows at a time; MXFP8 has a scale for every 32 rows and block scaling for every
128, and Transformer Engine quantises whole blocks only (`is_quantizable`).
"""
FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
"""Options without a flag in this Megatron; a script or a YAML may set them."""


def row_multiple(args: argparse.Namespace) -> int:
    """The number of which a rank's rows are a multiple.

    Added rows belong to no sequence and are masked.

    Sequence parallelism splits the rows over the tensor-parallel ranks, each of which may quantise
    its own before they are gathered.
    """
    return role_row_multiple(args, args.tensor_model_parallel_size)


def role_row_multiple(args: argparse.Namespace, tensor: int) -> int:
    """As `row_multiple`, of one of `tensor` tensor-parallel ranks."""
    shares = tensor if args.sequence_parallel else 1
    return shares * (FP8_ROWS[args.fp8_recipe] if args.fp8 is not None else 1)


def given(name: str) -> Callable[[Any], bool]:
    """Whether option `name` is there and set."""
    return lambda args: bool(getattr(args, name, None))


def _is_no_window(args: Any) -> bool:
    """Whether `--window-size` asks for anything but a sliding window up to a query's own key."""
    window = args.window_size
    return bool(window) and not (len(window) == 2 and window[0] >= 0 and window[1] == 0)


def balances_by(kind: str) -> Callable[[Any], bool]:
    """Whether a router's experts are balanced by `kind`."""

    def asks(args: Any) -> bool:
        given = args.moe_router_load_balancing_type
        return args.num_experts is not None and kind in (given if isinstance(given, list) else [given])

    return asks


balances_by_sample = balances_by("seq_aux_loss")
"""Whether a router's loss is taken over each sample."""


def averages_evaluation(args: Any) -> bool:
    """Whether Megatron averages evaluation over microbatches, not over tokens."""
    return bool(getattr(args, "sft", False)) and args.eval_iters != 0


def _packs(args: Any) -> bool:
    """Whether the script's samples have several sequences in Megatron's attention."""
    return any(getattr(args, name, None) for name in ("sft", "dataloader_inter_document_masking", "use_varlen_dataset"))


def _shards(args: Any, kind: Literal["", "expert_"]) -> int:
    """The ranks that each weight is split over."""
    tensor = args.tensor_model_parallel_size
    size = (args.expert_tensor_parallel_size or tensor) if kind else tensor
    return getattr(args, f"{kind}tensor_parallel_num_weight_shards", None) or size


REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: not args.calculate_per_token_loss,
        "calculate_per_token_loss was switched off: ranks hold unequal numbers of tokens, so a loss averaged per rank "
        "would be biased",
    ),
    (
        lambda args: args.yaml_cfg is not None,
        "--yaml-cfg replaces all options, --balance-* included; give the flags on the command line",
    ),
    (
        lambda args: bool(args.full_validation or args.multiple_validation_sets),
        "--full-validation: in Megatron 0.19 evaluation ends in an error with it where there is one validation set, "
        "and --multiple-validation-sets, which Megatron takes with it alone, has not been compared with one rank's; "
        "leave them out, and set --eval-iters",
    ),
    (
        given("config_logger_dir"),
        "--config-logger-dir: Megatron 0.19 cannot write the process groups that it builds a model with as JSON, and "
        "ends in an error; leave it out",
    ),
    (
        lambda args: args.rerun_mode == "report_stats",
        "--rerun-mode report_stats is no mode that Megatron 0.19 knows when training begins; use validate_results or "
        "disabled",
    ),
    (
        lambda args: bool(args.iterations_to_skip) or args.result_rejected_tracker_filename is not None,
        "--iterations-to-skip (and --result-rejected-tracker-filename) read batches past the planner; leave them out",
    ),
    (
        lambda args: getattr(args, "override_ckpt_iteration", None) is not None,
        "--override-ckpt-iteration sets the samples back, and not the documents of the checkpoint that wait for a "
        "later step; load the checkpoint of that iteration",
    ),
    (
        lambda args: args.position_embedding_type not in ("rope", "learned_absolute", "none"),
        "--position-embedding-type must be rope, learned_absolute or none: yarn, mrope and relative cannot be applied "
        "by position",
    ),
    (
        lambda args: averages_evaluation(args) and args.eval_micro_batch_size not in (None, args.micro_batch_size),
        "--sft averages evaluation by the microbatches of training; leave out --eval-micro-batch-size, or set "
        "--eval-iters 0",
    ),
    (
        lambda args: _packs(args) and balances_by_sample(args) and (args.micro_batch_size or 1) > 1,
        "--moe-router-load-balancing-type seq_aux_loss takes the packed samples of a microbatch (--sft, "
        "--dataloader-inter-document-masking, --use-varlen-dataset) for one in Megatron; use --micro-batch-size 1",
    ),
    (
        given("varlen_sbhd_validation"),
        "--varlen-sbhd-validation is Megatron's reference for its own packing; leave it out",
    ),
    (
        lambda args: bool(args.reset_position_ids) != bool(args.reset_attention_mask),
        "--reset-position-ids and --reset-attention-mask go together: positions tell us where a sequence begins",
    ),
    (
        lambda args: args.attention_dropout > 0,
        "--attention-dropout must be 0: attention dropout cannot be reproduced across placements",
    ),
    (
        lambda args: args.qk_clip or args.log_max_attention_logit,
        "--qk-clip and --log-max-attention-logit read the largest logit from Transformer Engine's attention; not "
        "supported",
    ),
    (
        _is_no_window,
        "--window-size must be KEYS,0: plans attend causally, so a window ends with a query's own key; without a "
        "window leave it out",
    ),
    (
        lambda args: (
            args.attention_backend is not None
            and getattr(args.attention_backend, "name", args.attention_backend) == "local"
        ),
        "--attention-backend local puts Megatron's own core attention over any layer spec; leave it out",
    ),
    (given("fused_single_qkv_rope"), "--fused-single-qkv-rope does not take positions; leave it out"),
    (
        lambda args: any(getattr(args, f"enable_{kind}_connections", None) for kind in ("mhc", "hyper")),
        "--enable-mhc-connections (--enable-hyper-connections) widens what goes between layers and pipeline stages, "
        "and has not been compared with one rank's; leave it out",
    ),
    (
        given("rotary_base_per_layer"),
        "--rotary-base-per-layer embeds positions by a row's place on its rank, and a plan lays rows out in any order; "
        "leave it out",
    ),
    (
        given("mtp_hsm"),
        "--mtp-hsm draws at random by a row's place on its rank, and takes the hidden state of the next row for that "
        "of the next token; leave it out",
    ),
    (
        given("use_kitchen_attention"),
        "--use-kitchen-attention puts a quantised attention where a plan's attention runs, in bf16; leave it out",
    ),
    (
        given("batch_invariant_mode"),
        "--batch-invariant-mode promises the same bits whatever shares a batch, and attention is summed in the order "
        "of a plan; leave it out",
    ),
    (
        given("fake_process_group"),
        "--fake-process-group leaves communication out, and ranks must tell each other their sequences' lengths; "
        "leave it out",
    ),
    (
        lambda args: args.fp4 is not None,
        "--fp4-format is for Blackwell, where plans have not been tried; use --fp8-format or bf16",
    ),
    (
        lambda args: args.fp8 is not None and args.fp8_recipe not in FP8_ROWS,
        "--fp8-recipe custom does not say what the rows of a matrix must be a multiple of; choose delayed, "
        "tensorwise, blockwise or mxfp8",
    ),
    (
        lambda args: args.fp8 is not None and any(getattr(args, name, False) for name in FP8_ATTENTION),
        "fp8_dot_product_attention and fp8_multi_head_attention: planned attention computes in bf16; linear layers "
        "alone can be FP8",
    ),
    (
        lambda args: args.use_torch_fsdp2,
        "--use-torch-fsdp2: Megatron's wrapper of torch's FSDP averages gradients over ranks and does not divide them "
        "by a step's tokens (its scale_gradients does nothing), so steps would grow with the number of tokens; use "
        "--use-distributed-optimizer, or FSDP2 without Megatron (megatron_balance.torch)",
    ),
    (
        lambda args: args.use_megatron_fsdp,
        "--use-megatron-fsdp gathers weights and sums gradients by its own hooks, whose sums over ranks with unequal "
        "numbers of tokens have not been compared with one rank's; use --use-distributed-optimizer",
    ),
    (
        lambda args: any(getattr(args, f"{kind}_context_parallel", None) for kind in ("hybrid", "dynamic")),
        "--hybrid-context-parallel (--dynamic-context-parallel) is another answer to the same question; choose one",
    ),
    (
        lambda args: args.hybrid_layer_pattern is not None or bool(args.hybrid_override_pattern),
        "hybrid models (--hybrid-layer-pattern) have layers whose state runs along the sequence: a sequence that lies "
        "on several ranks would need the state handed from rank to rank in order, which no plan has; train them with "
        "Megatron's own context parallelism",
    ),
    (
        lambda args: any(
            getattr(args, name, None) is not None
            for name in ("experimental_attention_variant", "linear_attention_type")
        ),
        "--experimental-attention-variant (--linear-attention-type): gated_delta_net has a state that runs along the "
        "sequence and would be handed from rank to rank, and dsa chooses each query's keys by scores over all of them, "
        "which a plan would have to exchange first; leave it out",
    ),
    (
        lambda args: (
            args.heterogeneous_layers_config_path is not None
            or args.heterogeneous_layers_config_encoded_json is not None
        ),
        "--heterogeneous-layers-config-*: one plan serves all layers, so they must have the same heads",
    ),
    (
        lambda args: args.decoder_seq_length is not None or args.decoder_num_layers is not None,
        "--decoder-seq-length and --decoder-num-layers: encoder-decoder models are not supported",
    ),
    (
        given("fine_grained_activation_offloading"),
        "--fine-grained-activation-offloading runs attention on other streams, and what a plan received would have "
        "to be offloaded with it, of another size in every step; leave it out, or recompute (--recompute-granularity)",
    ),
    (
        lambda args: args.cpu_offloading_num_layers > 0,
        "--cpu-offloading-num-layers moves what Transformer Engine's own attention saved, and a plan's attention saves "
        "rows of other ranks; leave it out, or recompute",
    ),
    (given("inprocess_restart"), "--inprocess-restart renumbers ranks while the job runs; leave it out"),
    (
        given("export_kd_teacher_load"),
        "--export-kd-teacher-load distils by the script's own loss, of a teacher's output beside the model's, and a "
        "plan's loss takes the place of the script's: a teacher would have to run on the rows of the plan; distil "
        "without plans",
    ),
    (given("perform_rl_step"), "--perform-rl-step has a training loop of its own; not supported"),
    (
        lambda args: args.logits_load_dir is not None or args.logits_save_dir is not None,
        "--logits-load-dir and --logits-save-dir need the script's own loss and order of tokens; not supported",
    ),
    (
        lambda args: _shards(args, "") != args.tensor_model_parallel_size,
        "--tensor-parallel-num-weight-shards other than the tensor-parallel size splits the data-parallel group; "
        "leave it out",
    ),
    (
        lambda args: _shards(args, "expert_") != (args.expert_tensor_parallel_size or args.tensor_model_parallel_size),
        "--expert-tensor-parallel-num-weight-shards other than the experts' tensor-parallel size splits the group that "
        "sums their gradients; leave it out",
    ),
    (
        balances_by("quantile_balancing"),
        "--moe-router-load-balancing-type quantile_balancing takes no padding, and ranks hold unequal numbers of "
        "tokens; use sinkhorn, aux_loss or global_aux_loss",
    ),
    (
        lambda args: args.moe_expert_capacity_factor is not None or args.moe_expert_rank_capacity_factor is not None,
        "--moe-expert-capacity-factor drops tokens by what shares a rank with them, so the loss would depend on the "
        "plan; leave it out",
    ),
)


def _asks_for_graphs(args: Any) -> bool:
    names = ("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph")
    return args.cuda_graph_impl not in (None, "none") or any(getattr(args, name) for name in names)


EQUAL_COUNTS = ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens")
"""Megatron's names of one flag, and of the same on its branch dev."""


def _dispatches_equal_counts(args: Any) -> bool:
    """Whether tokens go to experts by HybridEP, and nothing makes the numbers of ranks equal."""
    by_hybridep = args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend == "hybridep"
    padded = any(getattr(args, name, None) for name in EQUAL_COUNTS)
    return args.num_experts is not None and by_hybridep and not padded


LEFT_OUT: tuple[tuple[Callable[[Any], bool], Mapping[str, Any], str], ...] = (
    (
        lambda args: args.num_experts is not None and args.moe_token_dispatcher_type == "allgather",
        {"moe_token_dispatcher_type": "alltoall"},
        "--moe-token-dispatcher-type allgather was set to alltoall: ranks hold unequal numbers of tokens",
    ),
    (
        _asks_for_graphs,
        {
            "cuda_graph_impl": "none",
            "enable_cuda_graph": False,
            "external_cuda_graph": False,
            "optimizer_cuda_graph": False,
        },
        "CUDA graphs (--cuda-graph-impl, --optimizer-cuda-graph) were left out: they replay fixed shapes and "
        "addresses, plans change every step",
    ),
    (
        given("hierarchical_context_parallel_sizes"),
        {"hierarchical_context_parallel_sizes": None, "cp_comm_type": None},
        "--hierarchical-context-parallel-sizes was left out: it says how Megatron's own attention exchanges keys; "
        "here the plan does",
    ),
    (
        lambda args: bool(args.multi_latent_attention) and bool(args.apply_rope_fusion),
        {"apply_rope_fusion": False},
        "Fused rotary embeddings were left out (--no-rope-fusion): those of multi-latent attention take no positions",
    ),
    (
        given("sequence_packing_scheduler"),
        {"sequence_packing_scheduler": None},
        "--sequence-packing-scheduler was left out (--use-varlen-dataset sets it): the plan packs sequences",
    ),
    (
        lambda args: getattr(args, "cp_partition_mode", None) not in (None, "zigzag"),
        {"cp_partition_mode": "zigzag"},
        "--cp-partition-mode contiguous was left out: Megatron's attention would move rows about, and the plan says "
        "where they are",
    ),
    (
        _dispatches_equal_counts,
        dict.fromkeys(EQUAL_COUNTS, True),
        "--moe-hybridep-pad-uneven-dispatch-inputs (--moe-hybridep-pad-variable-tokens) was set: HybridEP wants as "
        "many tokens from every rank, and ranks hold unequal numbers",
    ),
    (
        given("tp_comm_overlap"),
        {"tp_comm_overlap": False},
        "--tp-comm-overlap was left out: its buffers are for one fixed number of tokens",
    ),
    (
        given("overlap_moe_expert_parallel_comm"),
        {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
        "--overlap-moe-expert-parallel-comm was left out: it runs layers out of order; the planner distca overlaps "
        "the experts' exchange with another half of the microbatch",
    ),
)
"""Flags that change how fast a step is and no number of it: when asked for, the values that they are
set to, and the sentence of the log.
"""


def says_fp16(args: Any) -> str | None:
    """The warning about the first steps under `--fp16`; None: gradients are in another type."""
    if not args.fp16:
        return None
    summed = (
        "--fp16: the loss is a sum over tokens until the step ends (--calculate-per-token-loss), so gradients overflow "
        "at a loss scale that a mean could take, by a factor of the tokens of a microbatch"
    )
    if args.loss_scale:
        return f"{summed}; steps that overflow are skipped, and --loss-scale {args.loss_scale:g} never falls"
    return (
        f"{summed}; Megatron skips the first steps and halves the scale, from --initial-loss-scale "
        f"{args.initial_loss_scale:g} down, until they do not: give a lower one to skip none"
    )


RANDOM: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda args: args.hidden_dropout > 0, "--hidden-dropout drops"),
    (lambda args: args.num_experts is not None and bool(args.moe_input_jitter_eps), "--moe-input-jitter-eps draws"),
    (
        lambda args: (
            args.num_experts is not None
            and (bool(args.moe_router_force_load_balancing) or args.moe_router_force_biased is not None)
        ),
        "--moe-router-force-load-balancing and --moe-router-force-biased draw",
    ),
)
"""Flags by which a rank draws at random for each of its rows."""


def leave_out(args: argparse.Namespace, configs: Sequence[object]) -> list[str]:
    """Switch off in `args`, and in Megatron's `configs` made of them, what plans cannot use.

    Returns the sentences for the log.
    """
    told: list[str] = []
    for asked, values, sentence in LEFT_OUT:
        if not asked(_OfAnyVersion(args)):
            continue
        told.append(sentence)
        for holder in (args, *configs):
            for name, value in values.items():
                if hasattr(holder, name):
                    setattr(holder, name, value)
    return told


class _OfAnyVersion:
    """Megatron's arguments; None for those that this version does not have."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name, None)


def reasons_in(table: tuple[tuple[Callable[[Any], bool], str], ...], args: argparse.Namespace) -> list[str]:
    """The reasons of a table that hold for these arguments."""
    found = _OfAnyVersion(args)
    return [reason for refused, reason in table if refused(found)]


def check_arguments(args: argparse.Namespace, others: Sequence[str] = ()) -> None:
    """Reject arguments under which a plan cannot run, for the reasons here and `others`.

    Raises:
        ConfigError: names every flag that cannot work, and what would be right.
    """
    if not getattr(args, "balance_config", None) and args.yaml_cfg is None:
        raise ConfigError("--balance-config is missing: name a YAML with a planner, such as configs/experiment/*.yaml")
    reasons = [*reasons_in(REFUSALS, args), *others]
    if reasons:
        raise ConfigError("; ".join(reasons))

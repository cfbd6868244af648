"""Flags that cannot work with a plan are refused, each with a sentence that names it."""

import argparse
import dataclasses
import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import add_megatron_arguments

from megatron_balance import launch
from megatron_balance.config import ClusterChoice, load_cluster, load_model
from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import RecurrentLayers
from megatron_balance.megatron import entry, flags
from megatron_balance.megatron.flags import add_balance_arguments, check_arguments, device_of, leave_out, row_multiple
from megatron_balance.megatron.planning import masks_of, planned_model
from megatron_balance.planning.choice import Run
from megatron_balance.profiling.hardware import Reading, cluster_of
from megatron_balance.runtime.bind import AttentionShape

WORKS = ("--balance-config", "x.yaml", "--attention-dropout", "0", "--position-embedding-type", "rope")
EXPERTS = ("--num-experts", "8", "--moe-token-dispatcher-type", "alltoall")


@functools.cache  # Megatron's parser takes a second to build
def parser() -> argparse.ArgumentParser:
    return add_balance_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def parse(*words: str) -> argparse.Namespace:
    return parser().parse_args([*WORKS, *words])


REFUSED: dict[str, tuple[str, ...]] = {
    "--yaml-cfg": ("--yaml-cfg", "x.yaml"),
    "--iterations-to-skip": ("--iterations-to-skip", "3"),
    "--result-rejected-tracker-filename": ("--result-rejected-tracker-filename", "x"),
    "yarn": ("--position-embedding-type", "yarn"),
    "mrope": ("--position-embedding-type", "mrope"),
    "relative": ("--position-embedding-type", "relative"),
    "--sft averages evaluation": ("--sft", "--micro-batch-size", "1", "--eval-micro-batch-size", "2"),
    "use --micro-batch-size 1": (
        *EXPERTS,
        *("--dataloader-inter-document-masking", "--micro-batch-size", "2"),
        *("--moe-router-load-balancing-type", "seq_aux_loss"),
    ),
    "--full-validation: in Megatron": ("--full-validation",),
    "--config-logger-dir": ("--config-logger-dir", "x"),
    "--rerun-mode report_stats": ("--rerun-mode", "report_stats"),
    "--multiple-validation-sets, which": ("--multiple-validation-sets", "--full-validation"),
    "--reset-position-ids and": ("--reset-position-ids",),
    "--reset-attention-mask go together": ("--reset-attention-mask",),
    "--attention-dropout": ("--attention-dropout", "0.1"),
    "--qk-clip": ("--qk-clip",),
    "--log-max-attention-logit": ("--log-max-attention-logit",),
    "--window-size must be KEYS,0": ("--window-size", "128,128"),
    "--attention-backend": ("--attention-backend", "local"),
    "--fp8-recipe custom": ("--fp8-format", "hybrid", "--fp8-recipe", "custom"),
    "--fp4-format": ("--fp4-format", "e2m1"),
    "--use-megatron-fsdp": ("--use-megatron-fsdp",),
    "--use-torch-fsdp2": ("--use-torch-fsdp2",),
    "--hybrid-context-parallel": ("--hybrid-context-parallel",),
    "--hybrid-layer-pattern": ("--hybrid-layer-pattern", "M-D"),
    "which a plan would have to exchange first": ("--hybrid-override-pattern", "M-D"),
    "must be gated_delta_net": ("--experimental-attention-variant", "dsa"),
    "--disable-mamba-mem-eff-path": ("--hybrid-layer-pattern", "M*", "--disable-mamba-mem-eff-path"),
    "--recompute-modules gdn": (
        *("--experimental-attention-variant", "gated_delta_net"),
        *("--recompute-granularity", "selective", "--recompute-modules", "gdn"),
    ),
    "--heterogeneous-layers-config": ("--heterogeneous-layers-config-path", "x.json"),
    "--decoder-seq-length": ("--decoder-seq-length", "64"),
    "--fine-grained-activation-offloading": ("--fine-grained-activation-offloading",),
    "--inprocess-restart": ("--inprocess-restart",),
    "--perform-rl-step": ("--perform-rl-step",),
    "--logits-load-dir": ("--logits-load-dir", "x"),
    "--tensor-parallel-num-weight-shards": ("--tensor-parallel-num-weight-shards", "2"),
    "--cpu-offloading-num-layers": ("--cpu-offloading-num-layers", "1"),
    "--expert-tensor-parallel-num-weight-shards": (*EXPERTS, "--expert-tensor-parallel-num-weight-shards", "2"),
    "--use-kitchen-attention": ("--use-kitchen-attention",),
    "--batch-invariant-mode": ("--batch-invariant-mode",),
    "--fake-process-group": ("--fake-process-group",),
    "--override-ckpt-iteration": ("--override-ckpt-iteration", "3"),
    "quantile_balancing": (*EXPERTS, "--moe-router-load-balancing-type", "quantile_balancing"),
    "--moe-expert-capacity-factor": (*EXPERTS, "--moe-expert-capacity-factor", "1.0"),
}


@pytest.mark.parametrize(("sentence", "words"), REFUSED.items(), ids=REFUSED)
def test_a_flag_that_cannot_work_is_refused_by_name(sentence: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_arguments(parse(*words))


def test_every_refusal_is_tested() -> None:
    tried = [parse(*words) for words in REFUSED.values()]
    every = [rule for rule in flags.record().refused if not rule.ways]
    untested = [rule.sentence for rule in every if not any(rule.holds(args) for args in tried)]
    without_flag = (  # tested below
        *("calculate_per_token_loss was switched off", "--fused-single-qkv", "fp8_dot_product_attention"),
        *("--varlen-sbhd-validation", "--export-kd-teacher-load", "--enable-mhc-connections"),
        *("--gdn-pre-gated-delta-rule-fusion", "--rotary-base-per-layer", "--mtp-hsm"),
    )
    assert untested == [rule.sentence for rule in every if any(word in rule.sentence for word in without_flag)]


def test_what_remains_passes_and_what_plans_need_is_the_default() -> None:
    for words in (
        (*EXPERTS, "--moe-router-load-balancing-type", "aux_loss"),
        ("--reset-position-ids", "--reset-attention-mask"),
        ("--position-embedding-type", "learned_absolute"),
        ("--window-size", "128,0", "--window-attn-skip-freq", "2"),
        *((), ("--softmax-type", "learnable"), ("--softmax-type", "off-by-one")),
        ("--hybrid-layer-pattern", "M-G|*E/M*", "--recompute-granularity", "selective"),
        ("--experimental-attention-variant", "gated_delta_net"),
        ("--disable-mamba-mem-eff-path",),
    ):
        check_arguments(parse(*words))
    for window in ("-1,0", "-1,-1", "128,-1", "128", "128,0,0"):
        with pytest.raises(ConfigError, match="--window-size must be KEYS,0"):
            check_arguments(parse(f"--window-size={window}"))
    args = parser().parse_args(["--balance-config", "x.yaml", *EXPERTS[:2]])
    check_arguments(args)
    assert args.calculate_per_token_loss
    assert (args.attention_dropout, args.moe_token_dispatcher_type) == (0, "alltoall")


# Nemotron-H-8B's flags in Megatron's examples (post_training/modelopt/conf/nvidia), and those that say
# what Qwen3-Next-80B-A3B's config.json does.
NEMOTRON_H = """--bf16 --disable-bias-linear --untie-embeddings-and-output-weights --no-rope-fusion
--normalization RMSNorm --squared-relu --num-layers 52 --hidden-size 4096 --ffn-hidden-size 21504
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --mamba-head-dim 64
--mamba-num-heads 128 --mamba-num-groups 8 --mamba-state-dim 128
--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"""
QWEN3_NEXT = """--bf16 --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm --swiglu
--apply-layernorm-1p --qk-layernorm --num-layers 48 --hidden-size 2048 --num-attention-heads 16 --group-query-attention
--num-query-groups 2 --kv-channels 256 --attention-output-gate --rotary-percent 0.25 --rotary-base 10000000
--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4
--linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads 32
--num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
--moe-shared-expert-gate --moe-router-load-balancing-type aux_loss --moe-grouped-gemm --mtp-num-layers 1"""
QWENS = RecurrentLayers("gated_delta", 36, 13, 49, heads=32, value_dim=128, key_heads=16, key_dim=128)


@pytest.mark.parametrize(
    ("words", "heads", "layers"),
    [
        (NEMOTRON_H, AttentionShape(32, 8, 128), load_model("nemotron-h-8b").recurrent),
        (QWEN3_NEXT, AttentionShape(16, 2, 256), QWENS),
    ],
    ids=["Nemotron-H", "Qwen3-Next"],
)
def test_released_hybrid_models_start_and_plans_see_their_layers(words: str, heads: Any, layers: Any) -> None:
    args = parse(*words.split())
    check_arguments(args)
    args.params_dtype, args.padded_vocab_size = torch.bfloat16, 131072
    assert planned_model(args, Run(source="x.yaml"), heads, 1).recurrent == layers


WINDOWS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((), ("causal",)),
    (("--window-size", "0,0"), ("window_1",)),
    (("--window-size", "127,0"), ("window_128",)),
    (("--window-size", "127,0", "--window-attn-skip-freq", "2"), ("causal", "window_128")),
    (("--window-size", "127,0", "--window-attn-skip-freq", "5"), ("window_128",)),
    (("--window-size", "127,0", "--window-attn-skip-freq", "[1,1,0,1]"), ("causal", "window_128")),
    (("--window-size", "127,0", "--window-attn-skip-freq", "5", "--mtp-num-layers", "1"), ("window_128",)),
]


@pytest.mark.parametrize(("words", "masks"), WINDOWS, ids=[" ".join(words) for words, _ in WINDOWS])
def test_masks_of_a_model_of_four_layers(words: tuple[str, ...], masks: tuple[str, ...]) -> None:
    # `--window-size L,0` is a window of L + 1 keys; plans are made for the causal layers, if any.
    assert tuple(mask.name for mask in masks_of(parse("--num-layers", "4", *words))) == masks


HYBRIDEP = ("--num-experts", "8", "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep")
SWITCHED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "allgather was set to alltoall": (
        ("--num-experts", "8", "--moe-token-dispatcher-type", "allgather"),
        {"moe_token_dispatcher_type": "alltoall"},
    ),
    "CUDA graphs": (("--cuda-graph-impl", "local"), {"cuda_graph_impl": "none"}),
    "--optimizer-cuda-graph": (("--optimizer-cuda-graph",), {"optimizer_cuda_graph": False}),
    "--hierarchical-context-parallel-sizes": (
        ("--hierarchical-context-parallel-sizes", "2", "2", "--cp-comm-type", "a2a+p2p"),
        {"hierarchical_context_parallel_sizes": None, "cp_comm_type": None},
    ),
    "--no-rope-fusion": (("--multi-latent-attention",), {"apply_rope_fusion": False}),
    "--tp-comm-overlap": (("--tp-comm-overlap",), {"tp_comm_overlap": False}),
    "--ddp-average-in-collective": (("--ddp-average-in-collective",), {"ddp_average_in_collective": False}),
    "HybridEP wants as many tokens": (HYBRIDEP, {"moe_hybridep_pad_uneven_dispatch_inputs": True}),
    "--overlap-moe-expert-parallel-comm": (
        ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"),
        {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
    ),
}


@pytest.mark.parametrize(("sentence", "words", "values"), [(key, *rest) for key, rest in SWITCHED.items()])
def test_a_flag_that_changes_no_number_is_switched_off_and_named(
    sentence: str, words: tuple[str, ...], values: dict[str, Any]
) -> None:
    # In the arguments, and in what Megatron made of them before.
    args, config = parse(*words), argparse.Namespace(**{name: object() for name in values}, other=1)
    check_arguments(args)
    (told,) = leave_out(args, [config])
    assert sentence in told
    assert {name: getattr(args, name) for name in values} == {k: v for k, v in vars(config).items() if k != "other"}
    assert {name: getattr(args, name) for name in values} == values
    assert leave_out(args, [config]) == []


def test_every_flag_that_is_switched_off_is_tested_and_left_out_as_another_version_calls_it() -> None:
    tried = [argparse.Namespace(**vars(parse(*words))) for words, _ in SWITCHED.values()]
    untested = [rule for rule in flags.record().left_out if not any(rule.holds(args) for args in tried)]
    named = [rule.sentence.split()[0] for rule in untested]
    assert named == ["--sequence-packing-scheduler", "--cp-partition-mode"], "tested in test_launch.py, and below"
    assert leave_out(parse(), []) == []
    # Megatron's branch dev moves rows, and has a name of its own for padding to equal counts.
    args = parse(*HYBRIDEP)
    args.cp_partition_mode, args.moe_hybridep_pad_variable_tokens = "contiguous", False
    told = leave_out(args, [])
    assert (args.cp_partition_mode, args.moe_hybridep_pad_variable_tokens) == ("zigzag", True)
    named = [sentence.split()[0] for sentence in told]
    assert named == ["--cp-partition-mode", "--moe-hybridep-pad-uneven-dispatch-inputs"]


def test_fp16_says_which_steps_are_skipped_and_sets_no_scale() -> None:
    # A loss summed over tokens overflows at a scale that a mean could take.
    def says(*words: str) -> list[str]:
        return flags.sentences(parse("--hidden-dropout", "0", *words), "command_line")

    assert says("--bf16") == []
    args = parse("--fp16")
    (told,) = says("--fp16")
    assert "--calculate-per-token-loss" in told
    assert f"from --initial-loss-scale {2**32:g} down" in told
    assert (args.initial_loss_scale, args.loss_scale) == (2**32, None)
    assert "from --initial-loss-scale 65536 down" in str(says("--fp16", "--initial-loss-scale", "65536"))
    assert "--loss-scale 1024 never falls" in str(says("--fp16", "--loss-scale", "1024"))


@pytest.mark.parametrize("script", [False, True])
def test_help_lists_our_flags_and_megatrons(
    script: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Megatron's own texts alone end in an error: one has a bare percent sign.
    if script:
        with pytest.raises(SystemExit) as ended:
            parser().parse_args(["--help"])
        assert ended.value.code == 0
    else:
        monkeypatch.setattr("sys.argv", ["launch", "--help"])
        launch.main()
    told = capsys.readouterr().out
    assert {"--balance-config", "--balance-planner", "--balance-cluster", "--balance-device", "--balance-log"} <= set(
        re.findall(r"--balance-[a-z]+", told)
    )
    assert ("--tensor-model-parallel-size" in told, "SCRIPT" in told) == (script, not script)


@pytest.mark.parametrize(
    "words",
    [
        ("--hidden-dropout", "0.1"),
        (*EXPERTS, "--moe-input-jitter-eps", "0.1"),
        (*EXPERTS, "--moe-router-force-load-balancing"),
        (*EXPERTS, "--moe-router-force-biased", "0.1"),
    ],
)
def test_what_is_drawn_by_row_is_named(words: tuple[str, ...]) -> None:
    plain = parse("--hidden-dropout", "0")
    assert flags.sentences(plain) == []
    (told,) = flags.sentences(parse(*(() if "--hidden-dropout" in words else ("--hidden-dropout", "0")), *words))
    assert any(word in told.split() for word in words)


def flags_of_megatron() -> dict[str, str]:
    # Megatron's own flags, without dashes, and the names of their values.
    ours = {"help", "h"}
    actions = parser()._option_string_actions.items()
    names = {flag.lstrip("-"): action.dest for flag, action in actions if not action.dest.startswith("balance_")}
    return {flag: name for flag, name in names.items() if flag not in ours}


def test_every_flag_of_megatron_was_looked_at_and_others_are_named_once() -> None:
    # A new one gets a rule, or goes into a list, when it is known what a plan does to it.
    record = flags.record()
    assert sorted(set(flags_of_megatron()) - record.reviewed) == []
    lists = (record.ruled, record.read.split(), record.elsewhere.split(), record.harmless.split())
    assert sum(map(len, lists)) == len(record.reviewed), "a flag is in two lists"
    argv = ["--lr", "1", "--of-a-fork=3", "--of-a-fork", "--", "--balance-config", "x.yaml", "--no-rope-fusion", "-3"]
    assert flags.unreviewed(argv) == ["--of-a-fork"]


def test_what_is_said_to_be_read_is_named_in_the_code() -> None:
    folder = Path(flags.__file__).parent
    files = [*folder.glob("*.py"), *(folder.parent / "patches").glob("*.py")]
    text = " ".join([*(path.read_text() for path in files), *(rule.when for rule in rules())])
    named, values = set(re.findall(r"[a-z_0-9]+", text)), flags_of_megatron()
    read = {flag: values[flag] for flag in flags.record().read.split() if flag in values}
    assert sorted(flag for flag, name in read.items() if name not in named) == []


def rules() -> list[flags.FlagRule]:
    record = flags.record()
    return [*record.defaults, *record.refused, *record.left_out, *record.told]


def test_rules_go_by_arguments_that_some_megatron_has() -> None:
    known = {flag.replace("-", "_") for flag in flags.record().reviewed} | set(flags_of_megatron().values())
    known |= {*flags.MADE, "len", "set", "virtual_pipeline_model_parallel_size"}  # the last of Megatron's validation
    for rule in rules():
        assert set(rule.condition.co_names) <= known, rule.flags
        assert rule.when or not rule.condition.co_consts, rule.flags


UNKNOWN: list[tuple[tuple[str, ...], str | None]] = [
    (("--soft-cap", "3"), "--soft-cap: a flag of this Megatron, of which nobody looked at what it does to plans"),
    (("--soft-cap", "0"), None),
    (("--softmax-scale", "0.5"), "--softmax-scale: a field of the config that layers are built of"),
    (("--run-name", "x"), None),
    (("--lr", "3"), None),
]


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize(("words", "why"), UNKNOWN)
def test_an_unknown_flag_that_may_change_the_model_is_refused_unless_accepted(
    words: tuple[str, str],
    why: str | None,
    accepted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Of Megatron's own parser, as a fork has it, and of a script's by which layers are built.
    own = add_megatron_arguments

    def of_a_fork(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        own(parser).add_argument("--soft-cap", type=float, default=0.0)
        return parser

    monkeypatch.setattr("megatron.training.arguments.add_megatron_arguments", of_a_fork)
    forks = add_balance_arguments(of_a_fork(argparse.ArgumentParser(allow_abbrev=False)))
    for flag, kind in (("--softmax-scale", float), ("--run-name", str)):
        forks.add_argument(flag, type=kind, default=None)
    config = tmp_path / "balance.yaml"
    config.write_text(f"planner: te_ring\n{f'accept: [{words[0]}]' if accepted else ''}\n")
    args = forks.parse_args([*WORKS, "--balance-config", str(config), *words])
    args.data_parallel_size, args.dataloader_type, args.virtual_pipeline_model_parallel_size = 1, "single", None
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
    monkeypatch.setattr(entry, "fault_of", lambda *_: "a source is another")
    with pytest.raises(ConfigError, match="a source is another") as ended, entry.training(None, has_script=False):
        pytest.fail("the block must not run")
    refused = why is not None and not accepted
    told = (f"flags: {why}", f"accept: ['{words[0]}'] in {config}")
    assert [each in str(ended.value) for each in told] == [refused] * 2
    assert (words[0] in str(ended.value)) == refused
    repeated = f"flags: accepted, though losses and plans may be wrong: {words[0]}: " in caplog.text
    assert repeated == (why is not None and accepted)


def test_a_scripts_other_flags_and_flags_at_their_defaults_are_told() -> None:
    args = argparse.Namespace(run_name="x", softmax_scale=None)
    assert flags.unknown(args, ["--run-name", "x", "--softmax-scale", "1"]) == ({}, ["--run-name", "--softmax-scale"])


@dataclasses.dataclass
class CappedConfig(TransformerConfig):
    attn_logit_softcapping: float = 50.0


def test_fields_of_a_built_models_config_are_known_or_named() -> None:
    given: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    usual = {"num_moe_experts": 4, "gated_linear_unit": True, "activation_func": print, "softmax_scale": 0.5}
    assert flags.unknown_fields(TransformerConfig(**given, bf16=True, params_dtype=torch.bfloat16)) == {}
    assert flags.unknown_fields(TransformerConfig(**given, **usual)) == {}
    assert flags.unknown_fields(CappedConfig(**given, attn_logit_softcapping=0.0)) == {}
    found = flags.unknown_fields(CappedConfig(**given, use_inference_optimized_layers=True))
    assert found.keys() == {"attn_logit_softcapping", "use_inference_optimized_layers"}
    assert found["attn_logit_softcapping"] == "set to 50.0, and nobody looked at what it does to plans"


# Arguments that no flag of this Megatron sets so: a YAML or a script may, and other versions have
# flags for them (Megatron's own script adds those of distillation).
SET: list[tuple[str, Any, str]] = [
    ("calculate_per_token_loss", False, "calculate_per_token_loss was switched off"),
    ("fused_single_qkv_rope", True, "--fused-single-qkv-rope"),
    ("fp8_dot_product_attention", True, "planned attention computes in bf16"),
    ("balance_config", None, "--balance-config is missing"),
    *(
        (name, True, f"--{name.replace('_', '-')}")
        for name in (
            *("varlen_sbhd_validation", "dynamic_context_parallel", "export_kd_teacher_load", "linear_attention_type"),
            *("enable_mhc_connections", "enable_hyper_connections", "rotary_base_per_layer", "mtp_hsm"),
        )
    ),
]


@pytest.mark.parametrize(("name", "value", "sentence"), SET)
def test_an_argument_that_is_set_to_what_no_plan_takes_is_refused(name: str, value: Any, sentence: str) -> None:
    args = parse(*(("--fp8-format", "hybrid") if "fp8" in name else ()))
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=sentence):
        check_arguments(args)


@pytest.mark.parametrize(
    ("words", "multiple"),
    [
        ((), 1),
        (("--tensor-model-parallel-size", "4", "--sequence-parallel"), 4),
        (("--tensor-model-parallel-size", "4"), 1),
        (("--fp8-format", "hybrid"), 16),
        (("--fp8-format", "e4m3", "--fp8-recipe", "tensorwise"), 16),
        (("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"), 32),
        (("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"), 128),
        (("--fp8-format", "hybrid", "--tensor-model-parallel-size", "2", "--sequence-parallel"), 32),
    ],
)
def test_rows_are_padded_to_what_their_layers_need(words: tuple[str, ...], multiple: int) -> None:
    args = parse(*words)
    check_arguments(args)
    assert row_multiple(args, args.tensor_model_parallel_size) == multiple


def test_all_reasons_of_flags_data_ways_and_sources_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--yaml-cfg.*; .*--qk-clip"):
        check_arguments(parse("--yaml-cfg", "x.yaml", "--qk-clip"))
    with pytest.raises(ConfigError, match=r"--qk-clip.*; --fim-data"):
        check_arguments(parse("--qk-clip"), ["--fim-data"])
    config = tmp_path / "balance.yaml"
    config.write_text("planner: te_ring\ndata: script\nlatent_kv: true\nself_check: true\n")
    args = parse("--balance-config", str(config), "--qk-clip", "--softmax-type", "learnable")
    args.data_parallel_size, args.dataloader_type = 1, "single"
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(entry, "fault_of", lambda *_: "a source is another")
    for told in (
        r"--qk-clip.*; data: script.*no data set.*sinks.*self-check",
        r"--qk-clip.*; --data-path: missing.*; a so",
    ):
        with pytest.raises(ConfigError, match=told), entry.training(None, has_script=False):
            pytest.fail("the block must not run")
        config.write_text("planner: te_ring\n")


def test_the_device_is_read_before_megatron_is() -> None:
    for argv, device in (
        ([], "cuda"),
        (["--balance-device", "cpu"], "cpu"),
        (["--lr", "1", "--balance-device=cpu"], "cpu"),
        (["--balance-device", "cuda"], "cuda"),
    ):
        assert device_of(argv) == device
    for wrong in (["--balance-device", "tpu"], ["--balance-device"], ["--balance-device="]):
        with pytest.raises(ConfigError, match="choose cpu or cuda"):
            device_of(wrong)


# The cluster from what the ranks read of their nodes.

H200 = "base: h200\nname: machine\nnum_ranks: 8\nranks_per_node: 8\nranks_per_nic: 1\nnic_bytes_per_s: 50e9\n"


def test_the_machine_says_links_and_memory_the_least_of_unlike_nodes_and_the_configuration_sizes(caplog, monkeypatch):
    found = cluster_of(ClusterChoice({"num_ranks": 16}), [Reading(H200)] * 16)
    assert found is not None
    built = found.build(num_ranks=16, ranks_per_node=8)
    assert (built.name, built.num_ranks, built.ranks_per_nic) == ("machine", 16, 1)
    assert built.flops_per_s == load_cluster("h200").build().flops_per_s
    assert found.ranks_per_node is None  # nobody set it: nodes are told apart by host name
    monkeypatch.setattr(logging.getLogger("megatron_balance"), "propagate", True)
    caplog.set_level(logging.WARNING, "megatron_balance")
    slower = H200.replace("50e9", "25e9").replace("ranks_per_nic: 1", "ranks_per_nic: 2")
    found = cluster_of(None, [Reading(H200), Reading(slower)])
    assert found is not None
    assert (found.given["nic_bytes_per_s"], found.given["ranks_per_nic"]) == (25e9, 2)
    assert "nodes are not alike in nic_bytes_per_s, ranks_per_nic" in caplog.text
    given = ClusterChoice({"num_ranks": 2})
    assert cluster_of(given, [Reading(H200), Reading(failure="no nvidia-smi")]) is given
    assert "rank 1 cannot read its machine: no nvidia-smi" in caplog.text

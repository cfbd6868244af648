"""Models as their makers train them, scaled down: their real flags, against Megatron alone."""

import argparse
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_utils import sinkhorn
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import roll_tensor
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.utils import cpp_extension

from megatron_balance import planners
from megatron_balance.cost.modules import layer_modules
from megatron_balance.errors import ConfigError
from megatron_balance.megatron.core_attention import Ahead, BalancedSeqParams, CountedMask
from megatron_balance.megatron.data import LABEL, LOSS_MASK, PADDING, POSITION, TOKEN, column, unpack
from megatron_balance.megatron.planning import planned_model
from megatron_balance.megatron.router import _sinkhorn_of_pool, check_router, share_losses
from megatron_balance.megatron.ways import _check_samples
from megatron_balance.patches.layers import looked_up
from megatron_balance.planning import choice
from megatron_balance.runtime.bind import AttentionShape
from megatron_balance.training.tokens import from_bits
from tests.megatron import conftest
from tests.megatron.conftest import Run, Train, assert_same_training, loaded_run, one_process, started
from tests.megatron.test_arguments import EXPERTS as WORDS
from tests.megatron.test_arguments import parse
from tests.megatron.test_launch import ON_CPU, printed_losses
from tests.megatron.test_parity import options_of, two_nodes
from tests.megatron.test_ping_pong import logged
from tests.support.pipeline_runs import gradients, worst_gradient

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "plain_documents.py")
TRAINED: dict[str, Any] = {"clip-grad": 1.0, "weight-decay": 0.1, "adam-beta1": 0.9, "adam-beta2": 0.95}
TRAINED |= {"init-method-std": 0.0134, "decoupled-lr": 0.005, "decoupled-min-lr": 0.00045, "lr-decay-style": "cosine"}
TRAINED |= {"manual-gc": True, "train-iters": 2}
# Of Megatron's examples/llama/train_llama3_8b_h100_fp8.sh, smaller. Left out: fp8, bf16 and what only
# Transformer Engine has (fused attention, LayerNorm1p, the fused loss).
LLAMA_3: dict[str, Any] = {**TRAINED, "num-query-groups": 2, "kv-channels": 8, "rotary-base": 1_000_000}
LLAMA_3 |= {"rotary-percent": 1.0}
# Of its functional test gpt3_15b_8t_release, smaller, whose model is Nemotron-4 15B; likewise.
NEMOTRON_4: dict[str, Any] = {**TRAINED, "normalization": "LayerNorm", "swiglu": None, "squared-relu": True}
NEMOTRON_4 |= {"num-attention-heads": 6, "kv-channels": 8, "num-query-groups": 2, "rotary-percent": 0.5}
# Of its release configurations mixtral_8x7b_alltoall_tp2pp4ep4 and deepseekv3_proxy_flex: what makes
# the model beside what `conftest.MODEL` has, smaller, with one expert after the other and the
# dispatcher that needs no GPU.
BOTH: dict[str, Any] = {"num-layers": 4, "num-experts": 8, "moe-router-topk": 2}
BOTH |= {"moe-token-dispatcher-type": "alltoall", "use-distributed-optimizer": True}
BOTH |= {"clip-grad": 1.0, "weight-decay": 0.1}
MIXTRAL: dict[str, Any] = {**BOTH, "rotary-percent": 0.5, "init-method-std": 0.01}
MIXTRAL |= {"moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.01}
MHA = {"group-query-attention": False, "num-query-groups": None}
LATENTS: dict[str, Any] = {"multi-latent-attention": True, "q-lora-rank": 16, "kv-lora-rank": 8, "qk-head-dim": 4}
LATENTS |= {"qk-pos-emb-head-dim": 4, "v-head-dim": 6, "qk-layernorm": True, **MHA}
DEEPSEEK_V3: dict[str, Any] = {**BOTH, **LATENTS, "kv-channels": 4, "rotary-base": 10000, "norm-epsilon": 1e-06}
DEEPSEEK_V3 |= {"rotary-scaling-factor": 40, "mscale": 1.0, "mscale-all-dim": 1.0}
DEEPSEEK_V3 |= {"mtp-num-layers": 1, "mtp-loss-scaling-factor": 0.1, "moe-layer-freq": "([0]*1+[1]*3)"}
DEEPSEEK_V3 |= {"moe-ffn-hidden-size": 32, "moe-shared-expert-intermediate-size": 32, "moe-router-pre-softmax": True}
DEEPSEEK_V3 |= {"moe-router-group-topk": 2, "moe-router-num-groups": 4, "moe-router-topk-scaling-factor": 2.5}
DEEPSEEK_V3 |= {"moe-router-load-balancing-type": "seq_aux_loss", "moe-aux-loss-coeff": 0.0001}
DEEPSEEK_V3 |= {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
DEEPSEEK_V3 |= {"moe-router-bias-update-rate": 0.001, "moe-router-dtype": "fp32"}
PARALLEL = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": True}
SHARDED = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}


# Others than the first have its flags but for the norm, the activation and how much is rotated.
@pytest.mark.parametrize(
    "family", [NEMOTRON_4, pytest.param(LLAMA_3, marks=pytest.mark.product)], ids=["Nemotron-4", "Llama 3"]
)
def test_its_flags_train_like_megatron_alone(
    train: Train, tmp_path_factory: pytest.TempPathFactory, family: dict[str, Any]
) -> None:
    flags = started(train, tmp_path_factory.mktemp("checkpoint"), family)
    folder = tmp_path_factory.mktemp("gradients")
    plain = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT, str(folder)))
    config = {**two_nodes(2), "remap": True}
    run = train(4, "zeppelin", {**flags, **PARALLEL}, config=config, entry="gradients")
    losses = run.column("loss")
    # Megatron's second line is the mean of the first two steps.
    assert printed_losses(plain.result, 0) == pytest.approx([losses[0], (losses[0] + losses[1]) / 2], rel=1e-5)
    assert worst_gradient(run.result.logs, folder, step=1) < 1e-5
    assert sum(run.column("remapped_tokens")) > 0


EXPERTS = {"context-parallel-size": 2, "expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}


# Against one rank of ours: alone, Megatron takes a router's losses document by document.
@pytest.mark.parametrize(
    ("family", "ranks", "parallel"),
    [(MIXTRAL, 4, {**PARALLEL, **SHARDED, **EXPERTS}), (DEEPSEEK_V3, 2, EXPERTS)],
    ids=["Mixtral", "DeepSeek-V3"],
)
def test_families_of_experts_train_like_one_rank(
    train: Train, tmp_path: Path, family: dict[str, Any], ranks: int, parallel: dict[str, Any]
) -> None:
    flags = started(train, tmp_path, {**family, "train-iters": 2})
    one = train(1, "te_ring", flags)
    run = train(ranks, options_of("zeppelin"), {**flags, **parallel}, config=two_nodes(2))
    assert_same_training(run, one)
    assert sum(sum(step["counters"]["kv_tokens_received"]) for step in run.steps) > 0, "attention was not cut"


# Sliding windows in all layers or in some, and attention sinks, against Megatron alone: losses and
# every gradient.

PLANNERS = ("te_ring", "zeppelin", "distca", "ulysses", "llama_all_gather")
ONE_STEP = {"train-iters": 1}
BOTH_MASKS = {"window-size": "23,0", "window-attn-skip-freq": 2, "softmax-type": "learnable", "num-query-groups": 1}
SMALL: dict[str, dict[str, Any]] = {
    "window, MHA, off by one": {**MHA, "window-size": "23,0", "softmax-type": "off-by-one", **ONE_STEP},
    "both masks, sinks, GQA 8:1": {**BOTH_MASKS, "window-size": "(23,0)", **ONE_STEP},
}
# Of Megatron's examples/gptoss/02_train.sh, smaller, with the experts' losses of its 20B
# configuration, which are zero: alone, Megatron takes them document by document.
GPT_OSS: dict[str, Any] = {**BOTH_MASKS, "num-layers": 4, "kv-channels": 8, "attention-softmax-in-fp32": True}
GPT_OSS |= {"swiglu": None, "quick-geglu": True, "glu-linear-offset": 1.0, "activation-func-clamp-value": 7.0}
GPT_OSS |= {"num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 32, "moe-router-dtype": "fp32"}
GPT_OSS |= {"moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.0}
GPT_OSS |= {"moe-token-dispatcher-type": "alltoall", "train-iters": 2}
MODELS: dict[str, dict[str, Any]] = {**SMALL, "GPT-OSS": GPT_OSS}
# Others have sinks in tests/distributed/test_executor.py, and windows are one comm pattern; GPT-OSS
# has both masks and sinks under zeppelin.
IN_THE_SUITE = {
    ("window, MHA, off by one", "zeppelin"),
    *(("both masks, sinks, GQA 8:1", planner) for planner in ("distca", "ulysses")),
}
RUNS = [
    pytest.param(*run, marks=() if run in IN_THE_SUITE else (pytest.mark.product,))
    for run in itertools.product(SMALL, PLANNERS)
]
Alone = Callable[[str], tuple[dict[str, Any], Run, Path]]


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    # By model: flags to start from the same weights, Megatron alone on one rank, and the folder of
    # its gradients.
    made: dict[str, tuple[dict[str, Any], Run, Path]] = {}

    def run(model: str) -> tuple[dict[str, Any], Run, Path]:
        if model not in made:
            # Megatron draws sinks and routers past its own generators.
            own = MODELS[model].get("softmax-type") == "learnable"
            flags = started(train, tmp_path_factory.mktemp("checkpoint"), MODELS[model]) if own else MODELS[model]
            folder = tmp_path_factory.mktemp("gradients")
            plain = train(1, "te_ring", {**flags, **ON_CPU}, entry="plain", before=(SCRIPT, str(folder)))
            made[model] = flags, plain, folder
        return made[model]

    return run


@pytest.mark.parametrize(("model", "planner"), RUNS)
def test_a_planner_trains_like_megatron_alone(train: Train, alone: Alone, model: str, planner: str) -> None:
    flags, plain, folder = alone(model)
    config = {**two_nodes(4), "remap": planner == "zeppelin"}
    run = train(4, options_of(planner), flags, config=config, entry="gradients")
    assert run.column("loss") == pytest.approx(printed_losses(plain.result, 0), rel=1e-5)
    assert worst_gradient(run.result.logs, folder, step=1) < 1e-5


def self_check_difference(run: Run) -> float:
    (told,) = re.findall(r"self-check before step 1: .* relative difference of (\S+)", run.result.log(0))
    return float(told)


def test_gpt_oss_trains_like_megatron_alone(train: Train, alone: Alone) -> None:
    # Its flags, scaled down; sinks over two tensor-parallel ranks, core attention computed again,
    # and a self-check, which attends without a plan.
    flags, plain, folder = alone("GPT-OSS")
    again = {"recompute-activations": True}
    config = {**two_nodes(2), "self_check": True}
    run = train(4, "zeppelin", {**flags, **PARALLEL, **again}, config=config, entry="gradients")
    expected = printed_losses(plain.result, 0)
    losses = run.column("loss")
    # Megatron's second line is the mean of the first two steps.
    assert expected == pytest.approx([losses[0], (losses[0] + losses[1]) / 2], rel=1e-5)
    assert worst_gradient(run.result.logs, folder, step=1) < 1e-5
    assert self_check_difference(run) < 1e-6
    sinks = [name for name in gradients(folder, 1) if name.endswith("core_attention.softmax_offset")]
    assert len(sinks) == 4, "a sink of each head in each layer"
    assert all(abs(each).min() > 0 for name in sinks for each in gradients(folder, 1)[name])


# Multi-latent attention: keys wider than values, rotary embeddings inside attention.

# a number that four ranks do not divide, nor two those of each of two
FLAGS: dict[str, Any] = {**LATENTS, "num-attention-heads": 6, "kv-channels": 8, "train-iters": 2}
FLAGS |= {"rope-type": "yarn", "rotary-scaling-factor": 4}


@pytest.fixture(scope="module")
def _extension() -> None:
    # Build what Megatron compiles when it first recomputes a projection: a minute of a quiet core,
    # which is no part of a job's time. The lock of a build that was killed, for which torch waits
    # for ever, goes.
    lock = Path(cpp_extension._get_build_directory("share_storage_ext", verbose=False)) / "lock"
    if lock.exists() and time.time() - lock.stat().st_mtime > 900:
        lock.unlink()
    build = "from megatron.core.tensor_parallel import random; random._get_share_storage()"
    subprocess.run([sys.executable, "-c", build], check=True, timeout=900)


# Megatron's own layers lose part of a gradient (of the shared rotary key) to tensor parallelism, so
# plan or none are compared under it.
IN_PARALLEL = {"tensor-model-parallel-size": 2, "sequence-parallel": True, "train-iters": 1}
AGAIN = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
UP_PROJECTION = {"recompute-granularity": "selective", "recompute-modules": "mla_up_proj"}


@pytest.fixture(scope="module")
def latents(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run, Run]:
    flags, one = loaded_run(train, tmp_path_factory.mktemp("checkpoint"), FLAGS, entry="gaps")
    two = train(2, "te_ring", {**flags, **IN_PARALLEL, "context-parallel-size": 1, "micro-batch-size": 2})
    return flags, one, two


def test_multi_latent_attention_trains_like_one_rank(train: Train, latents: tuple[dict[str, Any], Run, Run]) -> None:
    flags, one, two = latents
    run = train(4, "zeppelin", flags, config={**two_nodes(4), "remap": True, "latent_kv": "pays"}, entry="gaps")
    assert_same_training(run, one)
    assert "latent_kv: pays: keys and values travel: predicted are " in run.result.log(0)
    assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
    fast = {"cluster": {**two_nodes(4)["cluster"], "flops_per_s": 1e13}}  # transfers are what takes time
    latent = train(4, "te_ring", flags, config={**fast, "latent_kv": "pays"}, entry="gaps")
    assert_same_training(latent, one)
    assert worst_gradient(latent.result.logs, one.result.logs, step=1) < 1e-5
    received = sum(latent.steps[1]["counters"]["bytes_received_forward"])
    tokens = sum(latent.steps[1]["counters"]["kv_tokens_received"])
    assert received == tokens * (8 + 4) * 4, "12 numbers of a token travel in place of 6 heads of 8 and 6"
    parallel = {**flags, **IN_PARALLEL, **AGAIN, "context-parallel-size": 2}
    assert_same_training(train(4, "te_ring", parallel, config={"latent_kv": True}), two)


@pytest.mark.parametrize("again", [AGAIN, pytest.param(UP_PROJECTION, marks=pytest.mark.product)], ids=["all", "up"])
def test_where_latents_cannot_travel_keys_and_values_do_and_it_is_said(
    train: Train, latents: tuple[dict[str, Any], Run, Run], again: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    flags, one, two = latents
    if again is UP_PROJECTION:
        request.getfixturevalue("_extension")
    by_heads = {**flags, **IN_PARALLEL, **again, "context-parallel-size": 2}
    run = train(4, "ulysses", by_heads, config={"latent_kv": "pays"})
    assert_same_training(run, two)
    (told,) = re.findall("latent_kv: pays: keys and values travel, since latents cannot: .*", run.result.log(0))
    assert "the planner parts heads" in told
    assert ("mla_up_proj" in told) == (again is UP_PROJECTION)
    assert run.column("loss") == pytest.approx(one.column("loss")[:1], rel=1e-5)


@pytest.mark.parametrize(("query_rank", "travels"), [(16, False), (None, False), (16, True)])
def test_projections_are_priced_by_the_parameters_of_megatrons_layer(
    query_rank: int | None, travels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A product of a token with a matrix takes two FLOPs for each of its elements.
    sizes: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "q_lora_rank": query_rank,
        "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 6,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # for its rotary frequencies
    with one_process():
        config = MLATransformerConfig(
            **sizes, add_bias_linear=False, gated_linear_unit=True, rope_type="rope",
            use_cpu_initialization=True, gradient_accumulation_fusion=False,
        )  # fmt: skip
        spec: Any = get_gpt_layer_local_spec(multi_latent_attention=True)
        spec.submodules.self_attention.submodules.core_attention = IdentityOp  # its own takes no keys of other width
        layer: Any = build_module(spec, config=config, layer_number=1)
    of = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.dim() == 2}
    args = argparse.Namespace(
        **sizes, window_size=None, window_attn_skip_freq=None, num_experts=None, moe_ffn_hidden_size=None, swiglu=True,
        params_dtype=torch.bfloat16, padded_vocab_size=96, multi_latent_attention=True, sequence_parallel=False,
        mtp_num_layers=None, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    shape = AttentionShape(4, 1 if travels else 4, 6, None, (8, 2) if travels else None)
    model = planned_model(args, choice.Run(source="balance.yaml"), shape, 1)
    up = of["self_attention.linear_kv_up_proj.weight"]
    assert model.linear_flops_per_token == 2 * (sum(of.values()) - up * travels)
    assert model.latent_flops == 2 * up
    assert sum(module.weights for module in layer_modules(model)) - 2 * model.hidden_size == sum(of.values())
    halves = model.share(2)
    assert 2 * halves.linear_flops_per_token == model.linear_flops_per_token


# Multi-token prediction: what lies ahead of a token, on whatever rank the plan put it.

DEPTHS = 2
MTP_FLAGS: dict[str, Any] = {"mtp-num-layers": DEPTHS, "mtp-loss-scaling-factor": 0.5, "train-iters": 2}


def test_rows_say_what_lies_ahead_as_megatron_rolls_packed_sequences() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, PADDING]])
    held = positions != PADDING
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(1, 90, positions.shape, generator=generator) for _ in range(2))
    mask = torch.rand(positions.shape, generator=generator)
    rows = unpack({"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}, DEPTHS).rows
    starts = torch.nonzero(positions[held] == 0).flatten()
    packed = PackedSeqParams(cu_seqlens_q=torch.cat([starts, held.sum()[None]]))
    wanted = {TOKEN: tokens[held][None], LABEL: labels[held][None], LOSS_MASK: mask[held][None]}
    wanted[POSITION] = positions[held][None]
    for depth in range(1, DEPTHS + 1):
        rolled: Any = roll_tensor
        wanted = {which: rolled(values, packed_seq_params=packed)[0] for which, values in wanted.items()}
        for which, values in wanted.items():
            found = rows[:, column(depth, which)]
            assert torch.equal(from_bits(found) if which == LOSS_MASK else found, values[0]), (depth, which)


def test_several_tensors_are_rolled_at_once_and_masks_say_their_count() -> None:
    # As Megatron's branch dev asks, which sums the masks itself.
    count = torch.tensor(2.5)
    own, next_ = (torch.tensor([[at, at + 1, at + 2]]) for at in (10, 20))
    masks = torch.full((1, 3), 2.5 / 3), CountedMask.of(torch.tensor([[1.0, 0.5, 0.0]]), count)
    ahead = Ahead((own, next_), (own + 1, next_ + 1), (own + 2, next_ + 2), masks, count)
    params = BalancedSeqParams(ahead=ahead)
    calls: list[Any] = []
    roll = looked_up(lambda *args, **kwargs: calls.append((args, kwargs)))
    rolled = roll([ahead.tokens[0], ahead.labels[0], masks[0]], packed_seq_params=params, fill_values=[0, 0, 0])
    assert [each is of[1] for each, of in zip(rolled, (ahead.tokens, ahead.labels, masks), strict=True)] == [True] * 3
    assert rolled[2].sum() == count
    product = rolled[2] * torch.ones(1, 3)
    assert type(product) is torch.Tensor
    assert product.sum() == 1.5
    assert not calls
    roll(own, packed_seq_params=PackedSeqParams(), return_sum=False)
    assert calls[0][1] == {"return_sum": False}


# Routers that look at more than a token's own scores: the routes and losses of one rank.

STEPS = 2
SINKHORN: dict[str, Any] = {**conftest.EXPERTS, "moe-router-topk": 1, "train-iters": STEPS}
SINKHORN |= {"moe-router-load-balancing-type": "sinkhorn", "moe-aux-loss-coeff": 0}


def test_sinkhorn_is_megatrons_and_rows_of_no_sequence_count_nowhere() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 8, generator=generator)
    alone: Any = SimpleNamespace(size=lambda: 1)
    torch.testing.assert_close(_sinkhorn_of_pool(logits, None, alone), sinkhorn(logits))
    padding = torch.arange(60) >= 50
    padded = torch.cat([logits, torch.randn(10, 8, generator=generator)])
    found = _sinkhorn_of_pool(padded, padding, alone)
    torch.testing.assert_close(found[:50], sinkhorn(logits))


def test_megatrons_own_router_is_refused_where_it_would_balance_the_rows_of_a_rank() -> None:
    router: Any = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.routing_type = "aux_loss"
    check_router(router, "mlp.router")
    router.config = SimpleNamespace(moe_aux_loss_coeff=0.1)
    for kind in ("sinkhorn", "seq_aux_loss"):
        router.routing_type = kind
        with pytest.raises(ConfigError, match=r"mlp\.router is Megatron's own router.* from its model config"):
            check_router(router, "mlp.router")


def test_aux_loss_alone_is_taken_over_all_replicas() -> None:
    taken: list[Any] = []

    class Router(TopKRouter):
        def _apply_aux_loss(self, probs: Any) -> Any:
            taken.append(self.tp_cp_group)
            return probs

    router: Any = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.tp_cp_group, router.tp_dp_cp_group = "replica", "all"
    share_losses(router)
    assert router._apply_aux_loss("probabilities") == "probabilities"
    assert (taken, router.tp_cp_group) == (["all"], "replica"), "by whose size global_aux_loss is weighted"


def test_sinkhorn_routes_as_one_rank_does(train: Train, tmp_path: Path) -> None:
    # Replicas that share experts; plain Megatron's dispatcher is switched off.
    given, one = loaded_run(train, tmp_path, SINKHORN)
    flags = {**given, "moe-token-dispatcher-type": "allgather", **EXPERTS}
    run = train(4, "zeppelin", flags, config=two_nodes(4))
    assert_same_training(run, one)
    assert "allgather was set to alltoall" in run.result.log(0)


BY_SAMPLE: dict[str, Any] = {**conftest.EXPERTS, "moe-router-score-function": "sigmoid", "train-iters": STEPS}
BY_SAMPLE |= {"moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"], "moe-aux-loss-coeff": [0.1, 0.2]}


def test_further_tokens_and_the_loss_of_a_sample_are_those_of_one_rank(
    train: Train, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Coefficients that show; samples of one microbatch on all ranks, and in stages.
    sizes = {"micro-batch-size": 2, "global-batch-size": 4}
    given = {**BY_SAMPLE, **MTP_FLAGS, **sizes}
    flags, one = loaded_run(train, tmp_path_factory.mktemp("checkpoint"), given, whole=True, entry="gaps")
    config = {**two_nodes(4), "remap": True}
    run = train(4, "zeppelin", flags, config=config, entry="gaps")
    assert_same_training(run, one)
    assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
    for name in (*(f"mtp_{depth} loss" for depth in range(1, DEPTHS + 1)), "seq_load_balancing_loss"):
        assert len(logged(one.result, name)) == STEPS
        assert logged(run.result, name) == pytest.approx(logged(one.result, name), rel=1e-5), name
    stages = {**PARALLEL, "pipeline-model-parallel-size": 2, "context-parallel-size": 1, "train-iters": 1}
    again = {"recompute-granularity": "selective", "recompute-modules": ["moe", "mlp"]}
    # The first stage routes again for its first microbatch when it has gone on to the second.
    kept, recomputed = (
        train(4, "te_ring", {**flags, **stages, **more}, config={"self_check": not more}, entry="gradients")
        for more in ({}, again)
    )
    assert_same_training(kept, Run(one.result, one.steps[:1]))
    assert self_check_difference(kept) < 1e-6
    assert_same_training(recomputed, kept, tolerance=1e-6)
    for name, found in gradients(recomputed.result.logs, 1).items():
        for got, wanted in zip(found, gradients(kept.result.logs, 1)[name], strict=True):
            assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6 * float(abs(wanted).max())), name


def test_halves_of_a_sample_have_its_loss_and_one_alone_in_its_microbatch_megatrons(
    train: Train, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags, one = loaded_run(train, tmp_path_factory.mktemp("checkpoint"), {**BY_SAMPLE, "train-iters": 1})
    halves = {**flags, "micro-batch-size": 2, **AGAIN}
    assert_same_training(train(2, "distca", halves, config={"cluster": {"ranks_per_node": 2}}), one)
    # Then the loss over a sample is that over the microbatch, which is Megatron's own code.
    flags = {**BY_SAMPLE, "global-batch-size": 1, "micro-batch-size": 1, "moe-aux-loss-coeff": 0.2, "train-iters": 1}
    ours, megatrons = (
        train(1, "te_ring", {**flags, "moe-router-load-balancing-type": kind}) for kind in ("seq_aux_loss", "aux_loss")
    )
    assert_same_training(ours, megatrons)
    assert logged(ours.result, "seq_load_balancing_loss") == pytest.approx(
        logged(megatrons.result, "load_balancing_loss"), rel=1e-5
    )


def test_planners_that_part_samples_are_refused() -> None:
    args = parse(*WORDS, "--moe-router-load-balancing-type", "seq_aux_loss")
    for name in ("wlb_llm", "hydraulis", "megatron"):
        config: Any = SimpleNamespace(planner=SimpleNamespace(name=name, planner=planners.PLANNERS[name]))
        with pytest.raises(ConfigError, match=f"planner {name} makes microbatches of its own"):
            _check_samples(args, config)
        with pytest.raises(ConfigError, match=r"seq_aux_loss is a loss.*; --sft averages evaluation"):
            _check_samples(argparse.Namespace(**{**vars(args), "sft": True}), config)
        _check_samples(parse("--sft", "--eval-iters", "0"), config)
    config = SimpleNamespace(planner=SimpleNamespace(name="zeppelin", planner=planners.PLANNERS["zeppelin"]))
    _check_samples(args, config)

"""Tiny hybrid models of Transformers, trained on the ranks of a pool and by one rank alone."""

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_balance.compile.transpose import Policy
from megatron_balance.torch import SequenceBalancer, Settings, hf, mixers
from megatron_balance.torch.leaks import Leaks
from tests.support.pool import World, said
from tests.support.recurrent_jobs import FAULTS


def _sizes(words: str, **others: Any) -> dict[str, Any]:
    # Keys of a configuration, each with a number behind it.
    said = words.split()
    return dict(zip(said[::2], map(int, said[1::2]), strict=True)) | others


VOCABULARY = 96
SIZES = _sizes(
    f"vocab_size {VOCABULARY} hidden_size 32 intermediate_size 48 num_hidden_layers 4 num_attention_heads 4 "
    "num_key_value_heads 2",
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
)
DELTA = "linear_num_key_heads 2 linear_num_value_heads 4 linear_key_head_dim 8 linear_value_head_dim 8 head_dim 8"
MAMBA = "mamba_n_heads 8 mamba_d_head 8 mamba_d_state 8 mamba_n_groups 1 mamba_chunk_size 16"
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
# By model type, beside SIZES.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": _sizes(f"{DELTA} num_experts 0", mlp_only_layers=[0, 1, 2, 3], layer_types=LINEAR),
    "qwen3_5_text": _sizes(DELTA, layer_types=LINEAR),
    "olmo_hybrid": _sizes(DELTA, layer_types=LINEAR),
    "kimi_linear": _sizes(
        "num_key_value_heads 4 kv_lora_rank 16 qk_rope_head_dim 4 v_head_dim 12 qk_nope_head_dim 8 linear_head_dim 8 "
        "linear_num_heads 4 moe_intermediate_size 16 num_local_experts 4 num_experts_per_tok 2",
        layer_types=LINEAR,
        mlp_layer_types=["dense"] * 4,
    ),
    "nemotron_h": _sizes(
        "head_dim 8 mamba_num_heads 4 mamba_head_dim 8 ssm_state_size 8 n_groups 2 conv_kernel 4 chunk_size 16",
        layers_block_type=["mamba", "mlp", "attention", "mamba"],
    ),
    "granitemoehybrid": _sizes(
        f"{MAMBA} mamba_expand 2 num_local_experts 0 shared_intermediate_size 48",
        layer_types=["mamba", "mamba", "attention", "mamba"],
    ),
    "bamba": _sizes(MAMBA, attn_layer_indices=[2]),
    "falcon_h1": _sizes(f"{MAMBA} head_dim 8 mamba_d_ssm 64"),
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    # Without recurrent layers: latents, and values of another width than keys; soft-capped scores.
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        _sizes(
            "num_key_value_heads 4 kv_lora_rank 16 q_lora_rank 24 qk_rope_head_dim 4 v_head_dim 12 qk_nope_head_dim 8 "
            "first_k_dense_replace 2 moe_intermediate_size 16 n_routed_experts 4 num_experts_per_tok 2 n_group 1 "
            "topk_group 1 n_shared_experts 1",
            initializer_range=0.2,
        ),
    ),
    "gemma2": _sizes(
        "head_dim 8 sliding_window 24 query_pre_attn_scalar 8", attn_logit_softcapping=1.0, initializer_range=0.2
    ),
    # No plan reaches these.
    "jamba": _sizes(
        "mamba_d_state 8 mamba_expand 2 mamba_dt_rank 4 num_experts 1 attn_layer_period 4 attn_layer_offset 2"
    ),
    "rwkv": _sizes("attention_hidden_size 32"),
}
CONV = frozenset(["causal_conv1d_fn"])


@dataclass(frozen=True)
class Hybrid:
    # A model and how it trains. `again`: "no" checkpointing, or which form; `marks`: steps behind the
    # first whose gradients are compared from the weights of the one rank.
    model: str
    planner: str = "zeppelin"
    steps: int = 2
    accumulate: int = 1
    sharded: bool = False
    again: str = "no"
    backward: Policy = "keep"
    marks: tuple[int, ...] = ()


@dataclass
class Alone:
    # Of one rank with every document by itself: losses by step; by mark, weights before it; gradients
    # of the first step and of the marks.
    losses: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def make(name: str, attention: str) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(name, **SIZES | MODELS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    lengthen(model)
    return model.float()


def lengthen(model: nn.Module) -> None:
    # As drawn, a state is forgotten within a few tokens, or hardly written, which hides what is wrong.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-5.0)
            elif name.endswith("dt_bias"):
                parameter.fill_(1.0)


def documents(rank: int, step: int) -> list[Tensor]:
    draw = random.Random(100 * rank + step)
    lengths = [draw.choice([1, 2, 3, 5, 20, 50, 130]) for _ in range(draw.randrange(0, 4))]
    if (rank + step) % 4 == 0:
        lengths.append(200 + draw.randrange(60))
    return [(torch.arange(n) * draw.randrange(1, 5) + draw.randrange(VOCABULARY)) % VOCABULARY for n in lengths]


@cache
def alone(name: str, num_ranks: int, steps: int, accumulate: int, marks: tuple[int, ...]) -> Alone:
    model, found = make(name, "eager"), Alone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        drawn = [
            each
            for m in range(accumulate)
            for rank in range(num_ranks)
            for each in documents(rank, step * accumulate + m)
        ]
        targets = sum(len(each) - 1 for each in drawn)
        if step in marks:
            found.weights.append(deepcopy(model.state_dict()))
        total = 0.0
        for each in (each for each in drawn if len(each) > 1):
            logits = model(each[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1], each[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
        found.losses.append(total)
        if step in (0, *marks):
            named = model.named_parameters()
            found.gradients.append({name: x.grad.clone() for name, x in named if x.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def train(world: World, ways: Sequence[Hybrid], wanted: Sequence[Alone]) -> list[tuple[float, float, int]]:
    # Of each way the largest differences from one rank alone: of the first ten steps' losses, and of a
    # gradient over the largest entry of all; and documents that are cut.
    return [_train(world, way, each) for way, each in zip(ways, wanted, strict=True)]


def balanced(world: World, way: Hybrid) -> Any:
    # The model as a way trains it.
    model = make(way.model, hf.register())
    if way.again != "no":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": way.again == "reentrant"})
    if way.sharded:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_cp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _train(world: World, way: Hybrid, wanted: Alone) -> tuple[float, float, int]:
    model = balanced(world, way)
    settings = Settings(ranks_per_node=max(1, world.size // 2), backward=way.backward)
    balancer = SequenceBalancer.for_model(model.config, way.planner, settings=settings)
    cut = 0

    def run(step: int) -> float:
        # Gradients of a step, averaged over the ranks.
        nonlocal cut
        numbers = [step * way.accumulate + m for m in range(way.accumulate)]
        total = 0.0
        for batch in balancer.step([documents(world.rank, number) for number in numbers]):
            logits = model(**hf.inputs(batch)).logits[0]
            loss = F.cross_entropy(logits, batch.labels, reduction="sum")
            batch.mean_loss(loss).backward()
            total += float(batch.global_loss(loss, attended=0))
            owners = [set(batch.layout(rank)[:, 0].tolist()) for rank in range(world.size)]
            cut += sum(sum(each in of for of in owners) > 1 for each in range(len(batch.plan.lengths)))
        if not way.sharded:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size
        return total

    def apart(gradients: dict[str, Tensor]) -> float:
        largest = max(float(x.abs().max()) for x in gradients.values())
        named = [(name, x.grad) for name, x in model.named_parameters() if name in gradients and x.grad is not None]
        return max(float((_whole(x) - gradients[name]).abs().max()) for name, x in named) / largest

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    worst = 0.0
    for step in range(way.steps):
        losses.append(run(step))
        if step == 0:  # from the weights of the one rank
            worst = apart(wanted.gradients[0])
        optimizer.step()
        optimizer.zero_grad()
    for mark, weights, gradients in zip(way.marks, wanted.weights, wanted.gradients[1:], strict=True):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _set(parameter, weights[name])
        run(mark)
        worst = max(worst, apart(gradients))
        optimizer.zero_grad()
    balancer.close()
    pairs = zip(losses[:10], wanted.losses[:10], strict=True)
    return max(abs(a - b) for a, b in pairs), worst, cut


def _set(parameter: Tensor, weight: Tensor) -> None:
    if isinstance(parameter, DTensor):
        from torch.distributed.tensor import distribute_tensor

        weight = distribute_tensor(weight, parameter.device_mesh, parameter.placements)
    parameter.copy_(weight)


def rollouts(rank: int) -> list[Tensor]:
    # Of a prompt, which branch again; of another rank others; rank 1 has none.
    draw = random.Random(rank)

    def words(most: int) -> Tensor:
        return torch.tensor([draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, most))])

    prompt, found = words(60 + 60 * (rank == 0)), list[Tensor]()
    for _ in range(0 if rank == 1 else 3):
        turn = torch.cat([prompt, words(20)])
        found += [torch.cat([turn, words(30)]) for _ in range(draw.randrange(1, 4))]
    return found


def each_alone(name: str, num_ranks: int) -> tuple[float, dict[str, Tensor]]:
    # The loss of all ranks' rollouts, each by itself, and its gradients.
    reference, total = make(name, "eager"), 0.0
    for rank in range(num_ranks):
        for each in rollouts(rank):
            logits = reference(each[None], use_cache=False).logits[0]
            loss = F.cross_entropy(logits[:-1], each[1:], reduction="sum")
            loss.backward()
            total += loss.item()
    return total, {name: x.grad for name, x in reference.named_parameters() if x.grad is not None}


def branches(
    world: World, ways: Sequence[Hybrid], wanted: Sequence[tuple[float, dict[str, Tensor]]]
) -> list[tuple[float, float, int]]:
    # Rollouts as trees against each by itself, of each way: the loss, relative, gradients over the
    # largest entry, and trees that are cut.
    return [_branches(world, way, *each) for way, each in zip(ways, wanted, strict=True)]


def _branches(world: World, way: Hybrid, total: float, named: dict[str, Tensor]) -> tuple[float, float, int]:
    model, mine = balanced(world, way), rollouts(world.rank)
    settings = Settings(ranks_per_node=max(1, world.size // 2))
    with SequenceBalancer.for_model(model.config, way.planner, settings=settings) as balancer:
        batch = balancer.rollouts(mine, [torch.ones(len(each)) for each in mine])
        loss = batch.weighted_nll(model(**hf.inputs(batch)).logits[0])
        loss.backward()
        owners = [set(batch.layout(rank)[:, 0].tolist()) for rank in range(world.size)]
        cut = sum(sum(each in of for of in owners) > 1 for each in range(len(batch.plan.lengths)))
    value = loss.detach().clone()
    dist.all_reduce(value)
    worst, largest = 0.0, max(float(x.abs().max()) for x in named.values())
    for name, parameter in model.named_parameters():
        gradient = torch.zeros(parameter.shape) if parameter.grad is None else _whole(parameter.grad)
        if not way.sharded:
            dist.all_reduce(gradient)
            gradient = gradient / world.size
        if name in named:
            worst = max(worst, float((gradient - named[name]).abs().max()) / largest)
    return abs(value.item() / world.size / total - 1), worst, cut


def refuse(world: World) -> list[str]:
    # What is said of models and calls that a plan does not reach.
    told = [said(make, "jamba", hf.register()), said(hf.register, make("rwkv", "eager"))]
    model: Any = make("lfm2", hf.register())
    balancer = SequenceBalancer.for_model(model.config, settings=Settings(ranks_per_node=2))
    batch = balancer(documents(world.rank, 0))
    tree = torch.arange(5), torch.arange(5), [(2, -1, False), (2, 0, True), (1, 0, False)]
    mixer, hidden = model.model.layers[0].conv, torch.zeros(1, batch.num_rows, SIZES["hidden_size"])
    of_decoder = model.model.register_forward_pre_hook(lambda *_: mixer(hidden) and None)
    told.append(said(model, **hf.inputs(batch)))
    of_decoder.remove()
    with patch.object(type(mixer), "forward", lambda _mixer, x, **_: x), patch.object(mixers, "_named", lambda _: CONV):
        told.append(said(mixer, hidden, balanced=batch))
    q = torch.zeros(1, batch.num_rows, 2, 4)
    scan = mixers.SEAMS["torch_chunk_gated_delta_rule"]
    told.append(
        said(scan, mixers._Mixing(batch, 1, alone=False), q, q, q, q[..., 0], q[..., 0], output_final_state=True)
    )
    told.append(said(balancer.trees, [tree]))
    balancer.close()
    return told


class Invented(nn.Module):
    # A mixer that nobody reviewed: the mean of the rows up to each, or from each on.
    def __init__(self, mlp: nn.Module, *, backwards: bool) -> None:
        super().__init__()
        self.mlp, self.backwards = mlp, backwards

    def forward(self, x: Tensor) -> Tensor:
        x = x.flip(1) if self.backwards else x
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.mlp(mixed.flip(1) if self.backwards else mixed)


def check(world: World) -> tuple[list[Leaks], list[str]]:
    # Figures of models that keep documents apart, and what is said of others.
    figures: list[Leaks] = []
    told: list[str] = []
    for way in (Hybrid("granitemoehybrid"), Hybrid("qwen3_5_text", "te_ring", sharded=True, again="reentrant")):
        model = balanced(world, way)
        before = [_whole(x) for x in model.parameters()]
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.fill_(2.0)  # the check has long memory of its own
        with SequenceBalancer.for_model(model.config, way.planner, settings=Settings(ranks_per_node=2)) as balancer:
            figures.append(hf.check(model, balancer))
            balancer([(torch.arange(3), torch.arange(3), torch.ones(3))])
            assert [name for name, x in model.named_parameters() if not torch.equal(_whole(x), before.pop(0))] == [
                name for name, _ in model.named_parameters() if name.endswith("A_log")
            ]
            with patch.object(*FAULTS["states and their gradients lost"]):
                told.append(said(hf.check, model, balancer))
    for backwards in (False, True):
        model = make("lfm2", hf.register())
        model.model.layers[2].feed_forward = Invented(model.model.layers[2].feed_forward, backwards=backwards)
        with SequenceBalancer.for_model(model.config, "distca", settings=Settings(ranks_per_node=2)) as balancer:
            told.append(said(hf.check, model, balancer))
    return figures, told


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()

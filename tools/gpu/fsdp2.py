"""A loop in plain PyTorch under FSDP2, without Megatron, against one rank on the CPU, in fp32."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tests.support import torch_jobs
from tests.support.pool import World
from tools.gpu import ranks
from tools.gpu.ranks import Place
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 25.0
STEPS = 4
PLANNERS = ("zeppelin", "distca")
AGAINST_ONE = {
    name: Figure(f"plain PyTorch, FSDP2, {name}: loss and gradient norm against one rank", "relative", each)
    for each in (Target("at most", 2e-5),)
    for name in PLANNERS
}
QLORA = Figure(
    "plain PyTorch, QLoRA: loss and gradients against each document alone", "relative", Target("at most", 2e-5)
)
FIGURES = (*AGAINST_ONE.values(), QLORA)


def measure(context: Context) -> Iterator[Row]:
    size = min(4, context.ranks)
    kernel = "plain" if context.on_gpu else "auto"
    ways = [
        torch_jobs.Way(planner=name, steps=STEPS, device=context.device, kernel=kernel, ranks_per_node=size // 2)
        for name in PLANNERS
    ]
    found = ranks.run_ranks(_rank, size, (ways,), context, seconds=context.left_s() - 3.0).results()
    one = torch_jobs.reference(ways[0])
    for at, (name, figure) in enumerate(AGAINST_ONE.items()):
        differences = [
            abs(a - b) / abs(b)
            for rank in found
            for ours, theirs in ((rank[at][0], one.losses), (rank[at][1], one.norms))
            for a, b in zip(ours, theirs, strict=True)
        ]
        yield figure.measured(max(differences), f"{name} on {size} ranks, {STEPS} steps")
    if missing := [name for name in ("bitsandbytes", "peft", "transformers") if find_spec(name) is None]:
        yield QLORA.not_measured(f"{missing[0]} is not installed")
        return
    apart = ranks.run_ranks(_adapted, size, (kernel,), context, seconds=context.left_s() - 3.0).results()
    yield QLORA.measured(max(apart), f"a Llama in NF4, LoRA on all its linear modules, zeppelin on {size} ranks")


def _adapted(place: Place, kernel: str) -> float:
    """The largest difference of a quantised model's loss and its adapters' gradients."""
    import peft
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, LlamaConfig

    from megatron_balance.torch import SequenceBalancer, Settings, hf

    bitsandbytes: Any = import_module("bitsandbytes")
    ranks.join(place)
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, **heads)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=hf.register())
    for layer in model.model.layers:
        for of in (layer.self_attn, layer.mlp):
            for name, each in list(of.named_children()):
                if isinstance(each, torch.nn.Linear):
                    made = bitsandbytes.nn.Linear4bit(
                        each.in_features, each.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                    )
                    made.load_state_dict(each.state_dict())
                    setattr(of, name, made)
    model.is_loaded_in_4bit = True
    lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
    model = peft.get_peft_model(model.to(place.device), lora)
    quantised = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear4bit)]
    assert {each.weight.dtype for each in quantised} == {torch.uint8}
    documents = [torch.randint(256, (n,), device=place.device) for n in (300, 129, 64, 33, 2, 90)]
    settings = Settings(kernel=kernel, device=place.device, ranks_per_node=place.size // 2)
    balancer = SequenceBalancer.for_model(config, "zeppelin", settings=settings)
    batch = balancer(documents[place.rank :: place.size])
    loss = F.cross_entropy(model(**hf.inputs(batch)).logits[0].float(), batch.labels, reduction="sum")
    batch.mean_loss(loss).backward()
    adapters = [each for each in model.parameters() if each.requires_grad]
    found = [batch.global_loss(loss).detach()]
    for each in adapters:
        assert each.grad is not None
        dist.all_reduce(each.grad)
        found.append(each.grad / place.size)
        each.grad = None
    with hf.attention_of(model, "eager"):
        sums = [
            F.cross_entropy(model(input_ids=x[None]).logits[0, :-1].float(), x[1:], reduction="sum") for x in documents
        ]
    one = torch.stack(sums).sum() / sum(len(x) - 1 for x in documents)
    right = [one.detach(), *torch.autograd.grad(one, adapters)]
    balancer.close()
    ranks.leave()
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


def _rank(place: Place, ways: list[Any]) -> list[tuple[list[float], list[float]]]:
    ranks.join(place)
    trained = torch_jobs.train(World(place.rank, place.size, None), ways)  # pyright: ignore[reportArgumentType]
    ranks.leave()
    return [(each.losses, each.norms) for each in trained]

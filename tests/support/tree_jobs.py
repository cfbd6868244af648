"""Rollouts trained as trees on the ranks of a pool, and each rollout by itself on one rank."""

import io
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_balance
from megatron_balance.ir.forest import Forest
from megatron_balance.torch import BalancedBatch, SequenceBalancer, Settings, hf
from tests.support.pool import World, said
from tests.support.torch_jobs import HEAD_DIM, MODEL, SIZES, VOCABULARY, WIDTH, Gpt, tiny, whole

EPSILON, BETA = 0.2, 0.04


@dataclass(frozen=True)
class Rollout:
    # Tokens [n]; of each token whether it is trained, and what it counts; its log-probability when it
    # was drawn and that of a reference model.
    tokens: list[int]
    trained: Tensor
    advantage: float
    old: Tensor
    reference: Tensor


@dataclass(frozen=True)
class Case:
    # How rollouts are trained. `loss`: linear, or clipped with a KL term.
    planner: str = "zeppelin"
    model: str = "gpt"
    loss: str = "clipped"
    dtype: torch.dtype = torch.float64
    backward: str = "keep"
    fsdp: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def name(self) -> str:
        said_dtype = str(self.dtype).removeprefix("torch.")
        return "-".join([self.planner, self.model, self.loss, said_dtype, self.backward] + ["fsdp"] * self.fsdp)


def grpo(logp: Tensor, rollout: Rollout) -> Tensor:
    """GRPO's loss of one rollout (DeepSeekMath, equations 3 and 4), by the log-probabilities [n - 1]
    of the tokens behind the first.
    """
    old, reference, trained = (x[1:].to(logp.dtype) for x in (rollout.old, rollout.reference, rollout.trained))
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    gain = torch.minimum(ratio * rollout.advantage, clipped * rollout.advantage)
    kl = (reference - logp).exp() - (reference - logp) - 1
    return -((gain - BETA * kl) * trained).sum() / trained.sum().clamp(min=1)


def weights(rollout: Rollout) -> Tensor:
    return rollout.advantage * rollout.trained


def linear(logp: Tensor, rollout: Rollout) -> Tensor:
    """The weighted negative log likelihood of one rollout."""
    return -(logp * weights(rollout)[1:].to(logp.dtype)).sum()


LOSSES = {"clipped": grpo, "linear": linear}


# What rollouts changed by since they were drawn, as log ratios: far from where one is clipped, so that
# rounding brings no token to the other side.
SIDES = torch.tensor([-0.5, -0.1, 0.05, 0.4], dtype=torch.float64)


@cache
def drawn(num_ranks: int, name: str = "gpt") -> list[list[Rollout]]:
    """By rank: rollouts of a prompt, an agent's branching turns, equal ones, the beginning of another;
    rank 1 has none. `name`: of the model that they are of.
    """
    random = torch.Generator().manual_seed(num_ranks)

    def words(most: int, least: int = 1) -> list[int]:
        size = int(torch.randint(least, most + 1, (), generator=random))
        return torch.randint(0, VOCABULARY, (size,), generator=random).tolist()

    def branched(prompt: list[int], turns: int) -> list[list[int]]:
        if not turns:
            return [prompt]
        return [each for _ in range(2) for each in branched(prompt + words(9), turns - 1)]

    prompt = words(40, 30)
    grouped = [prompt + words(17) for _ in range(5)]
    given = [[*grouped, grouped[0], grouped[1][:-1]], [], branched(words(12, 10), 3), [words(60, 50), words(2, 2), [3]]]
    if num_ranks == 2:
        given = [given[0] + given[2] + given[3], []]
    given += [branched(words(30, 20), 2) for _ in range(len(given), num_ranks)]
    model = model_of(name, torch.float64, balanced=False)
    made: list[list[Rollout]] = []
    for of_rank in given:
        made.append([])
        for tokens in of_rank:
            with torch.no_grad():
                logp = torch.cat([torch.zeros(1, dtype=torch.float64), logp_of(model, tokens)])
            old = logp - SIDES[torch.randint(0, 4, (len(tokens),), generator=random)]
            near = logp + 0.3 * torch.randn(len(tokens), generator=random, dtype=torch.float64)
            trained = (torch.rand(len(tokens), generator=random) < 0.7).double()
            advantage = float(torch.randn((), generator=random))
            made[-1].append(Rollout(tokens, trained, advantage, old, near))
    return made


def model_of(name: str, dtype: torch.dtype, *, balanced: bool) -> nn.Module:
    """A model with the same parameters on every rank."""
    if name == "gpt":
        torch.manual_seed(0)
        return Gpt().to(dtype)
    others: dict[str, Any] = {"head_dim": HEAD_DIM}
    if name == "GptOss":  # windows in every other layer, and sinks
        others |= {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1}
    # Others' eager attention has its softmax in fp32.
    model = tiny(name, hf.register() if balanced else "eager" if name == "GptOss" else "sdpa", **others).to(dtype)
    model.config._experts_implementation = "eager"
    for each in model.modules():
        # Its norms round to fp32 whatever the type is, and with it every gradient.
        if "RMSNorm" in type(each).__name__ and dtype == torch.float64:
            each.forward = partial(_norm, each)
    return model


def _norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def logp_of(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities [n - 1] of the tokens behind the first, of one rollout by itself."""
    ids = torch.tensor(tokens)
    logits = model(ids, torch.arange(len(ids))) if isinstance(model, Gpt) else model(ids[None]).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


@cache
def alone(name: str, loss_of: str, num_ranks: int) -> tuple[float, list[Tensor]]:
    """The loss of all ranks' rollouts, one by one in fp64, and its gradients."""
    model, total = model_of(name, torch.float64, balanced=False), 0.0
    for rollout in chain.from_iterable(drawn(num_ranks, name)):
        loss = LOSSES[loss_of](logp_of(model, rollout.tokens), rollout)
        loss.backward()
        total += loss.item()
    return total, [p.grad for p in model.parameters() if p.grad is not None]


def balancer_of(case: Case, model: nn.Module | None = None) -> SequenceBalancer:
    settings = Settings(ranks_per_node=2, backward=case.backward)  # pyright: ignore[reportArgumentType]
    if case.model == "GptOss":
        assert model is not None
        return SequenceBalancer.for_model(model.config, case.planner, settings=settings, **dict(case.options))
    return SequenceBalancer(case.planner, MODEL, settings=settings, **dict(case.options))


def logits_of(model: nn.Module, batch: BalancedBatch) -> Tensor:
    if isinstance(model, Gpt):
        return model(batch.tokens, batch.position_ids, batch)
    return model(**hf.inputs(batch)).logits[0]


def train(world: World, cases: Sequence[Case]) -> list[tuple[float, list[Tensor], int]]:
    """Of each case: the loss of all ranks, its gradients, and the rows of this rank."""
    return [_train(world, case) for case in cases]


def _train(world: World, case: Case) -> tuple[float, list[Tensor], int]:
    mine = drawn(world.size, case.model)[world.rank]
    model: Any = model_of(case.model, case.dtype, balanced=True)
    balancer = balancer_of(case, model)
    if case.fsdp:
        fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    given = [weights(each) for each in mine] if case.loss == "linear" else None
    batch = balancer.rollouts([each.tokens for each in mine], given)
    assert isinstance(batch.plan.mask, Forest)
    megatron_balance.verify(batch.plan)
    logits = logits_of(model, batch)
    if case.loss == "linear":
        loss = batch.weighted_nll(logits)
    else:
        logp = logits.log_softmax(-1).gather(1, batch.labels.clamp(min=0)[:, None])[:, 0]
        of_rollouts = batch.by_rollout(logp)
        for found, each in zip(of_rollouts, mine, strict=True):
            moved = found.detach()[:-1].double() - each.old[1:]
            assert ((moved[:, None] - SIDES).abs().min(dim=1).values < 1e-3).all(), (
                "on the side of a clip it was drawn on"
            )
        loss = batch.sum_loss(sum(grpo(x[:-1], each) for x, each in zip(of_rollouts, mine, strict=True)))
    loss.backward()
    value = loss.detach().clone()
    dist.all_reduce(value)
    gradients: list[Any] = [whole(p.grad) for p in model.parameters()]
    if not case.fsdp:  # the average, as DDP has it
        for each in gradients:
            dist.all_reduce(each, op=dist.ReduceOp.SUM)
        gradients = [each / world.size for each in gradients]
    return value.item() / world.size, gradients, batch.num_tokens


@dataclass(frozen=True)
class Waited:
    # Of one rank: by step, the rollouts' numbers that it got back and how many trees wait behind it;
    # steps planned ahead; the loss of all ranks and its gradients.
    trained: list[list[int]]
    held: list[int]
    ahead: int
    loss: float
    gradients: list[Tensor]


def wait(world: World, then: Sequence[str | None]) -> list[Waited]:
    return [_wait(world, going_on) for going_on in then]


def _wait(world: World, going_on: str | None) -> Waited:
    """Train rollouts in three steps of two microbatches and those of what waits, under wlb_llm, which
    delays long trees. `going_on`: save after the second step and go on under this planner.
    """
    mine, case = drawn(world.size)[world.rank], Case("wlb_llm", options=(("thresholds", (49,)),))
    given = [mine[at::6] for at in range(6)]
    fed = list(chain.from_iterable(given))
    model: Any = model_of(case.model, case.dtype, balanced=True)
    balancer, trained, held, ahead, total = balancer_of(case), [], [], 0, torch.zeros((), dtype=case.dtype)

    def feed(first: int) -> list[list[list[int]]]:
        return [[each.tokens for each in microbatch] for microbatch in given[first:]]

    steps: Any = balancer.steps(feed(0), 2, of="rollouts")
    while (batches := next(steps, None)) is not None:
        for batch in batches:
            logp = logits_of(model, batch).log_softmax(-1).gather(1, batch.labels.clamp(min=0)[:, None])[:, 0]
            pairs = zip(batch.by_rollout(logp), batch.rollout_numbers, strict=True)
            loss = batch.sum_loss(sum(grpo(x[:-1], fed[number]) for x, number in pairs))
            loss.backward()
            total += loss.detach()
        trained.append([number for batch in batches for number in batch.rollout_numbers])
        assert balancer.planned is not None
        held.append(len(balancer.planned.ledger.held))
        ahead += balancer.planned.wait_s != balancer.planned.plan_s
        if going_on is not None and len(trained) == 2:
            written = io.BytesIO()
            torch.save(balancer.state_dict(), written)
            steps.close()
            balancer = balancer_of(Case(going_on))
            balancer.load_state_dict(torch.load(io.BytesIO(written.getvalue()), weights_only=True))
            others = said(next, balancer.steps([], of="trees"), otherwise="none")
            assert "expected steps of rollouts, which were read ahead, got of trees" in others, others
            steps = balancer.steps(feed(6), 2, of="rollouts")  # the third was read ahead
    gradients = [each.grad for each in model.parameters()]
    for each in (total, *gradients):
        dist.all_reduce(each)
    return Waited(trained, held, ahead, total.item() / world.size, [each / world.size for each in gradients])


def tell(world: World, planner: str, given: Sequence[Any], weights: Sequence[Any]) -> str:
    """The error on this rank of a step of rollouts that are given by rank."""
    balancer = balancer_of(Case(planner))
    return said(balancer.rollouts, given[world.rank], weights[world.rank], otherwise="none")


def counting_exchanges() -> Generator[int]:
    """How many all-to-alls there were since this was begun."""
    made, original = [], dist.all_to_all_single
    dist.all_to_all_single = lambda *given, **named: (made.append(1), original(*given, **named))[1]  # pyright: ignore
    try:
        while True:
            yield len(made)
    finally:
        dist.all_to_all_single = original


def gather(world: World, planner: str) -> tuple[bool, list[float]]:
    """Whether every rollout comes back along its path, and the gradient of what its rows gave."""
    mine = drawn(world.size)[world.rank]
    batch = balancer_of(Case(planner)).rollouts([each.tokens for each in mine])
    columns = torch.stack([batch.tokens, batch.position_ids, batch.labels], dim=1)
    right = True
    for each, rows in zip(mine, batch.by_rollout(columns, attended=0), strict=True):
        tokens, positions, labels = (column.tolist() for column in rows.unbind(1))
        right &= tokens == each.tokens and positions == list(range(len(tokens))) and labels == [*tokens[1:], -100]
    values = torch.ones(batch.num_rows, 2, dtype=torch.float64, requires_grad=True)
    counted = counting_exchanges()
    assert next(counted) == 0
    rows = batch.by_rollout(values[None] * 3, attended=0)
    assert next(counted) == 1
    refused = said(batch.by_rollout, values, attended=0, otherwise="none")
    assert "expected by_rollout once a loss" in refused, refused
    batch.sum_loss(sum((x.sum() for x in rows), torch.zeros((), dtype=torch.float64))).backward()
    assert next(counted) == 2, "one there and one back"
    counted.close()
    assert values.grad is not None
    return right, values.grad[: batch.num_tokens].sum(1).tolist()


# By rank, documents: of images in text (Gemma 3), 1 where a token is of an image; and (PaliGemma) of a
# prefix that sees itself both ways, 0, and what follows it.
IMAGES = [[[0] * 5 + [1] * 12 + [0] * 3 + [1] * 4 + [0] * 9, [1] * 6 + [0] * 2], [[0] * 20, [0, 1, 1, 0, 1]]]
PREFIXES = [[[0] * 17 + [1] * 9, [0] * 3 + [1] * 30], [[0] + [1] * 6, [0] * 12, [1] * 8]]


def seeing(name: str, attention: str, **of_text: Any) -> Any:
    """A small model of text and images, its weights large enough for attention to count."""
    import transformers

    torch.manual_seed(0)
    text = getattr(transformers, f"{name.replace('Pali', '')}{'Text' * (name == 'Gemma3')}Config")
    of_text = SIZES | {"intermediate_size": 2 * WIDTH, "head_dim": HEAD_DIM} | of_text
    sizes = {name: of_text[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    vision = transformers.SiglipVisionConfig(**sizes, num_hidden_layers=1, image_size=8, patch_size=4)
    tokens = {"image_token_id": 1, "boi_token_id": 2, "eoi_token_id": 3} if name == "Gemma3" else {}
    config = getattr(transformers, f"{name}Config")(text_config=text(**of_text), vision_config=vision, **tokens)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.set_attn_implementation({"text_config": attention, "vision_config": "eager"})
    if attention == hf.NAME:
        hf.register(model)
    for each in model.parameters():
        if each.ndim > 1:
            nn.init.normal_(each, std=0.3)
    return model.double()


Run = Callable[[Callable[..., Any], bool], tuple[BalancedBatch, Tensor]]


def beside_eager(
    world: World, models: tuple[Any, Any], of_ranks: list[list[list[int]]], segments: Callable[..., Any], plain: int
) -> tuple[Run, float, float]:
    """A function that runs a model with other segments or types; how far its logits are from eager
    ones of each document, and these from those of tokens that are all of type `plain`.
    """
    model, eager = models
    settings = Settings(ranks_per_node=2)
    accept = ["use_bidirectional_attention"] if plain else []
    balancer = SequenceBalancer.for_model(model.config.text_config, "zeppelin", accept=accept, settings=settings)
    random = torch.Generator().manual_seed(world.rank)
    of_rank = of_ranks[world.rank] if world.rank < len(of_ranks) else []
    mine = [(torch.randint(4, VOCABULARY, (len(types),), generator=random), types) for types in of_rank]

    def run(segments: Callable[..., Any], turned: bool) -> tuple[BalancedBatch, Tensor]:
        batch = balancer.trees([(ids, ids, segments(types), torch.tensor(types)) for ids, types in mine])
        types = 1 - batch.others[0] if turned else batch.others[0]
        return batch, model(**hf.inputs(batch), token_type_ids=types[None]).logits[0]

    batch, logits = run(segments, False)
    worst = counts = 0.0
    for (ids, types), found in zip(mine, batch.gather(logits.detach()), strict=True):
        with torch.no_grad():
            of_types = [torch.tensor(each)[None] for each in (types, [plain] * len(types))]
            alone, other = (eager(ids[None], token_type_ids=each, use_cache=False).logits[0] for each in of_types)
        worst = max(worst, float((alone - found).abs().max() / alone.abs().max()))
        counts = max(counts, float((alone - other).abs().max() / alone.abs().max()))
    return run, worst, counts


def images(world: World, window: int) -> tuple[float, float, set[int], str]:
    """Gemma 3 beside eager; windows of its layers; the error with the types of other blocks than the
    segments have.
    """
    kinds = {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    model, eager = (seeing("Gemma3", attention, **kinds) for attention in (hf.register(), "eager"))
    run, worst, counts = beside_eager(world, (model, eager), IMAGES, hf.image_segments, 0)
    batch, _ = run(hf.image_segments, False)
    windows = {mask.window_size for _, _, mask, _ in batch._bounds}
    return worst, counts, windows, said(run, hf.image_segments, True, otherwise="none")


def prefixes(world: World) -> tuple[float, float, str, str]:
    """PaliGemma beside eager; the error where a tree has two blocks, which the model makes one, and
    where a prefix is no segment.
    """
    models = seeing("PaliGemma", hf.register()), seeing("PaliGemma", "eager")
    run, worst, counts = beside_eager(world, models, PREFIXES, hf.prefix_segments, 1)

    def in_two(types: list[int]) -> list[tuple[int, int, str]]:
        prefix = types.count(0)
        if prefix < 2:
            return [(each.length, each.parent, "full" if each.full else "causal") for each in hf.prefix_segments(types)]
        rest = [(len(types) - prefix, 1, "causal")] if len(types) > prefix else []
        return [(1, -1, "full"), (prefix - 1, 0, "full"), *rest]

    def plain(types: list[int]) -> list[tuple[int, int, str]]:
        return [(1, -1, "causal"), *((len(types) - 1, 0, "full") for _ in types[1:2])]

    return worst, counts, said(run, in_two, False, otherwise="none"), said(run, plain, False, otherwise="none")


def three_positions(world: World) -> tuple[float, float]:
    """How far Qwen 2.5-VL's logits are from eager ones under positions in time, height and width, and
    these from those under positions of text.
    """
    from transformers import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [HEAD_DIM // 2 - 2, 1, 1]}
    models: list[Any] = []
    for attention in (hf.register(), "eager"):
        torch.manual_seed(0)
        config = Qwen2_5_VLTextConfig(**SIZES | {"head_dim": HEAD_DIM, "rope_parameters": rope})
        config._attn_implementation = attention
        models.append(Qwen2_5_VLTextModel(config).double())
    model, eager = models
    # A prompt with an image of 4 x 3 patches, and what follows it in two ways.
    random = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(0, VOCABULARY, (5 + 12 + 4 + 7,), generator=random)
    patch = torch.arange(12)
    image = torch.stack([torch.full((12,), 5), 5 + patch // 3, 5 + patch % 3])
    leaves = [9 + torch.arange(size).expand(3, -1) for size in (4, 7)]
    places = torch.cat([torch.arange(5).expand(3, -1), image, *leaves], dim=1)
    segments = [(17, -1, "causal"), (4, 0, "causal"), (7, 0, "causal")]
    settings = Settings(ranks_per_node=2)
    balancer = SequenceBalancer.for_model(model.config, "zeppelin", accept=["qwen2_5_vl_text"], settings=settings)
    batch = balancer.trees([(ids, ids, segments, places.T)])
    inputs = {**hf.inputs(batch), "position_ids": batch.others[0].T[:, None]}
    inputs.pop("num_items_in_batch")
    (found,) = batch.gather(model(**inputs).last_hidden_state[0].detach())
    worst = counts = 0.0
    for rows in (torch.arange(21), torch.cat([torch.arange(17), torch.arange(21, 28)])):
        given = {"input_ids": ids[rows][None], "use_cache": False}
        with torch.no_grad():
            alone = eager(**given, position_ids=places[:, None, rows]).last_hidden_state[0]
            text = eager(**given).last_hidden_state[0]
        worst = max(worst, float((alone - found[rows]).abs().max()))
        counts = max(counts, float((alone - text).abs().max()))
    return worst, counts

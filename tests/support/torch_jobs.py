"""Training in plain PyTorch on the ranks of a pool that is their whole world, and by one rank."""

import io
import os
import runpy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megatron_balance import Model
from megatron_balance.errors import BalanceError
from megatron_balance.runtime.attention import attend_flat
from megatron_balance.torch import BalancedBatch, SequenceBalancer, Settings, balanced_attention, hf, knapformer
from megatron_balance.torch.losses import token_losses
from tests.support.peak_bytes import PeakBytes
from tests.support.pool import World, said
from tools.zoo import Case, Found, run_case

HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY, LAYERS = 4, 2, 8, 32, 64, 2
MODEL = Model(HEADS, KV_HEADS, HEAD_DIM, num_layers=LAYERS, hidden_size=WIDTH, ffn_size=4 * WIDTH)
# The same of a model of Transformers.
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS}
# Of the documents of a step; the first is longer than a rank's share.
LENGTHS = (200, 33, 2, 61, 1, 90)


@dataclass(frozen=True)
class Way:
    # One way to train. `accumulate`: microbatches of a step; `steps`: of the run.
    model: str = "gpt"
    planner: str = "zeppelin"
    parallel: str = "fsdp2"
    checkpointed: bool = False
    compiled: bool = False
    # Attention inside the graphs, which are whole layers.
    fullgraph: bool = False
    accumulate: int = 1
    steps: int = 20
    backward: str = "keep"
    backend: str = "eager"
    # Parts of the world that share documents, each for itself.
    pools: int = 1
    # Of queries, and of keys and values (model gpt).
    heads: tuple[int, int] = (HEADS, KV_HEADS)
    ranks_per_node: int = 2
    # Of the planner.
    options: tuple[tuple[str, int], ...] = ()
    device: str = "cpu"
    kernel: str = "auto"

    def name(self) -> str:
        # For people: what differs from the plainest way is said.
        said = [self.model, self.planner, self.parallel]
        said += [word for word in ("checkpointed", "compiled", "fullgraph") if getattr(self, word)]
        said += [word for word in ("accumulate", "pools") if getattr(self, word) > 1]
        return " ".join(said)


@dataclass(frozen=True)
class Trained:
    # Losses and gradient norms by step, the first step's gradients by parameter, the number of
    # graphs that were compiled, and counters of the attention calls of this rank, summed.
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    graphs: int = 0
    # Of them, those that were compiled behind the third step.
    late: int = 0
    counted: Counter[str] = field(default_factory=Counter[str])
    # Of the plans.
    patterns: set[str] = field(default_factory=set[str])


class Block(nn.Module):
    # Attention and MLP on rows [T, C]; `heads`: of queries, and of keys and values.
    def __init__(self, heads: tuple[int, int]) -> None:
        super().__init__()
        queries, keys = heads
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.heads = [queries, keys, keys]
        self.qkv = nn.Linear(WIDTH, sum(self.heads) * HEAD_DIM)
        self.out = nn.Linear(queries * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, positions: Tensor, balanced: BalancedBatch | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), -1, HEAD_DIM).split(self.heads, dim=1)
        q, k = rotated(q, positions), rotated(k, positions)
        attended = alone(q, k, v) if balanced is None else balanced_attention(q, k, v, balanced)
        x = x + self.out(attended.view(len(x), -1))  # outputs have no gaps
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    # A GPT on rows [T]; `checkpointed` computes each layer again in the backward.
    def __init__(self, heads: tuple[int, int] = (HEADS, KV_HEADS), *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(heads) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor, balanced: BalancedBatch | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, position_ids, balanced, use_reentrant=False)
            else:
                x = layer(x, position_ids, balanced)
        return self.head(x)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None, None] * 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Causal attention of one document on one rank.
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).contiguous()


def make_model(way: Way, *, balanced: bool) -> nn.Module:
    # The model of a way, with the same parameters on every rank.
    if way.model == "gpt":
        torch.manual_seed(0)
        return Gpt(way.heads, checkpointed=way.checkpointed)
    model = tiny("Llama", hf.register() if balanced else "sdpa", max_position_embeddings=1024)
    if way.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def tiny(name: str, attention: str, seed: int = 0, **others: Any) -> Any:
    # A small model of Transformers, the same on every rank.
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES | others)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def logits_of(way: Way, model: nn.Module, batch: BalancedBatch) -> Tensor:
    if way.model == "gpt":
        return model(batch.tokens, position_ids=batch.position_ids, balanced=batch)
    return model(**hf.inputs(batch)).logits[0]


def documents(step: int, microbatch: int) -> list[Tensor]:
    # The documents of all ranks.
    g = torch.Generator().manual_seed(100 * step + microbatch)
    return [torch.randint(0, VOCABULARY, (n + step % 3,), generator=g) for n in LENGTHS]


def reference(way: Way) -> Trained:
    # Every document alone, on one rank, without torch.distributed.
    model = make_model(way, balanced=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = Trained()
    for step in range(way.steps):
        drawn = [document for m in range(way.accumulate) for document in documents(step, m)]
        targets = sum(len(document) - 1 for document in drawn)
        total = torch.zeros(())
        for document in (each for each in drawn if len(each) > 1):
            positions = torch.arange(len(document) - 1)
            if way.model == "gpt":
                logits = model(document[:-1], position_ids=positions)
            else:
                logits = model(input_ids=document[None, :-1], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, document[1:], reduction="sum") / targets
        total.backward()
        _note(done, total, model, step)
        optimizer.step()
        optimizer.zero_grad()
    return done


def train(world: World, ways: Sequence[Way]) -> list[Trained]:
    # Train in each of `ways` on all ranks of the world.
    found: list[Trained] = []
    for way in ways:
        with compiling() if way.compiled else nullcontext():
            found.append(_train(way, world))
    return found


def _train(way: Way, world: World) -> Trained:
    mesh = init_device_mesh(way.device, (world.size,), mesh_dim_names=("dp_cp",))["dp_cp"]
    shape = (way.pools, world.size // way.pools)
    shared = init_device_mesh(way.device, shape, mesh_dim_names=("dp", "cp"))["cp"] if way.pools > 1 else mesh
    names: Any = {"backward": way.backward, "kernel": way.kernel}
    settings = Settings(ranks_per_node=way.ranks_per_node, compiled=way.fullgraph, **names)
    gpt = replace(MODEL, num_heads=way.heads[0], num_kv_heads=way.heads[1])
    config = gpt if way.model == "gpt" else make_model(way, balanced=True).config
    options: dict[str, Any] = {"averaged_over": mesh if way.pools > 1 else None, **dict(way.options)}
    balancer = SequenceBalancer.for_model(config, way.planner, shared, settings=settings, **options)
    model = make_model(way, balanced=True).to(way.device)
    layers: Any = model.layers if way.model == "gpt" else model.model.layers  # pyright: ignore
    counted = CountGraphs(way.backend)
    # Transformers' own checkpointing calls layers past their compiled form
    in_parts = way.model != "gpt" and way.checkpointed
    for part in [part for layer in layers for part in (layer.self_attn, layer.mlp)] if in_parts else layers:
        if way.compiled:
            # a size may be a constant of the first graph, as where a library compiles
            part.compile(backend=counted, dynamic=None if way.fullgraph else True, fullgraph=way.fullgraph)
    parallel: Any = model
    if way.parallel == "fsdp2":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = Trained()
    early = 0
    for step in range(way.steps):
        if step == 3:
            early = counted.graphs
        drawn = [documents(step, m)[world.rank :: world.size] for m in range(way.accumulate)]
        loss = torch.zeros((), dtype=torch.float64)
        for batch in balancer.step(drawn):
            summed = F.cross_entropy(logits_of(way, parallel, batch), batch.labels, reduction="sum")
            batch.mean_loss(summed).backward()
            loss += batch.global_loss(summed).cpu()
            if not way.compiled:
                done.counted.update(asdict(batch.bound(torch.float32, balancer.device).counters))
                done.patterns.update(zone.pattern for zone in batch.plan.zones)
        _note(done, loss, model, step)
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return replace(done, graphs=counted.graphs, late=counted.graphs - early)


def _note(done: Trained, loss: Tensor, model: nn.Module, step: int) -> None:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    parts = [(g.to_local() if isinstance(g, DTensor) else g).double().square().sum() for g in gradients.values()]
    norm = torch.stack(parts).sum()
    if any(isinstance(g, DTensor) for g in gradients.values()):  # each rank has its share
        dist.all_reduce(norm)
    done.losses.append(loss.item())
    done.norms.append(norm.sqrt().item())
    if step == 0:
        done.gradients.update({name: whole(g).clone() for name, g in gradients.items()})


# How a compiled layer keeps what its attention received: as it is, computed again around or inside
# the graph, or moved to other memory.
KEEPING = ("kept", "checkpoint around", "checkpoint inside", "moved")


def keep_in_graphs(world: World, backend: str) -> dict[str, tuple[int, bool, float]]:
    """By way of keeping: between forward and backward the tensors with what a layer received that are
    there, whether they have elements, and how far the gradients are from those of a graph break.
    """
    from megatron_balance.torch import compiled as of_graphs

    found: dict[str, tuple[int, bool, float]] = {}
    flats: WeakSet[torch.UntypedStorage] = WeakSet()

    def attend(*given: Any) -> tuple[Tensor, ...]:
        made = attend_flat(*given)
        flats.add(made[-1].untyped_storage())
        return made

    g = torch.Generator().manual_seed(0)
    document = torch.randint(0, VOCABULARY, (90,), generator=g)
    for way in KEEPING:
        gradients: list[Tensor] = []
        for fullgraph in (False, True):
            balancer = balancer_of("te_ring", compiled=fullgraph)
            torch.manual_seed(0)
            layer = Block((HEADS, KV_HEADS))
            batch = balancer([document] if world.rank == 0 else [])
            x = torch.randn(batch.num_rows, WIDTH, generator=torch.Generator().manual_seed(1))
            run: Any = layer.forward
            with patch.object(of_graphs, "attend_flat", attend), compiling():
                if way == "checkpoint inside":
                    run = partial(checkpoint, run, use_reentrant=False)
                if fullgraph:
                    run = torch.compile(run, backend=backend, fullgraph=True)
                if way == "checkpoint around":
                    run = partial(checkpoint, run, use_reentrant=False)
                with saved_tensors_hooks(torch.clone, lambda x: x) if way == "moved" else nullcontext():
                    out = run(x, batch.position_ids, batch)
                held = [each.nbytes() for each in flats]
                out.square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]))
            assert not flats, "all is let go with the graph"
        kept, whole = gradients
        found[way] = len(held), any(size > 64 for size in held), float((kept - whole).abs().max() / kept.abs().max())
    return found


class CountGraphs:
    # A backend of torch.compile that counts the graphs that it is given.
    def __init__(self, name: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs = 0
        self._compile = lookup_backend(name)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs, **options)


@contextmanager
def compiling() -> Iterator[None]:
    # TorchDynamo on, whatever the environment says.
    import torch._dynamo

    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"), torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def differences(trained: Trained, expected: Trained) -> tuple[float, float, float]:
    # Largest differences of losses, of gradient norms (both relative), and of a parameter's
    # gradient, over its largest entry (or over 1e-3, if that is smaller).
    pairs = ((trained.losses, expected.losses), (trained.norms, expected.norms))
    loss, norm = (max(abs(a - b) / abs(b) for a, b in zip(x, y, strict=True)) for x, y in pairs)
    assert trained.gradients.keys() == expected.gradients.keys()
    both = [(trained.gradients[name], g) for name, g in expected.gradients.items()]
    return loss, norm, max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in both)


# What a balancer does with documents, without a model


@dataclass(frozen=True)
class Gathered:
    # Of one rank: its documents' tokens and others as they came back, the gradient of what it gave,
    # and whether rows carried the right token, position and other.
    tokens: list[list[int]]
    others: list[list[float]]
    gradient: list[float]
    right: bool


def balancer_of(
    planner: str, over: Any = None, *, backward: Any = "keep", compiled: bool = False, **options: Any
) -> SequenceBalancer:
    settings = Settings(ranks_per_node=2, backward=backward, compiled=compiled)
    return SequenceBalancer(planner, MODEL, over, settings=settings, **options)


def in_pairs(world: World) -> Any:
    # The mesh of this rank and its neighbour.
    return init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "cp"))["cp"]


def dealt(world: World, model: Any) -> BalancedBatch:
    # The first documents of all ranks, balanced for a model of Transformers.
    balancer = SequenceBalancer.for_model(model.config, settings=Settings(ranks_per_node=2))
    return balancer(documents(0, 0)[world.rank :: world.size])


def zoo(world: World, cases: Sequence[Case]) -> list[Found]:
    # Rows of models of Transformers, each against eager attention.
    return [run_case(case, world.rank) for case in cases]


def chunked_loss(world: World, vocabulary: int) -> dict[str, tuple[float, float, int, int]]:
    # By how the head is sharded, the largest differences of a Llama's loss and gradients (over the
    # largest entry) by chunks from those of its logits; and peak bytes both ways.
    found: dict[str, tuple[float, float, int, int]] = {}
    for way in ("alone", "with the model", "by itself", "as a parameter"):
        losses: list[float] = []
        grads: list[dict[str, Tensor]] = []
        peaks: list[int] = []
        for chunked in (True, False):
            model = tiny("Llama", hf.register(), vocab_size=vocabulary, intermediate_size=WIDTH)
            batch = dealt(world, model)
            if way != "alone":
                mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_cp",))
                for part in (*model.model.layers, *([] if way == "with the model" else [model.lm_head, model.model])):
                    fully_shard(part, mesh=mesh)
                if way != "as a parameter":
                    fully_shard(model, mesh=mesh)
            with PeakBytes() as counted, patch.object(hf, "token_losses", partial(token_losses, chunk=16)):
                if way == "as a parameter" and chunked:
                    hidden = model.model(**hf.inputs(batch)).last_hidden_state
                    loss = token_losses(hidden, model.lm_head.weight, batch.labels, chunk=16).loss
                elif chunked:
                    loss = model(**hf.inputs(batch, losses=True)).logits.loss
                else:
                    logits = model(**hf.inputs(batch)).logits[0]
                    loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
                    del logits
                batch.mean_loss(loss).backward()
            peaks.append(counted.peak)
            losses.append(float(batch.global_loss(loss, attended=0)))
            grads.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        assert grads[0].keys() == grads[1].keys()
        worst = max(
            float((a - grads[1][name]).abs().max() / grads[1][name].abs().max()) for name, a in grads[0].items()
        )
        found[way] = (abs(losses[0] - losses[1]) / losses[1], worst, peaks[0], peaks[1])
    return found


def gather(world: World, lengths: Sequence[Sequence[int]], planner: str) -> Gathered:
    # Deal documents to all ranks and gather what the ranks say of every token.
    balancer = balancer_of(planner)
    # tokens tell the documents apart; others: position, and two more
    numbers = [torch.full((n,), 100 * world.rank + at) for at, n in enumerate(lengths[world.rank])]
    places = [torch.arange(len(each)) for each in numbers]
    batch = balancer([(a, b, b / 7, torch.ones(len(a), 3).bool()) for a, b in zip(numbers, places, strict=True)])
    position, flags = batch.others
    n = batch.num_tokens
    right = torch.equal(position[:n], batch.position_ids[:n].float() / 7) and bool(flags[:n].all())
    right &= torch.equal(batch.labels[:n][batch.labels[:n] >= 0], batch.position_ids[:n][batch.labels[:n] >= 0] + 1)
    weight = torch.arange(batch.num_rows).double().requires_grad_()
    (batch.gather_rows(weight * 2, attended=0).sum() * 3).backward()
    assert weight.grad is not None
    tokens = [each.tolist() for each in balancer.gather(batch.tokens, attended=0)]
    others = [each.tolist() for each in batch.gather(position[None], attended=0)]
    return Gathered(tokens, others, weight.grad.tolist(), right)


def save(world: World, backward: str) -> tuple[int, int]:
    # Of one attention call: tokens received, and tensors that autograd saved through its hooks.
    batch = balancer_of("te_ring", backward=backward)([torch.arange(40)])
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(len(x))
        return x

    q = torch.randn(batch.num_rows, HEADS, HEAD_DIM, requires_grad=True)
    with saved_tensors_hooks(pack, lambda x: x):
        out = balanced_attention(q, q[:, :KV_HEADS], q[:, :KV_HEADS], batch)
        of_call = len(saved)
    out.sum().backward()
    return batch.bound(q.dtype, q.device).counters.kv_tokens_received, of_call


def differ_twice(world: World, planner: str, backward: str, checkpointed: bool) -> float:
    # Largest difference between the gradients of the sum of two losses, and the sum of their own by
    # two backwards of one forward, with another batch between them.
    balancer, way = balancer_of(planner, backward=backward), Way(checkpointed=checkpointed)
    model = make_model(way, balanced=True).double()
    parameters = list(model.parameters())
    batch, other = (balancer(documents(step, 0)[world.rank :: world.size]) for step in range(2))

    def losses() -> list[Tensor]:
        logits = logits_of(way, model, batch)
        return [F.cross_entropy(logits, batch.labels, reduction="sum"), batch.gather_rows(logits).square().sum()]

    expected = torch.autograd.grad(sum(losses(), torch.zeros(())), parameters)
    one, two = losses()
    first = torch.autograd.grad(one, parameters, retain_graph=True)
    torch.autograd.grad(logits_of(way, model, other).sum(), parameters)
    second = torch.autograd.grad(two, parameters)
    return max(float((a + b - c).abs().max()) for a, b, c in zip(first, second, expected, strict=True))


def differentiate_twice(world: World) -> list[str]:
    # The error where the gradient of each of our calls is to have a gradient itself.
    batch = balancer_of("te_ring")([torch.arange(9)])
    routes = knapformer.GroupBalancer("g2n1+g1n2", ranks_per_node=2)
    routes.plan_routing([8], WIDTH)
    packed = torch.randn(8, HEADS, HEAD_DIM, requires_grad=True)
    routed = routes.route(packed)[1]
    q = torch.randn(batch.num_rows, HEADS, HEAD_DIM, requires_grad=True)
    made = [
        (balanced_attention(q, q[:, :KV_HEADS], q[:, :KV_HEADS], batch), q),
        (batch.gather_rows(q), q),
        (routed, packed),
        (routes.pre_attn(routed, routed, routed)[1], routed),
        (routes.post_attn(routes.pre_attn(routed, routed, routed)[1])[1], routed),
        (routes.reverse_route(routed)[1], routed),
    ]
    return [said(torch.autograd.grad, out.sum(), leaf, create_graph=True) for out, leaf in made]


def share_groups(world: World) -> tuple[int, int]:
    # Numbers of different process groups: of three balancers of all ranks, and of these and one of
    # pairs of ranks.
    pairs = in_pairs(world)
    with balancer_of("te_ring") as first:
        with balancer_of("zeppelin") as second:
            assert second([torch.arange(3)]).plan.lengths == (3,) * world.size
        third = knapformer.GroupBalancer("g2n1+g1n2", ranks_per_node=2)
        assert third._group is knapformer.GroupBalancer("g2n1+g1n2", ranks_per_node=2)._group
        of_pair = balancer_of("te_ring", pairs)
        assert of_pair([torch.arange(3)]).plan.lengths == (3, 3)
        assert first([torch.arange(3)]).plan.lengths == (3,) * world.size
    groups = [each.groups.pool for each in (first.pool, second.pool, third._pool)]
    return len(set(groups)), len({*groups, of_pair.pool.groups.pool})


def step_together(world: World) -> list[tuple[int, ...]]:
    # Lengths of each step of this rank's pair, where pairs have other numbers of batches, and the
    # first pair a document that waits.
    first, pairs, everyone = world.rank < 2, in_pairs(world), init_device_mesh("cpu", (world.size,))
    with balancer_of("wlb_llm", pairs, averaged_over=everyone, thresholds=(50 if first else 100,)) as made:
        feed = [[torch.arange(60)]] * (3 if first else 1)
        return [batch.plan.lengths for (batch,) in made.steps(feed)]


def tell(world: World, given: Sequence[Any]) -> str:
    # The error on this rank when rank r gives documents `given[r]`; then that all can still talk.
    balancer, told = balancer_of("zeppelin"), "balanced"
    try:
        balancer(given[world.rank])
    except BalanceError as error:
        told = f"{type(error).__name__}: {error}"
    assert balancer([torch.arange(5)]).plan.lengths == (5,) * world.size
    return told


def refuse(world: World) -> str:
    # The error on this rank where a small Llama's attention does not reach the plan; rank 0 has all
    # documents.
    model = make_model(Way(model="llama"), balanced=False)
    balancer = SequenceBalancer.for_model(model.config, settings=Settings(ranks_per_node=2))
    batch = balancer([torch.arange(3)] * (world.rank == 0))
    takes = (batch.gather, lambda logits: batch.global_loss(logits.sum()))
    told = [said(lambda take=take: take(model(**hf.inputs(batch)).logits[0])) for take in takes]
    dist.barrier()
    return " / ".join(told)


def take_of_second_model(world: World) -> tuple[str, float, float]:
    # Of a Llama on sdpa, whose values are taken after those of a balanced one on the same batch: the
    # complaint; its mean loss, balanced and past the plan.
    model = make_model(Way(model="llama"), balanced=True)
    past, ours = (tiny("Llama", attention, 1, max_position_embeddings=1024) for attention in ("sdpa", hf.register()))
    batch = dealt(world, model)

    def summed(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[0], batch.labels, reduction="sum")

    batch.mean_loss(summed(model(**hf.inputs(batch)).logits)).backward()
    loss = summed(past(input_ids=batch.tokens[None], position_ids=batch.position_ids[None]).logits)
    told = [said(take, loss) for take in (batch.mean_loss, batch.global_loss)]
    of_past = float(batch.global_loss(loss, attended=0))
    balanced = float(batch.global_loss(summed(ours(**hf.inputs(batch)).logits)))
    return " / ".join(told), balanced, of_past


MIXTRAL = {"intermediate_size": WIDTH, "num_local_experts": 4}


def router_loss(world: World) -> tuple[float, Tensor, float]:
    # The router loss of a small Mixtral on all ranks, the gradient of its first router averaged
    # over the ranks, and the mean over ranks of Transformers' own loss.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = tiny("Mixtral", hf.register(), **MIXTRAL)
    batch = dealt(world, model)
    logits = model(**hf.inputs(batch), output_router_logits=True).router_logits
    loss = batch.router_loss(logits, 2)
    (gradient,) = torch.autograd.grad(loss, [model.model.layers[0].mlp.gate.weight])
    dist.all_reduce(gradient)
    of_ranks: Any = load_balancing_loss_func(logits, 4, 2)
    dist.all_reduce(of_ranks)
    return loss.item(), gradient / world.size, of_ranks.item() / world.size


@dataclass(frozen=True)
class Delayed:
    # Of one rank: by step, the documents' numbers that it got back; and steps planned ahead.
    trained: list[list[int]]
    waited: list[int]
    ahead: int


def delay(world: World, num_steps: int, resume_after: int | None) -> Delayed:
    # Train under wlb_llm, which delays long documents; save and go on in another balancer after
    # `resume_after` steps.
    def feed(first: int) -> Iterator[list[Tensor]]:
        for microbatch in range(first, 2 * num_steps):
            drawn = documents(0, microbatch)[world.rank :: world.size]
            yield drawn[1:] if world.rank == 0 and microbatch % 4 else drawn

    balancer, trained, waited, at, ahead = balancer_of("wlb_llm", thresholds=(150,)), [], [], 0, 0
    steps: Any = balancer.steps(feed(0), microbatches=2)
    while (batches := next(steps, None)) is not None:
        at += 1
        for batch in batches:
            back = batch.gather(batch.tokens, attended=0)
            assert [len(each) for each in back] == [n for _, n in batch._dealt.documents]
        trained.append([number for batch in batches for number in batch.documents])
        assert balancer.planned is not None
        waited.append(len(balancer.planned.ledger.held))
        ahead += balancer.planned.wait_s != balancer.planned.plan_s
        if at == resume_after:
            state, read = balancer.state_dict(), 2 * (at + 1)  # one step was read ahead
            steps.close()
            balancer = balancer_of("wlb_llm", thresholds=(150,))
            balancer.load_state_dict(state)
            steps = balancer.steps(feed(read), microbatches=2)
    return Delayed(trained, waited, ahead)


def trace(world: World, folder: Path) -> tuple[int, int]:
    # Train three steps of two microbatches, of which the second is traced and the third has no
    # optimizer: bytes that this rank received forward in the second, and its attention launches.
    settings = Settings(ranks_per_node=2, trace_steps=(2, 3), trace_folder=folder, log_folder=folder)
    balancer = SequenceBalancer("te_ring", MODEL, settings=settings)
    model = make_model(Way(), balanced=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counters: list[Any] = []
    for step in range(3):
        of_step: list[Any] = []
        for batch in balancer.step([documents(step, at)[world.rank :: world.size] for at in range(2)]):
            losses = F.cross_entropy(logits_of(Way(), model, batch), batch.labels, reduction="sum")
            batch.mean_loss(losses).backward()
            of_step.append(batch.bound(torch.float32, balancer.device).counters)
        if step < 2:
            optimizer.step()
            counters = of_step
    balancer.close()
    return sum(each.bytes_received_forward for each in counters), sum(each.kernel_calls for each in counters)


def run_script(world: World, script: str, arguments: Sequence[str], main: Callable[[], object] | None = None) -> str:
    # Run an example, or its `main`, on this rank, in the world that is there; what it prints.
    printed = io.StringIO()
    with (
        warnings.catch_warnings(),  # of transformers, for what its next version renames
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.object(sys, "argv", [script, *arguments]),
        redirect_stdout(printed),
        redirect_stderr(printed),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        (main or partial(runpy.run_path, script, run_name="__main__"))()
    return printed.getvalue()

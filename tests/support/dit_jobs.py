"""Training of the example's diffusion transformer on the ranks of a pool, and by one rank."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_balance.planners import PLANNERS
from tests.support.pool import World, said
from tests.support.torch_jobs import CountGraphs, Trained, Way, compiling, run_script

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "dit.py"


def example() -> ModuleType:
    if "dit_example" not in sys.modules:
        spec = importlib.util.spec_from_file_location("dit_example", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["dit_example"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["dit_example"]


def arguments(topology: str = "g2n1+g1n2", planner: str = "", **others: Any) -> argparse.Namespace:
    # Of the example; fewer samples than two a rank.
    given: dict[str, Any] = {"checkpoint": False, "ddp": False, "compile": "", "accumulate": 1, "steps": 20, **others}
    return argparse.Namespace(**{"samples": 7, "ranks": 4, "topology": topology, "planner": planner, **given})


def of(way: Way) -> argparse.Namespace:
    # The arguments for a way, whose planner is one's name or a topology.
    given: dict[str, Any] = {"planner" if way.planner in PLANNERS else "topology": way.planner}
    given |= {"ddp": way.parallel == "ddp", "checkpoint": way.checkpointed, "accumulate": way.accumulate}
    return arguments(**given, compile=way.backend if way.compiled else "", steps=way.steps)


def reference(given: argparse.Namespace) -> Trained:
    # Every sample by itself on one rank, no torch.distributed.
    dit = example()
    torch.manual_seed(0)
    model = dit.Dit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = Trained()
    for step in range(given.steps):
        drawn = dit.samples(step, given.samples)
        loss = dit.alone(model, drawn) / sum(int((each.text == 0).sum()) for each in drawn)
        loss.backward()
        done.losses.append(float(loss.detach()))
        if step == 0:
            _note(done, model)
        done.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return done


def train(world: World, ways: Sequence[argparse.Namespace]) -> list[Trained]:
    # Train in each of `ways` on all ranks of the world.
    dit = example()
    found: list[Trained] = []
    for way in ways:
        done = Trained()

        def look(model: nn.Module, done: Trained = done) -> None:
            if not done.gradients:
                _note(done, model)

        counted = CountGraphs(way.compile or "eager")
        compiled = argparse.Namespace(**{**vars(way), "compile": counted if way.compile else ""})
        with compiling() if way.compile else nullcontext():
            for loss, norm in dit.train(world.rank, world.size, compiled, look):
                done.losses.append(loss)
                done.norms.append(norm)
        found.append(replace(done, graphs=counted.graphs))
    return found


def _note(done: Trained, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        full = getattr(gradient, "full_tensor", None)
        done.gradients[name] = (gradient if full is None else full()).clone()


def run_example(world: World, script: str, arguments: Sequence[str]) -> str:
    # The pictures that were read stay read.
    return run_script(world, script, arguments, example().main)


def round_trips(world: World, cases: Sequence[tuple[str, Sequence[Sequence[int]]]]) -> list[list[Tensor]]:
    # Route and its inverse, and head exchange and its inverse, with gradients, for each topology
    # and lengths by rank; tensors that are to be zero.
    from megatron_balance.torch.knapformer import GroupBalancer

    balancers: dict[str, GroupBalancer] = {}
    found: list[list[Tensor]] = []
    for topology, by_rank in cases:
        if topology not in balancers:
            balancers[topology] = GroupBalancer(topology, ranks_per_node=2)
        balancer, lengths = balancers[topology], by_rank[world.rank]
        balancer.plan_routing(lengths, 8)
        generator = torch.Generator().manual_seed(world.rank)
        drawn: Any = {"dtype": torch.float64, "generator": generator}
        packed, feature = (torch.randn(sum(lengths), *shape, **drawn).requires_grad_() for shape in ((8, 3), ()))
        chunk_lens, routed, (routed_feature,) = balancer.route(packed, [feature])
        full_lens, q, k, v = balancer.pre_attn(routed, 2 * routed, 3 * routed)
        same_lens, back = balancer.post_attn(q + k + v)
        seq_lens, out = balancer.reverse_route(back)
        feature_lens, feature_out = balancer.reverse_route(routed_feature)
        assert list(lengths) == seq_lens == feature_lens
        assert chunk_lens == same_lens
        assert sum(chunk_lens) == len(routed) == len(routed_feature)
        assert sum(full_lens) == len(q)
        weights = torch.randn(out.shape, dtype=torch.float64, generator=generator)
        grads = torch.autograd.grad((out * weights).sum() + (feature_out * 5).sum(), [packed, feature])
        values = (out - 6 * packed).detach(), (feature_out - feature).detach()
        found.append([*values, grads[0] - 6 * weights, grads[1] - 5])
    return found


def mistakes(world: World) -> list[str]:
    # Errors: of calls that are wrong on all ranks, before anything is sent, and of lengths that are
    # wrong on rank 2 alone.
    from megatron_balance.torch.knapformer import GroupBalancer

    balancer, x = GroupBalancer("g2n1+g1n2", ranks_per_node=2), torch.zeros(5, 3, 4)
    told = [said(balancer.route, x)]
    balancer.plan_routing([5], 12)
    told += [said(balancer.plan_routing, [5], 1.5), said(balancer.route, x, x), said(balancer.route, x[:4])]
    told += [said(balancer.route, x, [torch.tensor(3)])]
    _, chunks, _ = balancer.route(x)
    told += [said(balancer.reverse_route, chunks[1:]), said(balancer.pre_attn, chunks, chunks.flatten(1), chunks)]
    told += [said(balancer.post_attn, x.new_zeros(99, 1, 4))]
    if world.rank < 2:  # a group of two ranks, three heads
        told += [said(balancer.pre_attn, chunks, chunks, chunks)]
    return [*told, said(balancer.plan_routing, [1.5] if world.rank == 2 else [5], 12)]


def attention(world: World, topology: str, by_rank: Sequence[Sequence[int]]) -> float:
    # The largest difference of outputs and gradients from attention of every sequence alone.
    dit = example()
    from megatron_balance.torch.knapformer import GroupBalancer

    balancer = GroupBalancer(topology)
    lengths = list(by_rank[world.rank])
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(3, sum(lengths), 4, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.randn(sum(lengths), 4, 8, dtype=torch.float64, generator=generator)
    truth = dit.by_sequence(*x, lengths)
    balancer.plan_routing(lengths, 32)
    _, q, (k, v) = balancer.route(x[0], [x[1], x[2]])
    seq_lens, q, k, v = balancer.pre_attn(q, k, v)
    _, attended = balancer.post_attn(dit.by_sequence(q, k, v, seq_lens))
    _, out = balancer.reverse_route(attended)
    ours, theirs = ((torch.autograd.grad((y * weights).sum(), x)[0], y) for y in (out, truth))
    return max([float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel()], default=0.0)

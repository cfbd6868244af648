"""Jobs for the ranks of the pool, apart from the tests: a rank imports no pytest, no hypothesis."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance import Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.compile.pipeline import layout
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import ConfigError, DataError, PlanMismatchError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import GradientWire
from megatron_balance.planning.layers import Layers, nano_batches_of
from megatron_balance.reference import Floats, owned_rows
from megatron_balance.runtime.attention import AttentionCall, balanced_attention, latent_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels.latent import keys_and_values
from megatron_balance.runtime.pool import ALIGN, BufferPool
from megatron_balance.runtime.transport import Gloo
from megatron_balance.training.plans import check_agreement, check_announced
from megatron_balance.training.pool import Membership, Pool, TensorParallel, make_pool
from megatron_balance.training.tokens import Sequences, TokenExchange, assemble, by_nano_batch, share_lengths
from tests.support import dense
from tests.support.pool import World, said


def add_ranks(world: World) -> int:
    # The sum of all ranks, by all_reduce.
    total = torch.tensor([world.rank])
    if world.groups.pool is not None:
        dist.all_reduce(total, group=world.groups.pool)
    return int(total)


def new_group_of_two(world: World) -> None:
    # Make a group, though the world has more ranks.
    dist.new_group(list(world.groups.ranks))


def fail_on(world: World, rank: int) -> None:
    # Rank `rank` raises while the others wait for it.
    if world.rank == rank:
        raise RuntimeError("this rank was asked to fail")
    dist.barrier(group=world.groups.pool)


def hang_on(world: World, rank: int) -> None:
    # Rank `rank` sleeps where a stack should show it.
    if world.rank == rank:
        time.sleep(600)


@dataclass(frozen=True)
class Run:
    # One way to run a plan. `calls`: so many forwards, on inputs of different seeds, and only then
    # the backwards, as layers do. `strided`: q, k and v are views of one tensor and dout is
    # transposed, as projections and views leave them. `device`: of the tensors. `mover`: as `bind`
    # has it; triton runs in its interpreter.
    policy: Policy
    dtype: str = "float32"
    calls: int = 1
    strided: bool = False
    device: str = "cpu"
    mover: str = "auto"
    gradient_wire: GradientWire = "fp32"
    softcap: float = 0.0


@dataclass(frozen=True)
class Ran:
    # One rank's values: rows [tokens of the rank, heads, D] in fp64, what was counted (sums over
    # all calls), and which of the tensors had gaps.
    out: Floats
    q_grad: Floats
    k_grad: Floats
    v_grad: Floats
    counters: dict[str, int]
    gaps: tuple[str, ...] = ()


# Head dim; or that of queries and keys, and that of values and outputs.
Widths: TypeAlias = int | tuple[int, int]


def split(widths: Widths) -> tuple[int, int | None]:
    # Head dim, and the width of values and outputs where it is another.
    return widths if isinstance(widths, tuple) else (widths, None)


def attend(world: World, plan: MicrobatchPlan, head_dim: Widths, runs: Sequence[Run]) -> list[Ran]:
    # Forward and backward of `plan` on the inputs that `inputs` draws, once per entry of `runs`;
    # values of the first call.
    owned = Rows.of(3, layout(plan, world.rank).tolist())
    heads = AttentionShape(plan.num_heads, plan.num_kv_heads, *split(head_dim))
    results = []
    for run in runs:
        shape = replace(heads, softcap=run.softcap)
        dtype = getattr(torch, run.dtype)
        how: Any = {"device": run.device, "policy": run.policy, "mover": run.mover, "gradient_wire": run.gradient_wire}
        bound = bind(plan, world.rank, shape, groups=world.groups, dtype=dtype, **how)
        calls: list[tuple[tuple[Tensor, ...], Tensor, Tensor]] = []
        for call in range(run.calls):
            x = inputs(plan, head_dim, call)
            q, k, v, dout = tensors(x, owned, shape, run)
            calls.append(((q, k, v), balanced_attention(q, k, v, bound, x.scale), dout))
        grads = [torch.autograd.grad(out, leaves, dout) for leaves, out, dout in calls]
        of_call = (calls[0][1], *grads[0])
        gaps = tuple(name for name, t in zip(Ran.__match_args__, of_call, strict=False) if not t.is_contiguous())
        arrays = (t.detach().cpu().to(torch.float64).numpy() for t in of_call)
        results.append(Ran(*arrays, counters=asdict(bound.counters), gaps=gaps))
    return results


def attend_late(world: World, plan: MicrobatchPlan, head_dim: Widths, run: Run, seeds: Sequence[int]) -> list[Ran]:
    # As `attend`, once per seed. What this rank sends in an exchange leaves late, by what the seed
    # draws for the rank.
    start, found = Gloo.start, list[Ran]()
    for seed in seeds:
        late = random.Random(f"{seed} {world.rank}")

        def start_late(*args: Any, late: random.Random = late) -> None:
            time.sleep(late.choice((0.0, 0.0, 0.002, 0.01)))
            start(*args)

        Gloo.start = start_late  # type: ignore[method-assign]
        try:
            found += attend(world, plan, head_dim, [run])
        finally:
            Gloo.start = start  # type: ignore[method-assign]
    return found


def attend_with_sink(world: World, plan: MicrobatchPlan, head_dim: int) -> list[list[Floats]]:
    # Output and gradients (q, k, v, sink) of `plan` with the sinks of `sinks`, policy keep and then
    # replay, whose call is in segments.
    owned = Rows.of(3, layout(plan, world.rank).tolist())
    shape = AttentionShape(plan.num_heads, plan.num_kv_heads, head_dim)
    results: list[list[Floats]] = []
    for policy in ("keep", "replay"):
        bound = bind(plan, world.rank, shape, groups=world.groups, dtype=torch.float64, policy=policy)
        x = inputs(plan, head_dim)
        q, k, v, dout = tensors(x, owned, shape, Run(policy, "float64"))
        sink = torch.from_numpy(sinks(plan.num_heads)).requires_grad_()
        out = (in_segments if policy == "replay" else balanced_attention)(q, k, v, bound, x.scale, sink=sink)
        grads = torch.autograd.grad(out, (q, k, v, sink), dout)
        results.append([each.detach().numpy() for each in (out, *grads)])
    return results


def in_segments(q: Tensor, k: Tensor, v: Tensor, bound: Bound, scale: float | None = None, **named: Any) -> Tensor:
    # As `balanced_attention`, in the parts that nano-batches have.
    call = AttentionCall(bound, scale, **named)
    call.start(q, k, v)
    call.attend()
    return call.end()


def attend_again(world: World, plan: MicrobatchPlan, other: MicrobatchPlan, segments: bool) -> list[Again]:
    # Two backwards of one forward, the second with twice the gradient, another batch between them.
    #
    # By policy, and by whether autograd saves received rows (`hooked`; never of a call in
    # `segments`).
    shape = AttentionShape(plan.num_heads, plan.num_kv_heads, 8)
    owned, theirs = (Rows.of(3, layout(each, world.rank).tolist()) for each in (plan, other))
    groups = replace(world.groups, buffers=BufferPool(cpu=True))
    results: list[Again] = []
    ways: tuple[tuple[Policy, bool], ...] = (("keep", False), ("replay", False), ("keep", True))
    for policy, hooked in ways[: 2 if segments else 3]:
        run = Run(policy, "float64")
        how: Any = {"groups": groups, "dtype": torch.float64, "policy": policy}
        bound, between = (bind(each, world.rank, shape, **how) for each in (plan, other))
        forward: Any = in_segments if segments else partial(balanced_attention, hooked=hooked)
        q, k, v, dout = tensors(inputs(plan, 8), owned, shape, run)
        out = forward(q, k, v, bound)
        first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        held = _used(groups.buffers)
        *leaves, grad = tensors(inputs(other, 8, seed=1), theirs, shape, run)
        torch.autograd.grad(forward(*leaves, between), leaves, grad)
        second = torch.autograd.grad(out, (q, k, v), 2 * dout)
        grads = [(a + b).numpy() for a, b in zip(first, second, strict=True)]
        told = said(torch.autograd.grad, out, (q, k, v), dout)
        node = out.grad_fn
        del out, first, second  # the caller's, and of the pool too
        until = time.monotonic() + 5  # gloo's threads let a tensor go shortly after its wait has returned
        while (left := _used(groups.buffers)) and time.monotonic() < until:
            time.sleep(0.001)
        del node
        results.append(Again(grads, bound.counters.kv_tokens_received, held, left, told))
    return results


@dataclass(frozen=True)
class Again:
    # Of two backwards: the sum of their gradients (q, k, v); key tokens received; pooled bytes
    # behind the first, and those that the graph holds behind the second; the error of a third.
    grads: list[Floats]
    kv_tokens_received: int
    held: int
    left: int
    told: str


def _used(buffers: BufferPool) -> int:
    # Pooled bytes that somebody holds.
    buffers.empty((1,), torch.uint8, torch.device("cpu"))  # takes back what was let go
    buffers.empty((1,), torch.uint8, torch.device("cpu"))
    return buffers.used_bytes - ALIGN


def sinks(num_heads: int) -> Floats:
    # A logit of each head: some far below its scores, some above.
    return np.linspace(-3.0, 4.0, num_heads)


def inputs(plan: MicrobatchPlan, head_dim: Widths, seed: int = 0) -> dense.Tensors:
    # Values drawn alike on every rank and in the judging process; exact in fp32, so that both types
    # start from the same numbers.
    keys, values = split(head_dim)
    x = dense.draw(plan.lengths, plan.num_heads, plan.num_kv_heads, keys, seed, values)
    rounded = ([t.astype(np.float32).astype(np.float64) for t in values] for values in (x.q, x.k, x.v, x.dout))
    return dense.Tensors(*rounded, scale=x.scale)


def compare_plans(world: World, plans: Sequence[MicrobatchPlan]) -> str:
    # The error on this rank when every rank checks its own plan; then that the ranks can still talk
    # to one another.
    heard = said(check_agreement, plans[world.rank].fingerprint(), world.groups, otherwise="agreed")
    assert add_ranks(world) == world.size * (world.size - 1) // 2
    return heard


def compare_with_peers(world: World, plans: Sequence[MicrobatchPlan]) -> str:
    # As `compare_plans` in two pools of neighbours, rank r and r + 2 being tensor-parallel peers;
    # on the first four ranks of all.
    # made by all ranks of the world together, which is all there are
    made = {ranks: cast("dist.ProcessGroup", dist.new_group(list(ranks))) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    if world.rank >= len(plans):
        return "not asked"
    first, own = world.rank // 2 * 2, world.rank % 2
    groups = Groups(own, 2, (first, first + 1), made[first, first + 1])
    peers, mine = made[own, own + 2], plans[world.rank].fingerprint()
    return said(check_agreement, mine, groups, tensor_parallel=peers, otherwise="agreed")


def tensors(x: dense.Tensors, owned: Rows, shape: AttentionShape, run: Run) -> list[Tensor]:
    # q, k, v and dout of this rank.
    heads, (keys, values) = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads), shape.widths
    parts = zip((x.q, x.k, x.v, x.dout), heads, (keys, keys, values, values), strict=True)
    rows = [owned_rows(owned, of) if of else np.empty((0, h, width)) for of, h, width in parts]
    q, k, v, dout = (torch.from_numpy(r).to(run.device, getattr(torch, run.dtype)) for r in rows)
    if not run.strided:
        return [*(leaf.requires_grad_() for leaf in (q, k, v)), dout]
    if keys != values:  # heads lie apart
        apart = [torch.cat([x, x], dim=2)[..., : x.shape[2]].detach().requires_grad_() for x in (q, k, v)]
        return [*apart, dout.permute(2, 1, 0).contiguous().permute(2, 1, 0)]
    fused = torch.cat([q, k, v], dim=1).requires_grad_()
    return [*fused.split(heads[:3], dim=1), dout.permute(2, 1, 0).contiguous().permute(2, 1, 0)]


HEADS, DIM, VALUES, LATENT = 4, 6, 3, (5, 2)
SHAPE, DTYPE = AttentionShape(HEADS, 1, DIM, VALUES, LATENT), torch.float64
Arrays = list[np.ndarray]


def both(world: World, plan: MicrobatchPlan, heads: MicrobatchPlan, policy: Policy) -> tuple[list[Arrays], list[int]]:
    # Output and gradients (queries, latents, weight summed over the pool) of attention over latents
    # and over their keys and values; and the bytes that each received.
    #
    # `heads`: the plan for keys and values of every head.
    rng = np.random.default_rng(3)
    num_weights = HEADS * (DIM - LATENT[1] + VALUES)
    values = {
        "q": [rng.standard_normal((n, HEADS, DIM)) for n in plan.lengths],
        "latent": [rng.standard_normal((n, 1, sum(LATENT))) for n in plan.lengths],
        "dout": [rng.standard_normal((n, HEADS, VALUES)) for n in plan.lengths],
    }
    weight = rng.standard_normal((num_weights, LATENT[0]))
    found: list[Arrays] = []
    received: list[int] = []
    for latent in (True, False):
        planned = plan if latent else heads
        owned = Rows.of(3, layout(planned, world.rank).tolist())
        q, c, dout = (torch.from_numpy(owned_rows(owned, of)).to(DTYPE) for of in values.values())
        shape = SHAPE if latent else AttentionShape(HEADS, HEADS, DIM, VALUES)
        bound = bind(planned, world.rank, shape, groups=world.groups, dtype=DTYPE, policy=policy)
        leaves = [x.clone().requires_grad_() for x in (q, c, torch.from_numpy(weight).to(DTYPE))]
        if latent:
            out = latent_attention(leaves[0], leaves[1], leaves[2], bound)
        else:
            k, v = keys_and_values(leaves[1], leaves[2], SHAPE)
            out = balanced_attention(leaves[0], k, v.contiguous(), bound)
        once = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        again = torch.autograd.grad(out, leaves, dout)
        dq, dc, dw = ((a + b) / 2 for a, b in zip(once, again, strict=True))
        if world.groups.pool is not None:
            dist.all_reduce(dw, group=world.groups.pool)
        found.append([x.detach().numpy() for x in (out, dq, dc, dw)])
        received.append(bound.counters.bytes_received_forward + bound.counters.bytes_received_backward)
    return found, received


CPU, ALONE = torch.device("cpu"), TensorParallel()
# By rank and microbatch: lengths of the documents that it reads.
Lengths = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Received:
    # One rank's side of a step, by nano-batch.
    #
    # `planned`, `rows`: (document, position) of its rows, as its plan has them and as they arrived.
    # `back`, `read`: documents of the rows that it read, as they came back and as it read them.
    planned: list[list[tuple[int, int]]]
    rows: list[list[tuple[int, int]]]
    back: list[list[int]]
    read: list[list[int]]


def documents(rank: int, microbatch: int, lengths: Sequence[int]) -> Sequences:
    # Documents whose rows (document, position) tell them all apart.
    numbers = [torch.full((n,), 10000 * rank + 100 * microbatch + at) for at, n in enumerate(lengths)]
    return Sequences.of([torch.stack([each, torch.arange(len(each))], dim=1) for each in numbers], num_columns=2)


def step(world: World, lengths: Lengths, planner: str, ping_pong: bool) -> Received:
    # Plan the documents of all ranks and move their rows there and back.
    pool = Pool(world.groups, world.size, tuple(range(world.size)), tuple(range(world.size)))
    mine = [documents(world.rank, m, own) for m, own in enumerate(lengths[world.rank])]
    shared = share_lengths(mine, None, len(mine), pool, ALONE, CPU)
    chosen = nano_batches_of(shared.lengths, ping_pong=ping_pong)
    first = [sum(map(len, shared.lengths[:m])) for m in range(len(shared.lengths))]
    begun = zip(first, chosen, strict=True)
    members = tuple(tuple(tuple(begin + seq for seq in part) for part in parts) for begin, parts in begun)
    mine, apart = by_nano_batch(mine, shared, members, world.rank)
    layers = Layers(remap=planner == "zeppelin")  # where tokens are owned by others than those that attend to them
    plan = make_planner(planner, Cluster(world.size, world.size), Model(4, 2, 8), layers, tokens_per_rank=600)
    exchange = TokenExchange(apart, [plan(each) for each in apart.lengths], pool)
    rows = exchange.to_ranks(mine, 2, ALONE, CPU)
    read_counts = [sum(each.lengths) for each in mine]
    back = exchange.back(torch.cat([each[:, 0].double() for each in rows])).split(read_counts)
    ids = [[int(rows[0, 0]) for rows in each.rows.split(list(each.lengths))] for each in mine]
    everyone: list[list[list[int]]] = [ids] * world.size
    if world.size > 1:
        dist.all_gather_object(everyone, ids, group=world.groups.pool)
    planned: list[list[tuple[int, int]]] = []
    for number, owned in enumerate(exchange.layouts):
        known = [document for of_rank in everyone for document in of_rank[number]]
        planned.append([(known[seq], at) for seq, start, stop in owned.tolist() for at in range(start, stop)])
        local = assemble(rows[number], owned, 4)
        assert local.positions[~local.padding].tolist() == [position for _, position in planned[-1]]
    return Received(
        planned,
        [[(document, position) for document, position in each.tolist()] for each in rows],
        [each.long().tolist() for each in back],
        [each.rows[:, 0].tolist() for each in mine],
    )


def read_with_failure(world: World, failing: int) -> str:
    # The answer that this rank gets when rank `failing` cannot read.
    pool = Pool(world.groups, world.size, tuple(range(world.size)), tuple(range(world.size)))
    failure = DataError("this rank was asked to fail") if world.rank == failing else None
    mine = [] if failure else [documents(world.rank, 0, (3,))]
    return said(share_lengths, mine, failure, 1, pool, ALONE, CPU, otherwise="read")


def read_other_numbers(world: World, numbers: Sequence[int], tensor_parallel: int) -> str:
    # The answer that this rank gets when rank r runs `numbers[r]` microbatches.
    #
    # `tensor_parallel`: consecutive ranks that compute the same tokens.
    pool, parallel = _tensor_parallel(world, tensor_parallel)
    mine = [documents(world.rank, m, (3, 2)) for m in range(numbers[world.rank])] if parallel.is_source else []
    try:
        shared = share_lengths(mine, None, numbers[world.rank], pool, parallel, CPU)
    except ConfigError as error:
        return str(error)
    return f"{len(shared.lengths)} microbatches"


def announce(world: World, fingerprints: Sequence[str], tensor_parallel: int) -> str:
    # The plan that all ranks agree on, or the error, when rank r announces `fingerprints[r]`.
    pool, parallel = _tensor_parallel(world, tensor_parallel)
    mine = [documents(world.rank, 0, (3, 2))] if parallel.is_source else []
    shared = share_lengths(mine, None, 1, pool, parallel, CPU, fingerprint=fingerprints[world.rank])
    assert shared.lengths == ((3, 2) * pool.size,)
    try:
        return check_announced(shared.announced)
    except PlanMismatchError as error:
        return str(error)


def _tensor_parallel(world: World, size: int) -> tuple[Pool, TensorParallel]:
    # The pool of this rank where `size` consecutive ranks compute the same tokens.
    place, peer = divmod(world.rank, size)
    same = tuple(range(peer, world.size, size))
    peers = tuple(range(place * size, (place + 1) * size))
    pools = [range(each, world.size, size) for each in range(size)]
    tensor = [range(first, first + size) for first in range(0, world.size, size)]
    # made by all ranks of the world together, which is all there are
    made = {tuple(ranks): cast("dist.ProcessGroup", dist.new_group(list(ranks))) for ranks in (*pools, *tensor)}
    numbered = tuple(range(len(same)))
    pool = Pool(Groups(place, len(same), same, made[same]), 1, numbered, numbered)
    return pool, TensorParallel(made[peers], peers[0])


def timeouts_of_pools(world: World, seconds: int) -> list[float]:
    # Seconds after which the groups of this rank give up: two stages of half the world each.
    half = world.size // 2
    stage, at = divmod(world.rank, half)
    mine = Membership(tuple(range(stage * half, (stage + 1) * half)), at, stage=stage, stages=(at, at + half))
    pool = make_pool(mine, ranks_per_node=2, timeout=timedelta(seconds=seconds))
    groups: list[Any] = [*pool.groups.process_groups(), *pool.joint.process_groups()]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def pool_of_group(world: World) -> tuple[int, int, int, tuple[int, ...]]:
    # Rank, size, ranks per node and readers of the pool of a plain process group.
    assert world.groups.pool is not None
    pool = make_pool(Membership(tuple(range(world.size)), replica=world.rank), ranks_per_node=4)
    return pool.rank, pool.size, pool.ranks_per_node, pool.readers

"""Jobs of the pool's ranks: two nano-batches through layers of attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import NanoSegment
from megatron_balance.compile.pipeline import PhaseName, layout
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Cell, TickPlan
from megatron_balance.reference import Floats
from megatron_balance.runtime.attention import AttentionCall, BackwardSlot, Server, balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import single
from megatron_balance.runtime.phase_run import PhaseRun
from tests.support import by_hand, jobs
from tests.support.pool import World
from tests.support.stream_threads import with_streams

QKV = tuple[Tensor, Tensor, Tensor]
Plans = Sequence[MicrobatchPlan]
# (nano-batch, phase, segment) of something that ran.
Done = tuple[int, str, str]


@dataclass(frozen=True)
class NanoBatches:
    # One rank's values of each nano-batch: output of the last layer and gradients of the first
    # one's inputs; counters; what ran in which order.
    out: list[Floats]
    grads: list[list[Floats]]
    counters: list[dict[str, int]]
    order: list[Done]


def layers(
    world: World, plans: Plans, segments: Sequence[NanoSegment] | None, policy: Policy, streams: bool = False
) -> NanoBatches:
    # Both nano-batches through all layers of `segments`, in fp64; without turns, through two layers
    # with one call each, one nano-batch after the other.
    groups = with_streams(world.groups, plans[0].ranks_per_node) if streams else world.groups
    shape = AttentionShape(plans[0].num_heads, plans[0].num_kv_heads, 8)
    how: Any = {"groups": groups, "dtype": torch.float64, "policy": policy}
    bounds = [bind(plan, world.rank, shape, **how, nano_batch=at) for at, plan in enumerate(plans)]
    inputs = [leaves(plan, world.rank, shape)[0] for plan in plans]
    with recorded(bounds.index) as order:
        if segments is None:
            out = [one_call_a_layer(bound, own, 2) for bound, own in zip(bounds, inputs, strict=True)]
        else:
            out = interleaved([AttentionOf(bound) for bound in bounds], inputs, segments)
        # One backward over both nano-batches, as a training step has it.
        douts = [torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos() for x in out]
        grads = torch.autograd.grad(out, [x for own in inputs for x in own], douts)
    return NanoBatches(
        [_array(x) for x in out],
        [[_array(x) for x in grads[3 * nano_batch : 3 * nano_batch + 3]] for nano_batch in range(len(plans))],
        [asdict(bound.counters) for bound in bounds],
        order,
    )


class AttentionOf(NamedTuple):
    # A nano-batch's plan, and where its backward finds another, if it does.
    bound: Bound
    backward: BackwardSlot | None = None


def interleaved(plans: Sequence[AttentionOf], inputs: Sequence[QKV], segments: Sequence[NanoSegment]) -> list[Tensor]:
    # Outputs of the last layer, by nano-batch.
    num_layers = max(segment.layer for segment in segments)
    calls: dict[int, AttentionCall] = {}
    qkv: list[QKV] = list(inputs)
    out: list[Tensor] = [x[0] for x in inputs]
    for nano_batch, layer, part in segments:
        match part:
            case "linear":
                if 0 < layer < num_layers:
                    qkv[nano_batch] = _linear(out[nano_batch], qkv[nano_batch])
            case "start":
                bound, slot = plans[nano_batch]
                calls[nano_batch] = AttentionCall(bound, backward=slot)
                calls[nano_batch].start(*qkv[nano_batch])
            case "attend":
                calls[nano_batch].attend()
            case "end":
                out[nano_batch] = calls.pop(nano_batch).end()
    return out


def one_call_a_layer(bound: Bound, qkv: QKV, num_layers: int) -> Tensor:
    # Output of the last layer.
    out = balanced_attention(*qkv, bound)
    for _ in range(num_layers - 1):
        qkv = _linear(out, qkv)
        out = balanced_attention(*qkv, bound)
    return out


def _linear(out: Tensor, qkv: QKV) -> QKV:
    # The next layer's inputs, token by token.
    q, k, v = qkv
    shared = out[:, : k.shape[1]]
    return q * 0.5 + out, k * 0.9 + shared * 0.3, torch.tanh(v) + shared


@contextmanager
def recorded(nano_batch_of: Callable[[Bound], int]) -> Iterator[list[Done]]:
    # Notes every part that runs.
    done: list[Done] = []
    originals = {name: getattr(PhaseRun, name) for name in ("start", "attend", "end")}

    def noting(name: str) -> Callable[[PhaseRun], None]:
        def part(run: PhaseRun) -> None:
            done.append((nano_batch_of(run.bound), "forward" if run.forward else "backward", name))
            originals[name](run)

        return part

    for name in originals:
        setattr(PhaseRun, name, noting(name))
    try:
        yield done
    finally:
        for name, original in originals.items():
            setattr(PhaseRun, name, original)


def leaves(plan: MicrobatchPlan, rank: int, shape: AttentionShape, seed: int = 0) -> tuple[QKV, Tensor]:
    # A rank's inputs, and the gradient of its output.
    owned = Rows.of(3, layout(plan, rank).tolist())
    q, k, v, dout = jobs.tensors(jobs.inputs(plan, shape.head_dim, seed), owned, shape, jobs.Run("keep", "float64"))
    return (q, k, v), dout


def _array(x: Tensor) -> Floats:
    return x.detach().to(torch.float64).numpy()


LAYERS = 2

# Output and gradients of q, k and v, this rank's rows.
Values = tuple[Floats, Floats, Floats, Floats]


@dataclass(frozen=True)
class NanoBatchStep:
    # One nano-batch of every microbatch: where its tokens are owned (`plans`, over one stage's
    # ranks), and the ticks over all ranks.
    plans: tuple[MicrobatchPlan, ...]
    ticks: tuple[TickPlan, ...]


@dataclass(frozen=True)
class Way:
    # `again`: the forward is computed once more in the backward. `streams`: what NCCL will carry,
    # messages matching by order alone.
    again: bool = False
    streams: bool = False


@dataclass(frozen=True)
class Attended:
    # By cell and nano-batch, this rank's rows of its stage's attention, in fp64; and every segment
    # that it ran, in order.
    values: dict[tuple[Cell, int], Values]
    order: list[Done]


def seed_of(stage: int, cell: Cell, nano_batch: int) -> int:
    # Of the inputs.
    return 1000 * nano_batch + 100 * cell.chunk + 10 * stage + cell.microbatch


def attend_in_ticks(world: World, nano_batches: Sequence[NanoBatchStep], head_dim: int, way: Way) -> Attended:
    # All ticks of a step.
    run = _Run(world, nano_batches, head_dim, way)
    with recorded(run.nano_batch_of.__getitem__) as order:
        for number, one in enumerate(nano_batches[0].ticks):
            run.tick(one, [run.bind(nano_batch.ticks[number], at) for at, nano_batch in enumerate(nano_batches)])
    return Attended(run.found, order)


class _Run:
    def __init__(self, world: World, nano_batches: Sequence[NanoBatchStep], head_dim: int, way: Way) -> None:
        plan = nano_batches[0].plans[0]
        self.groups = with_streams(world.groups, plan.ranks_per_node) if way.streams else world.groups
        self.stage, self.rank = divmod(world.rank, plan.num_ranks)
        self.shape = AttentionShape(plan.num_heads, plan.num_kv_heads, head_dim)
        self.nano_batches, self.way = nano_batches, way
        self.segments: tuple[NanoSegment, ...] = ping_pong.forward(LAYERS, len(nano_batches))
        self.nano_batch_of: dict[Bound, int] = {}
        self.under_way: dict[Cell, tuple[list[BackwardSlot], list[Tensor], tuple[Tensor, ...], list[Tensor]]] = {}
        self.found: dict[tuple[Cell, int], Values] = {}

    def bind(self, one: TickPlan, nano_batch: int) -> Bound:
        # For what the tick runs, as training does.
        phases: set[PhaseName] = {"backward"} if one.tick.backward else {"forward"}
        if self.way.again:
            phases.add("forward")
        rank, double = self.groups.rank, torch.float64
        how: Any = {"dtype": double, "policy": "replay", "nano_batch": nano_batch, "phases": phases}
        bound = bind(one.plan, rank, self.shape, groups=self.groups, **how)
        self.nano_batch_of[bound] = nano_batch
        return bound

    def tick(self, one: TickPlan, bounds: Sequence[Bound]) -> None:
        cell = one.tick.cells[self.stage]
        if cell is None:
            self.serve(bounds, backward=one.tick.backward)
        elif one.tick.backward:
            self.backward(cell, bounds)
        else:
            self.forward(cell, bounds)

    def serve(self, bounds: Sequence[Bound], *, backward: bool) -> None:
        server = Server(torch.float64, torch.device("cpu"), self.shape.head_dim**-0.5)
        if not backward or self.way.again:
            server.serve(bounds, self.segments, backward=False)
        if backward:
            server.serve(bounds, ping_pong.backward(self.segments), backward=True)

    def forward(self, cell: Cell, bounds: Sequence[Bound]) -> None:
        plans = [nano_batch.plans[cell.microbatch] for nano_batch in self.nano_batches]
        seeds = [seed_of(self.stage, cell, at) for at in range(len(plans))]
        drawn = [leaves(plan, self.rank, self.shape, seed) for plan, seed in zip(plans, seeds, strict=True)]
        slots = [BackwardSlot() for _ in bounds]

        def layers(*flat: Tensor) -> tuple[Tensor, ...]:
            inputs = [(flat[at], flat[at + 1], flat[at + 2]) for at in range(0, len(flat), 3)]
            now = [AttentionOf(slot.bound or bound, slot) for slot, bound in zip(slots, bounds, strict=True)]
            return tuple(interleaved(now, inputs, self.segments))

        flat = [x for qkv, _ in drawn for x in qkv]
        out = checkpoint(layers, *flat, use_reentrant=True) if self.way.again else layers(*flat)
        self.under_way[cell] = slots, flat, out, [dout for _, dout in drawn]  # pyright: ignore[reportArgumentType]  checkpoint is untyped

    def backward(self, cell: Cell, bounds: Sequence[Bound]) -> None:
        slots, flat, out, douts = self.under_way.pop(cell)
        for slot, bound in zip(slots, bounds, strict=True):
            slot.bound = bound
        torch.autograd.backward(out, douts)
        grads = [x.grad for x in flat]
        for nano_batch, of in enumerate(out):
            q, k, v = (x.numpy() for x in grads[3 * nano_batch : 3 * nano_batch + 3] if x is not None)
            self.found[cell, nano_batch] = of.detach().numpy(), q, k, v


def alone(plan: MicrobatchPlan, head_dim: int, seed: int) -> list[list[Floats]]:
    # Parts of `Values`, by sequence, of a rank that holds and attends to everything itself.
    lengths = plan.lengths
    owned = [(0, seq, 0, n) for seq, n in enumerate(lengths)]
    tasks = [(0, seq, 0, n, 0, n) for seq, n in enumerate(lengths)]
    zones = (by_hand.task_table(owned, tasks),) if lengths else ()
    whole = by_hand.plan(lengths, 1, *zones, heads=(plan.num_heads, plan.num_kv_heads))
    shape = AttentionShape(plan.num_heads, plan.num_kv_heads, head_dim)
    bound = bind(whole, 0, shape, groups=single(), dtype=torch.float64)
    qkv, dout = leaves(whole, 0, shape, seed)
    out = one_call_a_layer(bound, qkv, LAYERS)
    values = [out, *torch.autograd.grad(out, qkv, dout)]
    return [[part.detach().numpy() for part in x.split(list(lengths))] for x in values]

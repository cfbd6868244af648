"""Jobs of ranks whose pipeline stages attend together: layers of attention on each stage, forward
and backward in ticks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import Segment
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Cell, TickPlan
from megatron_balance.reference import Floats
from megatron_balance.runtime.attention import BackwardSlot, Server
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.groups import single
from megatron_balance.runtime.lower.steps import PhaseName
from tests.support import by_hand
from tests.support.nano_batches import AttentionOf, Done, interleaved, leaves, one_call_a_layer, recorded
from tests.support.pool import World
from tests.support.stream_threads import with_streams

LAYERS = 2
# Output and gradients of q, k and v, this rank's rows.
Values = tuple[Floats, Floats, Floats, Floats]


@dataclass(frozen=True)
class NanoBatchStep:
    """One nano-batch of every microbatch: where its tokens are owned (`plans`, over one stage's
    ranks), and the ticks over all ranks.
    """

    plans: tuple[MicrobatchPlan, ...]
    ticks: tuple[TickPlan, ...]


@dataclass(frozen=True)
class Way:
    """`again`: the forward is computed once more in the backward. `streams`: what NCCL will carry,
    messages matching by order alone.
    """

    again: bool = False
    streams: bool = False


@dataclass(frozen=True)
class Attended:
    """By cell and nano-batch, this rank's rows of its stage's attention, in fp64; and every segment
    that it ran, in order.
    """

    values: dict[tuple[Cell, int], Values]
    order: list[Done]


def seed_of(stage: int, cell: Cell, nano_batch: int) -> int:
    """Of the inputs."""
    return 1000 * nano_batch + 100 * cell.chunk + 10 * stage + cell.microbatch


def attend_in_ticks(world: World, nano_batches: Sequence[NanoBatchStep], head_dim: int, way: Way) -> Attended:
    """All ticks of a step."""
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
        self.segments: tuple[Segment, ...] = ping_pong.forward(LAYERS, len(nano_batches))
        self.nano_batch_of: dict[Bound, int] = {}
        self.under_way: dict[Cell, tuple[list[BackwardSlot], list[Tensor], tuple[Tensor, ...], list[Tensor]]] = {}
        self.found: dict[tuple[Cell, int], Values] = {}

    def bind(self, one: TickPlan, nano_batch: int) -> Bound:
        """For what the tick runs, as training does."""
        phases: set[PhaseName] = {"backward"} if one.tick.backward else {"forward"}
        if self.way.again:
            phases.add("forward")
        rank, double = self.groups.rank, torch.float64
        bound = bind(
            one.plan,
            rank,
            self.shape,
            groups=self.groups,
            dtype=double,
            policy="replay",
            nano_batch=nano_batch,
            phases=phases,
        )
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
        drawn = [
            leaves(nano_batch.plans[cell.microbatch], self.rank, self.shape, seed_of(self.stage, cell, at))
            for at, nano_batch in enumerate(self.nano_batches)
        ]
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
    """Parts of `Values`, by sequence, of a rank that holds and attends to everything itself."""
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

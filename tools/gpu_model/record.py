"""Record one rank's attention calls of a plan: layers of it, interleaved nano-batches, ticks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_balance.compile import ping_pong
from megatron_balance.compile.ping_pong import NanoSegment
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.model import GradientWire
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.executor import BackwardRun, ForwardRun
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.phase_run import PhaseRun, Received
from megatron_balance.runtime.pool import BufferPool
from tools.gpu_model.stand_ins import Communicator, RecordedStreams, Recorder, recording
from tools.gpu_model.trace import Trace

MOVERS = ("triton", "plain")


@dataclass(frozen=True)
class Way:
    """How a plan is run.

    Attributes:
        policy: of its backward.
        mover: as `bind` has it.
        num_layers: attention calls forward, then as many backward.
        head_dim: of the tensors.
        dtype: of the tensors.
        gradient_wire: as `bind` has it.
    """

    policy: Policy = "keep"
    mover: str = "triton"
    num_layers: int = 2
    head_dim: int = 4
    dtype: torch.dtype = torch.bfloat16
    gradient_wire: GradientWire = "fp32"


@dataclass
class _Layer:
    """Left by one attention call for its backward."""

    qkv: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    lse: Tensor
    received: Received


def record(plans: Sequence[MicrobatchPlan], rank: int, way: Way) -> Trace:
    """Everything that `rank` issues in a forward and a backward through some layers.

    Args:
        plans: one, or those of nano-batches that run interleaved.
        rank: in the pool.
        way: how.
    """
    return _Run(plans, rank, way).trace()


class _Run:
    def __init__(self, plans: Sequence[MicrobatchPlan], rank: int, way: Way) -> None:
        self.recorder = Recorder(rank)
        self.groups = model_groups(rank, plans[0].num_ranks, plans[0].ranks_per_node, self.recorder)
        self.plans, self.way = plans, way
        self.kept: dict[tuple[int, int], _Layer] = {}
        self.outs: dict[int, Tensor] = {}
        self.grads: dict[int, tuple[Tensor, ...]] = {}

    def trace(self) -> Trace:
        with torch.no_grad(), recording(self.recorder):
            bounds = [self.bind(plan, number) for number, plan in enumerate(self.plans)]
            if len(bounds) == 1:
                segments = ping_pong.one_by_one(self.way.num_layers, 1)
            else:
                segments = ping_pong.forward(self.way.num_layers, len(bounds))
            self.take(segments, bounds, backward=False)
            self.take(ping_pong.backward(segments), bounds, backward=True)
        return self.recorder.trace

    def bind(self, plan: MicrobatchPlan, number: int) -> Bound:
        shape = AttentionShape(plan.num_heads, plan.num_kv_heads, self.way.head_dim)
        return bind(
            plan,
            self.recorder.trace.rank,
            shape,
            groups=self.groups,
            dtype=self.way.dtype,
            policy=self.way.policy,
            mover=self.way.mover,
            nano_batch=number,
            gradient_wire=self.way.gradient_wire,
        )

    def take(self, segments: Sequence[NanoSegment], bounds: Sequence[Bound], *, backward: bool) -> None:
        """Take segments in order, as `runtime.attention` does. Together where there is one plan."""
        runs: dict[int, PhaseRun] = {}
        for number, layer, part in segments:
            bound = bounds[number]
            match part:
                case "linear":
                    self.linear(number, bound, backward=backward)
                case "start":
                    runs[number] = self.begun(number, layer, bound, backward=backward)
                    runs[number].start()
                    if len(bounds) > 1:
                        self.groups.issues.flush()
                case "attend":
                    runs[number].attend()
                case "end":
                    self.end(number, layer, runs.pop(number))

    def begun(self, number: int, layer: int, bound: Bound, *, backward: bool) -> PhaseRun:
        if not backward:
            self.kept[number, layer] = _Layer(self.inputs[number], self.inputs[number][0], torch.empty(0), Received())
            return ForwardRun(bound, self.inputs[number][0], self.inputs[number][1:], 1.0)
        layer_of = self.kept.pop((number, layer))
        return BackwardRun(bound, self.outs[number], layer_of.qkv, (layer_of.out, layer_of.lse), layer_of.received, 1.0)

    def end(self, number: int, layer: int, run: PhaseRun) -> None:
        if isinstance(run, ForwardRun):
            kept = self.kept[number, layer]
            kept.out, kept.lse, kept.received = run.outputs()
            self.outs[number] = kept.out
        else:
            assert isinstance(run, BackwardRun)
            self.grads[number] = run.gradients()

    inputs: dict[int, tuple[Tensor, Tensor, Tensor]]

    def linear(self, number: int, bound: Bound, *, backward: bool) -> None:
        """The work of a layer around attention: it reads what the last call left, and makes what the
        next one takes.
        """
        shape, rows = bound.shape, bound.num_tokens
        if backward:
            of = self.grads.pop(number, ())
            dout = torch.empty(rows, shape.num_heads, shape.head_dim, dtype=self.way.dtype)
            self.recorder.rows("linear", list(of), [dout])
            self.outs[number] = dout
            return
        if not hasattr(self, "inputs"):
            self.inputs = {}
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        made = [torch.empty(rows, h, shape.head_dim, dtype=self.way.dtype) for h in heads]
        self.recorder.rows("linear", [self.outs[number]] if number in self.outs else [], made)
        self.inputs[number] = (made[0], made[1], made[2])


def model_groups(rank: int, size: int, ranks_per_node: int, recorder: Recorder) -> Groups:
    """The rank's view of its pool as NCCL has it: streams, and communicators of pool and node."""
    sets = [tuple(range(size))] if size > 1 else []
    if 1 < ranks_per_node < size:
        first = rank // ranks_per_node * ranks_per_node
        sets.append(tuple(range(first, first + ranks_per_node)))
    by_ranks = {ranks: Communicator(ranks=ranks) for ranks in sets}
    streams = RecordedStreams(recorder) if size > 1 else None
    return Groups(rank, size, tuple(range(size)), None, by_ranks, streams=streams, buffers=BufferPool(cpu=True))  # pyright: ignore[reportArgumentType]

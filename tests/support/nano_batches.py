"""Jobs of the pool's ranks that run two nano-batches through layers of attention, interleaved or
one after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_balance.compile.ping_pong import Segment
from megatron_balance.compile.pipeline import layout
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.reference import Floats
from megatron_balance.runtime.attention import AttentionCall, BackwardSlot, balanced_attention
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.phase_run import PhaseRun
from tests.support import jobs
from tests.support.pool import World
from tests.support.stream_threads import with_streams

QKV = tuple[Tensor, Tensor, Tensor]
# (nano-batch, phase, segment) of something that ran.
Done = tuple[int, str, str]


@dataclass(frozen=True)
class NanoBatches:
    """One rank's values of each nano-batch: output of the last layer and gradients of the first
    one's inputs; counters; what ran in which order.
    """

    out: list[Floats]
    grads: list[list[Floats]]
    counters: list[dict[str, int]]
    order: list[Done]


def layers(
    world: World,
    plans: Sequence[MicrobatchPlan],
    segments: Sequence[Segment] | None,
    policy: Policy,
    streams: bool = False,
) -> NanoBatches:
    """Both nano-batches through all layers of `segments`, in fp64; without turns, through two
    layers with one call each, one nano-batch after the other.
    """
    groups = with_streams(world.groups, plans[0].ranks_per_node) if streams else world.groups
    shape = AttentionShape(plans[0].num_heads, plans[0].num_kv_heads, 8)
    bounds = [
        bind(plan, world.rank, shape, groups=groups, dtype=torch.float64, policy=policy, nano_batch=nano_batch)
        for nano_batch, plan in enumerate(plans)
    ]
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
    """A nano-batch's plan, and where its backward finds another, if it does."""

    bound: Bound
    backward: BackwardSlot | None = None


def interleaved(
    nano_batches: Sequence[AttentionOf], inputs: Sequence[QKV], segments: Sequence[Segment]
) -> list[Tensor]:
    """Outputs of the last layer, by nano-batch."""
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
                calls[nano_batch] = AttentionCall(
                    nano_batches[nano_batch].bound, backward=nano_batches[nano_batch].backward
                )
                calls[nano_batch].start(*qkv[nano_batch])
            case "attend":
                calls[nano_batch].attend()
            case "end":
                out[nano_batch] = calls.pop(nano_batch).end()
    return out


def one_call_a_layer(bound: Bound, qkv: QKV, num_layers: int) -> Tensor:
    """Output of the last layer."""
    out = balanced_attention(*qkv, bound)
    for _ in range(num_layers - 1):
        qkv = _linear(out, qkv)
        out = balanced_attention(*qkv, bound)
    return out


def _linear(out: Tensor, qkv: QKV) -> QKV:
    """The next layer's inputs, token by token."""
    q, k, v = qkv
    shared = out[:, : k.shape[1]]
    return q * 0.5 + out, k * 0.9 + shared * 0.3, torch.tanh(v) + shared


@contextmanager
def recorded(nano_batch_of: Callable[[Bound], int]) -> Iterator[list[Done]]:
    """Notes every part that runs."""
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
    """A rank's inputs, and the gradient of its output."""
    owned = Rows.of(3, layout(plan, rank).tolist())
    q, k, v, dout = jobs.tensors(jobs.inputs(plan, shape.head_dim, seed), owned, shape, jobs.Run("keep", "float64"))
    return (q, k, v), dout


def _array(x: Tensor) -> Floats:
    return x.detach().to(torch.float64).numpy()

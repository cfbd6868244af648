"""Several GPUs over real NCCL, one rank each: `tools/gpu/run --gpus 4`.

All planners against the reference, ranks that come late on communicators that nobody has used, links
as training uses them, and one routed round. Half of the GPUs play one node and half another, so that
routing and every stream have something to carry; all links are those inside the machine then. On a
CPU the same code runs over gloo, with threads for streams.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Routing
from tests.support import jobs
from tools.gpu import ranks
from tools.gpu.rows import Context, Device, Figure, Row, Target

BUDGET_S = 120.0
MOST_GPUS = 8
LENGTHS = {"cuda": (700, 300, 129, 64, 33, 1), "cpu": (140, 60, 27, 13, 7, 1)}
WAYS = ("keep", "replay")
LATE_S = 0.2
"""A rank begins so much later than the one before it."""
LINK_BYTES = {"cuda": 64 << 20, "cpu": 1 << 16}
ROUND_TOKENS = {"cuda": 8192, "cpu": 64}
"""Of each rank in the routed round."""
REPEATS = {"cuda": 7, "cpu": 2}
PATIENCE_S = 90.0

EXACT = {
    name: Figure(
        f"several GPUs, {name}: bf16 output and gradients against fp64", "of the largest", Target("at most", 0.02)
    )
    for name in ranks.PLACING
}
HANGS = Figure(
    "ranks that hang on communicators not used before, each rank later than the last", "", Target("equal", 0)
)
LINKS = {
    stream: Figure(f"stream {stream}: rate of a batch with every peer, each way", "GB/s", speed=True)
    for stream in ("inter_node", "intra_node")
}
ROUND = {way: Figure(f"a ring's forward over all ranks, {way}", "ms", speed=True) for way in ("direct", "routed")}
FIGURES = (*EXACT.values(), HANGS, *LINKS.values(), *ROUND.values())


@dataclass(frozen=True)
class Found:
    """Results of one rank. `seconds`: by figure."""

    ran: list[list[jobs.Ran]]
    seconds: dict[str, float]


def measure(context: Context) -> Iterator[Row]:
    plans = {name: _plan(name, context.ranks, LENGTHS[context.device]) for name in ranks.PLACING}
    with tempfile.TemporaryDirectory() as folder:
        given = (context.ranks, list(plans.values()), context.device)
        seconds = min(PATIENCE_S, context.left_s())
        found, hung = ranks.run_ranks(_rank, context.ranks, given, Path(folder), seconds)
    yield HANGS.measured(hung, f"{context.ranks} ranks, {LATE_S:g} s apart")
    if hung:
        raise RuntimeError(f"{hung} of {context.ranks} ranks did not end within {seconds:.0f} s")
    for at, (name, planned) in enumerate(plans.items()):
        errors = [ranks.worst(planned, [rank.ran[at][way] for rank in found]) for way in range(len(WAYS))]
        yield EXACT[name].measured(max(errors), f"{', '.join(WAYS)}; {'NCCL' if context.on_gpu else 'gloo'}")
    if context.on_gpu:
        peers = context.ranks - context.ranks // 2, context.ranks // 2 - 1
        for (stream, figure), count in zip(LINKS.items(), peers, strict=True):
            seconds = max(rank.seconds[stream] for rank in found)
            if count:
                yield figure.measured(
                    count * LINK_BYTES["cuda"] / seconds / 1e9, f"{count} peers, {LINK_BYTES['cuda'] >> 20} MiB each"
                )
            else:
                yield figure.not_measured("a node of one rank")
        for way, figure in ROUND.items():
            yield figure.measured(
                1e3 * max(rank.seconds[way] for rank in found), f"{ROUND_TOKENS['cuda']} tokens a rank"
            )


def _plan(name: str, num_ranks: int, lengths: Sequence[int]) -> MicrobatchPlan:
    """A planner's plan on two nodes, routed wherever it can be."""
    model = Model(num_heads=8, num_kv_heads=8, head_dim=ranks.HEAD_DIM, hidden_size=512, ffn_size=1024)
    room = -(-sum(lengths) // num_ranks) + 24
    return ranks.routed(ranks.planned(name, lengths, Cluster(num_ranks, num_ranks // 2), model, room))


def _rank(rank: int, size: int, plans: Sequence[MicrobatchPlan], device: Device, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from megatron_balance.runtime.groups import make_groups
    from tests.support.pool import World
    from tests.support.stream_threads import with_streams

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE_S)
    )
    groups = make_groups([range(size)], size // 2)
    if device == "cpu":
        groups = with_streams(groups, size // 2)
    world = World(rank, size, groups)
    dist.barrier()
    time.sleep(LATE_S * rank)
    runs: list[Any] = [jobs.Run(policy, "bfloat16", calls=2, device=device) for policy in WAYS]
    ran = [jobs.attend(world, planned, ranks.HEAD_DIM, runs) for planned in plans]
    seconds = {stream: _batch_s(world, stream, device) for stream in LINKS} | {
        way: _round_s(world, routed=way == "routed", device=device) for way in ROUND
    }
    (folder / f"rank{rank}").write_bytes(pickle.dumps(Found(ran, seconds)))
    dist.barrier()
    dist.destroy_process_group()


def _batch_s(world: Any, name: str, device: Device) -> float:
    """Seconds of one batch with every peer that a stream reaches, as a training step issues it."""
    import torch

    from megatron_balance.runtime.cuda import StreamMessage

    node = world.size // 2
    peers = [
        p for p in range(world.size) if p != world.rank and (p // node == world.rank // node) == (name == "intra_node")
    ]
    stream = world.groups.streams.of(name)
    tensors = [torch.zeros(LINK_BYTES[device], dtype=torch.uint8, device=device) for _ in range(2 * len(peers))]
    transfers = [StreamMessage(world.rank, p, 0, True, p, x) for p, x in zip(peers, tensors, strict=False)]
    transfers += [
        StreamMessage(p, world.rank, 0, False, p, x) for p, x in zip(peers, tensors[len(peers) :], strict=True)
    ]

    def issue() -> None:
        if transfers:
            stream.wait(world.groups.streams.now())
            stream.batch(sorted(transfers, key=lambda t: t[:3]))
            world.groups.streams.wait(stream.record())

    return _median_s(issue, device)


def _round_s(world: Any, *, routed: bool, device: Device) -> float:
    """Seconds of the forward of one ring over all ranks."""
    import torch

    from megatron_balance.runtime.attention import balanced_attention
    from megatron_balance.runtime.bind import AttentionShape, bind
    from tests.support import by_hand

    length = ROUND_TOKENS[device] * world.size
    heads = (8, 8)
    routing = Routing(1, (0,)) if routed else None
    planned = by_hand.pool("ring", (length,), world.size, ranks_per_node=world.size // 2, heads=heads, routing=routing)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = AttentionShape(*heads, ranks.HEAD_DIM)
    bound = bind(
        planned, world.rank, shape, groups=world.groups, device=device, dtype=dtype, phases=["forward"], policy="replay"
    )
    q, k, v = (torch.randn(bound.num_tokens, 8, ranks.HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    with torch.no_grad():
        return _median_s(lambda: balanced_attention(q, k, v, bound), device)


def _median_s(call: Any, device: Device) -> float:
    """Median seconds of a call that all ranks make."""
    import torch
    import torch.distributed as dist

    samples: list[float] = []
    for repeat in range(REPEATS[device] + 1):
        dist.barrier()
        with torch.cuda.device(torch.cuda.current_device()) if device == "cuda" else nullcontext():
            begin = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.current_stream().synchronize()
        if repeat:  # the first one connects
            samples.append(time.perf_counter() - begin)
    return median(samples)

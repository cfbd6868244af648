"""Whether ranks can talk: the ways of sharing a GPU, ranks that come late, and rates of links.

Half of the ranks play one node and half another, so that every stream has something to carry; all
links are those inside the machine. The best way that works is what later parts take.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from megatron_balance.ir.plan import Routing
from tools.gpu import ranks, sharing
from tools.gpu.ranks import Ended, Place
from tools.gpu.rows import Context, Figure, Row, Target
from tools.gpu.sharing import Way

BUDGET_S = 50.0
TRY_S = 15.0
"""Seconds of one way with one number of ranks."""
LATE_S = 0.2
"""A rank begins so much later than the one before it, on communicators that nobody has used."""
LINK_BYTES = {"cuda": 64 << 20, "cpu": 1 << 16}
SHARED_BYTES = 1 << 20
"""Where ranks share a GPU, which is about bytes that arrive and not about rates."""
ROUND_TOKENS = {"cuda": 8192, "cpu": 64}
HEADS, HEAD_DIM = (8, 8), 64
REPEATS = {"cuda": 7, "cpu": 2}
SHARED = "ranks share a GPU, which says nothing of links"

WAYS = Figure("ways in which ranks share a GPU over NCCL", "of 5", Target("at least", 1), speed=True)
HANGS = Figure("ranks that hang on unused communicators, each later than the last", "", Target("equal", 0))
WRONG = Figure("messages with other bytes than were sent, all streams at once", "", Target("equal", 0))
FIRST = Figure("until the first all-reduce is done, slowest rank", "s", speed=True)
LINKS = {
    stream: Figure(f"stream {stream}: rate of a batch with every peer, each way", "GB/s", speed=True)
    for stream in ("inter_node", "intra_node")
}
ROUND = {way: Figure(f"a ring's forward over all ranks, {way}", "ms", speed=True) for way in ("direct", "routed")}
FIGURES = (WAYS, HANGS, WRONG, FIRST, *LINKS.values(), *ROUND.values())


def measure(context: Context) -> Iterator[Row]:
    shared = context.ranks_per_gpu > 1
    if context.on_gpu and shared:
        works: list[tuple[Way, Ended]] = []
        failed: list[str] = []
        for way in _tried(context.state):
            if works and (not works[0][0].mps or way.mps):
                continue  # one with MPS, and one without for ranks that are killed
            ended = _all_sizes(context, sharing.environment(way, context.state, context.ranks_per_gpu))
            if ended.well:
                works.append((way, ended))
                sharing.keep([way for way, _ in works], context.state)
            else:
                failed.append(f"{way.name}: {ended.hung} hung, {ended.said[-160:]}")
        names = ", ".join(way.name for way, _ in works)
        yield WAYS.measured(len(works), "; ".join([f"works: {names or 'none'}", *failed]))
        if not works:
            raise RuntimeError("no way of sharing the GPU works")
        ended = works[0][1]
    else:
        ended = _all_sizes(context, {})
        if context.on_gpu:
            yield WAYS.not_measured("a GPU for each rank")
    yield HANGS.measured(ended.hung, f"{len(ended.codes)} ranks, {LATE_S:g} s apart")
    found = ended.results()
    yield WRONG.measured(sum(each["wrong"] for each in found))
    if context.on_gpu:
        first_s = max(each["first_s"] for each in found)
        yield FIRST.measured(first_s, f"{len(found)} ranks, NCCL {found[0]['nccl'] or 'of torch'}")
        yield from _rates(context, found, shared=shared)


def _tried(state: Any) -> Iterator[Way]:
    """Ways to try; those with MPS only where its daemon starts."""
    mps = sharing.start_mps(state)
    yield from (way for way in sharing.WAYS if mps or not way.mps)


def _all_sizes(context: Context, environment: dict[str, str]) -> Ended:
    """How the largest world ended, or the first that did not end well."""
    ended = Ended()
    for size in context.worlds:
        seconds = min(TRY_S, context.left_s())
        ended = ranks.run_ranks(
            _rank, size, (context.ranks_per_gpu > 1,), context, seconds=seconds, environment=environment
        )
        if not ended.well:
            break
    return ended


def _rates(context: Context, found: list[Any], *, shared: bool) -> Iterator[Row]:
    size = context.worlds[-1]
    peers = size - size // 2, size // 2 - 1
    for (stream, figure), count in zip(LINKS.items(), peers, strict=True):
        if shared or not count:
            yield figure.not_measured(SHARED if shared else "a node of one rank")
            continue
        rate = count * LINK_BYTES["cuda"] / max(each[stream] for each in found) / 1e9
        yield figure.measured(rate, f"{count} peers, {LINK_BYTES['cuda'] >> 20} MiB each")
    for way, figure in ROUND.items():
        if shared:
            yield figure.not_measured(SHARED)
        else:
            slowest = max(each[way] for each in found)
            yield figure.measured(1e3 * slowest, f"{ROUND_TOKENS['cuda']} tokens a rank")


def _rank(place: Place, shared: bool) -> Mapping[str, Any]:
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    ranks.join(place)
    one = torch.ones(1, device=place.device)
    dist.all_reduce(one)
    assert float(one) == place.size, "an all-reduce with another sum"
    found: dict[str, Any] = {"first_s": time.perf_counter() - began, "nccl": sharing.loaded()}
    pool = ranks.groups(place, place.size // 2)
    time.sleep(LATE_S * place.rank)
    wrong = _all_streams(place, pool)
    found["wrong"] = wrong
    if place.device == "cuda" and not shared:
        found |= {stream: _batch_s(place, pool, stream) for stream in LINKS}
        found |= {way: _round_s(place, pool, routed=way == "routed") for way in ROUND}
    ranks.leave()
    return found


def _all_streams(place: Place, pool: Any) -> int:
    """Every stream at once, with every peer that it reaches, beside a product on the compute stream:
    how many messages brought other bytes.
    """
    import torch

    batches = {name: _messages(place, name, SHARED_BYTES) for name in LINKS}
    a = torch.ones(256, 256, device=place.device)
    wrong = 0
    for _ in range(2):
        for name, (transfers, _) in batches.items():
            _issue(pool, name, transfers)
        a = (a @ a).clamp(max=1.0)
        for name, (transfers, arriving) in batches.items():
            if transfers:
                pool.streams.wait(pool.streams.of(name).record())
            wrong += sum(int((tensor != peer + 1).any()) for peer, tensor in arriving)
            for _, tensor in arriving:
                tensor.zero_()
        ranks.settle(place.device)
    return wrong


def _messages(place: Place, name: str, num_bytes: int) -> tuple[list[Any], list[tuple[int, Any]]]:
    """Messages with every peer of a stream, and (peer, tensor) of those that arrive: each byte is the
    sender's rank and one.
    """
    import torch

    from megatron_balance.runtime.cuda import StreamMessage

    node, rank = place.size // 2, place.rank
    peers = [p for p in range(place.size) if p != rank and (p // node == rank // node) == (name == "intra_node")]
    how: Any = {"dtype": torch.uint8, "device": place.device}
    leaving = [(peer, torch.full((num_bytes,), rank + 1, **how)) for peer in peers]
    arriving = [(peer, torch.zeros(num_bytes, **how)) for peer in peers]
    transfers = [StreamMessage(rank, peer, 0, True, peer, tensor) for peer, tensor in leaving]
    transfers += [StreamMessage(peer, rank, 0, False, peer, tensor) for peer, tensor in arriving]
    return sorted(transfers, key=lambda t: t[:3]), arriving


def _issue(pool: Any, name: str, transfers: list[Any]) -> None:
    if transfers:
        stream = pool.streams.of(name)
        stream.wait(pool.streams.now())
        stream.batch(transfers)


def _batch_s(place: Place, pool: Any, name: str) -> float:
    """Seconds of one batch with every peer that a stream reaches, as a training step issues it."""
    transfers, _ = _messages(place, name, LINK_BYTES[place.device])

    def issue() -> None:
        _issue(pool, name, transfers)
        if transfers:
            pool.streams.wait(pool.streams.of(name).record())

    return _median_s(issue, place)


def _round_s(place: Place, pool: Any, *, routed: bool) -> float:
    """Seconds of the forward of one ring over all ranks."""
    import torch

    from megatron_balance.runtime.attention import balanced_attention
    from megatron_balance.runtime.bind import AttentionShape, bind
    from tests.support import by_hand

    length = ROUND_TOKENS[place.device] * place.size
    routing = Routing(1, (0,)) if routed else None
    planned = by_hand.pool("ring", (length,), place.size, ranks_per_node=place.size // 2, heads=HEADS, routing=routing)
    how: Any = {"device": place.device, "dtype": torch.bfloat16}
    shape = AttentionShape(*HEADS, HEAD_DIM)
    bound = bind(planned, place.rank, shape, groups=pool, phases=["forward"], policy="replay", **how)
    q, k, v = (torch.randn(bound.num_tokens, heads, HEAD_DIM, **how) for heads in (HEADS[0], HEADS[1], HEADS[1]))
    with torch.no_grad():
        return _median_s(lambda: balanced_attention(q, k, v, bound), place)


def _median_s(call: Callable[[], object], place: Place) -> float:
    """Median seconds of a call that all ranks make, but for the first, which connects."""
    import torch.distributed as dist

    samples: list[float] = []
    for _ in range(REPEATS[place.device] + 1):
        dist.barrier()
        begin = time.perf_counter()
        call()
        ranks.settle(place.device)
        samples.append(time.perf_counter() - begin)
    return median(samples[1:])

"""Times of messages between two ranks: of a launched world, or of this machine's loopback.

On NCCL they go as training's go: over the communicators of its streams (`runtime.groups`), which
NCCL gives other channels than a communicator of the whole world or of two ranks, and in both
directions in one group call.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.cost.table import LinkTable
from megatron_balance.errors import ConfigError
from megatron_balance.profiling.cost_table import ProfileOptions, clock_s, events_s
from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.groups import Groups, make_groups


def measure_links(
    device_name: str, options: ProfileOptions, ranks_per_node: int | None
) -> tuple[tuple[LinkTable, ...], bool]:
    """Times of the launched world's links (torchrun), else of this machine's loopback; and whether
    this process goes on to measure kernels.

    `ranks_per_node`: of the launched world; None: all ranks are on one node.

    Raises:
        ConfigError: a world of one rank, or no way to reach a second process.
    """
    if not dist.is_torchelastic_launched():
        return _loopback_links(options.message_bytes, options.repeats), True
    dist.init_process_group("nccl" if device_name == "cuda" else "gloo")
    try:
        rank, device = dist.get_rank(), torch.device(device_name)
        if device_name == "cuda":  # NCCL needs a device of its own for each rank
            device = torch.device(device_name, rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        return world_links(
            options.message_bytes, options.repeats, ranks_per_node or dist.get_world_size(), device
        ), rank == 0
    finally:
        dist.destroy_process_group()


def _loopback_links(message_bytes: Sequence[int], repeats: int) -> tuple[LinkTable, ...]:
    """Times of messages between two processes of this machine over gloo, of which it starts the
    second: its `intra_node` link.

    Raises:
        ConfigError: gloo did not connect the two, as where it finds no interface to listen on.
    """
    import tempfile

    from torch import multiprocessing

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder, 'store')}"
        process = context.Process(target=_answer, args=(store, tuple(message_bytes), repeats), daemon=True)
        process.start()
        try:
            _join(store, 0)
            seconds = _ping((0, 1), message_bytes, repeats, torch.device("cpu"))
        except RuntimeError as error:
            raise ConfigError(f"--links: gloo could not reach a second process on this machine: {error}") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
    return (LinkTable("intra_node", "gloo", tuple(message_bytes), tuple(seconds)),)


def _answer(store: str, message_bytes: tuple[int, ...], repeats: int) -> None:
    _join(store, 1)
    _ping((0, 1), message_bytes, repeats, torch.device("cpu"))
    dist.destroy_process_group()


def _join(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))


def world_links(
    message_bytes: Sequence[int], repeats: int, ranks_per_node: int, device: torch.device
) -> tuple[LinkTable, ...]:
    """Times of messages of rank 0 with its neighbour, and with the first rank of the next node; none
    on other ranks. Collective: every rank of the launched world calls it.

    Raises:
        ConfigError: a world of one rank.
    """
    size = dist.get_world_size()
    if size < 2:
        raise ConfigError(
            "--links: the launched world has 1 rank; launch 2 or more with torchrun, or leave torchrun out for the "
            "loopback"
        )
    groups = make_groups([range(size)], ranks_per_node)
    links: list[LinkTable] = []
    for name, peer in (("intra_node", 1), ("inter_node", ranks_per_node)):
        if peer < size and (name == "inter_node" or ranks_per_node > 1):
            if groups.streams is not None:
                seconds = exchanged((0, peer), name, message_bytes, repeats, groups)
            else:
                seconds = _ping((0, peer), message_bytes, repeats, device)
            dist.barrier()
            if dist.get_rank() == 0:
                links.append(LinkTable(name, dist.get_backend(), tuple(message_bytes), tuple(seconds)))
    return tuple(links)


def exchanged(
    pair: tuple[int, int],
    stream: str,
    message_bytes: Sequence[int],
    repeats: int,
    groups: Groups,
    sample: Callable[[Callable[[], object]], float] = events_s,
) -> list[float]:
    """Seconds of one message of each size, while as much goes the other way: the median of samples
    (`sample`: seconds of a call).

    Ranks outside `pair` take no part. `stream`: as in `compile.order.stream_name`.
    """
    assert groups.streams is not None, "gloo has no streams"
    if groups.rank not in pair:
        return []
    peer = pair[1] if groups.rank == pair[0] else pair[0]
    streams, of = groups.streams, groups.streams.of(stream)
    seconds: list[float] = []
    for size in message_bytes:
        ends = [(groups.rank, peer, True, of.empty(size)), (peer, groups.rank, False, of.empty(size))]
        transfers = [
            StreamMessage(src, dst, 0, sends, peer, x) for src, dst, sends, x in sorted(ends, key=itemgetter(0))
        ]

        def exchange(transfers: Sequence[StreamMessage] = transfers) -> None:
            of.wait(streams.now())
            of.batch(transfers)
            streams.wait(of.record())

        exchange()
        seconds.append(median(sample(exchange) for _ in range(repeats)))
    return seconds


def _ping(pair: tuple[int, int], message_bytes: Sequence[int], repeats: int, device: torch.device) -> list[float]:
    """Seconds of one message of each size: half of there and back, the median of samples. Ranks
    outside `pair` take no part.
    """
    rank = dist.get_rank()
    if rank not in pair:
        return []
    peer = pair[1] if rank == pair[0] else pair[0]
    seconds: list[float] = []
    for size in message_bytes:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)

        def there_and_back(payload: Tensor = payload) -> None:
            for sending in (rank == pair[0], rank != pair[0]):
                if sending:
                    dist.send(payload, peer)
                else:
                    dist.recv(payload, peer)

        there_and_back()
        sample = events_s if device.type == "cuda" else clock_s
        seconds.append(median(sample(there_and_back) for _ in range(repeats)) / 2)
    return seconds

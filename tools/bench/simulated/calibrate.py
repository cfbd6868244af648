"""On the ranks: the cost table, by microbenchmarks alone, and how fast ranks at a share of a core
are by the clock on the wall.

The table's times are of the processor, as `megatron-balance profile` takes them on one thread: what
others do on the cores does not count. The ranks' pace, seconds on the wall over seconds of the
table, comes from launches one after the other on all ranks at once, each on operands that have left
the caches meanwhile, as those of a call that came over a NIC are.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.table import BesideTable, CostTable, LinkTable
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.profiling.cost_table import ProfileOptions, model_scale, profile, world_links
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels import choose_kernel
from megatron_balance.runtime.kernels.base import Entries
from tools.bench.emulated import device
from tools.bench.emulated.point import NUM_RANKS, RANKS_PER_NODE
from tools.bench.simulated.cases import MODEL, Rates, cluster_of
from tools.bench.simulated.paced import PacedKernel

Value = TypeVar("Value")

OPTIONS = ProfileOptions(
    # torch's kernel for CPUs works in tiles of 32, 64 and 256 queries from 1, 192 and 768 on.
    q_tokens=(64, 191, 192, 512, 767, 768, 1024, 2048, 4096),
    k_tokens=(64, 512, 1024, 8192),
    before_tokens=(0, 512, 1024, 4096),
    layer_tokens=(128, 512),
    pack_bytes=(1 << 14, 1 << 18, 1 << 20, 1 << 22),
    message_bytes=(1 << 10, 1 << 19, 1 << 20),
    repeats=3,
)
PROFILING = 2
"""Ranks that measure the table, one on each core; the others wait."""

LAUNCHES = (((512, 512), (256, 256), (128, 128), (64, 64), (32, 32)), ((2048, 4096),))
"""Queries and keys of the entries of two launches, a short and a long one, that ranks' pace is
measured with.
"""

MESSAGE_BYTES = 1 << 19

HOSTED, HOST_TIMES = (4, 1024), 5
"""Sequences of a rank and tokens of each, launched one by one to see what the executor takes around
a launch; and how often.
"""

COPIES = 8
"""Operands that a rank's pace is measured with in turn, so that none is still in a cache."""

_KEEP = {-1: 1 << 30, -3: 1 << 25}
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, and the most that each may be."""

TIMES = ("launch_s", "backward_launch_s", "full_s", "full_backward_s", "causal_s", "causal_backward_s")
"""Of an attention table."""


class OfPhase(NamedTuple):
    """The pace of launches, forward or backward: `factor` seconds on the wall of one by the table,
    and so much more for each launch.

    A launch finds the caches as whatever ran on the core before it has left them; in the table's
    repetitions that was itself.
    """

    factor: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of ranks at their share of a core: alone, and how much slower beside transfers in
    their node and to the other one.

    `host_s`: what the executor takes around each launch, forward and backward.
    """

    forward: OfPhase
    backward: OfPhase
    intra_node: float
    inter_node: float
    host_s: tuple[float, float] = (0.0, 0.0)


def alone(call: Callable[[], Value]) -> Value:
    """Result of a collective call in a world of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    value = call()
    dist.barrier()
    dist.destroy_process_group()
    return value


def measure_table() -> CostTable:
    """Collective: the kernels on the processor's clock, without links."""
    keep_memory()
    table = profile(MODEL, "cpu", OPTIONS, _quietly) if dist.get_rank() < PROFILING else None
    return mean_of([each for each in gathered(table) if each is not None])


class Pacer:
    """Launches at `share` of a core on all ranks at once, of known time by the table, alone and
    beside transfers that keep links full.
    """

    def __init__(self, table: CostTable, share: float, rates: Rates) -> None:
        device.prefer_transfers()
        self._launches = [_Launch(entries, table, share) for entries in LAUNCHES]
        self._rates = rates
        self._alone: list[list[float]] = []
        self._beside: list[list[float]] = []

    def sample(self, seconds: float) -> None:
        """Collective: how fast the ranks are now. A machine that others have a part in is not
        always as fast.
        """
        alone_s = self._mean_s(seconds)
        self._alone.append(alone_s)
        short_s, beside = alone_s[: len(self._launches[0].calls)], list[float]()
        for step, bytes_per_s in ((1, self._rates.intra), (RANKS_PER_NODE, self._rates.inter)):
            begin = partial(_transfers, step, 1.2 * seconds * bytes_per_s)
            beside.append(sum(self._mean_s(seconds, slice(1), begin)) / sum(short_s))
        self._beside.append(beside)

    def pace(self, host_s: tuple[float, float]) -> Pace:
        """The medians of the samples."""
        wall_s = [median(each) for each in zip(*self._alone, strict=True)]
        table_s = [each for launch in self._launches for each in launch.table_s]
        forward, backward = (of_phase(table_s[at::2], wall_s[at::2]) for at in (0, 1))
        intra, inter = (max(1.0, median(each)) for each in zip(*self._beside, strict=True))
        return Pace(forward, backward, intra, inter, host_s)

    def _mean_s(
        self, seconds: float, which: slice = slice(None), begin: Callable[[], list[dist.Work]] = list[dist.Work]
    ) -> list[float]:
        """Mean wall-clock seconds of calls in turn, two or more, while all ranks do the same."""
        return mean_of(
            gathered([_mean_s(calls, seconds, begin) for launch in self._launches[which] for calls in launch.calls])
        )


def of_phase(table_s: Sequence[float], wall_s: Sequence[float]) -> OfPhase:
    """From a short and a long launch."""
    factor = (wall_s[1] - wall_s[0]) / (table_s[1] - table_s[0])
    return OfPhase(factor, max(0.0, wall_s[0] - factor * table_s[0]))


def at_pace(table: CostTable, pace: Pace) -> CostTable:
    """The table of ranks at this pace."""
    found = table.attention
    slow = {
        name: scaled(getattr(found, name), (pace.backward if "backward" in name else pace.forward).factor)
        for name in TIMES
    }
    slow["launch_s"] += pace.forward.launch_s + pace.host_s[0]
    slow["backward_launch_s"] += pace.backward.launch_s + pace.host_s[1]
    return replace(table, attention=replace(found, **slow), beside=BesideTable(pace.intra_node, pace.inter_node))


def host_s(groups: Groups, share: float) -> tuple[float, float]:
    """Collective: seconds around a launch, forward and backward, of an executor that exchanges
    nothing: `HOSTED` sequences, one by one.
    """
    size, (count, tokens) = NUM_RANKS, HOSTED
    zones = tuple(Zone("local", "ring", (rank,), (rank * count + at,)) for rank in range(size) for at in range(count))
    plan = MicrobatchPlan(
        "host", (tokens,) * (size * count), size, RANKS_PER_NODE, MODEL.num_heads, MODEL.num_kv_heads, zones
    )
    kernel, shape = paced(share), AttentionShape(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
    bound = replace(bind(plan, groups.rank, shape, groups=groups, policy="keep"), kernel=kernel)
    q, dout = (torch.randn(count * tokens, MODEL.num_heads, MODEL.head_dim) / 8 for _ in range(2))
    k, v = (torch.randn(count * tokens, MODEL.num_kv_heads, MODEL.head_dim) / 8 for _ in range(2))
    found: list[tuple[float, float]] = []
    for _ in range(HOST_TIMES + 1):
        dist.barrier()
        (out, lse, received), forward_s = _around(kernel, partial(run_forward, bound, q, (k, v), model_scale(MODEL)))
        final = (out, lse)
        _, backward_s = _around(
            kernel, partial(run_backward, bound, dout, (q, k, v), final, received, model_scale(MODEL))
        )
        found.append((forward_s / count, backward_s / count))
    # the first finds the launches' times
    forward, backward = mean_of(gathered([median(each) for each in zip(*found[1:], strict=True)]))
    return forward, backward


def _around(kernel: PacedKernel, call: Callable[[], Value]) -> tuple[Value, float]:
    """Result of a call, and its seconds outside the kernel."""
    spent_s, begin_s = kernel.spent_s, time.perf_counter()
    value = call()
    return value, time.perf_counter() - begin_s - (kernel.spent_s - spent_s)


def gathered(mine: Value) -> list[Value]:
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def paced(share: float) -> PacedKernel:
    return PacedKernel(choose_kernel("auto", torch.device("cpu"), torch.float32, MODEL.head_dim), share)


def keep_memory() -> None:
    """Keep memory that this process has freed: else whether a tensor's pages must be found anew
    depends on what was freed before.
    """
    with suppress(OSError, AttributeError):  # another C library than GNU's
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, most in _KEEP.items():
            mallopt(parameter, most)


def measure_links() -> tuple[LinkTable, ...]:
    """Collective: links as they are shaped now; rank 0 has them.

    A token bucket that has been idle lets the first bytes through at once. Amid a transfer, and
    between two, it has nothing saved up; so the rate is that of what the larger message has more
    than the smaller, and the latency that of the smallest.
    """
    return tuple(
        without_burst(link)
        for link in world_links(OPTIONS.message_bytes, OPTIONS.repeats, RANKS_PER_NODE, torch.device("cpu"))
    )


def without_burst(link: LinkTable) -> LinkTable:
    least, less, more = link.sizes
    latency_s, less_s, more_s = link.seconds
    byte_s = (more_s - less_s) / (more - less)
    return replace(link, sizes=(least, more), seconds=(latency_s + least * byte_s, latency_s + more * byte_s))


def mean_of(tables: Sequence[Any]) -> Any:
    """The table whose times are the means of those of `tables`; all else is the first one's."""
    first = tables[0]
    if isinstance(first, float):
        return sum(tables) / len(tables)
    if isinstance(first, tuple | list):
        return type(first)(mean_of(each) for each in zip(*tables, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        return replace(
            first, **{field.name: mean_of([getattr(table, field.name) for table in tables]) for field in fields(first)}
        )
    return first


def scaled(times: Any, factor: float) -> Any:
    return tuple(scaled(each, factor) for each in times) if isinstance(times, tuple) else times * factor


def _quietly(points: Iterable[Callable[[], None]], count: int, what: str) -> Iterator[Callable[[], None]]:
    del count, what
    return iter(points)


class _Launch:
    """A launch, forward and backward: `calls` on operands in turn; `table_s`: what it takes by the
    table.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], table: CostTable, share: float) -> None:
        scale, kernel = model_scale(MODEL), paced(share)
        rows_q, rows_k = (tuple(pairwise(accumulate((size[at] for size in sizes), initial=0))) for at in (0, 1))
        entries = kernel.prepare(Entries(rows_q, rows_k, (False,) * len(sizes), rows_q), torch.device("cpu"))
        shapes = [
            (rows_q, MODEL.num_heads),
            (rows_k, MODEL.num_kv_heads),
            (rows_k, MODEL.num_kv_heads),
            (rows_q, MODEL.num_heads),
        ]
        operands = [
            [torch.randn(rows[-1][1], heads, MODEL.head_dim) / 8 for rows, heads in shapes] for _ in range(COPIES)
        ]
        outs = [kernel.forward(entries, q, k, v, scale) for q, k, v, _ in operands]
        forward = [lambda x=x: kernel.forward(entries, x[0], x[1], x[2], scale) for x in operands]
        backward = [
            lambda x=x, o=o: kernel.backward(entries, (x[3], *o), x[0], x[1], x[2], scale)
            for x, o in zip(operands, outs, strict=True)
        ]
        self.calls: tuple[Sequence[Callable[[], object]], ...] = (forward, backward)
        cost = MeasuredCost(table, cluster_of(RANKS_PER_NODE, 100.0, 1e9), MODEL)
        # Queries after all keys see them all.
        pairs = np.array(
            [[i, k, k + q, 0, MODEL.num_heads, 0, k, 0, MODEL.num_kv_heads] for i, (q, k) in enumerate(sizes)]
        )
        of_one = np.zeros(len(sizes), dtype=np.int64)
        self.table_s = tuple(float(cost.attend_s(pairs, of_one, 1, backward=back)[0]) for back in (False, True))


def _transfers(step: int, num_bytes: float) -> list[dist.Work]:
    """Begin to send so much to a rank of the same node (`step` 1), or of the other one, and to
    receive as much.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if step < RANKS_PER_NODE:
        first = rank // RANKS_PER_NODE * RANKS_PER_NODE
        to, of = (first + (rank + by) % RANKS_PER_NODE for by in (step, -step))
    else:
        to = of = (rank + step) % size
    count = max(1, round(num_bytes / MESSAGE_BYTES))
    source, target = (torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(2))
    works = [dist.irecv(target, of) for _ in range(count)] + [dist.isend(source, to) for _ in range(count)]
    return [work for work in works if work is not None]


def _mean_s(calls: Sequence[Callable[[], object]], seconds: float, begin: Callable[[], list[dist.Work]]) -> float:
    """Mean wall-clock seconds of calls in turn, two or more, while all ranks do the same."""
    dist.barrier()
    # behind the barrier, whose messages would wait for them on the same connections
    works = begin()
    start, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - start < seconds:
        calls[count % len(calls)]()
        count += 1
    mean = (time.perf_counter() - start) / count
    for work in works:
        work.wait()
    dist.barrier()
    return mean

"""Measure this machine's kernels for a cost table; its links are measured in `profiling.links`.

Each figure is of several samples of warm calls: their median on the device's own clock (CUDA
events), the shortest on the processor's, where what others take of the machine only adds; with one
thread its own time is counted, not theirs.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_balance.cost.table import FORMAT, AttentionTable, CostTable, Curve, LayerTable, LinkTable, Source
from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import Model
from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.groups import Groups, make_groups
from megatron_balance.runtime.kernels import choose_kernel
from megatron_balance.runtime.kernels.base import Entries, Kernel, merge_partials


def profile(
    model: Model, device_name: str, options: ProfileOptions, progress: Progress, links: tuple[LinkTable, ...] = ()
) -> CostTable:
    """Measure this machine for `model`'s heads and layers. ConfigError: no kernel for the device."""
    device = torch.device(device_name)
    dtype = torch.float32 if model.bytes_per_element == 4 else torch.bfloat16
    bench = _KernelBench(model, device, dtype, choose_kernel(options.kernel, device, dtype, model.head_dim), options)
    return CostTable(
        FORMAT,
        _source(device, options),
        bench.attention(progress),
        bench.merge(),
        bench.pack(),
        bench.layer(progress),
        links,
    )


def prepare(device_name: str | None, threads: int | None) -> str:
    """The device to measure (None: cuda, if any), and CPU `threads` set. ConfigError: no cuda."""
    name = device_name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no CUDA device here; use --device cpu, or see 'megatron-balance doctor'"
        )
    if threads:
        torch.set_num_threads(threads)
    return name


def _source(device: torch.device, options: ProfileOptions) -> Source:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    try:
        ours = version("megatron-balance")
    except PackageNotFoundError:  # run from a checkout that is not installed
        ours = "unknown"
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return Source(name, device.type, today, ours, str(torch.__version__), torch.get_num_threads(), options.repeats)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Points to measure, in tokens and bytes; `repeats`: samples of a figure."""

    q_tokens: tuple[int, ...] = (32, 128, 512, 1024, 2048, 4096)
    k_tokens: tuple[int, ...] = (32, 128, 512, 2048, 8192)
    before_tokens: tuple[int, ...] = (0, 128, 512, 2048, 8192)
    layer_tokens: tuple[int, ...] = (128, 512, 2048, 4096)
    pack_bytes: tuple[int, ...] = (1 << 14, 1 << 18, 1 << 22, 1 << 24)
    message_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
    repeats: int = 7
    kernel: str = "auto"


# A few seconds on a laptop for a small model: enough to plan with. Too coarse to judge two planners
# within a few percent.
QUICK = ProfileOptions(
    q_tokens=(32, 128, 512, 1024),
    k_tokens=(32, 256, 2048),
    before_tokens=(0, 256, 2048),
    layer_tokens=(128, 512, 1024),
    pack_bytes=(1 << 14, 1 << 20, 1 << 23),
    message_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 22),
    repeats=5,
)

# Wraps the points to measure: (points, how many, what they are) -> the same points.
Progress = Callable[[Iterable[Callable[[], None]], int, str], Iterator[Callable[[], None]]]


def _time_s(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    call()
    if device.type == "cuda":
        return median(_events_s(call) for _ in range(repeats))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return min(_clock_s(call, clock) for _ in range(repeats))


def _clock_s(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    call()
    return clock() - begin


def _events_s(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# Query tokens that a timed launch is filled up to with entries alike. A GPU needs many to be busy,
# a CPU takes them one by one.
FILLED_TOKENS = {"cpu": 256, "cuda": 16384}
MAX_COPIES = 64
# Most entries of a timed launch, and key tokens. Of a 7B model's heads 4 GB in bf16, and as much
# again for their gradients.
MAX_KEYS = 1 << 18


class _KernelBench:
    """One model on one device. One entry of the attention kernel is timed inside a launch of
    several alike, as plans launch them, and the launch's fixed part is taken off.
    """

    # Values do not matter to the time of these kernels; they are small, so that nothing overflows.

    def __init__(
        self, model: Model, device: torch.device, dtype: torch.dtype, kernel: Kernel, options: ProfileOptions
    ) -> None:
        self.model, self.device, self.dtype, self.kernel, self.options = model, device, dtype, kernel, options
        self.generator = torch.Generator(device).manual_seed(1)

    def attention(self, progress: Progress) -> AttentionTable:
        options, model = self.options, self.model
        smallest = (options.q_tokens[0], options.k_tokens[0], False)
        launch_s, backward_launch_s = self._launch_s(*smallest)
        grids: dict[tuple[bool, int, int], tuple[float, float]] = {}

        # `keys`: those before the queries where causal, else all.
        def point(num_q: int, keys: int, causal: bool) -> Callable[[], None]:
            def measure() -> None:
                num_k = keys + num_q if causal else keys
                copies = max(1, min(MAX_COPIES, FILLED_TOKENS[self.device.type] // num_q, MAX_KEYS // num_k))
                forward_s, backward_s = self._launch(num_q, num_k, causal, copies)
                # Entries take a tenth of a launch at least, whatever its fixed part.
                grids[causal, num_q, keys] = (
                    max(forward_s - launch_s, forward_s / 10) / copies,
                    max(backward_s - backward_launch_s, backward_s / 10) / copies,
                )

            return measure

        points = [point(q, x, causal) for causal in (False, True) for q in options.q_tokens for x in self._axis(causal)]
        for measure in progress(points, len(points), "attention"):
            measure()

        def grid(causal: bool, which: int) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(grids[causal, q, x][which] for x in self._axis(causal)) for q in options.q_tokens)

        heads = (model.num_heads, model.num_kv_heads, model.head_dim)
        axes = (options.q_tokens, options.k_tokens, options.before_tokens)
        times = (grid(False, 0), grid(False, 1), grid(True, 0), grid(True, 1))
        dtype = str(self.dtype).removeprefix("torch.")
        return AttentionTable(self.kernel.name, dtype, *heads, *axes, launch_s, backward_launch_s, *times)

    def _axis(self, causal: bool) -> tuple[int, ...]:
        return self.options.before_tokens if causal else self.options.k_tokens

    def _launch_s(self, num_q: int, num_k: int, causal: bool) -> tuple[float, float]:
        """Seconds of the fixed part of a launch, forward and backward: of one entry beside many."""
        one, many = self._launch(num_q, num_k, causal, 1), self._launch(num_q, num_k, causal, MAX_COPIES)
        return tuple(max(0.0, a - (b - a) / (MAX_COPIES - 1)) for a, b in zip(one, many, strict=True))  # pyright: ignore[reportReturnType]

    def _launch(self, num_q: int, num_k: int, causal: bool, copies: int) -> tuple[float, float]:
        model, scale = self.model, model_scale(self.model)
        rows_q = tuple((i * num_q, (i + 1) * num_q) for i in range(copies))
        rows_k = tuple((i * num_k, (i + 1) * num_k) for i in range(copies))
        entries = self.kernel.prepare(Entries(rows_q, rows_k, (causal,) * copies, rows_q), self.device)
        q = self._values(copies * num_q, model.num_heads, model.head_dim)
        k, v = (self._values(copies * num_k, model.num_kv_heads, model.head_dim) for _ in range(2))
        repeats = self.options.repeats
        forward_s = _time_s(lambda: self.kernel.forward(entries, q, k, v, scale), self.device, repeats)
        out, lse = self.kernel.forward(entries, q, k, v, scale)
        dout = (torch.ones_like(out), out, lse)
        backward_s = _time_s(lambda: self.kernel.backward(entries, dout, q, k, v, scale), self.device, repeats)
        return forward_s, backward_s

    def merge(self) -> Curve:
        """Seconds of merging partials in fp32, by tokens."""
        sizes, seconds = self.options.layer_tokens, []
        for tokens in sizes:
            one, other = (self._partial(tokens) for _ in range(2))
            seconds.append(
                _time_s(lambda one=one, other=other: merge_partials(one, other), self.device, self.options.repeats)
            )
        return Curve(sizes, tuple(seconds))

    def _partial(self, tokens: int) -> tuple[Tensor, Tensor]:
        shape = (tokens, self.model.num_heads)
        lse = torch.randn(shape, generator=self.generator, device=self.device)
        return torch.randn(*shape, self.model.head_dim, generator=self.generator, device=self.device), lse

    def pack(self) -> Curve:
        """Seconds of gathering every second row of keys into a message, by bytes."""
        width = self.model.num_kv_heads * self.model.head_dim
        row_bytes = width * self.dtype.itemsize
        sizes, seconds = [], []
        for wanted in self.options.pack_bytes:
            rows = max(1, wanted // row_bytes)
            source, index = self._values(2 * rows, width), torch.arange(0, 2 * rows, 2, device=self.device)
            target = source.new_empty(rows, width)
            call = lambda s=source, i=index, t=target: torch.index_select(s, 0, i, out=t)  # noqa: E731  timed as it stands
            sizes.append(rows * row_bytes)
            seconds.append(_time_s(call, self.device, self.options.repeats))
        return Curve(tuple(sizes), tuple(seconds))

    def layer(self, progress: Progress) -> LayerTable:
        """Seconds of norms, projections and MLP of one layer, forward and backward, by tokens."""
        model, sizes = self.model, self.options.layer_tokens
        layer = _AroundAttention(model, self.device, self.dtype, self.generator)
        times: list[tuple[float, float]] = []

        def point(tokens: int) -> Callable[[], None]:
            def measure() -> None:
                x = self._values(tokens, model.hidden_size).requires_grad_()
                forward_s = _time_s(lambda: layer.forward(x.detach()), self.device, self.options.repeats)
                both_s = _time_s(lambda: layer.forward(x).sum().backward(), self.device, self.options.repeats)
                times.append((forward_s, max(both_s - forward_s, forward_s / 10)))

            return measure

        points = [point(tokens) for tokens in sizes]
        for measure in progress(points, len(points), "layer"):
            measure()
        forward, backward = zip(*times, strict=True)
        return LayerTable(model.hidden_size, model.ffn_size, model.gated_ffn, sizes, forward, backward)

    def _values(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.dtype) / 8


class _AroundAttention:
    """The modules of a layer around attention; the queries stand in for its output."""

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> None:
        hidden, self.width = model.hidden_size, model.num_heads * model.head_dim
        products = 2 if model.gated_ffn else 1
        shapes = {
            "qkv": (self.width + 2 * model.num_kv_heads * model.head_dim, hidden),
            "out": (hidden, self.width),
            "up": (products * model.ffn_size, hidden),
            "down": (hidden, model.ffn_size),
        }
        self.gated = model.gated_ffn
        self.norm = torch.ones(hidden, device=device, dtype=dtype, requires_grad=True)
        self.weights = {
            name: (torch.randn(shape, generator=generator) / hidden**0.5).to(device, dtype).requires_grad_()
            for name, shape in shapes.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights
        qkv = F.linear(F.rms_norm(x, (x.shape[-1],), self.norm), weights["qkv"])
        x = x + F.linear(qkv[:, : self.width], weights["out"])
        inner = F.linear(F.rms_norm(x, (x.shape[-1],), self.norm), weights["up"])
        if self.gated:
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner)
        return x + F.linear(inner, weights["down"])


def model_scale(model: Model) -> float:
    return model.head_dim**-0.5


# Times of messages between two ranks: of a launched world, or of this machine's loopback.
#
# On NCCL they go as training's go: over the communicators of its streams (`runtime.groups`), which
# NCCL gives other channels than a communicator of the whole world or of two ranks, and in both
# directions in one group call.


def measure_links(
    device_name: str, options: ProfileOptions, ranks_per_node: int | None
) -> tuple[tuple[LinkTable, ...], bool]:
    """Times of the launched world's links (torchrun), else of this machine's loopback; and whether
    this process goes on to measure kernels. `ranks_per_node`: None: all ranks are on one node.
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
    """Times of messages between two processes of this machine over gloo: its `intra_node` link.
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
    """Times of messages of rank 0 with its neighbour, and with the first rank of the next node;
    none on other ranks. Collective over the launched world. ConfigError: a world of one rank.
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
    sample: Callable[[Callable[[], object]], float] = _events_s,
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
    """Seconds of a message of each size, half of there and back, median; none outside `pair`."""
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
        sample = _events_s if device.type == "cuda" else _clock_s
        seconds.append(median(sample(there_and_back) for _ in range(repeats)) / 2)
    return seconds

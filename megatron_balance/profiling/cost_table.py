"""Measure this machine's kernels for a cost table; its links are measured in `profiling.links`.

Each figure is of several samples of warm calls: their median on the device's own clock (CUDA
events), the shortest on the processor's, where what others take of the machine only adds; with one
thread its own time is counted, not theirs.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_balance.cost.table import FORMAT, AttentionTable, CostTable, Curve, LayerTable, LinkTable, Source
from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import Model
from megatron_balance.runtime.kernels import choose_kernel
from megatron_balance.runtime.kernels.base import Entries, Kernel, merge_partials

DEVICES = ("cpu", "cuda")


def profile(
    model: Model, device_name: str, options: ProfileOptions, progress: Progress, links: tuple[LinkTable, ...] = ()
) -> CostTable:
    """Measure this machine for `model`'s heads and layers. Raises ConfigError: no such device, or a
    kernel that does not serve it.
    """
    device = _open_device(device_name)
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


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare(device_name: str, threads: int | None) -> None:
    """Check the device and set the threads of the CPU kernels (None: torch's own choice)."""
    _open_device(device_name)
    if threads:
        torch.set_num_threads(threads)


def _open_device(name: str) -> torch.device:
    """The device called `name`. Raises ConfigError: unknown, or CUDA where there is none."""
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r}: choose one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no CUDA device here; use --device cpu, or see 'megatron-balance doctor'"
        )
    return torch.device(name)


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
    """Points to measure: tokens of the attention grid and of the layer, bytes of packing and
    messages; `repeats`: samples of a figure.
    """

    q_tokens: tuple[int, ...] = (32, 128, 512, 1024, 2048, 4096)
    k_tokens: tuple[int, ...] = (32, 128, 512, 2048, 8192)
    before_tokens: tuple[int, ...] = (0, 128, 512, 2048, 8192)
    layer_tokens: tuple[int, ...] = (128, 512, 2048, 4096)
    pack_bytes: tuple[int, ...] = (1 << 14, 1 << 18, 1 << 22, 1 << 24)
    message_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
    repeats: int = 7
    kernel: str = "auto"


QUICK = ProfileOptions(
    q_tokens=(32, 128, 512, 1024),
    k_tokens=(32, 256, 2048),
    before_tokens=(0, 256, 2048),
    layer_tokens=(128, 512, 1024),
    pack_bytes=(1 << 14, 1 << 20, 1 << 23),
    message_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 22),
    repeats=5,
)
"""A few seconds on a laptop for a small model: enough to plan with.

Too coarse to judge two planners within a few percent."""


Progress = Callable[[Iterable[Callable[[], None]], int, str], Iterator[Callable[[], None]]]
"""Wraps the points to measure: (points, how many, what they are) -> the same points."""


def _time_s(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    call()
    if device.type == "cuda":
        return median(events_s(call) for _ in range(repeats))
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return min(clock_s(call, clock) for _ in range(repeats))


def clock_s(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    call()
    return clock() - begin


def events_s(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


FILLED_TOKENS = {"cpu": 256, "cuda": 16384}
"""Query tokens that a timed launch is filled up to with entries alike.

A GPU needs many to be busy, a CPU takes them one by one."""


MAX_COPIES = 64


MAX_KEYS = 1 << 18
"""Most entries of a timed launch, and key tokens.

Of a 7B model's heads 4 GB in bf16, and as much again for their gradients."""


class _KernelBench:
    """One model on one device. One entry of the attention kernel is timed inside a launch of
    several alike, as plans launch them, and the launch's fixed part is taken off.

    Values do not matter to the time of these kernels; they are small, so that nothing overflows.
    """

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

        def point(num_q: int, second: int, causal: bool) -> Callable[[], None]:
            def measure() -> None:
                num_k = second + num_q if causal else second
                copies = max(1, min(MAX_COPIES, FILLED_TOKENS[self.device.type] // num_q, MAX_KEYS // num_k))
                forward_s, backward_s = self._launch(num_q, num_k, causal, copies)
                # Entries take a tenth of a launch at least, whatever its fixed part.
                grids[causal, num_q, second] = (
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
        return AttentionTable(self.kernel.name, _name(self.dtype), *heads, *axes, launch_s, backward_launch_s, *times)

    def _axis(self, causal: bool) -> tuple[int, ...]:
        return self.options.before_tokens if causal else self.options.k_tokens

    def _launch_s(self, num_q: int, num_k: int, causal: bool) -> tuple[float, float]:
        """Seconds of the fixed part of a launch, forward and backward: one small entry takes it
        beside its share of many.
        """
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

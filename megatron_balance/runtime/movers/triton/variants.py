"""Triton's kernels as a job launches them, compiled before its first step: by threads, once a node."""

# Compiling one takes from a part of a second to several; in a step that would stop this rank, and
# with it every rank that waits for it.

import fcntl
import logging
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple, TextIO

import torch
from triton import knobs
from triton.runtime import JITFunction

from megatron_balance.ir.model import GradientWire
from megatron_balance.runtime.lower.memory import AttentionShape, CallForm
from megatron_balance.runtime.lower.moves import Alike
from megatron_balance.runtime.movers.triton import mover as launches
from megatron_balance.runtime.movers.triton.kernels import AddBlock, CopyBlock, add_rows, copy_rows, merge_rows

log = logging.getLogger(__name__)
_TOLD_EVERY_S = 5.0
_LOCK = "megatron-balance.lock"
_WAIT_S = 300.0


class Variant(NamedTuple):
    """A kernel for tensors of one kind. `launch`: on nothing, by `kernel` or what stands for it."""

    # Equal for what Triton compiles once.
    name: str
    kernel: Any
    launch: Callable[..., None]


def variants(device: torch.device, dtype: torch.dtype, shape: AttentionShape, wire: GradientWire) -> list[Variant]:
    """All that a mover launches for calls of `shape`, inputs of `dtype`, gradients sent as `wire`."""
    mover, form = launches.TritonMover(device), CallForm.of(shape, dtype, wire)
    wide = form.wide
    widths = [width for width in (*shape.widths, shape.latent_dim) if width is not None]
    # (source, target): what is copied are inputs and outputs, gradients that become sums, those that
    # are sent, sums for the caller, and LSE; added are gradients as a kernel leaves them, and as sent,
    # to sums and to what was received.
    ends = ((dtype, dtype), (dtype, wide), (wide, dtype), (dtype, form.gradient), (wide, form.gradient))
    copies: list[Alike] = [(*both, width) for both in ends for width in widths]
    sums = [(source, target) for source in (dtype, form.gradient) for target in (wide, form.gradient)]
    additions: list[Alike] = [(*both, width) for both in sums for width in widths]
    found: list[Variant] = []
    for kernel, columns, kinds in (
        (copy_rows, CopyBlock.WIDTH, (*copies, (wide, wide, 1))),
        (add_rows, AddBlock.WIDTH, additions),
    ):
        blocks = torch.zeros((1, columns), dtype=torch.int32, device=device)  # one block of no rows
        table = launches.BlockTable((), blocks, mover.blank(torch.int32), 1)
        for *both, width in kinds:
            x, y = (torch.zeros((1, 1, width), dtype=each, device=device) for each in both)
            for places in launches.PLACES:
                call = partial(launches.launch, table=table, sources=[x] * places, targets=[y] * places)
                found.append(Variant(_name(call, kernel, both), kernel, call))
    lse, width = torch.zeros((1, 1), dtype=wide, device=device), shape.value_width
    part = launches.partial_of(torch.zeros((1, 1, width), dtype=dtype, device=device), lse)
    for places in launches.PARTS:
        for to in (dtype, wide):
            target = torch.empty((1, 1, width), dtype=to, device=device), torch.empty_like(lse)
            call = partial(launches.merge_parts, mover, [part] * places, *target)
            found.append(Variant(_name(call, merge_rows, (dtype, to)), merge_rows, call))
    return list({one.name: one for one in found}.values())


def _name(call: Callable[..., None], kernel: Any, both: Sequence[torch.dtype]) -> str:
    """Of what is launched: the kernel, its types, places for tensors, and constants."""
    said: list[str] = []

    class Told:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return self.tell

        def tell(self, first: Sequence[Any], *_: Any, VEC: int, ROWS: int, COLS: int, num_warps: int = 4) -> None:
            said.append(f"{len(first)} places, {ROWS} x {COLS} by {VEC}, {num_warps} warps")

    call(kernel=Told())
    source, target = (str(each).removeprefix("torch.") for each in both)
    return f"{kernel.fn.__name__} {source} to {target}, {said[0]}"


def build(device: torch.device, dtype: torch.dtype, shape: AttentionShape, wire: GradientWire) -> int:
    """Compile all variants and launch each once, on nothing; their number."""
    found = variants(device, dtype, shape, wire)
    if isinstance(copy_rows, JITFunction):  # else Triton interprets them
        with first_of_node(Path(knobs.cache.dir)):
            compile_all(found, device)
    for one in found:
        one.launch(kernel=one.kernel)
    return len(found)


def compile_all(found: Sequence[Variant], device: torch.device, threads: int | None = None) -> None:
    """Compile variants, or read them from Triton's cache, by as many threads as processors."""
    begin = told = monotonic()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # a new thread is on device 0
    with ThreadPoolExecutor(threads or min(len(found), len(os.sched_getaffinity(0)))) as pool:
        futures = [pool.submit(_compile, one, device) for one in found]
        for number, future in enumerate(as_completed(futures), 1):
            if future.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            future.result()
            if monotonic() - told > _TOLD_EVERY_S:
                told = monotonic()
                log.info("Triton: %d of %d kernels compiled after %.0f s", number, len(found), told - begin)
    if monotonic() - begin > 1.0:
        log.info("Triton: %d kernels ready after %.1f s", len(found), monotonic() - begin)


@contextmanager
def first_of_node(folder: Path, wait_s: float = _WAIT_S) -> Generator[None]:
    """Let one process go first, to compile what the others then find in the folder. They go on
    together when it leaves or ends, however it ends, or after `wait_s` seconds.
    """
    # The lock is the system's, which frees that of a process that died.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / _LOCK).open("a")
    except OSError as error:
        log.warning("%s cannot be written, so every process compiles for itself: %s", folder, error)
        yield
        return
    with stream:
        if not _locked(stream, fcntl.LOCK_EX):
            log.info("another process of this machine compiles; waiting for what it puts into %s", folder)
            begin = monotonic()
            while not _locked(stream, fcntl.LOCK_SH):
                if monotonic() - begin > wait_s:
                    log.warning("the process that compiles has not ended after %.0f s; compiling here, too", wait_s)
                    break
                sleep(0.05)
        yield


def _locked(stream: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("no locks in %s, so every process compiles for itself: %s", stream.name, error)
    return True


class Compiling:
    """A kernel that is compiled where it would be launched; `made`: the last, as Triton has it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.made = kernel, None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compiled(*args: Any, **constants: Any) -> None:
            self.made = self.kernel.run(*args, grid=grid, warmup=True, **constants)

        return compiled


def _compile(one: Variant, device: torch.device) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        try:
            one.launch(kernel=Compiling(one.kernel))
        except Exception as error:
            error.add_note(f"while Triton compiled {one.name}")
            raise

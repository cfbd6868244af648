"""Search a trace of torch's profiler for steps that make the host wait for the device.

A GPU is kept busy by a host that runs ahead of it; a host that waits (a value read by `.item()`, a
copy to or from pageable memory, an explicit synchronisation) lets it run dry. `find_host_syncs`
searches a Chrome trace, as `torch.profiler.profile.export_chrome_trace` writes it. Where the trace
has the calls of CUDA's runtime, these decide; a copy from pageable memory waits too, whatever its
name says, until CUDA has staged it. A trace without them, of a CPU, has the operators only: then
those are named that would wait if their tensors were on a GPU.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Calls of CUDA's runtime and driver that return when the device is done, or wait for it first.
WAITING_CALLS = frozenset(
    (
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
        *("cuStreamSynchronize", "cuCtxSynchronize"),
        *("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol", "cuMemcpyDtoH_v2", "cudaMemset"),
        *("cudaFree", "cudaFreeHost"),
    )
)

# Operators whose result, or its shape, the host must know.
WAITING_OPS = frozenset(
    ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::_unique2", "aten::masked_select")
)

RUNTIME = frozenset(("cuda_runtime", "cuda_driver"))
CALLERS = frozenset(("user_annotation", "cpu_op", "python_function"))


@dataclass(frozen=True, slots=True)
class HostSync:
    """A wait of `seconds` in the call or operator `what`; `where`: its callers, outermost first."""

    what: str
    where: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return f"{self.what} ({1e6 * self.seconds:.0f} us) in {' > '.join(self.where) or 'no operator'}"


def find_host_syncs(trace: Mapping[str, Any], within: str | None = None) -> list[HostSync]:
    """All waits of a trace in order; only those inside a `record_function` named `within`, if
    given. ValueError: that is nowhere in the trace.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") in RUNTIME for event in events)
    pageable = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") == "gpu_memcpy" and "Pageable" in event["name"]
    }
    if within is not None and not any(
        event["name"] == within and event.get("cat") == "user_annotation" for event in events
    ):
        raise ValueError(f"no record_function named {within!r} in the trace")
    waits = [
        (event["ts"], HostSync(event["name"], where, event["dur"] / 1e6))
        for event, where in _nested(events)
        if _waits(event, pageable, on_gpu=on_gpu) and (within is None or within in where)
    ]
    return [wait for _, wait in sorted(waits, key=lambda wait: wait[0])]


def read_trace(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _waits(event: Mapping[str, Any], pageable: set[Any], *, on_gpu: bool) -> bool:
    if not on_gpu:
        return event.get("cat") == "cpu_op" and event["name"] in WAITING_OPS
    called = event["name"] in WAITING_CALLS or event.get("args", {}).get("correlation") in pageable
    return event.get("cat") in RUNTIME and called


def _nested(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...]]]:
    """Every event of a host thread, and the names of those around it, outermost first."""
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in RUNTIME | CALLERS:
            threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        around: list[Mapping[str, Any]] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            yield event, tuple(outer["name"] for outer in around)
            if event.get("cat") in CALLERS:
                around.append(event)

"""Host synchronisations in a profiler's trace: planted ones are found, with what they were called
from, and nothing else is.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from megatron_balance.profiling.host_syncs import find_host_syncs, read_trace  # noqa: E402


def event(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def gpu_trace(*planted):
    """A step of two operators on the main thread, which launch kernels and copy to pinned memory,
    and what is planted.
    """
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            event("ProfilerStep#3", "user_annotation", 0, 1000),
            event("aten::mm", "cpu_op", 100, 50),
            event("cudaLaunchKernel", "cuda_runtime", 110, 10, correlation=1),
            event("gemm", "kernel", 400, 300, tid=7, correlation=1),
            event("aten::copy_", "cpu_op", 200, 50),
            event("cudaMemcpyAsync", "cuda_runtime", 210, 10, correlation=2),
            event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 700, 20, tid=7, correlation=2),
            event("cudaStreamWaitEvent", "cuda_runtime", 260, 5, correlation=3),
            event("cudaEventRecord", "cuda_runtime", 270, 5, correlation=4),
            *planted,
        ]
    }


def test_a_step_that_only_issues_has_none():
    assert find_host_syncs(gpu_trace()) == []


@pytest.mark.parametrize(
    "call", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"]
)
def test_a_call_that_waits_is_found_with_its_operators(call):
    outer, inner = event("aten::item", "cpu_op", 300, 400), event("aten::_local_scalar_dense", "cpu_op", 310, 380)
    (sync,) = find_host_syncs(gpu_trace(outer, inner, event(call, "cuda_runtime", 320, 350, correlation=9)))
    assert (sync.what, sync.where, sync.seconds) == (
        call,
        ("ProfilerStep#3", "aten::item", "aten::_local_scalar_dense"),
        350e-6,
    )
    assert str(sync) == f"{call} (350 us) in ProfilerStep#3 > aten::item > aten::_local_scalar_dense"


@pytest.mark.parametrize(
    ("way", "waits"),
    [("DtoH (Device -> Pageable)", 1), ("HtoD (Pageable -> Device)", 1), ("HtoD (Pinned -> Device)", 0)],
)
def test_a_copy_to_or_from_pageable_memory_waits_whatever_it_is_called(way, waits):
    copied = [
        event("cudaMemcpyAsync", "cuda_runtime", 320, 350, correlation=9),
        event(f"Memcpy {way}", "gpu_memcpy", 600, 60, tid=7, correlation=9),
    ]
    assert [sync.what for sync in find_host_syncs(gpu_trace(*copied))] == ["cudaMemcpyAsync"] * waits


def test_on_a_gpu_an_operator_on_cpu_tensors_does_not_wait():
    assert find_host_syncs(gpu_trace(event("aten::_local_scalar_dense", "cpu_op", 300, 10))) == []


def test_other_threads_and_what_lies_outside_are_told_apart():
    syncs = [
        event("cudaStreamSynchronize", "cuda_runtime", 320, 5, tid=2, correlation=8),
        event("cudaStreamSynchronize", "cuda_runtime", 1200, 5, correlation=9),
        event("cudaStreamSynchronize", "cuda_runtime", 900, 5, correlation=10),
    ]
    trace = gpu_trace(*syncs)
    assert [sync.where for sync in find_host_syncs(trace)] == [(), ("ProfilerStep#3",), ()]
    assert [sync.where for sync in find_host_syncs(trace, within="ProfilerStep#3")] == [("ProfilerStep#3",)]
    with pytest.raises(ValueError, match="no record_function named 'forward'"):
        find_host_syncs(trace, within="forward")


def traced(tmp_path, step):
    x = torch.randn(8, 8)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
        step(x)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    return find_host_syncs(read_trace(tmp_path / "trace.json"), within="step")


PLANTED = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x + 1),
}


@pytest.mark.parametrize("step", PLANTED.values(), ids=PLANTED)
def test_planted_ones_are_found_in_a_trace_of_this_torch(tmp_path, step):
    syncs = traced(tmp_path, lambda x: (x @ x, step(x), x @ x))
    assert len(syncs) == 1
    assert syncs[0].where[0] == "step"


def test_arithmetic_indexing_and_copies_by_shape_are_none(tmp_path):
    index = torch.arange(4)

    def step(x):
        out = torch.zeros(8, 8).index_add_(0, index, (x @ x)[index])
        return torch.where(x > 0, out, x).clone()

    assert traced(tmp_path, step) == []

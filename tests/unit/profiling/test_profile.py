"""`megatron-balance profile` on this machine's CPU: a table that loads, prices and plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.table import load_table
from megatron_balance.profiling.cost_table import exchanged
from megatron_balance.profiling.host_syncs import find_host_syncs, read_trace
from megatron_balance.runtime.cuda import StreamMessage
from megatron_balance.runtime.groups import Groups
from tests.support.cli import CommandLine

pytest.importorskip("torch")

TINY = (
    "profile --device cpu --repeats 2 --q-tokens 16,64 --k-tokens 16,128 --before-tokens 0,128 "
    "--layer-tokens 16,256 --pack-bytes 4096,262144"
)


def test_a_profile_is_a_table_that_prices_and_names_its_machine(tmp_path: Path, run: CommandLine) -> None:
    path = tmp_path / "table.json"
    printed, table = run.json(f"{TINY} --json --out", path), load_table(path)
    assert printed["attention"]["q_tokens"] == [16, 64]
    assert (table.source.kind, table.source.repeats, table.links) == ("cpu", 2, ())
    assert table.source.device
    assert (table.attention.kernel, table.attention.dtype) == ("cpu_flash", "float32")
    assert (table.attention.num_heads, table.attention.num_kv_heads, table.attention.head_dim) == (8, 2, 16)
    cost = MeasuredCost(table, load_cluster("emulated").build(), load_model("gpt-tiny"))
    pairs = np.array([[0, 0, 4096, 0, 8, 0, 4096, 0, 2]])
    forward, backward = (cost.attend_s(pairs, np.zeros(1, dtype=np.int64), 1, backward=b)[0] for b in (False, True))
    # 67 million pairs x 512 FLOPs: from a shared core's 0.3 GFLOP/s to a fast machine's 10 TFLOP/s.
    assert 3e-4 < forward < 100
    assert backward > 0
    assert cost.layer_s(100) > 0


def test_the_report_says_what_was_measured(run: CommandLine) -> None:
    lines = run.printed(TINY).splitlines()
    assert lines[0].endswith("of 2 samples")
    assert any(line.startswith("attention kernel cpu_flash, float32, 8 heads") for line in lines)
    assert any(line.startswith("gamma, attention's share of FLOPs to time (KnapFormer, Eq. 2): ") for line in lines)
    assert lines[-1] == "not written; --out FILE keeps it"


def test_links_are_measured_between_two_processes(run: CommandLine) -> None:
    (link,) = run.json(f"{TINY} --json --links --message-bytes 1024,4194304")["links"]
    assert (link["name"], link["backend"], link["sizes"]) == ("intra_node", "gloo", [1024, 4194304])
    assert all(0 < seconds < 10 for seconds in link["seconds"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--q-tokens", "64,16"], "--q-tokens 64,16: expected at least 2 sizes from 1 on, in rising order"),
        (["--k-tokens", "0,16"], "--k-tokens 0,16: expected at least 2 sizes from 1 on"),
        (["--before-tokens", "8"], "--before-tokens 8: expected at least 2 sizes from 0 on"),
        (["--pack-bytes", "a,b"], "--pack-bytes a,b: expected whole numbers such as 128,512"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--ranks-per-node", "2"], "--ranks-per-node goes with --links, which is not given"),
        (["--out", "/none/such/t.json"], "--out /none/such/t.json: no folder /none/such"),
        (["--model", "llama-8b"], "no model named 'llama-8b', did you mean 'llama3-8b'?"),
        (["--kernel", "flash"], "unknown kernel 'flash'"),
        (["--kernel", "flash_attn"], "kernel flash_attn does not serve cpu tensors"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(options: list[str], sentence: str, run: CommandLine) -> None:
    assert sentence in run.error(TINY, *options)


def test_cuda_is_refused_where_there_is_none(run: CommandLine) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "torch finds no CUDA device here" in run.error("profile --device cuda")


# Links are measured as training uses them: its communicators, both directions in one group call.

torch = pytest.importorskip("torch")


@dataclass
class Written:
    """Streams, and a stream, that write down what they are told."""

    log: list[tuple[Any, ...]] = field(default_factory=list)

    def of(self, name: str) -> Written:
        self.log.append(("of", name))
        return self

    def now(self) -> str:
        return "now"

    def record(self) -> str:
        return "done"

    def wait(self, event: str) -> None:
        self.log.append(("wait", event))

    def empty(self, num_bytes: int) -> Any:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def batch(self, transfers: list[StreamMessage]) -> None:
        self.log.append(("batch", *((t.src, t.dst, t.sends, t.peer, t.tensor.nbytes) for t in transfers)))


def measured(rank: int) -> tuple[list[float], Written]:
    written, taken = Written(), iter((5.0, 1.0, 3.0, 8.0, 9.0, 7.0))

    def sample(call: Callable[[], object]) -> float:
        call()
        return next(taken)

    groups = Groups(rank, 4, (0, 1, 2, 3), None, streams=cast("Any", written))
    return exchanged((0, 2), "inter_node", (16, 64), 3, groups, sample), written


@pytest.mark.parametrize(("rank", "peer"), [(0, 2), (2, 0)])
def test_both_directions_go_in_one_call_on_the_streams_communicator(rank: int, peer: int) -> None:
    seconds, written = measured(rank)
    assert seconds == [3.0, 8.0]
    assert written.log[0] == ("of", "inter_node")
    batches = [entry for entry in written.log if entry[0] == "batch"]
    assert len(batches) == 2 * (1 + 3)  # one to warm up
    for at, size in ((0, 16), (4, 64)):
        assert batches[at] == ("batch", (0, 2, rank == 0, peer, size), (2, 0, rank == 2, peer, size))


def test_ranks_outside_the_pair_take_no_part() -> None:
    seconds, written = measured(1)
    assert seconds == []
    assert written.log == []


# Host synchronisations in a profiler's trace: planted ones are found, with what they were called
# from, and nothing else is.


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

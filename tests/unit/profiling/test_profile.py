"""`megatron-balance profile` on this machine's CPU: a table that loads, prices and plans."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.table import load_table
from megatron_balance.profiling.cost_table import exchanged
from megatron_balance.profiling.host_syncs import find_host_syncs, read_trace
from megatron_balance.runtime.groups import Groups
from tests.support.cli import CommandLine

torch = pytest.importorskip("torch")

TINY = (
    "profile --device cpu --repeats 2 --q-tokens 16,64 --k-tokens 16,128 --before-tokens 0,128 "
    "--layer-tokens 16,256 --pack-bytes 4096,262144"
)


def test_a_profile_is_a_table_that_prices_and_says_what_was_measured(tmp_path: Path, run: CommandLine) -> None:
    # A profile is a table that prices and names its machine.
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
    # The report says what was measured.
    lines = run.printed(TINY).splitlines()
    assert lines[0].endswith("of 2 samples")
    assert any(line.startswith("attention kernel cpu_flash, float32, 8 heads") for line in lines)
    assert any(line.startswith("gamma, attention's share of FLOPs to time (KnapFormer, Eq. 2): ") for line in lines)
    assert lines[-1] == "not written; --out FILE keeps it"
    # Links are measured between two processes.
    (link,) = run.json(f"{TINY} --json --links --message-bytes 1024,4194304")["links"]
    assert (link["name"], link["backend"], link["sizes"]) == ("intra_node", "gloo", [1024, 4194304])
    assert all(0 < seconds < 10 for seconds in link["seconds"])


def test_a_users_mistake_is_one_line_and_exit_code_2(run: CommandLine) -> None:
    for options, sentence in (
        ("--q-tokens 64,16", "--q-tokens 64,16: expected at least 2 sizes from 1 on, in rising order"),
        ("--k-tokens 0,16", "--k-tokens 0,16: expected at least 2 sizes from 1 on"),
        ("--before-tokens 8", "--before-tokens 8: expected at least 2 sizes from 0 on"),
        ("--pack-bytes a,b", "--pack-bytes a,b: expected whole numbers such as 128,512"),
        ("--repeats 0", "--repeats 0: must be at least 1"),
        ("--ranks-per-node 2", "--ranks-per-node goes with --links, which is not given"),
        ("--message-bytes 1024,4096", "--message-bytes goes with --links, which is not given"),
        ("--out /none/such/t.json", "--out /none/such/t.json: no folder /none/such"),
        ("--model llama-8b", "no model named 'llama-8b', did you mean 'llama3-8b'?"),
        ("--kernel flash", "unknown kernel 'flash'"),
        ("--kernel flash_attn", "kernel flash_attn does not serve cpu tensors"),
        ("--device tpu", "--device"),
    ):
        assert sentence in run.error(f"{TINY} {options}")
    if not torch.cuda.is_available():
        assert "torch finds no CUDA device here" in run.error("profile --device cuda")


# Links are measured as training uses them: its communicators, both directions in one group call.


def measured(rank: int) -> tuple[list[float], list[Any], list[Any]]:
    """Seconds of a rank of the pair (0, 2) or of another; streams that it asked for; its batches."""
    streams, taken = Mock(empty=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)), iter((5, 1, 3, 8, 9, 7))
    streams.of.return_value = streams

    def sample(call: Callable[[], object]) -> float:
        call()
        return next(taken)

    groups = Groups(rank, 4, (0, 1, 2, 3), None, streams=streams)
    seconds = exchanged((0, 2), "inter_node", (16, 64), 3, groups, sample)
    batches = [call.args[0] for call in streams.batch.call_args_list]
    shown = [[(t.src, t.dst, t.sends, t.peer, t.tensor.nbytes) for t in batch] for batch in batches]
    return seconds, [call.args[0] for call in streams.of.call_args_list], shown


def test_both_directions_go_in_one_call_on_the_streams_communicator() -> None:
    for rank, peer in ((0, 2), (2, 0)):
        seconds, names, batches = measured(rank)
        assert seconds == [3.0, 8.0]
        assert set(names) == {"inter_node"}
        assert len(batches) == 2 * (1 + 3)  # one to warm up
        for at, size in ((0, 16), (4, 64)):
            assert batches[at] == [(0, 2, rank == 0, peer, size), (2, 0, rank == 2, peer, size)]
    assert measured(1) == ([], [], []), "ranks outside the pair take no part"


# Host synchronisations in a profiler's trace: planted ones are found, with what they were called
# from, and nothing else is.


def event(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def gpu_trace(*planted):
    # A step of two operators on the main thread, which launch kernels and copy to pinned memory, and
    # what is planted.
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


def test_a_call_that_waits_is_found_with_its_operators():
    # A call that waits is found with its operators.
    assert find_host_syncs(gpu_trace()) == [], "a step that only issues"
    on_cpu = event("aten::_local_scalar_dense", "cpu_op", 300, 10)
    assert find_host_syncs(gpu_trace(on_cpu)) == [], "on a GPU an operator on CPU tensors does not wait"
    operators = event("aten::item", "cpu_op", 300, 400), event("aten::_local_scalar_dense", "cpu_op", 310, 380)
    where = ("ProfilerStep#3", "aten::item", "aten::_local_scalar_dense")
    for call in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"):
        trace = gpu_trace(*operators, event(call, "cuda_runtime", 320, 350, correlation=9))
        (sync,) = find_host_syncs(trace)
        assert (sync.what, sync.where, sync.seconds) == (call, where, 350e-6)
        assert str(sync) == f"{call} (350 us) in {' > '.join(where)}"
    # A copy to or from pageable memory waits whatever it is called.
    ways = {"DtoH (Device -> Pageable)": 1, "HtoD (Pageable -> Device)": 1, "HtoD (Pinned -> Device)": 0}
    for way, waits in ways.items():
        called = event("cudaMemcpyAsync", "cuda_runtime", 320, 350, correlation=9)
        copied = event(f"Memcpy {way}", "gpu_memcpy", 600, 60, tid=7, correlation=9)
        assert [sync.what for sync in find_host_syncs(gpu_trace(called, copied))] == ["cudaMemcpyAsync"] * waits
    # Other threads and what lies outside are told apart.
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


def test_planted_ones_are_found_in_a_trace_of_this_torch_and_nothing_else(tmp_path):
    for name, step in PLANTED.items():
        (sync,) = traced(tmp_path, lambda x, step=step: (x @ x, step(x), x @ x))
        assert sync.where[0] == "step", name
    index = torch.arange(4)

    def shapes(x):
        out = torch.zeros(8, 8).index_add_(0, index, (x @ x)[index])
        return torch.where(x > 0, out, x).clone()

    assert traced(tmp_path, shapes) == []

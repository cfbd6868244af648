"""`megatron-balance profile` on this machine's CPU: a table that loads, prices and plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.table import load_table
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

"""Seconds, of CPU too, and memory of opening a large corpus: sorting it once, and on the order that
was kept.

python -m tools.bench.corpus_start [--documents 20m] [--seq-length 8192]

Writes an index of that many documents (their `.bin` is a hole) into a temporary folder, and opens it
in fresh processes: one that sorts, then one that maps. Private: memory that a rank has for itself
beside the maps, at the end. The page cache holds the maps once a node.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_balance.cli.inputs import tokens
from megatron_balance.workloads.idx import CODES, HEADER, MAGIC, VERSION


def write_corpus(prefix: Path, documents: int) -> None:
    """Write an index of so many documents of 20 to 2,000 tokens of int32, and a hole of their size."""
    lengths = np.random.default_rng(1).integers(20, 2001, documents).astype("<i4")
    pointers = 4 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, CODES["int32"], documents, documents + 1))
        for column in (lengths, pointers, np.arange(documents + 1, dtype="<i8")):
            column.tofile(stream)
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(int(pointers[-1]) + 4 * int(lengths[-1]))


def private_mb() -> float:
    """Anonymous memory of this process, in MB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) / 1e3


def open_it(prefix: str, seq_length: int, filling: str) -> None:
    """Open the corpus as a rank does, read 100 samples, and print what it took."""
    from megatron_balance.megatron.data import build_datasets

    args: Any = SimpleNamespace(
        data_path=[prefix],
        split="100,0,0",
        seq_length=seq_length,
        seed=1234,
        dataloader_type="single",
        eval_iters=0,
        data_cache_path=None,
        **dict.fromkeys(
            ("data_args_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
        ),
    )
    before, begin, cpu = private_mb(), time.perf_counter(), time.process_time()
    train, _, _ = build_datasets(args, (1 << 30, 0, 0), "split", "best_fit" if filling == "best_fit" else "next_fit")
    assert train is not None
    train.fingerprint()
    first = train[0]["tokens"].shape
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    lengths = [train.sample_lengths(index) for index in range(0, 1000, 10)]
    assert first == (seq_length,)
    assert all(lengths)
    print(json.dumps({"seconds": seconds, "cpu_s": cpu, "private_mb": private_mb() - before}))


def main() -> None:
    """Print a line for the first process and one for those that follow, by filling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=tokens, default=20_000_000)
    parser.add_argument("--seq-length", type=tokens, default=8192)
    parser.add_argument("--open", nargs=2, metavar=("PREFIX", "FILLING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        open_it(args.open[0], args.seq_length, args.open[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        write_corpus(prefix, args.documents)
        print(f"{args.documents:,} documents, samples of {args.seq_length:,} tokens")
        for filling in ("next_fit", "best_fit"):
            for which in ("sorted", "mapped", "mapped again"):
                words = ["--seq-length", str(args.seq_length), "--open", str(prefix), filling]
                command = [sys.executable, "-W", "ignore", "-m", "tools.bench.corpus_start", *words]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found = json.loads(told.splitlines()[-1])
                times = f"{found['seconds']:.2f} s, {found['cpu_s']:.2f} s of CPU"
                print(f"{filling}, {which}: {times}, {found['private_mb']:.0f} MB private", flush=True)


if __name__ == "__main__":
    main()

"""Damaged files for every loader: bits changed, cut short, grown, joined to themselves. Each is read,
or refused in one sentence, in little time and memory.
"""

import argparse
import gzip
import io
import json
import logging
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance import config
from megatron_balance.analysis.trace_format import Trace, TrackSpan, file_name
from megatron_balance.cli import trace, verify
from megatron_balance.cost.table import load_table, save_table
from megatron_balance.errors import BalanceError
from megatron_balance.ir.step import Carry
from megatron_balance.lab.report.run import read as read_steps
from megatron_balance.planning.choice import load_config
from megatron_balance.planning.step_planner import StepPlanner
from megatron_balance.training.ledger import DataIdentity, HeldDocument, Ledger
from megatron_balance.workloads import documents
from megatron_balance.workloads.documents import OrderCache
from megatron_balance.workloads.idx import CorpusWriter, read_index
from megatron_balance.workloads.lengths import document_lengths, read_lengths
from tests.support import cost_table
from tools.faults.cases import Outcome, SlowError, within
from tools.faults.plans import drawn

LIMIT_S, LIMIT_BYTES = 2.0, 200 << 20
FIRST_LOADERS = 120_000
"""Cases of the loaders that were there first; behind them come those of `_later_loaders`."""
PLAN = 15
"""The case of `plans` whose plan is damaged."""
CONFIGS = Path(config.__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Loader:
    """A whole file, and what reads it."""

    name: str
    whole: bytes
    suffix: str
    read: Callable[[Path], Any]


@contextmanager
def files() -> Iterator[Callable[[int], Outcome]]:
    """Damage file after file, of each loader in turn."""
    with tempfile.TemporaryDirectory(prefix="damaged-") as name:
        folder = Path(name)
        loaders, later = [*_loaders(folder)], [*_later_loaders(folder)]
        for each in (*loaders, *later):
            path = folder / f"whole{each.suffix}"
            path.write_bytes(each.whole)
            each.read(path)

        def one(number: int) -> Outcome:
            of = loaders if number < FIRST_LOADERS else later
            return try_file(of[number % len(of)], number, folder)

        yield one


def try_file(loader: Loader, number: int, folder: Path) -> Outcome:
    """Read a damaged file."""
    path = folder / f"damaged{loader.suffix}"
    path.write_bytes(damaged(loader.whole, random.Random(f"files {number}")))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with within(LIMIT_S):
            loader.read(path)
        kind, fault = "read", ""
    except BalanceError as error:
        said = str(error)
        kind, fault = "refused", "" if said and "\n" not in said and len(said) < 1000 else f"says {said!r}"
    except SlowError as error:
        kind, fault = "slow", str(error)
    except Exception as error:  # a traceback for the user
        kind, fault = "raises", f"{type(error).__name__}: {error}"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > LIMIT_BYTES and not fault:
        kind, fault = "large", f"took {grown >> 20} MB more"
    return Outcome(f"{loader.name}: {kind}", fault)


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """The bytes with a few bits changed, or cut, or grown, or with a number that is out of range."""
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        how = draw.choice(("bit", "bit", "bit", "byte", "cut", "grow", "again", "number"))
        at = draw.randrange(len(data) + 1) if data else 0
        if how == "bit" and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif how == "byte" and at < len(data):
            data[at] = draw.randrange(256)
        elif how == "cut":
            del data[at : at + draw.choice((1, 2, 16, len(data)))]
        elif how == "grow":
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 2, 16))))
        elif how == "again":
            data[at:at] = data[at : at + draw.randrange(1, 200)]
        else:
            digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
            if digits:
                i = draw.choice(digits)
                data[i : i + 1] = draw.choice((b"-1", b"0", b"1e99", b"9" * 25, b"NaN", b"null", b'"x"', b"[]", b"{}"))
    return bytes(data)


def _loaders(folder: Path) -> Iterator[Loader]:
    def read(name: str) -> bytes:
        return (CONFIGS / name).read_bytes()

    yield Loader("cluster", read("cluster/h200.yaml"), ".yaml", lambda path: config.load_cluster(str(path)).build())
    yield Loader("model", read("model/llama-7b.yaml"), ".yaml", lambda path: config.load_model(str(path)))
    yield Loader("scheme", read("scheme/a800-32b.yaml"), ".yaml", lambda path: config.load_scheme_table(str(path)))
    yield Loader("configuration", read("experiment/gpt-tiny-zeppelin.yaml"), ".yaml", load_config)
    save_table(cost_table.made(), folder / "costs.json")
    yield Loader("costs", (folder / "costs.json").read_bytes(), ".json", load_table)
    yield Loader("lengths", json.dumps([[4096, 17, 200], [1]]).encode(), ".json", read_lengths)
    lines = "".join(f'{{"length": {n}, "text": "some words"}}\n' for n in (5, 400, 12))
    yield Loader("documents", lines.encode(), ".jsonl", lambda path: document_lengths(f"{path}#length"))
    spec, ((lengths, *_), *_) = drawn(PLAN)
    verify.write(folder / "plans.json", StepPlanner(spec).plan([lengths])[0].plans, "replay")
    yield Loader("plan file", (folder / "plans.json").read_bytes(), ".json", verify.read)
    carry = Carry.of("wlb_llm", {"remained": []}, ((-1, 5),))
    data = DataIdentity.of_script({"--seed": "1", "corpus 1": "9 bytes"}, {"corpus 1": "here"}, {0: "ab", 1: "cd"})
    ledger = Ledger(carry, (HeldDocument(-1, 0, 1, 5),), drawn=5).to_json(data)
    yield Loader("ledger", ledger.encode(), ".json", lambda path: Ledger.from_json(path.read_text(errors="replace")))
    with CorpusWriter(folder / "corpus", "uint16") as writer:
        for length in (5, 60, 1):
            writer.add_document(np.arange(length))
    (folder / "damaged.bin").write_bytes((folder / "corpus.bin").read_bytes())
    (folder / "whole.bin").write_bytes((folder / "corpus.bin").read_bytes())
    yield Loader(
        "corpus index", (folder / "corpus.idx").read_bytes(), ".idx", lambda path: read_index(path.with_suffix(""))
    )
    record = {"step": 1, "loss": 6.0, "planner": "zeppelin", "num_tokens": 4000, "plan_ms": 1.5, "step_ms": 900.0}
    record["imbalance_after"] = {"tokens": 1.0, "attention": 1.02}
    steps = "".join(json.dumps({**record, "step": at}) + "\n" for at in range(1, 6))
    yield Loader("steps", steps.encode(), ".jsonl", read_steps)


def _later_loaders(folder: Path) -> Iterator[Loader]:
    described = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    described |= {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 14336}
    described |= {"num_hidden_layers": 32, "vocab_size": 128256, "sliding_window": None}
    yield Loader("config.json", json.dumps(described).encode(), ".json", lambda path: config.load_model(str(path)))
    table = b"batch,length,text\n" + b"".join(b"%d,%d,words\n" % (at // 3, 100 + at) for at in range(9))
    yield Loader("lengths in a table", table, ".csv", read_lengths)
    yield Loader("lengths, compressed", gzip.compress(b"4096 17 200\n128k\n", mtime=0), ".txt.gz", read_lengths)
    spans = [
        TrackSpan(
            0, "inter_node", "direct", 1.0 + at, 1.5 + at, "forward", 0, 2, exchange=at, sent={1: 64}, received={1: 64}
        )
        for at in (0, 1)
    ]
    traced = Trace(spans, {0: "rank 0, node 0"}, {"kind": "measured", "step": 12, "rank": 0, "world_size": 1})
    (folder / "traces").mkdir()

    def join(path: Path) -> None:
        shutil.copy(path, folder / "traces" / file_name(12, 0))
        with redirect_stdout(io.StringIO()):
            trace.run(argparse.Namespace(folder=folder, step=None, out=Path(os.devnull)))

    yield Loader("trace", json.dumps(traced.document()).encode(), ".json", join)
    said, order = logging.getLogger(documents.__name__), np.arange(100)
    cache = OrderCache(folder, "order")
    cache.get("documents", lambda: order)

    def ordered(path: Path) -> None:
        (folder / "order.documents.npy").write_bytes(path.read_bytes())
        said.setLevel(logging.ERROR)  # it says of each that it computes it again
        try:
            found = cache.get("documents", lambda: order)
        finally:
            said.setLevel(logging.NOTSET)
        if not np.array_equal(found, order):
            raise ValueError("another order than the one that was written")

    yield Loader("order", (folder / "order.documents.npy").read_bytes(), ".npy", ordered)

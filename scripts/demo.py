"""The demo behind scripts/demo.sh: one corpus, one small GPT, several planners, one table."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "demo"
RANKS = 8
CONTEXT = 16384

# A GPT with everything that matters to us: grouped-query attention, rotary positions, a gated MLP.
MODEL = """
    --transformer-impl local --num-layers 2 --hidden-size 128 --num-attention-heads 8 --group-query-attention --num-query-groups 2
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --no-rope-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
"""
TRAINING = """
    --micro-batch-size 1 --global-batch-size 1 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.01
    --calculate-per-token-loss --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 1234 --distributed-backend gloo
    --tokenizer-type NullTokenizer --vocab-size 257 --split 100,0,0
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every run finished and their losses agree."""
    options = _options(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` below ends the ranks
    console = Console(width=max(120, Console().width))
    corpus = _corpus(options.out)
    started = time.monotonic()
    runs = {planner: _train(planner, corpus, options) for planner in options.planners}
    console.print(_table(runs))
    console.print(
        f"{RANKS} ranks share this machine's cores, so a step takes the sum of all ranks' work and its time does not show balance; "
        "on a cluster the slowest rank sets it."
    )
    agree = _agreement(runs)
    console.print(
        f"Largest relative difference of a step's loss between the runs: {agree:.1e}. Training took {time.monotonic() - started:.0f} s."
    )
    console.print(
        f"Every step is in {options.out.relative_to(ROOT) if options.out.is_relative_to(ROOT) else options.out}/<planner>/steps.jsonl."
    )
    if agree > 1e-4:
        print("error: the runs do not agree; balancing must not change the loss", file=sys.stderr)
        return 1
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="training steps of each run (default 40)")
    parser.add_argument("--planners", type=lambda s: s.split(","), default=["te_ring", "zeppelin"], help="comma-separated planners")
    parser.add_argument("--out", type=Path, default=OUT, help="where corpus, logs and steps.jsonl go")
    return parser.parse_args(argv)


def _corpus(out: Path) -> Path:
    """A corpus of this Python's own sources up to 16 KiB, byte by byte; built once."""
    prefix = out / "corpus" / "stdlib-16k"
    print(f"Corpus: the Python standard library's sources up to {CONTEXT // 1024} KiB, byte-level tokens", flush=True)
    command = ["corpus", "build", str(prefix), "--stdlib", "--max-bytes", str(CONTEXT)]
    subprocess.run([sys.executable, "-m", "megatron_balance", *command], cwd=ROOT, check=True)
    return prefix


def _train(planner: str, corpus: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Pretrain under `planner`; the records of steps.jsonl."""
    folder = options.out / planner
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", str(_free_port())),
        *("-m", "megatron_balance.pretrain_gpt", "--balance-config", str(ROOT / "configs" / "experiment" / f"gpt-tiny-{planner}.yaml")),
        *("--balance-device", "cpu", "--balance-log", str(folder), "--data-path", str(corpus)),
        *("--seq-length", str(CONTEXT), "--max-position-embeddings", str(CONTEXT), "--context-parallel-size", str(RANKS)),
        *("--train-iters", str(options.steps), *MODEL.split(), *TRAINING.split()),
    ]
    log = folder / "train.log"
    print(f"\n{planner}: {options.steps} steps of megatron.training.pretrain on {RANKS} ranks (log: {log})", flush=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _watch(process, folder / "steps.jsonl", options.steps)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait(timeout=30)
    records = _records(folder / "steps.jsonl")
    if process.returncode or len(records) != options.steps:
        lines = log.read_text(errors="replace").splitlines()
        shown = [line for line in lines if "rror" in line and "<N/A>" not in line][:5] or lines[-20:]
        print(
            "\n".join([*shown, ""])
            + f"error: training under {planner} stopped after {len(records)} of {options.steps} steps; its log is {log}",
            file=sys.stderr,
        )
        raise SystemExit(1)
    return records


def _watch(process: subprocess.Popen[bytes], steps: Path, total: int) -> None:
    """A progress bar over steps.jsonl until the process ends."""
    with tqdm(total=total, unit="step", file=sys.stderr, desc=" starting", dynamic_ncols=True) as bar:
        while process.poll() is None:
            time.sleep(0.5)
            records = _records(steps)
            if len(records) > bar.n:
                bar.set_description(f" loss {records[-1]['loss']:.3f}")
                bar.update(len(records) - bar.n)
        bar.update(len(_records(steps)) - bar.n)


def _records(steps: Path) -> list[dict[str, Any]]:
    if not steps.exists():
        return []
    return [json.loads(line) for line in steps.read_text().splitlines() if line.endswith("}")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _agreement(runs: dict[str, list[dict[str, Any]]]) -> float:
    first = next(iter(runs.values()))
    return max(abs(a["loss"] - b["loss"]) / a["loss"] for other in runs.values() for a, b in zip(first, other, strict=True))


def _table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    num_steps = len(next(iter(runs.values())))
    table = Table(
        title=f"{num_steps} steps on {RANKS} ranks as 2 nodes x 4: means over steps, measured in the runs above", title_justify="left"
    )
    table.add_column("", justify="left")
    for planner in runs:
        table.add_column(planner, justify="right")

    def row(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *cells)

    def mean(records: list[dict[str, Any]], *path: str) -> float:
        values = []
        for record in records:
            value: Any = record
            for key in path:
                value = value[key]
            values.append(float(value))
        return statistics.fmean(values)

    each = list(runs.values())
    row("loss, first -> last step", [f"{r[0]['loss']:.4f} -> {r[-1]['loss']:.4f}" for r in each])
    row("tokens, max/mean over ranks", [f"{mean(r, 'imbalance_after', 'tokens'):.3f}" for r in each])
    row("attention, max/mean over ranks", [f"{mean(r, 'imbalance_after', 'attention'):.3f}" for r in each])
    row("KV tokens received per rank, a layer", [f"{mean(r, 'kv_tokens_received'):,.0f}" for r in each])
    row("  of them from the other node", [f"{mean(r, 'kv_tokens_received_inter_node'):,.0f}" for r in each])
    row("attention kernel calls per rank, a step", [f"{mean(r, 'kernel_calls'):.1f}" for r in each])
    row("plan ms (waited for ms)", [f"{mean(r, 'plan_ms'):.2f} ({mean(r, 'plan_wait_ms'):.2f})" for r in each])
    row("step ms, median", [f"{statistics.median(x['step_ms'] for x in r):,.0f}" for r in each])
    return table


if __name__ == "__main__":
    sys.exit(main())

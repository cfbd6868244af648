"""The demo behind scripts/demo.sh: one corpus, one small GPT, several planners, a table and a page."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "demo"
RANKS = 8
RANKS_PER_NODE = 4
CONTEXT = 16384
LONGEST = 8192
"""Bytes of the corpus's longest document: several to a batch, of very different lengths."""
INTRA_NODE_SPEEDUP = 8
"""Links inside a node over a NIC, about as NVSwitch is to one NIC."""

# A GPT with everything that matters to us: grouped-query attention, rotary positions, a gated MLP.
MODEL = """
    --transformer-impl local --num-layers 2 --hidden-size 128 --num-attention-heads 8 --group-query-attention
    --num-query-groups 2
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --no-rope-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
"""
TRAINING = """
    --micro-batch-size 1 --global-batch-size 1 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine
    --weight-decay 0.01
    --calculate-per-token-loss --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 1234
    --distributed-backend gloo
    --tokenizer-type NullTokenizer --vocab-size 257 --split 100,0,0
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every run finished and their losses agree."""
    options = _options(argv)
    # so that `finally` below ends the ranks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(width=max(120, Console().width))
    corpus = _corpus(options.out)
    options.emulated = _emulated(options)
    started = time.monotonic()
    runs = {planner: _train(planner, corpus, options) for planner in options.planners}
    console.print(
        _table(runs, {planner: _nic_megabytes(options, planner) for planner in runs} if options.emulated else {})
    )
    if options.emulated:
        console.print(
            f"Two nodes of {RANKS_PER_NODE} ranks, each rank with a NIC of {options.nic_mbit:g} Mbit/s and a link "
            f"{INTRA_NODE_SPEEDUP} "
            "times as fast inside its node: the transfers are real. All ranks share this machine's cores, so "
            "arithmetic takes the sum of "
            "their work, and its balance does not show in the step's time; on a cluster the slowest rank sets it."
        )
    else:
        console.print(
            f"{RANKS} ranks share this machine's cores, so a step takes the sum of all ranks' work and its time does "
            "not show balance; "
            "on a cluster the slowest rank sets it."
        )
    agree = _agreement(runs)
    console.print(
        f"Largest relative difference of a step's loss between the runs: {agree:.1e}. Training took "
        f"{time.monotonic() - started:.0f} s."
    )
    console.print(
        "Every step is in "
        f"{options.out.relative_to(ROOT) if options.out.is_relative_to(ROOT) else options.out}/<planner>/steps.jsonl."
    )
    page = write_page(options.out, tuple(runs))
    print(f"The same as a page, with both runs side by side, is {page}. To open it:\n")
    print(f"    {sys.executable} -m webbrowser {page.as_uri()}\n", flush=True)
    if agree > 1e-4:
        print("error: the runs do not agree; balancing must not change the loss", file=sys.stderr)
        return 1
    return 0


def write_page(folder: Path, planners: Sequence[str]) -> Path:
    """The report of the runs below `folder`, of the first and the last planner: a page holds two."""
    page = folder.resolve() / "report.html"
    shown = dict.fromkeys((planners[0], planners[-1]))
    steps = [word for planner in shown for word in ("--steps", str(folder.resolve() / planner))]
    command = [sys.executable, "-m", "megatron_balance", "report", *steps, "--out", str(page)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return page


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="training steps of each run (default 24)")
    parser.add_argument(
        "--nic-mbit", type=float, default=25.0, help="rate of each rank's emulated NIC (default 25 Mbit/s)"
    )
    parser.add_argument(
        "--no-emulated", action="store_true", help="plain processes on this machine, without emulated NICs"
    )
    parser.add_argument(
        "--planners", type=lambda s: s.split(","), default=["te_ring", "zeppelin"], help="comma-separated planners"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where corpus, logs and steps.jsonl go")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps: {options.steps} is less than one step")
    return options


def _corpus(out: Path) -> Path:
    """A corpus of this Python's own sources, byte by byte; built once."""
    prefix = out / "corpus" / f"stdlib-{LONGEST // 1024}k"
    print(f"Corpus: the Python standard library's sources up to {LONGEST // 1024} KiB, byte-level tokens", flush=True)
    command = ["corpus", "build", str(prefix), "--stdlib", "--max-bytes", str(LONGEST)]
    subprocess.run([sys.executable, "-m", "megatron_balance", *command], cwd=ROOT, check=True)
    return prefix


def _emulated(options: argparse.Namespace) -> bool:
    """Whether the runs are made on the emulated cluster; says why not."""
    if options.no_emulated:
        return False
    checked = subprocess.run(
        [sys.executable, "-m", "tools.emulated_cluster", "check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if checked.returncode:
        said = (checked.stdout + checked.stderr).strip()
        print(
            f"No emulated cluster here ({said}); the ranks run as plain processes, without NICs of their own.",
            flush=True,
        )
        return False
    return True


def _launcher(planner: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command in front of `-m megatron_balance.pretrain_gpt`, and its `--balance-config`."""
    module = ["-m", "megatron_balance.pretrain_gpt", "--balance-config"]
    if not options.emulated:
        # 127.0.0.1: the machine's own name need not resolve
        here = ["--standalone", "--local-addr", "127.0.0.1"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node", str(RANKS)]
        return [*torchrun, *module, str(ROOT / "configs" / "experiment" / f"gpt-tiny-{planner}.yaml")]
    nic = options.nic_mbit * 1e6 / 8
    config = folder / "balance.yaml"
    config.write_text(
        f"planner: {planner}\nmodel: gpt-tiny\nagreement_every: 10\n"
        f"cluster: {{base: emulated, nic_bytes_per_s: {nic:.6e}, intra_bytes_per_s: {INTRA_NODE_SPEEDUP * nic:.6e}}}\n"
    )
    rates = ["--nic-mbit", str(options.nic_mbit), "--intra-mbit", str(INTRA_NODE_SPEEDUP * options.nic_mbit)]
    counted = ["--json", str(folder / "nics.json"), "--logs", str(folder / "ranks")]
    shape = ["--nodes", str(RANKS // RANKS_PER_NODE), "--ranks-per-node", str(RANKS_PER_NODE)]
    return [sys.executable, "-m", "tools.emulated_cluster", "run", *shape, *rates, *counted, "--", *module, str(config)]


def _nic_megabytes(options: argparse.Namespace, planner: str) -> list[float]:
    """MB that each NIC sent in a step, by the kernel's counters; setting up the job is in it."""
    nics = json.loads((options.out / planner / "nics.json").read_text())["nics"]
    return [nic["sent"] / 1e6 / options.steps for nic in nics]


def _train(planner: str, corpus: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Pretrain under `planner`; the records of steps.jsonl."""
    folder = options.out / planner
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *_launcher(planner, folder, options),
        *("--balance-device", "cpu", "--balance-log", str(folder), "--data-path", str(corpus)),
        *("--seq-length", str(CONTEXT), "--max-position-embeddings", str(CONTEXT)),
        *("--context-parallel-size", str(RANKS)),
        # Megatron wants the warm-up to end before the last step
        *("--train-iters", str(options.steps), "--lr-warmup-iters", str(min(2, options.steps - 1))),
        *(*MODEL.split(), *TRAINING.split()),
    ]
    log = folder / "train.log"
    where = "the emulated cluster" if options.emulated else "this machine"
    print(
        f"\n{planner}: {options.steps} steps of megatron.training.pretrain on {RANKS} ranks of {where} (log: {log})",
        flush=True,
    )
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _watch(process, folder / "steps.jsonl", options.steps)
        finally:
            if process.poll() is None:
                process.terminate()  # the launcher ends its ranks
                process.wait(timeout=30)
    records = _records(folder / "steps.jsonl")
    if process.returncode or len(records) != options.steps:
        lines = log.read_text(errors="replace").splitlines()
        shown = [line for line in lines if "rror" in line and "<N/A>" not in line][:5] or lines[-20:]
        print(
            "\n".join([*shown, ""])
            + (
                f"error: training under {planner} stopped after {len(records)} of {options.steps} steps; its log is "
                f"{log}"
            ),
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


def _agreement(runs: dict[str, list[dict[str, Any]]]) -> float:
    first = next(iter(runs.values()))
    return max(
        abs(a["loss"] - b["loss"]) / a["loss"] for other in runs.values() for a, b in zip(first, other, strict=True)
    )


def _table(runs: dict[str, list[dict[str, Any]]], nic_megabytes: dict[str, list[float]]) -> Table:
    num_steps = len(next(iter(runs.values())))
    table = Table(
        title=f"{num_steps} steps on {RANKS} ranks as 2 nodes x 4: means over steps, measured in the runs above",
        title_justify="left",
    )
    table.add_column("", justify="left")
    for planner in runs:
        table.add_column(planner, justify="right")

    def mean(records: Sequence[Any], *path: str) -> float:
        return statistics.fmean(reduce(getitem, path, record) for record in records)

    def row(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *cells)

    each = list(runs.values())
    row("loss, first -> last step", [f"{r[0]['loss']:.4f} -> {r[-1]['loss']:.4f}" for r in each])
    row("tokens, max/mean over ranks", [f"{mean(r, 'imbalance_after', 'tokens'):.3f}" for r in each])
    row("attention, max/mean over ranks", [f"{mean(r, 'imbalance_after', 'attention'):.3f}" for r in each])
    row("KV tokens received per rank, a layer", [f"{mean(r, 'kv_tokens_received'):,.0f}" for r in each])
    row("  of them from the other node", [f"{mean(r, 'kv_tokens_received_inter_node'):,.0f}" for r in each])
    row("attention kernel calls per rank, a step", [f"{mean(r, 'kernel_calls'):.1f}" for r in each])
    if nic_megabytes:
        row("MB sent per NIC and step, mean", [f"{statistics.fmean(nic_megabytes[planner]):.2f}" for planner in runs])
        row("  of the busiest NIC", [f"{max(nic_megabytes[planner]):.2f}" for planner in runs])
    row("plan ms (waited for ms)", [f"{mean(r, 'plan_ms'):.2f} ({mean(r, 'plan_wait_ms'):.2f})" for r in each])
    medians = [statistics.median(x["step_ms"] for x in r) for r in each]
    row("step ms, median", [f"{median:,.0f}" for median in medians])
    row(f"step time of {next(iter(runs))} over it", [f"{medians[0] / median:.2f}" for median in medians])
    return table


if __name__ == "__main__":
    sys.exit(main())

"""Training on the emulated cluster with a slow rank, a slow link or lost packets: the log names which.

Each rank's compute thread has a share of a core of its own (`tools.bench.emulated.device`), so that
ranks compute at one speed on busy cores; the slow rank has less of it from step `FROM` on. A link is
what one NIC sends: at a lower rate, or with a queue of a few packets, so that the kernel drops what
TCP sends on top (this kernel has no `netem`).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.emulated_cluster import Controller, RankError, Topology, run
from tools.faults.cases import Outcome

ROOT = Path(__file__).parents[2]
STEPS, FROM = 14, 6
"""Of a run; the first disturbed one."""
KINDS = ("nothing", "rank", "link", "loss")
PLANNERS = ("te_ring", "zeppelin", "wlb_llm")
NODES, RANKS_PER_NODE = 2, 2
NIC_BITS, SLOW_NIC_BITS = 160_000_000, 16_000_000
SHORT_QUEUE_BYTES = 21_000
"""Two packets, and a burst."""
SHARE, SLOW_SHARE = 0.2, 0.07
"""Of a core, for a rank's compute thread."""
SEQ_LENGTH = 4096
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Case:
    """One disturbance. `victim`: the rank, or the rank whose NIC it is."""

    kind: str
    planner: str
    routed: bool
    victim: int

    @classmethod
    def of(cls, number: int) -> Case:
        """Case by number, of the kinds in turn."""
        draw = random.Random(f"slow {number}")
        kind, planner = KINDS[number % len(KINDS)], PLANNERS[number // len(KINDS) % len(PLANNERS)]
        routed = planner == "zeppelin" and draw.random() < 0.5
        victims = range(NODES * RANKS_PER_NODE)
        if kind in ("link", "loss") and not routed:  # that send to the other node
            victims = range(RANKS_PER_NODE - 1, NODES * RANKS_PER_NODE, RANKS_PER_NODE)
        return cls(kind, planner, routed, draw.choice(victims))


@contextmanager
def slow() -> Iterator[Callable[[int], Outcome]]:
    """Run after run, each from a process of its own: ranks are forked from one without threads."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        yield lambda number: try_slow(number, Path(folder) / str(number))


def try_slow(number: int, folder: Path) -> Outcome:
    """One run: nothing is named before it is disturbed, then the right rank or link, and no other."""
    case = Case.of(number)
    folder.mkdir(parents=True)
    words = [sys.executable, "-W", "ignore", "-m", "tools.faults.slow", str(number), str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    outcome = Outcome("failed", f"{case}: {done.stderr[-400:]}")
    if not done.returncode:
        steps = [json.loads(line) for line in (folder / "log" / "steps.jsonl").read_text().splitlines()]
        outcome = judged(case, steps, json.loads((folder / "dropped.json").read_text()))
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def judged(case: Case, steps: list[dict[str, Any]], dropped: int) -> Outcome:
    """Whether the records name what was disturbed. `dropped`: packets, as `tc` counts them."""
    early = [step["step"] for step in steps if step["step"] < FROM and any(step["slow"].values())]
    if early or len(steps) < STEPS:
        return Outcome("named before it was slow", f"{case}: steps {early} of {len(steps)}")
    named = [step for step in steps if any(step["slow"].values())]
    ranks = {rank for step in named for rank in step["slow"]["ranks"]}
    sources = {link[0] for step in named for link in step["slow"]["links"]}
    waited = [round(sum(step["times"]["waited_s"]) / len(step["times"]["waited_s"]), 2) for step in steps]
    told = f"{case}: ranks {sorted(ranks)}, links out of {sorted(sources)}, {dropped} packets lost, waits {waited}"
    wanted = {"nothing": (set[int](), set[int]()), "rank": ({case.victim}, set[int]())}
    if (ranks, sources) != wanted.get(case.kind, (set[int](), {case.victim})):
        return Outcome(f"{case.kind}: not named, or another", told)
    if (case.kind == "loss") != (dropped > 0):
        return Outcome("another number of lost packets", told)
    after = f", {named[0]['step'] - FROM + 1} steps after" if named else ""
    return Outcome(f"{case.kind}: named{after}" if named else "nothing: nothing named")


def main(number: int, folder: Path) -> None:
    """Run a case; its records and the number of dropped packets go into `folder`."""
    from megatron_balance.megatron import cpu

    cpu.install()
    from megatron_balance.patches.selection import every

    every()  # imports Megatron, for all ranks
    from tests.megatron.conftest import write_corpus

    case = Case.of(number)
    # a link is only waited for in steps that use it: documents that lie on both nodes
    shorter = [] if case.kind in ("link", "loss") else [1900, 1300, 896]
    corpus = write_corpus(folder / "documents", [SEQ_LENGTH - 1, 1, *shorter] * 20)
    topology = Topology(NODES, RANKS_PER_NODE, RANKS_PER_NODE, NIC_BITS, None)
    config = {
        "planner": {"name": case.planner},
        "cluster": {"ranks_per_node": RANKS_PER_NODE},
        "routing": "always" if case.routed else "never",
    }
    (folder / "balance.yaml").write_text(yaml.safe_dump(config))
    try:
        result = run(
            topology,
            lambda rank, controller: train(rank, controller, case, folder, corpus),
            folder / "ranks",
            deadline_s=DEADLINE_S,
            may_schedule=True,
        )
    except RankError as error:
        sys.exit(str(error))
    (folder / "dropped.json").write_text(json.dumps(result.values[0]))


def train(rank: int, controller: Controller, case: Case, folder: Path, corpus: str) -> int | None:
    """In a rank: train, and disturb when it is time. Rank 0 returns the packets that were lost."""
    from megatron_balance.training.log import StepLog
    from tests.megatron.conftest import MODEL, RUN
    from tools.bench.emulated import device
    from tools.emulated_cluster.command import Command
    from tools.megatron_flags import command_line

    begin, at = StepLog.begin, (case.victim // RANKS_PER_NODE, case.victim % RANKS_PER_NODE)
    slow_rank = case.kind == "rank" and rank == case.victim

    def disturbing(self: StepLog, step: int) -> None:
        if step in (1, FROM):
            device.release()
            device.reserve(SLOW_SHARE if slow_rank and step == FROM else SHARE)
        if rank == 0 and step == FROM and case.kind == "link":
            controller.disturb(*at, SLOW_NIC_BITS, 16 << 20)
        if rank == 0 and step == FROM and case.kind == "loss":
            controller.disturb(*at, NIC_BITS, SHORT_QUEUE_BYTES)
        begin(self, step)

    StepLog.begin = disturbing
    sizes = {"seq-length": SEQ_LENGTH, "max-position-embeddings": SEQ_LENGTH, "hidden-size": 128, "kv-channels": 16}
    flags = {
        "context-parallel-size": NODES * RANKS_PER_NODE,
        "global-batch-size": 1,
        "train-iters": STEPS,
        "data-path": corpus,
        "num-query-groups": 8,
        **sizes,
    }
    ours = {"balance-config": folder / "balance.yaml", "balance-log": folder / "log"}
    pretrain = Command("megatron_balance.pretrain_gpt", True, tuple(command_line(MODEL, RUN, flags, ours)))
    with suppress(SystemExit):  # as the entry ends
        pretrain(rank, controller)
    return controller.dropped(*at) if rank == 0 else None


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

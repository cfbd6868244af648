"""Training runs of Megatron on gloo in which a rank fails: at every place and in every way; at random,
with a resume.
"""

import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import yaml

from tests.megatron.conftest import DOCUMENT_LENGTHS, MODEL, RUN, write_corpus
from tests.support.injected import KINDS, PLACES, Fault
from tests.support.megatron_run import Job, Result, Trainer
from tools.faults.cases import Outcome
from tools.megatron_flags import command_line

AT_ONCE, AHEAD = 2, 6
"""Runs at a time, and cases that are begun before they are asked for."""
RANKS, WORKERS = (2, 4), (0, 2)
TIMEOUT_S = 20
"""Of Megatron's process groups, once training runs."""
MOST_S = 50.0
"""In which all ranks have ended, once one failed: the timeout, and 30 seconds."""
START_S = 150.0
"""Seconds for that, where one never starts: a minute is the shortest --distributed-timeout-minutes."""
LATE = frozenset({"log", "save", "evaluation"})
"""Places whose first call comes when all ranks have trained a step."""
PLANNERS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("te_ring", {}),
    ("llama_all_gather", {}),
    ("ulysses", {}),
    ("usp", {}),
    ("magi", {}),
    ("packing", {}),
    ("wlb_sharding", {}),
    ("hybrid_dp", {}),
    ("flexsp", {}),
    ("knapformer", {}),
    ("megatron_dynamic", {}),
    ("distca", {"block": 32}),
    ("wlb_llm", {"thresholds": [100], "slack": 3.0}),
    ("zeppelin", {}),
    ("auto", {}),
)
"""Of the first `KILLS` cases of `kills`."""
KILLS = 100
_TENSOR = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
_RESHARDABLE = {"dist-ckpt-optim-fully-reshardable": True}
PIPELINES: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("hydraulis", {}, {"context-parallel-size": 2}),
    ("megatron", {}, {"context-parallel-size": 2}),
    ("hydraulis", {}, {"context-parallel-size": 1, "pipeline-model-parallel-size": 2}),
    ("hydraulis", {"within": "zeppelin"}, {"context-parallel-size": 2}),
    ("megatron", {}, {"context-parallel-size": 1, "pipeline-model-parallel-size": 2}),
    (
        "hydraulis",
        {"tokens_per_rank": 256, "strategies": ["tp1-pp1-cp4", "tp2-pp1-cp1+tp1-pp1-cp1"]},
        {"context-parallel-size": 1, "use-distributed-optimizer": True, **_TENSOR, **_RESHARDABLE},
    ),
)
"""Of the cases behind them: planners of pipelines side by side on four ranks, with their flags."""


@dataclass(frozen=True)
class Runs:
    """Training runs in a folder of their own, all of one corpus."""

    trainer: Trainer
    folder: Path
    corpus: str

    def run(self, planner: Mapping[str, Any], ranks: int, flags: Mapping[str, Any], name: str, **job: Any) -> Result:
        """One run, whatever becomes of it; its records are in `name`/log of the folder."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        fault = job.get("fault")
        apart = planner["name"] in {name for name, *_ in PIPELINES}  # nothing is remapped or routed between them
        config = {
            "planner": dict(planner),
            "cluster": {"ranks_per_node": max(1, ranks // 2)},
            "routing": "never" if apart else "always",
            "remap": not apart,
            "plan_ahead": fault is None or fault[0] != "plan",  # else another process plans
        }
        (folder / "balance.yaml").write_text(yaml.safe_dump(config))
        if "kill_after" in job:
            job["kill_after"] = (str(folder / "log" / "steps.jsonl"), job["kill_after"])
        entry = job.pop("entry", "pretrain_gpt")
        ours = {"balance-config": folder / "balance.yaml", "balance-log": folder / "log", "data-path": self.corpus}
        argv = command_line(MODEL, RUN, {"distributed-timeout-seconds-after-init": TIMEOUT_S}, ours, flags)
        return self.trainer.run(Job(entry, ranks, tuple(argv), str(folder), spawns=True, **job))

    def steps(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name / "log" / "steps.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def one_at_a_time() -> Iterator[Runs]:
    """Runs one after the other."""
    trainer = Trainer()
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            lengths = list(itertools.islice(itertools.cycle(DOCUMENT_LENGTHS), 240))
            yield Runs(trainer, Path(folder), write_corpus(Path(folder) / "documents", lengths))
    finally:
        trainer.close()


@contextmanager
def _ahead(try_one: Callable[[Runs, int], Outcome]) -> Iterator[Callable[[int], Outcome]]:
    """Case after case, `AT_ONCE` of them at a time where they are asked for in order: a run that
    fails mostly waits. Each that runs has a `Runs` of its own.
    """
    with ExitStack() as stack:
        free: Queue[Runs] = Queue()
        for _ in range(AT_ONCE):
            free.put(stack.enter_context(one_at_a_time()))

        def in_turn(number: int) -> Outcome:
            runs = free.get()
            try:
                return try_one(runs, number)
            finally:
                free.put(runs)

        threads = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        begun: dict[int, Future[Outcome]] = {}

        def one(number: int) -> Outcome:
            for each in range(number, number + (AHEAD if number - 1 in begun else 1)):
                if each not in begun:
                    begun[each] = threads.submit(in_turn, each)
            return begun[number].result()

        yield one
        threads.shutdown(cancel_futures=True)


def matrix() -> list[tuple[int, int, str, str]]:
    """Data workers, ranks, place and kind of every cell, in an order in which any part has of all."""
    places = [place for place in PLACES if place != "attention"]  # `forward` is inside it
    cells: list[tuple[int, int, str, str]] = list(itertools.product(WORKERS, RANKS, places, KINDS))
    random.Random("matrix").shuffle(cells)
    return cells


@contextmanager
def places() -> Iterator[Callable[[int], Outcome]]:
    with _ahead(try_place) as one:
        yield one


def try_place(runs: Runs, number: int) -> Outcome:
    """One cell: all ranks end in time, by themselves, and one of those that did not fail names the
    one that did. Before training begins it is torch that says so, in words of its own.
    """
    cells = matrix()
    workers, ranks, place, kind = cells[number % len(cells)]
    ranks = 4 if place == "relay" else ranks  # one rank of a node has nobody to relay for
    draw = random.Random(f"places {number}")
    failing = draw.randrange(ranks)
    if place in ("log", "save"):
        failing = 0 if place == "log" else failing
    fault = Fault(place, kind, failing, draw.choice((1, 2)) if place in LATE else draw.choice((1, 2, 5)))
    folder = f"place{number}"
    flags = {
        "context-parallel-size": ranks,
        "num-workers": workers,
        "train-iters": 6,
        "distributed-timeout-minutes": 1,
        "split": "80,20,0",
        "eval-interval": 2,
        "eval-iters": 1,
        "ckpt-format": "torch_dist",
        "save": runs.folder / folder / "checkpoint",
        "save-interval": 2,
    }
    given = (fault.place, fault.kind, fault.rank, fault.call)
    result = runs.run(
        {"name": "zeppelin"},
        ranks,
        flags,
        folder,
        fault=given,
        deadline_s=300.0,
        grace_s=START_S if place == "start" else MOST_S,
    )
    survivors = [rank for rank in range(ranks) if rank != failing]
    cell = f"{kind} at {place}, rank {failing} of {ranks}, call {fault.call}, {workers} data workers"
    logs = {rank: result.log(rank) for rank in range(ranks)}
    shutil.rmtree(runs.folder / folder, ignore_errors=True)
    if place != "start" and "injected: " not in logs[failing]:
        return Outcome("not reached", f"{cell}: codes {result.codes}; {logs[0][-300:]}")
    hung = [rank for rank in survivors if result.codes[rank] == -9]
    if hung:
        return Outcome("hung", f"{cell}: ranks {hung} did not end; {logs[hung[0]][-300:]}")
    if any(result.codes[rank] == 0 for rank in survivors):
        return Outcome("went on", f"{cell}: codes {result.codes}")
    if result.left:
        return Outcome("left a process", f"{cell}: {result.left}")
    if place != "start" and not any(
        f"rank {failing} " in logs[rank] or "or is frozen: rank 0" in logs[rank] for rank in survivors
    ):
        return Outcome("not named", f"{cell}: {logs[survivors[0]][-300:]}")
    return Outcome("ended and named")


@contextmanager
def kills() -> Iterator[Callable[[int], Outcome]]:
    """Kill a random rank of a run, resume it, and compare with the run that nobody killed."""
    whole: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with _ahead(lambda runs, number: try_kill(runs, number, whole)) as one:
        yield one


def planned_case(number: int, draw: random.Random) -> tuple[str, Mapping[str, Any], dict[str, Any], int]:
    """Planner, its options, flags and ranks of a kill; each replica takes a sample at least."""
    if number >= KILLS:
        name, options, flags = PIPELINES[number % len(PIPELINES)]
        return name, options, {"train-iters": 6, "global-batch-size": 4, **flags}, 4
    name, options = PLANNERS[number % len(PLANNERS)]
    ranks = draw.choice(RANKS)
    context = draw.choice((1, ranks))
    batch = max(2, ranks // context)
    return name, options, {"context-parallel-size": context, "train-iters": 6, "global-batch-size": batch}, ranks


def try_kill(runs: Runs, number: int, whole: dict[tuple[str, int], list[dict[str, Any]]]) -> Outcome:
    """One kill, of each tenth inside a save: losses, gradient norms, tokens and plans of the resumed
    run are those of the whole one, to the last bit.
    """
    draw = random.Random(f"kills {number}")
    name, options, flags, ranks = planned_case(number, draw)
    at = (f"{name} {dict(options)} {flags}", ranks)
    planner = {"name": name, **options}
    if at not in whole:
        result = runs.run(planner, ranks, flags, f"whole{number}")
        if result.failed is not None:
            return Outcome("no whole run", f"{at}: {result.tail(result.failed)[-400:]}")
        whole[at] = runs.steps(f"whole{number}")
    folder = f"kill{number}"
    saving = {
        **flags,
        "ckpt-format": "torch_dist",
        "save": runs.folder / folder / "checkpoint",
        "load": runs.folder / folder / "checkpoint",
        "save-interval": 2,
    }
    killed = draw.randrange(ranks)
    if number % 10 == 9:
        ended = runs.run(planner, ranks, saving, folder, fault=("save", "kill", killed, draw.choice((1, 2))))
    else:
        ended = runs.run(planner, ranks, saving, folder, kill_after=draw.randint(2, 5), kill_only=killed)
    resumed = runs.run(planner, ranks, saving, folder)
    steps = {step["step"]: step for step in runs.steps(folder)}
    why = "" if resumed.failed is None else resumed.tail(resumed.failed)[-400:]
    shutil.rmtree(runs.folder / folder, ignore_errors=True)
    if ended.failed is None:
        return Outcome("ended before it was killed")
    if resumed.failed is not None:
        return Outcome("no resume", f"{at}, rank {killed} killed: {why}")
    for step in whole[at]:
        for key in ("loss", "grad_norm", "num_tokens", "fingerprint", "trained_tokens"):
            got = steps.get(step["step"], {}).get(key)
            if got != step[key]:
                return Outcome("differs", f"{at}: step {step['step']}: {key} {got} after a resume, {step[key]} before")
    return Outcome("resumed, equal to the bit")

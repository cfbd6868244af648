"""Training jobs on this machine: import torch and Megatron once, then fork the ranks of every job."""

# Most of a short run is its start, so whatever all ranks would import, read or compute alike is
# there before they are forked.
#
# `Trainer` (in the test process) starts this file as a server, which is the process that says
# "cuda" and means "cpu"; the test process stays as it is. One job is one line of JSON to the server
# and one line back.

import argparse
import dataclasses
import faulthandler
import functools
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
TAIL_BYTES = 6000
DUMP_S = 1.0  # between asking the ranks for their stacks and killing them
# Of the ranks' stores: below the range from which Linux serves those who ask for any free port, as
# gloo's connections do.
PORTS = range(15000, 32000)
# What torch and Megatron import only while a job runs: for the first optimizer, for checkpoints,
# for tokenizers.
IMPORTED_LATE = (
    "torch._dynamo",
    "torch.utils.serialization",
    "numpy.ma",
    "numpy.random",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.models.mimo.model.base",
    "megatron.core.tokenizers.text.models",
    "megatron_balance.launch",
    "megatron_balance.pretrain_gpt",
)

# Our own entry; the same, with transfers between stages counted, or with samples without documents
# and gradients written (`pipeline_runs`), or with gradients alone, or with the documents that it
# trains (`trained_documents`), of ours or of a data set of the script (`numbered_data`), of which that
# of rollouts comes with gradients; roles of
# several strategies (`role_runs`, argv[0] names them); the launcher (argv[0] is the script); the
# script alone, on the CPU but without balance; a loop of its own (`loop_runs`); our own, with
# samples of each rank's memory (`tools.faults.soak`).
_Ours = Literal["pretrain_gpt", "counted", "documents", "gaps", "gradients", "roles", "watched"]
Entry = _Ours | Literal["launch", "loop", "packed", "plain", "script", "trees", "apart", "scaled"]


@dataclass(frozen=True)
class Job:
    # One training run. `kill_after`: (file, lines): all ranks are killed once the file has so many
    # lines. `freeze`: the rank that is stopped (SIGSTOP) then, in place of a kill.
    entry: Entry
    num_ranks: int
    argv: tuple[str, ...]
    logs: str
    deadline_s: float = 120.0
    kill_after: tuple[str, int] | None = None
    kill_with: int = signal.SIGKILL
    freeze: int | None = None
    # Folders put in front of sys.path.
    path: tuple[str, ...] = ()
    # Put into a rank (`injected.Fault`).
    fault: tuple[str, str, int, int] | None = None
    # For the others to fail by themselves once one rank has.
    grace_s: float = 10.0
    # The rank that `kill_after` kills, in place of all.
    kill_only: int | None = None
    # Whether a rank that saves spawns the process for the results, as Megatron does; a fork takes
    # seconds less, and is no process of its own memory.
    spawns: bool = False
    # Neighbours that share a GPU, where there are GPUs.
    ranks_per_gpu: int = 1


@dataclass(frozen=True)
class Result:
    # Exit codes by rank (negative: killed by that signal), ranks in the order they ended, and where
    # the logs are.
    codes: tuple[int, ...]
    ended: tuple[int, ...]
    logs: Path
    seconds: float
    # Command lines of planning processes that outlived their ranks by more than data workers do.
    left: tuple[str, ...] = ()

    @property
    def failed(self) -> int | None:
        # The rank that failed first, the others usually because of it; None if all is well.
        return next((rank for rank in self.ended if self.codes[rank] != 0), None)

    def log(self, rank: int) -> str:
        return (self.logs / f"rank{rank}.log").read_text(errors="replace")

    def tail(self, rank: int) -> str:
        return self.log(rank)[-TAIL_BYTES:]


class Trainer:
    # The server, seen from a test. `variables`: of its environment; `device`: cuda on a real GPU.
    def __init__(
        self, path: Sequence[str] = (), variables: Mapping[str, str] | None = None, device: str = "cpu"
    ) -> None:
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        found = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join([*path, str(ROOT), *found])}
        pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        command = [sys.executable, "-W", "ignore", __file__, device]
        environment |= variables or {}
        self._server = subprocess.Popen(command, **pipes, text=True, cwd=ROOT, env=environment)

    def run(self, job: Job) -> Result:
        # Exit codes of a job, whatever they are.
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        Path(job.logs).mkdir(parents=True, exist_ok=True)
        self._server.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, f"the training server ended with code {self._server.poll()}"
        body = json.loads(answer)
        return Result(tuple(body["codes"]), tuple(body["ended"]), Path(job.logs), body["seconds"], tuple(body["left"]))

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)


def serve(device: str) -> None:
    # Answer jobs until stdin closes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Megatron prints while it is imported is no answer
    if device == "cpu":
        from megatron_balance.megatron import cpu

        cpu.install()
    import torch

    torch.set_num_threads(1)
    from megatron_balance.errors import PatchError
    from megatron_balance.patches import applied
    from megatron_balance.patches.selection import every

    # Imports Megatron and all of ours, and reads the sources that are patched, so that the ranks are
    # forked with that.
    for patch in every():
        with suppress(PatchError), applied((patch,)):
            pass
    prepare_ranks()
    assert device == "cpu" or not torch.cuda.is_initialized(), "ranks that are forked now could not use the GPU"
    for line in sys.stdin:
        body: dict[str, Any] = json.loads(line)
        kill_after = tuple(body["kill_after"]) if body["kill_after"] else None
        fault = tuple(body["fault"]) if body["fault"] else None
        given = {"argv": tuple(body["argv"]), "path": tuple(body["path"]), "kill_after": kill_after, "fault": fault}
        job = Job(**{**body, **given})  # pyright: ignore[reportArgumentType]
        start = time.monotonic()
        codes, left = run_job(job)
        by_rank = [codes[rank] for rank in range(job.num_ranks)]
        answer = {"left": left, "codes": by_rank, "ended": list(codes), "seconds": time.monotonic() - start}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def prepare_ranks() -> None:
    # Do once what every rank would do for itself, and keep the pages that they inherit shared.
    for name in IMPORTED_LATE:
        # other versions of Megatron do without some of them
        with suppress(ModuleNotFoundError) if name.startswith("megatron.") else nullcontext():
            importlib.import_module(name)
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    from megatron_balance.megatron import flags
    from tests.support import one_device

    one_device.install()
    # A rank makes Megatron's parser twice, and each time most of that is parsing classes' sources
    # for the texts of --help.
    texts = functools.cache(ArgumentGroupFactory.__new__(ArgumentGroupFactory)._get_field_docstrings)
    ArgumentGroupFactory._get_field_docstrings = staticmethod(texts)  # pyright: ignore[reportAttributeAccessIssue]
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags.record()
    # A rank that saves starts a process for the results; as Megatron starts it, that would import
    # torch once more (`Job.spawns`).
    filesystem_async.get_write_results_queue = functools.partial(filesystem_async.get_write_results_queue, "fork")
    gc.collect()
    gc.freeze()  # else a rank's first collection writes to, and so copies, all that it inherits


def free_port() -> int:
    # A port for rank 0's store that nobody else takes before rank 0 does.
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port := random.choice(PORTS)))
            return port


def run_job(job: Job) -> tuple[dict[int, int], list[str]]:
    # Exit codes by rank, in the order the ranks ended, and what they left running. Ranks that
    # outlive the deadline, or another's failure, are ended.
    port = free_port()
    ranks = {os.fork() or run_rank(job, rank, port): rank for rank in range(job.num_ranks)}
    codes: dict[int, int] = {}
    stop_at = time.monotonic() + job.deadline_s
    killed = frozen = False
    stopped = [job.fault[2]] if job.fault is not None and job.fault[1] == "stop" else []
    while len(codes) < job.num_ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[pid]] != 0:
                stop_at = min(stop_at, time.monotonic() + job.grace_s)
            continue
        left = [pid for pid, rank in ranks.items() if rank not in codes]
        if [ranks[pid] for pid in left] == stopped:
            os.kill(left[0], signal.SIGKILL)  # nobody waits for it any more, and it does not end by itself
        reached = job.kill_after is not None and _lines(job.kill_after[0]) >= job.kill_after[1]
        if reached and job.freeze is not None and not frozen:
            os.kill(next(pid for pid, rank in ranks.items() if rank == job.freeze), signal.SIGSTOP)
            frozen = True
        elif reached and job.freeze is None and not killed:
            for one in left if job.kill_only is None else [pid for pid in left if ranks[pid] == job.kill_only]:
                os.kill(one, job.kill_with)
            killed = True
            stop_at = min(stop_at, time.monotonic() + job.grace_s)
        elif time.monotonic() > stop_at:
            for one in left:
                os.kill(one, signal.SIGUSR1)
            time.sleep(DUMP_S)
            for one in left:
                os.kill(one, signal.SIGKILL)
            killed = True
        time.sleep(0.02)
    left_running = _planning(ranks.keys(), 12.0)
    for pid in ranks:  # what a rank started and left behind: Megatron's checkpoints go through a manager process
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return codes, left_running


def _planning(groups: Collection[int], patience_s: float) -> list[str]:
    # Command lines of the planning processes of these process groups, once they had time to end.
    end = time.monotonic() + patience_s
    while True:
        found: list[str] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "planning.ahead" in command and os.getpgid(int(folder.name)) in groups:
                    found.append(command)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _lines(file: str) -> int:
    return Path(file).read_bytes().count(b"\n") if Path(file).exists() else 0


def run_rank(job: Job, rank: int, port: int) -> int:
    # In the child: one rank. Never returns.
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(Path(job.logs, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank // job.ranks_per_gpu), WORLD_SIZE=str(job.num_ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.path[:0] = job.path
        if job.fault is not None:
            from tests.support import injected

            injected.install(injected.Fault(*job.fault), rank)
        if job.spawns:
            _spawn_for_results()
        code = _enter(job)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _spawn_for_results() -> None:
    # Save as Megatron saves, whatever `prepare_ranks` has set for quicker tests.
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    quick: Any = filesystem_async.get_write_results_queue
    assert quick.args == ("fork",)
    filesystem_async.get_write_results_queue = quick.func


def _enter(job: Job) -> int:
    from megatron_balance import launch, pretrain_gpt
    from megatron_balance.megatron import entry
    from megatron_balance.patches import applied, machine
    from tests.support import loop_runs, numbered_data, pipeline_runs, role_runs, torch_adam, trained_documents

    torch_adam.install()
    if job.entry == "plain":
        sys.argv = list(job.argv)
        with applied(machine.HELPERS):
            runpy.run_path(job.argv[0], run_name="__main__")
        return 0
    sys.argv = [job.entry, *job.argv]
    if job.entry == "counted":
        counts = pipeline_runs.install_counts()
        code = entry.run(pretrain_gpt.main)
        sys.stdout.write(f"{counts.line()}\n")
        return code
    if job.entry == "loop":
        entry._set_up_logging()
        return loop_runs.run(list(job.argv))
    if job.entry == "roles":
        return role_runs.run()
    if job.entry == "watched":
        from tools.faults import soak

        soak.install(Path(job.logs), int(os.environ["RANK"]))
    if job.entry in ("documents", "script", "packed"):
        trained_documents.install(Path(job.logs), int(os.environ["RANK"]))
        if job.entry != "documents":
            return entry.run(functools.partial(numbered_data.main, job.entry))
    if job.entry in ("trees", "apart", "scaled"):
        pipeline_runs.install(Path(job.logs), int(os.environ["RANK"]), gaps=False)
        return entry.run(functools.partial(numbered_data.main, job.entry))
    if job.entry in ("gaps", "gradients"):
        pipeline_runs.install(Path(job.logs), int(os.environ["RANK"]), gaps=job.entry == "gaps")
    return entry.run(launch.main if job.entry == "launch" else pretrain_gpt.main)


if __name__ == "__main__":
    serve(sys.argv[1])

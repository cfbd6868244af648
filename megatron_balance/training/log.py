"""The record of a step: a line in the log, an object in `steps.jsonl`, scalars for writers; and traces
of chosen steps, on every rank a file in `analysis.trace_format`, as simulated steps have it
(`megatron-balance trace` joins the files of a step).
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import yaml

from megatron_balance.analysis import trace_format
from megatron_balance.analysis.backward import Decision
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text, parse_json
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planning.proofs import Proofs
from megatron_balance.runtime.cuda import Streams
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.recorder import Counters, Mark, Recorder
from megatron_balance.training.figures import JobFacts, Json, step_figures
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.pool import Pool
from megatron_balance.training.stragglers import Stragglers, link_rates, own_times, times_of
from megatron_balance.training.tokens import PoolLengths

log = logging.getLogger(__name__)
FOLDER = "traces"


class StepTracer:
    """Traces of this rank. All ranks trace the same steps."""

    def __init__(self, folder: str | Path | None = None, steps: Collection[int] = (), rank: int = 0) -> None:
        """Write to `folder`. `rank`: in the world. Nothing is traced without steps."""
        self._folder, self._steps, self._rank = None if folder is None else Path(folder), frozenset(steps), rank
        self._node: Callable[[], int] = lambda: 0
        self._streams: Callable[[], Streams | None] = lambda: None
        self._step = self._at = 0
        self._begun: Mark = None
        self._planned: tuple[str, Mark] = ("", None)
        self._ran: Mark = None
        self.recorder: Recorder | None = None  # of the step that is under way, if it is traced

    def place(self, node: Callable[[], int], streams: Callable[[], Streams | None]) -> None:
        """Say how to find this rank's node and its device's streams (None: a CPU), when traced."""
        self._node, self._streams = node, streams

    def begin(self, step: int) -> None:
        """Begin a step. Collective over the world if it is traced: all clocks begin together."""
        # Begun twice: the step ran again, and is traced from its second beginning.
        if self.recorder is not None and step != self._step:
            self.finish()
        self.recorder = None
        if step not in self._steps:
            return
        self._step = step
        self._at, streams = self._node(), self._streams()
        if dist.is_initialized():
            dist.barrier()
        self.recorder = Recorder(self._rank, streams)
        self._begun, self._ran = self.recorder.mark(), None

    def planned(self, planner: str) -> None:
        if self.recorder is not None:
            self._planned = planner, self.recorder.mark()

    def ran(self) -> None:
        if self.recorder is not None:
            self._ran = self.recorder.mark()

    def finish(self) -> float | None:
        """Write the trace of the step that is over, if there is one. Returns the seconds of this
        rank's attention by the device's clock, where it has one.
        """
        # What cannot be written ends no training.
        recorder, self.recorder = self.recorder, None
        # None of a step that failed: it never said that it ran.
        if recorder is None or self._folder is None or self._ran is None:
            return None
        path = self._folder / FOLDER / trace_format.file_name(self._step, self._rank)
        trace = self._trace(recorder)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(trace.document(), allow_nan=False), encoding="utf-8")
        except OSError as error:
            log.warning("trace of step %d: %s cannot be written (%s)", self._step, path, error.strerror)
        if recorder.streams is None:
            return None
        return sum((span.stop_s - span.start_s for span in trace.spans if span.what == trace_format.ATTENTION), 0.0)

    def _trace(self, recorder: Recorder) -> trace_format.Trace:
        end = recorder.mark()
        self._add(recorder, trace_format.PLAN, self._begun, self._planned[1])
        self._add(recorder, trace_format.OPTIMIZER, self._ran, end)
        spans = recorder.spans()
        spans += _passes(spans)
        spans += _synchronising(spans)
        facts = {
            "kind": "measured",
            "clock": "host" if recorder.streams is None else "device",
            "planner": self._planned[0],
            "step": self._step,
            "rank": self._rank,
            "node": self._at,
            "began_unix_s": recorder.began_unix_s,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        }
        return trace_format.Trace(spans, {self._rank: trace_format.rank_name(self._rank, self._at)}, facts)

    def _add(self, recorder: Recorder, what: str, start: Mark, stop: Mark) -> None:
        recorder.add(trace_format.TrackSpan(self._rank, trace_format.STEP, what, 0.0, 0.0), start, stop)


def _passes(spans: list[trace_format.TrackSpan]) -> list[trace_format.TrackSpan]:
    """Every microbatch's forward and backward, from its first attention call to its last."""
    found: dict[tuple[str, int], trace_format.TrackSpan] = {}
    for span in spans:
        if span.track != trace_format.COMPUTE:
            continue
        key = (span.phase, span.microbatch)
        before = found.get(key, span)
        start_s, stop_s = min(before.start_s, span.start_s), max(before.stop_s, span.stop_s)
        what = f"{span.phase} {span.microbatch}"
        found[key] = trace_format.TrackSpan(
            span.rank, trace_format.STEP, what, start_s, stop_s, span.phase, span.microbatch
        )
    return list(found.values())


def _synchronising(spans: list[trace_format.TrackSpan]) -> list[trace_format.TrackSpan]:
    optimizer = next(span for span in spans if span.what == trace_format.OPTIMIZER)
    last_s = max((span.stop_s for span in spans if span.track == trace_format.COMPUTE), default=optimizer.start_s)
    return [
        trace_format.TrackSpan(
            optimizer.rank,
            trace_format.STEP,
            trace_format.GRADIENT_SYNC,
            min(last_s, optimizer.start_s),
            optimizer.start_s,
        )
    ]


STEPS_FILE = "steps.jsonl"
REPLACED_FILE = "steps.replaced.jsonl"  # records of steps that ran again after a resume
CONFIG_FILE = "config.yaml"
# The ranks that plans are made for, and the model as one of them has it.
CLUSTER_FILE, MODEL_FILE = "cluster.yaml", "model.yaml"
ScalarWriter: TypeAlias = Callable[[str, float, int], object]  # takes a name, a value and the number of a step


@dataclass(frozen=True, slots=True)
class LogTarget:
    """The files and writers of a job's records."""

    # None: no files.
    folder: Path | None = None
    # Written beside the records.
    config: str = ""
    # Whether this rank writes the log line and the files; true on one rank.
    writes: bool = True
    # Steps from one log line to the next, the first step's apart.
    interval: int = 1
    # Of scalars, for a step; also on other ranks.
    writers: Callable[[int], Sequence[ScalarWriter]] = lambda _: ()
    tracer: StepTracer = field(default_factory=StepTracer)


class StepLog:
    """Collects a step while it runs, writes it when its loss is reduced. ConfigError: it cannot."""

    def __init__(self, target: LogTarget) -> None:
        self._target = target
        self.tracer = target.tracer
        self._file: LineFile | None = None
        self._failed_writers = 0
        self._proofs = Proofs()
        self._first = self._untold = True
        self._begun: float | None = None
        self._ran: tuple[PlannedStep, PoolLengths, tuple[Counters, ...], Decision | None] | None = None
        self._job: tuple[JobFacts, torch.device] | None = None
        self._stragglers: Stragglers | None = None
        self._change: Callable[[], Mapping[str, float]] = dict
        folder = target.folder
        if folder is not None and target.writes:
            self._write(CONFIG_FILE, target.config)
            with _told(folder):
                self._file = LineFile(folder / STEPS_FILE)

    def _write(self, name: str, text: str) -> None:
        assert self._target.folder is not None
        with _told(self._target.folder):
            self._target.folder.mkdir(parents=True, exist_ok=True)
            (self._target.folder / name).write_text(text, encoding="utf-8")

    def describe(self, job: JobFacts, device: torch.device) -> None:
        """Tell the log what no step changes. `device`: that the process groups work on."""
        self._job = (job, device)
        joint = job.pool.joint
        if self._stragglers is None and self._target.folder is not None:
            per_node = job.pool.joint_ranks_per_node if job.pool.num_stages > 1 else job.pool.ranks_per_node
            # Only gloo's host waits for its transfers, and can time them.
            waits = joint.pool is not None and dist.get_backend(joint.pool) == "gloo"
            measure = partial(link_rates, groups=joint, ranks_per_node=per_node) if waits else None
            self._stragglers = Stragglers(joint.ranks, per_node, measure, tells=joint.rank == 0)
        if self._file is not None:
            self._write(CLUSTER_FILE, _as_yaml(job.cost.cluster))
            self._write(MODEL_FILE, _as_yaml(job.model))

    def begin(self, step: int) -> None:
        """Start the clock of a training step. Collective over the world if it is traced."""
        # Where a step runs again, the first start counts.
        self.tracer.begin(step)
        if self._begun is None:
            if self._job is not None:
                for groups in _pools(self._job[0].pool):  # evaluation lies between two steps
                    groups.host_times.clear()
            self._begun = time.perf_counter()

    def ran(
        self, planned: PlannedStep, shared: PoolLengths, counters: Sequence[Counters], backward: Decision | None = None
    ) -> None:
        """Keep the facts of a step, all of whose microbatches have run."""
        self._ran = planned, shared, tuple(counters), backward
        self.tracer.ran()

    def changed(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Keep who tells the figures of the step's pull and push when it is over."""
        self._change = figures

    def finish(self, step: int, loss: float | torch.Tensor | None, grad_norm: float | torch.Tensor | None) -> None:
        """Write the step; `loss`: reduced, as the last stage has it. Collective with a folder."""
        traced_s = self.tracer.finish()
        ran, begun, change = self._ran, self._begun, self._change
        self._ran = self._begun = None
        self._change = dict
        if ran is None or begun is None or self._job is None:
            return
        planned, shared, counters, backward = ran
        step_s = time.perf_counter() - begun
        reduced = _number(loss)
        counted, slow = _sums(counters)[None], Json()
        if self._target.folder is not None:
            gathered = self._gather(counters, step_s, traced_s)
            counted, reduced = gathered[:, : len(_COUNTERS)], self._from_last_stage(reduced)
            slow = self._judge(int(step), gathered)
        writers = self._target.writers(step)
        tells = self._target.writes and log.isEnabledFor(logging.INFO)
        tells = tells and (self._untold or step % self._target.interval == 0)
        if not (tells or writers or (self._target.writes and self._file is not None)):
            return  # figures of 512 ranks take a tenth of a second
        record: Json = {
            "step": int(step),
            "loss": reduced,
            "grad_norm": _number(grad_norm),
            **step_figures(planned, shared, self._job[0]),
            **_counted(counted),
            **slow,
            "change": dict(change()),
            # None: stages attend together, and replay.
            "backward": None if backward is None else backward.described(),
            "plan_ms": 1e3 * planned.plan_s,
            "plan_wait_ms": 1e3 * planned.wait_s,
            "step_ms": 1e3 * step_s,
            "fingerprint": planned.fingerprint,
            "announced": planned.announced,
            "proved_steps": planned.proofs.proved,
            "unproved_steps": planned.proofs.left_out,
        }
        if self._target.writes:
            if tells:
                self._untold = False
                _log_line(record)
            if planned.proofs != self._proofs:
                self._proofs = planned.proofs
                log.info(
                    "step %d: plans of %d steps proved so far; %d were too large to prove beside training",
                    *(step, self._proofs.proved, self._proofs.left_out),
                )
            if self._file is not None:
                if self._first:
                    self._move_steps_from(int(step), self._file)
                self._file.add(json_text(record))
        for write in writers:
            self._write_scalars(write, record, step)

    def _move_steps_from(self, step: int, file: "LineFile") -> None:
        self._first = False
        assert self._target.folder is not None
        moved = file.move_from(lambda line: _is_of_step(line, step), self._target.folder / REPLACED_FILE)
        if moved:
            log.warning(
                "%s: %d lines from step %d on, which run again, are now in %s", STEPS_FILE, moved, step, REPLACED_FILE
            )

    def close(self) -> None:
        self.tracer.finish()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_scalars(self, write: ScalarWriter, record: Json, step: int) -> None:
        try:
            for name in _SCALARS:
                write(f"balance/{name}", _value(record, name), step)
        except Exception as error:  # of TensorBoard or W&B, of any kind
            if not self._failed_writers:
                log.warning("step %d: a writer of scalars failed (%r); training goes on without it", step, error)
            self._failed_writers += 1

    def _judge(self, step: int, gathered: Ints) -> Json:
        assert self._stragglers is not None
        times = times_of(gathered, _COUNTERS)
        self._stragglers.judge(step, times)
        return {"times": self._stragglers.times_as_json(times), "slow": self._stragglers.as_json()}

    def _gather(self, counters: tuple[Counters, ...], step_s: float, traced_s: float | None) -> Ints:
        """Counters and times of all ranks of the joint pool [R, counters and times]."""
        assert self._job is not None
        job, device = self._job
        joint = job.pool.joint
        times = own_times(_pools(job.pool), joint, step_s, traced_s)
        # All that ranks tell one another of a step goes in one row of integers: counters, then
        # times.
        mine = np.concatenate([_sums(counters), np.array(times, dtype=np.int64)])
        if joint.size == 1:
            return mine[None]
        own = torch.from_numpy(mine).to(device)
        everyone = own.new_empty(joint.size, *own.shape)
        dist.all_gather(list(everyone.unbind()), own, group=joint.pool)
        return everyone.cpu().numpy()

    def _from_last_stage(self, loss: float | None) -> float | None:
        assert self._job is not None
        job, device = self._job
        if job.pool.num_stages == 1:
            return loss
        # NaN where there is none: no token was trained on, as Megatron has it; null in the record.
        known = torch.tensor([math.nan if loss is None else loss], dtype=torch.float64, device=device)
        dist.broadcast(known, job.pool.joint.ranks[-1], group=job.pool.joint.pool)
        return float(known)


@contextmanager
def _told(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"folder of the step log, {folder}: cannot be written ({error.strerror}); name another one"
        ) from None


_COUNTERS = tuple(field.name for field in fields(Counters))


def _as_yaml(facts: Cluster | Model) -> str:
    """A cluster or a model as YAML that `--cluster` and `--model` read back."""
    of_run = "gradient_wire"
    keys = {key: value for key, value in asdict(facts).items() if value is not None and key != of_run}
    return yaml.safe_dump(keys, sort_keys=False)


def _pools(pool: Pool) -> tuple[Groups, ...]:
    return pool.groups, pool.joint, pool.attention


def _is_of_step(line: bytes, step: int) -> bool:
    """Whether a line is the record of this step or a later one; a torn or foreign line is not."""
    try:
        record = parse_json(line.decode())
    except ValueError:
        return False
    number = record.get("step") if isinstance(record, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return isinstance(number, int) and number >= step


def _sums(counters: Sequence[Counters]) -> Ints:
    """Counters of one rank [counters] int64, summed over its microbatches."""
    # Pipelines differ in the number of their microbatches, so each rank sums its own.
    return np.array([sum(getattr(c, name) for c in counters) for name in _COUNTERS], dtype=np.int64)


def _counted(sums: Ints) -> Json:
    kernel_calls = sums[:, _COUNTERS.index("kernel_calls")]
    return {
        "kernel_calls": float(kernel_calls.mean()),
        "counters": {name: sums[:, at].tolist() for at, name in enumerate(_COUNTERS)},
    }


def _number(value: float | torch.Tensor | None) -> float | None:
    return None if value is None else float(value)


# Numbers of a step that all writers get, by their places in its record; the log has them by the
# same names.
_SCALARS = (
    *("num_sequences", "num_tokens", "imbalance_before/tokens", "imbalance_before/attention"),
    *("imbalance_after/tokens", "imbalance_after/attention", "kv_tokens_received", "remapped_tokens"),
    *("routed_transfers", "kernel_calls", "drawn_tokens", "trained_tokens", "waiting_tokens"),
    *("plan_ms", "plan_wait_ms", "step_ms", "predicted_ms"),
)


def _value(record: Json, name: str) -> float:
    found: Any = record
    for key in name.split("/"):
        found = found[key]
    return float(found)


def _log_line(record: Json) -> None:
    values = ", ".join(f"{name} {_value(record, name):.7g}" for name in _SCALARS)
    log.info("step %d: planner %s, %s", record["step"], record["planner"], values)
    if record["strategy"] is not None:
        change = record["change"]
        moved = (
            "on the command line's layout"
            if not change
            else (
                f"pull {change['pull_bytes'] / 1e6:.1f} MB in {1e3 * change['pull_s']:.1f} ms (predicted "
                f"{1e3 * change['predicted_pull_s']:.1f}), push {change['push_bytes'] / 1e6:.1f} MB in "
                f"{1e3 * change['push_s']:.1f} ms (predicted {1e3 * change['predicted_push_s']:.1f})"
            )
        )
        log.info("step %d: strategy %s, %s", record["step"], record["strategy"], moved)
    for at, note in enumerate(record["notes"]):
        log.info("step %d: plan %d: %s", record["step"], at, note)
    if record["waiting_tokens"] or record["drawn_tokens"] != record["trained_tokens"]:
        log.info(
            "step %d: %d tokens drawn, %d trained, %d waiting in %d documents; since the run began %d = %d + %d",
            record["step"],
            record["drawn_tokens"],
            record["trained_tokens"],
            record["waiting_tokens"],
            record["waiting_sequences"],
            record["run_tokens"]["drawn"],
            record["run_tokens"]["trained"],
            record["waiting_tokens"],
        )


class LineFile:
    """Lines appended to a file."""

    # One that cannot be written, as where the disk is full, is left out, with one warning until
    # writing works again. A line that an earlier process was killed in stays as it is.

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._torn = _is_torn(path)
        self._left_out = 0

    def move_from(self, first: Callable[[bytes], bool], aside: Path) -> int:
        """Move the lines from the one on for which `first` holds to file `aside`: their number."""
        # A file that cannot be read or cut stays whole.
        if not self._path.is_file():  # a pipe or a device
            return 0
        try:
            with self._path.open("rb") as stream:
                kept = 0
                for line in stream:
                    if first(line):
                        break
                    kept += len(line)
                else:
                    return 0
                moved = [line, *stream]
            with aside.open("ab") as into:
                into.writelines(moved)
            os.truncate(self._path, kept)
        except OSError as error:
            log.warning("%s: steps that run again stay in it twice (%s)", self._path, error.strerror)
            return 0
        self._torn = False
        return len(moved)

    def add(self, line: str) -> None:
        """Write a line, given without its end."""
        # A line that was torn ends where it is, and the next one begins behind it.
        data = (("\n" if self._torn else "") + line + "\n").encode()
        try:
            written = self._file.write(data)
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        if written != len(data):
            self._torn = written > 0 or self._torn
            self._failed("no space for all of a line")
            return
        if self._left_out:
            log.warning("%s: written again; %d lines before this one are missing", self._path, self._left_out)
        self._torn, self._left_out = False, 0

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.warning("%s: not closed in order (%s)", self._path, error.strerror)

    def _failed(self, why: str) -> None:
        if not self._left_out:
            log.warning("%s: a line could not be written (%s); training goes on without it", self._path, why)
        self._left_out += 1


def _is_torn(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            if not stream.seek(0, os.SEEK_END):
                return False
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) != b"\n"
    except OSError:  # not one that can be read, such as a pipe
        return False

"""Proof of some plans of a running job: of the first ones, and then of every so many.

The planning process forks a child of least priority for one step at a time; nobody waits for it.
Ranks have equal plans, so rank 0 proves them. But the proof of a ring grows with the square of its
ranks: where a plan has many, each rank proves its own part (`compile.proof.runs`).
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from megatron_balance.compile.halo import under
from megatron_balance.compile.proof.meaning import NotAloneError
from megatron_balance.compile.proof.runs import provable, prove, prove_rank
from megatron_balance.errors import BalanceError
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Policy
from megatron_balance.ir.step import StepPlan

# Steps at the beginning, each of which is proved if no other still is.
FIRST = 3
# Processor time of the proof of a step, and memory beside what the planning process holds.
LIMIT_S, LIMIT_BYTES = 300, 4 << 30
# Ranks of a plan from which on each of them proves its own part.
BY_RANK = 64
POLICIES: tuple[Policy, Policy] = ("keep", "replay")
NICENESS = 19
# Exit code of a proof that reached a limit.
_LEFT_OUT = 3


@dataclass(frozen=True, slots=True)
class Proofs:
    """Outcomes so far: steps whose plans are `proved`, and `left_out` since a limit was reached."""

    proved: int = 0
    left_out: int = 0
    wrong: str = ""
    """The first plan that does not hold, and why; empty: all do."""

    def __add__(self, other: "Proofs") -> "Proofs":
        return Proofs(self.proved + other.proved, self.left_out + other.left_out, self.wrong or other.wrong)


NONE = Proofs()


def prove_step(step: StepPlan, rank: int | None = None, masks: Sequence[Mask] = (CAUSAL,)) -> None:
    """Prove all plans of a step, with either way of the backward. `masks`: of the model's layers.

    Raises:
        InvalidProgramError: one that does not hold.
    """
    for plan, of_rank in _due_to(step, rank, masks):
        for policy in POLICIES:
            try:
                if of_rank is not None:
                    prove_rank(plan, of_rank, policy)
                    continue
            except NotAloneError:
                pass
            prove(plan, policy)


def _due_to(
    step: StepPlan, rank: int | None, masks: Sequence[Mask] = (CAUSAL,)
) -> list[tuple[MicrobatchPlan, int | None]]:
    """The plans that `rank` proves, each with the rank whose part alone; None: all of it."""
    pool_ranks = rank is not None and not step.ticks and step.strategy is None
    found: list[tuple[MicrobatchPlan, int | None]] = []
    made = (*step.plans, *(one.plan for ticks in step.ticks for one in ticks))
    for plan in dict.fromkeys(of for one in made for of in (one, *(under(one, mask) for mask in masks[1:]))):
        if pool_ranks and plan.num_ranks >= BY_RANK and provable(plan):
            found.append((plan, rank))
        elif not rank:
            found.append((plan, None))
    return found


class Prover:
    """Proves the first steps that it is offered, then one of every `every`, in a child process."""

    def __init__(
        self, every: int, check: Callable[[StepPlan, int | None], None] = prove_step, *, rank: int | None = None
    ) -> None:
        """`every`: 0: none. `rank`: of the pool; None: the only one that proves."""
        self._every, self._check, self._rank = every, check, rank
        self._offered = 0
        self._due = False
        self._child: tuple[int, int, str] | None = None
        self._outcomes = Proofs()

    def offer(self, step: StepPlan) -> None:
        if not self._every:
            return
        self._due = self._due or self._offered < FIRST or self._offered % self._every == 0
        self._offered += 1
        self.outcomes()
        if self._due and self._child is None:
            self._due = False
            if _due_to(step, self._rank):
                self._begin(step)

    def outcomes(self, *, wait: bool = False) -> Proofs:
        """Of all proofs that have ended; `wait`: for the one that runs, too."""
        if self._child is not None:
            pid, pipe, fingerprint = self._child
            ended, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if ended:
                self._child = None
                with os.fdopen(pipe, "rb") as stream:
                    said = stream.read().decode(errors="replace")
                code = os.waitstatus_to_exitcode(status)
                wrong = f"step plan {fingerprint}: {said}" if said else ""
                self._outcomes += Proofs(int(code == 0), int(code != 0 and not wrong), wrong)
        return self._outcomes

    def close(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child[0], signal.SIGKILL)
            self.outcomes(wait=True)

    def _begin(self, step: StepPlan) -> None:
        theirs, ours = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._in_child(step, ours, parent)
        os.close(ours)
        self._child = pid, theirs, step.fingerprint()

    def _in_child(self, step: StepPlan, answer: int, parent: int) -> NoReturn:
        """Prove, tell what is wrong, and end, whatever happens; with the parent at the latest."""
        code = _LEFT_OUT
        try:
            # What the parent talks through ends with it alone.
            os.closerange(3, answer)
            os.closerange(answer + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            _limit_self()
            end_with(parent, _LEFT_OUT)
            self._check(step, self._rank)
            code = 0
        except BalanceError as error:
            os.write(answer, str(error).encode()[:4000])
            code = 1
        except MemoryError:
            code = _LEFT_OUT
        except BaseException as error:  # a fault of the proof itself says nothing of the plan; it is counted
            with suppress(OSError):
                os.write(2, f"proof of a plan: {error!r}\n".encode()[:4000])
        finally:
            os._exit(code)


def _limit_self() -> None:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as stream:
            held = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT_BYTES, held + LIMIT_BYTES))


def end_with(parent: int, code: int) -> None:
    """End with `code` once the parent is gone; looks every second."""

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(code)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)

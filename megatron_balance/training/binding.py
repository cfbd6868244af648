"""Plans bound for this rank with what is the same for all of a job's plans."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TypeAlias

import torch

from megatron_balance.analysis.backward import Decision
from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import BOTH_PHASES, PhaseName
from megatron_balance.compile.recurrent import compile_recurrent, program_of
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Fragment, Rows
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.recurrent import RecurrentProgram
from megatron_balance.runtime.bind import BindOptions, Bound, Prepared, prepare
from megatron_balance.runtime.groups import Groups, single
from megatron_balance.runtime.recorder import Recorder
from megatron_balance.runtime.recurrent import RecurrentBound, bind_recurrent

log = logging.getLogger(__name__)

# Fingerprint, nano-batch, policies, phases and pool: what a prepared plan of a job depends on.
Key: TypeAlias = tuple[str, int, tuple[Policy, ...], frozenset[PhaseName], Groups]


class BindAhead:
    """A thread that prepares plans before they are asked for (`runtime.bind.prepare`). An error is
    raised where the plan is taken, if it is.
    """

    def __init__(self) -> None:
        # Tables go to the device, and whatever is collective happens, in the training thread
        # (`ship`): this thread touches neither the device nor other ranks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bind ahead")
        self._prepared: dict[Key, Future[Prepared]] = {}
        self._lock = Lock()

    def expect(self, key: Key, make: Callable[[], Prepared]) -> None:
        """Prepare a plan that will be asked for by `key`. Of one key once. Any thread."""
        with self._lock:
            if key not in self._prepared:
                self._prepared[key] = self._thread.submit(make)

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job that calls `expect`, behind what was expected before."""
        self._thread.submit(_logged, job)

    def take(self, key: Key) -> Prepared | None:
        """The plan prepared for `key`, waited for if it is being prepared; None: nobody expected
        it, or its turn has not come. Raises what `prepare` raised, with a note that says where.
        """
        with self._lock:
            future = self._prepared.pop(key, None)
        # A plan whose turn has not come is bound by the caller, who would only wait for it.
        if future is None or future.cancel():
            return None
        try:
            return future.result()
        except Exception as error:
            error.add_note(f"raised in the thread that binds ahead, of plan {key[0]}, nano-batch {key[1]}")
            raise

    def forget_all_but(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in self._prepared.keys() - set(keys):
                self._prepared.pop(key).cancel()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:  # nothing depends on it: what is not prepared is bound when it is asked for
        log.warning("the coming step's plans could not be bound ahead; they are bound in their step", exc_info=True)


@dataclass(frozen=True, slots=True)
class Binder:
    """Facts of a job that every bound plan needs. `options`: over the ranks that attend together."""

    options: BindOptions
    ahead: BindAhead | None = None
    recorder: Recorder | None = None
    masks: tuple[Mask, ...] = (CAUSAL,)  # of the model's layers, the one that plans are made for first

    def plans(self, plan: MicrobatchPlan) -> dict[str, MicrobatchPlan]:
        """The plans of the layers of each mask, by its name, of a plan made for the first mask."""
        first, *others = self.masks
        return {first.name: plan} | {mask.name: under(plan, mask) for mask in others}

    def bind(
        self,
        plan: MicrobatchPlan,
        policies: tuple[Policy, ...],
        nano_batch: int = 0,
        phases: Collection[PhaseName] = BOTH_PHASES,
        *,
        number: int = -1,
    ) -> tuple[Bound, ...]:
        """Bind `plan` for this rank by each policy, as `runtime.bind.bind`; what they share is
        looked up once. All ranks bind the same plans in one order. `number`: of the plan in its
        step, for a trace.
        """
        prepared = None if self.ahead is None else self.ahead.take(self.key(plan, policies, nano_batch, phases))
        bounds = (prepared or self._prepare(plan, policies, nano_batch, phases)).ship()
        if self.recorder is None:
            return bounds
        self.recorder.watch(self.options.groups.streams)
        return tuple(replace(bound, recorder=self.recorder, number=number) for bound in bounds)

    def expect(
        self,
        plan: MicrobatchPlan,
        policies: tuple[Policy, ...],
        nano_batch: int = 0,
        phases: Collection[PhaseName] = BOTH_PHASES,
    ) -> None:
        """Say that the plan will be bound with these arguments: it may then be prepared."""
        if self.ahead is not None:
            make = partial(self._prepare, plan, policies, nano_batch, phases)
            self.ahead.expect(self.key(plan, policies, nano_batch, phases), make)

    def key(
        self, plan: MicrobatchPlan, policies: tuple[Policy, ...], nano_batch: int, phases: Collection[PhaseName]
    ) -> Key:
        return plan.fingerprint(), nano_batch, policies, frozenset(phases), self.options.groups

    def _prepare(
        self, plan: MicrobatchPlan, policies: tuple[Policy, ...], nano_batch: int, phases: Collection[PhaseName]
    ) -> Prepared:
        options = replace(self.options, nano_batch=nano_batch, phases=phases)
        if torch.device(options.device).type == "cuda":  # another thread begins on device 0
            torch.cuda.set_device(options.device)
        return prepare(plan, options.groups.rank, options, policies)


class RecurrentBounds:
    """A plan bound for recurrent layers; a program when the first layer asks for it, and once."""

    def __init__(
        self,
        program: Callable[[int, int], RecurrentProgram],
        groups: Groups,
        device: torch.device | str = "cpu",
        wire: torch.dtype | None = None,
    ) -> None:
        """`program`: of heads and halo; `groups`: of its ranks; others: of `bind_recurrent`."""
        self._program, self._bind = program, partial(bind_recurrent, groups=groups, device=device, wire=wire)
        self._bound: dict[tuple[int, int], RecurrentBound] = {}

    @classmethod
    def of_plan(
        cls, plan: MicrobatchPlan, groups: Groups, device: torch.device | str = "cpu", wire: torch.dtype | None = None
    ) -> "RecurrentBounds":
        return cls(partial(compile_recurrent, plan), groups, device, wire)

    @classmethod
    def alone(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "RecurrentBounds":
        """Of one rank that has whole sequences, one behind the other."""
        owned = [Rows.of(Fragment.WIDTH, [(seq, 0, length) for seq, length in enumerate(lengths)])]
        return cls(partial(program_of, lengths, owned), single(), device)

    def of(self, num_heads: int, halo: int) -> RecurrentBound:
        """The program for layers of so many heads on this rank, and of so many rows before a token."""
        key = num_heads, halo
        if key not in self._bound:
            self._bound[key] = self._bind(self._program(num_heads, halo))
        return self._bound[key]


@dataclass(frozen=True, slots=True)
class MaskBounds:
    """A plan bound for the layers of each mask, by its name and by what keeping costs."""

    # For layers that keep what they received, with a number up to `keeping`
    # (`analysis.backward.held_layers`), and for those that receive it again, if there are any:
    # their backward programs differ.
    by_mask: Mapping[str, Mapping[Policy, Bound]]
    keeping: int
    recurrent: RecurrentBounds

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """All that there are, once."""
        distinct = {id(by_policy): by_policy for by_policy in self.by_mask.values()}
        return tuple(bound for by_policy in distinct.values() for bound in by_policy.values())

    def of_layer(self, number: int, mask: Mask) -> Bound:
        """The plan that a layer runs; InvalidProgramError: it was not bound for the layer's mask."""
        if mask.name not in self.by_mask:
            raise InvalidProgramError(
                f"a layer attends under mask {mask.name}, and the plan was bound for {' and '.join(self.by_mask)}"
            )
        by_policy = self.by_mask[mask.name]
        return by_policy.get("keep" if number <= self.keeping else "replay") or next(iter(by_policy.values()))


def policies_of(decision: Decision | None) -> tuple[Policy, ...]:
    """The policies by which a plan is bound; without a decision nothing is kept (evaluation)."""
    if decision is None or not decision.keeping:
        return ("replay",)
    return ("keep",) if decision.kept_share == 1 else ("keep", "replay")


def bind_layers(
    binder: Binder,
    plan: MicrobatchPlan,
    decision: Decision | None,
    nano_batch: int = 0,
    phases: Collection[PhaseName] = BOTH_PHASES,
    *,
    number: int = -1,
) -> MaskBounds:
    """Bind `plan` for the layers of each mask, and of these those that keep and those that replay."""
    policies = policies_of(decision)
    bound: dict[str, Mapping[Policy, Bound]] = {}
    by_mask: dict[str, Mapping[Policy, Bound]] = {}
    for mask, own in binder.plans(plan).items():
        key = own.fingerprint()  # a window that shows whole sequences has the first mask's plan
        if key not in bound:
            # The backward program depends on the policy: layers that keep have another than those
            # that replay.
            bounds = binder.bind(own, policies, nano_batch, phases, number=number)
            bound[key] = dict(zip(policies, bounds, strict=True))
        by_mask[mask] = bound[key]
    recurrent = RecurrentBounds.of_plan(plan, binder.options.groups, binder.options.device)
    return MaskBounds(by_mask, 0 if decision is None else decision.keeping, recurrent)

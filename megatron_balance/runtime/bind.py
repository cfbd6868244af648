"""Bind a plan to one rank: project, transpose, and look up every row once per microbatch.

The executor then serves every layer and every recomputation without planning, and without Python
work per token. Only the phases that will run are looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_balance.compile.pipeline import compile_policies
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.mask import SlidingWindow
from megatron_balance.ir.model import GradientWire
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.counters import Counters
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels import kernel_of_widths
from megatron_balance.runtime.kernels.base import Kernel
from megatron_balance.runtime.kernels.latent import LatentKernel, check_latent
from megatron_balance.runtime.lower.lowering import Lowering, Setting
from megatron_balance.runtime.lower.moves import Sites, moves_of
from megatron_balance.runtime.lower.parcels import CallForm
from megatron_balance.runtime.lower.peak_bytes import PeakBytes, peak_bytes
from megatron_balance.runtime.lower.steps import BOTH_PHASES, FinishStep, Phase, PhaseName
from megatron_balance.runtime.lower.tables import ship, tables_of
from megatron_balance.runtime.lower.views import ExchangeForm, Rooms, Sizes
from megatron_balance.runtime.movers import choose_mover
from megatron_balance.runtime.movers.base import Mover
from megatron_balance.runtime.recorder import Recorder
from megatron_balance.runtime.shape import AttentionShape
from megatron_balance.runtime.trace import Trace
from megatron_balance.runtime.transport.comm import brought, is_block, sent
from megatron_balance.runtime.transport.connect import connect

__all__ = ["AttentionShape", "Bound", "Counters", "Prepared", "bind", "prepare"]

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A plan, looked up for one rank. One serves all layers of its microbatch.

    Immutable but for `counters` and `trace`.

    Attributes:
        owned: int64 [n, 3], `ir.columns.Fragment`; the order of this rank's tokens.
        phases: those that it was bound for.
        peak_bytes: memory that a call needs, where it comes from the pool.
        query_rows: (rows, heads) of every query buffer, by number.
        key_rows: of every key buffer.
        exchange_forms: what is the same in every layer about the exchanges of a phase, by the phase's
            `id` and theirs.
        rooms: memory that tensors of a phase share, by the phase's `id`.
        gradient_wire: the type that gradients travel in.
        counters: sums over the calls that ran so far.
        trace: filled by every call, if there is one.
        recorder: of a traced step, told of every call.
        number: of the microbatch in its step, for the recorder.
    """

    plan: MicrobatchPlan
    rank: int
    shape: AttentionShape
    owned: Ints
    num_tokens: int
    policy: Policy
    phases: Mapping[PhaseName, Phase]
    groups: Groups
    kernel: Kernel
    mover: Mover
    peak_bytes: PeakBytes | None
    query_rows: dict[int, tuple[int, int]]
    key_rows: dict[int, tuple[int, int]]
    exchange_forms: Mapping[int, Mapping[int, ExchangeForm]]
    rooms: Mapping[int, Rooms]
    gradient_wire: GradientWire = "fp32"
    counters: Counters = field(default_factory=Counters)
    trace: Trace | None = None
    recorder: Recorder | None = None
    number: int = -1

    @property
    def forward(self) -> Phase:
        """The steps of the forward.

        Raises:
            InvalidProgramError: the plan was bound without.
        """
        return self._phase("forward")

    @property
    def backward(self) -> Phase:
        """The steps of the backward.

        Raises:
            InvalidProgramError: the plan was bound without.
        """
        return self._phase("backward")

    def _phase(self, name: PhaseName) -> Phase:
        if name not in self.phases:
            raise InvalidProgramError(
                f"the {name} of plan {self.plan.fingerprint()} shall run on rank {self.rank}, which bound it for its "
                f"{' and '.join(self.phases) or 'layout'} only; name it in bind(phases=...)"
            )
        return self.phases[name]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A plan looked up for one rank, with its tables still on the host.

    Made without touching the device or another rank, so that another thread may do it ahead of time.

    Attributes:
        bounds: of each policy, complete but for the tables' place.
        tables: tensors on the host; some may come twice.
        device: that they go to.
    """

    bounds: tuple[Bound, ...]
    tables: Sequence[Tensor]
    device: torch.device

    def ship(self) -> tuple[Bound, ...]:
        """Connect new pairs of ranks, make room in the pool, and copy all tables to the device.

        Call it once, in the thread that will run the plan; all ranks do so in one order.
        """
        groups = self.bounds[0].groups
        connect([phase for bound in self.bounds for phase in bound.phases.values()], groups)
        for bound in self.bounds:
            if bound.peak_bytes is not None:
                groups.buffers.reserve(bound.peak_bytes.call_bytes)
        ship(self.tables, self.device)
        return self.bounds


def bind(  # noqa: PLR0913  what the tensors are is six keyword-only facts, each with a default
    plan: MicrobatchPlan,
    rank: int,
    shape: AttentionShape,
    *,
    groups: Groups,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    policy: Policy = "keep",
    kernel: str = "auto",
    mover: str = "auto",
    trace: Trace | None = None,
    nano_batch: int = 0,
    gradient_wire: GradientWire = "fp32",
    phases: Collection[PhaseName] = BOTH_PHASES,
) -> Bound:
    """Look up everything that `rank` needs to run `plan`: steps, rows, messages, kernel.

    Arguments and errors as for `prepare`.
    """
    return prepare(
        plan,
        rank,
        shape,
        groups=groups,
        device=device,
        dtype=dtype,
        policies=(policy,),
        kernel=kernel,
        mover=mover,
        trace=trace,
        nano_batch=nano_batch,
        gradient_wire=gradient_wire,
        phases=phases,
    ).ship()[0]


def prepare(  # noqa: PLR0913  as `bind`
    plan: MicrobatchPlan,
    rank: int,
    shape: AttentionShape,
    *,
    groups: Groups,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    policies: Sequence[Policy] = ("keep",),
    kernel: str = "auto",
    mover: str = "auto",
    trace: Trace | None = None,
    nano_batch: int = 0,
    gradient_wire: GradientWire = "fp32",
    phases: Collection[PhaseName] = BOTH_PHASES,
) -> Prepared:
    """The first part of `bind`, which needs neither the device nor another rank.

    Args:
        plan: of one microbatch.
        rank: in the pool.
        shape: heads of the tensors.
        groups: the rank's view of its pool.
        device: of the tensors.
        dtype: of the tensors.
        policies: whether the backward keeps what the forward received, or receives it again. By
            both, what they share is looked up once, and all tables are shipped together.
        kernel: as for `runtime.kernels.choose_kernel`.
        mover: as for `runtime.movers.choose_mover`.
        trace: a list to record in, by wall clock (CPU).
        nano_batch: of two plans whose calls run interleaved (`compile.ping_pong`), the number of
            this one; equal on all ranks.
        gradient_wire: the type that gradients travel in; equal on all ranks.
        phases: those that will run; nothing is looked up for the others.

    Raises:
        ConfigError: the plan was made for other heads or another number of ranks, or policy keep
            without one of the phases.
        InvalidProgramError: a broken plan.
    """
    if (plan.num_heads, plan.num_kv_heads) != (shape.num_heads, shape.num_kv_heads):
        raise ConfigError(
            f"the plan is for {plan.num_heads} query and {plan.num_kv_heads} key-value heads, the tensors have "
            f"{shape.num_heads} and {shape.num_kv_heads}"
        )
    if plan.num_ranks != groups.size:
        raise ConfigError(f"the plan is for {plan.num_ranks} ranks, the pool has {groups.size}")
    if "keep" in policies and not set(BOTH_PHASES) <= set(phases):
        raise ConfigError(
            "policy keep hands what the forward received to the backward: bind both phases, or with policy replay"
        )
    place, form = torch.device(device), CallForm.of(shape, dtype, gradient_wire)
    windows = isinstance(plan.mask, SlidingWindow)
    chosen: Any = kernel_of_widths(kernel, place, dtype, shape.widths, windows=windows)
    moves = choose_mover(mover, place)
    if shape.latent is not None:
        check_latent(plan)
        chosen = LatentKernel(chosen, shape)
    bounds: list[Bound] = []
    tables: list[Tensor] = []
    like: Lowering | None = None
    compiled_by = compile_policies(plan, rank, policies, phases=phases, passing=not groups.safe)
    for policy, compiled in zip(policies, compiled_by, strict=True):
        program = compiled.program
        setting = Setting(plan.ranks_per_node, (compiled.forward, compiled.backward), nano_batch, phases)
        like = lowering = Lowering(program, shape, _HOST, policy, chosen, setting, like)
        sizes = (lowering.sizes[Kind.Q], lowering.sizes[Kind.KV])
        needs = None
        if groups.buffers.lends(place):
            needs = peak_bytes(lowering.phases, sizes, form, keep=policy == "keep")
        steps = lowering.phases.values()
        tables += [table for phase in steps for table in tables_of(phase)]
        forms = {id(phase): exchange_forms(phase, form, groups, sizes) for phase in steps}
        sites: Sites = {}
        rooms = {id(phase): Rooms() for phase in steps}
        calls = [moves_of(phase, sizes, form, forms[id(phase)], sites, rooms[id(phase)]) for phase in steps]
        tables += moves.prepare(list(chain.from_iterable(calls)), sizes[0], form)  # fills the rooms, too
        owned = as_array(program.owned)
        bound = Bound(
            plan=plan,
            rank=rank,
            shape=shape,
            owned=owned,
            num_tokens=int((owned[:, Fragment.STOP] - owned[:, Fragment.START]).sum()),
            policy=policy,
            phases=lowering.phases,
            groups=groups,
            kernel=chosen,
            mover=moves,
            peak_bytes=needs,
            query_rows=lowering.sizes[Kind.Q],
            key_rows=lowering.sizes[Kind.KV],
            exchange_forms=forms,
            rooms=rooms,
            gradient_wire=gradient_wire,
            trace=trace,
        )
        bounds.append(bound)
    return Prepared(tuple(bounds), tables, place)


def exchange_forms(phase: Phase, form: CallForm, groups: Groups, sizes: tuple[Sizes, Sizes]) -> dict[int, ExchangeForm]:
    """Facts of the exchanges of a phase that are the same in every layer, by their id. `sizes`: of
    query and key buffers.
    """
    found: dict[int, ExchangeForm] = {}
    for step in phase.steps:
        if isinstance(step, FinishStep):  # it says more about what arrives than the start does
            exchange = step.exchange
            sides = (sent(exchange, groups), brought(exchange, groups))
            found[exchange.id] = ExchangeForm.of(exchange, sides, form, sizes, is_block=is_block(exchange, groups))
    return found

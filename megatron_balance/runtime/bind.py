"""Bind a plan to one rank: project, transpose, and look up every row once per microbatch.

The executor then serves every layer and every recomputation without planning, and without Python
work per token. Only the phases that will run are looked up.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_balance.compile.pipeline import BOTH_PHASES, PhaseName, compile_policies
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.arrays import Ints, as_array
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.model import GradientWire
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.kernels import choose_kernel
from megatron_balance.runtime.kernels.base import Kernel
from megatron_balance.runtime.kernels.latent import LatentKernel, check_latent
from megatron_balance.runtime.lower.lowering import Lowering, Setting
from megatron_balance.runtime.lower.memory import AttentionShape, CallForm, PeakBytes, PhaseMemory, peak_bytes
from megatron_balance.runtime.lower.moves import Sites, moves_of
from megatron_balance.runtime.lower.steps import FinishStep, GradLaunch, IssueStep, Launch, Packed, Phase
from megatron_balance.runtime.movers import choose_mover
from megatron_balance.runtime.movers.base import Mover
from megatron_balance.runtime.recorder import Counters, Recorder, Trace
from megatron_balance.runtime.transport import connect

__all__ = ["AttentionShape", "BindOptions", "Bound", "Counters", "Prepared", "bind", "prepare"]


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A plan, looked up for one rank, for all layers of its microbatch. Immutable but for counts."""

    plan: MicrobatchPlan
    rank: int
    shape: AttentionShape
    # int64 [n, 3], `ir.columns.Fragment`, in the order of this rank's tokens.
    owned: Ints
    num_tokens: int
    policy: Policy
    phases: Mapping[PhaseName, Phase]
    groups: Groups
    kernel: Kernel
    mover: Mover
    # That a call needs, where memory comes from the pool.
    peak_bytes: PeakBytes | None
    # (rows, heads) of each buffer, by number; of keys likewise.
    query_rows: dict[int, tuple[int, int]]
    key_rows: dict[int, tuple[int, int]]
    memory: Mapping[PhaseName, PhaseMemory]
    gradient_wire: GradientWire = "fp32"
    counters: Counters = field(default_factory=Counters)
    trace: Trace | None = None
    recorder: Recorder | None = None
    # Of the microbatch in its step.
    number: int = -1

    def phase(self, name: PhaseName) -> Phase:
        """Raises InvalidProgramError where the plan was bound without."""
        if name not in self.phases:
            raise InvalidProgramError(
                f"the {name} of plan {self.plan.fingerprint()} shall run on rank {self.rank}, which bound it for its "
                f"{' and '.join(self.phases) or 'layout'} only; name it in bind(phases=...)"
            )
        return self.phases[name]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A plan looked up for one rank, with its tables still on the host."""

    # Made without touching the device or another rank, so that another thread may do it ahead of
    # time.
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
        ship(self.tables, self.device, groups.buffers.pinned_bytes)
        return self.bounds


@dataclass(frozen=True, slots=True)
class BindOptions:
    """The tensors of the calls that plans are bound for, and how these run."""

    # Heads of the tensors; `groups`: the rank's view of its pool.
    shape: AttentionShape
    groups: Groups
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    # As for `runtime.kernels.choose_kernel`, and for `runtime.movers.choose_mover`.
    kernel: str = "auto"
    mover: str = "auto"
    # A list to record in, by wall clock (CPU).
    trace: Trace | None = None
    # Of two plans whose calls run interleaved (`compile.ping_pong`), the number of this one; equal
    # on all ranks, as the type is in which gradients travel.
    nano_batch: int = 0
    gradient_wire: GradientWire = "fp32"
    # Those that will run; nothing is looked up for the others.
    phases: Collection[PhaseName] = BOTH_PHASES


def bind(plan: MicrobatchPlan, rank: int, shape: AttentionShape, *, policy: Policy = "keep", **options: Any) -> Bound:
    """Look up all that `rank` needs for `plan`; `options`: of `BindOptions`; errors: of `prepare`."""
    return prepare(plan, rank, BindOptions(shape, **options), (policy,)).ship()[0]


def prepare(plan: MicrobatchPlan, rank: int, options: BindOptions, policies: Sequence[Policy] = ("keep",)) -> Prepared:
    """The first part of `bind`, which needs neither the device nor another rank. By several
    `policies` what they share is looked up once, and all tables are shipped together.

    ConfigError: the plan was made for other heads or ranks, or policy keep without one of the
    phases. InvalidProgramError: a broken plan.
    """
    _check(plan, options, policies)
    groups, shape, device = options.groups, options.shape, torch.device(options.device)
    asks: Any = {"value_dim": shape.value_dim, "windows": plan.mask.window_size > 0, "softcap": shape.softcap}
    kernel: Any = choose_kernel(options.kernel, device, options.dtype, shape.head_dim, **asks)
    if shape.latent is not None:
        check_latent(plan)
        kernel = LatentKernel(kernel, shape)
    mover = choose_mover(options.mover, device)
    form = CallForm.of(shape, options.dtype, options.gradient_wire)
    setting = Setting(plan.ranks_per_node, options.nano_batch, options.phases)
    bounds: list[Bound] = []
    tables: list[Tensor] = []
    lowered: Lowering | None = None
    programs = compile_policies(plan, rank, policies, phases=options.phases, passing=not groups.safe)
    for policy, program in zip(policies, programs, strict=True):
        lowered = Lowering(program, shape, policy, kernel, setting, like=lowered)
        phases, sizes = lowered.phases, (lowered.sizes[Kind.Q], lowered.sizes[Kind.KV])
        lends = groups.buffers.lends(device)
        memory: dict[PhaseName, PhaseMemory] = {
            name: PhaseMemory.of(phase, form, groups, sizes) for name, phase in phases.items()
        }
        sites: Sites = {}  # where the forward left what the backward reads
        calls = [moves_of(phase, sizes, form, memory[name], sites) for name, phase in phases.items()]
        tables += chain.from_iterable(_tables_of(phase) for phase in phases.values())
        tables += mover.prepare(list(chain.from_iterable(calls)), sizes[0], form)
        owned = as_array(program.program.owned)
        bound = Bound(
            plan=plan,
            rank=rank,
            shape=shape,
            owned=owned,
            num_tokens=int((owned[:, Fragment.STOP] - owned[:, Fragment.START]).sum()),
            policy=policy,
            phases=phases,
            groups=groups,
            kernel=kernel,
            mover=mover,
            peak_bytes=peak_bytes(phases, sizes, form, keep=policy == "keep") if lends else None,
            query_rows=lowered.sizes[Kind.Q],
            key_rows=lowered.sizes[Kind.KV],
            memory=memory,
            gradient_wire=options.gradient_wire,
            trace=options.trace,
        )
        bounds.append(bound)
    return Prepared(tuple(bounds), tables, device)


def _check(plan: MicrobatchPlan, options: BindOptions, policies: Sequence[Policy]) -> None:
    shape = options.shape
    if (plan.num_heads, plan.num_kv_heads) != (shape.num_heads, shape.num_kv_heads):
        raise ConfigError(
            f"the plan is for {plan.num_heads} query and {plan.num_kv_heads} key-value heads, the tensors have "
            f"{shape.num_heads} and {shape.num_kv_heads}"
        )
    if plan.num_ranks != options.groups.size:
        raise ConfigError(f"the plan is for {plan.num_ranks} ranks, the pool has {options.groups.size}")
    if "keep" in policies and not set(BOTH_PHASES) <= set(options.phases):
        raise ConfigError(
            "policy keep hands what the forward received to the backward: bind both phases, or with policy replay"
        )


ALIGN = 16  # bytes. Triton compiles a kernel anew for pointers that are not aligned so.


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: itself, or those in its tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _tables_of(phase: Phase) -> Iterator[Tensor]:
    """The tables in a phase's steps; some may come twice."""
    for step in phase.steps:
        match step:
            case Launch():
                yield from _of_packed(step.q.packed, step.k.packed, step.out)
                yield from _tensors_in(step.entries)
            case GradLaunch():
                yield from _of_packed(step.q.packed, step.k.packed, step.dout.packed, step.dq, step.dk)
                yield from _tensors_in(step.entries)
            case IssueStep(exchange):
                yield from _of_packed(*(message.packed for message in exchange.sends))
            case FinishStep(exchange):
                yield from _of_packed(*(message.packed for message in exchange.receives))


def _of_packed(*packed: Packed) -> Iterator[Tensor]:
    return (index for one in packed for index in one.indices if index is not None)


def ship(tables: Iterable[Tensor], device: torch.device, pinned_bytes: Callable[[int], int] = int) -> int:
    """Make tables on the host views of one block on `device`; the bytes of that block. In place:
    the tensors are the same objects afterwards. `pinned_bytes`: `BufferPool`'s.
    """
    # Hundreds of them, copied one by one from pageable memory, would hold up the host for longer
    # than a layer's kernels run. The copy is issued to the device's current stream, and the host
    # does not wait for it.
    by_dtype: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for table in tables:
        by_dtype[table.dtype][id(table)] = table
    parts: list[tuple[torch.dtype, list[Tensor], list[int], int]] = []
    num_bytes = 0
    for dtype, named in by_dtype.items():
        held, step = list(named.values()), max(1, ALIGN // dtype.itemsize)
        sizes = [-(-table.numel() // step) * step for table in held]
        parts.append((dtype, held, sizes, num_bytes))
        num_bytes += sum(sizes) * dtype.itemsize
    if not num_bytes:
        return 0
    pins = device.type == "cuda"
    pinned = torch.empty(pinned_bytes(num_bytes) if pins else num_bytes, dtype=torch.uint8, pin_memory=pins)[:num_bytes]
    for dtype, held, sizes, begin in parts:
        for table, place in zip(held, _places(pinned, dtype, sizes, begin), strict=True):
            place[: table.numel()] = table.numpy().reshape(-1)
    block = pinned.to(device, non_blocking=True)
    for dtype, held, sizes, begin in parts:
        views = block[begin : begin + sum(sizes) * dtype.itemsize].view(dtype).split(sizes)
        for table, view in zip(held, views, strict=True):
            table.data = view[: table.numel()].view(table.shape)
    return num_bytes


def _places(pinned: Tensor, dtype: torch.dtype, sizes: Sequence[int], begin: int) -> Iterator[Any]:
    values = pinned[begin : begin + sum(sizes) * dtype.itemsize].view(dtype).numpy()
    at = 0
    for size in sizes:
        yield values[at : at + size]
        at += size

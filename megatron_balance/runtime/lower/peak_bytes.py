"""Peak bytes of the pool that one call of a bound plan needs: its steps are walked once, with what
each takes and lets go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_balance.analysis.wire import padded, tensor_bytes
from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.memory import CallForm, Sizes
from megatron_balance.runtime.lower.steps import (
    INPUTS,
    ExchangeStep,
    FinishStep,
    GradLaunch,
    IssueStep,
    Launch,
    Operand,
    PeerMessage,
    Phase,
    PhaseName,
    Value,
    grads_of,
)

AHEAD = 2
"""Exchanges whose receives are posted before they are due: the most of any transport."""


@dataclass(frozen=True, slots=True)
class PeakBytes:
    """Bytes at once; 0 of a phase that will not run. `kept_bytes`: those that the forward leaves
    for the backward (policy keep).
    """

    forward_bytes: int
    backward_bytes: int
    kept_bytes: int

    @property
    def call_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)


def peak_bytes(
    phases: Mapping[PhaseName, Phase], sizes: tuple[Sizes, Sizes], form: CallForm, *, keep: bool
) -> PeakBytes:
    """Peak bytes of one call. `sizes`: of query and of key buffers."""
    kept = sum(_message_bytes(m, form) for m in _received(phases["forward"]) if m.kind in INPUTS) if keep else 0
    forward = _forward_bytes(phases["forward"], sizes[0], form) if "forward" in phases else 0
    backward = kept + _backward_bytes(phases["backward"], sizes, form) if "backward" in phases else 0
    return PeakBytes(forward, backward, kept)


def _forward_bytes(phase: Phase, queries: Sizes, form: CallForm) -> int:
    partials = sum(rows * heads * (form.value_width + 1) * form.wide.itemsize for rows, heads in queries.values())
    return partials + _peak(phase, form, {})


def _backward_bytes(phase: Phase, sizes: tuple[Sizes, Sizes], form: CallForm) -> int:
    queries, keys = sizes
    wide = form.wide.itemsize
    finals = sum(
        rows * heads * (2 * form.value_width * form.dtype.itemsize + wide)
        for buffer, (rows, heads) in queries.items()
        if buffer
    )
    grads = {(Kind.Q_GRAD, buffer): rows * heads * form.dim * wide for buffer, (rows, heads) in queries.items()}
    grads |= {
        (Kind.KV_GRAD, buffer): rows * heads * sum(form.kv_widths) * wide for buffer, (rows, heads) in keys.items()
    }
    owned = grads[Kind.Q_GRAD, 0] + grads[Kind.KV_GRAD, 0]
    return owned + finals + _peak(phase, form, grads)


def _message_bytes(message: PeerMessage, form: CallForm) -> int:
    """Bytes of the tensors that carry a message, each aligned."""
    return sum(padded(num_bytes) for num_bytes in tensor_bytes([message.carried], form.sizes))


def _received(phase: Phase) -> list[PeerMessage]:
    return [m for step in phase.steps if isinstance(step, FinishStep) for m in step.exchange.receives]


def _peak(phase: Phase, form: CallForm, grads: Mapping[Value, int]) -> int:
    """Most bytes of messages, gathered operands and gradients (`grads`: of each) beside received
    inputs, at any step.
    """
    live = peak = 0
    made: dict[Value, int] = {}  # gradients so far
    held: dict[Value, int] = {(m.kind, m.buffer): _message_bytes(m, form) for m in _received(phase) if m.kind in INPUTS}
    upcoming = [step.exchange for step in phase.steps if isinstance(step, IssueStep)]
    started = expected = 0
    for index, step in enumerate(phase.steps):
        # Those of the caller's rows, buffer 0, are there from the beginning (`_backward_bytes`).
        new = {value: grads[value] for value in grads_of(step) - made.keys() if value[1]}
        made |= new
        live += sum(new.values())
        match step:
            case IssueStep(exchange):
                started += 1
                # What posted receives bring has memory before it is due.
                live += sum(_side(s.receives, form) for s in upcoming[expected : started + AHEAD])
                expected = started + AHEAD
                live += _side(exchange.sends, form) + _call(exchange, form)
                peak = max(peak, live)
            case FinishStep(exchange):
                live -= (
                    _side(exchange.sends, form)
                    + _call(exchange, form)
                    + _side([m for m in exchange.receives if m.kind not in INPUTS], form)
                )
            case Launch() | GradLaunch():
                peak = max(peak, live + _gathered(step, form))
        live -= sum(held.get(value, 0) + made.get(value, 0) for value in phase.last_uses[index])
    return peak


def _side(messages: list[PeerMessage] | tuple[PeerMessage, ...], form: CallForm) -> int:
    return sum(_message_bytes(m, form) for m in messages)


def _call(exchange: ExchangeStep, form: CallForm) -> int:
    """Bytes that a collective call takes beside its messages, which an all-to-all has in place."""
    if exchange.collective in ("p2p", "all_to_all"):
        return 0
    sends, receives = (dict.fromkeys((m.peer for m in side), 0) for side in (exchange.sends, exchange.receives))
    for side, num_bytes in ((exchange.sends, sends), (exchange.receives, receives)):
        for message in side:
            num_bytes[message.peer] += _message_bytes(message, form)
    if exchange.collective == "all_gather":  # as wide for every rank as for the widest
        return (len(exchange.group) + 1) * max((*sends.values(), *receives.values()), default=0)
    return sum(sends.values()) + sum(receives.values())


def _gathered(step: Launch | GradLaunch, form: CallForm) -> int:
    def rows(operand: Operand, width: int) -> int:
        if operand.buffer >= 0:
            return 0
        return operand.packed.num_rows * operand.num_heads * width * form.dtype.itemsize

    num_bytes = rows(step.q, form.dim) + rows(step.k, sum(form.kv_widths))
    if isinstance(step, GradLaunch):
        num_bytes += (
            rows(step.dout, 2 * form.value_width)
            + (step.dout.buffer < 0) * step.dout.packed.num_rows * step.dout.num_heads * form.wide.itemsize
        )
    return num_bytes

"""The last step that touches a received input, or the gradient of one."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.steps import (
    ExchangeStep,
    FinishStep,
    GradLaunch,
    IssueStep,
    Launch,
    PeerMessage,
    Step,
)

INPUTS = (Kind.Q, Kind.KV)
GRADS = (Kind.Q_GRAD, Kind.KV_GRAD)
Value = tuple[Kind, int]
"""(kind, buffer) of inputs and of gradients."""


def last_uses(steps: Sequence[Step]) -> tuple[tuple[Value, ...], ...]:
    """For each step, the received inputs, and gradients beside them, that no later step touches."""
    last: dict[Value, int] = {}
    for index, step in enumerate(steps):
        match step:
            case IssueStep(exchange):
                touched = _sent_inputs(exchange)
            case FinishStep(exchange):
                touched = {(m.kind, m.buffer) for m in exchange.receives}
            case Launch() | GradLaunch():
                touched = step.reads
        for value in (*touched, *grads_of(step)):
            if value[1] > 0:
                last[value] = index
    last_of: list[list[Value]] = [[] for _ in steps]
    for value, index in sorted(last.items()):
        last_of[index].append(value)
    return tuple(tuple(values) for values in last_of)


def grads_of(step: Step) -> set[Value]:
    """The gradients that a step adds to or sends."""
    match step:
        case IssueStep(exchange):
            return _grads(exchange.sends)
        case FinishStep(exchange):
            return _grads(exchange.receives)
        case GradLaunch():
            return {(Kind.Q_GRAD, run.buffer) for run in step.dq.runs} | {
                (Kind.KV_GRAD, run.buffer) for run in step.dk.runs
            }
        case Launch():
            return set()


def _grads(messages: Sequence[PeerMessage]) -> set[Value]:
    return {(m.kind, run.buffer) for m in messages if m.kind in GRADS for run in m.packed.runs}


def _sent_inputs(exchange: ExchangeStep) -> set[Value]:
    return {(m.kind, run.buffer) for m in exchange.sends if m.kind in INPUTS for run in m.packed.runs}

"""Faults put into a rank of a training run: where, which, and at which call."""

import functools
import importlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

# Functions, as module:name or module:class.method, at whose call a rank fails; start: before all.
PLACES = {
    "start": "",
    "lengths": "megatron_balance.training.tokens:share_lengths",
    "plan": "megatron_balance.planning.step_planner:StepPlanner.plan",
    "tokens": "megatron_balance.training.tokens:TokenExchange.to_ranks",
    "bind": "megatron_balance.training.binding:Binder.bind",
    "forward": "megatron_balance.runtime.executor:ForwardRun.launch",
    "relay": "megatron_balance.runtime.transport:_Relay.post",
    "backward": "megatron_balance.runtime.executor:BackwardRun.launch",
    "attention": "megatron_balance.megatron.core_attention:balanced_attention",
    "log": "megatron_balance.training.log:StepLog.finish",
    "save": "megatron.core.dist_checkpointing:save",
    "evaluation": "megatron_balance.planning.step_planner:StepPlanner.plan_evaluation",
}
# More of them, in runs that change strategies.
OF_CHANGES = {
    "pull": "megatron_balance.training.weights:WeightExchange.pull_slot",
    "push": "megatron_balance.training.weights:WeightExchange.push_slot",
    "gradient": "megatron_balance.megatron.roles:Roles._add_to_main_grad",
}
KINDS = ("kill", "stop", "exception", "memory", "exit")


@dataclass(frozen=True)
class Fault:
    # `kind` at call number `call` (from 1) of the place, on rank `rank`.
    #
    # Wrong: every call gives half as much again; nan: the gradient of a call's parameter is no
    # number.
    place: str
    kind: str
    rank: int
    call: int = 1


def install(fault: Fault, rank: int) -> None:
    # Put the fault in, if it is this rank's.
    if rank != fault.rank:
        return
    places = {**PLACES, **OF_CHANGES}
    if not places[fault.place]:
        happen(fault.kind)
        return
    module, _, path = places[fault.place].partition(":")
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        holder = getattr(holder, each)
    real, calls = getattr(holder, name), [0]

    @functools.wraps(real)
    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if fault.kind == "wrong":
            return real(*args, **kwargs) * 1.5
        if calls[0] == fault.call:
            sys.stderr.write(f"injected: {fault.kind} at {fault.place}\n")
            sys.stderr.flush()
            if fault.kind == "nan":
                args[-1].grad.fill_(float("nan"))
                return real(*args, **kwargs)
            happen(fault.kind)
        return real(*args, **kwargs)

    setattr(holder, name, failing)


def happen(kind: str) -> None:
    # End or fail this process in a way.
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "memory":
            raise MemoryError("injected")
        case _:
            raise RuntimeError("injected")

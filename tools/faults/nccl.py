"""Parts of the NCCL path that need no GPU: random programs under the rendezvous of NCCL's hosts, and
what ranks give to their streams, checked for races.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tools.faults import rendezvous
from tools.faults.cases import Outcome
from tools.gpu_model.drawn import drawn

SAFE = 10
"""One program of so many is also tried as `communication: safe` compiles it."""


@contextmanager
def programs() -> Iterator[Callable[[int], Outcome]]:
    """Try program after program."""
    yield try_program


def try_program(number: int) -> Outcome:
    """One issue order, and no host that waits for ever: program `number` of `rendezvous`."""
    program = rendezvous.drawn(number)
    said = rendezvous.tried(program, passing=True)
    if not said and number % SAFE == 0:
        said = rendezvous.tried(program, passing=False)
    size = "large" if program.large else "small"
    layers = [
        word for word, has in (("remapped", program.plans[0].moves), ("replay", program.policy == "replay")) if has
    ]
    kind = f"{size} with {' and '.join(layers)}" if layers else size
    return Outcome(f"{program.planner}: {kind}", f"{program}: {said}" if said else "")


@contextmanager
def races() -> Iterator[Callable[[int], Outcome]]:
    """Record plan after plan."""
    yield try_races


def try_races(number: int) -> Outcome:
    """No two accesses of the same bytes that nothing orders: plan `number` of the model of the GPU."""
    program = drawn(number)
    found = next(iter(program.recorded().races()), None)
    if found:
        return Outcome(f"{program.planner}: a race", f"{program}: {found}")
    return Outcome(f"{program.planner}: no race, {program.way.policy}")

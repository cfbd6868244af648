"""Random trees under every planner, proved and judged; programs of trees with one thing changed."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import prove
from megatron_balance.compile.transpose import POLICIES
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.program import Program
from tools.faults.cases import Outcome

PER_PROGRAM = 20
"""Mutants of one program, half of them of its rows."""
_SIZES = ((8, 6), (8, 6), (25, 3), (4, 30), (60, 2))
"""Segments of a tree and tokens of a segment, at most."""
EXACT = 1e-12


@contextmanager
def forests() -> Iterator[Callable[[int], Outcome]]:
    """Plan forests, by one planner after the other, for proof and dense attention to agree with."""
    from tests.support import forests as support
    from tests.support.strategies import ALL_PLANNERS

    names = (*ALL_PLANNERS, *support.GATHERS)

    def one(number: int) -> Outcome:
        rng, name = random.Random(f"forests {number}"), names[number % len(names)]
        most, longest = rng.choice(_SIZES)
        forest, case = support.drawn(rng, most=most, longest=longest)
        kind = f"{name}: windowed" if forest.window else f"{name}: whole paths"
        try:
            plan = support.with_layers(rng, support.planned(name, forest, case))
            worst = support.worst_of(prove(plan, rng.choice(POLICIES)), forest)
        except Exception as error:  # a planner or a proof that raises anything is a fault
            return Outcome(f"{name}: raises", f"{type(error).__name__}: {error}")
        return Outcome(kind, "" if worst < EXACT else f"{worst:.1e} from dense attention")

    yield one


@contextmanager
def mutants() -> Iterator[Callable[[int], Outcome]]:
    """Change rows and masks of program after program: what is accepted must compute each pair that the
    mask shows once, and no other, by the entries of the executor's kernels.
    """
    from tests.support import forest_mutants

    def one(number: int) -> Outcome:
        at, which = divmod(number, PER_PROGRAM)
        made = _made(at)
        if which >= len(made):
            return Outcome("none of this program")
        how, mutant = made[which]
        assert isinstance(mutant.mask, Forest)
        try:
            verify(mutant)
        except InvalidProgramError:
            return Outcome(f"{how}: refused")
        same = forest_mutants.as_shown(mutant, mutant.mask)
        return Outcome(f"{how}: accepted", "" if same else "accepted, and computes something else")

    yield one


@lru_cache(maxsize=1)
def _made(number: int) -> list[tuple[str, Program]]:
    from tests.support import forest_mutants
    from tests.support import forests as support

    rng = random.Random(f"tree mutants {number}")
    forest, case = support.drawn(rng)
    names = ("random_task_table", "te_ring", "gather_sequence", "random_once_per_node")
    program = expand(support.planned(rng.choice(names), forest, case), None)
    others = forest_mutants.of_masks(rng, forest, PER_PROGRAM // 2)
    return [
        *((how, replace(program, mask=other)) for how, other in others),
        *forest_mutants.of_rows(rng, program, PER_PROGRAM // 2),
    ]

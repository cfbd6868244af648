"""Random layouts and plans of recurrent layers, proved and judged; programs with one thing changed."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from megatron_balance.compile.proof.recurrent import verify_recurrent
from megatron_balance.compile.recurrent import compile_recurrent, program_of
from megatron_balance.errors import ConfigError, InfeasibleError, InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import num_tokens
from megatron_balance.ir.model import Model
from megatron_balance.ir.recurrent import RecurrentProgram
from megatron_balance.ir.text import parse_recurrent, text
from tools.faults.cases import Outcome
from tools.faults.forests import EXACT

PER_PROGRAM = 20
"""Mutants of one program."""
JUDGED = 40
"""Of so many programs four are run, one of each sort; all are proved."""
_RANKS = (2, 3, 4, 8, 8, 16, 64)  # of layouts; plans have 8 at most


@contextmanager
def layouts() -> Iterator[Callable[[int], Outcome]]:
    """Prove programs of layouts cut at random, of documents and of trees, and of one planner's plans
    after the other's; read them back from text; run a tenth for each sequence alone to agree with.
    """
    from tests.support import recurrent

    def one(number: int) -> Outcome:
        of, drawn = _drawn(number)
        if drawn is None:
            return Outcome(f"{of}: refused by the planner")
        try:
            verify_recurrent(drawn)
            same = parse_recurrent(text(drawn)) == drawn
            kind = recurrent.KINDS[number % len(recurrent.KINDS)]
            worst = recurrent.off(drawn, number, kind) if number % JUDGED < 4 else 0.0
        except Exception as error:  # a proof or the judge that raises anything is a fault
            return Outcome(f"{of}: raises", f"{type(error).__name__}: {error}")
        sent = "sent something" if drawn.forward else "sent nothing"
        wrong = "another program is read back" if not same else f"{worst:.1e} off" if worst > EXACT else ""
        return Outcome(f"{of}: {sent}", wrong)

    yield one


@contextmanager
def mutants() -> Iterator[Callable[[int], Outcome]]:
    """Change program after program: what is accepted must compute the same."""
    from tests.support import recurrent

    def one(number: int) -> Outcome:
        at = number // PER_PROGRAM
        _, program = _drawn(at)
        if program is None or not program.forward or not program.num_heads:  # the judge sees none without states
            return Outcome("none of this program")
        how, mutant = recurrent.changed(program, random.Random(f"layout mutant {number}"))
        try:
            verify_recurrent(mutant)
        except InvalidProgramError:
            return Outcome(f"{how}: refused")
        except Exception as error:  # a proof that raises anything else is a fault
            return Outcome(f"{how}: raises", f"{type(error).__name__}: {error}")
        try:
            same = recurrent.off(mutant, at, "kda") < EXACT
        except InvalidProgramError:
            same = False
        return Outcome(f"{how}: accepted", "" if same else "accepted, and computes something else")

    yield one


@lru_cache(maxsize=1)
def _drawn(number: int) -> tuple[str, RecurrentProgram | None]:
    # What it is of, and a small program; None: the planner refused.
    from tests.support import recurrent
    from tests.support.strategies import ALL_PLANNERS, Case, plan

    rng = random.Random(f"layouts {number}")
    heads, halo, ranks = rng.choice((0, 1, 2, 5)), rng.choice((0, 1, 3)), rng.choice(_RANKS)
    if number % 4 == 0:
        lengths, owned = recurrent.random_layout(rng, ranks, rng.choice((12, 30, 30, 90)))
        return "documents", program_of(lengths, owned, heads, halo)
    if number % 4 == 1:
        trees, owned = recurrent.random_trees(rng, ranks, rng.choice((3, 6, 12)))
        return "trees", program_of([*map(num_tokens, trees)], owned, heads, halo, trees)
    name = ALL_PLANNERS[(number // 4 * 2 + number % 2) % len(ALL_PLANNERS)]
    lengths = tuple(rng.choice((1, 2, rng.randint(1, 12), rng.randint(1, 90))) for _ in range(rng.randint(1, 5)))
    ranks = min(ranks, 8)
    cluster = Cluster(ranks, rng.choice([size for size in (1, 2, 4, ranks) if ranks % size == 0]))
    case = Case(Batch(lengths), cluster, Model(4, rng.choice((1, 2, 4)), 4), None, number, rng.random() < 0.5)
    try:
        return name, compile_recurrent(plan(name, case), heads, halo)
    except (ConfigError, InfeasibleError):
        return name, None

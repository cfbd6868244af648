"""The mirror of the proof: whatever op is dropped from a program that verifies, `verify` objects."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.transpose import POLICIES
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.program import Program
from tests.support import by_hand

ZONES = ("ring", "all_gather", "head_exchange", "chunk_exchange", "head_exchange_once", "head_ring")


def cuts(rng: random.Random, length: int, most: int) -> list[tuple[int, int]]:
    edges = sorted({0, length, *(rng.randint(0, length) for _ in range(rng.randint(0, most)))})
    return list(zip(edges, edges[1:], strict=False))


def random_tiles(rng: random.Random, seqs: list[int], lengths: tuple[int, ...], num_ranks: int) -> TaskTable:
    """Any cut of the (query, key) triangle into rectangles, on any ranks."""
    fragments = sorted((rng.randrange(num_ranks), seq, a, b) for seq in seqs for a, b in cuts(rng, lengths[seq], 3))
    tasks = [
        (rng.randrange(num_ranks), seq, a, b, c, d)
        for seq in seqs
        for a, b in cuts(rng, lengths[seq], 3)
        for c, d in cuts(rng, b, 2)
    ]
    return TaskTable("tiles", Rows.of(4, fragments), Rows.of(6, tasks))


def random_plan(pattern: str, seed: int) -> MicrobatchPlan:
    """Two zones on different ranks, the first with this comm pattern; sequences of one token and
    more ranks than tokens occur.
    """
    rng = random.Random(f"{pattern} {seed}")
    num_ranks = rng.randint(1, 6)
    lengths = tuple(rng.choice([1, 2, 3, rng.randint(1, 40), rng.randint(1, 300)]) for _ in range(rng.randint(1, 4)))
    heads = rng.choice([1, 2, 4, 6, 8])
    kv_heads = rng.choice([g for g in (1, 2, 3, 4, 8) if heads % g == 0])
    ranks = rng.sample(range(num_ranks), num_ranks)
    first = [seq for seq in range(len(lengths)) if rng.random() < 0.7]
    rest = [seq for seq in range(len(lengths)) if seq not in first]
    zones: list[Zone | TaskTable] = []
    if first and pattern == "tiles":
        zones.append(random_tiles(rng, first, lengths, num_ranks))
    elif first:
        zones.append(by_hand.zone("first", pattern, ranks[: rng.randint(1, num_ranks)], first))
    if rest:
        zones.append(by_hand.zone("rest", rng.choice(ZONES), ranks, rest))
    return by_hand.plan(lengths, num_ranks, *zones, heads=(heads, kv_heads))


def without_one_op(program: Program) -> list[tuple[str, Program]]:
    mutants: list[tuple[str, Program]] = []
    for phase in ("forward", "backward"):
        ops = getattr(program, phase)
        mutants += [
            (f"{phase} {i}: {op}", replace(program, **{phase: ops[:i] + ops[i + 1 :]})) for i, op in enumerate(ops)
        ]
    return mutants


def is_invalid(program: Program) -> bool:
    """Whether `verify` objects; any other exception is a failure."""
    try:
        verify(program)
    except InvalidProgramError:
        return True
    return False


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pattern", [*ZONES, "tiles"])
def test_dropping_any_op_is_caught(pattern: str, policy: Any) -> None:
    dropped = 0
    for seed in range(12):
        program = expand(random_plan(pattern, seed), policy)
        verify(program)
        for name, mutant in without_one_op(program):
            assert is_invalid(mutant), f"not caught: seed {seed}, {name}"
            dropped += 1
    assert dropped > 50

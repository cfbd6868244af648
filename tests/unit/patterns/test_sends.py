"""The table of what all ranks send, against that of each rank and against closed forms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Transfer
from megatron_balance.ir.mask import CAUSAL, FULL, Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import AnyPlanZone, Zone
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import CommPattern, Context, Load, ZoneMessages
from megatron_balance.patterns.sends import Sends
from tests.support.task_tables import random_once_per_node, random_shares, random_zones

CLUSTER = Cluster(12, 4)


def zones(mask: Mask) -> Iterator[tuple[Context, AnyPlanZone]]:
    """Zones of every kind, of random plans, each in its context."""
    model = Model(8, 2, 16, attention="full" if mask == FULL else "causal")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        batch = Batch(tuple(rng.integers(1, int(rng.choice([9, 400])), 6).tolist()))
        for make in (random_zones, random_once_per_node, random_shares):
            plan = make(batch, CLUSTER, model, seed)
            yield from ((Context.of(plan), zone) for zone in plan.zones)


def rows_of(sends: Sends, rank: int | None = None) -> list[tuple[int, ...]]:
    """(exchange, transfer) of all that moves, or that `rank` sends; without targets of all-gathers."""
    number, rows = sends.transfers()
    gathers = [at for at, call in sends.calls.items() if call.collective == "all_gather"]
    table = np.column_stack([number, rows])
    table[np.isin(number, gathers), 1 + Transfer.DST] = -1
    return sorted(set(map(tuple, table[(rows[:, Transfer.SRC] == rank) | (rank is None)].tolist())))


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_the_table_of_all_ranks_is_the_union_of_those_of_each(mask: Mask) -> None:
    for context, zone in zones(mask):
        pattern = pattern_of(zone)
        whole, ranks = pattern.sends(zone, context), pattern.ranks(zone, context.num_ranks)
        each = {rank: pattern.sends(zone, context, rank) for rank in ranks}
        assert rows_of(whole) == sorted(row for rank, own in each.items() for row in rows_of(own, rank))
        assert whole.calls == {at: call for own in each.values() for at, call in own.calls.items()}
        if whole.again is not None:
            again = [(rank, own.again) for rank, own in each.items() if own.again is not None]
            assert rows_of(whole.again) == sorted(row for rank, own in again for row in rows_of(own, rank))


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_messages_count_the_tokens_of_the_rows(mask: Mask) -> None:
    for context, zone in zones(mask):
        sends = pattern_of(zone).sends(zone, context)
        _, rows = sends.transfers()
        tokens = rows[:, Transfer.STOP] - rows[:, Transfer.START]
        assert int(sends.messages()[:, -1].sum()) == int(tokens.sum())


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_closed_forms_say_what_the_table_says(mask: Mask) -> None:
    for context, zone in zones(mask):
        pattern = pattern_of(zone)
        if not pattern.num_exchanges(zone):
            continue
        closed, counted = Load(context.num_ranks), Load(context.num_ranks)
        pattern.receive(closed, zone, context)
        CommPattern.receive(pattern, counted, zone, context)
        if "once" not in zone.pattern:  # there a token comes in parts of its heads, and counts once
            assert (closed.tokens == counted.tokens).all()
        assert (closed.token_heads == counted.token_heads).all()
        most = CommPattern.largest_exchange(pattern, zone, context)
        assert pattern.largest_exchange(zone, context).tolist() == most.tolist()
        if isinstance(zone, Zone):
            assert pattern.tokens([zone], context).tolist() == CommPattern.tokens(pattern, [zone], context).tolist()


def test_an_all_gather_brings_each_rank_the_blocks_of_all_others() -> None:
    rows = np.array([(0, rank, -1, 1, 0, 2, tokens) for rank, tokens in enumerate((3, 4, 0))])
    load = Load(3)
    load.receive(ZoneMessages(rows, "all_gather", (0, 1, 2)))
    assert load.tokens[1].tolist() == [4, 3, 7]
    assert load.token_heads[1].tolist() == [8, 6, 14]

"""The lead of a placement: what groups attend to while the heads of all other tokens are exchanged
(`patterns.waves`).

As long as its attention takes the exchange of all else shows no more; a longer lead shows more itself,
and keys leave behind it. So a few leads around that one are priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from megatron_balance.patterns.waves import ALIGN
from megatron_balance.planners.zeppelin.estimate import GroupCosts, Lead, PlacementEstimate, layer_s
from megatron_balance.planners.zeppelin.shares import Shares, Trimmed

_LEADS = (0.75, 1.0, 1.5)
"""Leads that are tried, over the one whose work takes as long as the exchange of all else."""


def with_lead(
    price: PlacementEstimate,
    lengths: Sequence[int],
    of: Sequence[dict[int, float]],
    costs: GroupCosts,
    waves: Sequence[int],
) -> PlacementEstimate:
    """The price of a placement with the lead, and the number of waves, that make it cheapest. `of`: of
    each sequence the share of each group; `price`: without a lead.
    """
    placed = Shares.of_placement(costs.works_s(lengths), lengths, costs.num_groups, of)
    enough = costs.lead_tokens(sum(lengths) / costs.num_groups)
    leads = [lead for lead in (int(part * enough) // ALIGN * ALIGN for part in _LEADS) if lead]
    if not leads:
        return price
    trimmed = Trimmed.of(placed, [placed.kept()] * len(leads), [0.0] * len(leads))
    seconds = layer_s(trimmed, costs, waves, _lead(_first_rows(lengths, of, costs.num_groups), leads, costs))
    at, wave = divmod(int(seconds.argmin()), len(waves))
    if seconds[at, wave] >= price.seconds:
        return price
    return replace(price, seconds=float(seconds[at, wave]), num_waves=waves[wave], lead=leads[at])


def _first_rows(lengths: Sequence[int], of: Sequence[dict[int, float]], num_groups: int) -> list[list[float]]:
    """Tokens of the first chunk that each group has of each of its sequences, longest first."""
    rows: list[list[float]] = [[] for _ in range(num_groups)]
    for length, own in zip(lengths, of, strict=True):
        last = max(own)  # has the middle chunk, others two apart
        for group, share in own.items():
            rows[group].append(length * share / (1 if group == last else 2))
    return [sorted(each, reverse=True) for each in rows]


def _lead(firsts: Sequence[Sequence[float]], leads: Sequence[int], costs: GroupCosts) -> Lead:
    """Work of each group under leads of so many tokens (`patterns.waves.lead_cuts`)."""
    held, work = np.zeros((2, len(leads), len(firsts)))
    for (at, tokens), (group, rows) in product(enumerate(leads), enumerate(firsts)):
        left = float(tokens)
        for row in rows:
            taken = min(row, left)
            left -= taken
            work[at, group] += costs.causal_s(taken)
            if not left:
                break
        held[at, group] = tokens - left
    return Lead(held, work)

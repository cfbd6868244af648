"""Rates of links between ranks, measured with a few small transfers (gloo).

Rank by rank a link's receiver asks, and times what the other end then sends, so that no two clocks
are compared. Links are taken in rounds in which a rank is at one of them at most, and a node sends
and receives by one link between nodes at most: none shares a NIC with another that is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_balance.runtime.groups import Groups
from megatron_balance.runtime.transport.comm import receive, send
from megatron_balance.training.stragglers import Link

NUM_BYTES = 512 << 10
REPEATS = 5
"""All of them count: not each meets a lost packet."""
_ASK_TAG, _ANSWER_TAG = 2**31 - 3, 2**31 - 2


def can_measure(groups: Groups) -> bool:
    """Whether the pool's host waits for its transfers (gloo)."""
    return groups.pool is not None and dist.get_backend(groups.pool) == "gloo"


def link_rates(links: Sequence[Link], groups: Groups, ranks_per_node: int) -> dict[Link, float]:
    """Bytes/s of each link, with the time of the question in it. Collective over the pool.

    `links`: by pool ranks, the same on all of them. `ranks_per_node`: 0: not known, so one link at a
    time.
    """
    took = torch.zeros(len(links), dtype=torch.float64)
    for members in rounds(links, ranks_per_node):
        dist.barrier(groups.pool)
        for at in members:
            source, target = links[at]
            if groups.rank == target:
                took[at] = sum(_asked(source, groups) for _ in range(REPEATS))
            elif groups.rank == source:
                for _ in range(REPEATS):
                    _answer(target, groups)
    dist.all_reduce(took, group=groups.pool)
    return {link: REPEATS * NUM_BYTES / seconds for link, seconds in zip(links, took.tolist(), strict=True)}


def rounds(links: Sequence[Link], ranks_per_node: int) -> list[list[int]]:
    """Links by number, in rounds whose links share no rank, and no NIC of a node in one direction."""
    found: list[tuple[set[object], list[int]]] = []
    for at, (source, target) in enumerate(links):
        held: set[object] = {source, target}
        if not ranks_per_node:
            held.add("any")
        elif source // ranks_per_node != target // ranks_per_node:
            held |= {("out of", source // ranks_per_node), ("into", target // ranks_per_node)}
        room = next((each for each in found if not each[0] & held), None)
        if room is None:
            found.append(room := (set(), []))
        room[0].update(held)
        room[1].append(at)
    return [members for _, members in found]


def _asked(source: int, groups: Groups) -> float:
    """Seconds from asking until all is there."""
    answer = receive(torch.empty(NUM_BYTES, dtype=torch.uint8), source, _ANSWER_TAG, groups)
    begin = time.perf_counter()
    asking = send(torch.zeros(1, dtype=torch.uint8), source, _ASK_TAG, groups)
    answer.wait(groups.timeout)
    seconds = time.perf_counter() - begin
    asking.wait(groups.timeout)
    return seconds


def _answer(target: int, groups: Groups) -> None:
    receive(torch.empty(1, dtype=torch.uint8), target, _ASK_TAG, groups).wait(groups.timeout)
    send(torch.zeros(NUM_BYTES, dtype=torch.uint8), target, _ANSWER_TAG, groups).wait(groups.timeout)

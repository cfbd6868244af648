"""Find out who holds the others up: a rank that computes slowly, or a link that carries little.

Judged from figures of all ranks that each step's record gathers anyway, so all ranks judge alike.

* A rank is slow where its attention took `SLOW_PACE` times the median of the other ranks', both per
  (query, key) pair and per kernel call, so that neither its share of the work nor many small calls
  make it so; and where that costs `SLOW_SHARE` of the step at least.
* Waits alone cannot tell a link: in a ring every rank soon waits as long as the one behind the slow
  link. Where ranks wait `WAITING_SHARE` of the step and none is slow, the links are measured, once,
  and again when ranks wait `WORSE` times as long beside their own work, or after `AGAIN` steps. A
  link is slow where its rate is at most `SLOW_RATE` of the median of the other links of its kind
  (between nodes, inside one), and no higher than what links of the other kind carry; and where two of
  at most `MEASURED` measurements, in steps one after the other, find it (`AT_LEAST`, where those find
  none): one busy core can slow one, and a link that loses packets is fast now and then.

Both must hold in `STEPS` steps in a row before anything is measured or named.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.runtime.groups import SEVERAL, Groups
from megatron_balance.runtime.transport import receive, send

log = logging.getLogger(__name__)
STEPS = 3
SLOW_PACE, SLOW_SHARE = 1.5, 0.05
WAITING_SHARE, WORSE, AGAIN = 0.2, 1.25, 50
SLOW_RATE, MEASURED, AT_LEAST = 0.5, 5, 2
MOST_LINKS = 32  # links that are measured: those that most was waited for, and as many between neighbours
SOURCES = 4  # of each rank's, those that it waited for longest are told to the others
MOST_NAMED = 4
Link: TypeAlias = tuple[int, int]  # (rank that sends, rank that receives)


class RankTimes(NamedTuple):
    """Times of one rank in one step, in seconds."""

    step_s: float
    # In attention; 0: not known (NCCL, but in traced steps).
    attended_s: float
    # Blocked, for transfers of attention; 0 on NCCL, where the host waits for nothing.
    waited_s: float
    # (query, key) pairs times heads, that it attended.
    pairs: int
    calls: int
    # Those that it waited for longest, with seconds; `SEVERAL`: a collective's ranks.
    sources: tuple[tuple[int, float], ...] = ()


def own_times(pools: Sequence[Groups], joint: Groups, step_s: float, traced_s: float | None) -> list[int]:
    """This rank's times as integers (microseconds), to be gathered; and the clocks are set to zero.
    `pools`: all that attention may have run over; sources are told as ranks of `joint`. `traced_s`:
    seconds of attention by the device's clock, where the step was traced.
    """
    attended, waited = traced_s or 0.0, dict[int, float]()
    for groups in {id(each): each for each in pools}.values():
        times = groups.host_times
        attended += times.attended_s if groups.streams is None else 0.0
        for source, seconds in times.waited_s.items():
            at = SEVERAL if source == SEVERAL else joint.ranks.index(groups.ranks[source])
            waited[at] = waited.get(at, 0.0) + seconds
        times.clear()
    longest = sorted(waited.items(), key=lambda each: -each[1])[:SOURCES]
    longest += [(SEVERAL, 0.0)] * (SOURCES - len(longest))
    seconds = (step_s, attended, sum(waited.values()))
    return [*map(_microseconds, seconds), *chain.from_iterable((at, _microseconds(s)) for at, s in longest)]


def times_of(gathered: Ints, names: Sequence[str]) -> list[RankTimes]:
    """Times by rank. `gathered` [R, counters of these `names`, then `own_times`]."""
    found: list[RankTimes] = []
    for row in gathered.tolist():
        step, attended, waited, *sources = row[len(names) :]
        longest = tuple((at, s / 1e6) for at, s in zip(sources[::2], sources[1::2], strict=True) if s)
        pairs, calls = (row[names.index(name)] for name in ("attended_pairs", "kernel_calls"))
        found.append(RankTimes(step / 1e6, attended / 1e6, waited / 1e6, pairs, calls, longest))
    return found


def slow_ranks(ranks: Sequence[RankTimes]) -> dict[int, float]:
    """By slow rank, how many times as long it takes as the median of the others."""
    known = [at for at, each in enumerate(ranks) if each.attended_s and each.pairs and each.calls]
    if len(known) < 2:
        return {}
    # [known] each.
    attended_s, pairs, calls = np.array([(r.attended_s, r.pairs, r.calls) for r in (ranks[at] for at in known)]).T
    per_pair, per_call = attended_s / pairs, attended_s / calls
    # Both must be slow: neither a rank's share of the work nor many small calls make it so.
    times = np.minimum(per_pair / _median_of_others(per_pair), per_call / _median_of_others(per_call))
    lost_s = attended_s * (1 - 1 / times)
    slow = (times >= SLOW_PACE) & (lost_s >= SLOW_SHARE * max(each.step_s for each in ranks))
    return {known[at]: float(times[at]) for at in np.flatnonzero(slow).tolist()}


def _median_of_others(values: Floats) -> Floats:
    """For each of n >= 2 values, the median of all others."""
    order, count = np.argsort(values), len(values) - 1
    ordered, place = values[order], np.empty(len(values), dtype=np.int64)
    place[order] = np.arange(len(values))
    # Positions in the sorted values; one value left out shifts those from its own place on by one.
    middle = ((count - 1) // 2, count // 2)
    # [n]: of each value the two that are in the middle of the others.
    low, high = (ordered[at + (place <= at)] for at in middle)
    return (low + high) / 2


def _links_to_measure(ranks: Sequence[RankTimes]) -> list[Link]:
    """The links that most was waited for, and those between neighbours to compare them with."""
    waits = {(source, at): s for at, each in enumerate(ranks) for source, s in each.sources if source != SEVERAL}
    longest = sorted(waits, key=lambda link: (-waits[link], link))[:MOST_LINKS]
    every = max(1, len(ranks) // MOST_LINKS)
    ring = [(at, (at + 1) % len(ranks)) for at in range(0, len(ranks), every)]
    return list(dict.fromkeys([*longest, *ring]))


def _slow_links(rates: Mapping[Link, float], node_of: Callable[[int], int]) -> dict[Link, tuple[float, int]]:
    """By slow link, the median rate of the others of its kind, and how many those are."""
    kinds: dict[bool, list[Link]] = {}
    for link in rates:
        kinds.setdefault(node_of(link[0]) != node_of(link[1]), []).append(link)
    found: dict[Link, tuple[float, int]] = {}
    enough = min((median(rates[each] for each in links) for links in kinds.values()), default=0.0)
    for links in kinds.values():
        for link in links:
            others = [rates[each] for each in links if each != link]
            if others and rates[link] <= min(SLOW_RATE * median(others), enough):
                found[link] = (median(others), len(others))
    return found


@dataclass(slots=True)
class Stragglers:
    """The judgement of a job so far. Ranks are those of the joint pool."""

    # Their numbers in the job.
    names: Sequence[int]
    # 0: not known.
    ranks_per_node: int
    # The rates of links in bytes/s, collective over the ranks; None: they cannot be measured
    # (NCCL).
    measure: Callable[[Sequence[Link]], Mapping[Link, float]] | None
    # This rank writes the log.
    tells: bool
    ranks: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    _recent: deque[tuple[dict[int, float], float]] = field(default_factory=lambda: deque(maxlen=STEPS))
    _measured: tuple[int, float] | None = None
    _found: list[dict[Link, tuple[float, int]]] = field(default_factory=list[dict[Link, tuple[float, int]]])

    def judge(self, step: int, times: Sequence[RankTimes]) -> None:
        """Judge a step by all ranks' times, and log what changed; collective if links are measured."""
        longest = max(each.step_s for each in times)
        waiting = sum(each.waited_s for each in times) / len(times) / longest if longest else 0.0
        self._recent.append((slow_ranks(times), waiting))
        if len(self._recent) < STEPS:
            return
        self._judge_ranks(step, times)
        self._judge_links(step, times)

    def as_json(self) -> dict[str, list[int] | list[list[int]]]:
        links = [[self.names[end] for end in link] for link in self.links]
        return {"ranks": [self.names[at] for at in self.ranks], "links": links}

    def times_as_json(self, times: Sequence[RankTimes]) -> dict[str, list[object]]:
        """Times of a step as its record has them, by rank."""
        return {
            "attended_s": [each.attended_s for each in times],
            "waited_s": [each.waited_s for each in times],
            "waited_for": [
                [[None if at == SEVERAL else self.names[at], seconds] for at, seconds in each.sources] for each in times
            ],
        }

    def _judge_ranks(self, step: int, times: Sequence[RankTimes]) -> None:
        slow = [found for found, _ in self._recent]
        now = tuple(at for at in slow[-1] if all(at in found for found in slow))
        for at in [at for at in now if at not in self.ranks][:MOST_NAMED]:
            lost_s = times[at].attended_s * (1 - 1 / slow[-1][at])
            self._tell(
                f"step {step}: rank {self.names[at]} holds the others up: for {STEPS} steps its attention has taken "
                f"{slow[-1][at]:.1f} times as long as the median of the other ranks, per pair and per kernel call; "
                f"{lost_s:.3g} s of {times[at].step_s:.3g} s"
            )
        ended = [at for at in self.ranks if not any(at in found for found in slow)]
        for at in ended:
            self._tell(f"step {step}: rank {self.names[at]} is no slower than the others any more")
        self.ranks = tuple(at for at in dict.fromkeys((*self.ranks, *now)) if at not in ended)

    def _judge_links(self, step: int, times: Sequence[RankTimes]) -> None:
        shares = [share for _, share in self._recent]
        if all(share < WAITING_SHARE for share in shares):
            if self.links:
                self._tell(f"step {step}: no link holds the ranks up any more")
            self.links, self._found = (), []
            return
        by_rank = any(found for found, _ in self._recent)
        if self.measure is None or by_rank or any(share < WAITING_SHARE for share in shares):
            return
        # Beside the ranks' own work, so that a share near 1 does not divide by nothing.
        beside = min(shares) / (1 - min(*shares, 0.999))
        if self._measured is not None and not self._found:
            at, before = self._measured
            if beside < WORSE * before and step < at + AGAIN:
                return
        # Waits alone cannot tell a link: in a ring every rank soon waits as long as the one behind
        # the slow link. So links are measured, once, and again when ranks wait longer.
        rates = self.measure(_links_to_measure(times))
        slow = _slow_links(rates, lambda rank: rank // self.ranks_per_node if self.ranks_per_node else 0)
        log.debug("step %d: links carry bytes/s: %s", step, rates)
        self._measured = (step, beside)
        # One busy core can slow a measurement, and a link that loses packets is fast now and then:
        # two of some in a row must find it.
        again = {link: than for link, than in slow.items() if any(link in found for found in self._found)}
        self._found.append(slow)
        if not again and len(self._found) < (MEASURED if any(self._found) else AT_LEAST):
            return
        self._found, slow = [], again
        self._tell_links(step, min(shares), rates, slow)
        self.links = tuple(sorted(slow, key=lambda link: rates[link]))

    def _tell_links(
        self, step: int, share: float, rates: Mapping[Link, float], slow: Mapping[Link, tuple[float, int]]
    ) -> None:
        waits = f"step {step}: ranks wait {100 * share:.0f} % of a step for transfers"
        if not slow:
            said = f"{waits}; no rank and, of {len(rates)} links measured, no link is slower than the others"
            self._tell(said, logging.INFO)
        for link in sorted(slow, key=lambda link: rates[link])[:MOST_NAMED]:
            (source, target), (others, count) = (self.names[end] for end in link), slow[link]
            same = "inside nodes"
            if not self.ranks_per_node:
                same = "measured"
            elif link[0] // self.ranks_per_node != link[1] // self.ranks_per_node:
                same = "between nodes"
            self._tell(
                f"{waits}; the link from rank {source} to rank {target} holds them up: {rates[link] / 1e6:.3g} MB/s, "
                f"{others / 1e6:.3g} MB/s the median of {count} other{'s' if count > 1 else ''} {same}"
            )

    def _tell(self, said: str, level: int = logging.WARNING) -> None:
        if self.tells:
            log.log(level, "%s", said)


def _microseconds(seconds: float) -> int:
    return int(np.rint(1e6 * seconds))


NUM_BYTES = 512 << 10
REPEATS = 5  # all of them count: not each meets a lost packet
_ASK_TAG, _ANSWER_TAG = 2**31 - 3, 2**31 - 2


def link_rates(links: Sequence[Link], groups: Groups, ranks_per_node: int) -> dict[Link, float]:
    """Bytes/s of each link, by pool ranks, with the time of the question in it. Collective over the
    pool. `ranks_per_node`: 0: not known, so one link at a time.
    """
    # Rank by rank a link's receiver asks, and times what the other end then sends: no two clocks
    # are compared.
    took = torch.zeros(len(links), dtype=torch.float64)
    # Links are taken in rounds in which a rank is at one of them at most, and a node sends and
    # receives by one link between nodes at most: none shares a NIC with another that is measured.
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

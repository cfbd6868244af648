"""The roll call: ranks that answer, that do not, that failed, and a store that is gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from megatron_balance.runtime.groups import SEVERAL, Groups
from megatron_balance.training import roll_call
from megatron_balance.training.roll_call import RollCall, in_words
from megatron_balance.training.stragglers import (
    AGAIN,
    Link,
    RankTimes,
    Stragglers,
    _links_to_measure,
    _median_of_others,
    own_times,
    rounds,
    slow_ranks,
    times_of,
)

pytest.importorskip("torch")

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

SIZE = 3
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


class Job:
    # Ranks of one process, which share a store.
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._patch = monkeypatch
        monkeypatch.setattr(roll_call, "PATIENCE_S", 0.5)
        monkeypatch.setattr(roll_call.missing, "__defaults__", (0.5, None))
        monkeypatch.setattr(roll_call.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(roll_call.dist, "get_world_size", lambda: SIZE)
        monkeypatch.setattr(roll_call, "_store", lambda: self.store)
        self.ranks = [self._rank(rank) for rank in range(SIZE - 1)]  # the last one is dead or frozen

    def _rank(self, rank: int) -> RollCall:
        self._patch.setattr(roll_call.dist, "get_rank", lambda: rank)
        return RollCall()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(monkeypatch)
    yield made
    for rank in made.ranks:
        rank.close()


def said(rank: RollCall, error: Exception, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        rank.failed(error)
    return caplog.messages


@pytest.mark.parametrize(
    "words",
    [
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "Timed out waiting 2000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "exchange 0, piece 1 of 2: it did not leave: pair closure",
    ],
)
def test_a_rank_that_is_dead_or_frozen_is_named_by_every_survivor(
    words: str, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in job.ranks:
        assert said(rank, RuntimeError(words), caplog) == ["rank 2 of 3 does not answer: ended, or frozen"]


def test_a_rank_that_failed_is_named_with_its_reason_though_it_answered(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(job.ranks[1], MemoryError("no memory\nfor tokens"), caplog) == [], "its own error is raised"
    job.ranks[1].close()
    found = said(job.ranks[0], CLOSED, caplog)
    assert found == ["rank 1 failed (MemoryError: no memory for tokens); rank 2 of 3 does not answer: ended, or frozen"]


def test_a_rank_that_came_to_its_end_has_answered(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.ranks[1].close()
    job.store.set("megatron_balance/roll_call/answer/2", "")
    assert said(job.ranks[0], CLOSED, caplog) == ["all 3 ranks still run: none of them ended or is frozen"]


def test_who_waits_for_news_waits_though_all_have_answered(job: Job) -> None:
    asked: list[list[bool]] = []

    def told() -> bool:
        asked.append([job.store.check([f"{roll_call.NAME}/answer/{rank}"]) for rank in range(2)])
        return len(asked) == 3

    assert roll_call.missing(job.store, 2, 5.0, until=told) == []
    assert asked == [[True, True]] * 3


def test_many_ranks_and_a_store_that_is_gone_make_one_sentence() -> None:
    found = in_words(list(range(20)), {}, 32)
    assert found == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more of 32 do not answer: ended, or frozen"
    gone = "the process that holds the job's store has ended, or is frozen: rank 0, or the launcher"
    assert in_words(None, {}, 32) == gone


class Frozen:
    # A store whose process is frozen: no call of it returns.
    def __getattr__(self, name: str) -> Any:
        return lambda *_: threading.Event().wait()

    def clone(self) -> Frozen:
        return self


@pytest.mark.parametrize("error", [CLOSED, MemoryError("of this rank")])
def test_a_frozen_store_ends_no_rank_later(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(monkeypatch)
    monkeypatch.setattr(roll_call, "PATIENCE_S", 0.05)
    monkeypatch.setattr(roll_call, "_store", Frozen)
    rank = RollCall()
    ended = threading.Thread(target=lambda: (said(rank, error, caplog), rank.close(), RollCall().close()), daemon=True)
    ended.start()
    ended.join(5.0)
    assert not ended.is_alive()
    assert caplog.messages == ([in_words(None, {}, SIZE)] if error is CLOSED else [])
    for each in job.ranks:
        each.close()


# Rules that say who holds the others up, on figures of steps; the links that are measured.

RANKS = 4
EVEN = RankTimes(step_s=2.0, attended_s=1.0, waited_s=0.1, pairs=1000, calls=10)
RING = tuple((at, (at + 1) % RANKS) for at in range(RANKS))


def judged(steps: Sequence[Sequence[RankTimes]], rates: Mapping[Link, float] | None = None) -> tuple[Stragglers, int]:
    # The judgement after `steps`, and how often links were measured. Two ranks a node; job ranks
    # are 10, 11, ...
    measured: list[Sequence[Link]] = []

    def measure(links: Sequence[Link]) -> Mapping[Link, float]:
        measured.append(links)
        return {link: (rates or {}).get(link, 10e6) for link in links}

    stragglers = Stragglers(tuple(range(10, 10 + RANKS)), 2, measure, tells=True)
    for number, times in enumerate(steps):
        stragglers.judge(number + 1, times)
    return stragglers, len(measured)


def with_rank(at: int, own: RankTimes, others: RankTimes = EVEN) -> list[RankTimes]:
    return [own if rank == at else others for rank in range(RANKS)]


def test_a_slow_rank_is_named_after_three_steps_and_dropped_when_it_recovers(caplog: pytest.LogCaptureFixture) -> None:
    slow = with_rank(2, EVEN._replace(attended_s=1.8))
    even = with_rank(2, EVEN)
    assert judged([slow, slow])[0].as_json() == {"ranks": [], "links": []}
    assert judged([slow, even, slow, slow])[0].ranks == ()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        found, measured = judged([slow] * 5)
    assert (found.as_json(), measured) == ({"ranks": [12], "links": []}, 0)
    (line,) = caplog.messages
    assert line.startswith("step 3: rank 12 holds the others up: for 3 steps its attention has taken 1.8 times as long")
    with caplog.at_level(logging.INFO):
        assert judged([slow] * 3 + [even] * 2)[0].ranks == (2,)
        assert judged([slow] * 3 + [even] * 3)[0].ranks == ()
    assert caplog.messages[-1] == "step 6: rank 12 is no slower than the others any more"


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (EVEN._replace(attended_s=1.4), "no half as long again"),
        (EVEN._replace(attended_s=2.0, pairs=2000), "twice the work by plan"),
        (EVEN._replace(attended_s=2.0, calls=20), "twice as many calls"),
        (EVEN._replace(attended_s=1.0, pairs=500), "half the work, and the same number of calls"),
        (EVEN._replace(attended_s=0.0), "not known"),
        (EVEN._replace(pairs=0, attended_s=0.0, calls=0), "nothing to attend"),
    ],
)
def test_a_rank_is_not_slow_for_its_share_of_the_work_or_of_the_step(own: RankTimes, why: str) -> None:
    assert slow_ranks(with_rank(1, own)) == {}, why
    little = EVEN._replace(attended_s=0.04)
    assert slow_ranks(with_rank(1, little._replace(attended_s=0.09), little)) == {}
    assert slow_ranks(with_rank(1, little._replace(attended_s=0.16), little)) == {1: pytest.approx(4.0)}


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_median_of_the_others_leaves_out_each_value_in_turn(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 4, count).astype(float)
    expected = [np.median(np.delete(values, at)) for at in range(count)]
    assert _median_of_others(values).tolist() == expected


WAITING = [EVEN._replace(waited_s=0.9, sources=(((at - 1) % RANKS, 0.9),)) for at in range(RANKS)]


def test_a_slow_link_is_named_among_those_of_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found, measured = judged([WAITING] * 5, {(0, 1): 100e6, (2, 3): 90e6, (1, 2): 2e6})
    assert (found.as_json(), measured) == ({"ranks": [], "links": [[11, 12]]}, 2)
    (line,) = caplog.messages
    assert line == (
        "step 4: ranks wait 45 % of a step for transfers; the link from rank 11 to rank 12 holds them up: 2 MB/s, "
        "10 MB/s the median of 1 other between nodes"
    )
    with caplog.at_level(logging.INFO):
        assert judged([WAITING] * 4 + [[EVEN] * RANKS] * 3, {(1, 2): 2e6})[0].links == ()
    assert caplog.messages[-1] == "step 7: no link holds the ranks up any more"


def test_a_link_is_named_only_if_it_is_slow_twice_and_slower_than_those_of_the_other_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rates = {(0, 1): 100e6, (2, 3): 40e6, (1, 2): 10e6, (3, 0): 11e6}
    assert judged([WAITING] * 5, rates)[0].links == ()
    assert judged([WAITING] * 5, rates | {(2, 3): 9e6})[0].links == ((2, 3),)
    once = {(1, 2): 2e6}

    def measure(links: Sequence[Link]) -> Mapping[Link, float]:
        return {link: once.pop(link, 10e6) for link in links}

    stragglers = Stragglers(range(RANKS), 2, measure, tells=True)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for step in range(8):
            stragglers.judge(step, WAITING)
    assert (once, stragglers.links) == ({}, ())
    assert len(caplog.messages) == 1


def test_links_are_measured_twice_and_again_when_waits_have_grown(caplog: pytest.LogCaptureFixture) -> None:
    worse = [each._replace(waited_s=1.4) for each in WAITING]
    with caplog.at_level(logging.INFO):
        assert judged([WAITING] * AGAIN)[1] == 2
    assert caplog.messages[0].endswith("no rank and, of 4 links measured, no link is slower than the others")
    assert judged([WAITING] * (AGAIN + 5))[1] == 4
    assert judged([WAITING] * 4 + [worse] * 4)[1] == 4
    assert judged([[EVEN] * RANKS] * 5)[1] == 0
    assert judged([WAITING, WAITING, [EVEN] * RANKS] * 3)[1] == 0
    slow = [each._replace(attended_s=1.8 if at == 2 else 1.0) for at, each in enumerate(WAITING)]
    assert judged([slow] * 5)[1] == 0, "the slow rank is why they wait"


def test_the_links_most_waited_for_and_between_neighbours_are_measured_in_rounds_of_ranks_and_nics_apart() -> None:
    times = [EVEN] * RANKS
    times[3] = EVEN._replace(sources=((1, 0.5), (SEVERAL, 0.3), (2, 0.2)))
    assert _links_to_measure(times) == [(1, 3), (2, 3), (0, 1), (1, 2), (3, 0)]
    many = _links_to_measure([EVEN] * 1000)
    assert len(many) <= 34
    assert many[1] == (31, 32)
    # ranks 0 and 1 on a node; all links between the nodes go one after the other in each direction
    links = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]
    assert rounds(links, 2) == [[0, 2], [1, 3], [4], [5]]
    assert rounds(links, 0) == [[at] for at in range(6)]


def test_times_survive_being_gathered() -> None:
    pool, attention = Groups(0, 2, (4, 5), None), Groups(0, 2, (5, 4), None)
    attention.host_times.attended_s = 0.5
    attention.host_times.waited_for(1, 0.25)
    attention.host_times.waited_for(SEVERAL, 0.125)
    attention.host_times.waited_for(1, 0.25)
    times = own_times((pool, pool, attention), pool, 2.0, None)
    row = np.array([[7, 3, 12, *times]], dtype=np.int64)
    (found,) = times_of(row, ("kernel_calls", "other", "attended_pairs"))
    assert found == RankTimes(2.0, 0.5, 0.625, 12, 7, ((0, 0.5), (SEVERAL, 0.125)))
    assert own_times((attention,), pool, 2.0, None)[1:3] == [0, 0]

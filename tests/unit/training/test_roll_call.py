"""The roll call: ranks that answer, that do not, that failed, and a store that is gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from megatron_balance.training import roll_call  # noqa: E402
from megatron_balance.training.roll_call import RollCall, in_words  # noqa: E402

SIZE = 3
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


class Job:
    """Ranks of one process, which share a store."""

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


def test_a_rank_that_is_dead_or_frozen_is_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    assert said(job.ranks[0], CLOSED, caplog) == ["rank 2 of 3 does not answer: ended, or frozen"]
    again = said(job.ranks[1], RuntimeError("Timed out waiting 2000ms for recv operation to complete"), caplog)
    assert again == ["rank 2 of 3 does not answer: ended, or frozen"], "every survivor says so"


@pytest.mark.parametrize(
    "words", ["Application timeout caused pair closure", "exchange 0, piece 1 of 2: it did not leave: pair closure"]
)
def test_an_exchange_that_gloo_broke_off_is_about_another_rank(
    words: str, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(job.ranks[0], RuntimeError(words), caplog) == ["rank 2 of 3 does not answer: ended, or frozen"]


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
    assert (
        in_words(None, {}, 32)
        == "the process that holds the job's store has ended, or is frozen: rank 0, or the launcher"
    )


class Frozen:
    """A store whose process is frozen: no call of it returns."""

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

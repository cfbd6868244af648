"""Pulls and pushes of slots beside a caller that computes: what is issued when, and waits for what."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch

from megatron_balance.training.weights import Lane, Moves, RoleMemory, Stopwatch

CPU = torch.device("cpu")
LANE_S = 5.0


class Slots:
    """Stands for an exchange of four slots; each may be held back, or fail."""

    def __init__(self) -> None:
        self.pulls = self.pushes = (None,) * 4
        self.ran: list[str] = []
        self.held = {slot: threading.Event() for slot in range(4)}
        self.failing = -1

    def pull_slot(self, slot: int, *_: Any) -> None:
        assert self.held[slot].wait(LANE_S)
        if slot == self.failing:
            raise ConnectionError("a rank ended")
        self.ran.append(f"pull {slot}")

    def push_slot(self, slot: int, *_: Any) -> None:
        self.ran.append(f"push {slot}")


SLOTS = {10: 0, 11: 1, 12: 1, 13: 3}
"""By number of a parameter; slot 2 has none on this rank."""


def moves(slots: Slots, *, first: bool = True, beside: bool = True) -> Moves:
    made = Moves(cast("Any", slots), RoleMemory({}, {}, SLOTS, first), {}, Lane(CPU, beside=beside), Stopwatch(CPU))
    if not beside:
        for event in slots.held.values():
            event.set()
    return made


def test_a_module_waits_for_its_own_slot_and_not_for_later_ones() -> None:
    slots = Slots()
    found = moves(slots)
    found.pull({}, torch.float32)
    slots.held[0].set()
    slots.held[1].set()
    found.need(1)
    assert slots.ran == ["pull 0", "pull 1"]
    found.need(0)
    slots.held[2].set()
    slots.held[3].set()
    found.need(3)
    assert slots.ran[2:] == ["pull 2", "pull 3"]


def test_a_push_begins_when_the_last_microbatch_has_left_the_slot_and_those_behind_it() -> None:
    slots, restored = Slots(), []
    for event in slots.held.values():
        event.set()
    found = moves(slots)
    found.pull({}, torch.float32)
    found.need(3)
    found.expect(2, lambda: restored.append(len(slots.ran)))
    for number in (13, 12, 11, 10, 12, 11):
        found.left(number)
    assert not found._pushed, "slot 1 is complete, and slot 3 lacks a gradient of the second microbatch"
    found.left(13)
    assert len(found._pushed) == 3, "with slot 2, which has no gradient here, and slot 1"
    assert restored == [4], "buffers are there before the first push"
    with pytest.raises(AssertionError, match="behind the push of its slot"):
        found.left(13)
    found.left(10)
    found.finish()
    assert slots.ran[4:] == ["push 3", "push 2", "push 1", "push 0"]
    assert restored == [4]


@pytest.mark.parametrize(("first", "beside"), [(False, True), (True, False)])
def test_ranks_behind_the_first_stage_and_runs_without_overlap_push_when_all_is_done(first: bool, beside: bool) -> None:
    slots = Slots()
    for event in slots.held.values():
        event.set()
    found = moves(slots, first=first, beside=beside)
    found.pull({}, torch.float32)
    found.expect(1, lambda: None)
    for number in SLOTS:
        found.left(number)
    assert not found._pushed
    found.issue_rest()
    found.finish()
    assert slots.ran == [*(f"pull {slot}" for slot in range(4)), *(f"push {slot}" for slot in reversed(range(4)))]


def test_what_an_exchange_raised_is_raised_where_somebody_waits_for_it() -> None:
    slots = Slots()
    for event in slots.held.values():
        event.set()
    slots.failing = 2
    found = moves(slots)
    found.pull({}, torch.float32)
    found.need(1)
    with pytest.raises(ConnectionError, match="a rank ended"):
        found.need(2)


def test_what_the_caller_waits_is_measured() -> None:
    slots = Slots()
    for event in slots.held.values():
        event.set()
    stopwatch = Stopwatch(CPU)
    found = Moves(cast("Any", slots), RoleMemory({}, {}, SLOTS, first=True), {}, Lane(CPU, beside=True), stopwatch)
    found.pull({}, torch.float32)
    found.finish()
    seconds = stopwatch.seconds()
    assert sorted(seconds) == ["pull_s", "push_s"]
    assert min(seconds.values()) > 0

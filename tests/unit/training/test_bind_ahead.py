"""Plans bound ahead of their step: the same as bound on the spot, errors where the plan is used."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from threading import Event, current_thread, main_thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from megatron_balance.compile.pipeline import Projector  # noqa: E402
from megatron_balance.errors import ConfigError, InvalidProgramError  # noqa: E402
from megatron_balance.ir.mask import CAUSAL, SlidingWindow  # noqa: E402
from megatron_balance.runtime import bind as binding  # noqa: E402
from megatron_balance.runtime.bind import AttentionShape  # noqa: E402
from megatron_balance.runtime.groups import Groups  # noqa: E402
from megatron_balance.runtime.lower.lowering import Lowering  # noqa: E402
from megatron_balance.runtime.lower.steps import describe  # noqa: E402
from megatron_balance.training.binding import BindAhead, Binder, bind_layers, policies_of  # noqa: E402
from tests.support import by_hand  # noqa: E402

CPU = torch.device("cpu")
PLAN = by_hand.pool("ring", (40, 24), 2, ranks_per_node=2, heads=(2, 2))
OTHER = by_hand.pool("ring", (40, 25), 2, ranks_per_node=2, heads=(2, 2))


@pytest.fixture
def ahead():
    made = BindAhead()
    yield made
    made.close()


def binder(ahead: BindAhead | None, num_heads: int = 2) -> Binder:
    return Binder(Groups(1, 2, (0, 1), None), AttentionShape(num_heads, num_heads, 4), torch.float32, CPU, ahead=ahead)


def test_a_plan_prepared_in_the_thread_is_the_one_bound_on_the_spot(ahead, monkeypatch):
    threads = []
    compiled = binding.compile_policies

    def noted(*args, **kwargs):
        threads.append(current_thread())
        return compiled(*args, **kwargs)

    monkeypatch.setattr(binding, "compile_policies", noted)
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    ahead.submit(lambda: None)
    ahead._prepared[next(iter(ahead._prepared))].result()
    bound, fresh = one.bind(PLAN, ("keep",))[0], binder(None).bind(PLAN, ("keep",))[0]
    assert [thread is main_thread() for thread in threads] == [False, True]
    assert bound.owned.tolist() == fresh.owned.tolist()
    kinds, again = ([type(step) for step in each.phases["forward"].steps] for each in (bound, fresh))
    assert kinds == again
    one.bind(PLAN, ("keep",))[0]  # taken once: the next is bound on the spot
    assert threads[-1] is main_thread()


def test_an_error_of_the_thread_is_raised_where_the_plan_is_used(ahead):
    wrong = binder(ahead, num_heads=3)
    wrong.expect(PLAN, ("keep",))
    ahead._prepared[next(iter(ahead._prepared))].exception()
    with pytest.raises(ConfigError, match="the plan is for 2 query and 2 key-value heads") as raised:
        wrong.bind(PLAN, ("keep",))[0]
    assert raised.value.__notes__ == [
        f"raised in the thread that binds ahead, of plan {PLAN.fingerprint()}, nano-batch 0"
    ]


def test_a_plan_whose_turn_has_not_come_is_bound_on_the_spot(ahead):
    gate = Event()
    ahead.submit(lambda: gate.wait(10) and None)
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    assert one.bind(PLAN, ("keep",))[0].num_tokens == 32
    gate.set()


def test_plans_of_a_step_that_did_not_come_are_dropped(ahead):
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    one.expect(OTHER, ("keep",))
    ahead.forget_all_but([one.key(OTHER, ("keep",), 0, ("forward", "backward"))])
    assert {key[0] for key in ahead._prepared} == {OTHER.fingerprint()}


def test_a_job_that_fails_is_said_in_the_log_and_stops_nothing(ahead, caplog):
    ahead.submit(lambda: 1 // 0)
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    ahead._prepared[next(iter(ahead._prepared))].result()
    assert "could not be bound ahead" in caplog.text
    assert one.bind(PLAN, ("keep",))[0].num_tokens == 32


def test_a_plan_is_bound_by_the_policies_that_the_decision_needs(ahead):
    stage = {"keeping": 1, "layers": 2}
    some, all_, none = (SimpleNamespace(**stage | {"keeping": n}) for n in (1, 2, 0))
    found: Any = (some, all_, none, None)
    assert [policies_of(each) for each in found] == [("keep", "replay"), ("keep",), ("replay",), ("replay",)]
    for decision in found:
        bounds = bind_layers(binder(ahead), PLAN, decision)
        assert [bound.policy for bound in bounds.bounds] == list(policies_of(decision))


def test_a_plan_of_both_policies_is_looked_up_once_where_they_agree(monkeypatch):
    """The forward is projected, looked up and gets its tables once; all tables go over together."""
    counts = Counter[str]()

    def counted(owner, name):
        held = getattr(owner, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return held(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(Projector, "attention")
    counted(Lowering, "look_up_forward")
    counted(Lowering, "backward")
    counted(binding, "ship")
    bounds = bind_layers(binder(None), PLAN, cast("Any", SimpleNamespace(keeping=1, layers=2)))
    assert counts == {"attention": 1, "look_up_forward": 1, "backward": 2, "ship": 1}
    kept, replayed = bounds.of_layer(1, CAUSAL), bounds.of_layer(2, CAUSAL)
    alone = binder(None).bind(PLAN, ("replay",))[0]
    one, other, third = (each.phases["forward"] for each in (kept, replayed, alone))
    assert one.steps is other.steps
    assert not any(one.last_uses)
    assert third.last_uses == other.last_uses != one.last_uses
    lines, others = ([describe(step) for step in each.phases["backward"].steps] for each in (alone, replayed))
    assert lines == others
    assert (alone.query_rows, alone.key_rows) == (replayed.query_rows, replayed.key_rows)


def test_new_pairs_are_connected_and_tables_copied_in_the_training_thread(ahead, monkeypatch):
    threads: list[object] = []
    for name in ("connect", "ship"):
        monkeypatch.setattr(binding, name, lambda *_: threads.append(current_thread()))
    one = binder(ahead)
    one.expect(PLAN, ("keep",))
    next(iter(ahead._prepared.values())).result()
    assert not threads
    one.bind(PLAN, ("keep",))[0]
    assert threads == [main_thread()] * 2


def test_layers_of_another_mask_run_another_program_of_the_same_rows():
    window, wide = SlidingWindow(8), SlidingWindow(40)
    two = replace(binder(None), masks=(CAUSAL, window))
    bound = bind_layers(two, PLAN, None)
    causal, windowed = bound.of_layer(1, CAUSAL), bound.of_layer(1, window)
    assert (causal.plan.mask, windowed.plan.mask) == (CAUSAL, window)
    assert causal.owned.tolist() == windowed.owned.tolist()
    assert bound.bounds == (causal, windowed)
    with pytest.raises(
        InvalidProgramError, match="under mask window_40, and the plan was bound for causal and window_8"
    ):
        bound.of_layer(1, wide)
    # No sequence is longer than the window: one program serves all layers.
    same = bind_layers(replace(two, masks=(CAUSAL, wide)), PLAN, None)
    assert same.of_layer(1, wide) is same.of_layer(1, CAUSAL)
    assert len(same.bounds) == 1

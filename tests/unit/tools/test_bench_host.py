"""Host time of real plans: exact counts against budgets, and what counting rests on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tools.bench.host import budget, counted, plans

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "measurements" / "host-time.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", budget.BUDGETS)
def test_a_layer_keeps_its_budget_of_host_time(name):
    plan = plans.plan(name)
    found = counted.count(plan, plans.rank_of(name, plan))
    assert found.group_calls > 0
    assert found.launches > 0
    assert found.copies == 1  # all tables of the microbatch
    counts = (found.group_calls, found.launches, found.operators, found.copies)
    assert f"| {name} | {' | '.join(map(str, counts))} |" in PAGE, f"docs/measurements/host-time.md is of old: {found}"
    host = budget.host_time(found, plan, budget.PYTHON_S[name])
    assert host.ratio <= budget.BUDGETS[name], f"{found}, {host}"


@pytest.mark.parametrize("name", ["head exchange in a node", "zeppelin, routed", "te_ring"])
def test_wider_heads_change_no_count(name, monkeypatch):
    plan = plans.plan(name, num_ranks=16)
    narrow = counted.count(plan, plans.rank_of(name, plan))
    monkeypatch.setattr(counted, "HEAD_DIM", 2 * counted.HEAD_DIM)
    assert counted.count(plan, plans.rank_of(name, plan)) == narrow


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("name", ["te_ring", "distca", "zeppelin, routed"])
def test_layers_behind_the_first_copy_no_table(name, policy):
    plan, counts = plans.plan(name, num_ranks=16), Counter[str]()
    with counted.stand_ins(counts), counted.copies(counts):
        bound = counted.bound_rank(plan, plans.rank_of(name, plan), counts, policy)
        counted.layer(bound)
        assert counts["copies"] > 0
        counts.clear()
        counted.layer(bound)
    assert counts["launches"] > 0
    assert counts["copies"] == 0


def test_a_head_exchange_copies_nothing_for_its_calls():
    """Messages are written into the call's own memory by the mover, and read where they arrive."""
    plan = plans.plan("head exchange in a node", num_ranks=16)
    found = counted.count(plan, plans.rank_of("head exchange in a node", plan))
    assert found.operators <= 8, "a copy of torch for a message"


def test_prices_and_python_make_host_time():
    found = counted.Counted(group_calls=2, launches=3, operators=4, copies=1)
    plan = plans.plan("distca", num_ranks=16)
    host = budget.host_time(found, plan, python_s=1e-3)
    assert host.priced_s == pytest.approx(2 * 35e-6 + 7 * 30e-6)
    assert host.ratio == pytest.approx((host.priced_s + 1e-3) / plans.kernel_s(plan))

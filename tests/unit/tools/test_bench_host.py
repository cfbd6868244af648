"""Host time of real plans: exact counts against budgets, and what counting rests on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tools.bench import host

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "measurements" / "host-time.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", host.BUDGETS)
def test_a_layer_keeps_its_budget_of_host_time(name):
    plan = host.plan_of(name)
    found = host.count(plan, host.rank_of(name, plan))
    assert found.group_calls > 0
    assert found.launches > 0
    assert found.copies == 1  # all tables of the microbatch
    counts = (found.group_calls, found.launches, found.operators, found.copies)
    assert f"| {name} | {' | '.join(map(str, counts))} |" in PAGE, f"docs/measurements/host-time.md is of old: {found}"
    time = host.host_time(found, plan, host.PYTHON_S[name])
    assert time.ratio <= host.BUDGETS[name], f"{found}, {time}"


@pytest.mark.parametrize("name", ["head exchange in a node", "zeppelin, routed", "te_ring"])
def test_wider_heads_change_no_count(name, monkeypatch):
    plan = host.plan_of(name, num_ranks=16)
    narrow = host.count(plan, host.rank_of(name, plan))
    monkeypatch.setattr(host, "HEAD_DIM", 2 * host.HEAD_DIM)
    assert host.count(plan, host.rank_of(name, plan)) == narrow


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("name", ["te_ring", "distca", "zeppelin, routed"])
def test_layers_behind_the_first_copy_no_table(name, policy):
    plan, counts = host.plan_of(name, num_ranks=16), Counter[str]()
    with host.stand_ins(counts), host.copies(counts):
        bound = host.bound_rank(plan, host.rank_of(name, plan), counts, policy)
        host.layer(bound)
        assert counts["copies"] > 0
        counts.clear()
        host.layer(bound)
    assert counts["launches"] > 0
    assert counts["copies"] == 0


def test_a_head_exchange_copies_nothing_for_its_calls():
    """Messages are written into the call's own memory by the mover, and read where they arrive."""
    plan = host.plan_of("head exchange in a node", num_ranks=16)
    found = host.count(plan, host.rank_of("head exchange in a node", plan))
    assert found.operators <= 8, "a copy of torch for a message"


def test_prices_and_python_make_host_time():
    found = host.Counted(group_calls=2, launches=3, operators=4, copies=1)
    plan = host.plan_of("distca", num_ranks=16)
    time = host.host_time(found, plan, 1e-3)
    assert time.priced_s == pytest.approx(2 * 35e-6 + 7 * 30e-6)
    assert time.ratio == pytest.approx((time.priced_s + 1e-3) / host.kernel_s(plan))

"""Hosts in the simulator: a device waits for what its host has not issued, in both engines alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import NO_HOST, Host
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.simulator.attention import ENGINES, attention_call
from tests.support import by_hand
from tests.support.flat_cost import MODEL, FlatCost, flat_machine
from tests.support.strategies import Case, cases, plan


def ring(num_ranks: int = 2):
    return by_hand.pool("ring", (64,), num_ranks, ranks_per_node=num_ranks, heads=(2, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_launch_does_not_start_before_its_host_issued_it(engine):
    # A group call of 7 s, then two launches of 2 x 5 s each: issued after 7, 17 and 27 s. The last
    # takes a second, forward, and two, backward, which ends by sending gradients.
    machine = replace(flat_machine(2, 2, launch=1.0), host=Host(7.0, 5.0))
    forward = attention_call(ring(), machine, name=engine).forward
    assert forward.end_s == pytest.approx([28.0, 28.0])
    assert forward.compute_s == pytest.approx([2.0, 2.0])


class Packing(FlatCost):
    """Packing and unpacking take a second."""

    def pack_s(self, num_bytes):
        return float(num_bytes > 0)


def test_packing_and_unpacking_are_a_launch_each():
    # Of a head exchange: inputs are packed and sent, and read where they arrive; two launches; outputs
    # are packed, sent and unpacked. Issued after 12, 22, 34 and 39 s; unpacking takes a second.
    plan = by_hand.pool("head_exchange", (64,), 2, ranks_per_node=2, heads=(2, 2))
    machine = replace(flat_machine(2, 2, launch=1.0), cost=Packing(MODEL), host=Host(7.0, 5.0))
    assert attention_call(plan, machine).forward.end_s == pytest.approx([40.0, 40.0])


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_of_a_group_call_have_a_price_of_their_own(engine):
    machine = replace(flat_machine(2, 2, launch=1.0), host=Host(7.0, 5.0, message_s=0.5))
    assert attention_call(ring(), machine, name=engine).forward.end_s == pytest.approx([29.0, 29.0])


def test_a_host_that_is_ahead_of_its_device_holds_nothing_up():
    machine = flat_machine(2, 2, launch=1.0)
    without = attention_call(ring(), machine)
    for outcome, same in zip(attention_call(ring(), replace(machine, host=Host(0.1, 0.1))), without, strict=True):
        assert outcome.end_s.tolist() == same.end_s.tolist()


@settings(max_examples=6, deadline=None)
@given(case=cases(), name=st.sampled_from(["te_ring", "zeppelin", "distca", "ulysses"]))
def test_slow_hosts_make_no_call_faster_and_take_at_least_what_they_issue(case: Case, name: str):
    planned = plan(name, case)
    ranks, per_node = planned.num_ranks, min(planned.ranks_per_node, planned.num_ranks)
    machine = flat_machine(ranks, per_node, launch=0.01, pair=1e-7)
    for engine in ("events", "rounds"):
        without = attention_call(planned, machine, name=engine)
        last = [outcome.end_s for outcome in without]
        for factor in (1.0, 4.0):
            slow = replace(machine, host=Host(0.02 * factor, 0.01 * factor))
            ends = [outcome.end_s for outcome in attention_call(planned, slow, name=engine)]
            for end, before in zip(ends, last, strict=True):
                assert (end >= before * (1 - 1e-9)).all()
            last = ends


def test_without_prices_seconds_are_the_same_bit_for_bit():
    cluster = Cluster(8, 4)
    assert AnalyticCost(cluster, MODEL).host == NO_HOST
    planned = by_hand.pool("ring", (300, 200), 8, ranks_per_node=4, heads=(2, 2))
    machine = flat_machine(8, 4, launch=0.01, pair=1e-6)
    for engine in ("events", "rounds"):
        plain, zero = (attention_call(planned, each, name=engine) for each in (machine, replace(machine, host=Host())))
        for a, b in zip(plain, zero, strict=True):
            assert np.array_equal(a.end_s, b.end_s)


def test_a_cluster_says_what_its_hosts_take():
    cluster = Cluster(8, 4, host_call_s=3e-5, host_launch_s=2e-5, host_message_s=1e-6)
    cost = AnalyticCost(cluster, MODEL)
    assert cost.host == Host(3e-5, 2e-5, 1e-6)
    assert PerturbedCost(cost, Factors(attention=2.0)).host == cost.host
    assert cost.host.issue_s(2, 3, 4) == pytest.approx(2 * 3e-5 + 3 * 2e-5 + 4e-6)
    with pytest.raises(ConfigError, match="cluster custom: host_call_s: expected seconds of at least 0, got -1"):
        Cluster(8, 4, host_call_s=-1.0)

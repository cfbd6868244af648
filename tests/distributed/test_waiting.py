"""For whom a rank's calls wait, and the rates of links, on gloo."""

from __future__ import annotations

import itertools

import pytest

from megatron_balance import Cluster, Model, make_planner
from megatron_balance.runtime.groups import SEVERAL
from tests.support import routed
from tests.support.pool import Pool

pytestmark = pytest.mark.dist

LATE, LATE_S = 2, 0.5
MODEL = Model(num_heads=4, num_kv_heads=4, head_dim=4)


@pytest.mark.parametrize(("planner", "source"), [("te_ring", LATE), ("ulysses", SEVERAL)])
def test_a_rank_that_comes_late_is_who_the_others_wait_for(pool: Pool, planner: str, source: int) -> None:
    plan = make_planner(planner, Cluster(4, 2), MODEL)([64])
    ranks = pool.run(routed.late, 4, plan, LATE, LATE_S)
    next_one = ranks[(LATE + 1) % 4]
    assert next_one.waited_s[source] > 0.8 * LATE_S, "what the late rank sends goes there"
    assert sum(ranks[LATE].waited_s.values()) < 0.5 * LATE_S, "the others were there before it"
    assert all(each.attended_s > 0 for each in ranks)
    assert max(each.attended_s for each in ranks) < 0.5 * LATE_S, "waiting is no attention"


def test_links_are_measured_whatever_ranks_they_join(pool: Pool) -> None:
    links = [*itertools.permutations(range(4), 2)]
    for ranks_per_node in (2, 0):
        for rates in pool.run(routed.rates, 4, links, ranks_per_node):
            assert list(rates) == links
            assert all(1e6 < rate < 1e12 for rate in rates.values()), rates

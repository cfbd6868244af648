"""The latent of multi-latent attention travels in place of keys and values: the same results, fewer
bytes."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.runtime.kernels.latent import check_latent
from tests.support import latent_jobs
from tests.support.latent_jobs import DIM, HEADS, LATENT, VALUES
from tests.support.pool import Pool
from tests.support.strategies import Case, plan

pytestmark = pytest.mark.dist

LENGTHS = (70, 9, 1, 33)


def case(num_kv_heads: int) -> Case:
    return Case(Batch(LENGTHS), Cluster(4, 2), Model(HEADS, num_kv_heads, DIM), 40, seed=5)


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("planner", ["te_ring", "llama_all_gather", "distca", "random_task_table"])
def test_latents_give_what_their_keys_and_values_give(pool: Pool, planner: str, policy: Policy) -> None:
    planned = plan(planner, case(1))
    runs = pool.run(latent_jobs.both, 4, planned, plan(planner, case(HEADS)), policy)
    for found, _ in runs:
        for name, ours, theirs in zip(("out", "dq", "dlatent", "dweight"), *found, strict=True):
            assert np.allclose(ours, theirs, atol=1e-10), name
    by_latent, by_heads = (sum(received[way] for _, received in runs) for way in (0, 1))
    assert 0 < by_latent < by_heads
    rank, rope = LATENT
    model = Model(
        HEADS, 1, DIM, bytes_per_element=8, value_dim=VALUES, latent_rank=rank, latent_rope=rope, latent_travels=True
    )
    predicted = plan_statistics(planned, model)["bytes_received_per_rank"]["total"]
    assert all(of_rank[1][0] >= expected for of_rank, expected in zip(runs, predicted, strict=True))
    assert any(predicted)


def test_a_plan_that_parts_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parts heads \(head_exchange\), and with 'latent_kv: true'"):
        check_latent(plan("ulysses", case(1)))

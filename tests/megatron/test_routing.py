"""Routers that look at more than a token's own scores: the routes and losses of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.training")

from megatron.core.transformer.moe.moe_utils import sinkhorn
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.router import check_router, sinkhorn_of_pool
from tests.megatron.conftest import EXPERTS, Run, Train, assert_same_training, at_once, started
from tests.megatron.test_parity import two_nodes
from tests.support.pipeline_runs import worst_gradient

pytestmark = pytest.mark.megatron

STEPS = 2
SINKHORN: dict[str, Any] = {
    **EXPERTS,
    "moe-router-load-balancing-type": "sinkhorn",
    "moe-aux-loss-coeff": 0,
    "moe-router-topk": 1,
    "train-iters": STEPS,
}


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1


def test_sinkhorn_is_megatrons_and_rows_of_no_sequence_count_nowhere() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 8, generator=generator)
    alone: Any = Alone()
    torch.testing.assert_close(sinkhorn_of_pool(logits, None, alone), sinkhorn(logits))
    padding = torch.arange(60) >= 50
    padded = torch.cat([logits, torch.randn(10, 8, generator=generator)])
    found = sinkhorn_of_pool(padded, padding, alone)
    torch.testing.assert_close(found[:50], sinkhorn(logits))


def test_megatrons_own_router_is_refused_where_it_would_balance_the_rows_of_a_rank() -> None:
    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.routing_type = "aux_loss"
    check_router(router, "mlp.router")
    router.routing_type = "sinkhorn"
    with pytest.raises(ConfigError, match=r"mlp\.router is Megatron's own router.* from its model config"):
        check_router(router, "mlp.router")


@pytest.fixture(scope="module")
def sinkhorned(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Run]:
    """Flags to start from one rank's weights, and that rank's run from there."""
    flags = started(train, tmp_path_factory.mktemp("checkpoint"), SINKHORN)
    return flags, train(1, "te_ring", at_once(flags), entry="gaps")


# Flags that say how plain Megatron moves tokens and keys, and are switched off.
MOVED = {
    "moe-token-dispatcher-type": "allgather",
    "hierarchical-context-parallel-sizes": [2, 2],
    "cp-comm-type": "a2a+p2p",
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({**MOVED, "micro-batch-size": 2}, id="one replica"),
        pytest.param({"context-parallel-size": 2, "expert-model-parallel-size": 2}, id="replicas that share experts"),
    ],
)
def test_sinkhorn_routes_as_one_rank_does(
    train: Train, sinkhorned: tuple[dict[str, Any], Run], flags: dict[str, Any]
) -> None:
    given, one = sinkhorned
    run = train(4, "zeppelin", {**given, **flags}, config=two_nodes(4), entry="gaps")
    assert_same_training(run, one)
    if "expert-model-parallel-size" not in flags:
        assert worst_gradient(run.result.logs, one.result.logs, step=1) < 1e-5
        assert "allgather was set to alltoall" in run.result.log(0)

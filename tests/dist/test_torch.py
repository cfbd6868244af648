"""Balanced training in plain PyTorch gives the losses and gradients of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.support import torch_jobs
from tests.support.pool import Pool
from tests.support.torch_jobs import Trained, Way

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    ranks = Pool(num_ranks=4)
    yield ranks
    ranks.close()


@cache
def truth(way: Way) -> Trained:
    return torch_jobs.reference(way)


@pytest.mark.parametrize("way", [Way()], ids=str)
def test_losses_and_gradients_are_those_of_one_rank(world: Pool, way: Way) -> None:
    expected = truth(Way(model=way.model, accumulate=way.accumulate, steps=way.steps))
    for (trained,) in world.run(torch_jobs.train, 4, [way]):
        assert trained.losses == pytest.approx(expected.losses, rel=1e-5)
        assert trained.norms == pytest.approx(expected.norms, rel=1e-5)
        assert trained.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            largest = gradient.abs().max().item()
            assert (trained.gradients[name] - gradient).abs().max().item() <= 1e-5 * max(largest, 1e-3), name

"""KnapFormer's printed interface, and a diffusion transformer that trains as on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support import dit_jobs, torch_jobs
from tests.support.pool import Pool
from tests.support.torch_jobs import Trained

pytestmark = pytest.mark.dist

TOPOLOGIES = ("g1n4", "g2n2", "g4n1", "g2n1+g1n2", "g1n1+g3n1", "g1n1", "g2n1")
"""The last two repeat as replicas."""
HEADS_DIVIDE = tuple(topology for topology in TOPOLOGIES if "g3" not in topology)


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    ranks = Pool(timeout_s=240.0, num_ranks=4)
    yield ranks
    ranks.close()


lengths_by_rank = st.lists(st.lists(st.integers(1, 30), max_size=3), min_size=4, max_size=4)


@settings(max_examples=2, phases=(Phase.explicit, Phase.generate))
@given(drawn=st.lists(st.tuples(st.sampled_from(HEADS_DIVIDE), lengths_by_rank), min_size=4, max_size=4))
def test_route_and_head_exchange_have_exact_inverses_and_gradients(
    world: Pool, drawn: list[tuple[str, list[list[int]]]]
) -> None:
    edge: list[tuple[str, list[list[int]]]] = [
        ("g2n1+g1n2", [[], [5], [], []]),  # one sequence, empty ranks
        ("g4n1", [[], [], [], [1]]),  # fewer tokens than ranks
        ("g1n4", [[], [], [3, 2], []]),  # more groups than sequences
        ("g2n2", [[], [], [], []]),  # none
    ]
    for zeros in world.run(dit_jobs.round_trips, 4, [*edge, *drawn]):
        assert all(float(x.abs().sum()) == 0 or float(x.abs().max()) < 1e-12 for case in zeros for x in case)


@pytest.mark.parametrize("topology", ["g2n1+g1n2", "g4n1"])
def test_attention_between_pre_attn_and_post_attn_is_that_of_whole_sequences(world: Pool, topology: str) -> None:
    worst = world.run(dit_jobs.attention, 4, topology, [[40, 3], [], [17], [1, 2, 9]])
    assert max(worst) < 1e-12


def test_mistakes_are_told_and_a_wrong_length_on_every_rank(world: Pool) -> None:
    told = world.run(dit_jobs.mistakes, 4)
    for rank, (none, width, tensor, rows, feature, back, heads, whole, *shared, lengths) in enumerate(told):
        assert none.startswith("expected a plan, got none; call plan_routing(seq_lens, d_model)")
        assert width == "d_model: expected a whole number of at least 1, got 1.5"
        assert tensor == "features: expected a list of tensors, got Tensor"
        assert rows == "expected 5 rows as the lengths in plan_routing, got [4, 3, 4]"
        assert feature == "expected 5 rows as the lengths in plan_routing, got []"
        assert back == "expected 5 rows as those of route, got [4, 3, 4]"
        assert heads == "expected [5, heads, head_dim] as those of route, got [5, 12]"
        tokens = 10 if rank < 2 else 5
        assert whole == f"expected [{tokens}, heads, head_dim] as those of pre_attn, got [99, 1, 4]"
        assert ["q has 3 heads, which a group of 2 ranks cannot share equally" in each for each in shared] == (
            [True] if rank < 2 else []
        )
        assert ("sequence 0 has length 1.5" if rank == 2 else "ranks [2] could not read") in lengths


def test_the_example_shows_its_progress_and_prints_a_table(world: Pool) -> None:
    source = dit_jobs.EXAMPLE.read_text(encoding="utf-8")
    assert "torchrun --standalone --nproc-per-node 4 scripts/examples/dit.py" in source
    printed, *others = world.run(dit_jobs.run_example, 4, ["--steps", "2", "--samples", "5"])
    assert "2/2" in printed
    assert "gradient norm" in printed
    assert set(others) == {""}, "one rank prints"


STEPS = 3
"""Of a run; all ways, torch.compile too, over 20 steps: tools/torch_parity.py."""


@cache
def truth() -> Trained:
    return dit_jobs.reference(dit_jobs.arguments(steps=STEPS))


@pytest.mark.parametrize(
    "way",
    [
        dit_jobs.arguments("g2n1+g1n2", steps=STEPS),
        dit_jobs.arguments("g4n1", checkpoint=True, steps=2),
        dit_jobs.arguments("g1n4", accumulate=2, steps=2),  # 3 samples for 4 groups: a rank without rows
        dit_jobs.arguments(planner="knapformer", ddp=True, steps=STEPS),
        dit_jobs.arguments(planner="zeppelin", checkpoint=True, ddp=True, accumulate=2, steps=STEPS),
    ],
    ids=lambda way: f"{way.planner or way.topology}{'-checkpointed' * way.checkpoint}",
)
def test_a_diffusion_transformer_trains_as_on_one_rank(world: Pool, way: dit_jobs.argparse.Namespace) -> None:
    expected = replace(truth(), losses=truth().losses[: way.steps], norms=truth().norms[: way.steps])
    for (trained,) in world.run(dit_jobs.train, 4, [way]):
        assert torch_jobs.differences(trained, expected) == pytest.approx((0, 0, 0), abs=1e-5)

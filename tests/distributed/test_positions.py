"""Models that take positions from a row take those of each document, or are refused."""

from collections.abc import Iterator

import pytest

from megatron_balance.planners import PLANNERS
from tests.support import position_jobs
from tests.support.pool import Pool
from tests.support.position_jobs import ORIGINAL, Case
from tests.support.strategies import EVERY_PATTERN

pytest.importorskip("transformers")

RANKS = 2
REFUSED = {
    "bart": "takes no position_ids: it numbers the rows that a rank holds",
    "esm, token dropout": "token_dropout scales by the share of masked tokens of a row",
}


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    ranks = Pool(timeout_s=240.0, num_ranks=RANKS)
    yield ranks
    ranks.close()


def largest(world: Pool, cases: list[Case]) -> dict[Case, tuple[float, float] | str]:
    one, two = world.run(position_jobs.differences, RANKS, cases)
    assert one == two, "all ranks alike"
    return dict(zip(cases, one, strict=True))


def assert_alike(found: dict[Case, tuple[float, float] | str]) -> None:
    for case, each in found.items():
        assert each == pytest.approx((0, 0), abs=5e-5), case


@pytest.mark.parametrize("model", [name for name in position_jobs.CONFIGS if name not in REFUSED])
def test_logits_and_gradients_are_those_of_each_document_alone(world: Pool, model: str) -> None:
    assert_alike(largest(world, [Case(model), Case(model, planner="packing")]))


def test_a_documents_length_counts_whatever_it_is_packed_with(world: Pool) -> None:
    cases = [Case("phi3, longrope", planner=planner) for planner in EVERY_PATTERN if planner in PLANNERS]
    cases += [Case("llama, dynamic", lengths) for lengths in ((3, 40), (40,), (9, 16), (30, 31, 32, 33))]
    assert_alike(largest(world, cases))


def test_recomputed_and_sharded_models_rotate_alike(world: Pool) -> None:
    cases = [Case(name, checkpointed=how) for name in ("phi3, longrope", "roberta") for how in (True, "reentrant")]
    cases += [Case("llama, dynamic", sharded=True, checkpointed=True)]
    assert_alike(largest(world, cases))


@pytest.mark.product
def test_a_compiled_model_rotates_alike(world: Pool) -> None:
    assert_alike(largest(world, [Case("phi3, longrope", compiled=True)]))


def test_an_untreated_model_runs_until_a_document_is_too_long_and_is_then_refused(world: Pool) -> None:
    for name in ("phi3, longrope", "llama, dynamic"):
        later, above = Case(name, set_later=True), Case(name, untreated=True)
        below = Case(name, (ORIGINAL, 7, 9), untreated=True)
        found = largest(world, [later, below, above])
        assert_alike({case: found[case] for case in (later, below)})
        assert "has another table for documents above 16 tokens, the longest here has 40" in found[above]
        assert "call hf.register(model)" in found[above]


def test_what_cannot_be_had_by_document_is_refused_on_all_ranks(world: Pool) -> None:
    wrong = {Case(model): said for model, said in REFUSED.items()}
    wrong[Case("roberta", untreated=True)] = (
        "counts positions from the padding token on, and its embedding was not seen to count"
    )
    for case, found in largest(world, [*wrong]).items():
        assert str(found).startswith("ConfigError"), case
        assert wrong[case] in str(found)


def test_without_a_batch_a_model_computes_as_it_did(world: Pool) -> None:
    for model in ("llama, dynamic", "phi3, longrope"):
        for found in world.run(position_jobs.stay_as_they_were, RANKS, model):
            assert found == [0.0, 0.0]


def test_each_of_two_models_on_one_batch_answers_for_itself(world: Pool) -> None:
    for treated, untreated in world.run(position_jobs.on_one_batch, RANKS, "llama, dynamic"):
        assert treated == ""
        assert "call hf.register(model)" in untreated

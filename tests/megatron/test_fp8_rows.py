"""Rows of FP8 linear layers under the launcher: every layer of every rank gets the multiple that
its recipe needs, and the loss stays.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.conftest import Train, assert_same_training
from tests.support.megatron_run import Result

pytestmark = pytest.mark.megatron

SCRIPT = str(Path(__file__).resolve().parents[1] / "support" / "stand_in_fp8_pretrain.py")
TWO_NODES = {"cluster": {"ranks_per_node": 2}}
STEPS = {"train-iters": 2}
PARALLEL = {"context-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": True}


def test_every_layer_gets_the_rows_that_its_recipe_needs(train: Train) -> None:
    aligned = train(
        4, "zeppelin", {**STEPS, "stand-in-recipe": "blockwise"}, config=TWO_NODES, entry="launch", before=(SCRIPT,)
    )
    assert "> layers refuse rows that are no multiple of 128" in aligned.result.log(0)
    assert_same_training(aligned, train(4, "zeppelin", STEPS, config=TWO_NODES))


def test_also_where_sequence_parallelism_cuts_the_rows(train: Train) -> None:
    both = {**STEPS, **PARALLEL}
    aligned = train(4, "zeppelin", both, config={"cluster": {"ranks_per_node": 4}}, entry="launch", before=(SCRIPT,))
    assert_same_training(aligned, train(4, "zeppelin", both, config={"cluster": {"ranks_per_node": 4}}))


def test_without_alignment_a_layer_refuses(train: Train) -> None:
    """The stand-in is worth something: a run that does not know of FP8 fails at its first layer."""

    def refused(result: Result) -> None:
        failed = result.failed
        assert failed is not None
        assert "no multiple of 16" in result.log(failed), result.tail(failed)

    train(
        4,
        "zeppelin",
        {**STEPS, "stand-in-unaligned": True},
        config=TWO_NODES,
        entry="launch",
        before=(SCRIPT,),
        expect=refused,
    )

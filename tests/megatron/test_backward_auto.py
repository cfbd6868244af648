"""Layers that keep beside layers that replay: the losses and gradients of keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron.conftest import Run, Train, assert_same_training, refusal

pytestmark = pytest.mark.megatron

STEPS, LAYERS = 3, 3
FLAGS = {"train-iters": STEPS, "lr-decay-iters": STEPS, "num-layers": LAYERS}


def trained(train: Train, planner: str, backward: str, memory_bytes: float | None = None, **flags: Any) -> Run:
    cluster = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
    config = {"backward": backward, "cluster": {"ranks_per_node": 2, **cluster}}
    return train(2, planner, {**FLAGS, **flags}, config=config)


@pytest.mark.parametrize("planner", ["te_ring", "distca"])
def test_a_mix_by_layer_trains_as_keep_does(train, planner):
    """distca runs two nano-batches interleaved, te_ring whole microbatches."""
    keep = trained(train, planner, "keep")
    told = keep.steps[0]["backward"]
    assert told["keeping_layers"] == told["layers"] == LAYERS
    between = (told["keep_bytes"] + told["replay_bytes"]) / 2
    mixed = trained(train, planner, "auto", between / 0.9)
    keeping = mixed.steps[0]["backward"]["keeping_layers"]
    assert 0 < keeping < LAYERS
    assert f"backward: keep in {keeping} of {LAYERS} layers, replay in {LAYERS - keeping}" in mixed.result.log(0)
    assert mixed.steps[0]["backward"]["peak_bytes"] <= between
    assert_same_training(mixed, keep)


def test_a_step_that_fits_in_no_way_ends_before_it_begins(train):
    config = {"cluster": {"ranks_per_node": 2, "memory_bytes": 1e6}}
    refused = refusal("error: this step does not fit: rank", "set 'backward: replay'")
    train(2, "te_ring", FLAGS, config=config, expect=refused)

"""`reproduce knapformer`: what its rows are made of; the rows are held by tests/golden."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.cost.fits import GAMMA_H100_FLUX, gamma_of
from megatron_balance.lab.papers import knapformer
from megatron_balance.lab.papers.knapformer import MODEL, WITHOUT, batches, flops, machine, plan
from megatron_balance.workloads.distributions import MIXED_RESOLUTION


def test_without_a_balancer_every_gpu_keeps_what_it_loads() -> None:
    (loaded,) = batches(MIXED_RESOLUTION, 1)
    planned = plan(WITHOUT, loaded)
    assert [tuple(planned.lengths[seq] for seq in zone.seqs) for zone in planned.zones] == list(loaded)


def test_utilisation_counts_four_forward_passes_of_equation_1() -> None:
    assert flops([1000]) == 4 * 57 * (24 * 1000 * 3072**2 + 4 * 1000**2 * 3072)


def test_attention_has_the_printed_gamma_over_a_whole_step() -> None:
    on, lengths = machine(), np.array([20000.0])
    linear_s = 4 * MODEL.linear_flops_per_token * lengths[0] / (on.cluster.flops_per_s * knapformer.RATE)
    attention_s = (2 + knapformer.backward_factor()) * on.cost.attention_s(lengths[0] ** 2)
    flops_ratio = MODEL.attention_flops_per_pair * lengths[0] / MODEL.linear_flops_per_token
    assert attention_s / linear_s / flops_ratio == pytest.approx(GAMMA_H100_FLUX)
    assert gamma_of(on.cost, MODEL) < GAMMA_H100_FLUX  # forward alone: the backward kernel is slower

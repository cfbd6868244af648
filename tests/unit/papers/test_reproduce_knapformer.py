"""`reproduce knapformer`: Table 1's imbalance and times, Figure 3's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_balance.cost.fits import GAMMA_H100_FLUX, gamma_of
from megatron_balance.lab.papers import knapformer
from megatron_balance.lab.papers.base import ITSELF, Effort
from megatron_balance.lab.papers.knapformer import MODEL, PAPER, WITHOUT, batches, flops, machine, plan
from megatron_balance.workloads.distributions import MIXED_RESOLUTION


def test_the_paper_has_what_it_prints() -> None:
    assert list(PAPER.tables) == ["fig3", "table1"]


def test_figure_3_is_exact_but_for_the_misprint() -> None:
    rows = {row.name: row for row in PAPER.tables["fig3"].rows(Effort(1))}
    clip = rows.pop("g4b1i512f85s1: tokens a GPU")
    assert all(row.ratio == pytest.approx(1) for row in rows.values())
    assert (clip.published, clip.ours) == (103184, 25796)


def test_table_1_is_close_to_the_paper() -> None:
    """Imbalance within 8 %; times within 20 %, but for g8n4 on low-resolution images, which
    docs/reproduce-knapformer.md explains.
    """
    rows = [row for row in PAPER.tables["table1"].rows(Effort(3)) if row.published is not None]
    assert len(rows) == 3 * 5 * 4
    fitted = [row.name.removeprefix("low-resolution images, g1n32: ") for row in rows if ITSELF in row.inputs]
    assert fitted == ["FBL", "TPS", "HFU"]
    assert all(any("sets the rate" in each for each in row.inputs) for row in rows if row.kind == "simulated")
    for row in rows:
        if ITSELF in row.inputs:
            continue
        assert row.ratio is not None
        if row.unit == "x":
            assert abs(row.ratio - 1) < 0.08, row
        elif not row.name.startswith("low-resolution images, g8n4"):
            assert abs(row.ratio - 1) < 0.2, row


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

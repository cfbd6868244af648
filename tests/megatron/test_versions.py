"""The other Megatron-core that patches are reviewed for trains like one rank of the same."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from tests.support import upstream
from tools import megatron_versions

pytestmark = pytest.mark.megatron

OTHER = "megatron_core-0.18.2"
CELLS = (("zeppelin", "pp"), ("distca", "cp"), ("te_ring", "ep"))
"""Megatron's own pipeline; layers in two nano-batches; experts: each with sources of its own."""


def test_0_18_2_trains_every_way_like_one_rank() -> None:
    root = upstream.folder(OTHER)
    assert megatron_versions.version_of(root) == OTHER.partition("-")[2]
    cells = list(megatron_versions.cells_of(root, CELLS, accept=False, always={}))
    assert [(cell["planner"], cell["layout"]) for cell in cells] == list(CELLS)
    for cell in cells:
        assert cell.get("difference", 1.0) <= megatron_versions.TOLERANCE, cell
        assert cell["steps"] == megatron_versions.STEPS
        assert cell["kv_tokens"] > 0, "attention was not cut"

"""The benchmark of WLB-LLM's choice of sharding: its figures follow from its samples."""

from __future__ import annotations

import pytest

from megatron_balance.cost.table import AttentionTable, CostTable, Curve, LayerTable, Source
from tools.bench import sharding


class TestSummary:
    def test_a_microbatch_takes_its_slowest_rank_and_the_median_of_its_repeats(self) -> None:
        run = _timed("a", [[3.0, 1.0, 2.0], [1.0, 9.0, 1.5]])
        assert run.measured_s == 2.0

    def test_the_choice_is_held_against_the_better_of_the_two(self) -> None:
        right, wrong = _four(document=2.0, sequence=4.0, adaptive="document"), _four(2.0, 1.0, adaptive="document")
        result = sharding.summary([right, wrong])
        assert result["mean_ms"] == {"document": 2000.0, "sequence": 2500.0, "adaptive": 2000.0, "mixed": 500.0}
        assert (result["document_wins"], result["right"], result["better_ms"]) == (1, 1, 1500.0)
        assert result["adaptive_over_better"] == pytest.approx(4 / 3)


def _timed(plan: str, seconds: list[list[float]]) -> sharding.Timed:
    return sharding.Timed(plan, 1.0, [[] for _ in seconds], seconds)  # pyright: ignore[reportArgumentType]  told apart by equality only


def _four(document: float, sequence: float, adaptive: str) -> dict[str, sharding.Timed]:
    """One microbatch; the adaptive plan is equal to one of the two and was not measured itself."""
    fixed = {"document": _timed("d", [[document]]), "sequence": _timed("s", [[sequence]])}
    chosen = _timed(fixed[adaptive].planned, [[]])  # pyright: ignore[reportArgumentType]
    return {**fixed, "adaptive": chosen, "mixed": _timed("m", [[0.5]])}


def test_launches_of_all_shardings_run_on_this_machines_kernel(tmp_path) -> None:
    table = tmp_path / "costs.json"
    sharding.save_table(_table(), table)
    arguments = ["--ranks", "2", "--tokens", "64", "--microbatches", "2", "--repeats", "1", "--costs", str(table)]
    assert sharding.main(arguments) == 0


def _table() -> CostTable:
    """Any figures: what runs does not depend on them."""
    square = ((1e-6, 1e-5), (1e-5, 1e-4))
    heads = (sharding.MODEL.num_heads, sharding.MODEL.num_kv_heads, sharding.MODEL.head_dim)
    attention = AttentionTable(
        "cpu_flash", "float32", *heads, (4, 64), (4, 64), (0, 64), 1e-6, 1e-6, square, square, square, square
    )
    curve, layer = Curve((1, 2), (1e-6, 2e-6)), LayerTable(128, 256, True, (1, 2), (1e-6, 2e-6), (1e-6, 2e-6))
    return CostTable(
        "megatron-balance cost table 1", Source("x", "cpu", "today", "0", "0", 1, 1), attention, curve, curve, layer, ()
    )

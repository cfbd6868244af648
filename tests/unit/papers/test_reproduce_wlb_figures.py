"""`reproduce wlb_llm`, Figures 12 to 15: cases as Table 1 prints them; all systems on the same
documents.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from megatron_balance.lab.papers import wlb_llm
from megatron_balance.lab.papers.base import ITSELF, Effort
from megatron_balance.lab.papers.wlb_llm import (
    ADAPTIVE,
    FIXED_DOCUMENT,
    FIXED_SEQUENCE,
    MIXED,
    PACKED,
    PAPER,
    PLAIN,
    SKEW,
    TABLE_1,
    THRESHOLDS,
    WLB,
    WlbCase,
    WlbSystem,
    error_of,
    fixed_blocks,
    samples,
    speedups,
    tokens_per_s,
)
from megatron_balance.workloads.distributions import K

SMALL = WlbCase("llama-550m", 16 * K, 2, 2, 2)
ONE = Effort(1)


def documents(steps: list[tuple[tuple[int, ...], ...]]) -> Counter[int]:
    return Counter(chain.from_iterable(chain.from_iterable(steps)))


def test_configurations_have_the_gpus_of_table_1_and_memory_for_the_window() -> None:
    gpus = [case.tensor * case.context * case.stages * case.replicas for case in TABLE_1]
    assert gpus == [32, 32, 32, 64, 64, 128, 256, 256]
    assert [case.name for case in TABLE_1 if case.recompute == "full"] == ["30B-64K", "30B-128K"]
    assert all(case.most_tokens() >= 1.25 * case.window for case in TABLE_1)
    assert all(case.model.num_layers % (case.stages * case.setup.interleave) == 0 for case in TABLE_1)


def test_samples_hold_whole_documents_in_their_order() -> None:
    assert list(samples(iter([5, 4, 2, 10, 1, 9]), 10)) == [(5, 4), (2,), (10,)]
    assert all(sum(sample) <= SMALL.window for batch in SMALL.batches(SKEW, 3) for sample in batch)
    assert [len(batch) for batch in SMALL.batches(SKEW, 3)] == [2, 2, 2]


@pytest.mark.parametrize("system", [FIXED_SEQUENCE, PACKED, WLB], ids=lambda system: system.name)
def test_every_system_trains_each_document_of_a_run_once(system: WlbSystem) -> None:
    batches = SMALL.batches(SKEW, 3)
    steps = system.steps(SMALL, SKEW, batches)
    assert documents(steps) == documents(batches)
    assert {len(step) for step in steps} == {SMALL.num_microbatches}


def test_outliers_wait_for_one_another_and_nothing_else_does() -> None:
    batches = SMALL.batches(SKEW, 3)
    steps = PACKED.steps(SMALL, SKEW, batches)
    late = [documents([batch]) - documents([step]) for batch, step in zip(batches, steps, strict=False)]
    threshold = THRESHOLDS[SKEW][2][0] * SMALL.window // (128 * K)
    assert any(late)
    assert all(length >= threshold for each in late for length in each)
    assert PLAIN.steps(SMALL, SKEW, batches) == batches


def test_fixed_4d_is_the_better_of_its_shardings() -> None:
    both = [tokens_per_s(system.blocks(SMALL, SKEW, 2)) for system in (FIXED_SEQUENCE, FIXED_DOCUMENT)]
    assert tokens_per_s(fixed_blocks(SMALL, SKEW, 2)) == max(both)


def test_a_standard_error_is_that_of_the_blocks() -> None:
    blocks = PLAIN.blocks(SMALL, SKEW, 6)
    assert len(blocks) == 4
    assert sum(tokens for tokens, _ in blocks) == sum(chain.from_iterable(chain.from_iterable(SMALL.batches(SKEW, 6))))
    each = speedups([(10, 1.0), (10, 2.0)], [(10, 2.0), (10, 2.0)])
    assert each == pytest.approx([4 / 3, 2.0, 1.0])
    assert error_of(each) == "standard error 0.500"


def test_every_row_of_table_2_is_on_the_same_global_batches(monkeypatch) -> None:
    """The solver's stood on a thirtieth of them."""
    seen = []
    method = wlb_llm.Method(1.2, 0.01, 8, 1.0, 0.1, 0.1)
    monkeypatch.setattr(wlb_llm, "measure", lambda batches, _: seen.append(batches) or method)
    rows = PAPER.tables["table2"].rows(Effort(8))
    assert len(seen) == 2 * 11
    assert all(
        batches == wlb_llm.global_batches(dataset, 8)
        for at, dataset in enumerate(("wlb-skew", "wlb"))
        for batches in seen[11 * at : 11 * at + 11]
    )
    imbalance = [row for row in rows if row.name.endswith("imbalance")]
    assert all("8 global batches, standard error 0.010" in row.note for row in imbalance)
    fitted = [row.name for row in imbalance if ITSELF in row.inputs]
    assert len(fitted) == 5
    assert all(name.startswith(("wlb-skew: original", "wlb-skew: fixed-length greedy")) for name in fitted)


def test_replicas_of_a_step_run_side_by_side() -> None:
    (batch,) = replace(SMALL, replicas=2).batches(SKEW, 1)
    two = PLAIN.step_s(replace(SMALL, replicas=2), batch)
    assert two == max(PLAIN.step_s(SMALL, batch[first::2]) for first in range(2))


class TestTables:
    @pytest.fixture(autouse=True)
    def small_cases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wlb_llm, "TABLE_1", (SMALL,))
        monkeypatch.setattr(wlb_llm, "BY_WINDOW", (SMALL.window,))
        monkeypatch.setattr(wlb_llm, "B7_128K", SMALL)
        monkeypatch.setattr(wlb_llm, "WINDOWS", (8 * K, 16 * K))
        monkeypatch.setattr(wlb_llm, "FIG15_CASES", (replace(SMALL, context=4),))

    def test_figure_12_has_the_means_of_the_text_for_both_data_sets_and_every_configuration(self) -> None:
        rows = {row.name: row for row in PAPER.tables["fig12"].rows(ONE)}
        ours = rows["WLB-LLM over Plain-4D, mean"]
        assert ours.published == 1.23
        assert ours.ours == speedups(WLB.blocks(SMALL, SKEW, 1), PLAIN.blocks(SMALL, SKEW, 1))[0]
        assert ours.ours == pytest.approx(
            rows["WLB-LLM over Fixed-4D, mean"].ours * rows["Fixed-4D over Plain-4D, mean"].ours
        )
        assert {"wlb: WLB-LLM over Plain-4D, mean", "550M-16K: WLB-LLM over Plain-4D"} <= set(rows)

    def test_figure_13_has_the_published_parts(self) -> None:
        rows = PAPER.tables["fig13"].rows(ONE)
        assert [row.published for row in rows] == [1.02, 1.05, 1.28, 1.33, None]
        by_name = {row.name: row.ours for row in rows}
        assert by_name[ADAPTIVE.name] >= 0.99 * max(1.0, by_name["per-document sharding"])
        assert by_name[MIXED.name] >= 0.99 * by_name[WLB.name]

    def test_figure_14_has_a_row_for_each_window(self) -> None:
        assert [row.name for row in PAPER.tables["fig14"].rows(ONE)] == ["8K", "16K"]

    def test_figure_15_is_never_better_than_the_optimum_of_both_shardings(self) -> None:
        rows = {row.name: row.ours for row in PAPER.tables["fig15"].rows(ONE)}
        assert 0.95 < rows["16K: adaptive over optimal"] <= 1.0
        assert rows["16K: a choice for each document over adaptive"] > 0.99

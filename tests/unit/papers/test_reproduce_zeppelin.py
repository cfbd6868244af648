"""`reproduce zeppelin`: closed forms, and small simulations that must come out in the order that
the paper describes.
"""

from __future__ import annotations

import pytest

from megatron_balance.lab.papers import zeppelin
from megatron_balance.lab.papers.base import Effort, Row
from megatron_balance.lab.papers.zeppelin import (
    DATASETS,
    DEFAULT,
    ENGINE,
    HYBRID,
    LLAMA,
    OURS,
    PAPER,
    TE,
    TE_ROUTED,
    ZEPPELIN,
    ZeppelinCase,
    tokens_per_s,
)
from megatron_balance.simulator.attention import attention_call
from megatron_balance.workloads.distributions import K

ONE = Effort(1)


@pytest.fixture(scope="module")
def small() -> ZeppelinCase:
    """3B on two nodes of cluster A."""
    return ZeppelinCase("llama-3b", "a800", 16)


def named(rows: list[Row], start: str) -> Row:
    found = [row for row in rows if row.name.startswith(start)]
    assert len(found) == 1, [row.name for row in rows]
    return found[0]


# Section 5.4.1; Table 2, Figures 3, 5 and 12 and Table 3 are held by tests/golden


def test_all_systems_move_in_backward_what_transformer_engine_moves(small):
    """Keys and values again and their gradients, both in bf16: twice the forward's bytes, over
    every NIC.
    """
    call = attention_call(TE.plans(small, (64 * K,))[0], small.machine, small.setup.policy)
    nics = slice(2 * small.cluster.num_ranks, None)
    forward, backward = (outcome.bytes_moved[nics].sum() for outcome in call)
    assert forward > 0
    assert backward == pytest.approx(2 * forward, rel=1e-3)


def test_a_round_in_series_is_equation_1_and_three_thread_blocks(small):
    cost = small.cost
    num_bytes = cost.kv_bytes(4 * K)
    legs = 2 * (3.4e-6 + num_bytes * 3 / 4 / 200e9) + 9.6e-6 + num_bytes / 4 / 25e9 + 3 * cost.call_s
    assert zeppelin.serial_round_s(small, 4 * K, 0) == pytest.approx(legs + 3 * cost.block_s(0.7))
    assert zeppelin.serial_round_s(small, 4 * K, 128) == pytest.approx(legs + 3 * cost.block_s(1.7))
    assert zeppelin.serial_round_s(small, 4 * K, 0, backward=True) > zeppelin.serial_round_s(small, 4 * K, 0)


# Speedups


def test_the_systems_come_in_the_papers_order_on_many_short_sequences(small):
    batches = small.batches("arxiv", 1)
    rate = {
        system.name: tokens_per_s(system, small, batches) for system in (TE, TE_ROUTED, HYBRID, ENGINE, ZEPPELIN, OURS)
    }
    assert rate[TE.name] < rate[TE_ROUTED.name]
    assert rate[TE.name] < rate[HYBRID.name] < rate[ZEPPELIN.name]
    assert rate[TE.name] < rate[ENGINE.name] < rate[OURS.name]


def test_rounds_in_series_are_slower_than_overlapped_ones_and_faster_than_one_nic(small):
    lengths = small.batches("github", 1)[0]
    assert TE_ROUTED.step_s(small, lengths) < zeppelin.serial_routing_s(small, lengths) < TE.step_s(small, lengths)


def test_gathering_is_ahead_of_a_ring_over_one_nic(small):
    """Figure 9: LLaMA CP gathers over all NICs of a node, and reduce-scatters gradients over all of
    them.
    """
    lengths = small.batches("prolong64k", 1)[0]
    assert LLAMA.step_s(small, lengths) < TE.step_s(small, lengths)


def test_more_nics_leave_less_to_gain(small):
    """Cluster C has a NIC for each GPU; A has one for two."""
    lengths = small.batches("arxiv", 1)[0]
    other = ZeppelinCase("llama-3b", "h200", 16)
    gain = [TE.step_s(case, lengths) / ZEPPELIN.step_s(case, lengths) for case in (small, other)]
    assert gain[0] > gain[1] > 1


def test_tensor_parallel_groups_are_ranks_of_twice_the_tokens():
    case = zeppelin.B13.case(64 * K)
    assert (case.cluster.num_ranks, case.cluster.node_size, case.num_tokens) == (8, 4, 64 * K)
    assert case.cluster.ranks_per_nic == 1
    assert TE.plans(case, (64 * K,))[0].num_ranks == 8
    single = ZeppelinCase("llama-13b", "a800", 16)
    layer_s = single.cost.layer_s(8192) / 2 + case.cost.tensor_parallel_s(8192)
    assert case.cost.layer_s(8192) == pytest.approx(layer_s, rel=1e-6)


def test_the_grid_has_a_row_for_every_cell_and_sums_them_up(monkeypatch):
    monkeypatch.setattr(zeppelin, "MODELS", (zeppelin.B7, zeppelin.B13, zeppelin.MOE))
    monkeypatch.setattr(zeppelin, "CONTEXTS", (64 * K,))
    monkeypatch.setattr(zeppelin, "speedups", _fixed_speedups)
    rows = PAPER.tables["fig8"].rows(ONE)
    cells = [
        row
        for row in rows
        if row.name.startswith(("7B, ", "13B, ", "8x550M, 64k, ")) and row.note == "drawn in the paper, not printed"
    ]
    assert len(cells) == 9
    default = [row for row in rows if row.name.endswith(": zeppelin, default")]
    assert [row.ours for row in default] == [6.0] * 9
    assert named(rows, "zeppelin by default over TE CP, mean").ours == 6.0
    assert named(rows, "zeppelin by default over Zeppelin, smallest").ours == pytest.approx(6.0 / 4.0)
    assert named(rows, "Zeppelin over TE CP, mean").ours == pytest.approx(sum(row.ours for row in cells) / 9)
    assert named(rows, "Zeppelin over TE CP, largest").ours == max(row.ours for row in cells) == 4.0
    assert named(rows, "speedup of 13B over that of 7B").ours == pytest.approx(4.0 / 3.0)
    assert named(rows, "8x550M, 64k: LLaMA CP over Zeppelin").ours == pytest.approx(2.5 / 2.0)
    assert named(rows, "8x550M, 64k, documents apart by 1: LLaMA CP over Zeppelin").ours == pytest.approx(2.5 / 1.0)
    assert named(rows, "8x550M, 64k, documents apart by 1.73: LLaMA CP over zeppelin").ours == pytest.approx(2.5 / 6.0)
    assert named(rows, "Zeppelin over the best of the others").ours == pytest.approx(3.0 / 2.5)  # without 8x550M at 64k
    published = {row.name: row.published for row in rows if row.published not in (None, 1.0)}
    assert {published[name] for name in published} == {2.80, 6.60}


def _fixed_speedups(case: ZeppelinCase, batches: list[tuple[int, ...]]) -> dict[str, float]:
    zeppelin = {"llama-7b": 3.0, "llama-13b": 4.0, "moe-8x550m": 2.0}[case.model_name]
    if case.expert_load is not None:
        zeppelin /= 2
    own = {ZEPPELIN.name: zeppelin, OURS.name: 5.0, DEFAULT.name: 6.0}
    return {TE.name: 1.0, LLAMA.name: 2.5, HYBRID.name: 1.5, **own}


def test_scaling_is_the_largest_scale_over_the_smallest(monkeypatch):
    def rate(system, case, batches):
        return {TE.name: 10.0, LLAMA.name: 5.0, HYBRID.name: 12.0}.get(system.name, 2.0 * case.num_gpus)

    monkeypatch.setattr(zeppelin, "tokens_per_s", rate)
    rows = PAPER.tables["fig9"].rows(ONE)
    assert (named(rows, "GitHub: growth of TE CP").ours, named(rows, "GitHub: growth of TE CP").published) == (1.0, 1.0)
    assert named(rows, "ArXiv: growth of Zeppelin").ours == pytest.approx(128 / 16)
    assert named(rows, "LLaMA CP over TE CP, smallest").ours == pytest.approx(0.5)
    assert named(rows, "Hybrid DP over LLaMA CP on 16").ours == pytest.approx(12 / 5)
    assert named(rows, "Zeppelin over the best of the others").ours == pytest.approx(2 * 16 / 12)
    assert named(rows, "growth of Zeppelin on GitHub over that on ArXiv").ours == 1.0


def test_the_ablations_printed_numbers_stand_at_their_rows(monkeypatch):
    monkeypatch.setattr(zeppelin, "tokens_per_s", lambda system, *_: {TE.name: 1.0}.get(system.name, 2.0))
    monkeypatch.setattr(zeppelin, "serial_routing_s", lambda _, lengths: sum(lengths) / 1.5)
    rows = PAPER.tables["fig11"].rows(ONE)
    printed = {row.name: row.published for row in rows if row.published is not None}
    assert printed["ArXiv: attention engine alone"] == 3.2
    assert printed["ArXiv: engine and routing"] == 3.51
    assert printed["ArXiv: engine, routing and remapping"] == 3.64
    assert [printed[f"{name}: routing alone"] for name in DATASETS.values()] == [1.6] * 3
    assert named(rows, "GitHub: routing alone, rounds in series").ours == pytest.approx(1.5)
    assert named(rows, "ArXiv: routing alone, rounds in series").published == 1.6
    assert named(rows, "ArXiv: what remapping adds").ours == 1.0


def test_clusters_are_compared_by_speedup_and_by_throughput(monkeypatch):
    def rate(system, case, batches):
        return {("a800", TE.name): 1.0, ("a800", ZEPPELIN.name): 4.0, ("h800", TE.name): 3.0}.get(
            (case.cluster_name, system.name), 6.0
        )

    monkeypatch.setattr(zeppelin, "tokens_per_s", rate)
    rows = PAPER.tables["fig10"].rows(ONE)
    assert named(rows, "ArXiv: speedup on A over that on B").ours == pytest.approx(4.0 / 2.0)
    assert named(rows, "ArXiv: throughput on B over that on A").ours == pytest.approx(6.0 / 4.0)

"""Reproduction of DistCA: the baselines' groups, what all systems are given, and what the closed
forms say.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest

from megatron_balance.lab.papers import distca
from megatron_balance.lab.papers.distca import (
    DistcaCase,
    GroupQueries,
    HeldTokens,
    ReplicaConfig,
    chunks,
    deal,
    distca_s,
    layer_s,
    megatron_by_config,
    per_document,
    per_sequence,
    replica_s,
    wlb_by_config,
)
from megatron_balance.workloads.distributions import K

DOCUMENTS = [700, 31, 1, 256, 1000]


@pytest.mark.parametrize("share", [per_sequence, per_document])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_group_attends_every_query_once(share: Callable[[list[int], int], GroupQueries], num_ranks: int) -> None:
    rows = share(DOCUMENTS, num_ranks).rows
    attended = sorted((int(seq), token) for seq, start, stop, _ in rows for token in range(start, stop))
    assert attended == [(seq, token) for seq, length in enumerate(DOCUMENTS) for token in range(length)]


def test_cutting_documents_evens_attention_out_and_cutting_the_sequence_does_not() -> None:
    documents = [6000, 1000, 1000]
    pairs = {}
    for name, share in (("document", per_document(documents, 4)), ("sequence", per_sequence(documents, 4))):
        start, stop = share.rows[:, 1], share.rows[:, 2]
        loads = np.bincount(share.rows[:, 3], (stop * (stop + 1) - start * (start + 1)) / 2, 4)
        pairs[name] = loads.max() / loads.mean()
    assert pairs["document"] < 1.01
    assert pairs["sequence"] > 1.3


def test_a_wider_group_computes_less_and_gathers_more() -> None:
    case = DistcaCase("8B", 8, 256 * K, 128 * K)
    alone, four = (sum(layer_s(case, per_document([128 * K], n))) for n in (1, 4))
    assert alone / 4 < four < alone


def test_samples_hold_whole_documents_but_for_those_that_pass_their_end() -> None:
    assert chunks([5, 3, 9], 6) == [[5, 1], [2, 4], [5]]
    for dataset in ("pretrain", "prolong"):
        for batch in DistcaCase("8B", 8, 1024 * K, 256 * K).batches(dataset, 2):
            assert sum(batch) == 1024 * K
            assert max(batch) <= 256 * K
            assert {256 * K * i for i in range(1, 5)} <= set(np.cumsum(batch).tolist())


def test_items_go_to_the_bin_with_least_work_that_has_room() -> None:
    assert deal([4, 3, 2, 1], [1, 1, 1, 1], 2, inf) == [[0, 3], [1, 2]]
    assert deal([4, 3, 2, 1], [2, 2, 1, 1], 2, 3) == [[0, 3], [1, 2]]
    assert deal([1, 1], [2, 2], 1, 3) is None


def test_a_pipeline_of_alike_microbatches_takes_what_1f1b_takes() -> None:
    case = DistcaCase("8B", 8, 1024 * K, 128 * K)
    share = per_document([128 * K], 4)
    one, two = (ReplicaConfig(stages, 4, "none") for stages in (1, 2))
    head_s = case.cost.head_s(32 * K) + case.cost.head_s(32 * K, backward=True)
    whole_s = replica_s(case, [share], one) - head_s
    # Two stages, four microbatches: five times half the layers and the head on the last stage, and
    # what results take to the next stage.
    assert replica_s(case, [share] * 4, two) == pytest.approx(5 * whole_s / 2 + 4 * head_s, rel=0.02)


def test_what_does_not_fit_the_memory_is_left_out() -> None:
    case = DistcaCase("34B", 8, 1024 * K, 512 * K)
    assert not case.fits(HeldTokens(512 * K, 0))
    assert case.fits(HeldTokens(64 * K, 0))
    [batch] = case.batches("pretrain", 1)
    found = {(config.degree, config.recompute) for config in megatron_by_config(case, batch)}
    assert (4, "none") not in found
    assert (8, "full") in found


def test_distca_is_ahead_of_megatron_and_not_behind_wlb_where_documents_differ() -> None:
    case = DistcaCase("8B", 8, 1024 * K, 128 * K)
    [batch] = case.batches("pretrain", 1)
    ours = distca_s(case, batch)
    assert min(megatron_by_config(case, batch).values()) > 1.1 * ours
    assert min(wlb_by_config(case, batch).values()) > 0.97 * ours
    pipelines = DistcaCase("8B", 8, 1024 * K, 128 * K, (2,))
    assert ours < distca_s(pipelines, batch) < inf


def test_the_grids_are_those_of_tables_4_and_5() -> None:
    fig9 = distca.grid(distca.TABLE_4, distca.NODES)
    fig10 = distca.grid(distca.TABLE_5, distca.NODES_5, distca.STAGES)
    assert (len(fig9), len(fig10)) == (18, 18)
    assert {case.num_tokens for case in fig9 if case.num_nodes == 8} == {1024 * K, 512 * K}

"""`reproduce`: the frame, and what the rows of each paper are made of."""

import json
from collections import Counter
from dataclasses import replace
from itertools import chain, product
from math import inf
from types import MappingProxyType

import numpy as np
import pytest

import megatron_balance.lab.papers as package
from megatron_balance.analysis.change import base_sync_s
from megatron_balance.cost.fits import GAMMA_H100_FLUX, gamma_of
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.lab.papers import distca, hydraulis, knapformer, wlb_llm, zeppelin
from megatron_balance.lab.papers.base import ITSELF, Effort, Paper, PaperTable, Published, Row
from megatron_balance.lab.papers.distca import layer_s
from megatron_balance.lab.papers.knapformer import MODEL, WITHOUT, flops, machine, plan
from megatron_balance.lab.papers.zeppelin import HYBRID, LLAMA, OURS, PAPER, TE, ZEPPELIN, ZeppelinCase, tokens_per_s
from megatron_balance.planning.strategies import costs_of
from megatron_balance.simulator.attention import attention_call
from megatron_balance.workloads.distributions import MIXED_RESOLUTION, K, draw_by_gpu

KEYS = {"paper", "table", "name", "published", "ours", "unit", "kind", "sign", "note", "inputs"}


def two_rows(effort: Effort) -> list[Row]:
    drawn = [float(number) for number in effort.progress(list(range(effort.batches)), "draws")]
    return [
        Row("the sum", Published(2.0), sum(drawn), "x", "exact"),
        Row("only drawn", None, 1234.5, "tokens/s", "simulated", "<=", "a figure without numbers"),
        Row("set by it", Published(2.0), 2.0, "s", "simulated", inputs=(ITSELF, "a rate")),
    ]


@pytest.fixture
def sketch(monkeypatch) -> Paper:
    # A paper of two small tables in place of the real ones.
    paper = Paper(
        "A sketch (arXiv 0)",
        MappingProxyType({"table1": PaperTable("one", two_rows, 3), "fig2": PaperTable("two", two_rows)}),
    )
    monkeypatch.setattr(package, "PAPERS", {"sketch": paper})
    return paper


def test_every_table_of_a_paper_comes_in_order_with_all_keys(run, sketch):
    code, out, err = run("reproduce sketch --json")
    rows = json.loads(out)["rows"]
    assert (code, err) == (0, "")
    assert [(row["table"], row["name"]) for row in rows] == [
        (t, n) for t in ("table1", "fig2") for n in ("the sum", "only drawn", "set by it")
    ]
    assert all(set(row) == KEYS and row["paper"] == "sketch" for row in rows)
    assert [row["ours"] for row in rows if row["name"] == "the sum"] == [3.0, 0.0]  # 0 + 1 + 2, and one batch
    drawn = {"name": "only drawn", "published": None, "ours": 1234.5, "unit": "tokens/s", "kind": "simulated"}
    drawn |= {"sign": "<=", "note": "a figure without numbers", "inputs": []}
    assert {key: rows[1][key] for key in drawn} == drawn
    assert rows[2]["inputs"] == [ITSELF, "a rate"]
    # One table and a number of batches are taken.
    rows = run.json("reproduce sketch fig2 --batches 5 --json")["rows"]
    assert {row["table"] for row in rows} == {"fig2"}
    assert rows[0]["ours"] == 10.0


def test_people_see_the_ratio_and_the_note(run, sketch):
    out = run("reproduce sketch table1")[1]

    def cells(name: str) -> list[str]:
        line = next(line for line in out.splitlines() if name in line)
        return [cell.strip() for cell in line.strip("│").split("│")]

    assert cells("the sum") == ["the sum", "2", "3", "x", "1.50", "exact"]
    assert cells("only drawn") == ["only drawn [1]", "-", "1,234", "tokens/s", "-", "simulated"]
    assert cells("set by it") == ["set by it [2]", "2", "2", "s", "input", "simulated"]
    notes = ("[1] a figure without numbers", "[2] taken from the paper: this number, a rate")
    assert all(words in out for words in ("A sketch (arXiv 0)", "table1: one", *notes))
    assert "fig2" not in out


def test_a_ratio_needs_something_published():
    rows = [Row("a", published, 3.0, "", "exact") for published in (Published(2.0), None, Published(0.0))]
    rows.append(replace(rows[0], inputs=(ITSELF,)))
    assert [row.ratio for row in rows] == [1.5, None, None, None]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("reproduce zepelin", "reproduce: no paper 'zepelin'; did you mean 'zeppelin'?"),
        ("reproduce megascale", "reproduce: no paper 'megascale'; there are "),
        ("reproduce zeppelin fgi8", "zeppelin has no table 'fgi8'; did you mean 'fig8'?"),
        ("reproduce zeppelin appendix", "zeppelin has no table 'appendix'; there are fig3, fig5, table2"),
        ("reproduce zeppelin table2 --batches 0", "--batches 0: must be at least 1"),
        ("reproduce zeppelin table2 --batch 3", "unknown option '--batch'; did you mean '--batches'?"),
        ("reproduce", "the following arguments are required: PAPER"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_be_right(run, command, message):
    assert message in run.error(command)


# `reproduce zeppelin`: closed forms, and small simulations that must come out in the order that the
# paper describes.
ONE = Effort(1)


@pytest.fixture(scope="module")
def small() -> ZeppelinCase:
    # 3B on two nodes of cluster A.
    return ZeppelinCase("llama-3b", "a800", 16)


def named(rows: list[Row], start: str) -> Row:
    (found,) = [row for row in rows if row.name.startswith(start)]
    return found


def test_a_round_in_series_is_equation_1_and_backwards_move_twice_the_bytes(small):
    # A round in series is equation 1 and three thread blocks.
    cost = small.cost
    num_bytes = cost.kv_bytes(4 * K)
    legs = 2 * (3.4e-6 + num_bytes * 3 / 4 / 160e9) + 9.6e-6 + num_bytes / 4 / 24e9 + 3 * cost.call_s
    assert zeppelin.serial_round_s(small, 4 * K, 0) == pytest.approx(legs + 3 * cost.block_s(0.7))
    assert zeppelin.serial_round_s(small, 4 * K, 128) == pytest.approx(legs + 3 * cost.block_s(1.7))
    assert zeppelin.serial_round_s(small, 4 * K, 0, backward=True) > zeppelin.serial_round_s(small, 4 * K, 0)
    # Section 5.4.1; Table 2, Figures 3, 5 and 12 and Table 3 are held by tests/golden
    # All systems move in backward what transformer engine moves.
    # Keys and values again and their gradients, both in bf16: twice the forward's bytes, over every
    # NIC.
    call = attention_call(TE.plans(small, (64 * K,))[0], small.machine, small.setup.policy)
    nics = slice(2 * small.cluster.num_ranks, None)
    forward, backward = (outcome.bytes_moved[nics].sum() for outcome in call)
    assert forward > 0
    assert backward == pytest.approx(2 * forward, rel=1e-3)


# Speedups
def test_systems_come_in_the_papers_order(small):
    batches = small.batches("arxiv", 1)
    systems = TE, zeppelin.TE_ROUTED, HYBRID, zeppelin.ENGINE, ZEPPELIN, OURS
    rate = {system.name: tokens_per_s(system, small, batches) for system in systems}
    assert rate[TE.name] < rate[zeppelin.TE_ROUTED.name]
    assert rate[TE.name] < rate[HYBRID.name] < rate[ZEPPELIN.name]
    assert rate[TE.name] < rate[zeppelin.ENGINE.name] < rate[OURS.name]
    # Rounds in series are slower than overlapped ones and faster than one nic.
    lengths = small.batches("github", 1)[0]
    assert (
        zeppelin.TE_ROUTED.step_s(small, lengths)
        < zeppelin.serial_routing_s(small, lengths)
        < TE.step_s(small, lengths)
    )
    # Gathering is ahead of a ring over one nic.
    # Figure 9: LLaMA CP gathers over all NICs of a node, and reduce-scatters gradients over all of
    # them.
    lengths = small.batches("prolong64k", 1)[0]
    assert LLAMA.step_s(small, lengths) < TE.step_s(small, lengths)
    # More nics leave less to gain.
    # Cluster C has a NIC for each GPU; A has one for two.
    lengths = small.batches("arxiv", 1)[0]
    other = ZeppelinCase("llama-3b", "h200", 16)
    gain = [TE.step_s(case, lengths) / ZEPPELIN.step_s(case, lengths) for case in (small, other)]
    assert gain[0] > gain[1] > 1


def test_tensor_parallel_groups_are_ranks_of_twice_the_tokens():
    case = zeppelin.MODELS["13B"]
    assert (case.cluster.num_ranks, case.cluster.node_size, case.num_tokens) == (8, 4, 64 * K)
    assert case.cluster.ranks_per_nic == 1
    assert TE.plans(case, (64 * K,))[0].num_ranks == 8
    single = ZeppelinCase("llama-13b", "a800", 16)
    layer_s = single.cost.layer_s(8192) / 2 + case.cost.tensor_parallel_s(8192)
    assert case.cost.layer_s(8192) == pytest.approx(layer_s, rel=1e-6)


def test_the_grid_has_a_row_for_every_cell_and_sums_them_up(monkeypatch):
    monkeypatch.delitem(zeppelin.MODELS, "30B")
    monkeypatch.setattr(zeppelin, "CONTEXTS", (64 * K,))
    monkeypatch.setattr(zeppelin, "_speedups", _fixed_speedups)
    rows = PAPER.tables["fig8"].rows(ONE)
    drawn = [row for row in rows if row.note == "drawn in the paper, not printed"]
    cells = [row for row in drawn if row.name.startswith(("7B, ", "13B, ", "8x550M, 64k, "))]
    assert len(cells) == 9
    default = [row for row in rows if row.name.endswith(": zeppelin, default")]
    assert [row.ours for row in default] == [6.0] * 9
    wanted = {
        "zeppelin by default over TE CP, mean": 6.0,
        "zeppelin by default over Zeppelin, smallest": 6.0 / 4.0,
        "Zeppelin over TE CP, mean": sum(row.ours for row in cells) / 9,
        "Zeppelin over TE CP, largest": 4.0,
        "speedup of 13B over that of 7B": 4.0 / 3.0,
        "8x550M, 64k: LLaMA CP over Zeppelin": 2.5 / 2.0,
        "8x550M, 64k, documents apart by 1: LLaMA CP over Zeppelin": 2.5 / 1.0,
        "8x550M, 64k, documents apart by 1.73: LLaMA CP over zeppelin": 2.5 / 6.0,
        "Zeppelin over the best of the others": 3.0 / 2.5,  # without 8x550M at 64k
    }
    assert {name: named(rows, name).ours for name in wanted} == pytest.approx(wanted)
    assert max(row.ours for row in cells) == 4.0
    published = {row.name: row.published for row in rows if row.published not in (None, 1.0)}
    assert {published[name] for name in published} == {2.80, 6.60}


def _fixed_speedups(case: ZeppelinCase, batches: list[tuple[int, ...]]) -> dict[str, float]:
    faster = {"llama-7b": 3.0, "llama-13b": 4.0, "moe-8x550m": 2.0}[case.model_name]
    if case.expert_load is not None:
        faster /= 2
    own = {ZEPPELIN.name: faster, OURS.name: 5.0, zeppelin.DEFAULT.name: 6.0}
    return {TE.name: 1.0, LLAMA.name: 2.5, HYBRID.name: 1.5, **own}


def test_the_ablations_printed_numbers_stand_at_their_rows(monkeypatch):
    monkeypatch.setattr(zeppelin, "tokens_per_s", lambda system, *_: {TE.name: 1.0}.get(system.name, 2.0))
    monkeypatch.setattr(zeppelin, "serial_routing_s", lambda _, lengths: sum(lengths) / 1.5)
    rows = PAPER.tables["fig11"].rows(ONE)
    printed = {row.name: row.published for row in rows if row.published is not None}
    assert printed["ArXiv: attention engine alone"] == 3.2
    assert printed["ArXiv: engine and routing"] == 3.51
    assert printed["ArXiv: engine, routing and remapping"] == 3.64
    assert [printed[f"{name}: routing alone"] for name in zeppelin.DATASETS.values()] == [1.6] * 3
    assert named(rows, "GitHub: routing alone, rounds in series").ours == pytest.approx(1.5)
    assert named(rows, "ArXiv: routing alone, rounds in series").published == 1.6
    assert named(rows, "ArXiv: what remapping adds").ours == 1.0


def test_clusters_and_scales_are_compared_by_speedup_and_throughput(monkeypatch):
    # Clusters are compared by speedup and by throughput.
    rates = {("a800", TE.name): 1.0, ("a800", ZEPPELIN.name): 4.0, ("h800", TE.name): 3.0}

    def rate(system, case, batches):
        return rates.get((case.cluster_name, system.name), 6.0)

    monkeypatch.setattr(zeppelin, "tokens_per_s", rate)
    rows = PAPER.tables["fig10"].rows(ONE)
    assert named(rows, "ArXiv: speedup on A over that on B").ours == pytest.approx(4.0 / 2.0)
    assert named(rows, "ArXiv: throughput on B over that on A").ours == pytest.approx(6.0 / 4.0)

    # Scaling is the largest scale over the smallest.
    def at_scale(system, case, batches):
        return {TE.name: 10.0, LLAMA.name: 5.0, HYBRID.name: 12.0}.get(system.name, 2.0 * case.num_gpus)

    monkeypatch.setattr(zeppelin, "tokens_per_s", at_scale)
    rows = PAPER.tables["fig9"].rows(ONE)
    assert named(rows, "GitHub: growth of TE CP").published == 1.0
    wanted = {
        "GitHub: growth of TE CP": 1.0,
        "ArXiv: growth of Zeppelin": 128 / 16,
        "LLaMA CP over TE CP, smallest": 0.5,
        "Hybrid DP over LLaMA CP on 16": 12 / 5,
        "Zeppelin over the best of the others": 2 * 16 / 12,
        "growth of Zeppelin on GitHub over that on ArXiv": 1.0,
    }
    assert {name: named(rows, name).ours for name in wanted} == pytest.approx(wanted)


# Reproduction of DistCA: the baselines' groups, what all systems are given, and what the closed
# forms say.
DOCUMENTS = [700, 31, 1, 256, 1000]


def test_documents_are_shared_dealt_and_cut_as_the_baselines_do() -> None:
    # A group attends every query once.
    every = [(seq, token) for seq, length in enumerate(DOCUMENTS) for token in range(length)]
    for share, num_ranks in product((distca.per_sequence, distca.per_document), (1, 2, 5)):
        rows = share(DOCUMENTS, num_ranks).rows
        assert sorted((int(seq), token) for _, seq, start, stop in rows for token in range(start, stop)) == every
    documents = [6000, 1000, 1000]
    uneven: list[float] = []
    for share in (distca.per_document, distca.per_sequence):
        rank, _, start, stop = share(documents, 4).rows.T
        loads = np.bincount(rank, (stop * (stop + 1) - start * (start + 1)) / 2, 4)
        uneven.append(loads.max() / loads.mean())
    assert uneven[0] < 1.01
    assert uneven[1] > 1.3
    # A wider group computes less and gathers more.
    case = distca.DistcaCase("8B", 8, 256 * K, 128 * K)
    alone, four = (sum(layer_s(case, distca.per_document([128 * K], n))) for n in (1, 4))
    assert alone / 4 < four < alone
    # Samples hold whole documents but for those that pass their end.
    assert distca.chunks([5, 3, 9], 6) == [[5, 1], [2, 4], [5]]
    for dataset in ("pretrain", "prolong"):
        for batch in distca.DistcaCase("8B", 8, 1024 * K, 256 * K).batches(dataset, 2):
            assert sum(batch) == 1024 * K
            assert max(batch) <= 256 * K
            assert {256 * K * i for i in range(1, 5)} <= set(np.cumsum(batch).tolist())
    # Items go to the bin with least work that has room.
    assert distca.deal([4, 3, 2, 1], [1, 1, 1, 1], 2, inf) == [[0, 3], [1, 2]]
    assert distca.deal([4, 3, 2, 1], [2, 2, 1, 1], 2, 3) == [[0, 3], [1, 2]]
    assert distca.deal([1, 1], [2, 2], 1, 3) is None


def test_a_pipeline_of_alike_microbatches_takes_what_1f1b_takes() -> None:
    case = distca.DistcaCase("8B", 8, 1024 * K, 128 * K)
    share = distca.per_document([128 * K], 4)
    one, two = (distca.ReplicaConfig(stages, 4, "none") for stages in (1, 2))
    head_s = case.cost.head_s(32 * K) + case.cost.head_s(32 * K, backward=True)
    whole_s = distca.replica_s(case, [share], one) - head_s
    # Two stages, four microbatches: five times half the layers and the head on the last stage, and
    # what results take to the next stage.
    assert distca.replica_s(case, [share] * 4, two) == pytest.approx(5 * whole_s / 2 + 4 * head_s, rel=0.02)


def test_baselines_of_distca_fit_the_memory_and_are_behind_it() -> None:
    case = distca.DistcaCase("34B", 8, 1024 * K, 512 * K)
    assert not case.fits(distca.HeldTokens(512 * K, 0))
    assert case.fits(distca.HeldTokens(64 * K, 0))
    [batch] = case.batches("pretrain", 1)
    found = {(config.degree, config.recompute) for config in distca.megatron_by_config(case, batch)}
    assert (4, "none") not in found
    assert (8, "full") in found
    # Distca is ahead of megatron and not behind wlb where documents differ.
    case = distca.DistcaCase("8B", 8, 1024 * K, 128 * K)
    [batch] = case.batches("pretrain", 1)
    ours = distca.distca_s(case, batch)
    assert min(distca.megatron_by_config(case, batch).values()) > 1.1 * ours
    assert min(distca.wlb_by_config(case, batch).values()) > 0.97 * ours
    pipelines = distca.DistcaCase("8B", 8, 1024 * K, 128 * K, (2,))
    assert ours < distca.distca_s(pipelines, batch) < inf
    # The grids are those of tables 4 and 5.
    fig9 = distca.grid(distca.TABLE_4)
    fig10 = distca.grid(distca.TABLE_5, distca.STAGES)
    assert (len(fig9), len(fig10)) == (18, 18)
    assert {case.num_tokens for case in fig9 if case.num_nodes == 8} == {1024 * K, 512 * K}


# `reproduce knapformer`: what its rows are made of; the rows are held by tests/golden.
def test_knapformer_is_given_loaded_images_printed_flops_and_gamma() -> None:
    (loaded,) = draw_by_gpu(MIXED_RESOLUTION, 1, knapformer.SEED)
    planned = plan(WITHOUT, loaded)
    assert [tuple(planned.lengths[seq] for seq in zone.seqs) for zone in planned.zones] == list(loaded)
    # Utilisation counts four forward passes of equation 1.
    assert flops([1000]) == 4 * 57 * (24 * 1000 * 3072**2 + 4 * 1000**2 * 3072)
    # Attention has the printed gamma over a whole step.
    on, lengths = machine(), np.array([20000.0])
    linear_s = 4 * MODEL.linear_flops_per_token * lengths[0] / (on.cluster.flops_per_s * knapformer.RATE)
    attention_s = (2 + knapformer.law_of(None).backward_factor) * on.cost.attention_s(lengths[0] ** 2)
    flops_ratio = MODEL.attention_flops_per_pair * lengths[0] / MODEL.linear_flops_per_token
    assert attention_s / linear_s / flops_ratio == pytest.approx(GAMMA_H100_FLUX)
    assert gamma_of(on.cost, MODEL) < GAMMA_H100_FLUX  # forward alone: the backward kernel is slower


# `reproduce wlb_llm`, Figures 12 to 15: cases as Table 1 prints them; all systems on the same
# documents.
SMALL = wlb_llm.WlbCase("llama-550m", 16 * K, 2, 2, 2)


def documents(steps: list[tuple[tuple[int, ...], ...]]) -> Counter[int]:
    return Counter(chain.from_iterable(chain.from_iterable(steps)))


def test_configurations_and_samples_are_those_of_table_1() -> None:
    gpus = [case.tensor * case.context * case.stages * case.replicas for case in wlb_llm.TABLE_1]
    assert gpus == [32, 32, 32, 64, 64, 128, 256, 256]
    assert [case.name for case in wlb_llm.TABLE_1 if case.recompute == "full"] == ["30B-64K", "30B-128K"]
    assert all(case.most_tokens() >= 1.25 * case.window for case in wlb_llm.TABLE_1)
    assert all(case.model.num_layers % (case.stages * case.setup.interleave) == 0 for case in wlb_llm.TABLE_1)
    # Samples hold whole documents in their order.
    assert list(wlb_llm.samples(iter([5, 4, 2, 10, 1, 9]), 10)) == [(5, 4), (2,), (10,)]
    assert all(sum(sample) <= SMALL.window for batch in SMALL.batches(wlb_llm.SKEW, 3) for sample in batch)
    assert [len(batch) for batch in SMALL.batches(wlb_llm.SKEW, 3)] == [2, 2, 2]


def test_documents_of_a_run_are_trained_once_and_only_outliers_wait() -> None:
    batches = SMALL.batches(wlb_llm.SKEW, 3)
    for system in (wlb_llm.FIXED_SEQUENCE, wlb_llm.PACKED, wlb_llm.WLB):
        steps = system.steps(SMALL, wlb_llm.SKEW, batches)
        assert documents(steps) == documents(batches), system.name
        assert {len(step) for step in steps} == {SMALL.num_microbatches}
    # Outliers wait for one another and nothing else does.
    steps = wlb_llm.PACKED.steps(SMALL, wlb_llm.SKEW, batches)
    late = [documents([batch]) - documents([step]) for batch, step in zip(batches, steps, strict=False)]
    threshold = wlb_llm.THRESHOLDS[wlb_llm.SKEW][2][0] * SMALL.window // (128 * K)
    assert any(late)
    assert all(length >= threshold for each in late for length in each)
    assert wlb_llm.PLAIN.steps(SMALL, wlb_llm.SKEW, batches) == batches


def test_throughput_is_of_the_better_sharding_of_blocks_and_of_replicas_side_by_side() -> None:
    fixed = wlb_llm.FIXED_SEQUENCE, wlb_llm.FIXED_DOCUMENT
    both = [wlb_llm.tokens_per_s(system.blocks(SMALL, wlb_llm.SKEW, 2)) for system in fixed]
    assert wlb_llm.tokens_per_s(wlb_llm.fixed_blocks(SMALL, wlb_llm.SKEW, 2)) == max(both)
    # A standard error is that of the blocks.
    blocks = wlb_llm.PLAIN.blocks(SMALL, wlb_llm.SKEW, 6)
    assert len(blocks) == 4
    trained = documents(list(SMALL.batches(wlb_llm.SKEW, 6)))
    assert sum(tokens for tokens, _ in blocks) == sum(trained.elements())
    each = wlb_llm.speedups([(10, 1.0), (10, 2.0)], [(10, 2.0), (10, 2.0)])
    assert each == pytest.approx([4 / 3, 2.0, 1.0])
    assert wlb_llm.error_of(each) == "standard error 0.500"
    # Replicas of a step run side by side.
    (batch,) = replace(SMALL, replicas=2).batches(wlb_llm.SKEW, 1)
    two = wlb_llm.PLAIN.step_s(replace(SMALL, replicas=2), batch)
    assert two == max(wlb_llm.PLAIN.step_s(SMALL, batch[first::2]) for first in range(2))


def test_every_row_of_table_2_is_on_the_same_global_batches(monkeypatch) -> None:
    # The solver's stood on a thirtieth of them.
    seen = []
    method = wlb_llm.Method(1.2, 0.01, 8, 1.0, 0.1, 0.1)
    monkeypatch.setattr(wlb_llm, "measure", lambda batches, _: seen.append(batches) or method)
    rows = wlb_llm.PAPER.tables["table2"].rows(Effort(8))
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


def test_figures_12_to_15_have_their_rows_means_and_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wlb_llm, "TABLE_1", (SMALL,))
    monkeypatch.setattr(wlb_llm, "BY_WINDOW", (SMALL.window,))
    monkeypatch.setattr(wlb_llm, "B7_128K", SMALL)
    monkeypatch.setattr(wlb_llm, "WINDOWS", (8 * K, 16 * K))
    monkeypatch.setattr(wlb_llm, "FIG15_CASES", (replace(SMALL, context=4),))
    fig12, fig13, fig14, fig15 = (
        {row.name: row for row in wlb_llm.PAPER.tables[name].rows(ONE)} for name in ("fig12", "fig13", "fig14", "fig15")
    )
    ours, blocks = fig12["WLB-LLM over Plain-4D, mean"], (wlb_llm.WLB, wlb_llm.PLAIN)
    assert ours.published == 1.23
    assert ours.ours == wlb_llm.speedups(*(system.blocks(SMALL, wlb_llm.SKEW, 1) for system in blocks))[0]
    over_fixed, fixed = fig12["WLB-LLM over Fixed-4D, mean"].ours, fig12["Fixed-4D over Plain-4D, mean"].ours
    assert ours.ours == pytest.approx(over_fixed * fixed)
    assert {"wlb: WLB-LLM over Plain-4D, mean", "550M-16K: WLB-LLM over Plain-4D"} <= set(fig12)
    assert [row.published for row in fig13.values()] == [1.02, 1.05, 1.28, 1.33, None]
    assert fig13[wlb_llm.ADAPTIVE.name].ours >= 0.99 * max(1.0, fig13["per-document sharding"].ours)
    assert fig13[wlb_llm.MIXED.name].ours >= 0.99 * fig13[wlb_llm.WLB.name].ours
    assert [*fig14] == ["8K", "16K"]
    # Never better than the optimum of both shardings.
    assert 0.95 < fig15["16K: adaptive over optimal"].ours <= 1.0
    assert fig15["16K: a choice for each document over adaptive"].ours > 0.99


# `reproduce hydraulis`: the systems that its figures compare; rows are held by tests/golden.
@pytest.fixture(autouse=True, scope="module")
def few_batches():
    # Strategies are ranked on few batches here, on more where the figures are made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydraulis, "RANK_BATCHES", 2)
        patch.setattr(hydraulis, "SAMPLE_BATCHES", 10)
        yield
    hydraulis.candidates.cache_clear()


def test_the_candidates_hold_the_context_and_the_choice_is_the_fastest() -> None:
    known = hydraulis.costs(hydraulis.AUTHORS, "32b")
    first = costs_of(hydraulis.candidates(hydraulis.AUTHORS, hydraulis.B32)[0], known, 64)
    assert max(cost.max_tokens for cost in first) >= hydraulis.B32.longest
    (batch,) = hydraulis.B32.batches(1)
    strategy, best_s, _ = hydraulis.chosen(hydraulis.AUTHORS, hydraulis.B32, batch)
    assert strategy in hydraulis.candidates(hydraulis.AUTHORS, hydraulis.B32)
    assert best_s == max(hydraulis.seconds(hydraulis.AUTHORS, hydraulis.B32, strategy, batch))
    assert best_s <= max(hydraulis.seconds(hydraulis.AUTHORS, hydraulis.B32, hydraulis.HOMOGENEOUS, batch))


def test_microbatches_are_dealt_in_turn_and_ranges_of_lengths_have_their_own_strategy() -> None:
    # Microbatches to the context length dealt in turn.
    assert hydraulis.full([3, 9, 5, 2, 1], 10) == [[9, 1], [5, 3, 2]]
    pipelines = costs_of(hydraulis.HOMOGENEOUS, hydraulis.costs(hydraulis.AUTHORS, "32b"), 64)
    cost = pipelines[0]
    found = hydraulis.megatron(hydraulis.AUTHORS, hydraulis.B32, hydraulis.HOMOGENEOUS, [32768] * 5)
    one_s = (cost.a * 32768 + cost.b) * 32768 + cost.c
    assert found == pytest.approx((2 * one_s, one_s, one_s, one_s))
    assert hydraulis.gap(found) == pytest.approx(0.5)
    # Hotspa trains each range of lengths under its own strategy.
    job = hydraulis.TrainedCase("13b", 16)
    cost, narrow = (hydraulis.costs(hydraulis.AUTHORS, "13b").pipeline(Scheme(tensor), 16) for tensor in (4, 2))
    one_s = (cost.a * 9000 + cost.b) * 9000 + cost.c
    short_s = (narrow.a * 4000 + narrow.b) * 4000 + narrow.c
    found = hydraulis.hotspa(hydraulis.AUTHORS, job, hydraulis.TABLE_3["13b", 16, 32 * K]["HotSPa"], [9000, 4000])
    assert found == pytest.approx(one_s + short_s)


def test_whole_steps_count_exchanges_of_all_systems_and_propagation_those_of_none() -> None:
    # Figure 13 charged HotSPa alone, and by the paper's own seconds.
    job, (batch,) = hydraulis.TrainedCase("32b", 64, 100_000), hydraulis.TrainedCase("32b", 64, 100_000).batches(1)
    switches_s = hydraulis.exchanged_s(job, hydraulis.TABLE_3["32b", 64, 32 * K]["HotSPa"])
    assert 1 < switches_s < 2.21  # published, which bytes over links alone do not reach
    own = Strategy.parse("4*tp8-pp2-cp1")
    cluster, model = hydraulis.cluster_and_model("32b")
    assert hydraulis.exchanged_s(job, [str(own)]) == sum(base_sync_s(own, model, cluster))
    alone, whole = (
        hydraulis.step_s(hydraulis.AUTHORS, job, "4*tp8-pp1-cp2", [batch], whole=each) for each in (False, True)
    )  # HotSPa alone: the authors have no coefficients for CP
    assert whole[0] - alone[0] == pytest.approx(switches_s)
    assert whole[1] > alone[1]


def test_deepspeed_computes_a_part_of_the_heads_and_waits_for_weights() -> None:
    job = hydraulis.TrainedCase("7b", 16, longest=32_000)
    long = [32_000] * 2
    one_s = hydraulis.deepspeed(job, 8, long, recompute=False)
    assert hydraulis.deepspeed(job, 8, [*long, *long], recompute=False) == pytest.approx(2 * one_s)
    assert 1.2 < hydraulis.deepspeed(job, 8, long, recompute=True) / one_s < 1.4
    half_s = hydraulis.deepspeed(job, 4, long, recompute=False)
    assert 1.7 < half_s / one_s < 2.1
    # A sequence of one token waits for the weights alone, which no narrower replica shortens.
    short_s = [hydraulis.deepspeed(job, degree, [1], recompute=False) for degree in (4, 8)]
    assert short_s[0] == pytest.approx(short_s[1], rel=0.05)
    assert short_s[0] > 0.1 * one_s


def test_algorithm_1_is_never_ahead_of_the_ideal(monkeypatch) -> None:
    monkeypatch.setattr(hydraulis, "SOURCES", (hydraulis.AUTHORS,))
    monkeypatch.setattr(hydraulis, "NODES", 1)
    monkeypatch.setattr(hydraulis, "B32", hydraulis.TrainedCase("32b", 64, 40_000))
    least, most, ours = hydraulis.PAPER.tables["fig20"].rows(Effort(1))
    assert 1 <= least.ours <= most.ours < 1.1
    assert 1 <= ours.ours <= most.ours

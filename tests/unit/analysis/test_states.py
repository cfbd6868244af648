"""The price of handing states on: bytes as the program sends them, what pieces add, layer weights."""

import logging
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import MicrobatchPlan, Model, cli, make_planner
from megatron_balance.analysis.backward import microbatch_bytes
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.recurrent import Pieces, SummarySizes, bytes_moved, kept_bytes
from megatron_balance.analysis.states import _Priced, by_heads_s, states_cost
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.compile.recurrent import compile_recurrent
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import layer_modules, scan_module, summary_module
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Placed
from megatron_balance.ir.forest import Segment, num_tokens
from megatron_balance.ir.model import RecurrentLayers
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.recurrent import Compose
from megatron_balance.ir.step import Layers
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.layers import _remap_saves_s
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import bound_s, simulate_step
from megatron_balance.workloads.trees import draw_trees

log = logging.getLogger(__name__)
GDN = RecurrentLayers("gated_delta", 36, 12, 48, heads=32, value_dim=128, key_heads=16, key_dim=128)
MAMBA = replace(GDN, kind="mamba2", heads=30, value_dim=64, key_heads=6, chunk=256)
CONVOLUTION = RecurrentLayers("convolution", 36, 12, 48, heads=1, value_dim=2048, conv_width=3)
MODEL = Model(16, 2, 256, num_layers=48, hidden_size=2048, ffn_size=5632, recurrent=GDN)
LENGTHS = (30011, 12000, 7301, 6000, 2003, 900, 400, 321, 64, 63, 5, 1)


def machine_of(model: Model, num_ranks: int = 16, ranks_per_node: int = 8) -> Machine:
    cluster = load_cluster("h100").build(num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    return Machine(cluster, model, AnalyticCost(cluster, model))


def planned(name: str, machine: Machine, lengths: tuple[int, ...] | Batch = LENGTHS) -> MicrobatchPlan:
    return make_planner(name, machine.cluster, machine.model)(lengths)


def trees() -> Batch:
    # Rollouts of a prompt, and an agent's turns.
    drawn = [
        *draw_trees("rollouts:prompt=3000,responses=6,shortest=40,longest=2000", 25_000, 1, 0)[0],
        *draw_trees("agents:system=900,turns=6,branches=3", 20_000, 1, 0)[0],
    ]
    return Batch(tuple(map(num_tokens, drawn)), tuple(drawn))


def whole(num_ranks: int, lengths: tuple[int, ...]) -> MicrobatchPlan:
    # Each sequence whole on a rank, one after the other.
    zones = tuple(Zone("local", "ring", (seq % num_ranks,), (seq,)) for seq in range(len(lengths)))
    return MicrobatchPlan("mine", lengths, num_ranks, min(8, num_ranks), 16, 2, zones)


@pytest.mark.parametrize("batch", [Batch(LENGTHS), trees()], ids=["documents", "trees"])
@pytest.mark.parametrize("own", [GDN, MAMBA, CONVOLUTION], ids=lambda own: own.kind)
def test_bytes_and_peers_are_those_of_the_program(own: RecurrentLayers, batch: Batch) -> None:
    for name in PLANNERS:
        if name in ("auto", "flexsp", "hydraulis"):
            continue  # which ask the others, and take seconds
        machine = machine_of(replace(MODEL, recurrent=own), 10 if name == "usp" else 16, 5 if name == "usp" else 8)
        plan = planned(name, machine, batch)
        program = compile_recurrent(plan, own.state_heads, own.conv_width - 1)
        sizes = SummarySizes(own.map_size, own.key_dim * own.value_dim, own.channels)
        for ops, rounds in zip((program.forward, program.backward), _Priced(plan, machine, own).rounds(), strict=True):
            wanted = bytes_moved(ops, sizes)
            numbers = np.unique(wanted[:, 0])
            assert len(numbers) == len(rounds), name
            for number, links in zip(numbers, rounds, strict=True):
                _, src, dst, num_bytes = wanted[wanted[:, 0] == number].T
                across = machine.crosses(src, dst)
                for end, ranks in enumerate((src, dst)):
                    for which, amount, peers in (
                        (~across, links.inside, links.peers_inside),
                        (across, links.across, links.peers_across),
                    ):
                        of = np.bincount(ranks[which], num_bytes[which], machine.num_ranks)
                        assert amount[end] == pytest.approx(of), (name, number)
                        assert peers[end].tolist() == np.bincount(ranks[which], minlength=machine.num_ranks).tolist()


def test_a_short_piece_costs_a_whole_chunk_and_a_middle_one_its_map() -> None:
    machine = machine_of(MODEL, 2)
    scan, cost = scan_module(GDN), machine.cost
    found = states_cost(whole(2, (64 * 10, 65)), machine)
    assert found is not None
    padded = cost.scan_s(63 * scan.flops, 63 * scan.elements)
    assert found.seconds[0].tolist() == pytest.approx([0.0, padded])
    assert found.seconds[1].tolist() == pytest.approx([0.0, 2 * padded])
    assert not kept_bytes(whole(2, (640, 65)), GDN).any()
    # Three pieces, zigzag on two ranks: rank 1 holds the middle, whose map it needs; rank 0 the ends.
    ring = MicrobatchPlan("mine", (64 * 8,), 2, 2, 16, 2, (Zone("pool", "ring", (0, 1), (0,)),))
    state = 4 * 128 * 128
    assert kept_bytes(ring, GDN).tolist() == [32 * state + 16 * state, 32 * state + 16 * state]
    of_ring = states_cost(ring, machine)
    assert of_ring is not None
    assert of_ring.compute_s[0][1] > of_ring.compute_s[0][0]
    assert states_cost(ring, machine_of(replace(MODEL, recurrent=None), 2)) is None


def test_the_mean_layer_is_shared_by_those_that_attend_and_those_that_do_not() -> None:
    # A plan without exchanges: the step is the sum of its layers.
    plain, hybrid = machine_of(replace(MODEL, recurrent=None), 2), machine_of(MODEL, 2)
    lengths = (64 * 100, 64 * 90)
    plan, setup = whole(2, lengths), Setup(engine="rounds", pipeline=1)
    steps = [simulate_step([plan], each, setup) for each in (plain, hybrid)]
    attended = [step.phases_s["forward_attention"] for step in steps]
    assert attended[1] == pytest.approx(attended[0] / 4)
    modules = {module.name: module for module in layer_modules(MODEL)}
    of_all = {module.name: module for module in layer_modules(replace(MODEL, recurrent=None))}
    assert modules["qkv"].flops == of_all["qkv"].flops / 4
    assert modules["mlp"] == of_all["mlp"]
    assert modules["recurrent"].weights == GDN.weights(2048) * 3 / 4
    # What a planner is told of a layer that attends has its part of the other three.
    cost = hybrid.cost
    token_s = cost.layer_s(1e9) / 1e9
    assert cost.linear_s(1.0) == pytest.approx(4 * token_s)
    assert MODEL.linear_flops_per_token == pytest.approx(4 * sum(each.flops for each in modules.values()))
    # Bounds are below.
    assert bound_s([Batch(lengths)], hybrid) <= steps[1].step_s
    # Figures of a step have the states of its recurrent layers.
    ring = planned("te_ring", hybrid, (1 << 14,))
    ringed = [simulate_step([ring], each, setup).attention_s["forward"] for each in (plain, hybrid)]
    of_states = states_cost(ring, hybrid)
    assert of_states is not None
    assert ringed[1] == pytest.approx(ringed[0] / 4 + 36 * float(of_states.seconds[0].max()), rel=0.01)
    # Keys are kept where layers attend, states where they are recurrent.
    cut = planned("te_ring", hybrid, (1 << 14,))
    assert microbatch_bytes([cut], MODEL).states.tolist() == kept_bytes(cut, GDN).tolist()


def test_states_are_beside_an_exchange_of_all_tokens_by_heads(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of(MODEL, 64)
    lengths = tuple(np.random.default_rng(0).pareto(0.7, 60).clip(0.02, 20).__mul__(4096).astype(int).tolist())
    by_heads = by_heads_s(GDN, machine, sum(lengths) / 64, 64)
    found = states_cost(planned("distca", machine, lengths), machine)
    assert found is not None
    assert float(found.seconds[0].max()) < by_heads
    # Who cuts every document over all ranks is refused, with both figures, and auto asks others.
    sentence = (
        rf"te_ring cuts documents into .* pieces, whose states take .* by heads would take {1e3 * by_heads:.1f} ms"
    )
    with pytest.raises(InfeasibleError, match=sentence):
        planned("te_ring", machine, lengths)
    assert make_planner("te_ring", machine.cluster, replace(MODEL, recurrent=None))(lengths).planner == "te_ring"
    # Training says so, once, and goes on.
    monkeypatch.setattr("megatron_balance.planning.layers._WARNED", set[str]())
    trained = StepPlanner(PlanSpec("te_ring", machine.cluster, MODEL, Layers(), {}))
    for _ in range(2):
        assert trained.plan([lengths])[0].plans[0].planner == "te_ring"
    assert [bool(re.search(sentence, each.message)) for each in caplog.records] == [True]
    auto = make_planner("auto", machine.cluster, MODEL, planners=["te_ring", "distca"])
    assert auto(lengths).planner == "distca"
    assert by_heads_s(GDN, machine, 8192, 1) == 0.0


@pytest.mark.parametrize("name", ["nemotron-h-8b", "qwen3.5-35b-a3b", "kimi-linear-48b-a3b"])
def test_rings_over_the_pool_are_refused_by_price_where_pieces_have_fewer_than_190_tokens(name: str) -> None:
    machine = machine_of(load_model(name), 64)
    own, ring = machine.model.recurrent, make_planner("te_ring", machine.cluster, machine.model, tokens_per_rank=9000)
    assert own is not None
    for tokens, documents in ((150, 27), (190, 22), (250, 16)):
        lengths = (128 * tokens,) * documents
        plan = (
            StepPlanner(PlanSpec("te_ring", machine.cluster, machine.model, Layers(), {})).plan([lengths])[0].plans[0]
        )
        pieces, states = Pieces.of(plan), states_cost(plan, machine)
        assert states is not None
        size = pieces.held[:, Placed.STOP] - pieces.held[:, Placed.START]
        # The two ranks' ends in the middle of a zigzag are one piece.
        assert sorted({*size.tolist()}) == [tokens, 2 * tokens]
        states_s, by_heads = float(states.seconds[0].max()), by_heads_s(own, machine, sum(lengths) / 64, 64)
        log.info("%s: pieces of %d tokens %.1f ms, by heads %.1f", name, tokens, 1e3 * states_s, 1e3 * by_heads)
        if tokens < 190:
            assert states_s > by_heads + 1e-3
            sentence = f"take {1e3 * states_s:.1f} ms in each of .* would take {1e3 * by_heads:.1f} ms"
            with pytest.raises(InfeasibleError, match=sentence):
                ring(lengths)
        else:
            assert states_s < by_heads + 1e-3
            assert ring(lengths) == plan


def test_a_remap_pays_for_its_moves_where_layers_attend_and_for_the_states_of_its_pieces() -> None:
    # Uneven tokens cost in all layers: a remap that does not pay in a dense model may in a hybrid one.
    machine = machine_of(MODEL)
    tokens = [8192.0 + 40 * rank for rank in range(16)]
    dense = replace(MODEL, recurrent=None)
    assert machine.cost.linear_s(1.0) > 3 * AnalyticCost(machine.cluster, dense).linear_s(1.0)
    assert _remap_saves_s(tokens, machine.cluster, machine.cost) > _remap_saves_s(
        tokens, machine.cluster, AnalyticCost(machine.cluster, dense)
    )


def test_compare_holds_states_against_all_tokens_by_heads(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "compare",
        "--model",
        "nemotron-h-8b",
        "--cluster",
        "h100",
        "--ranks",
        "32",
        "--lengths",
        "60000,40000,9000",
    ]
    asked += ["--planner", "distca", "--planner", "zeppelin", "--planner", "megatron", "--recompute", "full"]
    assert cli.main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "states in each of 24 recurrent layers, forward, ms: " in said
    assert "in groups of 32 ranks, the most that 128 heads go to" in said
    assert "Megatron-core itself, whose recurrent layers exchange all tokens by heads, takes " in said


def test_megatron_itself_exchanges_all_tokens_by_heads_in_groups_that_they_go_to() -> None:
    machine = machine_of(MODEL)
    by_heads = replace(machine, by_heads=True)
    plan = make_planner("megatron", machine.cluster, MODEL, context_parallel=8)(LENGTHS)
    found = states_cost(plan, by_heads)
    assert found is not None
    held = tokens_per_rank(plan).reshape(2, 8).max(axis=1).tolist()
    wanted = [by_heads_s(GDN, machine, tokens, 8) for tokens in held]
    assert found.seconds[0].reshape(2, 8).max(axis=1).tolist() == found.seconds[1][::8].tolist() == wanted
    assert found.seconds[0].tolist() != states_cost(plan, machine).seconds[0].tolist()  # pyright: ignore[reportOptionalMemberAccess]
    # What moves: seven eighths of every token's channels, gates and outputs, over links inside nodes.
    width = GDN.channels + GDN.gates + GDN.heads * GDN.value_dim
    assert found.moved[0][:16].sum() == pytest.approx(sum(LENGTHS) * 2 * width * 7 / 8)
    assert not found.moved[0][32:].any()
    steps = [simulate_step([plan], each).step_s for each in (machine, by_heads)]
    assert steps[0] != steps[1]
    machine = machine_of(MODEL, 32)
    wide = make_planner("megatron", machine.cluster, MODEL, context_parallel=32)((40_000,) * 4)
    with pytest.raises(InfeasibleError, match="16 heads of gated_delta layers cannot be dealt to groups of 32"):
        states_cost(wide, replace(machine, by_heads=True))


def test_documents_whose_rows_by_heads_would_be_fewer_bytes_are_those_of_planners_that_cut_all() -> None:
    machine = machine_of(MODEL)
    row_bytes = 2 * (GDN.channels + 2 * GDN.heads + GDN.heads * GDN.value_dim)
    for name, fewer in (("zeppelin", 0), ("distca", 0), ("magi", 0), ("ulysses", 0), ("te_ring", 4)):
        pieces = np.bincount(Pieces.of(planned(name, machine)).held[:, Placed.SEQ])
        numbers = 2 * (pieces - 1) * GDN.key_dim * GDN.value_dim + np.maximum(pieces - 2, 0) * GDN.map_size
        by_heads = np.array(LENGTHS) * row_bytes < 4 * GDN.heads * numbers
        assert by_heads.sum() >= fewer, name
        assert fewer or not by_heads.any(), name


def test_trees_keep_and_compose_what_their_program_says() -> None:
    own = replace(MAMBA, chunk=1)  # which every piece fills
    machine, summary = machine_of(replace(MODEL, recurrent=own)), summary_module(own)
    state, of_map = 4 * own.key_dim * own.value_dim, 4 * own.map_size
    for name in ("distca", "zeppelin", "te_ring"):
        plan = planned(name, machine, trees())
        program, pieces = compile_recurrent(plan, own.heads, 3), Pieces.of(plan)
        paths, ranks = program.paths, machine.num_ranks
        touched = np.zeros((2, ranks))
        kept = own.heads * state * np.bincount(pieces.held[~pieces.begins, Placed.RANK], minlength=ranks)
        for backward, ops in enumerate((program.forward, program.backward)):
            for op in (op for op in ops if isinstance(op, Compose)):
                _, seq, start, middle, _, first, last = as_array(op.rows).T
                joins = paths.before(seq, start) != paths.before(seq, middle)  # else of branches
                assert backward or joins.all()
                touched[backward, op.rank] += ((last - first) * (2 * state + of_map * joins)).sum()
                kept[op.rank] += backward * ((last - first) * of_map * joins).sum()
        assert touched[1].sum() > touched[0].sum()
        assert kept_bytes(plan, own).tolist() == kept.tolist()
        found = states_cost(plan, machine)
        assert found is not None
        size = pieces.held[:, Placed.STOP] - pieces.held[:, Placed.START]
        middle = np.bincount(pieces.held[:, Placed.RANK], size * (~pieces.begins & ~pieces.ends), ranks)
        for each, computes in zip(touched, found.compute_s, strict=True):
            wanted = [
                machine.cost.scan_s(n * summary.flops, n * summary.elements) + machine.pack_s(packed / 2)
                for n, packed in zip(middle, each, strict=True)
            ]
            assert computes.tolist() == pytest.approx(wanted)


def test_trees_are_estimated_and_simulated_with_their_states_and_refused_where_no_recurrence_runs_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine, batch = machine_of(MODEL), trees()
    plan = planned("distca", machine, batch)
    handed_on = states_cost(plan, machine)
    assert handed_on is not None
    step = simulate_step([plan], machine, Setup(engine="rounds", pipeline=1))
    of_states = step.phases_s["forward_states"]
    assert np.abs(36 * handed_on.seconds[0] - of_states).min() < 1e-9 < of_states
    assert estimate(plan, machine).layer_s == pytest.approx(sum(step.layer_s), rel=0.02)
    assert bound_s([batch], machine) <= step.step_s
    # By heads nobody has trees; full segments no recurrence shows.
    with pytest.raises(InfeasibleError, match="expected documents, got trees"):
        states_cost(plan, replace(machine, by_heads=True))
    full = Batch((1100,), ((Segment(900, -1), Segment(200, 0, full=True)),))
    with pytest.raises(ConfigError, match="expected causal segments for recurrent layers, got full ones"):
        planned("distca", machine, full)
    asked = (
        "compare --model nemotron-h-8b --cluster h100 --ranks 8 --dataset rollouts:prompt=4k,responses=8 --tokens 40k"
    )
    assert cli.main([*asked.split(), "--planner", "megatron", "--planner", "distca", "--tokens-per-rank", "1m"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "states in each of 24 recurrent layers, forward, ms: " in said
    assert "the same rollouts one by one take " in said
    assert "Megatron-core itself" not in said

"""Bytes of a rank, worked by hand."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import Batch, Cluster, MicrobatchPlan, Model
from megatron_balance.analysis import backward
from megatron_balance.analysis import memory as rank
from megatron_balance.analysis.estimate import Estimate, estimate
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.memory import Holding, Sharding, layer_activation_bytes, rank_memory
from megatron_balance.analysis.step_memory import MARGIN, StepMemory, max_len, most_tokens, stages_of
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import head_module, layer_flops, num_parameters
from megatron_balance.ir.step import Layers
from megatron_balance.ir.strategy import Scheme
from megatron_balance.model_config import pretrained
from megatron_balance.planners.base import StepContext
from megatron_balance.planners.zeppelin import Search, _InWaves
from megatron_balance.planning.choice import PlannerChoice, capacity, choose_planner, planning_cost
from megatron_balance.simulator.setup import Setup, StageSetup, step_memory
from megatron_balance.simulator.step import simulate_step
from tests.support.deepseek import DEEPSEEK_V3

MODEL = Model(num_heads=8, num_kv_heads=2, head_dim=64, num_layers=4, hidden_size=512, ffn_size=1024, vocab_size=1000)
LAYER = 512 * (2 * 512 + 2 * 128) + 3 * 512 * 1024
TABLES = 2 * 1000 * 512
NORMS = 2 * 512
KEPT = 2 * (4 * 512 + 2 * 512 + 2 * 128 + 3 * 1024)


def test_parameters_and_flops_are_those_of_layers_experts_and_tables() -> None:
    # Parameters are layers norms and two tables.
    assert num_parameters(MODEL) == 4 * (LAYER + NORMS) + TABLES
    assert layer_flops(MODEL) == 2 * LAYER
    # Every expert is stored and those visited are computed.
    moe = replace(MODEL, num_experts=8, experts_per_token=2)
    assert num_parameters(moe) - num_parameters(MODEL) == 4 * (7 * 3 * 512 * 1024 + 512 * 8)
    assert layer_flops(moe) - layer_flops(MODEL) == 2 * (3 * 512 * 1024 + 512 * 8)
    # Shared experts are visited and dense layers have none of the others.
    shared = replace(moe, shared_ffn_size=256)
    beside = 3 * 512 * 256
    assert num_parameters(shared) - num_parameters(moe) == 4 * beside
    assert layer_flops(shared) - layer_flops(moe) == 2 * beside
    assert layer_activation_bytes(shared) - layer_activation_bytes(moe) == 2 * 3 * 256
    visits = 3 * 1024 + 512  # inner values of the second expert, and two copies of the token
    assert layer_activation_bytes(moe) - layer_activation_bytes(MODEL) == 2 * (visits + 512)
    dense = replace(moe, dense_layers=1)
    assert num_parameters(moe) - num_parameters(dense) == 6 * 3 * 512 * 1024 + 512 * 8
    # Ranks with the same experts share out their optimizer.
    # Of 8 ranks two have each expert where 4 share them out, so each holds half of its optimizer.
    experts = 4 * 8 * 3 * 512 * 1024
    memory = rank_memory(moe, 0, 0, Sharding(optimizer=8, experts=4))
    others = num_parameters(moe) - experts
    assert memory.weights == 2 * (others + experts / 4)
    assert memory.optimizer == 12 * (others / 8 + experts / 4 / 2)


def test_further_tokens_and_tied_tables() -> None:
    # Further tokens have logits of their own and a matrix that joins.
    further = replace(MODEL, num_layers=5, mtp_layers=1)
    assert num_parameters(further) == 5 * (LAYER + NORMS) + TABLES + 2 * 512 * 512
    assert rank_memory(further, 100, 0).activations == 100 * (5 * KEPT + 2 * 8 * 1000)
    assert head_module(further).flops == 2 * (2 * 1000 * 512 + 2 * 512 * 512)
    # Tied tables are one on one stage and two on several.
    tied = replace(MODEL, tied_embeddings=True)
    assert num_parameters(MODEL) - num_parameters(tied) == 1000 * 512
    ends = [rank_memory(tied, 0, 0, Sharding(pipeline=2, stage=at)).weights for at in (0, 1)]
    assert ends == [2 * (2 * (LAYER + NORMS) + 1000 * 512)] * 2


def test_a_rank_holds_its_layers_what_it_received_and_microbatches_in_flight() -> None:
    # A rank of one stage holds all layers.
    memory = rank_memory(MODEL, 100, 30)
    parameters = num_parameters(MODEL)
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    assert memory.activations == 100 * (4 * KEPT + 8 * 1000)
    assert memory.received == 4 * 30 * 2 * 2 * 64 * 2
    assert memory.total == 18 * parameters + memory.activations + memory.received
    # Replay holds two rounds of one layer.
    assert rank_memory(MODEL, 100, 30, holding=Holding("replay")).received == 2 * 30 * 2 * 2 * 64 * 2
    # Recomputation keeps inputs and works on one layer.
    partial = 4 * 8 * 65
    memory = rank_memory(MODEL, 100, 30, holding=Holding(recompute="full"))
    assert memory.activations == 100 * (4 * 2 * 512 + max(KEPT + partial, 8000))
    assert memory.received == 30 * 2 * 2 * 64 * 2
    # The first stage holds most microbatches and the last the logits.
    eight = Holding(num_microbatches=8)
    first, last = (rank_memory(MODEL, 100, 0, Sharding(pipeline=2, stage=s), eight) for s in (0, 1))
    assert first.activations == 100 * (2 * 2 * KEPT + partial)
    assert last.activations == 100 * (2 * KEPT + 8000)
    assert first.weights == last.weights == 2 * (2 * (LAYER + NORMS) + TABLES / 2)


# The memory of a step by the layout that runs: what a rank of a job like DeepSeek-V3's holds, and
# what planners decide by it.
STAGES, LAYERS = 16, 4
DEEPSEEK = replace(Model(**pretrained({**DEEPSEEK_V3, "num_nextn_predict_layers": 1})), num_layers=STAGES * LAYERS)
SMALL = Model(8, 8, 64, num_layers=12, hidden_size=512, ffn_size=1024, vocab_size=1000)
EXPERT = 3 * 7168 * 2048
MIXED = [30011, 19000, 7301, 6000, 5003, 4000, 3000, 2500, 2000, 1700, 1500, 1200, 900, 700, 400, 321]


def of_deepseek(ranks: int, experts: int, recompute: str = "none") -> StepMemory:
    # `ranks` of each of 16 stages, and as many microbatches as there are stages.
    stages = stages_of(DEEPSEEK, ranks, recompute=recompute, pipeline=STAGES, experts=experts)  # pyright: ignore[reportArgumentType]
    return StepMemory(DEEPSEEK, tuple(stages)).of_microbatches(STAGES)


def test_the_state_of_a_rank_of_2048_gpus_is_the_sum_on_paper() -> None:
    # 128 ranks a stage; each has 4 of the 256 experts, which 2 ranks have. It was 4,160 GB, as if
    # of one stage with all experts.
    latents = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    router = 7168 * 256
    others = LAYERS * (latents + EXPERT + router + 2 * 7168) + 3 / STAGES * (8 * EXPERT - router)
    others += 7168 * 129280  # of the first stage: the embedding
    experts = (STAGES * LAYERS - 3) / STAGES * 4 * EXPERT
    state = 6 * (others + experts) + 12 * (others / 128 + experts / 2)
    assert state / 1e9 == pytest.approx(19.8, abs=0.05)
    assert of_deepseek(128, 64).stages[0].state_bytes == pytest.approx(state, rel=1e-6)
    whole = StepMemory.one_stage(DEEPSEEK, 128).of_microbatches(1)
    assert whole.stages[0].state_bytes == pytest.approx(4.3e12, rel=0.1)
    # It is told to the planning process as it is.
    memory = of_deepseek(32, 16, "full")
    assert StepMemory.from_json(json.loads(json.dumps(memory, default=dataclasses.asdict))) == memory


@pytest.mark.parametrize(
    ("ranks", "experts", "recompute", "tokens", "replays"),
    [
        # 19.8 GB of state; 64 layers in flight of 1,024 tokens hold 455 kB each and receive 147 kB:
        # 59 GB of the 72 that are filled.
        (128, 64, "none", 1024, False),
        # As many of 4,096 would hold 119 GB.
        (128, 64, "none", 4096, True),
        # Full recomputation holds 14 kB each: 3.8 GB.
        (128, 64, "full", 4096, False),
        # 16 ranks a stage have 16 experts each: 61 GB of state.
        (16, 16, "none", 1024, True),
        (16, 16, "full", 2048, False),
    ],
)
def test_zeppelin_keeps_where_the_layout_that_runs_has_room(
    ranks: int, experts: int, recompute: str, tokens: int, replays: bool
) -> None:
    # It replayed on any number of H800, whose ranks would each have held 671 billion parameters.
    cluster = load_cluster("h800").build(num_ranks=ranks)
    for memory, expected in ((None, True), (of_deepseek(ranks, experts, recompute), replays)):
        context = StepContext(cluster, DEEPSEEK, AnalyticCost(cluster, DEEPSEEK), memory=memory)
        assert Search((tokens * ranks,), context, tokens).most_would_replay() == expected


@pytest.mark.parametrize("told", [False, True])
def test_zeppelin_searches_and_compares_by_the_memory_that_it_is_told(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, seen, compared = of_deepseek(16, 16, "full") if told else None, list[bool](), list[StepMemory | None]()
    placed = Search.placed

    def noted(self: Search, *, replays: bool) -> _InWaves | None:
        seen.append(replays)
        compared.append(self.machine.memory)
        return placed(self, replays=replays)

    monkeypatch.setattr(Search, "placed", noted)
    cluster = load_cluster("a800-ib").build(num_ranks=16)
    context = StepContext(cluster, DEEPSEEK, AnalyticCost(cluster, DEEPSEEK), memory=memory)
    choose_planner("zeppelin", {}).plan_step((tuple(MIXED[3:]),), context)
    assert seen == [not told]
    assert set(compared) == {memory}


def test_auto_takes_the_fastest_where_it_took_what_needs_the_least() -> None:
    # On 512 H800, 32 ranks a stage.
    cluster = load_cluster("h800").build(num_ranks=32)
    context = StepContext(cluster, DEEPSEEK, AnalyticCost(cluster, DEEPSEEK))
    memories, auto = {False: None, True: of_deepseek(32, 32, "full")}, choose_planner("auto", {})
    steps = {
        told: auto.plan_step(((*MIXED * 2,),) * 2, replace(context, memory=memory))[0]
        for told, memory in memories.items()
    }
    assert "nothing fits" in steps[False].plans[0].note
    assert "fit" not in steps[True].plans[0].note
    seconds = {told: float(step.plans[0].note.split("ms")[0].split()[-1]) for told, step in steps.items()}
    assert seconds[True] < 0.95 * seconds[False], [step.plans[0].note for step in steps.values()]


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 2),
    st.sampled_from([backward.Recomputed(), backward.Recomputed("uniform")]),
    st.integers(0, 3_000_000),
    st.floats(0.2e9, 4e9),
)
def test_stages_that_are_left_out_change_no_decision(
    pipeline: int, number: int, chunks: int, recompute: backward.Recomputed, kept: int, memory_bytes: float
) -> None:
    shards = [Sharding(pipeline=pipeline, stage=at, optimizer=2) for at in range(pipeline)]
    layers = [12 // pipeline] * (pipeline - 1) + [12 // pipeline + 1]
    stages = tuple(backward.Stage(own, each, recompute, chunks) for own, each in zip(layers, shards, strict=True))
    received = (np.array([kept, kept // part]) for part in (2, 3, 4))
    own = backward.MicrobatchBytes(np.array([900, 1100]), *received)
    memory = StepMemory(SMALL, stages)
    every = [backward.step_bytes([own] * number, SMALL, stage) for stage in stages]
    found = memory.of_microbatches(number)
    decision = found.decide(own, memory_bytes)
    assert len(found.stages) <= 2
    expected, rounded = backward.decide(every, "auto", memory_bytes), ("peak_bytes", "keep_bytes", "replay_bytes")
    assert replace(decision, **dict.fromkeys(rounded, 0.0)) == replace(expected, **dict.fromkeys(rounded, 0.0))
    for bytes_of in rounded:
        assert getattr(decision, bytes_of) == pytest.approx(getattr(expected, bytes_of))


def test_whether_a_remap_stays_is_asked_of_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[StepMemory | None] = []

    def noted(plan: MicrobatchPlan, machine: Machine) -> Estimate:
        told.append(machine.memory)
        return estimate(plan, machine)

    monkeypatch.setattr("megatron_balance.planning.layers.estimate", noted)
    lengths = (1786, 16857, 2484, 8655, 13212, 1377, 487, 10695, 1580, 4224, 1494)
    cluster, model = load_cluster("a800").build(num_ranks=16, ranks_per_node=8), load_model("llama-7b")
    memory = StepMemory(model, tuple(stages_of(model, 16, pipeline=2)))
    context = StepContext(cluster, model, AnalyticCost(cluster, model), memory=memory)
    layers = Layers(routing="pays", remap=True, remap_when="pays")
    choose_planner("knapformer", {}, layers=layers).plan_step((lengths,) * 2, context)
    assert set(told) == {memory.of_microbatches(2)}


@pytest.mark.parametrize(
    ("experts", "planner"),
    [
        (1, choose_planner("zeppelin", {})),
        (8, choose_planner("zeppelin", {})),
        # The exchange of all ranks waits for one with a quarter more tokens than on average.
        (8, choose_planner("knapformer", {"topology": "g12n1+g1n4"})),
    ],
)
def test_an_estimate_is_of_the_experts_that_a_rank_has_and_of_the_way_to_the_others(
    experts: int, planner: PlannerChoice
) -> None:
    # A layer of experts is as long as it is simulated, and as many layers keep.
    cluster = load_cluster("h100").build(num_ranks=16, ranks_per_node=4)
    model = replace(load_model("moe-8x550m"), expert_split=experts)
    own = planning_cost(cluster, model, None)
    plan = planner.plan(Batch(tuple(MIXED)), cluster, model, own)
    machine = Machine(cluster, model, AnalyticCost(cluster, model))
    setup = Setup("auto", experts=experts, engine="rounds")
    told = step_memory(StageSetup(machine, setup)).of_microbatches(1)
    found, step = estimate(plan, Machine(cluster, model, own, memory=told)), simulate_step([plan], machine, setup)
    assert found is not None
    around = sum(step.phases_s[name] for name in ("head", "gradient_sync", "optimizer"))
    assert found.layer_s == pytest.approx((step.step_s - around) / model.num_layers, rel=0.02)
    without = estimate(plan, Machine(cluster, model, machine.cost, memory=told))
    assert without is not None
    assert (found.layer_s > 1.2 * without.layer_s) == (experts > 1), "beyond that tolerance"
    assert found.backward.keeping == step.backward.keeping
    assert found.backward.peak_bytes == pytest.approx(step.backward.peak_bytes, rel=0.02)


# The capacity of a rank is the inverse of the memory model
SMALL_GPUS = Cluster(32, 8, memory_bytes=4e9)


@pytest.mark.parametrize("num_ranks", [1, 4, 32])
def test_a_ring_as_full_as_the_capacity_says_fills_what_is_usable(num_ranks: int) -> None:
    cluster = replace(SMALL_GPUS, num_ranks=num_ranks, ranks_per_node=min(8, num_ranks))
    tokens = capacity(cluster, MODEL)
    cost = AnalyticCost(cluster, MODEL)
    plan = choose_planner("te_ring", {}).plan(Batch((tokens * num_ranks,)), cluster, MODEL, cost)
    (stage,) = stages_of(MODEL, num_ranks)
    found = backward.step_bytes([backward.microbatch_bytes([plan], MODEL)], MODEL, stage)
    assert backward.decide([found], "auto", cluster.memory_bytes).fits
    assert float(found.peak(0).max()) == pytest.approx(backward.USABLE * cluster.memory_bytes, rel=2e-3)


def test_recomputation_makes_room_and_microbatches_in_flight_take_it() -> None:
    def room(num_microbatches: int = 1, **more: object) -> int:
        return most_tokens(MODEL, 32, 4e9, stages_of(MODEL, 32, **more), num_microbatches)  # pyright: ignore[reportArgumentType]

    assert room(recompute="full") > 2 * room()
    assert room(4, pipeline=2) < room(1, pipeline=2)
    assert room(4) == room()
    # What a preset holds by default is what its memory model says.
    # An H100 was said to hold 12,720 tokens of llama-7b, and 8,192 need more than it has.
    assert capacity(load_cluster("h100").build(num_ranks=64), load_model("llama-7b")) < 8192


# MaxLen of a scheme: what the first and the last stage hold
LLAMA_32B = replace(load_model("llama2-32b"), num_heads=64, num_kv_heads=64, head_dim=104)
GPU_BYTES, ALL_RANKS = 80e9, 64


def test_the_first_and_last_stage_hold_what_c1_counts() -> None:
    # The first stage holds what c1 counts.
    # PP microbatches of its layers, its weights and gradients, its share of all optimizer state.
    # The last stage has the logits.
    wordy = replace(LLAMA_32B, vocab_size=4_000_000)
    one_layer = rank.PARTIAL_BYTES * LLAMA_32B.num_heads * (LLAMA_32B.head_dim + 1)
    for model, held in (
        (LLAMA_32B, LLAMA_32B.num_layers * layer_activation_bytes(LLAMA_32B) + one_layer),
        (wordy, LLAMA_32B.num_layers / 4 * layer_activation_bytes(wordy) + rank.LOGIT_BYTES * wordy.vocab_size),
    ):
        table = head_module(model).weights / 2
        stage = (num_parameters(model) - 2 * table) / 4 / 8 + table / 8
        states = (2 + 4) * stage + rank.OPTIMIZER_BYTES * num_parameters(model) / ALL_RANKS
        expected = ((1 - MARGIN) * GPU_BYTES - states) / (held / 8)
        assert max_len(Scheme(8, 4), model, GPU_BYTES, ALL_RANKS) == pytest.approx(expected, abs=1)
    # More of anything never holds less and a model too large holds none.
    for more, fewer in ((Scheme(8, 4), Scheme(4, 4)), (Scheme(8, 4), Scheme(8, 2)), (Scheme(4, 4, 2), Scheme(4, 4))):
        assert max_len(more, LLAMA_32B, GPU_BYTES, ALL_RANKS) > max_len(fewer, LLAMA_32B, GPU_BYTES, ALL_RANKS)
    assert max_len(Scheme(8), LLAMA_32B, GPU_BYTES, 1024) > max_len(Scheme(8), LLAMA_32B, GPU_BYTES, ALL_RANKS)
    assert max_len(Scheme(), LLAMA_32B, GPU_BYTES, ALL_RANKS) == 0

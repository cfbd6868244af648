"""Balanced training in plain PyTorch gives the losses and gradients of one rank."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_balance import cli
from megatron_balance.model_config import proved
from megatron_balance.planners import PLANNERS
from tests.support import dit_jobs, torch_jobs, trace_reader
from tests.support.pool import Pool
from tests.support.torch_jobs import Trained, Way
from tools.zoo import Case, judged

log = logging.getLogger(__name__)
RANKS = 4
WAYS = [
    Way(compiled=True, steps=2),
    Way(compiled=True, fullgraph=True, backend="aot_eager", steps=5),
    Way(planner="wlb_llm", parallel="ddp", accumulate=2, checkpointed=True, backward="replay", steps=3),
    Way(model="llama", planner="distca", parallel="ddp", steps=3),
    Way(model="llama", planner="te_ring", checkpointed=True, accumulate=2, pools=2, steps=3),
]
# With it every two choices meet in one of them; all, over 20 steps: tools/torch_parity.py.
INDUCTOR = Way(compiled=True, fullgraph=True, checkpointed=True, accumulate=2, backend="inductor", steps=5)
COMPILED_LLAMA = Way(model="llama", parallel="ddp", compiled=True, checkpointed=True, accumulate=2, steps=2)


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    ranks = Pool(timeout_s=240.0, num_ranks=RANKS)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "way", [*WAYS, *(pytest.param(way, marks=pytest.mark.product) for way in (INDUCTOR, COMPILED_LLAMA))], ids=Way.name
)
def test_losses_and_gradients_are_those_of_one_rank(world: Pool, way: Way) -> None:
    if way.model == "llama":
        pytest.importorskip("transformers")
    expected = torch_jobs.reference(way)
    for (trained,) in world.run(torch_jobs.train, RANKS, [way]):
        assert torch_jobs.differences(trained, expected) == pytest.approx((0, 0, 0), abs=1e-5)
        assert (trained.graphs > 0) == way.compiled
        if way.fullgraph:
            assert trained.graphs <= 2, "layers share a graph: one for the sizes of the first step, one for all"
            assert trained.late == 0, "nothing is compiled behind the third step"


def test_what_a_graph_keeps_is_where_checkpointing_and_offloading_see_it(world: Pool) -> None:
    for found in world.run(torch_jobs.keep_in_graphs, RANKS, "aot_eager"):
        assert {way: (held, sized) for way, (held, sized, _) in found.items()} == {
            "kept": (1, True),
            "checkpoint around": (0, False),
            "checkpoint inside": (0, False),
            "moved": (0, False),
        }
        assert max(difference for *_, difference in found.values()) < 1e-6


WAVES = [
    Way(heads=(6, 6), ranks_per_node=4, options=(("group_size", 2), ("num_waves", 2)), parallel="ddp", steps=3),
    Way(heads=(8, 1), options=(("num_waves", 3),), backward="replay", parallel="ddp", steps=3),
]


@pytest.mark.parametrize("way", WAVES, ids=lambda way: way.backward)
def test_waves_train_like_one_rank_with_every_gradient(world: Pool, way: Way) -> None:
    # zeppelin's default rule: heads exchanged in groups of two, keys between them in waves.
    expected = torch_jobs.reference(way)
    ranks = [trained for (trained,) in world.run(torch_jobs.train, RANKS, [way])]
    for trained in ranks:
        assert torch_jobs.differences(trained, expected) == pytest.approx((0, 0, 0), abs=1e-5)
        assert trained.patterns == {"waves"}
        both_ways = 2 * torch_jobs.LAYERS * way.steps
        assert trained.counted["exchanges_all_to_all"] >= 2 * both_ways, "forward and backward"
    assert sum(trained.counted["kv_tokens_received"] for trained in ranks) > 0


def test_every_planner_trains(world: Pool) -> None:
    ways = [Way(planner=planner, parallel="ddp", steps=2) for planner in PLANNERS]
    expected = torch_jobs.reference(ways[0])
    for trained in world.run(torch_jobs.train, RANKS, ways):
        found = {way.planner: torch_jobs.differences(each, expected) for way, each in zip(ways, trained, strict=True)}
        assert {planner: max(each) for planner, each in found.items() if max(each) > 1e-5} == {}


# By rank. One gives no document; the first document does not fit one rank.
LENGTHS = ((300, 3), (), (90, 1, 33), (7,))


@pytest.mark.parametrize("planner", ["zeppelin", "distca", "ulysses"])
def test_results_come_back_to_the_ranks_that_gave_the_documents(world: Pool, planner: str) -> None:
    ranks = world.run(torch_jobs.gather, RANKS, LENGTHS, planner)
    for rank, gathered in enumerate(ranks):
        assert gathered.right, "labels, positions and other tensors travel with their tokens"
        assert gathered.tokens == [[100 * rank + at] * n for at, n in enumerate(LENGTHS[rank])]
        assert gathered.others == [(torch.arange(n).float() / 7).tolist() for n in LENGTHS[rank]]
    given = [value for gathered in ranks for value in gathered.gradient]
    assert given.count(6.0) == sum(map(sum, LENGTHS)), "the gradient of every token, and of no padding"
    assert given.count(0.0) == len(given) - given.count(6.0)


def test_received_keys_are_saved_where_checkpointing_sees_them(world: Pool) -> None:
    kept, replayed = (world.run(torch_jobs.save, RANKS, backward) for backward in ("keep", "replay"))
    assert all(tokens > 0 for tokens, _ in kept), "every rank receives keys in a ring"
    assert all(k > r for (_, k), (_, r) in zip(kept, replayed, strict=True)), (kept, replayed)


@pytest.mark.parametrize(
    ("planner", "way", "again"),
    [("te_ring", "keep", False), ("zeppelin", "keep", True), ("distca", "replay", False), ("auto", "replay", True)],
)
def test_two_losses_of_one_forward_may_go_backward_apart(world: Pool, planner: str, way: str, again: bool) -> None:
    assert max(world.run(torch_jobs.differ_twice, RANKS, planner, way, again)) < 1e-10


def test_second_derivatives_are_refused_in_every_call(world: Pool) -> None:
    for told in world.run(torch_jobs.differentiate_twice, RANKS):
        assert len(told) == 6
        assert {each[: each.index(";")] for each in told} == {
            "create_graph=True: second derivatives through balanced attention and its exchanges are not implemented"
        }


def test_balancers_of_the_same_ranks_share_process_groups(world: Pool) -> None:
    for shared, apart in world.run(torch_jobs.share_groups, RANKS):
        assert shared == 1, "of three balancers of all ranks, one of them KnapFormer's"
        assert apart == 2, "of a balancer of all ranks, and one of pairs"


def test_pools_whose_gradients_are_averaged_make_the_same_number_of_steps(world: Pool) -> None:
    ranks = world.run(torch_jobs.step_together, RANKS)
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    assert len({len(steps) for steps in ranks}) == 1
    assert [sum(map(sum, steps)) for steps in ranks[1:3]] == [360, 120], "all that each pair was given"


def test_every_rank_refuses_what_did_not_reach_the_plan(world: Pool) -> None:
    pytest.importorskip("transformers")
    for said in world.run(torch_jobs.refuse, RANKS):
        assert said.count("in every layer of the forward that made these values, got none") == 2, said


def test_values_of_a_second_model_are_refused_after_those_of_a_balanced_one(world: Pool) -> None:
    pytest.importorskip("transformers")
    model = torch_jobs.tiny("Llama", "eager", 1, max_position_embeddings=1024)
    drawn = [each for each in torch_jobs.documents(0, 0) if len(each) > 1]
    sums = [F.cross_entropy(model(each[None]).logits[0, :-1], each[1:], reduction="sum") for each in drawn]
    right = float(sum(sums)) / sum(len(each) - 1 for each in drawn)
    for said, balanced, past in world.run(torch_jobs.take_of_second_model, RANKS):
        assert said.count("in every layer of the forward that made these values, got none") == 2, said
        assert balanced == pytest.approx(right, rel=1e-6)
        assert abs(past - right) > 1e-3, "on sdpa it sees other documents"


def test_the_router_loss_is_that_of_one_process_with_all_documents(world: Pool) -> None:
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = torch_jobs.tiny("Mixtral", "eager", **torch_jobs.MIXTRAL)
    alone = [model(each[None], output_router_logits=True).router_logits for each in torch_jobs.documents(0, 0)]
    joined: Any = tuple(torch.cat(layer) for layer in zip(*alone, strict=True))
    wanted = load_balancing_loss_func(joined, 4, 2)
    assert isinstance(wanted, torch.Tensor)
    (gradient,) = torch.autograd.grad(wanted, [model.model.layers[0].mlp.gate.weight])
    for loss, averaged, of_ranks in world.run(torch_jobs.router_loss, RANKS):
        assert loss == pytest.approx(wanted.item(), rel=1e-6)
        torch.testing.assert_close(averaged, gradient, rtol=1e-4, atol=1e-7)
        assert abs(of_ranks - wanted.item()) > 1e-4, "the mean of the ranks' losses is another"


GOOD, IDS = [torch.arange(4)], "expected token ids [n] of integers, at least one"
THREE = torch.arange(3)


@pytest.mark.parametrize(
    ("given", "own", "others"),
    [
        ([torch.zeros(2, 2)], f"document 0: {IDS}, got (2, 2)", "ranks [2] "),
        ([THREE, torch.arange(0)], f"document 1: {IDS}", "ranks [2]"),
        ([(THREE, torch.arange(2))], "expected tensors with one entry for each of 3 tokens, got [2]", "ranks"),
        (THREE, "DataError: rank 0 has nothing", "rank 0 has nothing"),
        ([(THREE, THREE, torch.ones(3))], "rank 2 has float32 []", "rank 0 has nothing"),
        ([["a"]], "expected tensors of integers, got list", "ranks [2] could not read"),
    ],
)
def test_every_rank_hears_of_documents_that_are_none(world: Pool, given: object, own: str, others: str) -> None:
    if isinstance(given, torch.Tensor):
        own = others = "expected a list of documents, got a Tensor"
    said = world.run(torch_jobs.tell, RANKS, [GOOD, GOOD, given, GOOD])
    assert own in said[2]
    if not isinstance(given, torch.Tensor):
        assert all(others in said[rank] for rank in (0, 1, 3)), said
    assert all(each.startswith("DataError") for each in said)


def test_every_document_is_trained_once_though_some_wait_and_a_resume_goes_on_alike(world: Pool) -> None:
    straight, resumed = (world.run(torch_jobs.delay, RANKS, 6, resume_after) for resume_after in (None, 2))
    assert straight[0].waited[1] > 0, "nothing waits at the resume"
    assert straight[0].waited[-1] == 0, "what waits is trained at the end"
    assert [delayed.trained for delayed in resumed] == [delayed.trained for delayed in straight]
    for delayed in straight:
        numbers = [number for step in delayed.trained for number in step]
        assert sorted(numbers) == list(range(len(numbers)))
    for delayed in (*straight, *resumed):
        assert delayed.ahead >= 4, "coming steps are planned while others compute"
    first = [number for step in straight[0].trained for number in step]
    assert first != sorted(first), "rank 0 read those that wait"


def test_a_step_is_traced_as_a_simulated_one(world: Pool, tmp_path: Path) -> None:
    counted = world.run(torch_jobs.trace, RANKS, tmp_path)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [f"step-2-rank-{r}.json" for r in range(4)]
    assert cli.main(["trace", str(tmp_path), "--out", str(tmp_path / "joined.json")]) == 0
    first, second = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())
    assert (first["step"], second["step"], second["num_microbatches"]) == (1, 2, 2)
    for at, name in enumerate(("bytes_received_forward", "kernel_calls")):
        assert second["counters"][name] == [each[at] for each in counted]
    found = trace_reader.read((tmp_path / "joined.json").read_text())
    trace_reader.check(tmp_path / "joined.json", found, tmp_path)
    assert found.processes == {rank: f"rank {rank}, node {rank // 2}" for rank in range(4)}
    names = {e["name"] for e in found.spans if found.track(e) == "step"}
    assert names >= {"plan", "forward 0", "backward 0", "forward 1", "backward 1", "gradient sync", "optimizer"}
    assert found.arrows
    for rank, (num_bytes, calls) in enumerate(counted):
        own = [e for e in found.spans if e["pid"] == rank]
        assert sum(e["args"].get("received_bytes", 0) for e in own if e["cat"] == "forward") == num_bytes > 0
        launches = [e for e in own if e["name"] == "attention"]
        assert 0 < len(launches) <= calls
        assert {e["args"]["microbatch"] for e in launches} == {0, 1}


EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"


def printed_by(world: Pool, name: str, *words: str, job: Any = torch_jobs.run_script) -> tuple[str, str]:
    # Source of an example, which says how it is started, and what rank 0 alone prints.
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert f"torchrun --standalone --nproc-per-node 4 scripts/examples/{name}" in source
    printed, *others = world.run(job, RANKS, str(EXAMPLES / name), words)
    assert set(others) == {""}
    return source, printed


@pytest.mark.parametrize(
    ("name", "words", "last"),
    [
        ("fsdp2_gpt.py", (), "in the last."),
        ("hf_llama.py", (), "hf.check: leak 0.0: rank 0's documents in the last step"),
        ("hf_llama.py", ("--hybrid",), "hf.check: leak 0.0: rank 0's documents in the last step"),
    ],
)
def test_an_example_trains_shows_its_progress_and_prints_a_table(
    world: Pool, name: str, words: tuple[str, ...], last: str
) -> None:
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    source, printed = printed_by(world, name, "--steps", "2", *words)
    assert source.count("\n") < 150
    assert all(each in printed for each in ("2/2", last, "┃"))


def test_a_new_users_script_has_under_20_lines_beyond_its_model_and_trains(world: Pool) -> None:
    source, printed = printed_by(world, "new_user.py")
    beyond = source.partition("# Beyond the model\n")[2]
    assert 0 < len([line for line in beyond.splitlines() if line]) < 20
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("planner", ["zeppelin", "distca"])
def test_the_corridor_is_one_file_and_ends_with_the_loss_of_dense_attention(world: Pool, planner: str) -> None:
    source, printed = printed_by(world, "corridor.py", "--planner", planner)
    assert source.count("\n") <= 150
    assert "program lengths 600 250 70 33 9 heads 4 kv_heads 2 policy keep" in printed
    ours, dense = map(float, re.findall(r"(?:loss|dense) (-?[\d.]+)", printed))
    assert ours == pytest.approx(dense, rel=1e-8)


# A configuration of each kind; all of them: tools/zoo.py.
ZOO = {
    Case("llama"): "equal",
    Case("gpt_oss"): "equal",  # windows in every other layer, and sinks
    Case("deepseek_v3"): "equal",  # latents: values of another width than keys
    Case("mimo_v2_flash"): "equal",  # more heads of keys in layers with windows, and values of another width
    Case("bert", "encoder"): "equal",
    Case("gemma2"): "equal",  # soft-capped scores, windows in every other layer
    Case("llama4_text"): "refused",  # chunks
    Case("kimi_linear"): "equal",  # layers without attention
    Case("jamba"): "refused",  # and no plan reaches them
    Case("bloom"): "refused",  # attends by itself
}


def test_models_of_transformers_are_equal_to_eager_attention_or_refused(world: Pool) -> None:
    pytest.importorskip("transformers")
    for rows in world.run(torch_jobs.zoo, RANKS, list(ZOO)):
        found = {row.name: row.status for row in judged(rows, list(ZOO), proved())}
        assert found == {case.name: status for case, status in ZOO.items()}


@pytest.mark.parametrize("vocabulary", [2048, *(pytest.param(n, marks=pytest.mark.product) for n in (8192, 32768))])
def test_the_loss_in_chunks_is_that_of_all_logits_with_a_sharded_head_too(world: Pool, vocabulary: int) -> None:
    pytest.importorskip("transformers")
    for found in world.run(torch_jobs.chunked_loss, RANKS, vocabulary):
        for way, (loss, gradient, chunked, whole) in found.items():
            log.info("%d words, %s: %.1e, %.1e; %d and %d bytes", vocabulary, way, loss, gradient, chunked, whole)
            assert max(loss, gradient) < 1e-6, way
            assert chunked < 0.8 * whole, way


# KnapFormer's printed interface, and a diffusion transformer that trains as on one rank.

# The last two repeat as replicas.
TOPOLOGIES = ("g1n4", "g2n2", "g4n1", "g2n1+g1n2", "g1n1+g3n1", "g1n1", "g2n1")
HEADS_DIVIDE = tuple(topology for topology in TOPOLOGIES if "g3" not in topology)
Routed = tuple[str, list[list[int]]]
lengths_by_rank = st.lists(st.lists(st.integers(1, 30), max_size=3), min_size=4, max_size=4)


@settings(max_examples=2, phases=(Phase.explicit, Phase.generate))
@given(drawn=st.lists(st.tuples(st.sampled_from(HEADS_DIVIDE), lengths_by_rank), min_size=4, max_size=4))
def test_route_and_head_exchange_have_exact_inverses_and_gradients(world: Pool, drawn: list[Routed]) -> None:
    # One sequence and empty ranks; fewer tokens than ranks; more groups than sequences; none.
    edge: list[Routed] = [("g2n1+g1n2", [[], [5], [], []]), ("g4n1", [[], [], [], [1]])]
    edge += [("g1n4", [[], [], [3, 2], []]), ("g2n2", [[], [], [], []])]
    for zeros in world.run(dit_jobs.round_trips, 4, [*edge, *drawn]):
        assert all(float(x.abs().sum()) == 0 or float(x.abs().max()) < 1e-12 for case in zeros for x in case)


@pytest.mark.parametrize("topology", ["g2n1+g1n2", "g4n1"])
def test_attention_between_pre_attn_and_post_attn_is_that_of_whole_sequences(world: Pool, topology: str) -> None:
    worst = world.run(dit_jobs.attention, 4, topology, [[40, 3], [], [17], [1, 2, 9]])
    assert max(worst) < 1e-12


def test_mistakes_are_told_and_a_wrong_length_on_every_rank(world: Pool) -> None:
    told = world.run(dit_jobs.mistakes, 4)
    for rank, (none, width, tensor, rows, feature, back, heads, whole, *shared, lengths) in enumerate(told):
        assert none.startswith("expected a plan, got none; call plan_routing(seq_lens, d_model)")
        assert width == "d_model: expected a whole number of at least 1, got 1.5"
        assert tensor == "features: expected a list of tensors, got Tensor"
        assert rows == "expected 5 rows as the lengths in plan_routing, got [4, 3, 4]"
        assert feature == "expected 5 rows as the lengths in plan_routing, got []"
        assert back == "expected 5 rows as those of route, got [4, 3, 4]"
        assert heads == "expected [5, heads, head_dim] as those of route, got [5, 12]"
        tokens = 10 if rank < 2 else 5
        assert whole == f"expected [{tokens}, heads, head_dim] as those of pre_attn, got [99, 1, 4]"
        assert len(shared) == (rank < 2)
        assert all("q has 3 heads, which a group of 2 ranks cannot share equally" in each for each in shared)
        assert ("sequence 0 has length 1.5" if rank == 2 else "ranks [2] could not read") in lengths


def test_the_example_of_a_diffusion_transformer_shows_its_progress_and_prints_a_table(world: Pool) -> None:
    _, printed = printed_by(world, "dit.py", "--steps", "2", "--samples", "5", job=dit_jobs.run_example)
    assert "2/2" in printed
    assert "gradient norm" in printed


# Of a run; all ways, torch.compile too, over 20 steps: tools/torch_parity.py.
STEPS = 3


@cache
def truth() -> Trained:
    return dit_jobs.reference(dit_jobs.arguments(steps=STEPS))


@pytest.mark.parametrize(
    "way",
    [
        dit_jobs.arguments("g2n1+g1n2", steps=STEPS),
        dit_jobs.arguments("g4n1", checkpoint=True, steps=2),
        dit_jobs.arguments("g1n4", accumulate=2, steps=2),  # 3 samples for 4 groups: a rank without rows
        dit_jobs.arguments(planner="knapformer", ddp=True, steps=STEPS),
        dit_jobs.arguments(planner="zeppelin", checkpoint=True, ddp=True, accumulate=2, steps=STEPS),
    ],
    ids=lambda way: f"{way.planner or way.topology}{'-checkpointed' * way.checkpoint}",
)
def test_a_diffusion_transformer_trains_as_on_one_rank(world: Pool, way: dit_jobs.argparse.Namespace) -> None:
    expected = replace(truth(), losses=truth().losses[: way.steps], norms=truth().norms[: way.steps])
    for (trained,) in world.run(dit_jobs.train, 4, [way]):
        assert torch_jobs.differences(trained, expected) == pytest.approx((0, 0, 0), abs=1e-5)

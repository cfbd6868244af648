"""The protocol every planner meets; planning by measured tables; costs of pipelines."""

# A planner of steps, with a carry, above other planners; traits are fields of its entry.

import ast
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import megatron_balance
from megatron_balance import Batch, Cluster, MicrobatchPlan, Model, make_planner
from megatron_balance.analysis.step_memory import max_len
from megatron_balance.config import load_cluster, load_model, load_scheme_table, names
from megatron_balance.cost import analytic, table
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.forest import Forest, Segment, document, over
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.step import EMPTY, Carry, Layers, Lengths, StepPlan
from megatron_balance.ir.strategy import Scheme
from megatron_balance.planners import PLANNERS, base
from megatron_balance.planning.choice import StepMode, choose_planner, load_config, planning_cost, step_mode
from megatron_balance.planning.step_planner import PlanAhead, PlanSpec
from megatron_balance.planning.strategies import PredictedCosts, TableCosts
from tests.support.cli import CommandLine
from tests.support.cost_table import made
from tests.support.processes import ended

CLUSTER, MODEL = Cluster(4, 2), Model(8, 2, 16)
CONTEXT = base.StepContext(CLUSTER, MODEL, analytic.AnalyticCost(CLUSTER, MODEL))
STEP: Lengths = ((4000, 300, 20), (900, 900))


@dataclass(frozen=True, slots=True)
class ShortOrLongOptions:
    tokens_per_rank: int | None = None
    long: int = 1000


def short_or_long(lengths: Lengths, context: base.StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
    """One planner for steps with a long sequence, another for the rest; carries their number."""
    seen = 0 if carry.is_empty else carry.value()["steps"]
    name = "te_ring" if max(map(max, lengths)) > context.options.long else "packing"
    planner = context.planner(name, {"tokens_per_rank": context.options.tokens_per_rank}, context.layers)
    step, _ = planner(lengths, context, EMPTY)
    return step, Carry.of("short_or_long", {"steps": seen + 1}) if context.may_carry else EMPTY


@pytest.fixture
def composite(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = base.Planner(None, ShortOrLongOptions, plan_step=short_or_long, ping_pong=True)
    monkeypatch.setitem(PLANNERS, "short_or_long", planner)


@pytest.mark.usefixtures("composite")
def test_a_planner_may_ask_other_planners_through_the_registry() -> None:
    chosen = choose_planner("short_or_long", {"long": 3999})
    long, carry = chosen.plan_step(STEP, CONTEXT)
    short, carry = chosen.plan_step(STEP[1:], CONTEXT, carry)
    assert long == choose_planner("te_ring", {}).plan_step(STEP, CONTEXT)[0]
    assert short == choose_planner("packing", {}).plan_step(STEP[1:], CONTEXT)[0]
    assert carry == Carry.of("short_or_long", {"steps": 2})
    # A microbatch is a step of one, with no carry.
    assert chosen.plan(Batch(STEP[0]), CLUSTER, MODEL, CONTEXT.cost) == long.plans[0]
    # Layers and traits are those of its entry.
    chosen = choose_planner("short_or_long", {}, layers=Layers(remap=True))
    step, _ = chosen.plan_step(((4001, 30, 30),), CONTEXT)
    assert step == choose_planner("te_ring", {}, layers=Layers(remap=True)).plan_step(((4001, 30, 30),), CONTEXT)[0]
    assert step_mode(chosen, 2) == StepMode(ping_pong=True, pipeline="stages")


@pytest.mark.usefixtures("composite")
def test_what_another_planner_held_back_is_trained_by_whoever_can_and_waits_on_for_room() -> None:
    # What another planner held back is trained by whoever can.
    held = Carry.of("delays", {"since": 3}, ((-5, 700), (-2, 40)))
    for name in PLANNERS:
        chosen = choose_planner(name, {})
        if chosen.planner.plan_step is not None and not chosen.planner.takes_waiting:
            said = f"planner {name} cannot train the 2 sequences that planner delays held back; go on"
            with pytest.raises(ConfigError, match=said):
                chosen.plan_step(STEP, CONTEXT, held)
            continue
        step, after = chosen.plan_step(STEP, CONTEXT, held)
        assert after == EMPTY, name
        trained = sorted(seq for microbatch in step.members for seqs in microbatch for seq in seqs)
        assert trained == [-5, -2, 0, 1, 2, 3, 4], name
    step, _ = choose_planner("short_or_long", {}).plan_step(STEP, CONTEXT, Carry.of("delays", {"since": 3}))
    assert step.is_dealt(), "a memory in which nothing waits is let go"
    # What finds no room waits on.
    held = Carry.of("delays", None, ((-5, 700), (-2, 40)))
    chosen = choose_planner("te_ring", {"tokens_per_rank": 1100})  # 4,400 tokens a microbatch, of which one has 4,320
    step, after = chosen.plan_step(((4000, 320), (3700, 20)), CONTEXT, held)
    assert [seqs for (seqs,) in step.members] == [(0, 1, -2), (2, 3)] or step.members[1] == ((2, 3, -2),)
    assert after == Carry(waiting=((-9, 700),))
    step, after = chosen.plan_step(((), ()), CONTEXT, after)
    assert (step.members[0], after) == (((-9,),), EMPTY)
    with pytest.raises(InfeasibleError, match="1 sequences that were held back do not fit 1 microbatches"):
        chosen.plan_step(((4000,),), replace(CONTEXT, may_carry=False), Carry(waiting=((-9, 700),)))
    with pytest.raises(InfeasibleError, match="a sequence of 4401 tokens was held back, and a microbatch has at most"):
        chosen.plan_step(((4000,),), CONTEXT, Carry(waiting=((-9, 4401),)))


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_carry_nothing_and_keep_the_number_of_microbatches_unless_they_are_asked_to(name: str) -> None:
    assert PLANNERS[name].options().tokens_per_rank is None, "every planner has options with a capacity"
    step, carry = choose_planner(name, {}).plan_step(STEP, CONTEXT)
    assert carry == EMPTY
    assert sum(plan.num_tokens for plan in step.plans) == sum(map(sum, STEP))
    pooled = [n for microbatch in STEP for n in microbatch]
    for microbatch, plans in zip(step.members, step.microbatches, strict=True):
        for seqs, plan in zip(microbatch, plans, strict=True):
            assert plan.lengths == tuple(pooled[seq] for seq in seqs)
    step, _ = choose_planner(name, {}).plan_step(STEP, replace(CONTEXT, own_microbatches=False))
    assert len(step.members) == len(STEP)
    assert PLANNERS[name].plan_step is not None or step.members == (((0, 1, 2),), ((3, 4),))


def test_no_file_outside_planners_and_papers_decides_by_a_planners_name() -> None:
    # A comparison with a planner's name, or a table keyed by it, is a trait that is missing in its
    # entry; the word auto is also a value of several keys.
    planners = PLANNERS.keys() - {"auto"}
    package = Path(megatron_balance.__file__).parent
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] == "planners" or path.is_relative_to(package / "lab" / "papers"):
            continue
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(f'"{name}"' in text for name in planners) else ():
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += [key for key in node.keys if key is not None] if isinstance(node, ast.Dict) else []
            names = [each.value for each in compared if isinstance(each, ast.Constant) and each.value in planners]
            found += [f"{path.relative_to(package)}:{node.lineno}: {name}" for name in names]  # pyright: ignore[reportAttributeAccessIssue]
    assert not found


# Plans that agree between processes

FINGERPRINTS = """
from megatron_balance import Cluster, Model, make_planner
from megatron_balance.planners import PLANNERS
lengths = [[900, 31, 31, 7, 420, 2, 64, 64], [1] * 40]
for name in PLANNERS:
    for cluster in (Cluster(8, 4), Cluster(6, 2)):
        for options in ({}, {"tokens_per_rank": 320}) + (({"rule": "paper"},) if name == "zeppelin" else ()):
            plan = make_planner(name, cluster, Model(8, 2, 16), **options)
            print(name, *(plan(batch).fingerprint() for batch in lengths))
"""


def test_processes_with_different_hash_seeds_make_the_same_plans() -> None:
    environments = [{"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)} for seed in ("0", "12345")]
    first, second = (ended([sys.executable, "-c", FINGERPRINTS], check=True, env=each).stdout for each in environments)
    assert len(first.splitlines()) == 4 * len(PLANNERS) + 2
    assert first == second


# Planning by a measured cost table: in Python, on the command line, in a configuration and in the
# process that plans ahead.

TWO_NODES, SMALL = Cluster(8, 4), Model(8, 8, 16)
LENGTHS = (4000, 300, 300, 300, 300, 300, 300, 300)


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Path, Path]:
    # Tables with links of 1 GB/s: attention so slow that links count for nothing, and so quick that
    # moving anything is dear.
    q, k = (16, 4096), (16, 8192)
    wire = table.LinkTable("intra_node", "gloo", (1000, 1000000), (1e-5 + 1e-6, 1e-5 + 1e-3))
    links = (wire, replace(wire, name="inter_node"))
    layer = table.LayerTable(128, 512, False, (16, 4096), (1e-12, 1e-10), (2e-12, 2e-10))
    files = tmp_path / "slow.json", tmp_path / "quick.json"
    for file, pair_s in zip(files, (1e-6, 1e-15), strict=True):
        grid = tuple(tuple(pair_s * a * b for b in k) for a in q)
        attention = table.AttentionTable("plain", "float32", 8, 8, 16, q, k, k, 1e-6, 1e-6, grid, grid, grid, grid)
        table.save_table(replace(made(links), attention=attention, layer=layer), file)
    return files


def priced_by(file: Path) -> MicrobatchPlan:
    options = {"tokens_per_rank": 4200, "rule": "groups", "group_size": 1}
    return make_planner("zeppelin", TWO_NODES, SMALL, Layers(), file, **options)(LENGTHS)


def test_a_planner_that_prices_follows_the_table(tables: tuple[Path, Path]) -> None:
    widest = [max(len(zone.ranks) for zone in priced_by(file).zones) for file in tables]  # pyright: ignore[reportAttributeAccessIssue]
    assert widest[1] < widest[0] == 8
    # The process that plans ahead has the same.
    options = {"tokens_per_rank": 4200, "rule": "groups", "group_size": 1}
    ahead = PlanAhead(PlanSpec("zeppelin", TWO_NODES, SMALL, Layers(), options, str(tables[0])))
    try:
        ahead.submit("first", (LENGTHS,))
        ready: Any = ahead.take("first")
    finally:
        ahead.close()
    assert ready.step.plans[0] == priced_by(tables[0])


def test_command_line_and_configuration_name_the_table(
    tables: tuple[Path, Path], tmp_path: Path, run: CommandLine
) -> None:
    slow, quick = tables
    config = tmp_path / "run.yaml"
    config.write_text(
        "planner: {name: zeppelin, tokens_per_rank: 4200, rule: groups, group_size: 1}\n"
        "cluster: {num_ranks: 8, ranks_per_node: 4}\n"
        "model: {num_heads: 8, num_kv_heads: 8, head_dim: 16}\nrouting: never\nremap: false\n"
        f"lengths: {list(LENGTHS)}\nplan_costs: slow.json\n"
    )
    assert load_config(config).plan_costs == slow
    asked = f"plan --json --config {config}"
    for file, more in ((slow, ""), (quick, f"--plan-costs {quick}")):
        found = run.json(f"{asked} {more}")["results"][0]["fingerprint"]
        assert found == priced_by(file).fingerprint()
    # A table of another head dim, or none at all, is refused.
    with pytest.raises(ConfigError, match="measured with head dim 16, llama-7b has 128"):
        planning_cost(TWO_NODES, Model(32, 32, 128, name="llama-7b"), slow)
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        planning_cost(TWO_NODES, SMALL, tmp_path / "nowhere.json")
    assert "head dim 16" in run.error("plan --planner zeppelin --lengths 100,20 --ranks 4 --plan-costs", slow)


# Costs of pipelines: the authors' tables, predictions, and a sentence for each mistake.

A800 = load_cluster("a800-ib").build()
LLAMA = load_model("llama-7b")
PREDICTED = PredictedCosts(analytic.AnalyticCost(A800, LLAMA), A800, LLAMA)
TABLE = """{name: mine, hidden_size: 100, num_layers: 10, vocab_size: 1000, gpu_memory_bytes: 1e8, reserved_bytes: 1e7,
state_bytes: 200, sharded_share: 0.75, vocabulary_bytes: 16, activation_bytes: {1: 40, 2: 50},
milliseconds: {tp1-pp1-cp1: [1e-6, 0.1, 20], tp2-pp2-cp2: [1e-7, 0.02, 5]}}"""


@pytest.fixture
def scheme_table(tmp_path):
    def of(text: str = TABLE) -> TableCosts:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return TableCosts(load_scheme_table(str(path)))

    return of


def test_tables_hold_what_the_paper_packs_to_and_maxlen_is_by_the_printed_formula(scheme_table) -> None:
    # Shipped tables hold what the paper packs to.
    # 32B, 64 GPUs: <16,1,1> holds the context of 32K, <8,1,1> not; <2,1,1> nothing.
    assert names("scheme") == ["a800-13b", "a800-32b", "a800-7b"]
    costs = TableCosts(load_scheme_table("a800-32b"))
    assert costs.pipeline(Scheme(16), 64).max_tokens > 32768 > costs.pipeline(Scheme(8), 64).max_tokens
    assert Scheme(2) not in costs.schemes(64)
    assert Scheme(16) not in costs.schemes(8)
    found = costs.pipeline(Scheme(8, 2), 64)
    assert (found.a, found.b, found.c, found.stages) == (1.06789378e-09, 7.10582460e-05, 0.0617678259, 2)
    # Maxlen of a table by the printed formula.
    layers, vocabulary = 10 * 100**2 * 200, 100 * 1000 * 16
    # One stage holds both vocabulary tables.
    states = 0.75 / 4 * (layers + 2 * vocabulary) + 0.25 * (layers + 2 * vocabulary)
    assert scheme_table().pipeline(Scheme(), 4).max_tokens == int((9e7 - states) / (10 * 100 * 40))
    states = 0.75 / 8 * (layers + 2 * vocabulary) + 0.25 / 2 * (layers / 2 + vocabulary)
    assert scheme_table().pipeline(Scheme(2, 2, 2), 8).max_tokens == int((9e7 - states) / (10 * 100 / 4 * 50))


def test_a_wrong_table_is_one_sentence(scheme_table) -> None:
    for old, new, message in (
        ("[1e-6, 0.1, 20]", "[1e-6, 0.1]", "tp1-pp1-cp1: expected"),
        ("[1e-6, 0.1, 20]", "[1e-6, -0.1, 2]", "none negative"),
        ("tp1-pp1-cp1", "tp1", "scheme 'tp1': expected tpA-ppB-cpC"),
        ("tp1-pp1-cp1", "2*tp1-pp1-cp1", "expected one scheme"),
        ("name: mine", "name: mine, state_byte: 1", "unknown key, did you mean 'state_bytes'"),
        ("sharded_share: 0.75", "sharded_share: 1.75", "sharded_share"),
        ("name: mine, ", "", "name: missing"),
    ):
        with pytest.raises(ConfigError, match="(?s)" + message):
            scheme_table(TABLE.replace(old, new))
    # And a scheme that there is nothing for is refused.
    with pytest.raises(ConfigError, match="mine has no coefficients for tp4-pp1-cp1; it has tp1-pp1-cp1, tp2"):
        scheme_table().pipeline(Scheme(4), 8)
    with pytest.raises(ConfigError, match="no activation_bytes for tensor parallelism 2"):
        scheme_table(TABLE.replace("{1: 40, 2: 50}", "{1: 40}")).pipeline(Scheme(2, 2, 2), 8)
    with pytest.raises(ConfigError, match="splits the 32 heads of llama-7b 3 ways"):
        PREDICTED.pipeline(Scheme(3), 64)
    with pytest.raises(ConfigError, match="splits the 32 layers of llama-7b 3 ways"):
        PREDICTED.pipeline(Scheme(1, 3), 64)
    with pytest.raises(ConfigError, match="no scheme named 'a800-33b'"):
        load_scheme_table("a800-33b")


def test_predicted_costs_share_out_the_work_and_know_their_memory() -> None:
    one, eight, staged = (PREDICTED.pipeline(each, 64) for each in (Scheme(2), Scheme(8), Scheme(2, 4)))
    assert [eight.a, staged.a] == pytest.approx([one.a / 4] * 2, rel=0.1)
    assert one.b / 4 < eight.b < one.b
    assert staged.max_tokens == max_len(Scheme(2, 4), LLAMA, A800.memory_bytes, 64)
    across = PREDICTED.pipeline(Scheme(16), 64)  # a group of two nodes
    assert across.b * 16 > eight.b * 8
    assert across.max_tokens > eight.max_tokens
    # Schemes divide the model and lie well on nodes.
    found = PREDICTED.schemes(64)
    assert {Scheme(8, 2, 4), Scheme(16, 1, 1), Scheme(4, 32 // 16, 2)} <= set(found)
    assert all(s.num_ranks <= 64 and LLAMA.num_layers % s.pipeline == LLAMA.num_heads % s.tensor == 0 for s in found)
    assert PredictedCosts(PREDICTED.cost, replace(A800, memory_bytes=1e9), LLAMA).schemes(8) == ()


TREES = tuple(document(n) if n < 30 else (Segment(n - 20, -1), Segment(9, 0), Segment(11, 0)) for n in (4000, 320, 20))


@pytest.mark.parametrize("name", ["te_ring", "distca", "auto", "wlb_llm", "hydraulis"])
def test_every_microbatch_of_a_step_has_the_trees_of_its_sequences(name: str) -> None:
    step, _ = choose_planner(name, {}).plan_step(((4000,), (320, 20)), replace(CONTEXT, trees=TREES))
    numbers = [seq for microbatch in step.members for seqs in microbatch for seq in seqs]
    assert sorted(numbers) == [0, 1, 2]
    for seqs, plan in zip((seqs for microbatch in step.members for seqs in microbatch), step.plans, strict=True):
        assert plan.mask == (Forest(tuple(TREES[seq] for seq in seqs)) if seqs else CAUSAL), seqs


@pytest.mark.parametrize("name", ["te_ring", "distca", "wlb_llm"])
def test_trees_wait_and_are_trained_as_the_trees_that_they_were(name: str) -> None:
    context = replace(CONTEXT, trees=TREES)
    waits = choose_planner("wlb_llm", {"thresholds": [350]})
    _, carry = waits.plan_step(((4000,), (320, 20)), context)
    assert carry.waiting == ((-3, 4000),)
    assert carry.trees == TREES[:1]
    assert Carry.from_json(carry.to_json()) == carry
    # With documents alone, by any planner: the tree of the one that waited stays.
    options = {} if name != "wlb_llm" else {"thresholds": [350]}
    step, after = choose_planner(name, options).plan_step(((360,), (30,)), CONTEXT, carry)
    trees = {-3: TREES[0], 0: document(360), 1: document(30)}
    trained = [(seqs, plan) for seqs, plan in zip((s for m in step.members for s in m), step.plans, strict=True)]
    assert -3 in {seq for seqs, _ in trained for seq in seqs}
    for seqs, plan in trained:
        assert plan.mask == over(CAUSAL, [trees[seq] for seq in seqs]), seqs
    assert after.trees == ()
    # Of a planner that is asked with the waiting one alone it is not lost either.
    with pytest.raises(
        ConfigError, match="expected a tree for each of 1 waiting sequences, of its length; got trees of"
    ):
        Carry.from_json(carry.to_json().replace("4000", "4001"))


def test_trees_of_other_lengths_are_refused() -> None:
    context = replace(CONTEXT, trees=TREES)
    with pytest.raises(ConfigError, match=r"trees of \[4000, 320, 20\] tokens and sequences of \[4000, 20, 320\]"):
        choose_planner("te_ring", {}).plan_step(((4000,), (20, 320)), context)

"""Costs of pipelines: the authors' tables, predictions, and a sentence for each mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_balance.analysis.step_memory import max_len
from megatron_balance.config import load_cluster, load_model, load_scheme_table, names
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Scheme
from megatron_balance.planning.strategies import PredictedCosts, TableCosts

CLUSTER = load_cluster("a800-ib").build()
MODEL = load_model("llama-7b")
PREDICTED = PredictedCosts(AnalyticCost(CLUSTER, MODEL), CLUSTER, MODEL)
TABLE = """
name: mine
hidden_size: 100
num_layers: 10
vocab_size: 1000
gpu_memory_bytes: 1e8
reserved_bytes: 1e7
state_bytes: 200
sharded_share: 0.75
vocabulary_bytes: 16
activation_bytes: {1: 40, 2: 50}
milliseconds:
  tp1-pp1-cp1: [1e-6, 0.1, 20]
  tp2-pp2-cp2: [1e-7, 0.02, 5]
"""


@pytest.fixture
def table(tmp_path):
    def of(text: str = TABLE) -> TableCosts:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return TableCosts(load_scheme_table(str(path)))

    return of


def test_shipped_tables_hold_what_the_paper_packs_to() -> None:
    """32B, 64 GPUs: <16,1,1> holds the context of 32K, <8,1,1> not; <2,1,1> nothing."""
    assert names("scheme") == ["a800-13b", "a800-32b", "a800-7b"]
    costs = TableCosts(load_scheme_table("a800-32b"))
    assert costs.pipeline(Scheme(16), 64).max_tokens > 32768 > costs.pipeline(Scheme(8), 64).max_tokens
    assert Scheme(2) not in costs.schemes(64)
    assert Scheme(16) not in costs.schemes(8)
    found = costs.pipeline(Scheme(8, 2), 64)
    assert (found.a, found.b, found.c, found.stages) == (1.06789378e-09, 7.10582460e-05, 0.0617678259, 2)


def test_maxlen_of_a_table_by_the_printed_formula(table) -> None:
    layers, vocabulary = 10 * 100**2 * 200, 100 * 1000 * 16
    # One stage holds both vocabulary tables.
    states = 0.75 / 4 * (layers + 2 * vocabulary) + 0.25 * (layers + 2 * vocabulary)
    assert table().pipeline(Scheme(), 4).max_tokens == int((9e7 - states) / (10 * 100 * 40))
    states = 0.75 / 8 * (layers + 2 * vocabulary) + 0.25 / 2 * (layers / 2 + vocabulary)
    assert table().pipeline(Scheme(2, 2, 2), 8).max_tokens == int((9e7 - states) / (10 * 100 / 4 * 50))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1e-6, 0.1, 20]", "[1e-6, 0.1]", "tp1-pp1-cp1: expected"),
        ("[1e-6, 0.1, 20]", "[1e-6, -0.1, 2]", "none negative"),
        ("tp1-pp1-cp1", "tp1", "scheme 'tp1': expected tpA-ppB-cpC"),
        ("tp1-pp1-cp1", "2*tp1-pp1-cp1", "expected one scheme"),
        ("name: mine", "name: mine\nstate_byte: 1", "unknown key, did you mean 'state_bytes'"),
        ("sharded_share: 0.75", "sharded_share: 1.75", "sharded_share"),
        ("name: mine", "", "name: missing"),
    ],
)
def test_a_wrong_table_is_one_sentence(table, old, new, message) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        table(TABLE.replace(old, new))


def test_a_scheme_that_there_is_nothing_for_is_refused(table) -> None:
    with pytest.raises(ConfigError, match="mine has no coefficients for tp4-pp1-cp1; it has tp1-pp1-cp1, tp2"):
        table().pipeline(Scheme(4), 8)
    with pytest.raises(ConfigError, match="no activation_bytes for tensor parallelism 2"):
        table(TABLE.replace("{1: 40, 2: 50}", "{1: 40}")).pipeline(Scheme(2, 2, 2), 8)
    with pytest.raises(ConfigError, match="splits the 32 heads of llama-7b 3 ways"):
        PREDICTED.pipeline(Scheme(3), 64)
    with pytest.raises(ConfigError, match="splits the 32 layers of llama-7b 3 ways"):
        PREDICTED.pipeline(Scheme(1, 3), 64)
    with pytest.raises(ConfigError, match="no scheme named 'a800-33b'"):
        load_scheme_table("a800-33b")


def test_predicted_costs_share_out_the_work_and_know_their_memory() -> None:
    one, eight, staged = (PREDICTED.pipeline(each, 64) for each in (Scheme(2), Scheme(8), Scheme(2, 4)))
    assert one.a / 4 == pytest.approx(eight.a, rel=0.1)
    assert one.a / 4 == pytest.approx(staged.a, rel=0.1)
    assert one.b / 4 < eight.b < one.b
    assert staged.max_tokens == max_len(Scheme(2, 4), MODEL, CLUSTER.memory_bytes, 64)
    across = PREDICTED.pipeline(Scheme(16), 64)  # a group of two nodes
    assert across.b * 16 > eight.b * 8
    assert across.max_tokens > eight.max_tokens


def test_schemes_divide_the_model_and_lie_well_on_nodes() -> None:
    found = PREDICTED.schemes(64)
    assert {Scheme(8, 2, 4), Scheme(16, 1, 1), Scheme(4, 32 // 16, 2)} <= set(found)
    assert all(
        s.num_ranks <= 64 and not MODEL.num_layers % s.pipeline and not MODEL.num_heads % s.tensor for s in found
    )
    small = PredictedCosts(PREDICTED.cost, replace(CLUSTER, memory_bytes=1e9), MODEL)
    assert small.schemes(8) == ()

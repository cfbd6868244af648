"""Transformer Engine's attention under the launcher, in a script that builds its model itself;
Transformer Engine is a stand-in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_balance.errors import ConfigError
from megatron_balance.megatron.gpt import check_model
from tests.megatron.conftest import Train, assert_same_training, train_with
from tests.support.megatron_run import Trainer

pytestmark = pytest.mark.megatron

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SCRIPT = str(SUPPORT / "stand_in_te_pretrain.py")
# Megatron's wrapper knows no grouped queries at the stand-in's version.
FLAGS = {"train-iters": 3, "group-query-attention": False, "num-query-groups": None, "optimizer": "adam"}
TWO_NODES = {"cluster": {"ranks_per_node": 1}}


@pytest.fixture(scope="module")
def train_te(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    trainer = Trainer(path=[str(SUPPORT / "stand_in_te")])
    yield train_with(trainer, corpus, tmp_path_factory)
    trainer.close()


def test_a_model_of_transformer_engines_attention_runs_the_plan(train: Train, train_te: Train) -> None:
    planned = train_te(2, "zeppelin", FLAGS, config=TWO_NODES, entry="launch", before=(SCRIPT,))
    assert "patched megatron.core.extensions.transformer_engine:TEDotProductAttention.forward" in planned.result.log(0)
    assert_same_training(planned, train(2, "zeppelin", FLAGS, config=TWO_NODES))


def test_megatrons_own_attention_gives_way_to_ours_in_a_model_that_a_script_built(
    train: Train, train_te: Train
) -> None:
    flags = {**FLAGS, "no-te-attention": True, "context-parallel-size": 1}
    planned = train_te(2, "zeppelin", flags, config=TWO_NODES, entry="launch", before=(SCRIPT,))
    assert planned.steps[0]["counters"]["forward_calls"][0] > 0
    assert_same_training(planned, train(2, "zeppelin", {**FLAGS, "context-parallel-size": 1}, config=TWO_NODES))


def test_an_attention_that_knows_no_plan_is_refused() -> None:
    class Foreign(torch.nn.Module):
        """An attention of the script's own."""

    layer = torch.nn.Module()
    layer.core_attention = Foreign()
    with pytest.raises(ConfigError, match="core_attention is Foreign, which knows nothing of plans"):
        check_model(torch.nn.ModuleList([layer]), te_patched=False)


SPEC = """
from megatron_balance.megatron import cpu
cpu.install()
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron_balance.megatron.core_attention import BalancedCoreAttention
from megatron_balance.megatron.gpt import balanced_spec
given = get_gpt_layer_with_transformer_engine_spec()
ours = balanced_spec(given)
theirs, attention = given.submodules.self_attention.submodules, ours.submodules.self_attention.submodules
assert attention.core_attention is BalancedCoreAttention, attention.core_attention
assert theirs.core_attention.__name__ == "TEDotProductAttention", "the script's own spec was changed"
assert attention.linear_qkv.__name__ == "TELayerNormColumnParallelLinear", attention.linear_qkv
assert attention.linear_proj.__name__ == "TERowParallelLinear", attention.linear_proj
"""


def test_the_layer_spec_of_transformer_engine_keeps_its_layers_and_gets_our_attention() -> None:
    path = os.pathsep.join([str(SUPPORT / "stand_in_te"), str(SUPPORT.parents[1])])
    built = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SPEC],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr

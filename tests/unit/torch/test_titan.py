"""torchtitan's configurations and rows, as a balanced run has them, and refusals."""

from importlib import import_module

import pytest
import torch

from megatron_balance.errors import ConfigError
from megatron_balance.torch.settings import model_of

pytest.importorskip("torchtitan")

from megatron_balance.torch import titan


@pytest.mark.parametrize(
    ("name", "heads", "widths"),
    [("llama3", (16, 16), (16, None)), ("qwen3", (16, 8), (128, None)), ("deepseek_v3", (16, 16), (192, 128))],
)
def test_sizes_of_debug_models_are_read(name: str, heads: tuple[int, int], widths: tuple[int, int | None]) -> None:
    spec = import_module(f"torchtitan.models.{name}").model_registry("debugmodel")
    model = model_of(titan.sizes(spec.model))
    assert ((model.num_heads, model.num_kv_heads), (model.head_dim, model.value_dim)) == (heads, widths)
    assert model.num_layers == len(spec.model.layers)
    inner = titan.attention(spec.model.layers[0].attention).inner_attention
    assert type(inner) is titan.TitanAttention.Config


def test_attention_that_was_not_tried_is_refused_by_name() -> None:
    spec = import_module("torchtitan.models.gpt_oss").model_registry("debugmodel")
    with pytest.raises(ConfigError, match=r"GQAttention or DeepSeek-V3's attention, got Attention\.Config"):
        titan.attention(spec.model.layers[0].attention)


def test_rows_are_cut_where_positions_begin_again() -> None:
    tokens = torch.arange(10).view(2, 5)
    positions = torch.tensor([[3, 4, 0, 1, 2], [0, 0, 1, 2, 3]])  # a row may begin within a document
    found = titan.documents({"input": tokens, "positions": positions}, tokens + 1)
    assert [each.tolist() for each, _ in found] == [[0, 1], [2, 3, 4], [5], [6, 7, 8, 9]]
    assert all(torch.equal(labels, of + 1) for of, labels in found)
    with pytest.raises(ConfigError, match="got pixels too"):
        titan.documents({"input": tokens, "positions": positions, "pixels": tokens}, tokens)


def test_what_a_run_had_stays_and_what_it_cannot_have_is_set() -> None:
    config = import_module("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    config.override.imports = ["mine.of_my_own"]
    made = titan.balanced(config, planner="te_ring", tokens_per_rank=64)
    assert made.override.imports == ["mine.of_my_own", *titan.OVERRIDES]
    assert (made.planner, made.planner_options) == ("te_ring", {"tokens_per_rank": 64})
    assert (made.model_spec, made.loss, made.validator.freq) == (config.model_spec, config.loss, config.validator.freq)
    assert made.training.disable_cuda_graphs
    saved = titan.checkpointing(config.activation_checkpoint).build().get_save_ops()
    assert torch.ops.megatron_balance.attention.default in saved

# type: ignore  # a user's script, which nobody type-checks
"""stand_in_pretrain_gpt.py with FP8: linear layers refuse what FP8's would refuse."""

from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from stand_in_pretrain_gpt import forward_step, print_rank_0, train_valid_test_datasets_provider

ROWS = {"delayed": 16, "blockwise": 128}


def check_rows(multiple):
    def before(module, inputs):
        rows = inputs[0].shape[0] * inputs[0].shape[1]
        name = type(module).__name__
        assert rows % multiple == 0, f"{name} was given {rows} rows, which is no multiple of {multiple}"

    return before


def hooked(models):
    # Transformer Engine quantises the linear layers of the blocks, and not the one that makes
    # logits.
    for model in models:
        linear = ColumnParallelLinear | RowParallelLinear
        layers = [layer for layer in model.decoder.modules() if isinstance(layer, linear)]
        assert len(layers) >= 8
        for layer in layers:
            layer.register_forward_pre_hook(check_rows(ROWS[RECIPE]))
    print_rank_0(f"> layers refuse rows that are no multiple of {ROWS[RECIPE]}")
    return models


def add_arguments(parser):
    parser.add_argument("--stand-in-recipe", default="delayed")
    parser.add_argument("--stand-in-unaligned", action="store_true")
    return parser


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    model = gpt_config_from_args(args)
    RECIPE = args.stand_in_recipe
    model.pre_wrap_hooks.append(hooked)
    if not args.stand_in_unaligned:  # once the model's configuration is made, which knows nothing of it
        args.fp8, args.fp8_recipe = "hybrid", RECIPE
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)

# type: ignore  # a user's script, which nobody type-checks
"""A training script that builds its model itself, of Transformer Engine's attention."""

from megatron.core.enums import ModelType
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from stand_in_pretrain_gpt import forward_step, train_valid_test_datasets_provider


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    if not args.no_te_attention:
        spec.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    sizes = (args.padded_vocab_size, args.max_position_embeddings)
    given = {"share_embeddings_and_output_weights": False, "position_embedding_type": args.position_embedding_type}
    given |= {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    return GPTModel(config, spec, *sizes, **given, pg_collection=pg_collection)


def add_arguments(parser):
    parser.add_argument("--no-te-attention", action="store_true")
    return parser


if __name__ == "__main__":
    data = train_valid_test_datasets_provider
    data.is_distributed = True
    config = pretrain_cfg_container_from_args(parse_and_validate_args(extra_args_provider=add_arguments))
    pretrain(config, data, ModelType.encoder_or_decoder, forward_step, model_provider=model_provider)

# type: ignore  # a user's script, which nobody type-checks
"""A training script of the shape of Megatron's own pretrain_gpt.py, which no wheel ships."""

# It knows nothing of megatron_balance: its own data sets of fixed length, its own batches, loss and
# forward step.

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.parallel_state import get_context_parallel_group, get_hybrid_data_context_parallel_groups
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

KEYS = ("attention_mask", "cu_seqlens", "cu_seqlens_padded", "labels", "loss_mask", "max_seqlen", "position_ids")
KEYS += ("tokens", "local_cp_size", "hybrid_cp_group")


def get_batch(data_iterator):
    args = get_args()
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        batch = {key: read[key].cuda() if read.get(key) is not None else None for key in KEYS}
    names = ("create_attention_mask_in_dataloader", "micro_batch_size", "seq_length", "pipeline_model_parallel_size")
    given = {name: getattr(args, name) for name in names} | {"cp_size": args.context_parallel_size}
    given |= dict.fromkeys(("has_cu_seqlens", "is_hybrid_cp", "mtp_on_this_rank"), False)
    given |= {"tp_rank": mpu.get_tensor_model_parallel_rank(), "is_pipeline_first_stage": mpu.is_pipeline_first_stage()}
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        **given,
    )
    groups = {"cp_group": get_context_parallel_group(), "hybrid_cp_group_func": get_hybrid_data_context_parallel_groups}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, **groups)


def loss_func(loss_mask, output_tensor):
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model):
    batch = get_batch(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def built(num_samples, dataset, config=GPTDatasetConfig, **others):
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    given = {"random_seed": args.seed, "sequence_length": args.seq_length, "split": args.split}
    given |= {"blend": blend, "blend_per_split": blend_per_split, "path_to_cache": args.data_cache_path}
    given |= {name: getattr(args, name) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
    of_rank = lambda: mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return BlendedMegatronDatasetBuilder(dataset, num_samples, of_rank, config(**given, **others)).build()


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    print_rank_0("> the script builds its own data sets")
    given = {"create_attention_mask": args.create_attention_mask_in_dataloader, "tokenizer": build_tokenizer(args)}
    return built(num_samples, MockGPTDataset if args.mock_data else GPTDataset, **given)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    full_config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(full_config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)

# type: ignore  # a user's script, which nobody type-checks
"""stand_in_pretrain_gpt.py on Megatron's own packed samples."""

# Conversations (`--sft`), text with its middle moved behind (`--fim-data`), samples that say where
# their documents end (`--dataloader-inter-document-masking`), and unequal lengths
# (`--use-varlen-dataset`).
#
# Without megatron_balance it is Megatron alone on one rank: its model, loss and schedule, and plain
# attention under a block-diagonal mask, as Transformer Engine's takes cu_seqlens. The first
# argument is the folder of the gradients.

import functools
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset

from tests.support.plain_documents import write_gradients
from tests.support.stand_in_pretrain_gpt import built, loss_func

FIRST_SPECIAL = 90


class Characters:
    # A tokenizer whose tokens are characters, and the last six special ones.
    vocab_size, eod, pad = 96, 94, 95

    def __init__(self):
        self.unique_identifiers = {"class": "Characters"}
        self._tokenizer = self
        names = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token", "fim_eod_token")
        self.special = {getattr(get_args(), name): FIRST_SPECIAL + at for at, name in enumerate(names)}

    def tokens_to_ids(self, tokens):
        return [self.special[token] for token in tokens]

    def ids_to_text(self, ids, remove_special_tokens):
        assert remove_special_tokens
        return "".join(chr(32 + each) for each in ids if each < FIRST_SPECIAL)

    def text_to_ids(self, text):
        return [ord(each) - 32 for each in text]

    def tokenize_conversation(self, conversation, return_target, add_generation_prompt):
        assert return_target
        assert not add_generation_prompt
        tokens = [self.text_to_ids(each["content"]) for each in conversation]
        kept = [each["role"] == "assistant" for each in conversation]
        targets = [ids if keep else [IGNORE_INDEX] * len(ids) for ids, keep in zip(tokens, kept, strict=True)]
        return np.concatenate(tokens), np.concatenate(targets)


class Lines:
    # Conversations of a file, a packed sample a line: what `datasets` reads for Megatron.
    def __init__(self, path):
        self.lines = [json.loads(line)["messages"] for line in Path(path).read_text().splitlines()]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


class Conversations(SFTDataset):
    # Megatron's own, but for who reads the file, and positions.
    @staticmethod
    def build_low_level_dataset(dataset_path, config):  # noqa: ARG004  Megatron passes it
        return Lines(dataset_path)

    def __getitem__(self, idx):
        # A sample with positions over its whole length; rotary embeddings follow cu_seqlens.
        return {**super().__getitem__(idx), "position_ids": torch.arange(self.config.sequence_length)}


class Varlen(Conversations):
    # Samples of one conversation each, as Megatron's `VarlenDataset` (branch dev) gives them.
    def __getitem__(self, idx):
        tokenizer, size = self.config.tokenizer, self.config.sequence_length
        conversation = self.dataset[int(self.indices[idx % len(self.indices)])]
        tokens, targets = tokenizer.tokenize_conversation(conversation, True, False)
        tokens, targets = [*tokens.tolist()[:size], tokenizer.eod], [*targets.tolist()[:size], tokenizer.eod]
        length = len(tokens) - 1
        padded = -(-length // 8) * 8
        fill = [tokenizer.pad] * (padded - length)
        labels = torch.tensor([*targets[1:], *fill])
        loss_mask = torch.ones(padded)
        loss_mask[length:] = 0
        loss_mask[labels == IGNORE_INDEX] = 0
        return {
            "tokens": torch.tensor([*tokens[:-1], *fill]),
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": torch.arange(padded),
            "original_seq_len": torch.tensor([length], dtype=torch.int32),
            "padded_seq_len": torch.tensor([padded], dtype=torch.int32),
        }


def add_arguments(parser):
    parser.add_argument("--use-varlen-dataset", action="store_true")
    return parser


def provider(num_samples, vp_stage=None):
    args = get_args()
    given = {"tokenizer": Characters(), "context_parallel_size": args.context_parallel_size}
    given |= {"create_attention_mask": False, "inter_document_masking": args.dataloader_inter_document_masking}
    if not args.fim_data:
        packed = Conversations if args.sft else Varlen
        return built(num_samples, packed if args.sft or args.use_varlen_dataset else GPTDataset, **given)
    names = ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix")
    given |= {name: getattr(args, name) for name in names}
    extra = ("prefix", "middle", "suffix", "pad", "eod")
    given["fim_extra_tokens"] = {name: getattr(args, f"fim_{name}_token") for name in extra}
    return built(num_samples, GPTFIMDataset, GPTFIMDatasetConfig, **given)


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    if isinstance(batch, list):
        (batch,) = ({name: each[None] for name, each in sample.items()} for sample in batch)
    tokens, labels, loss_mask, positions = (batch[name] for name in ("tokens", "labels", "loss_mask", "position_ids"))
    mask = None
    if "cu_seqlens" in batch:
        size = tokens.shape[1]
        number = torch.bucketize(torch.arange(size), batch["cu_seqlens"][0].unique(), right=True)
        mask = ((number[:, None] != number) | torch.ones(size, size).triu(1).bool())[None, None]
    return model(tokens, positions, mask, labels=labels), functools.partial(loss_func, loss_mask)


if __name__ == "__main__":
    write_gradients(Path(sys.argv.pop(1)), int(os.environ["RANK"]))
    provider.is_distributed = True
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    if args.use_varlen_dataset:  # what Megatron's validation and its data loader do for it
        args.sequence_packing_scheduler = "dp_balanced"
        torch.utils.data.DataLoader = functools.partial(torch.utils.data.DataLoader, collate_fn=list)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)

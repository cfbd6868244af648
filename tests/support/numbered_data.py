"""A script with a data set of its own, whose every token is its document's number."""

# Megatron's GPTDataset, which cuts documents at samples, or its SFTDataset, whose packed samples
# say by cu_seqlens where a conversation ends. On any Megatron that we train on.

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_balance.workloads.idx import CorpusWriter

Kind = Literal["script", "packed"]
# Tokens of the conversations of each line. All fit, however Megatron pads them.
PACKED = (300, 140, 40), (480,), (20, 7, 210, 64), (90,)


def write_joined(prefix: Path, lengths: Sequence[int], end: int) -> str:
    # A corpus of documents that the token `end` ends, each token before it the document's number.
    with CorpusWriter(prefix, "uint16") as writer:
        for number, length in enumerate(lengths):
            writer.add_document(np.append(np.full(length, number), end).astype(np.uint16))
    return str(prefix)


def write_packed(path: Path, num_lines: int) -> str:
    # A file of so many packed lines of conversations, numbered.
    lines: list[str] = []
    number = 0
    for at in range(num_lines):
        messages: list[dict[str, str]] = []
        for length in PACKED[at % len(PACKED)]:
            messages += [{"role": "system", "content": f"{number} 1"}]
            messages += [{"role": "assistant", "content": f"{number} {length - 1}"}]
            number += 1
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


class Numbers:
    # A tokenizer of conversations: what the system says is no target.
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eod, self.pad = vocab_size, vocab_size - 2, vocab_size - 1
        self.unique_identifiers = {"class": "Numbers"}

    def tokenize_conversation(self, conversation: list[dict[str, str]], **_: bool) -> tuple[Any, Any]:
        # Tokens and targets of a conversation.
        from megatron.training.datasets.sft_dataset import IGNORE_INDEX

        turns = [(turn["role"], *map(int, turn["content"].split())) for turn in conversation]
        tokens = [np.full(length, number) for _, number, length in turns]
        said = [np.full(length, number if role == "assistant" else IGNORE_INDEX) for role, number, length in turns]
        return np.concatenate(tokens), np.concatenate(said)


def provider(kind: Kind, num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
    # Megatron's data set provider, as a script has it.
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.datasets.sft_dataset import SFTDataset
    from megatron.training.utils import get_blend_and_blend_per_split

    class Conversations(SFTDataset):
        # Megatron's own, but for who reads the file.
        @staticmethod
        def build_low_level_dataset(dataset_path: str, config: Any) -> Any:  # noqa: ARG004  Megatron passes it
            return [json.loads(line)["messages"] for line in Path(dataset_path).read_text().splitlines()]

    args: Any = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    packed = kind == "packed"
    tokenizer: Any = Numbers(args.padded_vocab_size) if packed else build_tokenizer(args)
    given: dict[str, Any] = {"blend": blend, "blend_per_split": per_split, "split": args.split, "tokenizer": tokenizer}
    given |= {"random_seed": args.seed, "sequence_length": args.seq_length, "create_attention_mask": False}
    given |= dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), not packed)
    config = GPTDatasetConfig(**given, context_parallel_size=args.context_parallel_size)
    of_rank: Callable[[], bool] = lambda: mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    kind_of = Conversations if packed else GPTDataset
    return BlendedMegatronDatasetBuilder(kind_of, list(num_samples), of_rank, config).build()


def main(kind: Kind) -> None:
    # Train as our own entry does, on that data set.
    import torch
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.arguments import parse_and_validate_args

    from megatron_balance.megatron import entry, gpt
    from megatron_balance.megatron.flags import add_balance_arguments
    from megatron_balance.megatron.forward_step import forward_step

    args = parse_and_validate_args(extra_args_provider=add_balance_arguments)
    train: Any = pretrain
    config, model = gpt.start(train, args)
    given: Any = partial(provider, kind)
    given.is_distributed = True
    with entry.training(config):
        train(config, given, *model, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

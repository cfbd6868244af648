"""A script with a data set of its own, whose every token is its document's number, or of rollouts."""

# Megatron's GPTDataset, which cuts documents at samples, or its SFTDataset, whose packed samples
# say by cu_seqlens where a conversation ends. On any Megatron that we train on.

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from megatron_balance.ir.forest import Tree, document, num_tokens
from megatron_balance.workloads.idx import CorpusWriter
from megatron_balance.workloads.rollouts import as_trees

# Rollouts as trees, or each by itself; the weights of the first ones times `SCALE`.
Kind = Literal["script", "packed", "trees", "apart", "scaled"]
SCALE = -0.25
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


def rollouts_of(sample: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    # Of a sample, each rollout and what its tokens count: responses of a prompt, an agent that
    # branches twice, a lone one, and now and then padding alone.
    random = Random(sample)

    def words(most: int, least: int = 1) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(random.randint(least, most))]

    def counted(rollout: list[int], prompt: int) -> tuple[list[int], list[int]]:
        return rollout, [0] * prompt + [random.randint(0, 3) for _ in rollout[prompt:]]

    prompt, turn = words(60, 50), words(20, 15)
    branches = [turn + each for each in (words(9), words(9))]
    agents = [branch + words(9) for branch in branches for _ in range(2)]
    groups = [[counted(prompt + words(30), len(prompt)) for _ in range(4)]]
    groups += [[counted(each, 3) for each in agents], [counted(words(9, 2), 1)]]
    return [each for group in groups[: sample % 4] for each in group]


class RolloutSamples:
    # Samples of rollouts: as trees, or side by side.
    def __init__(self, kind: Kind, args: Any, num_samples: int) -> None:
        self.kind, self.args, self.num_samples = kind, args, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def sample_lengths(self, index: int) -> tuple[int, ...]:
        return tuple(map(num_tokens, self.sample_trees(index)))

    def sample_trees(self, index: int) -> tuple[Tree, ...]:
        rollouts = [tokens for tokens, _ in rollouts_of(index, self.args.vocab_size)]
        return tuple(document(len(each)) for each in rollouts) if self.kind == "apart" else as_trees(rollouts).trees

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        from megatron_balance.megatron.data import rollout_sample

        size, given = self.args.seq_length, rollouts_of(index, self.args.vocab_size)
        if self.kind != "apart":
            factor = SCALE if self.kind == "scaled" else 1
            weights = [[factor * weight for weight in weights] for _, weights in given]
            return rollout_sample([tokens for tokens, _ in given], weights, size)
        columns: dict[str, list[Any]] = {"tokens": [], "labels": [], "loss_mask": [], "position_ids": []}
        for tokens, weights in given:
            columns["tokens"] += tokens
            columns["labels"] += [*tokens[1:], 0]
            columns["loss_mask"] += [float(weight) for weight in weights[1:]] + [0.0]
            columns["position_ids"] += range(len(tokens))
        fill = {"tokens": 0, "labels": 0, "loss_mask": 0.0, "position_ids": -1}
        return {name: torch.tensor(each + [fill[name]] * (size - len(each))) for name, each in columns.items()}


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
    if kind in ("trees", "apart", "scaled"):
        return tuple(RolloutSamples(kind, args, number) if number else None for number in num_samples)
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

"""Megatron's own `pretrain` over documents of given lengths, with plans."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Documents(Dataset[dict[str, Tensor]]):
    """Sample i is step i's: its documents one after the other, of random tokens that depend on their
    lengths alone.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], vocabulary: int) -> None:
        """`lengths`: of the documents of each sample."""
        # Megatron looks at the device while it is imported, so not before that is known
        from megatron.core.datasets.utils import Split

        self.split = Split.train  # Megatron's samplers read it
        self._lengths, self._vocabulary = lengths, vocabulary

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens, labels, loss_mask and position_ids, each [tokens]; a document's last token has no
        label.
        """
        lengths = list(self._lengths[index])
        tokens = np.random.default_rng(lengths).integers(0, self._vocabulary, size=sum(lengths) + 1)
        loss_mask = np.ones(sum(lengths), dtype=np.float32)
        loss_mask[np.cumsum(lengths) - 1] = 0
        position_ids = np.concatenate([np.arange(length) for length in lengths])
        arrays = {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": loss_mask, "position_ids": position_ids}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def provider(documents: Documents) -> Callable[..., Any]:
    """Data sets as Megatron's `pretrain` asks for them."""

    def provide(*_: Any, **__: Any) -> tuple[Documents, None, None]:
        return documents, None, None

    provide.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    return provide


def pretrain_balanced(documents: Documents) -> None:
    """Train as the command line says; the target of `megatron.entry.run`."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_balance.megatron import entry
    from megatron_balance.megatron.flags import add_balance_arguments
    from megatron_balance.megatron.forward_step import forward_step

    args = parse_and_validate_args(extra_args_provider=add_balance_arguments)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    with entry.training(config):
        pretrain(config, provider(documents), ModelType.encoder_or_decoder, forward_step)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

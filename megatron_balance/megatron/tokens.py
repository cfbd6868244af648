"""A step's microbatches as this rank reads them, before they are planned.

Every replica's context-parallel rank 0 reads samples. With pipeline stages the first and the last
one read, each its own copy of the same samples; those between need lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_balance.megatron.data import unpack
from megatron_balance.training.sequences import Sequences


def job_device() -> torch.device:
    """The device of this rank's tensors.

    Asked of a tensor, since with `--balance-device cpu` those made on "cuda" are on the CPU.
    """
    return torch.empty(0, device="cuda").device


def read(
    data_iterator: Iterator[Mapping[str, torch.Tensor]], num_microbatches: int
) -> tuple[list[Sequences], Exception | None]:
    """The sequences of this rank's microbatches, on the host, or the error that prevented it."""
    microbatches: list[Sequences] = []
    try:
        for _ in range(num_microbatches):
            raw = next(data_iterator)
            microbatches.append(unpack({name: raw[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}))
    except Exception as error:  # raised again by share_lengths, on all ranks
        return [], error
    return microbatches, None

# type: ignore  # a script of Megatron's own functions, which nobody type-checks
"""Megatron alone on the samples of our data sets, document by document, with gradients written."""

# Its own model, attention, loss and schedule, on one rank: what a planned run is held against. The
# first argument is the folder of the gradients.

import functools
import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_balance.megatron.data import PADDING, make_provider
from tests.support.stand_in_pretrain_gpt import loss_func


def forward_step(data_iterator, model):
    # Losses of a sample whose documents are attended one by one.
    sample = next(data_iterator)
    tokens, labels, loss_mask, positions = (sample[name] for name in ("tokens", "labels", "loss_mask", "position_ids"))
    held = int((positions[0] != PADDING).sum())
    edges = [*torch.nonzero(positions[0, :held] == 0).flatten().tolist(), held]
    parts = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    losses = [model(tokens[:, part], positions[:, part], None, labels=labels[:, part]) for part in parts]
    return torch.cat(losses, dim=1), functools.partial(loss_func, loss_mask[:, :held])


def write_gradients(folder, rank=0):
    finalize, steps = training.finalize_model_grads, iter(range(1, 1000))

    @functools.wraps(finalize)
    def finalized(model, *args, **kwargs):
        result = finalize(model, *args, **kwargs)
        found = {name: each.main_grad.numpy() for name, each in model[0].named_parameters()}
        np.savez(folder / f"gradients.{next(steps)}.{rank}.npz", **found)
        return result

    training.finalize_model_grads = finalized


if __name__ == "__main__":
    write_gradients(Path(sys.argv.pop(1)))
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, make_provider("split", "next_fit"), ModelType.encoder_or_decoder, forward_step)

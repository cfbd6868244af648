"""Documents that a training run trains: labels that count towards a loss, by step, written by rank."""

# In a corpus whose document of number n holds nothing but the token n, a label names its document.

import functools
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from megatron_balance.workloads.idx import CorpusWriter


def write_numbered(prefix: Path, lengths: list[int]) -> str:
    # A corpus in which every token of a document is the document's number.
    with CorpusWriter(prefix, "uint16") as writer:
        for number, length in enumerate(lengths):
            writer.add_document(np.full(length, number, np.uint16))
    return str(prefix)


def install(folder: Path, rank: int) -> None:
    # Write the labels that this rank trains, from now on; of tensor-parallel ranks the first does.
    from megatron.core import mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.training import training

    from megatron_balance.megatron import forward_step, session

    labels: list[Any] = []
    counted: list[list[int]] = []
    microbatches = itertools.count()
    forward, loss, finalize = GPTModel.forward, forward_step.checked_loss, training.finalize_model_grads

    @functools.wraps(forward)
    def with_labels(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels[:] = [kwargs["labels"]] if self.training else []
        return forward(self, *args, **kwargs)

    @functools.wraps(loss)
    def counting(loss_mask: Any, losses: Any) -> Any:
        if labels and mpu.get_tensor_model_parallel_rank() == 0:
            at, mine = next(microbatches), labels.pop()[loss_mask > 0]
            numbers, counts = np.unique(mine.numpy(), return_counts=True)
            counted.extend([at, *each] for each in zip(numbers.tolist(), counts.tolist(), strict=True))
        return loss(loss_mask, losses)

    @functools.wraps(finalize)
    def finalized(*args: Any, **kwargs: Any) -> Any:
        step = session.current().args.curr_iteration + 1
        np.save(folder / f"trained.{step}.{rank}.npy", np.reshape(counted, (-1, 3)))
        counted.clear()
        return finalize(*args, **kwargs)

    GPTModel.forward, forward_step.checked_loss = with_labels, counting
    training.finalize_model_grads = finalized


def trained(folder: Path, steps: range) -> Counter[int]:
    # Labels that counted, by document, in some steps of a run.
    return sum(microbatches(folder, steps), Counter())


def microbatches(folder: Path, steps: range) -> list[Counter[int]]:
    # List the same of every microbatch of a rank, in the order in which it ran them.
    found: list[Counter[int]] = []
    for step in steps:
        files = sorted(folder.glob(f"trained.{step}.*.npy"))
        assert files, f"{folder}: nobody trained step {step}"
        for path in files:
            rows = np.load(path).tolist()
            for at in dict.fromkeys(row[0] for row in rows):
                found.append(Counter({number: labels for one, number, labels in rows if one == at}))
    return found

"""Train a Qwen 3 of Transformers in a loop of Accelerate's, balanced over all ranks.

On CPU:

    torchrun --standalone --nproc-per-node 4 scripts/examples/accelerate_loop.py

A small model with random weights; the documents are functions of the standard library, as bytes.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_balance.torch import SequenceBalancer, hf

CONFIG = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def documents() -> list[Tensor]:
    """Sources of functions, as bytes; 23 of them, so that ranks do not have as many."""
    sources = [inspect.getsource(each) for _, each in inspect.getmembers(shutil, inspect.isfunction)]
    return [torch.tensor(list(source.encode()[:1500])) for source in sources[:23]]


def main() -> None:
    """Train; the first rank prints losses of all ranks' documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help="documents of a rank in a step")
    parser.add_argument("--planner", default="zeppelin", help="see docs/planners.md")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    # even_batches, the default, would train documents of the last batch twice
    each_once = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=not options.gpu, dataloader_config=each_once)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=hf.register())  # balance
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data: Any = documents()
    loader = DataLoader(data, batch_size=options.batch, collate_fn=list)
    balancer = SequenceBalancer.for_model(model.config, options.planner)  # balance
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(options.epochs):
        for (batch,) in balancer.steps(loader):  # balance
            logits = model(**hf.inputs(batch)).logits[0]
            loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
            accelerator.backward(batch.mean_loss(loss))
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"loss {float(batch.global_loss(loss)):.6f}")


if __name__ == "__main__":
    main()

"""Train an unmodified Transformers Llama under FSDP2 on documents of different lengths; or a hybrid
model, a Qwen3-Next: three gated delta nets, then attention.

On CPU:

    torchrun --standalone --nproc-per-node 4 scripts/examples/hf_llama.py
    torchrun --standalone --nproc-per-node 4 scripts/examples/hf_llama.py --hybrid

A small model with random weights, whose outputs are asked first whether documents stay apart. Of each
document the loss of every token comes back to the rank that read it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3NextConfig
from transformers.utils import logging

from megatron_balance.torch import SequenceBalancer, Settings, hf

VOCABULARY = 128
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 192}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
DELTA_NETS: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA_NETS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


def loader(rank: int, steps: int) -> Iterator[list[Tensor]]:
    """This rank's documents, step by step: numbers that count up, a few long documents and many
    short ones.
    """
    draw = random.Random(rank)
    for _ in range(steps):
        lengths = [min(800, int(8 * draw.paretovariate(0.8))) for _ in range(5)]
        yield [(torch.arange(n) + draw.randrange(VOCABULARY)) % VOCABULARY for n in lengths]


def main() -> None:
    """Check, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--planner", default="zeppelin", help="see docs/planners.md")
    parser.add_argument("--hybrid", action="store_true", help="a model of attention and recurrent layers")
    options = parser.parse_args()

    logging.set_verbosity_error()  # every rank would say that it has no kernels of GPUs
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_cp",))
    torch.manual_seed(0)
    config = (
        Qwen3NextConfig(**SIZES, **HEADS, **DELTA_NETS, num_hidden_layers=4, head_dim=16, num_experts=0)
        if options.hybrid
        else LlamaConfig(**SIZES, **HEADS, num_hidden_layers=3)
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=hf.register())  # balance
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    settings = Settings(ranks_per_node=max(1, world // 2))  # as if there were two nodes
    balancer = SequenceBalancer.for_model(config, options.planner, mesh, settings=settings)  # balance
    found = hf.check(model, balancer)  # balance

    table = Table()
    for column in ("document", "tokens", "mean loss"):
        table.add_column(column, justify="right")
    of_documents: dict[int, Tensor] = {}
    bar = tqdm(total=options.steps, disable=rank != 0, unit="step")
    for (batch,) in balancer.steps(loader(rank, options.steps)):  # balance
        logits = model(**hf.inputs(batch)).logits[0]  # balance
        losses = F.cross_entropy(logits.float(), batch.labels, reduction="none")
        batch.mean_loss(losses.sum()).backward()  # balance
        optimizer.step()
        optimizer.zero_grad()
        loss = batch.global_loss(losses.sum())
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        bar.update()
        of_documents = dict(zip(batch.documents, balancer.gather(losses), strict=True))  # balance
    bar.close()
    if rank == 0:
        for number, of in of_documents.items():
            table.add_row(str(number), str(len(of)), f"{of.sum() / max(1, len(of) - 1):.3f}")
        print(f"{options.planner}, {world} ranks, hf.check: leak {found.leak}: rank 0's documents in the last step")
        Console().print(table)
    balancer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small GPT under FSDP2 on documents of different lengths, balanced.

On CPU:

    torchrun --standalone --nproc-per-node 4 scripts/examples/fsdp2_gpt.py

Every rank reads documents of its own. What a loop of your own needs is marked with "balance".
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from megatron_balance import Model
from megatron_balance.torch import BalancedBatch, SequenceBalancer, Settings, balanced_attention

HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS, VOCABULARY = 8, 2, 16, 128, 4, 256
LONGEST = 1024


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of x [T, heads, D]."""
    angles = positions[:, None, None] * 1e4 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


class Block(nn.Module):
    """Attention and MLP on rows [T, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, positions: Tensor, balanced: BalancedBatch) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(len(x), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        attended = balanced_attention(rotate(q, positions), rotate(k, positions), v, balanced)  # balance
        x = x + self.out(attended.flatten(1))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Logits [T, V] of rows of tokens [T]; every layer is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, position_ids: Tensor, balanced: BalancedBatch) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, position_ids, balanced, use_reentrant=False)
        return self.head(x)


def loader(rank: int, steps: int) -> Iterator[list[Tensor]]:
    """This rank's documents, step by step: pieces of the standard library's sources as bytes."""
    draw = random.Random(rank)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for _ in range(steps):
        documents: list[Tensor] = []
        for source in draw.sample(sources, 4):
            text = source.read_bytes()[: min(LONGEST, int(draw.lognormvariate(math.log(120), 1.2)) + 2)]
            documents += [torch.tensor(list(text))] if text else []
        yield documents


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--planner", default="zeppelin", help="see docs/planners.md")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_cp",))
    torch.manual_seed(0)
    model = Gpt()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    shape = Model(HEADS, KV_HEADS, HEAD_DIM, num_layers=LAYERS, hidden_size=WIDTH, ffn_size=4 * WIDTH)
    settings = Settings(ranks_per_node=max(1, world // 2))  # as if there were two nodes
    balancer = SequenceBalancer.for_model(shape, options.planner, mesh, settings=settings)  # balance

    bar = tqdm(total=options.steps, disable=rank != 0, unit="step")
    losses: list[float] = []
    spread: list[dict[str, dict[str, float]]] = []
    for (batch,) in balancer.steps(loader(rank, options.steps)):  # balance
        logits = model(batch.tokens, position_ids=batch.position_ids, balanced=batch)
        loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
        batch.mean_loss(loss).backward()  # balance
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(batch.global_loss(loss)))
        spread.append(batch.imbalance())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        bar.update()
    bar.close()
    if rank == 0:
        table = Table()
        for column in ("", "as read", "balanced"):
            table.add_column(column, justify="right" if column else "left")
        for name in ("tokens", "attention"):
            means = [sum(step[when][name] for step in spread) / len(spread) for when in ("as_read", "planned")]
            table.add_row(name, *(f"{mean:.2f}" for mean in means))
        print(f"{options.planner}, {world} ranks, {len(losses)} steps: largest load of a rank over the mean")
        Console().print(table)
        print(f"Loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last.")
    balancer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

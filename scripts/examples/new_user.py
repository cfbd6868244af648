"""The shortest balanced training: a model of your own, and under 20 lines beyond it.

On CPU:

    torchrun --standalone --nproc-per-node 4 scripts/examples/new_user.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_balance import Model
from megatron_balance.torch import BalancedBatch, SequenceBalancer, balanced_attention


class Tiny(nn.Module):
    """One layer of attention: logits [T, 64] of tokens [T]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(512, 32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, 64)

    def forward(self, tokens: Tensor, position_ids: Tensor, balanced: BalancedBatch) -> Tensor:
        x = self.tokens(tokens) + self.positions(position_ids)
        q, k, v = self.qkv(x).view(-1, 3, 4, 8).unbind(1)
        return self.head(x + balanced_attention(q, k, v, balanced).flatten(1))


# Beyond the model

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_cp",))
torch.manual_seed(0)
model = Tiny()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
balancer = SequenceBalancer.for_model(Model(num_heads=4, num_kv_heads=4, head_dim=8), planner="zeppelin", mesh=mesh)
for step in range(20):
    documents = [torch.arange(n) % 64 for n in (400 // (1 + dist.get_rank()), 7 + step)]  # this rank's own
    batch = balancer(documents)
    logits = model(batch.tokens, position_ids=batch.position_ids, balanced=batch)
    loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
    batch.mean_loss(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = batch.global_loss(loss)  # of all ranks
    print(f"step {step}, loss {mean:.3f}\n" if dist.get_rank() == 0 else "", end="")
dist.destroy_process_group()

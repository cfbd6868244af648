"""Balanced training in plain PyTorch: FSDP2, DDP, Transformers, torchtitan.

    balancer = SequenceBalancer.for_model(config, planner="zeppelin", mesh=mesh)
    for documents in loader:                      # of this rank
        batch = balancer(documents)
        logits = model(batch.tokens, position_ids=batch.position_ids, balanced=batch)
        loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum")
        batch.mean_loss(loss).backward()

In the model's layers `balanced_attention(q, k, v, batch)` takes the place of causal attention.
`megatron_balance.torch.hf` does that in Transformers' models. An adapter on `training`.
"""

from megatron_balance.torch.balancer import SequenceBalancer
from megatron_balance.torch.batch import BalancedBatch, balanced_attention, balanced_convolution, balanced_recurrence
from megatron_balance.torch.documents import Document
from megatron_balance.torch.losses import TokenLosses, token_losses
from megatron_balance.torch.settings import Settings, model_of
from megatron_balance.workloads.rollouts import IGNORED

__all__ = [
    "IGNORED",
    "BalancedBatch",
    "Document",
    "SequenceBalancer",
    "Settings",
    "TokenLosses",
    "balanced_attention",
    "balanced_convolution",
    "balanced_recurrence",
    "model_of",
    "token_losses",
]

"""Seconds of DeepSpeed's steps by data sheets: Ulysses in a replica, weights sharded over all GPUs.

Full microbatches go to the replicas in turn. A GPU has a part of the tokens in linear modules, and a
part of the heads in attention; four all-to-alls a layer change from one to the other, and four back.
Each layer's weights are gathered from all GPUs before its forward and again before its backward, and
its gradients scattered (ZeRO 3, which the paper does not say: assumed). That hides behind the layer,
or the layer behind it.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import num_parameters
from megatron_balance.cost.parallel import WEIGHT_BYTES, all_gather_s, all_to_all_s, group_of, reduce_scatter_s
from megatron_balance.lab.papers.hydraulis.cases import Lengths, TrainedCase, cluster_and_model, full


def deepspeed(job: TrainedCase, degree: int, batch: Lengths, *, recompute: bool) -> float:
    """Seconds of the slowest replica.

    Args:
        job: GPUs, and the tokens of a full microbatch.
        degree: GPUs of a replica, which Ulysses splits sequences over.
        batch: lengths of the step.
        recompute: whether activations are computed again in the backward pass.
    """
    packed, replicas = full(batch, job.longest), job.num_ranks // degree
    times = [_microbatch_s(job, degree, each, recompute=recompute) for each in packed]
    return max(sum(times[at::replicas]) for at in range(replicas))


def _microbatch_s(job: TrainedCase, degree: int, lengths: Lengths, *, recompute: bool) -> float:
    cluster, model = cluster_and_model(job.size)
    cost = AnalyticCost(cluster, model)
    node = cluster.node_size
    inside = group_of(cluster, degree, min(degree, node), busy_nics=True)
    everyone = group_of(cluster, job.num_ranks, min(job.num_ranks, node), busy_nics=True)
    tokens = sum(lengths) / degree
    heads, kv_heads = max(1, model.num_heads // degree), max(1, model.num_kv_heads // degree)
    pairs = np.array([[0, 0, n, 0, heads, 0, n, 0, kv_heads] for n in lengths], dtype=np.int64)
    once = np.zeros(len(pairs), dtype=np.int64)
    exchange_s = 2 * all_to_all_s(cost.query_bytes(tokens), inside)
    exchange_s += all_to_all_s(cost.kv_bytes(tokens), inside)
    shard = num_parameters(model) / model.num_layers / job.num_ranks
    gather_s = all_gather_s(WEIGHT_BYTES * shard, everyone)
    forward_s, backward_s = (
        float(cost.attend_s(pairs, once, 1, backward=backward)[0])
        + cost.layer_s(tokens, backward=backward)
        + exchange_s
        for backward in (False, True)
    )
    if recompute:
        backward_s += forward_s
    layer_s = max(forward_s, gather_s)
    layer_s += max(backward_s, gather_s + reduce_scatter_s(WEIGHT_BYTES * shard, everyone))
    return model.num_layers * layer_s + cost.head_s(tokens) + cost.head_s(tokens, backward=True)

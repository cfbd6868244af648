"""Appendix A: into how many shards a document may be cut before its keys no longer hide behind the
layers outside attention.
"""

from __future__ import annotations

from megatron_balance.ir.model import Model
from megatron_balance.lab.papers.base import Effort, Ours, table
from megatron_balance.lab.papers.distca.cases import DistcaCase
from megatron_balance.workloads.distributions import K

BYTES_PER_S = 50e9
MFU = 0.5
FLOPS_PER_S = 990e12


def bound(token_s: float, model: Model, kv_tensors: int) -> float:
    """The largest s for which l h_q + l h_kv (s + 1) / 2 travels within the time of l tokens.

    h_kv counts `kv_tensors` tensors.
    """
    size_q = model.num_heads * model.head_dim * model.bytes_per_element
    size_kv = kv_tensors * model.num_kv_heads * model.head_dim * model.bytes_per_element
    return 2 * (token_s * BYTES_PER_S - size_q) / size_kv - 1


def ours(_: Effort) -> Ours:
    """The printed bound, its formula with the printed numbers, and with keys and values both
    counted.
    """
    model = DistcaCase("34B", 8, 512 * K, 128 * K).model
    hidden, kv_hidden, inner = model.hidden_size, model.num_kv_heads * model.head_dim, model.ffn_size
    flops = 2.0 * hidden * (2 * hidden + kv_hidden + 3 * inner)
    both = 2.0 * hidden * (2 * hidden + 2 * kv_hidden + 3 * inner)
    token_s, both_s = (each / (MFU * FLOPS_PER_S) for each in (flops, both))
    yield "FLOPs of a token outside attention", flops
    yield "seconds of a token", token_s
    yield "shards, by the printed formula", bound(token_s, model, 1)
    yield "shards, keys and values both counted", bound(both_s, model, 2)


TABLE = table("distca", "appendixa", ours)

"""Appendix A: into how many shards a document may be cut before its keys no longer hide behind the
layers outside attention.
"""

from __future__ import annotations

from megatron_balance.ir.model import Model
from megatron_balance.papers.base import Effort, PaperTable, Row, published
from megatron_balance.papers.distca.cases import DistcaCase
from megatron_balance.workloads.distributions import K

BYTES_PER_S = 50e9
MFU = 0.5
FLOPS_PER_S = 990e12
FORMULA = ("bandwidth, MFU and FLOP/s",)
FLOPS, TOKEN_S, SHARDS = published(1320 * 2.0**20, 2.796e-6, 31)


def bound(token_s: float, model: Model, kv_tensors: int) -> float:
    """The largest s for which l h_q + l h_kv (s + 1) / 2 travels within the time of l tokens.

    h_kv counts `kv_tensors` tensors.
    """
    size_q = model.num_heads * model.head_dim * model.bytes_per_element
    size_kv = kv_tensors * model.num_kv_heads * model.head_dim * model.bytes_per_element
    return 2 * (token_s * BYTES_PER_S - size_q) / size_kv - 1


def rows(_: Effort) -> list[Row]:
    """The printed bound, its formula with the printed numbers, and with keys and values both
    counted.
    """
    case = DistcaCase("34B", 8, 512 * K, 128 * K)
    hidden, kv_hidden, inner = (
        case.model.hidden_size,
        case.model.num_kv_heads * case.model.head_dim,
        case.model.ffn_size,
    )
    flops = 2.0 * hidden * (2 * hidden + kv_hidden + 3 * inner)
    token_s = flops / (MFU * FLOPS_PER_S)
    both = 2.0 * hidden * (2 * hidden + 2 * kv_hidden + 3 * inner) / (MFU * FLOPS_PER_S)
    formula = "2 (t B - h_q) / h_kv - 1 with the printed numbers: t B = 139.8 KB, h_q = 16 KB, h_kv = 4 KB"
    return [
        Row(
            "FLOPs of a token outside attention",
            FLOPS,
            flops,
            "",
            "exact",
            note="key or value projection counted once",
        ),
        Row("seconds of a token", TOKEN_S, token_s, "s", "exact", inputs=FORMULA),
        Row(
            "shards, by the printed formula", SHARDS, bound(token_s, case.model, 1), "", "exact", "=", formula, FORMULA
        ),
        Row(
            "shards, keys and values both counted",
            SHARDS,
            bound(both, case.model, 2),
            "",
            "exact",
            note="4 KB are the keys alone",
            inputs=FORMULA,
        ),
    ]


TABLE = PaperTable("upper bound on the shards of a document (34B)", rows)

"""MaxLen: the most tokens that a microbatch may have under a parallel scheme (Hydraulis, arXiv
2412.07894, Appendix C.1).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_balance.analysis.memory import OPTIMIZER_BYTES, Holding, Sharding, rank_memory
from megatron_balance.cost.modules import num_parameters
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme

MARGIN = 0.1
"""Share of a GPU's memory that is left free."""

PROBE_TOKENS = 1024


def max_len(scheme: Scheme, model: Model, memory_bytes: float, num_ranks: int, margin: float = MARGIN) -> int:
    """Most tokens of a microbatch that the first and the last stage of a pipeline hold; 0 where the
    states alone do not fit.

    The optimizer's state is split over all `num_ranks` GPUs; weights and gradients are the stage's.
    The first stage holds the activations of PP microbatches, the last one those of one and its
    logits; with context parallelism, keys and values of one round and of the next. C.1 has one
    vocabulary table, two lie on a pipeline of one stage, and it has no logits.
    """
    return max(0, min(_stage_tokens(scheme, model, memory_bytes, num_ranks, margin, at) for at in _ends(scheme)))


def _ends(scheme: Scheme) -> set[int]:
    return {0, scheme.pipeline - 1}


def _stage_tokens(scheme: Scheme, model: Model, memory_bytes: float, num_ranks: int, margin: float, stage: int) -> int:
    sharding = Sharding(scheme.tensor, scheme.pipeline, stage)
    holding = Holding("replay", num_microbatches=scheme.pipeline)

    def used(tokens: float) -> float:
        own = tokens / scheme.context
        held = rank_memory(model, own, own if scheme.context > 1 else 0.0, sharding, holding)
        return replace(held, optimizer=OPTIMIZER_BYTES * num_parameters(model) / num_ranks).total

    empty = used(0.0)
    per_token = (used(float(PROBE_TOKENS)) - empty) / PROBE_TOKENS  # used bytes are linear in tokens
    return int(((1 - margin) * memory_bytes - empty) / per_token)

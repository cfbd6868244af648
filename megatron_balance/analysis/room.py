"""Tokens that a rank has room for: the inverse of `analysis.backward.step_bytes`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.analysis.backward import USABLE, MicrobatchBytes, Stage, step_bytes
from megatron_balance.analysis.layer_runs import Recompute as Again
from megatron_balance.analysis.memory import Recompute, Sharding
from megatron_balance.analysis.received import received_bytes
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan, Zone

PROBE_TOKENS = 1024
PROBE_RANKS = 16
"""Ranks of a ring from which on a replayed backward holds no more for another one."""


def stages_of(
    model: Model, num_ranks: int, *, recompute: Recompute = "none", pipeline: int = 1, chunks: int = 1, experts: int = 1
) -> list[Stage]:
    """The pipeline stages of a step, each over `num_ranks` ranks that share out the optimizer's state.

    `chunks`: model chunks of a stage; `experts`: ranks that share out the experts of a layer.
    """
    again = Again("uniform") if recompute == "full" else Again()
    return [
        Stage(
            model.num_layers // pipeline,
            Sharding(pipeline=pipeline, stage=at, optimizer=num_ranks, experts=experts),
            again,
            chunks,
        )
        for at in range(pipeline)
    ]


def most_tokens(
    model: Model, num_ranks: int, memory_bytes: float, stages: Sequence[Stage], num_microbatches: int = 1
) -> int:
    """Tokens of each microbatch that a rank of every stage holds within `USABLE` of its memory; less
    than 1 where the state alone does not fit.

    Every sequence goes round a ring of all ranks, and the backward receives keys and values again
    (policy replay), as `auto` does where memory is short.
    """
    probe = [_probe(model, num_ranks)] * num_microbatches
    found = [step_bytes(probe, model, stage) for stage in stages]
    # All but the state grows with the tokens.
    return min(
        int(PROBE_TOKENS * (USABLE * memory_bytes - each.state) / (float(each.peak(0).max()) - each.state))
        for each in found
    )


def _probe(model: Model, num_ranks: int) -> MicrobatchBytes:
    """Bytes of a microbatch of `PROBE_TOKENS` on each rank, one sequence around a ring of them all."""
    ranks = min(num_ranks, PROBE_RANKS)
    plan = MicrobatchPlan(
        "probe",
        (PROBE_TOKENS * ranks,),
        ranks,
        ranks,
        model.num_heads,
        model.num_kv_heads,
        (Zone("pool", "ring", tuple(range(ranks)), (0,)),),
    )
    return MicrobatchBytes(np.full(ranks, PROBE_TOKENS), received_bytes(plan, model))

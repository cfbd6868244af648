"""Routing by what shares a microbatch, over all ranks that share it."""

from __future__ import annotations

from megatron_balance.patches import Patch, read

_REPLACED = "a subclass (`megatron.router`) computes the same over the rows of all ranks; it relies on what this does"

SINKHORN = (
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.sinkhorn_load_balancing",
        wrap=read,
        reviewed={"8523b5da08b7": "0.19.x, 0.18.2, 0.20 of 2026-08, dev of 2026-08"},
        why=_REPLACED,
    ),
    Patch(
        target="megatron.core.transformer.moe.moe_utils:sinkhorn",
        wrap=read,
        reviewed={"36d8868d186c": "0.19.x, 0.18.2, 0.20 of 2026-08, dev of 2026-08"},
        why=_REPLACED,
    ),
)
BY_SAMPLE = (
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss",
        wrap=read,
        reviewed={"9d100b0c254e": "0.19.x, 0.20 of 2026-08", "0dbb1526bf54": "dev of 2026-08"},
        why=_REPLACED,
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.attach_and_log_load_balancing_loss",
        wrap=read,
        reviewed={"e983604d3ade": "0.19.x, 0.20 of 2026-08", "59d93e27c745": "dev of 2026-08"},
        why="it weights a rank's share of the loss by the tokens that it is told",
    ),
)
PATCHES = (*SINKHORN, *BY_SAMPLE)

"""Recomputation as Megatron's transformer configuration has it."""

from __future__ import annotations

from typing import Any

from megatron_balance.analysis.backward import Recompute


def recompute_of(config: Any) -> Recompute:
    """The forwards that a backward computes again under a `TransformerConfig`, or under the arguments
    that it is made of.

    Of `--recompute-granularity selective` only core attention matters here: other modules lie
    between attention calls.
    """
    if config.recompute_granularity == "full":
        what = "block" if config.recompute_method == "block" else "uniform"
        return Recompute(what, config.recompute_num_layers or 1)
    if config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ("core_attn",)):
        return Recompute("core_attention")
    return Recompute()

"""Seconds of one sequence under a parallel scheme, and the quadratic through them (Hydraulis, arXiv
2412.07894, Appendix C.2).

Hydraulis profiles each scheme <TP, PP, CP> on its cluster. Here the times to fit come from a cost
model of one rank, with the scheme's communication on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np

from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.fits import Quadratic, fit_quadratic
from megatron_balance.cost.parallel import stage_transfer_s, wide_ranks
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme

_RING_BACKWARD = 2
"""A ring's backward moves keys and values again, and their gradients."""


_FITTED = tuple(1 << power for power in range(8, 18))
"""Lengths in tokens through whose predicted times the quadratic of a scheme goes."""
_BEYOND = 4
"""Those longer than this many times the longest microbatch are left out, as long as three stay."""

_VOCAB_MULTIPLE = 128
"""Megatron pads a vocabulary to it (--make-vocab-size-divisible-by), times its own TP."""

_CostOf = Callable[[Cluster, int], MachineCost]
"""(cluster of wide ranks, tensor parallelism) -> its cost."""


def lengths_to_fit(max_tokens: int) -> list[int]:
    return [length for at, length in enumerate(_FITTED) if at < 3 or length <= _BEYOND * max_tokens]


def check_scheme(scheme: Scheme, model: Model, where: str = "") -> None:
    """Reject a scheme whose degrees do not divide a model's heads, padded vocabulary and layers.

    Raises:
        ConfigError: names what does not divide; `where`: what the sentence begins with.
    """
    for what, number, degree in (
        ("heads", model.num_heads, scheme.tensor),
        ("key-value heads (query groups)", model.num_kv_heads, scheme.tensor),
        ("layers", model.num_layers, scheme.pipeline),
    ):
        if number % degree:
            raise ConfigError(
                f"{where}{scheme} splits the {number} {what} of {model.name} {degree} ways; choose a divisor of "
                f"{number}"
            )
    padded = -(-model.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    if padded % scheme.tensor:
        raise ConfigError(
            f"{where}{scheme} splits the padded vocabulary of {model.name}, {padded} tokens, {scheme.tensor} ways; "
            f"choose a divisor of {padded}, or --make-vocab-size-divisible-by {scheme.tensor * _VOCAB_MULTIPLE}"
        )


def fit_scheme(scheme: Scheme, model: Model, cluster: Cluster, cost_of: _CostOf, lengths: Sequence[int]) -> Quadratic:
    """The quadratic through the predicted times of sequences of these lengths.

    Raises:
        ConfigError: fewer than three lengths, or a tensor parallelism that does not fit the
            cluster's nodes.
    """
    wide = wide_ranks(cluster, scheme.tensor)
    cost = cost_of(wide, scheme.tensor)
    return fit_quadratic(lengths, [sequence_s(scheme, model, wide, cost, length) for length in lengths])


def sequence_s(scheme: Scheme, model: Model, wide: Cluster, cost: MachineCost, length: int) -> float:
    """Seconds of the longest pipeline stage for one sequence as a microbatch, forward and backward.

    The stage is the last one, which has the logits. Context parallelism is a zigzag ring over the
    ranks of `wide`, each round's transfer hidden behind its attention or the other way round.
    """
    tokens = length / scheme.context
    rounds = scheme.context - 1
    link = cost.link(inter_node=scheme.context > wide.node_size)
    round_s = cost.call_s + link.time_s(cost.kv_bytes(tokens))
    layer_s = 0.0
    for backward in (False, True):
        ring_s = rounds * round_s * (_RING_BACKWARD if backward else 1)
        attention_s = _attention_s(scheme, model, cost, length, backward=backward)
        layer_s += max(attention_s, ring_s) + cost.layer_s(tokens, backward=backward)
    handed_on_s = 2 * stage_transfer_s(model, tokens, link) if scheme.pipeline > 1 else 0.0
    head_s = cost.head_s(tokens) + cost.head_s(tokens, backward=True)
    return model.num_layers / scheme.pipeline * layer_s + head_s + handed_on_s


def _attention_s(scheme: Scheme, model: Model, cost: MachineCost, length: int, *, backward: bool) -> float:
    """One layer's attention on one rank: the first and the last of 2 CP chunks, a launch a round."""
    heads = [0, model.num_heads], [0, model.num_kv_heads]
    chunk = ceil(length / (2 * scheme.context))
    queries = [(0, length)] if scheme.context == 1 else [(0, chunk), (length - chunk, length)]
    pairs = np.array(
        [[0, *query, *heads[0], 0, query[1], *heads[1]] for query in queries if query[0] >= 0], dtype=np.int64
    )
    launches_s = (scheme.context - 1) * cost.launch_s(1)
    return float(cost.attend_s(pairs, np.zeros(len(pairs), dtype=np.int64), 1, backward=backward)[0]) + launches_s

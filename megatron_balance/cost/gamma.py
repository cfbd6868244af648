"""KnapFormer's workload of a sequence (section 3.1): t = k (24 l d^2 + gamma 4 l^2 d), not causal.

`gamma` corrects attention's share of the FLOPs to its share of the time on one GPU; it is fitted to
measured latencies, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_balance.cost.base import CostModel, Floats
from megatron_balance.cost.fits import least_squares
from megatron_balance.ir.model import Model

GAMMA_H100_FLUX = 0.49
"""Table 1: "The estimated gamma = 0.49 on H100 GPUs", FLUX."""

GAMMA_H100_FLUX_FIGURE_2 = 0.385
"""Figure 2's estimate for the same model and GPU; the paper prints both."""


LENGTHS = (512, 2048, 8192, 32768)
"""Tokens of the sequences by which a cost model's gamma is fitted."""


def gamma_work(length: float, hidden_size: int, gamma: float) -> float:
    """Corrected FLOPs of one sequence in one block (Eq. 2 without k)."""
    return 24.0 * length * hidden_size**2 + gamma * 4.0 * length**2 * hidden_size


def fit_gamma(lengths: Sequence[float], seconds: Sequence[float], hidden_size: int) -> tuple[float, float]:
    """(gamma, k in seconds per FLOP) of least squares in relative error over measured (length,
    seconds).

    Raises:
        ConfigError: no times, or one that is not positive.
    """
    k, k_gamma = least_squares(
        [[24.0 * length * hidden_size**2, 4.0 * length**2 * hidden_size] for length in lengths],
        seconds,
        what="gamma",
        needed=(0,),
    )
    return k_gamma / k, k


def sequence_work(lengths: Floats, model: Model, gamma: float) -> Floats:
    """Corrected FLOPs of each sequence in one layer of `model`: Eq. 2 with the model's own FLOPs.

    For the paper's blocks (MHA, an MLP four times as wide, full attention) these are 24 l d^2 and
    4 l^2 d.
    """
    pairs = model.mask.num_pairs(lengths)
    return model.linear_flops_per_token * lengths + gamma * model.attention_flops_per_pair * pairs


def gamma_of(cost: CostModel, model: Model, lengths: Sequence[int] = LENGTHS) -> float:
    """Gamma of a cost model: least squares in relative error over its forward times at `lengths`."""
    mask = model.mask
    seconds = tuple(cost.linear_s(n) + cost.attention_s(mask.num_pairs(n), n) for n in lengths)
    linear, attention = model.linear_flops_per_token, model.attention_flops_per_pair
    return _ratio(tuple((linear * n, attention * mask.num_pairs(n)) for n in lengths), seconds)


@lru_cache(maxsize=8)  # a job asks for the same one in every step
def _ratio(flops: tuple[tuple[float, float], ...], seconds: tuple[float, ...]) -> float:
    k, k_gamma = least_squares(flops, seconds, what="gamma", needed=(0,))
    return k_gamma / k

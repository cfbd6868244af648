"""Uneven routing of tokens to experts: how many more visits the busiest rank gets than an even
share.

Ranks that share a layer's experts wait until all have computed, so the layer takes as long as the
busiest of them. Uneven are experts that all documents like (`shares`), and documents that like
other experts than the rest (`spread`): ranks with few documents then have other loads than the mean
of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_balance.cost.base import Floats
from megatron_balance.cost.modules import layer_modules
from megatron_balance.errors import ConfigError
from megatron_balance.ir.model import Model

_EXPERT_MODULE = "mlp"
"""The module of a layer (`cost.modules`) that experts are."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Routing of tokens to a layer's experts.

    `shares`: of all visits, by expert, summing to 1; empty: the same of each. `spread`: standard
    deviation of an even expert's share between documents, over its mean, as drawn: where a token
    visits several experts, large shares are cut afterwards. `seed`: of the documents' shares.
    """

    shares: tuple[float, ...] = ()
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not 0 <= share < inf for share in self.shares) or (self.shares and abs(sum(self.shares) - 1) > 1e-9):
            raise ConfigError(f"shares of experts {self.shares}: must be 0 or more and sum to 1")
        if not 0 <= self.spread < inf:
            raise ConfigError(f"spread of experts' shares {self.spread:g}: must be 0 or more")

    @staticmethod
    def counted(counts: Sequence[float], spread: float = 0.0) -> ExpertLoad:
        """The load of which these tokens were counted, by expert. Raises ConfigError of negative
        counts, or none above 0.
        """
        total = float(sum(counts))
        if not 0 < total < inf or any(count < 0 for count in counts):
            raise ConfigError(f"tokens counted of experts {list(counts)}: must be 0 or more, and one of them more")
        return ExpertLoad(tuple(count / total for count in counts), spread)

    def of_documents(self, count: int, model: Model) -> Floats:
        """Shares of the visits of each of `count` documents [count, num_experts], drawn from a
        Dirichlet distribution around the mean of all. A token visits `experts_per_token` different
        ones, so no share is more than one over that; what a draw has above goes to the other
        experts.

        Raises:
            ConfigError: shares of another number of experts, or larger than they can be; a spread
                that no documents have.
        """
        num_experts, most = model.num_experts, 1 / model.experts_per_token
        if self.shares and len(self.shares) != num_experts:
            raise ConfigError(f"shares of {len(self.shares)} experts; the model has {num_experts}")
        mean = np.array(self.shares or (1 / num_experts,) * num_experts)
        if mean.max() > most + 1e-9:
            raise ConfigError(
                f"an expert's share of {mean.max():.3g}: a token visits {model.experts_per_token} experts, so none has "
                f"more than {most:.3g}"
            )
        if not self.spread:
            return np.tile(mean, (count, 1))
        # Dirichlet(c x mean) spreads an even share by sqrt((E - 1) / (c + 1)); at the limit shares
        # are 0 or `most`.
        limit = np.sqrt(num_experts * most - 1)
        if self.spread > limit * (1 - 1e-9):
            raise ConfigError(
                f"spread of experts' shares {self.spread:g}: with {model.experts_per_token} of {num_experts} experts a "
                f"token it is below {limit:.3g}"
            )
        concentration = (num_experts - 1) / self.spread**2 - 1
        drawn = np.random.default_rng(self.seed).gamma(concentration * mean, size=(count, num_experts))
        return _capped(drawn / drawn.sum(axis=1, keepdims=True), most)

    def busiest(self, tokens: Floats, model: Model, ranks: int) -> Floats:
        """Visits of the busiest rank of each group, over the experts that a token visits: even
        routing has a group's tokens over its ranks, which each hold as many experts, in order.

        `tokens` [groups, documents]: on each group of ranks that share the experts; `ranks`: of a
        group.
        """
        visits = tokens @ self.of_documents(tokens.shape[1], model)
        return visits.reshape(len(tokens), ranks, -1).sum(axis=2).max(axis=1)


def _capped(shares: Floats, most: float) -> Floats:
    """Rows whose largest shares are `most`, the rest in the proportions they had."""
    full = np.zeros(shares.shape, dtype=bool)
    while (over := ~full & (shares > most + 1e-12)).any():
        full |= over
        rest = np.where(full, 0.0, shares)
        left = 1 - most * full.sum(axis=1, keepdims=True)
        total = rest.sum(axis=1, keepdims=True)
        shares = np.where(full, most, rest * np.divide(left, total, out=np.zeros_like(total), where=total > 0))
    return shares


def expert_part(model: Model) -> float:
    """The part of a layer's products outside attention that is counted with visits: its experts, the
    shared one with them.
    """
    flops = {module.name: module.flops for module in layer_modules(model)}
    return flops[_EXPERT_MODULE] / sum(flops.values())

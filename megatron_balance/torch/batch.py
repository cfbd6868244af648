"""The rows that this rank computes of a microbatch, with all that a training loop asks of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_balance
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import layout
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.mask import CAUSAL, Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime.bind import Bound
from megatron_balance.torch.exchange import back
from megatron_balance.training.figures import imbalance_after, imbalance_before
from megatron_balance.training.lengths import PoolLengths
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import TokenExchange

Bind = Callable[[MicrobatchPlan, torch.dtype, torch.device], Bound]


@dataclass(frozen=True, slots=True)
class LossScale:
    """Targets of a step, and the ranks over which gradients are averaged.

    `num_targets`: labels of all these ranks in all microbatches of the step that count; a scalar.
    `num_ranks`, `group`: of the average.
    """

    num_targets: Tensor
    num_ranks: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """A microbatch as it was planned and dealt.

    `lengths`: of its documents. `documents`: of those that this rank gave, their numbers
    (`BalancedBatch.documents`) and lengths.
    """

    plan: MicrobatchPlan
    lengths: PoolLengths
    documents: tuple[tuple[int, int], ...]
    pool: Pool
    model: Model

    def exchange(self) -> TokenExchange:
        """The way of its tokens alone."""
        return TokenExchange(self.lengths, [self.plan], self.pool)


class BalancedBatch:
    """One microbatch as this rank computes it.

    Its rows are pieces of documents, of whatever rank gave them, one behind the other. A rank that
    gets none has a row of padding, since it takes part in every collective of a layer.

    Attributes:
        tokens: int64 [T].
        position_ids: int64 [T], of each token in its document.
        labels: int64 [T], -100 where a token has none, as the last of a document, and padding.
        others: the other tensors [T, ...] of the documents.
        num_tokens: rows of documents; those behind them are padding.
        plan: the plan of the microbatch, for all ranks.
        documents: numbers of the documents that this rank gave, in the order of `gather`. A rank's
            documents count from 0 over all steps; a planner may bring them in another microbatch or
            a later step.
        accept: of the balancer.
    """

    def __init__(  # noqa: PLR0913  the balancer alone makes it
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        others: tuple[Tensor, ...],
        *,
        dealt: Dealt,
        loss_scale: LossScale,
        bind: Bind,
        accept: Collection[str] = (),
    ) -> None:
        self.tokens = tokens
        self.position_ids = position_ids
        self.labels = labels
        self.others = others
        self.num_tokens = sum(stop - start for _, start, stop in layout(dealt.plan, dealt.pool.rank).tolist())
        self.plan = dealt.plan
        self.documents = tuple(number for number, _ in dealt.documents)
        self._dealt = dealt
        self._scale = loss_scale
        self._bind = bind
        self.accept = accept
        self._bounds: dict[tuple[torch.dtype, torch.device, Mask], Bound] = {}

    def __repr__(self) -> str:
        return (
            f"BalancedBatch({self.num_tokens} tokens of {self.plan.num_tokens} in {len(self.plan.lengths)} documents, "
            f"{self.plan.planner})"
        )

    @property
    def num_rows(self) -> int:
        """T: tokens and padding."""
        return len(self.tokens)

    @property
    def num_targets(self) -> Tensor:
        """Labels of the whole step, of all ranks, that count; a scalar."""
        return self._scale.num_targets

    def mean_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on: its gradients are those of the mean over all targets of
        the step.

        FSDP and DDP average gradients over ranks; the factor here undoes that. With several
        microbatches in a step, gradients are added up as always.

        Args:
            loss: the sum over this rank's targets (`reduction="sum"`), a scalar.

        Raises:
            ConfigError: not a scalar.
        """
        _check_scalar(loss)
        targets = self._scale.num_targets.clamp(min=1)
        return loss * (self._scale.num_ranks / targets).to(loss.dtype)

    def global_loss(self, loss: Tensor) -> Tensor:
        """The share of this microbatch in the step's mean loss over all ranks, to log. Collective.

        `loss` and errors as for `mean_loss`. The sum over a step's microbatches is the step's mean
        loss.
        """
        _check_scalar(loss)
        total = loss.detach().double()
        if self._scale.num_ranks > 1:
            dist.all_reduce(total, group=self._scale.group)
        return total / self._scale.num_targets.clamp(min=1)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Per-token results [n, ...] of each of `documents`, back on the rank that gave them.

        Collective over the pool. For a loss on them take `gather_rows`.

        Args:
            values: [T, ...] or [1, T, ...], in the order of `tokens`, of one dtype on all ranks.

        Raises:
            ConfigError: values of another number of rows.
        """
        return list(self.gather_rows(values).split([length for _, length in self._dealt.documents]))

    def gather_rows(self, values: Tensor) -> Tensor:
        """As `gather`, the documents one behind the other in one tensor, with a gradient.

        The backward is collective too, so every rank calls it, one that gave no document on the sum
        of its empty tensor.
        """
        if not isinstance(values, Tensor):
            raise ConfigError(f"expected a tensor with one entry for each row, got {type(values).__name__}")
        rows = values
        if rows.ndim and len(rows) != self.num_rows and len(rows) == 1:
            rows = rows[0]
        if not rows.ndim or len(rows) != self.num_rows:
            raise ConfigError(f"expected one entry for each of {self.num_rows} rows, got {list(values.shape)}")
        return back(rows[: self.num_tokens], self._exchange)

    @cached_property
    def _exchange(self) -> TokenExchange:
        return self._dealt.exchange()

    def layout(self, rank: int | None = None) -> Ints:
        """Where tokens lie: rows (document, start, stop) of a rank of the pool, in order.

        `rank`: default this one. `document`: its number in the microbatch of all ranks, an index of
        `plan.lengths`.

        Raises:
            ConfigError: the pool has no such rank.
        """
        return megatron_balance.layout(self.plan, self._dealt.pool.rank if rank is None else rank)

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """Loads and traffic of the plan, as `megatron-balance plan --json` has them."""
        return plan_statistics(self.plan, self._dealt.model)

    def imbalance(self) -> dict[str, dict[str, float]]:
        """Largest load of a rank over the mean, of `tokens` and of `attention` pairs; 1 is even.

        `as_read`: if every rank had kept its documents; `planned`: as they are dealt.
        """
        loads = {"tokens": "tokens_per_rank", "attention": "attention_pairs_per_rank"}
        return {
            "as_read": imbalance_before(self._dealt.lengths, self._dealt.pool),
            "planned": {
                name: imbalance_after(np.array([self.statistics[key]], dtype=np.float64)) for name, key in loads.items()
            },
        }

    def bound(self, dtype: torch.dtype, device: torch.device, mask: Mask | None = None) -> Bound:
        """The plan looked up for this rank, for tensors of this type; made at the first call.

        `mask`: of the layer; None: that of the plan.

        Raises:
            ConfigError: the plan was made for another mask, and not for the causal one.
        """
        plan = self.plan
        if mask is not None and mask != plan.mask:
            if plan.mask != CAUSAL:
                raise ConfigError(
                    f"a layer attends under mask {mask.name}, and the batch was planned for {plan.mask.name} attention"
                    "; leave out Settings.mask, or give every layer that mask"
                )
            plan = under(plan, mask)
        key = (dtype, device, plan.mask)
        if key not in self._bounds:
            self._bounds[key] = self._bind(plan, dtype, device)
        return self._bounds[key]


def _check_scalar(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        got = f"{list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f'expected the sum over this rank\'s targets, a scalar tensor (reduction="sum"), got {got}')

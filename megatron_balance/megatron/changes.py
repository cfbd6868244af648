"""From one strategy to another inside one training run: this rank's roles beside Megatron's own model,
and the base layout's weights, whose all-gather waits until that model needs them
([0024](../../docs/adr/0024-weights-move-optimizer-stays.md)).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_balance.analysis.change import change
from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Strategy
from megatron_balance.megatron.arguments import role_row_multiple
from megatron_balance.megatron.base_layout import base_layout, optimizers_of
from megatron_balance.megatron.groups import tensor_parallel
from megatron_balance.megatron.own_weights import OwnWeights
from megatron_balance.megatron.place import RankPlace
from megatron_balance.megatron.roles import AttentionGroups, Role, Roles, WeightMovement
from megatron_balance.training.pool import StrategyRanks, TensorParallel
from megatron_balance.training.weights import Apart

if TYPE_CHECKING:
    from megatron_balance.megatron.session import Session

log = logging.getLogger(__name__)


class Changes:
    """The roles of this rank under every candidate, and the base layout that owns weights and
    gradients.
    """

    def __init__(self, job: Session, model: list[Any], optimizer: Any, model_config: Any) -> None:
        """Make all roles. Collective over the world, when Megatron has built model and optimizer.

        Raises:
            ConfigError: a Megatron whose all-gather cannot be put off, or whose layout or model is
                not one that strategies know.
        """
        self._job, self._model = job, model
        if not hasattr(model_config, "get_builder_cls"):
            raise ConfigError(
                "strategies: roles are built from a model config, which Megatron-core has since 0.19; use that, or "
                "leave strategies out"
            )
        layouts = job.layouts
        assert layouts is not None, "changes are made where there are other strategies than the layout"
        layout = base_layout(model, optimizer, job.layout.pipelines[0])
        buckets = len(layout.base.buffers[0].buckets) - 1  # later stages always have one
        if layouts.overlap and layout.base.num_shards > 1 and buckets == 1:
            log.warning(
                "strategies: all weights of the first stage are in one bucket, so that few ranks own a layer, and "
                "layers are pulled and pushed from few NICs at a time; use --overlap-grad-reduce, with a "
                "--ddp-bucket-size of about a layer (docs/hydraulis.md)"
            )
        config, communication = job.config, job.config.communication
        timeout = timedelta(minutes=job.args.distributed_timeout_minutes)
        others = [each for each in job.candidates if each != job.layout]
        attention = AttentionGroups(job.gpus_per_node, timeout, communication.sms, safe=communication.safe)
        gpus, overlap = job.gpus(), layouts.overlap
        moved = {each: change(layouts.base, each, job.model(1), gpus) for each in others}
        apart = {
            each: Apart(overlap, job.gpus_per_node if found.traffic.handed_on else None)
            for each, found in moved.items()
        }
        self.roles = Roles(model_config, layout, others, timeout, attention, WeightMovement(apart, overlap))
        for role in self.roles:
            if role.model is not None:
                job.adapt(role.model)
        for each in optimizers_of(optimizer):
            each._defer_param_sync = True
        ddp = model[0].ddp_config
        self._checks = ddp.check_for_nan_in_grad, ddp.check_for_large_grads
        registered = getattr(ddp, "nccl_ub", False)
        stay = bool(getattr(job.args, "async_save", False) or registered)
        self.own_weights = OwnWeights(model, optimizers_of(optimizer), stay=stay)
        self.weights_are_old = False
        """Whether Megatron's own model has older weights than the optimizer."""
        traffic = self.roles.traffic(job.gpus_per_node)
        self._predicted = {
            strategy: dataclasses.replace(each, handed_on=moved[strategy].traffic.handed_on).described(gpus)
            for strategy, each in traffic.items()
        }
        log.info(
            "strategies: %s; weights and gradients of a role take %.1f MB on this rank, of the largest; backward: %s",
            *(", ".join(map(str, job.candidates)), self.roles.num_bytes / 1e6, config.backward),
        )

    def place(self, strategy: Strategy) -> RankPlace | None:
        """This rank's place under a strategy; None: it is left over."""
        role = self.roles[strategy]
        if role.seat is None:
            return None
        assert role.attention is not None, "every seat has ranks that it attends with"
        tensor = role.seat.scheme.tensor
        return RankPlace(
            role.seat.pipeline,
            role.attention,
            self._job.shape_of(tensor),
            role_row_multiple(self._job.args, tensor),
        )

    def ranks(self, strategy: Strategy) -> StrategyRanks:
        """All ranks as the tokens of a step find them; those that read are of the base layout."""
        return StrategyRanks(self.roles.everyone, strategy, tuple(self.owner_ranks))

    @property
    def owner_ranks(self) -> list[int]:
        """By rank of the base layout's pool, the global rank that reads its sequences: on the first
        stage, of TP rank 0.
        """
        pool, parallel = self._job.pool, tensor_parallel()
        assert parallel.group is not None
        return [rank - parallel.group.rank() for rank in pool.joint.ranks[: pool.size]]

    def tensor_parallel(self, role: Role) -> TensorParallel:
        """Ranks that compute the same tokens in a role."""
        if role.seat is None or role.seat.scheme.tensor == 1:
            return TensorParallel()
        return TensorParallel(role.groups.tp, dist.get_rank() - role.seat.tensor)

    def begin(self, strategy: Strategy) -> Role:
        """The role of this rank in a step, with today's weights. Collective over the world.

        Gradients of the base layout give their memory back until they are pushed, and weights until
        they are gathered.
        """
        self.own_weights.give_back()
        for chunk in self._model:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        role = self.roles.pull(strategy)
        if role.model is not None:
            # `train` sets it on its own model's config alone, when roles are made already.
            get_model_config(role.model).grad_scale_func = get_model_config(self._model[0]).grad_scale_func
        return role

    def expect(self, num_microbatches: int) -> None:
        """Push the gradients of so many microbatches as they come; owners' buffers get their memory
        back when the first ones are issued.
        """
        self.roles.expect(num_microbatches, self._restore)

    def end(self, num_tokens: torch.Tensor) -> None:
        """Bring the role's gradients to the owners' buffers, a mean over the step's tokens.
        Collective over the world.
        """
        self.roles.push()
        with self.roles.stopwatch.measured("push"):
            scale = 1.0 / num_tokens.clamp(min=1).float()
            for gradient in self.roles.layout.gradients.values():
                gradient.mul_(scale)
        self._check_gradients()
        self.weights_are_old = True

    def _check_gradients(self) -> None:
        """Run the checks of Megatron's own reduction, which roles do not have, on what this rank owns.

        They replay the step, or end the job, where a gradient is not a number or leaps.
        """
        nan, large = self._checks
        if not (nan or large):
            return
        for chunk in self._model:
            for group in chunk.bucket_groups:
                group.check_grads(nan, large)

    def _restore(self) -> None:
        for chunk in self._model:
            chunk.restore_grad_buffers(synchronize=False)

    def gather_weights(self, *, for_step: bool = False) -> None:
        """Bring today's weights to Megatron's own model, unless it has them. Collective over the
        world.

        `for_step`: a training step on that model, behind which they are old again.
        """
        if self.weights_are_old:
            self.own_weights.restore()
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)
        self.weights_are_old = for_step

    def figures(self, strategy: Strategy) -> Mapping[str, Any]:
        """Bytes and seconds of the last pull and push, as a step's record has them. Waits for the
        device.
        """
        return {**self._predicted[strategy], **self.roles.stopwatch.seconds()}

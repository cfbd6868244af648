"""Training steps under other strategies than the command line's: this rank's roles beside
Megatron's own model, and the base layout that owns weights and gradients (docs/adr/0024).

`Session.changes` is the seam; a run with one strategy imports nothing of this room and of `roles`.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_timers

from megatron_balance.analysis.change import change
from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Strategy
from megatron_balance.megatron import flags, roles
from megatron_balance.megatron.data import NUM_COLUMNS
from megatron_balance.megatron.forward_step import LOSS, Microbatches, forward_step
from megatron_balance.megatron.groups import job_device, tensor_parallel
from megatron_balance.megatron.session import RankPlace, Session
from megatron_balance.megatron.stages import Crossings, PlannedTransfers, StageShapes
from megatron_balance.training.plans import PlannedStep
from megatron_balance.training.pool import StrategyRanks, TensorParallel
from megatron_balance.training.tokens import LocalMicrobatch, PoolLengths, Sequences, TokenExchange
from megatron_balance.training.weights import Apart

log = logging.getLogger(__name__)


class Changes:
    """This rank's roles under every candidate, and the base layout, which owns the weights."""

    # Their all-gather waits until Megatron's own model needs them.

    def __init__(self, job: Session, model: list[Any], optimizer: Any, model_config: Any) -> None:
        """Make all roles, when Megatron has built model and optimizer. Collective over the world.
        ConfigError: a Megatron whose all-gather cannot be put off, or a layout or model unknown to
        strategies.
        """
        self._job, self._model = job, model
        if not hasattr(model_config, "get_builder_cls"):
            raise ConfigError(
                "strategies: roles are built from a model config, which Megatron-core has since 0.19; use that, or "
                "leave strategies out"
            )
        layouts = job.layouts
        assert layouts is not None, "changes are made where there are other strategies than the layout"
        layout = roles.base_layout(model, optimizer, job.layout.pipelines[0])
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
        attention = roles.AttentionGroups(job.gpus_per_node, timeout, communication.sms, safe=communication.safe)
        gpus, overlap = job.gpus(), layouts.overlap
        moved = {each: change(layouts.base, each, job.model(1), gpus) for each in others}
        apart = {
            each: Apart(overlap, job.gpus_per_node if found.traffic.handed_on else None)
            for each, found in moved.items()
        }
        self.roles = roles.Roles(model_config, layout, others, timeout, attention, apart=apart, overlap=overlap)
        for role in self.roles:
            if role.model is not None:
                job.adapt(role.model)
        # `step_with_ready_grads` gathers no weights then (patches/training_loop.py pins its source).
        for each in roles.optimizers_of(optimizer):
            each._defer_param_sync = True
        ddp = model[0].ddp_config
        self._checks = ddp.check_for_nan_in_grad, ddp.check_for_large_grads
        registered = getattr(ddp, "nccl_ub", False)
        stay = bool(getattr(job.args, "async_save", False) or registered)
        self.own_weights = _OwnWeights(model, roles.optimizers_of(optimizer), stay=stay)
        self._weights_are_old = False  # whether Megatron's own model has older weights than the optimizer
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
        multiple = flags.row_multiple(self._job.args, tensor)
        return RankPlace(role.seat.pipeline, role.attention, self._job.shape_of(tensor), multiple)

    def run(
        self, planned: PlannedStep, shared: PoolLengths, mine: Sequence[Sequences], apart: PoolLengths
    ) -> list[Mapping[str, torch.Tensor]]:
        """Pull weights, run this rank's role, push gradients. Collective over the world. `mine`,
        `apart`: what this rank and the base layout's pool have read, a microbatch for each
        nano-batch.

        Returns, for each microbatch, what Megatron reports of it: on the base layout's last stage
        one, of the whole step on its first rank.
        """
        job, strategy = self._job, planned.step.strategy
        assert strategy is not None, "a step without strategy runs on the base layout"
        timers: Any = get_timers()
        timers("forward-backward", log_level=1).start(barrier=job.args.barrier_with_L1_time)
        job.keeping().decide(planned)  # with all ranks, those that are left over included
        role = self._pull(strategy)
        own = () if role.seat is None else planned.own_plans_of(role.seat.pipeline)
        self.roles.moves.expect(len(own), self._restore_gradients)
        exchange, rows = self._tokens(role, planned, mine, apart)
        place = self.place(strategy)
        stored: list[Any] = []
        if place is None:
            job.steps.ran(planned, shared, [])
        else:

            def local(index: int) -> LocalMicrobatch:
                return exchange.local(rows, own[index], place.row_multiple)

            config: Any = get_model_config(role.model)
            counts = [[exchange.counts[at] for at in of] for of in own]
            shapes = StageShapes.of_step(counts, place.row_multiple, config)
            microbatches = Microbatches(job, planned, local, own, forward_only=False)
            stored = role.schedule(_transfers(role, config, shapes))(
                forward_step_func=forward_step,
                data_iterator=microbatches.of_chunk(),
                num_microbatches=len(own),
                seq_length=job.args.seq_length,
                micro_batch_size=job.args.micro_batch_size,
            )
            microbatches.trained(shared)
        # Before `_summed`, which all ranks call: two ranks issue the calls of one group in one order.
        self.roles.moves.issue_rest()
        reported = self._summed(role, stored)
        self._push(reported[1])
        timers("forward-backward").stop()
        job.steps.changed(lambda: {**self._predicted[strategy], **self.roles.stopwatch.seconds()})
        if job.pool.stage != job.pool.num_stages - 1:
            return []
        return [{LOSS: (reported if job.pool.rank == 0 else torch.zeros_like(reported)).float()}]

    def gather_weights(self, *, for_step: bool = False) -> None:
        """Bring today's weights to Megatron's own model, unless it has them. Collective over the
        world. `for_step`: a training step on that model, behind which they are old again.
        """
        if self._weights_are_old:
            self.own_weights.restore()
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)
        self._weights_are_old = for_step

    def close(self) -> None:
        """Start no exchange any more."""
        self.roles.close()

    def _pull(self, strategy: Strategy) -> roles.Role:
        """The role of this rank in a step, with today's weights. Collective over the world."""
        # The base layout's gradients give their memory back until they are pushed, weights until
        # they are gathered.
        self.own_weights.give_back()
        for chunk in self._model:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        role = self.roles.pull(strategy)
        if role.model is not None:
            # `train` sets it on its own model's config alone, when roles are made already.
            get_model_config(role.model).grad_scale_func = get_model_config(self._model[0]).grad_scale_func
        return role

    def _restore_gradients(self) -> None:
        for chunk in self._model:
            chunk.restore_grad_buffers(synchronize=False)

    def _push(self, num_tokens: torch.Tensor) -> None:
        """Bring the role's gradients to their owners, a mean over the step's tokens. Collective."""
        self.roles.push()
        with self.roles.stopwatch.measured("push"):
            scale = 1.0 / num_tokens.clamp(min=1).float()
            for gradient in self.roles.layout.gradients.values():
                gradient.mul_(scale)
        nan, large = self._checks
        if nan or large:
            # Megatron's own reduction runs them, which roles do not have. They replay the step, or end
            # the job, where a gradient of what this rank owns is not a number or leaps.
            for group in (group for chunk in self._model for group in chunk.bucket_groups):
                group.check_grads(nan, large)
        self._weights_are_old = True

    def _tokens(
        self, role: roles.Role, planned: PlannedStep, mine: Sequence[Sequences], apart: PoolLengths
    ) -> tuple[TokenExchange, list[torch.Tensor]]:
        """The rows of this rank, straight from the ranks of the base layout that read them."""
        pool, parallel = self._job.pool, tensor_parallel()
        assert parallel.group is not None
        # By rank of the base layout's pool, the global rank that reads its sequences: on the first
        # stage, whose ranks stand first in the joint pool, of TP rank 0 (TP ranks are neighbours).
        readers = np.array(pool.joint.ranks[: pool.size], dtype=np.int64) - parallel.group.rank()
        everywhere = PoolLengths(apart.lengths, tuple(readers[owners] for owners in apart.owners))
        ranks = StrategyRanks(self.roles.everyone, role.strategy, tuple(readers.tolist()))
        exchange = TokenExchange(everywhere, planned.plans, ranks, planned.step.pipeline_of)
        peers = TensorParallel()
        if role.seat is not None and role.seat.scheme.tensor > 1:
            peers = TensorParallel(role.groups.tp, dist.get_rank() - role.seat.tensor)
        return exchange, exchange.to_ranks(mine if ranks.reads else (), NUM_COLUMNS, peers, job_device())

    def _summed(self, role: roles.Role, stored: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """The step's loss, summed over tokens, and its tokens [2] float64. Collective (world)."""
        # A pipeline's last stage knows them, each context-parallel rank its part; of TP ranks,
        # which have the same, the first one counts.
        found = torch.zeros(2, dtype=torch.float64, device=job_device())
        if role.seat is not None and role.seat.tensor == 0:
            for each in chain.from_iterable(one.values() for one in stored):
                found += each.double()
        dist.all_reduce(found, group=self.roles.everyone.pool)
        return found


def _transfers(role: roles.Role, config: Any, shapes: StageShapes) -> PlannedTransfers | None:
    """Transfers between the role's stages; None where there is one."""
    assert role.seat is not None
    stages = role.seat.scheme.pipeline
    if stages == 1:
        return None
    crossings = Crossings.of_schedule(len(shapes.rows), role.seat.stage, stages, 1, stages)
    return PlannedTransfers(role.groups.pp, config, shapes, crossings)


class _OwnWeights:
    """Flat buffers of weights of Megatron's own model, which give memory back while roles compute."""

    # In bf16 training they are copies of the optimizer's fp32 ones, made again before the model
    # runs; in fp32 they are the optimizer's own, and stay.

    def __init__(self, model: Sequence[Any], optimizers: Sequence[Any], *, stay: bool) -> None:
        """Leave them where they are. `stay`: others read them any time (asynchronous checkpoint)."""
        buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._data: list[torch.Tensor] = []
        self._copies: list[Callable[[], None]] = []
        self._given_back = False
        if stay or any(buffer.param_data is None or buffer.param_data.dtype == torch.float32 for buffer in buffers):
            return
        self._data = [buffer.param_data for buffer in buffers]
        self._sizes = [data.untyped_storage().nbytes() for data in self._data]
        for each in optimizers:
            self._copies.append(each._copy_main_params_to_model_params)
            each._copy_main_params_to_model_params = functools.partial(self._copy, self._copies[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes that they take now, of those that can be given back."""
        return sum(data.untyped_storage().nbytes() for data in self._data)

    def give_back(self) -> None:
        """Give their memory back. What the model has of weights is lost."""
        for data in self._data:
            data.untyped_storage().resize_(0)
        self._given_back = bool(self._data)

    def restore(self) -> None:
        """Bring this rank's part of today's weights back, if given back; an all-gather the rest."""
        if not self._given_back:
            return
        self._given_back = False
        for data, size in zip(self._data, self._sizes, strict=True):
            data.untyped_storage().resize_(size)
        for copy in self._copies:
            copy()

    def _copy(self, copy: Callable[[], None]) -> None:
        """Copy the optimizer's weights after a step, if there is memory to copy them to."""
        if not self._given_back:
            copy()

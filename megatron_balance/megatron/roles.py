"""Roles: what this rank is in each strategy, its pipeline's process groups, its part of the model,
and the memory that all roles share; and the base layout that owns weights (docs/adr/0024).

Source: Hydraulis, arXiv 2412.07894, section 5. `parallel_state` keeps speaking of the base layout;
a role's model and schedule have their groups given.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, unwrap_model

from megatron_balance.analysis.link import WeightTraffic, slots_of
from megatron_balance.analysis.shards import Base, Buffer, Parameter, ParameterTable, Shard, held
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, sums
from megatron_balance.ir.strategy import Scheme, Seat, Strategy
from megatron_balance.megatron.groups import job_device
from megatron_balance.runtime.groups import Groups, make_groups
from megatron_balance.runtime.pool import BufferPool
from megatron_balance.training.weights import Apart, Flat, Lane, Moves, RoleMemory, Stopwatch, WeightExchange

ALIGNED = 128
# Megatron's groups of one pipeline without replicas and experts: the dimensions that each spans.
AXES: dict[str, str] = {
    **{name: name for name in ("tp", "cp", "pp")},
    "mp": "tp pp",
    "tp_cp": "tp cp",
    "tp_dp_cp": "tp cp",
    "dp_cp": "cp",
    "expt_dp": "tp cp",
    **dict.fromkeys(("dp", "ep", "expt_tp", "tp_ep", "pos_embd"), ""),
    "tp_ep_pp": "pp",
}

NOTHING_HELD = RoleMemory({}, {}, {}, first=False)


@dataclass(frozen=True, slots=True)
class Role:
    """This rank in one strategy; left over, it has an exchange alone. `attention`: whom with."""

    strategy: Strategy
    seat: Seat | None
    exchange: WeightExchange
    groups: Any = None
    attention: Groups | None = None
    model: Any = None
    memory: RoleMemory = NOTHING_HELD

    def schedule(self, transfers: P2PCommunicator | None = None) -> Callable[..., Any]:
        """Megatron's schedule, given the role's model. `transfers`: if not Megatron's own."""
        assert self.seat is not None, "a rank that is left over runs no microbatch"
        given = {"model": self.model, "pg_collection": self.groups}
        if self.seat.scheme.pipeline == 1:
            return functools.partial(forward_backward_no_pipelining, **given)
        between = transfers or P2PCommunicator(pp_group=self.groups.pp, config=get_model_config(self.model))
        return functools.partial(forward_backward_pipelining_without_interleaving, p2p_communicator=between, **given)


class Roles:
    """The roles of a rank by strategy. One is in use at a time, so they share their memory."""

    def __init__(
        self,
        model_config: Any,
        layout: _BaseLayout,
        strategies: Sequence[Strategy],
        timeout: timedelta,
        attention: AttentionGroups | None = None,
        *,
        apart: Mapping[Strategy, Apart] = MappingProxyType({}),
        overlap: bool = False,
    ) -> None:
        """Make groups, models and exchanges of all strategies that the run may change to.
        Collective over the world, once. `model_config`: of the base model. `attention`: None:
        models attend by themselves. `apart`: how an exchange is cut. `overlap`: weights and
        gradients move beside compute, by slot.
        """
        self.layout = layout
        self._model_config = model_config
        # Most that any strategy takes on this rank.
        sizes = [int(_room(layout, strategy).sum()) for strategy in strategies]
        dtype, device = model_config.params_dtype, job_device()
        # Of the role in use. NaN at the start, so that a weight nobody pulled is seen.
        self.weights = torch.full((max(sizes, default=0),), torch.nan, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.weights.numel(), dtype=torch.float32, device=device)
        make_group = _GroupMaker(timeout)
        world, ranks = make_group(range(dist.get_world_size())), tuple(range(dist.get_world_size()))
        assert world is not None
        self.everyone = Groups(dist.get_rank(), len(ranks), ranks, world)
        self._apart, self._overlap = apart, overlap
        # A communicator of their own: they run beside all other calls.
        self._exchanges = cast("dist.ProcessGroup", dist.new_group(list(ranks), timeout=timeout))
        self._lane, self.stopwatch = Lane(device, beside=overlap), Stopwatch(device)
        self._moves: Moves | None = None
        self._roles = {strategy: self._made(strategy, make_group, attention) for strategy in dict.fromkeys(strategies)}

    def __iter__(self) -> Iterator[Role]:
        return iter(self._roles.values())

    def __contains__(self, strategy: object) -> bool:
        return strategy in self._roles

    def __getitem__(self, strategy: Strategy) -> Role:
        """The role of this rank in `strategy`; ConfigError: no role was made for it."""
        if strategy not in self._roles:
            raise ConfigError(
                f"strategy {strategy}: no role was made for it, but for {', '.join(map(str, self._roles))}; roles are "
                "made at the start"
            )
        return self._roles[strategy]

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + self.gradients.nbytes

    def traffic(self, ranks_per_node: int) -> dict[Strategy, WeightTraffic]:
        """Bytes that a change to each strategy moves. Collective over the world, once."""
        width = self.weights.element_size()
        mine = [role.exchange.traffic(width, ranks_per_node) for role in self]
        sent = torch.tensor(mine, dtype=torch.int64, device=self.weights.device).reshape(-1, *WeightTraffic.SHAPE)
        everyone = [torch.empty_like(sent) for _ in range(self.everyone.size)]
        dist.all_gather(everyone, sent, group=self.everyone.pool)
        # [strategies, ranks, 2, 2, 2] to a table by direction first.
        table = torch.stack(everyone, dim=1).cpu().numpy()
        return {role.strategy: WeightTraffic(table[at].swapaxes(0, 1)) for at, role in enumerate(self)}

    def pull(self, strategy: Strategy) -> Role:
        """The role of this rank in `strategy`, with today's weights and zero gradients. Collective.
        With overlap weights are still coming; the role's model waits for them, module by module.
        """
        role = self[strategy]
        self.gradients.zero_()
        self._moves = Moves(role.exchange, role.memory, self.layout.gradients, self._lane, self.stopwatch)
        self._moves.pull(self.layout.weights, self.weights.dtype)
        return role

    @property
    def moves(self) -> Moves:
        """Pull and push of the step that is under way."""
        assert self._moves is not None, "weights are pulled before"
        return self._moves

    def push(self) -> None:
        """Add the gradients of all ranks' roles to the owners' sums. Collective."""
        self.moves.finish()
        self._moves = None

    def close(self) -> None:
        self._lane.close()

    def _made(self, strategy: Strategy, make_group: _GroupMaker, attention: AttentionGroups | None) -> Role:
        layout, seat, mine = self.layout, strategy.seat(dist.get_rank()), None
        # All ranks make all groups, in one order; of a pipeline that is not its own a rank keeps
        # none.
        for pipeline, scheme in enumerate(strategy.pipelines):
            groups = _groups_of(strategy.ranks_of(pipeline), scheme, make_group)
            if seat is not None and seat.pipeline == pipeline:
                mine = groups
        attending = None if attention is None else attention.of(strategy)
        owners = layout.base, layout.owned, layout.parameters
        apart = self._apart.get(strategy, Apart(slots=self._overlap))
        exchange = WeightExchange.of(owners, strategy, self._exchanges, self.weights.device, apart)
        if seat is None:
            return Role(strategy, seat, exchange)
        model = self._model(seat.scheme, mine)
        return Role(strategy, seat, exchange, mine, attending, model, self._moved_in(model, strategy, seat))

    def _moved_in(self, model: Any, strategy: Strategy, seat: Seat) -> RoleMemory:
        """Let parameters and their gradients lie in the shared memory, and modules wait for theirs."""
        room = _room(self.layout, strategy)
        names = {name: number for number, name in enumerate(self.layout.parameters.names)}
        # [parameters]: where each begins in the shared memory.
        starts = np.cumsum(room) - room
        weights: dict[int, torch.Tensor] = {}
        gradients: dict[int, torch.Tensor] = {}
        for name, parameter in named_parameters(unwrap_model(model)):
            number, owner = names[name], cast("Any", parameter)
            if parameter.dtype != self.weights.dtype:
                raise ConfigError(
                    f"parameter {name} is of {parameter.dtype}, the others of {self.weights.dtype}; strategies need "
                    "weights of one type"
                )
            part = slice(int(starts[number]), int(starts[number]) + parameter.numel())
            # The views are what the model computes with: a pull writes into them.
            weights[number] = parameter.data = self.weights[part].view(parameter.shape)
            gradients[number] = owner.main_grad = self.gradients[part].view(parameter.shape)
            owner.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(functools.partial(self._add_to_main_grad, number))
        held_numbers = np.array(list(weights), dtype=np.int64)
        slots = np.zeros_like(held_numbers)
        if self._overlap:
            ranks = np.full_like(held_numbers, dist.get_rank())
            slots = slots_of(held_numbers, ranks, strategy, self.layout.parameters)
        by_number = dict(zip(weights, slots.tolist(), strict=True))
        by_parameter = {id(each): names[name] for name, each in named_parameters(unwrap_model(model))}
        for module in model.modules():
            mine = [by_number[by_parameter[id(each)]] for each in module.parameters(recurse=False)]
            if mine:
                # The last of a module's weights to come: slots arrive in order.
                module.register_forward_pre_hook(functools.partial(self._need, max(mine)))
        return RoleMemory(weights, gradients, by_number, seat.stage == 0)

    def _need(self, slot: int, *_: Any) -> None:
        if self._moves is not None:
            self._moves.need(slot)

    def _add_to_main_grad(self, number: int, parameter: Any) -> None:
        # As Megatron's DDP: a gradient is summed in fp32, unless the kernel did so already.
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        if self._moves is not None:
            self._moves.left(number)

    def _model(self, scheme: Scheme, groups: Any) -> Any:
        """This rank's part of the model under `scheme`, by Megatron's builder; not initialised."""
        config = copy.deepcopy(self._model_config)
        parameters = self.layout.parameters
        config.vocab_size = int(parameters.shape[parameters.names.index(EMBEDDING), 0])
        config.should_pad_vocab = False
        transformer = config.transformer
        transformer.tensor_model_parallel_size = scheme.tensor
        transformer.pipeline_model_parallel_size = scheme.pipeline
        transformer.context_parallel_size = scheme.context
        transformer.sequence_parallel = transformer.sequence_parallel and scheme.tensor > 1
        transformer.perform_initialization = False  # Megatron's would seed by the base's TP rank
        transformer.pipeline_dtype = transformer.params_dtype
        transformer.variable_seq_lengths = True
        # Megatron's other way uses the world's group between two stages.
        transformer.batch_p2p_comm, transformer.overlap_p2p_comm = True, False
        model = config.get_builder_cls()(config).build_model(groups).to(job_device())
        if transformer.bf16 or transformer.fp16:
            model = Float16Module(transformer, model)
        return model


class AttentionGroups:
    """Groups that attend together under strategies, each made once. All ranks ask in one order."""

    def __init__(self, gpus_per_node: int, timeout: timedelta, sms: Mapping[str, int], *, safe: bool) -> None:
        """Make none yet. Arguments as for `runtime.groups.make_groups`."""
        self._gpus_per_node = gpus_per_node
        self._make: Callable[..., Groups] = functools.partial(make_groups, timeout=timeout, sms=sms, safe=safe)
        self._made: dict[tuple[tuple[int, ...], int], Groups | None] = {}
        # Roles are in use one at a time, so attention calls share memory.
        self._buffers = BufferPool()

    def of(self, strategy: Strategy) -> Groups | None:
        """The ranks that this one attends with; None: it is left over. Collective over the world."""
        world, wanted = range(dist.get_world_size()), list(self._rows(strategy))
        for per_node in sorted({size for _, size in wanted}):
            rows = [row for row, size in wanted if size == per_node and (row, size) not in self._made]
            if not rows:
                continue
            # Ranks outside of all rows make groups of their own, since `make_groups` asks all of
            # the world.
            alone = [(rank,) for rank in world if not any(rank in row for row in rows)]
            mine = dataclasses.replace(self._make([*rows, *alone], per_node), buffers=self._buffers)
            self._made |= {(row, per_node): mine if mine.ranks == row else None for row in rows}
        found = (self._made[each] for each in wanted)
        return next((groups for groups in found if groups is not None), None)

    def _rows(self, strategy: Strategy) -> Iterator[tuple[tuple[int, ...], int]]:
        """Context-parallel ranks of every stage and TP rank; and ranks per node, for planners."""
        for pipeline, scheme in enumerate(strategy.pipelines):
            shape = (scheme.pipeline, scheme.context, scheme.tensor)
            # [stages, CP, TP] to rows of CP neighbours: [stages * TP, CP].
            rows = np.array(strategy.ranks_of(pipeline)).reshape(shape).transpose(0, 2, 1).reshape(-1, scheme.context)
            per_node = min(scheme.context, max(1, self._gpus_per_node // scheme.tensor))
            yield from ((tuple(row), per_node) for row in rows.tolist())


class _GroupMaker:
    """Process groups by their ranks; equal ones are made once. All ranks ask for all, in one order."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def __call__(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        key = tuple(ranks)
        if key not in self._made:
            group = dist.new_group(list(key), timeout=self._timeout)
            self._made[key] = cast("dist.ProcessGroup", group) if dist.get_rank() in key else None
        return self._made[key]


def _groups_of(ranks: range, scheme: Scheme, make_group: _GroupMaker) -> Any:
    """Megatron's groups of the pipeline on `ranks`, of which this rank may have none."""
    shape = (scheme.pipeline, scheme.context, scheme.tensor)
    grid = np.array(ranks).reshape(shape)
    mine: dict[str, dist.ProcessGroup | None] = {}
    for name, spanned in AXES.items():
        inside = [axis for axis, word in enumerate(("pp", "cp", "tp")) if word in spanned.split()]
        outside = [axis for axis in range(3) if axis not in inside]
        # [..., spanned dimensions last]: a row for each group.
        rows = grid.transpose(*outside, *inside).reshape(-1, int(np.prod([shape[axis] for axis in inside], dtype=int)))
        made = [make_group(row.tolist()) for row in rows]
        mine[name] = next((group for group in made if group is not None), None)
    # First and last stage of a pipeline, which share tied embeddings.
    ends = [
        make_group(list(dict.fromkeys((first, last))))
        for first, last in zip(grid[0].reshape(-1).tolist(), grid[-1].reshape(-1).tolist(), strict=True)
    ]
    mine["embd"] = next((group for group in ends if group is not None), None)
    return ProcessGroupCollection(**mine)


def _room(layout: _BaseLayout, strategy: Strategy) -> Ints:
    """Elements that each parameter takes in the shared memory under a strategy [n], this rank's."""
    mine = held(strategy, layout.parameters, rank=dist.get_rank())
    sizes = (mine[:, Shard.STOPS] - mine[:, Shard.STARTS]).prod(axis=1)
    # Each parameter begins at a multiple of ALIGNED elements.
    return -(-sums(mine[:, Shard.PARAMETER], sizes, len(layout.parameters)) // ALIGNED) * ALIGNED


# One parameter under two names where embeddings are tied.
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

LAYERS = "decoder.layers."


@dataclass(frozen=True, slots=True)
class _BaseLayout:
    """Megatron's layout, the same on every rank, and this rank's part of it."""

    base: Base
    parameters: ParameterTable
    # Shards of all ranks.
    owned: Ints
    # By number of a parameter, the fp32 values that this rank owns.
    weights: Flat
    # Where theirs are summed.
    gradients: Flat


def base_layout(model: Sequence[Any], optimizer: Any, scheme: Scheme) -> _BaseLayout:
    """Read the layout of `model` (Megatron's DDP chunks) and its distributed optimizer. Collective
    over the world. ConfigError: several chunks, buffers or optimizers, or one without fp32 shards.
    """
    chunk, chained = _only(model, "model chunks"), _only(optimizers_of(optimizer), "optimizers")
    buffer = _only([*chunk.buffers, *chunk.expert_parallel_buffers], "parameter buffers")
    whole: Any = unwrap_model(chunk)
    named = dict(named_parameters(whole))
    shared = bool(whole.share_embeddings_and_output_weights)
    described = [
        asdict(_described_parameter(name, parameter, whole, scheme.tensor)) for name, parameter in named.items()
    ]
    ranges = {name: buffer.param_index_map[parameter] for name, parameter in named.items()}
    stage = {
        "parameters": described,
        "starts": {name: int(start) for name, (start, _, _) in ranges.items()},
        "buckets": [0, *(int(end) for _, end in buffer.bucket_indices)],
    }
    world, size = dist.get_rank(), dist.get_world_size()
    a_stage = size // scheme.pipeline
    # A stage's parameters are the same on all of its ranks, so its first one describes it.
    stages = [_told(stage if world == first else None, first) for first in range(0, size, a_stage)]
    listed: dict[str, Parameter] = {}
    for body in stages:
        for each in body["parameters"]:
            # The same name on two stages is one parameter: a tied embedding.
            listed.setdefault(each["name"], Parameter(**{**each, "tied": shared and each["name"] == EMBEDDING}))
    numbers = {name: number for number, name in enumerate(listed)}
    parameters = ParameterTable.of(tuple(listed.values()), int(get_model_config(chunk).num_layers))
    buffers = tuple(
        Buffer(
            stage=number,
            parameters=np.array([numbers[name] for name in body["starts"]], dtype=np.int64),
            starts=np.array(list(body["starts"].values()), dtype=np.int64),
            buckets=np.array(body["buckets"], dtype=np.int64),
        )
        for number, body in enumerate(stages)
    )
    base = Base(scheme, size // scheme.num_ranks, buffers)
    owned = base.owned(parameters)
    weights: dict[int, torch.Tensor] = {}
    gradients: dict[int, torch.Tensor] = {}
    for name, parameter in named.items():
        if parameter not in chained.model_param_gbuf_map:
            continue
        # The part of the parameter that this rank's optimizer shard covers.
        where = chained._get_model_param_range_map(parameter)["param"]
        main = getattr(parameter, "main_param", None)
        weights[numbers[name]] = parameter.data.view(-1)[where.start : where.end] if main is None else main
        gradients[numbers[name]] = cast("Any", parameter).main_grad.view(-1)[where.start : where.end]
    _check_shards(owned[owned[:, Shard.RANK] == world], weights, parameters)
    return _BaseLayout(base, parameters, owned, weights, gradients)


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A stage's parameters by name in the whole model; a tied embedding's is the first stage's."""
    layers = {
        # Layers are numbered in the whole model by their own `layer_number`, from 1.
        f"{name}.": f"{LAYERS}{module.layer_number - 1}."
        for name, module in model.named_modules()
        if name.startswith(LAYERS) and name.count(".") == LAYERS.count(".")
    }
    for name, parameter in model.named_parameters():
        head = ".".join(name.split(".")[:3]) + "."
        whole = layers[head] + name[len(head) :] if head in layers else name
        yield (EMBEDDING if whole == OUTPUT and model.share_embeddings_and_output_weights else whole), parameter


def _described_parameter(name: str, parameter: Any, model: Any, tensor: int) -> Parameter:
    """A parameter of TP 1, from the shard that a rank of TP `tensor` has."""
    config = get_model_config(model)
    shape = [*parameter.shape, 1][:2] if parameter.dim() == 1 else list(parameter.shape)
    cut = int(parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else None
    if cut is not None:
        # Tensor-parallel parameters have their whole size in the table.
        shape[cut] *= tensor
    # Transformer Engine's layers say stride 1 of a gated fc1, too.
    gated = config.gated_linear_unit and ".mlp.linear_fc1." in name
    # As Megatron's `_allreduce_non_tensor_model_parallel_grads`.
    parts = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
    parts = parts or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
    layer: int | Literal["first", "last"] = "first" if name.startswith("embedding.") else "last"
    if name.startswith(LAYERS):
        layer = int(name[len(LAYERS) :].partition(".")[0])
    return Parameter(name, shape[0], shape[1], layer, cut, 2 if gated and cut == 0 else 1, bool(parts and cut is None))  # pyright: ignore[reportArgumentType]


def _check_shards(mine: Ints, weights: Flat, parameters: ParameterTable) -> None:
    """Compare the computed shards of this rank with the optimizer's; ConfigError: they differ."""
    sizes = (mine[:, Shard.STOPS] - mine[:, Shard.STARTS]).prod(axis=1)
    for number in range(len(parameters)):
        expected = int(sizes[mine[:, Shard.PARAMETER] == number].sum())
        got = weights[number].numel() if number in weights else 0
        if got != expected or (got and weights[number].dtype != torch.float32):
            raise ConfigError(
                f"strategies: this rank's optimizer has {got} elements of {parameters.names[number]} in "
                f"{weights[number].dtype if got else 'no type'}, expected {expected} in torch.float32; use "
                "--use-distributed-optimizer over all data- and context-parallel ranks, in Megatron's own order of "
                "ranks, without --use-precision-aware-optimizer"
            )


def optimizers_of(optimizer: Any) -> list[Any]:
    """Megatron's optimizers that have parameters."""
    return [each for each in getattr(optimizer, "chained_optimizers", [optimizer]) if not each.is_stub_optimizer]


def _only(found: Sequence[Any], what: str) -> Any:
    if len(found) != 1:
        raise ConfigError(
            f"strategies: Megatron made {len(found)} {what} on this rank, expected one; leave out interleaved model "
            "chunks, experts and mixed types of weights"
        )
    return found[0]


def _told(body: dict[str, Any] | None, source: int) -> dict[str, Any]:
    told: list[Any] = [body]
    dist.broadcast_object_list(told, source, device=job_device())
    return told[0]

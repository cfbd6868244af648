"""The base layout, read off the model and the optimizer that Megatron built: the parameters of the
whole model, which rank owns which part of them, and this rank's part
([0024](../../docs/adr/0024-weights-move-optimizer-stays.md)).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from megatron_balance.analysis.shards import Base, Buffer, Parameter, ParameterTable, Shard
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.strategy import Scheme
from megatron_balance.megatron.tokens import job_device
from megatron_balance.training.weights import Flat

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""One parameter under two names where embeddings are tied."""
LAYERS = "decoder.layers."


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """Megatron's layout, the same on every rank, and this rank's part of it."""

    base: Base
    parameters: ParameterTable
    owned: Ints
    """Shards of all ranks, `Base.owned`."""
    weights: Flat
    """fp32 values of what this rank owns, one flat tensor a parameter."""
    gradients: Flat
    """Where their gradients are summed: this rank's part of Megatron's gradient buffer."""


def base_layout(model: Sequence[Any], optimizer: Any, scheme: Scheme) -> BaseLayout:
    """Read the layout of `model` (Megatron's DDP chunks) and its distributed optimizer.

    Collective over the world: each stage's first rank describes the stage to all.

    Raises:
        ConfigError: several model chunks, buffers or optimizers, or an optimizer that does not keep
            fp32 shards.
    """
    chunk, chained = _only(model, "model chunks"), _only(optimizers_of(optimizer), "optimizers")
    buffer = _only([*chunk.buffers, *chunk.expert_parallel_buffers], "parameter buffers")
    named = dict(named_parameters(unwrap_model(chunk)))
    shared = shares_embedding(unwrap_model(chunk))
    described = [
        asdict(described_parameter(name, parameter, unwrap_model(chunk), scheme.tensor))
        for name, parameter in named.items()
    ]
    ranges = {name: buffer.param_index_map[parameter] for name, parameter in named.items()}
    stage = {
        "parameters": described,
        "starts": {name: int(start) for name, (start, _, _) in ranges.items()},
        "buckets": [0, *(int(end) for _, end in buffer.bucket_indices)],
    }
    world, size = dist.get_rank(), dist.get_world_size()
    a_stage = size // scheme.pipeline
    stages = [_told(stage if world == first else None, first) for first in range(0, size, a_stage)]
    listed: dict[str, Parameter] = {}
    for body in stages:
        for each in body["parameters"]:
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
        where = chained._get_model_param_range_map(parameter)["param"]
        main = getattr(parameter, "main_param", None)
        weights[numbers[name]] = parameter.data.view(-1)[where.start : where.end] if main is None else main
        gradients[numbers[name]] = cast("Any", parameter).main_grad.view(-1)[where.start : where.end]
    check_shards(owned[owned[:, Shard.RANK] == world], weights, parameters)
    return BaseLayout(base, parameters, owned, weights, gradients)


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a stage by their name in the whole model; a tied embedding's is the first
    stage's.
    """
    layers = {
        f"{name}.": f"{LAYERS}{module.layer_number - 1}."
        for name, module in model.named_modules()
        if name.startswith(LAYERS) and name.count(".") == LAYERS.count(".")
    }
    for name, parameter in model.named_parameters():
        head = ".".join(name.split(".")[:3]) + "."
        whole = layers[head] + name[len(head) :] if head in layers else name
        yield (EMBEDDING if whole == OUTPUT and shares_embedding(model) else whole), parameter


def shares_embedding(model: Any) -> bool:
    """Whether the model's output layer has the embedding's weight."""
    return bool(model.share_embeddings_and_output_weights)


def described_parameter(name: str, parameter: Any, model: Any, tensor: int) -> Parameter:
    """A parameter of TP 1, from the shard that a rank of TP `tensor` has."""
    config = get_model_config(model)
    shape = [*parameter.shape, 1][:2] if parameter.dim() == 1 else list(parameter.shape)
    cut = int(parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else None
    if cut is not None:
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


def check_shards(mine: Ints, weights: Flat, parameters: ParameterTable) -> None:
    """Compare the shards that were computed for this rank with the optimizer's.

    Raises:
        ConfigError: they differ.
    """
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
    """Send what `source` gives to all ranks of the world, as JSON."""
    text = torch.frombuffer(bytearray(json.dumps(body, allow_nan=False).encode()), dtype=torch.uint8).to(job_device())
    size = torch.tensor([len(text)], device=job_device())
    dist.broadcast(size, source)
    if dist.get_rank() != source:
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=job_device())
    dist.broadcast(text, source)
    return json.loads(bytes(text.cpu().numpy()))

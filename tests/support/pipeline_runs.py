"""Training runs whose replicas are pipelines: samples without documents, gradients written."""

import functools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import role_traps


def install(folder: Path, rank: int, *, gaps: bool = True) -> None:
    # Let samples have gaps, and write every step's gradients, in this process from now on.
    if gaps:
        _leave_gaps()
    role_traps.install()
    steps = iter(range(1, 1000))
    _write_gradients(folder, rank, steps)
    _write_owned(folder, rank, steps)


def _leave_gaps() -> None:
    # Let the second step have one document: its other samples are padding alone.
    from megatron.training import get_args

    from megatron_balance.megatron.data import PADDING, DocumentDataset

    lengths, item = DocumentDataset.sample_lengths, DocumentDataset.__getitem__

    @functools.wraps(lengths)
    def sample_lengths(self: Any, index: int) -> tuple[int, ...]:
        args: Any = get_args()
        size = args.global_batch_size
        found = lengths(self, index)
        return found if not size <= index < 2 * size else found[: int(index == size)]

    @functools.wraps(item)
    def sample(self: Any, index: int) -> Any:
        found = item(self, index)
        kept = sum(sample_lengths(self, index))
        found["position_ids"][kept:] = PADDING
        found["loss_mask"][kept:] = 0
        return found

    DocumentDataset.sample_lengths, DocumentDataset.__getitem__ = sample_lengths, sample  # type: ignore[method-assign]


def _write_gradients(folder: Path, rank: int, steps: Iterator[int]) -> None:
    # Write what each rank has, tensor-parallel shards joined.
    from megatron.core import mpu
    from megatron.core.utils import get_model_config, unwrap_model
    from megatron.training import training

    from megatron_balance.megatron import session

    finalize = training.finalize_model_grads

    @functools.wraps(finalize)
    def finalized(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = finalize(model, *args, **kwargs)
        if session.current().changes is not None:
            return result
        stage, stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
        layers = get_model_config(model[0]).num_layers // stages
        chunks: Any = unwrap_model(model)
        named = [pair for chunk in chunks for pair in chunk.named_parameters()]
        found: dict[str, Any] = {_whole(f"module.{name}", stage, stages, layers): _joined(name, p) for name, p in named}
        np.savez(folder / f"gradients.{next(steps)}.{rank}.npz", **found)
        return result

    training.finalize_model_grads = finalized


def _write_owned(folder: Path, rank: int, steps: Iterator[int]) -> None:
    # Write what the owners of a run that changes between strategies have, put together.
    import torch.distributed as dist
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from megatron_balance.analysis.shards import Shard
    from megatron_balance.megatron import session

    step: Any = ChainedOptimizer.step

    @functools.wraps(step)
    def with_gradients(self: Any) -> Any:
        changes = session.current().changes
        if changes is not None:
            layout = changes.roles.layout
            mine = {number: gradient.clone().numpy() for number, gradient in layout.gradients.items()}
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            whole = [np.full(tuple(shape), np.nan, np.float32) for shape in layout.parameters.shape.tolist()]
            taken: dict[tuple[int, int], int] = {}
            for row in layout.owned.tolist():
                owner, number = row[Shard.RANK], row[Shard.PARAMETER]
                (top, left), (bottom, right) = row[Shard.STARTS], row[Shard.STOPS]
                at, size = taken.get((owner, number), 0), (bottom - top) * (right - left)
                part = everyone[owner][number][at : at + size].reshape(bottom - top, right - left)
                whole[number][top:bottom, left:right] = part
                taken[owner, number] = at + size
            named = zip(layout.parameters.names, whole, strict=True)
            vectors = ((name, each[:, 0] if each.shape[1] == 1 else each) for name, each in named)
            found: dict[str, Any] = {f"module.{name}": each for name, each in vectors}
            number = next(steps)
            if rank == 0:
                np.savez(folder / f"gradients.{number}.{rank}.npz", **found)
        return step(self)

    ChainedOptimizer.step = with_gradients


def _joined(name: str, parameter: Any) -> np.ndarray:
    # The gradient of the whole parameter, of which tensor-parallel ranks have a shard each.
    import torch
    import torch.distributed as dist
    from megatron.core import mpu

    size = mpu.get_tensor_model_parallel_world_size()
    sinks = name.endswith(".softmax_offset")  # one a head; Megatron does not mark them
    if size == 1 or not (sinks or getattr(parameter, "tensor_model_parallel", False)):
        return parameter.main_grad.numpy()
    shards = [torch.empty_like(parameter.main_grad) for _ in range(size)]
    dist.all_gather(shards, parameter.main_grad.contiguous(), group=mpu.get_tensor_model_parallel_group())
    # A shard of a gated MLP has its rows of the gate, then its rows of what is gated.
    dim = 0 if sinks else parameter.partition_dim
    blocks = [shard.chunk(1 if sinks else parameter.partition_stride, dim) for shard in shards]
    return torch.cat([part for parts in zip(*blocks, strict=True) for part in parts], dim).numpy()


def _whole(name: str, stage: int, stages: int, layers: int) -> str:
    # A parameter's name in the whole model, whose layers the stages count from 0 each.
    head, found, rest = name.partition(".layers.")
    if not found or stages == 1:
        return name
    number, _, behind = rest.partition(".")
    return f"{head}{found}{int(number) + stage * layers}.{behind}"


def gradients(folder: Path, step: int) -> dict[str, list[np.ndarray]]:
    # By name of a parameter, its gradient on every rank that has it.
    found: dict[str, list[np.ndarray]] = {}
    for path in sorted(folder.glob(f"gradients.{step}.*.npz")):
        with np.load(path) as file:
            for name in file.files:
                found.setdefault(name, []).append(file[name])
    return found


def worst_gradient(ours: Path, theirs: Path, step: int) -> float:
    # The largest difference of two runs' gradients at a step, relative to the largest of its
    # parameter; `theirs` is of one rank.
    wanted, found = gradients(theirs, step), gradients(ours, step)
    assert found.keys() == wanted.keys(), f"parameters {found.keys() ^ wanted.keys()} are in one of the runs alone"
    pairs = ((got, whole) for name, (whole,) in wanted.items() for got in found[name])
    return max(float(np.abs(got - whole).max() / np.abs(whole).max()) for got, whole in pairs)


MARK = "counted transfers: "


@dataclass
class Counts:
    # Of one rank. `forward`, `backward`: rows that it sent on, in order.
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    shape_exchanges: int = 0
    synchronisations: int = 0

    def line(self) -> str:
        return MARK + json.dumps(asdict(self))


def read(log: str) -> Counts:
    # The counts that a rank printed at its end.
    found = re.search(f"{MARK}(.*)", log)
    assert found is not None, "the rank printed no counts"
    return Counts(**json.loads(found[1]))


def install_counts() -> Counts:
    # Count from now on, in this process.
    import torch
    from megatron.core.pipeline_parallel import p2p_communication

    counts = Counts()
    exchange = p2p_communication.P2PCommunicator._communicate_shapes
    synchronize = torch.cuda.synchronize

    @functools.wraps(exchange)
    def exchanged(*args: Any, **kwargs: Any) -> Any:
        counts.shape_exchanges += 1
        return exchange(*args, **kwargs)

    def synchronised(*args: Any, **kwargs: Any) -> Any:
        counts.synchronisations += sys._getframe(1).f_globals["__name__"] == p2p_communication.__name__
        return synchronize(*args, **kwargs)

    p2p_communication.P2PCommunicator._communicate_shapes = exchanged
    torch.cuda.synchronize = synchronised
    for name in ("_p2p_ops", "_batched_p2p_ops"):
        setattr(p2p_communication, name, _noting(getattr(p2p_communication, name), counts))
    return counts


def _noting(issue: Any, counts: Counts) -> Any:
    def noted(*, tensor_send_prev: Any, tensor_send_next: Any, **kwargs: Any) -> Any:
        if tensor_send_next is not None:
            counts.forward.append(tensor_send_next.shape[0])
        if tensor_send_prev is not None:
            counts.backward.append(tensor_send_prev.shape[0])
        return issue(tensor_send_prev=tensor_send_prev, tensor_send_next=tensor_send_next, **kwargs)

    return noted

"""Cases of the link of weights, and what they mean, with whole arrays of indices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from megatron_balance.analysis.shards import Base, Buffer, Parameter, ParameterTable
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.strategy import Scheme, Strategy

# Parameters begin at multiples of this in a buffer (Megatron: 64).
PAD = 4


@dataclass(frozen=True)
class Links:
    # One case. `owned_by` is the answer to compare with.
    listed: tuple[Parameter, ...]
    num_layers: int
    base: Base
    strategy: Strategy

    @property
    def parameters(self) -> ParameterTable:
        return ParameterTable.of(self.listed, self.num_layers)

    def seats(self) -> Iterator[tuple[int, int, int, int, int, Scheme]]:
        # Rank, pipeline, cp, stage, tp and scheme of all ranks of the strategy.
        rank = 0
        for pipeline, scheme in enumerate(self.strategy.pipelines):
            for stage in range(scheme.pipeline):
                for cp in range(scheme.context):
                    for tp in range(scheme.tensor):
                        yield rank, pipeline, cp, stage, tp, scheme
                        rank += 1


def stages_of(parameter: Parameter, num_stages: int, num_layers: int) -> list[int]:
    # The stages that have it, the tied copy last.
    if parameter.tied:
        return sorted({0, num_stages - 1})
    if isinstance(parameter.layer, str):
        return [0 if parameter.layer == "first" else num_stages - 1]
    bounds = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    return [next(s for s in range(num_stages) if bounds[s] <= parameter.layer < bounds[s + 1])]


def cut(parameter: Parameter, tensor: int, rank: int) -> Ints:
    # Indices in the whole tensor of a TP rank's shard, in its own shape.
    whole = np.arange(parameter.rows * parameter.columns).reshape(parameter.rows, parameter.columns)
    if parameter.cut is None:
        return whole
    shares = []
    for block in np.split(whole, parameter.blocks, axis=parameter.cut):
        size = block.shape[parameter.cut]
        start, stop = rank * size // tensor, (rank + 1) * size // tensor
        shares.append(block[start:stop] if parameter.cut == 0 else block[:, start:stop])
    return np.concatenate(shares, axis=parameter.cut)


def buffers_of(
    listed: Sequence[Parameter], num_layers: int, scheme: Scheme, replicas: int, per_bucket: int
) -> tuple[Buffer, ...]:
    # Flat buffers as Megatron fills them: parameters backwards, padded, buckets cut evenly.
    shards = scheme.context * replicas
    buffers: list[Buffer] = []
    for stage in range(scheme.pipeline):
        numbers = [n for n, p in enumerate(listed) if stage in stages_of(p, scheme.pipeline, num_layers)][::-1]
        starts: list[int] = []
        buckets, at = [0], 0
        for place, number in enumerate(numbers):
            at = -(-at // PAD) * PAD
            starts.append(at)
            at += cut(listed[number], scheme.tensor, 0).size
            if (place + 1) % per_bucket == 0 or place + 1 == len(numbers):
                at = -(-at // (PAD * shards)) * PAD * shards
                buckets.append(at)
        buffers.append(Buffer(stage, np.array(numbers, np.int64), np.array(starts, np.int64), np.array(buckets)))
    return tuple(buffers)


def owned_by(case: Links) -> dict[int, list[tuple[int, int]]]:
    # (parameter, element) that each rank's optimizer owns, in the order of its flat shard.
    base, answer = case.base, {}
    for buffer in base.buffers:
        for tp in range(base.scheme.tensor):
            flat: list[tuple[int, int] | None] = [None] * int(buffer.buckets[-1])
            for number, start in zip(buffer.parameters.tolist(), buffer.starts.tolist(), strict=True):
                content = cut(case.listed[number], base.scheme.tensor, tp).reshape(-1).tolist()
                flat[start : start + len(content)] = [(number, element) for element in content]
            for shard in range(base.num_shards):
                mine = []
                for low, high in zip(buffer.buckets[:-1].tolist(), buffer.buckets[1:].tolist(), strict=True):
                    size = (high - low) // base.num_shards
                    mine += flat[low + shard * size : low + (shard + 1) * size]
                rank = tp + base.scheme.tensor * (shard + base.num_shards * buffer.stage)
                answer[rank] = [entry for entry in mine if entry is not None]
    return answer


@st.composite
def model(draw: st.DrawFn, tensor: int) -> tuple[tuple[Parameter, ...], int]:
    # Parameters whose cut dimension `tensor` divides; of every kind that Megatron has.
    num_layers = draw(st.integers(1, 4))
    parts = draw(st.booleans())
    tied = draw(st.booleans())
    size = st.integers(1, 5).map(lambda n: n * tensor)
    hidden = draw(st.sampled_from((1, 2, 5, 11, 14)))
    listed = [Parameter("embedding", draw(size), hidden, "first", 0, tied=tied)]
    for layer in range(num_layers):
        listed += [
            Parameter(f"{layer}.norm", hidden, 1, layer, parts=parts),
            Parameter(f"{layer}.qkv", draw(size), hidden, layer, 0),
            Parameter(f"{layer}.qkv.bias", draw(size), 1, layer, 0),
            Parameter(f"{layer}.fc1", 2 * draw(size), hidden, layer, 0, blocks=2),
            Parameter(f"{layer}.fc2", hidden, draw(size), layer, 1),
        ]
    listed.append(Parameter("norm", hidden, 1, "last", parts=parts))
    if not tied:
        listed.append(Parameter("output", draw(size), hidden, "last", 0))
    return tuple(listed), num_layers


@st.composite
def schemes(draw: st.DrawFn, most: int) -> Scheme:
    tensor = draw(st.integers(1, min(5, most)))
    pipeline = draw(st.integers(1, min(3, most // tensor)))
    return Scheme(tensor, pipeline, draw(st.integers(1, min(5, most // (tensor * pipeline)))))


@st.composite
def links(draw: st.DrawFn) -> Links:
    # Any degrees beside one another, uneven shards, ranks left over.
    scheme, replicas = draw(schemes(8)), draw(st.integers(1, 3))
    listed, num_layers = draw(model(scheme.tensor))
    base = Base(scheme, replicas, buffers_of(listed, num_layers, scheme, replicas, draw(st.integers(1, 9))))
    pipelines: list[Scheme] = []
    while (left := base.num_ranks - sum(s.num_ranks for s in pipelines)) and (not pipelines or draw(st.booleans())):
        pipelines.append(draw(schemes(left)))
    return Links(listed, num_layers, base, Strategy(tuple(pipelines)))

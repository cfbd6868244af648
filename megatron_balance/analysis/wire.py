"""What travels, in bytes: tensors of a message, parcels of a pair of ranks, pieces of a routed parcel, and which NIC they take.

The executor packs in the same way (`runtime.lower.parcels`); a test holds the two against each other. Messages are rows (exchange, src,
dst, kind, head_start, head_stop, tokens): what one exchange moves of one kind and head span from one rank to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_balance.ir.arrays import Ints, sums
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Kind

EXCHANGE, SRC, DST, KIND, HEAD_START, HEAD_STOP, TOKENS = range(7)
WIDTH = 7

ALIGN = 16
"""Bytes at a multiple of which every tensor of a packed parcel begins, and every piece is cut."""

_WITH_LSE = (Kind.OUT, Kind.OUT_GRAD)

Carried: TypeAlias = tuple[Kind, int, int]
"""(kind, rows, heads) of one message."""


# Tensors of a message


class TensorShape(NamedTuple):
    """One tensor of a message. `wide`: of the type that partials are accumulated in, else of the model's."""

    shape: tuple[int, ...]
    wide: bool


class Sizes(NamedTuple):
    """Head dim of an attention call, and bytes of an element of the model's type and of the wide one."""

    dim: int
    narrow_bytes: int
    wide_bytes: int


def tensor_shapes(message: Carried, dim: int) -> tuple[TensorShape, ...]:
    """Tensors that carry a message: keys with values, outputs with their LSE, their gradient with both."""
    kind, rows, heads = message
    match kind:
        case Kind.Q:
            return (TensorShape((rows, heads, dim), False),)
        case Kind.KV:
            return (TensorShape((2, rows, heads, dim), False),)
        case Kind.OUT:
            return TensorShape((rows, heads, dim), False), TensorShape((rows, heads), True)
        case Kind.OUT_GRAD:
            return TensorShape((2, rows, heads, dim), False), TensorShape((rows, heads), True)
        case Kind.Q_GRAD:
            return (TensorShape((rows, heads, dim), True),)
        case Kind.KV_GRAD:
            return (TensorShape((2, rows, heads, dim), True),)


def tensor_bytes(messages: Iterable[Carried], sizes: Sizes) -> Iterator[int]:
    """Bytes of every tensor of the messages, in order."""
    for message in messages:
        for shape, wide in tensor_shapes(message, sizes.dim):
            yield prod(shape) * (sizes.wide_bytes if wide else sizes.narrow_bytes)


# Parcels: all messages from one rank to another in one exchange, packed one after the other


def padded(num_bytes: int) -> int:
    """Bytes up to where the next tensor begins."""
    return -(-num_bytes // ALIGN) * ALIGN


def parcel_bytes(messages: Sequence[Carried], sizes: Sizes) -> int:
    """Bytes of a parcel: every tensor begins at a multiple of `ALIGN`, the last one is not padded."""
    begin = end = 0
    for num_bytes in tensor_bytes(messages, sizes):
        end = begin + num_bytes
        begin = padded(end)
    return end


def piece_bounds(num_bytes: int, count: int) -> list[tuple[int, int]]:
    """[start, stop) of `count` near-equal pieces of a parcel, which end at multiples of `ALIGN`.

    Some are empty where there are too few bytes.
    """
    blocks = -(-num_bytes // ALIGN)
    bounds = [min(num_bytes, blocks * i // count * ALIGN) for i in range(count + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Parcels:
    """All that one exchange moves from one rank to another, [n] each.

    `direct`: bytes of its tensors as they are; `padded`: with every tensor padded to `ALIGN`, as collectives carry them; `packed`:
    all but the last padded, as it is cut into pieces.
    """

    exchange: Ints
    src: Ints
    dst: Ints
    tokens: Ints
    direct: Ints
    padded: Ints
    packed: Ints


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes of values. `row_bytes`, by kind: of one token and head, without its LSE; `lse_bytes`: of that."""

    row_bytes: tuple[int, ...]
    lse_bytes: int

    @classmethod
    def of(cls, model: Model) -> Payload:
        """Inputs, outputs and output gradients travel in the model's type; LSE and gradients, which are summed, in fp32 or wider."""
        narrow = model.head_dim * model.bytes_per_element
        wide = max(4, model.bytes_per_element)
        sizes = {
            Kind.Q: narrow,
            Kind.KV: 2 * narrow,
            Kind.OUT: narrow,
            Kind.OUT_GRAD: 2 * narrow,
            Kind.Q_GRAD: model.head_dim * wide,
            Kind.KV_GRAD: 2 * model.head_dim * wide,
        }
        return cls(tuple(sizes[kind] for kind in Kind), wide)

    def tensors(self, messages: Ints) -> tuple[Ints, Ints]:
        """Bytes of the values of each message, and of their LSE (0 where the kind has none)."""
        rows = messages[:, TOKENS] * (messages[:, HEAD_STOP] - messages[:, HEAD_START])
        return rows * np.array(self.row_bytes)[messages[:, KIND]], rows * self.lse_bytes * np.isin(messages[:, KIND], _WITH_LSE)

    def parcels(self, rows: Ints) -> Parcels:
        """Parcels by exchange, source and target. `rows`: of messages, in any order; those of one message are added up."""
        messages = _summed(rows, HEAD_STOP + 1)
        values, lse = self.tensors(messages)
        last = np.where(lse > 0, lse, values)
        begin = _begins(messages[:, : DST + 1])
        end = np.append(begin[1:], len(messages))[: len(begin)] - 1

        def total(each: Ints) -> Ints:
            return np.add.reduceat(each, begin) if len(begin) else each

        padded = total(padded_bytes(values) + padded_bytes(lse))
        unpadded = last[end]
        first = messages[begin]
        return Parcels(
            exchange=first[:, EXCHANGE],
            src=first[:, SRC],
            dst=first[:, DST],
            tokens=total(messages[:, TOKENS]),
            direct=total(values + lse),
            padded=padded,
            packed=padded - padded_bytes(unpadded) + unpadded,
        )


@dataclass(frozen=True, slots=True)
class NicOf:
    """Which NIC a rank uses: ranks are numbered node by node, neighbours share one. NICs are numbered node by node, too."""

    num_ranks: int
    ranks_per_node: int
    ranks_per_nic: int

    @property
    def per_node(self) -> int:
        return -(-min(self.ranks_per_node, self.num_ranks) // self.ranks_per_nic)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)

    def node(self, rank: Ints) -> Ints:
        return rank // self.ranks_per_node

    def nic(self, rank: Ints) -> Ints:
        return self.node(rank) * self.per_node + rank % self.ranks_per_node // self.ranks_per_nic

    def sums(self, rank: Ints, num_bytes: Ints) -> Ints:
        """Bytes that the NICs of `rank` carry: [nodes, NICs of a node]."""
        return sums(self.nic(rank), num_bytes, self.num_nodes * self.per_node).reshape(self.num_nodes, self.per_node)


def of_transfers(exchange: int, transfers: Ints) -> Ints:
    """Messages of transfer rows (`ir.program.Exchange`)."""
    kind, _, start, stop, head_start, head_stop, src, dst = transfers.T
    return np.column_stack([np.full(len(transfers), exchange), src, dst, kind, head_start, head_stop, stop - start])


def padded_bytes(num_bytes: Ints) -> Ints:
    return -(-num_bytes // ALIGN) * ALIGN


def cut(num_bytes: Ints, count: int) -> Ints:
    """Bytes of each of `count` near-equal pieces, cut at multiples of `ALIGN`: [count, *num_bytes.shape]."""
    blocks = -(-num_bytes // ALIGN)
    bounds = np.stack([np.minimum(num_bytes, blocks * i // count * ALIGN) for i in range(count + 1)])
    return np.diff(bounds, axis=0)


def is_collective(group: tuple[int, ...], num_ranks: int, ranks_per_node: int) -> bool:
    """Whether these ranks have a process group of their own (`runtime.groups`): the pool, or a whole node of several."""
    if group == tuple(range(num_ranks)):
        return num_ranks > 1
    whole = 1 < ranks_per_node < num_ranks and num_ranks % ranks_per_node == 0
    return whole and group[0] % ranks_per_node == 0 and group == tuple(range(group[0], group[0] + ranks_per_node))


def _begins(keys: Ints) -> Ints:
    """Where rows differ from the row before them."""
    fresh = np.ones(len(keys), dtype=bool)
    fresh[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.flatnonzero(fresh)


def _summed(rows: Ints, num_keys: int) -> Ints:
    """Rows with equal keys (the first columns) as one, tokens added up; sorted by key, without those that come to nothing."""
    rows = rows[np.lexsort(rows[:, :num_keys].T[::-1])]
    begin = _begins(rows[:, :num_keys])
    found = rows[begin]
    if len(begin):
        found[:, TOKENS] = np.add.reduceat(rows[:, TOKENS], begin)
    return found[found[:, TOKENS] != 0]

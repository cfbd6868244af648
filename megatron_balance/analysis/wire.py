"""The wire format: tensors of a message, parcels of a pair of ranks, pieces of a routed parcel, and
the NIC that they take.

The one place that knows it, without torch: the executor packs by it (`runtime.lower.memory`), the
simulator and plan statistics count by it. Messages are rows of `ir.columns.Message`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from megatron_balance.ir.arrays import Ints, sums
from megatron_balance.ir.columns import Message
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Kind

# Bytes at a multiple of which every tensor of a packed parcel begins, and every piece ends; no
# element type is larger.
ALIGN = 16

# (kind, rows, heads) of one message.
Carried: TypeAlias = tuple[Kind, int, int]

Element: TypeAlias = Literal["narrow", "wide", "gradient"]
_Size = TypeVar("_Size", int, Ints)


# Tensors of a message


class _TensorShape(NamedTuple):
    """One tensor of a message.

    `element`: "narrow" is the model's type, "wide" the one that partials are accumulated in,
    "gradient" the one that gradients travel in (`ir.model.GradientWire`).
    """

    shape: tuple[int, ...]
    element: Element


class HeadSizes(NamedTuple):
    """Width of a head's queries and keys in an attention call, and bytes of an element of each type
    (`_TensorShape`). `value_dim`: width of its values and outputs; None: the same. `latent_dim`: of
    what travels in place of keys and values; None: they do.
    """

    dim: int
    narrow_bytes: int
    wide_bytes: int
    gradient_bytes: int
    value_dim: int | None = None
    latent_dim: int | None = None

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """Widths of the tensors of keys and values, or of what travels in their place."""
        if self.latent_dim is not None:
            return (self.latent_dim,)
        return self.dim, self.dim if self.value_dim is None else self.value_dim

    def of(self, element: Element) -> int:
        """Bytes of an element."""
        match element:
            case "narrow":
                return self.narrow_bytes
            case "wide":
                return self.wide_bytes
            case "gradient":
                return self.gradient_bytes


def tensor_shapes(message: Carried, sizes: HeadSizes) -> tuple[_TensorShape, ...]:
    """Tensors that carry a message: keys with values, outputs with their LSE, their gradient with
    both. Keys and values of one width are one tensor, of two they are two.
    """
    kind, rows, heads = message
    dim, values = sizes.dim, sizes.dim if sizes.value_dim is None else sizes.value_dim
    match kind:
        case Kind.Q:
            return (_TensorShape((rows, heads, dim), "narrow"),)
        case Kind.KV:
            return _pair(rows, heads, sizes.kv_widths, "narrow")
        case Kind.OUT:
            return _TensorShape((rows, heads, values), "narrow"), _TensorShape((rows, heads), "wide")
        case Kind.OUT_GRAD:
            return _TensorShape((2, rows, heads, values), "narrow"), _TensorShape((rows, heads), "wide")
        case Kind.Q_GRAD:
            return (_TensorShape((rows, heads, dim), "gradient"),)
        case Kind.KV_GRAD:
            return _pair(rows, heads, sizes.kv_widths, "gradient")


def _pair(rows: int, heads: int, widths: tuple[int, ...], element: Element) -> tuple[_TensorShape, ...]:
    if len(widths) == 2 and widths[0] == widths[1]:
        return (_TensorShape((2, rows, heads, widths[0]), element),)
    return tuple(_TensorShape((rows, heads, width), element) for width in widths)


def tensor_bytes(messages: Iterable[Carried], sizes: HeadSizes) -> Iterator[int]:
    """Bytes of every tensor of the messages, in order."""
    for message in messages:
        for shape, element in tensor_shapes(message, sizes):
            yield prod(shape) * sizes.of(element)


# Parcels: all messages from one rank to another in one exchange, packed one after the other


def padded(num_bytes: _Size) -> _Size:
    """Bytes up to where the next tensor begins, of one size or of many."""
    return -(-num_bytes // ALIGN) * ALIGN


def piece_bounds(num_bytes: int, count: int) -> list[tuple[int, int]]:
    """[start, stop) of `count` near-equal pieces of a parcel, which end at multiples of `ALIGN`.

    Some are empty where there are too few bytes.
    """
    blocks = -(-num_bytes // ALIGN)
    return list(pairwise(min(num_bytes, blocks * i // count * ALIGN) for i in range(count + 1)))


def piece_bytes(num_bytes: Ints, count: int) -> Ints:
    """Sizes of the `count` pieces of many parcels (`piece_bounds`): [count, *num_bytes.shape]."""
    blocks = -(-num_bytes // ALIGN)
    bounds = np.stack([np.minimum(num_bytes, blocks * i // count * ALIGN) for i in range(count + 1)])
    return np.diff(bounds, axis=0)


@dataclass(frozen=True, slots=True)
class Parcels:
    """Parcels by exchange, source and target, [n] each.

    `direct`: bytes of its tensors as they are; `padded`: with every tensor padded to `ALIGN`, as
    collectives carry them; `packed`: all but the last padded, as it is divided into pieces.
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
    """Bytes of one token and head, by kind: `row_bytes` of the first tensor that carries it,
    `more_bytes` of the second (its LSE, or values of another width than the keys), 0 where there is
    none.
    """

    row_bytes: tuple[int, ...]
    more_bytes: tuple[int, ...]

    @classmethod
    def of(cls, model: Model) -> "Payload":
        """Inputs, outputs and output gradients travel in the model's type, LSE in fp32 or wider,
        gradients, which are summed, in the same or in bf16.
        """
        wide = max(4, model.bytes_per_element)
        gradient = 2 if model.gradient_wire == "bf16" else wide
        sizes = HeadSizes(model.head_dim, model.bytes_per_element, wide, gradient, model.value_dim, model.latent_dim)
        each = [tuple(tensor_bytes([(kind, 1, 1)], sizes)) for kind in Kind]
        return cls(tuple(first for first, *_ in each), tuple(sum(more) for _, *more in each))

    def whole(self) -> Ints:
        """Bytes of one token and head by kind, all tensors together: int64 [kinds]."""
        return np.array(self.row_bytes) + np.array(self.more_bytes)

    def tensors(self, messages: Ints) -> tuple[Ints, Ints]:
        """Bytes of the first tensor of each message, and of the second."""
        kinds = messages[:, Message.KIND]
        rows = messages[:, Message.TOKENS] * (messages[:, Message.HEAD_STOP] - messages[:, Message.HEAD_START])
        return rows * np.array(self.row_bytes)[kinds], rows * np.array(self.more_bytes)[kinds]

    def parcels(self, rows: Ints) -> Parcels:
        """Parcels by exchange, source and target; `rows` of messages, those of one are added up."""
        messages = _summed(rows)
        values, more = self.tensors(messages)
        last = np.where(more > 0, more, values)
        begin = _begins(messages[:, Message.PARCEL])
        end = np.append(begin[1:], len(messages))[: len(begin)] - 1

        def total(each: Ints) -> Ints:
            return np.add.reduceat(each, begin) if len(begin) else each

        whole, unpadded = total(padded(values) + padded(more)), last[end]
        first = messages[begin]
        return Parcels(
            exchange=first[:, Message.EXCHANGE],
            src=first[:, Message.SRC],
            dst=first[:, Message.DST],
            tokens=total(messages[:, Message.TOKENS]),
            direct=total(values + more),
            padded=whole,
            packed=whole - padded(unpadded) + unpadded,
        )


def _begins(keys: Ints) -> Ints:
    # Numbers of the rows that differ from the row before them.
    fresh = np.ones(len(keys), dtype=bool)
    fresh[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.flatnonzero(fresh)


def _summed(rows: Ints) -> Ints:
    # One row for all messages that differ in tokens only, sorted, without those that come to
    # nothing.
    rows = rows[np.lexsort(rows[:, Message.KEY].T[::-1])]
    begin = _begins(rows[:, Message.KEY])
    messages = rows[begin]
    if len(begin):
        messages[:, Message.TOKENS] = np.add.reduceat(rows[:, Message.TOKENS], begin)
    return messages[messages[:, Message.TOKENS] != 0]


# NICs and communicators


@dataclass(frozen=True, slots=True)
class NicOf:
    """The NIC of a rank: ranks and NICs are numbered node by node, neighbours share one."""

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


def is_collective(group: tuple[int, ...], num_ranks: int, ranks_per_node: int) -> bool:
    """Whether ranks have a process group (`runtime.groups`): the pool, or a node of several."""
    if len(group) == num_ranks and group == tuple(range(num_ranks)):
        return num_ranks > 1
    whole = 1 < ranks_per_node < num_ranks and num_ranks % ranks_per_node == 0
    return whole and group[0] % ranks_per_node == 0 and group == tuple(range(group[0], group[0] + ranks_per_node))

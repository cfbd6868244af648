"""Algorithm 1 of WLB-LLM without its queues: documents into microbatches by workload."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from megatron_balance.cost.base import CostModel
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import CAUSAL, Mask

Work: TypeAlias = Callable[[int], float]
"""From a document's length to its workload."""


class Document(NamedTuple):
    """A sequence of a step: its number (below 0: held back earlier) and its length in tokens."""

    number: int
    length: int


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """Documents by microbatch, in the order in which they were packed, and those that fit none."""

    microbatches: tuple[tuple[Document, ...], ...]
    left: tuple[Document, ...]


def workload(cost: CostModel, cluster: Cluster, mask: Mask = CAUSAL) -> Work:
    """W_a + W_l of Eq. 2: seconds of one layer's forward pass of a document spread over all ranks.

    Attention by the document's visible pairs; the modules outside of it, tensor-parallel
    communication included, and the gathering of keys and values from the other ranks by its tokens.
    """
    ranks = cluster.num_ranks
    received = cost.kv_bytes(1.0) * (ranks - 1) / ranks
    gather_s = cost.inter_node_s(received, 0) if cluster.num_nodes > 1 else cost.intra_node_s(received, 0)
    token_s = cost.linear_s(1.0) / ranks + gather_s
    attention_s = cost.attention_s

    def work(length: int) -> float:
        return attention_s(mask.num_pairs(length)) / ranks + length * token_s

    return work


def by_workload(
    documents: Sequence[Document], num_microbatches: int, most_tokens: float, work: Work
) -> PackedDocuments:
    """Each document in turn into the microbatch with the least work, or else with the fewest tokens.

    WLB-LLM, Algorithm 1, lines 17 to 31. Ties go to the lower microbatch.

    Args:
        documents: in the order in which they are packed.
        num_microbatches: N.
        most_tokens: S_max, the tokens that a microbatch may have.
        work: of a document.
    """
    loads, tokens = [0.0] * num_microbatches, [0] * num_microbatches
    packed: list[list[Document]] = [[] for _ in range(num_microbatches)]
    left: list[Document] = []
    heap = [(0.0, m) for m in range(num_microbatches)]  # entries of other loads than `loads` are out of date
    for document in documents:
        length = document.length
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heappop(heap)
        m = heap[0][1]
        if tokens[m] + length > most_tokens:
            m = min(range(num_microbatches), key=tokens.__getitem__)
            if tokens[m] + length > most_tokens:
                left.append(document)
                continue
        loads[m] += work(length)
        tokens[m] += length
        packed[m].append(document)
        heapq.heappush(heap, (loads[m], m))
    return PackedDocuments(tuple(map(tuple, packed)), tuple(left))


def rise_and_fall(microbatches: Sequence[tuple[Document, ...]], work: Work) -> tuple[tuple[Document, ...], ...]:
    """The microbatches with the least work first and last, the most in the middle.

    A pipeline of stages that alternate forward and backward waits longest where a long microbatch is
    its first or last: the others of that time are too short to fill it. Equal ones stay in order.
    """
    rising = sorted(microbatches, key=lambda each: sum(work(document.length) for document in each))
    return (*rising[::2], *reversed(rising[1::2]))


def longest_first(documents: Sequence[Document]) -> list[Document]:
    """Documents by length, descending; equal ones as they were dealt."""
    return sorted(documents, key=lambda each: (-each.length, each.number))

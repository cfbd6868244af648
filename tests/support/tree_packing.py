"""How TRL 1.16 packs rollouts into one row (its `TreeRow.pack`), told again from its description.

A token is one with the token behind it, so that lists share it where they also agree on what
follows; the last token of a list is one with nothing behind it. The tokens are nodes of a trie, laid
out depth first in the order in which they came, and a run of nodes with one child each is a segment.
Attention is a varlen call of FlashAttention: the queries of a segment over the keys of all segments
on its path, gathered one path behind the other, causal from the lower right corner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Packed:
    # [N] each: tokens, positions, and the next token where it is trained (-100 elsewhere).
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    # By list, the place of each token.
    places: list[list[int]] = field(default_factory=list)
    # Of every trained token: the list, and the place that predicts it.
    terms: list[tuple[int, int]] = field(default_factory=list)
    # Keys that the call gathers; where the queries and the keys of each segment end.
    kv_index: list[int] = field(default_factory=list)
    cu_seqlens_q: list[int] = field(default_factory=lambda: [0])
    cu_seqlens_k: list[int] = field(default_factory=lambda: [0])

    def visible(self) -> np.ndarray:
        """Whether query [N] sees key [N], as the varlen call has it."""
        shown = np.zeros((len(self.tokens), len(self.tokens)), dtype=bool)
        ends = zip(self.cu_seqlens_q, self.cu_seqlens_q[1:], self.cu_seqlens_k, self.cu_seqlens_k[1:], strict=False)
        for q_start, q_stop, k_start, k_stop in ends:
            for query in range(q_start, q_stop):
                shown[query, self.kv_index[k_start : k_stop - (q_stop - 1 - query)]] = True
        return shown


@dataclass
class _Node:
    token: int
    children: dict[tuple[int, int | None], "_Node"] = field(default_factory=dict)
    place: int = -1


def pack(rollouts: Sequence[Sequence[int]], trained: Sequence[Sequence[int]]) -> Packed:
    """`trained`: of each rollout, 1 for the tokens that are trained, one number a token."""
    root = _Node(-1)
    lists: list[list[_Node]] = []
    for rollout in rollouts:
        node, nodes = root, list[_Node]()
        for key in zip(rollout, [*rollout[1:], None], strict=True):
            node = node.children.setdefault(key, _Node(key[0]))
            nodes.append(node)
        lists.append(nodes)
    made = Packed()

    def lay_out(node: _Node, path: list[int]) -> None:
        own: list[int] = []
        while True:
            node.place = len(made.tokens)
            own.append(node.place)
            made.positions.append(len(path) + len(own) - 1)
            made.tokens.append(node.token)
            if len(node.children) != 1:
                break
            (node,) = node.children.values()
        made.kv_index.extend([*path, *own])
        made.cu_seqlens_q.append(len(made.tokens))
        made.cu_seqlens_k.append(len(made.kv_index))
        for child in node.children.values():
            lay_out(child, [*path, *own])

    for node in root.children.values():
        lay_out(node, [])
    made.places = [[node.place for node in nodes] for nodes in lists]
    made.labels = [-100] * len(made.tokens)
    for at, (rollout, places, mask) in enumerate(zip(rollouts, made.places, trained, strict=True)):
        for p in range(1, len(rollout)):
            if mask[p]:
                made.labels[places[p - 1]] = rollout[p]
                made.terms.append((at, places[p - 1]))
    return made

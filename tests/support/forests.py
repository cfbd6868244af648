"""Random trees, and their masks by the rule itself, from token to token along parents; their plans."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from megatron_balance import reference
from megatron_balance.compile.halo import under
from megatron_balance.ir.arrays import Bools
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Forest, Segment, Tree, over
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing
from megatron_balance.ir.program import Program
from megatron_balance.patterns import ONCE_PER_NODE
from tests.support import by_hand
from tests.support import dense as masks
from tests.support.strategies import Case, bare_plan, random_moves


def some_tree(random: Random, most: int = 12, longest: int = 12, depth: int = 8) -> Tree:
    """A tree of up to `most` segments of up to `longest` tokens; a third are full."""
    segments: list[Segment] = []
    path: list[int] = []
    for at in range(random.randint(1, most)):
        del path[random.randint(max(len(path) // 2, 1), depth) if path else 0 :]
        length = 1 if random.random() < 0.2 else random.randint(1, longest)
        segments.append(Segment(length, path[-1] if path else -1, random.random() < 1 / 3))
        path.append(at)
    return tuple(segments)


def visible(tree: Tree, window: int = 0) -> Bools:
    """Whether each query (row) of a tree sees each key (column), [T, T]."""
    owner = [at for at, segment in enumerate(tree) for _ in range(segment.length)]
    begins = np.cumsum([0, *(segment.length for segment in tree)])
    shown = np.zeros((len(owner), len(owner)), dtype=bool)
    for query, own in enumerate(owner):
        path = list(range(begins[own], query + 1))
        above = tree[own].parent
        while above >= 0:
            path[:0] = range(begins[above], begins[above + 1])
            above = tree[above].parent
        shown[query, path[-window:]] = True
        if tree[own].full:
            shown[query, query : begins[own + 1]] = True
    return shown


def some_forest(random: Random, trees: int = 4, window: int = 0, **sizes: int) -> Forest:
    return Forest(tuple(some_tree(random, **sizes) for _ in range(random.randint(1, trees))), window)


def dense(forest: Forest) -> Sequence[Bools]:
    return [visible(tree, forest.window) for tree in forest.trees]


# Patterns that know trees, beside task tables.
GATHERS = ("all_gather", "gather_documents", "gather_sequence")
WINDOWS = (0, 0, 3)


def drawn(rng: Random, *, most: int = 8, longest: int = 6) -> tuple[Forest, Case]:
    # A third under a window; a forest that is no batch of documents.
    forest = Forest(())
    while over(CAUSAL, forest.trees) == CAUSAL:
        forest = some_forest(rng, trees=3, most=most, longest=longest, window=rng.choice(WINDOWS))
    ranks = rng.choice([1, 2, 3, 4])
    cluster = Cluster(ranks, rng.choice([size for size in (1, 2, 3) if ranks % size == 0]))
    attention = SlidingWindow(forest.window).name if forest.window else "causal"
    model = Model(2, 1, head_dim=4, hidden_size=32, ffn_size=64, attention=attention)
    return forest, Case(Batch(forest.lengths, forest.trees), cluster, model, None, rng.randrange(1 << 16))


def planned(planner: str, forest: Forest, case: Case) -> MicrobatchPlan:
    # Of a planner, or of all sequences in one of `GATHERS`.
    if planner not in GATHERS:
        return bare_plan(planner, case)
    ranks, seqs = range(case.cluster.num_ranks), range(len(forest.lengths))
    zone, heads = by_hand.zone("all", planner, ranks, seqs), (case.model.num_heads, case.model.num_kv_heads)
    plan = by_hand.plan(forest.lengths, len(ranks), zone, ranks_per_node=case.cluster.ranks_per_node, heads=heads)
    return under(replace(plan, mask=forest.without_window), forest)


def with_layers(rng: Random, plan: MicrobatchPlan) -> MicrobatchPlan:
    # Half of them remapped at random, half of them routed; once per node where zones can be.
    if rng.random() < 0.5:
        plan = replace(plan, moves=random_moves(plan, rng.randrange(1 << 16)))
    if rng.random() < 0.5:
        zones = (replace(zone, pattern=ONCE_PER_NODE.get(zone.pattern, zone.pattern)) for zone in plan.zones)
        plan = replace(plan, zones=tuple(zones))
    return replace(plan, routing=Routing(1, (REMAP, *range(len(plan.zones))))) if rng.random() < 0.5 else plan


def worst_of(program: Program, forest: Forest) -> float:
    # Largest relative difference of outputs and gradients from dense attention.
    x = masks.draw(program.lengths, program.num_heads, program.num_kv_heads)
    ours = reference.run(program, x.q, x.k, x.v, x.scale, x.dout)
    tables = iter(dense(forest))
    theirs = masks.attention(x, lambda _: next(tables))
    return max(
        masks.worst(getattr(ours, name), getattr(theirs, name)) for name in ("out", "q_grad", "k_grad", "v_grad")
    )

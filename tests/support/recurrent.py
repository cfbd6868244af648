"""Recurrent layers: layouts cut at random, inputs with long memory, a document alone."""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np

from megatron_balance.compile.recurrent import program_of
from megatron_balance.ir.arrays import as_array, as_rows
from megatron_balance.ir.columns import Rows, Transfer
from megatron_balance.ir.forest import Tree, num_tokens
from megatron_balance.ir.program import Exchange
from megatron_balance.ir.recurrent import RecurrentOp, RecurrentProgram
from megatron_balance.recurrent_reference import Floats, Recurrence, RecurrentResult, run_recurrent
from tests.support.forests import some_tree

LayerKind = Literal["gated delta net", "kda", "mamba-2"]
KINDS: tuple[LayerKind, ...] = ("gated delta net", "kda", "mamba-2")


def random_layout(rng: random.Random, num_ranks: int, most: int = 30) -> tuple[tuple[int, ...], list[Rows]]:
    # Lengths and a linear layout: sequences whole, cut anywhere, and in pieces of a token; on any
    # ranks, rows in any order. Some ranks may have none.
    lengths = tuple(rng.choice([1, 2, 3, rng.randint(1, 9), rng.randint(1, most)]) for _ in range(rng.randint(1, 5)))
    return lengths, dealt(rng, lengths, num_ranks)


def random_trees(rng: random.Random, num_ranks: int, most: int = 6) -> tuple[tuple[Tree, ...], list[Rows]]:
    # Trees of causal segments, and their tokens in a layout of which segments know nothing.
    trees = tuple(
        tuple(segment._replace(full=False) for segment in some_tree(rng, most, rng.choice([2, 4, 12])))
        for _ in range(rng.randint(1, 3))
    )
    return trees, dealt(rng, tuple(map(num_tokens, trees)), num_ranks)


def dealt(rng: random.Random, lengths: tuple[int, ...], num_ranks: int) -> list[Rows]:
    owned: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for seq, length in enumerate(lengths):
        among = rng.sample(range(num_ranks), min(num_ranks, rng.randint(1, 5)))
        cuts = (
            range(length + 1)
            if rng.random() < 0.2
            else {0, length, *rng.choices(range(length + 1), k=rng.randint(0, 6))}
        )
        edges = sorted(cuts)
        for start, stop in zip(edges, edges[1:], strict=False):
            owned[rng.choice(among)].append((seq, start, stop))
    for rows in owned:
        rng.shuffle(rows)
    return [Rows.of(3, rows) for rows in owned]


def draw(
    kind: LayerKind, lengths: tuple[int, ...], heads: int, halo: int, seed: int
) -> tuple[list[Recurrence], Floats, list[Floats]]:
    # Inputs of each sequence, taps, and gradients of the outputs. Decays near 1 and weak erasing: a
    # state lasts, so that one that is lost or wrong is seen at the end of a sequence.
    rng = np.random.default_rng(seed)
    key, value = 3, 2
    inputs, dout = [], []
    for length in lengths:
        q, k = rng.normal(size=(2, length, heads, key))
        decay = 1 - 0.004 * rng.random((length, heads, key if kind == "kda" else 1)) * np.ones(key)
        write = 0.02 + 0.03 * rng.random((length, heads))
        erase = 0 * write if kind == "mamba-2" else write
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        inputs.append(Recurrence(q, k, rng.normal(size=(length, heads, value)), decay, write, erase))
        dout.append(rng.normal(size=(length, heads, value)))
    return inputs, rng.normal(size=(halo + 1, heads, value)), dout


def alone(inputs: list[Recurrence], taps: Floats, dout: list[Floats]) -> RecurrentResult:
    # Each sequence on one rank.
    lengths = tuple(len(x.q) for x in inputs)
    owned = [Rows.of(3, [(seq, 0, length) for seq, length in enumerate(lengths)])]
    return run_recurrent(program_of(lengths, owned, taps.shape[1], len(taps) - 1), inputs, taps, dout)


def by_path(trees: Sequence[Tree], inputs: list[Recurrence], taps: Floats, dout: list[Floats]) -> RecurrentResult:
    # Each path of a tree as a document by itself; the gradient of an output counts in one of them.
    outs, grads, taps_grad = [0 * of for of in dout], [], 0 * taps
    for seq, (tree, x) in enumerate(zip(trees, inputs, strict=True)):
        starts = np.cumsum([0, *(segment.length for segment in tree)]).tolist()
        total = Recurrence(*(0 * getattr(x, each.name) for each in fields(x)))
        seen = np.zeros(starts[-1], dtype=bool)
        for leaf in {*range(len(tree))}.difference(segment.parent for segment in tree):
            path, at = list[int](), leaf
            while at >= 0:
                path, at = [*range(starts[at], starts[at + 1]), *path], tree[at].parent
            of = np.array(path)
            found = alone([x.at(of)], taps, [np.where(seen[of, None, None], 0.0, dout[seq][of])])
            seen[of], outs[seq][of] = True, found.out[0]
            assert found.taps_grad is not None
            taps_grad = taps_grad + found.taps_grad
            for each in fields(total):
                getattr(total, each.name)[of] += getattr(found.grads[0], each.name)
        grads.append(total)
    return RecurrentResult(tuple(outs), tuple(grads), taps_grad)


def worst(one: RecurrentResult, other: RecurrentResult) -> float:
    # The largest difference of any output or gradient, of the largest value of its kind.
    pairs = list(zip(one.out, other.out, strict=True))
    pairs += [
        (getattr(a, each.name), getattr(b, each.name))
        for a, b in zip(one.grads, other.grads, strict=True)
        for each in fields(a)
    ]
    if one.taps_grad is not None and other.taps_grad is not None:
        pairs.append((one.taps_grad, other.taps_grad))
    return max((float(np.abs(a - b).max()) / max(1.0, float(np.abs(b).max())) for a, b in pairs if a.size), default=0.0)


def off(program: RecurrentProgram, seed: int, kind: LayerKind) -> float:
    # How far a program is from each sequence alone.
    if not program.lengths or not program.num_heads:
        return 0.0
    x, taps, dout = draw(kind, program.lengths, program.num_heads, program.halo, seed)
    wanted = by_path(program.trees, x, taps, dout) if program.trees else alone(x, taps, dout)
    return worst(run_recurrent(program, x, taps, dout), wanted)


# One change of a program: its name and the rows of an op, changed.
def changed(program: RecurrentProgram, rng: random.Random) -> tuple[str, RecurrentProgram]:
    ops = [*program.forward, *program.backward]
    at = rng.randrange(len(ops))
    op, first = ops[at], len(program.forward)
    table = as_array(op.transfers if isinstance(op, Exchange) else op.rows).copy()
    row = rng.randrange(len(table))
    what = rng.choice(["op dropped", "row dropped", "row twice", "column", "heads", "order", "one op earlier"])
    if what == "op dropped":
        del ops[at]
        first -= at < first
    elif what == "one op earlier":
        earlier = max(at - 1, 0 if at < first else first)
        ops[at], ops[earlier] = ops[earlier], op
        ids = iter(sorted(each.id for each in ops if isinstance(each, Exchange)))
        ops = [replace(each, id=next(ids)) if isinstance(each, Exchange) else each for each in ops]
    else:
        if what == "row dropped":
            table = np.delete(table, row, axis=0)
        elif what == "row twice":
            table = np.insert(table, row, table[row], axis=0)
        elif what == "order":
            table[[row, row - 1]] = table[[row - 1, row]]
        else:
            heads = [Transfer.HEAD_START, Transfer.HEAD_STOP] if isinstance(op, Exchange) else [5, 6]
            column = rng.choice(heads) if what == "heads" else rng.randrange(table.shape[1])
            table[row, column] += rng.choice([-1, 1])
        ops[at] = with_rows(op, table)
    return what, replace(program, forward=tuple(ops[:first]), backward=tuple(ops[first:]))


def with_rows(op: RecurrentOp, table: np.ndarray) -> RecurrentOp:
    return replace(op, transfers=as_rows(table)) if isinstance(op, Exchange) else replace(op, rows=as_rows(table))

"""Programs that are no longer what their forest shows; what the executor's kernels compute of any."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import as_array, as_rows
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.program import Attend, Program
from megatron_balance.runtime.kernels.base import hidden
from megatron_balance.runtime.lower import lowering
from tests.support import forests

_HOST = torch.device("cpu")


def computed(program: Program) -> list[np.ndarray]:
    # How often each (query, key) pair of each sequence is computed, [T, T]: by the entries that the
    # executor makes of all launches forward, as if buffers held whole sequences.
    base = np.cumsum([0, *program.lengths])
    counted = np.zeros((base[-1], base[-1]), dtype=int)
    for op in program.forward:
        if not isinstance(op, Attend):
            continue
        rows = as_array(op.pairs)
        pairs, launch = lowering._simple_pairs(rows.T, np.zeros(len(rows), dtype=int), program.mask)
        q_row, k_row = (base[pairs[Pair.SEQ]] + pairs[column] for column in (Pair.Q_START, Pair.K_START))
        fused = lowering._fuse(pairs, launch, q_row, k_row, program.mask)
        for entries in lowering._entries(fused, 1):
            for at, (queries, keys) in enumerate(zip(entries.q, entries.k, strict=True)):
                mask = hidden(entries, at, _HOST)
                counted[slice(*queries), slice(*keys)] += 1 if mask is None else ~mask.numpy()
    return [counted[a:b, a:b] for a, b in zip(base, base[1:], strict=False)]


def as_shown(program: Program, forest: Forest) -> bool:
    """Whether the forward computes each pair that the forest shows once, and no other."""
    each = zip(computed(program), forests.dense(forest), strict=True)
    return all(np.array_equal(ours, shown.astype(int)) for ours, shown in each)


def of_rows(rng: random.Random, program: Program, count: int) -> Iterator[tuple[str, Program]]:
    """Programs with one row lengthened, shifted, dropped, joined over others, or exchanged."""
    launches = [at for at, op in enumerate(program.forward) if isinstance(op, Attend)]
    for _ in range(count):
        at = rng.choice(launches)
        op = program.forward[at]
        assert isinstance(op, Attend)
        rows = as_array(op.pairs).copy()
        row = rng.randrange(len(rows))
        length, how = program.lengths[rows[row, Pair.SEQ]], rng.choice(sorted(_CHANGES))
        changed = _CHANGES[how](rng, rows, row, length)
        if len(changed) and (changed[:, Pair.Q_START] < changed[:, Pair.Q_STOP]).all():
            ops = (*program.forward[:at], replace(op, pairs=as_rows(changed)), *program.forward[at + 1 :])
            yield how, replace(program, forward=ops)


def _moved(column: int, by: int):
    def change(rng: random.Random, rows: np.ndarray, row: int, length: int) -> np.ndarray:
        rows[row, column] = np.clip(rows[row, column] + by * rng.randint(1, 3), 0, length)
        return rows

    return change


def _shifted(rng: random.Random, rows: np.ndarray, row: int, length: int) -> np.ndarray:
    start, stop = rng.choice([(Pair.Q_START, Pair.Q_STOP), (Pair.K_START, Pair.K_STOP)])
    by = np.clip(rng.choice([-2, -1, 1, 2]), -rows[row, start], length - rows[row, stop])
    rows[row, [start, stop]] += by
    return rows


def _dropped(rng: random.Random, rows: np.ndarray, row: int, length: int) -> np.ndarray:
    del rng, length
    return np.delete(rows, row, axis=0)


def _joined(rng: random.Random, rows: np.ndarray, row: int, length: int) -> np.ndarray:
    # One run of keys, or of queries, over what lies between, siblings too.
    del length
    same, start, stop = rng.choice(
        [(Pair.QUERY, Pair.K_START, Pair.K_STOP), (list(Pair.KEY), Pair.Q_START, Pair.Q_STOP)]
    )
    alike = (rows[:, same] == rows[row, same]).all(axis=1)
    rows[row, [start, stop]] = rows[alike, start].min(), rows[alike, stop].max()
    alike[row] = False
    return rows[~alike]


def _exchanged(rng: random.Random, rows: np.ndarray, row: int, length: int) -> np.ndarray:
    del length
    other = rng.choice(np.flatnonzero(rows[:, Pair.SEQ] == rows[row, Pair.SEQ]).tolist())
    rows[row, Pair.K_SPAN] = rows[other, Pair.K_SPAN]
    return rows


_CHANGES = {
    "queries earlier": _moved(Pair.Q_START, -1),
    "queries later": _moved(Pair.Q_STOP, 1),
    "keys earlier": _moved(Pair.K_START, -1),
    "keys later": _moved(Pair.K_STOP, 1),
    "shifted": _shifted,
    "dropped": _dropped,
    "joined": _joined,
    "exchanged": _exchanged,
}


def of_masks(rng: random.Random, forest: Forest, count: int) -> Iterator[tuple[str, Forest]]:
    """Forests of as many tokens with a segment below another, of the other kind, or cut elsewhere."""
    for _ in range(count):
        seq = rng.randrange(len(forest.trees))
        tree = list(forest.trees[seq])
        at, how = rng.randrange(len(tree)), rng.choice(["parent", "kind", "edge", "window"])
        window = forest.window
        if how == "parent" and at:
            tree[at] = tree[at]._replace(parent=rng.randrange(at))
        elif how == "edge" and at and tree[at - 1].length > 1:
            tree[at - 1] = tree[at - 1]._replace(length=tree[at - 1].length - 1)
            tree[at] = tree[at]._replace(length=tree[at].length + 1)
        elif how == "window" and window:
            window += rng.choice([-1, 1] if window > 1 else [1])
        else:
            how = "kind"
            tree[at] = tree[at]._replace(full=not tree[at].full)
        try:
            yield how, Forest((*forest.trees[:seq], tuple(tree), *forest.trees[seq + 1 :]), window)
        except ConfigError:
            continue

"""DistCA's scheduling of trees: to it a segment is a run of queries of a causal sequence of its own.

The queries of a causal segment of n tokens behind a path of p attend as queries [p, p + n) of a
causal sequence do: areas, tiles and the closed forms of Appendix B hold as they are. All queries
of a full segment see as many keys, so it goes as runs of at most `RUN` queries, each as the part of
a causal sequence that has its area.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Ints, overlaps, ranges, run_bounds
from megatron_balance.ir.columns import Placed, Task
from megatron_balance.ir.forest import Forest

# Queries of a full segment in a run: fewer even the pairs, more move fewer keys.
RUN = 512


class Paths(NamedTuple):
    """First keys that runs have in common: those of the segments above both.

    `segment`: of each run. By segment: `parent`, -1: of a root; `depth`: tokens of its path, its own
    included; `runs`: its own; `below`: those and of all below it.
    """

    segment: list[int]
    parent: list[int]
    depth: list[int]
    runs: list[range]
    below: list[range]

    def above(self, run: int) -> Iterator[int]:
        """Segments from the run's own to its root."""
        segment = self.segment[run]
        while segment >= 0:
            yield segment
            segment = self.parent[segment]

    def relatives(self, run: int) -> tuple[range, int]:
        """The runs of the same tree, and the most keys that a run has in common with another one."""
        own, *above = self.above(run)
        alone = len(self.below[own]) == 1
        return self.below[[own, *above][-1]], self.depth[own] if not alone else self.depth[above[0]] if above else 0

    def num_common(self, run: int, other: int) -> int:
        """Keys that two runs have in common."""
        one, two = self.segment[run], self.segment[other]
        while one != two:  # parents stand before their children
            if one > two:
                one = self.parent[one]
            else:
                two = self.parent[two]
        return self.depth[one] if one >= 0 else 0


class _SegmentRuns(NamedTuple):
    """By run [n]: `seq`, `start`, `stop`: of its queries; `segment`: row of `Segments`; `shift`: from
    its queries to those of its causal sequence, which ends with the last of them, at `seen`.
    """

    seq: Ints
    start: Ints
    stop: Ints
    segment: Ints
    shift: Ints
    seen: Ints


def schedule_trees(owned: Ints, forest: Forest, schedule: Callable[[Ints, Sequence[int], Paths], Ints]) -> Ints:
    """Attention tasks [m, 6] of trees, their keys as hulls: a mask hides what is not on a path.

    `owned`: `Placed` rows [n, 4].
    `schedule`: makes tasks of rows, lengths and paths of runs.
    """
    runs = _runs(forest)
    row, run = overlaps(owned[:, Placed.SEQ :], np.stack((runs.seq, runs.start, runs.stop), axis=1))
    pieces = owned[row]
    pieces[:, Placed.START] = np.maximum(pieces[:, Placed.START], runs.start[run]) + runs.shift[run]
    pieces[:, Placed.STOP] = np.minimum(pieces[:, Placed.STOP], runs.stop[run]) + runs.shift[run]
    pieces[:, Placed.SEQ] = run
    tasks = schedule(pieces, runs.seen.tolist(), _paths(forest, runs))
    run = tasks[:, Task.SEQ].copy()
    tasks[:, [Task.Q_START, Task.Q_STOP]] -= runs.shift[run, None]
    tasks[:, Task.SEQ] = runs.seq[run]
    tasks[:, Task.K_STOP] = forest.keys(tasks[:, Task.SEQ], tasks[:, Task.Q_STOP] - 1)[1]
    return joined(tasks)


def _runs(forest: Forest) -> _SegmentRuns:
    of = forest.segments
    sizes = of.stop - of.start
    segment, number = ranges(np.zeros_like(sizes), np.where(of.full, -(-sizes // RUN), 1))
    start = of.start[segment] + number * RUN
    stop = np.where(of.full[segment], np.minimum(start + RUN, of.stop[segment]), of.stop[segment])
    # A causal segment sees the last key of its path at its last query; a full one's queries see
    # them all, as those of a causal run do on average that ends half its own queries later.
    seen = (of.stop - of.shift)[segment] + np.where(of.full[segment], (stop - start) // 2, 0)
    seq = np.searchsorted(of.base, segment, side="right") - 1
    return _SegmentRuns(seq, start, stop, segment, seen - stop, seen)


def _paths(forest: Forest, runs: _SegmentRuns) -> Paths:
    of, trees = forest.segments, zip(forest.trees, forest.segments.base.tolist(), strict=False)
    parent = [base + each.parent if each.parent >= 0 else -1 for tree, base in trees for each in tree]
    first, stop = (runs.segment.searchsorted(np.arange(len(parent)), side).tolist() for side in ("left", "right"))
    own = list(map(range, first, stop))
    for segment in range(len(parent) - 1, 0, -1):
        if (above := parent[segment]) >= 0:
            stop[above] = max(stop[above], stop[segment])
    depth = (of.stop - of.shift).tolist()
    return Paths(runs.segment.tolist(), parent, depth, own, list(map(range, first, stop)))


def joined(tasks: Ints) -> Ints:
    """Tasks by rank, sequence and query, those that follow one another as one."""
    tasks = tasks[np.lexsort((tasks[:, Task.Q_START], tasks[:, Task.SEQ], tasks[:, Task.RANK]))]
    parted = (tasks[1:, : Task.SEQ + 1] != tasks[:-1, : Task.SEQ + 1]).any(axis=1)
    bounds = run_bounds(parted | (tasks[1:, Task.Q_START] != tasks[:-1, Task.Q_STOP]), len(tasks))
    rows = tasks[bounds[:-1]]
    rows[:, Task.Q_STOP] = tasks[bounds[1:] - 1, Task.Q_STOP]
    rows[:, Task.K_STOP] = np.maximum.reduceat(tasks[:, Task.K_STOP], bounds[:-1])
    return rows

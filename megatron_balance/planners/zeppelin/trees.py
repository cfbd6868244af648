"""Trees on groups of ranks: the same share of tokens and of visible pairs on each, in few runs.

All trees depth first, one behind the other, are a line of tokens; its ends joined make a circle. On
a circle some run of a share of the tokens has the same share of the pairs: runs of that many tokens
have it on average, and their pairs change little by little from one to the next. So two cuts part
tokens and pairs of a circle at once, for nodes first, then for ranks of a node; what a run leaves is
joined to a circle again. Of runs that are even enough the one is taken whose two cuts have the
shortest paths above them: so many keys that are seen behind a cut lie before it.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.ir.arrays import Bools, Ints, ranges
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import CAUSAL, Mask, SlidingWindow

# Pairs by which a run may miss its share, over those of the circle.
_EVEN = 0.002
# Runs of a circle that are looked at.
_RUNS = 1 << 11


class _TokenLine(NamedTuple):
    """`begin` [trees + 1]: where trees begin on the line. By segment: `start`, `stop` on the line;
    `above`: tokens of the path to its first; `pairs`: of all queries before it; `full`.
    """

    begin: Ints
    start: Ints
    stop: Ints
    above: Ints
    pairs: Ints
    full: Bools
    mask: Mask

    @classmethod
    def of(cls, forest: Forest) -> "_TokenLine":
        of, begin = forest.segments, np.cumsum([0, *forest.lengths])
        tree = np.repeat(begin[:-1], np.diff(of.base))
        mask = SlidingWindow(forest.window) if forest.window else CAUSAL
        line = cls(begin, of.start + tree, of.stop + tree, of.start - of.shift, np.zeros_like(tree), of.full, mask)
        own = line._pairs_in(np.arange(len(tree)), of.stop - of.start)
        return line._replace(pairs=np.cumsum(own) - own)

    def _pairs_in(self, segment: Ints, tokens: Ints) -> Ints:
        # Of the first so many queries of segments.
        above, later = self.above[segment], (self.stop - self.start)[segment] - 1
        of_paths = self.mask.num_pairs(above + tokens) - self.mask.num_pairs(above)
        return of_paths + self.full[segment] * (tokens * later - tokens * (tokens - 1) // 2)

    def at(self, token: Ints) -> tuple[Ints, Ints]:
        """Pairs of all queries before a token, and tokens of its path."""
        segment = np.searchsorted(self.start, token, side="right") - 1
        own = token - self.start[segment]
        return self.pairs[segment] + self._pairs_in(segment, own), self.above[segment] + own


def dealt(forest: Forest, cluster: Cluster) -> Ints:
    """`Placed` rows of all tokens."""
    line, parts = _TokenLine.of(forest), list[Ints]()
    waiting = [(np.array([[0, line.begin[-1]]]), cluster.num_ranks)]
    while waiting:
        circle, count = waiting.pop()
        if count == 1:
            parts.append(circle)
            continue
        node = cluster.node_size if count > cluster.node_size else 1
        first = max(1, count // 2 // node) * node
        run, others = _parted(line, circle, first / count)
        waiting += [(others, count - first), (run, first)]
    rows = np.concatenate(parts)
    # Cut where trees begin.
    first = np.searchsorted(line.begin, rows[:, 0], side="right") - 1
    row, seq = ranges(first, np.searchsorted(line.begin, rows[:, 1]))
    rank = np.repeat(np.arange(cluster.num_ranks), [*map(len, parts)])[row]
    start, stop = np.maximum(rows[row, 0], line.begin[seq]), np.minimum(rows[row, 1], line.begin[seq + 1])
    return np.column_stack([rank, seq, start - line.begin[seq], stop - line.begin[seq]])


def _parted(line: _TokenLine, circle: Ints, share: float) -> tuple[Ints, Ints]:
    """A run with a share of the circle's tokens and pairs, and what it leaves. `circle`: rows (start,
    stop) of the line.
    """
    lengths = circle[:, 1] - circle[:, 0]
    ends, tokens = np.cumsum(lengths), int(lengths.sum())
    width = round(tokens * share)
    if not 0 < width < tokens:
        return (circle, circle[:0]) if width else (circle[:0], circle)
    before, behind = (line.at(circle[:, side])[0] for side in (0, 1))
    so_far = np.append(0, np.cumsum(behind - before))
    wanted = share * float(so_far[-1])

    def at(place: Ints) -> tuple[Ints, Ints]:
        # Pairs of the circle before each place, and the path there.
        row = np.searchsorted(ends, place, side="right")
        pairs, above = line.at(circle[row, 1] - ends[row] + place)
        return so_far[row] + pairs - before[row], above

    def looked_at(first: Ints) -> tuple[Ints, Ints, Ints]:
        # Runs by their first place, by how much their pairs miss what is wanted, and paths at cuts.
        (until, above), (more, other) = at(first), at((first + width) % tokens)
        found = more - until + (first + width >= tokens) * so_far[-1]
        return first, np.abs(found - wanted), above + other

    step = -(-tokens // _RUNS)
    runs = looked_at(np.arange(0, tokens, step))
    closest = int(runs[0][runs[1].argmin()])
    near = looked_at(np.arange(max(0, closest - step), min(tokens, closest + step)))
    first, missed, above = (np.concatenate(both) for both in zip(runs, near, strict=True))
    enough = np.flatnonzero(missed <= max(_EVEN * float(so_far[-1]), missed.min()))
    start = int(first[enough[above[enough].argmin()]])
    # What is of each row between two places, once around.
    twice, stops = np.concatenate([circle, circle]), np.concatenate([ends, ends + tokens])
    parts: list[Ints] = []
    for begin, end in ((start, start + width), (start + width, start + tokens)):
        place = twice[:, 1] - stops
        rows = np.column_stack([np.maximum(twice[:, 0], place + begin), np.minimum(twice[:, 1], place + end)])
        parts.append(rows[rows[:, 0] < rows[:, 1]])
    return parts[0], parts[1]

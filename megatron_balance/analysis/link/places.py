"""Where the rectangles of a link lie in the memory of the two ranks that exchange them."""

from __future__ import annotations

import numpy as np

from megatron_balance.analysis.link.shards import Shard, runs
from megatron_balance.analysis.link.table import WeightPiece
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints


class WeightPlace:
    """Columns of a table of places: a strided matrix in the flat tensor that a rank has of a
    parameter.
    """

    WIDTH = 5
    PARAMETER, START, ROWS, COLUMNS, STRIDE = range(5)


def places(pieces: Ints, shards: Ints) -> Ints:
    """Where each piece lies on the rank that has these shards [n, Place.WIDTH].

    A rank's shards of a parameter lie in one flat tensor, one behind the other, row by row: for an
    owner its range of the parameter (`Base.owned`), for a role the weight itself (`held`).

    Args:
        pieces: rows of a link that this rank sends, or receives.
        shards: rows of one rank, in the order of `Base.owned` or `held`.

    Raises:
        ConfigError: a piece that lies in none of the shards.
    """
    order = np.argsort(shards[:, Shard.PARAMETER], kind="stable")
    shards = shards[order]
    sizes = (shards[:, Shard.STOPS] - shards[:, Shard.STARTS]).prod(axis=1)
    before = np.cumsum(sizes) - sizes
    numbers = shards[:, Shard.PARAMETER]
    starts = before - before[np.searchsorted(numbers, numbers, side="left")]
    first = np.searchsorted(numbers, pieces[:, WeightPiece.PARAMETER], side="left")
    which, offset = runs(np.searchsorted(numbers, pieces[:, WeightPiece.PARAMETER], side="right") - first)
    shard = first[which] + offset
    inside = (pieces[which][:, WeightPiece.STARTS] >= shards[shard][:, Shard.STARTS]).all(axis=1)
    inside &= (pieces[which][:, WeightPiece.STOPS] <= shards[shard][:, Shard.STOPS]).all(axis=1)
    which, shard = which[inside], shard[inside]
    if not np.array_equal(which, np.arange(len(pieces))):
        wrong = int(np.setdiff1d(np.arange(len(pieces)), which)[0]) if len(which) < len(pieces) else int(which[0])
        raise ConfigError(
            f"places: piece {pieces[wrong].tolist()} of a link lies in {int((which == wrong).sum())} of this rank's "
            "shards, expected one; give the shards that the link was computed from"
        )
    mine = shards[shard]
    stride = mine[:, Shard.COLUMN_STOP] - mine[:, Shard.COLUMN_START]
    down, right = (pieces[:, WeightPiece.STARTS] - mine[:, Shard.STARTS]).T
    rows, columns = (pieces[:, WeightPiece.STOPS] - pieces[:, WeightPiece.STARTS]).T
    return np.stack(
        [pieces[:, WeightPiece.PARAMETER], starts[shard] + down * stride + right, rows, columns, stride], axis=1
    )

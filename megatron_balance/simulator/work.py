"""What ops cost on a machine: seconds of launches and of the merging and packing around them, the same for both engines.

Packing (gathering what is sent) and adding up what arrives run on the compute stream, as in the executor. What a ring compile on as
it came is not packed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.base import Floats, Ints
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.intervals import key
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.program import Kind
from megatron_balance.ir.visible import sees
from megatron_balance.simulator.machine import Machine

ADD = 1.5
"""Adding to what is held reads two values and writes one, packing reads one and writes one."""

STORED = (Kind.OUT, Kind.OUT_GRAD)
"""What is put away where it arrives; queries and keys stay as they came."""

ADDED = (Kind.Q_GRAD, Kind.KV_GRAD)
"""What is added to what is held."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Seconds of each launch: `kernel` alone, and `around` it: merging partial outputs, or adding up gradients."""

    kernel: Floats
    around: Floats

    @property
    def seconds(self) -> Floats:
        return self.kernel + self.around


def launches(pairs: Ints, launch: Ints, merging: Floats, machine: Machine, *, backward: bool) -> Launches:
    """Costs of launches [len(merging)]; `pairs` and `launch` as in `MachineCost.attend_s`. `merging`: 1 where a forward launch merges."""
    kernel = machine.cost.attend_s(pairs, launch, len(merging), backward=backward)
    seen = sees(pairs, CAUSAL)
    pairs, launch = pairs[seen], launch[seen]
    queries = _distinct(pairs[:, Pair.QUERY], launch, len(merging))
    if not backward:
        return Launches(
            kernel, merging * np.array([machine.cost.merge_s(tokens) for tokens in (queries / machine.model.num_heads).tolist()])
        )
    keys = _distinct(pairs[:, Pair.KEY], launch, len(merging))
    sizes = machine.payload.row_bytes
    num_bytes = queries * sizes[Kind.Q_GRAD] + keys * sizes[Kind.KV_GRAD]
    return Launches(kernel, np.array([ADD * machine.cost.pack_s(size) for size in num_bytes.tolist()]))


def _distinct(regions: Ints, launch: Ints, num_launches: int) -> Floats:
    """Tokens times heads of each launch's regions [n, 5], those that several of its pairs name counted once."""
    order = np.lexsort((regions[:, 3], key(regions[:, 0], regions[:, 1]), launch))
    regions, launch = regions[order], launch[order]
    fresh = np.ones(len(regions), dtype=bool)
    same = (regions[1:, [0, 1, 3]] == regions[:-1, [0, 1, 3]]).all(axis=1)
    fresh[1:] = ~same | (launch[1:] != launch[:-1])
    size = (regions[:, 2] - regions[:, 1]) * (regions[:, 4] - regions[:, 3])
    return np.bincount(launch[fresh], weights=size[fresh], minlength=num_launches)


def unpack_s(values: Ints, kinds: Ints, machine: Machine) -> float:
    """Seconds to put what arrives where it belongs; `values`: bytes of each message."""
    stored, added = (float(values[np.isin(kinds, of)].sum()) for of in (STORED, ADDED))
    pack_s = machine.cost.pack_s
    return (pack_s(stored) if stored else 0.0) + (ADD * pack_s(added) if added else 0.0)

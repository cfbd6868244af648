"""Items to machines of unlike speed, so that the last machine is done early: the problem.

Beside its items a machine may be charged for its largest one again (`behind` times): the first
microbatch of a pipeline goes through all its stages alone. A small one may count more there than the
machine works for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NOT_HELD = 1e15
"""Seconds in `MachinesProblem.work` where an item is not held: finite, so that sums stay numbers."""


@dataclass(frozen=True, slots=True)
class MachinesProblem:
    """Items and machines.

    `work` [kinds, items]: seconds of each item on a machine of each kind; `NOT_HELD`: not there.
    `kind`, `behind`, `start_s` [machines]: its kind, how often its largest item counts again, and
    seconds of a machine that has any item. `sizes` [items]: what limits are in.
    """

    work: Floats
    kind: Ints
    behind: Floats
    start_s: Floats
    sizes: Ints
    floor: Floats | None = None
    """[kinds]: seconds that the largest item counts at least where it counts again; None: its work."""

    @property
    def again(self) -> Floats:
        """Seconds of each item where it counts again as the largest [kinds, items]."""
        return self.work if self.floor is None else np.maximum(self.work, self.floor[:, None])

    @property
    def num_items(self) -> int:
        return self.work.shape[1]

    @property
    def num_machines(self) -> int:
        return len(self.kind)

    def seconds(self, machine_of: Ints) -> Floats:
        """Seconds of each machine [machines]; `machine_of` [items]."""
        at = self.kind[machine_of], np.arange(self.num_items)
        total = np.bincount(machine_of, weights=self.work[at], minlength=self.num_machines)
        largest = np.zeros(self.num_machines)
        np.maximum.at(largest, machine_of, self.again[at])
        return total + self.behind * largest + self.start_s * (largest > 0)

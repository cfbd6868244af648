"""Plans under a sliding window: each rank is brought the keys that lie before its own tokens."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from megatron_balance.compile.remap import fragments
from megatron_balance.ir.arrays import Ints, as_rows
from megatron_balance.ir.columns import Held, Placed, Task
from megatron_balance.ir.mask import CAUSAL, Mask, SlidingWindow
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, TaskTable

ZONE = "window"


@lru_cache(maxsize=64)
def under(plan: MicrobatchPlan, mask: Mask) -> MicrobatchPlan:
    """The plan of layers under `mask`, of tokens placed as in `plan`."""
    # Under a window all zones become one task table (`halo`), and routing, which was decided for
    # their transfers, stays with the remap alone. A window that no sequence is longer than shows
    # what a causal mask shows, and the zones stay.
    if plan.mask == mask:
        return plan
    assert isinstance(mask, SlidingWindow), mask
    assert plan.mask == CAUSAL, plan.mask
    if max(plan.lengths, default=0) <= mask.size:
        return plan
    routing = plan.routing
    if routing is not None:
        routing = replace(routing, zones=(REMAP,)) if REMAP in routing.zones else None
    return replace(plan, zones=(halo(plan, mask),), routing=routing, mask=mask)


# Under a window of W keys a query needs W - 1 keys before its own, so of a run of tokens on one
# rank only the W - 1 keys before it come from elsewhere: a halo. It is one exchange, straight from
# the ranks that hold these keys, then one launch; a key that nobody needs does not travel. Where
# tokens lie stays as the plan has it, whatever its comm patterns, so layers of a window and layers
# without one can share the rows of a microbatch. Work is then as even as the placement makes it: a
# query has W pairs wherever it is, but for the first of its sequence.
def halo(plan: MicrobatchPlan, mask: SlidingWindow) -> TaskTable:
    """The zone in which each rank attends its own queries of `plan`, over the keys that they see."""
    placed = fragments(plan)[:, Held.PLACED]
    return TaskTable(ZONE, as_rows(placed), as_rows(_tasks(placed, mask)))


def _tasks(placed: Ints, mask: SlidingWindow) -> Ints:
    tasks = np.empty((len(placed), Task.WIDTH), dtype=np.int64)
    tasks[:, Task.RANK], tasks[:, Task.QUERY] = placed[:, Placed.RANK], placed[:, Placed.FRAGMENT]
    start, stop = placed[:, Placed.START], placed[:, Placed.STOP]
    tasks[:, Task.K_START], tasks[:, Task.K_STOP] = mask.keys(placed[:, Placed.SEQ], start)[0], stop
    return tasks

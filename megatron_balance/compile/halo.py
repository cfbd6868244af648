"""Plans under a sliding window or of trees: each rank is brought the keys that its own tokens see."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from megatron_balance.compile.remap import fragments
from megatron_balance.ir.arrays import as_rows, keys_of
from megatron_balance.ir.columns import Held
from megatron_balance.ir.forest import Forest, over
from megatron_balance.ir.mask import CAUSAL, Mask, SlidingWindow
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, TaskTable

ZONE = "window"


@lru_cache(maxsize=64)
def under(plan: MicrobatchPlan, mask: Mask) -> MicrobatchPlan:
    """The plan of layers under `mask`, of tokens placed as in `plan`; its trees stay."""
    # All zones become one task table, and routing, which was decided for their transfers,
    # stays with the remap alone. A window that no sequence is longer than shows what its mask shows
    # without it, and the zones stay.
    if isinstance(plan.mask, Forest) and not isinstance(mask, Forest):
        mask = over(mask, plan.mask.trees)
    all_seen = mask.window_size >= max(plan.lengths, default=0)
    if plan.mask in (mask, mask.without_window if all_seen else mask):
        return plan
    assert isinstance(mask, SlidingWindow | Forest), mask
    assert plan.mask in (CAUSAL, mask.without_window), plan.mask
    routing = plan.routing
    if routing is not None:
        routing = replace(routing, zones=(REMAP,)) if REMAP in routing.zones else None
    return replace(plan, zones=(_halo(plan, mask),), routing=routing, mask=mask)


# Under a window of W keys a query needs W - 1 keys before its own, so of a run of tokens on one
# rank only the W - 1 keys before it come from elsewhere: a halo. Of a tree it needs what is on its
# path. It is one exchange, straight from the ranks that hold these keys, then one launch; a key
# that nobody needs does not travel. Where tokens lie stays as the plan has it, whatever its comm
# patterns, so layers of a window and layers without one can share the rows of a microbatch. Work is
# then as even as the placement makes it: under a window a query has W pairs wherever it is, but for
# the first of its sequence; of a tree no placement by lengths alone is even.
def _halo(plan: MicrobatchPlan, mask: SlidingWindow | Forest) -> TaskTable:
    # The zone in which each rank attends its own queries of `plan`, over the keys that they see. Of
    # trees the pattern takes of these keys what is on paths.
    placed = fragments(plan)[:, Held.PLACED]
    _, seq, start, stop = placed.T
    tasks = np.column_stack([placed, *keys_of(seq, start, stop, mask)])
    return TaskTable(ZONE, as_rows(placed), as_rows(tasks))

"""The weight of a rank's share of the load-balancing loss, with unequal tokens per rank.

With per-token loss Megatron weights each rank's share by that rank's own token count times the
group size, which is the group's count only if all ranks hold as many (the derivation in the
router's comment says so). We give every rank the group's mean count, so that the shares add up to
the auxiliary loss of the whole microbatch times its tokens, however they are placed.

The same change mends a slip of 0.19.2: under a padding mask the "local" count is read from a tensor
that the all-reduce before it has overwritten with the group's, so the loss is too strong by the
size of the group.

A group may hold no token at all: a replica of ranks that only serve attention, or more replicas
than tokens. Its loss is 0, not 0 / 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_balance.patches import Patch


def mean_of_group(count: Callable[..., Any]) -> Callable[..., Any]:
    """`get_tokens_per_expert_and_token_count` with the group's mean as local token count.

    The total, a divisor, is at least 1. Megatron's branch dev names several groups, `reduce_groups`.
    """

    @functools.wraps(count)
    def counted(
        routing_map: Any,
        reduce_group: dist.ProcessGroup,
        topk: int | None = None,
        with_padding_mask: bool = False,
        **groups: Sequence[dist.ProcessGroup],
    ) -> Any:
        tokens_per_expert, _, total = count(
            routing_map, reduce_group, topk=topk, with_padding_mask=with_padding_mask, **groups
        )
        divisor = total.clamp(min=1) if with_padding_mask else total
        size = math.prod(group.size() for group in groups.get("reduce_groups", (reduce_group,)))
        return tokens_per_expert, total / size, divisor

    return counted


PATCHES = (
    Patch(
        target="megatron.core.transformer.moe.router:get_tokens_per_expert_and_token_count",
        wrap=mean_of_group,
        reviewed={"e6a448660cfd": "0.19.x, 0.18.2, 0.20 of 2026-08", "c6db4d4f28ed": "dev of 2026-08"},
        why="with unequal tokens per rank the shares of the auxiliary loss would be weighted by placement",
    ),
)

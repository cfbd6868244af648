"""Agreement: ranks compare their plans, and a difference is an error on every rank."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from megatron_balance.errors import PlanMismatchError
from megatron_balance.runtime.groups import Groups


def check_agreement(fingerprint: str, groups: Groups, device: torch.device | str = "cpu") -> None:
    """Compare `fingerprint` (16 hex digits) across the pool. Collective.

    Raises:
        PlanMismatchError: on every rank of the pool, naming the ranks that differ from most others.
            Since all raise, none is left waiting in an exchange.
    """
    if groups.pool is None:
        return
    if dist.get_backend(groups.pool) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    words = [int(fingerprint[i : i + 8], 16) for i in (0, 8)]  # 64 bits do not fit an int64
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    every = torch.empty(2 * groups.size, dtype=torch.int64, device=device)
    dist.all_gather(list(every.view(-1, 2).unbind()), mine, group=groups.pool)
    fingerprints = [f"{a:08x}{b:08x}" for a, b in every.view(-1, 2).tolist()]
    common, count = Counter(fingerprints).most_common(1)[0]
    if count == groups.size:
        return
    others = ", ".join(f"rank {groups.ranks[i]} has {f}" for i, f in enumerate(fingerprints) if f != common)
    raise PlanMismatchError(
        f"ranks planned differently: {count} of {groups.size} ranks have plan {common}, but {others}. "
        "Check that all ranks run the same version of megatron_balance with the same configuration"
    )

"""Agreement: ranks compare their plans, and a difference is an error on every rank.

A plan that is made before the samples are read is announced with their lengths (`training.lengths`),
and costs no collective of its own; another one is compared once it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_balance.errors import PlanMismatchError
from megatron_balance.runtime.groups import Groups


def check_agreement(
    fingerprint: str,
    groups: Groups,
    device: torch.device | str = "cpu",
    tensor_parallel: dist.ProcessGroup | None = None,
) -> None:
    """Compare `fingerprint` (16 hex digits) across the pool and the tensor-parallel group. Collective.

    One reduction of 32 bytes where all is well.

    Raises:
        PlanMismatchError: on every rank, naming those of the pool that differ from most others.
            Since all raise, none is left waiting in an exchange.
    """
    reduced = [group for group in (groups.pool, tensor_parallel) if group is not None]
    if not reduced:
        return
    if dist.get_backend(reduced[0]) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    words = [int(fingerprint[i : i + 8], 16) for i in (0, 8)]  # 64 bits do not fit an int64
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    ends = torch.cat([mine, -mine])
    for group in reduced:
        dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group)
    least, most = ends.view(2, 2).tolist()
    if least == [-word for word in most]:
        return
    # All ranks come here: pools of one stage differ, or their tensor-parallel peers do.
    every = mine.clone()[None]
    if groups.pool is not None:
        every = torch.empty(groups.size, 2, dtype=torch.int64, device=device)
        dist.all_gather(list(every.unbind()), mine, group=groups.pool)
    raise _mismatch({groups.ranks[i]: f"{a:08x}{b:08x}" for i, (a, b) in enumerate(every.tolist())})


def check_announced(announced: Mapping[int, str]) -> str:
    """The plan that all ranks announced, by fingerprint; empty: none of them did.

    `announced`: by global rank; the same on all ranks, so that all of them raise.

    Raises:
        PlanMismatchError: names the ranks that differ from most others.
    """
    if len(set(announced.values())) > 1:
        raise _mismatch(announced)
    return next(iter(announced.values()), "")


def _mismatch(fingerprints: Mapping[int, str]) -> PlanMismatchError:
    common, count = Counter(fingerprints.values()).most_common(1)[0]
    others = ", ".join(f"rank {rank} has {f or 'none'}" for rank, f in fingerprints.items() if f != common)
    others = others or "their tensor-parallel peers have others"
    return PlanMismatchError(
        f"ranks planned differently: {count} of {len(fingerprints)} ranks have plan {common or 'none'}, but {others}. "
        "Check that all ranks run the same version of megatron_balance with the same configuration"
    )

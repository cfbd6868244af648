"""A rank is killed, or frozen, in the middle of training: all others end by themselves and name it.

Where ranks share a GPU this is tried without MPS, whose server lets no client go that was killed.
"""

import signal
from collections.abc import Iterator, Mapping
from typing import Any

from tools.gpu.pretrain_ranks import FLAGS, LAYERED, RINGS, training
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 50.0
RANKS, FAILING, AFTER_STEPS = 4, 1, 3
TIMEOUT_S = 4
"""Of Megatron's process groups, once training runs."""
GRACE_S = 6.0
"""For the others, once the first of them has ended."""
WAYS: Mapping[str, Mapping[str, Any]] = {"killed": {"kill_only": FAILING}, "frozen": {"freeze": FAILING}}
LEFT = {way: Figure(f"ranks that do not end by themselves, one {way}", "", Target("equal", 0)) for way in WAYS}
NAMED = {way: Figure(f"ranks that name the one that was {way}", "", Target("at least", 1)) for way in WAYS}
FIGURES = tuple(figure for way in WAYS for figure in (LEFT[way], NAMED[way]))


def measure(context: Context) -> Iterator[Row]:
    num_ranks = min(RANKS, context.ranks)
    others = [rank for rank in range(num_ranks) if rank != FAILING]
    flags = {**FLAGS, "train-iters": 5000, "distributed-timeout-seconds-after-init": TIMEOUT_S}
    config = {"cluster": {"ranks_per_node": num_ranks // 2}, **(LAYERED if num_ranks > 2 else {"remap": True})}
    with training(context, mps=False) as train:
        for at, (way, how) in enumerate(WAYS.items()):
            results: list[Any] = []
            limit = context.left_s() / (len(WAYS) - at) - 4.0  # stacks, and Megatron's processes, take a while to end
            run = train.run(
                num_ranks, dict(RINGS), flags, config=config, expect=results.append, kill_after=AFTER_STEPS,
                deadline_s=limit, grace_s=min(GRACE_S, limit), **how,
            )  # fmt: skip
            (result,) = results
            if len(run.steps) < AFTER_STEPS or result.codes[FAILING] != -signal.SIGKILL:
                raise RuntimeError(f"no rank was {way}: exit codes {result.codes}; {result.tail(0)[-300:]}")
            codes = f"exit codes {result.codes}, {result.seconds:.0f} s in all"
            yield LEFT[way].measured(sum(result.codes[rank] in (0, -signal.SIGKILL) for rank in others), codes)
            named = sum(f"rank {FAILING} of {num_ranks} does not answer" in result.log(rank) for rank in others)
            yield NAMED[way].measured(named, f"of {len(others)}")

"""Train in plain PyTorch in every way that docs/torch.md names, and compare with one rank.

    python -m tools.torch_parity                  # all ways, some minutes each planner
    python -m tools.torch_parity --planners zeppelin --models gpt --steps 5
    python -m tools.torch_parity --waves          # zeppelin's waves: 8 ranks, heads, keep and replay

Largest differences over 20 steps: of the loss and of the gradient norm (relative), and of a
parameter's gradient at the first step (over its largest entry). 4 ranks on gloo, 8 with `--waves`.
The suite runs pairs of these (tests/dist/test_torch.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from megatron_balance.planners import PLANNERS
from tests.support import torch_jobs
from tests.support.pool import Pool
from tests.support.torch_jobs import Way

RANKS = 4
MOST = 1e-5


def ways(options: argparse.Namespace) -> list[Way]:
    """Every combination of the choices."""
    choices = product(
        options.models, options.planners, options.parallel, (False, True), (False, True), (1, 2), options.backward
    )
    return [
        Way(
            model=model,
            planner=planner,
            parallel=parallel,
            checkpointed=checkpointed,
            compiled=compiled,
            accumulate=accumulate,
            backward=backward,
            steps=options.steps,
            backend=options.backend,
        )
        for model, planner, parallel, checkpointed, compiled, accumulate, backward in choices
    ]


def waves(options: argparse.Namespace) -> list[Way]:
    """Waves on 2 nodes of 4 and 4 nodes of 2: MHA on groups of 2 and 4, 8 query heads a key-value
    head, and 6 heads on groups of 4; a backward that keeps and one that replays.
    """
    groups = {(8, 8): (2, 4), (8, 1): (2,), (6, 6): (4,)}
    return [
        Way(
            parallel="ddp",
            heads=heads,
            ranks_per_node=per_node,
            backward=backward,
            steps=options.steps,
            options=(("num_waves", 2), ("group_size", size)),
        )
        for per_node, backward, heads in product((4, 2), ("keep", "replay"), groups)
        for size in groups[heads]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ways; 0 if all agree with one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "llama"])
    parser.add_argument("--planners", nargs="+", default=list(PLANNERS))
    parser.add_argument("--parallel", nargs="+", default=["fsdp2", "ddp"])
    parser.add_argument("--backward", nargs="+", default=["keep"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="eager", help="of torch.compile, such as inductor")
    parser.add_argument("--json", type=Path, help="write all differences there")
    parser.add_argument("--waves", action="store_true", help="zeppelin's waves on 8 ranks (function waves)")
    options = parser.parse_args(argv)
    num_ranks = 2 * RANKS if options.waves else RANKS
    if options.waves:
        options.models, options.planners = ["gpt"], ["zeppelin"]
    started = time.monotonic()
    found = _run(waves(options) if options.waves else ways(options), num_ranks)
    wrong = [way for way, differences, graphs in found if max(differences) > MOST or (graphs > 0) != way.compiled]
    table = Table("model", "planner", "runs", "loss", "gradient norm", "gradient", "graphs")
    for model, planner in product(options.models, options.planners):
        of = [(d, graphs) for way, d, graphs in found if (way.model, way.planner) == (model, planner)]
        loss, norm, gradient = (max(d[at] for d, _ in of) for at in range(3))
        graphs = max(graphs for _, graphs in of)
        table.add_row(model, planner, str(len(of)), *(f"{x:.1e}" for x in (loss, norm, gradient)), str(graphs))
    Console().print(table)
    print(
        f"{len(found)} runs of {options.steps} steps in {time.monotonic() - started:.0f} s, {len(wrong)} of them wrong"
    )
    for way in wrong:
        print(f"wrong: {way}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps([(str(way), differences, graphs) for way, differences, graphs in found]))
    return 1 if wrong else 0


Found = tuple[Way, tuple[float, float, float], int]
"""A way, its largest differences, and the fewest graphs of a rank."""


def _run(chosen: Sequence[Way], num_ranks: int) -> list[Found]:
    ranks = Pool(timeout_s=900.0, num_ranks=num_ranks)
    expected: dict[tuple[object, ...], torch_jobs.Trained] = {}
    found: list[Found] = []
    try:
        for way in tqdm(chosen, unit="run"):
            key = (way.model, way.accumulate, way.heads)
            if key not in expected:
                expected[key] = torch_jobs.reference(way)
            trained = [each for (each,) in ranks.run(torch_jobs.train, num_ranks, [way])]
            each = [torch_jobs.differences(of_rank, expected[key]) for of_rank in trained]
            loss, norm, gradient = (max(column) for column in zip(*each, strict=True))
            found.append((way, (loss, norm, gradient), min(of_rank.graphs for of_rank in trained)))
            if way.options and not _in_waves(trained):
                raise SystemExit(f"no heads or no keys were exchanged: {way}")
    finally:
        ranks.close()
    return found


def _in_waves(trained: Sequence[torch_jobs.Trained]) -> bool:
    """Whether ranks exchanged heads inside groups and keys, by one pattern."""
    counted = [of_rank.counted for of_rank in trained]
    return (
        all(each.patterns == {"waves"} and each.all_to_alls > 0 for each in counted)
        and sum(each.kv_tokens_received for each in counted) > 0
    )


if __name__ == "__main__":
    sys.exit(main())

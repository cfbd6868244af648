"""Train in plain PyTorch in every way that docs/torch.md names, and compare with one rank.

    python -m tools.torch_parity                  # all ways, some minutes each planner
    python -m tools.torch_parity --planners zeppelin --models gpt --steps 5
    python -m tools.torch_parity --waves          # zeppelin's waves: 8 ranks, heads, keep and replay
    python -m tools.torch_parity --compiled no --results runs.jsonl      # go on after an interruption

Largest differences over 20 steps: of the loss and of the gradient norm (relative), and of a
parameter's gradient at the first step (over its largest entry). 4 ranks on gloo, 8 with `--waves`.
The suite runs pairs of these (tests/distributed/test_torch.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from megatron_balance.planners import PLANNERS
from tests.support import torch_jobs
from tests.support.pool import Pool
from tests.support.torch_jobs import Way

RANKS = 4
MOST = 1e-5
NO, YES = "no", "yes"
Found: TypeAlias = tuple[Way, tuple[float, float, float], int]
"""A way, its largest differences of losses, gradient norms and gradients, and its graphs."""


def ways(options: argparse.Namespace) -> list[Way]:
    """Every combination of the choices; those that compile nothing first, which are quick."""
    choices = product(
        options.compiled,
        options.models,
        options.planners,
        options.parallel,
        options.checkpointed,
        options.accumulate,
        options.backward,
    )
    return [
        Way(
            model=model,
            planner=planner,
            parallel=parallel,
            checkpointed=checkpointed == YES,
            compiled=compiled == YES,
            accumulate=accumulate,
            backward=backward,
            steps=options.steps,
            backend=options.backend,
        )
        for compiled, model, planner, parallel, checkpointed, accumulate, backward in choices
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
    parser.add_argument("--checkpointed", nargs="+", default=[NO, YES], choices=[NO, YES])
    parser.add_argument("--compiled", nargs="+", default=[NO, YES], choices=[NO, YES])
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--backward", nargs="+", default=["keep"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="eager", help="of torch.compile, such as inductor")
    parser.add_argument("--results", type=Path, help="a line of JSON for each run; runs that have one are left out")
    parser.add_argument("--waves", action="store_true", help="zeppelin's waves on 8 ranks (function waves)")
    options = parser.parse_args(argv)
    num_ranks = 2 * RANKS if options.waves else RANKS
    if options.waves:
        options.models, options.planners = ["gpt"], ["zeppelin"]
    results: Path | None = options.results
    found: list[Found] = [] if results is None or not results.exists() else _read(results)
    done = [way for way, _, _ in found]
    started = time.monotonic()
    chosen = [way for way in (waves(options) if options.waves else ways(options)) if way not in done]
    found += _run(chosen, num_ranks, results)
    print(f"{time.monotonic() - started:.0f} s")
    return _show(found)


def _show(found: Sequence[Found]) -> int:
    """Print a row for each model and planner, and the runs that are wrong; 1 if one is."""
    wrong = [way for way, differences, graphs in found if max(differences) > MOST or (graphs > 0) != way.compiled]
    table = Table("model", "planner", "runs", "compiled", "loss", "gradient norm", "gradient", "graphs")
    for model, planner in dict.fromkeys((way.model, way.planner) for way, _, _ in found):
        of = [(way, d, graphs) for way, d, graphs in found if (way.model, way.planner) == (model, planner)]
        largest = (max(d[at] for _, d, _ in of) for at in range(3))
        graphs, compiled = max(graphs for _, _, graphs in of), sum(way.compiled for way, _, _ in of)
        table.add_row(model, planner, str(len(of)), str(compiled), *(f"{x:.1e}" for x in largest), str(graphs))
    Console().print(table)
    print(f"{len(found)} runs, {len(wrong)} of them wrong")
    for way in wrong:
        print(f"wrong: {way}", file=sys.stderr)
    return 1 if wrong else 0


def _run(chosen: Sequence[Way], num_ranks: int, results: Path | None) -> list[Found]:
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
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps([asdict(way), *found[-1][1:]]) + "\n")
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


def _read(results: Path) -> list[Found]:
    """The runs of earlier calls."""
    lines = (json.loads(line) for line in results.read_text(encoding="utf-8").splitlines())
    return [(_way(way), (loss, norm, gradient), graphs) for way, (loss, norm, gradient), graphs in lines]


def _way(body: dict[str, Any]) -> Way:
    """A way as JSON has it: lists where there were tuples."""
    return Way(**{**body, "heads": tuple(body["heads"]), "options": tuple(map(tuple, body["options"]))})


if __name__ == "__main__":
    sys.exit(main())

"""Train in plain PyTorch in every way that docs/torch.md names, and compare with one rank.

    python -m tools.torch_parity                  # all ways, some hours on two cores
    python -m tools.torch_parity --planners zeppelin --models gpt --steps 5
    python -m tools.torch_parity --models dit --planners g2n1+g1n2 --compiled yes
    python -m tools.torch_parity --compiled no --results runs.jsonl      # go on after an interruption
    python -m tools.torch_parity --results runs.jsonl --show             # the table of what has run

Largest differences over 20 steps: of the loss and of the gradient norm (relative), and of a
parameter's gradient at the first step (over its largest entry). 4 ranks on gloo.
Models: `gpt`, `llama` (an unmodified Transformers model), `dit` (the diffusion transformer of
scripts/examples, under planners of full attention and KnapFormer's interface on topologies). The
suite runs pairs of these (tests/distributed/test_torch.py).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from megatron_balance.planners import PLANNERS
from tests.support import dit_jobs, torch_jobs
from tests.support.pool import Pool
from tests.support.torch_jobs import Way

MODELS = ("gpt", "llama", "dit")
RANKS = 4
MOST = 1e-5
NO, YES = "no", "yes"
Found: TypeAlias = tuple[Way, tuple[float, float, float], int]
"""A way, its largest differences of losses, gradient norms and gradients, and its graphs."""


TOPOLOGIES = ("g1n4", "g2n2", "g4n1", "g2n1+g1n2", "g1n1", "g2n1")
"""Of KnapFormer's interface; the last two repeat as replicas."""


def fits(model: str, planner: str) -> bool:
    """Whether a model trains under a planner, or on a topology: the diffusion transformer attends
    fully, and has the interface that topologies are given to.
    """
    return model == "dit" if planner not in PLANNERS else model != "dit" or "full" in PLANNERS[planner].masks


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
        if fits(model, planner)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all agree with one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--planners", nargs="+", default=[*PLANNERS, *TOPOLOGIES], help="names, or topologies (dit)")
    parser.add_argument("--parallel", nargs="+", default=["fsdp2", "ddp"])
    parser.add_argument("--checkpointed", nargs="+", default=[NO, YES], choices=[NO, YES])
    parser.add_argument("--compiled", nargs="+", default=[NO, YES], choices=[NO, YES])
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--backward", nargs="+", default=["keep"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="eager", help="of torch.compile, such as inductor")
    parser.add_argument("--results", type=Path, help="a line of JSON for each run; runs that have one are left out")
    parser.add_argument("--show", action="store_true", help="run nothing; the table of --results")
    options = parser.parse_args(argv)
    results: Path | None = options.results
    found: list[Found] = [] if results is None or not results.exists() else _read(results)
    done = [way for way, _, _ in found]
    started = time.monotonic()
    chosen = [way for way in ways(options) if way not in done]
    if not options.show:
        found += _run(chosen, results)
        print(f"{time.monotonic() - started:.0f} s")
    return _show(found)


def _show(found: Sequence[Found]) -> int:
    """Print a row for each model, planner, and compiled or not, as Markdown, and the runs that are
    wrong; 1 if one is.
    """
    wrong = [way for way, differences, graphs in found if max(differences) > MOST or (graphs > 0) != way.compiled]
    print("| model | planner, topology | compiled by | runs | loss | gradient norm | gradient | graphs |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    kinds = dict.fromkeys(_kind(way) for way, _, _ in found)
    for kind in sorted(kinds, key=lambda kind: (kind[2], MODELS.index(kind[0]))):  # those not compiled first
        of = [each for each in found if _kind(each[0]) == kind]
        largest = [f"{max(differences[at] for _, differences, _ in of):.1e}" for at in range(3)]
        graphs = [number for _, _, number in of]
        counted = f"{min(graphs)} to {max(graphs)}" if max(graphs) else "-"
        print(f"| {' | '.join([*kind, str(len(of)), *largest, counted])} |")
    print(f"\n{len(found)} runs, {len(wrong)} of them wrong")
    for way in wrong:
        print(f"wrong: {way}", file=sys.stderr)
    return 1 if wrong else 0


def _kind(way: Way) -> tuple[str, str, str]:
    return way.model, way.planner, way.backend if way.compiled else "-"


def _run(chosen: Sequence[Way], results: Path | None) -> list[Found]:
    ranks = Pool(timeout_s=900.0, num_ranks=RANKS)
    expected: dict[tuple[object, ...], torch_jobs.Trained] = {}
    found: list[Found] = []
    try:
        for way in tqdm(chosen, unit="run"):
            jobs, given = (dit_jobs, dit_jobs.of(way)) if way.model == "dit" else (torch_jobs, way)
            key = (way.model, way.accumulate)
            if key not in expected:
                expected[key] = jobs.reference(given)
            trained = [each for (each,) in ranks.run(jobs.train, RANKS, [given])]
            each = [torch_jobs.differences(of_rank, expected[key]) for of_rank in trained]
            loss, norm, gradient = (max(column) for column in zip(*each, strict=True))
            found.append((way, (loss, norm, gradient), min(of_rank.graphs for of_rank in trained)))
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps([asdict(way), *found[-1][1:]]) + "\n")
    finally:
        ranks.close()
    return found


def _read(results: Path) -> list[Found]:
    lines = (json.loads(line) for line in results.read_text(encoding="utf-8").splitlines())
    return [(_way(way), (loss, norm, gradient), graphs) for way, (loss, norm, gradient), graphs in lines]


def _way(body: dict[str, Any]) -> Way:
    return Way(**{**body, "heads": tuple(body["heads"]), "options": tuple(map(tuple, body["options"]))})


if __name__ == "__main__":
    sys.exit(main())

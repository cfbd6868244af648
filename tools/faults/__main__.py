"""Look for faults, suite by suite, and go on where a run was ended.

    python -m tools.faults plans --count 20000 --folder out/faults
    python -m tools.faults all --share 0.01 --folder out/faults     # a hundredth of each
    python -m tools.faults plans --only 4711            # one case again, in words
    python -m tools.faults plans --again                # all that were faults; notes the mended
    python -m tools.faults show --folder out/faults     # the table of docs/measurements/faults.md
    python -m tools.faults keep --folder out/faults     # adds the folder's records to the committed

Counts are over all runs: `docs/measurements/faults.json` holds what is committed, and a run goes on
behind it. After `keep`, the records of the folder count no second time.

Exit code 1 if a fault was found. A whole run is many hours: `chrt -i 0` leaves the machine to others.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tools.faults import cases, digests, files, forests, layouts, mutants, plans, races, rendezvous, soak, training
from tools.faults.cases import Suite, Tally

SUITES = {
    suite.name: suite
    for suite in (
        Suite("plans", "random steps of every planner, some proved", 1_000_000, 200, plans.plans),
        Suite("mutants", "programs with one thing changed", 100_000, 200, mutants.mutants),
        Suite("ranks", "the same, proved rank by rank", 26_000, 200, mutants.by_ranks),
        Suite("gloo", "random plans on four gloo ranks against dense attention", 10_000, 20, plans.on_gloo),
        Suite("digests", "plans on an old CPU and under another hash seed", 10_000, 100, digests.digests),
        Suite("places", "a rank of a training run fails, by place and way", 220, 1, training.places),
        Suite("kills", "a random rank killed, the run resumed", 112, 1, training.kills),
        Suite("soak", "a long run of four ranks, with saves and evaluation", 1, 1, soak.soak),
        Suite("files", "damaged files, of each loader in turn", 170_000, 1000, files.files),
        Suite("rendezvous", "random programs under a model of NCCL's hosts", 10_000, 10, rendezvous.programs),
        Suite(
            "forests", "random trees under every planner, proved, and dense attention", 100_000, 100, forests.forests
        ),
        Suite("tree mutants", "programs of trees with a row or the mask changed", 20_000, 100, forests.mutants),
        Suite(
            "layouts", "random layouts and plans of recurrent layers, proved and judged", 100_000, 500, layouts.layouts
        ),
        Suite("layout mutants", "programs of these with one thing changed", 20_000, 200, layouts.mutants),
        Suite("races", "what a rank gives to its streams, on a model of the GPU", 1_000, 5, races.races),
    )
}


def main() -> int:
    """Run what the command line names; 1 if it found a fault."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description="Look for faults, suite by suite.")
    parser.add_argument("suite", choices=[*SUITES, "all", "show", "keep"])
    parser.add_argument("--count", type=int, help="cases over all runs with this folder; default: a whole run's")
    parser.add_argument("--share", type=float, default=1.0, help="of a whole run, in place of --count")
    parser.add_argument("--only", type=int, help="try this case alone, and say how it ended")
    parser.add_argument("--again", action="store_true", help="try the cases again that were faults")
    parser.add_argument("--folder", type=Path, default=Path("out/faults"), help="of the records")
    options = parser.parse_args()
    if options.suite == "show":
        show(options.folder)
        return 0
    if options.suite == "keep":
        cases.keep(SUITES, options.folder)
        return 0
    chosen = list(SUITES.values()) if options.suite == "all" else [SUITES[options.suite]]
    if options.only is not None:
        with chosen[0].open() as try_one:
            outcome = try_one(options.only)
        sys.stdout.write(f"{outcome.kind}\n{outcome.fault}\n" if outcome.fault else f"{outcome.kind}\n")
        return bool(outcome.fault)
    found = 0
    for suite in chosen:
        if options.again:
            found += len(cases.again(suite, options.folder).faults)
            continue
        count = options.count if options.count is not None else max(1, int(suite.wanted * options.share))
        found += len(cases.run(suite, count, options.folder).faults)
    show(options.folder)
    return found > 0


def show(folder: Path) -> None:
    """Print the records of a folder as a table, and the faults."""
    sys.stdout.write(
        "| suite | tried | of | faults | mended | how they ended | seconds |\n|---|---|---|---|---|---|---|\n"
    )
    for suite in SUITES.values():
        tally = cases.read(suite.name, folder)
        if tally.tried:
            counts = (f"{tally.tried:,}", f"{suite.wanted:,}", str(len(tally.faults)), str(len(tally.mended)))
            row = (f"{suite.name}: {suite.tries}", *counts, ended(tally), f"{tally.seconds:,.0f}")
            sys.stdout.write(f"| {' | '.join(row)} |\n")
    for suite in SUITES.values():
        for fault in cases.read(suite.name, folder).faults:
            sys.stdout.write(f"\n{suite.name} {fault['number']}, {fault['kind']}: {fault['fault']}\n")


def ended(tally: Tally) -> str:
    """How many cases ended in which way, planners and loaders together."""
    kinds = Counter[str]()
    for kind, count in tally.kinds.items():
        kinds[kind.rpartition(": ")[2]] += count
    return ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())


if __name__ == "__main__":
    sys.exit(main())

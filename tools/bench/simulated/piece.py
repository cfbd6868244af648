"""One run on the emulated cluster: measure the costs, then the cases; and the folder that it
leaves.

The folder has a cost table for every rate, which `megatron-balance simulate --costs` reads as well,
and `cases.json` with the plans and what they took. So the simulator can be held against a
measurement again when it has changed.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_balance.cost.table import CostTable, load_table, save_table
from megatron_balance.ir.plan import from_json, to_json
from tools.bench.emulated.point import NUM_RANKS
from tools.bench.simulated.cases import Case, Grid, Key, cases_of, flops_per_s, topology_of
from tools.emulated_cluster import Topology, run

CASES = "cases.json"
DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Row(Case):
    """A case with what it took: seconds of each repetition, forward and backward, until the last rank
    was done.
    """

    repeats: tuple[tuple[float, float], ...]
    late_share: float
    table: CostTable


def measure(grid: Grid, nics: int, repeats: int, share: float, folder: Path) -> None:
    """Measure all cases of a grid on `nics` NICs a node, and write them to `folder`."""
    from tools.bench.simulated import calibrate
    from tools.bench.simulated.job import Job

    folder.mkdir(parents=True, exist_ok=True)
    one_node = Topology(1, NUM_RANKS, NUM_RANKS, 10**9, None)
    table = run(
        one_node, lambda *_: calibrate.alone(calibrate.measure_table), folder / "kernels", may_schedule=True
    ).values[0]
    cases = cases_of(grid, nics, flops_per_s(table, share))
    job = Job(cases, table, repeats, share, _bar(len(cases) * repeats))
    ranks = run(topology_of(nics, grid.mbit[0]), job, folder / "ranks", deadline_s=DEADLINE_S, may_schedule=True).values
    entries: list[dict[str, Any]] = []
    for case, of_ranks in zip(cases, zip(*ranks, strict=True), strict=True):
        first = of_ranks[0]
        file = f"costs-{nics}-nics-{case.mbit:g}-mbit.json"
        save_table(replace(calibrate.at_pace(table, first.pace), links=first.links), folder / file)
        entries.append(
            {
                "costs": file,
                **{field.name: getattr(case, field.name) for field in fields(Key)},
                "repeats": first.repeats,
                "late_share": max(each.late_share for each in of_ranks),
                "plan": json.loads(to_json(case.plan)),
            }
        )
    (folder / CASES).write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")


def rows(folder: Path) -> Iterator[Row]:
    tables: dict[str, CostTable] = {}
    for entry in json.loads((folder / CASES).read_text()):
        file = entry.pop("costs")
        if file not in tables:
            tables[file] = load_table(folder / file)
        plan, others = from_json(json.dumps(entry.pop("plan"))), tuple(entry.pop("others"))
        repeats = tuple((forward, backward) for forward, backward in entry.pop("repeats"))
        yield Row(**entry, others=others, plan=plan, repeats=repeats, table=tables[file])


def _bar(total: int) -> Callable[[str], None]:
    """Shows how far the ranks are; called in the process of one of them, whose own output goes to a
    log.
    """
    screen = os.dup(2)
    bars: list[Any] = []

    def done(what: str) -> None:
        if not bars:
            tqdm.monitor_interval = 0  # no thread of its own in a rank
            bars.append(tqdm(total=total, unit="call", file=os.fdopen(screen, "w"), dynamic_ncols=True))
        bars[0].set_description(what)
        bars[0].update()

    return done


def all_rows(folders: Sequence[Path]) -> list[Row]:
    return [row for folder in folders for row in rows(folder)]

"""From records of steps to two tables: steps of both variants, and what idle stages attended to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_balance.ir.tick import Tick
from tools.bench.distca.pipeline.experiment import APART, REPLICAS, TOGETHER, VARIANTS
from tools.bench.distca.report import mean_over_ranks
from tools.bench.emulated.report import Record, busiest_nic_mb, net_step_s, slowest
from tools.bench.emulated.steps import WARM_UP


@dataclass(frozen=True, slots=True)
class Line:
    """One variant on one data set, or on all ("mean"). Seconds: medians over repeats of each batch,
    then means over batches.

    `ratio`: steps of stages that attend each for itself over this one's; `low`, `high`: the
    smallest and the largest of one turn, in which one follows the other; `spread`: the largest (max
    - min) / median of a batch's steps.
    """

    dataset: str
    variant: str
    step_s: float
    ratio: float
    low: float
    high: float
    spread: float
    model_s: float
    kernel_s: float
    waited_s: float
    nic_mb: float


class Idle(NamedTuple):
    """A rank's work in a tick in which its stage had no microbatch. `first`: as `warms_up` says,
    else the stage drains. `kernel_s`: seconds of attention.
    """

    backward: bool
    first: bool
    tasks: int
    kernel_s: float


def warms_up(ticks: Sequence[Tick], number: int, stage: int) -> bool:
    """Whether a stage that is idle in tick `number` still has all its passes of that tick's
    direction before it; else they are over.
    """
    return any(tick.backward == ticks[number].backward and tick.cells[stage] is not None for tick in ticks[number:])


def measured(records: Sequence[Record]) -> list[Record]:
    """Without the warm-up."""
    return [record for record in records if record["repeat"] != WARM_UP]


def lines(records: Sequence[Record]) -> list[Line]:
    """By data set, the variants in order; then all data sets together."""
    kept = measured(records)
    sets = list(dict.fromkeys(record["dataset"] for record in kept))
    found = [_line(name, at, [r for r in kept if r["dataset"] == name]) for name in sets for at in (APART, TOGETHER)]
    return [*found, *(_line("mean", at, kept) for at in (APART, TOGETHER))]


def _line(dataset: str, variant: int, records: Sequence[Record]) -> Line:
    own, apart = (_by_batch(records, at) for at in (variant, APART))

    def mean(figure: Callable[[Record], float], of: Iterable[Sequence[Record]]) -> float:
        return statistics.fmean(statistics.median(map(figure, same)) for same in of)

    step = mean(net_step_s, own.values())
    steps = [list(map(net_step_s, same)) for same in own.values()]
    turns = [net_step_s(b) / net_step_s(a) for key in own for a, b in zip(own[key], apart[key], strict=True)]
    return Line(
        dataset=dataset,
        variant=VARIANTS[variant].name,
        step_s=step,
        ratio=mean(net_step_s, apart.values()) / step,
        low=min(turns),
        high=max(turns),
        spread=max((max(each) - min(each)) / statistics.median(each) for each in steps),
        model_s=mean(slowest("model_s"), own.values()),
        kernel_s=mean(mean_over_ranks("kernel_s"), own.values()),
        waited_s=mean(mean_over_ranks("waited_s"), own.values()),
        nic_mb=mean(busiest_nic_mb, own.values()),
    )


def _by_batch(records: Sequence[Record], variant: int) -> dict[tuple[str, int], list[Record]]:
    """Of one variant, the repeats of each batch in order."""
    found: dict[tuple[str, int], list[Record]] = {}
    for record in sorted(records, key=lambda r: r["repeat"]):
        if record["variant"] == VARIANTS[variant].name:
            found.setdefault((record["dataset"], record["batch"]), []).append(record)
    return found


HEADINGS = (
    "data set",
    "pipeline",
    "step s",
    "to stages",
    "of a turn",
    "spread",
    "model s",
    "attention s",
    "waited s",
    "busiest NIC MB",
)


def rows(found: Sequence[Line]) -> list[list[str]]:
    """Cells of the table of steps, by line."""
    return [
        [
            *(line.dataset, line.variant, f"{line.step_s:.2f}", f"{line.ratio:.2f}", f"{line.low:.2f}-{line.high:.2f}"),
            *(
                f"{100 * line.spread:.0f} %",
                f"{line.model_s:.2f}",
                f"{line.kernel_s:.2f}",
                f"{line.waited_s:.2f}",
                f"{line.nic_mb:.2f}",
            ),
        ]
        for line in found
    ]


IDLE_HEADINGS = (
    *("stage", "rank", "tasks in warm-up, forward", "backward", "tasks in drain, forward", "backward"),
    *("in all", "least in a step", "attention s", "of all its attention"),
)


def idle_rows(records: Sequence[Record]) -> list[list[str]]:
    """Cells of the table of idle stages, by rank: means over the steps in which stages attend
    together.
    """
    steps = [record for record in measured(records) if record["variant"] == VARIANTS[TOGETHER].name]
    return [_idle_row(rank, [step["ranks"][rank] for step in steps]) for rank in range(len(steps[0]["ranks"]))]


def _idle_row(rank: int, steps: Sequence[Record]) -> list[str]:
    each = [[Idle(*tick) for tick in step["idle"]] for step in steps]

    def tasks(*, first: bool, backward: bool) -> str:
        ticks = [[tick.tasks for tick in step if (tick.first, tick.backward) == (first, backward)] for step in each]
        return f"{statistics.fmean(map(sum, ticks)):.1f}" if any(ticks) else "-"

    kinds = [tasks(first=first, backward=backward) for first in (True, False) for backward in (False, True)]
    in_all = [sum(tick.tasks for tick in step) for step in each]
    idle_s = statistics.fmean(sum(tick.kernel_s for tick in step) for step in each)
    share = idle_s / statistics.fmean(step["kernel_s"] for step in steps)
    return [
        *(str(rank // REPLICAS), str(rank), *kinds, f"{statistics.fmean(in_all):.1f}", str(min(in_all))),
        *(f"{idle_s:.2f}", f"{100 * share:.0f} %"),
    ]


def markdown(headings: Sequence[str], cells: Sequence[Sequence[str]], named: int) -> str:
    """A table whose first `named` columns are words."""
    lined = [list(headings), [*["---"] * named, *["---:"] * (len(headings) - named)], *cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in lined)


def brief(record: Record) -> Record:
    """A step without what each rank counted but for its idle ticks."""
    names = (
        "nics",
        "dataset",
        "batch",
        "repeat",
        "variant",
        "lengths",
        "loss",
        "grad_norm",
        "nic_sent",
        "nic_received",
    )
    return {
        **{name: record[name] for name in names},
        "step_s": round(net_step_s(record), 4),
        "idle": [r["idle"] for r in record["ranks"]],
    }

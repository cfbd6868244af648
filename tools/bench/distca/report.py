"""From records of steps to the table: what the exchanges take, what of them shows, and steps
against the other planners'.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.bench.distca.job import VARIANTS
from tools.bench.emulated import exchanges
from tools.bench.emulated.exchanges import Exchanged
from tools.bench.emulated.report import Record, busiest_nic_mb, net_step_s, slowest
from tools.bench.emulated.steps import WARM_UP
from tools.bench.emulated.variants import BASELINE

SINGLE, PING_PONG = VARIANTS[3].name, VARIANTS[4].name


@dataclass(frozen=True, slots=True)
class Line:
    """One variant on one data set, or on all ("mean"). Seconds: medians over repeats of each batch,
    then means over batches.

    `model_s`: forward and backward of the slowest rank; `ratio`: te_ring's steps over this one's;
    `single_ratio`: those of nano-batches one by one. Means over ranks: `kernel_s` of attention,
    `waited_s` for exchanges; `exposed_s`: of that, without waiting for senders that are late.
    `hidden_share`: of the time that exchanges were under way, the share in which the rank did not
    wait; `of_single`: of what is exposed one by one, the share that is not.
    """

    dataset: str
    variant: str
    step_s: float
    ratio: float
    single_ratio: float
    model_s: float
    kernel_s: float
    waited_s: float
    hidden_share: float
    exposed_s: float
    of_single: float
    spread: float
    nic_mb: float


def mean_over_ranks(name: str) -> Callable[[Record], float]:
    """The mean of a figure of the ranks."""
    return lambda record: statistics.fmean(rank[name] for rank in record["ranks"])


def exposed_s(record: Record) -> float:
    """Seconds that ranks waited for what was on its way, mean over ranks."""
    return exchanges.exposed_s([[Exchanged(*one) for one in rank["exchanges"]] for rank in record["ranks"]])


def lines(records: Sequence[Record]) -> list[Line]:
    """By data set, the variants in order; then all data sets together."""
    measured = [record for record in records if record["repeat"] != WARM_UP]
    sets = list(dict.fromkeys(record["dataset"] for record in measured))
    found = [
        _line(name, variant.name, [r for r in measured if r["dataset"] == name])
        for name in sets
        for variant in VARIANTS
    ]
    return [*found, *(_line("mean", variant.name, measured) for variant in VARIANTS)]


def _line(dataset: str, variant: str, records: Sequence[Record]) -> Line:
    groups: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["variant"], record["dataset"], record["batch"]].append(record)

    def mean(figure: Callable[[Record], float], of: str = variant) -> float:
        return statistics.fmean(
            statistics.median(map(figure, same)) for (name, _, _), same in groups.items() if name == of
        )

    step, under_way, waited = mean(net_step_s), mean(mean_over_ranks("under_way_s")), mean(mean_over_ranks("waited_s"))
    exposed, single = mean(exposed_s), mean(exposed_s, SINGLE)
    own = [[net_step_s(record) for record in same] for (name, _, _), same in groups.items() if name == variant]
    return Line(
        dataset=dataset,
        variant=variant,
        step_s=step,
        ratio=mean(net_step_s, BASELINE) / step,
        single_ratio=mean(net_step_s, SINGLE) / step,
        model_s=mean(slowest("model_s")),
        kernel_s=mean(mean_over_ranks("kernel_s")),
        waited_s=waited,
        hidden_share=1 - waited / under_way if under_way else 1.0,
        exposed_s=exposed,
        of_single=1 - exposed / single if single else 1.0,
        spread=max((max(steps) - min(steps)) / statistics.median(steps) for steps in own),
        nic_mb=mean(busiest_nic_mb),
    )


HEADINGS = (
    *("data set", "variant", "step s", "to te_ring", "to one by one", "model s", "attention s", "waited s", "hidden"),
    *("exposed s", "hidden of one by one's", "spread", "busiest NIC MB"),
)


def rows(found: Sequence[Line]) -> list[list[str]]:
    """Cells of the table, by line."""
    return [
        [
            *(
                line.dataset,
                line.variant,
                f"{line.step_s:.2f}",
                f"{line.ratio:.2f}",
                f"{line.single_ratio:.2f}",
                f"{line.model_s:.2f}",
            ),
            *(
                f"{line.kernel_s:.2f}",
                f"{line.waited_s:.2f}",
                f"{100 * line.hidden_share:.0f} %",
                f"{line.exposed_s:.2f}",
            ),
            *(_of_single(line), f"{100 * line.spread:.0f} %", f"{line.nic_mb:.2f}"),
        ]
        for line in found
    ]


def _of_single(line: Line) -> str:
    return f"{100 * line.of_single:.0f} %" if line.variant == PING_PONG else "-"


def markdown(found: Sequence[Line]) -> str:
    """The table."""
    cells = [list(HEADINGS), ["---", "---", *["---:"] * (len(HEADINGS) - 2)], *rows(found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)

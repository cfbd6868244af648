"""From records of steps to the table: medians, spreads, and ratios to te_ring over the same
batches.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.emulated.batches import DATASETS
from tools.bench.emulated.point import GOODPUT
from tools.bench.emulated.steps import WARM_UP
from tools.bench.emulated.variants import BASELINE

Record = dict[str, Any]
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Line:
    """One variant on one data set (or on all of them: "mean") and topology.

    Times are medians over repeats of each batch, then means over batches; `*_ratio`: te_ring's over
    this one's; `low`, `high`: the smallest and largest ratio of one batch; `spread`: the largest
    (max - min) / median of a batch's attention time over repeats. `nic_mb`: bytes of the busiest NIC,
    in MB; `nic_over_mean`: of all NICs, those of the busiest over the mean; `disturbed`: steps.
    """

    nics: int
    dataset: str
    variant: str
    attention_s: float
    attention_ratio: float
    low: float
    high: float
    spread: float
    step_s: float
    step_ratio: float
    all_reduce_s: float
    nic_mb: float
    nic_over_mean: float
    hidden_share: float
    disturbed: int


LEAST_COMPARED = 1_000_000
"""Bytes of the busiest NIC from which on counted and planned bytes are compared."""


def slowest(name: str) -> Callable[[Record], float]:
    """The largest figure of a rank."""
    return lambda record: max(rank[name] for rank in record["ranks"])


def attention_s(record: Record) -> float:
    """Seconds of all attention calls, forward and backward."""
    return phase_s(record, "forward_calls") + phase_s(record, "backward_calls")


def phase_s(record: Record, calls: str) -> float:
    """Seconds of the calls of one phase, each from when the last rank has come to it until the last
    one leaves it.

    A rank that has little to do outside attention comes early and waits; that is the others' time
    outside attention, not attention's.
    """
    each = zip(*(rank[calls] for rank in record["ranks"]), strict=True)
    return sum(max(stop for _, stop in call) - max(start for start, _ in call) for call in each)


def net_step_s(record: Record) -> float:
    """Seconds of the step without its reduction of gradients."""
    return slowest("step_s")(record) - slowest("all_reduce_s")(record)


def brief(record: Record) -> Record:
    """A step without what each rank counted."""
    names = (
        "nics",
        "dataset",
        "batch",
        "repeat",
        "lengths",
        "variant",
        "fingerprint",
        "zones",
        "moved_tokens",
        "routed_zones",
        "picked",
    )
    names += ("loss", "grad_norm", "nic_sent", "nic_received", "plan_nic_sent", "plan_nic_received")
    times = {
        "attention_forward_s": phase_s(record, "forward_calls"),
        "attention_backward_s": phase_s(record, "backward_calls"),
        "step_s": slowest("step_s")(record),
        "all_reduce_s": slowest("all_reduce_s")(record),
        "speed": speed(record),
        "others_share": others_share(record),
    }
    return {**{name: record[name] for name in names}, **{name: round(seconds, 4) for name, seconds in times.items()}}


def busiest_nic_mb(record: Record) -> float:
    """Most bytes that a NIC sent or received, as the kernel counted them, in MB."""
    return max(*record["nic_sent"], *record["nic_received"]) / 1e6


def nic_over_mean(record: Record) -> float:
    """Bytes of the busiest NIC over the mean of all, of what they sent or received; 1 where that one
    carries less than `LEAST_COMPARED`.
    """
    sides = (record["nic_sent"], record["nic_received"])
    return max((max(side) / statistics.fmean(side) for side in sides if max(side) >= LEAST_COMPARED), default=1.0)


LEAST_SPEED, MOST_OTHERS = 0.95, 0.05


def speed(record: Record) -> float:
    """Of the core's share that each rank was promised, what the slowest one's thread had while it was
    busy.
    """
    if record["share"] is None:
        return 1.0
    return min(rank["cpu_s"] / (rank["model_s"] - rank["waited_s"]) for rank in record["ranks"]) / record["share"]


def others_share(record: Record) -> float:
    """Of all cores, the share that programs beside the ranks took while the model ran."""
    begun, ended = zip(*(rank["used"] for rank in record["ranks"]), strict=True)
    own_s = sum(stop[0] - start[0] for start, stop in zip(begun, ended, strict=True))
    machine_s = max(stop[1] for stop in ended) - min(start[1] for start in begun)
    return max(0.0, machine_s - own_s) / (record["cores"] * slowest("model_s")(record))


def disturbed(record: Record) -> bool:
    """Whether ranks computed slower than promised, or other programs took what transfers need."""
    return speed(record) < LEAST_SPEED or others_share(record) > MOST_OTHERS


def disturbance(records: Sequence[Record]) -> str:
    """A sentence."""
    steps = [record for record in records if record["repeat"] != WARM_UP]
    others = [100 * others_share(step) for step in steps]
    return (
        f"Disturbed steps: {sum(map(disturbed, steps))} of {len(steps)}. A rank had at least "
        f"{min(map(speed, steps)):.2f} of its share of a core (disturbed below {LEAST_SPEED}); other programs had "
        f"{max(others):.0f} % of the cores at most, {statistics.median(others):.0f} % in the median step (disturbed "
        f"above {100 * MOST_OTHERS:.0f} %)."
    )


def check(records: Sequence[Record]) -> list[str]:
    """Errors: losses or gradient norms of one batch that differ between variants."""
    wrong: list[str] = []
    for (nics, dataset, batch), same in _grouped(records, "nics", "dataset", "batch").items():
        for name in ("loss", "grad_norm"):
            low, high = min(r[name] for r in same), max(r[name] for r in same)
            if high - low > LOSS_TOLERANCE * high:
                wrong.append(f"{nics} NICs, {dataset} batch {batch}: {name} from {low!r} to {high!r}")
    return wrong


def counted_against_plan(records: Sequence[Record]) -> float:
    """Largest difference between a NIC's bytes as counted, less headers, and as planned, over the
    busiest NIC's planned bytes.

    Of steps in which the busiest NIC carries a megabyte or more: below, the headers of gloo's own
    messages and barriers count.
    """
    worst = 0.0
    for record in records:
        for side in ("sent", "received"):
            planned, counted = record[f"plan_nic_{side}"], record[f"nic_{side}"]
            if max(planned) >= LEAST_COMPARED:
                worst = max(
                    worst, *(abs(c * GOODPUT - p) / max(planned) for c, p in zip(counted, planned, strict=True))
                )
    return worst


def lines(records: Sequence[Record]) -> list[Line]:
    """By topology and data set, the variants in the order of the table; then the mean of the data
    sets.
    """
    measured = [record for record in records if record["repeat"] != WARM_UP]
    found: list[Line] = []
    for (nics,), on_topology in _grouped(measured, "nics").items():
        variants = list(
            dict.fromkeys(record["variant"] for record in sorted(on_topology, key=lambda r: r["variant_id"]))
        )
        sets = [name for name in DATASETS if any(record["dataset"] == name for record in on_topology)]
        for name in sets:
            of_set = _grouped([r for r in on_topology if r["dataset"] == name], "variant", "batch")
            found += [_line(nics, name, variant, of_set) for variant in variants]
        found += [
            _mean(nics, variant, [line for line in found if (line.nics, line.variant) == (nics, variant)])
            for variant in variants
        ]
    return found


def _line(nics: int, dataset: str, variant: str, groups: dict[tuple[Any, ...], list[Record]]) -> Line:
    batches = sorted(batch for name, batch in groups if name == variant)

    def medians(name: str, figure: Callable[[Record], float]) -> list[float]:
        return [statistics.median(map(figure, groups[name, batch])) for batch in batches]

    attention, base = medians(variant, attention_s), medians(BASELINE, attention_s)
    step, base_step = medians(variant, net_step_s), medians(BASELINE, net_step_s)
    each = [b / a for a, b in zip(attention, base, strict=True)]
    return Line(
        nics=nics,
        dataset=dataset,
        variant=variant,
        attention_s=statistics.fmean(attention),
        attention_ratio=sum(base) / sum(attention),
        low=min(each),
        high=max(each),
        spread=max(_spread([attention_s(record) for record in groups[variant, batch]]) for batch in batches),
        step_s=statistics.fmean(step),
        step_ratio=sum(base_step) / sum(step),
        all_reduce_s=statistics.fmean(medians(variant, slowest("all_reduce_s"))),
        nic_mb=statistics.fmean(medians(variant, busiest_nic_mb)),
        nic_over_mean=statistics.fmean(medians(variant, nic_over_mean)),
        disturbed=sum(disturbed(record) for batch in batches for record in groups[variant, batch]),
        hidden_share=statistics.fmean(
            statistics.fmean(rank["hidden_share"] for rank in record["ranks"])
            for batch in batches
            for record in groups[variant, batch]
        ),
    )


def _mean(nics: int, variant: str, of_sets: Sequence[Line]) -> Line:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(line, name) for line in of_sets)

    names = ("attention_s", "attention_ratio", "step_s", "step_ratio", "all_reduce_s", "nic_mb")
    names += ("nic_over_mean", "hidden_share")
    ends = {"low": min(line.low for line in of_sets), "high": max(line.high for line in of_sets)}
    return Line(
        nics,
        "mean",
        variant,
        spread=max(line.spread for line in of_sets),
        disturbed=sum(line.disturbed for line in of_sets),
        **ends,
        **{name: mean(name) for name in names},
    )


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def _grouped(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[name] for name in names)].append(record)
    return dict(groups)


HEADINGS = (
    *("data set", "variant", "attention s", "ratio", "of a batch", "spread", "step s", "ratio"),
    *("all-reduce s", "busiest NIC MB", "over mean", "hidden", "disturbed"),
)


def rows(of_topology: Sequence[Line]) -> list[list[str]]:
    """Cells of the table, by line."""
    return [
        [
            *(
                line.dataset,
                line.variant,
                f"{line.attention_s:.3f}",
                f"{line.attention_ratio:.2f}",
                f"{line.low:.2f}-{line.high:.2f}",
            ),
            *(f"{100 * line.spread:.0f} %", f"{line.step_s:.3f}", f"{line.step_ratio:.2f}", f"{line.all_reduce_s:.3f}"),
            *(
                f"{line.nic_mb:.2f}",
                f"{line.nic_over_mean:.2f}",
                f"{100 * line.hidden_share:.0f} %",
                f"{line.disturbed}",
            ),
        ]
        for line in of_topology
    ]


def markdown(of_topology: Sequence[Line]) -> str:
    """The table of one topology."""
    cells = [list(HEADINGS), ["---", "---", *["---:"] * (len(HEADINGS) - 2)], *rows(of_topology)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)

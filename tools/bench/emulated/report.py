"""From records of steps to tables: medians over the repeats of a batch, means over batches, and ratios
to another variant over the same batches.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_balance.runtime.recorder import Trace
from tools.bench.emulated.ablation import BASELINE, WARM_UP
from tools.bench.emulated.point import DATASETS, GOODPUT

Record = dict[str, Any]
Figure = Callable[[Record], float]
LOSS_TOLERANCE = 1e-5
LEAST_COMPARED = 1_000_000
"""Bytes of the busiest NIC from which on counted and planned bytes are compared."""
LEAST_SPEED, MOST_OTHERS = 0.95, 0.05


# Figures of a step


def waited(trace: Trace) -> tuple[float, float]:
    """Seconds that the rank waited for own exchanges, and the share of their time in which it did not,
    from being issued until put to use; 1 if nothing was exchanged.
    """
    issued: dict[int, float] = {}
    under_way = waited_s = 0.0
    for event in sorted(trace, key=lambda e: e.start_s):
        if event.role != "own" or event.leg == "run":
            continue
        if event.leg == "finish":
            under_way += event.stop_s - issued.pop(event.op, event.start_s)
            waited_s += event.stop_s - event.start_s
        else:
            issued.setdefault(event.op, event.start_s)
    return waited_s, 1.0 - waited_s / under_way if under_way else 1.0


def slowest(name: str) -> Figure:
    return lambda record: max(rank[name] for rank in record["ranks"])


def mean_over_ranks(name: str) -> Figure:
    return lambda record: statistics.fmean(rank[name] for rank in record["ranks"])


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


def busiest_nic_mb(record: Record) -> float:
    """Most bytes that a NIC sent or received, as the kernel counted them, in MB."""
    return max(*record["nic_sent"], *record["nic_received"]) / 1e6


def nic_over_mean(record: Record) -> float:
    """Bytes of the busiest NIC over the mean of all, of what they sent or received; 1 where that one
    carries less than `LEAST_COMPARED`.
    """
    sides = (record["nic_sent"], record["nic_received"])
    return max((max(side) / statistics.fmean(side) for side in sides if max(side) >= LEAST_COMPARED), default=1.0)


def speed(record: Record) -> float:
    """Of the share of a core that it was promised, what the slowest rank had while it was busy."""
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


def brief(record: Record) -> Record:
    """A step without what each rank counted."""
    figures = {
        "step_s": net_step_s,
        "all_reduce_s": slowest("all_reduce_s"),
        "attention_s": attention_s,
        "speed": speed,
        "others_share": others_share,
    }
    found = {name: value for name, value in record.items() if name != "ranks"}
    return {**found, **{name: round(figure(record), 4) for name, figure in figures.items()}}


# Figures of a variant


@dataclass(frozen=True, slots=True)
class Group:
    """The measured steps of one data set, by variant and batch the repeats in order; and the variant
    that is looked at.
    """

    steps: Mapping[tuple[str, int], Sequence[Record]]
    variant: str

    def batches(self, of: str = "") -> list[Sequence[Record]]:
        return [same for (name, _), same in sorted(self.steps.items()) if name == (of or self.variant)]

    def medians(self, figure: Figure, of: str = "") -> list[float]:
        return [statistics.median(map(figure, same)) for same in self.batches(of)]

    def mean(self, figure: Figure, of: str = "") -> float:
        """The mean over batches of the medians over repeats."""
        return statistics.fmean(self.medians(figure, of))

    def ratios(self, figure: Figure) -> list[float]:
        """Of each batch, the baseline's figure over this one's."""
        return [b / a for a, b in zip(self.medians(figure), self.medians(figure, BASELINE), strict=True)]

    def spread(self, figure: Figure) -> float:
        """The largest (max - min) / median over the repeats of a batch."""
        each = [list(map(figure, same)) for same in self.batches()]
        return max((max(own) - min(own)) / statistics.median(own) for own in each)


class Column(NamedTuple):
    """A column of a table. `over`: how a value of all data sets is made of those of each."""

    key: str
    heading: str
    value: Callable[[Group], float]
    show: str = "{:.2f}"
    over: Callable[[Iterable[float]], float] = statistics.fmean


def plain(key: str, heading: str, figure: Figure, show: str = "{:.2f}") -> Column:
    return Column(key, heading, lambda group: group.mean(figure), show)


def ratio(key: str, figure: Figure) -> Column:
    return Column(key, "ratio", lambda group: group.mean(figure, BASELINE) / group.mean(figure))


def _disturbed(group: Group) -> int:
    return sum(disturbed(record) for same in group.batches() for record in same)


COLUMNS = (
    plain("attention_s", "attention s", attention_s, "{:.3f}"),
    ratio("attention_ratio", attention_s),
    Column("low", "least", lambda group: min(group.ratios(attention_s)), over=min),
    Column("high", "most", lambda group: max(group.ratios(attention_s)), over=max),
    Column("spread", "spread", lambda group: group.spread(attention_s), "{:.0%}", max),
    plain("step_s", "step s", net_step_s, "{:.3f}"),
    ratio("step_ratio", net_step_s),
    plain("all_reduce_s", "all-reduce s", slowest("all_reduce_s"), "{:.3f}"),
    plain("nic_mb", "busiest NIC MB", busiest_nic_mb),
    plain("nic_over_mean", "over mean", nic_over_mean),
    plain("hidden_share", "hidden", mean_over_ranks("hidden_share"), "{:.0%}"),
    Column("disturbed", "disturbed", _disturbed, "{:.0f}", sum),
)
HEADINGS = ("data set", "variant", *(column.heading for column in COLUMNS))


def measured(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record["repeat"] != WARM_UP]


def lines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """By topology and data set, the variants in the order of their list; then all data sets."""
    found: list[dict[str, Any]] = []
    for nics in dict.fromkeys(record["nics"] for record in records):
        kept = sorted((r for r in measured(records) if r["nics"] == nics), key=lambda r: (r["variant_id"], r["repeat"]))
        variants = list(dict.fromkeys(record["variant"] for record in kept))
        of_sets: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
        for dataset in (name for name in DATASETS if any(record["dataset"] == name for record in kept)):
            steps: dict[tuple[str, int], list[Record]] = {}
            for record in (record for record in kept if record["dataset"] == dataset):
                steps.setdefault((record["variant"], record["batch"]), []).append(record)
            for name in variants:
                values = {column.key: column.value(Group(steps, name)) for column in COLUMNS}
                of_sets[name].append({"nics": nics, "dataset": dataset, "variant": name, **values})
                found.append(of_sets[name][-1])
        for name, own in of_sets.items():
            values = {column.key: column.over([line[column.key] for line in own]) for column in COLUMNS}
            found.append({"nics": nics, "dataset": "mean", "variant": name, **values})
    return found


def rows(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            line["dataset"],
            line["variant"],
            *(column.show.format(line[column.key]).replace("%", " %") for column in COLUMNS),
        ]
        for line in found
    ]


def markdown(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table whose first two columns are words."""
    lined = [heads, ["---", "---", *["---:"] * (len(heads) - 2)], *cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in lined)


def rows_on_lines(content: dict[str, Any]) -> str:
    """JSON with one line for each entry of a list."""
    parts: list[str] = []
    for key, value in content.items():
        rows = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f" {json.dumps(key)}: " + (f"[\n  {rows}\n ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


# Checks


def check(records: Sequence[Record]) -> list[str]:
    """Errors: losses or gradient norms of one batch that differ between variants."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["nics"], record["dataset"], record["batch"]), []).append(record)
    wrong: list[str] = []
    for (nics, dataset, batch), same in groups.items():
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
                apart = (abs(c * GOODPUT - p) / max(planned) for c, p in zip(counted, planned, strict=True))
                worst = max(worst, *apart)
    return worst


def health(records: Sequence[Record]) -> str:
    """Sentences on what disturbed the steps, and on bytes counted and planned."""
    steps = measured(records)
    others = [100 * others_share(step) for step in steps]
    return (
        f"Disturbed steps: {sum(map(disturbed, steps))} of {len(steps)}. A rank had at least "
        f"{min(map(speed, steps)):.2f} of its share of a core (disturbed below {LEAST_SPEED}); other programs had "
        f"{max(others):.0f} % of the cores at most, {statistics.median(others):.0f} % in the median step (disturbed "
        f"above {100 * MOST_OTHERS:.0f} %). Bytes of a NIC as the kernel counted them, less headers, and as planned: "
        f"{100 * counted_against_plan(records):.1f} % of the busiest NIC's apart at most, where that one carries a "
        "megabyte or more."
    )

"""From records of steps to tables: medians over the repeats of a batch, means over batches, and ratios
to another variant over the same batches.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_balance.ir.step import Tick
from tools.bench.emulated.exchanges import Exchanged
from tools.bench.emulated.exchanges import exposed_s as exposed
from tools.bench.emulated.experiments import APART, BASELINE, ONE_BY_ONE, PING_PONG, REPLICAS, TOGETHER, WARM_UP
from tools.bench.emulated.point import DATASETS, GOODPUT

Record = dict[str, Any]
Figure = Callable[[Record], float]
LOSS_TOLERANCE = 1e-5
LEAST_COMPARED = 1_000_000
"""Bytes of the busiest NIC from which on counted and planned bytes are compared."""
LEAST_SPEED, MOST_OTHERS = 0.95, 0.05


# Figures of a step


def slowest(name: str) -> Figure:
    """The largest figure of a rank."""
    return lambda record: max(rank[name] for rank in record["ranks"])


def mean_over_ranks(name: str) -> Figure:
    """The mean of a figure of the ranks."""
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


def exposed_s(record: Record) -> float:
    """Seconds that ranks waited for what was on its way, mean over ranks."""
    return exposed([[Exchanged(*one) for one in rank["exchanges"]] for rank in record["ranks"]])


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


def brief(record: Record) -> Record:
    """A step without what each rank counted, but for its idle ticks."""
    times = {"step_s": net_step_s(record), "all_reduce_s": slowest("all_reduce_s")(record)}
    if record["stages"] == 1:
        times["attention_s"], times["speed"] = attention_s(record), speed(record)
        times["others_share"] = others_share(record)
    found = {name: value for name, value in record.items() if name != "ranks"}
    idle = [rank["idle"] for rank in record["ranks"]]
    return {
        **found,
        **{name: round(value, 4) for name, value in times.items()},
        **({"idle": idle} if any(idle) else {}),
    }


# Figures of a variant


@dataclass(frozen=True, slots=True)
class Group:
    """The measured steps of one data set, by variant and batch the repeats in order; and the variant
    that is looked at.
    """

    steps: Mapping[tuple[str, int], Sequence[Record]]
    variant: str

    def batches(self, of: str = "") -> list[Sequence[Record]]:
        """The repeats of each batch."""
        return [same for (name, _), same in sorted(self.steps.items()) if name == (of or self.variant)]

    def medians(self, figure: Figure, of: str = "") -> list[float]:
        return [statistics.median(map(figure, same)) for same in self.batches(of)]

    def mean(self, figure: Figure, of: str = "") -> float:
        """The mean over batches of the medians over repeats."""
        return statistics.fmean(self.medians(figure, of))

    def ratios(self, figure: Figure, base: str) -> list[float]:
        """Of each batch, the base's figure over this one's."""
        return [b / a for a, b in zip(self.medians(figure), self.medians(figure, base), strict=True)]

    def turns(self, figure: Figure, base: str) -> list[float]:
        """Of each turn, in which one step follows the other, the base's figure over this one's."""
        pairs = zip(self.batches(), self.batches(base), strict=True)
        return [figure(b) / figure(a) for own, others in pairs for a, b in zip(own, others, strict=True)]

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
    """The mean of a figure."""
    return Column(key, heading, lambda group: group.mean(figure), show)


def to(base: str, heading: str, figure: Figure = net_step_s, key: str = "ratio") -> Column:
    """The base's figure over the variant's."""
    return Column(key, heading, lambda group: group.mean(figure, base) / group.mean(figure))


def spread(figure: Figure) -> Column:
    return Column("spread", "spread", lambda group: group.spread(figure), "{:.0%}", max)


def _hidden(group: Group) -> float:
    """Of the time that exchanges were under way, the share in which the rank did not wait."""
    under_way, waited = (group.mean(mean_over_ranks(name)) for name in ("under_way_s", "waited_s"))
    return 1 - waited / under_way if under_way else 1.0


def _of_one_by_one(group: Group) -> float:
    """Of what is exposed one by one, the share that ping-pong does not expose."""
    single = group.mean(exposed_s, ONE_BY_ONE)
    return 1 - group.mean(exposed_s) / single if single and group.variant == PING_PONG else 0.0


def _disturbed(group: Group) -> int:
    return sum(disturbed(record) for same in group.batches() for record in same)


COLUMNS: dict[str, tuple[Column, ...]] = {
    "ablation": (
        plain("attention_s", "attention s", attention_s, "{:.3f}"),
        to(BASELINE, "ratio", attention_s, "attention_ratio"),
        Column("low", "least", lambda group: min(group.ratios(attention_s, BASELINE)), over=min),
        Column("high", "most", lambda group: max(group.ratios(attention_s, BASELINE)), over=max),
        spread(attention_s),
        plain("step_s", "step s", net_step_s, "{:.3f}"),
        to(BASELINE, "ratio", net_step_s, "step_ratio"),
        plain("all_reduce_s", "all-reduce s", slowest("all_reduce_s"), "{:.3f}"),
        plain("nic_mb", "busiest NIC MB", busiest_nic_mb),
        plain("nic_over_mean", "over mean", nic_over_mean),
        plain("hidden_share", "hidden", mean_over_ranks("hidden_share"), "{:.0%}"),
        Column("disturbed", "disturbed", _disturbed, "{:.0f}", sum),
    ),
    "distca": (
        plain("step_s", "step s", net_step_s),
        to(BASELINE, "to te_ring"),
        to(ONE_BY_ONE, "to one by one", key="single_ratio"),
        plain("model_s", "model s", slowest("model_s")),
        plain("kernel_s", "attention s", mean_over_ranks("kernel_s")),
        plain("waited_s", "waited s", mean_over_ranks("waited_s")),
        Column("hidden_share", "hidden", _hidden, "{:.0%}"),
        plain("exposed_s", "exposed s", exposed_s),
        Column("of_single", "hidden of one by one's", _of_one_by_one, "{:.0%}"),
        spread(net_step_s),
        plain("nic_mb", "busiest NIC MB", busiest_nic_mb),
    ),
    "pipeline": (
        plain("step_s", "step s", net_step_s),
        to(APART, "to stages"),
        Column("low", "least of a turn", lambda group: min(group.turns(net_step_s, APART)), over=min),
        Column("high", "most of a turn", lambda group: max(group.turns(net_step_s, APART)), over=max),
        spread(net_step_s),
        plain("model_s", "model s", slowest("model_s")),
        plain("kernel_s", "attention s", mean_over_ranks("kernel_s")),
        plain("waited_s", "waited s", mean_over_ranks("waited_s")),
        plain("nic_mb", "busiest NIC MB", busiest_nic_mb),
    ),
}
"""By experiment; `microbatches` has a table of its own."""


def measured(records: Iterable[Record]) -> list[Record]:
    """Steps without the warm-up."""
    return [record for record in records if record["repeat"] != WARM_UP]


def lines(records: Sequence[Record], columns: Sequence[Column]) -> list[dict[str, Any]]:
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
                values = {column.key: column.value(Group(steps, name)) for column in columns}
                of_sets[name].append({"nics": nics, "dataset": dataset, "variant": name, **values})
                found.append(of_sets[name][-1])
        for name, own in of_sets.items():
            values = {column.key: column.over([line[column.key] for line in own]) for column in columns}
            found.append({"nics": nics, "dataset": "mean", "variant": name, **values})
    return found


def rows(found: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[list[str]]:
    """Cells of a table, by line."""
    return [
        [
            line["dataset"],
            line["variant"],
            *(column.show.format(line[column.key]).replace("%", " %") for column in columns),
        ]
        for line in found
    ]


def headings(columns: Sequence[Column]) -> list[str]:
    """Of a table."""
    return ["data set", "variant", *(column.heading for column in columns)]


def markdown(heads: Sequence[str], cells: Sequence[Sequence[str]], named: int = 2) -> str:
    """A table whose first `named` columns are words."""
    lined = [list(heads), [*["---"] * named, *["---:"] * (len(heads) - named)], *cells]
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


# Idle stages


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


IDLE_HEADINGS = (
    *("stage", "rank", "tasks in warm-up, forward", "backward", "tasks in drain, forward", "backward"),
    *("in all", "least in a step", "attention s", "of all its attention"),
)


def idle_rows(records: Sequence[Record]) -> list[list[str]]:
    """Cells of the table of idle stages, by rank: means over the steps in which stages attend
    together.
    """
    steps = [record for record in measured(records) if record["variant"] == TOGETHER]
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

"""Simulate measured cases, and say how far off: case by case, and whether planners that are close
come in the right order.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.simulator.attention import attention_call
from tools.bench.simulated.cases import MODEL, Key, cluster_of
from tools.bench.simulated.piece import Row

CLOSE = 0.15
"""Two planners are close if the slower one takes at most so much longer."""

EXPLANATION = (
    "Attention calls on two emulated nodes of 4 ranks, forward and backward by the executor, from a common start "
    "until the last rank is "
    "done: medians over the repetitions; spread: longest less shortest, over the median. Every rank's kernel runs at "
    "a fixed share of a "
    "core (`tools/bench/simulated/paced.py`), its links are shaped (docs/emulated-cluster.md). Error: simulated over "
    "measured time - 1, of "
    "both phases together, and of each.",
    "The simulator has the same plans, transport `sockets`, and a cost table that was measured on the ranks just "
    "before, by "
    "microbenchmarks alone: the kernel over a grid of queries and keys, how fast it is on all ranks at once and "
    "beside transfers, what the "
    "executor takes around a launch, merging, packing, messages on links as they are shaped. Planners were told the "
    "links' rates and the "
    "kernel's, not this table. Planners that made the same plan for a batch are one case. Simulated: the mean of 10 "
    "orders in which ranks "
    "may begin, within 3 ms (`STAGGER_S`).",
)

STAGGER_S, DRAWS = 0.003, 10
"""Ranks that wait for the same moment wake within so long of one another (3.3 ms, median of 30
times, 8 ranks on two cores), in an order that chance decides; and how many of these are simulated.
"""

AGAIN = 2000
"""Draws of `noise`."""

TIE = 0.005
"""Planners simulated no further apart are in the right order by chance."""

HEADINGS = ("NICs", "Mbit/s", "batch", "planner", "measured s", "spread", "simulated s", "error", "forward", "backward")
_NO_FLOPS = 1.0  # the cluster's rate, which a measured table does not ask for


@dataclass(frozen=True, slots=True)
class Line(Key):
    """One case. Seconds of forward and backward together, measured: median, shortest and longest;
    errors: simulated over measured - 1.
    """

    measured_s: float
    shortest_s: float
    longest_s: float
    simulated_s: float
    forward_error: float
    backward_error: float
    late_share: float
    repeats: int

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1

    @property
    def spread(self) -> float:
        return (self.longest_s - self.shortest_s) / self.measured_s


@dataclass(frozen=True, slots=True)
class Pair:
    """Two planners whose times are close.

    `decided`: no repetition of the faster one took as long as any of the other's. `clear`: their
    medians are further apart than either one's repetitions.
    """

    faster: Line
    slower: Line

    @property
    def apart(self) -> float:
        return self.slower.measured_s / self.faster.measured_s - 1

    @property
    def decided(self) -> bool:
        return self.faster.longest_s < self.slower.shortest_s

    @property
    def clear(self) -> bool:
        return self.apart > max(self.faster.spread, self.slower.spread)

    @property
    def simulated_apart(self) -> float:
        return self.slower.simulated_s / self.faster.simulated_s - 1

    @property
    def right(self) -> bool:
        return self.faster.simulated_s < self.slower.simulated_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all lines. `close`: cases that have a planner within `CLOSE`; `pairs` of them, how many
    are decided and clear (`Pair`), and of those how many are in the wrong order.
    """

    cases: int
    median_error: float
    worst_error: float
    within_ten_percent: int
    close: int
    pairs: int
    decided: int
    wrong: int
    clear: int
    clear_wrong: int


def line_of(row: Row) -> Line:
    """Simulate a measured case."""
    cluster = cluster_of(row.nics, row.mbit, _NO_FLOPS)
    machine = Machine(cluster, MODEL, MeasuredCost(row.table, cluster, MODEL))
    draws = np.random.default_rng(0).uniform(0.0, STAGGER_S, (DRAWS, 2, machine.num_ranks))
    calls = [
        attention_call(row.plan, machine, row.policy, (enter[0], enter[1]), "events", "sockets") for enter in draws
    ]
    forward, backward = (
        statistics.mean(float(outcome.end_s.max()) for outcome in phase) for phase in zip(*calls, strict=True)
    )
    both = [sum(each) for each in row.repeats]
    measured = [statistics.median(each) for each in zip(*row.repeats, strict=True)]
    return Line(
        *(getattr(row, field.name) for field in fields(Key)),
        measured_s=statistics.median(both),
        shortest_s=min(both),
        longest_s=max(both),
        simulated_s=forward + backward,
        forward_error=forward / measured[0] - 1,
        backward_error=backward / measured[1] - 1,
        late_share=row.late_share,
        repeats=len(row.repeats),
    )


def close_pairs(lines: Sequence[Line]) -> list[Pair]:
    return [pair for pair in _pairs(lines) if pair.apart <= CLOSE]


def summary(lines: Sequence[Line]) -> Summary:
    errors = [abs(line.error) for line in lines]
    pairs = close_pairs(lines)
    decided, clear = [pair for pair in pairs if pair.decided], [pair for pair in pairs if pair.clear]
    return Summary(
        cases=len(lines),
        median_error=statistics.median(errors),
        worst_error=max(errors),
        within_ten_percent=sum(error <= 0.1 for error in errors),
        close=len({id(line) for pair in pairs for line in (pair.faster, pair.slower)}),
        pairs=len(pairs),
        decided=len(decided),
        wrong=sum(not pair.right for pair in decided),
        clear=len(clear),
        clear_wrong=sum(not pair.right for pair in clear),
    )


def noise(lines: Sequence[Line]) -> tuple[float, float]:
    """Within what 95 % of median errors lie, with cases and their repetitions drawn again."""
    random, repeats = np.random.default_rng(0), min(line.repeats for line in lines)
    drawn = random.integers(len(lines), size=(AGAIN, len(lines)))
    names = ("shortest_s", "measured_s", "longest_s", "simulated_s")
    shortest, measured, longest, simulated = (
        np.array([getattr(line, name) for line in lines])[drawn] for name in names
    )
    # Repetitions are spread evenly on either side of their median.
    at = 2 * np.median(random.random((repeats, *drawn.shape)), axis=0) - 1
    again = measured + np.where(at < 0, at * (measured - shortest), at * (longest - measured))
    low, high = np.percentile(np.median(np.abs(simulated / again - 1), axis=1), (2.5, 97.5))
    return float(low), float(high)


def from_body(found: Mapping[str, Any]) -> list[Line]:
    """The lines of a `body`."""
    names = {field.name for field in fields(Line)}
    return [Line(**{name: value for name, value in case.items() if name in names}) for case in found["cases"]]


def body(lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "summary": asdict(summary(lines)),
        "cases": [{**asdict(line), "error": line.error, "spread": line.spread} for line in lines],
        "wrong_order": [
            [*pair.faster.group, pair.faster.planner, pair.slower.planner, pair.apart] for pair in _wrong(lines)
        ],
    }


def cells(line: Line) -> tuple[str, ...]:
    """A row of the table, under `HEADINGS`."""
    return (
        *(str(line.nics), f"{line.mbit:g}", f"{line.dataset} {line.batch}, {line.policy}", line.planner),
        *(f"{line.measured_s:.3f}", f"{line.spread:.1%}", f"{line.simulated_s:.3f}", f"{line.error:+.1%}"),
        *(f"{error:+.1%}" for error in (line.forward_error, line.backward_error)),
    )


def in_words(lines: Sequence[Line]) -> list[str]:
    """The summary, and what is wrong, a sentence each."""
    found, repeats, (low, high) = summary(lines), min(line.repeats for line in lines), noise(lines)
    text = [
        f"{found.cases} cases: median error {found.median_error:.1%}, worst {found.worst_error:.1%}, "
        f"{found.within_ten_percent} within 10 %. With cases and repetitions drawn again the median is {low:.1%} to "
        f"{high:.1%} (95 % of draws).",
        f"{found.close} cases have a planner within {CLOSE:.0%} of theirs: {found.pairs} pairs. In {found.clear} of "
        "them the medians are "
        f"further apart than either one's repetitions; the simulator has {found.clear - found.clear_wrong} of these "
        "in the right order. "
        f"In {found.decided} every repetition of one planner was faster than any of the other's (of {repeats} each, "
        "those of two equal "
        f"planners are one time in {comb(2 * repeats, repeats) // 2}); {found.decided - found.wrong} of these are in "
        "the right order.",
    ]
    for pair in close_pairs(lines):
        if pair.clear and pair.right and pair.simulated_apart < TIE:
            text.append(
                f"No more than a tie in the simulation ({pair.simulated_apart:.1%} apart), though in the right order: "
                f"{_where(pair)}: {pair.faster.planner} was {pair.apart:.1%} faster than {pair.slower.planner}."
            )
    for pair in _wrong(lines):
        text.append(
            f"Wrong order: {_where(pair)}: {pair.faster.planner} was {pair.apart:.1%} faster than "
            f"{pair.slower.planner} "
            f"({pair.faster.simulated_s:.3f} and {pair.slower.simulated_s:.3f} s simulated)."
        )
    return text


def markdown(lines: Sequence[Line]) -> str:
    rows = [HEADINGS, ("---:", "---:", "---", "---", *("---:",) * 6), *map(cells, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _where(pair: Pair) -> str:
    nics, mbit, policy, dataset, batch = pair.faster.group
    return f"{nics} NICs, {mbit:g} Mbit/s, {dataset} {batch}, {policy}"


def _wrong(lines: Sequence[Line]) -> list[Pair]:
    return [pair for pair in close_pairs(lines) if (pair.decided or pair.clear) and not pair.right]


def _pairs(lines: Sequence[Line]) -> Iterator[Pair]:
    groups: defaultdict[tuple[int, float, str, str, int], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line.group].append(line)
    for group in groups.values():
        for a, b in combinations(group, 2):
            yield Pair(*sorted((a, b), key=lambda line: line.measured_s))

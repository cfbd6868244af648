"""One document over all ranks: simulated step over the bound, zeppelin's default beside other plans.

python -m tools.bench.lone_documents [--tokens 262144] [--widths]

The step is forward and backward with policy keep, hosts left out, as in `tools/bench/zeppelin_rules`.
`--widths`: zeppelin's groups of each size in each number of waves too, the cheapest of each size a
row: what a search could find at best. `estimate`: the same by `analysis/estimate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance import MicrobatchPlan, make_planner
from megatron_balance.analysis.estimate import estimate
from megatron_balance.analysis.estimate.times import PricedMachine as Prices
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import BalanceError
from megatron_balance.ir.plan import SharedZone
from megatron_balance.planners.zeppelin import group_sizes
from megatron_balance.simulator.bound import bound_s
from megatron_balance.simulator.machine import Machine
from megatron_balance.simulator.step import simulate_step


@dataclass(frozen=True, slots=True)
class Case:
    """One document on a cluster. `aim`: zeppelin's step over the bound, at 256k tokens."""

    cluster: str
    ranks: int
    aim: float
    model: str = "llama-7b"


CASES = (Case("h200", 64, 1.04), Case("h200", 256, 1.14), Case("a800", 256, 1.24))
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "te_ring": ("te_ring", {}),
    "ulysses": ("ulysses", {}),
    "zeppelin, printed rule": ("zeppelin", {"rule": "paper"}),
    "zeppelin, rings of groups": ("zeppelin", {"rule": "groups"}),
    "zeppelin": ("zeppelin", {}),
    "auto": ("auto", {}),
}
"""By label: a planner and its options."""
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Of waves."""


class Priced:
    """Steps over the bound of one document on one cluster."""

    def __init__(self, case: Case, tokens: int) -> None:
        """Attention at FlashAttention-2's rate."""
        cluster = load_cluster(case.cluster).build(num_ranks=case.ranks)
        self.cluster, self.model, self.lengths = (
            replace(cluster, attention_kernel="flash_attn"),
            load_model(case.model),
            [tokens],
        )
        cost = AnalyticCost(self.cluster, self.model)
        self._machine, self._prices = (
            Machine(self.cluster, self.model, cost),
            Prices.of(self.cluster, self.model, cost),
        )
        self.bound_s = bound_s((tuple(self.lengths),), self._machine)

    def plan(self, planner: str, **options: Any) -> MicrobatchPlan:
        """As `make_planner`."""
        return make_planner(planner, self.cluster, self.model, **options)(self.lengths)

    def simulated(self, plan: MicrobatchPlan) -> float:
        """The step over the bound."""
        step = simulate_step([plan], self._machine)
        return (step.step_s - step.phases_s["gradient_sync"] - step.phases_s["optimizer"]) / self.bound_s

    def estimated(self, plan: MicrobatchPlan) -> float | None:
        """All layers over the bound, by closed forms; None where the plan has none."""
        found = estimate(plan, self._prices)
        return None if found is None else found.layer_s * self.model.num_layers / self.bound_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256 * 1024)
    parser.add_argument("--widths", action="store_true")
    options = parser.parse_args(argv)
    print("| cluster, ranks | planner | over bound | estimate | ms a layer | groups | waves |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        priced = Priced(case, options.tokens)
        for label, plan in _rows(priced, widths=options.widths):
            ratio, closed = priced.simulated(plan), priced.estimated(plan)
            layer_ms = 1e3 * ratio * priced.bound_s / priced.model.num_layers
            name = f"{label} (aim {case.aim:.2f})" if label == "zeppelin" else label
            cells = (f"{ratio:.3f}", "" if closed is None else f"{closed:.3f}", f"{layer_ms:.1f}", *_shape(plan))
            print(f"| {case.cluster}, {case.ranks} | {name} | {' | '.join(cells)} |", flush=True)
    return 0


def _rows(priced: Priced, *, widths: bool) -> Iterator[tuple[str, MicrobatchPlan]]:
    for label, (name, options) in ROWS.items():
        yield label, priced.plan(name, **options)
    for size in group_sizes(priced.cluster) if widths else ():
        found: list[MicrobatchPlan] = []
        for number in NUMBERS:
            try:
                found.append(priced.plan("zeppelin", group_size=size, num_waves=number))
            except BalanceError:
                continue
        if found:
            yield f"groups of {size}", min(found, key=lambda plan: priced.estimated(plan) or priced.simulated(plan))


def _shape(plan: MicrobatchPlan) -> tuple[str, str]:
    """Ranks of a group, and waves."""
    (zone,) = plan.zones
    if isinstance(zone, SharedZone):
        return str(zone.group_size), str(zone.waves)
    return str(getattr(zone, "group_size", 0) or ""), ""


if __name__ == "__main__":
    raise SystemExit(main())

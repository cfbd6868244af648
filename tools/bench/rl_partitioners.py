"""How libraries of reinforcement learning deal samples into microbatches, beside `rl.plan_step` on the
same lengths: caps broken, microbatches, predicted steps on H100 over their bound.

python -m tools.bench.rl_partitioners [--gpus 8 64 256] [--model qwen3-8b]
    [--shape grpo conversation agent] [--steps 2] [--json]

Rules are written from what the libraries do, not copied: verl 0.8.0 (0.9.0 has the same file) and
0.9.1 by their wheels, TRL 1.16's `TokenBudgetBatcher` by its own (samples in the order drawn, no
prefix shared), slime of 2026-08-21 by its `dp_schedule.py`; Megatron's scheduler is that of
`planners/megatron.py`. Lengths are drawn: of `conversation` and `agent` from those of Mooncake's
traces (`conversation` and `toolagent` of `workloads.distributions`), of `grpo` from no trace: median,
spread and cut are ours.

`max/mean`: seconds that ranks compute, the most of each microbatch over the mean. `each` is the step
of ranks that meet in every layer, as FSDP's do to gather weights; `end` of ranks that meet at its end
alone; both over even computation, without synchronisation and optimizer. A rank has all layers and
experts, whatever memory would say.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, groupby
from statistics import NormalDist, fmean
from typing import Any, cast

import numpy as np

from megatron_balance import Model, rl
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.config import load_cluster
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Floats
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan
from megatron_balance.planners.megatron import MegatronDynamicOptions, plan_batch
from megatron_balance.simulator.attention import attention_call, linear_s
from megatron_balance.simulator.step import bound_s, play_step
from megatron_balance.solvers.groups import Frame
from megatron_balance.workloads.distributions import DISTRIBUTIONS, Bins, LogNormal

# From the models' config.json.
MODELS = {
    "qwen3-8b": Model(32, 8, 128, 36, 4096, 12288, name="qwen3-8b", vocab_size=151936),
    "qwen3-32b": Model(64, 8, 128, 64, 5120, 25600, name="qwen3-32b", vocab_size=151936),
    "qwen3-30b-a3b": Model(
        *(32, 4, 128, 48, 2048, 768), name="qwen3-30b-a3b", num_experts=128, experts_per_token=8, vocab_size=151936
    ),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Samples of a step: `group` responses a prompt, of `lengths`, cut at `longest` tokens.

    `cap`: tokens of a microbatch on a rank; `context`: ranks that share a sample; `each`: samples of a
    data-parallel rank.
    """

    group: int
    lengths: LogNormal | Bins
    longest: int
    cap: int
    context: int
    each: int

    def draw(self, data: int, seed: int) -> tuple[list[int], list[int]]:
        """Lengths, and the group of each."""
        generator = np.random.default_rng(seed)
        prompts = max(1, data * self.each // self.group)
        # Responses of one prompt are alike: half of the variance is the prompt's.
        normal = (generator.normal(size=(prompts, 1)) + generator.normal(size=(prompts, self.group))) / 2**0.5
        if isinstance(self.lengths, Bins):
            drawn = self.lengths.quantiles(np.vectorize(NormalDist().cdf)(normal))
        else:
            drawn = self.lengths.median * np.exp(self.lengths.sigma * normal)
        lengths = drawn.clip(64, self.longest).astype(int)
        return lengths.ravel().tolist(), np.repeat(np.arange(prompts), self.group).tolist()


CONVERSATION, TOOLAGENT = (cast("Bins", DISTRIBUTIONS[name]) for name in ("conversation", "toolagent"))
SHAPES = {
    "grpo": Shape(group=16, lengths=LogNormal(3000, 1.0), longest=32768, cap=32768, context=1, each=32),
    "conversation": Shape(group=8, lengths=CONVERSATION, longest=126000, cap=16384, context=8, each=32),
    "agent": Shape(group=8, lengths=TOOLAGENT, longest=126000, cap=16384, context=8, each=32),
}

# By data-parallel rank and microbatch, the samples.
Dealt = list[list[list[int]]]


def karmarkar_karp(values: Sequence[int], parts: int, *, equal: bool) -> list[list[int]]:
    """Differencing in so many parts; `equal`: each has as many items, so many at a time."""
    order = sorted(range(len(values)), key=lambda at: (values[at], at))
    size = parts if equal else 1
    heap: list[tuple[int, int, int, int, list[tuple[int, list[int]]]]] = []
    number = count()  # no two states are compared beyond it

    def entry(state: list[tuple[int, list[int]]]) -> tuple[int, int, int, int, list[tuple[int, list[int]]]]:
        (most, items), (least, _) = state[0], state[-1]
        return least - most, -most, -len(items), next(number), state

    for first in range(0, len(order), size):
        sums = [(values[at], [at]) for at in order[first : first + size]]
        state = sorted([*sums, *[(0, list[int]())] * (parts - len(sums))], key=_rank, reverse=True)
        heap.append(entry(state))
    heapify(heap)
    while len(heap) > 1:
        one, other = heappop(heap)[-1], heappop(heap)[-1]
        both = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        both.sort(key=_rank, reverse=True)
        heappush(heap, entry(both))
    return [sorted(items) for _, items in heap[0][-1]]


def _rank(part: tuple[int, list[int]]) -> tuple[int, int]:
    return part[0], len(part[1])


def verl(lengths: Sequence[int], data: int, cap: int, *, keeps: bool) -> Dealt:
    """Karmarkar-Karp over data-parallel ranks, as many samples each, then over microbatches: tokens
    over the cap, rounded up; `keeps`: more until none is above it (0.9.1).
    """
    work = [24576 * length + length**2 for length in lengths]
    of_ranks = karmarkar_karp(work, data, equal=True)
    parts = max(min(len(own), -(-sum(lengths[at] for at in own) // cap)) for own in of_ranks)
    while True:
        dealt = [_parted(own, work, parts) for own in of_ranks]
        if not keeps or all(sum(lengths[at] for at in each) <= cap for rank in dealt for each in rank):
            return dealt
        parts += 1


def _parted(own: Sequence[int], work: Sequence[int], count: int) -> list[list[int]]:
    parts = [[own[at] for at in each] for each in karmarkar_karp([work[at] for at in own], count, equal=False)]
    parts.sort(key=lambda each: sum(work[at] for at in each), reverse=True)
    return parts[::2][::-1] + parts[1::2]  # small ones at both ends


def slime(
    lengths: Sequence[int], data: int, cap: int, flops: Callable[[int], float], *, balances: bool = False
) -> Dealt:
    """First fit over all ranks; `balances`: Karmarkar-Karp of FLOPs into as few as tokens need. The
    largest are halved until every rank has as many; dealt by FLOPs.
    """
    work, fewest = [int(flops(length)) for length in lengths], -(-sum(lengths) // cap)
    bins: list[list[int]] = []
    if balances:
        bins = karmarkar_karp(work, min(fewest, len(lengths)), equal=False)
    for at, length in enumerate(() if balances else lengths):
        room = next((own for own in bins if sum(lengths[seq] for seq in own) + length <= cap), None)
        if room is None:
            bins.append([at])
        else:
            room.append(at)
    while len(bins) % data:
        largest = max((sum(lengths[at] for at in own), number) for number, own in enumerate(bins) if len(own) > 1)[1]
        halves: tuple[list[int], list[int]] = ([], [])
        for at in sorted(bins[largest], key=lambda at: -lengths[at]):
            min(halves, key=lambda half: sum(lengths[seq] for seq in half)).append(at)
        bins[largest] = halves[0]
        bins.append(halves[1])
    of_ranks = karmarkar_karp([sum(work[at] for at in own) for own in bins], data, equal=True)
    return [[bins[at] for at in own] for own in of_ranks]


def trl(lengths: Sequence[int], data: int, cap: int, groups: Sequence[Hashable]) -> Dealt:
    """One sample after the other, each to the row with the fewest pairs that has room, those with its
    group first; where none has, the microbatch closes.
    """
    closed: list[list[list[int]]] = []
    rows: list[list[int]] = [[] for _ in range(data)]
    tokens, load, there = [0] * data, [0] * data, [set[Hashable]() for _ in range(data)]
    for sample, length in enumerate(lengths):
        while True:
            fits = [row for row in range(data) if tokens[row] + length <= cap]
            near = [row for row in fits if groups[sample] in there[row]]
            home = any(groups[sample] in each for each in there)
            if near or (fits and not (home and all(rows))):
                break
            closed.append(rows)
            rows, there = [[] for _ in range(data)], [set[Hashable]() for _ in range(data)]
            tokens, load = [0] * data, [0] * data
        row = min(near or fits, key=load.__getitem__)
        rows[row].append(sample)
        there[row].add(groups[sample])
        tokens[row] += length
        load[row] += length * (length + 1) // 2
    closed.append(rows)
    return [[rows[rank] for rows in closed] for rank in range(data)]


@dataclass(frozen=True, slots=True)
class Case:
    """A step on a machine. `machine`: of data- and context-parallel ranks."""

    shape: Shape
    machine: Machine
    lengths: list[int]
    groups: list[int]

    @property
    def data(self) -> int:
        return self.machine.num_ranks // self.shape.context

    def steps(self) -> Iterator[tuple[str, StepPlan | str]]:
        """Every way, and its step or why there is none."""
        shape, lengths, model = self.shape, self.lengths, self.machine.model
        cap = shape.cap * shape.context

        def flops(length: int) -> float:
            pairs = length * (length + 1) / 2
            return length * model.linear_flops_per_token + pairs * model.attention_flops_per_pair

        yield "verl 0.8.0, 0.9.0", self._whole(verl(lengths, self.data, cap, keeps=False))
        yield "verl 0.9.1", self._whole(verl(lengths, self.data, cap, keeps=True))
        yield "slime, first fit", self._whole(slime(lengths, self.data, cap, flops))
        yield "slime, FLOPs", self._whole(slime(lengths, self.data, cap, flops, balances=True))
        yield "TRL 1.16, token budget", self._whole(trl(lengths, self.data, cap, self.groups))
        machine = self.machine
        given = Batch(tuple(lengths)), machine.cluster, model, machine.cost
        yield "Megatron, dynamic", plan_batch(*given, MegatronDynamicOptions(tokens_per_rank=shape.cap))
        yield "ours, whole, same mesh", self._ours(context=shape.context, attend="context")
        yield "ours, whole, `meet` `step`", self._ours(context=shape.context, attend="context", meet="step")
        yield "ours, whole, all attend", self._ours(planner="whole")
        yield "ours, zeppelin groups", self._ours(planner="zeppelin", options={"rule": "groups"})
        yield "ours, zeppelin", self._ours(planner="zeppelin")
        yield "ours, distca", self._ours(planner="distca")

    def _ours(self, **options: Any) -> StepPlan | str:
        cluster, model = self.machine.cluster, self.machine.model
        try:
            return rl.plan_step(self.lengths, None, cluster, model, max_tokens=self.shape.cap, **options)
        except InfeasibleError as error:
            return str(error)

    def _whole(self, dealt: Dealt) -> StepPlan:
        context = self.shape.context
        ranks = [tuple(range(at * context, (at + 1) * context)) for at in range(self.data)]
        frame = Frame("library", self.machine.cluster, self.machine.model)
        members = [[(at, ranks[r]) for r, own in enumerate(dealt) for at in own[m]] for m in range(len(dealt[0]))]
        plans = [frame.microbatch([self.lengths[at] for at, _ in each], [on for _, on in each]) for each in members]
        return StepPlan.whole(plans, [[at for at, _ in each] for each in members])

    def _work_s(self, plan: MicrobatchPlan) -> Floats:
        # Of each rank, a layer without waiting.
        call = attention_call(plan, self.machine)
        return sum(linear_s(plan, self.machine), start=call.forward.compute_s + call.backward.compute_s)

    def row(self, step: StepPlan) -> dict[str, Any]:
        """The figures of a step."""
        held = np.array([linear_tokens(plan) for plan in step.plans])
        bound = bound_s([Batch(plan.lengths) for plan in step.plans], self.machine)
        played = play_step(step.plans, self.machine)
        each_s = sum(
            played.layers_per_chunk * float(one.layer_s.max()) + float(one.head_s.max()) for one in played.passes
        )
        work = [self._work_s(plan) for plan in step.plans]
        return {
            "broken": int((held > self.shape.cap).sum()),
            "most": int(held.max()),
            "microbatches": len(step.plans),
            "max/mean": sum(float(each.max()) for each in work) / sum(float(each.mean()) for each in work),
            "each": each_s / bound,
            "end": played.done_s / bound,
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--steps", type=int, default=2, help="drawn, means are printed (default 2)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = [row for shape in options.shape for name in options.model for gpus in options.gpus
            for row in _rows(shape, name, gpus, options.steps)]  # fmt: skip
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    for (shape, name, gpus), own in groupby(rows, lambda row: (row["shape"], row["model"], row["gpus"])):
        print(f"\n{shape}, {name}, {gpus} H100, cap {SHAPES[shape].cap}\n")
        print("| | caps broken | most tokens | microbatches | max/mean | each | end |\n|---" + "|---:" * 6 + "|")
        for row in own:
            figures = ("broken", "most", "microbatches", "max/mean", "each", "end")
            shown = row.get("error") or " | ".join(f"{row[key]:.4g}" for key in figures)
            print(f"| {row['label']} | {shown} |")
    return 0


def _rows(shape: str, name: str, gpus: int, number: int) -> Iterator[dict[str, Any]]:
    """Means over steps that are drawn; of the most tokens, the most."""
    cluster = load_cluster("h100").build(num_ranks=gpus, ranks_per_node=8)
    machine = Machine(cluster, MODELS[name], AnalyticCost(cluster, MODELS[name]))
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(number):
        case = Case(SHAPES[shape], machine, *SHAPES[shape].draw(gpus // SHAPES[shape].context, seed))
        for label, step in case.steps():
            found.setdefault(label, []).append({"error": step} if isinstance(step, str) else case.row(step))
    for label, own in found.items():
        row: dict[str, Any] = {"shape": shape, "model": name, "gpus": gpus, "label": label}
        failed = next((each["error"] for each in own if "error" in each), None)
        if failed is not None:
            yield row | {"error": failed}
            continue
        means = {key: fmean(each[key] for each in own) for key in own[0]}
        yield row | means | {"most": max(each["most"] for each in own)}


if __name__ == "__main__":
    raise SystemExit(main())

"""Planners on a bench: the machine and the kind of step that their plans are simulated on, a row of
figures of each, and the order of rows: which planner is the best, and what it saves.

Verbs import this for `--help`, so what simulates is imported where it is used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.files import read_json
from megatron_balance.lab import Progress
from megatron_balance.planning.choice import planning_cost

if TYPE_CHECKING:
    from megatron_balance.analysis.change import Layouts
    from megatron_balance.analysis.machine import Machine
    from megatron_balance.analysis.step_memory import StepMemory
    from megatron_balance.cost.base import MachineCost
    from megatron_balance.ir.batch import Batch
    from megatron_balance.ir.cluster import Cluster
    from megatron_balance.ir.model import Model
    from megatron_balance.ir.plan import MicrobatchPlan
    from megatron_balance.ir.step import StepPlan
    from megatron_balance.planning.choice import PingPong, PlannerChoice, Run, Stages, StepMode
    from megatron_balance.simulator.setup import Setup
    from megatron_balance.simulator.step import Perturbation, Step

# A JSON object.
Figures = dict[str, Any]
# Number of first steps on which limits and variants are simulated.
MOST_STEPS = 4
# Capacities tried of a planner whose groups follow from it (`Planner.sized_by`), and the factor from
# one to the next: four lead to groups of twice as many ranks.
MOST_CAPACITIES, CAPACITY_STEP = 10, 2**0.25
# Planners of plain batches that trees are held against, as the same rollouts one by one.
FLAT = ("zeppelin", "distca")
# Microbatches in place of one that are tried, at most, until they fit in memory.
MOST_PARTS = 16
# What a found size is to a reader, by that option.
SIZES_IN_WORDS = {"tokens_per_rank": "{:,} tokens a rank", "group_size": "heads in groups of {}"}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a verb. `assumed` says in words which parts nobody gave."""

    batches: tuple[Batch, ...]
    cluster: Cluster
    model: Model
    planners: tuple[PlannerChoice, ...]
    tokens_per_rank: int
    config: Run
    assumed: str
    plan_costs: Path | None = None
    tensor_parallel: int = 1
    """GPUs of a rank of `cluster` (`cost.parallel.wide_ranks`)."""

    def planning_cost(self) -> MachineCost:
        """The cost model that planners plan by."""
        return planning_cost(self.cluster, self.model, self.plan_costs, self.tensor_parallel)


@dataclass(frozen=True, slots=True)
class Planned:
    """One planner's steps, and how they run; `plan_ms`: CPU time of a batch, on average."""

    choice: PlannerChoice
    mode: StepMode
    steps: tuple[StepPlan, ...]
    plan_ms: float
    context_parallel: int | None = None
    """Ranks of a replica, where the planner keeps replicas."""
    layouts: Layouts | None = None
    """The owner of weights, where the planner changes between strategies."""
    sizes: tuple[dict[str, Any], ...] = ()
    """Where nobody said `context_parallel`: every size that was simulated, ascending."""
    tried: tuple[dict[str, Any], ...] = ()
    """Where groups are as wide as an option (`Planner.sized_by`) that nobody said: the values that
    were estimated, ascending; `choice` has the fastest that fits."""

    @property
    def name(self) -> str:
        return self.choice.name

    def described(self) -> dict[str, Any]:
        """The mode for JSON, by the keys of a configuration."""
        mode = {"ping_pong": self.mode.ping_pong, "pipeline": self.mode.pipeline}
        sizes = {"context_parallel": self.context_parallel, "sizes": list(self.sizes)}
        capacity = self.choice.options.tokens_per_rank
        return {**mode, **sizes, "tokens_per_rank": capacity, "tried": list(self.tried), "found": self._found()}

    def _found(self) -> str:
        """The size in words that was found by trying several; empty: none were tried."""
        option = self.choice.planner.sized_by
        return SIZES_IN_WORDS[option].format(getattr(self.choice.options, option)) if self.tried else ""

    def in_words(self) -> str:
        """The mode in words; empty where microbatches run whole, on one stage."""
        others = ", ".join(str(each["context_parallel"]) for each in self.sizes)
        fastest = f" (fastest of {others})" if len(self.sizes) > 1 else ""
        parts = [] if self.context_parallel is None else [f"context parallelism {self.context_parallel}{fastest}"]
        if self.tried:
            parts.append(f"{self._found()} (fastest by estimate)")
        parts += ["microbatches as two nano-batches interleaved"] * self.mode.ping_pong
        parts += {
            "joint": ["all pipeline stages attending together"],
            "stages": ["each pipeline stage attending for itself"],
            None: [],
        }[self.mode.pipeline]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Bench:
    """The machine and the kind of step that plans are simulated on.

    `group`: batches of a step. `pool`: the machine of all pipeline stages' ranks; `machine` where
    there is one stage. `ping_pong`, `stages`: as the keys `ping_pong` and `pipeline` of a
    configuration.
    """

    given: Inputs
    machine: Machine
    setup: Setup
    perturbation: Perturbation
    group: int
    pool: Machine
    progress: Progress
    ping_pong: PingPong = False
    stages: Stages = "stages"
    price: float | None = None
    """Of a GPU-hour."""

    @property
    def num_gpus(self) -> int:
        return self.pool.cluster.num_ranks * self.given.tensor_parallel

    def mfu(self, found: dict[str, Any]) -> float:
        """A step's FLOPs over what its GPUs could compute by their data sheet meanwhile."""
        from megatron_balance.cost.modules import model_flops

        batches, pool = self.given.batches, self.pool.cluster
        flops = model_flops(self.given.model, batches)
        seconds = sum(batch.num_tokens for batch in batches) / found["tokens_per_s"]
        return flops / (seconds * pool.num_ranks * pool.flops_per_s)

    @property
    def steps(self) -> list[tuple[Batch, ...]]:
        """Batches by step."""
        each = self.given.batches
        return [each[at : at + self.group] for at in range(0, len(each), self.group)]

    @property
    def lengths(self) -> list[tuple[tuple[int, ...], ...]]:
        """By step and batch."""
        return [tuple(batch.lengths for batch in step) for step in self.steps]

    def mode(self, choice: PlannerChoice) -> StepMode:
        """The mode in which a planner's steps run."""
        from megatron_balance.planning.choice import step_mode

        ping_pong, stages = self.ping_pong, self.stages
        if self.given.model.recurrent is not None:  # Megatron refuses both, so who asks for it has it alone
            ping_pong, stages = False if ping_pong == "auto" else ping_pong, stages or "stages"
        found = step_mode(choice, self.setup.pipeline, ping_pong, stages)
        if found.joint and self.given.model.other_layers:
            raise ConfigError(
                f"{self.given.model.name} has layers of two masks, and pipeline stages that attend together have one; "
                f"{choice.name} runs them with --stages stages"
            )
        return found

    def memory(self, mode: StepMode) -> StepMemory:
        """The memory of a step around its plans, as it is simulated."""
        from megatron_balance.simulator.setup import StageSetup, step_memory

        found = step_memory(StageSetup(self.machine, self.setup))
        return replace(found, asked="replay") if mode.joint else found

    def plan(self, choice: PlannerChoice) -> Planned:
        """Plan all steps; replicas, and groups that are as wide as an option, have one size: where
        nobody says which, the fastest that fits.
        """
        from megatron_balance.solvers.groups import context_sizes, least_context

        given, options = self.given, choice.options
        if choice.planner.sized_by and choice.planner.sized_by not in choice.given:
            return self._sized(choice)
        if not choice.planner.replicas or options.strategy is not None or options.context_parallel is not None:
            return self._plan(choice)
        least = least_context([batch.lengths for batch in given.batches], given.cluster, options.tokens_per_rank)
        found: list[tuple[dict[str, Any], Planned]] = []
        refused: list[InfeasibleError] = []
        for size in (each for each in context_sizes(given.cluster) if each >= least):
            try:
                planned = self._plan(replace(choice, options=replace(options, context_parallel=size)))
                simulated = self.simulate(planned)
            except InfeasibleError as error:
                refused.append(error)
                continue
            fits = max(simulated["peak_bytes_per_rank"]) <= given.cluster.memory_bytes
            step_s = simulated["step_s"]["median"]
            found.append(({"context_parallel": size, "step_s": step_s, "fits": fits}, planned))
        if not found:
            raise refused[0]
        fastest = min(found, key=lambda each: (not each[0]["fits"], each[0]["step_s"]))[1]
        return replace(fastest, choice=choice, sizes=tuple(size for size, _ in found))

    def _sized(self, choice: PlannerChoice) -> Planned:
        # By estimates of the first steps: to simulate each would take longer than all other planners.
        from megatron_balance.analysis.estimate import estimate
        from megatron_balance.analysis.machine import Machine
        from megatron_balance.solvers.groups import context_sizes

        first, given, option, options = self.first_steps(), self.given, choice.planner.sized_by, choice.options
        if option == "tokens_per_rank":
            most = options.tokens_per_rank
            mean = max(batch.num_tokens for batch in given.batches) / given.cluster.num_ranks
            steps = (ceil(mean * CAPACITY_STEP**at) for at in range(MOST_CAPACITIES - 1))
            values = sorted({most, *(each for each in steps if each < most)})
        else:
            ranks = options.context_parallel or given.cluster.num_ranks
            values = [each for each in context_sizes(given.cluster) if not ranks % each]
        machine = Machine(given.cluster, given.model, given.planning_cost(), memory=self.memory(self.mode(choice)))
        found: list[dict[str, Any]] = []
        for value in values:
            try:
                planned = first._plan(replace(choice, options=replace(options, **{option: value})))
            except InfeasibleError:
                continue
            each = [estimate(plan, machine) for step in planned.steps for plan in step.plans]
            seconds, fits = sum(one.layer_s for one in each), all(one.backward.fits for one in each)
            found.append({option: value, "layer_s": seconds, "fits": fits})
        best = min(found, key=lambda one: (not one["fits"], one["layer_s"]), default={option: getattr(options, option)})
        options = replace(options, **{option: best[option]})
        return replace(self._plan(replace(choice, options=options)), tried=tuple(found))

    def _plan(self, choice: PlannerChoice) -> Planned:
        from megatron_balance.compile.proof.structure import verify_plans
        from megatron_balance.ir.step import EMPTY
        from megatron_balance.planners.base import JointStages, StepContext
        from megatron_balance.planning.strategies import with_proposed

        given, mode = self.given, self.mode(choice)
        degrees = choice.planner.pipelines and (choice.given.get("strategies") or choice.given.get("strategy"))
        if degrees and given.tensor_parallel > 1:
            raise ConfigError(
                f"--tensor-parallel {given.tensor_parallel}: a strategy says the degrees of its pipelines; leave it out"
            )
        joint = JointStages(self.pool.cluster, self.setup.interleave) if mode.joint else None
        on, memory = (given.cluster, given.model, given.planning_cost()), self.memory(mode)
        by_heads = self.machine.by_heads
        context = StepContext(*on, joint=joint, ping_pong=mode.ping_pong, memory=memory, by_heads=by_heads)
        choice = with_proposed(choice, self.lengths, context)
        begin = time.process_time()
        steps: list[StepPlan] = []
        carry = EMPTY
        for batches in self.progress(self.steps, f"{choice.name}: plan"):
            context = replace(context, trees=tuple(chain.from_iterable(batch.trees for batch in batches)))
            step, carry = choice.plan_step(tuple(batch.lengths for batch in batches), context, carry)
            steps.append(step)
        plan_ms = 1e3 * (time.process_time() - begin) / len(given.batches)
        for step in steps:
            verify_plans(step)
        context_parallel = choice.options.context_parallel if choice.planner.replicas else None
        of = choice.planner.layouts
        layouts = None if of is None else of(choice.options, given.cluster.num_ranks, None)
        return Planned(choice, mode, tuple(steps), plan_ms, context_parallel, layouts)

    def simulate(self, planned: Planned) -> dict[str, Any]:
        """The statistics of all steps (`simulator.step.summary`)."""
        # `step_with_host_s`: where devices wait for their hosts, too; None where the costs have no
        # prices of a host.
        from megatron_balance.simulator.step import summary

        found = summary(self._steps(planned, self.machine, self.pool))
        host, with_host = self.machine.cost.host, None
        if host.is_modelled:
            stage, pool = (replace(each, host=host) for each in (self.machine, self.pool))
            with_host = summary(self._steps(planned, stage, pool))["step_s"]
        return {**found, "step_with_host_s": with_host, **planned.described()}

    def _steps(self, planned: Planned, stage: Machine, pool: Machine) -> list[Step]:
        from megatron_balance.simulator.ticks import simulate_planned

        machines = list(zip(self.perturbation.machines(stage), self.perturbation.machines(pool), strict=True))
        setup = replace(self.setup, layouts=planned.layouts)
        return [
            simulate_planned(step, *each, setup)
            for step in self.progress(planned.steps, f"{planned.name}: simulate")
            for each in machines
        ]

    def imbalance(self, planned: Planned) -> dict[str, float]:
        """Largest over mean load of the ranks, mean over microbatches."""
        from megatron_balance.analysis.statistics import plan_statistics

        plans = {
            "tokens": [plan for step in planned.steps for plan in step.plans],
            "attention": [plan for step in planned.steps for plan in step.attention],
        }
        return {
            key: fmean(plan_statistics(plan, self.given.model)["imbalance"][key] for plan in found)
            for key, found in plans.items()
        }

    def play(self, choice: PlannerChoice) -> PlayedCase:
        planned = self.plan(choice)
        found = self.simulate(planned)
        peak = max(found["peak_bytes_per_rank"])
        row = {
            "planner": planned.name,
            "step_s": found["step_s"]["median"],
            "step_with_host_s": None if found["step_with_host_s"] is None else found["step_with_host_s"]["median"],
            "tokens_per_s": found["tokens_per_s"],
            "mfu": self.mfu(found),
            "gpu_hours": self.num_gpus * BILLION / found["tokens_per_s"] / 3600,
            "over_bound": found["mean_step_s"] / fmean(self.bounds_s()),
            "imbalance": self.imbalance(planned),
            "plan_ms": planned.plan_ms,
            "peak_bytes": peak,
            "changes": found.get("changes"),  # pull and push of steps of another strategy than the base layout
            "fits": peak <= self.given.cluster.memory_bytes,
            # Plans are made while the step before runs.
            "hides": self.group * planned.plan_ms <= 1e3 * found["step_s"]["median"],
            "published_error": published_errors().get(planned.name),
            **planned.described(),
        }
        return PlayedCase(self, planned, found, row)

    def compare(
        self, choices: Sequence[PlannerChoice], baseline: str, *, explicit: bool
    ) -> tuple[list[PlayedCase], dict[str, str]]:
        """Planners' steps held against those of `baseline`, and why planners that nobody named
        (`explicit`: somebody did) were left out. ConfigError: the baseline cannot plan, or a named
        planner cannot run as asked. InfeasibleError: a named planner cannot place the batches.
        """
        played: list[PlayedCase] = []
        left_out: dict[str, str] = {}
        for choice in self.progress(choices, "planners"):
            try:
                self.mode(choice)
            except ConfigError as error:
                if explicit:
                    raise
                left_out[choice.name] = str(error)
                continue
            try:
                played.append(self.play(choice))
            except InfeasibleError as error:
                if explicit:
                    raise
                left_out[choice.name] = str(error)
        base = next((each for each in played if each.name == baseline), None)
        if base is None:
            raise ConfigError(f"--baseline {baseline} cannot plan this batch: {left_out[baseline]}")
        hold_against([each.row for each in played], base.row)
        return played, left_out

    def first_steps(self) -> Bench:
        """The bench with the batches of the first few steps only."""
        return replace(self, given=replace(self.given, batches=self.given.batches[: MOST_STEPS * self.group]))

    def bounds_s(self) -> list[float]:
        """Seconds of even computation of each step (`simulator.step`)."""
        from megatron_balance.simulator.step import bound_s

        return [bound_s(batches, self.machine, self.setup) for batches in self.steps]

    def by_heads(self) -> Bench:
        """The bench on which recurrent layers exchange all tokens by heads (`Machine.by_heads`)."""
        machine, pool = (replace(each, by_heads=True) for each in (self.machine, self.pool))
        return replace(self, machine=machine, pool=pool)

    def flattened(self) -> Bench | None:
        """The bench whose trees are rollouts of their own, each from root to leaf; None: no trees."""
        if not any(batch.trees for batch in self.given.batches):
            return None
        batches = tuple(batch.flattened() for batch in self.given.batches)
        return replace(self, given=replace(self.given, batches=batches))

    def one_by_one(self, choices: Sequence[PlannerChoice]) -> dict[str, Any] | None:
        """The row of the same rollouts one by one, by the fastest of those of `FLAT` that are among
        `choices`; None: trees share nothing, or the ranks cannot hold them. `fitting`: where that
        needs more memory than a rank has, the row of as few `microbatches` in place of each as fit.
        """
        flat = self.flattened()
        if flat is None or shares_nothing(self.sharing()) or (row := flat._fastest(choices)) is None:
            return None
        for count in range(1, min(MOST_PARTS, *(len(batch.lengths) for batch in flat.given.batches)) + 1):
            fitting = row if count == 1 else flat._parted(count)._fastest(choices)
            if fitting is not None and fitting["fits"]:
                return {**row, "fitting": {**fitting, "microbatches": count}}
        return {**row, "fitting": None}

    def _fastest(self, choices: Sequence[PlannerChoice]) -> dict[str, Any] | None:
        rows = list[dict[str, Any]]()
        for choice in (each for each in choices if each.name in FLAT):
            with suppress(InfeasibleError):
                rows.append(self.play(choice).row)
        return min(rows, key=lambda row: (not row["fits"], row["step_s"]), default=None)

    def _parted(self, count: int) -> Bench:
        """The bench with `count` microbatches of like many tokens in place of each."""
        from megatron_balance.ir.batch import Batch
        from megatron_balance.solvers.packing import first_fit_evenly

        batches: list[Batch] = []
        for lengths, trees in ((batch.lengths, batch.trees) for batch in self.given.batches):
            bins = first_fit_evenly(lengths, count, None)
            assert bins is not None
            for seqs in map(sorted, bins):
                batches.append(Batch(tuple(lengths[seq] for seq in seqs), tuple(trees[seq] for seq in seqs if trees)))
        return replace(self, given=replace(self.given, batches=tuple(batches)), group=count * self.group)

    def sharing(self) -> dict[str, Any] | None:
        """Figures of trees and of the same rollouts one by one, over all batches; None: no trees."""
        flat = self.flattened()
        if flat is None:
            return None
        mask = self.given.model.mask
        own, alone = (
            (sum(batch.num_tokens for batch in batches), sum(batch.num_pairs(mask) for batch in batches))
            for batches in (self.given.batches, flat.given.batches)
        )
        trees = [tree for batch in self.given.batches for tree in batch.trees]
        return {
            "trees": len(trees),
            "segments": sum(map(len, trees)),
            "rollouts": sum(len(batch.lengths) for batch in flat.given.batches),
            "tokens": own[0],
            "flattened_tokens": alone[0],
            "attention_pairs": own[1],
            "flattened_attention_pairs": alone[1],
        }

    def described(self) -> dict[str, Any]:
        given, bounds_s = self.given, self.bounds_s()
        return {
            "bound_s": fmean(bounds_s),
            "bound_s_per_step": bounds_s,
            "cluster": given.cluster.name,
            "model": given.model.name,
            "num_ranks": given.cluster.num_ranks,
            "gpus_per_rank": given.tensor_parallel,
            "num_gpus": self.num_gpus,
            "price_per_gpu_hour": self.price,
            "assumed": given.assumed or None,
            "capacity_tokens_per_rank": given.tokens_per_rank,
            "sharing": self.sharing(),
        }

    def headline(self) -> str:
        given, cluster, count = self.given, self.given.cluster, len(self.lengths)
        ranks = "ranks" if given.tensor_parallel == 1 else f"ranks of {given.tensor_parallel} GPUs"
        nodes = f"{cluster.num_ranks} {ranks} ({cluster.num_nodes} x {cluster.node_size})"
        assumed = f" ({given.assumed})" if given.assumed else ""
        tokens = fmean(batch.num_tokens for batch in given.batches)
        return (
            f"{nodes}, {given.model.name} on {cluster.name}{assumed}; {count} step{'s' * (count > 1)} of {self.group} "
            f"x {tokens:,.0f} tokens; bound {fmean(self.bounds_s()):.3f} s: even computation, nothing moves"
            f"{_of_sharing(self.sharing())}"
        )


@dataclass(frozen=True, slots=True)
class PlayedCase:
    """A planner's simulated steps. `found`: their statistics; `row`: what a table has of them, and
    what `hold_against` adds.
    """

    bench: Bench
    planned: Planned
    found: Figures
    row: Figures

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def steps(self) -> tuple[StepPlan, ...]:
        return self.planned.steps

    @property
    def first_plan(self) -> MicrobatchPlan:
        return self.steps[0].plans[0]

    def first_steps(self) -> PlayedCase:
        """A copy with the first few steps only; the row stays that of all steps."""
        planned = replace(self.planned, steps=self.steps[:MOST_STEPS])
        return replace(self, bench=self.bench.first_steps(), planned=planned)


# The order of rows


# Share by which the speedups of median steps and of all steps may differ without a word.
APART = 0.03
# Tokens for which GPU-hours and their cost are told.
BILLION = 1e9
# Figures of a planner or variant: `step_s`; `fits`, in memory; `hides`, its planning in a step.
Row = Mapping[str, Any]


@cache
def published_errors() -> dict[str, dict[str, float]]:
    """By planner, per cent that simulated attention is off H100 figures that others measured:
    `forward` and `backward`, median of MagiAttention's packs on 8 to 64 GPUs (`reproduce magi
    errors`). Planners of which nobody published any are missing.
    """
    return read_json(Path(__file__).parents[1] / "configs" / "published_errors.json")


def named(row: Row) -> str:
    """The planner, with the size of its replicas where it keeps replicas."""
    size = row["context_parallel"]
    return row["planner"] if size is None else f"{row['planner']} (CP {size})"


def why_not(row: Row) -> str:
    """Why a job cannot run these steps, which must fit in memory and hide their planning; empty: it
    can.
    """
    if not row["fits"]:
        return "does not fit in memory"
    return "" if row["hides"] else "takes longer to plan than a step"


def standing(row: Row) -> tuple[bool, bool, float]:
    """The order: what a job can run, then what fits, then the rest; the fastest first."""
    return bool(why_not(row)), not row["fits"], row["step_s"]


def best_of(rows: Sequence[Row]) -> str | None:
    """The planner with the fastest steps of those that a job can run; None: there is none."""
    best = min(rows, key=standing)
    return None if why_not(best) else best["planner"]


def hold_against(rows: Sequence[MutableMapping[str, Any]], base: Row) -> None:
    """Add to each row its speedup over `base`, of median steps and of all, and saved GPU-hours."""
    for row in rows:
        row["speedup"] = base["step_s"] / row["step_s"]
        row["mean_speedup"] = row["tokens_per_s"] / base["tokens_per_s"]
        row["gpu_hours_saved"] = base["gpu_hours"] - row["gpu_hours"]


def in_the_mean(row: Row) -> str:
    """A note on the speedup over all steps, where that of median steps says otherwise; else empty."""
    mean, median = row["mean_speedup"], row["speedup"]
    return f"over all steps {mean:.2f}x, over the median one {median:.2f}x" if abs(mean / median - 1) > APART else ""


def _of_sharing(sharing: dict[str, Any] | None) -> str:
    """A further line on what trees save; else empty."""
    if sharing is None:
        return ""
    said = f"\n{sharing['trees']:,} trees of {sharing['segments']:,} segments"
    if shares_nothing(sharing):
        return f"{said}, which no two rollouts share"
    tokens, pairs = (sharing[f"flattened_{key}"] / sharing[key] for key in ("tokens", "attention_pairs"))
    return (
        f"{said}; their {sharing['rollouts']:,} rollouts one by one are {tokens:.2f}x the tokens and {pairs:.2f}x the "
        "pairs"
    )


def shares_nothing(sharing: dict[str, Any] | None) -> bool:
    """Whether the trees of `Bench.sharing` are one path each."""
    return sharing is not None and sharing["flattened_tokens"] == sharing["tokens"]


def saving(row: Row, base: Row, price: float | None) -> str:
    """A sentence on what `row` saves beside `base`; `price`: of a GPU-hour, in any currency."""
    hours, saved = row["gpu_hours"], row["gpu_hours_saved"]
    cannot, mean = why_not(base), in_the_mean(row)
    note = f"; {base['planner']} {cannot}, so no job spends them" if cannot else ""
    cost = "" if price is None else f", {price * saved:,.2f} at {price:g} an hour"
    return (
        f"{row['planner']} takes {hours:,.1f} GPU-hours for a billion tokens, {named(base)} "
        f"{base['gpu_hours']:,.1f}: {saved:,.1f} saved ({saved / base['gpu_hours']:.0%}{cost}); MFU {row['mfu']:.1%} "
        f"instead of {base['mfu']:.1%}{note}{f'; speedup {mean}' if mean else ''}"
    )

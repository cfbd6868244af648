"""A whole training step: layers around attention calls, the pipeline, gradient synchronisation and
the optimizer.

All layers are alike but for their masks, so one of each mask is simulated and counted as often as
there are; so are microbatches with the same plan. Ranks that exchange anything in a layer go
through the layers in step: their clock is that of the slowest. Ranks that do not, drift apart until
the gradients are synchronised. A microbatch given as two plans runs as two nano-batches interleaved
(`simulator.ping_pong`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.analysis.backward import Decision, decide
from megatron_balance.analysis.clocks import Outcome
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.rounds import coupled, in_step
from megatron_balance.analysis.states import mean_layer_s, states_of
from megatron_balance.analysis.statistics import linear_tokens
from megatron_balance.cost import parallel
from megatron_balance.cost.perturbed import Factors, PerturbedCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats, Ints, split_rows
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.forest import over
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Policy
from megatron_balance.ir.step import StepPlan
from megatron_balance.simulator import ping_pong, pipeline
from megatron_balance.simulator.attention import BothPhases, attention_call, beside, by_mask, linear_s, mean_call
from megatron_balance.simulator.pipeline import ChunkPass, PipelineClocks
from megatron_balance.simulator.setup import PLAIN, Microbatch, Setup, StageSetup, added_s, parts_of, peaks

PHASES = (
    "forward_linear",
    "forward_attention",
    "backward_linear",
    "backward_attention",
    "head",
    "waiting",
    "gradient_sync",
    "optimizer",
)


@dataclass(slots=True)
class Step:
    """One simulated step.

    `phases_s`: of the rank that is done last; they add up to `step_s`. `peak_bytes`: by rank, stage
    by stage. `backward`: how many layers keep what they received. `bubble_share`: idle time of the
    pipeline over its work, all stages (`PipelineClocks`); None: stages attend together, and idle
    ones serve.
    """

    step_s: float
    num_tokens: int
    phases_s: dict[str, float]
    peak_bytes: Floats
    utilisation: dict[str, float]
    backward: Decision
    bubble_share: float | None = None
    layer_s: tuple[float, float] = (0.0, 0.0)
    """Of a layer: forward of the first microbatch, backward of the last."""
    attention_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the rank that has most, `forward` and `backward`: from entering the step's attention calls to
    being done with them itself."""
    change: Mapping[str, float] = field(default_factory=dict[str, float])
    """Bytes of the pull and the push of its strategy, and their seconds by links alone; empty where
    weights stay."""


@dataclass(frozen=True, slots=True)
class _LayerSeconds:
    """One layer of one microbatch, [num_ranks] each; forward and backward seconds of the modules
    outside attention, of attention without waiting behind it, of the layer in all, and of the head;
    of handing on states, in the mean layer.
    """

    tokens: Ints
    linear_s: tuple[Floats, Floats]
    attention_s: tuple[Floats, Floats]
    seconds: tuple[Floats, Floats]
    head_s: tuple[Floats, Floats]
    group: Ints
    call: BothPhases
    states_s: tuple[Floats, Floats] | None


def run_layer(
    microbatch: Microbatch,
    machine: Machine,
    setup: Setup,
    num_layers: int,
    experts: Sequence[tuple[Floats, Floats]],
    shares: Sequence[tuple[Policy, float]],
) -> _LayerSeconds:
    """Run a layer of a microbatch; in nano-batches the mean one of the `num_layers` of a pipeline
    chunk, filling and draining included.

    `experts`: seconds that they add, by plan; `shares`: of the layers by policy. Recomputation is
    left out.
    """
    plans, in_turns = parts_of(microbatch), isinstance(microbatch, tuple)
    linear = np.sum([linear_s(plan, machine) for plan in plans], axis=0) + np.sum(experts, axis=0)
    both, tokens = (linear[0], linear[1]), np.sum([linear_tokens(plan) for plan in plans], axis=0)

    def run(own: Sequence[MicrobatchPlan], on: Machine, policy: Policy) -> BothPhases:
        if not in_turns:
            return attention_call(own[0], on, policy, both, setup.engine, setup.transport)
        mode = ping_pong.PingPongMode(policy, setup.interleaved, engine=setup.engine, transport=setup.transport)
        return ping_pong.layers(own, on, num_layers, mode, experts)

    calls: list[tuple[BothPhases, float]] = []
    # Layers of one mask are taken as if they followed one another.
    for alike in zip(*(by_mask(plan, machine) for plan in plans), strict=True):
        (_, on, part), own = alike[0], [plan for plan, _, _ in alike]
        calls.append((mean_call([(run(own, on, policy), share) for policy, share in shares]), part))
    call = beside(mean_call(calls), plans, machine, both, num_layers if in_turns else None)
    group, times = one_group(plans), num_layers if in_turns else 1
    forward_s, backward_s = (
        np.sum([part * in_step(each[backward].end_s, group) for each, part in calls], axis=0) / times
        for backward in (False, True)
    )
    attention_s, attention_back_s = (each.end_s / times - own for each, own in zip(call, both, strict=True))
    states, (_, recurrent, _) = states_of(plans, machine), machine.model.layer_shares
    states_s = None if states is None else (recurrent * states.seconds[0], recurrent * states.seconds[1])
    forward_s, backward_s = (
        mean_layer_s(each, both[at], states, group, machine.model, backward=bool(at))
        for at, each in enumerate((forward_s, backward_s))
    )
    if in_turns:
        each = zip(call, both, strict=True)
        call = BothPhases(*(Outcome(o.end_s, o.compute_s / times - own, o.bytes_moved / times) for o, own in each))
    head, head_back = (
        np.array([machine.cost.head_s(n, backward=b) for n in tokens.tolist()]) * machine.slow() for b in (False, True)
    )
    own = both, (attention_s, attention_back_s)
    return _LayerSeconds(tokens, *own, (forward_s, backward_s), (head, head_back), group, call, states_s)


def one_group(plans: Sequence[MicrobatchPlan]) -> Ints:
    """The groups of ranks in step (`coupled`); nano-batches with unlike ones have one of all ranks."""
    groups = np.array([coupled(plan) for plan in plans])
    return np.zeros_like(groups[0]) if (groups != groups[0]).any() else groups[0]


def simulate_step(
    plans: Sequence[Microbatch], machine: Machine, setup: Setup = PLAIN, sharing: Machine | None = None
) -> Step:
    """Simulate the step whose microbatches have these plans, in order.

    `sharing`: all ranks that hold the parameters of a stage, and so sum gradients and share the
    optimizer; None: those of `machine`. Raises ConfigError: no microbatches, or one planned for other
    ranks; layers or microbatches that the pipeline cannot be given evenly.
    """
    if not plans:
        raise ConfigError("a step needs at least one microbatch")
    return _StepRun(plans, machine, setup, StageSetup(sharing or machine, setup)).step()


class Played(NamedTuple):
    """A pass as it went, seconds by rank: when it began, each of its layers, what that spends on
    running the forward again, and the head (0 where this chunk has none).
    """

    stage: int
    step: ChunkPass
    begin_s: Floats
    layer_s: Floats
    again_s: Floats
    head_s: Floats


class PlayedStep(NamedTuple):
    """The passes of a step, and what comes after the last of them is done, at `done_s`."""

    passes: list[Played]
    layers_per_chunk: int
    done_s: float
    sync_s: float
    optimizer_s: float


def play_step(plans: Sequence[Microbatch], machine: Machine, setup: Setup = PLAIN) -> PlayedStep:
    """The passes of `simulate_step`, one by one. Errors as there."""
    run = _StepRun(plans, machine, setup, StageSetup(machine, setup))
    passes: list[Played] = []
    done_s = run.clocks(passes).total_s
    num_layers = run.layers_per_chunk * setup.interleave
    sync_s = run.stage.sync_s(num_layers, float(run.layers[-1].seconds[1].max()))
    return PlayedStep(passes, run.layers_per_chunk, done_s, sync_s, run.stage.optimizer_s())


class _StepRun:
    def __init__(self, plans: Sequence[Microbatch], machine: Machine, setup: Setup, stage: StageSetup) -> None:
        self.plans, self.machine, self.setup, self.stage = plans, machine, setup, stage
        self.layers_per_chunk = stage.layers_per_chunk()
        for plan in (plan for microbatch in plans for plan in parts_of(microbatch)):
            machine.check(plan)
        self.stages = stage.step_bytes(plans)
        self.decision = decide(self.stages, setup.policy, machine.cluster.memory_bytes)
        keeping = self.decision.kept_share
        shares: list[tuple[Policy, float]] = [("keep", keeping), ("replay", 1 - keeping)]
        self.shares: list[tuple[Policy, float]] = [each for each in shares if each[1]]
        known: dict[tuple[str, ...], _LayerSeconds] = {}
        self.layers: list[_LayerSeconds] = []
        for microbatch in plans:
            name = tuple(plan.fingerprint() for plan in parts_of(microbatch))
            if name not in known:
                known[name] = self._layer(microbatch)
            self.layers.append(known[name])

    def _layer(self, microbatch: Microbatch) -> _LayerSeconds:
        on = microbatch, self.machine, self.setup, self.layers_per_chunk
        layer = run_layer(*on, [added_s(plan, self.stage) for plan in parts_of(microbatch)], self.shares)
        if self.setup.recompute == "full":
            (forward_s, backward_s), (own_s, own_back_s) = layer.seconds, layer.attention_s
            again = (forward_s, backward_s + forward_s), (own_s, own_back_s + own_s)
            layer = replace(layer, seconds=again[0], attention_s=again[1])
        return layer

    def step(self) -> Step:
        clocks = self.clocks()
        stages = clocks.done_s
        last = max(range(len(stages)), key=lambda stage: float(stages[stage].max()))
        rank = int(stages[last].argmax())
        phases = self._phases(last, rank)
        phases["waiting"] = max(0.0, float(stages[last][rank]) - sum(phases.values()))
        num_layers = self.layers_per_chunk * self.setup.interleave
        phases["gradient_sync"] = self.stage.sync_s(num_layers, float(self.layers[-1].seconds[1].max()))
        phases["optimizer"] = self.stage.optimizer_s()
        step_s = sum(phases.values())
        return Step(
            step_s,
            sum(plan.num_tokens for each in self.plans for plan in parts_of(each)),
            phases,
            peaks(self.stages, self.decision.keeping),
            self._utilisation(step_s),
            self.decision,
            clocks.bubble_share,
            (float(self.layers[0].seconds[0].max()), float(self.layers[-1].seconds[1].max())),
            {
                name: num_layers * float(np.sum([layer.attention_s[at] for layer in self.layers], axis=0).max())
                for at, name in enumerate(("forward", "backward"))
            },
        )

    def clocks(self, passes: list[Played] | None = None) -> PipelineClocks:
        # Run the pipeline; note every pass in `passes`, if it is given.
        setup, model = self.setup, self.machine.model
        last_stage, last_chunk = setup.pipeline - 1, setup.interleave - 1

        def each(stage: int, step: ChunkPass, ready: Floats) -> Floats:
            layer = self.layers[step.microbatch]
            layer_s = layer.seconds[step.backward]
            has_head = (stage, step.chunk) == (last_stage, last_chunk)
            head_s = layer.head_s[step.backward] * has_head
            begin_s = in_step(ready, layer.group)
            if passes is not None:
                again_s = layer.seconds[0] * (step.backward and setup.recompute == "full")
                passes.append(Played(stage, step, begin_s, layer_s, again_s, head_s))
            return begin_s + self.layers_per_chunk * layer_s + head_s

        def transfer(microbatch: int) -> Floats:
            far = self.machine.cluster.num_nodes > 1 or setup.pipeline > 1
            link, tokens = self.machine.inter if far else self.machine.intra, self.layers[microbatch].tokens.tolist()
            return np.array([parallel.stage_transfer_s(model, n, link) for n in tokens])

        return pipeline.run(setup.pipeline, len(self.plans), setup.interleave, self.machine.num_ranks, each, transfer)

    def _phases(self, stage: int, rank: int) -> dict[str, float]:
        # Seconds of one rank's step by phase, without waiting.
        times, again = self.layers_per_chunk * self.setup.interleave, self.setup.recompute == "full"
        phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for layer in self.layers:
            linear, backward_linear = (float(each[rank]) for each in layer.linear_s)
            forward_s, backward_s = (float(each[rank]) for each in layer.seconds)
            phases["forward_linear"] += times * linear
            phases["forward_attention"] += times * (forward_s - linear)
            phases["backward_linear"] += times * (backward_linear + again * linear)
            phases["backward_attention"] += times * (backward_s - backward_linear - again * linear)
            if layer.states_s is not None:
                own, own_back = (times * float(each[rank]) for each in layer.states_s)
                for name, states_s in (("forward", own), ("backward", own_back + again * own)):
                    phases[f"{name}_attention"] -= states_s
                    phases[f"{name}_states"] = phases.get(f"{name}_states", 0.0) + states_s
            if stage == self.setup.pipeline - 1:
                phases["head"] += float(layer.head_s[0][rank] + layer.head_s[1][rank])
        return phases

    def _utilisation(self, step_s: float) -> dict[str, float]:
        # Mean share of the step that ranks compute, and that links and NICs are full;
        # synchronisation left out.
        machine = self.machine
        ranks, times = machine.num_ranks, self.machine.model.num_layers / self.setup.pipeline
        busy, moved = np.zeros(ranks), np.zeros(len(machine.capacity()))
        for layer in self.layers:
            again = 2 if self.setup.recompute == "full" else 1
            for outcome, linear, repeats in zip(layer.call, layer.linear_s, (again, 1), strict=True):
                busy += repeats * times * (outcome.compute_s + linear)
                moved += repeats * times * outcome.bytes_moved
            busy += (layer.head_s[0] + layer.head_s[1]) / self.setup.pipeline
        return machine.utilisation(busy, moved, step_s)


def bound_s(batches: Sequence[Batch], machine: Machine, setup: Setup = PLAIN) -> float:
    """Seconds of a step's forward and backward: even computation over all ranks and pipeline
    stages.

    `batches`: the step's, microbatch by microbatch; `machine`: of one pipeline stage's ranks; `setup`:
    `pipeline` and `recompute` count; what surrounds layers and head (optimizer, synchronisation,
    experts' exchange, bubbles) does not.
    """
    return sum(_bound_of_microbatch(each, machine, setup) for each in batches) / setup.pipeline


def _bound_of_microbatch(batch: Batch, machine: Machine, setup: Setup) -> float:
    cost, model, ranks = machine.cost, machine.model, machine.num_ranks
    pairs = np.zeros((len(batch.lengths), Pair.WIDTH), dtype=np.int64)
    pairs[:, Pair.SEQ] = np.arange(len(pairs))  # rows of unlike documents are unlike rows
    pairs[:, Pair.Q_STOP] = pairs[:, Pair.K_STOP] = batch.lengths
    pairs[:, Pair.Q_HEAD_STOP], pairs[:, Pair.KV_HEAD_STOP] = model.num_heads, model.num_kv_heads
    tokens = batch.num_tokens / ranks
    forward = backward = 0.0
    for mask, share in model.mask_shares:
        shown = over(mask, batch.trees)
        rows = split_rows(pairs, Pair.SEQ, Pair.SPANS, shown)
        cost_there, launch = machine.under(mask).for_trees(shown).cost, np.zeros(len(rows), dtype=np.int64)
        forward, backward = (
            before + share * float(cost_there.attend_s(rows, launch, 1, backward=b)[0]) / ranks
            for b, before in ((False, forward), (True, backward))
        )
    forward += cost.layer_s(tokens)
    backward += cost.layer_s(tokens, backward=True)
    again = forward if setup.recompute == "full" else 0.0
    layers_s = model.num_layers * (forward + backward + again)
    return layers_s + cost.head_s(tokens) + cost.head_s(tokens, backward=True)


# Several simulated steps as the figures that `megatron-balance simulate` prints; none was
# measured.


@dataclass(frozen=True, slots=True)
class Perturbation:
    """Machines that differ from the one that was planned for: `draws` of them, times off by factors
    exp(N(0, `spread`)).
    """

    spread: float = 0.0
    draws: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.spread < 0:
            raise ConfigError(f"spread {self.spread}: must not be negative; 0.1 is about 10 %")
        if self.draws < 1:
            raise ConfigError(f"draws {self.draws}: must be at least 1")

    def machines(self, machine: Machine) -> Iterator[Machine]:
        """Yield the machine itself, or `draws` others."""
        if not self.spread:
            yield machine
            return
        for draw in range(self.draws):
            cost = PerturbedCost(machine.cost, Factors.draw(self.spread, self.seed + draw))
            yield replace(machine, cost=cost)


def simulate_plans(
    plans: Sequence[StepPlan | MicrobatchPlan], machine: Machine, setup: Setup, perturbation: Perturbation
) -> list[Step]:
    """Simulate every plan, each a step, on every machine."""
    machines = list(perturbation.machines(machine))
    # Every plan is a microbatch of its own.
    steps = [plan.plans if isinstance(plan, StepPlan) else (plan,) for plan in plans]
    return [simulate_step(step, each, setup) for step in steps for each in machines]


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """The keys of `simulate` for several steps.

    Median, p5 and p95 of their seconds; means of phases, of the slowest rank's attention and of
    utilisation, and of what steps pulled and pushed, of those that did; each rank's largest peak.
    """

    def means(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: float(np.mean([each[name] for each in of])) for name in of[0]}

    moved = [step.change for step in steps if step.change]
    seconds = np.array([step.step_s for step in steps])
    median, low, high = (float(np.percentile(seconds, at)) for at in (50, 5, 95))
    return {
        "step_s": {"median": median, "p5": low, "p95": high},
        "mean_step_s": float(seconds.mean()),
        "tokens_per_s": sum(step.num_tokens for step in steps) / float(seconds.sum()),
        "phases_s": means([step.phases_s for step in steps]),
        "attention_s": means([step.attention_s for step in steps]),
        "peak_bytes_per_rank": np.max([step.peak_bytes for step in steps], axis=0).tolist(),
        "utilisation": means([step.utilisation for step in steps]),
        **({"changes": {"steps": len(moved), **means(moved)}} if moved else {}),
        "backward": max((step.backward for step in steps), key=lambda each: each.peak_bytes).described(),
        "kind": "simulated",
    }

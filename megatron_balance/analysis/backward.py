"""Keep or replay, layer by layer: predicted bytes of a step, and the decision by a rank's memory.

Every input is the plan's or agreed, so all ranks decide alike. The backward of a layer finds the
keys and values that its forward received (policy keep) or receives them again (replay). Keeping
costs memory in every layer and microbatch in flight, replaying costs traffic in the backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from megatron_balance.analysis.memory import Sharding, layer_activation_bytes, logit_bytes, rank_memory
from megatron_balance.analysis.recurrent import kept_bytes
from megatron_balance.analysis.statistics import linear_tokens, moved_tokens, received_load
from megatron_balance.analysis.wire import Payload
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.arrays import Floats, Ints
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Backward, Kind
from megatron_balance.patterns import pattern_of
from megatron_balance.patterns.base import Context

# Share of a device's memory that `auto` fills by prediction; the rest is for what is not predicted:
# the device's context, communicators, fragments of the allocator.
USABLE = 0.9

GB = 1e9


@dataclass(frozen=True, slots=True)
class MicrobatchBytes:
    """By rank, int64 [num_ranks]: tokens that it owns in a microbatch, bytes of an attention call.

    `kept`: of all inputs that the forward received, with their heads: what a layer with policy keep
    holds until its backward. `replayed`: of those that a layer with policy replay holds at once in
    its backward. `working`: beside them, of the call while it runs: partial outputs, gradients and
    messages on their way. `states`: what a recurrent layer keeps beside its activations.
    """

    tokens: Ints
    kept: Ints
    replayed: Ints
    working: Ints
    states: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))


def microbatch_bytes(plans: Sequence[MicrobatchPlan], model: Model) -> MicrobatchBytes:
    """Bytes of a microbatch from its plan, or from those of its nano-batches.

    A remap hands queries, keys and values over before attention and they are used throughout: a
    replay holds them all, and beside them of every other exchange what is in use and what arrives.
    `kept` is exact but for the padding of messages. `working` is an estimate: gradients of owned
    rows, what goes and comes with each query that is attended elsewhere, and the gradients of keys
    and values on their way, at most `GRADIENT_ROUNDS` blocks of a ring or `GRADIENT_COPIES` of all
    that was received.
    """
    row_bytes, found = Payload.of(model).whole().tolist(), list[MicrobatchBytes]()
    for plan in plans:
        load, (given, taken) = received_load(plan), moved_tokens(plan)
        queries, keys, outputs = (load.token_heads[kind] for kind in (Kind.Q, Kind.KV, Kind.OUT))
        loads = Loads(linear_tokens(plan), queries, keys, outputs, largest_exchange(plan), given, taken)
        found.append(with_states(loads.bytes((plan.num_heads, plan.num_kv_heads), row_bytes), plan, model))
    # Nano-batches are under way at once.
    return MicrobatchBytes(*(np.add.reduce([getattr(e, of.name) for e in found]) for of in fields(MicrobatchBytes)))


def with_states(counted: MicrobatchBytes, plan: MicrobatchPlan, model: Model) -> MicrobatchBytes:
    """The bytes of a microbatch, with what recurrent layers keep of its states."""
    return counted if model.recurrent is None else replace(counted, states=kept_bytes(plan, model.recurrent))


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The forwards that a backward computes again.

    `what`: nothing; core attention alone; runs of `num_layers` layers each, all of them ("uniform");
    or the first `num_layers` layers, one by one ("block").
    """

    what: Literal["nothing", "core_attention", "uniform", "block"] = "nothing"
    num_layers: int = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline stage, as memory sees them.

    `chunks`: model chunks of the stage (interleaved schedule); `state_bytes`: of parameters,
    gradients and optimizer where they were counted; None: predicted. `in_flight`: passes through a
    chunk whose activations are held at once; None: those of Megatron's 1F1B schedules.
    """

    num_layers: int
    sharding: Sharding = field(default_factory=Sharding)
    recompute: Recomputed = field(default_factory=Recomputed)
    chunks: int = 1
    state_bytes: float | None = None
    in_flight: float | None = None

    @property
    def is_last(self) -> bool:
        return self.sharding.stage == self.sharding.pipeline - 1

    def passes(self, num_microbatches: int) -> float:
        """Passes through a chunk in flight at once (Narayanan et al., 2021, section 2.2)."""
        if self.in_flight is not None:
            return self.in_flight
        behind = self.sharding.pipeline - 1 - self.sharding.stage
        if self.chunks == 1:
            return min(behind + 1, num_microbatches)
        warm_up = 2 * behind + (self.chunks - 1) * self.sharding.pipeline
        return min(warm_up + 1, self.chunks * num_microbatches)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Predicted bytes of the ranks of one stage at the peak of a step; arrays are [num_ranks].

    `state`: parameters, gradients, optimizer; `activations`: saved for the backward; `working`: of
    the layer or the logits at work; `kept`: added by each layer that keeps; `replayed`: added if
    any layer replays; `numbers`: of the stage's layers (`_HeldLayers.numbers`).
    """

    state: float
    activations: Floats
    working: Floats
    kept: Floats
    replayed: Floats
    numbers: tuple[int, ...]
    stage: int = 0

    @property
    def layers(self) -> int:
        """The most whose kept rows are held at once: all, unless layers are computed again in runs."""
        return max(self.numbers, default=0)

    def peak(self, keeping: int) -> Floats:
        """Bytes of each rank if so many layers at once keep."""
        held = keeping * self.kept + (self.replayed if keeping < self.layers else 0.0)
        return self.state + self.activations + self.working + held

    def most_keeping(self, memory_bytes: float) -> int | None:
        """Most layers that may keep within `memory_bytes`; None: not even all replayed fit."""
        if float(self.peak(self.layers).max()) <= memory_bytes:
            return self.layers
        left = memory_bytes - self.peak(0)
        if float(left.min()) < 0:
            return None
        costly = self.kept > 0
        most = np.floor(left[costly] / self.kept[costly]).min(initial=self.layers)
        return int(min(most, self.layers - 1))


def step_bytes(microbatches: Sequence[MicrobatchBytes], model: Model, stage: Stage) -> StepBytes:
    """Predict the peak of a step of these microbatches, in order, on the ranks of one stage.

    Activations of one rank of `model` as it stands (`layer_activation_bytes`).
    """
    layers = held_layers(stage.recompute, ceil(stage.num_layers / stage.chunks))
    saved = layers.saved * layer_activation_bytes(model) + layers.inputs * layer_activation_bytes(model, "full")
    tokens, kept, replayed, working = (
        np.array([getattr(each, name) for each in microbatches], dtype=np.float64)
        for name in ("tokens", "kept", "replayed", "working")
    )
    passes = stage.passes(len(microbatches))
    kept = kept * model.attending  # of the mean layer
    again = layers.again * layer_activation_bytes(model) * tokens
    at_work = (working + again).max(axis=0)
    if stage.is_last:  # logits are there when no layer is at work
        at_work = np.maximum(at_work, logit_bytes(model) * tokens.max(axis=0))
    # What a run that is computed again received is there for one microbatch only.
    apart = any(number > layers.again for number in layers.numbers) and stage.recompute.what != "core_attention"
    held = _in_flight(kept, passes, stage.chunks) if apart else kept.max(axis=0)
    activations = saved * _in_flight(tokens, passes, stage.chunks)
    if model.recurrent is not None:
        each_kept = np.array([each.states for each in microbatches], dtype=np.float64)
        states = layers.saved * model.layer_shares[1] * each_kept
        activations = activations + _in_flight(states, passes, stage.chunks)
    return StepBytes(
        state_bytes(model, stage),
        activations,
        at_work,
        held,
        replayed.max(axis=0),
        layers.numbers * stage.chunks,
        stage.sharding.stage,
    )


def state_bytes(model: Model, stage: Stage) -> float:
    """Bytes of a rank's parameters, gradients and optimizer."""
    if stage.state_bytes is not None:
        return stage.state_bytes
    predicted = rank_memory(model, 0, 0, stage.sharding)
    return predicted.weights + predicted.gradients + predicted.optimizer


def _in_flight(each: Floats, passes: float, chunks: int) -> Floats:
    # The most over consecutive microbatches that are in flight at once, in passes through a chunk:
    # [num_ranks] from [microbatches, num_ranks].
    window = min(len(each), max(1, ceil(passes / chunks)))
    sums_of = np.cumsum(np.concatenate([np.zeros((1, each.shape[1])), each]), axis=0)
    return (sums_of[window:] - sums_of[:-window]).max(axis=0) / window * passes


@dataclass(frozen=True, slots=True)
class Decision:
    """The layers that keep: those whose number (`_HeldLayers.numbers`) is at most `keeping`.
    Without recomputation that is a count of layers; with it, of layers held at once.

    `numbers`: of the layers of the stage that has most of them. `peak_bytes`: predicted, of the
    fullest `rank` of pipeline `stage`. `memory_bytes`: of a rank; None: not known. `keep_bytes`,
    `replay_bytes`: the peak if all layers kept or replayed.
    """

    keeping: int
    numbers: tuple[int, ...]
    peak_bytes: float
    keep_bytes: float
    replay_bytes: float
    rank: int
    stage: int
    memory_bytes: float | None
    asked: Backward = "auto"

    @property
    def fits(self) -> bool:
        """Whether the prediction is within the memory."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes

    @property
    def tight(self) -> bool:
        """Whether it leaves less of the memory than the reserve for what is not predicted."""
        return self.memory_bytes is not None and USABLE * self.memory_bytes < self.peak_bytes <= self.memory_bytes

    @property
    def kept_layers(self) -> int:
        """Layers that keep, of the stage that has most."""
        return sum(number <= self.keeping for number in self.numbers)

    @property
    def kept_share(self) -> float:
        """Layers that keep over all of the stage that has most."""
        return self.kept_layers / max(1, len(self.numbers))

    @property
    def in_words(self) -> str:
        """The policy in a word or two."""
        kept, layers = self.kept_layers, len(self.numbers)
        if kept in (0, layers):
            return "keep" if kept else "replay"
        return f"keep in {kept} of {layers} layers, replay in {layers - kept}"

    def described(self) -> dict[str, Any]:
        """The decision for JSON, with its sentence."""
        return {
            "asked": self.asked,
            "keeping_layers": self.kept_layers,
            "layers": len(self.numbers),
            "peak_bytes": self.peak_bytes,
            "keep_bytes": self.keep_bytes,
            "replay_bytes": self.replay_bytes,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "sentence": self.sentence(),
        }

    def sentence(self) -> str:
        """The decision and the predicted peak in one sentence."""
        of = "" if self.memory_bytes is None else f" of {self.memory_bytes / GB:.1f}"
        where = f"rank {self.rank} of stage {self.stage}" if self.stage else f"rank {self.rank}"
        but = f", which leaves less than {1 - USABLE:.0%} for what is not predicted" if self.tight else ""
        return (
            f"backward: {self.in_words}{'' if self.asked == 'auto' else ' as configured'}; predicted peak "
            f"{self.peak_bytes / GB:.1f}{of} GB on {where}{but if self.fits else ', which does not fit'} "
            f"(all keep: {self.keep_bytes / GB:.1f} GB, all replay: {self.replay_bytes / GB:.1f} GB)"
        )


def decide(stages: Sequence[StepBytes], asked: Backward, memory_bytes: float | None) -> Decision:
    """Decide how many layers keep, the same in all stages: as many as fit into `USABLE` of the
    memory.

    `asked`: the key `backward` of a configuration; without a known memory `auto` keeps.
    """
    most = max(stage.layers for stage in stages)
    keeping = 0 if asked == "replay" else most
    if asked == "auto" and memory_bytes is not None:
        limits = [(stage.most_keeping(USABLE * memory_bytes), stage.layers) for stage in stages]
        # A stage of fewer layers that can keep them all does not hold the others back.
        keeping = min((most if limit == layers else limit or 0 for limit, layers in limits), default=most)
    peaks = [stage.peak(min(keeping, stage.layers)) for stage in stages]
    fullest = max(range(len(stages)), key=lambda at: float(peaks[at].max()))
    return Decision(
        keeping,
        max((stage.numbers for stage in stages), key=lambda numbers: (max(numbers, default=0), len(numbers))),
        float(peaks[fullest].max()),
        max(float(stage.peak(stage.layers).max()) for stage in stages),
        max(float(stage.peak(0).max()) for stage in stages),
        int(peaks[fullest].argmax()),
        stages[fullest].stage,
        memory_bytes,
        asked,
    )


def check_fits(
    decision: Decision, microbatches: Sequence[MicrobatchBytes], model: Model, stages: Sequence[Stage]
) -> None:
    """Reject a step that `auto` cannot make fit. Raises InfeasibleError: the prediction is more
    than the memory, with every layer replayed. Says which changes would make it fit.
    """
    if decision.fits or decision.asked != "auto" or decision.memory_bytes is None:
        return
    raise InfeasibleError(
        f"this step does not fit: rank {decision.rank} needs {decision.peak_bytes / GB:.1f} GB by prediction, with "
        f"keys and values received again in every layer, and has {decision.memory_bytes / GB:.1f} GB. "
        f"{advice(decision, microbatches, model, stages)} To try it all the same, set 'backward: replay'"
    )


def advice(decision: Decision, microbatches: Sequence[MicrobatchBytes], model: Model, stages: Sequence[Stage]) -> str:
    """The changes after which a step would fit, in a sentence."""
    ways = [f"{what} ({needs / GB:.1f} GB)" for what, needs in _ways(decision, microbatches, model, stages)]
    return f"What would fit: {'; '.join(ways)}." if ways else "No single change would make it fit: use more ranks."


def _ways(
    decision: Decision, microbatches: Sequence[MicrobatchBytes], model: Model, stages: Sequence[Stage]
) -> list[tuple[str, float]]:
    # Changes after which the step would fit, with the bytes that the fullest rank then needs.
    assert decision.memory_bytes is not None
    usable = USABLE * decision.memory_bytes
    ways: list[tuple[str, float]] = []

    def needed(stage: Stage, spared: float) -> float:
        # `spared`: of weights and gradients, the part that goes; counted state is divided as
        # predicted.
        own = rank_memory(model, 0, 0, stage.sharding)
        part = (own.weights + own.gradients) / (own.weights + own.gradients + own.optimizer)
        peak = float(step_bytes(microbatches, model, stage).peak(0).max())
        return peak - spared * part * state_bytes(model, stage)

    def try_(what: str, stages: Sequence[Stage], spared: float = 0.0) -> bool:
        needs = max(needed(each, spared) for each in stages)
        if needs <= usable:
            ways.append((what, needs))
        return needs <= usable

    full = [replace(each, recompute=Recomputed("uniform", 1)) for each in stages]
    try_("full activation recomputation (--recompute-granularity full)", full)
    for size in (2, 4, 8):
        if try_(f"tensor parallelism {size} times as wide", stages, 1 - 1 / size):
            break
    found = [step_bytes(microbatches, model, each) for each in stages]
    share = min((usable - each.state) / max(1.0, float(each.peak(0).max()) - each.state) for each in found)
    if share > 0:
        most = max(int(each.tokens.max()) for each in microbatches)
        ways.append((f"at most {int(most * share):,} tokens on a rank, in place of {most:,}", usable))
    return ways


class _LayerRun(NamedTuple):
    """Consecutive layers. `again`: their forward is computed once more in the backward."""

    num_layers: int
    again: bool


def layer_runs(recompute: Recomputed, num_layers: int, *, training: bool) -> tuple[_LayerRun, ...]:
    """Split layers into the runs of full recomputation.

    Without it, or in evaluation, they are one run.
    """
    if recompute.what not in ("uniform", "block") or not training:
        return (_LayerRun(num_layers, again=False),)
    size = recompute.num_layers
    if recompute.what == "block":
        again = min(size, num_layers)
        rest = (_LayerRun(num_layers - again, again=False),) if again < num_layers else ()
        return (_LayerRun(1, again=True),) * again + rest
    return tuple(_LayerRun(min(size, num_layers - first), again=True) for first in range(0, num_layers, size))


def attention_runs(recompute: Recomputed, num_layers: int, *, training: bool = True) -> tuple[_LayerRun, ...]:
    """The runs of attention calls: of `layer_runs`, or each layer where it alone is recomputed."""
    if training and recompute.what == "core_attention":
        return (_LayerRun(1, again=True),) * num_layers
    return layer_runs(recompute, num_layers, training=training)


class _HeldLayers(NamedTuple):
    """Layers of a model chunk as memory sees them.

    `numbers` [layers]: a layer keeps what it received if its number is at most the number of layers
    that shall keep at once. `saved`: layers that save all activations; `inputs`: runs that save their
    input; `again`: layers of the longest run that is computed again.
    """

    numbers: tuple[int, ...]
    saved: int
    inputs: int
    again: int


def held_layers(recompute: Recomputed, num_layers: int) -> _HeldLayers:
    """Number the layers of a chunk by what keeping costs, the last ones first.

    The last layers hold for the shortest time. A run that is computed again holds what its layers
    received only while its own backward runs, so all such runs together cost as much as the longest
    of them, and come before layers that hold from forward to backward.
    """
    runs = attention_runs(recompute, num_layers)
    again = max((run.num_layers for run in runs if run.again), default=0)
    apart = sum(run.num_layers for run in runs if not run.again)
    numbers: list[int] = []
    seen = 0
    for run in runs:
        if run.again:
            numbers += range(run.num_layers, 0, -1)
        else:
            numbers += range(again + apart - seen, again + apart - seen - run.num_layers, -1)
            seen += run.num_layers
    whole = layer_runs(recompute, num_layers, training=True)
    return _HeldLayers(
        tuple(numbers),
        sum(run.num_layers for run in whole if not run.again),
        sum(run.again for run in whole),
        max((run.num_layers for run in whole if run.again), default=0),
    )


_Counts: TypeAlias = Ints | Floats

# Rounds whose keys and values a replayed backward holds at once.
_IN_USE_AND_ARRIVING = 2

# Blocks of a ring, and copies of all received keys and values, whose gradients are held at once:
# accumulated, sent and arriving. Fitted to the buffers that the runtime counts.
GRADIENT_ROUNDS, GRADIENT_COPIES = 8, 3


class Loads(NamedTuple):
    """Counts of one attention call, arrays [num_ranks]: tokens that each rank owns; token-heads of
    queries and of keys that it receives, and of outputs that it sends home; the most token-heads of
    keys that one exchange brings (`CommPattern.largest_exchange`); tokens that a remap has it attend
    for others (`given`), and others for it (`taken`).
    """

    own: _Counts
    queries: _Counts
    keys: _Counts
    outputs: _Counts
    largest: _Counts
    given: _Counts
    taken: _Counts

    def bytes(self, heads: tuple[int, int], row_bytes: Sequence[int]) -> MicrobatchBytes:
        """`heads`: of queries, and of keys; `row_bytes`: of a token and head by kind."""
        own, queries, keys, outputs, largest, given, taken = self
        num_heads, num_kv = heads
        handed = given * (num_heads * row_bytes[Kind.Q] + num_kv * row_bytes[Kind.KV])
        kept = queries * row_bytes[Kind.Q] + keys * row_bytes[Kind.KV] + handed
        of_rounds = _IN_USE_AND_ARRIVING * largest * row_bytes[Kind.KV]
        replayed = np.minimum(queries * row_bytes[Kind.Q] + of_rounds + handed, kept)
        served, sent = queries + given * num_heads, outputs + taken * num_heads
        arriving = np.minimum(GRADIENT_ROUNDS * (largest + given * num_kv), GRADIENT_COPIES * (keys + given * num_kv))
        # An estimate, held to what calls of the runtime need (tests/unit/runtime/test_kept_bytes.py).
        working = (
            own * (num_heads * row_bytes[Kind.Q_GRAD] + num_kv * row_bytes[Kind.KV_GRAD])
            + (1.5 * served + 2 * sent + own * num_heads * (sent > 0))
            * (row_bytes[Kind.OUT_GRAD] + row_bytes[Kind.Q_GRAD])
            + arriving * row_bytes[Kind.KV_GRAD]
        )
        return MicrobatchBytes(
            own.round().astype(np.int64), *(each.astype(np.int64) for each in (kept, replayed, working))
        )


def largest_exchange(plan: MicrobatchPlan) -> Ints:
    """By rank, the most token-heads of keys that one exchange brings, the remap's apart."""
    context = Context.of(plan)
    most = np.zeros(plan.num_ranks, dtype=np.int64)
    for zone in plan.zones:
        pattern = pattern_of(zone)
        ranks = np.array(pattern.ranks(zone, plan.num_ranks))
        if len(ranks) > 1:
            most[ranks] = np.maximum(most[ranks], pattern.largest_exchange(zone, context))
    return most

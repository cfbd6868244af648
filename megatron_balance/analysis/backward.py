"""Keep or replay, layer by layer: predicted bytes of a step, and the decision by a rank's memory.

Every input is the plan's or agreed, so all ranks decide alike. The backward of a layer finds the
keys and values that its forward received (policy keep) or receives them again (replay). Keeping
costs memory in every layer and microbatch in flight, replaying costs traffic in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from megatron_balance.analysis.layer_runs import Recompute, held_layers
from megatron_balance.analysis.memory import Sharding, layer_activation_bytes, logit_bytes, rank_memory
from megatron_balance.analysis.received import ReceivedBytes, received_bytes
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.cost.base import Floats
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.arrays import Ints, as_array, sums
from megatron_balance.ir.columns import Move
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Backward

USABLE = 0.9
"""Share of a device's memory that `auto` fills by prediction; the rest is for what is not
predicted: the device's context, communicators, fragments of the allocator."""

GB = 1e9
NOT_SHARDED = Sharding()
NOTHING_AGAIN = Recompute()


@dataclass(frozen=True, slots=True)
class MicrobatchBytes:
    """Tokens that each rank owns in a microbatch, int64 [num_ranks], and what its attention calls
    receive.
    """

    tokens: Ints
    received: ReceivedBytes


def microbatch_bytes(plans: Sequence[MicrobatchPlan], model: Model) -> MicrobatchBytes:
    """Bytes of a microbatch from its plan, or from those of its nano-batches, which are under way
    at once.
    """
    received = [received_bytes(plan, model) for plan in plans]
    total = received[0]
    for each in received[1:]:
        total = total + each
    return MicrobatchBytes(np.sum([_owned(plan) for plan in plans], axis=0), total)


def _owned(plan: MicrobatchPlan) -> Ints:
    holder, owner, tokens = as_array(plan.moves)[:, [Move.SRC, Move.DST, Move.TOKENS]].T
    return tokens_per_rank(plan) + sums(owner, tokens, plan.num_ranks) - sums(holder, tokens, plan.num_ranks)


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline stage, as memory sees them.

    `chunks`: model chunks of the stage (interleaved schedule); `state_bytes`: of parameters,
    gradients and optimizer where they were counted; None: predicted. `in_flight`: passes through a
    chunk whose activations are held at once; None: those of Megatron's 1F1B schedules.
    """

    num_layers: int
    sharding: Sharding = NOT_SHARDED
    recompute: Recompute = NOTHING_AGAIN
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
    any layer replays; `layers`: the most that keep at once (`HeldLayers.most`).
    """

    state: float
    activations: Floats
    working: Floats
    kept: Floats
    replayed: Floats
    layers: int
    stage: int = 0

    def peak(self, keeping: int) -> Floats:
        """Bytes of each rank if so many layers at once keep."""
        held = keeping * self.kept + (self.replayed if keeping < self.layers else 0.0)
        return self.state + self.activations + self.working + held

    def most_keeping(self, memory_bytes: float) -> int | None:
        """The largest number of layers that may keep within `memory_bytes`; None: not even all
        replayed fit.
        """
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
    layers = held_layers(stage.recompute, stage.num_layers // stage.chunks)
    saved = layers.saved * layer_activation_bytes(model) + layers.inputs * layer_activation_bytes(model, "full")
    tokens = np.array([each.tokens for each in microbatches], dtype=np.float64)
    kept, replayed, working = (
        np.array([getattr(each.received, name) for each in microbatches], dtype=np.float64)
        for name in ("kept", "replayed", "working")
    )
    passes = stage.passes(len(microbatches))
    again = layers.again * layer_activation_bytes(model) * tokens
    at_work = (working + again).max(axis=0)
    if stage.is_last:  # logits are there when no layer is at work
        at_work = np.maximum(at_work, logit_bytes(model) * tokens.max(axis=0))
    # What a run that is computed again received is there for one microbatch only.
    apart = any(number > layers.again for number in layers.numbers) and stage.recompute.what != "core_attention"
    held = _in_flight(kept, passes, stage.chunks) if apart else kept.max(axis=0)
    return StepBytes(
        state_bytes(model, stage),
        saved * _in_flight(tokens, passes, stage.chunks),
        at_work,
        held,
        replayed.max(axis=0),
        layers.most,
        stage.sharding.stage,
    )


def state_bytes(model: Model, stage: Stage) -> float:
    """Bytes of a rank's parameters, gradients and optimizer."""
    if stage.state_bytes is not None:
        return stage.state_bytes
    predicted = rank_memory(model, 0, 0, stage.sharding)
    return predicted.weights + predicted.gradients + predicted.optimizer


def _in_flight(each: Floats, passes: float, chunks: int) -> Floats:
    """The most over consecutive microbatches that are in flight at once, in passes through a chunk:
    [num_ranks] from [microbatches, num_ranks].
    """
    window = min(len(each), max(1, ceil(passes / chunks)))
    sums_of = np.cumsum(np.concatenate([np.zeros((1, each.shape[1])), each]), axis=0)
    return (sums_of[window:] - sums_of[:-window]).max(axis=0) / window * passes


@dataclass(frozen=True, slots=True)
class Decision:
    """Number of layers that keep; of a chunk, those whose number is at most `keeping`
    (`HeldLayers.numbers`).

    `peak_bytes`: predicted, of the fullest `rank` of pipeline `stage`. `memory_bytes`: of a rank;
    None: not known. `keep_bytes`, `replay_bytes`: the peak if all layers kept or replayed.
    """

    keeping: int
    layers: int
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
    def in_words(self) -> str:
        """The policy in a word or two."""
        if self.keeping == self.layers:
            return "keep"
        if not self.keeping:
            return "replay"
        return f"keep in {self.keeping} of {self.layers} layers, replay in {self.layers - self.keeping}"

    def described(self) -> dict[str, Any]:
        """The decision for JSON, with its sentence."""
        return {
            "asked": self.asked,
            "keeping_layers": self.keeping,
            "layers": self.layers,
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
        return (
            f"backward: {self.in_words}{'' if self.asked == 'auto' else ' as configured'}; predicted peak "
            f"{self.peak_bytes / GB:.1f}{of} GB on {where}{'' if self.fits else ', which does not fit'} "
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
        most,
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
    """Reject a step that `auto` cannot make fit.

    Raises:
        InfeasibleError: the prediction is more than the memory, with every layer replayed. Says
            which changes would make it fit.
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
    """Changes after which the step would fit, with the bytes that the fullest rank then needs."""
    assert decision.memory_bytes is not None
    usable = USABLE * decision.memory_bytes
    ways: list[tuple[str, float]] = []

    def try_(what: str, stages: Sequence[Stage], spared: float = 0.0) -> bool:
        needs = max(float(step_bytes(microbatches, model, each).peak(0).max()) for each in stages) - spared
        if needs <= usable:
            ways.append((what, needs))
        return needs <= usable

    full = [replace(each, recompute=Recompute("uniform", 1)) for each in stages]
    try_("full activation recomputation (--recompute-granularity full)", full)
    replicated = min(each.weights + each.gradients for each in (rank_memory(model, 0, 0, s.sharding) for s in stages))
    for size in (2, 4, 8):
        if try_(f"tensor parallelism {size} times as wide", stages, replicated * (1 - 1 / size)):
            break
    found = [step_bytes(microbatches, model, each) for each in stages]
    share = min((usable - each.state) / max(1.0, float(each.peak(0).max()) - each.state) for each in found)
    if share > 0:
        most = max(int(each.tokens.max()) for each in microbatches)
        ways.append((f"at most {int(most * share):,} tokens on a rank, in place of {most:,}", usable))
    return ways

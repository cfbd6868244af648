"""auto: the best of all planners for each microbatch, by one estimate (`analysis.estimate`). No
paper.

Planners of the registry are asked in the order of a bound that is known before they plan; one whose
bound is no better than the best plan so far is not asked. The fastest plan that fits memory is
taken; where none fits, the fastest of those that need about the least memory, and the note says so.
Of trees, a planner that places them by length has to be faster by the margin.
Parts of a microbatch by different planners are left out: a zone's ranks follow from the load of all
the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_balance.analysis.backward import GB
from megatron_balance.analysis.estimate import ALIKE, Bounds, Estimate, best_first, estimate
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.mask import FOREST
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.planners.base import Candidate, Count, NotNegative, Slack, StepContext, placed_by

# Plans beside the chosen one that a note names.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class AutoOptions:
    tokens_per_rank: Count | None = None
    """Capacity of a rank in tokens; `slack` decides if not given."""
    slack: Slack = 1.5
    """Without `tokens_per_rank`: what planners that spread tokens unevenly are given as theirs."""
    planners: Sequence[str] = ()
    """The planners to ask, left-out ones too; all but those if not given."""
    margin: NotNegative = 0.005
    """A planner is not asked if its bound is not this much, relatively, below the best plan so far.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "planners", tuple(self.planners))


@dataclass(frozen=True, slots=True)
class _PricedPlan:
    label: str
    plan: MicrobatchPlan
    estimate: Estimate
    by_length: bool


def plan(batch: Batch, context: StepContext) -> MicrobatchPlan:
    """The best plan of one microbatch, with its layers; `note` says whose it is and why.

    Raises:
        InfeasibleError: no planner that is asked can place the batch; the error of the first one.
    """
    options: AutoOptions = context.options
    candidates = _candidates(context, options)
    bounds = Bounds.of(batch.lengths, context.cluster, context.model, context.cost, context.memory, batch.trees)
    # Bounds are of a layer that attends, estimates of the mean layer.
    attending = context.model.attending
    least = [attending * (bounds.even() if batch.trees else each.tried.least(bounds)) for each in candidates]
    # Those that place trees by length last.
    by_length = [bool(batch.trees) and each.by_length for each in candidates]
    ordered = sorted(zip(least, by_length, range(len(candidates)), strict=True))
    priced: list[_PricedPlan] = []
    passed_over: list[str] = []
    refused: list[InfeasibleError] = []
    for bound_s, _, at in ordered:
        candidate = candidates[at]
        fitting = [each.estimate.layer_s for each in priced if each.estimate.backward.fits]
        most_s = min(fitting, default=inf) * (1 - options.margin)
        if bound_s > most_s:
            passed_over.append(candidate.label)
            continue
        try:
            made = _ask(candidate, batch, context, options)
        except InfeasibleError as error:
            refused.append(error)
            continue
        if batch.trees and attending * bounds.of_halo(made) > most_s:
            passed_over.append(candidate.label)
            continue
        priced.append(_PricedPlan(candidate.label, made, estimate(made, bounds.machine), by_length[at]))
    if not priced:
        raise refused[0] if refused else ConfigError("auto: no planner to ask (option planners)")
    priced = [priced[number] for number in best_first([each.estimate for each in priced])]
    if priced[0].by_length and priced[0].estimate.backward.fits:
        # Nothing is gained by uneven pairs that are not faster by the margin.
        most_s = priced[0].estimate.layer_s / (1 - options.margin)
        alike = [each for each in priced if each.estimate.backward.fits and each.estimate.layer_s <= most_s]
        even = next((each for each in alike if not each.by_length), priced[0])
        priced.insert(0, priced.pop(priced.index(even)))
    return replace(priced[0].plan, note=_note(priced, attending * bounds.even(), passed_over))


def _candidates(context: StepContext, options: AutoOptions) -> list[Candidate]:
    known = [each.name for each in context.candidates]
    for name in options.planners:
        if name not in known:
            raise ConfigError(
                f"auto: planners: {name} is not one to ask; expected some of {', '.join(dict.fromkeys(known))}"
            )
    asked = [each for each in context.candidates if each.name in options.planners or not options.planners]
    able = [each for each in asked if not (context.model.latent_travels and each.planner.parts(each.tried.options))]
    if asked and not able:
        raise ConfigError(
            f"auto: planners: {', '.join(options.planners)} part heads, and a latent that travels is of all of them; "
            "name others"
        )
    # Trees are asked of all that price them.
    trees = {FOREST} if context.trees else set[str]()
    return [each for each in able if options.planners or not each.planner.left_out or trees & set(each.planner.masks)]


def _ask(candidate: Candidate, batch: Batch, context: StepContext, options: AutoOptions) -> MicrobatchPlan:
    given = dict(candidate.tried.options)
    if options.tokens_per_rank is not None:
        given["tokens_per_rank"] = options.tokens_per_rank
    if hasattr(candidate.planner.options, "slack"):
        given["slack"] = options.slack
    planner = context.planner(candidate.name, given, context.layers)
    return placed_by(planner, (batch.lengths,), replace(context, ping_pong=False)).plans[0]


def _note(priced: Sequence[_PricedPlan], least_s: float, passed_over: Sequence[str]) -> str:
    best, *others = priced
    decision = best.estimate.backward
    text = f"{best.label}: {1e3 * best.estimate.layer_s:.2f} ms a layer by estimate"
    text += f", {best.estimate.layer_s / least_s:.3f} of even computation" if least_s else ""
    if not decision.fits and decision.memory_bytes is not None:
        needs = f"{decision.peak_bytes / GB:.1f} GB of {decision.memory_bytes / GB:.1f} on rank {decision.rank}"
        text += f"; nothing fits: it needs {needs}, within {ALIKE:.0%} of a rank's memory of the least"
    named = [
        f"{each.label} {1e3 * each.estimate.layer_s:.2f}{'' if each.estimate.backward.fits else ' (does not fit)'}"
        for each in others[:_MOST_NAMED]
    ]
    text += f"; then {', '.join(named)}" if named else ""
    more = len(others) - len(named)
    text += f" and {more} more" if more else ""
    return text + (f"; not faster by their bounds: {', '.join(passed_over)}" if passed_over else "")

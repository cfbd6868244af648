"""Thresholds of the queues from a sample of steps (WLB-LLM, section 4.2, "Tuning Hyperparameter
L_i").

The paper says what is measured, workload balance and delay per token on a sample, and not how the
values are searched. Here: lengths a third of a doubling apart are candidates; the best few sets of
n thresholds are extended by each candidate to n + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

from megatron_balance.errors import ConfigError
from megatron_balance.ir.step import EMPTY, Carry, Lengths
from megatron_balance.planners.base import StepContext, Trial, Tuning
from megatron_balance.planners.wlb_llm.packing import workload

OCTAVES, CANDIDATES_PER_OCTAVE = 4, 3
BEAM = 6
"""Sets of thresholds that are extended."""
ENOUGH = 0.005
"""Imbalance that one more queue must win to be worth it."""


def tune(steps: Sequence[Lengths], context: StepContext, tuning: Tuning) -> tuple[Trial, ...]:
    """The trials that no other trial beats in both imbalance and delay, by delay; one is chosen.

    The chosen one has the fewest queues of those that come within `ENOUGH` of the least imbalance
    under the delay allowed.

    Args:
        steps: a sample, each the lengths by microbatch.
        context: `options` are those of the planner; its thresholds are replaced.
        tuning: limits of the search.

    Raises:
        ConfigError: a sample of one microbatch a step, or a number of queues that cannot be.
    """
    if tuning.most_queues < 1:
        raise ConfigError(f"--queues {tuning.most_queues}: expected at least 1")
    if not steps or min(map(len, steps)) < 2:
        raise ConfigError(
            "tune: expected a sample of steps of at least 2 microbatches, since one microbatch is always balanced; "
            "give --microbatches N"
        )
    longest = max(chain.from_iterable(chain.from_iterable(steps)))
    count = OCTAVES * CANDIDATES_PER_OCTAVE
    candidates = sorted({max(1, round(longest * 2 ** (-k / CANDIDATES_PER_OCTAVE))) for k in range(count)})
    tried = [evaluate(steps, context, ())]
    best: list[Trial] = tried[:]
    for _ in range(tuning.most_queues):
        extended = {tuple(sorted({*trial.thresholds, each})) for trial in best for each in candidates}
        new = [evaluate(steps, context, thresholds) for thresholds in sorted(extended - {t.thresholds for t in tried})]
        tried += new
        best = sorted(new, key=lambda trial: (trial.delay > tuning.most_delay, trial.imbalance))[:BEAM]
    allowed = [trial for trial in tried if trial.delay <= tuning.most_delay]
    goal = min(trial.imbalance for trial in allowed) + ENOUGH
    chosen = min(
        (trial for trial in allowed if trial.imbalance <= goal),
        key=lambda trial: (len(trial.thresholds), trial.imbalance, trial.delay),
    )
    return tuple(replace(trial, chosen=trial is chosen) for trial in _unbeaten(tried, chosen))


def evaluate(steps: Iterable[Lengths], context: StepContext, thresholds: tuple[int, ...]) -> Trial:
    """Imbalance and delay under these thresholds.

    Imbalance: largest work of a microbatch x microbatches / all work, mean over the steps that train
    something. Delay: steps that a token waits, mean over all tokens drawn.
    """
    from megatron_balance.planners.wlb_llm import NAME, REMAINED, pack

    context = replace(context, options=replace(context.options, thresholds=thresholds, packing="workload"))
    work = workload(context.cost, context.cluster, context.model.mask)
    carry = EMPTY
    imbalances: list[float] = []
    drawn = waited = delayed = 0
    for lengths in steps:
        microbatches, queued = pack(lengths, context, carry)
        new = tuple(enumerate(chain.from_iterable(lengths)))
        left = dict(carry.waiting) | dict(new)
        for document in chain.from_iterable(microbatches):
            del left[document.number]
        loads = [sum(work(each.length) for each in microbatch) for microbatch in microbatches]
        if any(loads):
            imbalances.append(max(loads) * len(loads) / sum(loads))
        drawn += sum(length for _, length in new)
        waited += sum(left.values())
        delayed += sum(length for number, length in left.items() if number >= 0)
        waiting = tuple(sorted((number - len(new), length) for number, length in left.items()))
        in_queues = {each.number - len(new) for each in queued}
        remained = [number for number, _ in waiting if number not in in_queues]
        carry = Carry.of(NAME, {REMAINED: remained}, waiting) if waiting else EMPTY
    return Trial(thresholds, fmean(imbalances), waited / drawn, delayed / drawn)


def _unbeaten(tried: Sequence[Trial], chosen: Trial) -> list[Trial]:
    kept: list[Trial] = []
    for trial in sorted(tried, key=lambda each: (each.delay, each.imbalance, len(each.thresholds))):
        if trial is chosen or not kept or trial.imbalance < min(each.imbalance for each in kept):
            kept.append(trial)
    return kept

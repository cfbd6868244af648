"""The predicted memory of a step and how its backward is run, for verbs that plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_balance.cli.inputs import Inputs

if TYPE_CHECKING:
    from megatron_balance.analysis.backward import Decision, Stage
    from megatron_balance.ir.plan import MicrobatchPlan


def decision_of(plan: MicrobatchPlan, given: Inputs) -> Decision:
    """Number of layers that keep what they received, if this plan is a step: one stage, nothing
    recomputed, the optimizer shared out over all ranks.
    """
    from megatron_balance.analysis.backward import decide, microbatch_bytes, step_bytes

    stage = _stage(given)
    predicted = step_bytes([microbatch_bytes([plan], given.model)], given.model, stage)
    return decide([predicted], given.config.backward, given.cluster.memory_bytes)


def lines(plans: Sequence[MicrobatchPlan], given: Inputs) -> list[str]:
    """The decision for the fullest of several steps in a sentence, and what would fit if it does
    not.
    """
    from megatron_balance.analysis.backward import advice, microbatch_bytes

    plan, decision = max(((plan, decision_of(plan, given)) for plan in plans), key=lambda each: each[1].peak_bytes)
    told = [decision.sentence()]
    if not decision.fits:
        told.append(advice(decision, [microbatch_bytes([plan], given.model)], given.model, [_stage(given)]))
    return told


def _stage(given: Inputs) -> Stage:
    from megatron_balance.analysis.backward import Stage
    from megatron_balance.analysis.memory import Sharding

    return Stage(given.model.num_layers, Sharding(optimizer=given.cluster.num_ranks))

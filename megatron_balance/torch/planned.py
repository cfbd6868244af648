"""The samples of a step that its driver planned, as the ranks of a pool give them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch.distributed as dist

from megatron_balance.compile.proof.structure import verify_plans
from megatron_balance.errors import BalanceError, ConfigError, DataError, PlanMismatchError
from megatron_balance.ir.arrays import Ints
from megatron_balance.ir.forest import Forest, Tree, document
from megatron_balance.ir.mask import FULL
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan, from_json
from megatron_balance.torch import documents
from megatron_balance.torch.batch import BalancedBatch
from megatron_balance.training.plans import check_announced
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import PoolLengths, Sequences
from megatron_balance.workloads.rollouts import Rollouts, joined

MOST_NAMED = 8  # samples in an error

# Of a pass, by microbatch: what this rank gives, what the pool does, the plan, and numbers and lengths
# of this rank's samples.
_Pass: TypeAlias = tuple[list[Sequences], PoolLengths, tuple[MicrobatchPlan, ...], list[tuple[tuple[int, int], ...]]]


class StepPasses(NamedTuple):
    """The microbatches of a step's passes with a backward (`update`), and of those without one
    (`forward`): log-probabilities, a reference. They are the same ones unless the plan has others.
    """

    update: list[BalancedBatch]
    forward: list[BalancedBatch]


class _ToldOfStep(NamedTuple):
    """A rank's word to the others: why it failed, or its plan and what it gives."""

    failed: str
    fingerprint: str = ""
    form: documents.Form | None = None
    numbers: tuple[int, ...] = ()
    of_rollouts: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedSamples:
    """A step's plan, who gives which of its samples, and this rank's."""

    step: StepPlan
    form: documents.Form | None
    owners: Ints
    parts: Mapping[int, documents.Parts]
    rollouts: Mapping[int, Rollouts] | None
    """None: the step is of documents."""

    def of(self, step: StepPlan) -> _Pass:
        """The microbatches of one of the step's passes."""
        members = [seqs for (seqs,) in step.members]
        own = [[seq for seq in seqs if seq in self.parts] for seqs in members]
        trees = tuple(map(_trees_of, step.plans)) if any(isinstance(each.mask, Forest) for each in step.plans) else ()
        shared = PoolLengths(
            tuple(plan.lengths for plan in step.plans),
            tuple(self.owners[np.array(seqs, dtype=np.int64)] for seqs in members),
            trees=trees,
        )
        mine = documents.sequences([[self.parts[seq] for seq in seqs] for seqs in own], self.form)
        given = [tuple((seq, len(self.parts[seq].tokens)) for seq in seqs) for seqs in own]
        return mine, shared, step.plans, given

    def rollouts_of(self, numbers: Sequence[int]) -> Rollouts | None:
        """Those of this rank's samples `numbers`, by number; None: there are documents."""
        return None if self.rollouts is None else joined([self.rollouts[number] for number in sorted(numbers)])


def planned_samples(
    step: StepPlan | str, samples: Mapping[int, Any], model: Model, pool: Pool, *, shift_labels: bool
) -> _PlannedSamples:
    """Read the plan of a step, and this rank's samples of it, and hold them against those of the other
    ranks. Collective over the pool. Errors: see `SequenceBalancer.from_plan`.
    """
    plan, parts, rollouts = StepPlan((), ()), dict[int, documents.Parts](), dict[int, Rollouts]()
    failure: BalanceError | None = None
    try:
        plan = _checked(from_json(step) if isinstance(step, str) else step, model, pool)
        parts, rollouts = documents.read_samples(samples, shift_labels=shift_labels)
        _check_planned(plan, parts)
        form = documents.check_form([list(parts.values())], None)
        told = _ToldOfStep("", plan.fingerprint(), form, tuple(parts), bool(rollouts))
    except BalanceError as error:
        failure, told = error, _ToldOfStep(f"{type(error).__name__}: {error}")
    except Exception as error:  # told to the other ranks
        failure = DataError(f"could not read the plan or its samples: {type(error).__name__}: {error}")
        told = _ToldOfStep(str(failure))
    every = [told] * pool.size
    if pool.size > 1:
        dist.all_gather_object(every, told, group=pool.groups.pool)
    if failure is not None:
        raise failure
    if failed := [(rank, each.failed) for rank, each in zip(pool.groups.ranks, every, strict=True) if each.failed]:
        raise DataError(f"rank {failed[0][0]} could not begin the planned step: {failed[0][1]}")
    try:
        check_announced({rank: each.fingerprint for rank, each in zip(pool.groups.ranks, every, strict=True)})
    except PlanMismatchError as error:
        raise PlanMismatchError(f"planned step: {error}; the driver sends one plan to all ranks") from None
    form = documents.same_form([each.form for each in every], pool)
    owners = _owners(sum(len(seqs) for (seqs,) in plan.members), [each.numbers for each in every], pool)
    return _PlannedSamples(plan, form, owners, parts, rollouts if any(each.of_rollouts for each in every) else None)


def _owners(num_samples: int, given: Sequence[Sequence[int]], pool: Pool) -> Ints:
    """Of each sample the pool rank that gives it. DataError: none does, or several."""
    counts = Counter(chain.from_iterable(given))
    missing = [number for number in range(num_samples) if number not in counts]
    twice = [number for number, count in counts.items() if count > 1]
    if missing or twice:
        what = "no rank gives" if missing else "several ranks give"
        who = [rank for rank, numbers in zip(pool.groups.ranks, given, strict=True) if twice and twice[0] in numbers]
        raise DataError(
            f"expected each of {num_samples} samples of the planned step from one rank, but {what} samples "
            f"{(missing or sorted(twice))[:MOST_NAMED]}{f' (the first: ranks {who})' if who and not missing else ''}"
        )
    owners = np.empty(num_samples, dtype=np.int64)
    for rank, numbers in enumerate(given):
        owners[list(numbers)] = rank
    return owners


def _checked(step: Any, model: Model, pool: Pool) -> StepPlan:
    """A plan that this pool can run. ConfigError: it cannot. InvalidProgramError: it does not hold."""
    if not isinstance(step, StepPlan):
        raise ConfigError(f"expected the StepPlan of rl.plan_step, or its JSON, got {type(step).__name__}")
    passes = [each for each in (step, step.forward) if each is not None]
    for each in passes:
        if each.ticks or each.strategy is not None or any(len(parts) != 1 for parts in each.members):
            raise ConfigError(
                "expected a plan of microbatches that run whole over one pool, as rl.plan_step gives, got one with "
                "pipelines, ticks or nano-batches"
            )
        if not each.plans:
            raise ConfigError("expected a plan of at least 1 microbatch, got none")
        for plan in each.plans:
            _check_plan(plan, model, pool)
        verify_plans(each)
    if sorted(_lengths(step)) != list(range(len(_lengths(step)))):
        raise ConfigError("expected a plan with each sample from 0 on once, got others")
    if any(_lengths(each) != _lengths(step) or _planned_trees(each) != _planned_trees(step) for each in passes):
        raise ConfigError("expected passes without a backward of the same samples as the update, got others")
    return step


def _check_plan(plan: MicrobatchPlan, model: Model, pool: Pool) -> None:
    heads = (plan.num_heads, plan.num_kv_heads)
    mask = (plan.mask.window_size, plan.mask == FULL)
    made, here = (plan.num_ranks, plan.ranks_per_node), (pool.size, pool.ranks_per_node)
    if made != here:
        raise ConfigError(
            f"expected a plan for {here[0]} ranks, {here[1]} a node, got one for {made[0]}, {made[1]} a node; plan for "
            "the cluster that the ranks are (a tensor-parallel group is one rank), or give Settings.ranks_per_node"
        )
    if heads != (model.num_heads, model.num_kv_heads):
        raise ConfigError(
            f"expected a plan for the balancer's model of {model.num_heads} heads, {model.num_kv_heads} of keys, got "
            f"one for {heads[0]} and {heads[1]}"
        )
    if mask != (model.mask.window_size, model.mask == FULL):
        raise ConfigError(
            f"expected a plan for the balancer's model, whose attention is {model.mask.name}, got one for "
            f"{plan.mask.name}"
        )


def _check_planned(step: StepPlan, parts: Mapping[int, documents.Parts]) -> None:
    """Refuse samples that the plan does not have, or has with another length or tree."""
    lengths, trees = _lengths(step), _planned_trees(step)
    for number, part in parts.items():
        if number not in lengths:
            raise DataError(
                f"sample {number}: expected one of the plan's {len(lengths)} samples, 0 to {len(lengths) - 1}"
            )
        if len(part.tokens) != lengths[number]:
            raise DataError(f"sample {number}: {len(part.tokens)} tokens, and the plan has {lengths[number]}")
        plain = document(lengths[number])
        if (part.tree or plain) != trees.get(number, plain):
            raise DataError(
                f"sample {number}: another tree than the plan has, of {len(part.tree or plain)} segments and of "
                f"{len(trees.get(number, plain))}; give the driver the trees of the same rollouts"
            )


def _lengths(step: StepPlan) -> dict[int, int]:
    pairs = zip(step.members, step.plans, strict=True)
    return {seq: length for (seqs,), plan in pairs for seq, length in zip(seqs, plan.lengths, strict=True)}


def _planned_trees(step: StepPlan) -> dict[int, Tree]:
    """By number, of the samples of microbatches that have trees."""
    pairs = zip(step.members, step.plans, strict=True)
    return {
        seq: tree
        for (seqs,), plan in pairs
        if isinstance(plan.mask, Forest)
        for seq, tree in zip(seqs, plan.mask.trees, strict=True)
    }


def _trees_of(plan: MicrobatchPlan) -> tuple[Tree, ...]:
    return plan.mask.trees if isinstance(plan.mask, Forest) else tuple(map(document, plan.lengths))

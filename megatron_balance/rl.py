"""One plan for the passes of a step of reinforcement learning, for the driver of another library: a
process that knows all lengths and needs neither GPU nor torch.

`plan_step` deals samples into microbatches under a cap of tokens and says who holds and attends
what; workers read the step's JSON (`ir.step.from_json`) and expand the programs of their own rank.
Importing this module imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from megatron_balance.errors import ConfigError, InfeasibleError, InvalidProgramError, suggest
from megatron_balance.ir.batch import Batch, at_least
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Tree, num_pairs
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import StepPlan

if TYPE_CHECKING:
    from megatron_balance.cost.base import Floats, MachineCost
    from megatron_balance.ir.arrays import Ints
    from megatron_balance.planners.base import StepContext

# Tokens of the sequence, and of the layer, whose predicted seconds stand for all.
_PROBE = 1 << 14

# The planner of `RlOptions` that cuts no sample that a rank can hold, and the one where some are cut.
WHOLE, CUTS = "whole", "zeppelin"


@dataclass(frozen=True, slots=True)
class RlOptions:
    """Settings of a step beside its samples, given to `plan_step` by keyword."""

    max_tokens: int | None = None
    """Most tokens of one microbatch on a rank (of trees, each shared token once); a tensor-parallel
    group is one rank. None: what memory holds by prediction."""
    forward_max_tokens: int | None = None
    """Most of passes without a backward, which then have microbatches of their own
    (`StepPlan.forward`). None: all passes have those of the update."""
    planner: str | None = None
    """`whole`: samples stay whole on a rank, and those that no rank holds go round the fewest
    neighbouring ranks that do. Else the planner of the registry that places each microbatch. None:
    `zeppelin` where a sample has to be cut and all ranks may attend, else `whole`."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of that planner."""
    tensor: int = 1
    """Tensor-parallel GPUs of a rank."""
    context: int = 1
    """Context-parallel ranks, which share every sample."""
    pipeline: int = 1
    """Pipeline stages; a step then has at least as many microbatches."""
    expert: int = 1
    """Ranks that share the experts of a layer."""
    attend: Literal["pool", "context"] = "pool"
    """Over which ranks a sample may be cut: all data- and context-parallel ranks of a stage, or only
    the context-parallel ones of one data-parallel rank."""
    meet: Literal["layer", "step"] = "layer"
    """Where data-parallel ranks wait for one another: in every layer, as where FSDP gathers weights,
    or at the step's end alone (with planner `whole`, which then is the default)."""
    min_microbatches: int = 1
    multiple_of: int = 1
    """Microbatches come in multiples of this, as interleaved pipelines need them."""
    trees: Sequence[Tree] = ()
    """Of each sample, which then are trees (`workloads.rollouts.as_trees`); none: plain sequences."""
    plan_costs: str | None = None
    """File of a cost table measured by `megatron-balance profile`. None: data sheets."""


def plan_step(
    lengths: Sequence[int], groups: Sequence[Hashable] | None, cluster: Cluster, model: Model, **options: Any
) -> StepPlan:
    """The microbatches of a step and the plan of each; all ranks have as many.

    Plans are over the data- and context-parallel ranks of a pipeline stage, a tensor-parallel group
    being one, data-parallel ranks one after the other. Balanced are seconds, forward and backward, by
    prediction.

    Args:
        lengths: tokens of each sample; the index is its number in `StepPlan.members`.
        groups: of each sample, the group that it stays together with: in one microbatch, with
            planner `whole` also on the same ranks. None: each is alone.
        cluster: all GPUs of the job.
        model: whole, as one GPU without tensor parallelism has it.
        options: those of `RlOptions`.

    Raises:
        ConfigError: lengths, groups or options that cannot be.
        InfeasibleError: a sample or group that the ranks which may share it do not hold; names it.
    """
    known = [each.name for each in fields(RlOptions)]
    for name in options:
        if name not in known:
            hint = suggest(name, known)
            raise ConfigError(f"rl.plan_step: unknown option {name!r}{f', {hint}' if hint else ''}. Known: {known}")
    job = _RlStep.of(lengths, groups, cluster, model, RlOptions(**options))
    step = job.plan(job.most_tokens(), forward_only=False)
    forward = job.options.forward_max_tokens
    return step if forward is None else replace(step, forward=job.plan(forward, forward_only=True))


def check_caps(step: StepPlan, max_tokens: int) -> None:
    """Prove that no rank holds more than `max_tokens` tokens of one microbatch, neither in attention
    nor outside it. InvalidProgramError: one does; names rank and microbatch.
    """
    for microbatch, of in enumerate(step.microbatches):
        for tokens in _held_tokens(of):
            if tokens.max() > max_tokens:
                raise InvalidProgramError(
                    f"microbatch {microbatch}: rank {int(tokens.argmax())} holds {int(tokens.max())} tokens; expected "
                    f"at most {max_tokens}"
                )


def _held_tokens(microbatch: Sequence[MicrobatchPlan]) -> tuple[Ints, Ints]:
    """Tokens of each rank [num_ranks] in attention, and outside it, of a microbatch's plans."""
    import numpy as np

    from megatron_balance.analysis.statistics import linear_tokens, tokens_per_rank

    attended = [tokens_per_rank(plan) for plan in microbatch]
    owned = [linear_tokens(*each) for each in zip(microbatch, attended, strict=True)]
    return np.sum(attended, axis=0), np.sum(owned, axis=0)


def rows_of(step: StepPlan, rank: int) -> list[list[tuple[int, int, int]]]:
    """By microbatch, the (sample, start, stop) that a rank holds, in the order of its tokens."""
    from megatron_balance import layout

    return [
        [(seqs[seq], start, stop) for seqs, at in zip(step.members[m], of, strict=True)
         for seq, start, stop in layout(step.plans[at], rank).tolist()]
        for m, of in enumerate(step.plans_of)
    ]  # fmt: skip


def whole_samples(step: StepPlan, context: int = 1) -> list[list[list[int]]]:
    """By microbatch and data-parallel rank, the numbers of its samples, for workers that take whole
    ones and never none: a rank that the plan gives none takes half of its fullest microbatch, else of
    the fullest of all.

    Args:
        step: of `plan_step`, with planner `whole` and `attend="context"`.
        context: context-parallel ranks of a data-parallel one.

    Raises:
        ConfigError: a sample is cut over several data-parallel ranks.
        InfeasibleError: fewer samples than microbatches times ranks.
    """
    lengths: dict[int, int] = {}
    home: dict[int, int] = {}
    ranks = step.plans[0].num_ranks // context
    found: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in step.members]
    for rank in range(ranks * context):
        for microbatch, rows in enumerate(rows_of(step, rank)):
            for sample, start, stop in rows:
                if sample not in home:
                    home[sample] = rank // context
                    found[microbatch][rank // context].append(sample)
                elif home[sample] != rank // context:
                    raise ConfigError(
                        f"sample {sample} is cut over data-parallel ranks {home[sample]} and {rank // context}; "
                        'expected whole ones: plan with attend="context"'
                    )
                lengths[sample] = lengths.get(sample, 0) + stop - start
    for at, own in enumerate(chain.from_iterable(found)):
        if own:
            continue
        several = [of[at % ranks] for of in found if len(of[at % ranks]) > 1]
        several = several or [each for each in chain.from_iterable(found) if len(each) > 1]
        if not several:
            raise InfeasibleError(
                f"{len(lengths)} samples for {len(found)} microbatches on {ranks} ranks, and every rank of each needs "
                "one; raise the cap of tokens, or give the step more samples"
            )
        fullest = max(several, key=lambda each: sum(lengths[sample] for sample in each))
        halves: tuple[list[int], list[int]] = ([], own)
        for sample in sorted(fullest, key=lambda sample: -lengths[sample]):
            min(halves, key=lambda half: sum(lengths[one] for one in half)).append(sample)
        fullest[:] = halves[0]
    return found


@dataclass(frozen=True, slots=True)
class _RlStep:
    batch: Batch
    members: tuple[tuple[int, ...], ...]
    """Of each group, its samples."""
    labels: tuple[Hashable, ...]
    """Of each group; `what`: a sample or a group."""
    what: str
    stage: Cluster
    """The ranks of a pipeline stage."""
    model: Model
    options: RlOptions

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        groups: Sequence[Hashable] | None,
        cluster: Cluster,
        model: Model,
        options: RlOptions,
    ) -> _RlStep:
        from megatron_balance.cost.parallel import joined_nodes, wide_ranks
        from megatron_balance.planners.pipelines import stage_cluster

        for name in ("tensor", "context", "pipeline", "expert", "min_microbatches", "multiple_of"):
            at_least(1, f"rl.plan_step: {name}", getattr(options, name))
        for name in ("max_tokens", "forward_max_tokens"):
            if getattr(options, name) is not None:
                at_least(1, f"rl.plan_step: {name}", getattr(options, name))
        shared = options.tensor * options.context * options.pipeline
        if cluster.num_ranks % shared:
            raise ConfigError(
                f"rl.plan_step: tensor {options.tensor} x context {options.context} x pipeline {options.pipeline} does "
                f"not divide {cluster.num_ranks} GPUs; choose degrees whose product does"
            )
        if options.attend not in ("pool", "context"):
            raise ConfigError(f"rl.plan_step: attend: expected 'pool' or 'context', got {options.attend!r}")
        if options.meet not in ("layer", "step"):
            raise ConfigError(f"rl.plan_step: meet: expected 'layer' or 'step', got {options.meet!r}")
        if options.planner not in (None, WHOLE) and options.meet == "step":
            raise ConfigError(
                f"rl.plan_step: planner {options.planner} lets ranks meet in every layer, and meet 'step' forbids it; "
                f"use planner {WHOLE!r}"
            )
        if options.planner not in (None, WHOLE) and options.attend == "context":
            raise ConfigError(
                f"rl.plan_step: planner {options.planner} cuts samples over all ranks of a stage, and attend 'context' "
                f"forbids it; use planner {WHOLE!r}"
            )
        batch = Batch(tuple(lengths), tuple(options.trees))
        labels = range(len(batch.lengths)) if groups is None else groups
        if len(labels) != len(batch.lengths):
            raise ConfigError(f"rl.plan_step: groups of {len(labels)} samples, lengths of {len(batch.lengths)}")
        members: dict[Hashable, list[int]] = {}
        for seq, label in enumerate(labels):
            members.setdefault(label, []).append(seq)
        stage = wide_ranks(joined_nodes(cluster, options.tensor), options.tensor)
        return cls(
            batch,
            tuple(map(tuple, members.values())),
            tuple(members),
            "sample" if groups is None else "group",
            stage_cluster(stage, cluster.num_ranks // (options.tensor * options.pipeline)),
            replace(model, expert_split=options.expert) if model.num_experts else model,
            options,
        )

    @property
    def fewest(self) -> int:
        return max(self.options.min_microbatches, self.options.pipeline)

    def most_tokens(self) -> int:
        from megatron_balance.analysis.step_memory import stages_of
        from megatron_balance.planning.choice import capacity

        if self.options.max_tokens is not None:
            return self.options.max_tokens
        options = self.options
        stages = stages_of(self.model, self.stage.num_ranks, pipeline=options.pipeline, experts=options.expert)
        return capacity(self.stage, self.model, stages, self.fewest)

    def plan(self, most: int, *, forward_only: bool) -> StepPlan:
        from megatron_balance.planners.base import StepContext
        from megatron_balance.planning.choice import planning_cost

        cost = planning_cost(self.stage, self.model, self.options.plan_costs, self.options.tensor)
        seconds = self._seconds(cost, forward_only=forward_only)
        context = StepContext(
            self.stage,
            self.model,
            cost,
            own_microbatches=False,
            may_carry=False,
            forward_only=forward_only,
            refuses_by_price=False,
        )
        name = self.options.planner
        if name is None:
            holds = max(self.batch.lengths, default=0) <= most * self.options.context
            name = WHOLE if holds or self.options.attend == "context" or self.options.meet == "step" else CUTS
        step = self._whole(most, seconds) if name == WHOLE else self._placed(name, most, seconds, context)
        if sorted(chain.from_iterable(chain.from_iterable(step.members))) != list(range(len(self.batch.lengths))):
            raise InvalidProgramError(f"planner {name}: expected each sample once in the step")
        if name == WHOLE:  # of others, tokens were counted already
            check_caps(step, most)
        return step

    def _seconds(self, cost: MachineCost, *, forward_only: bool) -> Floats:
        """Predicted seconds of each sample on one rank of a stage that holds it alone."""
        import numpy as np

        from megatron_balance.ir.columns import Pair

        model, lengths = self.model, np.array(self.batch.lengths, dtype=np.int64)
        pairs = np.zeros(len(lengths))
        for mask, share in model.mask_shares:
            if self.batch.trees:
                pairs += [share * num_pairs(tree, mask.window_size) for tree in self.batch.trees]
            else:
                pairs += share * mask.num_pairs(lengths)
        row = np.zeros((1, Pair.WIDTH), dtype=np.int64)
        row[0, [Pair.Q_STOP, Pair.K_STOP]] = _PROBE
        row[0, [Pair.Q_HEAD_STOP, Pair.KV_HEAD_STOP]] = model.num_heads, model.num_kv_heads
        passes = (False,) if forward_only else (False, True)
        attend_s = [float(cost.attend_s(row, np.zeros(1, dtype=np.int64), 1, backward=each)[0]) for each in passes]
        of_pairs = cost.attention_s(1.0) * sum(attend_s) / attend_s[0]
        # Of a token, without what a layer reads once whatever the tokens.
        of_tokens = sum(
            cost.layer_s(2 * _PROBE, backward=each) - cost.layer_s(_PROBE, backward=each) for each in passes
        )
        of_head = sum(cost.head_s(_PROBE, backward=each) for each in passes)
        layers = model.num_layers / self.options.pipeline
        return layers * (pairs * of_pairs + lengths * (of_tokens / _PROBE)) + lengths * (of_head / _PROBE)

    def _whole(self, most: int, seconds: Floats) -> StepPlan:
        """Groups whole on the context-parallel ranks of one data-parallel rank; those that these do
        not hold on the fewest neighbouring ones that do.
        """
        from megatron_balance.compile.halo import under
        from megatron_balance.ir.mask import CAUSAL, SlidingWindow
        from megatron_balance.planning.layers import of_trees
        from megatron_balance.solvers.groups import Frame, context_sizes

        context = self.options.context
        sizes = [size for size in context_sizes(self.stage) if not size % context]
        allowed = sizes if self.options.attend == "pool" else [context]
        held = [self._fewest_ranks(group, allowed, most) for group in range(len(self.members))]
        count, dealt = self._deal([(size // context, tokens) for size, tokens in held], seconds, most)
        runs: dict[tuple[int, int], tuple[int, ...]] = {}
        placement: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(count)]
        for members, (size, _), (microbatch, first) in zip(self.members, held, dealt, strict=True):
            at = first * context, first * context + size
            ranks = runs.setdefault(at, tuple(range(*at)))
            placement[microbatch] += [(seq, ranks) for seq in members]
        frame = Frame(WHOLE, self.stage, self.model)
        ordered = [sorted(each) for each in placement]
        plans = [
            frame.microbatch([self.batch.lengths[seq] for seq, _ in own], [on for _, on in own]) for own in ordered
        ]
        if isinstance(self.model.mask, SlidingWindow):
            plans = [under(replace(plan, mask=CAUSAL), self.model.mask) for plan in plans]
        step = StepPlan.whole(plans, [[seq for seq, _ in own] for own in ordered])
        return of_trees(step, dict(enumerate(self.batch.trees)), self.model.mask) if self.batch.trees else step

    def _fewest_ranks(self, group: int, allowed: Sequence[int], most: int) -> tuple[int, int]:
        """Ranks that hold a group, and its tokens on each of them at most."""
        from megatron_balance.solvers.groups import rank_tokens

        lengths = [self.batch.lengths[seq] for seq in self.members[group]]
        for size in allowed:
            tokens = sum(rank_tokens(length, size) for length in lengths)
            if tokens <= most:
                return size, tokens
        raise InfeasibleError(
            f"{self.what} {self.labels[group]} has {sum(lengths)} tokens; the {allowed[-1]} ranks that may share it "
            f"hold {most} each of a microbatch. Raise max_tokens to at least {tokens}, use more context-parallel "
            "ranks, or drop it"
            + (", or let all ranks attend (attend='pool')" if self.options.attend == "context" else "")
        )

    def _placed(self, name: str, most: int, seconds: Floats, context: StepContext) -> StepPlan:
        """Microbatches of whole groups, each placed by a planner on all ranks of the stage."""
        from megatron_balance.planners.base import renumbered
        from megatron_balance.planning.choice import choose_planner

        ranks, lengths, trees = self.stage.num_ranks, self.batch.lengths, self.batch.trees
        totals = [sum(map(lengths.__getitem__, members)) for members in self.members]
        for label, total in zip(self.labels, totals, strict=True):
            if total > ranks * most:
                raise InfeasibleError(
                    f"{self.what} {label} has {total} tokens; {ranks} ranks hold {most} each of a microbatch. Raise "
                    f"max_tokens to at least {-(-total // ranks)}, use more ranks, or drop it"
                )
        fewest, held = self.fewest, [(1, total) for total in totals]
        while True:
            fewest, dealt = self._deal(held, seconds, ranks * most, places=1, fewest=fewest)
            chosen: list[list[int]] = [[] for _ in range(fewest)]
            for members, (microbatch, _) in zip(self.members, dealt, strict=True):
                chosen[microbatch] += members
            numbers = list(chain.from_iterable(map(sorted, chosen)))
            asked = replace(context, trees=tuple(trees[seq] for seq in numbers) if trees else ())
            microbatches = tuple(tuple(lengths[seq] for seq in sorted(each)) for each in chosen)
            room = most
            # Planners may pass their capacity by rounding; then they are given less.
            while room > 0:
                choice = choose_planner(name, {**self.options.options, "tokens_per_rank": room}, "rl.plan_step")
                try:
                    step = renumbered(choice.plan_step(microbatches, asked)[0], numbers)
                except InfeasibleError:
                    break
                above = self._above(step, most)
                if not above:
                    return step
                room -= above
            if fewest >= len(self.members):
                raise InfeasibleError(
                    f"planner {name} finds no plan under {most} tokens a rank, not even of one group a "
                    f"microbatch; raise max_tokens, or use planner {WHOLE!r}"
                )
            fewest += 1

    def _above(self, step: StepPlan, most: int) -> int:
        """Tokens by which the fullest rank passes a cap."""
        return max(max(0, int(tokens.max()) - most) for of in step.microbatches for tokens in _held_tokens(of))

    def _deal(
        self,
        held: Sequence[tuple[int, int]],
        seconds: Floats,
        most: int,
        *,
        places: int | None = None,
        fewest: int | None = None,
    ) -> tuple[int, list[tuple[int, int]]]:
        """Number of microbatches, and of each group its microbatch and first place. `held`: of each
        group, how many places share it, and its tokens on each.
        """
        import numpy as np

        from megatron_balance.solvers.microbatches import MicrobatchesProblem, deal

        widths, tokens = np.array(held, dtype=np.int64).reshape(-1, 2).T
        group = np.repeat(np.arange(len(self.members)), [len(members) for members in self.members])
        seqs = np.array([*chain.from_iterable(self.members)], dtype=np.int64)
        of_groups = np.bincount(group, seconds[seqs], len(self.members)) / widths
        count = self.stage.num_ranks // self.options.context if places is None else places
        problem = MicrobatchesProblem(tokens, of_groups, widths, count, most)
        return deal(problem, fewest or self.fewest, self.options.multiple_of, meet=self.options.meet)

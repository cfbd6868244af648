"""The protocol every planner meets: `plan_step(lengths, context, carry) -> (StepPlan, carry)`.

Most planners place one microbatch and `planning.layers` lifts them to steps; others give
`plan_step`. Whatever is particular to a planner is a field of its entry, never its name in another
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

from megatron_balance.analysis.change import Layouts
from megatron_balance.analysis.estimate import Bounds
from megatron_balance.analysis.step_memory import StepMemory
from megatron_balance.cost.base import CostModel, MachineCost
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.forest import Tree
from megatron_balance.ir.mask import FOREST, KINDS
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import EMPTY, Carry, Layers, Lengths, StepPlan
from megatron_balance.ir.strategy import Strategy

NO_LAYERS = Layers()


@dataclass(frozen=True, slots=True)
class _AtLeast:
    # The least value of an option, which whoever reads options (`strict_yaml.checked`) asks for by
    # pydantic's protocol: no planner imports pydantic.
    least: int

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(kind), "ge": self.least}


Count: TypeAlias = Annotated[int, _AtLeast(1)]
Whole: TypeAlias = Annotated[int, _AtLeast(0)]
NotNegative: TypeAlias = Annotated[float, _AtLeast(0)]
# Capacity of a rank over its mean tokens: below that no batch fits.
Slack: TypeAlias = Annotated[float, _AtLeast(1)]

# From lengths, tokens of a rank and number of ranks, by microbatch, to context-parallel groups
# from the first rank on: the number of ranks and the sequences of each. Tokens are Megatron's
# `max_seqlen_per_dp_cp_rank`.
Scheduler: TypeAlias = Callable[[Sequence[int], int, int], list[tuple[tuple[int, tuple[int, ...]], ...]]]


@runtime_checkable
class PlanStep(Protocol):
    """A planner of whole steps: pure, and equal on every rank."""

    def __call__(self, lengths: Lengths, context: StepContext, carry: Carry, /) -> tuple[StepPlan, Carry]:
        """The plan of a step, and what the next step is planned with.

        Args:
            lengths: of the step's sequences in tokens, microbatch by microbatch as dealt.
            context: what is planned for, equal at every step.
            carry: what the step before returned; `EMPTY` at the first one. Every sequence that is
                held back stands in `Carry.waiting`, whatever else the planner remembers.

        Raises:
            InfeasibleError: a sequence or a microbatch that the ranks cannot hold.
            ConfigError: options out of range.
        """
        ...


class _Lookup(Protocol):
    """Another planner from the registry, with options and layers (default: that planner's own)."""

    def __call__(self, name: str, options: Mapping[str, Any], layers: Layers | None = None, /) -> PlanStep: ...


@dataclass(frozen=True, slots=True)
class JointStages:
    """Pipeline stages that attend together: the ranks of all stages, and the model chunks of each."""

    cluster: Cluster
    num_chunks: int = 1


def _no_registry(name: str, options: Mapping[str, Any], layers: Layers | None = None, /) -> PlanStep:
    del options, layers
    raise LookupError(f"no registry to look up planner {name} in; plan by planning.choice.PlannerChoice.plan_step")


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that steps are planned for beside lengths. `cluster`: the ranks of one pipeline stage."""

    cluster: Cluster
    model: Model
    cost: MachineCost
    joint: JointStages | None = None
    """All stages, where they attend together. None: each stage attends for itself."""
    ping_pong: bool = False
    """Whether microbatches of two sequences or more run as two nano-batches."""
    own_microbatches: bool = True
    """Whether a planner may choose the number of microbatches; else it is as dealt, and only a
    planner of whole steps moves sequences between them."""
    may_carry: bool = True
    """Whether another step follows that can take what this one holds back; not in evaluation, nor
    for a microbatch alone."""
    may_delay: bool = True
    """Whether a planner may hold back what would fit; in the last steps of training it may not, and
    what waits goes first."""
    forward_only: bool = False
    """Whether the step has no backward pass: evaluation."""
    strategy: Strategy | None = None
    """Layout of a training job whose replicas are pipelines (`Planner.pipelines`): the only strategy
    there is. `cluster` has a rank for each of its tensor-parallel groups of one stage."""
    base: Strategy | None = None
    """Layout of a training job that changes between strategies: it owns weights and optimizer. None:
    the options say it, or `analysis.change.base_for`."""
    of_ranks: bool = False
    """Whether microbatches of a strategy are planned for one rank of each tensor-parallel group, with
    its share of the heads, as training runs them; else for whole groups, as one wide rank each."""
    refuses_by_price: bool = True
    """Whether plans are refused whose recurrent layers hand states on for longer than all tokens by
    heads would take; training warns, and goes on."""
    by_heads: bool = False
    """Whether they are priced as an exchange of all tokens by heads (`Machine.by_heads`)."""
    trees: tuple[Tree, ...] = ()
    """Of the step's sequences, numbered microbatch by microbatch as dealt; none: all are plain
    documents."""
    memory: StepMemory | None = None
    """Of the step around its plans, by the layout that runs. None: one stage of all layers, whose
    ranks share out the optimizer's state."""
    options: Any = None
    """Of the planner that is asked, as its own dataclass."""
    layers: Layers = NO_LAYERS
    """Around the planner that is asked."""
    planner: _Lookup = _no_registry
    """The registry, for planners that ask other planners."""
    candidates: tuple[Candidate, ...] = ()
    """Of the registry, for planners that choose among all others."""


@dataclass(frozen=True, slots=True)
class Try:
    """Options worth trying; `least`: seconds of a layer that no plan made with them comes below;
    `by_length`: trees are placed by their lengths with them, whatever the planner can.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    least: Callable[[Bounds], float] = Bounds.even
    by_length: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A planner of the registry, to be asked with these options."""

    name: str
    planner: Planner
    tried: Try

    @property
    def by_length(self) -> bool:
        """Whether it places trees by their lengths."""
        return self.tried.by_length or FOREST not in self.planner.masks

    @property
    def label(self) -> str:
        given = ", ".join(f"{key} {value}" for key, value in self.tried.options.items())
        return f"{self.name} ({given})" if given else self.name


@dataclass(frozen=True, slots=True)
class Trial:
    """Thresholds tried on a sample of steps. `imbalance`: largest work of a microbatch over the
    mean; `delay`: mean steps that a token waits; `delayed`: share of the tokens that wait at all.
    """

    thresholds: tuple[int, ...]
    imbalance: float
    delay: float
    delayed: float
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Planner:
    """An entry of the registry. `options`: a frozen dataclass of plain fields with defaults, always
    with `tokens_per_rank: int | None = None`, and with `slack: float` where a rank must have room for
    more than the mean tokens; `layers`: remapping and routing that the system comes with.
    """

    plan: Callable[[Batch, Cluster, Model, MachineCost, Any], MicrobatchPlan] | None
    """Place one microbatch. None: `plan_by_others` does, or `plan_step` is asked for a step of one.
    """
    options: type[Any]
    layers: Layers = NO_LAYERS
    plan_in: Callable[[Batch, StepContext], MicrobatchPlan] | None = None
    """As `plan`, of a planner that also decides by the step's memory (`StepContext.memory`)."""
    plan_step: PlanStep | None = None
    """Plan a whole step. None: its microbatches are placed one by one (`planning.layers`)."""
    plan_batch: Callable[[Batch, Cluster, Model, CostModel, Any], StepPlan] | None = None
    """Make microbatches of the system's own from a batch that may be larger than the pool; None: as
    dealt."""
    plan_owned: Callable[[tuple[int, ...], Rows, Cluster, Model, CostModel, Any], MicrobatchPlan] | None = None
    """Plan attention for tokens wherever they are owned: from lengths, and rows (rank, seq, start,
    stop) of owners, to a plan with these owners."""
    replicas: bool = False
    """Whether the ranks are data-parallel replicas of `context_parallel` ranks each, an option that
    the planner has; None there: the fewest that hold the longest sequence."""
    takes_waiting: bool = False
    """Whether `plan_step` also trains sequences that another planner held back (`Carry.waiting` of a
    carry without a state); planners of microbatches need not care (`planning.layers`)."""
    tune: Callable[[Sequence[Lengths], StepContext, float, int], tuple[Trial, ...]] | None = None
    """Choose options from a sample of steps, and show what was weighed; a token may wait so many steps
    in the mean, and there are so many queues at most."""
    pipelines: bool = False
    """Whether each replica of a training job is a pipeline with microbatches of its own, in number and
    length, and attends for itself; else all replicas share every microbatch."""
    strategies: Callable[[Any], tuple[Strategy, ...]] | None = None
    """Strategies that options name, for training to change between; None: it cannot."""
    layouts: Callable[[Any, int, Strategy | None], Layouts | None] | None = None
    """The base layout and the strategies that options name on so many ranks; the last argument as
    `StepContext.base`. None: weights stay where they are."""
    num_holders: Callable[[Cluster, Any], int] | None = None
    """Number of ranks that hold tokens; the others serve attention alone. None: all ranks hold
    some."""
    parts_heads: Callable[[Any], bool] | None = None
    """Whether, with these options, a rank may attend with some of the heads alone, which a latent of
    all of them (`Model.latent_travels`) does not allow; None: never."""
    ping_pong: bool = False
    """Whether microbatches run as two nano-batches unless somebody says otherwise."""
    masks: tuple[str, ...] = KINDS
    """Kinds of the masks that it plans for (`ir.mask.KINDS`). With `FOREST` its batches have trees,
    which it prices; others place them by their lengths alone (`compile.halo`)."""
    plan_by_others: Callable[[Batch, StepContext], MicrobatchPlan] | None = None
    """Place one microbatch by asking other planners, layers included, where there is no `plan`."""
    sized_by: Literal["", "tokens_per_rank", "group_size"] = ""
    """The option that groups are as wide as, so that less of it may be faster: those who compare
    planners try several. Empty: there are no groups, or the planner weighs several itself."""
    tries: tuple[Try, ...] = (Try(),)
    """How planners that choose among all others ask this one."""
    left_out: str = ""
    """Why they do not ask it unless somebody names it; empty: they do."""
    idle: Callable[[Any, Cluster], str | None] | None = None
    """Why options leave a planner of microbatches nothing to choose on these ranks, for the log; None:
    they do not."""
    plan_with: Callable[[Any], _PlanWith | None] | None = None
    """Plan by another scheduler of context-parallel groups, if the options allow one: training
    hands it Megatron's own."""

    def parts(self, given: Mapping[str, Any]) -> bool:
        """Whether, with these options, a rank may attend with some of the heads alone."""
        return self.parts_heads is not None and self.parts_heads(self.options(**given))

    @property
    def joint(self) -> bool:
        """Whether the attention of several pipeline stages can be planned together."""
        return self.plan_owned is not None


@runtime_checkable
class _PlanWith(Protocol):
    def __call__(
        self, scheduler: Scheduler, batch: Batch, cluster: Cluster, model: Model, options: Any, /
    ) -> MicrobatchPlan: ...


def check_within(planner: str, options: Any) -> None:
    """Reject (ConfigError) options `within` and `within_options` that name no planner of microbatches,
    or its capacity.
    """
    if options.within == planner:
        default = type(options)().within
        raise ConfigError(f"within: expected the planner of one microbatch, such as {default}, got {planner}")
    if "tokens_per_rank" in options.within_options:
        raise ConfigError(
            f"within_options: tokens_per_rank is an option of {planner} itself; give it beside within_options"
        )


def planner_within(context: StepContext, name: str, given: Mapping[str, Any]) -> PlanStep:
    """A planner that places microbatches, with the capacity and the layers of the one that asks."""
    options = dict(given)
    if context.options.tokens_per_rank is not None:
        options["tokens_per_rank"] = context.options.tokens_per_rank
    # Layers that somebody asked for go inside; otherwise that planner comes with its own.
    asked = Layers(align=context.layers.align)
    return context.planner(name, options, None if context.layers == asked else context.layers)


def placed_by(planner: PlanStep, lengths: Lengths, context: StepContext) -> StepPlan:
    """The step of microbatches as they are, each placed by another planner."""
    inside = replace(context, own_microbatches=False, may_carry=False)
    step, carried = planner(lengths, inside, EMPTY)
    assert carried.is_empty, "nothing may be carried inside a microbatch"
    return step


def renumbered(step: StepPlan, numbers: Sequence[int]) -> StepPlan:
    """The step with members that were places in `numbers`."""
    members = tuple(tuple(tuple(numbers[at] for at in part) for part in each) for each in step.members)
    return replace(step, members=members)

"""The planner, its options and layers: chosen from the registry, or by a configuration's file, and how
training runs its plans.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, lcm
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import yaml
from pydantic import BaseModel, Field, InstanceOf

from megatron_balance.analysis.backward import Stage, state_bytes
from megatron_balance.analysis.step_memory import most_tokens, stages_of
from megatron_balance.config import (
    ClusterChoice,
    CommunicationChoice,
    DatasetConfig,
    RemapChoice,
    RoutingChoice,
    load_cluster,
    load_model,
    section_file,
)
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.table import load_table
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import unless_plain
from megatron_balance.ir.mask import KINDS, kind_of
from megatron_balance.ir.model import GradientWire, Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.program import Backward
from megatron_balance.ir.step import EMPTY, Carry, Layers, Lengths, StepPlan, When, by_number, held_back
from megatron_balance.planners import PLANNERS
from megatron_balance.planners.base import NO_LAYERS, Candidate, Planner, PlanStep, StepContext
from megatron_balance.planning.layers import of_trees, place_step
from megatron_balance.strict_yaml import STRICT, checked, joined, read_yaml, shown, unknown, unknown_name, validated

PingPong: TypeAlias = bool | Literal["auto"]
Stages: TypeAlias = Literal["joint", "stages"] | None


@dataclass(frozen=True, slots=True)
class PlannerChoice:
    """A planner by name, its options as its own dataclass, and the layers around it. `given`: the
    options that somebody set.
    """

    name: str
    given: Mapping[str, Any]
    options: Any
    planner: Planner
    layers: Layers = NO_LAYERS

    def idle(self, cluster: Cluster, num_microbatches: int) -> str | None:
        """Why the planner has nothing to do in steps of one pool of ranks, for the log."""
        name, planner, options = self.name, self.planner, self.options
        runs = f"a step runs as {getattr(options, 'within', 'te_ring')} places it"
        if planner.pipelines and not planner.replicas:
            return f"planner {name} deals sequences to pipelines, and ranks that share their documents are none: {runs}"
        if planner.plan_step is not None and num_microbatches == 1 and not getattr(options, "thresholds", True):
            return (
                f"planner {name} moves sequences between the microbatches of a step, and this one has one: {runs}; "
                "give it more, or set thresholds, which delay long sequences"
            )
        if cluster.num_ranks == 1:
            return (
                f"planner {name} places sequences on the ranks that attend together, and there is one: all planners "
                "make the same plan"
            )
        return None if planner.idle is None else planner.idle(options, cluster)

    def plan(self, batch: Batch, cluster: Cluster, model: Model, cost: MachineCost) -> MicrobatchPlan:
        """The plan of one microbatch, layers included; raises as `plan_step`."""
        context = StepContext(cluster, model, cost, own_microbatches=False, may_carry=False, trees=batch.trees)
        (plan,) = self.plan_step((batch.lengths,), context)[0].plans
        return plan

    def plan_step(self, lengths: Lengths, context: StepContext, carry: Carry = EMPTY, /) -> tuple[StepPlan, Carry]:
        """The plan of one step, layers included, and what the next step is planned with.

        Raises:
            InfeasibleError: a sequence or a microbatch that the ranks cannot hold.
            ConfigError: options, stages, a mask, trees or waiting sequences that it cannot plan.
            InvalidProgramError: a step that trains a sequence twice, by another length, or loses one.
        """
        num_holders = self.num_holders(context.cluster)
        self.check_mask(context.model)
        if context.joint is not None and not self.planner.joint:
            raise ConfigError(
                f"planner {self.name} cannot plan several pipeline stages together; these can: {_joint_planners()}"
            )
        self.check_carry(carry)
        trees = by_number(lengths, context.trees, carry)
        if trees:
            self.check_trees(lengths, context)
        if carry.planner != self.name:
            carry = carry.unowned()
        if self.planner.plan_step is None:
            each = self.options.tokens_per_rank
            limit = inf if each is None else each * num_holders
            step, after = place_step(self.planner, lengths, self._asked(context), carry, limit)
        else:
            # It numbers sequences anew for the planners that it asks, so it plans by lengths.
            step, after = self.planner.plan_step(lengths, dataclasses.replace(self._asked(context), trees=()), carry)
        assert after.is_empty or (context.may_carry and after.planner in ("", self.name)), after
        try:
            waiting = held_back(step, lengths, carry.waiting)
        except ValueError as error:
            raise InvalidProgramError(f"planner {self.name}: {error}") from None
        if waiting != after.waiting:
            raise InvalidProgramError(
                f"planner {self.name} neither trains nor carries on {sorted(set(waiting) ^ set(after.waiting))[:4]} "
                "(number, tokens); expected every sequence in one of both"
            )
        if not trees:
            return step, after
        num_dealt = sum(map(len, lengths))
        left = unless_plain([trees[number + num_dealt] for number, _ in after.waiting])
        return of_trees(step, trees, context.model.mask), dataclasses.replace(after, trees=left)

    def check_trees(self, lengths: Lengths, context: StepContext) -> None:
        """Reject (ConfigError) trees of other lengths than the step has, and what no trees go with."""
        Batch(tuple(chain.from_iterable(lengths)), context.trees)
        if context.joint is not None:
            raise ConfigError(
                f"planner {self.name}: the attention of several pipeline stages cannot be planned together with trees"
            )

    def check_carry(self, carry: Carry) -> None:
        """Reject sequences that another planner held back, if this one cannot train them."""
        of_another = carry.waiting and carry.planner != self.name
        if of_another and self.planner.plan_step is not None and not self.planner.takes_waiting:
            raise ConfigError(
                f"planner {self.name} cannot train the {len(carry.waiting)} sequences that planner "
                f"{carry.planner or 'before it'} held back; go on with a planner that can, or start anew from the "
                "weights alone (--finetune)"
            )

    def check_mask(self, model: Model) -> None:
        """Reject (ConfigError) a model whose attention the planner cannot plan."""
        kind = kind_of(model.mask)
        if kind not in self.planner.masks:
            able = ", ".join(name for name, planner in PLANNERS.items() if kind in planner.masks)
            plans = " and ".join(each for each in self.planner.masks if each in KINDS)
            raise ConfigError(
                f"planner {self.name} plans {plans} attention only, and model {model.name} "
                f"has {model.attention} attention (attention: {model.attention}); choose one of {able}"
            )

    def num_holders(self, cluster: Cluster) -> int:
        """Ranks that hold tokens; ConfigError: none, or a remap would give some to others."""
        of = self.planner.num_holders
        num_holders = cluster.num_ranks if of is None else of(cluster, self.options)
        if self.layers.remap and num_holders < cluster.num_ranks:
            raise ConfigError(
                f"planner {self.name} keeps {cluster.num_ranks - num_holders} of {cluster.num_ranks} ranks for "
                "attention alone (servers: pool), and a remap would give them tokens again outside attention. Leave "
                "out the remap (--no-remap, remap: false), or let all ranks hold tokens (servers: in_place)"
            )
        return num_holders

    def _asked(self, context: StepContext) -> StepContext:
        """`context` for this planner; rows come in multiples of what the one that asks needs."""
        align = lcm(self.layers.align, context.layers.align)
        layers = dataclasses.replace(self.layers, align=align)
        return dataclasses.replace(
            context, options=self.options, layers=layers, planner=_look_up, candidates=_candidates()
        )


def _candidates() -> tuple[Candidate, ...]:
    asked = ((name, planner) for name, planner in PLANNERS.items() if planner.plan is not None)
    return tuple(Candidate(name, planner, each) for name, planner in asked for each in planner.tries)


def _look_up(name: str, options: Mapping[str, Any], layers: Layers | None = None, /) -> PlanStep:
    return choose_planner(name, options, f"planner {name}", layers).plan_step


def _joint_planners() -> str:
    return ", ".join(name for name, planner in PLANNERS.items() if planner.joint) or "none"


def choose_planner(
    name: str, given: Mapping[str, Any], where: str = "planner", layers: Layers | None = None
) -> PlannerChoice:
    """The planner `name` with options checked against its own dataclass, and with `layers` or its
    own.

    Raises:
        ConfigError: no such planner or option, or a wrong type; `where` says in which file or option.
    """
    if name not in PLANNERS:
        raise ConfigError(
            f"{where}: {unknown_name('unknown planner', name, PLANNERS)}. Planners: {', '.join(PLANNERS)}"
        )
    planner = PLANNERS[name]
    keys = checked(planner.options, given, where, "")
    given = MappingProxyType(keys)
    return PlannerChoice(name, given, planner.options(**keys), planner, planner.layers if layers is None else layers)


def choose_layers(
    name: str,
    routing: When | RoutingChoice | None = None,
    remapping: bool | RemapChoice | None = None,
    once_per_node: bool | None = None,
) -> Layers:
    """The layers around planner `name`: its own, but for what is given. A remap that is asked for
    is made whether it pays or not.
    """
    changes: dict[str, Any] = {}
    if isinstance(routing, RoutingChoice):
        changes = {"routing": routing.when, "pieces": routing.pieces}
    elif routing is not None:
        changes = {"routing": routing}
    if once_per_node is not None:
        changes["once_per_node"] = once_per_node
    if remapping is False:
        changes |= {"remap": False, "remap_when": "always"}
    elif remapping is not None:
        how = RemapChoice() if remapping is True else remapping
        changes |= {"remap": True, "remap_when": how.when, "solver": how.solver}
    return dataclasses.replace(PLANNERS[name].layers, **changes)


@dataclass(frozen=True, slots=True)
class StepMode:
    """How training runs a step. `pipeline`: whether stages attend together; None: there is one."""

    ping_pong: bool = False
    pipeline: Stages = None

    @property
    def joint(self) -> bool:
        return self.pipeline == "joint"


def step_mode(choice: PlannerChoice, num_stages: int, ping_pong: PingPong = "auto", stages: Stages = None) -> StepMode:
    """How training runs a planner's plans under a configuration's `ping_pong` and `pipeline`.

    Raises:
        ConfigError: joint stages, which the planner cannot plan.
    """
    ping_pong = choice.planner.ping_pong if ping_pong == "auto" else ping_pong
    if num_stages == 1:
        return StepMode(ping_pong)
    return StepMode(ping_pong, "joint" if attends_jointly(choice, stages, "'stages'") else "stages")


def attends_jointly(choice: PlannerChoice, stages: Stages, otherwise: str) -> bool:
    """Whether several pipeline stages attend together under the key `pipeline`; `otherwise`: how to
    ask for the opposite. ConfigError: they shall, and the planner cannot plan that.
    """
    if stages == "joint" and not choice.planner.joint:
        raise ConfigError(
            f"pipeline: joint: planner {choice.name} plans each stage for itself; choose {_joint_planners()}, or "
            f"{otherwise}"
        )
    return choice.planner.joint and stages != "stages"


def planning_cost(
    cluster: Cluster, model: Model, table: str | Path | None, tensor_parallel: int = 1
) -> AnalyticCost | MeasuredCost:
    """The cost model planners plan by: the cost table of that file, or data sheets of ranks of so many
    GPUs.

    Raises:
        ConfigError: no such table, or one of another head dim.
    """
    if table is None:
        return AnalyticCost(cluster, model, tensor_parallel, exchanges=True)
    return MeasuredCost(load_table(Path(table)), cluster, model, exchanges=True)


def capacity(cluster: Cluster, model: Model, stages: Sequence[Stage] = (), num_microbatches: int = 1) -> int:
    """Tokens of a microbatch that a rank can hold by the memory model
    (`analysis.step_memory.most_tokens`). `stages`: of the step; none: one of all layers.
    ConfigError: the model's state alone does not fit.
    """
    stages = stages or stages_of(model, cluster.num_ranks)
    tokens = most_tokens(model, cluster.num_ranks, cluster.memory_bytes, stages, num_microbatches)
    if tokens < 1:
        state = max(state_bytes(model, stage) for stage in stages)
        raise ConfigError(
            f"{model.name} does not fit {cluster.name}: parameters, gradients and optimizer need {state / 1e9:.0f} GB "
            f"on each of {cluster.num_ranks} ranks, which have {cluster.memory_bytes / 1e9:.0f} GB and leave a tenth "
            "free. Use tensor or pipeline parallelism (--tensor-parallel, --pipeline of simulate, compare and report), "
            "or say --tokens-per-rank"
        )
    return tokens


class Run(BaseModel):
    """One run: what to plan for (`plan` and the laboratory) and how to train (the Megatron
    adapter).
    """

    model_config = STRICT

    source: str
    """The file this came from, or a word for where else."""
    planner: InstanceOf[PlannerChoice] | None = None
    """The planner and its options. Required in training."""
    cluster: ClusterChoice | None = None
    """The machine. In training the number of ranks is the job's, and `ranks_per_node` wins over
    host names."""
    model: Model | None = None
    """The model. In training Megatron's own flags decide."""
    lengths: list[int] | list[list[int]] | None = None
    """Sequence lengths in tokens, of one batch or of several."""
    lengths_file: Path | None = None
    """JSON file of lengths, relative to this file."""
    trees: Path | None = None
    """Or JSON file of trees (`workloads.trees.read_trees`), relative to this file."""
    dataset: DatasetConfig | None = None
    """Or lengths drawn from a distribution."""
    routing: When | RoutingChoice | None = None
    """When transfers between nodes go over all NICs of both: always, pays (where Eq. 1 says so),
    never; or keys when, pieces (of a transfer on each NIC). Default: the planner's own."""
    remap: bool | RemapChoice | None = None
    """Whether to balance tokens outside attention: true, false, or keys when (always, pays),
    solver. Default: the planner's own."""
    once_per_node: bool | None = None
    """Whether rows that several ranks of a node need cross its NICs once, where that pays: of
    tasks that are dispatched, and of head exchanges. Default: the planner's own."""
    plan_costs: Path | None = None
    """Cost table measured by `megatron-balance profile`, relative to this file, that planners plan
    by. Default: data sheets."""
    pipeline: Literal["joint", "stages"] | None = None
    """With pipeline parallelism: `joint` plans the attention of all stages of a tick together,
    `stages` that of each stage for itself, under Megatron's own schedules. Default: joint where the
    planner can."""
    ping_pong: bool | Literal["auto"] = "auto"
    """Whether a microbatch runs as two nano-batches, each one's exchanges beside the other's
    computation; `auto`: for planners that are made for it (`planners.base.Planner.ping_pong`)."""
    communication: CommunicationChoice = CommunicationChoice()
    """`safe`, or keys: safe (the order of transfers); inter_node_sms, intra_node_sms (how much of a
    GPU they may take)."""
    backward: Backward = "auto"
    """`keep` holds received keys and values until the backward; `replay` communicates them again
    and needs less memory; `auto` keeps in as many layers as fit a rank's memory by prediction."""
    gradient_wire: GradientWire = "fp32"
    """Type that gradients of queries, keys and values travel in between ranks: `fp32`, or `bf16` as
    in Transformer Engine's ring, half the bytes and one rounding on every rank that adds its own."""
    agreement_every: int = Field(default=100, ge=1)
    """With `backward: auto` ranks agree on how far devices' memory passed its prediction in the third
    step and then every so many. Plans are compared in every step."""
    plan_ahead: bool = True
    """Plan coming batches in a background process."""
    prove_every: int = Field(default=100, ge=0)
    """That process proves the plans of the first steps and then of every so many, while nobody waits
    for it; 0: of none. The structure of every plan is checked in any case."""
    data: Literal["documents", "script"] = "documents"
    """`documents`: whole documents from --data-path, in place of the script's data set; `script`: the
    script's own stays, with its blends and caches, and plans are made of what it delivers."""
    documents: Literal["split", "truncate"] = "split"
    """The rest of a document that is longer than the context becomes a document of its own, or is
    dropped."""
    sample_filling: Literal["next_fit", "best_fit"] = "best_fit"
    """How documents fill samples: `best_fit` puts each into the fullest of a window that holds it, for
    fewer empty tokens; `next_fit` opens the next one where a document does not fit. Another filling
    is another stream of samples: no run resumes from one in the other."""
    latent_kv: bool | Literal["pays"] = False
    """With multi-latent attention the latent of keys and values travels in place of them, and ranks
    make keys and values of what they receive: fewer bytes, more products. `pays`: where it can, and a
    step of the job's first samples takes fewer predicted seconds so. Megatron only, with planners that
    do not part heads."""
    trace_steps: list[int] = []
    """Steps of which every rank writes a trace into --balance-log DIR; `megatron-balance trace DIR`
    joins them. Megatron only."""
    self_check: bool = False
    """Before the first training step, compare the loss of a tiny batch with a plan and without; end
    where they differ by more than rounding. Megatron only."""
    accept: list[str] = []
    """Flags of Megatron, or fields of a model's config, that nobody here has looked at and that you
    answer for: the message that refuses them lists them. Megatron only."""
    accepted_data: str = ""
    """Fingerprint of the samples that a checkpoint was trained on, or plain, if this run may count
    on in others: the message that refuses to resume says it."""
    accepted_sources: dict[str, str] = {}
    """Digests of functions of Megatron that nobody here reviewed, by target, which you answer for:
    the message that stops a run on another Megatron lists them."""
    kernel: Literal[
        "auto", "plain", "cpu_flash", "torch_varlen", "flash_attn", "flash_attn_3", "flash_attn_4", "te_fused"
    ] = "auto"
    """Attention kernel; `auto` takes the fastest one that is installed and serves the GPU, dtype and
    head dim; on CUDA never `plain`, the formula."""


def load_config(path: str | Path, *, planner: str | None = None, cluster: str | None = None) -> Run:
    """The configuration in a YAML file; `planner` and `cluster`: in place of its own sections.

    Raises:
        ConfigError: the file is not there, is not YAML, repeats a key, or has an unknown, missing or
            mistyped key.
    """
    path = Path(path)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys such as 'planner:', got {shown(raw)}")
    keys: dict[str, Any] = dict(cast("dict[str, Any]", raw))
    known = [name for name in Run.model_fields if name != "source"]
    if "source" in keys:  # ours, not the user's
        raise ConfigError(f"{path}: source: {unknown('source', known)}")
    keys |= {key: name for key, name in (("planner", planner), ("cluster", cluster)) if name is not None}
    section = None if keys.get("planner") is None else _planner_section(keys["planner"], path)
    keys["planner"] = None
    if keys.get("remap") is not None and not isinstance(keys["remap"], bool):
        of_remap = f"true, false or keys such as {', '.join(RemapChoice.model_fields)}"
        keys["remap"] = _of_keys(RemapChoice, keys["remap"], path, "remap", of_remap)
    if isinstance(keys.get("routing"), dict):
        keys["routing"] = _of_keys(RoutingChoice, keys["routing"], path, "routing", "")
    if "communication" in keys:
        given = {"safe": True} if keys["communication"] == "safe" else keys["communication"]
        expected = "safe or keys such as inter_node_sms"
        keys["communication"] = _of_keys(CommunicationChoice, given, path, "communication", expected)
    if keys.get("cluster") is not None:
        keys["cluster"] = load_cluster(keys["cluster"], path, "cluster")
    if keys.get("model") is not None:
        keys["model"] = load_model(keys["model"], (), path, "model")
    for key in ("lengths_file", "trees", "plan_costs"):
        if isinstance(keys.get(key), str):
            keys[key] = path.parent / keys[key]
    config = cast(Run, validated(Run, {**keys, "source": str(path)}, str(path), "", known))
    if section is None:
        return config
    name, options, source, where = section
    if name in PLANNERS:
        options = checked(PLANNERS[name].options, options, source, where, ("name",))
    layers = choose_layers(name, config.routing, config.remap, config.once_per_node)
    chosen = choose_planner(name, options, f"{source}: {where or 'planner'}", layers)
    return config.model_copy(update={"planner": chosen})


def _planner_section(value: Any, file: Path) -> tuple[str, Mapping[str, Any], str, str]:
    """A planner's name and options, unchecked; the file, and the path to the options inside of it."""
    where = "planner"
    if isinstance(value, str) and value not in PLANNERS:
        file, where = section_file("planner", value, file, where), ""
        value = read_yaml(file)
    if isinstance(value, str):
        return value, {}, str(file), "planner"
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file}: planner: expected 'name:' and options, a planner's name or a path to a YAML, got {shown(value)}"
        )
    keys = dict(cast("dict[str, Any]", value))
    name = keys.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{file}: {joined(where, 'name')}: missing; one of {', '.join(PLANNERS)}")
    if name not in PLANNERS:
        raise ConfigError(
            f"{file}: {joined(where, 'name')}: {unknown_name('unknown planner', name, PLANNERS)}. Planners: "
            f"{', '.join(PLANNERS)}"
        )
    return name, keys, str(file), where


def _of_keys(model: type[BaseModel], value: Any, file: Path, where: str, expected: str) -> BaseModel:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {where}: expected {expected}, got {shown(value)}")
    return validated(model, cast("dict[str, Any]", value), str(file), where, known=model.model_fields)


def resolved(config: Run) -> dict[str, Any]:
    """All that the run was told and every default, as plain data, written beside results."""
    planner, cluster, model = config.planner, config.cluster, config.model
    own = {"source", "planner", "cluster", "model"}
    if planner is not None:  # whose layers say so
        own |= {"routing", "remap", "once_per_node"}
    body = config.model_dump(exclude=own, exclude_none=True, mode="json")
    sections: dict[str, Any] = {}
    if planner is not None:
        sections["planner"] = {"name": planner.name, **dataclasses.asdict(planner.options)}
        layers = planner.layers
        how = RemapChoice(when=layers.remap_when, solver=layers.solver)
        sections["routing"] = RoutingChoice(when=layers.routing, pieces=layers.pieces).model_dump()
        sections["remap"] = how.model_dump() if layers.remap else False
        sections["once_per_node"] = layers.once_per_node
    if cluster is not None:
        sections["cluster"] = dict(cluster.given)
    if model is not None:
        own = {"gradient_wire", "forest"} | ({"recurrent"} if model.recurrent is None else set[str]())
        sections["model"] = {key: each for key, each in dataclasses.asdict(model).items() if key not in own}
    return {**sections, **body}


def to_yaml(config: Run) -> str:
    head = f"# Resolved from {config.source}: every default is written out.\n"
    return head + yaml.safe_dump(resolved(config), sort_keys=False)

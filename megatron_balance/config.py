"""Configuration: strict YAML in, plain frozen dataclasses of `ir` and of the planners out.

A section (`planner`, `cluster`, `model`) is a mapping, the name of a file shipped in `configs/`, or a path to another YAML,
relative to the file that names it. A `cluster` or `model` section may start from another one with `base:`. How mistakes are told:
`strict_yaml`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import yaml
from pydantic import BaseModel, Field

from megatron_balance.compile.transpose import Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import CostModel
from megatron_balance.cost.measured import MeasuredCost
from megatron_balance.cost.memory import activation_bytes_per_token, model_state_bytes
from megatron_balance.cost.table import load_table
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import BatchPlan, MicrobatchPlan
from megatron_balance.ir.rows import Rows
from megatron_balance.ir.tick import Tick, TickPlan
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.layers import Layers, RemapWhen, When, with_layers
from megatron_balance.planning.ticks import plan_ticks
from megatron_balance.solvers.remap import Objective, Sides, Solver
from megatron_balance.strict_yaml import STRICT, checked, joined, read_yaml, shown, suggestion, unknown, validated

CONFIGS = Path(__file__).parent / "configs"
DEFAULT_CLUSTER = "h200"
DEFAULT_MODEL = "llama-7b"
PING_PONG_BY_DEFAULT = "distca"
"""The planner whose microbatches run as two nano-batches unless somebody says otherwise (`RunConfig.ping_pong`)."""

Section: TypeAlias = Literal["cluster", "model", "planner"]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannerChoice:
    """A planner by name, its options as that planner's own frozen dataclass, and the layers around it.

    `given`: the options that somebody set; the others are defaults, or follow from the layers.
    """

    name: str
    options: Any
    given: Mapping[str, Any]
    layers: Layers

    def plan(self, batch: Batch, cluster: Cluster, model: Model, cost: CostModel) -> MicrobatchPlan:
        """The plan of a batch, layers included.

        Raises:
            InfeasibleError: a batch that the ranks cannot hold.
            ConfigError: as `num_holders`, or options out of range.
        """
        self.num_holders(cluster)
        return with_layers(PLANNERS[self.name].plan(batch, cluster, model, cost, self.options), cluster, cost, self.layers)

    def num_holders(self, cluster: Cluster) -> int:
        """Ranks of the cluster that hold tokens; the others only serve attention.

        Raises:
            ConfigError: options that leave no rank for either, or a remap, which would give tokens to those that are to hold none.
        """
        of = PLANNERS[self.name].num_holders
        found = cluster.num_ranks if of is None else of(cluster, self.options)
        if self.layers.remap and found < cluster.num_ranks:
            raise ConfigError(
                f"planner {self.name} keeps {cluster.num_ranks - found} of {cluster.num_ranks} ranks for attention alone (servers: pool), "
                "and a remap would give them tokens again outside attention. Leave out the remap (--no-remap, remap: false), or let all "
                "ranks hold tokens (servers: in_place)"
            )
        return found

    def plan_step(self, batches: Sequence[Batch], cluster: Cluster, model: Model, cost: CostModel) -> BatchPlan:
        """The plans of one optimizer step, layers included: a microbatch for each batch, or those that the system makes of all of them.

        Raises:
            InfeasibleError: a batch, or where the system makes its own microbatches a sequence, that the ranks cannot hold.
        """
        own = PLANNERS[self.name].plan_batch
        if own is None:
            return BatchPlan(tuple(self.plan(batch, cluster, model, cost) for batch in batches))
        pooled = Batch(tuple(length for batch in batches for length in batch.lengths))
        plan, _ = own(pooled, cluster, model, cost, self.options)
        return BatchPlan(tuple(with_layers(each, cluster, cost, self.layers) for each in plan.microbatches))

    def plan_ticks(
        self, ticks: Sequence[Tick], plans: Sequence[MicrobatchPlan], cluster: Cluster, model: Model, cost: CostModel
    ) -> tuple[TickPlan, ...]:
        """Plans of a step's ticks, in which all pipeline stages attend together; no remap, since every rank keeps its stage's tokens.

        Args:
            ticks: of the step.
            plans: by microbatch, over the ranks of one stage: where they leave tokens outside attention is where the ticks find them.
            cluster: the ranks of all stages, stage by stage.
            model: as for `plan`.
            cost: of that cluster.

        Raises:
            ConfigError: a planner that cannot.
        """
        plan_owned = PLANNERS[self.name].plan_owned
        if plan_owned is None:
            able = ", ".join(name for name, planner in PLANNERS.items() if planner.plan_owned is not None)
            raise ConfigError(f"planner {self.name} cannot plan several pipeline stages together; these can: {able or 'none'}")
        layers = dataclasses.replace(self.layers, remap=False)

        def plan(lengths: tuple[int, ...], owned: Rows) -> MicrobatchPlan:
            return with_layers(plan_owned(lengths, owned, cluster, model, cost, self.options), cluster, cost, layers)

        return plan_ticks(ticks, plans, plan)


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingChoice:
    """How transfers between nodes go over all NICs; see `layers.Layers`."""

    when: When = "pays"
    pieces: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class RemapChoice:
    """How to balance tokens outside attention; see `layers.Layers` and `solvers.remap.solve`."""

    when: RemapWhen = "always"
    solver: Solver = "exact"
    objective: Objective = "bottleneck"
    sides: Sides = "both"


@dataclasses.dataclass(frozen=True, slots=True)
class CommunicationChoice:
    """The most multiprocessors of a GPU that one communicator's transfers may take from the kernels that run beside them (NCCL).

    Between nodes, and inside a node (dispatch and combine of routed transfers included). Default: NCCL's own choice.
    """

    inter_node_sms: int | None = None
    intra_node_sms: int | None = None

    @property
    def sms(self) -> dict[str, int]:
        """By link, where there is a limit; as `runtime.groups.make_groups` takes it."""
        limits = {"inter_node": self.inter_node_sms, "intra_node": self.intra_node_sms}
        return {link: limit for link, limit in limits.items() if limit is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterChoice:
    """The keys of a cluster that a configuration gives; the rest comes from the default preset and from the run."""

    given: Mapping[str, Any]

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks per node if the configuration says so; training then asks no host names."""
        return cast("int | None", self.given.get("ranks_per_node"))

    def build(self, *, num_ranks: int | None = None, ranks_per_node: int | None = None) -> Cluster:
        """The cluster; arguments win over the configuration, which wins over the preset `DEFAULT_CLUSTER`."""
        sizes = {"num_ranks": num_ranks, "ranks_per_node": ranks_per_node}
        keys: dict[str, Any] = {**_preset("cluster", DEFAULT_CLUSTER), **self.given}
        keys.update((key, size) for key, size in sizes.items() if size is not None)
        return Cluster(**keys)


class DatasetConfig(BaseModel):
    """Batches of lengths drawn from a known distribution, or from files."""

    model_config = STRICT

    name: str
    """Data set of lengths, such as arxiv or github; data codes; or a path to a corpus, JSONL, Parquet or Arrow."""
    tokens: int | None = Field(default=None, gt=0)
    """Tokens of a batch; data codes set their own."""
    batches: int = Field(default=1, gt=0)
    """Number of batches."""
    seed: int = 0
    """Seed of the generator."""


class RunConfig(BaseModel):
    """One run: what to plan for (`plan` and the laboratory) and how to train with it (the Megatron adapter)."""

    model_config = STRICT

    source: str
    """The file this came from, or a word for where else."""
    planner: PlannerChoice | None = None
    """The planner and its options. Required in training."""
    cluster: ClusterChoice | None = None
    """The machine. In training the number of ranks is the job's, and `ranks_per_node` wins over host names."""
    model: Model | None = None
    """The model. In training Megatron's own flags decide."""
    lengths: list[int] | list[list[int]] | None = None
    """Sequence lengths in tokens, of one batch or of several."""
    lengths_file: Path | None = None
    """JSON file of lengths, relative to this file."""
    dataset: DatasetConfig | None = None
    """Or lengths drawn from a distribution."""
    routing: When | RoutingChoice | None = None
    """When transfers between nodes go over all NICs of both: always, pays (where Eq. 1 says so), never; or keys when, pieces (of a
    transfer on each NIC). Default: the planner's own."""
    remap: bool | RemapChoice | None = None
    """Whether to balance tokens outside attention: true, false, or keys when (always, pays), solver, objective, sides. Default: the
    planner's own."""
    plan_costs: Path | None = None
    """Cost table measured by `megatron-balance profile`, relative to this file, that planners plan by. Default: data sheets."""
    pipeline: Literal["joint", "stages"] | None = None
    """With pipeline parallelism: `joint` plans the attention of all stages of a tick together, `stages` that of each stage for itself,
    under Megatron's own schedules. Default: joint where the planner can."""
    ping_pong: bool | Literal["auto"] = "auto"
    """Whether a microbatch runs as two nano-batches, each one's exchanges beside the other's computation; `auto`: for planner distca."""
    communication: CommunicationChoice = CommunicationChoice()
    """How much of a GPU transfers may take: keys inter_node_sms, intra_node_sms."""
    backward: Policy = "keep"
    """`keep` holds received KV until backward; `replay` communicates it again and needs less memory."""
    agreement_every: int = Field(default=100, ge=1)
    """Ranks compare the plan's fingerprint in the first steps and then every so many."""
    plan_ahead: bool = True
    """Plan coming batches in a background process."""
    documents: Literal["split", "truncate"] = "split"
    """What happens to the rest of a document that is longer than the context: a document of its own, or dropped."""
    kernel: Literal["auto", "plain", "cpu_flash", "torch_varlen", "flash_attn", "flash_attn_3", "te_fused"] = "auto"
    """Attention kernel; `auto` takes the fastest one that serves device, dtype and head dim."""


def load_config(path: str | Path) -> RunConfig:
    """The configuration in a YAML file.

    Raises:
        ConfigError: the file is not there, is not YAML, repeats a key, or has an unknown, missing or mistyped key.
    """
    path = Path(path)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys such as 'planner:', got {shown(raw)}")
    keys: dict[str, Any] = dict(cast("dict[str, Any]", raw))
    if "source" in keys:  # ours, not the user's
        raise ConfigError(f"{path}: source: {unknown('source', _file_keys())}")
    if keys.get("planner") is not None:
        keys["planner"] = _planner_section(keys["planner"], path)
    if keys.get("remap") is not None:
        keys["remap"] = _remap_section(keys["remap"], path)
    if isinstance(keys.get("routing"), dict):
        keys["routing"] = RoutingChoice(**checked(RoutingChoice, cast("dict[str, Any]", keys["routing"]), str(path), "routing"))
        if keys["routing"].pieces < 1:
            raise ConfigError(f"{path}: routing.pieces: expected at least 1, got {keys['routing'].pieces}")
    if "communication" in keys:
        keys["communication"] = _communication_section(keys["communication"], path)
    if keys.get("cluster") is not None:
        keys["cluster"] = ClusterChoice(MappingProxyType(_section("cluster", keys["cluster"], path, "cluster")))
    if keys.get("model") is not None:
        keys["model"] = _model(_section("model", keys["model"], path, "model"))
    for key in ("lengths_file", "plan_costs"):
        if isinstance(keys.get(key), str):
            keys[key] = path.parent / keys[key]
    keys["source"] = str(path)
    config = cast("RunConfig", validated(RunConfig, keys, str(path), "", known=_file_keys()))
    if config.planner is None:
        return config
    layers = choose_layers(config.planner.name, config.routing, config.remap)
    return config.model_copy(update={"planner": under_layers(config.planner, layers)})


def resolved(config: RunConfig) -> dict[str, Any]:
    """Everything the run was told and every default it took, as plain data; written beside every result."""
    planner, cluster, model = config.planner, config.cluster, config.model
    told = {"routing", "remap"} if planner is not None else set[str]()  # then the planner's layers say so
    body = config.model_dump(exclude={"source", "planner", "cluster", "model"} | told, exclude_none=True, mode="json")
    sections: dict[str, Any] = {}
    if planner is not None:
        sections["planner"] = {"name": planner.name, **dataclasses.asdict(planner.options)}
        layers = planner.layers
        how = RemapChoice(layers.remap_when, layers.solver, layers.objective, layers.sides)
        sections["routing"] = dataclasses.asdict(RoutingChoice(layers.routing, layers.pieces))
        sections["remap"] = dataclasses.asdict(how) if layers.remap else False
    if cluster is not None:
        sections["cluster"] = dict(cluster.given)
    if model is not None:
        sections["model"] = dataclasses.asdict(model)
    return {**sections, **body}


def to_yaml(config: RunConfig) -> str:
    """`resolved(config)` as YAML that `load_config` reads back."""
    return f"# Resolved from {config.source}: every default is written out.\n" + yaml.safe_dump(resolved(config), sort_keys=False)


def choose_planner(name: str, given: Mapping[str, Any], where: str = "planner", layers: Layers | None = None) -> PlannerChoice:
    """The planner `name` with options checked against that planner's own dataclass, and with `layers` or the planner's own.

    Raises:
        ConfigError: no such planner or option, or a wrong type; `where` says in which file or option.
    """
    if name not in PLANNERS:
        raise ConfigError(f"{where}: unknown planner {name!r}{suggestion(name, PLANNERS)}. Planners: {', '.join(PLANNERS)}")
    options = PLANNERS[name].options
    keys = checked(options, given, where, "")
    if keys.get("tokens_per_rank") is not None and keys["tokens_per_rank"] < 1:
        raise ConfigError(f"{where}: tokens_per_rank: expected at least 1 token, got {keys['tokens_per_rank']}")
    chosen = PlannerChoice(name, options(**keys), MappingProxyType(keys), PLANNERS[name].layers)
    return under_layers(chosen, layers if layers is not None else chosen.layers)


def choose_layers(name: str, routing: When | RoutingChoice | None = None, remapping: bool | RemapChoice | None = None) -> Layers:
    """The layers around planner `name`: its own, but for what is given. A remap that is asked for is made whether it pays or not."""
    layers = PLANNERS[name].layers
    if isinstance(routing, RoutingChoice):
        layers = dataclasses.replace(layers, routing=routing.when, pieces=routing.pieces)
    elif routing is not None:
        layers = dataclasses.replace(layers, routing=routing)
    if remapping is None:
        return layers
    if not remapping:
        return dataclasses.replace(layers, remap=False, remap_when="always")
    how = remapping if isinstance(remapping, RemapChoice) else RemapChoice()
    return dataclasses.replace(layers, remap=True, remap_when=how.when, solver=how.solver, objective=how.objective, sides=how.sides)


def under_layers(choice: PlannerChoice, layers: Layers) -> PlannerChoice:
    """`choice` with other layers, on which a planner's options `routed` and `remapped` count unless somebody set them."""
    follow = {"routed": layers.routing != "never", "remapped": layers.remap}
    names = {field.name for field in dataclasses.fields(choice.options)} - set(choice.given)
    options = dataclasses.replace(choice.options, **{name: value for name, value in follow.items() if name in names})
    return dataclasses.replace(choice, options=options, layers=layers)


def planning_cost(cluster: Cluster, model: Model, table: str | Path | None) -> AnalyticCost | MeasuredCost:
    """What planners plan by: the cost table of that file, or data sheets.

    Raises:
        ConfigError: no such table, or one measured for another head dim.
    """
    if table is None:
        return AnalyticCost(cluster, model)
    return MeasuredCost(load_table(Path(table)), cluster, model)


def load_cluster(name_or_path: str) -> ClusterChoice:
    """The cluster of that name in configs/cluster, or in that YAML file."""
    return ClusterChoice(MappingProxyType(_section("cluster", name_or_path, None, "--cluster")))


def load_model(name_or_path: str) -> Model:
    """The model of that name in configs/model, or in that YAML file."""
    return _model(_section("model", name_or_path, None, "--model"))


def names(section: Section) -> list[str]:
    """Names of the files shipped for a section."""
    return sorted(file.stem for file in (CONFIGS / section).glob("*.yaml"))


def capacity(cluster: Cluster, model: Model) -> int:
    """Tokens a rank can hold in a microbatch, when nobody says: (90 % of memory - its share of the state) / bytes per token.

    The state is taken as sharded over all ranks. A rough number, there so that planning works without being told; a training
    job knows better (`--tokens-per-rank`).

    Raises:
        ConfigError: the model's state alone does not fit.
    """
    room = 0.9 * cluster.memory_bytes - model_state_bytes(model) / cluster.num_ranks
    tokens = int(room / activation_bytes_per_token(model))
    if tokens < 1:
        raise ConfigError(
            f"{model.name} does not fit {cluster.name}: parameters, gradients and optimizer need "
            f"{model_state_bytes(model) / cluster.num_ranks / 1e9:.0f} GB on each of {cluster.num_ranks} ranks, which have "
            f"{cluster.memory_bytes / 1e9:.0f} GB. Use more ranks or say --tokens-per-rank"
        )
    return tokens


# Sections


def _section(section: Section, value: Any, file: Path | None, where: str) -> dict[str, Any]:
    """The keys of a cluster or model section, with those of its `base` underneath. `file` is the YAML that holds it."""
    target = Cluster if section == "cluster" else Model
    if isinstance(value, str):
        path = _find(section, value, file, where)
        return _section(section, read_yaml(path), path, "")
    source = str(file)
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: {where or section}: expected keys, a name or a path to a YAML, got {shown(value)}")
    keys = dict(cast("dict[str, Any]", value))
    base = keys.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{source}: {joined(where, 'base')}: expected a name or a path to a YAML, got {shown(base)}")
    underneath: dict[str, Any] = {} if base is None else _section(section, base, file, joined(where, "base"))
    return {**underneath, **checked(target, keys, source, where, ("base",))}


def _planner_section(value: Any, file: Path) -> PlannerChoice:
    where = "planner"
    if isinstance(value, str) and value not in PLANNERS:
        file, where = _find("planner", value, file, where), ""
        value = read_yaml(file)
    if isinstance(value, str):
        return choose_planner(value, {}, f"{file}: planner")
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: planner: expected 'name:' and options, a planner's name or a path to a YAML, got {shown(value)}")
    keys = dict(cast("dict[str, Any]", value))
    name = keys.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{file}: {joined(where, 'name')}: missing; one of {', '.join(PLANNERS)}")
    if name not in PLANNERS:
        raise ConfigError(
            f"{file}: {joined(where, 'name')}: unknown planner {name!r}{suggestion(name, PLANNERS)}. Planners: {', '.join(PLANNERS)}"
        )
    options = checked(PLANNERS[name].options, keys, str(file), where, ("name",))
    return choose_planner(name, options, f"{file}: {where or 'planner'}")


def _communication_section(value: Any, file: Path) -> CommunicationChoice:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: communication: expected keys such as inter_node_sms, got {shown(value)}")
    choice = CommunicationChoice(**checked(CommunicationChoice, cast("dict[str, Any]", value), str(file), "communication"))
    for key, limit in choice.sms.items():
        if limit < 1:
            raise ConfigError(f"{file}: communication.{key}_sms: expected at least 1, got {limit}; leave it out for NCCL's own choice")
    return choice


def _remap_section(value: Any, file: Path) -> bool | RemapChoice:
    if isinstance(value, bool):
        return value
    known = ", ".join(field.name for field in dataclasses.fields(RemapChoice))
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: remap: expected true, false or keys such as {known}, got {shown(value)}")
    return RemapChoice(**checked(RemapChoice, cast("dict[str, Any]", value), str(file), "remap"))


def _model(keys: Mapping[str, Any]) -> Model:
    missing = [f.name for f in dataclasses.fields(Model) if f.default is dataclasses.MISSING and f.name not in keys]
    if missing:
        raise ConfigError(f"model: {missing[0]}: missing; a model needs num_heads, num_kv_heads and head_dim, or 'base: NAME'")
    return Model(**keys)


def _preset(section: Section, name: str) -> dict[str, Any]:
    return _section(section, name, None, section)


def _find(section: Section, reference: str, file: Path | None, where: str) -> Path:
    """The YAML that a name or path means; paths are relative to the file that holds them."""
    if not reference.endswith((".yaml", ".yml")) and "/" not in reference:
        path = CONFIGS / section / f"{reference}.yaml"
        if path.is_file():
            return path
        known = names(section)
        at = f"{file}: {where}" if file else where
        raise ConfigError(
            f"{at}: no {section} named {reference!r}{suggestion(reference, known)}. Names: {', '.join(known)}; or a path to a YAML"
        )
    return (file.parent if file else Path()) / reference


def _file_keys() -> list[str]:
    return [name for name in RunConfig.model_fields if name != "source"]

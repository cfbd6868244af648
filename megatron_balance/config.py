"""Configuration as models: strict YAML in, checked sections out, with no behaviour of their own.

A section (`planner`, `cluster`, `model`) is a mapping, the name of a file shipped in `configs/`, or
a path to another YAML, relative to the file that names it. A `cluster` or `model` section may start
from another one with `base:`. `strict_yaml` says how mistakes are told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

from pydantic import BaseModel, Field, InstanceOf, field_validator
from pydantic_core import PydanticCustomError

from megatron_balance.errors import ConfigError
from megatron_balance.files import UnreadableError, read_json
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import GradientWire, Model
from megatron_balance.ir.program import Backward
from megatron_balance.ir.step import RemapWhen, Solver, When
from megatron_balance.model_config import NAMES, pretrained
from megatron_balance.strict_yaml import (
    STRICT,
    checked,
    joined,
    parse_yaml,
    read_yaml,
    shown,
    unknown,
    unknown_name,
    validated,
)

CONFIGS = Path(__file__).parent / "configs"
DEFAULT_CLUSTER = "h200"
DEFAULT_MODEL = "llama-7b"

Section: TypeAlias = Literal["cluster", "model", "planner", "scheme"]


# Planners' names and options are not known here: `planning.choice` loads a whole run, planner
# included.
@dataclasses.dataclass(frozen=True, slots=True)
class PlannerSection:
    """A planner by name and the options that somebody set, unchecked.

    `source`, `where`: the file, and the path to the options inside of it, for errors.
    """

    name: str
    given: Mapping[str, Any]
    source: str = ""
    where: str = "planner"


class RoutingChoice(BaseModel):
    """How transfers between nodes go over all NICs; see `ir.layers.Layers`."""

    model_config = STRICT

    when: When = "pays"
    """Always, where Eq. 1 of Zeppelin says that it pays, or never."""
    pieces: int = Field(default=1, ge=1)
    """Pieces of a transfer on each NIC."""


class RemapChoice(BaseModel):
    """How to balance tokens outside attention; see `ir.layers.Layers` and `solvers.remap.solve`."""

    model_config = STRICT

    when: RemapWhen = "always"
    """Always, or where it saves time."""
    solver: Solver = "exact"
    """Finds the moves; all solvers find equally good ones."""


class CommunicationChoice(BaseModel):
    """The order of transfers, and the multiprocessors of a GPU that NCCL may take."""

    model_config = STRICT

    safe: bool = False
    """Exchanges one after the other in the order of their ids, none passes another, and no CUDA
    graphs: slower, and for the first day on a node. `communication: safe` says the same."""
    inter_node_sms: int | None = None
    """Between nodes."""
    intra_node_sms: int | None = None
    """Inside a node, dispatch and combine of routed transfers included."""

    @field_validator("inter_node_sms", "intra_node_sms")
    @classmethod
    def _at_least_one(cls, limit: int | None) -> int | None:
        if limit is not None and limit < 1:
            raise PydanticCustomError(
                "sentence", "expected at least 1, got {limit}; leave it out for NCCL's own choice", {"limit": limit}
            )
        return limit

    @property
    def sms(self) -> dict[str, int]:
        """By link, where there is a limit; as `runtime.groups.make_groups` takes it."""
        limits = {"inter_node": self.inter_node_sms, "intra_node": self.intra_node_sms}
        return {link: limit for link, limit in limits.items() if limit is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterChoice:
    """The keys of a cluster that somebody gives; the default preset and the run give the rest."""

    given: Mapping[str, Any]

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks per node if the configuration says so; training then asks no host names."""
        return cast("int | None", self.given.get("ranks_per_node"))

    @property
    def names_machine(self) -> bool:
        """Whether more than sizes is given: links, rates or memory."""
        return not self.given.keys() <= {"num_ranks", "ranks_per_node", "name"}

    def build(self, *, num_ranks: int | None = None, ranks_per_node: int | None = None) -> Cluster:
        """The cluster; arguments win over the file, which wins over the preset `DEFAULT_CLUSTER`."""
        sizes = {"num_ranks": num_ranks, "ranks_per_node": ranks_per_node}
        keys: dict[str, Any] = {**_preset("cluster", DEFAULT_CLUSTER), **self.given}
        keys.update((key, size) for key, size in sizes.items() if size is not None)
        if "attention_efficiency" in self.given:  # a number of one's own, over the preset's kernel
            keys["attention_kernel"] = None
        return Cluster(**keys)


class DatasetConfig(BaseModel):
    """Batches of lengths drawn from a known distribution, or from files."""

    model_config = STRICT

    name: str
    """Data set of lengths, such as arxiv or github; data codes; or a path to a corpus, JSONL,
    Parquet or Arrow."""
    tokens: int | None = Field(default=None, gt=0)
    """Tokens of a batch; data codes set their own."""
    batches: int = Field(default=1, gt=0)
    """Number of batches."""
    seed: int = 0
    """Seed of the generator."""


class SchemeTable(BaseModel):
    """Measured times and memory of a model under schemes (Hydraulis, arXiv 2412.07894, Appendix C)."""

    model_config = STRICT

    name: str
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    gpu_memory_bytes: float = Field(gt=0)
    reserved_bytes: float = Field(ge=0)
    """Memory of a GPU that nothing of the model may take."""
    state_bytes: float = Field(gt=0)
    """B of C.1: bytes of a layer's weights, gradients and optimizer over hidden_size squared."""
    sharded_share: float = Field(ge=0, le=1)
    """Alpha of C.1: the share of the states that all GPUs split."""
    vocabulary_bytes: float = Field(ge=0)
    """Bytes of states of a parameter of one vocabulary table."""
    activation_bytes: dict[int, float]
    """A of C.1, by tensor parallelism: bytes of a token in a layer over hidden_size / TP."""
    milliseconds: dict[str, list[float]]
    """[a, b, c] by scheme, such as tp4-pp2-cp1: milliseconds a l^2 + b l + c of a stage for a
    microbatch of one sequence of l tokens."""

    @field_validator("milliseconds")
    @classmethod
    def _three_each(cls, given: dict[str, list[float]]) -> dict[str, list[float]]:
        for scheme, numbers in given.items():
            if len(numbers) != 3 or min(numbers) < 0:
                raise PydanticCustomError("sentence", "{scheme}: expected [a, b, c], none negative", {"scheme": scheme})
        return given


class RunConfig(BaseModel):
    """One run: what to plan for (`plan` and the laboratory) and how to train (the Megatron
    adapter).

    `planning.choice.Run` is the same with its planner looked up.
    """

    model_config = STRICT

    source: str
    """The file this came from, or a word for where else."""
    planner: InstanceOf[PlannerSection] | None = None
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


def read_config(
    path: str | Path, planners: Collection[str], instead: Mapping[str, str] = MappingProxyType({})
) -> RunConfig:
    """Read the configuration in a YAML file; `planners`: names that a planner section may have;
    `instead`: sections by name, in place of the file's own.

    Raises:
        ConfigError: the file is not there, is not YAML, repeats a key, or has an unknown, missing
            or mistyped key. A planner's options are not checked here.
    """
    path = Path(path)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys such as 'planner:', got {shown(raw)}")
    keys: dict[str, Any] = dict(cast("dict[str, Any]", raw))
    if "source" in keys:  # ours, not the user's
        raise ConfigError(f"{path}: source: {unknown('source', _file_keys())}")
    keys.update(instead)
    if keys.get("planner") is not None:
        keys["planner"] = _planner_section(keys["planner"], path, planners)
    if keys.get("remap") is not None and not isinstance(keys["remap"], bool):
        known = ", ".join(RemapChoice.model_fields)
        keys["remap"] = _of_keys(RemapChoice, keys["remap"], path, "remap", f"true, false or keys such as {known}")
    if isinstance(keys.get("routing"), dict):
        keys["routing"] = _of_keys(RoutingChoice, keys["routing"], path, "routing", "")
    if "communication" in keys:
        given = {"safe": True} if keys["communication"] == "safe" else keys["communication"]
        keys["communication"] = _of_keys(
            CommunicationChoice, given, path, "communication", "safe or keys such as inter_node_sms"
        )
    if keys.get("cluster") is not None:
        keys["cluster"] = ClusterChoice(MappingProxyType(_section("cluster", keys["cluster"], path, "cluster")))
    if keys.get("model") is not None:
        keys["model"] = _model(_section("model", keys["model"], path, "model"))
    for key in ("lengths_file", "plan_costs"):
        if isinstance(keys.get(key), str):
            keys[key] = path.parent / keys[key]
    keys["source"] = str(path)
    return cast("RunConfig", validated(RunConfig, keys, str(path), "", known=_file_keys()))


def load_cluster(name_or_path: str) -> ClusterChoice:
    """The cluster of that name in configs/cluster, or in that YAML file."""
    return ClusterChoice(MappingProxyType(_section("cluster", name_or_path, None, "--cluster")))


def parse_cluster(text: str, source: str) -> ClusterChoice:
    """The cluster in a YAML text, as 'doctor --write-cluster' writes. `source`: its name in errors
    (ConfigError).
    """
    return ClusterChoice(MappingProxyType(_section("cluster", parse_yaml(text, source), Path(source), "")))


def load_model(name_or_path: str, accept: Collection[str] = ()) -> Model:
    """The model of that name in configs/model, in that YAML file, or that a `config.json` of
    Transformers describes.

    `accept`: model types and keys of the latter to go on with (`model_config.check`); a YAML has
    them under `accept`, beside its `base`.
    """
    return _model(_section("model", name_or_path, None, "--model", accept=accept))


def load_scheme_table(name_or_path: str) -> SchemeTable:
    """The table of that name in configs/scheme, or in that YAML file. ConfigError: there is none."""
    path = _find("scheme", name_or_path, None, "--schemes")
    keys = read_yaml(path)
    if not isinstance(keys, dict):
        raise ConfigError(f"{path}: expected keys such as milliseconds:, got {shown(keys)}")
    known = list(SchemeTable.model_fields)
    return cast(SchemeTable, validated(SchemeTable, cast("dict[str, Any]", keys), str(path), "", known))


def names(section: Section) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / section).glob("*.yaml"))


# Sections


def _section(
    section: Section,
    value: Any,
    file: Path | None,
    where: str,
    above: tuple[Path, ...] = (),
    accept: Collection[str] = (),
) -> dict[str, Any]:
    # The keys of a cluster or model section, with those of its `base` underneath. `file` is the
    # YAML that holds it; `above`: files whose base it is; `accept`: of a config.json, as those say.
    target = Cluster if section == "cluster" else Model
    if isinstance(value, str):
        path = _find(section, value, file, where)
        if section == "model" and (path.suffix == ".json" or path.is_dir()):
            return _model_json(path / "config.json" if path.is_dir() else path, accept)
        if path.resolve() in above:
            raise ConfigError(
                f"{file}: {where or 'base'}: {value} is based on itself ({' -> '.join(each.name for each in above)} -> "
                f"{path.name}); name another {section}"
            )
        return _section(section, read_yaml(path), path, "", (*above, path.resolve()), accept)
    source = str(file)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{source}: {where or section}: expected keys, a name or a path to a YAML, got {shown(value)}"
        )
    keys = dict(cast("dict[str, Any]", value))
    if section == "model":
        keys = _own_names(keys, source, where)
        named: object = keys.pop("accept", [])
        if not isinstance(named, list):
            raise ConfigError(f"{source}: {joined(where, 'accept')}: expected a list of names, got {shown(named)}")
        accept = [*accept, *map(str, cast("list[object]", named))]
    base = keys.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{source}: {joined(where, 'base')}: expected a name or a path to a YAML, got {shown(base)}")
    underneath = {} if base is None else _section(section, base, file, joined(where, "base"), above, accept)
    return {**underneath, **checked(target, keys, source, where, ("base", "accept"))}


def _model_json(path: Path, accept: Collection[str]) -> dict[str, Any]:
    try:
        described: object = read_json(path)
        if not isinstance(described, dict):
            raise UnreadableError("expected an object of keys such as num_attention_heads")
        return pretrained(cast("dict[str, Any]", described), accept)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; a model is a YAML, or Transformers' config.json"
        ) from error
    except (UnreadableError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _own_names(keys: dict[str, Any], source: str, where: str) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for key, value in keys.items():
        name = next((fact for fact, aliases in NAMES.items() if key in aliases), key)
        if name in renamed:
            raise ConfigError(f"{source}: {joined(where, key)}: {name} is given twice; leave one out")
        renamed[name] = value
    if renamed.keys() != keys.keys() and "num_heads" in renamed:
        renamed.setdefault("num_kv_heads", renamed["num_heads"])
        heads, hidden = renamed["num_heads"], renamed.get("hidden_size")
        if type(heads) is int and type(hidden) is int and heads > 0:
            renamed.setdefault("head_dim", hidden // heads)
    return renamed


def _planner_section(value: Any, file: Path, planners: Collection[str]) -> PlannerSection:
    where = "planner"
    if isinstance(value, str) and value not in planners:
        file, where = _find("planner", value, file, where), ""
        value = read_yaml(file)
    if isinstance(value, str):
        return PlannerSection(value, {}, str(file))
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file}: planner: expected 'name:' and options, a planner's name or a path to a YAML, got {shown(value)}"
        )
    keys = dict(cast("dict[str, Any]", value))
    name = keys.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{file}: {joined(where, 'name')}: missing; one of {', '.join(planners)}")
    if name not in planners:
        raise ConfigError(
            f"{file}: {joined(where, 'name')}: {unknown_name('unknown planner', name, planners)}. Planners: "
            f"{', '.join(planners)}"
        )
    return PlannerSection(name, keys, str(file), where)


def _of_keys(model: type[BaseModel], value: Any, file: Path, where: str, expected: str) -> BaseModel:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {where}: expected {expected}, got {shown(value)}")
    return validated(model, cast("dict[str, Any]", value), str(file), where, known=model.model_fields)


def _model(keys: Mapping[str, Any]) -> Model:
    if "gradient_wire" in keys:
        raise ConfigError("model: gradient_wire: a key of the run; write 'gradient_wire:' beside 'model:'")
    missing = [f.name for f in dataclasses.fields(Model) if f.default is dataclasses.MISSING and f.name not in keys]
    if missing:
        raise ConfigError(
            f"model: {missing[0]}: missing; a model needs num_heads, num_kv_heads and head_dim, or 'base: NAME'"
        )
    return Model(**keys)


def _preset(section: Section, name: str) -> dict[str, Any]:
    return _section(section, name, None, section)


def _find(section: Section, reference: str, file: Path | None, where: str) -> Path:
    # The YAML that a name or path means; paths are relative to the file that holds them.
    is_path = "/" in reference or reference.endswith((".yaml", ".yml", *([".json"] if section == "model" else [])))
    if not is_path:
        path = CONFIGS / section / f"{reference}.yaml"
        if path.is_file():
            return path
        known = names(section)
        at = f"{file}: {where}" if file else where
        raise ConfigError(
            f"{at}: {unknown_name(f'no {section} named', reference, known)}. Names: {', '.join(known)}; or a path to "
            "a YAML"
        )
    return (file.parent if file else Path()) / reference


def _file_keys() -> list[str]:
    return [name for name in RunConfig.model_fields if name != "source"]

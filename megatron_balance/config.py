"""Configuration as models: strict YAML in, checked sections out, with no behaviour of their own.

A section (`planner`, `cluster`, `model`) is a mapping, the name of a file shipped in `configs/`, or
a path to another YAML, relative to the file that names it. A `cluster` or `model` section may start
from another one with `base:`. `strict_yaml` says how mistakes are told.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

from pydantic import BaseModel, Field, field_validator
from pydantic_core import PydanticCustomError

from megatron_balance import strict_yaml
from megatron_balance.errors import ConfigError
from megatron_balance.files import UnreadableError, read_json
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model, RecurrentLayers
from megatron_balance.ir.step import RemapWhen, Solver, When
from megatron_balance.model_config import NAMES, pretrained
from megatron_balance.strict_yaml import joined, shown

CONFIGS = Path(__file__).parent / "configs"
DEFAULT_CLUSTER = "h200"
DEFAULT_MODEL = "llama-7b"

Section: TypeAlias = Literal["cluster", "model", "planner", "scheme"]


class RoutingChoice(BaseModel):
    """How transfers between nodes go over all NICs; see `ir.step.Layers`."""

    model_config = strict_yaml.STRICT

    when: When = "pays"
    """Always, where Eq. 1 of Zeppelin says that it pays, or never."""
    pieces: int = Field(default=1, ge=1)
    """Pieces of a transfer on each NIC."""


class RemapChoice(BaseModel):
    """How to balance tokens outside attention; see `ir.step.Layers` and `solvers.remap.solve`."""

    model_config = strict_yaml.STRICT

    when: RemapWhen = "always"
    """Always, or where it saves time."""
    solver: Solver = "exact"
    """Finds the moves; all solvers find equally good ones."""


class CommunicationChoice(BaseModel):
    """The order of transfers, and the multiprocessors of a GPU that NCCL may take."""

    model_config = strict_yaml.STRICT

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
        keys: dict[str, Any] = {**_section("cluster", DEFAULT_CLUSTER, None, "cluster"), **self.given}
        keys.update((key, size) for key, size in sizes.items() if size is not None)
        if "attention_efficiency" in self.given:  # a number of one's own, over the preset's kernel
            keys["attention_kernel"] = None
        return Cluster(**keys)


class DatasetConfig(BaseModel):
    """Batches of lengths drawn from a known distribution, or from files."""

    model_config = strict_yaml.STRICT

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

    model_config = strict_yaml.STRICT

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


def load_cluster(given: Any, file: Path | None = None, where: str = "--cluster") -> ClusterChoice:
    """The cluster that `given` says: keys, a name in configs/cluster, or a path to a YAML. `file`,
    `where`: the YAML that says it, and the path to it in there, for errors (ConfigError).
    """
    return ClusterChoice(MappingProxyType(_section("cluster", given, file, where)))


def load_model(given: Any, accept: Collection[str] = (), file: Path | None = None, where: str = "--model") -> Model:
    """The model that `given` says: keys, a name in configs/model, a path to a YAML, or to a
    `config.json` of Transformers. `file`, `where`: as of `load_cluster`.

    `accept`: model types and keys of the latter to go on with (`model_config.check`); a YAML has
    them under `accept`, beside its `base`.
    """
    keys = _section("model", given, file, where, accept=accept)
    if "gradient_wire" in keys:
        raise ConfigError("model: gradient_wire: a key of the run; write 'gradient_wire:' beside 'model:'")
    missing = [f.name for f in dataclasses.fields(Model) if f.default is dataclasses.MISSING and f.name not in keys]
    if missing:
        raise ConfigError(
            f"model: {missing[0]}: missing; a model needs num_heads, num_kv_heads and head_dim, or 'base: NAME'"
        )
    return Model(**keys)


def load_scheme_table(name_or_path: str) -> SchemeTable:
    """The table of that name in configs/scheme, or in that YAML file. ConfigError: there is none."""
    path = section_file("scheme", name_or_path, None, "--schemes")
    keys = strict_yaml.read_yaml(path)
    if not isinstance(keys, dict):
        raise ConfigError(f"{path}: expected keys such as milliseconds:, got {shown(keys)}")
    known = list(SchemeTable.model_fields)
    return cast(SchemeTable, strict_yaml.validated(SchemeTable, cast("dict[str, Any]", keys), str(path), "", known))


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
        path = section_file(section, value, file, where)
        if section == "model" and (path.suffix == ".json" or path.is_dir()):
            return _model_json(path / "config.json" if path.is_dir() else path, accept)
        if path.resolve() in above:
            raise ConfigError(
                f"{file}: {where or 'base'}: {value} is based on itself ({' -> '.join(each.name for each in above)} -> "
                f"{path.name}); name another {section}"
            )
        return _section(section, strict_yaml.read_yaml(path), path, "", (*above, path.resolve()), accept)
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
    if section == "model" and (given := keys.get("recurrent")) is not None:
        keys["recurrent"] = _recurrent(given, source, joined(where, "recurrent"))
    underneath = {} if base is None else _section(section, base, file, joined(where, "base"), above, accept)
    return {**underneath, **strict_yaml.checked(target, keys, source, where, ("base", "accept"))}


def _recurrent(given: Any, source: str, where: str) -> RecurrentLayers:
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: {where}: expected keys such as kind and layers, got {shown(given)}")
    found = strict_yaml.checked(RecurrentLayers, cast("dict[str, Any]", given), source, where)
    missing = [f.name for f in dataclasses.fields(RecurrentLayers) if f.default is dataclasses.MISSING]
    if absent := [name for name in missing if name not in found]:
        raise ConfigError(f"{source}: {where}: {absent[0]}: missing")
    return RecurrentLayers(**found)


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


def section_file(section: Section, reference: str, file: Path | None, where: str) -> Path:
    """The YAML that a name or path means; paths are relative to `file`. ConfigError: no such name."""
    is_path = "/" in reference or reference.endswith((".yaml", ".yml", *([".json"] if section == "model" else [])))
    if not is_path:
        path = CONFIGS / section / f"{reference}.yaml"
        if path.is_file():
            return path
        known = names(section)
        at = f"{file}: {where}" if file else where
        raise ConfigError(
            f"{at}: {strict_yaml.unknown_name(f'no {section} named', reference, known)}. Names: {', '.join(known)}; "
            "or a path to a YAML"
        )
    return (file.parent if file else Path()) / reference

"""The cost table that `megatron-balance profile` writes: what was measured, where, when and with
what. JSON, loaded strictly.

Times are seconds, sizes tokens or bytes. Grids are [len(q_tokens)][len(other axis)]. A file that
lacks a key, has one too many, or holds anything but positive numbers in rising order is refused
with the key's name.
"""

import dataclasses
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from megatron_balance.errors import ConfigError, suggest
from megatron_balance.files import read_json

# First key of the file; another number is another layout.
FORMAT = "megatron-balance cost table 1"

Numbers = tuple[float, ...]
Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of the figures. `threads`: of the CPU kernels; `repeats`: samples of a figure."""

    device: str
    kind: str
    date: str
    version: str
    torch: str
    threads: int
    repeats: int


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """Seconds of one entry of an attention launch, all heads, beside the launch's fixed `launch_s`.

    `full_*`: queries by keys, no mask, axis `k_tokens`. `causal_*`: queries by the keys before the
    first query, axis `before_tokens`; the queries' own keys come on top, masked.
    """

    kernel: str
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_tokens: tuple[int, ...]
    k_tokens: tuple[int, ...]
    before_tokens: tuple[int, ...]
    launch_s: float
    backward_launch_s: float
    full_s: Grid
    full_backward_s: Grid
    causal_s: Grid
    causal_backward_s: Grid

    def __post_init__(self) -> None:
        _rising("q_tokens", self.q_tokens)
        _rising("k_tokens", self.k_tokens)
        _rising("before_tokens", self.before_tokens, zero=True)
        for name in ("launch_s", "backward_launch_s"):
            _not_negative(name, getattr(self, name))
        for name, other in (("full", self.k_tokens), ("causal", self.before_tokens)):
            for key in (f"{name}_s", f"{name}_backward_s"):
                _grid(key, getattr(self, key), len(self.q_tokens), len(other))


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size."""

    sizes: tuple[int, ...]
    seconds: Numbers

    def __post_init__(self) -> None:
        _rising("sizes", self.sizes)
        _series("seconds", self.seconds, len(self.sizes))


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Seconds of a layer's modules outside attention by tokens, and the sizes of that layer."""

    hidden_size: int
    ffn_size: int
    gated_ffn: bool
    tokens: tuple[int, ...]
    forward_s: Numbers
    backward_s: Numbers

    def __post_init__(self) -> None:
        _rising("tokens", self.tokens)
        _series("forward_s", self.forward_s, len(self.tokens))
        _series("backward_s", self.backward_s, len(self.tokens))


@dataclass(frozen=True, slots=True)
class LinkTable:
    """Seconds of one message by bytes over one class of links: `intra_node`, `inter_node`."""

    name: str
    backend: str
    sizes: tuple[int, ...]
    seconds: Numbers

    def __post_init__(self) -> None:
        if self.name not in LINKS:
            raise ConfigError(
                f"name: unknown link {self.name!r}{_suggestion(self.name, LINKS)}. Links: {', '.join(LINKS)}"
            )
        _rising("sizes", self.sizes)
        _series("seconds", self.seconds, len(self.sizes))


LINKS = ("intra_node", "inter_node")


@dataclass(frozen=True, slots=True)
class BesideTable:
    """Slowdown of a kernel beside transfers in the node, or between nodes: factors from 1."""

    intra_node: float
    inter_node: float

    def __post_init__(self) -> None:
        for name in ("intra_node", "inter_node"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: expected a factor of at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class HostTable:
    """Seconds of a rank's host, as `cost.base.Host`."""

    call_s: float
    launch_s: float
    message_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("call_s", "launch_s", "message_s"):
            _not_negative(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Everything a profile measured. `merge`: by tokens, all heads; `pack`: by bytes."""

    format: str
    source: Source
    attention: AttentionTable
    merge: Curve
    pack: Curve
    layer: LayerTable
    links: tuple[LinkTable, ...] = ()
    beside: BesideTable | None = None
    host: HostTable | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(
                f"format: expected {FORMAT!r}, got {self.format!r}; write the table anew with 'megatron-balance "
                "profile'"
            )
        names = [link.name for link in self.links]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"links: {name!r} is there twice")


def save_table(table: CostTable, path: Path) -> None:
    """Write the table as JSON. Raises ConfigError where the file cannot be written."""
    try:
        path.write_text(json.dumps(dataclasses.asdict(table), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error


def load_table(path: Path) -> CostTable:
    """The table in a JSON file. Raises ConfigError: no such file, not JSON, or a key that is
    unknown, missing or does not hold what it should.
    """
    try:
        content: object = read_json(path, _unique)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); 'megatron-balance profile --out FILE' writes a cost table"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not a cost table in JSON ({error})") from error
    return cast(CostTable, _decode(CostTable, content, str(path), ""))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"key {key!r} is given twice")
    return dict(pairs)


def _decode(kind: Any, value: object, file: str, at: str) -> object:
    # `value` as `kind`: a dataclass, a tuple, a number, text or None; `at` is the path to it.
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(cast(type, kind), value, file, at)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{file}: {at}: expected a list, got {_shown(value)}")
        inner = get_args(kind)[0]
        return tuple(
            _decode(inner, entry, file, f"{at}[{place}]") for place, entry in enumerate(cast(list[object], value))
        )
    if isinstance(kind, UnionType):
        if value is None and NoneType in get_args(kind):
            return None
        return _decode(next(arg for arg in get_args(kind) if arg is not NoneType), value, file, at)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        expected = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
        raise ConfigError(f"{file}: {at}: expected {expected}, got {_shown(value)}")
    return value


def _decode_dataclass(kind: type, value: object, file: str, at: str) -> object:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {at or 'the file'}: expected an object, got {_shown(value)}")
    keys, hints, fields = cast(dict[str, object], value), get_type_hints(kind), dataclasses.fields(kind)
    names = [field.name for field in fields]
    for key in keys:
        if key not in names:
            raise ConfigError(
                f"{file}: {_join(at, key)}: unknown key{_suggestion(key, names)}. Keys: {', '.join(names)}"
            )
    for field in fields:
        if field.name not in keys and field.default is dataclasses.MISSING:
            raise ConfigError(f"{file}: {_join(at, field.name)}: missing")
    decoded = {key: _decode(hints[key], entry, file, _join(at, key)) for key, entry in keys.items()}
    try:
        return kind(**decoded)
    except ConfigError as error:
        raise ConfigError(f"{file}: {_join(at, str(error))}") from error


def _rising(name: str, values: tuple[int, ...], *, zero: bool = False) -> None:
    lowest = 0 if zero else 1
    if len(values) < 2:
        raise ConfigError(f"{name}: at least 2 sizes are needed, got {list(values)}")
    if values[0] < lowest or any(b <= a for a, b in pairwise(values)):
        raise ConfigError(f"{name}: expected whole numbers from {lowest} on in rising order, got {list(values)}")


def _series(name: str, values: Numbers, count: int) -> None:
    if len(values) != count:
        raise ConfigError(f"{name}: expected {count} times, one for each size, got {len(values)}")
    for place, value in enumerate(values):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}[{place}]: expected positive seconds, got {value}")


def _grid(name: str, rows: Grid, height: int, width: int) -> None:
    if len(rows) != height:
        raise ConfigError(f"{name}: expected {height} rows, one for each entry of q_tokens, got {len(rows)}")
    for place, row in enumerate(rows):
        _series(f"{name}[{place}]", row, width)


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}: expected seconds of at least 0, got {value}")


def _suggestion(word: str, known: tuple[str, ...] | list[str]) -> str:
    hint = suggest(word, known)
    return f", {hint}" if hint else ""


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

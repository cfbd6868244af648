"""Strict YAML, and mappings checked against dataclasses and pydantic models.

An unknown, repeated, missing or mistyped key is a ConfigError that names the file, the path to the
key and what would be right. The only coercion is int -> float.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from megatron_balance.errors import ConfigError, suggest

STRICT = ConfigDict(
    frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True
)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a repeated key is an error, 4e11 is a number, and only true and false are
    booleans (YAML 1.2).
    """


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[str] = set()
    for key_node, _ in node.value:
        if key_node.value in keys:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
            )
        keys.add(key_node.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|false)$", "tf"),
    ("float", r"^[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)$", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))  # pyright: ignore[reportUnknownMemberType]


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text (one option's value, or a file); `source` names it in errors.

    Raises:
        ConfigError: it is not YAML or repeats a key.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


def read_yaml(path: Path) -> Any:
    """The value of a YAML file.

    Raises:
        ConfigError: it cannot be read, is not YAML or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    return parse_yaml(text, str(path))


def checked(
    target: type, keys: Mapping[str, Any], source: str, where: str, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`keys` checked, and int turned to float, against the fields of a dataclass; only those that
    were given.

    Args:
        target: the dataclass.
        keys: what somebody wrote.
        source: the file or option, for errors.
        where: the path to the keys inside of it.
        also: keys that are right, too, and have been taken out.

    Raises:
        ConfigError: a key is unknown, or its value of the wrong type.
    """
    partial = _partial(target)
    found = validated(partial, keys, source, where, known=[*partial.model_fields, *also])
    return {name: getattr(found, name) for name in found.model_fields_set}


@functools.cache  # pydantic takes milliseconds to make a model
def _partial(target: type) -> type[BaseModel]:
    """A model of the dataclass's fields in which none is required."""
    hints = get_type_hints(target)
    fields: dict[str, Any] = {f.name: (hints[f.name], None) for f in dataclasses.fields(target)}
    return create_model(target.__name__, __config__=STRICT, **fields)


def validated(
    model: type[BaseModel], keys: Mapping[str, Any], source: str, where: str, known: Iterable[str]
) -> BaseModel:
    """The model of `keys`, as `checked`; `known`: all keys that are right.

    Raises:
        ConfigError: a key is unknown or missing, or its value is wrong.
    """
    try:
        return model.model_validate(dict(keys))
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]
    path = [str(part) for part in error["loc"] if not _is_union_tag(part)]
    inner = _known_at(model, path[:-1]) if len(path) > 1 else list(known)
    raise ConfigError(f"{source}: {joined(where, *path)}: {_explain(error, path[-1] if path else '', inner)}")


def _explain(error: ErrorDetails, key: str, known: Iterable[str]) -> str:
    got = shown(error["input"])
    expected = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "dict_type": "a mapping such as {key: value}",
    }.get(error["type"])
    context: dict[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            return unknown(key, known)
        case "missing":
            return "missing"
        case "sentence":  # of a validator of ours
            return error["msg"]
        case "literal_error":
            return f"expected {context['expected']}, got {got}"
        case "greater_than":
            return f"expected more than {context['gt']}, got {got}"
        case "greater_than_equal":
            return f"expected at least {context['ge']}, got {got}"
        case _:
            return (
                f"expected {expected}, got {got}"
                if expected
                else f"{error['msg'][0].lower()}{error['msg'][1:]}, got {got}"
            )


def _known_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Keys of the nested section that `path` leads to."""
    for key in path:
        field = model.model_fields.get(key)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def _is_union_tag(part: int | str) -> bool:
    """Pydantic names the branch of a union in the path to an error, such as 'list[int]'; users did
    not write that.
    """
    return isinstance(part, str) and not re.fullmatch(r"\w+", part)


def unknown(key: str, known: Iterable[str]) -> str:
    """The complaint about an unknown key."""
    known = list(known)
    hint = suggest(key, known)
    return f"unknown key, {hint}" if hint else f"unknown key. Keys: {', '.join(known)}"


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """`what 'name'` with the name that comes closest."""
    hint = suggest(name, known)
    return f"{what} {name!r}{f', {hint}' if hint else ''}"


def joined(*parts: str) -> str:
    """The path to a key."""
    return ".".join(part for part in parts if part)


def shown(value: object) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

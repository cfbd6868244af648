"""Strict YAML, and mappings checked against dataclasses and pydantic models.

An unknown, repeated, missing or mistyped key is a ConfigError that names the file, the path to the
key and what would be right. The only coercion is int -> float.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from megatron_balance.errors import ConfigError, suggest
from megatron_balance.files import UnreadableError, read_text

STRICT = ConfigDict(
    frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True
)

# Of a YAML file: a hundred times what any configuration takes, and read in about a second.
MOST_BYTES = 128 * 2**10
# Of a whole number, which then fits 64 bits.
MOST_DIGITS = 18
# Brackets that are open at once.
MOST_DEPTH = 100
# Keys and values of a YAML text, each alias counted as all that it stands for.
MOST_NODES = 100_000
_ONE_RULE = "is gone with rule cost; leave it out"
# Sentences on what files of before may have, by class and key (and value): what to write instead.
GONE: Mapping[str, str] = {
    "ZeppelinOptions.rule: cost": "rule cost is gone; write groups, with group_size 1 for rings of single ranks",
    "ZeppelinOptions.routed": f"{_ONE_RULE}, and say routing beside the planner (routing: never)",
    "ZeppelinOptions.remapped": f"{_ONE_RULE}, and say remap beside the planner (remap: false)",
    "ZeppelinOptions.weight_tokens": _ONE_RULE,
    "ZeppelinOptions.weight_communication": _ONE_RULE,
    "RemapChoice.objective": "the moves make both objectives least at once; leave it out",
    "RemapChoice.sides": "both sides of a rank's link count; leave it out",
    "RemapChoice.solver: ortools": "OR-Tools is no solver any more; write 'highs', or leave it out for 'exact'",
}


class _Loader(yaml.SafeLoader):
    """Safe YAML: no repeated keys, 4e11 is a number, only true and false are booleans (YAML 1.2)."""

    def get_single_node(self) -> yaml.Node | None:
        """The document's node, refused if its aliases stand for too much or for themselves."""
        node = super().get_single_node()
        if node is not None and _num_nodes(node, {}) > MOST_NODES:
            raise _refused(f"its aliases stand for more than {MOST_NODES} keys and values", node)
        return node


def _refused(why: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, node.start_mark)


def _num_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    # Number of nodes below and with `node`, aliases written out; `known`: by identity, 0 while a
    # node is being counted.
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 0
        below = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_num_nodes(each, known) for each in below)
    elif not known[id(node)]:
        raise _refused("an alias stands for itself", node)
    return known[id(node)]


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[str] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refused("a key that is a list or a mapping itself", key_node)
        if key_node.value in keys:
            raise _refused(f"key {key_node.value!r} is given twice", key_node)
        keys.add(key_node.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MOST_DIGITS:
        raise _refused(f"a number of {len(node.value)} characters; none needs more than {MOST_DIGITS}", node)
    return yaml.SafeLoader.construct_yaml_int(loader, node)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
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
    """The value of a YAML text (one option's value, or a file); `source` names it in errors. Raises
    ConfigError: it is not YAML or repeats a key.
    """
    try:
        if _nests_deeply(text):  # the library takes seconds to give up
            raise RecursionError
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ConfigError(f"{source}: not valid YAML: it nests too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from None


def _nests_deeply(text: str) -> bool:
    # Whether more than `MOST_DEPTH` brackets are open at once.
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return False
    open_after = accumulate(1 if found[0] in "[{" else -1 for found in re.finditer(r"[\[\]{}]", text))
    return max(open_after) > MOST_DEPTH


def read_yaml(path: Path) -> Any:
    """The value of a YAML file; ConfigError as `parse_yaml`, and where it cannot be read."""
    try:
        text = read_text(path, MOST_BYTES)
    except (OSError, UnreadableError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    return parse_yaml(text, str(path))


def checked(
    target: type, keys: Mapping[str, Any], source: str, where: str, also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`keys` checked, and int turned to float, against the fields of a dataclass; only those given.

    `source`: the file or option, `where`: the path to the keys inside of it, for errors. `also`: keys
    that are right, too, and have been taken out. Raises ConfigError: a key is unknown, or its value of
    the wrong type.
    """
    partial = _partial(target)
    found = validated(partial, keys, source, where, known=[*partial.model_fields, *also])
    return {name: getattr(found, name) for name in found.model_fields_set}


@functools.cache  # pydantic takes milliseconds to make a model
def _partial(target: type) -> type[BaseModel]:
    hints = get_type_hints(target, include_extras=True)
    fields: dict[str, Any] = {f.name: (hints[f.name], None) for f in dataclasses.fields(target)}
    config: ConfigDict = {**STRICT, "use_attribute_docstrings": False}  # which reads the sources of all modules
    return create_model(target.__name__, __config__=config, **fields)


def validated(
    model: type[BaseModel], keys: Mapping[str, Any], source: str, where: str, known: Iterable[str]
) -> BaseModel:
    """The model of `keys`, as `checked`; `known`: all keys that are right. Raises ConfigError: a
    key is unknown or missing, or its value is wrong.
    """
    try:
        return model.model_validate(dict(keys))
    except ValidationError as failure:
        error = failure.errors(include_url=False)[0]
    path = [str(part) for part in error["loc"] if not _is_union_tag(part)]
    gone = f"{model.__name__}.{'.'.join(path)}"
    if instead := GONE.get(gone) or GONE.get(f"{gone}: {error['input']}"):
        raise ConfigError(f"{source}: {joined(where, *path)}: {instead}")
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
            wrong = f"expected {expected}" if expected else f"{error['msg'][0].lower()}{error['msg'][1:]}"
            return f"{wrong}, got {got}"


def _known_at(model: type[BaseModel], path: list[str]) -> list[str]:
    # Keys of the nested section that `path` leads to.
    for key in path:
        field = model.model_fields.get(key)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def _is_union_tag(part: int | str) -> bool:
    # Pydantic names the branch of a union in the path to an error, such as 'list[int]'; users did
    # not write that.
    return isinstance(part, str) and not re.fullmatch(r"\w+", part)


def unknown(key: str, known: Iterable[str]) -> str:
    known = list(known)
    hint = suggest(key, known)
    return f"unknown key, {hint}" if hint else f"unknown key. Keys: {', '.join(known)}"


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """`what 'name'` with the name that comes closest."""
    hint = suggest(name, known)
    return f"{what} {name!r}{f', {hint}' if hint else ''}"


def joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Trees to plan for: read from files, and drawn: as reinforcement learning makes them, and of full
segments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from math import log, sqrt
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.files import UnreadableError, parse_json, read_text
from megatron_balance.ir.forest import Segment, Tree, checked, document, num_tokens
from megatron_balance.workloads.lengths import tokens_of
from megatron_balance.workloads.rollouts import as_trees

_EXPECTED = (
    'batches of trees, [[tree, ...], ...]: a tree is a list of segments [TOKENS, PARENT, "causal" or "full"], or '
    'TOKENS alone; a batch may also be {"rollouts": [[TOKEN, ...], ...]}'
)


def read_trees(path: Path) -> list[tuple[Tree, ...]]:
    """Batches of trees from a JSON file, which may be compressed (.gz, .zst).

    `[[tree, ...], ...]`, a list a batch. A tree is its segments depth first, each `[tokens, parent,
    kind]`: the index of the segment above it in the tree (-1: none, the root), "causal" (which may be
    left out) or "full". A number of tokens alone is a plain document. `{"rollouts": [[token, ...],
    ...]}` is a batch of token lists, which share what they begin with (`workloads.rollouts`).
    Raises ConfigError with batch and tree.
    """
    try:
        content = parse_json(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; --trees takes a JSON file") from error
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error}; expected {_EXPECTED}") from error
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path}: expected {_EXPECTED}")
    return [_batch(each, f"{path}: batch {at}") for at, each in enumerate(cast(list[Any], content))]


def _batch(given: Any, where: str) -> tuple[Tree, ...]:
    entries = cast(list[Any], given) if isinstance(given, list) else []
    named = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    try:
        if set(named) == {"rollouts"}:
            return as_trees(named["rollouts"]).trees
        if entries:
            return checked([document(each) if type(each) is int else _segments(each) for each in entries])
    except (ConfigError, DataError) as error:
        raise ConfigError(f"{where}: {error}") from None
    raise ConfigError(f"{where}: expected {_EXPECTED}")


def _segments(tree: Any) -> list[tuple[Any, ...]]:
    segments: list[tuple[Any, ...]] = []
    for each in cast(list[Any], tree) if isinstance(tree, list) else [tree]:
        words = cast(list[Any], each) if isinstance(each, list) else []
        if len(words) == 2:
            words = [*words, "causal"]
        if len(words) != 3 or words[2] not in ("causal", "full"):
            raise ConfigError(f"segment {each!r:.80}; expected {_EXPECTED}")
        segments.append((words[0], words[1], words[2] == "full"))
    return segments


@dataclass(frozen=True, slots=True)
class RolloutShape:
    """One prompt and its responses, as GRPO draws them; tokens."""

    prompt: int = 4096
    responses: int = 16
    shortest: int = 200
    longest: int = 8192

    def draw(self, generator: np.random.Generator) -> Tree:
        """A tree; responses are log-normal between the two, 0.8 wide."""
        middle = log(sqrt(self.shortest * self.longest))
        lengths = np.clip(generator.lognormal(middle, 0.8, self.responses), self.shortest, self.longest).astype(int)
        # The last token of the prompt has a row in each response, whose first token it predicts.
        # The longest comes first.
        root = Segment(self.prompt - 1, -1)
        return (root, *(Segment(length + 1, 0) for length in sorted(lengths.tolist(), reverse=True)))


@dataclass(frozen=True, slots=True)
class _AgentShape:
    """Turns of an agent: a system prompt and task, then an action and what it is answered, turn by
    turn; tokens. Before each of `branches` turns, spread over the first half, every trajectory
    parts in two.
    """

    system: int = 4096
    turns: int = 20
    branches: int = 3
    action: int = 150
    answer: int = 400

    def draw(self, generator: np.random.Generator) -> Tree:
        """A tree; actions and answers are log-normal around the two, 0.7 and 0.9 wide."""
        parting = {branch * self.turns // (2 * self.branches) for branch in range(self.branches)}

        def turn() -> int:
            return int(generator.lognormal(log(self.action), 0.7)) + int(generator.lognormal(log(self.answer), 0.9))

        def from_turn(first: int, tokens: int) -> Tree:
            for at in range(first, self.turns):
                if at in parting:
                    # A branch begins with the token that it parts from, whose row predicts its turn.
                    return _above(tokens, [from_turn(at + 1, 1 + turn()) for _ in range(2)])
                tokens += turn()
            return document(tokens)

        return from_turn(0, self.system - 1)


def _above(tokens: int, trees: Sequence[Tree]) -> Tree:
    """A segment and trees below it, the largest first."""
    segments = [Segment(tokens, -1)]
    for tree in sorted(trees, key=num_tokens, reverse=True):
        begin = len(segments)
        segments += [each._replace(parent=each.parent + begin if each.parent >= 0 else 0) for each in tree]
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class _VideoShape:
    """A clip whose frames see themselves and those before them; tokens of a frame, and numbers of
    frames.
    """

    frame: int = 1560
    shortest: int = 8
    longest: int = 48

    def draw(self, generator: np.random.Generator) -> Tree:
        """A tree: a chain of full segments."""
        return tuple(
            Segment(self.frame, at - 1, True) for at in range(generator.integers(self.shortest, self.longest + 1))
        )


@dataclass(frozen=True, slots=True)
class _PrefixShape:
    """A prefix that sees itself both ways, and a causal answer of a twentieth of `answer` up to it;
    tokens.
    """

    shortest: int = 1000
    longest: int = 32000
    answer: int = 4000

    def draw(self, generator: np.random.Generator) -> Tree:
        """A tree; logarithms of prefixes are uniform between the two."""
        prefix = int(self.shortest * (self.longest / self.shortest) ** generator.random())
        return Segment(prefix, -1, True), Segment(int(generator.integers(self.answer // 20, self.answer)) + 1, 0)


@dataclass(frozen=True, slots=True)
class _ImageShape:
    """Two images or more in text, each behind a sixteenth of `text` up to it, and as large as
    `image`, a quarter or a sixteenth of it; tokens.
    """

    images: int = 12
    image: int = 4096
    text: int = 800

    def draw(self, generator: np.random.Generator) -> Tree:
        """A tree: a chain of causal text and full images."""
        segments: list[Segment] = []
        for _ in range(generator.integers(2, self.images + 1)):
            text = int(generator.integers(self.text // 16, self.text)) + 1
            image = max(1, self.image >> int(2 * generator.integers(3)))
            segments += [Segment(text, len(segments) - 1), Segment(image, len(segments), True)]
        return tuple(segments)


_Shape: TypeAlias = RolloutShape | _AgentShape | _VideoShape | _PrefixShape | _ImageShape

SHAPES: dict[str, _Shape] = {
    "rollouts": RolloutShape(),
    "agents": _AgentShape(),
    "video": _VideoShape(),
    "prefixes": _PrefixShape(),
    "images": _ImageShape(),
}


def draw_trees(name: str, tokens: int | None, batches: int, seed: int) -> list[tuple[Tree, ...]]:
    """Batches of trees: as many of each as stay within `tokens`, at least one.

    `name`: one of `SHAPES`, with other numbers behind a colon: `rollouts:prompt=16k,responses=64`.
    Raises ConfigError: an unknown name or field, or a number that cannot be.
    """
    if tokens is None:
        raise ConfigError(f"--dataset {name} needs --tokens N, the tokens of a batch, shared ones once")
    shape, generator = _shape(name), np.random.default_rng(seed)
    drawn = iter(lambda: shape.draw(generator), None)
    return [_filled(drawn, tokens) for _ in range(batches)]


def is_trees(name: str) -> bool:
    """Whether a data set's name is of trees."""
    return name.partition(":")[0] in SHAPES


def _shape(name: str) -> _Shape:
    kind, _, fields = name.partition(":")
    shape = SHAPES[kind]
    known = [field.name for field in dataclass_fields(shape)]
    for entry in filter(None, fields.split(",")):
        key, _, word = entry.partition("=")
        number = tokens_of(word)
        if key not in known or number is None or number < 2:
            raise ConfigError(
                f"--dataset {name}: {entry!r}: expected {kind}:FIELD=NUMBER,... of {', '.join(known)}, each at least 2"
            )
        shape = replace(shape, **{key: number})
    if isinstance(shape, RolloutShape | _VideoShape | _PrefixShape) and shape.longest < shape.shortest:
        raise ConfigError(
            f"--dataset {name}: expected shortest at most longest, got {shape.shortest} and {shape.longest}"
        )
    return shape


def _filled(trees: Iterator[Tree], tokens: int) -> tuple[Tree, ...]:
    batch = [next(trees)]
    left = tokens - num_tokens(batch[0])
    for tree in trees:
        left -= num_tokens(tree)
        if left < 0:
            break
        batch.append(tree)
    return tuple(batch)

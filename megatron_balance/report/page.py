"""A self-contained HTML page: text, tables and plots, with plotly.js inside. Everything that it is given is text, and is escaped here.

The page forbids itself any network by its content security policy, which names its two scripts by their digests: a script that comes
in with a name or an option does not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any, Literal, TypeAlias

from megatron_balance.errors import ConfigError

Kind = Literal["exact", "measured", "simulated", "published"]
"""Where a number comes from; `exact`: counted from lengths and plans."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `words in backticks` are set as code."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of paragraphs."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """A number that matters, with what it is."""

    label: str
    value: str
    note: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Cards:
    """Cards side by side."""

    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column heads; the first column names the row."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kind: Kind | tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A Plotly figure, and the same in words for who does not see it."""

    id: str
    title: str
    caption: str
    kind: Kind | tuple[Kind, ...]
    data: Sequence[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fold:
    """What is there to be unfolded."""

    summary: str
    items: tuple[Item, ...]


Item: TypeAlias = Text | Bullets | Cards | Table | Plot | Fold


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, with an entry in the table of contents."""

    id: str
    title: str
    items: tuple[Item, ...]


@dataclass(slots=True)
class _Writer:
    plots: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def item(self, item: Item) -> str:
        match item:
            case Text(text):
                return f"<p>{_inline(text)}</p>"
            case Bullets(items):
                return f"<ul>{''.join(f'<li>{_inline(each)}</li>' for each in items)}</ul>"
            case Cards(cards):
                return f'<div class="cards">{"".join(map(_card, cards))}</div>'
            case Table():
                return _table(item)
            case Plot():
                return self.plot(item)
            case Fold(summary, items):
                return f"<details><summary>{_inline(summary)}</summary>{self.items(items)}</details>"

    def items(self, items: Iterable[Item]) -> str:
        return "\n".join(map(self.item, items))

    def plot(self, plot: Plot) -> str:
        self.plots.append({"id": plot.id, "data": plot.data, "layout": plot.layout})
        return (
            f'<figure><p class="title" id="{escape(plot.id)}-title">{_inline(plot.title)} {_chips(plot.kind)}</p>'
            f'<div class="plot" id="{escape(plot.id)}" role="img" aria-labelledby="{escape(plot.id)}-title" '
            f'aria-describedby="{escape(plot.id)}-caption" style="height:{int(plot.layout["height"])}px"></div>'
            f'<figcaption id="{escape(plot.id)}-caption">{_inline(plot.caption)}</figcaption></figure>'
        )


def plot_library() -> str:
    """The source of plotly.js.

    Raises:
        ConfigError: the extra that brings it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise ConfigError(
            "the plots of a report need plotly, which is not installed: pip install 'megatron-balance[report]', or pip install plotly"
        ) from None
    return str(get_plotlyjs())


def render(title: str, lead: Sequence[str], sections: Sequence[Section], library: str) -> str:
    """The page as text; `lead`: what it is about."""
    writer = _Writer()
    body = "\n".join(
        f'<section id="{escape(s.id)}" aria-labelledby="{escape(s.id)}-head"><h2 id="{escape(s.id)}-head">{_inline(s.title)}</h2>'
        f"{writer.items(s.items)}</section>"
        for s in sections
    )
    contents = "".join(f'<li><a href="#{escape(s.id)}">{_inline(s.title)}</a></li>' for s in sections)
    parts = {
        "title": escape(title),
        "policy": _policy(library),
        "style": _part("page.css"),
        "lead": "".join(f"<p>{_inline(text)}</p>" for text in lead),
        "contents": contents,
        "body": body,
        "plots": _embedded(writer.plots),
        "library": library,
        "script": _part("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def label(text: str) -> str:
    """A name as Plotly shows it, which takes labels for HTML."""
    return escape(text, quote=False)


def _policy(library: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (library, _part("page.js")))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {scripts}"


def _part(name: str) -> str:
    return (resources.files("megatron_balance.report") / name).read_text(encoding="utf-8")


def _embedded(plots: Sequence[dict[str, Any]]) -> str:
    """JSON that cannot end the element that it stands in."""
    return json.dumps(plots, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _inline(text: str) -> str:
    """Escaped text with `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _chips(kind: Kind | tuple[Kind, ...]) -> str:
    kinds = (kind,) if isinstance(kind, str) else kind
    return " ".join(f'<span class="kind {each}">{each}</span>' for each in kinds)


def _card(card: Card) -> str:
    return (
        f'<div class="card"><p class="label">{_inline(card.label)}</p><p class="value">{_inline(card.value)}</p>'
        f'<p class="note">{_inline(card.note)} {_chips(card.kind)}</p></div>'
    )


def _table(table: Table) -> str:
    sides = [_side([row[at] for row in table.rows]) for at in range(len(table.columns))]
    heads = "".join(f'<th scope="col"{side}>{_inline(column)}</th>' for column, side in zip(table.columns, sides, strict=True))
    rows = "".join(
        f'<tr><th scope="row">{_inline(row[0])}</th>'
        + "".join(f"<td{side}>{_inline(cell)}</td>" for cell, side in zip(row[1:], sides[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="wide"><table><caption>{_inline(table.caption)} {_chips(table.kind)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


_NUMBER = re.compile(r"(under )?[-+]?[\d.,]+(x|( (%|s|ms|us|bytes|[kMGT]B)))?( \(.*\))?")


def _side(cells: Sequence[str]) -> str:
    """A column of numbers lines up on the right."""
    said = [cell for cell in cells if cell]
    return ' class="number"' if said and all(_NUMBER.fullmatch(cell) for cell in said) else ""

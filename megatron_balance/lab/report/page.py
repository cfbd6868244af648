"""A self-contained HTML page: text, tables and plots, with plotly.js inside.

Everything that the page is given is text: `page.html.j2` is rendered with autoescape on. The page
forbids itself any network by its content security policy, which names its two scripts by their
digests: a script that comes in with a name or an option does not run.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from megatron_balance.errors import ConfigError

if TYPE_CHECKING:
    from markupsafe import Markup

# Origin of a number; `exact`: counted from lengths and plans.
Kind = Literal["exact", "measured", "simulated", "published"]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `words in backticks` are set as code."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Card:
    """A number that matters, with what it is."""

    label: str
    value: str
    note: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Cards:
    cards: Sequence[Card]


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """Rows of text under column heads; the first column names the row."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: Kind | tuple[Kind, ...]

    @property
    def numeric(self) -> list[bool]:
        """Whether a column holds numbers only, which line up on the right."""
        columns = [[row[at] for row in self.rows if row[at]] for at in range(len(self.columns))]
        return [bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in columns]


@dataclass(frozen=True, slots=True)
class Plot:
    """A Plotly figure, and the same in words for readers who do not see it."""

    id: str
    title: str
    caption: str
    kind: Kind | tuple[Kind, ...]
    data: Sequence[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fold:
    """Items that the reader unfolds."""

    summary: str
    items: "Sequence[Item]"


Item: TypeAlias = Text | Bullets | Cards | HtmlTable | Plot | Fold


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, with an entry in the table of contents."""

    id: str
    title: str
    items: Sequence[Item]


_NUMBER = re.compile(r"(under )?[-+]?[\d.,]+(x|( (%|s|ms|us|bytes|[kMGT]B)))?( \(.*\))?")


def plot_library() -> str:
    """The source of plotly.js."""
    try:
        import jinja2  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        package = (error.name or "plotly").partition(".")[0]
        raise ConfigError(
            f"a report needs {package}, which is not installed: pip install 'megatron-balance[report]', or pip "
            f"install {package}"
        ) from None
    return str(get_plotlyjs())


def render(title: str, lead: Sequence[str], sections: Sequence[Section], library: str) -> str:
    """The page as text; `lead`: paragraphs on what it is about, `library`: the source of plotly.js."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    shown = (plot for section in sections for plot in _plots(section.items))
    plots = [{"id": plot.id, "data": plot.data, "layout": plot.layout} for plot in shown]
    style, script = _part("page.css"), _part("page.js")
    ours = {"policy": _policy(library, script), "style": style, "library": library, "script": script}
    trusted = {name: Markup(text) for name, text in ours.items()}
    loader = PackageLoader("megatron_balance.lab.report", "")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    pages.filters.update(inline=_inline, type_name=_type_name)  # pyright: ignore[reportUnknownMemberType]
    pages.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    template = pages.get_template("page.html.j2")
    return template.render(title=title, lead=lead, sections=sections, plots=plots, **trusted)


def _type_name(item: Item) -> str:
    return type(item).__name__


def _inline(text: str) -> "Markup":
    """Escaped text with `code`."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))


def _plots(items: Iterable[Item]) -> Iterator[Plot]:
    for item in items:
        if isinstance(item, Plot):
            yield item
        elif isinstance(item, Fold):
            yield from _plots(item.items)


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}"


def _part(name: str) -> str:
    return (resources.files("megatron_balance.lab.report") / name).read_text(encoding="utf-8")


# Numbers as people read them.

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def seconds(value: float) -> str:
    """Three figures and the unit that fits: '1.32 s', '21.5 ms'."""
    for size, unit in _SECONDS:
        if abs(value) >= size:
            return f"{_three(value / size)} {unit}"
    return f"{_three(value * 1e6)} us" if value else "0 s"


def size(num_bytes: float) -> str:
    """Three figures and a decimal unit: '4.23 GB'."""
    for unit_bytes, unit in _BYTES:
        if abs(num_bytes) >= unit_bytes:
            return f"{_three(num_bytes / unit_bytes)} {unit}"
    return f"{num_bytes:.0f} bytes"


def rate(bytes_per_s: float) -> str:
    """'400 Gbit/s (50 GB/s)': NICs are sold in bits."""
    return f"{_three(bytes_per_s * 8e-9)} Gbit/s ({size(bytes_per_s)}/s)"


def percent(share: float) -> str:
    """'41 %', with one decimal below ten."""
    value = 100 * share
    if 0 < value < 0.05:
        return "under 0.1 %"
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def count(number: int, one: str, several: str | None = None) -> str:
    """'1 rank', '8 ranks'."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _three(value: float) -> str:
    """Three figures, never in powers of ten."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"

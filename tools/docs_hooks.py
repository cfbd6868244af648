"""Hooks of mkdocs (mkdocs.yml): pages that lie beside `docs/`, and links between all pages.

Pages are written to be read in the repository. On the site the README and a few others get names of
their own, and a link to a file that is no page stays as its text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TOP = Path(__file__).resolve().parents[1]

BESIDE = {"README.md": "readme_page.md", "CONTRIBUTING.md": "contributing.md"}
"""By path in the repository, the page's name on the site. (A page README.md would be the index.)"""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie beside `docs/`."""
    for source, name in BESIDE.items():
        files.append(File.generated(config, name, content=(TOP / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return with_links(markdown, page.file.src_uri)


def with_links(markdown: str, name: str) -> str:
    """The text of the page `name` of the site, with links to pages of the site."""
    of_site = {site: source for source, site in BESIDE.items()}
    folder = posixpath.dirname(of_site.get(name, f"docs/{name}"))

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups(default="")
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        source = posixpath.normpath(posixpath.join(folder, target))
        site = BESIDE.get(source, source.removeprefix("docs/") if source.startswith("docs/") else "")
        if not site or not (TOP / source).is_file():
            return "" if image else text
        return f"{image}[{text}]({posixpath.relpath(site, posixpath.dirname(name) or '.')}{anchor})"

    return LINK.sub(link, markdown)

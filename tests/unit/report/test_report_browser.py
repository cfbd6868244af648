"""Reports in a real browser: plots are drawn, nothing is complained about, nothing is fetched, and
no name becomes a script.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import browser, report_pages
from tests.support.report_pages import embedded

pytest.importorskip("plotly", reason="needs plotly, of the extra 'report'")
pytestmark = pytest.mark.skipif(browser.find() is None, reason=browser.NOT_FOUND)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    return report_pages.make(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("which", ["simulated", "trained"])
def test_a_page_is_drawn_without_a_word_and_without_a_network(pages, tmp_path, which):
    seen = browser.view(pages[which], tmp_path)
    plots = embedded(pages[which].read_text(encoding="utf-8"))
    assert f'data-drawn="{len(plots)}"' in seen.dom
    for plot in plots:
        drawn = _of_plot(seen.dom, plot["id"])
        assert 'class="main-svg"' in drawn, plot["id"]
        marks = len(re.findall(r'class="(?:point|points|scatterlayer|trace [^"]*)"', drawn)) + drawn.count("<path")
        assert marks >= len([trace for trace in plot["data"] if trace.get("visible") != "legendonly"]), plot["id"]
    assert seen.console == ()
    assert seen.requests == ()
    assert "<title>pwned" not in seen.dom


def test_what_gets_into_a_page_neither_runs_nor_fetches(pages, tmp_path):
    text = pages["trained"].read_text(encoding="utf-8")
    planted = "<script>document.title = 'pwned'</script><img src='http://example.invalid/planted.png'>"
    page = tmp_path / "planted.html"
    page.write_text(text.replace('<main id="main">', f'<main id="main">{planted}'), encoding="utf-8")
    seen = browser.view(page, tmp_path)
    assert "<title>pwned" not in seen.dom
    assert seen.requests == ()
    assert any("Content Security Policy" in line for line in seen.console)
    assert "data-drawn=" in seen.dom


def test_the_browser_would_tell(tmp_path):
    """The tests above can fail: an error, a request and a changed title are seen."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><title>page</title><img src='http://example.invalid/x.png'><script>document.title = 'pwned'; "
        "missing();</script>",
        encoding="utf-8",
    )
    seen = browser.view(page, tmp_path)
    assert "<title>pwned" in seen.dom
    assert any("missing is not defined" in line for line in seen.console)
    assert seen.requests == ("http://example.invalid/x.png",)


def _of_plot(dom: str, name: str) -> str:
    """The part of a document that is a plot's: up to its caption."""
    begin = dom.index(f'id="{name}"')
    return dom[begin : dom.index("<figcaption", begin)]

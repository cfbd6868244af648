"""The pages of reports: well-formed, escaped, self-contained; every plot is one that Plotly takes."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_balance import rl
from megatron_balance.config import load_cluster, load_model
from megatron_balance.errors import ConfigError
from megatron_balance.ir.step import to_json
from megatron_balance.lab.report import page
from tests.support import browser
from tests.support.browser import HOSTILE, PICTURE, embedded

go = pytest.importorskip("plotly.graph_objects", reason="needs plotly, of the extra 'report'")

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Document(HTMLParser):
    """Elements in order, with their attributes; and whether every one was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.text = list[str](), list[str]()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        self.ids = [name for _, attrs in self.elements if (name := attrs.get("id"))]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    return browser.make(tmp_path_factory.mktemp("pages"))


@pytest.fixture(params=["simulated", "trained"])
def text(request, pages) -> str:
    return pages[request.param].read_text(encoding="utf-8")


def test_elements_are_closed_names_are_text_and_it_refers_only_to_itself(text):
    document = Document(text)
    assert document.open == []
    tags = [tag for tag, _ in document.elements]
    assert (tags.count("script"), tags.count("img")) == (3, 0)
    assert all(name in "".join(document.text) for name in (PICTURE, HOSTILE))
    assert len(document.ids) == len(set(document.ids))
    for tag, attrs in document.elements:
        assert "src" not in attrs, tag
        assert (attrs.get("href") or "#").startswith("#")
        named = [attrs.get(name) for name in ("aria-labelledby", "aria-describedby")]
        assert {*named, (attrs.get("href") or "")[1:]} - {None, ""} <= set(document.ids)
    without_library = text.replace(page.plot_library(), "")
    assert not re.search(r"(?<!\\u003c)https?://", without_library)
    assert len(without_library) < 500_000
    # Its policy forbids the network and names its scripts.
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1].startswith("default-src 'none';")
    assert policy[1].count("sha256-") == 2
    assert "'unsafe-inline'" not in policy[1].split("script-src")[1]


def test_plotly_takes_every_plot_and_every_section_is_in_the_contents(text):
    # Every section is in the contents and every plot has words.
    document = Document(text)
    sections = [attrs["id"] for tag, attrs in document.elements if tag == "section"]
    links = [attrs["href"] for tag, attrs in document.elements if tag == "a" and attrs.get("class") != "skip"]
    assert links == [f"#{each}" for each in sections]
    assert len(sections) >= 10
    plots = embedded(text)
    captions = re.findall(r"<figcaption[^>]*>(.*?)</figcaption>", text, re.DOTALL)
    assert len(captions) == len(plots) >= 7
    assert all(len(caption) > 40 for caption in captions)
    chips = re.findall(r'<span class="kind (\w+)">', text)
    assert set(chips) <= {"exact", "measured", "simulated", "published"}
    assert len(chips) >= len(plots)
    # Plotly takes every plot.
    for plot in embedded(text):
        figure = go.Figure(data=plot["data"], layout=plot["layout"])  # raises where a key or value is none of Plotly's
        assert len(figure.data) >= 1, plot["id"]
        assert any(len(trace["y"] or ()) for trace in plot["data"]), plot["id"]


def test_a_step_of_reinforcement_learning_shows_its_passes(tmp_path, run):
    model, cluster = load_model("llama3-8b"), load_cluster("h100").build(num_ranks=4, ranks_per_node=4)
    lengths = [9000, 300, 700, 4000, 2500, 2500, 60, 8000]
    step = rl.plan_step(lengths, None, cluster, model, max_tokens=9000, forward_max_tokens=20000, min_microbatches=2)
    (tmp_path / "step.json").write_text(to_json(step))
    asked = f"report --json --cluster h100 --ranks 4 --model llama3-8b --rl {tmp_path / 'step.json'}"
    found = run.json(f"{asked} --out", tmp_path / "rl.html")
    forward, update = found["passes"]
    assert (len(forward["microbatches"]), len(update["microbatches"])) == (len(step.forward.plans), len(step.plans))
    for of, planned in ((forward, step.forward), (update, step)):
        assert [row["tokens"] for row in of["microbatches"]] == [plan.num_tokens for plan in planned.plans]
        assert sum(row["samples"] for row in of["microbatches"]) == len(lengths)
        seconds = [row["rank_s"] for row in of["microbatches"]]
        assert of["step_s"] == pytest.approx(sum(map(max, seconds)))
        assert of["over_mean"] == pytest.approx(of["step_s"] * 4 / sum(map(sum, seconds)))
    # a backward takes twice the products of a forward
    assert 2.5 < sum(map(sum, seconds)) / sum(sum(row["rank_s"]) for row in forward["microbatches"]) < 4
    text = (tmp_path / "rl.html").read_text(encoding="utf-8")
    document = Document(text)
    assert document.open == []
    assert "The pass update" in "".join(document.text)
    for plot in embedded(text):
        assert len(go.Figure(data=plot["data"], layout=plot["layout"]).data) >= 1
    shared = run.json(f"{asked} --out", tmp_path / "other.html")
    assert shared == found
    refused = {
        asked.replace("--ranks 4", "--ranks 8"): "planned for [4] ranks, and --cluster has 8",
        f"{asked} --lengths 5": "--lengths does not go with --rl",
        f"{asked} --planner zeppelin": "--planner does not go with --rl",
        asked.replace("step.json", "none.json"): "cannot be read (No such file or directory)",
    }
    for line, said in refused.items():
        assert said in run.error(f"{line} --out", tmp_path / "r.html")


def test_a_page_is_one_file_of_some_megabytes_and_labels_of_its_plots_are_escaped_too(pages):
    assert all(4e6 < path.stat().st_size < 8e6 for path in pages.values())
    names = [trace["name"] for plot in embedded(pages["trained"].read_text(encoding="utf-8")) for trace in plot["data"]]
    assert any("&lt;img src=x" in name for name in names)
    assert not any("<" in name for name in names)


def test_where_the_page_cannot_go_is_said_before_any_work(monkeypatch, tmp_path, run):
    (tmp_path / "file").write_text("")
    folder = "there is no folder"
    for out, said in (("", "is a folder; give a file to write"), ("none/r.html", folder), ("file/r.html", folder)):
        assert said in run.error("report --lengths 100 --out", tmp_path / out)
    assert "--out" in run.error("report --lengths 100")
    # Without plotly the extra is named.
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"megatron-balance\[report\]"):
        page.plot_library()
    assert run.error("report --lengths 100 --out", tmp_path / "r.html").startswith("a report needs plotly")
    assert not (tmp_path / "r.html").exists()


# Reports in a real browser: plots are drawn, nothing is complained about, nothing is fetched, and
# no name becomes a script.


@pytest.mark.skipif(browser.find() is None, reason=browser.NOT_FOUND)
@pytest.mark.parametrize("which", ["simulated", "trained"])
def test_a_page_is_drawn_without_a_word_and_without_a_network(pages, tmp_path, which):
    seen = browser.view(pages[which], tmp_path)
    plots = embedded(pages[which].read_text(encoding="utf-8"))
    assert f'data-drawn="{len(plots)}"' in seen.dom
    for plot in plots:
        drawn = seen.dom.partition(f'id="{plot["id"]}"')[2].partition("<figcaption")[0]  # up to its caption
        assert 'class="main-svg"' in drawn, plot["id"]
        marks = len(re.findall(r'class="(?:point|points|scatterlayer|trace [^"]*)"', drawn)) + drawn.count("<path")
        assert marks >= len([trace for trace in plot["data"] if trace.get("visible") != "legendonly"]), plot["id"]
    assert seen.console == ()
    assert seen.requests == ()
    assert "<title>pwned" not in seen.dom


@pytest.mark.skipif(browser.find() is None, reason=browser.NOT_FOUND)
def test_what_gets_into_a_page_neither_runs_nor_fetches(pages, tmp_path):
    planted = "<script>document.title = 'pwned'</script><img src='http://example.invalid/planted.png'>"
    bad = tmp_path / "bad.html"
    text = pages["trained"].read_text(encoding="utf-8")
    bad.write_text(text.replace('<main id="main">', f'<main id="main">{planted}'), encoding="utf-8")
    seen = browser.view(bad, tmp_path)
    assert "<title>pwned" not in seen.dom
    assert seen.requests == ()
    assert any("Content Security Policy" in line for line in seen.console)
    assert "data-drawn=" in seen.dom
    # The browser would tell: an error, a request and a changed title are seen.
    bad.write_text(f"<!DOCTYPE html><title>page</title>{planted}<script>missing();</script>", encoding="utf-8")
    seen = browser.view(bad, tmp_path)
    assert "<title>pwned" in seen.dom
    assert any("missing is not defined" in line for line in seen.console)
    assert seen.requests == ("http://example.invalid/planted.png",)

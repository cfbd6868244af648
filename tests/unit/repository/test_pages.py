"""Links and paths in the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_balance.analysis.backward import GRADIENT_COPIES, GRADIENT_ROUNDS
from megatron_balance.config import CommunicationChoice
from megatron_balance.lab.papers.knapformer import RATE
from megatron_balance.patterns import PATTERNS
from megatron_balance.planning.choice import load_config
from megatron_balance.workloads.distributions import DISTRIBUTIONS, LogNormal, Pareto

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron_balance"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAPS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md", ROOT / "docs" / "architecture.md"]
"""Pages that send a reader to files: every path on them exists."""

MADE = {"path/to/pretrain_gpt.py", "balance.yaml", ".bin/.idx", "megatron_balance/planners/mine.py"}
MADE |= {"megatron_balance/patterns/mine.py", "megatron_balance/compile/mine.py"}
"""Files that the reader has or makes."""


def without_outputs(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_outputs(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_links_lead_somewhere():
    missing, found = [], 0
    for page in PAGES:
        text = without_outputs(page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            found += 1
            name, _, anchor = target.partition("#")
            other = (page.parent / name).resolve() if name else page
            if not other.exists() or (anchor and anchor not in anchors(other.read_text(encoding="utf-8"))):
                missing.append((ids(page), target))
    assert missing == []
    assert found > len(PAGES)


def test_paths_on_the_pages_that_send_a_reader_to_files_exist():
    """Of the repository's top or of the package; in prose, and in a diagram too."""
    missing = []
    for page in MAPS:
        text = page.read_text(encoding="utf-8")
        named = [
            name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name or name.endswith((".py", ".md", ".yaml"))
        ]
        assert named, page
        if page.name == "architecture.md":
            drawings = "".join(re.findall(r"```.*?```", text, re.DOTALL))
            named += re.findall(r"(?<![\w./<-])(?:[a-z_]+/)+(?:[\w-]+\.(?:py|md))?(?![\w<])", drawings)
        for name in sorted({*named} - MADE):
            if not any((folder / name).exists() for folder in (ROOT, PACKAGE, page.parent)):
                missing.append((ids(page), name))
    assert missing == []


def names_by_file() -> dict[str, list[str]]:
    """Names of the tests of every file, whose path is told from the folder of tests."""
    folder = ROOT / "tests"
    return {
        path.relative_to(folder).as_posix(): re.findall(
            r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        for path in folder.rglob("*.py")
    }


def test_tests_that_pages_name_are_there():
    """In full, by their beginning, or with dots for what is left out; behind a file's name, in it."""
    files = names_by_file()
    everywhere = [name for names in files.values() for name in names]
    modules = {Path(path).stem for path in files}
    missing = []
    for page in PAGES:
        text = without_outputs(page.read_text(encoding="utf-8"))
        for path, names in re.findall(r"`(?:tests/)?((?:[a-z]+/)+test_\w+\.py)`(?: \(((?:[^()]*`[^()]*)+)\))?", text):
            wanted = re.findall(r"`(test_[\w.]+)`", names)
            if path not in files or any(not known(name, files[path]) for name in wanted):
                missing.append((ids(page), path, wanted))
        named = set(re.findall(r"`(test_[\w.]+?)`", text))
        missing += [(ids(page), name) for name in sorted(named) if not (name in modules or known(name, everywhere))]
    assert missing == []


def known(name: str, names: list[str]) -> bool:
    """Whether one of the names begins with `name`, "..." in which stands for anything."""
    pattern = re.compile(".*".join(map(re.escape, name.removesuffix(".py").split("..."))))
    return any(pattern.match(other) for other in names)


def test_every_page_is_reached_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index)) | {"index.md"}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == linked


def test_the_page_of_costs_names_every_constant_that_is_fitted_to_a_result():
    page = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    section = page.partition("## Constants that are fitted to a result\n")[2].partition("\n## ")[0]
    skew, pages = DISTRIBUTIONS["wlb-skew"], DISTRIBUTIONS["commoncrawl"]
    assert isinstance(skew, Pareto)
    assert isinstance(pages, LogNormal)
    fitted = (RATE, skew.exponent, pages.sigma, f"{GRADIENT_ROUNDS} blocks and {GRADIENT_COPIES} copies")
    assert [row.partition(",")[0].partition(" of ")[0] for row in re.findall(r"^\| (\d.+)", section, re.MULTILINE)] == [
        str(value) for value in fitted
    ]


def test_the_glossary_has_at_most_25_terms():
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 0 < len([row for row in rows if row not in ("word", "---")]) <= 25


def test_every_comm_pattern_has_a_drawing_its_bytes_and_when_it_wins():
    """On the page of patterns, in a section that names it in its heading."""
    sections = re.split(r"^## ", (ROOT / "docs" / "patterns.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    asked = {
        "a drawing": r"(?ms)^```$.*?^```$",
        "its bytes": r"(?m)^\| bytes a rank .*bytes of the busiest NIC \| rounds \| launches \|$",
        "when it wins": "Wins",
    }
    missing = []
    for pattern in PATTERNS:
        own = [section for section in sections if f"`{pattern}`" in section.splitlines()[0]]
        missing += [(pattern, what) for what, sought in asked.items() if not re.search(sought, "".join(own))]
        missing += [(pattern, "one section")] * (len(own) != 1)
    assert missing == []


# docs/cluster.md names flags, files and keys that exist


CLUSTER_PAGE = (ROOT / "docs" / "cluster.md").read_text()


def test_files_that_it_names_are_there():
    named = set(re.findall(r"(?:scripts|tests|docs|tools)/[\w./-]+\.(?:sh|sbatch|md|py)", CLUSTER_PAGE))
    assert sorted(path for path in named if not (ROOT / path).is_file()) == ["tools/preprocess_data.py"]  # Megatron's
    assert len(named) > 1


def test_its_configurations_load(tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", CLUSTER_PAGE, re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "cluster.yaml").write_text("base: h200\n")
    for at, block in enumerate(blocks):
        path = tmp_path / f"balance{at}.yaml"
        path.write_text(block if "planner" in block else f"planner: zeppelin\n{block}")
        config = load_config(path)
        assert config.planner is not None
    assert config.communication == CommunicationChoice(inter_node_sms=4, intra_node_sms=12)


def test_its_step_figures_are_written():
    package = ROOT / "megatron_balance"
    written = "".join(
        (package / file).read_text() for file in ("training/log.py", "training/figures.py", "runtime/recorder.py")
    )
    names = {
        name.partition(".")[0]
        for row in CLUSTER_PAGE.partition("look at this first")[2].partition("## NCCL")[0].splitlines()
        if row.startswith("| ")
        for name in re.findall(r"`([a-z_.]+)`", row.split("|")[1])
    }
    assert {"plan_wait_ms", "imbalance_after", "bytes_sent_per_nic"} <= names
    assert not [name for name in names if not re.search(rf"\b{name}\b", written)]

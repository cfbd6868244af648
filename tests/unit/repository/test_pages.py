"""Links and paths in the documents lead somewhere."""

import argparse
import ast
import dataclasses
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from megatron_balance import Cluster, rl
from megatron_balance.analysis.backward import GRADIENT_COPIES, GRADIENT_ROUNDS
from megatron_balance.cli import build_parser, main
from megatron_balance.config import CommunicationChoice, load_model
from megatron_balance.cost.table import save_table
from megatron_balance.ir.step import to_json
from megatron_balance.lab.papers.knapformer import RATE
from megatron_balance.patterns import PATTERNS
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import load_config
from megatron_balance.workloads.distributions import DISTRIBUTIONS, LogNormal, Pareto
from megatron_balance.workloads.idx import CorpusWriter
from tests.support.cost_table import made

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron_balance"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages that send a reader to files: every path on them exists.
MAPS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md", ROOT / "docs" / "architecture.md"]

# Files that the reader has or makes.
MADE = {"path/to/pretrain_gpt.py", "balance.yaml", ".bin/.idx"}
MADE |= {f"megatron_balance/{room}/mine.py" for room in ("planners", "patterns", "compile")}


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_outputs(page: Path) -> str:
    return re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    # Of a page's headings, as GitHub makes them.
    headings = re.findall(r"^#+ (.+)$", without_outputs(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_links_lead_somewhere():
    missing, found = [], 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_outputs(page)):
            name, _, anchor = target.partition("#")
            other = (page.parent / name).resolve() if name else page
            found += "://" not in target
            if "://" not in target and not (other.exists() and (not anchor or anchor in anchors(other))):
                missing.append((ids(page), target))
    assert missing == []
    assert found > len(PAGES)
    index = set(re.findall(r"\]\(([\w-]+\.md)\)", read(ROOT / "docs" / "index.md")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == index | {"index.md"}, "reached from the index"


def test_paths_on_the_pages_that_send_a_reader_to_files_exist():
    # Of the repository's top or of the package; in prose, and in a diagram too.
    missing = []
    for page in MAPS:
        named = [name for name in re.findall(r"`([\w./-]+)`", read(page)) if re.search(r"/|\.(py|md|yaml)$", name)]
        assert named, page
        if page.name == "architecture.md":
            drawings = "".join(re.findall(r"```.*?```", read(page), re.DOTALL))
            named += re.findall(r"(?<![\w./<-])(?:[a-z_]+/)+(?:[\w-]+\.(?:py|md))?(?![\w<])", drawings)
        for name in sorted({*named} - MADE):
            if not any((folder / name).exists() for folder in (ROOT, PACKAGE, page.parent)):
                missing.append((ids(page), name))
    assert missing == []


def known(name: str, names: Iterable[str]) -> bool:
    # Whether one of the names begins with `name`, "..." in which stands for anything.
    pattern = re.compile(".*".join(map(re.escape, name.removesuffix(".py").split("..."))))
    return any(pattern.match(other) for other in names)


def test_tests_that_pages_name_are_there():
    # In full, by their beginning, or with dots for what is left out; behind a file's name, in it.
    paths = {path.relative_to(ROOT / "tests").as_posix(): path for path in (ROOT / "tests").rglob("*.py")}
    files = {name: re.findall(r"^ *def (test_\w+)", read(path), re.MULTILINE) for name, path in paths.items()}
    everywhere = [*(Path(path).stem for path in files), *(name for names in files.values() for name in names)]
    missing = []
    for page in PAGES:
        text = without_outputs(page)
        for path, names in re.findall(r"`(?:tests/)?((?:[a-z]+/)+test_\w+\.py)`(?: \(((?:[^()]*`[^()]*)+)\))?", text):
            wanted = re.findall(r"`(test_[\w.]+)`", names)
            if path not in files or any(not known(name, files[path]) for name in wanted):
                missing.append((ids(page), path, wanted))
        named = set(re.findall(r"`(test_[\w.]+?)`", text))
        missing += [(ids(page), name) for name in sorted(named) if not known(name, everywhere)]
    assert missing == []


def test_the_page_of_costs_names_fitted_constants_and_the_glossary_stays_on_a_page():
    # The page of costs names every constant that is fitted to a result.
    section = (
        read(ROOT / "docs" / "costs.md")
        .partition("## Constants that are fitted to a result\n")[2]
        .partition("\n## ")[0]
    )
    skew, pages = cast("Pareto", DISTRIBUTIONS["wlb-skew"]), cast("LogNormal", DISTRIBUTIONS["commoncrawl"])
    fitted = (RATE, skew.exponent, pages.sigma, f"{GRADIENT_ROUNDS} blocks and {GRADIENT_COPIES} copies")
    rows = re.findall(r"^\| (\d.+)", section, re.MULTILINE)
    assert [row.partition(",")[0].partition(" of ")[0] for row in rows] == [str(value) for value in fitted]
    # The glossary has at most 35 rows.
    rows = re.findall(r"^\| (.+?) \|", read(ROOT / "docs" / "glossary.md"), re.MULTILINE)
    assert 0 < len([row for row in rows if row not in ("word", "---")]) <= 35


def test_every_comm_pattern_has_a_drawing_its_bytes_and_when_it_wins():
    # On the page of patterns, in one section, which names it in its heading.
    sections = re.split(r"^## ", read(ROOT / "docs" / "patterns.md"), flags=re.MULTILINE)[1:]
    table = r"(?m)^\| bytes a rank .*bytes of the busiest NIC \| rounds \| launches \|$"
    for pattern in PATTERNS:
        (own,) = (section for section in sections if f"`{pattern}`" in section.splitlines()[0])
        for sought in (r"(?ms)^```$.*?^```$", table, "Wins"):
            assert re.search(sought, own), (pattern, sought)


# docs/cluster.md names flags, files and keys that exist

CLUSTER_PAGE = (ROOT / "docs" / "cluster.md").read_text()


def test_files_configurations_and_figures_that_the_page_of_clusters_names_are_there(tmp_path):
    # Files and configurations that the page of clusters names are there.
    named = set(re.findall(r"(?:scripts|tests|docs|tools)/[\w./-]+\.(?:sh|sbatch|md|py)", CLUSTER_PAGE))
    assert sorted(path for path in named if not (ROOT / path).is_file()) == ["tools/preprocess_data.py"]  # Megatron's
    assert len(named) > 1
    written = re.findall(r"```yaml\n(.*?)```", CLUSTER_PAGE, re.DOTALL)
    assert len(written) == 3
    (tmp_path / "cluster.yaml").write_text("base: h200\n")
    configs = []
    for block in written:
        (tmp_path / "balance.yaml").write_text(block if "planner" in block else f"planner: zeppelin\n{block}")
        configs.append(load_config(tmp_path / "balance.yaml"))
    assert None not in [config.planner for config in configs]
    assert configs[-1].communication == CommunicationChoice(inter_node_sms=4, intra_node_sms=12)
    # Step figures that the page of clusters names are written.
    files = ("training/log.py", "training/figures.py", "runtime/recorder.py")
    written = "".join(read(PACKAGE / file) for file in files)
    table = CLUSTER_PAGE.partition("look at this first")[2].partition("## NCCL")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    names = {name.partition(".")[0] for cell in cells for name in re.findall(r"`([a-z_.]+)`", cell)}
    assert {"plan_wait_ms", "imbalance_after", "bytes_sent_per_nic"} <= names
    assert not [name for name in names if not re.search(rf"\b{name}\b", written)]


# Prose: how a docstring may begin, and how wide a page is.

ROOMS = ("megatron_balance", "patches", "tests", "tools", "scripts")
# First words of a docstring that name neither what is done nor what is returned.
OPENINGS = ("Nothing", "What", "Who", "Which", "So many", "The same")
WIDTH = 100
WIDTH_PAGES = [page for page in PAGES if page.parent.name != "measurements" and page.name != "CHANGELOG.md"]


def docstrings(source: str) -> list[tuple[int, str]]:
    # (line, text) of every docstring: of modules, classes and functions, and under an assignment.
    texts = []
    below: list[ast.AST] = [ast.parse(source)]
    for node in below:  # grows: blocks of statements, whose expressions hold no docstring
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        below += (each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr))
        opens = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for before, statement in zip([None, *body], body, strict=False):
            if (before is None and opens) or isinstance(before, (ast.Assign, ast.AnnAssign)):
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        texts.append((statement.lineno, text))
    return texts


REFUSED = re.compile(rf"\s*(?:{'|'.join(OPENINGS)})\b")


def test_docstrings_say_what_is_done_or_returned():
    wrong = ["Nothing, if a plan can run.", "So many layers.", "The same of rows."]
    right = ["Whole rows of a table.", "Reject arguments under which a plan cannot run."]
    assert [text for text in wrong + right if REFUSED.match(text)] == wrong
    read_ = docstrings('"""A."""\nX = 1\n"""B."""\ndef f():\n    """C."""\n    "not one"\n')
    assert read_ == [(1, "A."), (3, "B."), (5, "C.")], "those of values are seen too"
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = read(path)
        if re.search(f'"""{REFUSED.pattern}', text):  # or there is nothing to parse it for
            found += [f"{ids(path)}:{line}: {text}" for line, text in docstrings(text) if REFUSED.match(text)]
    assert not found, "begin with an imperative, or with a noun phrase for what is returned:\n" + "\n".join(found)


def test_prose_fits_the_width():
    wide = []
    for page in WIDTH_PAGES:
        fenced = False
        for number, line in enumerate(read(page).splitlines(), start=1):
            fenced ^= line.lstrip().startswith("```")
            free = fenced or line.lstrip().startswith(("```", "|"))
            if not free and len(re.sub(r"\]\([^)]*\)", "]", line)) > WIDTH:  # links count by their text
                wide.append(f"{ids(page)}:{number}")
    assert not wide, f"more than {WIDTH} characters; break these lines:\n" + "\n".join(wide)


# Every shell command of README, CONTRIBUTING and docs/ runs here, or stands in `ELSEWHERE` with the
# reason why not; what is not run names verbs, tools, files and flags that are there. `megatron-
# balance` commands that take longer than some seconds are `product` cases.

TOUR = ROOT / "docs" / "tour.md"
PROGRAMS = ["megatron-balance", "python", "python3.12", "torchrun", "pip", "pytest", "bash", "sh", "cd", "echo"]
PROGRAMS += ["export", "source", "docker", "enroot", "sbatch", "srun", "git", "apt-get", "curl", "wget", "ncu", "nsys"]
PAPERS = ("distca", "knapformer", "wlb_llm", "zeppelin")
# Beginnings of commands that are not run here, and why.
ELSEWHERE = {
    "./scripts/demo.sh": "trains for minutes, in network namespaces",
    "./scripts/test.sh": "is what runs this test",
    "PYTHONPATH=DIR:. python -m tools.gpu.compiled": "needs another Triton",
    "PYTHONPATH=$PWD V/bin/python": "needs another torch",
    "DATA=": "needs Slurm; tests/unit/repository/test_shipping.py submits the scripts to a stand-in",
    "bash scripts/slurm/": "the same",
    "docker build": "needs Docker and the base image; tests/unit/repository/test_shipping.py reads the Dockerfile",
    "echo $PWD/.venv": "writes into another environment",
    "echo 'planner: zeppelin'": "writes the reader's configuration",
    "enroot import": "needs enroot and the image",
    "export OMP_NUM_THREADS": "of the shell that runs the tests",
    "fresh/bin/": "installs a fresh environment; its script is run by tests/distributed/test_torch.py",
    "megatron-balance compare --planner megatron --context-parallel 1 --model FOLDER": "published models, minutes",
    "megatron-balance compare --planner zeppelin --planner auto --model FOLDER": "the same",
    "megatron-balance compare --ranks 64 --cluster h200 --model llama3-8b": "run by test_tour.py, but for flexsp",
    "megatron-balance doctor --write-cluster": "needs GPUs; tests/unit/cli/test_doctor.py runs it on stand-ins",
    **{f"megatron-balance reproduce {paper} --json": "the same as without --json" for paper in PAPERS},
    "megatron-balance trace DIR": "needs a run's traces; tests/unit/cli/test_cli_simulate.py joins some",
    "pip download": "fetches 291 MiB; tests/unit/tools/test_bare.py reads what is made of it",
    "pip install": "installs packages; tests/unit/repository/test_shipping.py reads what",
    "pytest tests/": "is this suite",
    "python -m tools.bench.host": "measures for minutes",
    "python -m tools.bench.simulated": "needs network namespaces, and minutes",
    "python -m tools.emulated_cluster": "needs network namespaces; tests/emulated runs it",
    "python -m tools.faults": "searches for hours",
    "python -m tools.gpu.compiled": "two minutes; tests/unit/runtime/test_triton.py compiles some",
    "python -m tools.megatron_": "needs checkouts of other Megatrons",
    "python -m tools.torch_parity": "hours; tests/distributed/test_torch.py has one of each kind",
    "python -m tools.zoo": "half an hour; tests/distributed/test_torch.py has one of each kind",
    "python -m venv V": "makes a fresh environment",
    "python3.12 -m venv": "the same",
    "source .venv": "of the reader's shell",
    "tools/gpu/share": "needs a GPU; tests/unit/tools/test_bare.py runs it with other commands",
    "torchrun --nnodes 2": "needs two nodes with GPUs",
    "torchrun --nproc-per-node 8 -m megatron_balance profile --links": "eight processes, for minutes",
    "torchrun --standalone --nproc-per-node 4 scripts/examples/": "tests/distributed runs these scripts",
    "torchrun ... -m megatron_balance.launch": "the reader's own script; tests/megatron/test_launch.py has one",
}

# Beginnings of commands of `megatron-balance` that take longer than 5 s on a quiet machine.
LONG = ("reproduce ", "report --dataset", "report --planner", "report --run", "profile ", "compare  --dataset github")
LONG += ("compare --model nemotron-h-8b --cluster h100",)
LONG += ("compare --ranks 64 --cluster a800-ib", "simulate --planner te_ring --lengths 40000")


def is_command(line: str) -> bool:
    word = line.split(" ", 1)[0]
    known = word in PROGRAMS or word.startswith(("./", "fresh/bin/"))
    return known or re.match(r"[A-Z_]+=\S|[a-z][\w./-]* (.* )?--?[a-z]", line) is not None  # or has an option


def commands(page: Path) -> list[str]:
    # Commands of a page's shell blocks without comments, each on one line; where lines have a prompt,
    # the others are output.
    found: list[str] = []
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", read(page), re.DOTALL | re.MULTILINE)
    for block in (text for language, text in fenced if language in ("", "sh", "bash", "console")):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        if prompted or (lines and is_command(lines[0])):
            found += [re.sub(r"\s+#.*", "", line).strip() for line in prompted or lines if line.strip()]
    return found


# Commands that test_tour.py runs, whose outputs it compares with the page.
TOURED = re.findall(r"^\$ (megatron-balance .*)", read(TOUR), re.MULTILINE)
COMMANDS = sorted({each for page in PAGES for each in commands(page)}.difference(TOURED))


def why_elsewhere(command: str) -> str | None:
    return next((why for beginning, why in ELSEWHERE.items() if command.startswith(beginning)), None)


OWN = [each for each in COMMANDS if each.startswith("megatron-balance ") and why_elsewhere(each) is None]


def test_every_command_of_a_page_is_run_or_listed_with_the_reason_why_not():
    assert [each for each in COMMANDS if each not in OWN and why_elsewhere(each) is None] == []
    begun = [*ELSEWHERE, *(f"megatron-balance {each}" for each in LONG)]
    assert [each for each in begun if not any(command.startswith(each) for command in COMMANDS)] == []


def furnish(desk: Path) -> None:
    # Put the files into a folder that pages say a reader has.
    desk.mkdir()
    table = made()
    wide = dataclasses.replace(table.attention, num_heads=32, num_kv_heads=32, head_dim=128)
    for name in ("costs.json", "measured.json"):
        save_table(dataclasses.replace(table, attention=wide), desk / name)
    (desk / "cluster.yaml").write_text("base: h200\n")
    (desk / "balance.yaml").write_text("planner: zeppelin\ncluster: cluster.yaml\nplan_costs: costs.json\n")
    (desk / "lengths.json").write_text("[[9000, 700, 300], [4000, 4000, 2000]]")
    step = rl.plan_step([9000, 700, 300, 4000], None, Cluster(64, 8), load_model("llama3-8b"), max_tokens=9000)
    (desk / "step.json").write_text(to_json(step))
    (desk / "trees.json").write_text("[[[[900, -1], [300, 0], [250, 0]], 400]]")
    sizes = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu"}
    (desk / "qwen3-8b.json").write_text(json.dumps({"model_type": "qwen3", **sizes, **heads}))
    with CorpusWriter(desk / "PREFIX") as corpus:
        for length in (30000, 70000, 40000, 900):
            corpus.add_document(np.ones(length, dtype=np.uint16))
    for name in ("te_ring", "zeppelin"):
        run = desk / "out" / "demo" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"planner: {{name: {name}, tokens_per_rank: 4000}}\n")
        (run / "model.yaml").write_text("num_heads: 8\nnum_kv_heads: 8\nhead_dim: 64\nnum_layers: 4\n")
        (run / "cluster.yaml").write_text("num_ranks: 4\nranks_per_node: 2\n")
        steps = [{"step": at, "step_ms": 100.0 + at, "planner": name, "lengths": [[3000, 50]]} for at in range(9)]
        (run / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.product)])
def test_commands_run_as_their_pages_have_them(long, run, tmp_path, monkeypatch):
    failed = []
    own = [each for each in OWN if each.removeprefix("megatron-balance ").startswith(LONG) == long]
    for at, command in enumerate(own):
        furnish(tmp_path / str(at))
        monkeypatch.chdir(tmp_path / str(at))
        code, _, err = run("", *shlex.split(command)[1:])
        failed += [(command, code, err)] * (code != 0)
    assert failed == []


# What they name, in blocks and within lines


def spans(pages: Iterable[Path] = PAGES) -> set[str]:
    # Code within lines, each on one line.
    return {" ".join(each.split()) for each in re.findall(r"`([^`]+)`", "".join(map(without_outputs, pages)))}


def options(command: str) -> list[str]:
    # Of a command, those behind `--` left out.
    words = command.split()
    own = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in own if word.startswith("--")]


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    below = (each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {verb: each for choices in below for verb, each in choices.items()}


def accepted(parser: argparse.ArgumentParser) -> set[str]:
    # Options of a verb, and of the verbs below it.
    return set(parser._option_string_actions).union(*(accepted(each) for each in verbs(parser).values()))


def test_options_tools_and_scripts_that_pages_name_are_there():
    # Options of verbs that pages name are there.
    parser = build_parser()
    for command in COMMANDS:
        if command.startswith("megatron-balance "):
            parser.parse_args(shlex.split(command)[1:])  # raises
    known = {verb: accepted(each) for verb, each in verbs(parser).items()}
    missing = []
    for command in sorted({*COMMANDS, *TOURED, *spans()}):
        verb = command.removeprefix("megatron-balance ").split(" ")[0]
        missing += [(command, each) for each in options(command) if verb in known and each not in known[verb]]
    assert missing == []
    # Tools and scripts that pages call are there with their options.
    missing = []
    today = [page for page in PAGES if page.name != "CHANGELOG.md"]  # tools whose question is answered go
    for command in sorted({*COMMANDS, *spans(today)}):
        called = re.search(r"^(?:\./|bash |python (?:-m )?|torchrun .*?)((?:tools|scripts)[./][\w./]+)", command)
        if called is None:
            continue
        path = ROOT / (called[1] if "/" in called[1] else called[1].replace(".", "/"))
        path = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path
        if not path.exists():
            missing.append((command, called[1]))
            continue
        shared = ROOT.joinpath(*path.relative_to(ROOT).parts[:2])  # tools/bench: options that its tools share
        files = [path] if path.is_file() and path.parent == shared.parent else shared.rglob("*.py")
        text = "".join(map(read, files))
        given = options(command[called.end() :]) if path.suffix in ("", ".py") else []
        missing += [(command, each) for each in given if each not in text]
    assert missing == []


# Commands of the tour print what the page says, times aside; the README's table holds what
# `compare` simulates.

README = read(ROOT / "README.md")


def commands_and_output(page: str) -> list[tuple[str, str]]:
    # Of every `$ megatron-balance` in a code block, up to the next command.
    blocks_ = re.findall(r"```\n(\$ megatron-balance .*?)```", page, re.DOTALL)
    parts = [part for block in blocks_ for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def without_times(text: str) -> list[str]:
    # Planning times: `12.3 ms`, and the column `plan ms` of a table.
    lines, column = [], None
    for line in text.strip().splitlines():
        cells = re.split("[┃│]", line)
        if "┃" in line:
            column = next((at for at, cell in enumerate(cells) if cell.strip() == "plan ms"), None)
        if column is not None and "│" in line:
            cells[column] = ""
        lines.append(re.sub(r"[\d.]+ ms", "- ms", "|".join(cells)).rstrip())
    return lines


def test_every_command_prints_what_the_tour_says(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # one command's plan.json is the next one's input
    monkeypatch.setenv("COLUMNS", "120")
    toured = commands_and_output(read(TOUR))
    assert len(toured) >= 4
    for command, expected in toured:
        assert main(shlex.split(command)[1:]) == 0, command
        assert without_times(capsys.readouterr().out) == without_times(expected), command


def strategies() -> dict[str, list[str]]:
    # Cells of each row of the README's table of strategies, by planner.
    section = README.partition("## Strategies")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" *†") for cell in cells] for cells in lines]
    return {row[0].strip("`"): row for row in rows}


# flexsp is left out: its integer program takes seconds for each of the batches.
COMPARED = [name for name in PLANNERS if name != "flexsp"]


@pytest.mark.parametrize(
    "names", [["te_ring", "zeppelin", "distca"], pytest.param(COMPARED, marks=pytest.mark.product)]
)
def test_the_table_of_strategies_holds_what_compare_simulates(run, names):
    assert strategies().keys() == PLANNERS.keys()
    assert all((PACKAGE / row[2].strip("`")).exists() for row in strategies().values())
    # The baseline and two that differ most in what they do; all of them are a `product`.
    command = next(line for line in README.splitlines() if line.startswith("megatron-balance compare "))
    asked = (word for name in names for word in ("--planner", name))
    rows = run.json("", *shlex.split(command)[1:], *asked)["rows"]
    assert {row["planner"]: f"{row['speedup']:.2f}" for row in rows} == {name: strategies()[name][3] for name in names}

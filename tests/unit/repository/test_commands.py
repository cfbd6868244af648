"""Every shell command of README, CONTRIBUTING and docs/ runs here, or stands in `ELSEWHERE` with the
reason why not; what is not run names verbs, tools, files and flags that are there.

`megatron-balance` commands that take longer than some seconds are `product` cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.cli import build_parser
from megatron_balance.cost.table import save_table
from megatron_balance.workloads.idx import CorpusWriter
from tests.support.cost_table import made

ROOT = Path(__file__).resolve().parents[3]
TOUR = ROOT / "docs" / "tour.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

PROGRAMS = ["megatron-balance", "python", "python3.12", "torchrun", "pip", "pytest", "bash", "sh", "cd", "echo"]
PROGRAMS += ["export", "source", "docker", "enroot", "sbatch", "srun", "git", "apt-get", "curl", "wget", "ncu", "nsys"]

ELSEWHERE = {
    "./scripts/demo.sh": "trains for minutes, in network namespaces",
    "./scripts/test.sh": "is what runs this test",
    "DATA=": "needs Slurm; tests/unit/repository/test_shipping.py submits the scripts to a stand-in",
    "bash scripts/slurm/": "the same",
    "docker build": "needs Docker and the base image; tests/unit/repository/test_shipping.py reads the Dockerfile",
    "echo 'planner: zeppelin'": "writes the reader's configuration",
    "enroot import": "needs enroot and the image",
    "export OMP_NUM_THREADS": "of the shell that runs the tests",
    "fresh/bin/": "installs a fresh environment; its script is run by tests/distributed/test_torch.py",
    "megatron-balance compare --planner megatron --context-parallel 1 --model FOLDER": "published models, minutes",
    "megatron-balance compare --planner zeppelin --planner auto --model FOLDER": "the same",
    "megatron-balance compare --ranks 64 --cluster h200 --model llama3-8b": "run by test_tour.py, but for flexsp",
    "megatron-balance doctor --write-cluster": "needs GPUs; tests/unit/cli/test_hardware.py runs it on stand-ins",
    "megatron-balance reproduce distca --json": "the same as without --json, as all of them",
    "megatron-balance reproduce knapformer --json": "the same",
    "megatron-balance reproduce wlb_llm --json": "the same",
    "megatron-balance reproduce zeppelin --json": "the same",
    "megatron-balance trace DIR": "needs a run's traces; tests/unit/cli/test_trace.py joins some",
    "pip install": "installs packages; tests/unit/repository/test_locks.py reads what",
    "pytest tests/": "is this suite",
    "python -m tools.bench.host": "measures for minutes",
    "python -m tools.bench.simulated": "needs network namespaces, and minutes",
    "python -m tools.emulated_cluster": "needs network namespaces; tests/emulated runs it",
    "python -m tools.faults": "searches for hours",
    "python -m tools.megatron_": "needs checkouts of other Megatrons",
    "python -m tools.torch_parity": "hours; tests/distributed/test_torch.py has one of each kind",
    "python -m tools.zoo": "half an hour; tests/distributed/test_torch.py has one of each kind",
    "python3.12 -m venv": "makes a fresh environment",
    "source .venv": "of the reader's shell",
    "torchrun --nnodes 2": "needs two nodes with GPUs",
    "torchrun --nproc-per-node 8 -m megatron_balance profile --links": "eight processes, for minutes",
    "torchrun --standalone --nproc-per-node 4 scripts/examples/": "tests/distributed runs these scripts",
    "torchrun ... -m megatron_balance.launch": "the reader's own script; tests/megatron/test_launch.py has one",
}
"""Beginnings of commands that are not run here, and why."""

LONG = ("reproduce ", "report --dataset", "report --planner", "report --run", "profile ", "compare  --dataset github")
LONG += ("compare --ranks 64 --cluster a800-ib", "simulate --planner te_ring --lengths 40000")
"""Beginnings of commands of `megatron-balance` that take longer than 5 s on a quiet machine."""


def blocks(page: Path) -> list[str]:
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for language, text in fenced if language in ("", "sh", "bash", "console")]


def is_command(line: str) -> bool:
    word = line.split(" ", 1)[0]
    known = word in PROGRAMS or word.startswith(("./", "fresh/bin/"))
    return known or re.match(r"[A-Z_]+=\S|[a-z][\w./-]* (.* )?--?[a-z]", line) is not None  # or has an option


def commands(page: Path) -> list[str]:
    """Commands of a page's shell blocks without comments, each on one line; where lines have a prompt,
    the others are output.
    """
    found: list[str] = []
    for block in blocks(page):
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        if prompted or (lines and is_command(lines[0])):
            found += [re.sub(r"\s+#.*", "", line).strip() for line in prompted or lines if line.strip()]
    return found


TOURED = re.findall(r"^\$ (megatron-balance .*)", TOUR.read_text(encoding="utf-8"), re.MULTILINE)
"""Commands that test_tour.py runs, whose outputs it compares with the page."""

COMMANDS = sorted({each for page in PAGES for each in commands(page)}.difference(TOURED))


def why_elsewhere(command: str) -> str | None:
    return next((why for beginning, why in ELSEWHERE.items() if command.startswith(beginning)), None)


OWN = [each for each in COMMANDS if each.startswith("megatron-balance ") and why_elsewhere(each) is None]


def is_long(command: str) -> bool:
    return command.removeprefix("megatron-balance ").startswith(LONG)


def test_every_command_of_a_page_is_run_or_listed_with_the_reason_why_not():
    assert [each for each in COMMANDS if each not in OWN and why_elsewhere(each) is None] == []
    begun = [*ELSEWHERE, *(f"megatron-balance {each}" for each in LONG)]
    assert [each for each in begun if not any(command.startswith(each) for command in COMMANDS)] == []


def furnish(desk: Path) -> None:
    """Put the files into a folder that pages say a reader has."""
    desk.mkdir()
    table = made()
    wide = dataclasses.replace(table.attention, num_heads=32, num_kv_heads=32, head_dim=128)
    for name in ("costs.json", "measured.json"):
        save_table(dataclasses.replace(table, attention=wide), desk / name)
    (desk / "cluster.yaml").write_text("base: h200\n")
    (desk / "balance.yaml").write_text("planner: zeppelin\ncluster: cluster.yaml\nplan_costs: costs.json\n")
    (desk / "lengths.json").write_text("[[9000, 700, 300], [4000, 4000, 2000]]")
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
    """Each at a desk of its own."""
    failed = []
    for at, command in enumerate(each for each in OWN if is_long(each) == long):
        furnish(tmp_path / str(at))
        monkeypatch.chdir(tmp_path / str(at))
        code, _, err = run("", *shlex.split(command)[1:])
        failed += [(command, code, err)] * (code != 0)
    assert failed == []


# What they name, in blocks and within lines


def spans(pages: Iterable[Path] = PAGES) -> set[str]:
    """Code within lines, each on one line."""
    text = "".join(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages)
    return {" ".join(each.split()) for each in re.findall(r"`([^`]+)`", text)}


def options(command: str) -> list[str]:
    """Options of a command, those behind `--` left out."""
    words = command.split()
    own = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in own if word.startswith("--")]


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    below = (each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {verb: each for choices in below for verb, each in choices.items()}


def accepted(parser: argparse.ArgumentParser) -> set[str]:
    """Options of a verb, and of the verbs below it."""
    return set(parser._option_string_actions).union(*(accepted(each) for each in verbs(parser).values()))


def test_options_of_verbs_that_pages_name_are_there():
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


def test_tools_and_scripts_that_pages_call_are_there_with_their_options():
    missing = []
    today = [page for page in PAGES if page.name != "CHANGELOG.md"]  # tools whose question is answered go
    for command in sorted({*COMMANDS, *spans(today)}):
        called = re.search(r"^(?:\./|bash |python (?:-m )?|torchrun .*?)((?:tools|scripts)[./][\w./]+)", command)
        if called is None:
            continue
        name = called[1]
        path = ROOT / (name if "/" in name else name.replace(".", "/"))
        path = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path
        if not path.exists():
            missing.append((command, name))
            continue
        shared = ROOT.joinpath(*path.relative_to(ROOT).parts[:2])  # tools/bench: options that its tools share
        files = [path] if path.is_file() and path.parent == shared.parent else shared.rglob("*.py")
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        after = command[called.end() :]
        missing += [(command, each) for each in options(after) if path.suffix in ("", ".py") and each not in text]
    assert missing == []

"""The README's commands print what the README says, times aside; its word table names files that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_balance.cli import main

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _commands() -> list[tuple[str, str]]:
    """(command, output) of every `$ megatron-balance` in a code block; the output ends at the next command."""
    found = []
    for block in re.findall(r"```\n(\$ megatron-balance .*?)```", README, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def _without_times(text: str) -> list[str]:
    return [re.sub(r"[\d.]+ ms", "- ms", line).rstrip() for line in text.strip().splitlines()]


def test_there_are_commands_to_check():
    assert len(_commands()) >= 3


def test_every_command_prints_what_the_readme_says(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # one command's plan.json is the next one's input
    monkeypatch.setenv("COLUMNS", "120")
    for command, expected in _commands():
        assert main(shlex.split(command)[1:]) == 0, command
        assert _without_times(capsys.readouterr().out) == _without_times(expected), command


def test_the_word_table_names_files_that_exist():
    table = README.partition("## Where is what")[2].partition("##")[0]
    named = [name for name in re.findall(r"`([\w./]+)`", table) if "/" in name or name.endswith(".py")]
    planned = {"passes/route", "passes/remap", "solvers/remap"}
    assert len(named) > 20
    missing = [n for n in named if n not in planned and not ((ROOT / n).exists() or (ROOT / "megatron_balance" / n).exists())]
    assert missing == []


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()

"""`megatron-balance` run in this process: the fixture `run` of tests/unit/conftest.py."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_balance.cli import main


class Answer(NamedTuple):
    # The exit code of a command, and the text that it printed.
    code: int
    out: str
    err: str


class CommandLine:
    # Runs commands; `command` is split at blanks, every one of `words` is a word as it is.
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, command: str, *words: str | Path) -> Answer:
        code = main([*command.split(), *map(str, words)])
        out, err = self.capsys.readouterr()
        return Answer(code, out, err)

    def printed(self, command: str, *words: str | Path) -> str:
        # Standard output of a command that must succeed.
        code, out, err = self(command, *words)
        assert code == 0, err
        return out

    def json(self, command: str, *words: str | Path) -> Any:
        # The JSON document that a command prints, which must succeed and print nothing else.
        return json.loads(self.printed(command, *words))

    def error(self, command: str, *words: str | Path) -> str:
        # The sentence of a command that must refuse: one line "error: ...", exit code 2, nothing on
        # standard output.
        code, out, err = self(command, *words)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err[len("error: ") :].rstrip("\n")

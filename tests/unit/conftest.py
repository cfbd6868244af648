"""Fixtures of the unit tests."""

import pytest

from tests.support.cli import CommandLine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Runs `megatron-balance` in this process."""
    return CommandLine(capsys)

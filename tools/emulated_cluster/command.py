"""A training command as what a forked rank calls: `-m MODULE ...` or `SCRIPT.py ...`, imported once
before the ranks are forked.
"""

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_balance.errors import ConfigError
from tools.emulated_cluster.launch import Controller


@dataclass(frozen=True, slots=True)
class Command:
    """Arguments of `python`; an instance is a target of `run`."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    def preload(self) -> None:
        """Import what every rank will need: torch, and all of Megatron and of ours if the command
        says that it runs on the CPU.

        Raises:
            ConfigError: the module or script does not exist.
        """
        from megatron_balance.megatron.flags import device_of

        if device_of(self.arguments) == "cpu":
            from megatron_balance.megatron import cpu

            cpu.install()
            from megatron_balance.patches.selection import every

            # imports Megatron, which looks at the device while it is imported
            every()
        else:
            importlib.import_module("torch.distributed")
        if self.is_module and not _exists(self.name):
            raise ConfigError(f"-m {self.name}: no module of that name can be imported from here")

    def __call__(self, _rank: int, _controller: Controller) -> None:
        """In a rank: run the command as Python would."""
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            # as python itself does; scripts import their neighbours
            sys.path.insert(0, str(Path(self.name).resolve().parent))
            runpy.run_path(self.name, run_name="__main__")


def parse(words: Sequence[str]) -> Command:
    """The command after `--`.

    Raises:
        ConfigError: it is neither `-m MODULE ...` nor an existing `SCRIPT.py ...`.
    """
    if words and words[0] == "--":
        words = words[1:]
    if len(words) > 1 and words[0] == "-m":
        return Command(words[1], True, tuple(words[2:]))
    if not words or words[0].startswith("-"):
        raise ConfigError("name the command after '--': -m MODULE [ARGUMENT ...] or SCRIPT.py [ARGUMENT ...]")
    if not Path(words[0]).is_file():
        raise ConfigError(
            f"{words[0]}: no such script; the command after '--' is -m MODULE ... or SCRIPT.py ..., without 'python'"
        )
    return Command(words[0], False, tuple(words[1:]))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False

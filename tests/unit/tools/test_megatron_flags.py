"""Flags of Megatron as words of a command line."""

from __future__ import annotations

from tools.megatron_flags import command_line


def test_a_flag_stands_alone_with_its_value_or_with_several() -> None:
    flags = {
        "swiglu": True,
        "lr": 1e-3,
        "save-interval": None,
        "balance-device": False,
        "data-path": ["1", "documents"],
    }
    assert command_line(flags) == ["--swiglu", "--lr", "0.001", "--data-path", "1", "documents"]


def test_later_tables_win_and_may_take_a_flag_out() -> None:
    assert command_line({"seed": 1, "swiglu": True}, {"seed": 2, "swiglu": False}) == ["--seed", "2"]

"""Our options on Megatron's command line, and what its flags make of a rank's rows; rules of flags
are in `flags`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from megatron_balance.errors import ConfigError
from megatron_balance.megatron import flags

Device: TypeAlias = Literal["cpu", "cuda"]
DEVICE_OPTION = "--balance-device"

CPU_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "cp_comm_type": ["all_gather"],
}
"""Defaults of Megatron's flags with `--balance-device cpu`.

Its own need a GPU or Transformer Engine. How keys travel is the plan's, so `cp_comm_type` changes
nothing; Megatron's branch dev builds local layers under no other one.
"""


def device_of(argv: Sequence[str]) -> Device:
    """The device that the command line asks for.

    Read without Megatron's parser, before Megatron is imported.

    Raises:
        ConfigError: neither cpu nor cuda.
    """
    device = "cuda"
    for at, word in enumerate(argv):
        if word == DEVICE_OPTION:
            device = argv[at + 1] if at + 1 < len(argv) else ""
        elif word.startswith(f"{DEVICE_OPTION}="):
            device = word.partition("=")[2]
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"{DEVICE_OPTION} {device}: choose cpu or cuda")
    return device


def add_balance_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's parser with our group, and with defaults that work on a CPU if that is the device.

    Some of Megatron's own texts have a bare percent sign, at which `--help` would end in an error.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\(\w+\)[dfrs])", "%%", action.help)
    group = parser.add_argument_group("balance")
    group.add_argument(
        "--balance-config", metavar="FILE", default=None, help="YAML that names the planner and its options."
    )
    group.add_argument(
        "--balance-planner",
        metavar="NAME",
        default=None,
        help="A planner or a file of configs/planner, in place of the configuration's.",
    )
    group.add_argument(
        "--balance-cluster",
        metavar="NAME|FILE",
        default=None,
        help="A machine of configs/cluster or a YAML, in place of the configuration's and of what the machine says.",
    )
    group.add_argument(
        DEVICE_OPTION,
        choices=("cpu", "cuda"),
        default="cuda",
        help="cpu runs without a GPU, for tests and demonstrations (slow, and says so).",
    )
    group.add_argument(
        "--balance-log", metavar="DIR", default=None, help="Write steps.jsonl and the resolved configuration here."
    )
    from megatron_balance.megatron import cpu

    parser.set_defaults(**flags.defaults())
    if cpu.installed():
        parser.set_defaults(**CPU_DEFAULTS)
    return parser


FP8_ROWS: dict[str, int] = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""By `--fp8-recipe`, the number of which the rows of a linear layer's input must be a multiple.

The products take 16 rows at a time; MXFP8 has a scale for every 32 rows and block scaling for every
128, and Transformer Engine quantises whole blocks only (`is_quantizable`).
"""


def row_multiple(args: argparse.Namespace) -> int:
    """The number of which a rank's rows are a multiple.

    Added rows belong to no sequence and are masked.

    Sequence parallelism splits the rows over the tensor-parallel ranks, each of which may quantise
    its own before they are gathered.
    """
    return role_row_multiple(args, args.tensor_model_parallel_size)


def role_row_multiple(args: argparse.Namespace, tensor: int) -> int:
    """As `row_multiple`, of one of `tensor` tensor-parallel ranks."""
    shares = tensor if args.sequence_parallel else 1
    return shares * (FP8_ROWS[args.fp8_recipe] if args.fp8 is not None else 1)


def check_arguments(args: argparse.Namespace, others: Sequence[str] = ()) -> None:
    """Reject arguments under which a plan cannot run, for the reasons here and `others`.

    Raises:
        ConfigError: names every flag that cannot work, and what would be right.
    """
    if not getattr(args, "balance_config", None) and args.yaml_cfg is None:
        raise ConfigError("--balance-config is missing: name a YAML with a planner, such as configs/experiment/*.yaml")
    reasons = [*flags.reasons(args), *others]
    if reasons:
        raise ConfigError("; ".join(reasons))

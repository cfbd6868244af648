"""Megatron's flags by `flags.yaml`, the record of all that were looked at: what is refused, left
out, told, or unknown. A flag's rule stands there and nowhere else. And our options beside them.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import Any, Literal, TypeAlias, cast

from pydantic import BaseModel

from megatron_balance import model_config
from megatron_balance.errors import ConfigError
from megatron_balance.strict_yaml import STRICT, read_yaml, validated

PATH = Path(__file__).with_suffix(".yaml")

Way: TypeAlias = (
    Literal["joint", "pipelines", "strategies", "microbatches", "ping_pong", "latent_kv"]
    | Literal["documents", "command_line", "own_loop", "no_te", "trees"]
)


class FlagRule(BaseModel):
    """The rule of some flags; the head of the YAML says what the fields are."""

    model_config = STRICT

    flags: str
    sentence: str
    when: str = ""
    ways: list[Way] = []
    values: dict[str, Any] = {}

    @cached_property
    def condition(self) -> CodeType:
        any_set = " or ".join(flag.replace("-", "_") for flag in self.flags.split())
        return compile(self.when or any_set, f"{PATH.name}: {self.flags}", "eval")

    def holds(self, args: object) -> bool:
        return bool(eval(self.condition, {"__builtins__": {}}, _Options(args)))

    def told(self, args: object) -> str:
        return self.sentence.format_map(_Options(args))


class _FlagRecord(BaseModel):
    """The YAML: rules by verdict, then flags without one, by why they need none."""

    model_config = STRICT

    defaults: list[FlagRule]
    refused: list[FlagRule]
    left_out: list[FlagRule]
    told: list[FlagRule]
    read: str
    elsewhere: str
    harmless: str
    fields: str

    @cached_property
    def ruled(self) -> frozenset[str]:
        rules = (*self.defaults, *self.refused, *self.left_out, *self.told)
        return frozenset(flag for rule in rules for flag in rule.flags.split())

    @cached_property
    def reviewed(self) -> frozenset[str]:
        """All flags that were looked at, without dashes."""
        return self.ruled.union(self.read.split(), self.elsewhere.split(), self.harmless.split())


@cache
def record() -> _FlagRecord:
    return cast(_FlagRecord, validated(_FlagRecord, read_yaml(PATH), str(PATH), "", _FlagRecord.model_fields))


class _Options(dict[str, Any]):
    """Megatron's arguments by name (None: of another version), and those made of several (`MADE`)."""

    def __init__(self, args: object) -> None:
        super().__init__(len=len, set=set)
        self._args = args

    def __missing__(self, name: str) -> Any:
        if name in MADE:
            return MADE[name](self._args)
        value = getattr(self._args, name, None)
        return value.name if isinstance(value, Enum) else value


def _router_losses(args: Any) -> tuple[str, ...]:
    kinds = getattr(args, "moe_router_load_balancing_type", None)
    if getattr(args, "num_experts", None) is None or kinds is None:
        return ()
    return tuple(kinds) if isinstance(kinds, list) else (kinds,)


def balances_by_sample(args: Any) -> bool:
    return "seq_aux_loss" in _router_losses(args)


def averages_evaluation(args: Any) -> bool:
    """Whether Megatron averages evaluation over microbatches, not over tokens."""
    return bool(getattr(args, "sft", False)) and args.eval_iters != 0


def layers_by_pattern(args: Any) -> str:
    """Symbols of a hybrid model's layers by its pattern, those that predict further tokens last."""
    given = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None) or ""
    return re.sub("[|/]", "", given)


def _has_gated_delta_net(args: Any) -> bool:
    """Whether attention is a gated delta net in some layers of a GPT."""
    given = (getattr(args, name, None) for name in ("experimental_attention_variant", "linear_attention_type"))
    return "gated_delta_net" in given


def is_hybrid(args: Any) -> bool:
    """Whether a model has layers whose state runs along the sequence."""
    return bool(layers_by_pattern(args)) or _has_gated_delta_net(args)


def sums_trees(args: Any) -> bool:
    """Whether the loss of trees is the weighted sum, divided by no number of tokens."""
    return args.balance_trees == "sum"


MADE = {
    "router_losses": _router_losses,
    "averages_evaluation": averages_evaluation,
    "layers_by_pattern": layers_by_pattern,
    "is_hybrid": is_hybrid,
    "sums_trees": sums_trees,
}


def reasons(args: object, way: Way | None = None) -> list[str]:
    """Why plans cannot run under these arguments; `way`: the reasons of a way of running alone."""
    return [
        rule.told(args)
        for rule in record().refused
        if (way in rule.ways if way else not rule.ways) and rule.holds(args)
    ]


def sentences(args: object, way: Way | None = None) -> list[str]:
    """Sentences for the log, of arguments that work otherwise than one may think; `way`: besides."""
    return [rule.told(args) for rule in record().told if (not rule.ways or way in rule.ways) and rule.holds(args)]


def defaulted(args: object, argv: Sequence[str]) -> list[str]:
    """The sentences of defaults that a command line leaves to us."""
    given = {flag[2:] for flag in _given(argv)}
    return [
        rule.sentence for rule in record().defaults if rule.flags not in given and (not rule.when or rule.holds(args))
    ]


def leave_out(args: argparse.Namespace, configs: Sequence[object]) -> list[str]:
    """Switch off in `args` and `configs` made of them what plans cannot use; sentences for the log."""
    told: list[str] = []
    for rule in record().left_out:
        if not rule.holds(args):
            continue
        told.append(rule.told(args))
        for holder in (args, *configs):
            for name, value in rule.values.items():
                if hasattr(holder, name):
                    setattr(holder, name, value)
    return told


def unreviewed(argv: Sequence[str]) -> list[str]:
    """The flags of a command line that the record does not name and that are not ours."""
    return [flag for flag in _given(argv) if flag[2:] not in record().reviewed and not flag.startswith("--balance-")]


def _given(argv: Sequence[str]) -> list[str]:
    flags = [word.partition("=")[0] for word in argv if word.startswith("--") and len(word) > 2]
    return list(dict.fromkeys(flags))


def unknown(args: object, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Of a command line's unreviewed flags those that may change what plans go by, why; the others."""
    names = unreviewed(argv)
    if not names:
        return {}, []
    parser, fields = _megatrons_parser(), _fields_of_layers()
    own = parser._option_string_actions
    found: dict[str, str] = {}
    for flag in names:
        name = own[flag].dest if flag in own else flag[2:].replace("-", "_")
        default = own[flag].default if flag in own else fields.get(name)
        # Flags of Megatron's own parser, since the record was made of all there were, and those of
        # a script by which Megatron builds its layers; at their defaults they change nothing.
        if (flag not in own and name not in fields) or getattr(args, name, None) == default:
            continue
        whose = "a flag of this Megatron" if flag in own else "a field of the config that layers are built of"
        found[flag] = f"{whose}, of which nobody looked at what it does to plans"
    return found, [flag for flag in names if flag not in found]


def unknown_fields(config: Any) -> dict[str, str]:
    """The fields of a built model's config that are set, and of which nobody looked at what they do
    to plans; of a class of one's own, its further fields whatever their defaults.
    """
    own, layers = _megatrons_parser()._option_string_actions, _fields_of_layers()
    known = {action.dest for flag, action in own.items() if flag.lstrip("-") in record().reviewed}
    known.update(record().fields.split())
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        unset = (*model_config.UNSET, layers.get(field.name))
        if field.name not in known and not any(value is each or value == each for each in unset):
            found[field.name] = f"set to {str(value)[:60]}, and nobody looked at what it does to plans"
    return found


def _megatrons_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _fields_of_layers() -> dict[str, Any]:
    from megatron.core.transformer import MLATransformerConfig

    found: dict[str, Any] = {}
    for field in dataclasses.fields(MLATransformerConfig):
        made = field.default_factory
        found[field.name] = field.default if made is dataclasses.MISSING else made()
    return found


Device: TypeAlias = Literal["cpu", "cuda"]
DEVICE_OPTION = "--balance-device"

# Megatron's own defaults need a GPU or Transformer Engine. How keys travel is the plan's, so
# `cp_comm_type` changes nothing; Megatron's branch dev builds local layers under no other one.
CPU_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "cp_comm_type": ["all_gather"],
}


def device_of(argv: Sequence[str]) -> Device:
    """The device that the command line asks for, before Megatron is imported. ConfigError: neither."""
    # Megatron's parser is not at hand: it looks at the device while it is imported.
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
    """Megatron's parser with our group, and with defaults that work on a CPU if that is the device."""
    # Some of Megatron's own texts have a bare percent sign, at which `--help` would end in an
    # error.
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\(\w+\)[dfrs])", "%%", action.help)
    group = parser.add_argument_group("balance")
    machine = "A machine of configs/cluster or a YAML, in place of the configuration's and of what the machine says."
    for name, value, text in (
        ("config", "FILE", "YAML that names the planner and its options."),
        ("planner", "NAME", "A planner or a file of configs/planner, in place of the configuration's."),
        ("cluster", "NAME|FILE", machine),
        ("log", "DIR", "Write steps.jsonl and the resolved configuration here."),
    ):
        group.add_argument(f"--balance-{name}", metavar=value, help=text)
    trees = (
        "Read trees of rollouts from position_ids along paths, loss_mask as weights: of a mean over what they count "
        "(default), or of a sum."
    )
    group.add_argument("--balance-trees", nargs="?", const="mean", choices=("mean", "sum"), help=trees)
    told = "cpu runs without a GPU, for tests and demonstrations (slow, and says so)."
    group.add_argument(DEVICE_OPTION, choices=("cpu", "cuda"), default="cuda", help=told)
    from megatron_balance.megatron import cpu

    for rule in record().defaults:
        parser.set_defaults(**rule.values)
    if cpu.installed():
        parser.set_defaults(**CPU_DEFAULTS)
    return parser


# The products take 16 rows at a time; MXFP8 has a scale for every 32 rows and block scaling for
# every 128, and Transformer Engine quantises whole blocks only (`is_quantizable`).
# By `--fp8-recipe`, the number of which the rows of a linear layer's input must be a multiple.
FP8_ROWS: dict[str, int] = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


def row_multiple(args: argparse.Namespace, tensor: int) -> int:
    """Of what number the rows of one of `tensor` TP ranks are a multiple; those added are masked."""
    # Sequence parallelism splits the rows over the tensor-parallel ranks, each of which may quantise
    # its own before they are gathered.
    shares = tensor if args.sequence_parallel else 1
    return shares * (FP8_ROWS[args.fp8_recipe] if args.fp8 is not None else 1)


def check_arguments(args: argparse.Namespace, others: Sequence[str] = ()) -> None:
    """Reject arguments under which plans cannot run, these reasons and `others` in one ConfigError."""
    if not getattr(args, "balance_config", None) and args.yaml_cfg is None:
        raise ConfigError("--balance-config is missing: name a YAML with a planner, such as configs/experiment/*.yaml")
    against = [*reasons(args), *others]
    if against:
        raise ConfigError("; ".join(against))

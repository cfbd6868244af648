"""Reach: which of Megatron's functional test configurations pass our argument checks, and why not.

    python -m tools.reach CHECKOUT [--list]

CHECKOUT: a checkout of Megatron-LM. Reads `tests/functional_tests/test_cases/*/*/model_config.yaml`
and hands the flags of each that pretrains a decoder to the installed Megatron's parser and to our
checks (`megatron/flags.py`, `megatron/data.py`). Files and GPUs are not looked at. A
configuration whose data set cannot be replaced by whole documents starts with `data: script`, and the
report counts those. `--list` names the configurations. Prints a table of suites, then the reasons by
how many configurations each keeps out, and how many it keeps out alone, and the flags that nobody
looked at; those of `--export-*` are Megatron's library for distillation's.
"""

import argparse
import contextlib
import io
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import yaml

SUITES = ("gpt", "hybrid", "mixtral", "moe", "nemotron")
NOT_PRETRAINING = {"inference", "rl", "grpo", "multimodal", "mimo", "upcycling"}
"""Words between the underscores of a configuration's name."""
SET_BY_THE_RUNNER = {"REPEAT": "1", "TOKENIZER_TYPE": "GPTSentencePieceTokenizer"}
"""Variables in configurations that whoever runs them sets: the number of a repetition, a tokenizer."""


def words_of(config: dict[str, Any], single: Collection[str] = ()) -> list[str]:
    """The command line of a test's configuration. A value with blanks, or in brackets, is several
    words, except for the flags `single`, which take one.
    """
    words: list[str] = []
    for flag, value in (config.get("MODEL_ARGS") or {}).items():
        if value is True:
            words.append(flag)
        elif value not in (False, None):
            text = str(value).replace('"', "")
            for name, set_to in SET_BY_THE_RUNNER.items():
                text = text.replace(f"${{{name}}}", set_to)
            several = text.startswith("[") and text.endswith("]")
            words += [flag, *([text] if flag in single else (text[1:-1] if several else text).split())]
    return words


def pretrains(path: Path, config: dict[str, Any]) -> bool:
    flags = config.get("MODEL_ARGS") or {}
    words = path.parent.name.split("_")  # "overlap" and "interleaved" have an rl in them
    return NOT_PRETRAINING.isdisjoint(words) and not {"--train-iters", "--train-samples"}.isdisjoint(flags)


def add_modelopt_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags that Megatron's own script adds where its library for distillation is installed."""
    try:
        from megatron.post_training.arguments import add_modelopt_args  # pyright: ignore[reportMissingImports]
    except ImportError:  # a part of a checkout, not of the package
        return parser
    return add_modelopt_args(parser)


def reasons_of(parser: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], list[str]]:
    """The reasons why a command line does not start, and those why its own data set has to stay."""
    from megatron_balance.megatron import flags
    from megatron_balance.megatron.data import data_reasons, names_corpus

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            args, unknown = parser.parse_known_args(["--balance-config", "balance.yaml", *words])
    except SystemExit:
        return [f"Megatron's parser: {told.getvalue().strip().splitlines()[-1].split('error: ')[-1]}"], []
    except KeyError as error:  # from the type of a flag
        return [f"Megatron's parser: a flag does not take {error}"], []
    if unknown:
        return [f"Megatron's parser: unknown {next(word for word in unknown if word.startswith('--'))}"], []
    found = flags.reasons(args)
    # Validation sets what the parser leaves out: the default of Megatron's own script.
    args.dataloader_type = args.dataloader_type or "single"
    return found, data_reasons(cast(Any, args)) if names_corpus(args) else []


def short(reason: str) -> str:
    return reason.split(": ", maxsplit=1)[0] if not reason.startswith("Megatron") else reason


def report(checkout: Path, *, listing: bool) -> list[str]:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_balance.megatron.flags import add_balance_arguments, unreviewed

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = add_modelopt_arguments(add_balance_arguments(add_megatron_arguments(parser)))
    single = {flag for flag, action in parser._option_string_actions.items() if action.nargs is None}
    lines, every, alone = ["suite      files  pretrain  start"], Counter[str](), Counter[str]()
    named: list[str] = []
    sums, kept = [0, 0, 0], list[str]()
    for suite in SUITES:
        files = sorted(checkout.glob(f"tests/functional_tests/test_cases/{suite}/*/model_config.yaml"))
        configs = [(path, yaml.safe_load(path.read_text())) for path in files]
        chosen = [(path, config) for path, config in configs if pretrains(path, config)]
        started = 0
        for path, config in chosen:
            words = words_of(config, single)
            found, data = reasons_of(parser, words)
            reasons = list(dict.fromkeys(map(short, found)))
            started += not reasons
            kept += data[:1] if not reasons else ()
            every.update(reasons)
            alone.update(reasons if len(reasons) == 1 else ())
            named.append(f"{suite}/{path.parent.name}: {'starts' if not reasons else '; '.join(reasons)}")
        lines.append(f"{suite:10} {len(files):5} {len(chosen):9} {started:6}")
        sums = [a + b for a, b in zip(sums, (len(files), len(chosen), started), strict=True)]
    lines += [f"{'all':10} {sums[0]:5} {sums[1]:9} {sums[2]:6}", f"with 'data: script': {len(kept)}"]
    lines += [f"  {reason}" for reason in dict.fromkeys(kept)]
    lines += ["", "keeps out  alone  reason"]
    lines += [f"{count:9} {alone[reason]:6}  {reason}" for reason, count in every.most_common()]
    flags = sorted(flag for flag in parser._option_string_actions if flag.startswith("--"))
    lines += ["", f"flags that nobody looked at: {' '.join(unreviewed(flags)) or 'none'}"]
    return lines + (["", *named] if listing else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if not (args.checkout / "tests" / "functional_tests" / "test_cases").is_dir():
        parser.error(f"{args.checkout}: expected a checkout of Megatron-LM, with tests/functional_tests/test_cases")
    print("\n".join(report(args.checkout, listing=args.list)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

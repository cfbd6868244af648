"""Reach: which of Megatron's functional test configurations pass our argument checks, and why not; and
what becomes of flags whose effect comes late.

    python -m tools.reach CHECKOUT [--list] [--before]
    python -m tools.reach --late [NAME ...]

CHECKOUT: a checkout of Megatron-LM. Reads `tests/functional_tests/test_cases/*/*/model_config.yaml`
and hands the flags of each that pretrains a decoder to the installed Megatron's parser and to our
checks (`megatron/flags.py`, `megatron/data.py`). Files and GPUs are not looked at. A
configuration whose data set cannot be replaced by whole documents starts with `data: script`, and the
report counts those. `--before`: with the flags that had to be given by hand while they were not set
for the user. `--list` names the configurations. Prints a table of suites, then the reasons by how
many configurations each keeps out, and how many it keeps out alone, and the flags that nobody looked
at; those of `--export-*` are Megatron's library for distillation's.

`--late` trains a small GPT on CPU with each reviewed flag that acts at an evaluation, a checkpoint,
the end or every so many steps (`LATE`): with `zeppelin` on two ranks and with `te_ring` on one. Runs
that save go on from what they saved. A line for each: how it ended; the largest relative difference
of a step's loss and of an evaluation from one rank's under the same flag; and the end of the log where
a run failed. NAME: only those whose name has it. Ten seconds a run, a minute where the flag waits for
one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any, TypeAlias, cast

import yaml

SUITES = ("gpt", "hybrid", "mixtral", "moe", "nemotron")
NOT_PRETRAINING = {"inference", "rl", "grpo", "multimodal", "mimo", "upcycling"}
"""Words between the underscores of a configuration's name."""
SET_BY_THE_RUNNER = {"REPEAT": "1", "TOKENIZER_TYPE": "GPTSentencePieceTokenizer"}
"""Variables in configurations that whoever runs them sets: the number of a repetition, a tokenizer."""
BEFORE = ("--calculate-per-token-loss", "--attention-dropout", "--moe-token-dispatcher-type")
"""Flags that had to be given while they were not set for the user."""


Flags: TypeAlias = dict[str, Any]

SAVED: Flags = {"save": "FOLDER", "save-interval": 2, "exit-interval": 2}
ON: Flags = {"load": "FOLDER"}
BOARD: Flags = {"tensorboard-dir": "FOLDER/board"}
MOE: Flags = {"num-experts": 4, "ffn-hidden-size": 32, "moe-aux-loss-coeff": 1e-2}
ENDED: Flags = {**SAVED, "exit-interval": None, "train-iters": 100_000, "TERM": 3}
AFTER: Flags = {**ON, "train-iters": 100_000, "exit-interval": 8}
LATE: dict[str, tuple[Flags, ...]] = {
    "nothing": ({},),
    "nothing, with experts": (MOE,),
    "eval-interval": ({"eval-interval": 1},),
    "eval-iters 0": ({"eval-iters": 0},),
    "eval-global-batch-size": ({"eval-global-batch-size": 4},),
    "eval-micro-batch-size": ({"eval-micro-batch-size": 2},),
    "start-eval-at-iter": ({"start-eval-at-iter": 3},),
    "full-validation": ({"full-validation": True},),
    "multiple-validation-sets": ({"multiple-validation-sets": True},),
    "validation-set-names": ({"validation-set-names": "one"},),
    "test-mode": ({"test-mode": True},),
    "skip-train": ({**SAVED, "skip-train": None}, {**ON, "skip-train": True}),
    "manual-gc": ({"manual-gc": True, "manual-gc-interval": 2},),
    "no-manual-gc-eval": ({"manual-gc": True, "manual-gc-interval": 2, "no-manual-gc-eval": True},),
    "save": (SAVED, ON),
    "persistent-save-interval": ({**SAVED, "save-interval": None, "persistent-save-interval": 2}, ON),
    "save-retain-interval": ({**SAVED, "save-interval": 1, "save-retain-interval": 2}, ON),
    "async-save": ({**SAVED, "async-save": True}, ON),
    "async-strategy mcore": ({**SAVED, "async-save": True, "async-strategy": "mcore"}, ON),
    "use-persistent-ckpt-worker": (
        {**SAVED, "async-save": True, "async-strategy": "mcore", "use-persistent-ckpt-worker": True},
        ON,
    ),
    "non-persistent global": (
        {**SAVED, "save-interval": 100, "non-persistent-save-interval": 2, "non-persistent-ckpt-type": "global"},
        {**ON, "non-persistent-ckpt-type": "global", "save": "FOLDER", "save-interval": 100},
    ),
    "non-persistent local": (
        {
            **SAVED,
            "save-interval": 100,
            "non-persistent-save-interval": 2,
            "non-persistent-ckpt-type": "local",
            "non-persistent-local-ckpt-dir": "FOLDER/local",
        },
        {**ON, "non-persistent-ckpt-type": "local", "non-persistent-local-ckpt-dir": "FOLDER/local"},
    ),
    "ckpt-format torch": ({**SAVED, "ckpt-format": "torch"}, {**ON, "ckpt-format": "torch"}),
    "ckpt-format torch_dcp": ({**SAVED, "ckpt-format": "torch_dcp"}, {**ON, "ckpt-format": "torch_dcp"}),
    "ckpt-convert-format": (
        {**SAVED, "ckpt-format": "torch"},
        {**ON, "ckpt-format": "torch", "ckpt-convert-format": "torch_dist", "ckpt-convert-save": "FOLDER/converted"},
    ),
    "no-save-optim": ({**SAVED, "no-save-optim": True}, {**ON, "no-load-optim": True}),
    "no-save-rng": ({**SAVED, "no-save-rng": True}, {**ON, "no-load-rng": True}),
    "no-ckpt-fully-parallel-save": ({**SAVED, "no-ckpt-fully-parallel-save": True}, ON),
    "ckpt-fully-parallel-load": (SAVED, {**ON, "ckpt-fully-parallel-load": True}),
    "ckpt-assume-constant-structure": ({**SAVED, "save-interval": 1, "ckpt-assume-constant-structure": True}, ON),
    "dist-ckpt-optim-fully-reshardable": (
        {**SAVED, "use-distributed-optimizer": True, "dist-ckpt-optim-fully-reshardable": True},
        {**ON, "use-distributed-optimizer": True, "dist-ckpt-optim-fully-reshardable": True},
    ),
    "dist-ckpt-save-pre-mcore-014": ({**SAVED, "dist-ckpt-save-pre-mcore-014": True}, ON),
    "dist-ckpt-strictness": (SAVED, {**ON, "dist-ckpt-strictness": "raise_all"}),
    "verify-integrity": ({**SAVED, "verify-integrity": True}, {**ON, "verify-integrity": True}),
    "log-progress": (
        {**SAVED, "log-progress": True},
        {**ON, "save": "FOLDER", "save-interval": 2, "log-progress": True},
    ),
    "use-checkpoint-args": (SAVED, {**ON, "use-checkpoint-args": True}),
    "use-checkpoint-opt-param-scheduler": (SAVED, {**ON, "use-checkpoint-opt-param-scheduler": True}),
    "override-opt-param-scheduler": (SAVED, {**ON, "override-opt-param-scheduler": True}),
    "ckpt-step": ({**SAVED, "save-interval": 1}, {**ON, "ckpt-step": 1}),
    "pretrained-checkpoint": (SAVED, {"pretrained-checkpoint": "FOLDER"}),
    "finetune": (SAVED, {**ON, "finetune": True}),
    "exit-on-missing-checkpoint": (SAVED, {**ON, "exit-on-missing-checkpoint": True}),
    "auto-detect-ckpt-format": (SAVED, {**ON, "auto-detect-ckpt-format": True}),
    "save-params-interval": ({**SAVED, "save-params-interval": 2},),
    "save-activations-interval": ({**SAVED, "save-activations-interval": 2},),
    "save-wgrads-interval": ({**SAVED, "save-wgrads-interval": 2},),
    "save-dgrads-interval": ({**SAVED, "save-dgrads-interval": 2},),
    "save-tokens-per-expert-interval": ({**SAVED, **MOE, "save-tokens-per-expert-interval": 2},),
    "exit-interval": ({"exit-interval": 3},),
    "exit-duration-in-mins": ({"exit-duration-in-mins": 1, "train-iters": 100_000, "eval-interval": 50},),
    "exit-signal-handler": ({**ENDED, "exit-signal-handler": True}, AFTER),
    "exit-signal": ({**ENDED, "exit-signal-handler": True, "exit-signal": "SIGTERM"}, AFTER),
    "exit-signal-handler-for-dataloader": (
        {"exit-signal-handler": True, "exit-signal-handler-for-dataloader": True, "num-workers": 1, "TERM": 3}
        | {"train-iters": 100_000},
    ),
    "exit-signal-handler-for-training": (
        {"exit-signal-handler-for-training": True, "TERM": 3, "train-iters": 100_000},
    ),
    "check-weight-hash": ({"check-weight-hash-across-dp-replicas-interval": 2},),
    "train-sync-interval": ({"train-sync-interval": 2},),
    "empty-unused-memory-level": ({"empty-unused-memory-level": 2},),
    "distributed-timeout-seconds-after-init": ({"distributed-timeout-seconds-after-init": 60},),
    "profile": (
        {"profile": True, "use-pytorch-profiler": True, "profile-step-start": 1, "profile-step-end": 3}
        | BOARD
        | {"profile-ranks": 0},
    ),
    "record-memory-history": ({"record-memory-history": True, "memory-snapshot-path": "FOLDER/memory"},),
    "log-straggler": ({"log-straggler": True},),
    "log-energy": ({"log-energy": True},),
    "log-memory-interval": ({"log-memory-interval": 2},),
    "log-device-memory-used": ({"log-memory-interval": 2, "log-device-memory-used": True},),
    "log-num-zeros-in-grad": ({"log-num-zeros-in-grad": True},),
    "log-params-norm": ({"log-params-norm": True},),
    "log-throughput": ({"log-throughput": True},),
    "log-interval 2": ({"log-interval": 2},),
    "tensorboard": (
        {**BOARD, "log-timers-to-tensorboard": True, "log-memory-to-tensorboard": True}
        | {"log-world-size-to-tensorboard": True, "log-validation-ppl-to-tensorboard": True, "timing-log-level": 2},
    ),
    "timing-log-option all": ({"timing-log-level": 2, "timing-log-option": "all"},),
    "no-barrier-with-level-1-timing": ({"timing-log-level": 1, "no-barrier-with-level-1-timing": True},),
    "moe-per-layer-logging": ({**MOE, "moe-per-layer-logging": True, **BOARD},),
    "moe-routing-trace-path": ({**MOE, "moe-routing-trace-path": "FOLDER/routes"},),
    "gpu-sniff-test-interval": ({"gpu-sniff-test-interval": 2},),
    "config-logger-dir": ({"config-logger-dir": "FOLDER/config"},),
    "dump-param-to-param-group-map": ({"dump-param-to-param-group-map": "FOLDER/groups.json"},),
    "rerun-mode disabled": ({"rerun-mode": "disabled"},),
    "rerun-mode report_stats": ({"rerun-mode": "report_stats"},),
    "check-for-spiky-loss": ({"check-for-spiky-loss": True},),
    "error-injection": ({"error-injection-rate": 1, "error-injection-type": "transient_error"},),
    "rampup-batch-size": (
        {"rampup-batch-size": (2, 2, 4), "global-batch-size": 4, "train-iters": None}
        | {"train-samples": 12, "lr-decay-iters": None, "lr-decay-samples": 12},
    ),
    "step-batch-size-schedule": (
        {"step-batch-size-schedule": "0:2 2048:4", "global-batch-size": None}
        | {"train-iters": None, "train-samples": 12, "lr-decay-iters": None, "lr-decay-samples": 12},
    ),
    "decrease-batch-size-if-needed": ({"decrease-batch-size-if-needed": True, "global-batch-size": 2},),
    "train-samples": ({"train-iters": None, "train-samples": 8, "lr-decay-iters": None, "lr-decay-samples": 8},),
    "phase-transition-iterations": (
        {"phase-transition-iterations": 2, "train-iters": None, "train-samples": 8}
        | {"lr-decay-iters": None, "lr-decay-samples": 8},
    ),
    "adlr-autoresume": ({"adlr-autoresume": True, "adlr-autoresume-interval": 2},),
    "enable-ft-package": ({"enable-ft-package": True, "calc-ft-timeouts": True, "save": "FOLDER", "save-interval": 2},),
    "run-workload-inspector-server": ({"run-workload-inspector-server": True},),
    "freeze-all-layers": ({"freeze-all-layers": True},),
    "fp16": ({"fp16": True, "train-iters": 14, "lr-decay-iters": 14},),
}
"""By name, the flags of runs one after the other. FOLDER: of the case. TERM: not Megatron's; all ranks
are sent SIGTERM once so many steps are logged."""
LATE_RUN: Flags = {
    "split": "80,10,10",
    "train-iters": 4,
    "lr-decay-iters": 4,
    "eval-iters": 2,
    "eval-interval": 2,
    "ckpt-format": "torch_dist",
}


class Late:
    """Runs of `LATE`."""

    def __init__(self, folder: Path) -> None:
        from tests.megatron.conftest import DOCUMENT_LENGTHS, train_with, write_corpus
        from tests.support.megatron_run import Trainer

        self._folder, self._made = folder, 0
        corpus = write_corpus(folder / "corpus", DOCUMENT_LENGTHS * 40)
        self.trainer = Trainer()
        self._train = train_with(self.trainer, corpus, cast(Any, self))

    def mktemp(self, name: str) -> Path:
        """A new folder, as pytest's factory makes it."""
        self._made += 1
        path = self._folder / f"{name}{self._made}"
        path.mkdir()
        return path

    def run(self, runs: Sequence[Flags], num_ranks: int) -> tuple[str, dict[int, float], list[float]]:
        """How a case ended, empty: well; the loss of each step; and evaluations."""
        folder, losses, evaluations = self.mktemp("case"), dict[int, float](), list[float]()
        for flags in runs:
            given = {name: self._filled(value, folder) for name, value in {**LATE_RUN, **flags}.items()}
            lines, results = given.pop("TERM", None), list[Any]()
            ends = {} if lines is None else {"kill_after": lines, "kill_with": int(SIGTERM), "grace_s": 60.0}
            planner = {"name": "zeppelin"} if num_ranks > 1 else {"name": "te_ring"}
            run = self._train(
                num_ranks,
                planner,
                given,
                expect=results.append,
                deadline_s=240.0,
                spawns="use-persistent-ckpt-worker" in flags,
                **ends,
            )
            losses |= {step["step"]: step["loss"] for step in run.steps}
            log = run.result.log(num_ranks - 1)
            evaluations += map(float, re.findall(r"validation loss at .*?lm loss value: (\S+)", log))
            if run.result.failed is not None:
                said = [line for line in run.result.log(run.result.failed).splitlines() if "rror" in line]
                return f"{run.result.codes}: {(said or ['no error is named'])[-1].strip()[:200]}", losses, evaluations
        return "", losses, evaluations

    @staticmethod
    def _filled(value: Any, folder: Path) -> Any:
        return value.replace("FOLDER", str(folder)) if isinstance(value, str) else value


def late(names: Sequence[str]) -> int:
    """Run the cases, a line for each; 1 if one differs."""
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = Late(Path(folder))
        for name, flags in LATE.items():
            if names and not any(each in name for each in names):
                continue
            ended, losses, evaluations = runs.run(flags, 2)
            if ended:
                print(f"{name:36} {ended}", flush=True)
                continue
            one, wanted, evaluated = runs.run(flags, 1)
            common = sorted(losses.keys() & wanted.keys())
            apart = max((_apart(losses[step], wanted[step]) for step in common), default=0.0)
            between = max(map(_apart, evaluations, evaluated), default=0.0)
            differ += max(apart, between) > 1e-5
            told = f"{len(common)} steps {apart:.0e}, {min(len(evaluations), len(evaluated))} evaluations {between:.0e}"
            print(f"{name:36} {told}{f'; one rank: {one}' if one else ''}", flush=True)
        runs.trainer.close()
    return int(differ > 0)


def _apart(first: float | None, second: float | None) -> float:
    if first is None or second is None:
        return 0.0 if first is second else math.inf
    return abs(first - second) / abs(second)


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
    """Whether a configuration pretrains a decoder."""
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
    """A reason without its explanation."""
    return reason.split(": ", maxsplit=1)[0] if not reason.startswith("Megatron") else reason


def report(checkout: Path, *, listing: bool, before: bool) -> list[str]:
    """The lines of the report."""
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
            if before:
                reasons += [
                    f"{flag} is not given"
                    for flag in BEFORE
                    if flag not in words and ("moe" not in flag or "--num-experts" in words)
                ]
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
    """Print the report of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--late", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--before", action="store_true")
    args = parser.parse_args()
    if args.late is not None:
        return late(args.late)
    if args.checkout is None or not (args.checkout / "tests" / "functional_tests" / "test_cases").is_dir():
        parser.error(f"{args.checkout}: expected a checkout of Megatron-LM, with tests/functional_tests/test_cases")
    print("\n".join(report(args.checkout, listing=args.list, before=args.before)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`megatron-balance report`: one self-contained HTML page: where the time of a step goes, what
limits it, and what would help.

Of a simulated comparison of planners, with --steps of what a training run logged, with --rl of a step
of reinforcement learning.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_balance.cli import inputs, simulation
from megatron_balance.cli.compare import baseline_of, heads_exchanged, of_heads, of_sizes
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text, read_text
from megatron_balance.planners import PLANNERS

if TYPE_CHECKING:
    from megatron_balance.lab.bench import Inputs
    from megatron_balance.lab.report.run import RealBatches

# Options that say lengths.
GIVEN = ("lengths", "lengths_file", "trees", "dataset", "tokens", "batches", "global_tokens")
HELP = "one HTML page: where the time goes, what limits it, what would help"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE.html", help="the page to write; it needs no network")
    ran = "report a training run: its --balance-log folder or steps.jsonl; twice: two runs side by side"
    add("--steps", type=Path, action="append", default=[], metavar="PATH", help=ran)
    add(
        "--run",
        dest="trained",
        type=Path,
        metavar="PATH",
        help="simulate every planner on the batches of a training run: its --balance-log folder or steps.jsonl; "
        "cluster, model, microbatches and the baseline are the run's unless given",
    )
    planned = "a step that rl.plan_step planned, as its JSON (ir.step.to_json), on --cluster with --model: its passes"
    add("--rl", type=Path, metavar="STEP.json", help=planned)
    inputs.add_options(parser)
    simulation.add_options(parser, modes=False)
    over = f"the planner that others are held against (default {baseline_of(tuple(PLANNERS))})"
    add("--baseline", metavar="NAME", help=over)
    add("--json", action="store_true", help="also print the page's figures as one JSON document on stdout")
    # `--steps` refuses every other option; argparse does not say which were given.
    parser.set_defaults(defaults={action.dest: action.default for action in parser._actions})  # pyright: ignore[reportPrivateUsage]


def run(args: argparse.Namespace) -> int:
    from megatron_balance.lab.report import page, simulated, trained

    page_on_stdout = inputs.check(args)
    library = page.plot_library()  # before minutes of simulation
    if args.out.is_dir():
        raise ConfigError(f"--out {args.out}: is a folder; give a file to write, such as {args.out / 'report.html'}")
    if not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: there is no folder {args.out.parent}")
    if args.rl is not None and not args.steps:
        document, text = _rl(args, library)
    else:
        document = _trained(args) if args.steps else _simulated(args)
        text = (trained if args.steps else simulated).page(document, library)
    inputs.write(args.out, text)
    if page_on_stdout:
        return 0
    if args.json:
        print(json_text(document))
    else:
        for sentence in document["answer"]:
            print(sentence)
        print(f"{args.out}: {len(text.encode()) / 1e6:.1f} MB, one file that any browser opens without a network")
    return 0


def _trained(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_balance.lab.report import run

    for name, default in args.defaults.items():
        if name not in ("out", "steps", "json", "help") and getattr(args, name) != default:
            option = {"options": "-o", "trained": "--run"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{option} does not go with --steps, which reports what was measured; drop one of them")
    if len(args.steps) > 2:
        raise ConfigError(f"--steps is given {len(args.steps)} times; one run, or two to be held against each other")
    return run.document(args.steps)


def _rl(args: argparse.Namespace, library: str) -> tuple[dict[str, Any], str]:
    from megatron_balance.ir.step import from_json
    from megatron_balance.lab.report import rl_step

    for name in ("planner", "trained", "microbatches", "tokens_per_rank", *GIVEN):
        if getattr(args, name) != args.defaults[name]:
            option = {"trained": "--run"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{option} does not go with --rl, whose plan says it; drop one of them")
    try:
        step = from_json(read_text(args.rl))
    except OSError as error:
        raise ConfigError(f"--rl {args.rl}: cannot be read ({error.strerror})") from None
    args.planner, args.microbatches = ["te_ring"], len(step.plans)
    args.tokens_per_rank = max(plan.num_tokens for plan in step.plans)  # memory was the driver's to ask
    machine = simulation.bench(args, simulation.read(args, [plan.lengths for plan in step.plans])).machine
    made = {plan.num_ranks for plan in step.plans}
    if made != {machine.num_ranks}:
        raise ConfigError(
            f"--rl {args.rl}: planned for {sorted(made)} ranks, and --cluster has {machine.num_ranks}; give --ranks, "
            "with --tensor-parallel and --pipeline, as it was planned"
        )
    found = rl_step.document(step, machine)
    return found, rl_step.page(found, library)


def _simulated(args: argparse.Namespace) -> dict[str, Any]:
    from megatron_balance.lab.bench import standing
    from megatron_balance.lab.report.study import study
    from megatron_balance.planning.choice import choose_planner

    explicit = bool(args.planner)
    if not explicit:
        args.planner = list(PLANNERS)
    real = None if args.trained is None else _real(args)
    given = simulation.read(args, None if real is None else real.lengths)
    bench = simulation.bench(args, given)
    if args.baseline is not None and args.baseline not in PLANNERS:
        raise ConfigError(f"--baseline {args.baseline}: no such planner; one of {', '.join(PLANNERS)}")
    of_run = given.config.planner if real is not None else None
    baseline = args.baseline or (of_run.name if of_run is not None else baseline_of(tuple(PLANNERS)))
    choices = list(given.planners)
    if baseline not in (choice.name for choice in choices):
        choices.insert(0, choose_planner(baseline, {"tokens_per_rank": given.tokens_per_rank}))
    costs = "" if args.costs is None else str(args.costs)
    found = study(bench, choices, baseline, explicit=explicit, lengths=_lengths_from(args, given), costs=costs)
    base = next(row for row in found["rows"] if row["planner"] == baseline)
    by_heads = heads_exchanged(bench, choices)
    said = (
        of_sizes(found["rows"], base),
        "" if by_heads is None else of_heads(by_heads, min(found["rows"], key=standing)),
    )
    first, *others = found["answer"]
    answer = [first, *(f"{each} (simulated)." for each in said if each), *others]
    if real is not None:
        answer.append(real.sentence(baseline, base["step_s"]))
    return {**found, "answer": answer, "baseline_sizes": base["sizes"]}


def _real(args: argparse.Namespace) -> "RealBatches":
    """The batches of a run; cluster, model and configuration are the run's unless given."""
    from megatron_balance.lab.report.run import real_batches

    for name in GIVEN:
        if getattr(args, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} does not go with --run, whose batches are the run's; drop one")
    real = real_batches(args.trained)
    args.cluster = args.cluster or real.beside("cluster.yaml")
    args.model = args.model or real.beside("model.yaml")
    args.config = args.config or (Path(found) if (found := real.beside("config.yaml")) else None)
    if args.microbatches is None:
        args.microbatches = real.microbatches
    return real


def _lengths_from(args: argparse.Namespace, given: "Inputs") -> str:
    drawn = given.config.dataset
    if args.trained is not None:
        return f"the training run {args.trained}"
    if args.lengths is not None:
        return "given one by one"
    if args.lengths_file is not None:
        return f"the file {args.lengths_file}"
    if args.trees is not None:
        return f"the trees of {args.trees}"
    if args.dataset is not None or drawn is not None:
        drawn = inputs.dataset(args, drawn)
        return f"drawn from {drawn.name}, seed {drawn.seed}"
    return f"the configuration {given.config.source}"

"""The inputs that verbs share: which lengths, for which ranks and model, by which planners."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from megatron_balance.analysis.memory import Recompute
from megatron_balance.analysis.step_memory import stages_of
from megatron_balance.config import (
    DEFAULT_CLUSTER,
    DEFAULT_MODEL,
    ClusterChoice,
    DatasetConfig,
    RemapChoice,
    RoutingChoice,
    load_cluster,
    load_model,
    names,
)
from megatron_balance.cost.parallel import wide_ranks
from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.forest import Tree, num_tokens
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import Layers, Solver, When
from megatron_balance.lab.bench import Inputs
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice, Run, capacity, choose_layers, choose_planner, load_config
from megatron_balance.solvers.groups import check_pool
from megatron_balance.strict_yaml import parse_yaml

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def add_options(parser: argparse.ArgumentParser) -> None:
    add, replicas = parser.add_argument, ", ".join(name for name, planner in PLANNERS.items() if planner.replicas)
    add("--planner", action="append", metavar="NAME", default=[], help=f"one of {', '.join(PLANNERS)}; repeatable")
    of_planner = "planner option; PLANNER.KEY=VALUE reaches one of several"
    add("-o", dest="options", action="append", metavar="KEY=VALUE", default=[], help=of_planner)
    add(
        "--routing",
        choices=get_args(When),
        help="send transfers between nodes over all NICs of both: always, where Eq. 1 of Zeppelin says it pays, or "
        f"never (default: {_own(lambda layers: layers.routing)})",
    )
    remap = f"balance tokens outside attention, whatever attention needs (default: {_own(_remap_words)})"
    add("--remap", action=argparse.BooleanOptionalAction, help=remap)
    solvers = f"what finds the remap's moves; all find equally good ones (default {Layers().solver})"
    add("--remap-solver", choices=get_args(Solver), help=solvers)
    add(
        "--once-per-node",
        action=argparse.BooleanOptionalAction,
        help="rows that several ranks of a node need cross its NICs once, where that pays: of tasks that are "
        f"dispatched, and of head exchanges (default: {_own(lambda layers: 'yes' if layers.once_per_node else 'no')})",
    )
    add_machine_options(parser)
    add("--lengths", metavar="4096,512,...", help="sequence lengths of one batch, in tokens; 128k is 131072")
    read = "JSON: [lengths] or [[lengths], ...], one list per batch; or CSV, or lines; .gz and .zst too"
    add("--lengths-file", type=Path, metavar="FILE", help=read)
    shaped = "JSON: batches of trees, by segments [tokens, parent, causal|full] or by rollouts; see docs/trees.md"
    add("--trees", type=Path, metavar="FILE", help=shaped)
    drawn = (
        "draw lengths from a known distribution, data codes, or the documents of a file or folder; or trees, as "
        "rollouts:prompt=16k,responses=64 or agents:turns=40"
    )
    add("--dataset", metavar="NAME|PATH", help=drawn)
    add("--tokens", type=tokens, metavar="N", help="with --dataset: tokens of a batch")
    add("--batches", type=int, metavar="K", help="with --dataset: number of batches (default 1)")
    add("--seed", type=int, metavar="S", help="with --dataset: seed (default 0)")
    held = "tokens a rank can hold (default: what the model leaves of its memory)"
    add("--tokens-per-rank", type=tokens, metavar="L", help=held)
    add(
        "--context-parallel",
        type=int,
        metavar="C",
        help=f"ranks of a data-parallel replica, for planners that keep Megatron's replicas: {replicas} (default: the "
        "fewest that hold the longest sequence; simulate, compare and report: of the sizes that hold it, the fastest "
        "that fits)",
    )
    add("--config", type=Path, metavar="FILE", help="all of the above in one YAML; options on the command line win")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    clusters, models = (", ".join(names(kind)) for kind in ("cluster", "model"))
    add("--cluster", metavar="NAME|FILE", help=f"one of {clusters}, or a YAML (default {DEFAULT_CLUSTER})")
    add("--ranks", type=int, metavar="N", help="number of ranks (default: the cluster's)")
    add("--ranks-per-node", type=int, metavar="P", help="ranks on a node (default: the cluster's)")
    known = f"one of {models}, a YAML, or Transformers' config.json (default {DEFAULT_MODEL})"
    add("--model", metavar="NAME|FILE", help=known)
    refused = "go on with this model type or key of a config.json, which is refused as not known; repeatable"
    add("--accept", action="append", metavar="NAME", default=[], help=refused)
    measured = "plan by a cost table measured by 'profile' (default: data sheets)"
    add("--plan-costs", type=Path, metavar="FILE", help=measured)


def _remap_words(layers: Layers) -> str:
    if not layers.remap:
        return "no remap"
    return "where it pays" if layers.remap_when == "pays" else "remap"


def _own(what: Callable[[Layers], str]) -> str:
    """A setting of each planner's own layers: 'never; zeppelin: pays'."""
    usual = what(Layers())
    return "; ".join([usual, *(f"{name}: {what(p.layers)}" for name, p in PLANNERS.items() if what(p.layers) != usual)])


@dataclass(frozen=True, slots=True)
class StepShape:
    """The step that a rank's memory has to hold, as far as the command line says."""

    tensor_parallel: int = 1
    pipeline: int = 1
    interleave: int = 1
    experts: int = 1
    recompute: Recompute = "none"
    microbatches: int = 1

    def capacity(self, cluster: Cluster, model: Model) -> int:
        stages = stages_of(
            in_stages(model, self.pipeline * self.interleave),
            cluster.num_ranks,
            recompute=self.recompute,
            pipeline=self.pipeline,
            chunks=self.interleave,
            experts=self.experts,
        )
        return capacity(cluster, model, stages, self.microbatches)


def in_stages(model: Model, chunks: int) -> Model:
    """The model with as many layers as fill all chunks of the pipeline."""
    # The fullest sets the pace; jobs leave the places that are over to embedding and logits
    # (`--pipeline-model-parallel-layout`).
    chunks = max(1, chunks)
    return replace(model, num_layers=-(-model.num_layers // chunks) * chunks)


def read(
    args: argparse.Namespace, shape: StepShape | None = None, lengths: Sequence[Sequence[int]] | None = None
) -> Inputs:
    """The inputs of a step of that shape; `lengths`: of the batches, where they are known already."""
    config, shape = _config(args), shape or StepShape()
    cluster, model = machine(args, shape.tensor_parallel)
    model = replace(model, gradient_wire=config.gradient_wire, expert_split=max(1, shape.experts))
    check_positive(args, "tokens_per_rank")
    batches = _batches(args, config) if lengths is None else _of_lengths(lengths)
    chosen = _planners(args, config)
    told = [choice.options.tokens_per_rank for choice in chosen if choice.options.tokens_per_rank is not None]
    default = shape.capacity(cluster, model) if len(told) < len(chosen) else 0
    planners = tuple(
        replace(each, options=replace(each.options, tokens_per_rank=each.options.tokens_per_rank or default))
        for each in chosen
    )
    tokens_per_rank = min(choice.options.tokens_per_rank for choice in planners)
    full = replace(shape, recompute="full")
    _check_capacity(
        batches, cluster, planners, "" if told else _whence(tokens_per_rank, shape, full.capacity(cluster, model))
    )
    plan_costs = args.plan_costs or config.plan_costs
    assumed, width = _assumed(args, config, cluster, model), shape.tensor_parallel
    return Inputs(batches, cluster, model, planners, tokens_per_rank, config, assumed, plan_costs, width)


def _config(args: argparse.Namespace) -> Run:
    return load_config(args.config) if args.config else Run(source="command line")


def machine(args: argparse.Namespace, tensor_parallel: int) -> tuple[Cluster, Model]:
    """The cluster, whose ranks are `tensor_parallel` GPUs, and the model."""
    config = _config(args)
    model = load_model(args.model, args.accept) if args.model else config.model or load_model(DEFAULT_MODEL)
    check_positive(args, "ranks", "ranks_per_node")
    choice = load_cluster(args.cluster) if args.cluster else config.cluster or ClusterChoice({})
    gpus = choice.build(num_ranks=args.ranks, ranks_per_node=args.ranks_per_node)
    return wide_ranks(gpus, tensor_parallel), model


def _assumed(args: argparse.Namespace, config: Run, cluster: Cluster, model: Model) -> str:
    """The parts of model and cluster that were assumed: 'llama-7b on h200 assumed', or nothing."""
    parts: list[str] = []
    if not args.model and config.model is None:
        parts.append(model.name)
    if not args.cluster and (config.cluster is None or not config.cluster.names_machine):
        # Ranks may be given without a cluster; links and memory are then still the default's.
        parts.append(f"on {cluster.name}" if parts else cluster.name)
    return f"{' '.join(parts)} assumed" if parts else ""


def _batches(args: argparse.Namespace, config: Run) -> tuple[Batch, ...]:
    # Reading and drawing need numpy; --help does not.
    from megatron_balance.workloads.lengths import draw, read_lengths
    from megatron_balance.workloads.trees import draw_trees, is_trees, read_trees

    sources = ("lengths", "lengths_file", "trees", "dataset")
    given = [name for name in sources if getattr(args, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"--{given[0].replace('_', '-')} and --{given[1].replace('_', '-')} are both given; use one")
    has_dataset = args.dataset is not None or (config.dataset is not None and not given)
    check_beside(args, has_dataset, "--dataset NAME", "tokens", "batches", "seed")
    if args.lengths is not None:
        return _of_lengths([_numbers(args.lengths)])
    if args.lengths_file is not None:
        return _of_lengths(read_lengths(args.lengths_file))
    if args.trees is not None:
        return _of_trees(read_trees(args.trees))
    if args.dataset is not None or config.dataset is not None:
        drawn = dataset(args, config.dataset)
        if is_trees(drawn.name):
            return _of_trees(draw_trees(drawn.name, drawn.tokens, drawn.batches, drawn.seed))
        return _of_lengths(draw(drawn.name, drawn.tokens, drawn.batches, drawn.seed))
    if config.lengths is not None:
        several = [entry for entry in config.lengths if isinstance(entry, list)]
        return _of_lengths(several or [[entry for entry in config.lengths if isinstance(entry, int)]])
    if config.lengths_file is not None:
        return _of_lengths(read_lengths(config.lengths_file))
    if config.trees is not None:
        return _of_trees(read_trees(config.trees))
    raise ConfigError(
        "no sequence lengths to plan for; give --lengths 4096,512,..., --lengths-file FILE, --trees FILE or --dataset "
        "NAME --tokens N"
    )


def _of_lengths(lengths: Iterable[Sequence[int]]) -> tuple[Batch, ...]:
    return tuple(Batch(tuple(each)) for each in lengths)


def _of_trees(trees: Iterable[tuple[Tree, ...]]) -> tuple[Batch, ...]:
    return tuple(Batch(tuple(map(num_tokens, each)), each) for each in trees)


def dataset(args: argparse.Namespace, given: DatasetConfig | None) -> DatasetConfig:
    """The data set of the configuration with what the command line changes."""
    same = given is not None and args.dataset in (None, given.name)
    keys: dict[str, Any] = given.model_dump() if given is not None and same else {}
    for option, key in (("dataset", "name"), ("tokens", "tokens"), ("batches", "batches"), ("seed", "seed")):
        if getattr(args, option) is not None:
            keys[key] = getattr(args, option)
    _positive("--tokens", keys.get("tokens"))
    _positive("--batches", keys.get("batches"))
    return DatasetConfig(**keys)


def _numbers(text: str) -> list[int]:
    values: list[int] = []
    for place, word in enumerate(text.split(",")):
        try:
            values.append(tokens(word))
        except argparse.ArgumentTypeError:
            expected = "expected whole numbers of tokens such as 4096,512,128k"
            raise ConfigError(f"--lengths: entry {place} is {word.strip()!r}; {expected}") from None
    return values


def tokens(word: str) -> int:
    """A number of tokens: 4096, 128k (of 1,024), 1m (of 1,024 k)."""
    from megatron_balance.workloads.lengths import tokens_of

    number = tokens_of(word)
    if number is None:
        raise argparse.ArgumentTypeError(f"expected whole tokens such as 4096 or 128k, got {word.strip()!r}")
    return number


def _planners(args: argparse.Namespace, config: Run) -> list[PlannerChoice]:
    configured = config.planner
    wanted: list[str] = args.planner or ([configured.name] if configured else [])
    if not wanted:
        raise ConfigError(f"no planner; give --planner NAME, one of {', '.join(PLANNERS)}")
    for name in wanted:
        if wanted.count(name) > 1:
            raise ConfigError(f"--planner {name} is given twice")
    options = _options(args.options, wanted)
    check_positive(args, "context_parallel")
    if args.context_parallel is not None and not any(name in PLANNERS and PLANNERS[name].replicas for name in wanted):
        raise ConfigError(
            f"--context-parallel {args.context_parallel} goes with planner "
            f"{' or '.join(name for name, planner in PLANNERS.items() if planner.replicas)}, which keeps replicas; "
            f"{', '.join(wanted)} decides for itself which ranks share a sequence"
        )
    chosen: list[PlannerChoice] = []
    for name in wanted:
        keys = dict(configured.given) if configured is not None and configured.name == name else {}
        # --tokens-per-rank is what memory holds, for all; -o tokens_per_rank asks for a plan of so
        # many.
        if args.tokens_per_rank is not None:
            keys.pop("tokens_per_rank", None)
        if args.context_parallel is not None and name in PLANNERS and PLANNERS[name].replicas:
            keys["context_parallel"] = args.context_parallel
        choice = choose_planner(name, keys | options[name], f"--planner {name}")
        held = choice.options.tokens_per_rank or args.tokens_per_rank
        chosen.append(
            replace(choice, options=replace(choice.options, tokens_per_rank=held), layers=_layers(args, config, name))
        )
    if args.remap_solver is not None and not any(choice.layers.remap for choice in chosen):
        none = f"which {', '.join(wanted)} leaves out; add --remap"
        raise ConfigError(f"--remap-solver {args.remap_solver} goes with a remap, {none}")
    return chosen


def _layers(args: argparse.Namespace, config: Run, name: str) -> Layers:
    """The layers around a planner: its own, but for the configuration, but for the command line."""
    routing, remap = config.routing, config.remap
    if args.routing is not None:
        kept = isinstance(routing, RoutingChoice)
        routing = routing.model_copy(update={"when": args.routing}) if kept else args.routing
    # --remap keeps how the configuration does it.
    if args.remap is not None and not (args.remap and isinstance(remap, RemapChoice)):
        remap = args.remap
    once = config.once_per_node if args.once_per_node is None else args.once_per_node
    layers = choose_layers(name, routing, remap, once)
    return layers if args.remap_solver is None else replace(layers, solver=args.remap_solver)


def _options(given: Sequence[str], wanted: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """`-o KEY=VALUE` per planner; a plain KEY reaches every planner, PLANNER.KEY one of them."""
    options: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    for entry in given:
        key, equals, text = entry.partition("=")
        if not equals or not key:
            raise ConfigError(f"-o {entry}: expected KEY=VALUE, such as -o tokens_per_rank=8192")
        planner, dot, rest = key.partition(".")
        if dot and planner not in wanted:
            among = f"is not among the planners of this run: {', '.join(wanted)}"
            raise ConfigError(f"-o {entry}: planner {planner!r} {among}")
        for name in [planner] if dot else wanted:
            options[name][rest if dot else key] = parse_yaml(text, f"-o {entry}")
    return options


def _whence(tokens_per_rank: int, shape: StepShape, with_full: int) -> str:
    """The end of an error about a capacity that nobody said."""
    said = ". The capacity comes from the model and the cluster's memory; --tokens-per-rank sets it"
    if shape.recompute == "full" or with_full <= tokens_per_rank:
        return said
    return f"{said}, and --recompute full (of simulate, compare and report) makes it {with_full}"


def _check_capacity(batches: Sequence[Batch], cluster: Cluster, planners: Sequence[PlannerChoice], whence: str) -> None:
    """Reject batches of more tokens than hold; `whence`: where the capacity comes from."""
    num_ranks, each = min(((c.num_holders(cluster), c.options.tokens_per_rank) for c in planners), key=prod)
    for number, batch in enumerate(batches):
        try:
            check_pool(batch.lengths, num_ranks, each)
        except InfeasibleError as error:
            which = f"batch {number}: " if len(batches) > 1 else ""
            raise InfeasibleError(f"{which}{error}{whence}") from None


def check_positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        _positive(f"--{name.replace('_', '-')}", getattr(args, name))


def check_beside(args: argparse.Namespace, given: bool, said: str, *names: str) -> None:
    """Refuse options that are read beside `said` alone, which is not given."""
    for name in names:
        if getattr(args, name) is not None and not given:
            raise ConfigError(f"--{name.replace('_', '-')} goes with {said}, which is not given")


def _positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{option} {value}: must be at least 1")


# The output of verbs: JSON, tables, files, progress; a file `-` is standard output.

T = TypeVar("T")
STDOUT = Path("-")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else there")


def check(args: argparse.Namespace, option: str = "--out") -> bool:
    """Whether an option that names a file means standard output, which then holds nothing else."""
    means = getattr(args, option.removeprefix("--").replace("-", "_")) == STDOUT
    if means and args.json:
        raise ConfigError(f"{option} - and --json both write to standard output; leave one out, or name a file")
    return means


def write(path: Path, text: str, option: str = "--out") -> None:
    if path == STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None


def check_folder(args: argparse.Namespace) -> None:
    """Reject an `--out` in a folder that is not there."""
    if args.out and not args.out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: no folder {args.out.parent}")


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """`items`, with a progress bar on stderr where there are several and someone looks."""
    if len(items) < 2:
        return items
    from tqdm import tqdm

    return cast("Iterable[T]", tqdm(items, desc=what, file=sys.stderr, disable=None, leave=False))


def console(width: int = 158) -> "Console":
    """Standard output; `width` of a pipe or a file, which has none of its own."""
    from rich.console import Console

    # No markup: [train] is an extra, not a colour.
    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found.width = width
    return found


def table(
    title: str | None, columns: Iterable[str], left: Collection[str], overflow: Literal["fold", "ellipsis"] = "ellipsis"
) -> "Table":
    """A table without rows, whose columns are set on the right but for those in `left`."""
    from rich.table import Table

    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", overflow=overflow)
    return made

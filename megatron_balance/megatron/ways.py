"""The ways in which a job can run a planner, by Megatron's arguments and the configuration: stages
that attend together, replicas that are pipelines of their own, strategies that training changes
between, latents that travel.
"""

import argparse
from collections.abc import Callable, Sequence
from math import lcm

from megatron_balance.analysis.change import Layouts
from megatron_balance.errors import ConfigError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.strategy import Scheme, Strategy
from megatron_balance.megatron import flags, ping_pong
from megatron_balance.planning import choice
from megatron_balance.planning.choice import Run


def way_reasons(args: argparse.Namespace, config: Run) -> list[str]:
    """The reasons why the planner cannot run under these arguments, of all ways in which it may."""
    reasons, layout = list[str](), layout_of(args)
    # One planner of several may be asked for in each way; every check raises for its own.
    checks: tuple[Callable[[], object], ...] = (
        lambda: _check_samples(args, config),
        lambda: attends_jointly(args, config),
        lambda: runs_pipelines(args, config),
        lambda: candidates_of(args, config, layout) and layouts_of(args, config, layout),
        lambda: ping_pong.wanted(args, config),
        lambda: _check_trees(args, config, layout),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            reasons.append(str(error))
    if config.latent_kv is True:
        reasons += flags.reasons(args, "latent_kv") if reasons else latent_reasons(args, config)
    return list(dict.fromkeys(reasons))


def idle_reason(args: argparse.Namespace, config: Run, cluster: Cluster) -> str | None:
    """Why the planner has nothing to do here, for the log; `cluster`: ranks that attend together."""
    chosen = config.planner
    if chosen is None:
        return None
    name, planner, options = chosen.name, chosen.planner, chosen.options
    runs = f"a step runs as {getattr(options, 'within', 'te_ring')} places it"
    if planner.pipelines:
        if args.data_parallel_size > 1 or candidates_of(args, config, layout_of(args)):
            return None
        return (
            f"planner {name} deals sequences over data-parallel replicas, and there is one: {runs}; choose a "
            "smaller --context-parallel-size, so that there are several"
        )
    if planner.plan_step is not None:
        read = args.micro_batch_size * args.data_parallel_size
        if args.global_batch_size > read:
            return None
        return (
            f"planner {name} moves sequences between the microbatches of a step, and a step has one "
            f"(--global-batch-size {args.global_batch_size}, of which all replicas read {read} at once): {runs}; raise "
            "--global-batch-size"
        )
    if cluster.num_ranks == 1:
        return (
            f"planner {name} places sequences on the ranks that attend together, and there is one: all planners make "
            "the same plan; raise --context-parallel-size, or use more ranks"
        )
    return None if planner.idle is None else planner.idle(options, cluster)


def latent_reasons(args: argparse.Namespace, config: Run) -> list[str]:
    """Why latents cannot travel, by flags and by how the job runs. ConfigError: as `way_reasons`."""
    chosen = config.planner
    parts_heads = None if chosen is None else chosen.planner.parts_heads
    # A rank would attend for layers whose weights it does not have, or with some of the heads, or
    # nobody has tried it.
    ways = (
        (
            attends_jointly(args, config),
            "idle pipeline stages have no weights of other stages' layers; set 'pipeline: stages'",
        ),
        (ping_pong.wanted(args, config), "it does not run as two nano-batches; set 'ping_pong: false'"),
        (
            bool(candidates_of(args, config, layout_of(args))),
            "it does not change between strategies; name one strategy",
        ),
        (config.self_check, "the self-check of a step has no attention over latents; set 'self_check: false'"),
        (
            parts_heads is not None and chosen is not None and parts_heads(chosen.options),
            "the planner parts heads, and all heads come in one latent; choose another planner",
        ),
    )
    of_way = [f"latent_kv: true: {sentence}, or leave it out" for found, sentence in ways if found]
    return [*flags.reasons(args, "latent_kv"), *of_way]


def _check_samples(args: argparse.Namespace, config: Run) -> None:
    """Reject a loss of samples where a planner parts them."""
    if config.planner is None or config.planner.planner.plan_step is None:
        return
    reasons = flags.reasons(args, "microbatches")
    if reasons:
        raise ConfigError(
            f"planner {config.planner.name} makes microbatches of its own, and {'; '.join(reasons)}, or use another "
            "planner"
        )


def _check_trees(args: argparse.Namespace, config: Run, layout: Strategy) -> None:
    """Reject trees where something goes by rows that are no tokens of one sequence."""
    if args.balance_trees is None:
        return
    reasons = flags.reasons(args, "trees")
    if attends_jointly(args, config):
        reasons.append("stages that attend together are not planned for trees; set 'pipeline: stages'")
    if candidates_of(args, config, layout):
        reasons.append("training does not change between strategies with trees; name one strategy, the layout's")
    if reasons:
        raise ConfigError(f"--balance-trees: {'; '.join(reasons)}")


def attends_jointly(args: argparse.Namespace, config: Run) -> bool:
    """Whether all stages' attention is planned together; ConfigError: it shall be, and cannot."""
    if args.pipeline_model_parallel_size == 1 or config.planner is None:
        return False
    if not choice.attends_jointly(config.planner, config.pipeline, "'pipeline: stages'"):
        return False
    if reasons := flags.reasons(args, "joint"):
        raise ConfigError(f"pipeline stages cannot attend together: {'; '.join(reasons)}; or set 'pipeline: stages'")
    return True


def runs_pipelines(args: argparse.Namespace, config: Run) -> bool:
    """Whether each replica has microbatches of its own; ConfigError: it shall have, and cannot."""
    if config.planner is None or not config.planner.planner.pipelines:
        return False
    if reasons := flags.reasons(args, "pipelines"):
        raise ConfigError(f"planner {config.planner.name}: {'; '.join(reasons)}")
    return True


def layout_of(args: argparse.Namespace) -> Strategy:
    """The strategy of the command line: a pipeline for each data-parallel replica, all alike."""
    scheme = Scheme(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    return Strategy((scheme,) * args.data_parallel_size)


def candidates_of(args: argparse.Namespace, config: Run, layout: Strategy) -> tuple[Strategy, ...]:
    """The strategies that training changes between, none: `layout` alone; ConfigError: it cannot."""
    chosen = config.planner
    if chosen is None or chosen.planner.strategies is None:
        return ()
    named = tuple(dict.fromkeys(chosen.planner.strategies(chosen.options)))
    # Of a layout that replaces none there is nothing to change between.
    if not named or named == (layout,):
        return ()
    _check_strategies(args, named)
    return named


def _check_strategies(args: argparse.Namespace, strategies: Sequence[Strategy]) -> None:
    """Reject, in one ConfigError, arguments and strategies between which training cannot change."""
    reasons = flags.reasons(args, "strategies")
    for strategy in strategies:
        reasons += [f"{strategy}: {reason}" for reason in _not_cut(args, strategy)]
    if reasons:
        raise ConfigError(f"strategies: {'; '.join(reasons)}")


def _not_cut(args: argparse.Namespace, strategy: Strategy) -> list[str]:
    reasons: list[str] = []
    if strategy.num_ranks > args.world_size:
        reasons.append(f"takes {strategy.num_ranks} ranks, and there are {args.world_size}; use fewer or smaller ones")
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    counts = (
        (args.num_attention_heads, "attention heads (--num-attention-heads)"),
        (groups, "query groups (--num-query-groups)"),
        (args.ffn_hidden_size, "the FFN's size (--ffn-hidden-size)"),
    )
    for scheme in dict.fromkeys(strategy.pipelines):
        reasons += [
            f"TP {scheme.tensor} does not divide {count}, {what}" for count, what in counts if count % scheme.tensor
        ]
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        padded = args.padded_vocab_size or -(-(args.vocab_size or 0) // multiple) * multiple
        if padded % scheme.tensor:
            wanted = lcm(args.make_vocab_size_divisible_by, scheme.tensor)
            reasons.append(
                f"TP {scheme.tensor} does not divide the padded vocabulary, {padded}; pad it with "
                f"--make-vocab-size-divisible-by {wanted}"
            )
        if args.num_layers % scheme.pipeline:
            reasons.append(f"PP {scheme.pipeline} does not divide the {args.num_layers} layers (--num-layers)")
    return reasons


def layouts_of(args: argparse.Namespace, config: Run, layout: Strategy) -> Layouts | None:
    """The layout that owns weights, and the candidates. ConfigError: options name another layout."""
    chosen = config.planner
    assert chosen is not None, "a planner has named candidates"
    assert chosen.planner.layouts is not None, "a planner with candidates says what owns weights"
    return chosen.planner.layouts(chosen.options, args.world_size, layout)


def log_reasons(args: argparse.Namespace, config: Run) -> list[str]:
    if config.trace_steps and not args.balance_log:
        return [
            f"trace_steps in {config.source}: traces go into --balance-log DIR, which is not given (in a loop of its "
            "own: log_folder)"
        ]
    return []

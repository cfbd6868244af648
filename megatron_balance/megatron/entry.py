"""Logging, refusals, the session, and errors as one line: for both training entries."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError, ConfigError
from megatron_balance.megatron import environment
from megatron_balance.megatron.arguments import RANDOM, check_arguments, device_of, leave_out, reasons_in, says_fp16
from megatron_balance.megatron.reviewed_flags import unreviewed
from megatron_balance.patches import Patch, applied, fault_of

log = logging.getLogger(__name__)

USAGE_ERROR = 2


def run(main: Callable[[], None]) -> int:
    """Exit code of `main`: 0, or 2 with the one line `error: ...` for a mistake of the user's."""
    set_up_logging()
    try:
        if device_of(sys.argv) == "cpu":
            from megatron_balance.megatron import cpu

            cpu.install()
        main()
    except BalanceError as error:
        rank = environment.rank()
        sys.stderr.write(f"error: {error}\n" if rank == 0 else f"error (rank {rank}): {error}\n")
        sys.stderr.flush()
        return USAGE_ERROR
    return 0


def set_up_logging() -> None:
    """Our log to stderr with the rank in every line; Megatron's is left to Megatron."""
    rank = environment.rank()
    logger = logging.getLogger("megatron_balance")
    if any(getattr(handler, "megatron_balance", False) for handler in logger.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.megatron_balance = True  # pyright: ignore[reportAttributeAccessIssue]
    handler.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(name)s: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


@contextmanager
def training(cfg_container: Any, *, has_script: bool = True) -> Iterator[None]:
    """The session of one call of Megatron's `pretrain`, whose model config gets our core attention.

    `has_script`: whether the data set provider is a script's, not ours.

    Raises:
        ConfigError: flags or a configuration that cannot work, before anything is built.
    """
    from megatron.training import get_args

    from megatron_balance.megatron.corpora import corpus_reasons, data_reasons
    from megatron_balance.megatron.documents import names_corpus
    from megatron_balance.megatron.gpt import give_layer_spec
    from megatron_balance.megatron.log import log_reasons
    from megatron_balance.megatron.session import Session, opened
    from megatron_balance.megatron.ways import way_reasons
    from megatron_balance.planning.run import load_config

    args: Any = get_args()
    if not args.balance_config:
        check_arguments(args)
    cluster = None if args.balance_cluster is None else _absolute(args.balance_cluster)
    config = load_config(args.balance_config, planner=args.balance_planner, cluster=cluster)
    if config.planner is None:
        raise ConfigError(
            f"{args.balance_config}: planner: missing; name one, for example 'planner: {{name: zeppelin}}'"
        )
    reasons: list[str] = []
    if config.data == "documents" and (names_corpus(args) or not has_script):
        reasons += [*data_reasons(args), *(corpus_reasons(args) if names_corpus(args) else ())]
    elif not has_script:
        reasons.append(
            "data: script: megatron_balance.pretrain_gpt has no data set of its own; start your script by "
            "megatron_balance.launch"
        )
    reasons += log_reasons(args, config)
    if (args.save_activations_interval or args.save_dgrads_interval) and not te_available():
        reasons.append(
            "--save-activations-interval and --save-dgrads-interval: Megatron looks for Transformer Engine's layers, "
            "and there is none here, so the first such step would end in an error; leave them out"
        )
    of_way = way_reasons(args, config)
    patches = () if of_way else _patches_of(args, config)
    fault = fault_of(patches, config.accepted_sources, config.source)
    check_arguments(args, [*reasons, *of_way, *([] if fault is None else [fault])])
    _say_what_was_set(args, cfg_container)
    give_layer_spec(cfg_container)
    if args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or ["core_attn"]):
        log.warning(
            "--recompute-granularity selective runs core attention again in the backward pass, its exchanges included; "
            "attention keeps no score matrix here, so --recompute-modules without core_attn saves the traffic"
        )
    log.info(
        "planner %s from %s; the forward step is megatron_balance's, with loss per token",
        config.planner.name,
        config.source,
    )
    session = Session(args, config, te_patched=te_available())
    with applied(patches, config.accepted_sources, config.source), opened(session):
        yield


def _patches_of(args: Any, config: Any) -> tuple[Patch, ...]:
    """The patches of a job that `way_reasons` knows nothing against."""
    from megatron_balance.megatron import ping_pong
    from megatron_balance.megatron.ways import attends_jointly, candidates_of, layout_of
    from megatron_balance.patches.selection import for_job

    return for_job(
        args,
        joint=attends_jointly(args, config),
        nano_batches=ping_pong.wanted(args, config),
        changes=bool(candidates_of(args, config, layout_of(args))),
    )


def _say_what_was_set(args: Any, cfg_container: Any) -> None:
    """Set what plans need and no flag of the script's can want otherwise; the log says so."""
    if "--calculate-per-token-loss" not in sys.argv:
        log.warning("--calculate-per-token-loss was set: ranks hold unequal numbers of tokens")
    if not any(word.startswith("--attention-dropout") for word in sys.argv):
        log.warning("--attention-dropout was set to 0, Megatron's default is 0.1: planned attention drops nothing")
    if args.num_experts is not None and not any(word.startswith("--moe-token-dispatcher-type") for word in sys.argv):
        log.warning("--moe-token-dispatcher-type was set to alltoall: allgather needs equal numbers of tokens")
    ddp = getattr(cfg_container, "ddp", None)
    transformer = getattr(getattr(cfg_container, "model", None), "transformer", None)
    configs = (transformer, ddp, getattr(cfg_container, "optimizer", None))
    for sentence in leave_out(args, [each for each in configs if each is not None]):
        log.warning("%s", sentence)
    if args.ddp_average_in_collective:
        log.warning("--ddp-average-in-collective was left out: a loss per token is summed, then divided")
        args.ddp_average_in_collective = False
        if ddp is not None:
            ddp.average_in_collective = False
    if (told := says_fp16(args)) is not None:
        log.warning("%s", told)
    unknown = unreviewed(sys.argv[1:])
    if unknown:
        log.warning(
            "flags of which nobody looked at what they do to plans (the script's own, or of a Megatron that was not "
            "reviewed): %s",
            ", ".join(unknown),
        )
    for drawn in reasons_in(RANDOM, args):
        log.warning(
            "%s at random by where a token lies, so losses differ between plans; leave it out to compare", drawn
        )


def _absolute(cluster: str) -> str:
    """A cluster's name as it is, or the absolute path of its file: else it would be taken relative
    to the configuration.
    """
    return str(Path(cluster).absolute()) if "/" in cluster or cluster.endswith((".yaml", ".yml")) else cluster


def te_available() -> bool:
    """Whether Transformer Engine serves Megatron in this process."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)

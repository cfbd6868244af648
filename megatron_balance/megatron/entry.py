"""Logging, refusals, the session, and errors as one line: for both training entries."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError, ConfigError
from megatron_balance.megatron import flags
from megatron_balance.megatron.flags import check_arguments, device_of
from megatron_balance.model_config import refusal
from megatron_balance.patches import Patch, applied, fault_of

log = logging.getLogger(__name__)

USAGE_ERROR = 2


def run(main: Callable[[], None]) -> int:
    """Exit code of `main`: 0, or 2 with the one line `error: ...` for a mistake of the user's."""
    _set_up_logging()
    try:
        if device_of(sys.argv) == "cpu":
            from megatron_balance.megatron import cpu

            cpu.install()
        main()
    except BalanceError as error:
        rank = _launched_rank()
        sys.stderr.write(f"error: {error}\n" if rank == 0 else f"error (rank {rank}): {error}\n")
        sys.stderr.flush()
        return USAGE_ERROR
    return 0


def _set_up_logging() -> None:
    """Our log to stderr with the rank in every line; Megatron's is left to Megatron."""
    rank = _launched_rank()
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
    `has_script`: it has a data set provider. ConfigError, before anything is built: what cannot
    work.
    """
    from megatron.training import get_args

    from megatron_balance.megatron import ping_pong
    from megatron_balance.megatron.data import corpus_reasons, data_reasons, names_corpus
    from megatron_balance.megatron.gpt import give_layer_spec
    from megatron_balance.megatron.session import Session, opened
    from megatron_balance.megatron.ways import attends_jointly, candidates_of, layout_of, log_reasons, way_reasons
    from megatron_balance.patches.selection import for_job
    from megatron_balance.planning.choice import load_config

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
    if not te_available():
        reasons += flags.reasons(args, "no_te")
    unknown, others = flags.unknown(args, sys.argv[1:])
    said = refusal("flags", unknown, config.accept, f"accept: {{}} in {config.source}")
    reasons += [] if said is None else [said]
    of_way = way_reasons(args, config)
    patches: tuple[Patch, ...] = ()
    # It is not known how a job runs that cannot.
    if not of_way:
        patches = for_job(
            args,
            joint=attends_jointly(args, config),
            nano_batches=ping_pong.wanted(args, config),
            changes=bool(candidates_of(args, config, layout_of(args))),
        )
    fault = fault_of(patches, config.accepted_sources, config.source)
    check_arguments(args, [*reasons, *of_way, *([] if fault is None else [fault])])
    # In this order: what no flag can want otherwise is set behind all refusals, and the model's
    # spec before Megatron builds it.
    _say_what_was_set(args, cfg_container, others)
    give_layer_spec(cfg_container)
    log.info(
        "planner %s from %s; the forward step is megatron_balance's, with loss per token",
        config.planner.name,
        config.source,
    )
    session = Session(args, config, te_patched=te_available())
    with applied(patches, config.accepted_sources, config.source), opened(session):
        yield


def _say_what_was_set(args: Any, cfg_container: Any, unknown: Sequence[str]) -> None:
    """Set what plans need and no flag can want otherwise; tell that, and which flags are unknown."""
    transformer = getattr(getattr(cfg_container, "model", None), "transformer", None)
    configs = (transformer, getattr(cfg_container, "ddp", None), getattr(cfg_container, "optimizer", None))
    told = flags.defaulted(args, sys.argv[1:])
    told += flags.leave_out(args, [each for each in configs if each is not None])
    if unknown:
        told.append(f"flags of the script's own, of which nobody looked at what they do to plans: {', '.join(unknown)}")
    for sentence in (*told, *flags.sentences(args, "command_line")):
        log.warning("%s", sentence)


def _absolute(cluster: str) -> str:
    # A relative path would be taken relative to the configuration.
    return str(Path(cluster).absolute()) if "/" in cluster or cluster.endswith((".yaml", ".yml")) else cluster


def te_available() -> bool:
    """Whether Transformer Engine serves Megatron in this process."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


def _launched_rank() -> int:
    """This process's global rank, as the launcher says; 0 without one."""
    return int(os.environ.get("RANK", "0"))  # noqa: TID251  torchrun's own variable, not a switch

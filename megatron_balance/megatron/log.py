"""The step log in Megatron's terms: rank 0 writes, scalars go to Megatron's TensorBoard and W&B."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron_balance.planning.choice import Run, to_yaml
from megatron_balance.training.log import LogTarget, ScalarWriter
from megatron_balance.training.tracing import StepTracer


def log_target(args: argparse.Namespace, config: Run, writers: Sequence[ScalarWriter] | None = None) -> LogTarget:
    """The target of this rank's records, from Megatron's arguments and ours.

    `writers`: of scalars; None: Megatron's own.
    """
    folder, writes = Path(args.balance_log) if args.balance_log else None, args.rank == 0
    return LogTarget(
        folder=folder,
        config=to_yaml(config) if folder is not None and writes else "",
        writes=writes,
        interval=args.log_interval,
        writers=scalar_writers(args.tensorboard_log_interval) if writers is None else lambda _: writers,
        tracer=StepTracer(folder, config.trace_steps, args.rank),
    )


def log_reasons(args: argparse.Namespace, config: Run) -> list[str]:
    """Reasons why a configuration cannot be logged as it asks."""
    if config.trace_steps and not args.balance_log:
        return [
            f"trace_steps in {config.source}: traces go into --balance-log DIR, which is not given (in a loop of its "
            "own: log_folder)"
        ]
    return []


def scalar_writers(interval: int) -> Callable[[int], Sequence[ScalarWriter]]:
    """Megatron's writers for a step: those that exist on this rank, every `interval` steps."""

    def writers(step: int) -> list[ScalarWriter]:
        if step % interval:
            return []
        tensorboard: Any = get_tensorboard_writer()
        wandb: Any = get_wandb_writer()
        present: list[ScalarWriter] = []
        if tensorboard:
            present.append(tensorboard.add_scalar)
        if wandb:
            present.append(lambda name, value, at: wandb.log({name: value}, at))
        return present

    return writers

"""Options about experts: ranks that share a layer's, and how unevenly tokens are routed to them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_balance.cli.inputs import Inputs
from megatron_balance.errors import ConfigError

if TYPE_CHECKING:
    from megatron_balance.cost.experts import ExpertLoad
    from megatron_balance.ir.model import Model


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument(
        "--expert-parallel", type=int, default=1, metavar="E", help="ranks that share a layer's experts (default 1)"
    )
    parser.add_argument(
        "--expert-counts",
        metavar="N,N,...",
        help="tokens counted of each expert of a layer: the busiest rank of those that share them decides "
        "(default: as many of each)",
    )
    parser.add_argument(
        "--expert-spread",
        type=float,
        metavar="S",
        help="how unlike documents are to experts: deviation of an expert's share between documents, over its mean "
        "(default 0)",
    )


def check(ranks: int, given: Inputs) -> None:
    """Reject ranks that cannot share a layer's experts.

    Raises:
        ConfigError: a model without experts, or a number that divides nothing.
    """
    if ranks == 1:
        return
    model, cluster = given.model, given.cluster
    if not model.num_experts:
        raise ConfigError(f"--expert-parallel {ranks}: {model.name} has no experts; leave it out")
    here = min(ranks, cluster.node_size)
    if ranks < 1 or model.num_experts % ranks or cluster.num_ranks % ranks or ranks % here:
        raise ConfigError(
            f"--expert-parallel {ranks}: must divide the {model.num_experts} experts of {model.name} and the "
            f"{cluster.num_ranks} ranks, "
            f"and fill nodes of {cluster.node_size} ranks if it is more than one"
        )


def load(args: argparse.Namespace, model: Model) -> ExpertLoad | None:
    """The routing to experts that the options say; None: they say nothing.

    Raises:
        ConfigError: counts or a spread that cannot be, or that nothing is made of.
    """
    from megatron_balance.cost.experts import ExpertLoad

    counts, spread = args.expert_counts, args.expert_spread
    if counts is None and spread is None:
        return None
    given = f"--expert-counts {counts}" if counts is not None else f"--expert-spread {spread:g}"
    if args.expert_parallel == 1:
        raise ConfigError(f"{given} goes with --expert-parallel E: without, every rank has all experts")
    try:
        numbers = [float(word) for word in (counts or "").split(",") if counts]
    except ValueError as error:
        raise ConfigError(
            f"--expert-counts {counts}: expected numbers with commas between, such as 120,80,96"
        ) from error
    found = ExpertLoad.counted(numbers, spread or 0.0) if numbers else ExpertLoad(spread=spread or 0.0)
    found.of_documents(1, model)  # raises where they do not fit the model
    return found

"""`megatron-balance verify`: prove a plan that `plan --out` wrote: every query meets every key it
may see exactly once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_balance.cli import planfile
from megatron_balance.compile.transpose import Policy
from megatron_balance.errors import InvalidProgramError
from megatron_balance.files import json_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add the verb `verify`."""
    parser = subparsers.add_parser(
        "verify", help="prove a plan written by 'plan --out', forward and backward", description=__doc__
    )
    parser.add_argument("plan", type=Path, metavar="PLAN.json", help="what 'plan --out' wrote")
    parser.add_argument(
        "--policy",
        choices=("keep", "replay"),
        default="keep",
        help="backward with received KV kept, or communicated again",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prove every plan of the file.

    Returns:
        0, or 1 when a plan does not hold; the offending op is printed on stderr.

    Raises:
        ConfigError: the file cannot be read.
    """
    results = [_prove(entry, args.policy) for entry in planfile.read(args.plan)]
    failed = [number for number, result in enumerate(results) if not result["verified"]]
    if args.json:
        print(json_text({"verified": not failed, "policy": args.policy, "results": results}))
    for number, result in enumerate(results):
        name = f"{args.plan}" if len(results) == 1 else f"{args.plan}, plan {number}"
        if not result["verified"]:
            print(f"{name}: not verified: {result['error']}", file=sys.stderr)
        elif not args.json:
            written = "; the program written with it is right too" if result["program_checked"] else ""
            print(
                f"{name}: verified: {result['planner']} {result['fingerprint']}, {result['num_ops']} ops, backward "
                f"{args.policy}{written}"
            )
    return 1 if failed else 0


def _prove(entry: planfile.PlanEntry, policy: Policy) -> dict[str, Any]:
    result: dict[str, Any] = {
        "planner": entry.plan.planner,
        "fingerprint": entry.plan.fingerprint(),
        "verified": True,
        "num_ops": None,
        "program_checked": entry.program is not None,
        "error": None,
    }
    try:
        result["num_ops"] = planfile.prove_entry(entry, policy)
    except InvalidProgramError as error:
        result |= {"verified": False, "error": str(error)}
    return result

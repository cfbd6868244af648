"""Gradients of strategies of several schemes, one after another in the same processes, beside one
rank's with the whole model: real Megatron on 8 gloo ranks.

    python -m tools.hydraulis_roles                     # all base layouts, some minutes
    python -m tools.hydraulis_roles --base "DP8" --strategies tp4-pp1-cp1+tp1-pp4-cp1

A role's weights are NaN before each pull, and `parallel_state` may not be asked inside a role.
Largest differences of a gradient, relative to the largest element of its parameter. The suite runs
four ranks (tests/megatron/test_roles.py). Roles with CP need planned attention; this has none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.megatron_run import Trainer
from tests.support.role_runs import trained

MOST = 1e-5
RANKS = 8
TIED = {"untie-embeddings-and-output-weights": False}
BASES: Mapping[str, dict[str, Any]] = {
    "DP8": {},
    "TP2 x DP4": {"tensor-model-parallel-size": 2, "sequence-parallel": True},
    "TP2 x DP4, not sequence parallel": {"tensor-model-parallel-size": 2},
    "PP2 x DP4, tied": {"pipeline-model-parallel-size": 2, **TIED},
    "TP2 x PP2 x DP2": {
        "tensor-model-parallel-size": 2,
        "pipeline-model-parallel-size": 2,
        "sequence-parallel": True,
    },
    "TP2 x DP4, QK norm, tied": {
        "tensor-model-parallel-size": 2,
        "sequence-parallel": True,
        "qk-layernorm": True,
        **TIED,
    },
}
"""By name, Megatron's flags."""
STRATEGIES = (
    "2*tp1-pp2-cp1+tp2-pp1-cp1",
    "tp4-pp1-cp1+tp2-pp1-cp1+2*tp1-pp1-cp1",
    "tp3-pp1-cp1+tp2-pp2-cp1+tp1-pp1-cp1",
    "tp4-pp2-cp1",
    "8*tp1-pp1-cp1",
    "tp3-pp2-cp1",
    "2*tp1-pp2-cp1+tp2-pp1-cp1",
)
"""The fifth has empty pipelines, the sixth leaves two ranks over, the last comes again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the base layouts; 0 if all gradients agree with one rank's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", nargs="+", choices=tuple(BASES), default=list(BASES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    options = parser.parse_args(argv)
    table = Table("base layout", "strategy", "largest difference", "of", "the same bits again")
    worst = 0.0
    trainer = Trainer()
    try:
        for base in options.base:
            with tempfile.TemporaryDirectory() as folder:
                ranks = trained(trainer, Path(folder), RANKS, options.strategies, BASES[base])
            for steps in zip(*ranks, strict=True):
                error, name = max((error, name) for step in steps for name, error in step["errors"].items())
                same = all(step["same_bits"] for step in steps)
                worst = max(worst, error if same else 1.0)
                table.add_row(base, steps[0]["strategy"], f"{error:.1e}", name, "yes" if same else "no")
    finally:
        trainer.close()
    Console().print(table)
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())

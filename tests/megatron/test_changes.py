"""Planner hydraulis with candidates: one `pretrain` that changes between mixes of tensor, pipeline and
context parallelism, and trains as one rank does.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Strategy
from megatron_balance.megatron.arguments import check_strategy_arguments
from tests.megatron.conftest import Run, Train, assert_same_training, at_once, started, write_corpus
from tests.megatron.test_parity import SLOW
from tests.support.pipeline_runs import worst_gradient

pytestmark = pytest.mark.megatron

LENGTHS = (1000, *(60, 90, 40, 70, 110, 30) * 6)
"""Steps with a long document need context or tensor parallelism, the others do not."""
SAMPLES = 2
LONG = {"seq-length": 1024, "max-position-embeddings": 1024}
CONFIG = {"cluster": {"ranks_per_node": 8, "num_sms": 0, **SLOW}}
"""No multiprocessors: else a short kernel takes as long as its longest block on one of many."""


def changes_of(run: Run) -> int:
    """How often the strategy of a step was another than that of the step before."""
    return sum(a != b for a, b in itertools.pairwise(run.column("strategy")))

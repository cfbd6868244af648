"""The package as imported by a newcomer, and plans that agree between processes."""

from __future__ import annotations

import subprocess
import sys

from megatron_balance.planners import PLANNERS

FINGERPRINTS = """
from megatron_balance import Cluster, Model, make_planner
from megatron_balance.planners import PLANNERS
lengths = [[900, 31, 31, 7, 420, 2, 64, 64], [5], [1] * 40, [77, 500, 1300, 20, 20]]
for name in PLANNERS:
    for cluster in (Cluster(8, 4), Cluster(6, 2)):
        for options in ({}, {"tokens_per_rank": 320}) + (({"rule": "paper"},) if name == "zeppelin" else ()):
            plan = make_planner(name, cluster, Model(8, 2, 16), **options)
            print(name, *(plan(batch).fingerprint() for batch in lengths))
"""


def run(code: str, hash_seed: str = "0") -> str:
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
    )
    return process.stdout


def test_processes_with_different_hash_seeds_make_the_same_plans() -> None:
    first, second = run(FINGERPRINTS, "0"), run(FINGERPRINTS, "12345")
    assert len(first.splitlines()) == 4 * len(PLANNERS) + 2
    assert first == second


def test_every_planner_has_options_with_a_capacity_that_defaults_to_none() -> None:
    assert all(planner.options().tokens_per_rank is None for planner in PLANNERS.values())

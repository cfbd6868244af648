"""A stored plan of every comm pattern is read, proved and run, whichever class its name stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_balance import reference
from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.proof.runs import prove
from megatron_balance.compile.transpose import Policy
from megatron_balance.ir.plan import from_json, to_json
from megatron_balance.patterns import PATTERNS
from tests.support import dense

STORED = json.loads((Path(__file__).parent / "stored_plans.json").read_text())
"""By comm pattern: a plan with a remap and routing as `to_json` wrote it, and its fingerprint."""


def test_every_pattern_has_a_stored_plan() -> None:
    assert STORED.keys() == PATTERNS.keys()


@pytest.mark.parametrize("policy", ["keep", "replay"])
@pytest.mark.parametrize("pattern", STORED)
def test_a_stored_plan_is_read_proved_and_run(pattern: str, policy: Policy) -> None:
    plan = from_json(json.dumps(STORED[pattern]["plan"]))
    assert plan.fingerprint() == STORED[pattern]["fingerprint"]
    assert json.loads(to_json(plan)) == STORED[pattern]["plan"]
    prove(plan, policy)
    x = dense.draw(plan.lengths, plan.num_heads, plan.num_kv_heads, head_dim=5)
    ours = reference.run(expand(plan, policy), x.q, x.k, x.v, x.scale, x.dout)
    theirs = dense.attention(x)
    for what in ("out", "q_grad", "k_grad", "v_grad"):
        assert dense.worst(getattr(ours, what), getattr(theirs, what)) < 1e-12

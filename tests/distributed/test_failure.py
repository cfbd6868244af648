"""A step that fails says where in the plan it was."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

from megatron_balance import Cluster, Model, make_planner  # noqa: E402
from megatron_balance.runtime.attention import balanced_attention  # noqa: E402
from megatron_balance.runtime.bind import AttentionShape, bind  # noqa: E402
from megatron_balance.runtime.groups import single  # noqa: E402
from megatron_balance.runtime.kernels.plain import PlainKernel  # noqa: E402

pytestmark = pytest.mark.dist


def test_a_failing_step_is_logged_with_its_place_in_the_plan(caplog, monkeypatch):
    plan = make_planner("te_ring", Cluster(1, 1), Model(num_heads=2, num_kv_heads=1, head_dim=4))([5])
    bound = bind(plan, 0, AttentionShape(2, 1, 4), groups=single(), kernel="plain")
    monkeypatch.setattr(PlainKernel, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    inputs = [torch.zeros(5, heads, 4) for heads in (2, 1, 1)]
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="out of memory"):
        balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    assert caplog.messages == [
        f"rank 0 of 1, forward step 0 of 1 of the plan {plan.fingerprint()}: attention of zone 'pool' in 1 kernel calls"
    ]

"""A step that fails says where in the plan it was, and a rank that fails tells those that wait."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from megatron_balance import Cluster, Model, make_planner  # noqa: E402
from megatron_balance.runtime.attention import balanced_attention  # noqa: E402
from megatron_balance.runtime.bind import AttentionShape, bind  # noqa: E402
from megatron_balance.runtime.groups import single  # noqa: E402
from megatron_balance.runtime.kernels.base import PlainKernel  # noqa: E402

pytestmark = pytest.mark.dist


def test_a_failing_step_is_logged_with_its_place_in_the_plan(caplog, monkeypatch):
    plan = make_planner("te_ring", Cluster(1, 1), Model(num_heads=2, num_kv_heads=1, head_dim=4))([5])
    bound = bind(plan, 0, AttentionShape(2, 1, 4), groups=single(), kernel="plain")
    monkeypatch.setattr(PlainKernel, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    inputs = [torch.zeros(5, heads, 4) for heads in (2, 1, 1)]
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="out of memory"):
        balanced_attention(inputs[0], inputs[1], inputs[2], bound)
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR] == [
        f"rank 0 of 1, forward step 0 of 1 of the plan {plan.fingerprint()}: attention of zone 'pool' in 1 kernel calls"
    ]


@pytest.fixture(scope="module")
def ended() -> dict[str, list[tuple[int, str]]]:
    """By job of `failing_ranks`: exit code and output of each rank."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.failing_ranks"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def seconds(said: str) -> float:
    found = re.search(r"^seconds ([\d.]+)$", said, re.MULTILINE)
    assert found, said
    return float(found[1])


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("in_the_model", "rank 1 failed (ValueError: boom)"),
        ("in_the_backward", "rank 1 failed (ValueError: boom)"),
        ("refused", "rank 1 failed (ConfigError: q: expected [rows, heads, head_dim]"),
        ("masked", "rank 1 failed (ConfigError: LlamaAttention asks for an attention mask that hides tokens;"),
        ("in_a_collective_of_the_user", "rank 1 failed (ValueError: boom)"),
        ("in_knapformer", "rank 1 failed (ValueError: boom)"),
        ("leaves_the_balancer", "rank 1 failed (ValueError: boom)"),
        ("leaves_an_evaluation", "rank 1 failed (ValueError: boom)"),
        ("killed", "rank 1 of 3 does not answer: ended, or frozen"),
        ("exits", "rank 1 came to its end before the others"),
    ],
)
def test_ranks_that_wait_for_one_that_failed_end_soon_and_name_it(
    ended: dict[str, list[tuple[int, str]]], job: str, reason: str
) -> None:
    """gloo's own timeout is 200 s there."""
    if job == "masked":
        pytest.importorskip("transformers")
    ranks = ended[job]
    for rank in (0, 2):
        code, said = ranks[rank]
        assert code == 1, said
        assert reason in said
        # who exits lets go of the others with its process, which takes its time on a busy machine
        assert seconds(said) < (60 if job == "exits" else 15)
    codes = {"leaves_the_balancer": 0, "leaves_an_evaluation": 0, "killed": 9, "exits": 3}
    assert ranks[1][0] == codes.get(job, 1), ranks[1]


@pytest.mark.parametrize("job", ["caught", "caught_by_all", "ends_first"])
def test_an_error_that_is_caught_and_an_end_that_comes_early_end_nobody(
    ended: dict[str, list[tuple[int, str]]], job: str
) -> None:
    for code, said in ended[job]:
        assert code == 0, said
        assert said.startswith("seconds"), "nothing is said"

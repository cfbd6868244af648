"""Runs that change strategies, killed and resumed: with other candidates, by Megatron without us, and
back. Real Megatron on 4 gloo ranks, each part beside the same of one rank.

    python -m tools.hydraulis_resuming            # about two minutes of a quiet machine

1. Strategies on a base layout of TP2 x DP2, saved every second step; all ranks are killed.
2. Resumed with other candidates, steps 3 and 4.
3. Resumed by a plain script of Megatron on TP 2, steps 5 and 6 of data of its own. It is not sequence
   parallel, which Megatron cannot be without Transformer Engine.
4. Resumed by us on another base layout, PP2 x DP2, steps 7 and 8.

Largest relative differences of losses, and of gradient norms where they are logged. The suite has
the resume on another layout (tests/megatron/test_changes.py).
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

from tests.megatron.conftest import Run, at_once, started, train_with, write_corpus
from tests.megatron.test_changes import CONFIG, FIRST, FLAGS, GOING_ON, LENGTHS, OWNED, THEN
from tests.megatron.test_launch import ON_CPU, SCRIPT, printed_losses
from tests.support.megatron_run import Result, Trainer
from tools.hydraulis_parity import Folders

MOST = 1e-5
STEPS = 8
TENSOR = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
ACCEPTED = {"accepted_data": "plain"}
"""Else the steps that somebody else's data trained are refused."""
PLAIN: dict[str, Any] = {**ON_CPU, "data-path": None, "mock-data": True, "context-parallel-size": 1}


def main() -> int:
    """Run all parts; 0 if each agrees with one rank's."""
    with tempfile.TemporaryDirectory() as root:
        folders: Any = Folders(Path(root))
        lengths = list(itertools.islice(itertools.cycle(LENGTHS), 400))
        corpus = write_corpus(folders.mktemp("corpus") / "documents", lengths)
        trainer = Trainer()
        try:
            return _parts(train_with(trainer, corpus, folders), folders)
        finally:
            trainer.close()


def _parts(train: Any, folders: Any) -> int:
    saved: dict[str, Any] = {"dist-ckpt-optim-fully-reshardable": True, "use-distributed-optimizer": True}
    flags = {**started(train, folders.mktemp("checkpoint"), {**FLAGS, "train-iters": STEPS}), **saved}
    ours, one = folders.mktemp("ours"), folders.mktemp("one")

    def until(step: int, folder: Any, *, every: int | None = None) -> dict[str, Any]:
        return {"save": folder, "save-interval": every or step, "exit-interval": step}

    def on(folder: Any) -> dict[str, Any]:
        return {**GOING_ON, "load": folder}

    alone = train(1, "te_ring", {**at_once(flags), **until(4, one)})
    planner: dict[str, Any] = {"name": "hydraulis", "tokens_per_rank": 256}

    def killed(result: Result) -> None:
        assert set(result.codes) == {-SIGKILL}, f"ranks ended with {result.codes}"

    first = train(
        4,
        {**planner, "strategies": list(FIRST)},
        {**flags, **OWNED, **TENSOR, "save": ours, "save-interval": 2},
        config=CONFIG,
        kill_after=3,
        expect=killed,
    )
    then = train(
        4,
        {**planner, "tokens_per_rank": 512, "strategies": [THEN[1], "tp4-pp1-cp1"]},
        {**flags, **OWNED, **TENSOR, **on(ours), **until(4, ours)},
        config=CONFIG,
    )
    told = [_compared("killed behind step 3", first, alone, range(1, 4))]
    told.append(_compared("other candidates", then, alone, range(3, 5)))
    plain = train(
        2,
        "te_ring",
        {**flags, **PLAIN, "tensor-model-parallel-size": 2, **on(ours), **until(6, ours)},
        entry="plain",
        before=(SCRIPT,),
    )
    plain_alone = train(1, "te_ring", {**flags, **PLAIN, **on(one), **until(6, one)}, entry="plain", before=(SCRIPT,))
    losses, wanted = printed_losses(plain.result, 1), printed_losses(plain_alone.result, 0)
    told.append(_difference("plain Megatron", losses, wanted))
    layout = {"pipeline-model-parallel-size": 2}
    back = train(
        4,
        {**planner, "tokens_per_rank": 512, "strategies": list(THEN)},
        {**flags, **OWNED, **layout, **on(ours)},
        config={**CONFIG, **ACCEPTED},
    )
    back_alone = train(1, "te_ring", {**at_once(flags), **on(one)}, config=ACCEPTED)
    told.append(_compared("back, on another base layout", back, back_alone, range(7, 9)))
    used = [sorted(set(run.column("strategy"))) for run in (first, then, back)]
    print(f"strategies: {used}")
    return int(max(told) > MOST)


def _compared(name: str, run: Run, one: Run, steps: range) -> float:
    """Print and return the largest difference of these steps from one rank's."""
    found = [step for step in run.steps if step["step"] in steps]
    wanted = {step["step"]: step for step in one.steps}
    assert [step["step"] for step in found][: len(steps)] == list(steps)[: len(found)], name
    got, expected = (
        [step[of] for step in each for of in ("loss", "grad_norm")]
        for each in (found, [wanted[step["step"]] for step in found])
    )
    return _difference(f"{name}, {len(found)} steps", got, expected)


def _difference(name: str, got: Sequence[float], wanted: Sequence[float]) -> float:
    assert got, f"{name}: no step was logged"
    assert len(got) == len(wanted), f"{name}: {len(got)} values beside {len(wanted)}"
    worst = max(abs(a / b - 1) for a, b in zip(got, wanted, strict=True))
    print(f"{name}: {worst:.1e}")
    return worst


if __name__ == "__main__":
    sys.exit(main())

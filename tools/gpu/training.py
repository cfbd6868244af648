"""Two steps of Megatron's own training with balance on and off.

Equal losses and gradients, and no more waits of the host.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.gpu.pretrain import Job, run_all
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 40.0

LOSS = Figure("loss of two bf16 steps, balance on against off", "relative", Target("at most", 1e-3))
GRAD_NORM = Figure("gradient norm of two bf16 steps, balance on against off", "relative", Target("at most", 1e-2))
WAITS = Figure("host waits in a step, balance on, more than off", "waits", Target("at most", 0), speed=True)
FIGURES = (LOSS, GRAD_NORM, WAITS)

MODEL: dict[str, dict[str, Any]] = {
    "cuda": {"num-layers": 4, "hidden-size": 1024, "ffn-hidden-size": 2816, "num-attention-heads": 8},
    "cpu": {"num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 4},
}
DOCUMENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "cuda": ((5000, 2000, 700, 300, 129, 62, 1), (8192,), (8000, 192)),
    "cpu": ((150, 60, 30, 15, 1), (256,)),
}
"""By step; the third is the one that is searched for waits."""
VOCABULARY = 512


def measure(context: Context) -> Iterator[Row]:
    documents = DOCUMENTS[context.device]
    with tempfile.TemporaryDirectory() as folder:

        def job(*, balance: bool) -> Job:
            traced = 2 if len(documents) > 2 else None
            out = str(Path(folder, f"{balance}.json"))
            return Job(context.device, balance, MODEL[context.device], VOCABULARY, documents, out, traced)

        off, on = run_all([job(balance=False), job(balance=True)])
    yield LOSS.measured(largest(on.losses[:2], off.losses[:2]), f"{on.layers}; losses {_shown(on.losses[:2])}")
    yield GRAD_NORM.measured(largest(on.grad_norms[:2], off.grad_norms[:2]), f"norms {_shown(on.grad_norms[:2])}")
    if context.on_gpu:
        yield WAITS.measured(
            len(on.waits) - len(off.waits), f"{len(on.waits)} on, {len(off.waits)} off; on: {'; '.join(on.waits[:4])}"
        )


def largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.5g}" for value in values)

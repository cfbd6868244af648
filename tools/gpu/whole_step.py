"""A whole step of a GPT of about a billion parameters over one document of 32k tokens.

The time that the plugin adds where there is no imbalance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tools.gpu.pretrain import Job, Trained, run_all
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 120.0

RATIO = Figure(
    "Megatron step, one document of 32k tokens, balance on over off", "times", Target("at most", 1.02), speed=True
)
ON = Figure("Megatron step, one document of 32k tokens, balance on", "ms", speed=True)
OFF = Figure("Megatron step, one document of 32k tokens, balance off", "ms", speed=True)
FASTEST = Figure("Megatron step, one document of 32k tokens, balance off, attention as torch chooses", "ms", speed=True)
FIGURES = (RATIO, ON, OFF, FASTEST)

TOKENS = 32768
# Wide and shallow: parameters grow with the square of the width, activations with the width, and no
# layer is recomputed.
MODEL: dict[str, Any] = {"num-layers": 9, "hidden-size": 3072, "ffn-hidden-size": 8192, "num-attention-heads": 24}
VOCABULARY = 32000
STEPS, WARM = 10, 3


def measure(context: Context) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:

        def job(name: str, *, balance: bool, flash: bool = True) -> Job:
            return Job(
                context.device,
                balance,
                MODEL,
                VOCABULARY,
                ((TOKENS,),) * STEPS,
                str(Path(folder, f"{name}.json")),
                flash=flash,
            )

        off, on = run_all([job("off", balance=False), job("on", balance=True)])
        note = (
            f"medians of {STEPS - WARM} steps, {on.layers}, {_parameters() / 1e9:.2f} billion parameters, "
            "bf16, Adam, torch.compile off"
        )
        yield RATIO.measured(_median_s(on) / _median_s(off), note)
        yield _milliseconds(ON, on)
        yield _milliseconds(OFF, off)
        yield _milliseconds(FASTEST, *run_all([job("fastest", balance=False, flash=False)]))


def _median_s(run: Trained) -> float:
    return median(run.seconds[WARM:])


def _milliseconds(figure: Figure, run: Trained) -> Row:
    warm = run.seconds[WARM:]
    return figure.measured(1e3 * _median_s(run), f"{1e3 * min(warm):.1f} to {1e3 * max(warm):.1f}")


def _parameters() -> int:
    hidden, inner = MODEL["hidden-size"], MODEL["ffn-hidden-size"]
    return MODEL["num-layers"] * (4 * hidden * hidden + 3 * hidden * inner) + 2 * VOCABULARY * hidden

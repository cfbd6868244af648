"""A whole step of a GPT of about a billion parameters over one document of 32k tokens.

The time that the plugin adds where there is no imbalance.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tools.gpu.cost_table import FILE as COST_TABLE
from tools.gpu.pretrain import Job, Trained, run_all
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 85.0

RATIO = Figure(
    "Megatron step, one document of 32k tokens, balance on over off", "times", Target("at most", 1.01), speed=True
)
ON = Figure("Megatron step, one document of 32k tokens, balance on", "ms", speed=True)
OFF = Figure("Megatron step, one document of 32k tokens, balance off", "ms", speed=True)
FASTEST = Figure("Megatron step, one document of 32k tokens, balance off, attention as torch chooses", "ms", speed=True)
MEMORY = Figure("memory of that step: predicted over measured, less 1", "", Target("at most", 0.05), speed=True)
PREDICTED = Figure(
    "what one document of 32k tokens costs more than many short ones: predicted over measured, less 1",
    "",
    Target("at most", 0.05),
    speed=True,
)
FIGURES = (RATIO, ON, OFF, MEMORY, PREDICTED, FASTEST)

TOKENS = 32768
# Wide and shallow: parameters grow with the square of the width, activations with the width, and no
# layer is recomputed.
MODEL: dict[str, Any] = {"num-layers": 9, "hidden-size": 3072, "ffn-hidden-size": 8192, "num-attention-heads": 24}
VOCABULARY = 32000
STEPS, WARM = 10, 3
SHORT = (1024,) * (TOKENS // 1024)
"""Documents of the steps behind them, with balance on: all but attention costs the same."""
SHORT_STEPS = 5


def measure(context: Context) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        table = context.state / COST_TABLE

        def job(name: str, *, balance: bool, flash: bool = True) -> Job:
            return Job(
                context.device,
                balance,
                MODEL,
                VOCABULARY,
                (*(((TOKENS,),) * STEPS), *((SHORT,) * (SHORT_STEPS * balance))),
                str(Path(folder, f"{name}.json")),
                flash=flash,
                costs=str(table) if balance and table.exists() else None,
            )

        off, on = run_all([job("off", balance=False), job("on", balance=True)])
        note = (
            f"medians of {STEPS - WARM} steps, {on.layers}, {_parameters() / 1e9:.2f} billion parameters, "
            "bf16, Adam, torch.compile off"
        )
        yield RATIO.measured(_median_s(on) / _median_s(off), note)
        yield _milliseconds(ON, on)
        yield _milliseconds(OFF, off)
        used, said = on.peak_bytes
        yield MEMORY.measured(abs(said / used - 1), f"{said / 2**30:.2f} and {used / 2**30:.2f} GiB")
        if table.exists():
            seconds, guessed = (_more_s(each) for each in (on.seconds, on.predicted_s))
            yield PREDICTED.measured(abs(guessed / seconds - 1), f"{1e3 * guessed:.1f} and {1e3 * seconds:.1f} ms")
        else:
            yield PREDICTED.not_measured("there is no cost table: run part profile in the same run")
        yield _milliseconds(FASTEST, *run_all([job("fastest", balance=False, flash=False)]))


def _median_s(run: Trained) -> float:
    return median(run.seconds[WARM:STEPS])


def _more_s(by_step: list[float]) -> float:
    """Seconds of a step of one document over those of one of short documents."""
    return median(by_step[WARM:STEPS]) - median(by_step[STEPS + 1 :])


def _milliseconds(figure: Figure, run: Trained) -> Row:
    warm = run.seconds[WARM:STEPS]
    return figure.measured(1e3 * _median_s(run), f"{1e3 * min(warm):.1f} to {1e3 * max(warm):.1f}")


def _parameters() -> int:
    hidden, inner = MODEL["hidden-size"], MODEL["ffn-hidden-size"]
    return MODEL["num-layers"] * (4 * hidden * hidden + 3 * hidden * inner) + 2 * VOCABULARY * hidden

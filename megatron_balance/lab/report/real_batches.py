"""The batches that a training run trained on, for simulating what other planners would have made of
them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron_balance.errors import ConfigError
from megatron_balance.lab.report.steps import read

MOST_STEPS = 8
"""Steps of a run that are simulated, evenly spread over it."""


@dataclass(frozen=True, slots=True)
class RealBatches:
    """Steps of a run. `lengths`: of each microbatch, step by step; `microbatches`: of a step.

    `label`, `path`: of the run; `planner`: of its last step; `step_ms`: of these steps, the mean.
    """

    label: str
    path: Path
    lengths: tuple[tuple[int, ...], ...]
    microbatches: int
    steps: tuple[int, ...]
    num_steps: int
    planner: str
    step_ms: float

    def beside(self, name: str) -> str | None:
        """A file beside the run's log."""
        file = self.path.parent / name
        return str(file) if file.is_file() else None

    def sentence(self, planner: str, step_s: float) -> str:
        """A sentence on the steps that were simulated, and how far `planner` is from the clock."""
        measured = (
            f"; there they took {self.step_ms / 1e3:.3g} s in the mean (measured, {self.planner}), here {step_s:.3g} s "
            "(simulated)"
            if planner == self.planner
            else ""
        )
        return f"The batches are those of {len(self.steps)} of the {self.num_steps} steps of {self.label}{measured}."


def real_batches(path: Path) -> RealBatches:
    """The batches of the run whose `--balance-log` folder or `steps.jsonl` this is: of the steps with
    the usual number of microbatches, `MOST_STEPS` evenly spread.

    Raises:
        ConfigError: no such file, a line that is none of a run's, or no lengths in it.
    """
    run = read(path, "--run")
    known = [step for step in run.steps if _is_lengths(step.get("lengths"))]
    if not known:
        raise ConfigError(
            f"--run {path}: its steps hold no lengths, as those of an earlier version; train some steps with this one, "
            "or report what was measured with --steps"
        )
    usual = Counter(len(step["lengths"]) for step in known).most_common(1)[0][0]
    known = [step for step in known if len(step["lengths"]) == usual]
    every = max(1, len(known) // MOST_STEPS)
    chosen = known[::every][:MOST_STEPS]
    return RealBatches(
        run.label,
        Path(run.path),
        tuple(tuple(each) for step in chosen for each in step["lengths"]),
        usual,
        tuple(step["step"] for step in chosen),
        len(run.steps),
        str(chosen[-1].get("planner") or ""),
        sum(step["step_ms"] for step in chosen) / len(chosen),
    )


def _is_lengths(given: Any) -> bool:
    """Whether this is a list of lists of tokens, with some in it."""
    if not isinstance(given, list) or not given:
        return False
    microbatches = cast("list[Any]", given)
    if not all(isinstance(each, list) for each in microbatches):
        return False
    every = [length for each in cast("list[list[Any]]", microbatches) for length in each]
    return bool(every) and all(type(length) is int and length > 0 for length in every)

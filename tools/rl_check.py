"""Stand-ins for slime and NeMo-RL in our tests, against their sources; their tests with our schedules.

python -m tools.rl_check slime CHECKOUT
python -m tools.rl_check nemo-rl CHECKOUT

CHECKOUT: a clone, of which pure Python is imported. slime: its own tests of its schedule, with that
of `scripts/examples/slime_balanced.py`; `refused`: the test asks for what the script refuses.
NeMo-RL: on drawn lengths, bins of its packers and of that of `nemo_rl_balanced.py` on its base class.
Exit 1: a test failed otherwise, a bin is above its cap, or a signature differs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_balance.errors import BalanceError
from tests.support import rl_libraries
from tools.verl_check import differences

SCRIPTS = Path(__file__).parents[1] / "scripts" / "examples"
SOURCES = {
    "slime": {
        "build_dp_schedule": ("slime/utils/dp_schedule.py", None),
        "RolloutManager": ("slime/ray/rollout.py", "RolloutManager"),
        "DataIterator": ("slime/backends/megatron_utils/data.py", "DataIterator"),
    },
    "nemo-rl": {
        "get_packer": ("nemo_rl/data/packing/algorithms.py", None),
        "SequencePacker": ("nemo_rl/data/packing/algorithms.py", "SequencePacker"),
    },
}
"""As `tools.verl_check.SOURCES`, of `tests.support.rl_libraries`."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=SOURCES)
    parser.add_argument("checkout", type=Path)
    options = parser.parse_args(argv)
    differ = differences(options.checkout, SOURCES[options.library], rl_libraries)
    print(*differ, f"signatures: {len(differ)} differ", sep="\n")
    failed = {"slime": slime, "nemo-rl": nemo_rl}[options.library](options.checkout)
    return int(bool(failed or differ))


def slime(checkout: Path) -> int:
    """Tests that failed."""
    sys.path[:0] = [str(checkout), str(checkout / "tests")]
    runpy.run_path(str(SCRIPTS / "slime_balanced.py"))["register"]()
    tests, failed = importlib.import_module("test_dp_schedule"), 0
    for name in [name for name in dir(tests) if name.startswith("test_")]:
        told = "passed"
        try:
            getattr(tests, name)()
        except BalanceError as error:
            told = f"refused: {error}"
        except Exception as error:
            told, failed = f"failed: {type(error).__name__} {error!s:.200}", failed + 1
        print(f"{name}: {told}")
    return failed


def nemo_rl(checkout: Path, cap: int = 4096, ranks: int = 8, batches: int = 50) -> int:
    """Bins above the cap."""
    os.environ.setdefault("BALANCE_MODEL", "llama3-8b")
    theirs = runpy.run_path(str(checkout / SOURCES["nemo-rl"]["get_packer"][0]))
    script, above = runpy.run_path(str(SCRIPTS / "nemo_rl_balanced.py")), 0
    get_packer = script["chooser"](script["packer_of"](theirs["SequencePacker"]), theirs["get_packer"])
    for algorithm in (*(each.value for each in theirs["PackingAlgorithm"]), "balanced"):
        draw = random.Random(0)
        packer = get_packer(algorithm, cap, min_bin_count=ranks, bin_count_multiple=ranks)
        number, slowest, mean = 0, 0.0, 0.0
        for _ in range(batches):
            lengths = [min(cap, 1 + int(draw.lognormvariate(6, 1))) for _ in range(32 * ranks)]
            bins = packer.pack(lengths)
            work = [
                sum(24576.0 * lengths[seq] + lengths[seq] ** 2 for seq in own) for own in bins
            ]  # as verl weighs them
            number += len(bins) // ranks
            slowest += sum(max(work[at : at + ranks]) for at in range(0, len(bins), ranks))
            mean += sum(work) / ranks
            above += sum(sum(lengths[seq] for seq in own) > cap for own in bins)
        print(f"{algorithm}: {number} microbatches of {batches} batches, slowest ranks over even {slowest / mean:.2f}")
    return above


if __name__ == "__main__":
    sys.exit(main())

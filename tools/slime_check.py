"""slime's own tests of its schedule with that of `scripts/examples/slime_balanced.py`; what stands for
slime in our tests, against its source.

python -m tools.slime_check CHECKOUT

CHECKOUT: a clone of slime, of which pure Python is imported. `refused`: the test asks for what the
script refuses by a message. Exit 1: a test failed otherwise, or a signature differs.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_balance.errors import BalanceError
from tools.verl_check import differences

SCRIPT = Path(__file__).parents[1] / "scripts" / "examples" / "slime_balanced.py"
SOURCES = {
    "build_dp_schedule": ("slime/utils/dp_schedule.py", None),
    "RolloutManager": ("slime/ray/rollout.py", "RolloutManager"),
    "DataIterator": ("slime/backends/megatron_utils/data.py", "DataIterator"),
}
"""As `tools.verl_check.SOURCES`, of `tests.support.slime_jobs`."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    checkout: Path = parser.parse_args(argv).checkout
    from tests.support import slime_jobs

    differ = differences(checkout, SOURCES, slime_jobs)
    print(*differ, f"signatures: {len(differ)} differ", sep="\n")
    sys.path[:0] = [str(checkout), str(checkout / "tests")]
    runpy.run_path(str(SCRIPT))["register"]()
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
    return int(bool(failed or differ))


if __name__ == "__main__":
    sys.exit(main())

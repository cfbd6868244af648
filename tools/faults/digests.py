"""Plans are equal on other CPUs and under other hash seeds: their fingerprints, by processes that are
told to have fewer features, and other seeds.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.ir.step import Carry
from megatron_balance.planning.step_planner import StepPlanner
from tools.faults.cases import Outcome, SlowError, within
from tools.faults.plans import LIMIT_S, drawn

ROOT = Path(__file__).resolve().parents[2]
OLD_CPU = {
    # NumPy's loops, OpenBLAS' kernels and libm's functions without what came after SSE
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX",
    "OPENBLAS_CORETYPE": "Nehalem",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-FMA,-FMA_Usable,-AVX512F,-AVX",
}
OTHERS = ({"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "4242", **OLD_CPU})


@contextmanager
def digests() -> Iterator[Callable[[int], Outcome]]:
    with ExitStack() as stack:
        both = [stack.enter_context(_answering(each)) for each in OTHERS]

        def one(number: int) -> Outcome:
            said = [ask(number) for ask in both]
            name = said[0].partition(" ")[0]
            same = len(set(said)) == 1
            return Outcome(f"{name}: {'equal' if same else 'differs'}", "" if same else f"{said}")

        yield one


@contextmanager
def _answering(environment: dict[str, str]) -> Iterator[Callable[[int], str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tools.faults.digests"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    asked, answered = process.stdin, process.stdout
    assert asked is not None
    assert answered is not None
    try:

        def ask(number: int) -> str:
            asked.write(f"{number}\n")
            asked.flush()
            return json.loads(answered.readline())

        yield ask
    finally:
        asked.close()
        process.wait(30)


def digest(number: int) -> str:
    """The planner of a case, and the fingerprints of its steps and what they carry, or what refused
    it.
    """
    spec, steps = drawn(number)
    planner, carry = StepPlanner(spec), Carry()
    told: list[str] = []
    try:
        with within(LIMIT_S):
            for lengths in steps:
                step, carry = planner.plan(lengths, carry)
                told.append(step.fingerprint() + carry.to_json())
    except (ConfigError, InfeasibleError) as error:
        told.append(str(error))
    except SlowError:
        return "slow"
    return f"{spec.name} {hashlib.sha256(''.join(told).encode()).hexdigest()}"


def answer() -> None:
    """Answer numbers with digests until stdin closes."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(digest(int(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    answer()

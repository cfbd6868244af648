"""Stand-ins for slime, NeMo-RL and OpenRLHF in our tests, against their sources; slime's tests with
our schedule, NeMo-RL's packers and OpenRLHF's buffer beside ours.

python -m tools.rl_check slime CHECKOUT
python -m tools.rl_check nemo-rl CHECKOUT
python -m tools.rl_check openrlhf CHECKOUT

CHECKOUT: a clone, of which pure Python is imported. slime: its own tests of its schedule, with that
of `scripts/examples/slime_balanced.py`; `refused`: the test asks for what the script refuses.
NeMo-RL: on drawn lengths, bins of its packers and of that of `nemo_rl_balanced.py` on its base class.
OpenRLHF: its buffers on four gloo ranks, dealt by its method and by that of `openrlhf_balanced.py`.
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
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron_balance.errors import BalanceError
from tests.support import rl_libraries
from tests.support.pool import Pool, World
from tests.support.verl_jobs import config
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
    "openrlhf": {
        "NaiveReplayBuffer": ("openrlhf/trainer/ppo_utils/replay_buffer.py", "NaiveReplayBuffer"),
        "Experience": ("openrlhf/trainer/ppo_utils/experience.py", "Experience"),
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
    checks = {"slime": slime, "nemo-rl": nemo_rl, "openrlhf": openrlhf}
    return int(bool(checks[options.library](options.checkout) or differ))


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


def openrlhf(checkout: Path, cap: int = 4096, ranks: int = 4) -> int:
    """Our microbatches above the cap."""
    pool, above = Pool(num_ranks=ranks), 0
    told = pool.run(buffers, ranks, checkout, cap)
    pool.close()
    for at, whose in enumerate(("its own", "balanced")):
        number, slowest, mean, above = 0, 0.0, 0.0, 0
        for of_ranks in zip(*(rank[at] for rank in told), strict=True):
            work = [sum(24576.0 * length + length**2 for length in own) for own in of_ranks]
            number, slowest, mean = number + 1, slowest + max(work), mean + sum(work) / ranks
            above += sum(sum(own) > cap for own in of_ranks)
        print(f"{whose}: {number} microbatches, {above} above the cap, slowest ranks over even {slowest / mean:.2f}")
    return above


def buffers(world: World, checkout: Path, cap: int, steps: int = 50, each: int = 32) -> list[list[list[int]]]:
    """By OpenRLHF's method and by ours, lengths of this rank's samples in each microbatch."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(checkout))
    theirs = importlib.import_module("openrlhf.trainer.ppo_utils.replay_buffer")
    script, kind = runpy.run_path(str(SCRIPTS / "openrlhf_balanced.py")), theirs.NaiveReplayBuffer
    draw, found, folder = random.Random(world.rank), list[list[list[int]]](), TemporaryDirectory()
    config().save_pretrained(folder.name)

    def highest(numbers: Any, op: str) -> Any:
        dist.all_reduce(numbers, op=getattr(dist.ReduceOp, op.upper()))
        return numbers

    items: list[Any] = []
    for length in (min(cap, 1 + int(draw.lognormvariate(6, 1))) for _ in range(steps * each)):
        one = {"sequences": torch.ones(1, length), "action_mask": torch.ones(1, length, dtype=torch.bool)}
        items.append(theirs.Experience(**one, total_length=torch.tensor([length])))
    sizes = {"batch_size": each * world.size, "max_tokens_per_gpu": cap}
    args = SimpleNamespace(
        train=SimpleNamespace(**sizes),
        rollout=SimpleNamespace(batch_size=steps * each * world.size, n_samples_per_prompt=1),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
        actor=SimpleNamespace(model_name_or_path=folder.name),
    )
    mesh = {"dp": SimpleNamespace(get_group=lambda: dist.group.WORLD)}
    strategy = SimpleNamespace(args=args, ds_device_mesh=mesh, all_reduce=highest)
    for method in (kind.setup_dynamic_batch, script["setup_dynamic_batch"]):
        with patch.object(torch.cuda, "current_device", lambda: 0):
            buffer = kind(1, dynamic_batch=True)
        buffer.items = list(items)
        with patch.object(torch.cuda, "current_device", lambda: "cpu"):
            method(buffer, strategy)
        found.append([[int(item.total_length) for item in buffer[at]] for at in range(len(buffer))])
    return found


if __name__ == "__main__":
    sys.exit(main())

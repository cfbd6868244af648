"""One long training run of four ranks, whose memory, descriptors, threads and process groups must not
grow.
"""

import importlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.injected import PLACES
from tools.faults.cases import Outcome

RANKS, STEPS, WARM, EVERY = 4, 2000, 200, 10
"""`EVERY`: steps between two samples; `WARM`: steps before what is judged."""
MOST_MB = 1.0
"""Growth of resident memory in 100 steps."""
COUNTED = ("descriptors", "threads", "groups")


def install(folder: Path, rank: int) -> None:
    """Have this rank write a sample of itself every so many steps."""
    import torch.distributed as dist

    module, _, name = PLACES["lengths"].partition(":")
    holder: Any = importlib.import_module(module)
    real, calls = getattr(holder, name), [0]

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] % EVERY == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            groups: Any = dist.distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
            sample = {
                "step": calls[0],
                "mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "groups": len(groups),
            }
            with (folder / f"watched{rank}.jsonl").open("a") as stream:
                stream.write(json.dumps(sample) + "\n")
        return real(*args, **kwargs)

    setattr(holder, name, watched)


@contextmanager
def soak() -> Iterator[Callable[[int], Outcome]]:
    """Run for long; the next case with other lengths."""
    from tools.faults import training

    with training.one_at_a_time() as runs:
        yield lambda number: try_soak(runs, number)


def try_soak(runs: Any, number: int) -> Outcome:
    """A run of `STEPS` steps with random lengths, saves and evaluation. `runs`: `Runs` of training."""
    from tests.megatron.conftest import write_corpus

    draw = random.Random(f"soak {number}")
    lengths = [max(1, int(300 * draw.random() ** 3)) for _ in range(3000)]
    flags = {
        "num-layers": 1,
        "context-parallel-size": RANKS,
        "train-iters": STEPS,
        "lr-decay-iters": STEPS,
        "data-path": write_corpus(runs.folder / f"soak{number}", lengths),
        "split": "80,20,0",
        "eval-interval": 50,
        "eval-iters": 1,
        "ckpt-format": "torch_dist",
        "save": runs.folder / "checkpoint",
        "save-interval": 100,
        "log-interval": 50,
    }
    result = runs.run({"name": "zeppelin"}, RANKS, flags, "soak", entry="watched", deadline_s=3 * 3600.0)
    if result.failed is not None:
        return Outcome("failed", f"{result.codes}: {result.tail(result.failed)[-400:]}")
    samples = [_samples(Path(result.logs) / f"watched{rank}.jsonl") for rank in range(RANKS)]
    return judged(samples, STEPS)


def judged(ranks: list[dict[str, np.ndarray[Any, Any]]], steps: int) -> Outcome:
    """How the ranks did: `ranks`: by rank and name, the samples of a run of `steps` steps."""
    wrong, slopes = list[str](), list[float]()
    for rank, found in enumerate(ranks):
        late = found["step"] > min(WARM, steps // 2)
        if found["step"][-1] < steps - EVERY or late.sum() < 2:
            return Outcome("cut short", f"rank {rank}: the last sample is of step {found['step'][-1]}")
        slopes.append(100 * float(np.polyfit(found["step"][late], found["mb"][late], 1)[0]))
        if slopes[-1] >= MOST_MB:
            wrong.append(f"rank {rank}: {slopes[-1]:.2f} MB more in 100 steps")
        for name in COUNTED:
            if len(set(found[name][late].tolist())) > 1:
                wrong.append(f"rank {rank}: {name} from {found[name][late].min():.0f} to {found[name][late].max():.0f}")
    kind = f"{steps} steps, at most {max(slopes):.2f} MB more in 100"
    return Outcome(kind, "; ".join(wrong))


def _samples(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {name: np.array([line[name] for line in lines], dtype=float) for name in ("step", "mb", *COUNTED)}

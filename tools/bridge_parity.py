"""Megatron-Bridge's own `pretrain` on CPUs, alone and with plans: largest differences of its losses.

    python -m tools.bridge_parity BRIDGE --path MEGATRON PACKAGES [--planners zeppelin] [--layouts dp]

BRIDGE: a checkout of Megatron-Bridge. MEGATRON: the Megatron-LM that it names in `3rdparty`, with
its compiled data set helpers (`make -C MEGATRON/megatron/core/datasets`). PACKAGES: a folder of `pip
install --target PACKAGES --no-deps` with what Bridge imports (scripts/examples/bridge.md).

Runs scripts/examples/bridge_balanced.py, which trains a small GPT on documents of 1 to 300 tokens
and evaluates it. Prints a row a planner: the largest relative difference of a loss, a gradient norm
or an evaluation from Bridge alone, by layout. Exit code 1 if one is above 1e-5.

Bridge alone has as many replicas, since its evaluation draws by them, and no context parallelism,
which Megatron's own layers on CPUs have not.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from megatron_balance.planners import PLANNERS
from megatron_balance.workloads.idx import CorpusWriter
from tools.megatron_versions import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "examples" / "bridge_balanced.py"
TOLERANCE = 1e-5
DOCUMENTS = (300, 140, 40, 20, 7, 1)
EOD = 95
LAYOUTS = {
    "dp": ("DP 2", 2, {}),
    "cp": ("CP 2", 1, {"context": 2}),
    "dp_cp": ("DP 2, CP 2", 2, {"context": 2}),
    "pp": ("CP 2, PP 2", 1, {"context": 2, "pipeline": 2}),
    "tp": ("CP 2, TP 2", 1, {"context": 2, "tensor": 2}),
}
"""By name: its title, replicas, and sizes of other groups."""
Lines = list[tuple[str, list[float]]]


class Bridge:
    """Runs of the example on one Bridge, in one folder."""

    def __init__(self, path: Sequence[str], folder: Path) -> None:
        """Write the corpus; `path`: folders put in front of sys.path."""
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        self.corpus = folder / "documents"
        generator = np.random.default_rng(1)
        with CorpusWriter(self.corpus, "uint16") as writer:
            for length in itertools.islice(itertools.cycle(DOCUMENTS), 200):
                tokens = generator.integers(0, EOD, length + 1)
                tokens[-1] = EOD
                writer.add_document(tokens.astype(np.uint16))
        self._alone: dict[tuple[object, ...], Lines] = {}

    def train(self, replicas: int, sizes: dict[str, int], planner: str | None = None) -> Lines:
        """Lines that the example printed, each once.

        Raises:
            RuntimeError: it failed; the end of its log.
        """
        ranks = math.prod((replicas, *sizes.values()))
        words = [str(SCRIPT), "--cpu", "--corpus", str(self.corpus)]
        words += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        if planner is not None:
            options = {"planner": {"name": planner, **OPTIONS.get(planner, {})}, "cluster": {"ranks_per_node": 1}}
            config = self.folder / f"{planner}.yaml"
            # Bridge hands the schedule groups of its own, over which stages cannot attend together.
            options |= {"plan_ahead": False, "pipeline": "stages"}
            config.write_text(yaml.safe_dump(options), encoding="utf-8")
            words += ["--balance", str(config)]
        here = ["--standalone", "--local-addr", "127.0.0.1"]
        start = [sys.executable, "-m", "torch.distributed.run", *here, "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*start, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        lines = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("step [", "eval ["))]
        # Every rank of the last stage prints the same.
        return [(what, json.loads(values)) for what, values in dict.fromkeys(map(tuple, lines))]

    def alone(self, replicas: int, sizes: dict[str, int]) -> Lines:
        """Lines of Bridge without plans and context parallelism."""
        others = {name: size for name, size in sizes.items() if name != "context"}
        key = (replicas, *others.items())
        if key not in self._alone:
            self._alone[key] = self.train(replicas, others)
        return self._alone[key]


def differs(found: Lines, wanted: Lines) -> float:
    """The largest relative difference of a number; infinite where there are others.

    A gradient norm is a float of fp32, as losses are.
    """
    if not wanted or [(what, len(values)) for what, values in found] != [(what, len(each)) for what, each in wanted]:
        return float("inf")
    pairs = [pair for (_, got), (_, alone) in zip(found, wanted, strict=True) for pair in zip(got, alone, strict=True)]
    return max(abs(got - alone) / abs(alone) for got, alone in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bridge", type=Path, metavar="BRIDGE")
    parser.add_argument("--path", nargs="+", default=[], metavar="FOLDER", help="put in front of sys.path")
    parser.add_argument("--planners", nargs="+", choices=tuple(PLANNERS), default=["te_ring", "zeppelin", "distca"])
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    args = parser.parse_args(argv)
    path = [str(args.bridge / "src"), *args.path]
    titles = [LAYOUTS[layout][0] for layout in args.layouts]
    print(f"| planner | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        bridge = Bridge([str(Path(each).resolve()) for each in path], Path(name))
        for planner in args.planners:
            row: list[float] = []
            for layout in args.layouts:
                _, replicas, sizes = LAYOUTS[layout]
                row.append(differs(bridge.train(replicas, sizes, planner), bridge.alone(replicas, sizes)))
                print(planner, layout, f"{row[-1]:.1e}", file=sys.stderr, flush=True)
            print(f"| {planner} | {' | '.join(f'{each:.1e}' for each in row)} |", flush=True)
            worst = max(worst, *row)
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

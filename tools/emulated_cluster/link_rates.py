"""Measured rates of the emulated links on this machine: the table of docs/emulated-cluster.md, and
an example of the API.

`python -m tools.emulated_cluster.link_rates [--mbit 25,50,...] [--repeats 5] [--seconds 0.5]`
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tools.emulated_cluster import Controller, Topology, run
from tools.emulated_cluster.wiring import MTU

INTRA_TO_NIC = 8
HEADERS = 20 + 32, 14  # of IP and TCP inside a packet of MTU bytes; of the frame around it
GOODPUT = (MTU - HEADERS[0]) / (MTU + HEADERS[1])
LEAD_S = 0.05

CASES = {
    "one way": ((0, 4),),
    "both ways": ((0, 4), (4, 0)),
    "two to one": ((0, 4), (1, 4)),
    "four NICs": ((0, 4), (1, 5), (2, 6), (3, 7)),
    "in the node": ((0, 1),),
}
"""Pairs (source, destination) that start together, on 2 nodes of 4 ranks with a NIC each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; rank 0 does both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mbit", type=lambda words: [int(word) for word in words.split(",")], default=[25, 50, 100, 200, 400, 800]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="what a transfer over one NIC should take; sets its bytes"
    )
    parser.add_argument("--logs", type=Path, default=Path("out") / "link-rates")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    topology = Topology(2, 4, 4, nic_bits_per_s=options.mbit[0] * 1_000_000, intra_bits_per_s=None)

    def measure(rank: int, controller: Controller) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            print(f"{'NIC Mbit/s':>10} {'MB':>6}" + "".join(f" {name:>20}" for name in CASES))
        for mbit in options.mbit:
            if rank == 0:
                controller.reshape(mbit * 1_000_000, INTRA_TO_NIC * mbit * 1_000_000)
            num_bytes = int(mbit * 1e6 / 8 * GOODPUT * options.seconds)
            cells = [_cell(rank, name, num_bytes, options) for name in CASES]
            if rank == 0:
                print(f"{mbit:>10} {num_bytes / 1e6:>6.2f}" + "".join(f" {cell:>20}" for cell in cells), flush=True)
        dist.destroy_process_group()

    start = time.monotonic()
    result = run(topology, measure, options.logs, show=0)
    print(f"measured over expected time, median (shortest-longest) of {options.repeats}")
    print(f"set up and torn down in {time.monotonic() - start - result.seconds:.2f} s")
    return 0


def _cell(rank: int, name: str, num_bytes: int, options: argparse.Namespace) -> str:
    pairs = CASES[name]
    expected_s = options.seconds * max([sum(dst == one for _, dst in pairs) for one in range(8)])
    if name == "in the node":
        expected_s /= INTRA_TO_NIC
    ratios = [transfer_s(rank, pairs, num_bytes) / expected_s for _ in range(options.repeats)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"


def transfer_s(rank: int, pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
    """Seconds from a common start until all of these transfers have ended on all ranks."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    # all ranks share this machine's clock
    start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, float(start) - time.monotonic()))
    # Receives first: gloo asks for what it receives on the same connection, behind what is being
    # sent on it.
    works = [dist.irecv(torch.empty_like(payload), src) for src, dst in pairs if dst == rank]
    works += [dist.isend(payload, dst) for src, dst in pairs if src == rank]
    for work in works:
        assert work is not None
        work.wait()
    end = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return float(end - start)


if __name__ == "__main__":
    sys.exit(main())

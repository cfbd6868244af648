"""Every way to train the example's diffusion transformer on 4 ranks against one rank that sees every
sample by itself: topologies and planners, FSDP2 and DDP, checkpointing, torch.compile, accumulation.

python -m tools.dit_parity [--only TEXT] [--exactly NAME ...] [--steps 20]
"""

from __future__ import annotations

import argparse
import time
from itertools import product

from megatron_balance.planners import PLANNERS
from tests.support import dit_jobs
from tests.support.pool import Pool
from tests.support.torch_jobs import Trained

TOPOLOGIES = ("g1n4", "g2n2", "g4n1", "g2n1+g1n2", "g1n1", "g2n1")
TOLERANCE = 1e-5


def main() -> int:
    """Print a line for each way; 1 if one differs by more than 1e-5."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--exactly", nargs="+", default=[], metavar="NAME", help="ways of these names")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile: eager, aot_eager, inductor")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    truth = dit_jobs.reference(dit_jobs.arguments(steps=options.steps))
    ranks, worst = Pool(timeout_s=600, num_ranks=4), 0.0
    try:
        for name, way in ways(options.steps, options.backend).items():
            if options.only in name and (not options.exactly or name in options.exactly):
                began = time.perf_counter()
                (found,) = ranks.run(dit_jobs.train, 4, [way])[0]
                loss, norm, gradient = differences(found, truth)
                worst = max(worst, loss, norm, gradient)
                seconds = time.perf_counter() - began
                print(
                    f"{name:58} loss {loss:.1e} norm {norm:.1e} gradients {gradient:.1e} {seconds:5.1f} s", flush=True
                )
    finally:
        ranks.close()
    print(f"largest relative difference {worst:.1e}; allowed {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


def ways(steps: int, backend: str) -> dict[str, argparse.Namespace]:
    """Names and arguments of every way."""
    placed = [{"topology": each} for each in TOPOLOGIES]
    placed += [{"planner": name} for name, planner in PLANNERS.items() if "full" in planner.masks and planner.plan]
    found: dict[str, argparse.Namespace] = {}
    for how, ddp, checkpoint, compiled, accumulate in product(
        placed, (False, True), (False, True), ("", backend), (1, 2)
    ):
        words = [*how.values(), "DDP" if ddp else "FSDP2", "checkpointed" * checkpoint, "compiled" * bool(compiled)]
        name = ", ".join(word for word in [*words, "accumulated" * (accumulate > 1)] if word)
        given = {"ddp": ddp, "checkpoint": checkpoint, "compile": compiled, "accumulate": accumulate, "steps": steps}
        found[name] = dit_jobs.arguments(**how, **given)
    return found


def differences(found: Trained, truth: Trained) -> tuple[float, float, float]:
    """Largest relative differences of losses, gradient norms, and the first step's gradients."""
    loss, norm = (
        max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in ((found.losses, truth.losses), (found.norms, truth.norms))
    )
    gradient = max(
        float((found.gradients[name] - each).abs().max()) / max(float(each.abs().max()), 1e-3)
        for name, each in truth.gradients.items()
    )
    return loss, norm, gradient


if __name__ == "__main__":
    raise SystemExit(main())

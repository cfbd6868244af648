"""Gains of routing over real, shaped NICs: one transfer and one ring between two emulated nodes,
routed against direct, beside Eq. 1.

python -m tools.bench.routing [--mbit 50 100] [--megabytes 8 32] [--ring-megabytes 4] [--nics 4 2 1]
    [--repeats 5] [--json]

What runs are plans, by the executor, forward and backward. In the transfer, the first rank of one
node has the keys and values that the first rank of the other attends to; in the ring, all ranks do.
Heads are many and tokens few, so that attention takes next to no time. Direct and routed calls take
turns, and what they compute is compared. Times are from a common start until the last rank is done.

Eq. 1 (Zeppelin, section 3.3) is reckoned with the rates of the links, headers taken off; unshaped
links inside a node count as taking no time. It lets the three hops of a transfer follow one
another. A ring's rounds overlap: while a piece of one round crosses, those of the next are handed
out, so that over shaped links a ring takes less than as many transfers. Where a node has fewer NICs
than ranks, transfers are also cut into as many pieces as there are ranks: more pieces than NICs
gain nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from megatron_balance.ir.columns import Rows
from megatron_balance.ir.plan import MicrobatchPlan, Routing, TaskTable, Zone
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import Groups, make_groups
from tools.bench.together import from_common_start
from tools.emulated_cluster import Controller, Topology, run
from tools.emulated_cluster.link_rates import GOODPUT

# a process's first backward imports it: once here, not in every rank
importlib.import_module("torch.fx.experimental.symbolic_shapes")

NODES, RANKS_PER_NODE = 2, 4
NUM_RANKS = NODES * RANKS_PER_NODE
INTRA_TO_NIC = 8
MEGABYTE = 1 << 20
HEAD_DIM, ELEMENT_BYTES = 256, 4
TRANSFER_TOKENS, RING_TOKENS_PER_RANK = 32, 2

CLOSE = 1.1
"""Repetitions may end when the shortest take no more than this times what Eq. 1 says."""

What: TypeAlias = Literal["transfer", "ring"]


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes: what: "transfer": one, from the first rank of node 0 to the first of node 1
        (backward: its gradient, back); "ring": all ranks. num_bytes: Payload of the transfer, or of
        what a rank of the ring passes on in one round. nics: NICs of a node. pieces: What a
        transfer between nodes is cut into when it is routed. nic_bits_per_s: Rate of a NIC, in
        either direction. intra_bits_per_s: Rate of a rank's link inside its node; None: unshaped.
    """

    what: What
    num_bytes: int
    nics: int
    pieces: int
    nic_bits_per_s: int
    intra_bits_per_s: int | None


class Seconds(NamedTuple):
    """Of one call."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Measured:
    """All repetitions; `equal`: on this rank, the last direct and the last routed call computed the
    same outputs and gradients.
    """

    case: Case
    direct: tuple[Seconds, ...]
    routed: tuple[Seconds, ...]
    equal: bool


class Repeats(NamedTuple):
    """Number of repetitions: `most`, or fewer, but `least`, as soon as the shortest calls are as
    fast as the links (`CLOSE`).
    """

    least: int
    most: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the grid and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mbit",
        type=int,
        nargs="+",
        default=[50, 100],
        help="rates of a NIC; a link inside a node: unshaped, and 8 times it",
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[8, 32], help="of the transfer")
    parser.add_argument(
        "--ring-megabytes", type=int, nargs="+", default=[4], help="that a rank of the ring passes on in a round"
    )
    parser.add_argument(
        "--nics",
        type=int,
        nargs="+",
        default=[4, 2, 1],
        help="of a node; with fewer than 4 the first size of each list only",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--logs", type=Path, default=Path("out") / "routing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for nics in options.nics:
        cases = list(_grid(nics, options))
        topology = Topology(NODES, RANKS_PER_NODE, nics, cases[0].nic_bits_per_s, None)
        job = _Job(cases, Repeats(options.repeats, options.repeats))
        ranks = run(topology, job, options.logs / f"{nics}-nics").values
        rows += [row for of_case in zip(*ranks, strict=True) for row in _rows(of_case)]
    print(json.dumps({"rows": rows}) if options.json else _table(rows))
    return 0


def _grid(nics: int, options: argparse.Namespace) -> Iterator[Case]:
    whole = nics == RANKS_PER_NODE
    sizes: list[tuple[What, list[int]]] = [("transfer", options.megabytes), ("ring", options.ring_megabytes)]
    for mbit in options.mbit:
        for intra in (None, INTRA_TO_NIC * mbit * 1_000_000) if whole else (None,):
            for what, megabytes in sizes:
                for size in megabytes if whole else megabytes[:1]:
                    for pieces in sorted({max(2, nics), RANKS_PER_NODE} if nics > 1 else {RANKS_PER_NODE}):
                        yield Case(what, size * MEGABYTE, nics, pieces, mbit * 1_000_000, intra)


def _rows(of_ranks: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """Forward and backward of one case. Seconds are the same on all ranks."""
    measured = of_ranks[0]
    direct_s, routed_s = eq1(measured.case)
    for at, phase in enumerate(Seconds._fields):
        direct, routed = ([seconds[at] for seconds in of] for of in (measured.direct, measured.routed))
        yield {
            **asdict(measured.case),
            "phase": phase,
            "equal": all(of_rank.equal for of_rank in of_ranks),
            "direct": _statistics(direct, direct_s),
            "routed": _statistics(routed, routed_s),
            "ratio": {
                "median": statistics.median(direct) / statistics.median(routed),
                "min": min(direct) / min(routed),
                "eq1": direct_s / routed_s,
            },
        }


def _statistics(seconds: Sequence[float], eq1_s: float) -> dict[str, float]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "eq1": eq1_s}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    times = f"{'median':>7} {'min':>6} {'max':>6} {'Eq. 1':>6}"
    lines = [
        f"{'':49} | {'direct, s':^28} | {'routed, s':^28} {'error of':>15} | direct / routed",
        f"{'':8} {'':8} {'NICs':>4} {'pieces':>6} {'Mbit/s':>6} {'in node':>8} {'MB':>3} | {times} | {times} "
        f"{'median':>7} {'min':>7} | "
        f"{'median':>6} {'min':>5} {'Eq. 1':>5}",
    ]
    for row in rows:
        direct, routed, ratio = row["direct"], row["routed"], row["ratio"]
        intra = "unshaped" if row["intra_bits_per_s"] is None else f"{row['intra_bits_per_s'] / 1e6:.0f}"
        errors = " ".join(f"{100 * (routed[of] / routed['eq1'] - 1):+6.1f}%" for of in ("median", "min"))
        lines.append(
            f"{row['what']:8} {row['phase']:8} {row['nics']:>4} {row['pieces']:>6} "
            f"{row['nic_bits_per_s'] / 1e6:>6.0f} {intra:>8} "
            f"{row['num_bytes'] // MEGABYTE:>3} | {_seconds(direct)} | {_seconds(routed)} {errors} | "
            f"{ratio['median']:6.2f} {ratio['min']:5.2f} {ratio['eq1']:5.2f}"
            + ("" if row["equal"] else "  OUTPUTS DIFFER")
        )
    return "\n".join(
        [
            *lines,
            "MB: 2 ** 20 bytes, of the transfer, or of what a rank of the ring passes on in one of its seven rounds",
        ]
    )


def _seconds(of: dict[str, float]) -> str:
    return f"{of['median']:7.3f} {of['min']:6.3f} {of['max']:6.3f} {of['eq1']:6.3f}"


class Expected(NamedTuple):
    """Seconds by Eq. 1."""

    direct_s: float
    routed_s: float


def eq1(case: Case) -> Expected:
    """Zeppelin's Eq. 1 for a case, a ring taken as so many transfers. More pieces than NICs cross
    no faster.
    """
    hops = 1 if case.what == "transfer" else NUM_RANKS - 1
    bits = hops * case.num_bytes * 8 / GOODPUT
    inter_s = bits / case.nic_bits_per_s
    intra_s = 0.0 if case.intra_bits_per_s is None else bits / case.intra_bits_per_s
    return Expected(inter_s, inter_s / min(case.pieces, case.nics) + 2 * intra_s * (case.pieces - 1) / case.pieces)


def plan_of(case: Case, *, routed: bool) -> MicrobatchPlan:
    """The transfer: a sequence on rank 0 but for its last token, which lies on the next node. The
    ring: one sequence, zigzag.
    """
    ring = case.what == "ring"
    tokens = RING_TOKENS_PER_RANK if ring else TRANSFER_TOKENS
    heads = case.num_bytes // (tokens * 2 * HEAD_DIM * ELEMENT_BYTES)
    return MicrobatchPlan(
        planner=case.what,
        lengths=(tokens * NUM_RANKS if ring else tokens + 1,),
        num_ranks=NUM_RANKS,
        ranks_per_node=RANKS_PER_NODE,
        num_heads=heads,
        num_kv_heads=heads,
        zones=(Zone("inter_node", "ring", tuple(range(NUM_RANKS)), (0,)) if ring else _one_transfer(tokens),),
        routing=Routing(RANKS_PER_NODE // case.pieces, (0,)) if routed else None,
    )


def _one_transfer(tokens: int) -> TaskTable:
    far = RANKS_PER_NODE
    fragments = Rows.of(4, [(0, 0, 0, tokens), (far, 0, tokens, tokens + 1)])
    tasks = Rows.of(6, [(0, 0, 0, tokens, 0, tokens), (far, 0, tokens, tokens + 1, 0, tokens + 1)])
    return TaskTable("inter_node", fragments, tasks)


@dataclass(frozen=True)
class _Job:
    """The job of every rank, as `tools.emulated_cluster.run` calls it."""

    cases: Sequence[Case]
    repeats: Repeats

    def __call__(self, rank: int, controller: Controller) -> list[Measured]:
        return measure(rank, controller, self.cases, self.repeats)


def measure(rank: int, controller: Controller, cases: Sequence[Case], repeats: Repeats) -> list[Measured]:
    """On a rank: all cases, one after the other."""
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # a hop takes a thread's waking, which waits for whatever else is on the cores
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = make_groups([list(range(NUM_RANKS))], RANKS_PER_NODE)
    found: list[Measured] = []
    for case in cases:
        dist.barrier()
        if rank == 0:
            controller.reshape(case.nic_bits_per_s, case.intra_bits_per_s)
        found.append(_measure(case, groups, repeats))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _measure(case: Case, groups: Groups, repeats: Repeats) -> Measured:
    direct, routed = (_Call(plan_of(case, routed=routed), groups) for routed in (False, True))
    expected = eq1(case)
    while len(direct.seconds) < repeats.most:
        direct.run()
        routed.run()
        close = direct.is_close_to(expected.direct_s) and routed.is_close_to(expected.routed_s)
        if close and len(direct.seconds) >= repeats.least:
            break
    equal = all(torch.equal(a, b) for a, b in zip(direct.values, routed.values, strict=True))
    return Measured(case, tuple(direct.seconds), tuple(routed.seconds), equal)


class _Call:
    """A plan, its inputs, how long its calls took, and what the last one computed: the output and
    the gradients of the inputs.
    """

    def __init__(self, plan: MicrobatchPlan, groups: Groups) -> None:
        self.bound = bind(plan, groups.rank, AttentionShape(plan.num_heads, plan.num_kv_heads, HEAD_DIM), groups=groups)
        generator = torch.Generator().manual_seed(groups.rank)
        shape = (self.bound.num_tokens, plan.num_heads, HEAD_DIM)
        self.inputs = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
        self.dout = torch.randn(shape, generator=generator)
        self.seconds: list[Seconds] = []
        self.values: list[torch.Tensor] = []

    def run(self) -> None:
        q, k, v = self.inputs
        out, forward_s = from_common_start(lambda: balanced_attention(q, k, v, self.bound))
        grads, backward_s = from_common_start(lambda: torch.autograd.grad(out, self.inputs, self.dout))
        self.values = [out.detach(), *grads]
        self.seconds.append(Seconds(forward_s, backward_s))

    def is_close_to(self, expected_s: float) -> bool:
        """Whether the shortest forward and the shortest backward are; what else runs on the cores
        only lengthens them.
        """
        return all(min(times) <= CLOSE * expected_s for times in zip(*self.seconds, strict=True))


if __name__ == "__main__":
    sys.exit(main())

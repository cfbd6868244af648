"""One transfer and one ring between two emulated nodes, routed and direct in turns, beside Eq."""

# 1.
#
# In the transfer, the first rank of one node has the keys and values that the first rank of the
# other attends to; in the ring, all ranks do. Heads are many and tokens few, so that attention
# takes next to no time.

import contextlib
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_balance import MicrobatchPlan
from megatron_balance.ir.plan import Routing
from megatron_balance.runtime.attention import balanced_attention
from megatron_balance.runtime.bind import AttentionShape, bind
from megatron_balance.runtime.groups import Groups, make_groups
from tests.support import by_hand
from tools.bench.together import from_common_start
from tools.emulated_cluster import Controller
from tools.emulated_cluster.wiring import GOODPUT

# a process's first backward imports it: once here, not in every rank
importlib.import_module("torch.fx.experimental.symbolic_shapes")

NODES, RANKS_PER_NODE = 2, 4
NUM_RANKS = NODES * RANKS_PER_NODE
MEGABYTE = 1 << 20
HEAD_DIM, ELEMENT_BYTES = 256, 4
TRANSFER_TOKENS, RING_TOKENS_PER_RANK = 32, 2

# Repetitions: MOST, or fewer when the shortest take no more than CLOSE times what Eq. 1 says.
CLOSE, MOST = 1.1, 24


@dataclass(frozen=True, slots=True)
class Case:
    # One comparison.
    #
    # Attributes: what: "transfer": one, from the first rank of node 0 to the first of node 1
    # (backward: its gradient, back); "ring": all ranks. num_bytes: Payload of the transfer, or of
    # what a rank of the ring passes on in one round. nics: NICs of a node. pieces: What a transfer
    # between nodes is cut into when it is routed. nic_bits_per_s: Rate of a NIC, in either
    # direction. intra_bits_per_s: Rate of a rank's link inside its node; None: unshaped.
    what: Literal["transfer", "ring"]
    num_bytes: int
    nics: int
    pieces: int
    nic_bits_per_s: int
    intra_bits_per_s: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    # All repetitions; `equal`: on this rank, the last direct and the last routed call computed the
    # same outputs and gradients.
    case: Case
    # (forward, backward) seconds of each call
    direct: tuple[tuple[float, float], ...]
    routed: tuple[tuple[float, float], ...]
    equal: bool


class Expected(NamedTuple):
    # Seconds by Eq. 1.
    direct_s: float
    routed_s: float


def eq1(case: Case) -> Expected:
    # Zeppelin's Eq. 1 for a case, a ring taken as so many transfers. More pieces than NICs cross no
    # faster.
    hops = 1 if case.what == "transfer" else NUM_RANKS - 1
    bits = hops * case.num_bytes * 8 / GOODPUT
    inter_s = bits / case.nic_bits_per_s
    intra_s = 0.0 if case.intra_bits_per_s is None else bits / case.intra_bits_per_s
    return Expected(inter_s, inter_s / min(case.pieces, case.nics) + 2 * intra_s * (case.pieces - 1) / case.pieces)


def plan_of(case: Case, *, routed: bool) -> MicrobatchPlan:
    # The transfer: a sequence on rank 0 but for its last token, which lies on the next node. The
    # ring: one sequence, zigzag.
    ring = case.what == "ring"
    tokens = RING_TOKENS_PER_RANK if ring else TRANSFER_TOKENS
    heads = case.num_bytes // (tokens * 2 * HEAD_DIM * ELEMENT_BYTES)
    far = RANKS_PER_NODE
    fragments = [(0, 0, 0, tokens), (far, 0, tokens, tokens + 1)]
    tasks = [(0, 0, 0, tokens, 0, tokens), (far, 0, tokens, tokens + 1, 0, tokens + 1)]
    zone = by_hand.ring(range(NUM_RANKS), 0) if ring else by_hand.task_table(fragments, tasks)
    routing = Routing(RANKS_PER_NODE // case.pieces, (0,)) if routed else None
    lengths = (tokens * NUM_RANKS if ring else tokens + 1,)
    return by_hand.plan(lengths, NUM_RANKS, zone, ranks_per_node=far, heads=(heads, heads), routing=routing)


def measure(rank: int, controller: Controller, cases: Sequence[Case]) -> list[Measured]:
    # On a rank: all cases, one after the other.
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
        found.append(_measure(case, groups))
    dist.barrier()
    dist.destroy_process_group()
    return found


def _measure(case: Case, groups: Groups) -> Measured:
    direct, routed = (_Call(plan_of(case, routed=routed), groups) for routed in (False, True))
    expected = eq1(case)
    # Each for itself: a direct call takes several times as long, and is seldom disturbed.
    for call, expected_s in ((direct, expected.direct_s), (routed, expected.routed_s)):
        while len(call.seconds) < MOST and not (call.seconds and call.is_close_to(expected_s)):
            call.run()
    equal = all(torch.equal(a, b) for a, b in zip(direct.values, routed.values, strict=True))
    return Measured(case, tuple(direct.seconds), tuple(routed.seconds), equal)


class _Call:
    # A plan, its inputs, how long its calls took, and what the last one computed: the output and
    # the gradients of the inputs.
    def __init__(self, plan: MicrobatchPlan, groups: Groups) -> None:
        self.bound = bind(plan, groups.rank, AttentionShape(plan.num_heads, plan.num_kv_heads, HEAD_DIM), groups=groups)
        generator = torch.Generator().manual_seed(groups.rank)
        shape = (self.bound.num_tokens, plan.num_heads, HEAD_DIM)
        self.inputs = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
        self.dout = torch.randn(shape, generator=generator)
        self.seconds: list[tuple[float, float]] = []
        self.values: list[torch.Tensor] = []

    def run(self) -> None:
        q, k, v = self.inputs
        out, forward_s = from_common_start(lambda: balanced_attention(q, k, v, self.bound))
        grads, backward_s = from_common_start(lambda: torch.autograd.grad(out, self.inputs, self.dout))
        self.values = [out.detach(), *grads]
        self.seconds.append((forward_s, backward_s))

    def is_close_to(self, expected_s: float) -> bool:
        # Whether the shortest forward and the shortest backward are; what else runs on the cores
        # only lengthens them.
        return all(min(times) <= CLOSE * expected_s for times in zip(*self.seconds, strict=True))

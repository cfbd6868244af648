"""Host time of a layer on one rank of real plans, beside the attention kernel's predicted time.

python -m tools.bench.host [--plan NAME] [--policy keep] [--repeats 30] [--json]

What the host issues is counted on stand-ins: the executor, the transport `Streamed`, the memory pool,
the varlen kernel and the Triton mover are those of training; stand-ins take the place of streams, of
the attention library and of Triton's kernels and do nothing but count, so no other rank is needed. A
group call is a batch of sends and receives or a collective; a launch is a kernel of attention or of
Triton; an operator is a call into torch that would launch a kernel on a GPU.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_balance import Cluster, MicrobatchPlan, make_planner
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.base import Host
from megatron_balance.cost.kernel import law_of
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import Zone
from megatron_balance.ir.step import Layers
from megatron_balance.runtime import bind as binding
from megatron_balance.runtime.bind import AttentionShape, Bound, bind
from megatron_balance.runtime.executor import run_backward, run_forward
from megatron_balance.runtime.groups import Groups, stream_names
from megatron_balance.runtime.kernels import CuSeqlens, Grads, VarlenKernel
from megatron_balance.runtime.movers.triton import mover as triton_mover
from megatron_balance.runtime.pool import BufferPool
from megatron_balance.workloads.lengths import draw

NUM_RANKS, TOKENS = 64, 8192
DATASET = "arxiv"
SLACK = 1.25
"""Tokens that a rank may hold, over its even share."""

KERNEL = "flash_attn_3"
"""The attention kernel that host time is held against: the fastest, so the strictest."""

PLANS: Mapping[str, tuple[str, Layers, Mapping[str, Any]]] = {
    "te_ring": ("te_ring", Layers(), {}),
    "hybrid_dp": ("hybrid_dp", Layers(), {}),
    "ulysses": ("ulysses", Layers(), {}),
    "head exchange in a node": ("flexsp", Layers(), {}),
    # Rings, which are what is routed.
    "zeppelin, routed": ("zeppelin", Layers(routing="pays", remap=True), {"rule": "groups", "group_size": 1}),
    "zeppelin, waves": ("zeppelin", Layers(routing="pays", remap=True), {"rule": "waves"}),
    "zeppelin, groups": ("zeppelin", Layers(routing="pays", remap=True), {"rule": "groups"}),
    "distca": ("distca", Layers(), {}),
}
"""Planner, layers and options by name."""

NODE = 8
"""Ranks of the head exchanges of "head exchange in a node"."""


def machine(num_ranks: int = NUM_RANKS) -> tuple[Cluster, Model]:
    """H100 nodes, priced at the rate of `KERNEL`, and LLaMA 7B."""
    return load_cluster("h100").build(num_ranks=num_ranks).with_kernel(KERNEL), load_model("llama-7b")


def plan_of(name: str, num_ranks: int = NUM_RANKS, seed: int = 0) -> MicrobatchPlan:
    cluster, model = machine(num_ranks)
    planner, layers, more = PLANS[name]
    lengths = draw(DATASET, num_ranks * TOKENS, 1, seed)[0]
    options: dict[str, Any] = {} if planner in ("te_ring", "ulysses") else {"tokens_per_rank": int(SLACK * TOKENS)}
    options |= more
    return make_planner(planner, cluster, model, layers, **options)(lengths)


def kernel_s(plan: MicrobatchPlan) -> float:
    """Predicted seconds of the attention kernel on a rank, forward and backward of a layer: the
    plan's (query, key) pairs spread evenly, at the rate of the cluster's kernel.
    """
    cluster, model = machine(plan.num_ranks)
    pairs = sum(n * (n + 1) / 2 for n in plan.lengths)
    return AnalyticCost(cluster, model).attention_s(pairs / plan.num_ranks) * (1 + law_of(KERNEL).backward_factor)


def rank_of(name: str, plan: MicrobatchPlan) -> int:
    """The rank that is counted: one between two others in every ring, or the first of a head exchange
    over a node.
    """
    if name != "head exchange in a node":
        return 5
    return next(zone.ranks[0] for zone in plan.zones if isinstance(zone, Zone) and len(zone.ranks) == NODE)


ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "set_")
"""Operators of torch that launch nothing; views are left out by their schema."""

HEAD_DIM = 8
"""Elements of a head here: 16 bytes, as many as one access of the mover's kernels needs, so that it
launches what it does for larger heads."""

DEVICE = torch.device("cpu", 0)
"""The GPU here: a name for the host's memory under which copies to it are told from others."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Calls that one layer's forward and backward issue on one rank.

    `copies`: copies of tables from host to device, of the microbatch: at bind and in the first
    layer.
    """

    group_calls: int
    launches: int
    operators: int
    copies: int


class _Stream:
    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def wait(self, _event: object) -> None: ...

    def batch(self, _transfers: Sequence[object]) -> None:
        self.counts["group_calls"] += 1

    def call(self, _issue: Callable[[], object]) -> None:
        self.counts["group_calls"] += 1

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def uses(self, _x: Tensor) -> None: ...

    def record(self) -> object:
        return None


class _Streams:
    def __init__(self, counts: Counter[str]) -> None:
        self.stream = _Stream(counts)

    def of(self, _name: str) -> _Stream:
        return self.stream

    def now(self) -> object:
        return None

    def wait(self, _event: object) -> None: ...


class _Calls:
    """An attention library whose kernels write nothing."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def forward(self, _at: CuSeqlens, q: Tensor, _k: Tensor, _v: Tensor, _scale: float) -> tuple[Tensor, Tensor]:
        self.counts["launches"] += 1
        return torch.empty_like(q), torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32).T

    def backward(
        self, _at: CuSeqlens, _dout: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, _scale: float
    ) -> Grads:
        self.counts["launches"] += 1
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Kernel:
    """A Triton kernel that is not compiled."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *_tensors: object, **_constants: object) -> None:
        self.counts["launches"] += 1


class _Operators(TorchDispatchMode):
    """Counts the operators that would launch a kernel."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        if not is_view and func._schema.name.rpartition("::")[2] not in ALLOCATES:
            self.counts["operators"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def stand_ins(counts: Counter[str]) -> Iterator[None]:
    """Triton's kernels and the choice of kernel and mover, replaced by what counts."""
    names = ("copy_rows", "add_rows", "merge_rows")
    held: dict[tuple[Any, str], Any] = {(triton_mover, name): getattr(triton_mover, name) for name in names}
    held |= {(binding, name): getattr(binding, name) for name in ("choose_kernel", "choose_mover")}
    for name in names:
        setattr(triton_mover, name, _Kernel(counts))
    calls: Any = _Calls(counts)
    binding.choose_kernel = lambda *_, **__: VarlenKernel(KERNEL, calls)
    binding.choose_mover = lambda _, device: triton_mover.TritonMover(device)
    try:
        yield
    finally:
        for (module, name), value in held.items():
            setattr(module, name, value)


def groups_of(plan: MicrobatchPlan, rank: int, counts: Counter[str]) -> Groups:
    """A rank's view of its pool: streams that count, and a process group where training has one."""
    size, per_node = plan.num_ranks, plan.ranks_per_node
    whole: Any = object()
    node = rank // per_node
    by_ranks: dict[tuple[int, ...], Any] = {tuple(range(size)): whole}
    if 1 < per_node < size:
        by_ranks[tuple(range(node * per_node, (node + 1) * per_node))] = whole
    assert stream_names(size, per_node), "one rank alone communicates with nobody"
    streams: Any = _Streams(counts)
    return Groups(rank, size, tuple(range(size)), whole, by_ranks, streams=streams, buffers=BufferPool(cpu=True))


def bound_rank(plan: MicrobatchPlan, rank: int, counts: Counter[str], policy: Policy) -> Bound:
    """The plan bound for `rank`; tables are copied as they would be to a GPU."""
    shape = AttentionShape(plan.num_heads, plan.num_kv_heads, HEAD_DIM)
    groups = groups_of(plan, rank, counts)
    return bind(plan, rank, shape, groups=groups, device=DEVICE, dtype=torch.bfloat16, policy=policy)


def layer(bound: Bound) -> None:
    heads = (bound.shape.num_heads, bound.shape.num_kv_heads, bound.shape.num_kv_heads)
    q, k, v = (torch.empty((bound.num_tokens, n, HEAD_DIM), dtype=torch.bfloat16) for n in heads)
    out, lse, received = run_forward(bound, q, (k, v), 1.0)
    run_backward(bound, torch.empty_like(out), (q, k, v), (out, lse), received, 1.0)


@contextmanager
def copies(counts: Counter[str]) -> Iterator[None]:
    """Count the tables that go to the device: calls of `Tensor.to` with a device."""
    held = Tensor.to

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == DEVICE:
            counts["copies"] += 1
        return held(self, *args, **kwargs)

    Tensor.to = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Tensor.to = held


def count(plan: MicrobatchPlan, rank: int, policy: Policy = "keep") -> Counted:
    """Count one rank's layer."""
    counts: Counter[str] = Counter()
    with stand_ins(counts), copies(counts):
        bound = bound_rank(plan, rank, counts, policy)
        layer(bound)  # tables that are made in the first layer
        tables = counts["copies"]
        counts.clear()
        with _Operators(counts):
            layer(bound)
    return Counted(counts["group_calls"], counts["launches"], counts["operators"], tables)


@contextmanager
def idle_operators() -> Iterator[None]:
    """Operators that touch data do not: what is left is the host's time."""
    held = {name: getattr(Tensor, name) for name in ("zero_", "fill_", "copy_", "index_select", "to")}

    def select(self: Tensor, _dim: int, index: Tensor) -> Tensor:
        return torch.empty((len(index), *self.shape[1:]), dtype=self.dtype)

    def to(self: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.shape, dtype=dtype)

    other = {"index_select": select, "to": to}
    for name in held:
        setattr(Tensor, name, other.get(name, lambda self, *_: self))
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(Tensor, name, value)


def python_s(plan: MicrobatchPlan, rank: int, policy: Policy, repeats: int) -> float:
    """The least CPU seconds that a layer takes on the stand-ins in `repeats` runs."""
    counts: Counter[str] = Counter()
    seconds: list[float] = []
    with stand_ins(counts):
        bound = bound_rank(plan, rank, counts, policy)
        layer(bound)
    with stand_ins(counts), idle_operators():
        for _ in range(repeats):
            begin = time.thread_time()  # of this thread: other processes do not count
            layer(bound)
            seconds.append(time.thread_time() - begin)
    return min(seconds)


PRICES = Host(call_s=35e-6, launch_s=30e-6)
"""A group call through torch's NCCL process group, and a kernel launched by torch or Triton.
Estimates, not measured here: the table of docs/measurements/host-time.md says what is."""

BUDGETS: dict[str, float] = {
    "distca": 0.5,
    "head exchange in a node": 0.5,
    "zeppelin, waves": 0.55,
    "zeppelin, groups": 0.5,
    "zeppelin, routed": 1.2,
}
"""Most host time over kernel time, forward and backward of a layer; the others are printed only."""

PYTHON_S: dict[str, float] = {
    "distca": 1.3e-3,
    "head exchange in a node": 0.9e-3,
    "zeppelin, waves": 3.3e-3,
    "zeppelin, groups": 2.6e-3,
    "zeppelin, routed": 3.7e-3,
}
"""CPU seconds of a layer's Python, as docs/measurements/host-time.md has them."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds of a layer, forward and backward: what the host takes, priced and in Python, and the
    kernel.
    """

    priced_s: float
    python_s: float
    kernel_s: float

    @property
    def ratio(self) -> float:
        return (self.priced_s + self.python_s) / self.kernel_s


def host_time(found: Counted, plan: MicrobatchPlan, seconds: float) -> HostTime:
    """Price what was counted of a plan; `seconds`: of Python."""
    return HostTime(PRICES.issue_s(found.group_calls, found.launches + found.operators), seconds, kernel_s(plan))


COLUMNS = (
    *("plan", "group calls", "launches", "operators", "priced ms", "Python ms", "kernel ms"),
    *("ratio", "budget", "copies", "bind ms"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=tuple(PLANS), action="append", help="only this one; repeatable")
    parser.add_argument("--policy", choices=POLICIES, default="keep")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = [row(name, options.policy, options.repeats) for name in options.plan or PLANS]
    if options.json:
        print(json.dumps({"rows": rows, "prices": dataclasses.asdict(PRICES)}))
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for each in rows:
        print(
            f"| {each['plan']} | {each['group_calls']} | {each['launches']} | {each['operators']} | "
            f"{1e3 * each['priced_s']:.1f} | {1e3 * each['python_s']:.1f} | {1e3 * each['kernel_s']:.1f} | "
            f"{each['ratio']:.2f} | {each['budget'] or ''} | {each['copies']} | {1e3 * each['bind_s']:.0f} |"
        )
    return 0


def row(name: str, policy: Policy, repeats: int) -> dict[str, Any]:
    """Counts and times of one plan."""
    plan = plan_of(name)
    rank = rank_of(name, plan)
    found = count(plan, rank, policy)
    host = host_time(found, plan, python_s(plan, rank, policy, repeats))
    return {
        "plan": name,
        **dataclasses.asdict(found),
        **dataclasses.asdict(host),
        "ratio": host.ratio,
        "budget": BUDGETS.get(name),
        "bind_s": min(_bind_s(plan, rank, policy) for _ in range(3)),
    }


def _bind_s(plan: Any, rank: int, policy: Policy) -> float:
    counts: Counter[str] = Counter()
    with stand_ins(counts):
        begin = time.thread_time()
        bound_rank(plan, rank, counts, policy)
        return time.thread_time() - begin


if __name__ == "__main__":
    sys.exit(main())

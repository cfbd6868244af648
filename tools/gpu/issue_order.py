"""Issue order in a profiler's trace: the plan's, on the host and on the device.

What NCCL asks of all ranks is one order of group calls. Each call of a step is a range in the trace;
the kernels that a range launched say when the device ran it.
"""

import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.profiling.host_syncs import read_trace
from tests.support.rendezvous import calls_of
from tests.support.strategies import Case, plan
from tools.gpu import ranks
from tools.gpu.ranks import Place
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 25.0
PLANNERS = ("zeppelin", "distca", "ulysses", "random_zones")
POLICY = "replay"
HEADS, HEAD_DIM = (8, 4), 64
LENGTHS = (700, 300, 129, 64, 33, 1)
PREFIX = "issue "

HOST = Figure("group calls that the host issued in another order than the plan's", "", Target("equal", 0))
CALLS = Figure("group calls in the traces of all ranks", "calls", Target("at least", 1))
DEVICE = Figure("group calls that the device ran before an earlier one of their stream", "", Target("equal", 0), True)
FIGURES = (HOST, CALLS, DEVICE)


def measure(context: Context) -> Iterator[Row]:
    size = min(4, context.ranks)
    cluster, model = Cluster(size, size // 2), Model(*HEADS, HEAD_DIM, 512, 1024)
    case = Case(Batch(LENGTHS), cluster, model, None, seed=5, remapped=True, routing=(1, 1))
    plans = [plan(name, case) for name in PLANNERS]
    found = ranks.run_ranks(_rank, size, (plans,), context, seconds=context.left_s() - 2.0).results()
    issued = 0
    wrong = 0
    for at, planned in enumerate(plans):
        wanted = calls_of([planned], [compile_ranks(planned, POLICY)])
        for rank, traced in enumerate(found):
            expected = [_label(call.communicator.partition(" (")[0], call.pairs) for call in wanted[rank]]
            issued += len(traced[at][0])
            wrong += apart(traced[at][0], expected)
    yield HOST.measured(wrong, f"{', '.join(PLANNERS)} on {size} ranks, forward and backward")
    yield CALLS.measured(issued)
    if context.on_gpu:
        yield DEVICE.measured(sum(late for traced in found for _, late in traced))


def apart(found: Sequence[str], wanted: Sequence[str]) -> int:
    """How many places of two lists differ."""
    return sum(a != b for a, b in zip(found, wanted, strict=False)) + abs(len(found) - len(wanted))


def _label(stream: str, pairs: Iterable[tuple[int, int]]) -> str:
    return f"{PREFIX}{stream}: {' '.join(f'{src}-{dst}' for src, dst in sorted(pairs))}"


def issued(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ranges of group calls in a trace, in order."""
    events = trace["traceEvents"]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e.get("name", "").startswith(PREFIX)]
    return sorted(ranges, key=lambda e: e["ts"])


def late_on_device(trace: Mapping[str, Any]) -> int:
    """Kernels that begin on a stream before one that an earlier group call had launched there."""
    ranges = issued(trace)
    starts = [e["ts"] for e in ranges]
    call_of: dict[int, int] = {}  # by correlation of a launch, the group call that made it
    for event in trace["traceEvents"]:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            at = bisect_right(starts, event["ts"]) - 1
            if at >= 0 and event["ts"] < starts[at] + ranges[at]["dur"] and event["tid"] == ranges[at]["tid"]:
                call_of[event["args"]["correlation"]] = at
    ran: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        call = call_of.get(event.get("args", {}).get("correlation"))
        if event.get("cat") == "kernel" and call is not None:
            ran[event["args"]["stream"]].append((event["ts"], call))
    if starts and not ran:
        raise RuntimeError("no kernel of a group call in the trace")
    orders = [[call for _, call in sorted(of_stream)] for of_stream in ran.values()]
    return sum(b < a for order in orders for a, b in zip(order, order[1:], strict=False))


def _rank(place: Place, plans: Sequence[MicrobatchPlan]) -> list[tuple[list[str], int]]:
    """Of each plan: labels of its group calls as the trace has them, and `late_on_device`."""
    from torch.profiler import ProfilerActivity, profile

    ranks.join(place)
    pool = ranks.groups(place, place.size // 2)
    _name(pool)
    on_gpu = place.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    found: list[tuple[list[str], int]] = []
    for planned in plans:
        step = _step(place, pool, planned)
        step()  # warm, and connected
        with tempfile.TemporaryDirectory() as folder:
            with profile(activities=activities) as profiler:
                step()
                ranks.settle(place.device)
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            trace = read_trace(path)
        found.append(([e["name"] for e in issued(trace)], late_on_device(trace) if on_gpu else 0))
    ranks.leave()
    return found


def _name(pool: Any) -> None:
    """Make every group call of a pool's streams a range of the profiler, in this process."""
    of = pool.streams.of
    named: dict[str, Any] = {}

    def stream(name: str) -> Any:
        if name not in named:
            named[name] = of(name)
            what = "call" if name.endswith("collective") else "batch"
            setattr(named[name], what, partial(_ranged, name, pool.rank, getattr(named[name], what)))
        return named[name]

    pool.streams.of = stream


def _ranged(name: str, rank: int, issue: Callable[[Any], None], given: Any) -> None:
    from torch.profiler import record_function

    legs = () if name.endswith("collective") else given  # src and dst of a message are a routed piece's, not a leg's
    pairs = {(rank, leg.peer) if leg.sends else (leg.peer, rank) for leg in legs}
    with record_function(_label(name, pairs)):
        issue(given)


def _step(place: Place, pool: Any, planned: MicrobatchPlan) -> Callable[[], None]:
    import torch

    from megatron_balance.runtime.attention import balanced_attention
    from megatron_balance.runtime.bind import AttentionShape, bind

    how: Any = {"device": place.device, "dtype": torch.bfloat16}
    bound = bind(planned, place.rank, AttentionShape(*HEADS, HEAD_DIM), groups=pool, policy=POLICY, **how)
    leaves = [torch.randn(bound.num_tokens, heads, HEAD_DIM, **how) for heads in (HEADS[0], HEADS[1], HEADS[1])]
    for leaf in leaves:
        leaf.requires_grad_()

    def step() -> None:
        out = balanced_attention(leaves[0], leaves[1], leaves[2], bound)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return step

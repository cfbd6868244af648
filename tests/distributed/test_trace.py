"""Traces of real attention calls beside those of the simulated ones: the same spans, zones, peers and
bytes, whatever carries them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.trace_format import COMPUTE, Trace, TrackSpan, joined
from megatron_balance.compile.transpose import Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing
from megatron_balance.simulator.timeline import layer_trace
from tests.support import by_hand, routed, trace_processor, trace_reader
from tests.support.pool import Pool

pytestmark = pytest.mark.dist

CLUSTER = Cluster(8, 4)
RING = by_hand.plan(
    (256, 40, 40),
    8,
    by_hand.ring((1, 2, 5, 6), 0, name="far"),
    by_hand.local(0, 1),
    by_hand.local(3, 2),
    ranks_per_node=4,
    heads=(4, 2),
    moves=[(1, 6, 16)],
    routing=Routing(1, (REMAP, 0), pieces=2),
)
HEADS = by_hand.pool("head_exchange", (100, 64), 8, ranks_per_node=4, heads=(8, 8))
GATHER = by_hand.pool("all_gather", (100, 64), 8, ranks_per_node=4, heads=(4, 2))


def moved(spans: Sequence[TrackSpan]) -> Counter[tuple[object, ...]]:
    """All that travels in a layer, without times."""
    return Counter(
        (s.rank, s.track, s.name, s.phase, s.zone, tuple(sorted(s.sent.items())), tuple(sorted(s.received.items())))
        for s in spans
        if s.sent or s.received
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["gloo", "streams"])
@pytest.mark.parametrize(
    ("plan", "policy"), [(RING, "replay"), (HEADS, "keep"), (GATHER, "keep")], ids=["routed", "heads", "gather"]
)
def test_a_real_call_moves_what_the_simulated_one_moves_under_the_same_names(
    pool: Pool, tmp_path: Path, plan: MicrobatchPlan, policy: Policy, streamed: bool
) -> None:
    runs = pool.run(routed.recorded, 8, plan, policy, streamed)
    model = Model(plan.num_heads, plan.num_kv_heads, routed.HEAD_DIM, bytes_per_element=4)
    simulated = layer_trace(plan, Machine(CLUSTER, model, AnalyticCost(CLUSTER, model)), policy).spans
    expected = moved(simulated)
    for call in (0, 1):
        real = [s for spans, _, _ in runs for s in spans if s.call == call]
        assert moved(real) == expected
        for what in ("attention", "pack", "place"):
            names = {(s.rank, s.phase, s.name, s.zone) for s in real if s.what == what}
            assert names >= {(s.rank, s.phase, s.name, s.zone) for s in simulated if s.what == what}
        assert {s.microbatch for s in real} == {5}
    for rank, (spans, names, _) in enumerate(runs):
        linear = [s for s in spans if s.what == "linear"]
        assert {(s.rank, s.phase) for s in linear} == {(rank, "forward"), (rank, "backward")}
        assert {s.track for s in spans} <= {COMPUTE, *names, *(f"{name} collective" for name in names)}
        assert all(s.stop_s >= s.start_s >= 0 for s in spans)
    traces = [
        Trace(spans, {rank: f"rank {rank}"}, {"node": 0, "began_unix_s": began})
        for rank, (spans, _, began) in enumerate(runs)
    ]
    trace = joined(traces)
    assert trace.facts["skew_s"] == 0, "one machine has one clock"
    file = tmp_path / "step.json"
    file.write_text(json.dumps(trace.document(), allow_nan=False))
    found = trace_reader.read(file.read_text())
    trace_processor.check(file, found, tmp_path)
    assert len(found.arrows) == 2 * sum(len(s.sent) for s in simulated)

"""Traffic between nodes as the executor counts it, against the program's ops and against the
figures in closed form.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_balance.analysis.statistics import plan_statistics, traffic
from megatron_balance.analysis.wire import Payload
from megatron_balance.compile.pipeline import expand
from megatron_balance.compile.transpose import POLICIES
from megatron_balance.ir.model import Model
from megatron_balance.ir.program import Exchange
from tests.support import jobs
from tests.support.jobs import Run
from tests.support.pool import Pool
from tests.support.strategies import Case, cases, plan

pytestmark = pytest.mark.dist

HEAD_DIM = 4
RUNS = tuple(Run(policy) for policy in POLICIES)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("planner", ["te_ring", "zeppelin", "random_task_table", "ulysses"])
# A failure costs new ranks: shrinking would take minutes.
@settings(max_examples=4, phases=(Phase.explicit, Phase.generate))
@given(data=st.data())
def test_ranks_send_and_receive_between_nodes_what_the_program_says(
    pool: Pool, planner: str, num_ranks: int, data: st.DataObject
) -> None:
    case: Case = data.draw(cases([num_ranks], max_sequences=5, min_sequences=1))
    planned = plan(planner, case)
    model = Model(planned.num_heads, planned.num_kv_heads, HEAD_DIM, bytes_per_element=4)
    results = pool.run(jobs.attend, num_ranks, planned, HEAD_DIM, RUNS)
    counters = [r[0].counters for r in results]
    predicted = plan_statistics(planned, model)
    assert [c["bytes_received_forward"] for c in counters] == predicted["bytes_received_per_rank"]["total"]
    pairs = planned.num_heads * sum(planned.mask.num_pairs(length) for length in planned.lengths)
    for index, run in enumerate(RUNS):
        attended = sum(r[index].counters["attended_pairs"] for r in results)
        assert attended == 2 * pairs, "each pair once in the forward and once in the backward"
        program = expand(planned, run.policy)
        if any(isinstance(op, Exchange) and op.collective != "p2p" for op in (*program.forward, *program.backward)):
            # Who sends how much in a collective is the backend's business: the emulated cluster's
            # counters show it.
            continue
        planned_bytes = traffic(program, Payload.of(model), ranks_per_node=planned.ranks_per_node)
        for way, expected in (("sent", planned_bytes.inter_node_sent), ("received", planned_bytes.inter_node_received)):
            counted = [
                sum(r[index].counters[f"inter_node_bytes_{way}_{phase}"] for phase in ("forward", "backward"))
                for r in results
            ]
            assert counted == expected.tolist(), (run, way)
        assert sum(map(sum, predicted["bytes_sent_per_nic"])) == sum(
            c["inter_node_bytes_sent_forward"] for c in counters
        )
        assert predicted["routed_transfers"] <= sum(c["routed_transfers"] for c in counters)

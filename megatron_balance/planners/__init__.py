"""Planners: one file per system, none imports another. A planner is a pure function of lengths.

To add one, write its functions and options in a module of its own and add a line to `PLANNERS`
(docs/planners.md). `planners.base` has the protocol and what an entry can say.
"""

from __future__ import annotations

from megatron_balance.ir.layers import Layers
from megatron_balance.planners import (
    distca,
    flexsp,
    hybrid_dp,
    knapformer,
    llama_all_gather,
    megatron_dynamic,
    packing,
    te_ring,
    ulysses,
    wlb_llm,
    wlb_sharding,
    zeppelin,
)
from megatron_balance.planners.base import Planner, slack
from megatron_balance.planners.wlb_llm import tuning

PLANNERS: dict[str, Planner] = {
    "te_ring": Planner(te_ring.plan, te_ring.TeRingOptions),
    "llama_all_gather": Planner(llama_all_gather.plan, llama_all_gather.LlamaAllGatherOptions),
    "wlb_sharding": Planner(wlb_sharding.plan, wlb_sharding.WlbShardingOptions),
    "ulysses": Planner(ulysses.plan, ulysses.UlyssesOptions),
    "packing": Planner(packing.plan, packing.PackingOptions),
    "hybrid_dp": Planner(hybrid_dp.plan, hybrid_dp.HybridDpOptions, plan_batch=hybrid_dp.plan_batch, room=slack),
    "flexsp": Planner(flexsp.plan, flexsp.FlexSpOptions, plan_batch=flexsp.plan_batch, room=slack),
    "knapformer": Planner(knapformer.plan, knapformer.KnapFormerOptions, room=slack),
    "megatron_dynamic": Planner(
        megatron_dynamic.plan,
        megatron_dynamic.MegatronDynamicOptions,
        plan_batch=megatron_dynamic.plan_batch,
        room=slack,
        plan_with=megatron_dynamic.plan_by,
    ),
    "distca": Planner(
        distca.plan,
        distca.DistcaOptions,
        plan_owned=distca.plan_owned,
        num_holders=distca.num_holders,
        ping_pong=True,
        masks=("causal",),
    ),
    "wlb_llm": Planner(
        None,
        wlb_llm.WlbLlmOptions,
        plan_step=wlb_llm.plan_step,
        takes_waiting=True,
        tune=tuning.tune,
        room=slack,
    ),
    "zeppelin": Planner(
        zeppelin.plan, zeppelin.ZeppelinOptions, Layers(routing="pays", remap=True, remap_when="pays"), room=slack
    ),
}

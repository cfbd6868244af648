"""The table of planners. To add one, write its functions and options in a module of its own and a
line in `PLANNERS` (docs/planners.md); `planners.base` says what an entry can have. None imports
another.
"""

from typing import Any

from megatron_balance.analysis.estimate import Bounds
from megatron_balance.ir.mask import FOREST, KINDS
from megatron_balance.ir.step import Layers
from megatron_balance.planners import (
    auto,
    baselines,
    distca,
    flexsp,
    hydraulis,
    knapformer,
    megatron,
    wlb_llm,
    zeppelin,
)
from megatron_balance.planners.base import Planner, Try

_WHERE_THEY_PAY = Layers(routing="pays", remap=True, remap_when="pays", once_per_node=True)
_ONCE_PER_NODE = Layers(once_per_node=True)
_ONCE_PER_NODE_OVER_ALL_NICS = Layers(routing="pays", once_per_node=True)
# `tries`: what `auto` asks of a planner, where the bound `least` is below its best plan so far;
# `left_out`: why it does not ask.
_RINGS = (Try(least=Bounds.rings),)
_IN_ZEPPELIN = "rings on groups of ranks, as in zeppelin's search; never within 1 % of that on the common batches"
_A_PEER = "a peer, here to be compared with"


def _always(_: Any) -> bool:
    return True


def _parted_within(options: Any) -> bool:
    return PLANNERS[options.within].parts(options.within_options)


PLANNERS: dict[str, Planner] = {
    "te_ring": Planner(baselines.te_ring, baselines.WholePoolOptions, tries=(Try(least=Bounds.pool_ring),)),
    "llama_all_gather": Planner(
        baselines.llama_all_gather, baselines.WholePoolOptions, tries=(Try(least=Bounds.pool_zigzag_gather),)
    ),
    "wlb_sharding": Planner(wlb_llm.shard, wlb_llm.WlbShardingOptions, tries=(Try(least=Bounds.pool_gather),)),
    "ulysses": Planner(
        baselines.ulysses,
        baselines.WholePoolOptions,
        _ONCE_PER_NODE,
        parts_heads=_always,
        tries=(Try(least=Bounds.pool_heads),),
    ),
    "usp": Planner(baselines.usp, baselines.UspOptions, parts_heads=_always, sized_by="group_size", left_out=_A_PEER),
    "magi": Planner(baselines.magi, baselines.MagiOptions, _ONCE_PER_NODE, masks=(*KINDS, FOREST), left_out=_A_PEER),
    "packing": Planner(
        baselines.packing, baselines.PackingOptions, _ONCE_PER_NODE, tries=(Try(least=Bounds.even_tokens),)
    ),
    "hybrid_dp": Planner(
        baselines.hybrid_dp,
        baselines.HybridDpOptions,
        plan_batch=baselines.hybrid_dp_batch,
        sized_by="tokens_per_rank",
        tries=_RINGS,
        left_out=_IN_ZEPPELIN,
    ),
    "flexsp": Planner(
        flexsp.plan,
        flexsp.FlexSpOptions,
        _ONCE_PER_NODE,
        plan_batch=flexsp.plan_batch,
        parts_heads=_always,
        left_out="its integer program takes longer than a step hides",
    ),
    "knapformer": Planner(
        knapformer.plan,
        knapformer.KnapFormerOptions,
        _ONCE_PER_NODE,
        parts_heads=_always,
        tries=(Try(least=Bounds.whole_on_groups),),
        idle=knapformer.idle,
    ),
    "megatron_dynamic": Planner(
        megatron.plan,
        megatron.MegatronDynamicOptions,
        plan_batch=megatron.plan_batch,
        sized_by="tokens_per_rank",
        tries=_RINGS,
        left_out=_IN_ZEPPELIN,
        plan_with=megatron.plan_by,
    ),
    "distca": Planner(
        distca.plan,
        distca.DistcaOptions,
        _ONCE_PER_NODE_OVER_ALL_NICS,
        plan_owned=distca.plan_owned,
        num_holders=distca.num_holders,
        ping_pong=True,
        masks=("causal", "window", FOREST),
        left_out="it hides its transfers behind a second nano-batch, and microbatches run whole here",
    ),
    "wlb_llm": Planner(
        None,
        wlb_llm.WlbLlmOptions,
        plan_step=wlb_llm.plan_step,
        parts_heads=_parted_within,
        takes_waiting=True,
        tune=wlb_llm.tune,
        left_out="it moves sequences between microbatches; inside one it is the planner named by its option within",
    ),
    "hydraulis": Planner(
        None,
        hydraulis.HydraulisOptions,
        plan_step=hydraulis.plan_step,
        pipelines=True,
        strategies=hydraulis.strategies_of,
        layouts=hydraulis.layouts_of,
        parts_heads=_parted_within,
        takes_waiting=True,
        left_out="it deals sequences to pipelines; inside a microbatch it is the planner named by its option within",
    ),
    "megatron": Planner(
        None,
        megatron.MegatronOptions,
        plan_step=megatron.plan_step,
        pipelines=True,
        replicas=True,
        takes_waiting=True,
        left_out="it keeps replicas of context-parallel ranks; inside one it is te_ring",
    ),
    "zeppelin": Planner(
        zeppelin.plan,
        zeppelin.ZeppelinOptions,
        _WHERE_THEY_PAY,
        zeppelin.plan_in,
        parts_heads=zeppelin.parts_heads,
        masks=(*KINDS, FOREST),
        tries=(Try(), Try({"rule": "groups"}, by_length=True)),
    ),
    "auto": Planner(
        None,
        auto.AutoOptions,
        _WHERE_THEY_PAY,
        plan_by_others=auto.plan,
        masks=(*KINDS, FOREST),
        left_out="it is the one that asks",
    ),
}

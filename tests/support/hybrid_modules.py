# type: ignore  # a rank's script: Megatron's modules, built by keywords
"""Megatron's mixers under plans, on real ranks, against each document alone in the plain module."""

# Arguments: the file of results, tensor-parallel ranks. Fla and mamba_ssm are stand-ins. The result:
# the largest differences by mixer, of the largest value of each kind; and with a fault put in.

import json
import random
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_balance import Cluster, Model, make_planner
from megatron_balance.compile.pipeline import layout
from megatron_balance.errors import BalanceError
from megatron_balance.ir.step import Layers
from megatron_balance.megatron import recurrent
from megatron_balance.megatron.core_attention import BalancedSeqParams
from megatron_balance.megatron.groups import make_pool
from megatron_balance.training.binding import MaskBounds, RecurrentBounds
from tests.support.recurrent_jobs import FAULTS

PLANNERS = ("zeppelin", "distca", "te_ring", "ulysses", "llama_all_gather", "wlb_sharding")
CASES = 6
HIDDEN = 32
SIZES = {
    "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "normalization": "RMSNorm",
    "activation_func": F.silu, "params_dtype": torch.float32, "use_cpu_initialization": True,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 2,
}  # fmt: skip


def build(name, module, groups, deterministic):
    config = TransformerConfig(**SIZES, deterministic_mode=deterministic)
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    if name == "gated delta net":
        made = module(
            config, GatedDeltaNetSubmodules(**linear, out_norm=WrappedTorchNorm), layer_number=1, pg_collection=groups
        )
        return made, lambda x, params: made(x[:, None], None, packed_seq_params=params)[0][:, 0]
    made = module(config, MambaMixerSubmodules(**linear), HIDDEN, layer_number=1, pg_collection=groups)
    return made, lambda x, params: made(x[:, None], packed_seq_params=params)[0][:, 0]


def main(file, tensor):
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=dist.get_world_size() // tensor)
    model_parallel_cuda_manual_seed(1)
    pool = make_pool(None, timeout=timedelta(seconds=60))
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    ones = recurrent._without_context_parallelism(groups)
    found = {}
    for name, theirs in (("gated delta net", GatedDeltaNet), ("mamba", MambaMixer)):
        ours, planned = build(name, recurrent.MIXERS[theirs], groups, deterministic=True)
        reference, alone = build(name, theirs, ones, deterministic=False)
        with torch.no_grad():
            for parameter in ours.parameters():
                dist.broadcast(parameter, pool.groups.ranks[0], group=pool.groups.pool)
            ours.A_log.fill_(-5.0)  # a state lasts, so that one that is lost or wrong is seen
        reference.load_state_dict(ours.state_dict())
        for fault, number in (("", CASES), *((fault, 2) for fault in _FAULTS)):
            for case in range(number):
                with _FAULTS[fault]() if fault else patch.dict({}):
                    worst = differences(pool.groups, ours, planned, reference, alone, case)
                if case == 0 and not fault and not sum(worst.pop("cut")):
                    raise AssertionError("no document was cut")
                worst.pop("cut", None)
                kept = found.setdefault(name, {}).setdefault(fault, {})
                found[name][fault] = {kind: max(kept.get(kind, 0.0), value) for kind, value in worst.items()}
    values = torch.tensor([v for by in found.values() for kinds in by.values() for v in kinds.values()])
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    flat = iter(values.tolist())
    found = {name: {f: {k: next(flat) for k in kinds} for f, kinds in by.items()} for name, by in found.items()}
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.destroy_process_group()


_FAULTS = {
    "states lost": lambda: patch.object(*FAULTS["states and their gradients lost"]),
    "halo shifted": lambda: patch.object(*FAULTS["halo rows shifted"]),
    "rows in another order": lambda: patch.object(recurrent, "_bound_of", lambda *given: _reversed(_BOUND_OF(*given))),
}
_BOUND_OF = recurrent._bound_of


def _reversed(bound):
    return replace(bound, order=bound.order.flip(0))


def differences(groups, ours, planned, reference, alone, case):
    draw = random.Random(case)
    lengths = tuple(draw.choice([1, 2, 5, 30, 70]) for _ in range(5))
    plan = plan_of(PLANNERS[case % len(PLANNERS)], lengths, groups.size)
    generator = torch.Generator().manual_seed(case)
    documents, weights = ([torch.randn(length, HIDDEN, generator=generator) for length in lengths] for _ in range(2))
    out, dx = [], []
    reference.zero_grad()
    for document, weight in zip(documents, weights, strict=True):
        leaf = document.clone().requires_grad_()
        found = alone(leaf, None)
        (found * weight).sum().backward()
        out.append(found.detach())
        dx.append(leaf.grad)
    own = layout(plan, groups.rank).tolist()
    padding = 3  # rows that no sequence owns

    def rows(of):
        return torch.cat([*(of[seq][start:stop] for seq, start, stop in own), torch.zeros(padding, HIDDEN)])

    leaf = rows(documents).requires_grad_()
    ours.zero_grad()
    params = BalancedSeqParams(qkv_format="sbhd", layers=MaskBounds({}, 0, RecurrentBounds.of_plan(plan, groups)))
    found = planned(leaf, params)
    (found * rows(weights)).sum().backward()
    worst = {"out": _largest(found[:-padding], rows(out)[:-padding]), "dx": _largest(leaf.grad, rows(dx))}
    most = max(float(p.grad.abs().max()) for p in reference.parameters())
    for (kind, got), wanted in zip(ours.named_parameters(), reference.parameters(), strict=True):
        dist.all_reduce(got.grad, group=groups.pool)
        worst[kind] = float((got.grad - wanted.grad).abs().max()) / most
    worst["cut"] = [len({seq for seq, start, _ in own if start})]
    dist.all_reduce(cut := torch.tensor(worst["cut"]), group=groups.pool)
    return {**worst, "cut": cut.tolist()}


def _largest(got, wanted):
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)) if got.numel() else 0.0


def plan_of(name, lengths, ranks):
    model = Model(num_heads=4, num_kv_heads=4, head_dim=8, num_layers=4, hidden_size=HIDDEN, ffn_size=64)
    room = {"tokens_per_rank": max(1, -(-sum(lengths) * 3 // (2 * ranks)))}
    try:
        return make_planner(name, Cluster(ranks, 2), model, Layers(remap=True), **room)(lengths)
    except BalanceError:  # it fits no room, or has no such option
        return make_planner(name, Cluster(ranks, 2), model, Layers(remap=True))(lengths)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""The job of Table 1: FLUX on 32 H100 GPUs, three workloads, and what a system makes of a batch.

Not printed and assumed:

- How fast the paper's modules are. One printed number sets it: the forward-backward latency of the
  low-resolution workload with the balancer g1n32, 2.95 s, where no rank waits and nothing is
  exchanged (`RATE`). Attention follows from the printed gamma of 0.49 (Eq. 2), taken over forward,
  recomputation and backward together. All other rows are predictions.
- Nodes of 8 GPUs with a NIC of 400 Gb/s each, and links as in configs/cluster/h100.yaml.
- Weights are sharded by FSDP2, whose transfers hide behind the layers.
- `g1n32` and the rest are planned with gamma 0.49, as there.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.fits import GAMMA_H100_FLUX, sequence_work
from megatron_balance.cost.kernel import law_of
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.lab.papers.base import Effort, Ours, paper
from megatron_balance.planners.knapformer import KnapFormerOptions
from megatron_balance.planners.knapformer import plan as balance
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads import distributions

NUM_GPUS, NODE = 32, 8
PEAK_FLOPS_PER_S = 989.4e12
SEED = 0
# Share of the peak that matrix products reach, so that g1n32 takes 2.95 s on low-resolution images;
# what is read and written between them comes on top.
RATE = 0.2773
# Forward passes that a step costs: forward 1, recomputation 1, backward 2 (Table 1, HFU).
PASSES = 4
WITHOUT = "w/o Balancer"
TOPOLOGIES = ("g1n32", "g2n16", "g4n8", "g8n4")
WORKLOADS = {
    "low-resolution images": distributions.LOW_RESOLUTION,
    "mixed-resolution images": distributions.MIXED_RESOLUTION,
    "images and videos": distributions.IMAGES_AND_VIDEOS,
}

MODEL = load_model("flux-12b")
# Lengths of the samples that each GPU loads.
ByGpu = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1)
def machine() -> Machine:
    """The 32 GPUs at the rates that the paper's numbers say."""
    preset = load_cluster("h100").build(num_ranks=NUM_GPUS, ranks_per_node=NODE)
    # Eq. 2 for the whole step: the attention kernel's backward takes longer than two forwards.
    attention = RATE / GAMMA_H100_FLUX * (2 + law_of(None).backward_factor) / PASSES
    cluster = replace(preset, linear_efficiency=RATE, attention_kernel=None, attention_efficiency=attention)
    return Machine(cluster, MODEL, AnalyticCost(cluster, MODEL))


def plan(system: str, loaded: ByGpu) -> MicrobatchPlan:
    """The plan of a system: where each GPU keeps what it loads, or a topology (also `auto`)."""
    on = machine()
    lengths = tuple(length for samples in loaded for length in samples)
    if system != WITHOUT:
        options = KnapFormerOptions(topology=system, gamma=GAMMA_H100_FLUX)
        return balance(Batch(lengths), on.cluster, MODEL, on.cost, options)
    seqs = iter(range(len(lengths)))
    zones = tuple(Zone("local", "ring", (gpu,), tuple(next(seqs) for _ in own)) for gpu, own in enumerate(loaded))
    heads = MODEL.num_heads, MODEL.num_kv_heads
    return MicrobatchPlan(WITHOUT, lengths, NUM_GPUS, NODE, *heads, zones, mask=MODEL.mask)


def _imbalance(planned: MicrobatchPlan) -> float:
    """Workload imbalance ratio: the most work of a GPU over the least, by Eq. 2."""
    work = sequence_work(np.array(planned.lengths, dtype=np.float64), MODEL, GAMMA_H100_FLUX)
    load = np.zeros(planned.num_ranks)
    for zone in planned.zones:
        assert isinstance(zone, Zone)
        load[list(zone.ranks)] += work[list(zone.seqs)].sum() / len(zone.ranks)
    return float(load.max() / load.min())


def flops(lengths: Sequence[int]) -> float:
    """FLOPs of a step as the paper counts them: four forward passes of Eq. 1 in all blocks."""
    each = sequence_work(np.array(lengths, dtype=np.float64), MODEL, 1.0)
    return PASSES * MODEL.num_layers * float(each.sum())


@lru_cache(maxsize=256)
def _run(system: str, loaded: ByGpu) -> dict[str, float]:
    """Imbalance of work, seconds, tokens per second and share of the peak, as the table names them."""
    planned = plan(system, loaded)
    step = simulate_step([planned], machine(), Setup(recompute="full"))
    fbl_s = step.step_s - step.phases_s["optimizer"]
    return {
        "WIR": _imbalance(planned),
        "FBL": fbl_s,
        "TPS": planned.num_tokens / fbl_s,
        "HFU": flops(planned.lengths) / (fbl_s * NUM_GPUS * PEAK_FLOPS_PER_S),
    }


def _fig3(_: Effort) -> Ours:
    """A row a data code."""
    codes = distributions.IMAGES_AND_VIDEOS
    for text, code in zip(codes.split(","), distributions.parse_codes(codes), strict=True):
        yield f"{text}: tokens a GPU", code.samples * (code.visual_tokens + distributions.TEXT_TOKENS / 2)


def _table1(effort: Effort) -> Ours:
    """Four rows a workload and system; means over the batches."""
    for workload, codes in effort.progress(list(WORKLOADS.items()), "table1"):
        drawn = distributions.draw_by_gpu(codes, effort.batches, SEED)
        for system in (WITHOUT, *TOPOLOGIES, "auto"):
            each = [_run(system, loaded) for loaded in drawn]
            for what in each[0]:
                yield f"{workload}, {system}: {what}", fmean(one[what] for one in each)


PAPER = paper("knapformer", "KnapFormer", {"fig3": _fig3, "table1": _table1})

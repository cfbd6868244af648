"""OpenRLHF's replay buffer with its samples balanced over data-parallel ranks (docs/rl.md).

OpenRLHF has no option for its buffer, so one method of it is replaced where workers of Ray start, by
Ray's own hook. With this folder on PYTHONPATH, and both in the job's runtime environment:

    ray job submit --runtime-env-json='{"worker_process_setup_hook": "openrlhf_balanced.register",
        "env_vars": {"PYTHONPATH": "..."}}' -- python3 -m openrlhf.cli.train_ppo_ray \
        --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 ...

Before an update the buffers of all ranks tell one another their lengths, all make the same plan, and
whole samples go to the ranks that it says; what they count is OpenRLHF's. Passes without a backward
are dealt by OpenRLHF's driver. OpenRLHF 0.11.0 (3c3be623): its buffer was run.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance import Model, rl
from megatron_balance.config import load_cluster
from megatron_balance.errors import InfeasibleError
from megatron_balance.torch.settings import model_of

CLUSTER = "h100"
"""The preset whose GPUs weigh attention against the rest."""


def register() -> None:
    """Replace the dealing of OpenRLHF's buffers in this process."""
    buffer = importlib.import_module("openrlhf.trainer.ppo_utils.replay_buffer").NaiveReplayBuffer
    buffer.setup_dynamic_batch = setup_dynamic_batch


def setup_dynamic_batch(self: Any, strategy: Any) -> None:
    """Of each step its microbatches, as many on all ranks, no rank above the cap, and their samples.

    Raises:
        InfeasibleError: a sample longer than the cap of its ranks; too few samples for every rank to
            have one in every microbatch.
    """
    args, group = strategy.args, strategy.ds_device_mesh["dp"].get_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    every: list[list[tuple[int, int]]] = [[]] * size  # of each sample its tokens, and those that count
    mine = [(int(item.total_length.item()), int(item.action_mask.sum().item())) for item in self.items]
    dist.all_gather_object(every, mine, group=group)
    local = args.train.batch_size // size
    expected = args.rollout.batch_size * args.rollout.n_samples_per_prompt // args.train.batch_size
    items: list[Any] = []
    indices: list[list[int]] = []
    scales: list[float] = []
    tokens: list[float] = []
    samples: list[float] = []
    last: list[int] = []
    for step in range(min(expected, min(map(len, every)) // local)):
        own = range(step * local, (step + 1) * local)
        counted = [each[at] for each in every for at in own]
        plan = planned(args, size, [length for length, _ in counted])
        first = rank * local  # the step's number of this rank's first sample
        held = [[[(n, self.items[own[n - first]].to_device(torch.device("cpu")))
                  for n in of_ranks[to] if first <= n < first + local] for of_ranks in plan]
                for to in range(size)]  # fmt: skip
        for parts in zip(*exchanged(held, group), strict=True):
            found = [item for _, item in sorted(chain.from_iterable(parts), key=lambda pair: pair[0])]
            indices.append(list(range(len(items), len(items) + len(found))))
            items += found
            scales.append(len(found) / local)  # ranks average
        tokens += [float(sum(count for _, count in counted))] * len(plan)
        samples += [float(sum(count > 0 for _, count in counted))] * len(plan)
        last += [0] * (len(plan) - 1) + [1]
    self.items = items if self.cpu_offload else [item.to_device(self.target_device) for item in items]
    self.sample_batch_size, self.dynamic_indices = 1, indices
    self.dynamic_sample_loss_scale, self.dynamic_batch_num_tokens = scales, tokens
    self.dynamic_global_batch_size, self.dynamic_optimizer_step = samples, last


def planned(args: Any, size: int, lengths: Sequence[int]) -> list[list[list[int]]]:
    """By microbatch and data-parallel rank, the numbers of its samples, at least one."""
    ring, cap = args.ds.ring_attn_size, args.train.max_tokens_per_gpu * args.ds.tensor_parallel_size
    if max(lengths) > cap * ring:
        raise InfeasibleError(
            f"OpenRLHF: a sample has {max(lengths)} tokens, and its {ring} ranks hold {cap} each; raise "
            "train.max_tokens_per_gpu, or ds.ring_attn_size"
        )
    cluster = load_cluster(CLUSTER).build(num_ranks=size * ring, ranks_per_node=size * ring)
    model = model_at(args.actor.model_name_or_path)
    step = rl.plan_step(lengths, None, cluster, model, max_tokens=cap, context=ring, attend="context")
    return rl.whole_samples(step, ring)


@cache
def model_at(path: str) -> Model:
    """The actor's; a critic is like it but for its head."""
    return model_of(importlib.import_module("transformers").AutoConfig.from_pretrained(path))


def exchanged(given: Sequence[Any], group: Any) -> list[Any]:
    """Objects that each rank of a group gives this one. `given`: to each of them."""
    found: list[Any] = []
    for source in range(len(given)):
        got: list[Any] = [None]
        told = list(given) if source == dist.get_rank(group) else None
        dist.scatter_object_list(got, told, src=dist.get_global_rank(group, source), group=group)
        found += got
    return found

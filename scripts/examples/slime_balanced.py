"""slime's schedule of a rollout by `rl.plan_step`, behind the signature of slime's own (docs/rl.md).

slime has no option for its schedule, and Ray sends the class that calls it by value, with what the
schedule is called: so it is replaced where workers of Ray start, by Ray's own hook. With this folder
on PYTHONPATH, and both in the job's runtime environment:

    ray job submit --runtime-env-json='{"worker_process_setup_hook": "slime_balanced.register",
        "env_vars": {"PYTHONPATH": "..."}}' -- python3 train.py --use-dynamic-batch-size ...

Samples stay whole on the context-parallel ranks of one data-parallel rank: attention and losses are
slime's. Read, not run: slime 624b824a of 2026-08-21.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

from megatron_balance import Model, rl
from megatron_balance.config import load_cluster
from megatron_balance.errors import ConfigError, InfeasibleError

FACTS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "num_experts": "num_experts",
    "experts_per_token": "moe_router_topk",
}
"""Of a model, and slime's arguments that say it, where they are set."""


def register() -> None:
    """Replace slime's schedule in this process; before slime's `rollout.py` is imported."""
    vars(importlib.import_module("slime.utils.dp_schedule"))["build_dp_schedule"] = build_dp_schedule


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Of each data-parallel rank its samples and, by microbatch, their places among them; of each
    training step its microbatches, the same on all ranks, and its rollouts. As slime's, rollouts
    behind the last full step are left out.

    No rank holds more than `max_tokens_per_gpu` tokens of a microbatch. `balance_cluster` of the
    arguments, by `--custom-config-path`: the preset whose GPUs weigh attention against the rest.

    Raises:
        ConfigError: microbatches of a fixed size; fewer rollouts than a step has.
        InfeasibleError: a sample longer than the cap of its ranks; too few samples for every rank
            to have one in every microbatch.
    """
    if not args.use_dynamic_batch_size or args.max_tokens_per_gpu is None:
        raise ConfigError("slime: microbatches of a fixed size are not planned; use --use-dynamic-batch-size")
    rollouts: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        rollouts.setdefault(rollout, []).append(sample)
    steps = len(rollouts) // global_batch_size
    if not steps:
        raise ConfigError(f"slime: {len(rollouts)} rollouts, and a step has global_batch_size {global_batch_size}")
    ordered = list(rollouts.values())
    partitions: list[list[int]] = [[] for _ in range(train_parallel_config["dp_size"])]
    indices: list[list[list[int]]] = [[] for _ in partitions]
    counts: list[int] = []
    for step in range(steps):
        own = list(chain.from_iterable(ordered[step * global_batch_size : (step + 1) * global_batch_size]))
        microbatches = planned(args, train_parallel_config, [total_lengths[sample] for sample in own], own)
        counts.append(len(microbatches))
        for of_ranks in microbatches:
            for mine, tiles, samples in zip(partitions, indices, of_ranks, strict=True):
                tiles.append(list(range(len(mine), len(mine) + len(samples))))
                mine.extend(samples)
    return partitions, indices, counts, [global_batch_size] * steps


def planned(args: Any, mesh: dict[str, Any], lengths: list[int], numbers: Sequence[int]) -> list[list[list[int]]]:
    """By microbatch and data-parallel rank, the numbers of its samples, at least one."""
    data, context, cap = mesh["dp_size"], mesh["cp_size"], args.max_tokens_per_gpu
    for number, length in zip(numbers, lengths, strict=True):
        if length > cap * context:
            raise InfeasibleError(
                f"slime: sample {number} has {length} tokens, and its {context} ranks hold {cap} each; raise "
                "max_tokens_per_gpu, or lower rollout_max_context_len"
            )
    multiple = mesh["microbatch_group_size_per_vp_stage"] if mesh["vpp_size"] > 1 else 1
    most = len(lengths) // (data * multiple) * multiple
    stages = getattr(args, "pipeline_model_parallel_size", 1)
    ranks = data * context
    cluster = load_cluster(getattr(args, "balance_cluster", "h100")).build(num_ranks=ranks, ranks_per_node=ranks)
    options = {"min_microbatches": max(1, min(stages, most)), "multiple_of": multiple}
    meet = "step" if getattr(args, "expert_model_parallel_size", 1) == 1 else "layer"
    step = rl.plan_step(
        *(lengths, None, cluster, model_of(args)),
        **{"max_tokens": cap, "context": context, "attend": "context", "meet": meet, **options},
    )
    found = rl.whole_samples(step, context)
    return [[[numbers[sample] for sample in own] for own in of_ranks] for of_ranks in found]


def model_of(args: Any) -> Model:
    """The model, as slime's (Megatron's) arguments say it."""
    latent = getattr(args, "multi_latent_attention", False)
    width = args.qk_head_dim + args.qk_pos_emb_head_dim if latent else args.kv_channels
    heads = args.num_attention_heads
    groups = args.num_query_groups if getattr(args, "group_query_attention", True) and not latent else heads
    said = {name: getattr(args, of, None) for name, of in FACTS.items()}
    if said["num_experts"]:
        said["ffn_size"] = args.moe_ffn_hidden_size
    return Model(heads, groups, width, **{name: number for name, number in said.items() if number})

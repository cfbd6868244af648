"""slime's side of a schedule: the driver that asks for it and a worker that reads it, as slime of
2026-08-21 does (`tools.slime_check` holds them against its source).
"""

import importlib
from collections.abc import Sequence
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

KEYS = ("tokens", "total_lengths")


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Any:
    raise AssertionError("slime's own")


def modules() -> dict[str, ModuleType]:
    """slime's modules that the script asks for."""
    names = ("slime", "slime.utils", "slime.utils.dp_schedule")
    made = {name: ModuleType(name) for name in names}
    vars(made[names[-1]])["build_dp_schedule"] = build_dp_schedule
    return made


def arguments(**others: Any) -> Any:
    """Of a small model, with the names that slime and Megatron have."""
    sizes = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 64, "vocab_size": 32, "num_experts": None}
    heads = {"num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 8}
    asked = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100, "global_batch_size": 8}
    return SimpleNamespace(**{**sizes, **heads, **asked, **others})


class RolloutManager:
    train_parallel_config: dict[str, Any]

    def __init__(self, args: Any) -> None:
        self.args = args
        # Where Ray unpacks the class, what it calls is looked up by name.
        self.schedule = importlib.import_module("slime.utils.dp_schedule").build_dp_schedule

    def set_train_parallel_config(self, config: dict[str, Any]) -> None:
        self.train_parallel_config = config

    def _split_train_data_by_dp(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        data["total_lengths"] = [len(each) for each in data["tokens"]]
        partitions, indices, counts, sizes = self.schedule(
            self.args,
            self.train_parallel_config,
            data["total_lengths"],
            global_batch_size=self.args.global_batch_size,
            rollout_indices=data["rollout_ids"],
        )
        found: list[dict[str, Any]] = []
        for rank in range(self.train_parallel_config["dp_size"]):
            own = {key: [data[key][sample] for sample in partitions[rank]] for key in KEYS}
            told = {"num_microbatches": counts, "global_batch_sizes": sizes, "micro_batch_indices": indices[rank]}
            found.append({"partition": partitions[rank], **own, **told})
        return found


class DataIterator:
    def __init__(self, rollout_data: dict[str, Any], micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data, self.micro_batch_indices, self.offset = rollout_data, micro_batch_indices, 0

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        return {key: [self.rollout_data[key][at] for at in indices] for key in keys}


def sharded(args: Any, data: int, context: int, tokens: list[list[int]], rollouts: list[int], multiple: int = 1) -> Any:
    """What slime's workers are sent, by data-parallel rank."""
    manager = RolloutManager(args)
    names = ("dp_size", "cp_size", "vpp_size", "microbatch_group_size_per_vp_stage")
    manager.set_train_parallel_config(dict(zip(names, (data, context, 1 + (multiple > 1), multiple), strict=True)))
    return manager._split_train_data_by_dp({"tokens": tokens, "rollout_ids": rollouts})


def worked(sent: dict[str, Any]) -> tuple[list[list[list[list[int]]]], list[list[int]]]:
    """By step and microbatch its samples' tokens; results in the worker's order of samples."""
    iterator = DataIterator(sent, sent["micro_batch_indices"])
    steps: list[list[list[list[int]]]] = []
    for count in sent["num_microbatches"]:
        steps.append([iterator.get_next(KEYS)["tokens"] for _ in range(count)])
    assert iterator.offset == len(iterator.micro_batch_indices)
    results: list[list[int]] = [[]] * len(sent["tokens"])
    values = [each for step in steps for batch in step for each in batch]
    for value, at in zip(values, chain.from_iterable(sent["micro_batch_indices"]), strict=True):
        results[at] = value
    return steps, results

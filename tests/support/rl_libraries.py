"""slime's side of a schedule, the driver that asks for it and a worker that reads it, and NeMo-RL's of
a packer, as they are of 2026-08-21 and 22 (`tools.rl_check` holds them against their sources).
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


class SequencePacker:
    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        self.bin_capacity, self.collect_metrics = bin_capacity, collect_metrics
        self.min_bin_count, self.bin_count_multiple = min_bin_count, bin_count_multiple

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        raise NotImplementedError

    def pack(self, sequence_lengths: list[int]) -> list[list[int]]:
        return self._pack_implementation(sequence_lengths)


def get_packer(
    algorithm: Any,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> Any:
    raise ValueError(f"Unknown packing algorithm: {algorithm}")


def modules() -> dict[str, ModuleType]:
    """Modules that the scripts ask for."""
    packing = {"SequencePacker": SequencePacker, "get_packer": get_packer}
    made = {
        **{name: {} for name in ("slime", "slime.utils", "nemo_rl", "nemo_rl.data", "nemo_rl.distributed")},
        "slime.utils.dp_schedule": {"build_dp_schedule": build_dp_schedule},
        "nemo_rl.data.packing": packing,
        "nemo_rl.distributed.batched_data_dict": {"get_packer": get_packer},
    }
    found: dict[str, ModuleType] = {}
    for name, members in made.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(members)
    return found


def packed(algorithm: str, cap: int, shards: int, lengths: list[int], batch_size: int, multiple: int) -> Any:
    """By data-parallel rank, batch and microbatch, the samples: NeMo-RL's `shard_by_batch_size`."""
    make = importlib.import_module("nemo_rl.distributed.batched_data_dict").get_packer
    packer = make(
        algorithm=algorithm,
        bin_capacity=cap,
        collect_metrics=False,
        min_bin_count=shards,
        bin_count_multiple=shards,
    )
    found: list[list[list[list[int]]]] = [[] for _ in range(shards)]
    for start in range(0, len(lengths), batch_size):
        padded = [-(-length // multiple) * multiple for length in lengths[start : start + batch_size]]
        bins = packer.pack(sequence_lengths=padded)
        for shard, own in enumerate(found):
            own.append([[start + at for at in each] for each in bins[shard::shards]])
    return found


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
    """Parts sent to slime's workers, by data-parallel rank."""
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

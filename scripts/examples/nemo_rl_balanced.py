"""NeMo-RL's sequence packing by `rl.plan_step`, as one more of its packers (docs/rl.md).

NeMo-RL's table of packers is inside a function, so the function is replaced in the driver, and only
the name `balanced` is ours; other processes refuse it. With this folder on PYTHONPATH:

    BALANCE_MODEL=llama3-8b python scripts/examples/nemo_rl_balanced.py examples/run_grpo.py \
        policy.sequence_packing.enabled=true policy.sequence_packing.algorithm=balanced ...

BALANCE_MODEL: a preset or a model's config.json, BALANCE_CLUSTER: the preset (h100) whose GPUs weigh
attention against the rest. Read, not run: NeMo-RL 7ea279abf of 2026-08-22.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_balance import rl
from megatron_balance.config import load_cluster, load_model
from megatron_balance.errors import ConfigError

ALGORITHM = "balanced"


def register() -> None:
    """Give the batches of this process the packer `ALGORITHM` beside NeMo-RL's."""
    base = importlib.import_module("nemo_rl.data.packing").SequencePacker
    batches = vars(importlib.import_module("nemo_rl.distributed.batched_data_dict"))
    batches["get_packer"] = chooser(packer_of(base), batches["get_packer"])


def chooser(ours: type[Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-RL's `get_packer`, which knows one more."""

    def get_packer(
        algorithm: Any,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> Any:
        chosen, given = (theirs, (algorithm,)) if algorithm != ALGORITHM else (ours, ())
        return chosen(
            *(*given, bin_capacity),
            collect_metrics=collect_metrics,
            min_bin_count=min_bin_count,
            bin_count_multiple=bin_count_multiple,
        )

    return get_packer


def packer_of(base: type[Any]) -> type[Any]:
    """The packer, of NeMo-RL's `SequencePacker`."""
    if (name := os.environ.get("BALANCE_MODEL")) is None:
        raise ConfigError("NeMo-RL: BALANCE_MODEL is not set; expected a preset, or the path of a model's config.json")
    model, cluster = load_model(name), load_cluster(os.environ.get("BALANCE_CLUSTER", "h100"))

    class BalancedPacker(base):
        """Bins for `bin_count_multiple` data-parallel ranks, which take them in turns: the n-th of all
        ranks form a microbatch. A bin is whole on a rank's context-parallel ones.
        """

        def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
            ranks = self.bin_count_multiple or 1
            fewest = max(1, -(-(self.min_bin_count or 1) // ranks))
            machine = cluster.build(num_ranks=ranks, ranks_per_node=ranks)
            options = {"max_tokens": self.bin_capacity, "attend": "context", "min_microbatches": fewest}
            step = rl.plan_step(sequence_lengths, None, machine, model, **options)
            return list(chain.from_iterable(rl.whole_samples(step)))

    return BalancedPacker


if __name__ == "__main__":
    register()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")

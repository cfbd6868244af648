"""verl's own tests of its partition with ours behind the same signature; what stands for verl in our
tests, against its source.

python -m tools.verl_check CHECKOUT [--ours]

CHECKOUT: a clone of verl; the Python that runs this needs what `import verl` does (tensordict, ray,
hydra-core, ...), no GPU. `--ours`: the partition is `rearrange_micro_batches` below; without it verl's
own. Its test on two GPUs is called on one rank of gloo. Exit 1: a test failed, or a signature differs.

Beside the tests, both partitions are counted on drawn lengths: microbatches, and those above the cap.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from megatron_balance.solvers.microbatches import MicrobatchesProblem, deal

TESTS = "tests/utils/test_seqlen_balancing.py"
OF_GPUS = "test_seqlen_balancing_distributed_params"
SOURCES = {
    "MegatronEngine": ("verl/workers/engine/megatron/transformer_impl.py", "MegatronEngine"),
    "MegatronEngineWithLMHead": ("verl/workers/engine/megatron/transformer_impl.py", "MegatronEngineWithLMHead"),
    "make_batch_generator": ("verl/utils/megatron/pipeline_parallel.py", None),
    "concat_tensordict": ("verl/utils/tensordict_utils.py", None),
    "FSDPEngineWithLMHead": ("verl/workers/engine/fsdp/transformer_impl.py", "FSDPEngine"),
    "EngineRegistry": ("verl/workers/engine/base.py", "EngineRegistry"),
    "Metric": ("verl/utils/metric/utils.py", "Metric"),
    "postprocess_batch_func": ("verl/workers/engine/utils.py", None),
    "assign_non_tensor": ("verl/utils/tensordict_utils.py", None),
    "get_non_tensor_data": ("verl/utils/tensordict_utils.py", None),
    "index_select_tensor_dict": ("verl/utils/tensordict_utils.py", None),
}
"""Files of verl by name in `tests.support.verl_jobs`, and the class of a method."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ours", action="store_true")
    options = parser.parse_args(argv)
    from tests.support import verl_jobs

    differ = differences(options.checkout, SOURCES, verl_jobs)
    for line in differ:
        print(line)
    print(f"signatures: {len(differ)} differ")
    return int(bool(_run(options.checkout, ours=options.ours) or differ))


def rearrange_micro_batches(  # noqa: PLR0913, PLR0917  verl's
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """verl's, by `solvers.microbatches`: none has more than `max_token_len` tokens. ValueError:
    `force_group_size` samples that have.
    """
    import torch
    import torch.distributed as dist

    select = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
    ids = batch["input_ids"]
    lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    fewest = min_num_micro_batch or 1
    together = dist.is_initialized() and same_micro_num_in_dp
    while True:
        found = partition(lengths.tolist(), max_token_len, fewest, num_batches_divided_by or 1, force_group_size)
        most = torch.tensor([len(found)], device=ids.device)
        if together:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dp_group)
        if int(most) == len(found) or not together:
            break
        fewest = int(most)
    if use_dynamic_bsz_balance:  # small ones at both ends, where a pipeline fills and drains
        found.sort(key=lambda own: sum(int(lengths[seq]) ** 2 for seq in own), reverse=True)
        found = found[::2][::-1] + found[1::2]
    return [select(batch, own) for own in found], found


def partition(lengths: Sequence[int], cap: int, fewest: int, multiple: int, size: int) -> list[list[int]]:
    """The samples of each microbatch, ascending; `size` neighbours stay together."""
    tokens = np.array(lengths, dtype=np.int64).reshape(-1, size)
    seconds = (24576.0 * tokens + tokens.astype(np.float64) ** 2).sum(axis=1)  # as verl weighs them
    held = tokens.sum(axis=1)
    if held.max() > cap:
        raise ValueError(f"samples {int(held.argmax()) * size} and on have {held.max()} tokens, max_token_len is {cap}")
    count, dealt = deal(
        MicrobatchesProblem(held, seconds, np.ones(len(held), dtype=np.int64), 1, cap), fewest, multiple
    )
    found: list[list[int]] = [[] for _ in range(count)]
    for group, (microbatch, _) in enumerate(dealt):
        found[microbatch] += range(group * size, (group + 1) * size)
    return found


def differences(checkout: Path, sources: Mapping[str, tuple[str, str | None]], jobs: ModuleType) -> list[str]:
    """Functions whose arguments, or their order, are others in a clone than in what stands for it in
    `jobs`.
    """
    found: list[str] = []
    for name, (file, owner) in sources.items():
        tree, ours = ast.parse((checkout / file).read_text()), getattr(jobs, name)
        mine: dict[str, Callable[..., Any]] = {name: ours}
        if owner is not None:
            tree = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
            mine = {of: call for of, call in vars(ours).items() if inspect.isfunction(call) or of == "register"}
            mine.pop("__init__", None)  # of configurations
        theirs = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
        for called, function in mine.items():
            arguments = inspect.signature(getattr(function, "__func__", function)).parameters
            wanted = theirs.get(called)
            here = [each.name for each in arguments.values()]
            there = [] if wanted is None else [each.arg for each in (*wanted.args, *wanted.kwonlyargs)]
            there += [wanted.kwarg.arg] if wanted is not None and wanted.kwarg else []
            if here != there:
                found.append(f"{name}.{called}: ours {here}, theirs {there}")
    return found


def _run(checkout: Path, *, ours: bool) -> int:
    """verl's tests; how many failed."""
    sys.path[:0] = [str(checkout), str((checkout / TESTS).parent)]
    theirs = importlib.import_module("verl.utils.seqlen_balancing")
    own = theirs.rearrange_micro_batches
    failed = 0
    with patch.object(theirs, "rearrange_micro_batches", rearrange_micro_batches if ours else own):
        module = importlib.import_module(Path(TESTS).stem)
        for name in [name for name in dir(module) if name.startswith("test_")]:
            told = "passed"
            try:
                _on_one_rank(module) if name == OF_GPUS else getattr(module, name)()
            except Exception as error:
                told, failed = f"failed: {type(error).__name__} {error!s:.200}", failed + 1
            print(f"{name}: {told}")
    for who, function in (("verl's", own), ("ours", rearrange_micro_batches)):
        print(f"{who}: {_counted(function)}")
    return failed


def _on_one_rank(module: Any) -> None:
    """verl's `_worker` on the CPU, with the settings that its test has."""
    import tempfile

    device = type("Device", (), {"set_device": staticmethod(lambda _: None)})
    stands = {"get_torch_device": lambda: device, "get_nccl_backend": lambda: "gloo", "get_device_name": lambda: "cpu"}
    theirs = importlib.import_module("verl.utils.seqlen_balancing")
    with (
        patch.multiple(module, **stands),
        patch.object(theirs, "get_device_name", lambda: "cpu"),
        tempfile.TemporaryDirectory() as folder,
    ):
        for at, (same, fewest) in enumerate(((False, 4), (True, None))):
            module._worker(0, 1, f"file://{folder}/{at}", 300, same, fewest)


def _counted(function: Callable[..., Any], cap: int = 4096, batches: int = 200) -> str:
    """On drawn batches: microbatches, and those above the cap."""
    import torch

    draw, number, above = np.random.default_rng(0), 0, 0
    tensordict = importlib.import_module("tensordict").TensorDict
    for _ in range(batches):
        lengths = np.clip(draw.lognormal(6.0, 1.0, 64), 1, cap).astype(int)
        mask = torch.arange(cap) < torch.tensor(lengths)[:, None]
        batch = tensordict({"input_ids": mask.long(), "attention_mask": mask.long()}, batch_size=[64])
        _, found = function(batch, max_token_len=cap)
        number += len(found)
        above += sum(int(lengths[own].sum()) > cap for own in found)
    return f"{number} microbatches of {batches} batches, {above} above the cap"


if __name__ == "__main__":
    sys.exit(main())

"""torchtitan's trainer on CPUs: its debug models, balanced over ranks and each document alone.

python tests/support/titan_run.py NAME AC BACKEND ROUNDING FOLDER

It imports torchtitan and forks a rank that takes each document alone and `RANKS` that are balanced;
what they found lies in FOLDER as alone.json and balanced.json.
What stands in for what a CPU does not have: the device, sums in place of gloo's scaled ones, data
and a tokenizer. `set_timeout` is missing from torch 2.13, whatever the device is. ROUNDING: "theirs",
or "exact", in which experts multiply in fp32 (torchtitan's do in bf16 whatever the precision) and
counts of tokens are not halved (torchtitan does that for layers computed again, of which compiled
ones count once: an odd count loses one, and an expert's bias may move another way).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a thread would be in the way of forks

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchtitan.tools.utils as titan
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_balance.files import json_text

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "examples"))


def nothing(*_: Any) -> None:
    pass


class Cpu:
    # In the place of torch.cuda.
    memory = None
    set_device = reset_peak_memory_stats = empty_cache = synchronize = nothing
    memory_stats = staticmethod(lambda *_: {})
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda *_: "CPU")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(total_memory=1 << 34))


titan.device_type, titan.device_module = "cpu", Cpu  # before any of torchtitan's modules takes them
titan.get_local_device = lambda: torch.device("cpu")
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = nothing  # pyright: ignore[reportAttributeAccessIssue]

import torchtitan.distributed.utils as titan_dist  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402

from megatron_balance.torch.titan import balanced  # noqa: E402
from tests.support import one_device  # noqa: E402

VOCABULARY, RANKS, TOKENS = 2048, 2, 128
# Of the documents in a row of `TOKENS`; a rank reads a row a step.
ROWS = ((90, 7, 31), (40, 21, 67), (64, 60, 4), (100, 20, 8), (5, 120, 3), (126, 1, 1), (30, 50, 48))


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        del config

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Rows(BaseDataLoader):
    # Rows of random documents, one after the other to the ranks, or each document by itself.
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True
        alone: bool = False
        seed: int = 0

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.config, self.size, self.rank = config, dp_world_size, dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for row in range(10_000):
            g = torch.Generator().manual_seed(self.config.seed + row)
            documents = [torch.randint(0, VOCABULARY, (n + 1,), generator=g) for n in ROWS[row % len(ROWS)]]
            if self.config.alone:
                yield from (packed([each]) for each in documents)
            elif row % self.size == self.rank:
                yield packed(documents)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


def packed(documents: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    tokens, labels = torch.cat([each[:-1] for each in documents]), torch.cat([each[1:] for each in documents])
    positions = torch.cat([torch.arange(len(each) - 1) for each in documents])
    return {"input": tokens[None], "positions": positions[None]}, labels[None]


def experts_in_fp32(experts: GroupedExperts, rows: Tensor, counts: Tensor) -> Tensor:
    # Each expert on all rows, then on its own alone: torch compiles grouped products only in bf16.
    expert = torch.searchsorted(counts.cumsum(0), torch.arange(len(rows)), right=True)
    own = expert == torch.arange(len(counts))[:, None]
    rows = rows.expand(len(counts), -1, -1)
    hidden = F.silu(rows.bmm(experts.w1_EFD.mT)) * rows.bmm(experts.w3_EFD.mT)
    return (own[..., None] * hidden.bmm(experts.w2_EDF.mT)).sum(0)


def config_of(name: str, checkpointing: str, backend: str, *, alone: bool, folder: Path) -> Any:
    # The debug model's, read by torchtitan's command line; Llama 3's balanced one is the example's.
    example = name == "llama3" and not alone
    words = ("titan_balanced", "llama3_debugmodel_balanced") if example else (name, f"{name}_debugmodel")
    config: Any = ConfigManager().parse_args(["--module", words[0], "--config", words[1]])
    config.dump_folder = str(folder)
    config.tokenizer = NoTokenizer.Config()
    training = config.training
    training.steps, training.local_batch_size, training.seq_len = 5, 1, TOKENS
    training.dtype = training.mixed_precision_param = "float32"
    config.checkpoint.enable = False
    config.activation_checkpoint = FullAC.Config() if checkpointing == "full" else config.activation_checkpoint
    config.dataloader = Rows.Config(alone=alone)
    documents = RANKS * len(ROWS[0])
    config.validator = replace(config.validator, enable=True, freq=2, steps=documents if alone else 1)
    config.validator.dataloader = Rows.Config(alone=alone, seed=1000)
    # The chunked loss asks for rows in eights: documents are not, and a router counts padding.
    if alone or name == "deepseek_v3":
        config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    if alone:
        training.global_batch_size = documents
        training.disable_cuda_graphs = True
        config.parallelism.spmd_backend = "partial_dtensor"
        config.activation_checkpoint = None
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        return config
    config.compile.enable, config.compile.components, config.compile.backend = True, ["model"], backend
    return config if example else balanced(config, planner="te_ring")


def fill(model: torch.nn.Module) -> None:
    # The same parameters on any number of ranks.
    for name, parameter in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        g = torch.Generator().manual_seed(zlib.crc32(plain.encode()))
        whole = torch.ones(parameter.shape)
        if parameter.ndim > 1:
            whole = 0.05 * torch.randn(parameter.shape, generator=g)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)


def train(way: str, words: list[str], folder: Path) -> None:
    # One rank, whose place is in the environment.
    name, checkpointing, backend, rounding = words
    if rounding == "exact":
        GroupedExperts.forward = experts_in_fp32  # pyright: ignore[reportAttributeAccessIssue]
    torch._dynamo.config.disable = way == "alone"
    own = folder / way
    trainer = config_of(name, checkpointing, backend, alone=way == "alone", folder=own).build()
    model = trainer.model_parts[0]
    fill(model)
    if rounding == "exact":
        for layer in model.layers.values():
            layer.checkpoint_impl = None  # by which torchtitan knows what it halves
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo scales no sums
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "validation": [], "graphs": []}

    clip = titan_dist.clip_grad_norm_

    def clipped(parameters: list[Tensor], *given: Any, **named: Any) -> Any:
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        squares = [each.double().square().sum() for each in gradients if each is not None]
        found["norms"].append(float(torch.stack(squares).sum().sqrt()))  # theirs is a sum in fp32
        return clip(parameters, *given, **named)

    def log(_step: int, loss: float, *_: Any, **__: Any) -> None:
        found["losses"].append(loss)
        found["graphs"].append(counters["stats"]["unique_graphs"])

    titan_dist.clip_grad_norm_ = clipped

    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda loss, **_: found["validation"].append(loss)
    trainer.train()
    found["breaks"] = list(counters["graph_break"])
    trainer.close()
    if os.environ["RANK"] == "0":
        own.with_suffix(".json").write_text(json_text(found), encoding="utf-8")


def fork(way: str, rank: int, size: int, port: int) -> int:
    if process := os.fork():
        return process
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(at) for name, at in place.items()}, MASTER_ADDR="127.0.0.1")
    *words, folder = sys.argv[1:]
    train(way, words, Path(folder))
    sys.exit(0)


def main() -> None:
    one_device.install()
    gc.freeze()
    left: set[int] = set()
    for way, size in (("alone", 1), ("balanced", RANKS)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        left |= {fork(way, rank, size, port) for rank in range(size)}
    while left:
        process, status = os.wait()
        left.discard(process)
        if status:
            for each in left:
                os.kill(each, signal.SIGKILL)
            sys.exit("a rank failed")


if __name__ == "__main__":
    main()

"""One job of Megatron's own `pretrain` on one device, with balance on or off, over documents of
given lengths.

Off, Megatron's layers attend by one dense causal call a document: Transformer Engine's where it is
installed, else torch's scaled dot product attention in Megatron's local layers, whose own unfused
attention would hold all scores in memory. Batches, loss and weights are the same.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.gpu import sharing
from tools.gpu.rows import Device
from tools.megatron_flags import GPT, LOCAL_LAYERS, LOOP, command_line
from tools.megatron_pretrain import Documents, pretrain_balanced, provider

FLAGS: dict[str, Any] = {
    **GPT,
    **LOOP,
    "bf16": True,
    "global-batch-size": 1,
    "lr": 1e-4,
    "lr-decay-iters": 100,
    "weight-decay": 0.01,
    "seed": 1234,
    "mock-data": True,  # Megatron asks for data or for none; ours come from our own provider
}


@dataclass(frozen=True, slots=True)
class Job:
    """`documents`: lengths of the documents of each step, which fill the context. `flags`: of the
    model. `out`: where its figures go, JSON.

    `traced`: the step, counted from 0, that is searched for waits of the host; None: none. `flash`:
    with balance off, attend by torch's FlashAttention, which a plan runs too; else by what torch
    takes for the fastest (cuDNN's attention on Hopper). `costs`: file of the table that predicts.
    """

    device: Device
    balance: bool
    flags: dict[str, Any]
    vocabulary: int
    documents: tuple[tuple[int, ...], ...]
    out: str
    traced: int | None = None
    flash: bool = True
    costs: str | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """By step: loss, gradient norm and seconds. `waits`: of the host in the traced step. `layers`:
    whose they are. `predicted_s`: by step, of its layers, with balance on. `peak_bytes`: the most
    memory that was in use, and what was predicted of it (0: nothing was).
    """

    losses: list[float]
    grad_norms: list[float]
    seconds: list[float]
    waits: list[str]
    layers: str
    predicted_s: list[float]
    peak_bytes: tuple[float, float]


def train(job: Job) -> None:
    """Run a job; made to be the target of a process of its own."""
    _sole_rank()
    if job.device == "cpu":
        from megatron_balance.megatron import cpu

        cpu.install()
        torch.set_num_threads(1)
    from megatron_balance.megatron import entry

    engine = entry.te_available()
    impl = {} if engine else LOCAL_LAYERS
    kernel = "auto" if engine or job.device == "cpu" else "torch_varlen"  # the kernel of the other side
    balance = Path(job.out).with_suffix(".yaml")
    costs = "" if job.costs is None else f"plan_costs: {job.costs}\n"
    balance.write_text(f"planner: {{name: zeppelin}}\nplan_ahead: false\nkernel: {kernel}\n{costs}", encoding="utf-8")
    records = Path(job.out).with_suffix(".log")
    tokens = sum(job.documents[0])
    flags = {
        **FLAGS, **impl, **job.flags,
        "vocab-size": job.vocabulary, "seq-length": tokens,
        "max-position-embeddings": tokens, "train-iters": len(job.documents),
        **({"balance-config": balance, "balance-device": job.device, "balance-log": records} if job.balance else {}),
        **({"distributed-backend": "gloo"} if job.device == "cpu" else {}),
    }  # fmt: skip
    sys.argv = ["pretrain", *command_line(flags)]
    meter = _Meter(job)
    meter.install()
    documents = Documents(job.documents, job.vocabulary)
    code = entry.run(
        partial(pretrain_balanced, documents)
        if job.balance
        else partial(_plain, documents, flash=job.flash and job.device == "cuda")
    )
    local = "Megatron's local layers (Transformer Engine is not installed) and torch's FlashAttention on both sides"
    layers = "Transformer Engine's layers, and its attention with balance off" if engine else local
    lines = (records / "steps.jsonl").read_text().splitlines() if job.balance else []
    predicted_s = [json.loads(line)["predicted_ms"] / 1e3 for line in lines]
    used = torch.cuda.max_memory_allocated() if job.device == "cuda" else 0
    said = {"layers": layers, "predicted_s": predicted_s, "peak_bytes": [used, meter.predicted_bytes]}
    Path(job.out).write_text(json.dumps({**meter.figures, **said}), encoding="utf-8")
    sys.exit(code)


def _sole_rank() -> None:
    """The launcher's variables of a world of one rank."""
    os.environ.update(sharing.place(0, 1, 1, sharing.free_port()), CUDA_DEVICE_MAX_CONNECTIONS="1")


def _plain(documents: Documents, *, flash: bool) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_balance.megatron.flags import CPU_DEFAULTS
    from megatron_balance.patches import applied, machine

    def defaults(parser: Any) -> Any:
        from megatron_balance.megatron import cpu

        if cpu.installed():
            parser.set_defaults(**CPU_DEFAULTS)
        return parser

    with applied(machine.HELPERS):
        args: Any = parse_and_validate_args(extra_args_provider=defaults)
        model = gpt_config_from_args(args)
        if args.transformer_impl == "local":
            model.transformer_layer_spec = partial(_dense_spec, flash)
        pretrain(
            pretrain_cfg_container_from_args(args, model),
            provider(documents),
            ModelType.encoder_or_decoder,
            dense_forward_step,
        )
    torch.distributed.destroy_process_group()


def dense_forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Token losses of the next microbatch [1, T], with attention inside each document, and the
    function that sums them.
    """
    from megatron_balance.megatron.forward_step import summed_loss

    batch = next(data_iterator)
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    bounds = [*starts, batch["tokens"].shape[1]]
    on = {name: x.cuda(non_blocking=True) for name, x in batch.items()}
    params = _packed(bounds) if len(starts) > 1 else None
    losses = model(on["tokens"], on["position_ids"], None, labels=on["labels"], packed_seq_params=params)
    return losses, partial(summed_loss, on["loss_mask"])


def _packed(bounds: list[int]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu_seqlens = torch.tensor(bounds, dtype=torch.int32).cuda(non_blocking=True)
    longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    both = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return PackedSeqParams(qkv_format="thd", **both)


def _dense_spec(flash: bool, config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's local layers with torch's attention."""
    from megatron.training.models.gpt import default_layer_spec

    spec: Any = default_layer_spec(config, vp_stage)  # pyright: ignore[reportArgumentType]
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        layer.submodules.self_attention.submodules.core_attention = _dense_attention(flash)
    return spec


def _dense_attention(flash: bool) -> type:
    """The class is made here, since its base comes with Megatron, which is not imported before the
    device is known.
    """
    from megatron.core.transformer.module import MegatronModule

    class DenseCoreAttention(MegatronModule):
        """Causal attention by torch's scaled dot product attention, one call a document."""

        def __init__(self, config: Any, **_kwargs: Any) -> None:
            super().__init__(config=config)

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, packed_seq_params: Any = None, **_kwargs: Any
        ) -> Tensor:
            """Query [T, 1, H, D] to [T, 1, H * D]; packed: [T, H, D] to [T, H * D]."""
            if packed_seq_params is None:
                return dense_attention(query[:, 0], key[:, 0], value[:, 0], flash=flash).flatten(1)[:, None]
            bounds = packed_seq_params.cu_seqlens_q.tolist()
            spans = list(zip(bounds, bounds[1:], strict=False))
            return torch.cat(
                [dense_attention(query[a:b], key[a:b], value[a:b], flash=flash) for a, b in spans]
            ).flatten(1)

    return DenseCoreAttention


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, flash: bool) -> Tensor:
    """Causal attention of one document: q [T, H, D], k and v [T, G, D] to [T, H, D]."""
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
        out = F.scaled_dot_product_attention(
            heads_first[0], heads_first[1], heads_first[2], is_causal=True, enable_gqa=grouped
        )
    return out[0].transpose(0, 1)


class _Meter:
    """Wraps Megatron's `train_step` in this process, which ends with its job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.figures: dict[str, list[Any]] = {"losses": [], "grad_norms": [], "seconds": [], "waits": []}
        self.predicted_bytes = 0.0

    def install(self) -> None:
        from megatron.training import training as megatron_training

        from megatron_balance.training.keeping import Keeping

        megatron_training.train_step = self.measured(megatron_training.train_step)
        decide = Keeping.decide

        def noted(keeping: Keeping, planned: Any) -> Any:
            decision = decide(keeping, planned)
            self.predicted_bytes = self.predicted_bytes or decision.peak_bytes  # later ones are corrected
            return decision

        Keeping.decide = noted  # pyright: ignore[reportAttributeAccessIssue]

    def measured(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            results: list[Any] = []
            torch.cuda.synchronize()  # a step's time is from a device that is done to a device that is done
            start = time.perf_counter()

            def run() -> None:
                results.append(train_step(*args, **kwargs))

            if len(self.figures["seconds"]) == self.job.traced:
                from tools.gpu.syncs import waits

                self.figures["waits"] = [str(sync) for sync in waits(run, self.job.device)]
            else:
                run()
            torch.cuda.synchronize()
            self.figures["seconds"].append(time.perf_counter() - start)
            self.figures["losses"].append(float(results[0][0]["lm loss"]))
            self.figures["grad_norms"].append(float(results[0][5]))
            return results[0]

        return step


def run_all(jobs: Sequence[Job]) -> list[Trained]:
    """Measurements of jobs, one after the other, each in a process of its own.

    Raises RuntimeError: one failed; its log is above.
    """
    import multiprocessing

    os.environ["TORCHDYNAMO_DISABLE"] = (
        "1"  # for the children: to compile what is a small part of a step would cost most of the suite's time
    )
    found: list[Trained] = []
    for job in jobs:
        process = multiprocessing.get_context("spawn").Process(target=train, args=(job,))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(
                f"training with balance {'on' if job.balance else 'off'} ended with code {process.exitcode}"
            )
        found.append(Trained(**json.loads(Path(job.out).read_text(encoding="utf-8"))))
    return found

"""Ranks of plain PyTorch of which one fails in a step."""

# Run as a module; prints what became of each, as JSON.
#
# Each job's ranks are forked from this process, which has imported all, and end as interpreters do:
# by their hooks, with their exit code.

import gc
import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance import Model
from megatron_balance.errors import DataError
from megatron_balance.runtime.lower.steps import Step
from megatron_balance.runtime.phase_run import PhaseRun
from megatron_balance.torch import SequenceBalancer, Settings, balanced_attention, hf, knapformer
from tests.support import one_device

SIZE, FAILS = 3, 1
MODEL = Model(4, 2, 8, num_layers=2, hidden_size=32, ffn_size=64)
# Longer than the others wait for a rank that caught its error.
SLOW_S = 5.0
# Longer than the others take to end.
STAYS_S = 12.0


def step(balancer: SequenceBalancer, between: Callable[[Tensor], object] = lambda _: None) -> None:
    # Two layers, and what comes between them on this rank.
    batch = balancer([torch.arange(40)])
    x = torch.randn(batch.num_rows, 4, 8, requires_grad=True)
    first = balanced_attention(x, x[:, :2], x[:, :2], batch)
    between(first)
    balanced_attention(first, first[:, :2], first[:, :2], batch).sum().backward()


def boom(*_: object) -> None:
    if dist.get_rank() == FAILS:
        raise ValueError("boom")


def refused(balancer: SequenceBalancer) -> None:
    # By attention, on one rank.
    batch = balancer([torch.arange(40)])
    x = torch.randn(batch.num_rows - (dist.get_rank() == FAILS), 4, 8)
    balanced_attention(x, x[:, :2], x[:, :2], batch)


def llama() -> Any:
    # A small model of Transformers.
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    return LlamaForCausalLM._from_config(config, attn_implementation=hf.register())


def masked(balancer: SequenceBalancer) -> None:
    # By attention, for an attention mask that one rank alone has.
    model = llama()
    batch = balancer([torch.arange(40)])
    mask = torch.ones(1, batch.num_rows)
    mask[0, 3] = 0
    model(**hf.inputs(batch), **{"attention_mask": mask} if dist.get_rank() == FAILS else {})


def in_a_collective_of_the_user(balancer: SequenceBalancer) -> None:
    def reduce(first: Tensor) -> None:
        boom(first)
        dist.all_reduce(torch.ones(3))

    step(balancer, reduce)


def in_knapformer(_balancer: SequenceBalancer) -> None:
    balancer = knapformer.GroupBalancer("g3n1", ranks_per_node=SIZE)
    balancer.plan_routing([9], 32)
    routed = balancer.route(torch.randn(9, 3, 8))[1]
    boom(routed)
    balancer.pre_attn(routed, routed, routed)


def leaves_the_balancer(balancer: SequenceBalancer) -> None:
    # The error is caught outside, and the process stays.
    try:
        with balancer:
            step(balancer, boom)
    except ValueError:
        time.sleep(STAYS_S)


def leaves_an_evaluation(balancer: SequenceBalancer) -> None:
    # Where it plans; the error is caught, and the process stays.
    balancer.evaluate([torch.arange(40)])
    plans: Any = balancer._evaluation
    if dist.get_rank() == FAILS:
        plans.plan = boom
    try:
        balancer.evaluate([torch.arange(40)])
    except ValueError:
        time.sleep(STAYS_S)


def caught(balancer: SequenceBalancer) -> None:
    # Training goes on, late.
    try:
        boom(torch.empty(0))
    except ValueError:
        time.sleep(SLOW_S)
    step(balancer)


def goes_on_from_the_model(balancer: SequenceBalancer) -> None:
    # To the next step, at once, while the others are in this one.
    with suppress(ValueError):
        step(balancer, boom)
    step(balancer)


def goes_on_from_attention(balancer: SequenceBalancer) -> None:
    def take(self: PhaseRun, step: Step) -> None:
        raise ValueError("boom")

    whole = PhaseRun.take
    if dist.get_rank() == FAILS:
        PhaseRun.take = take
    with suppress(ValueError):
        step(balancer)
    PhaseRun.take = whole
    step(balancer)


def caught_by_all(balancer: SequenceBalancer) -> None:
    # An error of all ranks, of which one comes back late.
    try:
        balancer([torch.zeros(2, 2)])
    except DataError:
        time.sleep(SLOW_S if dist.get_rank() == FAILS else 0.0)
    step(balancer)


def ends_first(balancer: SequenceBalancer) -> None:
    # Rank 0, which holds the store.
    step(balancer)
    time.sleep(1.0 if dist.get_rank() else 0.0)


Job = Callable[[SequenceBalancer], object]
JOBS: dict[str, Job] = {
    "in_the_model": lambda balancer: step(balancer, boom),
    "in_the_backward": lambda balancer: step(balancer, lambda first: first.register_hook(boom)),
    "killed": lambda balancer: step(balancer, lambda _: dist.get_rank() == FAILS and os._exit(9)),
    "exits": lambda balancer: step(balancer, lambda _: dist.get_rank() == FAILS and sys.exit(3)),
    **{job.__name__: job for job in (refused, in_a_collective_of_the_user, in_knapformer, leaves_the_balancer)},
    **{job.__name__: job for job in (leaves_an_evaluation, caught, caught_by_all, ends_first)},
    **{job.__name__: job for job in (goes_on_from_the_model, goes_on_from_attention)},
    **({"masked": masked} if find_spec("transformers") else {}),
}


def run(job: Job, rank: int, port: int) -> None:
    # A rank; what it raises ends its process.
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=SIZE, timeout=timedelta(seconds=200))
    balancer = SequenceBalancer("te_ring", MODEL, settings=Settings(ranks_per_node=SIZE))
    step(balancer)
    dist.barrier()
    begin = time.monotonic()
    try:
        job(balancer)
    finally:
        print(f"seconds {time.monotonic() - begin:.1f}", file=sys.stderr)  # noqa: T201  read below


def fork(job: Job, rank: int, port: int, said: Path) -> int:
    # Start a rank that writes to `said`; its process.
    process = os.fork()
    if process:
        return process
    file = os.open(said, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run(job, rank, port)
    sys.exit(0)


def main() -> None:
    torch.set_num_threads(1)
    one_device.install()
    # What a step and a first backward import, for all ranks
    SequenceBalancer("te_ring", MODEL)([torch.arange(4)])
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    folder = Path(tempfile.mkdtemp(prefix="failing-"))  # not a block: ranks leave through it
    processes: dict[tuple[str, int], int] = {}
    gc.collect()
    gc.freeze()  # a rank's end else goes through, and so copies, all that it inherits
    for name, job in JOBS.items():
        if job is masked:
            llama()  # after the others are forked, whose end would be slow with all that it imports
            gc.freeze()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank in range(SIZE):
            processes[name, rank] = fork(job, rank, port, folder / f"{name}-{rank}")
    found: dict[str, list[tuple[int, str]]] = {}
    for (name, rank), process in processes.items():
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        found.setdefault(name, []).append((code, (folder / f"{name}-{rank}").read_text()))
    shutil.rmtree(folder)
    print(json.dumps(found))  # noqa: T201  read by the test that started this process


if __name__ == "__main__":
    main()

"""Measure what pull and push add to a step: row O-P of Hydraulis' Table 1 (arXiv 2412.07894, section
8.4) on the emulated cluster, in Megatron's own loop.

    python -m tools.hydraulis_exchange            # some minutes; needs a quiet machine
    python -m tools.hydraulis_exchange --short    # one batch, two small layers: whether it runs

The same batches three ways: the base layout, whose weights are gathered and gradients
reduce-scattered; a mix of pipelines that pulls and pushes; the same with overlap. Without overlap both
exchanges are timed between barriers, and every NIC's bytes are held against those of the link's rows,
within 3 %. With overlap, what they add is what a step takes longer than one without them: the step of
the mix, less its pull and push. Losses of a batch are equal to 1e-5. A change adds nothing else where
what is left of a step is the same behind another way and behind the same one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_balance.ir.strategy import Strategy
from megatron_balance.workloads.lengths import draw
from tools.bench.emulated.point import GOODPUT, INTRA_TO_NIC, NUM_NODES, NUM_RANKS, RANKS_PER_NODE
from tools.bench.emulated.steps import WARM_UP, Planned
from tools.emulated_cluster import Controller, Topology, check, run

BASE, MIXED = Strategy.parse("4*tp2-pp1-cp1"), Strategy.parse("tp2-pp1-cp1+6*tp1-pp1-cp1")
"""As <16,1,1> x 4 and <16,1,1> + 6 <8,1,1> are to each other in the paper."""
WAYS = ("base layout", "mixed", "mixed, overlap")
SEQ, SAMPLES = 1024, 4
MOST = 0.03
SKIPPED = 77


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    batches: int
    repeats: int
    layers: int
    hidden: int
    nic_mbit: float

    def lengths(self) -> list[tuple[int, ...]]:
        """Documents of each batch: as many as fill its samples, of at most half of one."""
        drawn = draw("commoncrawl", SAMPLES * SEQ, self.batches, 0)
        batches: list[tuple[int, ...]] = []
        for batch in drawn:
            samples = [0] * SAMPLES
            kept: list[int] = []
            for length in batch:
                cut = max(2, min(length, SEQ // 2))
                at = min(range(SAMPLES), key=samples.__getitem__)
                if samples[at] + cut <= SEQ:
                    samples[at] += cut
                    kept.append(cut)
            batches.append(tuple(kept))
        return batches

    def steps(self, ways: Sequence[int]) -> tuple[Planned, ...]:
        """A warm-up of each way, then every batch twice under each in turn: behind another, and behind
        itself.
        """
        batches, turns = self.lengths(), [way for way in ways for _ in range(2)]
        steps = [Planned("commoncrawl", 0, WARM_UP, way, batches[0]) for way in ways]
        for repeat in range(self.repeats):
            for number, batch in enumerate(batches):
                steps += [Planned("commoncrawl", number, repeat, way, batch) for way in turns]
        return tuple(steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if losses or a NIC's bytes differ; 77 where namespaces are not permitted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--nic-mbit", type=float, default=100.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step's record here")
    given = parser.parse_args(argv)
    options = Options(given.batches, given.repeats, given.layers, given.hidden, given.nic_mbit)
    if given.short:
        options = Options(1, 1, 2, 128, given.nic_mbit)
    if (reason := check()) is not None:
        print(f"SKIP: no emulated cluster on this machine: {reason}")
        return SKIPPED
    from megatron_balance.megatron import cpu

    cpu.install()
    import torch

    torch.set_num_threads(1)
    from megatron_balance.patches.selection import every

    every()  # imports Megatron, which looks at the device while it is imported
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="exchange-") as root:
        for ways in ((0, 1), (2,)):
            folder = Path(root) / f"ways{ways[0]}"
            bits = round(1e6 * options.nic_mbit)
            topology = Topology(NUM_NODES, RANKS_PER_NODE, RANKS_PER_NODE, bits, round(INTRA_TO_NIC * bits))
            job = functools.partial(_on_rank, options=options, ways=ways, topology=topology, folder=folder)
            records += run(topology, job, folder, deadline_s=3600).values[0]
    if given.json is not None:
        given.json.write_text("\n".join(map(json.dumps, records)) + "\n")
    return _told(records)


def _told(records: Sequence[Mapping[str, Any]]) -> int:
    """Print what the ways took; 1 if a batch's losses or a NIC's bytes differ."""
    found = [record for record in records if record["repeat"] != WARM_UP]
    by_way = [[record for record in found if record["way"] == way] for way in range(len(WAYS))]
    seconds = [median(record["step_s"] for record in way) for way in by_way]
    added = [median(record["exchange_s"] for record in way) for way in by_way[:2]]
    added.append(seconds[2] - (seconds[1] - added[1]))
    table = Table("way", "step s", "O-P s", "by links alone s", "largest NIC error")
    for name, step_s, own_s, way in zip(WAYS, seconds, added, by_way, strict=True):
        errors = [record["nic_error"] for record in way if record["nic_error"] is not None]
        told = f"{max(errors):.1%}" if errors else ""
        table.add_row(name, f"{step_s:.2f}", f"{own_s:.2f}", f"{way[0]['links_s']:.2f}", told)
    Console(width=120).print(table)
    apart = [_behind(way) for way in by_way[:2]]
    print(
        "seconds of a step without O-P, behind another way and behind the same one: "
        + ", ".join(f"{name} {other:.3f} {same:.3f}" for name, (other, same) in zip(WAYS, apart, strict=False))
    )
    first = {record["batch"]: record["loss"] for record in by_way[0]}
    losses = max(abs(record["loss"] / first[record["batch"]] - 1) for record in found)
    nics = max(record["nic_error"] for record in found if record["nic_error"] is not None)
    print(f"largest difference of a loss {losses:.1e}; of a NIC's bytes from the link's rows {nics:.1%}")
    return int(losses > 1e-5 or nics > MOST)


def _behind(way: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Median seconds of a way's steps without exchanges, behind another way and behind itself."""
    times: tuple[list[float], list[float]] = [], []
    for record in way:
        times[not record["changed"]].append(record["step_s"] - record["exchange_s"])
    return median(times[0]), median(times[1])


def _on_rank(
    rank: int, controller: Controller, *, options: Options, ways: tuple[int, ...], topology: Topology, folder: Path
) -> list[dict[str, Any]]:
    """Train all steps of these ways; the records, on rank 0."""
    from tools.bench.emulated.training import Run, pretrain_steps

    rate = topology.nic_bits_per_s / 8 * GOODPUT
    cluster = {
        "base": "emulated",
        "num_ranks": NUM_RANKS,
        "ranks_per_node": RANKS_PER_NODE,
        "ranks_per_nic": topology.ranks_per_nic,
        "nic_bytes_per_s": rate,
        "intra_bytes_per_s": INTRA_TO_NIC * rate,
    }
    steps = options.steps(ways)
    flags = {
        "context-parallel-size": 1,
        "tensor-model-parallel-size": 2,
        "use-distributed-optimizer": True,
        "hidden-size": options.hidden,
        "num-attention-heads": 8,
        "kv-channels": options.hidden // 8,
        "ffn-hidden-size": 3 * options.hidden,
        "seq-length": SEQ,
        "max-position-embeddings": SEQ,
        "global-batch-size": SAMPLES,
    }
    if ways == (2,):  # else few ranks own a layer (docs/hydraulis.md)
        layer = (4 + 3 * 3) * options.hidden**2 // 2
        flags |= {"overlap-grad-reduce": True, "ddp-bucket-size": layer}
    records: list[dict[str, Any]] = []
    made = Run(topology, cluster, steps, options.layers, "keep", folder, None, records.append, flags=flags)
    samples = [sample for step in steps for sample in _samples(step.lengths)]
    planner = {
        "name": "hydraulis",
        "strategies": [str(BASE), str(MIXED)],
        "overlap": ways == (2,),
        "tokens_per_rank": SEQ,
    }
    _Meter(rank, controller, made).install()
    pretrain_steps(rank, made, {"planner": planner}, samples)
    return records


def _samples(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Documents of a batch by sample, as `Options.lengths` filled them."""
    filled: list[list[int]] = [[] for _ in range(SAMPLES)]
    for length in lengths:
        min(filled, key=sum).append(length)
    return [tuple(each) for each in filled]


class _Meter:
    """Forces each step's strategy, and measures its exchanges. Without overlap they stand between
    barriers, with the NICs' counters read on both sides.
    """

    def __init__(self, rank: int, controller: Controller, made: Any) -> None:
        self.rank, self.controller, self.run, self.at = rank, controller, made, -1
        self.exchange_s = self.own_s = 0.0
        self.moved: list[list[int]] = []
        self.planners: dict[int, Any] = {}

    @property
    def overlapped(self) -> bool:
        return self.run.steps[self.at].variant == len(WAYS) - 1

    def install(self) -> None:
        """Wrap what is measured, in this process, which ends with its job."""
        from megatron.training import training as megatron_training

        from megatron_balance.megatron import session
        from megatron_balance.megatron.changes import Changes
        from megatron_balance.megatron.roles import Roles

        planner = self._planner
        session.Session.planner = lambda self, forward_only: planner(self)  # noqa: ARG005  evaluation is off
        Roles.pull, Roles.issue_pushes = self._apart(Roles.pull), self._apart(Roles.issue_pushes)
        Changes.gather_weights = self._apart(Changes.gather_weights)
        megatron_training.finalize_model_grads = self._apart(megatron_training.finalize_model_grads)
        megatron_training.train_step = self._measured(megatron_training.train_step)

    def _planner(self, job: Any) -> Any:
        from megatron_balance.megatron.planning import step_plans

        variant = self.run.steps[self.at].variant
        if variant not in self.planners:
            forced = copy.copy(job)
            forced.candidates = (BASE if variant == 0 else MIXED,)
            self.planners[variant] = step_plans(forced, ahead=False)
        return self.planners[variant]

    def _apart(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """An exchange that begins on all ranks at once, unless it runs beside other work."""
        import torch.distributed as dist

        @functools.wraps(exchange)
        def apart(*args: Any, **kwargs: Any) -> Any:
            if self.overlapped:
                return exchange(*args, **kwargs)
            start = perf_counter()
            before = self._counted()
            begun = perf_counter()
            result = exchange(*args, **kwargs)
            dist.barrier()
            ended = perf_counter()
            after = self._counted()
            self.exchange_s += ended - begun
            self.own_s += begun - start + perf_counter() - ended
            self.moved.append([b.sent - a.sent for a, b in zip(before, after, strict=True)])
            return result

        return apart

    def _counted(self) -> Sequence[Any]:
        import torch.distributed as dist

        dist.barrier()
        found = self.controller.nic_bytes() if self.rank == 0 else ()
        dist.barrier()
        return found

    def _measured(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        import torch.distributed as dist

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.at += 1
            self.exchange_s = self.own_s = 0.0
            self.moved = []
            dist.barrier()
            start = perf_counter()
            result = train_step(*args, **kwargs)
            dist.barrier()
            self._report(float(result[0]["lm loss"]), perf_counter() - start - self.own_s)
            return result

        return measured

    def _report(self, loss: float, step_s: float) -> None:
        from megatron_balance.analysis.change import base_sync_s
        from megatron_balance.megatron import session

        job, planned = session.current(), self.run.steps[self.at]
        assert job.changes is not None, "the run has candidates"
        error, links_s = None, sum(base_sync_s(BASE, job.model(1), job.gpus()))
        if planned.variant:
            told = job.changes._predicted[MIXED]
            links_s = told["predicted_pull_s"] + told["predicted_push_s"]
        if planned.variant == 1 and self.rank == 0:
            rows = self.traffic[:, :, 1, 0].sum(axis=0)  # between nodes, sent, by rank, which has a NIC
            carried = [GOODPUT * sum(way[nic] for way in self.moved) for nic in range(len(rows))]
            error = max(abs(got / wanted - 1) for got, wanted in zip(carried, rows.tolist(), strict=True) if wanted)
        if self.rank == 0:
            self.run.record(
                {
                    "way": planned.variant,
                    "changed": self.at > 0 and self.run.steps[self.at - 1].variant != planned.variant,
                    "batch": planned.batch,
                    "repeat": planned.repeat,
                    "loss": loss,
                    "step_s": step_s,
                    "exchange_s": self.exchange_s,
                    "links_s": links_s,
                    "nic_error": error,
                }
            )

    @functools.cached_property
    def traffic(self) -> Any:
        """Bytes of the mix by the rows of its link, of all ranks."""
        import numpy as np

        from megatron_balance.analysis.link import Twins, link, through_nodes, volume
        from megatron_balance.megatron import session

        changes = session.current().changes
        assert changes is not None, "the run has candidates"
        layout, roles = changes.roles.layout, changes.roles
        rows = [link(layout.base, layout.owned, MIXED, layout.parameters)]
        if roles._moving.apart[MIXED].ranks_per_node is not None:
            twins = Twins.of(MIXED, NUM_RANKS, RANKS_PER_NODE)
            rows = [*through_nodes(rows[0], layout.parameters, twins, None)]
        width = roles.weights.element_size()
        return np.stack(
            [
                sum(volume(getattr(each, name), size, NUM_RANKS, RANKS_PER_NODE) for each in rows)
                for name, size in (("pull", width), ("push", 4))
            ]
        )


if __name__ == "__main__":
    sys.exit(main())

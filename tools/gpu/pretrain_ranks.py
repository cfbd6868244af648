"""Megatron's own `pretrain` on several ranks, planner after planner, against one rank.

A tiny GPT over documents of very different lengths, in fp32 with the plain formula, so that a race
shows, and once in bf16: losses and gradient norms of one rank that holds everything, from the same
weights.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, cast

from tools.gpu import sharing
from tools.gpu.rows import OUT_OF_TIME, Context, Figure, Row, Target
from tools.megatron_flags import LOCAL_LAYERS

BUDGET_S = 110.0
LIMIT_S = 60.0
"""Of one run."""
STEPS = 6
LENGTHS = (1000, *(60, 90, 40, 70, 110, 30) * 6)
"""Steps with the long document need several ranks, the others do not."""
FLAGS: Mapping[str, Any] = {
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "num-layers": 2,
    "global-batch-size": 2,
    "train-iters": STEPS,
    "untie-embeddings-and-output-weights": False,
}
GPU_FLAGS: Mapping[str, Any] = {"balance-device": "cuda", "distributed-backend": "nccl", **LOCAL_LAYERS}
LAYERED: Mapping[str, Any] = {"routing": "always", "remap": True}
RINGS: Mapping[str, Any] = {"name": "zeppelin", "slack": 1.0, "rule": "groups", "group_size": 1}
TENSOR: Mapping[str, Any] = {"tensor-model-parallel-size": 2, "sequence-parallel": True}


@dataclass(frozen=True)
class Case:
    """A way to train. `per_node`: ranks of one attention pool that play a node."""

    what: str
    ranks: int
    planner: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    per_node: int = 2
    bf16: bool = False

    @property
    def figure(self) -> Figure:
        name = f"Megatron on {self.ranks} ranks, {self.what}: loss and gradient norm against one rank"
        return Figure(name, "relative", Target("at most", 1e-2 if self.bf16 else 2e-5))


_CHANGES = {"name": "hydraulis", "tokens_per_rank": 256, "within": "zeppelin"}
_CHANGES |= {"strategies": ["tp1-pp1-cp4", "tp2-pp1-cp1+tp1-pp1-cp1"]}
_OWNED = {"context-parallel-size": 1, "use-distributed-optimizer": True, "dist-ckpt-optim-fully-reshardable": True}
CASES = (
    Case("zeppelin, remapped and routed", 4, RINGS, {}, LAYERED),
    Case("zeppelin, two nano-batches", 4, {"name": "zeppelin"}, {}, {**LAYERED, "ping_pong": True}),
    Case(
        "distca, all pipeline stages attending together",
        4,
        {"name": "distca", "block": 16, "tolerance": 0.02},
        {"pipeline-model-parallel-size": 2, "context-parallel-size": 1},
    ),
    Case(
        "zeppelin, tensor-parallel",
        4,
        {"name": "zeppelin"},
        {**TENSOR, "context-parallel-size": 2},
        {"remap": True},
        per_node=1,
    ),
    Case("hydraulis, which changes its strategy", 4, _CHANGES, {**_OWNED, **TENSOR}, {}, per_node=8),
    Case("zeppelin, remapped and routed", 8, RINGS, {}, LAYERED, per_node=4),
    Case("zeppelin in bf16, remapped and routed", 4, RINGS, {}, LAYERED, bf16=True),
    Case("te_ring, remapped", 2, {"name": "te_ring"}, {}, {"remap": True}, per_node=1),
    Case("zeppelin, waves", 4, {"name": "zeppelin", "slack": 2.0, "group_size": 2, "num_waves": 2}, {}, LAYERED),
    Case("distca, two nano-batches", 8, {"name": "distca"}, {}, {}, per_node=4),
    Case("te_ring, remapped and routed", 8, {"name": "te_ring"}, {}, LAYERED, per_node=4),
    *(
        Case(name, 4, {"name": name})
        for name in ("ulysses", "llama_all_gather", "wlb_sharding", "hybrid_dp", "flexsp", "auto", "megatron_dynamic")
    ),
)
FIGURES = tuple(case.figure for case in CASES)


def measure(context: Context) -> Iterator[Row]:
    with training(context) as train:
        start, one = train.reference(FLAGS)
        longest = 0.0
        for case in CASES:
            if case.ranks > context.ranks or context.left_s() < 1.2 * longest + 3.0:
                few = f"{context.ranks} ranks here"
                yield case.figure.not_measured(few if case.ranks > context.ranks else OUT_OF_TIME)
                continue
            began = time.monotonic()
            try:
                if case.bf16:
                    worst, note = train.against(*train.reference({**FLAGS, "bf16": True}), case)
                else:
                    worst, note = train.against(start, one, case)
                yield case.figure.measured(worst, note)
            except AssertionError as error:
                sys.stderr.write(f"{case.what}: {error}\n")
                yield case.figure.failed(" | ".join(str(error).strip().splitlines()[-2:])[-400:])
            longest = max(longest, time.monotonic() - began)


@dataclass
class Training:
    """Megatron's runs on this device, each in a folder of its own."""

    context: Context
    folder: Path
    train: Any
    corpus: str

    def run(self, ranks: int, planner: Any, flags: Mapping[str, Any], **how: Any) -> Any:
        """One run, as `tests.megatron.conftest.train_with` has it."""
        device = GPU_FLAGS if self.context.on_gpu else {}
        kernel = {"kernel": "plain"} if self.context.on_gpu and not flags.get("bf16") else {}
        config = {**kernel, **how.pop("config", {})}
        limits = {"deadline_s": min(LIMIT_S, max(1.0, self.context.left_s() - 2.0)), "grace_s": 5.0}
        given = {**limits, "ranks_per_gpu": self.context.ranks_per_gpu, **how}
        return self.train(ranks, planner, {"data-path": self.corpus, **device, **flags}, config=config, **given)

    def reference(self, flags: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Flags under which any run starts from one rank's weights, and one rank's run from there."""
        from tests.megatron.conftest import at_once, started

        start = started(cast("Any", self.run), Path(mkdtemp(dir=self.folder)), dict(flags))
        return start, self.run(1, "te_ring", at_once(start))

    def against(self, start: Mapping[str, Any], one: Any, case: Case) -> tuple[float, str]:
        """The largest relative difference of a step's loss or gradient norm from one rank's."""
        from tests.megatron.test_parity import SLOW

        config = {"cluster": {"ranks_per_node": case.per_node, **SLOW}, **case.config}
        run = self.run(case.ranks, dict(case.planner), {**start, **case.flags}, config=config)
        assert len(run.steps) == len(one.steps), f"{len(run.steps)} steps of {len(one.steps)}"
        worst = max(
            abs(ours[name] - theirs[name]) / abs(theirs[name])
            for ours, theirs in zip(run.steps, one.steps, strict=True)
            for name in ("loss", "grad_norm")
        )
        counted = {name: sum(sum(step["counters"][name]) for step in run.steps) for name in run.steps[0]["counters"]}
        moved = sum(value for name, value in counted.items() if name.startswith("exchanges_"))
        return worst, f"{len(run.steps)} steps, {moved} exchanges, {run.result.seconds:.0f} s"


@contextmanager
def training(context: Context, *, mps: bool = True) -> Iterator[Training]:
    """Runs from one server, which has imported Megatron and forks the ranks."""
    from tests.megatron.conftest import train_with, write_corpus
    from tests.support.megatron_run import Trainer

    variables = sharing.environment(sharing.chosen(context, mps=mps), context.state, context.ranks_per_gpu)
    with TemporaryDirectory(prefix="pretrain-") as name:
        folder = Path(name)
        corpus = write_corpus(folder / "documents", list(itertools.islice(itertools.cycle(LENGTHS), 200)))
        trainer = Trainer(variables=variables, device=context.device)
        try:
            folders: Any = _Folders(folder)
            yield Training(context, folder, train_with(trainer, corpus, folders), corpus)
        finally:
            trainer.close()


@dataclass(frozen=True)
class _Folders:
    """As much of pytest's `tmp_path_factory` as a run takes."""

    base: Path

    def mktemp(self, name: str) -> Path:
        return Path(mkdtemp(prefix=name, dir=self.base))

"""The experiment: documents of each step, the point, Megatron's flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from megatron_balance.planners import PLANNERS
from megatron_balance.workloads.lengths import Lengths
from tools.bench.distca import point as distca
from tools.bench.emulated.batches import DATASETS, draw_batches
from tools.bench.emulated.point import NUM_RANKS, PAPER_TOKENS, Kernels, Point
from tools.bench.emulated.steps import Experiment, Planned, interleaved
from tools.bench.emulated.variants import Variant

STAGES = 2
REPLICAS = NUM_RANKS // STAGES
SAMPLE = 2048
"""Tokens that a replica reads for a microbatch."""

VARIANTS = (
    Variant("stages", "distca", PLANNERS["distca"].layers, ping_pong=True),
    Variant("joint", "distca", PLANNERS["distca"].layers, ping_pong=True),
)
"""By what `pipeline:` says in a configuration."""
APART, TOGETHER = range(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined(Experiment):
    """Both variants on one topology."""

    batches: int
    """Of each data set; one is a step's."""
    microbatches: int
    """Of a step."""

    def drawn(self) -> dict[str, list[Lengths]]:
        """By data set, the documents of each step, sample after sample."""
        samples = self.microbatches * REPLICAS
        found: dict[str, list[Lengths]] = {}
        for name in DATASETS:
            contexts = draw_batches(name, self.batches * samples, self.seed, PAPER_TOKENS // SAMPLE)
            found[name] = [tuple(chain(*contexts[at : at + samples])) for at in range(0, len(contexts), samples)]
        return found

    def steps(self) -> tuple[Planned, ...]:
        """All of them."""
        return interleaved(self.drawn(), range(len(VARIANTS)), self.repeats)

    def point(self, kernels: Kernels) -> Point:
        """The point at which the NICs are as fast as ticks need in which every stage has a
        microbatch, and a margin.
        """
        each = [cut(lengths, REPLICAS * SAMPLE) for of_set in self.drawn().values() for lengths in of_set]
        ticks = [
            tuple(chain(*microbatches[at : at + STAGES]))
            for microbatches in each
            for at in range(len(microbatches) - STAGES + 1)
        ]
        return distca.point(kernels, ticks, self.layers)

    def flags(self) -> dict[str, Any]:
        """Of Megatron."""
        return {
            **distca.FLAGS,
            "pipeline-model-parallel-size": STAGES,
            "context-parallel-size": 1,
            "seq-length": SAMPLE,
            "max-position-embeddings": SAMPLE,
            "global-batch-size": self.microbatches * REPLICAS,
        }


def cut(lengths: Sequence[int], tokens: int) -> list[Lengths]:
    """Consecutive documents of so many tokens each; some document ends there."""
    parts: dict[int, list[int]] = {}
    for length, start in zip(lengths, accumulate(lengths, initial=0), strict=False):
        parts.setdefault(start // tokens, []).append(length)
    return [tuple(part) for part in parts.values()]

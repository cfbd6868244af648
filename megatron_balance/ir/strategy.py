"""Parallel schemes and strategies (Hydraulis, arXiv 2412.07894, section 1): the degrees of one
pipeline, and the pipelines that share the ranks.

Read and printed as text: `tp4-pp1-cp1+2*tp1-pp2-cp1`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice, product

from megatron_balance.errors import ConfigError

_SCHEME = re.compile(r"tp([1-9]\d*)-pp([1-9]\d*)-cp([1-9]\d*)", re.ASCII)
_REPEATED = re.compile(r"(?:([1-9]\d*)\*)?(tp.*)", re.ASCII)
# Most pipelines that a text may name, so that a typing error does not fill the memory.
_MAX_PIPELINES = 1 << 20


@dataclass(frozen=True, slots=True)
class Scheme:
    """Degrees of tensor, pipeline and context parallelism of one pipeline of the model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        return f"tp{self.tensor}-pp{self.pipeline}-cp{self.context}"

    @staticmethod
    def parse(text: str) -> "Scheme":
        """Read `tp4-pp1-cp2`; ConfigError for another text."""
        match = _SCHEME.fullmatch(text)
        if match is None:
            raise ConfigError(f"scheme {text!r}: expected tpA-ppB-cpC with whole numbers from 1, such as 'tp4-pp1-cp2'")
        return Scheme(*map(int, match.groups()))


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place: its pipeline, that one's first rank and scheme, its number in each dimension."""

    pipeline: int
    first: int
    scheme: Scheme
    tensor: int
    context: int
    stage: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """Pipelines on neighbouring ranks from rank 0 on, each with a scheme; ranks may be left over."""

    pipelines: tuple[Scheme, ...]

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ConfigError("strategy without pipelines: name at least one scheme, such as 'tp1-pp1-cp1'")
        for scheme in self.pipelines:
            if min(scheme.tensor, scheme.pipeline, scheme.context) < 1:
                raise ConfigError(f"strategy: scheme {scheme} has a degree below 1; give whole numbers from 1")

    @property
    def num_ranks(self) -> int:
        """Ranks that the pipelines take together."""
        return sum(scheme.num_ranks for scheme in self.pipelines)

    def ranks_of(self, pipeline: int) -> range:
        """The neighbouring ranks of the pipeline with this number."""
        if not 0 <= pipeline < len(self.pipelines):
            raise IndexError(f"pipeline {pipeline} of a strategy with {len(self.pipelines)}")
        first = sum(scheme.num_ranks for scheme in self.pipelines[:pipeline])
        return range(first, first + self.pipelines[pipeline].num_ranks)

    def seat(self, rank: int) -> Seat | None:
        """The place of `rank`, in Megatron's order tp-cp-pp inside its pipeline; None: left over."""
        return next(islice(self.seats(), rank, None), None)

    def seats(self) -> Iterator[Seat]:
        """The places of all ranks in their order; those left over have none."""
        first = 0
        for pipeline, scheme in enumerate(self.pipelines):
            for stage, context, tensor in product(*map(range, (scheme.pipeline, scheme.context, scheme.tensor))):
                yield Seat(pipeline, first, scheme, tensor, context, stage)
            first += scheme.num_ranks

    def __str__(self) -> str:
        runs = [(len(list(run)), scheme) for scheme, run in groupby(self.pipelines)]
        return "+".join(str(scheme) if count == 1 else f"{count}*{scheme}" for count, scheme in runs)

    @staticmethod
    def parse(text: str) -> "Strategy":
        """Read `tp4-pp1-cp1+2*tp1-pp2-cp1`; ConfigError for another text."""
        pipelines: list[Scheme] = []
        for part in text.split("+"):
            match = _REPEATED.fullmatch(part)
            count = int(match.group(1) or 1) if match else 0
            if match is None or count > _MAX_PIPELINES:
                raise ConfigError(
                    f"strategy {text!r}: cannot read {part!r}; expected schemes joined by '+', each perhaps with a "
                    "count, such as 'tp4-pp1-cp1+2*tp1-pp2-cp1'"
                )
            pipelines += [Scheme.parse(match.group(2))] * count
        return Strategy(tuple(pipelines))

    def check(self, num_ranks: int, node_size: int) -> None:
        """Refuse a strategy that does not lie on the ranks. Raises ConfigError: more ranks than
        `num_ranks`; a TP group that crosses a node's border though it is not larger than a node, or
        is larger and no whole number of nodes.
        """
        if self.num_ranks > num_ranks:
            raise ConfigError(
                f"strategy {self} takes {self.num_ranks} ranks, and there are {num_ranks}; use more ranks (--ranks), "
                "or fewer or smaller pipelines"
            )
        first = 0
        for scheme in self.pipelines:
            tensor = scheme.tensor
            for start in range(first, first + scheme.num_ranks, tensor):
                last = start + tensor - 1
                crosses = start // node_size != last // node_size
                if tensor > node_size:  # whole nodes
                    crosses = start % node_size or tensor % node_size
                if crosses:
                    raise ConfigError(
                        f"strategy {self}: the TP group of ranks {start} to {last} crosses nodes of {node_size} ranks; "
                        "list pipelines with larger TP first, or use a TP that divides the node"
                    )
            first += scheme.num_ranks

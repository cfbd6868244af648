"""Links are measured as training uses them: its communicators, both directions in one group call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from megatron_balance.profiling.cost_table import exchanged  # noqa: E402
from megatron_balance.runtime.cuda import StreamMessage  # noqa: E402
from megatron_balance.runtime.groups import Groups  # noqa: E402


@dataclass
class Written:
    """Streams, and a stream, that write down what they are told."""

    log: list[tuple[Any, ...]] = field(default_factory=list)

    def of(self, name: str) -> Written:
        self.log.append(("of", name))
        return self

    def now(self) -> str:
        return "now"

    def record(self) -> str:
        return "done"

    def wait(self, event: str) -> None:
        self.log.append(("wait", event))

    def empty(self, num_bytes: int) -> Any:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def batch(self, transfers: list[StreamMessage]) -> None:
        self.log.append(("batch", *((t.src, t.dst, t.sends, t.peer, t.tensor.nbytes) for t in transfers)))


def measured(rank: int) -> tuple[list[float], Written]:
    written, taken = Written(), iter((5.0, 1.0, 3.0, 8.0, 9.0, 7.0))

    def sample(call: Callable[[], object]) -> float:
        call()
        return next(taken)

    groups = Groups(rank, 4, (0, 1, 2, 3), None, streams=cast("Any", written))
    return exchanged((0, 2), "inter_node", (16, 64), 3, groups, sample), written


@pytest.mark.parametrize(("rank", "peer"), [(0, 2), (2, 0)])
def test_both_directions_go_in_one_call_on_the_streams_communicator(rank: int, peer: int) -> None:
    seconds, written = measured(rank)
    assert seconds == [3.0, 8.0]
    assert written.log[0] == ("of", "inter_node")
    batches = [entry for entry in written.log if entry[0] == "batch"]
    assert len(batches) == 2 * (1 + 3)  # one to warm up
    for at, size in ((0, 16), (4, 64)):
        assert batches[at] == ("batch", (0, 2, rank == 0, peer, size), (2, 0, rank == 2, peer, size))


def test_ranks_outside_the_pair_take_no_part() -> None:
    seconds, written = measured(1)
    assert seconds == []
    assert written.log == []

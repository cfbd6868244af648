"""Counts the transfers between pipeline stages in a training rank: which shapes were sent, how often
shapes were asked for, how often the device was synchronised for one.
"""

import functools
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

MARK = "counted transfers: "


@dataclass
class Counts:
    """Of one rank. `forward`, `backward`: rows that it sent on, in order."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    shape_exchanges: int = 0
    synchronisations: int = 0

    def line(self) -> str:
        return MARK + json.dumps(asdict(self))


def read(log: str) -> Counts:
    """The counts that a rank printed at its end."""
    found = re.search(f"{MARK}(.*)", log)
    assert found is not None, "the rank printed no counts"
    return Counts(**json.loads(found[1]))


def install() -> Counts:
    """Count from now on, in this process."""
    import torch
    from megatron.core.pipeline_parallel import p2p_communication

    counts = Counts()
    exchange = p2p_communication.P2PCommunicator._communicate_shapes
    synchronize = torch.cuda.synchronize

    @functools.wraps(exchange)
    def exchanged(*args: Any, **kwargs: Any) -> Any:
        counts.shape_exchanges += 1
        return exchange(*args, **kwargs)

    def synchronised(*args: Any, **kwargs: Any) -> Any:
        counts.synchronisations += sys._getframe(1).f_globals["__name__"] == p2p_communication.__name__
        return synchronize(*args, **kwargs)

    p2p_communication.P2PCommunicator._communicate_shapes = exchanged
    torch.cuda.synchronize = synchronised
    for name in ("_p2p_ops", "_batched_p2p_ops"):
        setattr(p2p_communication, name, _noting(getattr(p2p_communication, name), counts))
    return counts


def _noting(issue: Any, counts: Counts) -> Any:
    def noted(*, tensor_send_prev: Any, tensor_send_next: Any, **kwargs: Any) -> Any:
        if tensor_send_next is not None:
            counts.forward.append(tensor_send_next.shape[0])
        if tensor_send_prev is not None:
            counts.backward.append(tensor_send_prev.shape[0])
        return issue(tensor_send_prev=tensor_send_prev, tensor_send_next=tensor_send_next, **kwargs)

    return noted

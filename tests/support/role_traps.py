"""Traps for what may not happen while roles train, in one rank's process."""

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Getters of `parallel_state` that may be asked inside a role (by the function that has its group
# looked up; by any), and why.
ALLOWED = {
    ("get_global_memory_buffer", ""): "scratch memory for gathered rows, of no layout",
    ("is_initialized", ""): "says only that there are groups",
    (
        "get_tensor_model_parallel_group",
        "linear_with_grad_accumulation_and_async_allreduce",
    ): "RowParallelLinear names no group there, and none is used: it gathers nothing and reduces nothing",
}


def install() -> None:
    # Set the traps, from now on. Weights are NaN before each pull. Inside a role `parallel_state`
    # is not asked, and nothing goes over the world's group. Behind the first pull no group and no
    # model is made. Each step moves the bytes that the link's rows say. Losses of roles are scaled
    # as Megatron's own, which `train` sets up when roles are made already.
    import torch
    import torch.distributed as dist
    from megatron.core.utils import get_model_config
    from torch.distributed import distributed_c10d

    from megatron_balance.megatron.roles import Role, Roles

    pull, push, schedule, build = Roles.pull, Roles.push, Role.schedule, Roles._model
    new_group: Any = distributed_c10d._new_group_with_tag
    exchange = dist.all_to_all_single
    now, groups, moved = list[Any](), list[Any](), Counter[str]()

    def pulled(self: Any, strategy: Any) -> Any:
        now[:] = [strategy]
        check_given_back()
        self.weights.fill_(torch.nan)
        moved.clear()
        return pull(self, strategy)

    def pushed(self: Any) -> None:
        push(self)
        assert dict(moved) == bytes_of_rows(self, now[0]), f"{now[0]}: other bytes than those of the link's rows"

    def scheduled(self: Any, transfers: Any = None) -> Callable[..., Any]:
        inner = schedule(self, transfers)

        def run(**kwargs: Any) -> Any:
            assert get_model_config(self.model).grad_scale_func is not None, "a role's loss is not scaled"
            check_gradients_given_back()
            with no_parallel_state(), no_world_group():
                return inner(**kwargs)

        return run

    def counted(into: Any, out: Any, *sizes: Any, group: Any = None, **more: Any) -> Any:
        if any(group is each for each in groups):
            (received, sent), me = sizes, group.rank()
            moved["sent"] += sum(sent) - sent[me]
            moved["received"] += sum(received) - received[me]
        return exchange(into, out, *sizes, group=group, **more)

    made = Roles.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        groups.append(self._exchanges)

    def none_later(what: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def checked(*args: Any, **kwargs: Any) -> Any:
            assert not now, f"{what} was made behind the first pull"
            return inner(*args, **kwargs)

        return checked

    Roles.pull, Roles.push, Role.schedule, Roles.__init__ = pulled, pushed, scheduled, init  # type: ignore[method-assign]
    Roles._model = none_later("a model", build)  # type: ignore[method-assign]
    distributed_c10d._new_group_with_tag = none_later("a group", new_group)
    dist.all_to_all_single = counted  # type: ignore[assignment]


def check_given_back() -> None:
    # Megatron's own model has no weights beside a role's, where they can be made again.
    from megatron_balance.megatron import session

    changes = session.current().changes if session._current else None
    if changes is not None and changes.own_weights._data:
        assert changes.own_weights.num_bytes == 0, "weights of Megatron's own model are there beside a role's"
        sys.stdout.write("GIVEN BACK\n")


def check_gradients_given_back() -> None:
    # Megatron's own model has no gradient buffers while a role begins to compute.
    from megatron_balance.megatron import session

    changes = session.current().changes
    buffers = [buffer for chunk in changes._model for buffer in chunk.buffers] if changes else []
    taken = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    assert taken == 0, f"gradients of Megatron's own model take {taken} bytes beside a role's"


def bytes_of_rows(roles: Any, strategy: Any) -> dict[str, int]:
    # Bytes that a rank sends and receives in a step, by the link's rows.
    import torch.distributed as dist

    from megatron_balance.analysis.link import Twins, link, through_nodes, volume

    layout, rank, size = roles.layout, dist.get_rank(), dist.get_world_size()
    rows = [link(layout.base, layout.owned, strategy, layout.parameters, rank)]
    per_node = roles._apart[strategy].ranks_per_node
    if per_node is not None:
        rows = [*through_nodes(rows[0], layout.parameters, Twins.of(strategy, size, per_node), rank)]
    pieces = [pair for each in rows for pair in ((each.pull, roles.weights.element_size()), (each.push, 4))]
    found = [volume(moved, width, size, 1)[rank].sum(axis=0).tolist() for moved, width in pieces]
    sent, received = map(sum, zip(*found, strict=True))
    return {"sent": sent, "received": received}


@contextmanager
def no_parallel_state() -> Iterator[None]:
    # Let every getter of `parallel_state` raise, wherever Megatron imported it.
    from megatron.core import parallel_state

    def asked(name: str, getter: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if (name, sys._getframe(2).f_code.co_name) in ALLOWED:
            return getter(*given, **named)
        raise AssertionError(f"parallel_state.{name} was asked inside a role: it speaks of the base layout")

    replaced: list[tuple[Any, str, Any]] = []
    for name, getter in list(vars(parallel_state).items()):
        ours = getattr(getter, "__module__", "") == parallel_state.__name__
        if not (callable(getter) and ours and name.startswith(("get_", "is_"))) or (name, "") in ALLOWED:
            continue
        raising = functools.partial(asked, name, getter)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("megatron.") and vars(module).get(name) is getter:
                replaced.append((module, name, getter))
                setattr(module, name, raising)
    try:
        yield
    finally:
        for module, name, getter in replaced:
            setattr(module, name, getter)


# Of `torch.distributed`, in the world's group if none is given.
CALLS = ("isend", "irecv", "send", "recv", "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")
CALLS += ("reduce_scatter_tensor", "all_to_all_single", "barrier")


@contextmanager
def no_world_group() -> Iterator[None]:
    # Let messages over the world's own group raise; Megatron's p2p of two stages may use it.
    import torch.distributed as dist

    def checked(call: Any) -> Callable[..., Any]:
        signature = inspect.signature(call)

        @functools.wraps(call)
        def in_a_group(*args: Any, **kwargs: Any) -> Any:
            group = signature.bind(*args, **kwargs).arguments.get("group")
            assert group not in (None, dist.group.WORLD), f"{call.__name__} over the world's group inside a role"
            return call(*args, **kwargs)

        return in_a_group

    calls = {name: getattr(dist, name) for name in CALLS}

    def batched(op: Any, tensor: Any, peer: int, group: Any = None, **more: Any) -> Any:
        assert group not in (None, dist.group.WORLD), f"{op.__name__} over the world's group inside a role"
        return calls["P2POp"](calls[op.__name__], tensor, peer, group, **more)

    calls["P2POp"], dist.P2POp = dist.P2POp, batched  # type: ignore[assignment]
    for name, call in [(name, call) for name, call in calls.items() if name != "P2POp"]:
        setattr(dist, name, checked(call))
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(dist, name, call)

"""The ranks of a mesh or a process group as a pool."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_balance.errors import ConfigError
from megatron_balance.runtime.groups import single
from megatron_balance.training.pool import Membership, Pool, make_pool
from megatron_balance.training.roll_call import RollCall

Ranks: TypeAlias = DeviceMesh | dist.ProcessGroup
_T = TypeVar("_T")
# By world: what `shared` made.
_SHARED: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = WeakKeyDictionary()


def shared(asked: Hashable, make: Callable[[], _T]) -> _T:
    """The process groups that `make` makes of what the ranks asked for alone: once in a world for
    what its ranks, each for itself, ask for. Collective over the world.
    """
    # Groups cost every rank threads and connections, and only all ranks together can make them, so
    # all compare what each of them asked for.
    everyone: list[Hashable] = [asked] * dist.get_world_size()
    dist.all_gather_object(everyone, asked)
    made = _SHARED.setdefault(cast("dist.ProcessGroup", dist.group.WORLD), {})
    key = tuple(everyone)
    if key not in made:
        made[key] = make()
    return made[key]


def pool_of(ranks: Ranks | None, ranks_per_node: int | None) -> Pool:
    """The pool of this rank, whose ranks each read documents of their own. Collective over the
    world: every rank gives the ranks that it shares documents with, a mesh, of which all dimensions
    count, or a group; None: the world, or this process alone without torch.distributed. Balancers
    of the same ranks share their pool. ConfigError: this rank is not among `ranks`, or nodes hold
    different numbers of them.
    """
    if ranks is not None and not isinstance(ranks, (DeviceMesh, dist.ProcessGroup)):
        raise ConfigError(f"expected a DeviceMesh or a process group, got {type(ranks).__name__}")
    if not dist.is_initialized():
        if ranks is not None:
            raise ConfigError("expected torch.distributed to be set up before the balancer; call init_process_group")
        return Pool(single(), 1, (0,), (0,))
    members, me = _members_of(ranks), dist.get_rank()
    if me not in members:
        raise ConfigError(f"rank {me} is not among the ranks {list(members)} of the mesh or group that it gave")
    return shared_pool(Membership(members, replica=members.index(me)), ranks_per_node)


def shared_pool(mine: Membership, ranks_per_node: int | None) -> Pool:
    """As `training.pool.make_pool`, the pool of all who ask for it. Its ranks hear when one fails."""

    def make() -> Pool:
        pool = make_pool(mine, ranks_per_node)
        return replace(pool, groups=replace(pool.groups, inside=roll_call().of_pool(pool.groups.ranks)))

    return shared((mine, ranks_per_node), make)


def roll_call() -> RollCall:
    """The one of this process in its world."""
    made = _SHARED.setdefault(cast("dist.ProcessGroup", dist.group.WORLD), {})
    if RollCall not in made:
        made[RollCall] = RollCall(watches=True)
    return made[RollCall]


def _members_of(ranks: Ranks | None) -> tuple[int, ...]:
    """Global ranks, in the order of the mesh."""
    if ranks is None:
        return tuple(range(dist.get_world_size()))
    if isinstance(ranks, DeviceMesh):
        return tuple(ranks.mesh.flatten().tolist())
    return tuple(dist.get_process_group_ranks(ranks))


def group_of(ranks: Ranks) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension, or the group itself. ConfigError: neither."""
    if not isinstance(ranks, DeviceMesh):
        if not isinstance(ranks, dist.ProcessGroup):
            raise ConfigError(f"averaged_over: expected a mesh or a process group, got {type(ranks).__name__}")
        return ranks
    if ranks.ndim != 1:
        raise ConfigError(
            f"averaged_over: expected a mesh of one dimension or a process group, got a mesh of {list(ranks.shape)}; "
            "give the process group of these ranks"
        )
    return ranks.get_group()


def device_of(ranks: Ranks | None) -> torch.device:
    """The device of this rank's tensors, by what its groups communicate with."""
    if isinstance(ranks, DeviceMesh):
        cuda = ranks.device_type == "cuda"
    else:
        cuda = dist.is_initialized() and "nccl" in dist.get_backend(ranks)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

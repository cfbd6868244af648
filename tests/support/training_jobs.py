"""A step of training on the ranks of the pool, as an adapter takes it: there and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_balance import make_planner
from megatron_balance.errors import ConfigError, DataError, PlanMismatchError
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planning.layers import Layers
from megatron_balance.planning.place import nano_batches_of
from megatron_balance.runtime.groups import Groups
from megatron_balance.training.plans import check_announced
from megatron_balance.training.pool import Membership, Pool, TensorParallel, make_pool
from megatron_balance.training.tokens import Sequences, TokenExchange, assemble, by_nano_batch, share_lengths
from tests.support.pool import World

CPU, ALONE = torch.device("cpu"), TensorParallel()

# By rank and microbatch: lengths of the documents that it reads.
Lengths = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Received:
    """One rank's side of a step, by nano-batch.

    `planned`, `rows`: (document, position) of its rows, as its plan has them and as they arrived.
    `back`, `read`: documents of the rows that it read, as they came back and as it read them.
    """

    planned: list[list[tuple[int, int]]]
    rows: list[list[tuple[int, int]]]
    back: list[list[int]]
    read: list[list[int]]


def documents(rank: int, microbatch: int, lengths: Sequence[int]) -> Sequences:
    """Documents whose rows (document, position) tell them all apart."""
    made = [
        torch.stack([torch.full((n,), 10000 * rank + 100 * microbatch + at), torch.arange(n)], dim=1)
        for at, n in enumerate(lengths)
    ]
    return Sequences.of(made, num_columns=2)


def step(world: World, lengths: Lengths, planner: str, ping_pong: bool) -> Received:
    """Plan the documents of all ranks and move their rows there and back."""
    pool = Pool(world.groups, world.size, tuple(range(world.size)), tuple(range(world.size)))
    mine = [documents(world.rank, m, own) for m, own in enumerate(lengths[world.rank])]
    shared = share_lengths(mine, None, len(mine), pool, ALONE, CPU)
    chosen = nano_batches_of(shared.lengths, ping_pong=ping_pong)
    first = [sum(map(len, shared.lengths[:m])) for m in range(len(shared.lengths))]
    members = tuple(
        tuple(tuple(begin + seq for seq in part) for part in parts) for begin, parts in zip(first, chosen, strict=True)
    )
    mine, apart = by_nano_batch(mine, shared, members, world.rank)
    layers = Layers(remap=planner == "zeppelin")  # where tokens are owned by others than those that attend to them
    plan = make_planner(planner, Cluster(world.size, world.size), Model(4, 2, 8), layers, tokens_per_rank=600)
    exchange = TokenExchange(apart, [plan(each) for each in apart.lengths], pool)
    rows = exchange.to_ranks(mine, 2, ALONE, CPU)
    read_counts = [sum(each.lengths) for each in mine]
    back = exchange.back(torch.cat([each[:, 0].double() for each in rows])).split(read_counts)
    ids = [[int(each.rows[start, 0]) for start in _starts(each.lengths)] for each in mine]
    everyone: list[list[list[int]]] = [ids] * world.size
    if world.size > 1:
        dist.all_gather_object(everyone, ids, group=world.groups.pool)
    planned: list[list[tuple[int, int]]] = []
    for at, layout in enumerate(exchange.layouts):
        known = [document for of_rank in everyone for document in of_rank[at]]
        planned.append(
            [(known[seq], position) for seq, start, stop in layout.tolist() for position in range(start, stop)]
        )
        local = assemble(rows[at], layout, 4)
        assert local.positions[~local.padding].tolist() == [position for _, position in planned[-1]]
    return Received(
        planned,
        [[(document, position) for document, position in each.tolist()] for each in rows],
        [each.long().tolist() for each in back],
        [each.rows[:, 0].tolist() for each in mine],
    )


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:at]) for at in range(len(lengths))]


def read_with_failure(world: World, failing: int) -> str:
    """The answer that this rank gets when rank `failing` cannot read."""
    pool = Pool(world.groups, world.size, tuple(range(world.size)), tuple(range(world.size)))
    failure = DataError("this rank was asked to fail") if world.rank == failing else None
    mine = [] if failure else [documents(world.rank, 0, (3,))]
    try:
        share_lengths(mine, failure, 1, pool, ALONE, CPU)
    except DataError as error:
        return str(error)
    return "read"


def read_other_numbers(world: World, numbers: Sequence[int], tensor_parallel: int) -> str:
    """The answer that this rank gets when rank r runs `numbers[r]` microbatches.

    `tensor_parallel`: consecutive ranks that compute the same tokens.
    """
    pool, parallel = _tensor_parallel(world, tensor_parallel)
    mine = [documents(world.rank, m, (3, 2)) for m in range(numbers[world.rank])] if parallel.is_source else []
    try:
        shared = share_lengths(mine, None, numbers[world.rank], pool, parallel, CPU)
    except ConfigError as error:
        return str(error)
    return f"{len(shared.lengths)} microbatches"


def announce(world: World, fingerprints: Sequence[str], tensor_parallel: int) -> str:
    """The plan that all ranks agree on, or the error, when rank r announces `fingerprints[r]`."""
    pool, parallel = _tensor_parallel(world, tensor_parallel)
    mine = [documents(world.rank, 0, (3, 2))] if parallel.is_source else []
    shared = share_lengths(mine, None, 1, pool, parallel, CPU, fingerprint=fingerprints[world.rank])
    assert shared.lengths == ((3, 2) * pool.size,)
    try:
        return check_announced(shared.announced)
    except PlanMismatchError as error:
        return str(error)


def _tensor_parallel(world: World, size: int) -> tuple[Pool, TensorParallel]:
    """The pool of this rank where `size` consecutive ranks compute the same tokens."""
    place, peer = divmod(world.rank, size)
    same = tuple(range(peer, world.size, size))
    peers = tuple(range(place * size, (place + 1) * size))
    pools = [range(each, world.size, size) for each in range(size)]
    tensor = [range(first, first + size) for first in range(0, world.size, size)]
    # made by all ranks of the world together, which is all there are
    made = {tuple(ranks): cast("dist.ProcessGroup", dist.new_group(list(ranks))) for ranks in (*pools, *tensor)}
    numbered = tuple(range(len(same)))
    return Pool(Groups(place, len(same), same, made[same]), 1, numbered, numbered), TensorParallel(
        made[peers], peers[0]
    )


def timeouts_of_pools(world: World, seconds: int) -> list[float]:
    """Seconds after which the groups of this rank give up: two stages of half the world each."""
    half = world.size // 2
    stage, at = divmod(world.rank, half)
    mine = Membership(tuple(range(stage * half, (stage + 1) * half)), at, stage=stage, stages=(at, at + half))
    pool = make_pool(mine, ranks_per_node=2, timeout=timedelta(seconds=seconds))
    groups: list[Any] = [*pool.groups.process_groups(), *pool.joint.process_groups()]
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def pool_of_group(world: World) -> tuple[int, int, int, tuple[int, ...]]:
    """Rank, size, ranks per node and readers of the pool of a plain process group."""
    assert world.groups.pool is not None
    pool = make_pool(Membership(tuple(range(world.size)), replica=world.rank), ranks_per_node=4)
    return pool.rank, pool.size, pool.ranks_per_node, pool.readers

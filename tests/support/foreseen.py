"""The order of what each stream of a rank does, as the issue order foresees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_balance.compile.order import Leg, Role, RunLaunches, hops, order, relay_role
from megatron_balance.compile.proof.runs import batches
from megatron_balance.ir.program import Exchange, Op


@dataclass(frozen=True, slots=True)
class Issue:
    # The launches of attention op `op` (leg "run"), or one leg of exchange `op`.
    #
    # `roles`: those of this rank in the leg; proxies pass on bytes as they come, whatever the rank
    # itself is at.
    op: int
    leg: Leg | Literal["run"]
    roles: tuple[Role, ...] = ()


def streams(ops: Sequence[Op], rank: int, ranks_per_node: int) -> dict[str, tuple[Issue, ...]]:
    # Issues of "compute" and of each communication stream that the exchanges of a rank use.
    issues: dict[str, list[Issue]] = {"compute": []}
    for step in order(ops, rank):
        if isinstance(step, RunLaunches):
            issues["compute"].append(Issue(step.op, "run"))
        for (_, _, leg, stream), op, _, pairs in batches(ops, [step], rank, ranks_per_node):
            exchange, taken = ops[op], set[Role]()
            assert isinstance(exchange, Exchange)
            for src, dst, _, *proxies in exchange.routes:
                route = (src, *proxies, dst)
                if any(on == leg and (a, b) in pairs for on, a, b in hops(route)):
                    taken |= {role for on, role in _roles(route, rank) if on == leg}
            issues.setdefault(stream, []).append(Issue(op, leg, tuple(sorted(taken)) or ("own",)))
    return {stream: tuple(own) for stream, own in issues.items()}


def _roles(route: Sequence[int], rank: int) -> list[tuple[Leg, Role]]:
    # The roles of `rank` in each leg of a piece; `route`: src, send proxy, receive proxy, dst.
    path = hops(route)
    taken: list[tuple[Leg, Role]] = []
    for at, (leg, a, b) in enumerate(path):
        if a == rank:
            taken.append((leg, "own" if at == 0 else relay_role(path[at - 1][0])))
        if b == rank:
            taken.append((leg, "own" if at == len(path) - 1 else relay_role(leg)))
    return taken

"""Servers whose own tasks need more keys than a cap allows give some away, before anything is balanced.

A query needs all keys before it, so a server is relieved of the keys of a sequence only by giving away all of its queries of that sequence
(paper: caps bound what migrates; what a server needs for its own queries it has to hold).
"""

from __future__ import annotations

from math import ceil

from megatron_balance.errors import InfeasibleError
from megatron_balance.planners.distca.servers import Servers
from megatron_balance.planners.distca.shards import Piece


def relieve(servers: Servers) -> None:
    """Bring all servers under the caps.

    Raises:
        InfeasibleError: what a server would have to give away, no other one has room for.
    """
    if not servers.counted:
        return
    need = [(own + keys, keys + queries) for own, keys, queries in zip(servers.own, servers.keys, servers.queries, strict=True)]
    for server in sorted(range(len(need)), key=lambda rank: need[rank], reverse=True):
        while servers.over_caps(server):
            if not any(_give_away(servers, server, seq) for seq in _by_keys(servers, server)):
                raise InfeasibleError(_sentence(servers, server, need))


def _by_keys(servers: Servers, server: int) -> list[int]:
    """The sequences of a server for which it receives keys, that with most of them first."""
    missing = {seq: servers.received_keys(server, seq) for seq in {servers.seq(piece) for piece in servers.pieces[server]}}
    return sorted((seq for seq in missing if missing[seq]), key=lambda seq: (-missing[seq], seq))


def _give_away(servers: Servers, giver: int, seq: int) -> bool:
    """Move all tasks of a sequence elsewhere, as they were if that does not work. Returns whether it did."""
    moves: list[tuple[Piece, int]] = []
    for piece in [piece for piece in servers.pieces[giver] if servers.seq(piece) == seq]:
        left: Piece | None = piece
        while left is not None:
            found = _taker(servers, left, giver)
            if found is None:
                for moved, taker in reversed(moves):
                    servers.move(moved, moved[1], moved[2], taker, giver)
                return False
            taker, low = found
            servers.move(left, low, left[2], giver, taker)
            moves.append(((left[0], low, left[2]), taker))
            left = (left[0], left[1], low) if left[1] < low else None
    return bool(moves)


def _taker(servers: Servers, piece: Piece, giver: int) -> tuple[int, int] | None:
    """Who takes most of the end of a piece within its caps, and from where on: with equal queries the one that lacks fewest keys, then the
    lightest. None if nobody takes any.
    """
    key_stop, seq = servers.shards.key_stop(piece), servers.seq(piece)
    best: tuple[int, int, float, int] | None = None
    for server in range(len(servers.pieces)):
        if server != giver and servers.allows(server, (piece[0], piece[2] - 1, piece[2])):
            low = _lowest(servers, piece, server)
            found = (low, servers.missing(server, seq, key_stop), float(servers.load[server]), server)
            best = found if best is None else min(best, found)
    return None if best is None else (best[3], best[0])


def _lowest(servers: Servers, piece: Piece, server: int) -> int:
    """The least index from which on a server may take a piece; it may take the last block."""
    allowed, refused = piece[2] - 1, piece[1] - 1
    while allowed - refused > 1:
        middle = (allowed + refused) // 2
        if servers.allows(server, (piece[0], middle, piece[2])):
            allowed = middle
        else:
            refused = middle
    return allowed


def _sentence(servers: Servers, server: int, need: list[tuple[int, int]]) -> str:
    caps = servers.caps
    held, received = servers.own[server] + servers.keys[server], servers.keys[server] + servers.queries[server]
    what, needed, cap, which = (
        ("max_kv_tokens", held, caps.held, 0) if held > caps.held else ("max_received_tokens", received, caps.received, 1)
    )
    return (
        f"distca: rank {server} would have {needed} tokens for its attention tasks and {what} is {ceil(cap)}, and no other rank has room "
        f"for what it would have to give away. Set {what} to {max(each[which] for each in need)}, with which nobody has to give anything "
        "away, or plan fewer tokens at once"
    )

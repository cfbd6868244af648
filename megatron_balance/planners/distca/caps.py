"""Bring servers whose own tasks exceed a cap under it, before anything is balanced.

A query needs all keys before it, so a server gets rid of the keys of a sequence only by giving away
all of its queries of that sequence (paper: caps bound what migrates; what a server needs for its
own queries it has to hold).
"""

from __future__ import annotations

from math import ceil

from megatron_balance.errors import InfeasibleError
from megatron_balance.planners.distca.servers import Servers
from megatron_balance.planners.distca.shards import Piece


def enforce_caps(servers: Servers) -> None:
    """Give tasks of servers above a cap to servers with room below it.

    Raises:
        InfeasibleError: what a server would have to give away, no other one has room for.
    """
    if not servers.counted:
        return
    need = [
        (own + keys, keys + queries)
        for own, keys, queries in zip(servers.own, servers.keys, servers.queries, strict=True)
    ]
    for server in sorted(range(len(need)), key=lambda rank: need[rank], reverse=True):
        while servers.over_caps(server):
            if not any(_give_away(servers, server, seq) for seq in _by_keys(servers, server)):
                raise InfeasibleError(_sentence(servers, server, need))


def _by_keys(servers: Servers, server: int) -> list[int]:
    """The sequences for which a server receives keys, the one with most keys first."""
    missing = {
        seq: servers.received_keys(server, seq) for seq in {servers.seq(piece) for piece in servers.pieces[server]}
    }
    return sorted((seq for seq in missing if missing[seq]), key=lambda seq: (-missing[seq], seq))


def _give_away(servers: Servers, giver: int, seq: int) -> bool:
    """Move all tasks of a sequence elsewhere, or none if that is impossible.

    Returns whether they moved.
    """
    moves: list[tuple[Piece, int]] = []
    for piece in [piece for piece in servers.pieces[giver] if servers.seq(piece) == seq]:
        rest: Piece | None = piece
        while rest is not None:
            chosen = _taker(servers, rest, giver)
            if chosen is None:
                for moved, taker in reversed(moves):
                    servers.move(moved, moved[1], moved[2], taker, giver)
                return False
            taker, low = chosen
            servers.move(rest, low, rest[2], giver, taker)
            moves.append(((rest[0], low, rest[2]), taker))
            rest = (rest[0], rest[1], low) if rest[1] < low else None
    return bool(moves)


def _taker(servers: Servers, piece: Piece, giver: int) -> tuple[int, int] | None:
    """The server that can take most of the end of a piece within its caps, and where its part
    begins.

    Among servers that can take equally many queries the one that lacks fewest keys, then the
    lightest. None if no server can take any.
    """
    key_stop, seq = servers.shards.key_stop(piece), servers.seq(piece)
    best: tuple[int, int, float, int] | None = None
    for server in range(len(servers.pieces)):
        if server != giver and servers.allows(server, (piece[0], piece[2] - 1, piece[2])):
            low = _lowest(servers, piece, server)
            candidate = (low, servers.missing(server, seq, key_stop), float(servers.load[server]), server)
            best = candidate if best is None else min(best, candidate)
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
        ("max_kv_tokens", held, caps.held, 0)
        if held > caps.held
        else ("max_received_tokens", received, caps.received, 1)
    )
    return (
        f"distca: rank {server} would have {needed} tokens for its attention tasks and {what} is {ceil(cap)}, and no "
        "other rank has room "
        f"for what it would have to give away. Set {what} to {max(each[which] for each in need)}, with which nobody "
        "has to give anything "
        "away, or plan fewer tokens at once"
    )

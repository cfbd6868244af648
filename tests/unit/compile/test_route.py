"""Routing as a pass: which proxies, which pieces, what a rank must know of its neighbours."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron_balance.compile.join import join, split
from megatron_balance.compile.pipeline import expand, project
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.route import Nics
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Fragment, Route, Rows, Transfer
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Exchange, Kind, Op, Program
from megatron_balance.ir.text import parse, text
from tests.support import by_hand, programs
from tests.support.programs import with_backward, with_routes

FOUR_NICS = Nics(4, 1)
TWO_NICS = Nics(4, 2)
ROUTED_CHAIN = programs.CHAIN.replace("owner r2 s0[4:6)\n", "owner r2 s0[4:6)\nowner r3\n")


def transfer(src: int, dst: int, tokens: int = 8) -> tuple[int, ...]:
    return (Kind.KV, 0, 0, tokens, 0, 1, src, dst)


def routes_of(row: tuple[int, ...], nics: Nics) -> list[tuple[int, ...]]:
    """Route rows of an exchange of this one transfer."""
    nobody = (Rows(Fragment.WIDTH),) * 16
    program = Program((8,), 1, 1, nobody, (Exchange(5, Rows.of(Transfer.WIDTH, [row])),))
    (routed,) = with_routes(program, nics).forward
    assert isinstance(routed, Exchange)
    return list(routed.routes)


def ring(num_ranks: int = 8, ranks_per_node: int = 4, ranks_per_nic: int = 1, min_tokens: int = 1) -> MicrobatchPlan:
    routing = Routing(ranks_per_nic, (0,), min_tokens)
    return by_hand.pool("ring", (16 * num_ranks,), num_ranks, ranks_per_node=ranks_per_node, routing=routing)


def routed(ops: tuple[Op, ...]) -> list[Exchange]:
    return [op for op in ops if isinstance(op, Exchange) and op.routes]


def test_a_transfer_between_nodes_goes_over_every_nic_of_both() -> None:
    assert routes_of(transfer(3, 4), FOUR_NICS) == [(3, 4, 0, 0, 4), (3, 4, 1, 1, 5), (3, 4, 2, 2, 6), (3, 4, 3, 3, 7)]


def test_ranks_that_share_a_nic_send_one_piece_between_them_and_take_turns() -> None:
    assert routes_of(transfer(3, 4), TWO_NICS) == [(3, 4, 0, 1, 4), (3, 4, 1, 3, 6)]
    assert routes_of(transfer(2, 5), TWO_NICS) == [(2, 5, 0, 0, 5), (2, 5, 1, 2, 7)]


def test_source_and_target_serve_themselves_on_their_own_nic() -> None:
    for src, dst in [(0, 7), (1, 4), (2, 6)]:
        send_proxies, receive_proxies = zip(*(row[3:] for row in routes_of(transfer(src, dst), FOUR_NICS)), strict=True)
        assert src in send_proxies
        assert dst in receive_proxies
        assert len(set(send_proxies)) == len(set(receive_proxies)) == 4


@pytest.mark.parametrize(
    ("row", "nics"),
    [
        (transfer(0, 1), FOUR_NICS),  # inside a node
        (transfer(0, 4), Nics(4, 4)),  # one NIC a node: nothing to gain
        (transfer(0, 4, tokens=7), Nics(4, 1, min_tokens=8)),  # too short
    ],
)
def test_what_gains_nothing_goes_directly(row: tuple[int, ...], nics: Nics) -> None:
    assert routes_of(row, nics) == []


def test_a_nic_count_that_does_not_divide_the_node() -> None:
    assert Nics(3, 2).per_node == 2
    assert routes_of(transfer(1, 5), Nics(3, 2)) == [(1, 5, 0, 1, 3), (1, 5, 1, 2, 5)]


def test_several_pieces_go_over_each_nic_in_turn() -> None:
    twice = routes_of(transfer(3, 4), replace(TWO_NICS, pieces=2))
    assert twice == [(3, 4, 0, 1, 4), (3, 4, 1, 3, 6), (3, 4, 2, 1, 4), (3, 4, 3, 3, 6)]


def test_every_nic_carries_the_same_in_a_routed_ring() -> None:
    crossing = routed(expand(ring()).forward)[0]
    assert Counter(row[3] for row in crossing.routes) == Counter(range(8))
    assert Counter(row[4] for row in crossing.routes) == Counter(range(8))


def test_a_rank_that_takes_no_part_passes_on() -> None:
    """The ring is over ranks 3 and 4 alone; rank 0 sees their transfers and its own piece of them."""
    plan = replace(ring(), zones=(Zone("inter_node", "ring", (3, 4), (0,)),))
    (only,) = project(plan, 0).forward
    assert isinstance(only, Exchange)
    assert {tuple(row) for row in as_array(only.transfers)[:, 6:].tolist()} == {(3, 4), (4, 3)}
    assert [row for row in only.routes if 0 in row[3:]] == [(3, 4, 0, 0, 4), (4, 3, 0, 4, 0)]
    assert project(plan, 0).queues == (("proxy", 1),)
    verify(expand(plan, "keep"))
    verify(expand(plan, "replay"))


def test_a_rank_on_a_third_node_knows_nothing_of_it() -> None:
    plan = replace(ring(12), zones=(Zone("inter_node", "ring", (3, 4), (0,)),))
    assert project(plan, 8).forward == ()


def test_the_backward_takes_the_same_proxies_the_other_way() -> None:
    program = expand(ring(), "keep")
    there, back = routed(program.forward)[0], routed(program.backward)[-1]
    assert sorted((dst, src, i, q, p) for src, dst, i, p, q in there.routes) == sorted(back.routes)
    assert {row[0] for row in back.transfers} == {Kind.KV_GRAD}


def test_short_rounds_of_a_ring_go_directly() -> None:
    assert routed(expand(ring(min_tokens=16)).forward)
    assert not routed(expand(ring(min_tokens=17)).forward)


def test_the_remap_is_routed_where_the_plan_says_so() -> None:
    plan = by_hand.plan(
        (32,), 4, by_hand.local(0, 0), ranks_per_node=2, moves=[(0, 3, 16)], routing=Routing(1, (REMAP,))
    )
    program = expand(plan, "replay")
    verify(program)
    remap_in, remap_out = routed(program.forward)
    assert list(remap_in.routes) == [(3, 0, 0, 2, 0), (3, 0, 1, 3, 1)]
    assert list(remap_out.routes) == [(0, 3, 0, 0, 2), (0, 3, 1, 1, 3)]
    assert not routed(expand(replace(plan, routing=Routing(1, ()))).forward)


def test_a_whole_program_is_routed_printed_and_split() -> None:
    program = with_routes(parse(ROUTED_CHAIN), Nics(2, 1))
    assert "  r2 <- r1 via r0>r2 r1>r3\n" in text(program)
    both = with_backward(program, "keep")
    verify(both)
    assert parse(text(both)) == both
    assert join(split(program), program.lengths, 1, 1) == program


def test_routes_that_make_no_sense_are_refused() -> None:
    program = with_routes(parse(ROUTED_CHAIN), Nics(2, 1))
    source = text(program)
    for right, wrong, complaint in [
        ("via r0>r2 r1>r3", "via r0>r9 r1>r3", "names a rank that is not there"),
        ("  r2 <- r1 via", "  r3 <- r1 via", "a route from rank 1 to rank 3, which moves nothing"),
    ]:
        assert right in source
        with pytest.raises(InvalidProgramError, match=complaint):
            verify(parse(source.replace(right, wrong)))
    for op in program.forward:
        if isinstance(op, Exchange) and op.routes:
            skipped = replace(op, routes=Rows.of(Route.WIDTH, list(op.routes)[1:]))
            with pytest.raises(InvalidProgramError, match="are numbered"):
                verify(replace(program, forward=tuple(skipped if o is op else o for o in program.forward)))


def test_ranks_that_route_differently_are_found_out() -> None:
    plan = ring(4, 2)
    ranks = [project(plan, rank) for rank in range(4)]
    direct = [project(replace(plan, routing=None), rank) for rank in range(4)]
    for odd in range(4):
        mixed = [direct[r] if r == odd else ranks[r] for r in range(4)]
        with pytest.raises(InvalidProgramError, match=rf"of which rank {odd} does not know"):
            join(mixed, plan.lengths, 2, 1)


def test_a_proxy_that_expects_other_rows_is_found_out() -> None:
    plan = ring(4, 2)
    ranks = [project(plan, rank) for rank in range(4)]
    longer = project(replace(plan, lengths=(128,)), 0)
    ops = [
        b if isinstance(a, Exchange) and a.routes else a for a, b in zip(ranks[0].forward, longer.forward, strict=True)
    ]
    with pytest.raises(InvalidProgramError, match=r"proxy 0 expects other rows|does not expect it"):
        join([replace(ranks[0], forward=tuple(ops)), *ranks[1:]], plan.lengths, 2, 1)


def test_what_is_passed_on_in_the_forward_alone_is_not_brought_again() -> None:
    short = replace(
        ring(6, 2), lengths=(6,)
    )  # three ranks hold it, and the two directions of the ring end at different ones
    for policy in ("keep", "replay"):
        verify(expand(short, policy))

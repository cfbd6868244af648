"""Plans under a sliding window: tokens stay where they are, and only keys that are needed travel."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import Batch, Cluster, Model, reference
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.halo import under
from megatron_balance.compile.join import join, split
from megatron_balance.compile.pipeline import Projector, expand, layout, project
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.compile.proof.runs import prove
from megatron_balance.compile.route import Nics
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.columns import Fragment, Move, Route, Rows, Transfer
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.ir.plan import REMAP, MicrobatchPlan, Routing, Zone
from megatron_balance.ir.program import Attend, Exchange, Kind, Op, Program
from megatron_balance.ir.text import parse, text
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator import simulate
from tests.support import by_hand, dense, programs
from tests.support.programs import with_backward, with_routes
from tests.support.strategies import ALL_PLANNERS, Case, plan

CAUSAL_MODEL = Model(8, 8, 4, hidden_size=32, ffn_size=64)
WINDOW = SlidingWindow(10)
LENGTHS = (150, 61, 24, 7, 7, 3)


def case(model: Model = CAUSAL_MODEL, **options: object) -> Case:
    return Case(Batch(LENGTHS), Cluster(4, 2), model, None, seed=3, **options)  # pyright: ignore[reportArgumentType]


def needed(planned: MicrobatchPlan, rank: int) -> set[tuple[int, int]]:
    # Keys that the queries of a rank see and that it does not hold, token by token.
    held = Projector(planned).attention_layout(rank).tolist()
    own = {(seq, token) for seq, start, stop in held for token in range(start, stop)}
    first = WINDOW.size - 1
    return {(seq, key) for seq, query in own for key in range(max(0, query - first), query)} - own


@pytest.mark.parametrize("planner", ALL_PLANNERS)
def test_a_rank_is_brought_the_keys_that_it_needs_and_no_others(planner: str) -> None:
    # In one exchange before one launch, whatever the comm patterns of the causal plan.
    windowed = under(plan(planner, case()), WINDOW)
    program = prove(windowed, "keep")
    arrived: list[set[tuple[int, int]]] = [set() for _ in range(windowed.num_ranks)]
    launches = [0] * windowed.num_ranks
    for op in program.forward:
        if isinstance(op, Exchange):
            for kind, seq, start, stop, _, _, _, dst in op.transfers:
                assert kind == Kind.KV
                new = {(seq, token) for token in range(start, stop)}
                assert not new & arrived[dst], "a key comes once"
                arrived[dst] |= new
        elif isinstance(op, Attend):
            launches[op.rank] += 1
    assert arrived == [needed(windowed, rank) for rank in range(windowed.num_ranks)]
    assert launches == [int(len(Projector(windowed).attention_layout(rank)) > 0) for rank in range(windowed.num_ranks)]


@pytest.mark.parametrize("planner", ALL_PLANNERS)
def test_tokens_stay_where_the_causal_plan_has_them(planner: str) -> None:
    # Also after a remap, which the layers of both masks make; the window's may be routed alone.
    causal = plan(planner, case(remapped=True, routing=(1, 1)))
    windowed = under(causal, WINDOW)
    assert [layout(windowed, r).tolist() for r in range(4)] == [layout(causal, r).tolist() for r in range(4)]
    assert causal.routing is not None
    assert windowed.routing == replace(causal.routing, zones=(REMAP,))
    prove(windowed, "replay")


def test_a_window_that_shows_whole_sequences_leaves_the_plan_as_it_is() -> None:
    causal = plan("te_ring", case())
    assert under(causal, SlidingWindow(150)) is causal
    assert under(causal, CAUSAL) is causal
    assert under(causal, SlidingWindow(149)).mask == SlidingWindow(149)


@pytest.mark.parametrize("planner", ["te_ring", "ulysses", "distca", "zeppelin"])
def test_a_model_of_windows_is_planned_with_its_pairs_and_bytes(planner: str) -> None:
    model, cluster = replace(CAUSAL_MODEL, attention=WINDOW.name), Cluster(4, 2)
    found = choose_planner(planner, {}).plan(Batch(LENGTHS), cluster, model, AnalyticCost(cluster, model))
    figures = plan_statistics(found, model)
    assert sum(figures["attention_pairs_per_rank"]) == sum(map(WINDOW.num_pairs, LENGTHS))
    received = [len(needed(found, rank)) for rank in range(4)]
    assert figures["kv_tokens_received_per_rank"] == received
    assert figures["bytes_received_per_rank"]["total"] == [n * model.kv_bytes_per_token for n in received]


def test_the_simulator_sees_the_keys_that_do_not_travel() -> None:
    # GPT-OSS's window of 128 keys on one long sequence over two nodes.
    model = Model(64, 8, 64, attention="window_128")
    cluster = Cluster(16, 8)

    def layer(model: Model) -> dict[str, float]:
        cost = AnalyticCost(cluster, model)
        planned = choose_planner("te_ring", {}).plan(Batch((131_072,)), cluster, model, cost)
        received = sum(plan_statistics(planned, model)["bytes_received_per_rank"]["total"])
        return {"bytes": received, "s": simulate(planned, cluster, model)["phases_s"]["forward_attention"]}

    causal, windowed = layer(replace(model, attention="causal")), layer(model)
    # Each of 16 ranks has two chunks, and 15 + 16 begin behind others' tokens: 127 keys each; the two
    # chunks in the middle lie on one rank.
    assert windowed["bytes"] == 30 * 127 * model.kv_bytes_per_token
    assert windowed["bytes"] < causal["bytes"] / 200
    assert windowed["s"] < causal["s"] / 100


# Programs under a mask that is not causal: `verify` and `reference` ask the mask, and nothing else
# in them knows it.
FULL = """program lengths 8 3 heads 2 kv_heads 1 policy none mask full
owner r0 s0[0:4) s1[0:3)
owner r1 s0[4:8)
forward
exchange 0 p2p
  r1 <- r0 kv s0[0:4)
  r0 <- r1 kv s0[4:8)
attend r0
  q s0[0:4) over s0[0:4) s0[4:8)
  q s1[0:3) over s1[0:3)
attend r1
  q s0[4:8) over s0[0:4) s0[4:8)
backward
"""
# Queries 4 to 6 see keys 2 and 3 with a window of 3 (4: 2, 3, 4; 5: 3, 4, 5; 6: 4, 5, 6): the last
# one needs none of rank 0's.
WINDOWED = """program lengths 8 3 heads 2 kv_heads 1 policy none
owner r0 s0[0:4) s1[0:3)
owner r1 s0[4:8)
forward
exchange 0 p2p
  r1 <- r0 kv s0[2:4)
attend r0
  q s0[0:4) over s0[0:4)
  q s1[0:3) over s1[0:3)
attend r1
  q s0[4:8) over s0[2:4) s0[4:8)
backward
"""
# The partial outputs of queries 4 and 5 over the keys of rank 0 come from there, and are merged.
WINDOW_BY_OUTPUTS = """program lengths 8 heads 2 kv_heads 1 policy none
owner r0 s0[0:4)
owner r1 s0[4:8)
forward
exchange 0 p2p
  r0 <- r1 q s0[4:6)
attend r0
  q s0[0:8) over s0[0:4)
attend r1
  q s0[4:8) over s0[4:8)
exchange 1 p2p
  r1 <- r0 out s0[4:6)
merge r1
  out s0[4:6)
backward
"""


def window(source: str) -> Program:
    return replace(parse(source), mask=SlidingWindow(3))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "program", [parse(FULL), window(WINDOWED), window(WINDOW_BY_OUTPUTS)], ids=["full", "window", "outputs"]
)
def test_other_masks_are_proved_and_equal_dense_attention(program: Program, policy: Policy) -> None:
    both = with_backward(program, policy)
    verify(program)
    verify(both)
    assert dense.worst_of(both) < 1e-12


def test_text_names_a_mask_that_is_not_causal_and_the_reference_asks_it() -> None:
    assert parse(FULL).mask.name == "full"
    assert text(parse(FULL)) == FULL
    assert text(parse(text(with_backward(parse(FULL), "keep")))) == text(with_backward(parse(FULL), "keep"))
    with pytest.raises(InvalidProgramError, match=r"line 1: expected 'program lengths .*\[mask M\]'"):
        parse(FULL.replace("mask full", "mask half"))
    # More than is needed may travel and the reference refuses what the mask does not show.
    verify(window(WINDOWED.replace("kv s0[2:4)", "kv s0[0:4)")))  # as with causal masks
    program = OUTPUT_TOO_MANY
    x = dense.draw(program.lengths, program.num_heads, program.num_kv_heads)
    with pytest.raises(InvalidProgramError, match="holds no partial of out"):
        reference.run(program, x.q, x.k, x.v, x.scale)


BACK, SEEN = "  r0 <- r1 kv s0[4:8)\n", "s0[2:4) s0[4:8)"
OUTPUT_TOO_MANY = window(WINDOW_BY_OUTPUTS.replace("out s0[4:6)", "out s0[4:7)").replace("q s0[4:6)", "q s0[4:7)"))


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        # A causal program leaves out keys that the full mask shows, and the other way round.
        (parse(FULL.replace("s0[0:4) s0[4:8)\n  q s1", "s0[0:4)\n  q s1").replace(BACK, "")), "never completes OUT"),
        (parse(FULL.replace(" mask full", "")), "no query of it may see any key of it"),
        # A key too few, a key too many, a query that sees nothing of it.
        (window(WINDOWED.replace("[2:4)", "[3:4)")), "never completes OUT"),
        (window(WINDOWED.replace("kv s0[2:4)", "kv s0[3:4)")), "rank does not hold KV"),
        (window(WINDOWED.replace(SEEN, f"{SEEN}\n  q s0[6:8) over s0[2:4)")), "no query of it may see any key of it"),
        (OUTPUT_TOO_MANY, "no partial output of it"),
        (parse(WINDOWED), "never completes OUT"),
    ],
)
def test_verify_finds_what_a_mask_shows_and_a_program_misses(program: Program, complaint: str) -> None:
    with pytest.raises(InvalidProgramError, match=complaint):
        verify(program)


# The remap as a pass: what small programs look like with one, and that they still compute
# attention.
LAYOUT = np.array([[0, 0, 4], [1, 2, 5], [0, 8, 9]])


def moves(*rows: tuple[int, int, int]) -> Rows:
    return Rows.of(Move.WIDTH, rows)


def transfers(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    return [row for op in ops if isinstance(op, Exchange) for row in op.transfers]


def two_zones(*moved: tuple[int, int, int]) -> MicrobatchPlan:
    # Sequence 0 over ranks 0 and 1, sequence 1 on rank 1, sequence 2 on rank 2; rank 3 has nothing.
    zones = (by_hand.zone("intra_node", "ring", (0, 1), (0,)), by_hand.local(1, 1), by_hand.local(2, 2))
    return by_hand.plan((16, 10, 6), 4, *zones, ranks_per_node=2, moves=moved)


def test_inputs_come_first_outputs_go_back_last_and_a_home_no_longer_holds_what_it_gave() -> None:
    program = expand(by_hand.plan((4,), 2, by_hand.local(0, 0), moves=[(0, 1, 1)]))
    expected = """\
program lengths 4 heads 2 kv_heads 1 policy none remap_in 1
owner r0 s0[0:2) s0[2:3)
owner r1 s0[3:4)
forward
exchange 0 p2p
  r0 <- r1 q s0[3:4)
  r0 <- r1 kv s0[3:4)
attend r0
  q s0[0:2) over s0[0:2)
  q s0[2:4) over s0[0:2) s0[2:4)
exchange 1 p2p
  r1 <- r0 out s0[3:4)
backward
"""
    assert text(program) == expected
    verify(program)
    # What a home has handed over it no longer holds.
    source = text(expand(two_zones((2, 3, 2))))
    kept = source.replace("attend r2\n", "attend r3\n  q s2[4:6) over s2[4:6)\nattend r2\n")
    assert kept != source
    with pytest.raises(InvalidProgramError, match="rank does not hold Q"):
        verify(parse(kept))


def test_a_first_hop_of_a_ring_is_made_by_the_home_or_saved() -> None:
    # The home makes the first hop of a ring.
    # Rank 1 holds s0[4:12); of these the last are owned by rank 3, which sends them to rank 0, too:
    # one transfer, not two.
    plan = two_zones((1, 3, 14))
    assert Projector(plan).attention_layout(1).tolist() == [[0, 4, 8], [0, 8, 12], [1, 0, 5], [1, 5, 10]]
    remap_in = expand(plan).forward[0]
    assert isinstance(remap_in, Exchange)
    sent_on = [row for row in remap_in.transfers if row[6:] == (3, 0)]
    assert [row[:4] for row in sent_on] == [(Kind.KV, 0, 8, 12)]
    keys = [row for row in transfers(expand(plan).forward[1:]) if row[0] == Kind.KV]
    assert [row[:4] for row in keys if row[6:] == (1, 0)] == [(Kind.KV, 0, 4, 8)]
    # A first hop that is away altogether saves an exchange.
    plan = two_zones((1, 3, 18))
    forward = project(plan, 0).forward
    assert not any(row[6] == 1 for row in transfers(forward))
    ids = [op.id for op in forward if isinstance(op, Exchange)]
    assert ids == [0, 1]  # it still sends its own block to rank 1
    alone = two_zones((0, 3, 8), (1, 3, 18))
    assert [op.id for op in expand(alone).forward if isinstance(op, Exchange)] == [0, 2]
    # A token at home where it hops to takes the long way.
    # Rank 0 has handed s0[8:12) over to rank 1, so only rank 1 can bring it back.
    plan = two_zones((1, 0, 14))
    assert (Kind.KV, 0, 8, 12, 0, 1, 1, 0) in transfers(expand(plan).forward[1:])
    verify(expand(plan, "keep"))


# Routing as a pass: which proxies, which pieces, what a rank must know of its neighbours.
FOUR_NICS = Nics(4, 1)
TWO_NICS = Nics(4, 2)
ROUTED_CHAIN = programs.CHAIN.replace("owner r2 s0[4:6)\n", "owner r2 s0[4:6)\nowner r3\n")


def transfer(src: int, dst: int, tokens: int = 8) -> tuple[int, ...]:
    return (Kind.KV, 0, 0, tokens, 0, 1, src, dst)


def routes_of(row: tuple[int, ...], nics: Nics) -> list[tuple[int, ...]]:
    # Route rows of an exchange of this one transfer.
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
    # Ranks that share a NIC send one piece between them and take turns.
    assert routes_of(transfer(3, 4), TWO_NICS) == [(3, 4, 0, 1, 4), (3, 4, 1, 3, 6)]
    assert routes_of(transfer(2, 5), TWO_NICS) == [(2, 5, 0, 0, 5), (2, 5, 1, 2, 7)]
    # Source and target serve themselves on their own NIC.
    for src, dst in [(0, 7), (1, 4), (2, 6)]:
        send_proxies, receive_proxies = zip(*(row[3:] for row in routes_of(transfer(src, dst), FOUR_NICS)), strict=True)
        assert src in send_proxies
        assert dst in receive_proxies
        assert len(set(send_proxies)) == len(set(receive_proxies)) == 4
    # A NIC count that does not divide the node.
    assert Nics(3, 2).per_node == 2
    assert routes_of(transfer(1, 5), Nics(3, 2)) == [(1, 5, 0, 1, 3), (1, 5, 1, 2, 5)]
    # What gains nothing goes directly: inside a node; with one NIC a node; too short.
    assert routes_of(transfer(0, 1), FOUR_NICS) == []
    assert routes_of(transfer(0, 4), Nics(4, 4)) == []
    assert routes_of(transfer(0, 4, tokens=7), Nics(4, 1, min_tokens=8)) == []
    # Several pieces go over each NIC in turn.
    twice = routes_of(transfer(3, 4), replace(TWO_NICS, pieces=2))
    assert twice == [(3, 4, 0, 1, 4), (3, 4, 1, 3, 6), (3, 4, 2, 1, 4), (3, 4, 3, 3, 6)]


def test_a_routed_ring_loads_all_nics_alike_there_and_back() -> None:
    # Every NIC carries the same in a routed ring.
    crossing = routed(expand(ring()).forward)[0]
    assert Counter(row[3] for row in crossing.routes) == Counter(range(8))
    assert Counter(row[4] for row in crossing.routes) == Counter(range(8))
    # The backward takes the same proxies the other way.
    program = expand(ring(), "keep")
    there, back = routed(program.forward)[0], routed(program.backward)[-1]
    assert sorted((dst, src, i, q, p) for src, dst, i, p, q in there.routes) == sorted(back.routes)
    assert {row[0] for row in back.transfers} == {Kind.KV_GRAD}
    # Short rounds of a ring go directly.
    assert routed(expand(ring(min_tokens=16)).forward)
    assert not routed(expand(ring(min_tokens=17)).forward)
    # What is passed on in the forward alone is not brought again.
    # Three ranks hold it, and the two directions of the ring end at different ones.
    short = replace(ring(6, 2), lengths=(6,))
    for policy in ("keep", "replay"):
        verify(expand(short, policy))


def test_a_rank_that_takes_no_part_passes_on() -> None:
    # The ring is over ranks 3 and 4 alone; rank 0 sees their transfers and its own piece of them.
    plan = replace(ring(), zones=(Zone("inter_node", "ring", (3, 4), (0,)),))
    (only,) = project(plan, 0).forward
    assert isinstance(only, Exchange)
    assert {tuple(row) for row in as_array(only.transfers)[:, 6:].tolist()} == {(3, 4), (4, 3)}
    assert [row for row in only.routes if 0 in row[3:]] == [(3, 4, 0, 0, 4), (4, 3, 0, 4, 0)]
    assert project(plan, 0).queues == (("proxy", 1),)
    verify(expand(plan, "keep"))
    verify(expand(plan, "replay"))
    # A rank on a third node knows nothing of it.
    assert project(replace(ring(12), zones=plan.zones), 8).forward == ()


def test_the_remap_is_routed_where_the_plan_says_so() -> None:
    routing = Routing(1, (REMAP,))
    plan = by_hand.plan((32,), 4, by_hand.local(0, 0), ranks_per_node=2, moves=[(0, 3, 16)], routing=routing)
    program = expand(plan, "replay")
    verify(program)
    remap_in, remap_out = routed(program.forward)
    assert list(remap_in.routes) == [(3, 0, 0, 2, 0), (3, 0, 1, 3, 1)]
    assert list(remap_out.routes) == [(0, 3, 0, 0, 2), (0, 3, 1, 1, 3)]
    assert not routed(expand(replace(plan, routing=Routing(1, ()))).forward)


def test_a_whole_program_is_routed_printed_and_split_and_wrong_routes_are_refused() -> None:
    program = with_routes(parse(ROUTED_CHAIN), Nics(2, 1))
    assert "  r2 <- r1 via r0>r2 r1>r3\n" in text(program)
    both = with_backward(program, "keep")
    verify(both)
    assert parse(text(both)) == both
    assert join(split(program), program.lengths, 1, 1) == program
    # Routes that make no sense are refused.
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


def test_ranks_that_route_differently_or_expect_other_rows_are_found_out() -> None:
    plan = ring(4, 2)
    ranks = [project(plan, rank) for rank in range(4)]
    direct = [project(replace(plan, routing=None), rank) for rank in range(4)]
    for odd in range(4):
        mixed = [direct[r] if r == odd else ranks[r] for r in range(4)]
        with pytest.raises(InvalidProgramError, match=rf"of which rank {odd} does not know"):
            join(mixed, plan.lengths, 2, 1)
    # A proxy that expects other rows is found out.
    longer = project(replace(plan, lengths=(128,)), 0)
    pairs = zip(ranks[0].forward, longer.forward, strict=True)
    ops = [b if isinstance(a, Exchange) and a.routes else a for a, b in pairs]
    with pytest.raises(InvalidProgramError, match=r"proxy 0 expects other rows|does not expect it"):
        join([replace(ranks[0], forward=tuple(ops)), *ranks[1:]], plan.lengths, 2, 1)

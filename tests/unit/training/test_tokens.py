"""A rank's rows: what travels with a token, nano-batches, positions and padding."""

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_balance.compile.halo import under
from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.forest import Forest, Segment, Tree, document, num_tokens, path_positions
from megatron_balance.ir.mask import CAUSAL
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.strategy import Strategy
from megatron_balance.runtime.groups import Groups
from megatron_balance.training import tokens
from megatron_balance.training.pool import StrategyRanks, node_size
from megatron_balance.training.weights import Lane, Moves, RoleMemory, Stopwatch

pytest.importorskip("torch")


def test_documents_of_one_or_several_columns_become_rows() -> None:
    pairs = tokens.Sequences.of([torch.tensor([[1, 5], [2, 6]]), torch.tensor([[3, 7]])], num_columns=2)
    assert (pairs.rows.tolist(), pairs.lengths) == ([[1, 5], [2, 6], [3, 7]], (2, 1))
    assert (tokens.Sequences.of([]).rows.shape, tokens.Sequences.of([]).lengths) == ((0, 1), ())
    mask = torch.tensor([0.0, 1.0, 0.3, -2.5])
    assert tokens.from_bits(tokens.to_bits(mask)).tolist() == mask.tolist(), "weights of any size survive"


def test_nano_batches_take_their_sequences_of_those_read_here() -> None:
    mine = [tokens.Sequences.of([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])])]
    shared = tokens.PoolLengths(((9, 2, 1, 2),), (np.array([0, 1, 1, 1]),))
    read, apart = tokens.by_nano_batch(mine, shared, (((0, 2), (1, 3)),), rank=1)
    assert [each.rows.flatten().tolist() for each in read] == [[3], [1, 2, 4, 5]]
    assert [each.lengths for each in read] == [(1,), (2, 2)]
    assert apart.lengths == ((9, 1), (2, 2))
    assert [owners.tolist() for owners in apart.owners] == [[0, 1], [1, 1]]


def test_rows_are_padded_keep_their_positions_and_are_shared_by_tensor_parallel_ranks() -> None:
    local = tokens.assemble(torch.tensor([[7], [8], [9]]), np.array([[4, 5, 7], [2, 0, 1]]), multiple=2)
    assert local.rows.flatten().tolist() == [7, 8, 9, 0]
    assert local.positions.tolist() == [5, 6, 0, 0]
    assert local.padding.tolist() == [False, False, False, True]
    nobody = tokens.assemble(torch.empty(0, 1, dtype=torch.int64), np.empty((0, 3), dtype=np.int64), multiple=2)
    assert nobody.padding.tolist() == [True, True], "a rank without tokens computes padding"
    first, second = (
        tokens.assemble(torch.tensor(rows)[:, None], np.array([[0, 0, len(rows)]]), multiple=2)
        for rows in ([1, 2, 3, 4], [5, 6])
    )
    both = tokens.interleave([first, second], shares=2)
    assert both.rows.flatten().tolist() == [1, 2, 5, 3, 4, 6]
    assert both.positions.tolist() == [0, 1, 0, 2, 3, 1]
    assert both.nano_batches == (first, second)
    assert tokens.interleave([first], shares=2) is first


# Pulls and pushes of slots beside a caller that computes: what is issued when, and waits for what.

CPU = torch.device("cpu")
LANE_S = 5.0


class Slots:
    # Stands for an exchange of four slots; each may be held back, or fail.
    def __init__(self, *, held: bool = False) -> None:
        self.pulls = self.pushes = (None,) * 4
        self.ran: list[str] = []
        self.held = {slot: threading.Event() for slot in range(4)}
        for event in () if held else self.held.values():
            event.set()
        self.failing = -1

    def pull_slot(self, slot: int, *_: Any) -> None:
        assert self.held[slot].wait(LANE_S)
        if slot == self.failing:
            raise ConnectionError("a rank ended")
        self.ran.append(f"pull {slot}")

    def push_slot(self, slot: int, *_: Any) -> None:
        self.ran.append(f"push {slot}")


# By number of a parameter; slot 2 has none on this rank.
SLOTS = {10: 0, 11: 1, 12: 1, 13: 3}


def moves(slots: Slots, *, first: bool = True, beside: bool = True) -> Moves:
    made = Moves(cast("Any", slots), RoleMemory({}, {}, SLOTS, first), {}, Lane(CPU, beside=beside), Stopwatch(CPU))
    made.pull({}, torch.float32)
    return made


def test_a_module_waits_for_its_own_slot_not_for_later_ones_and_is_told_what_it_raised() -> None:
    slots = Slots(held=True)
    found = moves(slots)
    slots.held[0].set()
    slots.held[1].set()
    found.need(1)
    assert slots.ran == ["pull 0", "pull 1"]
    found.need(0)
    slots.held[2].set()
    slots.held[3].set()
    found.need(3)
    assert slots.ran[2:] == ["pull 2", "pull 3"]
    slots = Slots()
    slots.failing = 2
    found = moves(slots)
    found.need(1)
    with pytest.raises(ConnectionError, match="a rank ended"):
        found.need(2)


def test_a_push_begins_when_the_last_microbatch_has_left_the_slot_and_those_behind_it() -> None:
    slots, restored = Slots(), []
    found = moves(slots)
    found.need(3)
    found.expect(2, lambda: restored.append(len(slots.ran)))
    for number in (13, 12, 11, 10, 12, 11):
        found.left(number)
    assert not found._pushed, "slot 1 is complete, and slot 3 lacks a gradient of the second microbatch"
    found.left(13)
    assert len(found._pushed) == 3, "with slot 2, which has no gradient here, and slot 1"
    assert restored == [4], "buffers are there before the first push"
    with pytest.raises(AssertionError, match="behind the push of its slot"):
        found.left(13)
    found.left(10)
    found.finish()
    assert slots.ran[4:] == ["push 3", "push 2", "push 1", "push 0"]
    assert restored == [4]


@pytest.mark.parametrize(("first", "beside"), [(False, True), (True, False)])
def test_ranks_behind_the_first_stage_and_runs_without_overlap_push_when_all_is_done(first: bool, beside: bool) -> None:
    slots = Slots()
    found = moves(slots, first=first, beside=beside)
    found.expect(1, lambda: None)
    for number in SLOTS:
        found.left(number)
    assert not found._pushed
    found.issue_rest()
    found.finish()
    assert slots.ran == [*(f"pull {slot}" for slot in range(4)), *(f"push {slot}" for slot in reversed(range(4)))]


def test_what_the_caller_waits_is_measured() -> None:
    slots, stopwatch = Slots(), Stopwatch(CPU)
    found = Moves(cast("Any", slots), RoleMemory({}, {}, SLOTS, first=True), {}, Lane(CPU, beside=True), stopwatch)
    found.pull({}, torch.float32)
    found.finish()
    seconds = stopwatch.seconds()
    assert sorted(seconds) == ["pull_s", "push_s"]
    assert min(seconds.values()) > 0


# Pools: their ranks per node, and the ranks of a strategy that tokens go to.


def test_ranks_of_a_pool_on_a_node() -> None:
    for nodes, size in ((["a", "a", "b", "b"], 2), (["a"] * 4, 4), ([0, 1, 2], 1), (["a"], 1)):
        assert node_size(nodes, range(len(nodes))) == size
    for nodes in (["a", "a", "b"], ["a", "b", "a", "b"]):
        with pytest.raises(ConfigError, match=r"set cluster\.ranks_per_node"):
            node_size(nodes, range(len(nodes)))


@pytest.mark.parametrize(
    ("rank", "row", "has_tokens"),
    [(0, (0, 2), True), (3, (1, 3), True), (4, (4,), True), (5, (5,), False), (7, (0, 2), False)],
)
def test_tokens_go_to_the_ends_of_a_strategys_pipelines(rank: int, row: tuple[int, ...], has_tokens: bool) -> None:
    # Rank 7 is left over, and rank 5 is a stage between others.
    strategy = Strategy.parse("tp2-pp1-cp2+tp1-pp3-cp1")
    ranks = StrategyRanks(Groups(rank, 8, tuple(range(8)), None), strategy, (0, 4))
    assert ranks.has_tokens == has_tokens
    assert ranks.ranks_of(0 if rank < 4 or rank == 7 else 1) == row
    assert ranks.holders_of(0) == ((0, 2),)
    assert ranks.holders_of(1) == ((4,), (6,))


# Trees

TREE = (Segment(2, -1), Segment(3, 0), Segment(1, 1, full=True), Segment(2, 0))
ROOT = (Segment(4, -1, full=True),)


def sequences(*trees: Tree) -> tokens.Sequences:
    rows = [torch.arange(num_tokens(tree)) for tree in trees]
    plain = all(tree == document(len(each)) for tree, each in zip(trees, rows, strict=True))
    return tokens.Sequences.of(rows, trees=() if plain else trees)


def shared_by(*ranks: list[tokens.Sequences]) -> tokens.PoolLengths:
    # What ranks learn of microbatches that each of them read, of the numbers that travel.
    given = [[len(m.lengths) for m in mine] + [n for m in mine for n in m.lengths] for mine in ranks]
    given = [numbers + tokens._tree_numbers(mine) for numbers, mine in zip(given, ranks, strict=True)]
    width = max(map(len, given))
    rows = np.array([numbers + [0] * (width - len(numbers)) for numbers in given])
    pool: Any = SimpleNamespace(readers=range(len(ranks)))
    return tokens._split_by_microbatch(rows, len(ranks[0]), pool, {})


def test_ranks_learn_the_trees_of_all_sequences() -> None:
    plain, longer = document(5), document(9)
    shared = shared_by([sequences(plain, TREE), sequences()], [sequences(longer), sequences(ROOT, plain)])
    assert shared.lengths == ((5, 8, 9), (4, 5))
    assert shared.trees == ((plain, TREE, longer), (ROOT, plain))
    assert shared.of(1).trees == ((ROOT, plain),)
    assert shared_by([sequences(plain)], [sequences(longer)]).trees == ()
    assert tokens._tree_numbers([sequences(plain)]) == [], "documents travel as before"
    assert tokens.Sequences.of([torch.arange(5)], trees=[plain]).sizes() == [0]


def test_trees_stay_with_their_sequences_in_nano_batches() -> None:
    mine = [sequences(TREE, document(3), ROOT)]
    shared = shared_by(mine)
    _, apart = tokens.by_nano_batch(mine, shared, (((0, 2), (1,)),), rank=0)
    assert apart.trees == ((TREE, ROOT), (document(3),))
    # And those of earlier steps, of which only some are trees.
    again = sequences(document(4), TREE)
    rows = tuple(zip((-2, -1), again.rows.split(again.lengths), strict=True))
    waiting = ((-2, 4), (-1, 8))
    recalled = tokens.Recalled(waiting, (0, 0), rows, again.trees)
    _, apart = tokens.by_nano_batch(
        [sequences(document(3))], shared_by([sequences(document(3))]), (((-1, 0, -2),),), 0, recalled
    )
    assert apart.trees == ((TREE, document(3), document(4)),)
    _, apart = tokens.by_nano_batch(mine, shared, (((0, -2),),), 0, tokens.Recalled(waiting, (0, 0), rows))
    assert apart.trees == ((TREE, document(4)),)


def test_a_plan_of_other_trees_of_the_same_lengths_is_refused() -> None:
    pool: Any = SimpleNamespace(pipeline=0, rank=0, ranks_of=lambda _: (0,), holders_of=lambda _: ((0,),))
    plan = MicrobatchPlan("zeppelin", (8, 3), 1, 1, 2, 2, (Zone("local", "ring", (0,), (0, 1)),))
    exchange = partial(tokens.TokenExchange, pool=pool)
    alike = (*TREE[:3], Segment(2, 1))
    dealt = shared_by([sequences(TREE, document(3))])
    exchange(dealt, [under(plan, Forest((TREE, document(3))))])
    for mask in (CAUSAL, Forest((alike, document(3)))):
        told = rf"mask {mask.name}, and sequences \[0.* were dealt as other trees .* see one another"
        with pytest.raises(InvalidProgramError, match=told):
            exchange(dealt, [under(plan, mask)])
    with pytest.raises(InvalidProgramError, match="other trees"):
        exchange(shared_by([sequences(document(8), document(3))]), [under(plan, Forest((TREE, document(3))))])


def test_positions_are_along_the_paths_of_trees() -> None:
    forest = Forest((document(3), TREE))
    layout = np.array([[1, 3, 8], [0, 1, 3], [1, 0, 2]])
    local = tokens.assemble(torch.arange(9)[:, None], layout, 10, forest)
    assert local.positions.tolist() == [*path_positions(TREE)[3:], 1, 2, 0, 1, 0]

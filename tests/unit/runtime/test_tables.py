"""Tables of a bound plan: one block, one copy, views where the tables were; all of them at bind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from megatron_balance.ir.batch import Batch  # noqa: E402
from megatron_balance.ir.cluster import Cluster  # noqa: E402
from megatron_balance.ir.model import Model  # noqa: E402
from megatron_balance.runtime.bind import ALIGN, ship, tensors_in  # noqa: E402
from tests.support.strategies import ALL_PLANNERS, EVERY_PATTERN, Case, plan  # noqa: E402

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Held:
    name: str
    tables: tuple[Any, ...]


def test_shipped_tables_are_the_same_objects_in_one_aligned_block():
    one, two = torch.arange(5, dtype=torch.int32), torch.arange(7, dtype=torch.int64)
    blocks, empty = torch.arange(12, dtype=torch.int32).reshape(3, 4), torch.empty(0, dtype=torch.int64)
    held, before = [one, two, blocks, empty], [x.clone() for x in (one, two, blocks, empty)]
    num_bytes = ship([*held, one], CPU)
    for table, expected in zip(held, before, strict=True):
        assert torch.equal(table, expected)
    assert {table.untyped_storage().data_ptr() for table in held} == {one.untyped_storage().data_ptr()}
    assert one.untyped_storage().nbytes() == num_bytes == 32 + 48 + 64
    assert all(table.data_ptr() % ALIGN == 0 for table in held if table.numel())


def test_nothing_to_ship_is_no_copy(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "to", None)
    assert ship([], CPU) == 0
    assert ship([torch.empty(0, dtype=torch.int32)], CPU) == 0


def test_a_shipment_is_one_copy(monkeypatch):
    copies: list[int] = []
    to = torch.Tensor.to

    def counted(self, *args, **kwargs):
        copies.append(self.nbytes)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    tables = [torch.arange(n) for n in range(1, 40)]
    assert [ship(tables, CPU)] == copies


def test_tables_are_found_in_tuples_lists_and_dataclasses():
    a, b, c = (torch.arange(n) for n in (1, 2, 3))
    found = list(tensors_in(([Held("x", (a, None))], (b, slice(0, 1), 3), {"not": "a table"}, c)))
    assert [x.numel() for x in found] == [1, 2, 3]


CASE = Case(Batch((300, 90, 41, 17, 130, 6)), Cluster(4, 2), Model(8, 4, 8), 160, seed=5)
VARIED = {
    "plain": CASE,
    "remapped": replace(CASE, remapped=True),
    "routed": replace(CASE, remapped=True, routing=(1, 1)),
}


WAYS = (("keep", "fp32"), ("replay", "bf16"))
EACH = [(planner, *way) for planner in EVERY_PATTERN for way in WAYS]
EACH += [(name, *WAYS[at % 2]) for at, name in enumerate(ALL_PLANNERS) if name not in EVERY_PATTERN]


@pytest.mark.parametrize(("planner", "policy", "wire"), EACH)
def test_all_tables_of_a_microbatch_are_one_copy_at_bind(planner, policy, wire):
    pytest.importorskip("triton")
    from tests.support.counted_copies import count

    launches = set()
    for name, case in VARIED.items():
        for rank in (0, 3):
            found = count(plan(planner, case), rank, policy, wire, strided=rank > 0)
            assert (found.at_bind, found.in_layers) == (1, 0), (name, rank)
            launches |= set(found.launches)
    assert "add_rows" in launches


@pytest.mark.parametrize("planner", ["te_ring", "random_shares", "random_task_table", "random_once_per_node"])
def test_every_table_that_a_step_holds_is_shipped(planner, monkeypatch):
    """Those that only the plain mover asks for, too: it may be named on a GPU."""
    pytest.importorskip("triton")
    from megatron_balance.runtime import bind as binding
    from tests.support.counted_copies import count

    real, held, kinds = binding.tables_of, [], set()

    def seen(phase):
        found = list(real(phase))
        for step in phase.steps:
            inside = {id(table) for table in tensors_in(step)}
            held.append(inside <= {id(table) for table in found})
            kinds.update({type(step).__name__} if inside else ())
        return found

    monkeypatch.setattr(binding, "tables_of", seen)
    for case in VARIED.values():
        for rank in (0, 3):
            count(plan(planner, case), rank, "replay", "fp32", strided=rank > 0)
    assert all(held)
    assert kinds == {"IssueStep", "FinishStep", "Launch", "GradLaunch"}

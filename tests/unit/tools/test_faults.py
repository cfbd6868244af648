"""The suites that look for faults: a few cases of each, and that a run goes on where it was ended."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_balance.compile.proof import runs
from megatron_balance.compile.proof.meaning import verify
from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.program import Exchange, Program
from megatron_balance.ir.text import parse
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.step_planner import StepPlanner
from tools.faults import __main__ as command
from tools.faults import cases, digests, files, layouts, mutants, plans, races, rendezvous, soak
from tools.faults.cases import Outcome, Suite, within
from tools.gpu_model.races import Recorded


def suite(tried: list[int], faults: tuple[int, ...] = ()) -> Suite:
    @contextmanager
    def opened() -> Iterator[Callable[[int], Outcome]]:
        def one(number: int) -> Outcome:
            tried.append(number)
            return Outcome("odd" if number % 2 else "even", "a fault" if number in faults else "")

        yield one

    return Suite("some", "numbers", 20, 4, opened)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "KEPT", tmp_path_factory.mktemp("kept") / "faults.json")


def test_a_run_goes_on_where_it_was_ended_and_a_line_cut_short_is_tried_again(tmp_path: Path) -> None:
    tried: list[int] = []
    cases.run(suite(tried), 6, tmp_path)
    record = cases.record_of("some", tmp_path)
    whole, last = record.read_text().splitlines()
    record.write_text(f"{whole}\n{last[:20]}\n")
    tally = cases.run(suite(tried, faults=(5,)), 10, tmp_path)
    assert tried == [*range(6), *range(4, 10)]
    assert (tally.tried, tally.kinds) == (10, {"odd": 5, "even": 5})
    assert tally.faults == [{"number": 5, "kind": "odd", "fault": "a fault"}]


def test_the_command_shows_a_table_and_its_exit_code_says_whether_a_fault_was_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "SUITES", {"some": suite([], faults=(3,))})
    for given, code in (("some --count 3", 0), ("all --share 0.2", 1), ("show", 0), ("some --only 3", 1)):
        monkeypatch.setattr(sys, "argv", ["tools.faults", *given.split(), "--folder", str(tmp_path)])
        assert command.main() == code
    said = capsys.readouterr().out
    assert "| some: numbers | 4 | 20 | 1 | 0 | even 2, odd 2 |" in said
    assert "some 3, odd: a fault" in said


def test_counts_add_up_over_runs_and_a_fault_that_is_mended_is_none(tmp_path: Path) -> None:
    tried: list[int] = []
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    cases.run(suite(tried, faults=(1, 2)), 6, here)
    cases.keep(["some", "other"], here)
    assert cases.read("some", here) == cases.read("some", elsewhere), "what is kept counts once, in any folder"
    tally = cases.run(suite(tried), 9, elsewhere)
    assert tried == list(range(9))
    assert (tally.tried, sum(tally.kinds.values()), len(tally.faults)) == (9, 9, 2)
    tally = cases.again(suite([], faults=(2,)), elsewhere)
    assert ([fault["number"] for fault in tally.faults], tally.mended) == ([2], [1])
    cases.keep(["some"], elsewhere)
    assert cases.read("some", elsewhere) == tally == cases.read("some", here)


def test_programs_under_rendezvous_and_on_the_model_of_the_gpu_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [rendezvous.try_program(10), races.try_races(1)]
    assert not [outcome for outcome in ended if outcome.fault]
    monkeypatch.setattr(rendezvous, "tried", lambda _, *, passing: "" if passing else "rank 0 hangs")
    assert rendezvous.try_program(10).fault.endswith(": rank 0 hangs")
    monkeypatch.setattr(Recorded, "races", lambda _: ["two touch the same memory"])
    assert races.try_races(1).fault.endswith(": two touch the same memory")


@pytest.mark.parametrize("number", [*range(15), 110, 165, 666, *range(plans.FIRST, plans.FIRST + 5)])
def test_random_steps_are_planned_or_refused_in_words(number: int) -> None:
    assert not plans.try_plan(number).fault


def test_a_case_is_the_same_at_any_time_and_no_planner_goes_without_its_share() -> None:
    assert plans.drawn(666) == plans.drawn(666)
    assert plans.drawn(666)[0].cluster.num_ranks == 904, "cases of the first drawing stay what they were"
    later = plans.Drawing.of(plans.FIRST)
    assert set(later.order) == set(PLANNERS)
    assert min(map(later.order.count, PLANNERS)) * 1_000_000 // len(later.order) > 10_000
    ranks = [plans.drawn(number)[0].cluster.num_ranks for number in range(plans.FIRST, plans.FIRST + 3000)]
    assert sum(count <= 16 for count in ranks) > 0.9 * len(ranks)
    assert max(ranks) > 256


def test_a_planner_that_is_slow_raises_or_plans_nonsense_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(plan: Callable[..., object]) -> Outcome:
        monkeypatch.setattr(StepPlanner, "plan", plan)
        return plans.try_plan(0)

    def fails(*_: object) -> None:
        raise IndexError("argmax")

    monkeypatch.setattr(plans, "LIMIT_S", 0.05)
    assert says(lambda *_: [None for _ in iter(int, 1)]).kind == "te_ring: slow"
    assert says(fails) == Outcome("te_ring: raises", "IndexError: argmax")


def test_changed_programs_are_refused_or_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with mutants.mutants() as one:
        outcomes = [one(number) for number in range(mutants.PER_PLAN)]
        assert not [outcome for outcome in outcomes if outcome.fault]
        assert any(outcome.kind.endswith(": refused") for outcome in outcomes)
        monkeypatch.setattr(mutants, "verify", lambda _: None)
        monkeypatch.setattr(mutants, "verify_runs", lambda *_: None)
        assert any(one(number).fault.startswith("accepted, and") for number in range(mutants.PER_PLAN))
    assert runs.verify_runs is not mutants.verify_runs
    with mutants.by_ranks() as one:
        assert not [outcome for outcome in map(one, range(4)) if outcome.fault]  # of te_ring
        # a program that no rank refuses though the whole is refused
        monkeypatch.setattr(mutants, "refused_by_a_rank", lambda _: False)
        assert any(one(number).fault.startswith("no rank refuses: ") for number in range(4))


def test_layouts_of_recurrent_layers_are_judged_and_changed_programs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with layouts.layouts() as one, layouts.mutants() as change:
        assert not [outcome for outcome in map(one, range(24)) if outcome.fault]
        outcomes = [change(number) for number in range(80)]
        assert not [outcome for outcome in outcomes if outcome.fault]
        assert sum(outcome.kind.endswith(": refused") for outcome in outcomes) > 10
        monkeypatch.setattr(layouts, "verify_recurrent", lambda _: None)
        assert any(change(number).fault == "accepted, and computes something else" for number in range(80))
        monkeypatch.setattr(layouts, "EXACT", 0.0)
        assert any(one(number).fault.endswith(" off") for number in range(24))


def test_damaged_files_are_read_or_refused_in_one_sentence(tmp_path: Path) -> None:
    with files.files() as one:
        outcomes = [one(number) for number in (*range(48), 1305, 46, *range(120_000, 120_020))]
    assert not [outcome for outcome in outcomes if outcome.fault]
    assert sum(outcome.kind.endswith(": refused") for outcome in outcomes) > 10
    broken = files.Loader("some", b"{}", ".json", lambda path: json.loads(path.read_text())["key"])
    assert files.try_file(broken, 0, tmp_path).kind == "some: raises", "a traceback is a fault"


def test_digests_of_a_case_are_equal_here_and_on_an_old_cpu() -> None:
    with digests.digests() as one:
        assert one(13) == Outcome("zeppelin: equal")
        assert one(866) == Outcome("hydraulis: equal"), "BLAS rounded the fit of its costs"
    drawn = plans.drawn(13)
    assert plans.drawn(13) == drawn, "a case depends on its number alone"
    with pytest.raises(cases.SlowError, match=r"more than 0\.01 CPU seconds"), within(0.01):
        sum(iter(lambda: 1, 0))


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"mb": lambda step: 500 + 0.02 * step}, "rank 1: 2.00 MB more in 100 steps"),
        ({"descriptors": lambda step: 20 + (step > 1500)}, "rank 1: descriptors from 20 to 21"),
        ({"mb": lambda step: 500 + 50 * (step <= soak.WARM)}, ""),
    ],
)
def test_a_long_run_that_grows_is_a_fault(changed: dict[str, Callable[[int], float]], fault: str) -> None:
    def samples(of: dict[str, Callable[[int], float]]) -> dict[str, Any]:
        steps = range(soak.EVERY, soak.STEPS + 1, soak.EVERY)
        flat: dict[str, Callable[[int], float]] = {name: lambda _: 20.0 for name in ("mb", *soak.COUNTED)}
        return {"step": np.array(steps), **{name: np.array([f(s) for s in steps]) for name, f in (flat | of).items()}}

    assert soak.judged([samples({}), samples(changed)], soak.STEPS).fault == fault
    assert soak.judged([samples({})], soak.STEPS + 500).kind == "cut short"


TWO_NODES = """program lengths 2 2 heads 2 kv_heads 2 policy none
owner r0 s0[0:1)
owner r1 s0[1:2)
owner r2 s1[0:1)
owner r3 s1[1:2)
forward
exchange 2 all_to_all r0 r1
  r1 <- r0 kv s0[0:1)
exchange 3 all_to_all r2 r3
  r3 <- r2 kv s1[0:1)
attend r0
  q s0[0:1) over s0[0:1)
attend r1
  q s0[1:2) over s0[0:1) s0[1:2)
attend r2
  q s1[0:1) over s1[0:1)
attend r3
  q s1[1:2) over s1[0:1) s1[1:2)
"""


def test_exchanges_of_ranks_that_share_nothing_may_share_an_id() -> None:
    # As cases 12200 and 13736 of suite `ranks` once had it: the whole is refused, since one
    # exchange cannot have two groups, and no rank takes part in both. What a rank could confuse is
    # told.
    program = parse(TWO_NODES)
    verify(program)
    ops = list(program.forward)

    def with_second(**fields: Any) -> Program:
        return replace(program, forward=(ops[0], replace(ops[1], **fields), *ops[2:]))

    shared = with_second(id=2)
    with pytest.raises(InvalidProgramError, match="exchange 2: rank 2 sees all_to_all in"):
        verify(mutants.of_parts(shared))
    assert not mutants.refused_by_a_rank(shared)
    assert mutants.same_but_for_ids(shared)
    assert isinstance(ops[1], Exchange)
    (row,) = ops[1].transfers
    for wrong in (
        with_second(id=2, group=(1, 2, 3)),  # rank 1 is in both
        with_second(id=2, transfers=Rows.of(8, [(*row[:3], 2, *row[4:])])),  # a key that nobody has
        with_second(id=1, group=(2, 3), transfers=Rows.of(8, [])),  # nobody sends what is read
    ):
        assert not mutants.same_but_for_ids(wrong)

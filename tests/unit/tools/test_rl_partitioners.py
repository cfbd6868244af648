"""Other libraries' ways to deal samples into microbatches, beside ours."""

import random

import pytest

from megatron_balance import Cluster, Model, rl
from tools.bench import rl_partitioners
from tools.bench.rl_partitioners import karmarkar_karp, slime, trl, verl


def test_differencing_is_the_textbooks_and_gives_as_many_items_each_where_asked() -> None:
    # 8 - 7 and 6 - 5, then 4 - 1, then 3 - 1.
    values = [8, 7, 6, 5, 4]
    sums = sorted(sum(values[at] for at in part) for part in karmarkar_karp(values, 2, equal=False))
    assert sums == [14, 16]
    assert [len(part) for part in karmarkar_karp([9, 1, 1, 1], 2, equal=True)] == [2, 2]


def test_verl_passes_a_cap_until_0_9_1_and_slimes_flops_do() -> None:
    # Figures of verl's own functions for these lengths.
    assert sorted(7 * len(each) for each in verl([7] * 8, 1, 8, keeps=False)[0]) == [7] * 6 + [14]
    assert [7 * len(each) for each in verl([7] * 8, 1, 8, keeps=True)[0]] == [7] * 8
    # Two microbatches hold 16 tokens under 8; by squares 7 is alone, and the others have 9.
    lengths = [7, 1, 2, 2, 2, 2]
    (found,) = slime(lengths, 1, 8, lambda length: length**2, balances=True)
    assert max(sum(lengths[at] for at in each) for each in found) == 9
    # First fit: 7 and 1, then 8; as many on three ranks, by halves of the largest, the later of two.
    assert sorted(slime(lengths, 3, 8, lambda length: length**2)) == [[[0, 1]], [[2, 4]], [[3, 5]]]


def test_rows_take_their_group_and_close_where_one_has_no_room() -> None:
    assert trl([4, 4, 4, 4], 2, 8, [0, 0, 1, 1]) == [[[0, 1]], [[2, 3]]]
    # The third of group 0 has no room in its row, and every row holds some: a new microbatch.
    assert trl([4, 4, 1, 4], 2, 8, [0, 0, 1, 0]) == [[[0, 1], [3]], [[2], []]]


@pytest.mark.parametrize("data", [1, 4])
def test_ours_pass_no_cap_and_are_no_more_microbatches_than_verls(data: int) -> None:
    draw, fewer = random.Random(data), 0
    for _ in range(50):
        lengths = [min(100, 1 + int(draw.lognormvariate(3, 1))) for _ in range(data * draw.randint(1, 12))]
        step = rl.plan_step(lengths, None, Cluster(data, 4), Model(8, 2, 16, num_layers=2), max_tokens=100)
        rl.check_caps(step, 100)
        theirs = len(verl(lengths, data, 100, keeps=True)[0])
        assert len(step.members) <= theirs
        fewer += len(step.members) < theirs
    assert fewer


def test_the_comparison_prints_a_row_of_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_partitioners.main(["--gpus", "8", "--model", "qwen3-30b-a3b", "--shape", "grpo", "--steps", "1"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12
    broken = {label.strip("| "): int(count) for label, count, *_ in rows}
    assert broken["verl 0.8.0, 0.9.0"] > 0
    assert all(count == 0 for label, count in broken.items() if label.startswith("ours"))

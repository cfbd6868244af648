"""KnapFormer's data codes: lengths and imbalance as its paper gives them."""

from __future__ import annotations

from statistics import fmean

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.workloads.distributions import (
    DataCode,
    draw_by_gpu,
    is_data_code,
    parse_codes,
)


@pytest.mark.parametrize(
    ("code", "visual", "total"),
    [  # Figure 3: visual tokens of a sample, tokens of a GPU with 196 of text each
        ("g8b4i256f1s0", 256, 1808),
        ("g2b5i512f1s0", 1024, 6100),
        ("g2b5i1024f1s0", 4096, 21460),
        ("g4b1i2048f1s0", 16384, 16580),
        ("g1b10i256f4s0", 1024, 12200),
        ("g3b1i512f4s0", 4096, 4292),
        ("g8b2i256f85s1", 6400, 13192),
    ],
)
def test_tokens_of_a_gpu_are_those_of_figure_3(code: str, visual: int, total: int) -> None:
    (parsed,) = parse_codes(code)
    assert parsed.visual_tokens == visual
    drawn = [sum(gpu) for batch in draw_by_gpu(code, 400, seed=2) for gpu in batch]
    assert fmean(drawn) == pytest.approx(total, rel=0.01)


def test_samples_of_a_gpu_share_their_aspect_and_have_text_of_their_own() -> None:
    for batch in draw_by_gpu("g4b6i1024f1s0", 20, seed=2):
        assert len(batch) == 4
        for gpu in batch:
            assert len(gpu) == 6
            assert max(gpu) - min(gpu) <= 392
            assert round(0.96 * 4096) <= min(gpu)
            assert max(gpu) <= round(1.04 * 4096) + 392


def test_streams_take_their_gpus_in_order() -> None:
    assert parse_codes("g2b3i256f1s0,g1b1i512f85s1") == (DataCode(2, 3, 256, 1, False), DataCode(1, 1, 512, 85, True))
    (batch,) = draw_by_gpu("g2b3i256f1s0,g1b1i512f85s1", 1, seed=0)
    assert [len(gpu) for gpu in batch] == [3, 3, 1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("g8b4i256", "expected g{GPUs}b{samples}i{pixels}f{frames}s{0|1}, such as g8b4i256f1s0"),
        ("g8b4i256f1s2", "expected g{GPUs}"),
        ("g0b4i256f1s0", "at least 1"),
        ("g1b4i250f1s0", "a multiple of 16"),
        ("g1b4i256f84s1", "a multiple of 17"),
        ("g1b4i256f1s0,", "data code ''"),
    ],
)
def test_codes_that_cannot_be_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_codes(text)
    assert sentence in str(caught.value)


def test_codes_are_told_from_names() -> None:
    assert is_data_code("g8b4i256")
    assert not is_data_code("github")

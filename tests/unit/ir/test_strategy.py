"""Strategies: text, ranks, nodes."""

from __future__ import annotations

import pytest

from megatron_balance.errors import ConfigError
from megatron_balance.ir.strategy import Scheme, Strategy


def test_a_strategy_is_read_and_printed() -> None:
    strategy = Strategy.parse("tp4-pp1-cp1+2*tp1-pp2-cp1")
    assert strategy.pipelines == (Scheme(4), Scheme(1, 2), Scheme(1, 2))
    assert (str(strategy), strategy.num_ranks) == ("tp4-pp1-cp1+2*tp1-pp2-cp1", 8)
    assert [strategy.ranks_of(pipeline) for pipeline in range(3)] == [range(4), range(4, 6), range(6, 8)]
    assert str(Strategy.parse("tp1-pp1-cp1+tp1-pp1-cp1")) == "2*tp1-pp1-cp1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp4",
        "tp4-pp1-cp0",
        "0*tp1-pp1-cp1",
        "tp1-pp1-cp1+",
        " tp1-pp1-cp1",
        "tp1-pp1-cp1*2",
        "99999999*tp1-pp1-cp1",
        "2*",
    ],
)
def test_another_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*such as '") as caught:
        Strategy.parse(text)
    assert "\n" not in str(caught.value)


def test_a_tp_group_lies_inside_a_node_unless_it_is_larger() -> None:
    Strategy.parse("tp16-pp1-cp1+tp8-pp1-cp1+2*tp2-pp2-cp1").check(num_ranks=33, node_size=8)  # one left over
    for text in ("tp1-pp1-cp1+tp8-pp1-cp1", "2*tp6-pp1-cp1", "tp8-pp1-cp1+tp12-pp1-cp1", "tp1-pp1-cp1+tp16-pp1-cp1"):
        with pytest.raises(ConfigError, match="crosses nodes of 8"):
            Strategy.parse(text).check(num_ranks=64, node_size=8)
    with pytest.raises(ConfigError, match="takes 9 ranks, and there are 8"):
        Strategy.parse("9*tp1-pp1-cp1").check(num_ranks=8, node_size=8)


def test_a_rank_has_one_seat_in_megatrons_order_tp_cp_pp() -> None:
    strategy = Strategy.parse("tp2-pp1-cp1+tp2-pp3-cp2")
    seats = [strategy.seat(rank) for rank in range(14)]
    places = [(seat.pipeline, seat.first, seat.stage, seat.context, seat.tensor) for seat in seats if seat]
    expected = [(0, 0, 0, 0, tp) for tp in range(2)]
    expected += [(1, 2, pp, cp, tp) for pp in range(3) for cp in range(2) for tp in range(2)]
    assert places == expected
    assert seats == list(strategy.seats())
    assert strategy.seat(14) is None

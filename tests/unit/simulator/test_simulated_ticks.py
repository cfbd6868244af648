"""Ticks on the clocks: closed forms for like microbatches; what attending together saves others."""

import itertools
import operator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_balance import Cluster, Model
from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.states import states_cost, states_of
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.cost import analytic, parallel
from megatron_balance.errors import ConfigError
from megatron_balance.ir.columns import Rows
from megatron_balance.ir.model import RecurrentLayers
from megatron_balance.ir.plan import MicrobatchPlan, TaskTable, Zone
from megatron_balance.ir.program import Kind
from megatron_balance.ir.step import TickPlan
from megatron_balance.planners import distca
from megatron_balance.planning.ticks import plan_ticks, ticks
from megatron_balance.simulator.attention import BothPhases, EngineName, attention_call, linear_s
from megatron_balance.simulator.ping_pong import PingPongMode, layers
from megatron_balance.simulator.step import Setup, simulate_step
from megatron_balance.simulator.ticks import simulate_ticks
from megatron_balance.solvers.packing import nano_batches
from tests.support import by_hand, flat_cost
from tests.support.flat_cost import INTER, flat_machine

MODEL = Model(num_heads=8, num_kv_heads=8, head_dim=128, num_layers=8, hidden_size=1024, ffn_size=4096)


def machine(num_ranks: int, model: Model = MODEL) -> Machine:
    cluster = Cluster(num_ranks=num_ranks, ranks_per_node=num_ranks)
    return Machine(cluster, model, analytic.AnalyticCost(cluster, model))


def owned_rows(lengths: tuple[int, ...], owned: Rows, num_ranks: int) -> MicrobatchPlan:
    tasks = [(rank, seq, start, stop, 0, stop) for rank, seq, start, stop in owned]
    return by_hand.plan(lengths, num_ranks, by_hand.task_table(owned, tasks), heads=(8, 8))


def whole(*lengths: int) -> MicrobatchPlan:
    return owned_rows(lengths, Rows.of(4, [(rank, rank, 0, n) for rank, n in enumerate(lengths)]), len(lengths))


def planned(plans: list[MicrobatchPlan], stages: int, chunks: int = 1) -> tuple[TickPlan, ...]:
    num_ranks = stages * plans[0].num_ranks
    return plan_ticks(
        ticks(stages, len(plans), chunks), plans, lambda lengths, owned: owned_rows(lengths, owned, num_ranks)
    )


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_microbatches_that_are_alike_take_as_long_as_their_ticks(stages: int, chunks: int) -> None:
    microbatches, tokens = 4, 4096
    plans = [whole(tokens, tokens)] * microbatches
    work = machine(2 * stages)
    found = simulate_ticks(planned(plans, stages, chunks), work, Setup(pipeline=stages, interleave=chunks))
    one, alone = plans[0], machine(2)
    layer = sum(float(outcome.end_s[0]) for outcome in attention_call(one, alone, "replay", linear_s(one, alone)))
    head = sum(alone.cost.head_s(tokens, backward=backward) for backward in (False, True))
    count = microbatches * chunks + stages - 1
    # Only the last rank computes losses, one after the other with nothing to overlap them; results
    # wait for no one else.
    transfer = parallel.stage_transfer_s(MODEL, tokens, work.intra)
    least = count * MODEL.num_layers / (stages * chunks) * layer
    most = least + microbatches * head + 2 * count * transfer
    assert least + head < found.step_s <= most * (1 + 1e-9)
    assert len(found.end_s) == 2 * count
    assert (np.diff(found.end_s) >= 0).all()


def test_hybrid_models_take_the_same_in_ticks_and_states_of_both_nano_batches() -> None:
    mamba = RecurrentLayers("mamba2", 6, 2, 8, heads=16, value_dim=64, key_heads=2, key_dim=64)
    on, attends = machine(2, replace(MODEL, recurrent=mamba)), machine(2)
    cut = Rows.of(4, [(0, 0, 0, 2048), (1, 0, 2048, 4096), (0, 1, 0, 1000), (1, 1, 1000, 3000)])
    plans = [owned_rows((4096, 3000), cut, 2), whole(2048, 2048)]
    own = states_cost(plans[0], on)
    assert own is not None
    assert own.seconds[0].min() > 0
    for parts in ([plans[0]], plans):
        whole_step = [tuple(parts) if len(parts) > 1 else plans[0]]
        step = simulate_step(whole_step, on, Setup(policy="replay"))
        first, *second = (planned([each], 1) for each in parts)
        found = simulate_ticks(first, on, Setup(), *second)
        around = step.phases_s["gradient_sync"] + step.phases_s["optimizer"]
        assert found.step_s == pytest.approx(step.step_s - around)
        states = sum(states_of([each], on).seconds[0].max() for each in parts)  # pyright: ignore[reportOptionalMemberAccess]
        assert step.phases_s["forward_states"] == pytest.approx(6 * states, rel=0.01)
        dense = simulate_step(whole_step, attends, Setup(policy="replay"))
        assert step.attention_s["forward"] - 6 * states < 0.5 * dense.attention_s["forward"]


@pytest.mark.parametrize("windowed", [0, 6])  # layers under a mask of their own
def test_one_stage_takes_what_a_step_takes(windowed: int) -> None:
    plans, on = (
        [whole(4096, 2048), whole(1024, 8192)],
        machine(2, replace(MODEL, other_attention="window_64" if windowed else "", other_layers=windowed)),
    )
    for recompute in ("none", "full"):
        step = simulate_step(plans, on, Setup(policy="replay", recompute=recompute))
        around = step.phases_s["gradient_sync"] + step.phases_s["optimizer"]
        found = simulate_ticks(planned(plans, 1), on, Setup(recompute=recompute))
        assert found.step_s == pytest.approx(step.step_s - around)


def dispatched(batches: list[tuple[int, ...]], tolerance: float | None = None) -> tuple[TickPlan, ...]:
    """Microbatches of distca on two stages of two ranks, which attend together."""
    two, four, usual = machine(2), machine(4), distca.DistcaOptions()
    options = usual if tolerance is None else distca.DistcaOptions(tolerance=tolerance)
    plans = [distca.plan(distca.Batch(lengths), two.cluster, MODEL, two.cost, usual) for lengths in batches]

    def owned(lengths: tuple[int, ...], rows: Rows) -> MicrobatchPlan:
        return distca.plan_owned(lengths, rows, four.cluster, MODEL, four.cost, options)

    return plan_ticks(ticks(2, len(batches)), plans, owned)


def test_stages_that_attend_together_are_sooner_done_and_nano_batches_hide_their_exchanges() -> None:
    # Stages that attend together are sooner done with uneven microbatches.
    uneven, work = [(32768,), (1024,) * 32, (24576, 8192), (2048,) * 16], machine(4)
    order = dispatched(uneven)
    alone = machine(2)
    plans = [distca.plan(distca.Batch(n), alone.cluster, MODEL, alone.cost, distca.DistcaOptions()) for n in uneven]
    together, apart = (simulate_ticks(each, work) for each in (order, planned(plans, 2)))
    assert together.step_s < 0.9 * apart.step_s
    assert together.compute_s.mean() / together.step_s > apart.compute_s.mean() / apart.step_s
    first = order[0].plan.zones[0]
    assert isinstance(first, TaskTable)
    assert {2, 3} & {task[0] for task in first.tasks}, "the idle stage attends in the first tick"
    # Two nano batches hide what they exchange.
    first, second = (dispatched([each] * 2, tolerance=0.02) for each in ((12288, 4096), (8192, 8192)))
    interleaved, one_by_one = (simulate_ticks(first, machine(4), Setup(interleaved=i), second) for i in (True, False))
    assert interleaved.step_s < one_by_one.step_s


def test_what_cannot_be_is_said() -> None:
    # What cannot be is said.
    with pytest.raises(ConfigError, match="at least one tick"):
        simulate_ticks((), machine(2))
    with pytest.raises(ConfigError, match=r"8 layers .* cannot be cut into 3 chunks"):
        simulate_ticks(planned([whole(64)] * 3, 3), machine(3))
    two = planned([whole(64)], 2)
    with pytest.raises(ConfigError, match="2 pipeline stages, the setup has 4"):
        simulate_ticks(two, machine(2), Setup(pipeline=4))
    with pytest.raises(ConfigError, match="in the same ticks"):
        simulate_ticks(two, machine(2), Setup(), two[1:])
    # What an engine does not know is refused.
    ring = replace(nano_batch(), zones=(Zone("inter_node", "ring", tuple(range(RANKS)), tuple(range(RANKS))),))
    with pytest.raises(ConfigError, match="use the engine 'events'"):
        layers([ring, ring], hopper(), 2, PingPongMode(engine="rounds"))
    assert layers([ring, nano_batch()], hopper(), 2).forward.end_s.max() > 0
    assert passes(2, "auto", transport="sockets").forward.end_s.max() > 0


# Nano-batches on clocks: closed forms of what hides behind what, and that the two engines, and the
# step around them, agree.

TOKENS, RANKS = 64, 4
LINEAR, LAUNCH, CALL = 0.5, 1.0, 0.0005
ENGINES: tuple[EngineName, ...] = ("events", "rounds")


def nano_batch(tokens: int = TOKENS) -> MicrobatchPlan:
    # A document owned by each rank, a rank a node; a rank attends for the earlier half of its own and
    # the later of its neighbour's.
    fragments = [(rank, rank, 0, tokens) for rank in range(RANKS)]
    near = [(rank, rank, 0, tokens // 2, 0, tokens // 2) for rank in range(RANKS)]
    far = [((rank + 1) % RANKS, rank, tokens // 2, tokens, 0, tokens) for rank in range(RANKS)]
    table = by_hand.task_table(fragments, near + far)
    return by_hand.plan((tokens,) * RANKS, RANKS, table, ranks_per_node=1, heads=(2, 2))


def hopper(**cost: object) -> Machine:
    return flat_machine(RANKS, 1, **{"launch": LAUNCH, "layer": LINEAR / TOKENS, "call_s": CALL, **cost})


def transfer_s(*kinds: Kind) -> float:
    """Seconds of an exchange of half a document's queries, all its keys, or their gradients."""
    sizes = hopper().payload.whole()
    tokens = {kind: TOKENS if kind in (Kind.KV, Kind.KV_GRAD) else TOKENS // 2 for kind in kinds}
    return CALL + INTER.time_s(flat_cost.MODEL.num_heads * sum(tokens[kind] * int(sizes[kind]) for kind in kinds))


def passes(num_layers: int, engine: EngineName, on: Machine | None = None, **mode: Any) -> BothPhases:
    return layers([nano_batch(), nano_batch()], on or hopper(), num_layers, PingPongMode(engine=engine, **mode))


IN, OUT, GRADS = transfer_s(Kind.Q, Kind.KV), transfer_s(Kind.OUT), transfer_s(Kind.Q_GRAD, Kind.KV_GRAD)


@pytest.mark.parametrize("num_layers", [1, 3, 9])
@pytest.mark.parametrize("engine", ENGINES)
def test_interleaved_only_the_last_transfer_has_nothing_beside_it(engine: EngineName, num_layers: int) -> None:
    assert max(IN, OUT, GRADS) < min(LINEAR, LAUNCH)
    forward, backward = passes(num_layers, engine)
    assert forward.end_s == pytest.approx(num_layers * 2 * (LINEAR + LAUNCH) + OUT)
    # The backward begins with the first nano-batch's output gradients on their way, which nothing
    # precedes, and ends with a linear step.
    assert backward.end_s == pytest.approx(num_layers * 4 * (LINEAR + LAUNCH) + transfer_s(Kind.OUT_GRAD))
    assert forward.compute_s == pytest.approx(num_layers * 2 * (LINEAR + LAUNCH))
    # Exchanges between experts lengthen the linear steps.
    experts = ((0.25, 0.5), (np.full(RANKS, 0.125), 0.25))
    found = layers([nano_batch(), nano_batch()], hopper(), num_layers, PingPongMode(engine=engine), experts)
    for longer, alone, each in zip(found, (forward, backward), (0.375, 0.75), strict=True):
        assert longer.end_s - alone.end_s == pytest.approx(np.full(RANKS, num_layers * each))


@pytest.mark.parametrize("engine", ENGINES)
def test_one_by_one_every_transfer_is_waited_for(engine: EngineName) -> None:
    forward, backward = passes(5, engine, interleaved=False)
    assert forward.end_s == pytest.approx(5 * 2 * (LINEAR + LAUNCH + IN + OUT))
    assert backward.end_s == pytest.approx(5 * 2 * (2 * LINEAR + 2 * LAUNCH + transfer_s(Kind.OUT_GRAD) + GRADS))
    signal = passes(5, engine, interleaved=False, signal=True).forward
    assert signal.end_s == pytest.approx(forward.compute_s, rel=2e-2)
    assert signal.compute_s == pytest.approx(forward.compute_s)
    assert signal.end_s.max() < forward.end_s.max()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_transfer_longer_than_what_is_beside_it_shows_by_the_difference(engine: EngineName) -> None:
    # Eight times the link's time: the inputs of A hide behind the linear step of B as far as it goes.
    slow = replace(INTER, bytes_per_s=INTER.bytes_per_s / 8)
    forward, _ = passes(1, engine, hopper(inter=slow))
    late = CALL + slow.time_s((IN - CALL - INTER.alpha_s) * INTER.bytes_per_s)
    owned = CALL + slow.time_s((OUT - CALL - INTER.alpha_s) * INTER.bytes_per_s)
    assert LINEAR < late < LAUNCH
    # The second nano-batch's inputs, behind the first's on the same stream, still hide beside the
    # first's attention.
    assert forward.end_s == pytest.approx(LINEAR + late + 2 * LAUNCH + owned)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_engines_agree_on_uneven_nano_batches(policy: Policy) -> None:
    plans = [nano_batch(TOKENS), nano_batch(TOKENS // 2)]
    for interleaved in (True, False):
        events, rounds = (
            layers(plans, hopper(), 6, PingPongMode(policy, interleaved, engine=engine)) for engine in ENGINES
        )
        for one, other in zip(events, rounds, strict=True):
            assert one.end_s == pytest.approx(other.end_s, rel=1e-3)
            assert one.compute_s == pytest.approx(other.compute_s)
            assert one.bytes_moved == pytest.approx(other.bytes_moved)


def test_a_step_of_nano_batches_is_its_layers() -> None:
    plans, on = (nano_batch(), nano_batch()), hopper()
    step = simulate_step([plans], on, Setup(engine="events"))
    forward, backward = passes(flat_cost.MODEL.num_layers, "events")
    own = [s for name, s in step.phases_s.items() if name not in ("gradient_sync", "optimizer", "head")]
    assert sum(own) == pytest.approx(forward.end_s.max() + backward.end_s.max())
    alone = simulate_step([plans], on, Setup(engine="events", interleaved=False))
    assert alone.step_s > step.step_s
    assert step.num_tokens == 2 * RANKS * TOKENS
    whole = simulate_step([nano_batch()], on, Setup(engine="events"))
    assert (step.peak_bytes > whole.peak_bytes).all()


def test_nano_batches_are_as_even_as_whole_items_allow() -> None:
    assert nano_batches([]) == ((), ())
    assert nano_batches([5]) == ((0,), ())
    assert nano_batches([3, 3, 2, 2, 2]) == ((0, 1), (2, 3, 4))
    rng = np.random.default_rng(3)
    for _ in range(50):
        sizes = rng.integers(1, 60, int(rng.integers(2, 11))).tolist()
        first, second = nano_batches(sizes)
        assert sorted(first + second) == list(range(len(sizes)))
        choices = itertools.product((-1, 1), repeat=len(sizes))
        best = min(abs(sum(map(operator.mul, sizes, signs))) for signs in choices)
        larger, smaller = (sum(sizes[i] for i in each) for each in (first, second))
        assert 0 < smaller <= larger <= smaller + max(best, sum(sizes) // 100)

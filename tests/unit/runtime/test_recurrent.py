"""Recurrences in plain torch on one rank: chunks, maps, gradients of steep decays, refusals."""

import numpy as np
import pytest
import torch

from megatron_balance.compile.recurrent import program_of
from megatron_balance.errors import ConfigError
from megatron_balance.ir.columns import Rows
from megatron_balance.runtime.groups import single
from megatron_balance.runtime.kernels.recurrence import GatedDelta, Mamba2
from megatron_balance.runtime.recurrent import bind_recurrent, causal_convolution, recurrent_layer
from tests.support import recurrent

LENGTHS = (23, 1, 9)
ONE_RANK = program_of(LENGTHS, [Rows.of(3, [(0, 0, 23), (1, 0, 1), (2, 0, 9)])], 2, 2)


def drawn(kind: recurrent.LayerKind, dtype=torch.float64):
    # The recurrence of a kind and its inputs for all sequences, one behind the other.
    x, _, _ = recurrent.draw(kind, LENGTHS, 2, 2, 3)
    q, k, v, decay, write = (
        torch.tensor(np.concatenate([getattr(each, name) for each in x]), dtype=dtype)
        for name in ("q", "k", "v", "decay", "write")
    )
    if kind == "mamba-2":
        return Mamba2, [v, write, decay[..., 0].log(), k, q]
    return GatedDelta, [q, k, v, decay.log() if kind == "kda" else decay[..., 0].log(), write]


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_any_chunk_gives_the_recurrence_and_a_map_takes_a_state_to_the_last_one(kind, chunk):
    made, inputs = drawn(kind)
    recurrence = made(chunk)
    x, taps, dout = recurrent.draw(kind, LENGTHS, 2, 2, 3)
    got = recurrent_layer(recurrence, bind_recurrent(ONE_RANK, single()), *inputs)
    taps = np.stack([0 * taps[0], 0 * taps[0], 0 * taps[0] + 1])  # no convolution
    assert np.abs(got.numpy() - np.concatenate(recurrent.alone(x, taps, dout).out)).max() < 1e-12
    state = torch.randn(2, *recurrence.shapes(inputs)[1], dtype=torch.float64, generator=torch.manual_seed(0))
    last, behind_zero = (recurrence.run(inputs, first)[1] for first in (state, 0 * state))
    assert (recurrence.apply(recurrence.map_of(inputs), state) + behind_zero - last).abs().max() < 1e-12


@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_gradients_are_finite_where_a_chunk_forgets_all(kind):
    made, inputs = drawn(kind, torch.float32)
    inputs = [(x - 60 if x.max() < 0 else x).requires_grad_() for x in inputs]
    recurrent_layer(made(16), bind_recurrent(ONE_RANK, single()), *inputs).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


def test_states_of_a_narrow_type_are_kept_in_fp32_and_come_back_narrow():
    made, inputs = drawn("kda", torch.bfloat16)
    bound = bind_recurrent(ONE_RANK, single())
    got = recurrent_layer(made(16), bound, *inputs)
    wide = recurrent_layer(made(16), bound, *(x.float() for x in inputs))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())


def test_autocast_does_not_reach_the_states():
    made, inputs = drawn("gated delta net", torch.float32)
    bound = bind_recurrent(ONE_RANK, single())
    weight, x = torch.ones(2, 3), torch.ones(33, 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = recurrent_layer(made(16), bound, *inputs)
        assert causal_convolution(x, weight, None, bound).dtype == torch.bfloat16, "as a convolution there is"
    assert torch.equal(inside, recurrent_layer(made(16), bound, *inputs))


def test_what_the_program_is_not_for_is_refused():
    made, inputs = drawn("kda")
    bound = bind_recurrent(ONE_RANK, single())
    with pytest.raises(ConfigError, match="an input has 32 rows, the plan gives this rank 33"):
        recurrent_layer(made(), bound, *(x[1:] for x in inputs))
    with pytest.raises(ConfigError, match="the inputs have 1 heads, the program 2"):
        recurrent_layer(made(), bound, *(x[:, :1] for x in inputs))
    with pytest.raises(ConfigError, match="the convolution is 4 wide, the program is for 3"):
        causal_convolution(torch.zeros(33, 2), torch.zeros(2, 4), None, bound)
    with pytest.raises(ConfigError, match="the program is for 2 ranks, the pool has 1"):
        bind_recurrent(program_of((3,), [Rows.of(3, [(0, 0, 3)]), Rows(3)], 2, 2), single())


def test_a_second_derivative_is_refused():
    made, inputs = drawn("kda")
    inputs = [x.requires_grad_() for x in inputs]
    out = recurrent_layer(made(), bind_recurrent(ONE_RANK, single()), *inputs)
    with pytest.raises(ConfigError, match="create_graph"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)

"""Recurrent layers by plans over several ranks, against every sequence alone on the same device.

NCCL carries states in one all-to-all of all ranks; here it shows that they arrive.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_balance.compile.pipeline import layout
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from tests.support.strategies import Case, plan
from tools.gpu import ranks
from tools.gpu.ranks import Place
from tools.gpu.rows import NEEDS_GPU, Context, Figure, Row, Target

BUDGET_S = 15.0
PLANNERS = ("zeppelin", "te_ring")
HEADS, WIDTH, HALO = 4, 16, 3
LENGTHS = (300, 129, 64, 33, 1)

WORST = Figure("largest error of recurrent layers under plans, fp32", "of the largest value", Target("at most", 2e-5))
KERNELS = Figure(
    "largest error of fla's recurrences against plain torch, fp32", "of the largest value", Target("at most", 5e-3)
)
FIGURES = (WORST, KERNELS)


def measure(context: Context) -> Iterator[Row]:
    size = min(4, context.ranks)
    case = Case(Batch(LENGTHS), Cluster(size, size // 2), Model(HEADS, HEADS, WIDTH), None, seed=5, remapped=True)
    plans = [plan(name, case) for name in PLANNERS]
    found = ranks.run_ranks(_rank, size, (plans,), context, seconds=context.left_s() - 2.0).results()
    worst, libraries = zip(*found, strict=True)
    yield WORST.measured(max(worst), f"gated delta rule, KDA, Mamba-2; {', '.join(PLANNERS)} on {size} ranks")
    if not context.on_gpu:
        yield KERNELS.not_measured(NEEDS_GPU)
    elif isinstance(libraries[0], str):
        yield KERNELS.not_measured(libraries[0])
    else:
        yield KERNELS.measured(libraries[0], "outputs, states, M, gradients; gated delta rule, KDA, Mamba-2")


def _of_libraries(place: Place) -> float | str:
    """The largest error of fla's kernels on this rank's device, or why there is none."""
    import torch

    from megatron_balance.runtime.kernels import scans

    if importlib.util.find_spec("fla") is None or place.device == "cpu":
        return "fla-core is not installed"
    device, kept = torch.device(place.device), torch.float32
    kernels = ((scans.FlaGatedDelta(), False), (scans.FlaGatedDelta(), True), (scans.FlaMamba2(), False))
    return max(max(scans.differences(each, by, device, kept).values()) for each, by in kernels)


def _rank(place: Place, plans: Sequence[MicrobatchPlan]) -> tuple[float, float | str]:
    """The largest error of this rank's outputs and gradients, of each tensor's largest; fla's."""
    import torch

    from megatron_balance.training.binding import RecurrentBounds

    ranks.join(place)
    pool, worst = ranks.groups(place, place.size // 2), 0.0
    for planned in plans:
        bounds = RecurrentBounds.of_plan(planned, pool, place.device)
        alone = RecurrentBounds.alone(planned.lengths, place.device)
        ends = [0, *torch.tensor(planned.lengths).cumsum(0).tolist()]
        spans = layout(planned, place.rank).tolist()
        own = torch.cat([torch.arange(0), *(torch.arange(ends[seq] + a, ends[seq] + b) for seq, a, b in spans)])
        for kind in ("gated delta", "kda", "mamba2"):
            inputs = [x.to(place.device) for x in _inputs(kind, ends[-1])]
            wanted = _run(kind, alone, inputs)
            for ours, whole in zip(_run(kind, bounds, [x[own] for x in inputs]), wanted, strict=True):
                if len(own):
                    apart = float((ours - whole[own]).abs().max() / whole.abs().max())
                    worst = max(worst, apart if apart == apart else float("inf"))  # noqa: PLR0124  not a number
    libraries = _of_libraries(place) if place.rank == 0 else ""
    ranks.leave()
    return worst, libraries


def _inputs(kind: str, rows: int) -> list[Any]:
    # q, k, v, decay, write of all sequences; states last.
    import torch
    from torch.nn.functional import normalize

    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(rows, HEADS, WIDTH, generator=random) for _ in range(3))
    decay = -0.01 * torch.rand(rows, HEADS, *([WIDTH] if kind == "kda" else []), generator=random)
    return [q, normalize(k, dim=-1), v, decay, torch.rand(rows, HEADS, generator=random)]


def _run(kind: str, bounds: Any, inputs: Sequence[Any]) -> list[Any]:
    """Output of a convolution and a recurrence behind it, and gradients by the inputs."""
    import torch

    from megatron_balance.runtime.kernels.recurrence import GatedDelta, Mamba2
    from megatron_balance.runtime.recurrent import causal_convolution, recurrent_layer

    leaves = q, k, v, decay, write = [x.detach().requires_grad_() for x in inputs]
    taps = torch.linspace(-1.0, 1.0, HEADS * WIDTH * (HALO + 1), device=v.device).view(-1, HALO + 1)
    v = causal_convolution(v.flatten(1), taps, None, bounds.of(0, HALO)).view(v.shape)
    bound = bounds.of(HEADS, 0)
    if kind == "mamba2":
        out = recurrent_layer(Mamba2(), bound, v, write, decay, k, q)
    else:
        out = recurrent_layer(GatedDelta(), bound, q, k, v, decay, write)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

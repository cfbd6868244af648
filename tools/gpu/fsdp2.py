"""A loop in plain PyTorch under FSDP2, without Megatron, against one rank on the CPU, in fp32."""

from collections.abc import Iterator
from typing import Any

from tests.support import torch_jobs
from tests.support.pool import World
from tools.gpu import ranks
from tools.gpu.ranks import Place
from tools.gpu.rows import Context, Figure, Row, Target

BUDGET_S = 25.0
STEPS = 4
PLANNERS = ("zeppelin", "distca")
AGAINST_ONE = {
    name: Figure(f"plain PyTorch, FSDP2, {name}: loss and gradient norm against one rank", "relative", each)
    for each in (Target("at most", 2e-5),)
    for name in PLANNERS
}
FIGURES = tuple(AGAINST_ONE.values())


def measure(context: Context) -> Iterator[Row]:
    size = min(4, context.ranks)
    kernel = "plain" if context.on_gpu else "auto"
    ways = [
        torch_jobs.Way(planner=name, steps=STEPS, device=context.device, kernel=kernel, ranks_per_node=size // 2)
        for name in PLANNERS
    ]
    found = ranks.run_ranks(_rank, size, (ways,), context, seconds=context.left_s() - 3.0).results()
    one = torch_jobs.reference(ways[0])
    for at, (name, figure) in enumerate(AGAINST_ONE.items()):
        differences = [
            abs(a - b) / abs(b)
            for rank in found
            for ours, theirs in ((rank[at][0], one.losses), (rank[at][1], one.norms))
            for a, b in zip(ours, theirs, strict=True)
        ]
        yield figure.measured(max(differences), f"{name} on {size} ranks, {STEPS} steps")


def _rank(place: Place, ways: list[Any]) -> list[tuple[list[float], list[float]]]:
    ranks.join(place)
    trained = torch_jobs.train(World(place.rank, place.size, None), ways)  # pyright: ignore[reportArgumentType]
    ranks.leave()
    return [(each.losses, each.norms) for each in trained]

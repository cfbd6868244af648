"""Random plans under the rendezvous of NCCL's hosts: whether any rank would stand in a group call
for ever, with nothing connected before: `python -m tools.faults rendezvous`.

Of every two plans one is small (one to eight ranks) and one is of 16 to 64 ranks in nodes of four or
eight, with a remap or a replayed backward, or both, and lengths as GitHub's. Planners, routing, the
policy of the backward and what runs take turns at random: two layers of one plan, or two nano-batches
interleaved. Of each the group calls of all ranks, forward and backward, are compiled; then they must
have one order (`compile.proof.runs`), and must all go through in a model of the hosts
(`tests.support.rendezvous`). Plan n is the same in every run. Those from `LED` on are zeppelin's
default, waves with a lead (in five of six), which needs a model and lengths of real size:
`python -m tools.faults rendezvous --only 20000` tries the first of them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron_balance.compile import ping_pong
from megatron_balance.compile.pipeline import compile_ranks
from megatron_balance.compile.proof.runs import verify_issue_order
from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.config import load_cluster, load_model
from megatron_balance.errors import BalanceError, InvalidProgramError
from megatron_balance.ir.batch import Batch
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.workloads.lengths import draw
from tests.support.rendezvous import batches_of, group_calls, hanging
from tests.support.strategies import ALL_PLANNERS, Case, plan
from tools.faults.cases import Outcome

LARGE = ((16, 4), (16, 8), (24, 8), (32, 4), (32, 8), (64, 8))
"""(ranks, of a node)."""
SMALL = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4), (8, 8))
TOKENS_PER_RANK = 256
LED = 20_000
LED_TOKENS_PER_RANK = 4096
SAFE = 10
"""One program of so many is also tried as `communication: safe` compiles it."""


@dataclass(frozen=True)
class Drawn:
    """One program to try."""

    planner: str
    plans: tuple[MicrobatchPlan, ...]
    policy: Policy
    large: bool

    @property
    def segments(self) -> Sequence[ping_pong.NanoSegment]:
        return ping_pong.forward(2) if len(self.plans) > 1 else ping_pong.one_by_one(2, 1)

    def __str__(self) -> str:
        first = self.plans[0]
        layers = " remapped" * bool(first.moves) + " routed" * (first.routing is not None)
        form = ", two nano-batches" * (len(self.plans) > 1)
        return f"{self.planner}{layers}, {self.policy}{form}, {first.num_ranks} ranks, {first.ranks_per_node} a node"


def drawn(number: int) -> Drawn:
    """Program `number`. A planner that finds no plan for a batch is asked for another."""
    rng = random.Random(number)
    large = number % 2 == 1
    led = number >= LED
    models = _real_models() if led else (Model(4, 2, 8), Model(2, 2, 8), Model(8, 8, 8), Model(8, 2, 8))
    while True:
        ranks, per_node = rng.choice(LARGE if large else SMALL)
        planner = rng.choice(("zeppelin",) if led else ALL_PLANNERS)
        policy = rng.choice(POLICIES)
        case = Case(
            Batch(()),
            _real_cluster(ranks, per_node) if led else Cluster(ranks, per_node),
            rng.choice(models),
            None,
            seed=rng.randrange(2**16),
            remapped=rng.random() < 0.5 or (large and policy == "keep"),
            routing=rng.choice((None, (1, 1), (2, 1), (1, 16))),
        )
        try:
            plans = tuple(
                plan(planner, replace(case, batch=_real_batch(rng, ranks) if led else _batch(rng, ranks)))
                for _ in range(rng.choice((1, 1, 2)))
            )
        except BalanceError:
            continue
        return Drawn(planner, plans, policy, large)


def _batch(rng: random.Random, num_ranks: int) -> Batch:
    """Lengths as GitHub's, scaled down to `TOKENS_PER_RANK`; sometimes few or none."""
    if rng.random() < 0.1:
        return Batch(tuple(rng.randint(1, 40) for _ in range(rng.randint(0, 4))))
    lengths = draw("github", 16 * TOKENS_PER_RANK * num_ranks, 1, rng.randrange(2**16))[0]
    return Batch(tuple(max(1, length // 16) for length in lengths))


def _real_batch(rng: random.Random, num_ranks: int) -> Batch:
    return Batch(tuple(draw("arxiv", LED_TOKENS_PER_RANK * num_ranks, 1, rng.randrange(2**16))[0]))


def _real_models() -> tuple[Model, ...]:
    """LLaMA 7B with as many key-value heads as queries have, or 8."""
    model = load_model("llama-7b")
    grouped = replace(model, num_kv_heads=8)
    return grouped, model, model, grouped


def _real_cluster(num_ranks: int, per_node: int) -> Cluster:
    """H100s; a NIC each, in nodes of whatever size."""
    machine = load_cluster("h100").build(num_ranks=64)
    return replace(machine, num_ranks=num_ranks, ranks_per_node=per_node, ranks_per_nic=1)


def tried(program: Drawn, *, passing: bool) -> str:
    """Say what is wrong with a program; empty: nothing is."""
    compiled = [compile_ranks(each, program.policy, passing=passing) for each in program.plans]
    phases, said = batches_of(program.plans, compiled, program.segments), ""
    for batches in phases:
        try:
            verify_issue_order(batches)
        except InvalidProgramError as error:
            said = str(error)
    hangs = hanging([group_calls([*ahead, *back]) for ahead, back in zip(*phases, strict=True)])
    if hangs:
        said = said or "though there is one order"
        said = f"{len(hangs)} ranks hang, rank {min(hangs)} in {hangs[min(hangs)].name}; {said}"
    return said


@contextmanager
def programs() -> Iterator[Callable[[int], Outcome]]:
    yield try_program


def try_program(number: int) -> Outcome:
    """One issue order, and no host that waits for ever: program `number`."""
    program = drawn(number)
    said = tried(program, passing=True)
    if not said and number % SAFE == 0:
        said = tried(program, passing=False)
    size = "large" if program.large else "small"
    layers = [
        word for word, has in (("remapped", program.plans[0].moves), ("replay", program.policy == "replay")) if has
    ]
    kind = f"{size} with {' and '.join(layers)}" if layers else size
    return Outcome(f"{program.planner}: {kind}", f"{program}: {said}" if said else "")

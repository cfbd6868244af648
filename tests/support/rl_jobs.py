"""Steps of reinforcement learning that a driver planned, on the ranks of a pool, and on one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_balance import Cluster, rl
from megatron_balance.ir import step as steps
from megatron_balance.ir.forest import Forest, num_tokens
from megatron_balance.ir.step import StepPlan
from megatron_balance.torch import BalancedBatch, SequenceBalancer, Settings
from megatron_balance.workloads.normalisations import sequence_ratios, token_weights
from megatron_balance.workloads.rollouts import as_trees
from tests.support.pool import World, said
from tests.support.torch_jobs import MODEL, VOCABULARY, whole
from tests.support.tree_jobs import EPSILON, Rollout, grpo, logits_of, logp_of, model_of

GROUPS, RESPONSES, EPOCHS, RATE = 4, 4, 2, 0.05
CLIP = (EPSILON, EPSILON)


@dataclass(frozen=True)
class Case:
    # How a driver plans a step. `trees`: a group is one sample.
    cap: int = 320
    forward_cap: int | None = None
    planner: str | None = None
    trees: bool = False
    model: str = "gpt"
    fsdp: bool = False


def drawn() -> list[Rollout]:
    """Rollouts of 3 to 300 tokens, group by group, with advantages of both signs in each."""
    draw = np.random.default_rng(0)
    made: list[Rollout] = []
    for _ in range(GROUPS):
        prompt = draw.integers(0, VOCABULARY, draw.integers(2, 30)).tolist()
        for _ in range(RESPONSES):
            length = int(np.clip(draw.lognormal(3.5, 1.2), 1, 300 - len(prompt)))
            tokens = prompt + draw.integers(0, VOCABULARY, length).tolist()
            trained = torch.tensor([0.0] * len(prompt) + [1.0] * length, dtype=torch.float64)
            none = torch.zeros(len(tokens), dtype=torch.float64)
            made.append(Rollout(tokens, trained, float(draw.normal()), none, none))
    return made


def policy(seed: int, name: str = "gpt", *, balanced: bool = False) -> nn.Module:
    """The model of all ranks, moved by what another one would have learnt; 0: as it is."""
    model, noise = model_of(name, torch.float64, balanced=balanced), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=noise, dtype=torch.float64), alpha=0.03 * bool(seed))
    return model


def behind(logp: Tensor) -> Tensor:
    # Log-probabilities [n - 1] at the tokens that they are of [n].
    return torch.cat([logp.new_zeros(1), logp.detach()])


def alone(name: str) -> list[tuple[float, list[Tensor]]]:
    """By epoch, the loss and its gradients, sample by sample."""
    others = [policy(seed, name) for seed in (1, 2)]
    with torch.no_grad():
        old, reference = ([behind(logp_of(other, each.tokens)) for each in drawn()] for other in others)
    rollouts = [replace(each, old=a, reference=b) for each, a, b in zip(drawn(), old, reference, strict=True)]
    model, made = policy(0, name), []
    for _ in range(EPOCHS):
        model.zero_grad()
        loss = sum((grpo(logp_of(model, each.tokens), each) for each in rollouts), torch.zeros(())) / len(rollouts)
        loss.backward()
        made.append((loss.item(), _descend(model)))
    return made


def _descend(model: nn.Module) -> list[Tensor]:
    # The gradients, once they have moved the model.
    gradients = [whole(each.grad).clone() for each in model.parameters() if each.grad is not None]
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            each.sub_(each.grad, alpha=RATE)
    return gradients


def samples_of(case: Case) -> list[list[int]]:
    """Of each sample of the plan, its rollouts."""
    groups = [list(range(at, at + RESPONSES)) for at in range(0, GROUPS * RESPONSES, RESPONSES)]
    return groups if case.trees else [[at] for of in groups for at in of]


def planned(world: World, case: Case) -> str:
    """The driver's text, as every rank gets it."""
    rollouts, samples = drawn(), samples_of(case)
    texts: list[Any] = [None]
    if world.rank == 0:
        forests = [as_trees([rollouts[at].tokens for at in of]) for of in samples]
        trees = [tree for each in forests for tree in each.trees]
        caps = {"max_tokens": case.cap, "forward_max_tokens": case.forward_cap}
        lengths = [
            num_tokens(tree) if case.trees else len(rollouts[of[0]].tokens)
            for tree, of in zip(trees, samples, strict=True)
        ]
        more: dict[str, Any] = {"trees": trees} if case.trees else {}
        step = rl.plan_step(lengths, None, Cluster(world.size, 2), MODEL, planner=case.planner, **caps, **more)
        texts = [steps.to_json(step)]
    dist.broadcast_object_list(texts)
    return texts[0]


def given(world: World, case: Case) -> dict[int, Any]:
    """This rank's samples; rank 1 has none, and others have parts of groups."""
    rollouts, readers = drawn(), [rank for rank in range(world.size) if rank != 1]
    made: dict[int, Any] = {}
    for number, of in enumerate(samples_of(case)):
        if readers[number % len(readers)] == world.rank:
            tokens = [rollouts[at].tokens for at in of]
            made[number] = as_trees(tokens) if case.trees else torch.tensor(tokens[0])
    return made


def balancer() -> SequenceBalancer:
    return SequenceBalancer("te_ring", MODEL, settings=Settings(ranks_per_node=2))


def log_probabilities(model: nn.Module, batch: BalancedBatch) -> Tensor:
    # Of each row, that of its label; 0 where it has none.
    found = logits_of(model, batch).log_softmax(-1).gather(1, batch.labels.clamp(min=0)[:, None])[:, 0]
    return found * (batch.labels >= 0)


def by_sample(case: Case, batch: BalancedBatch, rows: Tensor) -> dict[int, Tensor]:
    """By number of this rank's rollouts in the microbatch, results [n] of its rows."""
    if case.trees:
        order = [at for number in sorted(batch.documents) for at in samples_of(case)[number]]
        return dict(zip(order, batch.by_rollout(rows), strict=True))
    return dict(zip(batch.documents, batch.gather(rows), strict=True))


@dataclass(frozen=True)
class Run:
    # Of each epoch the loss of all ranks and its gradients; microbatches with and without a backward,
    # look-ups of plans, ratios that were clipped, and whether the plan has trees.
    epochs: list[tuple[float, list[Tensor]]]
    microbatches: tuple[int, int]
    bound: int
    clipped: int
    forests: bool


def train(world: World, cases: Sequence[Case]) -> list[Run]:
    return [_train(world, case) for case in cases]


def _train(world: World, case: Case) -> Run:
    rollouts, made = drawn(), list[tuple[float, list[Tensor]]]()
    bound, clipped, original = list[int](), 0, SequenceBalancer._bind
    with balancer() as balanced, patch.object(SequenceBalancer, "_bind", _counting(original, bound)):
        passes = balanced.from_plan(planned(world, case), given(world, case))
        found: list[dict[int, Tensor]] = []
        for seed in (1, 2):  # when they were drawn, and a reference
            other = policy(seed, case.model, balanced=True)
            with torch.no_grad():
                results = [by_sample(case, each, log_probabilities(other, each)) for each in passes.forward]
            found.append({at: behind(of[at][:-1]) for of in results for at in of})
        own = {at: replace(rollouts[at], old=found[0][at], reference=found[1][at]) for at in found[0]}
        model: Any = policy(0, case.model, balanced=True)
        if case.fsdp:
            fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
        for epoch in range(EPOCHS):
            model.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for batch in passes.update:
                logp = log_probabilities(model, batch)
                if case.trees:
                    of = by_sample(case, batch, logp)
                    loss = batch.sum_loss(sum(grpo(of[at][:-1], own[at]) for at in of) / len(rollouts))
                elif epoch:
                    loss = batch.sum_loss(_at_rows(batch, logp, own) / len(rollouts))
                else:
                    rows = batch.gather_rows(logp)
                    parts = rows.split([len(own[at].tokens) for at in batch.documents])
                    of = dict(zip(batch.documents, parts, strict=True))
                    clipped += sum(_clipped(of[at][:-1].detach(), own[at]) for at in of)
                    loss = batch.sum_loss(
                        sum((grpo(of[at][:-1], own[at]) for at in of), rows[:0].sum()) / len(rollouts)
                    )
                loss.backward()
                total += loss.detach() / world.size
            for each in () if case.fsdp else model.parameters():
                dist.all_reduce(each.grad)
                each.grad /= world.size
            dist.all_reduce(total)
            made.append((total.item(), _descend(model)))
        counts = (len(passes.update), len(passes.forward) if passes.forward is not passes.update else 0)
        forests = any(isinstance(each.plan.mask, Forest) for each in passes.update)
    return Run(made, counts, len(bound), clipped, forests)


def _at_rows(batch: BalancedBatch, logp: Tensor, own: dict[int, Rollout]) -> Tensor:
    # The loss by rows, to which columns travel. A row predicts the next token.
    def column(of: Callable[[Rollout], Tensor]) -> Tensor:
        return torch.cat(
            [logp.new_zeros(0), *(torch.cat([of(own[at])[1:], logp.new_zeros(1)]) for at in batch.documents)]
        )

    columns = [
        column(lambda each: each.old),
        column(lambda each: each.reference),
        column(lambda each: torch.full_like(each.old, each.advantage)),
        column(lambda each: each.trained / each.trained.sum()),
    ]
    old, reference, advantage, weight = batch.to_rows(torch.stack(columns, dim=1)).unbind(1)
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
    kl = (reference - logp).exp() - (reference - logp) - 1
    return -((gain - 0.04 * kl) * weight).sum()


def _clipped(logp: Tensor, each: Rollout) -> int:
    ratio, trained = (logp - each.old[1:]).exp(), each.trained[1:].bool()
    bad = ratio > 1 + EPSILON if each.advantage > 0 else ratio < 1 - EPSILON
    return int((bad & trained).sum())


def _counting(original: Callable[..., Any], made: list[int]) -> Callable[..., Any]:
    def bind(*args: Any, **named: Any) -> Any:
        made.append(1)
        return original(*args, **named)

    return bind


def weights_of(how: str, ratios: Sequence[Tensor]) -> list[np.ndarray]:
    """The weights of a step's tokens, GSPO's with its `ratios`: of each rollout log ratios [n], the
    first 0.
    """
    rollouts = drawn()
    counts, advantages = [each.trained.bool().numpy() for each in rollouts], [each.advantage for each in rollouts]
    labels = [at // RESPONSES for at in range(len(rollouts))]
    if how == "gspo":
        factors = sequence_ratios([each.numpy() for each in ratios], counts, advantages, CLIP)
        return token_weights(counts, (np.array(advantages) * factors).tolist(), "sequence")
    return token_weights(counts, advantages, how, groups=labels, constant=300)


def normalised_alone(how: str) -> list[Tensor]:
    """The gradients of the published loss, written out, on one rank."""
    model, other, rollouts = policy(0), policy(1), drawn()
    with torch.no_grad():
        olds = [logp_of(other, each.tokens) for each in rollouts]
    total = torch.zeros((), dtype=torch.float64)
    sizes = [each.trained.sum() for each in rollouts]
    for at, (each, old) in enumerate(zip(rollouts, olds, strict=True)):
        logp, counts = logp_of(model, each.tokens), each.trained[1:]
        of_group = sum(sizes[at // RESPONSES * RESPONSES :][:RESPONSES])
        own = -each.advantage * (logp * counts).sum()
        match how:
            case "token":
                total += own / sum(sizes)
            case "sequence":
                total += own / sizes[at] / len(rollouts)
            case "group":
                total += own / of_group / GROUPS
            case "constant":
                total += own / 300 / len(rollouts)
            case _:  # GSPO
                ratio = ((logp - old) * counts).sum().div(sizes[at]).exp()
                clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
                total -= torch.minimum(ratio * each.advantage, clipped * each.advantage) / len(rollouts)
    total.backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def normalise(world: World, asked: Sequence[tuple[str, Case]]) -> list[list[Tensor]]:
    """Of each normalisation, its gradients by weights at rows of documents, or of trees."""
    made: list[list[Tensor]] = []
    rollouts = drawn()
    for how, case in asked:
        with balancer() as balanced:
            text, mine, model = planned(world, case), given(world, case), policy(0)
            ratios = [torch.zeros(len(each.tokens), dtype=torch.float64) for each in rollouts]
            if how == "gspo":  # of all ranks, by two passes without a backward
                other = policy(1)
                with torch.no_grad():
                    for batch in balanced.from_plan(text, mine).forward:
                        moved = log_probabilities(model, batch) - log_probabilities(other, batch)
                        for at, found in by_sample(case, batch, moved).items():
                            ratios[at] = behind(found[:-1])
                for each in ratios:
                    dist.all_reduce(each)
            weights = weights_of(how, ratios)
            if case.trees:
                numbered = samples_of(case)
                mine = {number: (mine[number], [weights[at] for at in numbered[number]]) for number in mine}
            for batch in balanced.from_plan(text, mine).update:
                if case.trees:
                    loss = batch.weighted_nll(logits_of(model, batch))
                else:  # a weight stands at the row that predicts its token
                    own = [torch.from_numpy(np.append(weights[at][1:], 0.0)) for at in batch.documents]
                    at_rows = batch.to_rows(torch.cat([torch.zeros(0, dtype=torch.float64), *own]))
                    loss = batch.sum_loss(-(at_rows * log_probabilities(model, batch)).sum())
                loss.backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
                assert each.grad is not None
            made.append([each.grad / world.size for each in model.parameters() if each.grad is not None])
    return made


def tell(world: World) -> dict[str, str]:
    """Errors on this rank of steps that cannot be, by what they should say."""
    plain, forest = Case(), Case(trees=True)
    text, mine = planned(world, plain), given(world, plain)
    trees, rollouts = planned(world, forest), given(world, forest)
    mixed = rollouts | ({9: torch.arange(3)} if rollouts else {})
    step = steps.from_json(text)
    others = rl.plan_step([len(each.tokens) for each in drawn()][::-1], None, Cluster(4, 2), MODEL, max_tokens=320)
    mine_or = {} if world.rank == 0 else mine
    windowed = rl.plan_step(
        step.plans[0].lengths, None, Cluster(4, 2), replace(MODEL, attention="window_8"), max_tokens=320
    )
    wide = rl.plan_step([5], None, Cluster(2, 2), MODEL, max_tokens=5)
    heads = rl.plan_step([5], None, Cluster(4, 2), replace(MODEL, num_kv_heads=4), max_tokens=5)
    halves = StepPlan(((*step.members[0], *step.members[1]),), step.plans[:2])
    first = min(mine, default=0)
    asked: dict[str, tuple[Any, Any]] = {
        "not the plan of a step": ("{}" if world.rank == 2 else text, mine),
        "expected the StepPlan of rl.plan_step, or its JSON, got int": (3, mine),
        "of microbatches that run whole": (halves, mine),
        "expected a plan of at least 1 microbatch": (StepPlan((), ()), mine),
        "4 ranks, 2 a node, got one for 2, 2 a node": (wide, mine),
        "4 heads, 2 of keys, got one for 4 and 4": (heads, mine),
        "attention is causal, got one for window_8": (windowed, mine),
        "with each sample from 0 on once": (
            replace(step, members=((tuple(at + 1 for at in step.members[0][0]),), *step.members[1:])),
            mine,
        ),
        "without a backward of the same samples": (replace(step, forward=others), mine),
        "ranks planned differently": (others if world.rank == 3 else text, {} if world.rank == 3 else mine),
        "no rank gives samples [0, ": (text, mine_or),
        "several ranks give samples [0] (the first: ranks [0, 1])": (
            text,
            mine | ({0: torch.tensor(drawn()[0].tokens)} if world.rank == 1 else {}),
        ),
        "sample 99: expected one of the plan's 16 samples": (text, mine | {99: torch.arange(3)}),
        "3 tokens, and the plan has": (text, mine | {first: torch.arange(3)} if world.rank == 0 else mine),
        "sample 0: expected token ids [n] of integers": (text, mine | {0: torch.ones(3)} if world.rank == 0 else mine),
        "another tree than the plan has": (trees, {at: torch.from_numpy(each.tokens) for at, each in rollouts.items()}),
        "expected rollouts alone, or none": (trees, mixed),
        "expected as_trees of the rollouts of one tree": (trees, {at: as_trees([[1], [2]]) for at in rollouts}),
        "expected samples by their number in the plan, in a dict": (text, list(mine)),
        "expected documents with the same tensors": (
            text,
            {at: (each, each, each / 2) for at, each in mine.items()} if world.rank == 2 else mine,
        ),
        "could not read the plan or its samples: TypeError": (
            text,
            {"first": torch.arange(3)} if world.rank == 1 else mine,
        ),
    }
    with balancer() as balanced:
        told = {name: said(balanced.from_plan, *given, otherwise="none") for name, given in asked.items()}
        batch = balanced.from_plan(text, mine).update[0]
        told["expected one entry for each of"] = said(batch.to_rows, torch.ones(1), otherwise="none")
    return told

"""The balancer: from the documents that each rank read to the rows that each rank computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.ir.batch import at_least
from megatron_balance.ir.forest import Tree, checked
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.ir.step import Lengths, StepPlan
from megatron_balance.planning.choice import Run, choose_planner, planning_cost, to_yaml
from megatron_balance.planning.step_planner import PlanAhead, PlanSpec, StepPlanner
from megatron_balance.runtime.bind import AttentionShape, BindOptions, Bound
from megatron_balance.runtime.cuda import CudaStreams
from megatron_balance.runtime.movers import build_variants
from megatron_balance.runtime.recorder import Counters
from megatron_balance.torch import documents
from megatron_balance.torch.batch import BalancedBatch, Dealt, LossScale
from megatron_balance.torch.documents import LABEL, TOKEN, Document
from megatron_balance.torch.planned import StepPasses, planned_samples
from megatron_balance.torch.ranks import Ranks, device_of, group_of, pool_of, roll_call
from megatron_balance.torch.settings import Settings, calls_of, model_of
from megatron_balance.training import tokens
from megatron_balance.training.binding import Binder
from megatron_balance.training.figures import JobFacts
from megatron_balance.training.ledger import HeldDocument, Ledger
from megatron_balance.training.log import LogTarget, StepLog, StepTracer
from megatron_balance.training.plans import PlannedStep, Samples, StepPlans, check_agreement
from megatron_balance.training.pool import Pool, TensorParallel
from megatron_balance.workloads.rollouts import IGNORED, Rollouts, joined

T = TypeVar("T")
ALONE = TensorParallel()
DEFAULTS = Settings()


def _each(loader: Iterable[Sequence[Document]]) -> Iterator[Sequence[Document]]:
    """The lists of a loader; the first `next` raises DataError where it is no loader."""
    try:
        given = iter(loader)
    except TypeError:
        raise DataError(f"expected a loader, which gives lists of documents, got {type(loader).__name__}") from None
    yield from given


def _collective(method: Callable[..., T]) -> Callable[..., T]:
    """A method in which this rank waits for others: who failed is told (`RollCall.of_pool`)."""
    # By the outermost call, which alone counts.
    call = {"_run": "a step's plan", "evaluate": "an evaluation"}.get(
        method.__name__, "the exchange of a step's lengths"
    )

    @wraps(method)
    def inside(self: SequenceBalancer, *args: Any, **keywords: Any) -> T:
        with self.pool.groups.inside(call):
            return method(self, *args, **keywords)

    return inside


class SequenceBalancer:
    """Balances the documents of every step over the ranks that train together.

    Each rank gives the documents that it read. Their lengths are exchanged, a planner places them,
    the ranks agree on its plan, and tokens travel to the ranks that compute them.

    Every method that plans is collective over the balancer's ranks, and over those of `averaged_over`
    where these are more: all of them make the same number of steps, which `steps` and `flush` see to.
    The constructor is collective over the world.
    """

    def __init__(
        self,
        planner: str,
        model: Model,
        mesh: Ranks | None = None,
        *,
        averaged_over: Ranks | None = None,
        settings: Settings = DEFAULTS,
        accept: Collection[str] = (),
        **options: Any,
    ) -> None:
        """Make the process groups of the ranks, or share those that are there, and the planner.

        Args:
            planner: its name (docs/planners.md).
            model: heads, head dim and sizes, of the whole model.
            mesh: ranks that share their documents; of a mesh all dimensions count. None: the world.
            averaged_over: ranks over which FSDP or DDP averages gradients, if these are others.
            settings: see there.
            accept: names from an earlier refusal (model types, keys of a configuration) to go on with.
                Nothing proves that such a model attends inside documents, as plans have it.
            options: of the planner, such as `tokens_per_rank`.
        """
        if not isinstance(settings, Settings):
            raise ConfigError(f"settings: expected Settings(...), got {type(settings).__name__}")
        if not isinstance(model, Model):
            raise ConfigError(
                f"expected a megatron_balance.Model, got {type(model).__name__}; for_model takes configurations"
            )
        if not isinstance(planner, str):
            raise ConfigError(f"expected the name of a planner, got {planner!r}; docs/planners.md has them")
        self.settings, self.accept = settings, accept
        self.model = model = model if settings.mask is None else replace(model, attention=settings.mask)
        self.pool = pool_of(mesh, settings.ranks_per_node)
        self.device = torch.device(settings.device) if settings.device is not None else device_of(mesh)
        self._group = self.pool.groups.pool if averaged_over is None else group_of(averaged_over)
        choice = choose_planner(planner, options, "SequenceBalancer", settings.layers)
        cluster = settings.cluster_of(self.pool, self.device)
        choice.check_mask(model)
        choice.num_holders(cluster)  # options that cannot be are told before a model is built
        costs = None if settings.plan_costs is None else str(settings.plan_costs)
        self.spec = PlanSpec(planner, cluster, model, choice.layers, dict(choice.given), costs)
        self._idle = partial(choice.idle, cluster)
        self._said_idle = False
        # `_at`: the first microbatch of the step at hand, `_read`: the first that was not read,
        # `_known`: the lengths and trees of those between; `_num_documents`: that this rank gave;
        # `_pending`: the step that was read ahead.
        self._form: documents.Form | None = None
        self._known: dict[int, tuple[tuple[int, ...], tuple[Tree, ...]]] = {}
        self._at = self._read = self._num_documents = 0
        self._num_microbatches = 1
        self._plans = self._make_plans(None)
        self._evaluation: StepPlans | None = None
        config = Run(source="", planner=choice, plan_costs=None if costs is None else Path(costs).absolute())
        self._log = _LoopLog(settings, self.pool, self.device, self.spec, config)
        self._waiting = _Waiting(self.pool.rank)
        self._pending: list[tokens.Sequences] = []
        self._pending_of: documents.Of = "documents"
        self._pending_form: documents.Form | None = None
        # By number, trees of rollouts that were not trained yet, and the numbers of their rollouts.
        self._rollouts: dict[int, tuple[tuple[int, ...], Rollouts]] = {}
        self._num_rollouts = 0
        self._last: BalancedBatch | None = None
        self._layers: int | None = None
        self._asked: dict[Any, None] = {}  # by layers, of all batches so far
        self.planned: PlannedStep | None = None  # the plan of the last step that was dealt, and how long planning took

    @classmethod
    def for_model(
        cls,
        config: object,
        planner: str = "zeppelin",
        mesh: Ranks | None = None,
        *,
        accept: Collection[str] = (),
        **keywords: Any,
    ) -> Self:
        """The balancer for a model.

        `config`: of a Transformers model, of torchtitan's, or a `megatron_balance.Model`
        (`torch.model_of`). Others, and `keywords`, as for the constructor; the log repeats what is
        accepted. ConfigError: no heads and sizes are said, or the attention is not known; as there.
        """
        made = cls(planner, model_of(config, accept), mesh, accept=accept, **keywords)
        made._layers = calls_of(config, made.model)
        return made

    def __call__(self, documents: Sequence[Document]) -> BalancedBatch:
        """The rows that this rank computes of a step of one microbatch, of the documents that it
        read (none is fine): token ids [n], or tuples (tokens, labels, others [n, ...]). All ranks
        give the same number of other tensors, of the same types.

        DataError: documents that are none, on every rank. InfeasibleError: the ranks cannot hold
        them. PlanMismatchError: ranks that planned differently.
        """
        (batch,) = self.step([documents])
        return batch

    def step(self, microbatches: Sequence[Sequence[Document]], of: documents.Of = "documents") -> list[BalancedBatch]:
        """The rows that this rank computes of a step of several microbatches (gradient accumulation).

        Errors as for one. `microbatches`: as many on every rank; `of`: of what, as for `steps`.
        """
        self._check_none_pending(f"a step of {of}")
        failure = None
        if not isinstance(microbatches, Sequence):  # told to all ranks
            got = type(microbatches).__name__
            failure, microbatches = DataError(f"expected the {of} of each microbatch in a list, got {got}"), [[]]
        dealing = self._share(microbatches, failure, of)  # also tells ranks that give another number of microbatches
        if not dealing.mine:
            raise ConfigError("expected the documents of at least 1 microbatch (an empty list is one), got none")
        return self._run(dealing)

    def steps(
        self, loader: Iterable[Sequence[Document]], microbatches: int = 1, of: documents.Of = "documents"
    ) -> Iterator[list[BalancedBatch]]:
        """The steps of a loader, which gives the documents of one microbatch after the other, each
        step but the first planned in a background process while the one before computes.

        Ends when the loaders of all ranks have ended, those of `averaged_over` included; a rank whose
        loader ended before takes part without documents. Then come steps of the documents that still
        wait (`flush`).
        `microbatches`: of a step. `of`: what a microbatch is a list of: "documents", "trees" (as for
        `trees`), or "rollouts"; with weights it is a tuple (rollouts, weights). DataError: a loader
        that failed, on every rank.
        """
        microbatches = at_least(1, "microbatches", microbatches)
        if self._pending and self._pending_of != of:
            raise ConfigError(f"expected steps of {self._pending_of}, which were read ahead, got of {of}")
        ledger = self._plans.end_step()
        self._plans.close()
        proving = replace(self.spec, prove_every=self.settings.prove_every, prove_as=self.pool.rank)
        self._plans = plans = self._make_plans(PlanAhead(proving))
        plans.restore(ledger)
        feed = _each(loader)
        try:
            coming = self._share_again() if self._pending else self._draw(feed, microbatches, of)
            while coming is not None:
                now = coming
                coming = self._draw(feed, microbatches, of, now.form)
                self._pending = [] if coming is None else coming.mine
                self._pending_of, self._pending_form = now.of, now.form if coming is None else coming.form
                yield self._run(now)
            yield from self.flush(microbatches)
        finally:
            plans.close()

    def flush(self, microbatches: int = 1) -> Iterator[list[BalancedBatch]]:
        """Steps of the documents that still wait, until none does; `microbatches` of a step."""
        microbatches = at_least(1, "microbatches", microbatches)
        self._check_none_pending("flush")
        while self._most(len(self._plans.end_step().held)):
            coming = self._share([[] for _ in range(microbatches)], of=self._waiting.of or "documents")
            yield self._run(coming, may_delay=False)

    def rollouts(self, rollouts: Sequence[Any], weights: Sequence[Any] | None = None) -> BalancedBatch:
        """The rows that this rank computes of a step of rollouts: token ids [n] of prompt and
        response, in any order. What rollouts of one rank have in common from their beginning on is
        computed once, so one rank gives all rollouts of a prompt; none is fine.

        `weights`: of each rollout one number a token, what its prediction counts in
        `BalancedBatch.weighted_nll`: an advantage, 0 for the prompt's. All ranks give them, or none.

        Where a planner holds trees back, the batch has some of earlier steps (`rollout_numbers`).
        DataError: rollouts or weights that are none, on every rank. Others as for documents.
        """
        (batch,) = self.step([(rollouts, weights)], "rollouts")
        return batch

    def trees(self, trees: Sequence[Document]) -> BalancedBatch:
        """The rows that this rank computes of a step of trees: tuples (tokens [n], labels [n],
        segments, others [n, ...]), tokens depth first, labels those of the outputs already.

        `segments`: (length, parent, full) of each, as `ir.forest.Segment`: `parent` is a number in
        the tree, -1 for the first; `full`: its tokens see one another both ways, also in words,
        "causal" or "full".

        Errors as for `rollouts`.
        """
        (batch,) = self.step([trees], "trees")
        return batch

    @_collective
    def from_plan(self, step: StepPlan | str, samples: Mapping[int, Any]) -> StepPasses:
        """The rows that this rank computes in the passes of a step that its driver planned
        (`rl.plan_step`), whatever the balancer's own planner is: the plan, or its JSON.

        All passes take the same batches: what is looked up for the first serves those behind it, the
        results of one are `gather`ed by sample, and reach the rows of the next by `to_rows`.
        `BalancedBatch.documents` are numbers of samples in the plan.

        `samples`: by number, those that this rank gives, each given by one rank: documents as for
        `step`, or, where the plan has trees, `workloads.rollouts.as_trees` of the rollouts of one
        tree, alone or in a tuple (that, weights as for `rollouts`). Documents that wait go on waiting.

        ConfigError: a plan that is none, or is for other ranks or another model. DataError: samples
        that are none, or other ones than the plan has. Both on every rank. PlanMismatchError: ranks
        that have other plans.
        """
        self._check_none_pending("a planned step")
        given = planned_samples(step, samples, self.model, self.pool, shift_labels=self.settings.shift_labels)
        counts = [0 if each is None else len(each.members) for each in (given.step, given.step.forward)]
        most, least = (self.largest(torch.tensor([sign * each for each in counts])) for sign in (1, -1))
        if not torch.equal(most, -least):
            raise ConfigError(
                f"expected the same number of microbatches on all ranks that average gradients, got {counts} and up to "
                f"{most.tolist()}; plan them for all of these, or with min_microbatches"
            )
        self._log.begin_next()
        self.planned = PlannedStep(given.step, 0.0, 0.0, planner=given.step.plans[0].planner)
        of_update = given.of(given.step)
        self._log.planned(self.planned, of_update[1], self.planned.planner)
        update = self._batches(*of_update, given.form, training=True)
        forward = update
        if given.step.forward is not None:
            forward = self._batches(*given.of(given.step.forward), given.form, training=False)
        for batch in (*update, *forward):
            batch.rollouts = given.rollouts_of(batch.documents)
        return StepPasses(update, forward)

    @_collective
    def evaluate(self, documents: Sequence[Document]) -> BalancedBatch:
        """The rows that this rank computes of documents that are not trained: no backward follows.

        Nothing is held back, and training's waiting documents keep waiting. Errors as for a step.
        """
        if self._evaluation is None:
            self._evaluation = self._make_plans(None, evaluation=True)
        dealing = self._share([documents], training=False)
        planned = self._evaluation.plan(dealing.shared.lengths, dealing.shared.trees)
        (batch,) = self._deal(dealing, planned, training=False)
        return batch

    @contextmanager
    def of_another_form(self) -> Iterator[None]:
        """Evaluate documents with other tensors than those of the run, or with none."""
        form, self._form = self._form, None
        try:
            yield
        finally:
            self._form = form

    def gather(self, values: Tensor, *, attended: int | None = None) -> list[Tensor]:
        """`BalancedBatch.gather` of the batch that was made last. ConfigError: there is none yet."""
        if self._last is None:
            raise ConfigError("expected a batch before gather, got none; call the balancer first")
        return self._last.gather(values, attended=attended)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for a checkpoint: documents that wait, or were read ahead by `steps`.

        Each rank saves and loads its own; plain data and tensors on the host.
        """
        of = self._waiting.of or (self._pending_of if self._pending else "documents")
        form = self._waiting.form or (self._pending_form if self._pending else None) or self._form
        return {
            "ledger": self._plans.saved(),
            "ranks": self.pool.size,
            "rank": self.pool.rank,
            "counts": [self._at, self._num_documents - sum(len(each.lengths) for each in self._pending)],
            "waiting": self._waiting.state(),
            "pending": [
                (each.rows, list(each.lengths), [[*map(list, tree)] for tree in each.trees]) for each in self._pending
            ],
            "of": of,
            "form": None if form is None else [(dtype, list(shape)) for dtype, shape in form.others],
            "num_rollouts": self._num_rollouts,
            "rollouts": {number: (list(places), each.state()) for number, (places, each) in self._rollouts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, with this rank's own state. ConfigError: it is none, or
        documents wait that another number of ranks has, or that this planner cannot train.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"expected the state_dict of a balancer, got {type(state).__name__}")
        # States of before have no rank, and no trees.
        later = ("rank", "of", "num_rollouts", "rollouts")
        missing = [key for key in self.state_dict() if key not in state and key not in later]
        if missing:
            raise ConfigError(f"expected the state_dict of a balancer, got one without {', '.join(missing)}")
        try:
            ledger, _ = Ledger.from_json(state["ledger"])
            at, trained = map(int, state["counts"])
            waiting = _Waiting(self.pool.rank, state["waiting"])
            pending = [
                tokens.Sequences(rows, tuple(lengths), checked(*trees) if trees else ())
                for rows, lengths, *trees in state["pending"]
            ]
            others = None if state["form"] is None else tuple((dtype, tuple(shape)) for dtype, shape in state["form"])
            kept = {
                number: (tuple(places), Rollouts.of_state(*each))
                for number, (places, each) in state.get("rollouts", {}).items()
            }
        except (TypeError, ValueError) as error:
            raise ConfigError(f"expected the state_dict of a balancer, got one that is damaged: {error}") from None
        if state["ranks"] != self.pool.size and (state["waiting"] or state["pending"]):
            raise ConfigError(
                f"{len(state['waiting'])} documents that wait and {len(state['pending'])} microbatches read ahead are "
                f"on {state['ranks']} ranks, this run has {self.pool.size}; go on with as many, or train them first "
                "(flush) and then save"
            )
        of_rank = state.get("rank", self.pool.rank)
        if of_rank != self.pool.rank and (state["waiting"] or state["pending"]):
            raise ConfigError(
                f"expected the state of rank {self.pool.rank}, got that of rank {of_rank}, whose documents wait: each "
                "rank saves and loads its own"
            )
        self._plans.restore(ledger)
        self._waiting, self._pending = waiting, pending
        self._at = self._read = at
        self._num_documents = trained + sum(len(each.lengths) for each in self._pending)
        self._known.clear()
        of, form = state.get("of", "documents"), None if others is None else documents.Form(others)
        waiting.of, waiting.form = (of, form) if len(waiting) else (None, None)
        self._pending_of, self._pending_form = of, form
        self._form = form if of == "documents" else None
        self._rollouts, self._num_rollouts = kept, state.get("num_rollouts", 0)

    def close(self) -> None:
        """End what runs in the background, and a trace that is under way; `with` does so, too.

        Balancers of the same ranks share process groups. These end with torch.distributed.
        """
        self._plans.close()
        self._log.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception | KeyboardInterrupt) and self.pool.size > 1:
            roll_call().left(error)  # the others may be waiting for this rank
        self.close()

    # The steps of a step

    def _check_none_pending(self, got: str) -> None:
        if self._pending:
            raise ConfigError(
                f"expected steps(loader), since documents were read ahead, by it or before a checkpoint; got {got}"
            )

    @_collective
    def _most(self, number: int) -> int:
        """The largest number that any rank has, of those that make the same number of steps."""
        return int(self.largest(torch.tensor([number])))

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest of each number, of the pool and of the ranks whose gradients are averaged."""
        numbers = numbers.to(self.device)
        for group in dict.fromkeys((self.pool.groups.pool, self._group)):  # in this order on all ranks
            if group is not None:
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        return numbers

    def _make_plans(self, ahead: PlanAhead | None, *, evaluation: bool = False) -> StepPlans:
        samples = _Known(
            consumed=lambda: self._at,
            num_microbatches=lambda: self._num_microbatches,
            per_microbatch=1,
            lengths=lambda number: self._known[number][0],
            trees=lambda number: self._known[number][1],
        )
        return StepPlans(
            StepPlanner(self.spec),
            samples,
            lambda fingerprint: check_agreement(fingerprint, self.pool.groups, self.device),
            ahead=ahead,
            evaluation=evaluation,
        )

    @_collective
    def _draw(
        self,
        feed: Iterator[Sequence[Document]],
        microbatches: int,
        of: documents.Of,
        form: documents.Form | None = None,
    ) -> _Dealing | None:
        """The next step of a loader, lengths shared; None: the loaders of all ranks have ended.
        `form`: of the step before it.
        """
        drawn: list[Sequence[Document]] = []
        failure: Exception | None = None
        try:
            drawn = list(islice(feed, microbatches))
        except Exception as error:  # raised below, on all ranks
            failure = error
        if not self._most(len(drawn) + (failure is not None)):
            return None
        return self._share([*drawn, *([] for _ in range(microbatches - len(drawn)))], failure, of, form)

    @_collective
    def _share(
        self,
        microbatches: Sequence[Sequence[Document]],
        failure: Exception | None = None,
        of: documents.Of = "documents",
        form: documents.Form | None = None,
        *,
        training: bool = True,
    ) -> _Dealing:
        """Share the lengths of the documents of a step. `failure`: to read them, told to all ranks.
        `form`: that trees have; None: any, unless some wait.
        """
        if of not in get_args(documents.Of):
            raise ConfigError(f"expected a step of {', '.join(get_args(documents.Of))}, got of {of!r}")
        if training and self._waiting.of not in (None, of):
            raise ConfigError(
                f"expected {self._waiting.of}, since {len(self._waiting)} of earlier steps wait, got {of}; train them "
                "first (flush)"
            )
        parts: list[list[documents.Parts]] = []
        rollouts: list[Rollouts] = []
        own: documents.Form | None = None
        known = (self._waiting.form if training else None) or (self._form if of == "documents" else form)
        try:
            if failure is None:
                parts, rollouts = documents.read_as(of, microbatches, shift_labels=self.settings.shift_labels)
                own = documents.check_form(parts, known)
        except Exception as error:  # raised by share_lengths, on all ranks
            failure = error
        known = known or documents.agree_form(None if failure is not None else own, self.pool)
        if of == "documents":
            self._form = known
        mine = documents.sequences(parts, known) if failure is None else []
        dealing = self._share_sequences(mine, failure, len(microbatches), training=training)
        for numbers, made in zip(dealing.numbers, rollouts, strict=False):
            for number, (places, each) in zip(numbers, made.by_tree(), strict=True):
                self._rollouts[number] = tuple(self._num_rollouts + at for at in places), each
            self._num_rollouts += len(made.paths)
        return replace(dealing, of=of, form=known)

    @_collective
    def _share_again(self) -> _Dealing:
        """The step that was read ahead and not run."""
        mine, self._pending = self._pending, []
        self._read = self._at
        self._num_documents -= sum(len(each.lengths) for each in mine)
        shared = self._share_sequences(mine, None, len(mine))
        return replace(shared, of=self._pending_of, form=self._pending_form)

    def _share_sequences(
        self, mine: list[tokens.Sequences], failure: Exception | None, num_microbatches: int, *, training: bool = True
    ) -> _Dealing:
        shared = tokens.share_lengths(mine, failure, num_microbatches, self.pool, ALONE, self.device)
        ends = list(accumulate((len(each.lengths) for each in mine), initial=self._num_documents if training else 0))
        dealing = _Dealing(self._read, mine, [tuple(range(a, b)) for a, b in pairwise(ends)], shared)
        if training:
            trees = shared.trees or ((),) * num_microbatches
            self._known |= dict(enumerate(zip(shared.lengths, trees, strict=True), start=self._read))
            self._read += num_microbatches
            self._num_documents = ends[-1]
        return dealing

    @_collective
    def _run(self, dealing: _Dealing, *, may_delay: bool = True) -> list[BalancedBatch]:
        """Plan a training step, and deal its tokens."""
        self._at, self._num_microbatches = dealing.first, len(dealing.mine)
        if not self._said_idle and (idle := self._idle(self._num_microbatches)) and self.pool.rank == 0:
            log.warning("%s", idle)
        self._said_idle = True
        self._log.begin_next()
        lengths, trees = dealing.shared.lengths, dealing.shared.trees
        self.planned = planned = self._plans.plan(lengths, trees, may_delay=may_delay)
        self._log.planned(planned, dealing.shared, self.spec.name)
        batches = self._deal(dealing, planned, training=True)
        self._at += self._num_microbatches
        for number in [each for each in self._known if each < self._at]:  # also of steps that could not be planned
            del self._known[number]
        return batches

    @_collective
    def _deal(self, dealing: _Dealing, planned: PlannedStep, *, training: bool) -> list[BalancedBatch]:
        """Move the tokens of a planned step."""
        rank = self.pool.rank
        recalled = self._waiting.recall(planned.recalled, planned.recalled_trees)
        mine, apart = tokens.by_nano_batch(dealing.mine, dealing.shared, planned.step.members, rank, recalled)
        own = np.flatnonzero(np.concatenate([*dealing.shared.owners, np.empty(0)]) == rank).tolist()
        numbers = dict(zip(own, chain.from_iterable(dealing.numbers), strict=True))
        again = {number for number, _ in recalled.rows}
        numbers |= {held.number: self._waiting.number(held) for held in planned.recalled if held.number in again}
        if training:
            self._waiting.keep(planned.ledger.held, dealing)
        given = [
            tuple((numbers[seq], length) for seq, length in zip(seqs, lengths, strict=True) if seq in numbers)
            for seqs, lengths in zip(chain.from_iterable(planned.step.members), apart.lengths, strict=True)
        ]
        batches = self._batches(mine, apart, planned.plans, given, dealing.form, training=training)
        for batch in batches if dealing.of == "rollouts" else ():
            kept = [self._rollouts.pop(number) for number in sorted(batch.documents)]
            numbers, made = [number for of_tree, _ in kept for number in of_tree], joined([each for _, each in kept])
            order = sorted(range(len(numbers)), key=numbers.__getitem__)
            batch.rollouts = replace(made, paths=tuple(made.paths[at] for at in order))
            batch.rollout_numbers = tuple(sorted(numbers))
        return batches

    def _batches(
        self,
        mine: Sequence[tokens.Sequences],
        shared: tokens.PoolLengths,
        plans: Sequence[MicrobatchPlan],
        given: Sequence[tuple[tuple[int, int], ...]],
        form: documents.Form | None,
        *,
        training: bool,
    ) -> list[BalancedBatch]:
        """Move the tokens of plans. `given`: of each, numbers and lengths of what this rank gave."""
        form = form or documents.Form()
        exchange = tokens.TokenExchange(shared, plans, self.pool)
        rows = exchange.to_ranks(mine, form.num_columns, ALONE, self.device)
        scale = self._loss_scale(rows)
        batches: list[BalancedBatch] = []
        for at, plan in enumerate(plans):
            local = tokens.assemble(rows[at], exchange.layouts[at], self.settings.row_multiple, plan.mask)
            dealt = Dealt(
                plan,
                shared.of(at),
                given[at],
                self.pool,
                self.model,
                self._layers,
                torch.bfloat16 if self.settings.state_wire == "bf16" else None,
            )
            batches.append(
                BalancedBatch(
                    local.rows[:, TOKEN],
                    local.positions,
                    local.rows[:, LABEL].masked_fill(local.padding, IGNORED),
                    form.others_of(local.rows),
                    dealt=dealt,
                    loss_scale=scale,
                    bind=partial(self._bind, number=at, training=training),
                    asked=self._asked,
                    accept=self.accept,
                )
            )
            if self.settings.compiled:
                on_gpu = self.device.type == "cuda"
                batches[-1].in_graphs(torch.bfloat16 if on_gpu else torch.get_default_dtype())
        self._last = batches[-1]
        return batches

    def _loss_scale(self, rows: Sequence[Tensor]) -> LossScale:
        targets = sum(
            ((each[:, LABEL] != IGNORED).sum() for each in rows), torch.zeros((), dtype=torch.int64, device=self.device)
        ).double()
        if self._group is None:
            return LossScale(targets, 1, None)
        dist.all_reduce(targets, group=self._group)
        return LossScale(targets, self._group.size(), self._group)

    def _bind(
        self,
        plan: MicrobatchPlan,
        dtype: torch.dtype,
        device: torch.device,
        shape: AttentionShape,
        *,
        number: int,
        training: bool,
    ) -> Bound:
        build_variants(device, dtype, shape, self.settings.gradient_wire)
        kernel, wire = self.settings.kernel, self.settings.gradient_wire
        options = BindOptions(shape, self.pool.groups, device, dtype, kernel, gradient_wire=wire)
        if not training:
            return Binder(options).bind(plan, ("replay",), phases=("forward",))[0]
        binder = Binder(options, recorder=self._log.tracer.recorder)
        (bound,) = binder.bind(plan, (self.settings.backward,), number=number)
        self._log.counters.append(bound.counters)
        return bound


class _Known(Samples):
    """The microbatches whose lengths the ranks have shared; a microbatch of all ranks is a sample."""

    def step(self, first: int, num_microbatches: int) -> Lengths | None:
        assert self.lengths is not None
        try:
            return tuple(self.lengths(number) for number in range(first, first + num_microbatches))
        except KeyError:
            return None


_Place = tuple[int, int]  # where a document was dealt: number of the microbatch in the run, and number in it


@dataclass(frozen=True, slots=True, eq=False)
class _Dealing:
    """The documents of a step, as all ranks gave them."""

    # `first`: number of its first microbatch in the run; by microbatch, `mine`: this rank's,
    # `numbers`: those of this rank's documents among all that it ever gave.
    first: int
    mine: list[tokens.Sequences]
    numbers: list[tuple[int, ...]]
    shared: tokens.PoolLengths
    of: documents.Of = "documents"
    form: documents.Form | None = None

    def own(self, rank: int) -> list[tuple[_Place, int]]:
        """Of this rank's documents, the place and the number."""
        made: list[tuple[_Place, int]] = []
        for m, (owners, numbers) in enumerate(zip(self.shared.owners, self.numbers, strict=True)):
            places = [(self.first + m, at) for at, owner in enumerate(owners.tolist()) if owner == rank]
            made += zip(places, numbers, strict=True)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingDocument:
    """A document of pool rank `owner` that waits; there `number` and `rows` [n, C]."""

    owner: int
    number: int = -1
    rows: Tensor | None = None


class _Waiting:
    """The documents that wait, on one rank. `of`, `form`: all of them; None: none waits."""

    of: documents.Of | None = None
    form: documents.Form | None = None

    def __init__(self, rank: int, state: Sequence[Sequence[Any]] = ()) -> None:
        """The documents of `state`, as `state()` gave it; ValueError or TypeError where it is none."""
        self._rank = rank
        self._kept: dict[_Place, _WaitingDocument] = {
            (sample, place): _WaitingDocument(owner, number, rows) for sample, place, owner, number, rows in state
        }

    def __len__(self) -> int:
        return len(self._kept)

    def recall(self, wanted: Sequence[HeldDocument], trees: tuple[Tree, ...]) -> tokens.Recalled:
        """The documents that a step trains."""
        if not wanted:
            return tokens.NOTHING
        kept = [self._kept[each.sample, each.place] for each in wanted]
        return tokens.Recalled(
            tuple((each.number, each.length) for each in wanted),
            tuple(each.owner for each in kept),
            tuple((held.number, each.rows) for held, each in zip(wanted, kept, strict=True) if each.rows is not None),
            trees,
        )

    def number(self, held: HeldDocument) -> int:
        return self._kept[held.sample, held.place].number

    def keep(self, held: Sequence[HeldDocument], dealing: _Dealing) -> None:
        """Keep exactly the documents `held` behind a step that dealt `dealing`."""
        before, self._kept = self._kept, {}
        self.of, self.form = (dealing.of, dealing.form) if held else (None, None)
        own = dict(dealing.own(self._rank))
        for each in held:
            place = (each.sample, each.place)
            if place in before:
                self._kept[place] = before[place]
                continue
            m = each.sample - dealing.first
            owner = int(dealing.shared.owners[m][each.place])
            kept = _WaitingDocument(owner)
            if owner == self._rank:
                number = own[place]
                at = dealing.numbers[m].index(number)
                rows = dealing.mine[m].rows.split(dealing.mine[m].lengths)[at]
                kept = _WaitingDocument(owner, number, rows.clone())
            self._kept[place] = kept

    def state(self) -> list[tuple[int, int, int, int, Tensor | None]]:
        return [(*place, kept.owner, kept.number, kept.rows) for place, kept in self._kept.items()]


log = logging.getLogger(__name__)


class _LoopLog(StepLog):
    """Records and traces of this rank. All ranks of the job log the same steps, counted from 1."""

    def __init__(self, settings: Settings, pool: Pool, device: torch.device, spec: PlanSpec, config: Run) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        tracer = StepTracer(settings.trace_folder, settings.trace_steps, rank)
        on_device, node = device.type == "cuda", rank // pool.ranks_per_node
        tracer.place(lambda: node, lambda: CudaStreams({}, ()) if on_device else None)
        folder = None if settings.log_folder is None else Path(settings.log_folder)
        super().__init__(LogTarget(folder, to_yaml(config), writes=rank == 0, tracer=tracer))
        self._folder, self._groups, self._number = folder, pool.groups, 0
        self._hooks: list[RemovableHandle] = []
        self._planned: tuple[PlannedStep, tokens.PoolLengths] | None = None
        self.counters: list[Counters] = []  # of the plans that were looked up for the step at hand
        if folder is not None:
            self.describe(JobFacts(pool, spec.model, planning_cost(spec.cluster, spec.model, spec.plan_costs)), device)

    def begin_next(self) -> None:
        """Begin a training step; collective over the job if it is traced, or steps are recorded."""
        self.end()
        self._computed()
        self._over()  # of a step without an optimizer's, as where a trainer accumulates
        self._number += 1
        self.begin(self._number)
        if self.tracer.recorder is not None or self._folder is not None:
            self._hooks = [
                register_optimizer_step_pre_hook(lambda *_: self._computed()),
                register_optimizer_step_post_hook(lambda *_: self._over()),
            ]

    def planned(self, planned: PlannedStep, shared: tokens.PoolLengths, planner: str) -> None:
        self._planned, self.counters = (planned, shared), []
        self.tracer.planned(planner)

    def end(self) -> None:
        """Give up the trace of a step whose optimizer made no step; the log says so."""
        for each in self._hooks:  # not by a hook itself: torch may be going through them
            each.remove()
        self._hooks = []
        if self.tracer.recorder is not None:
            log.warning("step %d is not traced: no optimizer of torch.optim made a step in it", self._number)
            self.tracer.finish()

    def _computed(self) -> None:
        if self._planned is not None:
            self.ran(*self._planned, self.counters)

    def _over(self) -> None:
        """The first optimizer has made its step, or the next step begins."""
        if self._planned is not None:
            self._planned = None
            with self._groups.inside("the record of a step"):
                self.finish(self._number, None, None)

"""The rows that this rank computes of a microbatch, with all that a training loop asks of them."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import disable

import megatron_balance
from megatron_balance.analysis.statistics import plan_statistics
from megatron_balance.compile.halo import under
from megatron_balance.compile.pipeline import layout
from megatron_balance.compile.proof.structure import verify_plan
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Ints, ranges
from megatron_balance.ir.batch import at_least
from megatron_balance.ir.columns import Fragment
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.mask import FULL, Mask, SlidingWindow
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.runtime import attention
from megatron_balance.runtime.attention import differentiable_once
from megatron_balance.runtime.bind import AttentionShape, Bound
from megatron_balance.runtime.kernels.recurrence import AffineRecurrence
from megatron_balance.runtime.recurrent import RecurrentBound, causal_convolution, recurrent_layer
from megatron_balance.torch import compiled
from megatron_balance.torch.losses import Losses
from megatron_balance.training.binding import RecurrentBounds
from megatron_balance.training.figures import imbalance_after, imbalance_before
from megatron_balance.training.pool import Pool
from megatron_balance.training.tokens import PoolLengths, TokenExchange
from megatron_balance.workloads.rollouts import IGNORED, Rollouts

# Looks a plan up for this rank. The shape is of a layer's heads.
_Bind: TypeAlias = Callable[[MicrobatchPlan, torch.dtype, torch.device, AttentionShape], Bound]
# What a layer asks a plan for (`BalancedBatch.bound`).
_Asked: TypeAlias = tuple[torch.dtype, torch.device, Mask | None, AttentionShape]


@dataclass(frozen=True, slots=True)
class LossScale:
    """Ranks over which gradients are averaged, and a scalar: their labels that count in a step."""

    num_targets: Tensor
    num_ranks: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """A microbatch as planned and dealt; `documents`: numbers and lengths of this rank's;
    `state_wire`: the type in which states of recurrent layers travel; None: that of states.
    """

    plan: MicrobatchPlan
    lengths: PoolLengths
    documents: tuple[tuple[int, int], ...]
    pool: Pool
    model: Model
    layers: int | None = None
    state_wire: torch.dtype | None = None


class _Forward:
    """A forward whose layers attended under a batch. `taken`: values of it were let through."""

    taken = False


_Called = TypeVar("_Called", bound=Callable[..., Any])


def _outside_compiled(function: _Called) -> _Called:
    """A function at which graphs of torch.compile break."""
    return cast("_Called", disable(function))


def in_backward() -> bool:
    """Whether a backward runs in this thread, which may compute a forward again (checkpointing)."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


class BalancedBatch:
    """One microbatch as this rank computes it.

    Its rows are pieces of documents, of whatever rank gave them, one behind the other. A rank that
    gets none has a row of padding, since it takes part in every collective of a layer.

    A batch counts the calls of attention, and of recurrent layers, under its plan. `mean_loss`,
    `global_loss`, `gather`, `gather_rows` and `router_loss` refuse values of a forward of which
    some layer did not call under it, on all ranks alike and before anything is communicated. A
    forward lets values through once; further ones pass if they share memory with these, or their
    autograd graphs meet. The argument `attended` is the number of calls of a forward,
    where the configuration does not say it; 0 lets values through that none made, or that
    nothing links to their forward.

    Attributes:
        tokens: int64 [T].
        position_ids: int64 [T], of each token in its document.
        labels: int64 [T], -100 where a token has none, as the last of a document, and padding.
        others: the other tensors [T, ...] of the documents.
        num_tokens: rows of documents; those behind them are padding.
        plan: the plan of the microbatch, for all ranks.
        documents: numbers of the documents that this rank gave, in the order of `gather`. A rank's
            documents count from 0 over all steps; a planner may bring them in another microbatch or
            a later step. Of a step that its driver planned: numbers in its plan.
        rollouts: those that this rank gave, as trees; None: the step is of documents or trees.
        rollout_numbers: theirs. A rank's rollouts count from 0 over all steps, as documents do.
        accept: of the balancer.
    """

    rollouts: Rollouts | None = None
    rollout_numbers: tuple[int, ...] = ()
    as_losses: Losses = False  # what the forward at hand gives in place of logits (`hf.inputs`)

    def __init__(  # noqa: PLR0913  the balancer alone makes it
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        others: tuple[Tensor, ...],
        *,
        dealt: Dealt,
        loss_scale: LossScale,
        bind: _Bind,
        asked: dict[_Asked, None],
        accept: Collection[str] = (),
    ) -> None:
        self.tokens = tokens
        self.position_ids = position_ids
        self.labels = labels
        self.others = others
        self.num_tokens = sum(stop - start for _, start, stop in layout(dealt.plan, dealt.pool.rank).tolist())
        self.plan = dealt.plan
        self.documents = tuple(number for number, _ in dealt.documents)
        self._dealt = dealt
        self._scale = loss_scale
        self._bind = bind
        self.accept = accept
        self._bounds: dict[tuple[torch.dtype, torch.device, Mask, AttentionShape], Bound] = {}
        self._asked = asked  # by layers, of all batches so far
        # What stands for the batch in graphs of torch.compile (`in_graphs`), and by window, heads and
        # widths of a layer what says how much it receives; none: graphs break at attention.
        self.number: Tensor | None = None
        self.rooms: dict[tuple[int | None, int, int, int, int], Tensor] = {}
        self._recurrent = RecurrentBounds.of_plan(dealt.plan, dealt.pool.groups, tokens.device, dealt.state_wire)
        # since values were taken last: attention calls by layers of their model (0: not known), and
        # forwards begun
        self._calls: Counter[int] = Counter()
        self._begun = 0
        # the last forward, the forwards that let no values through yet, and memory of those that were
        self._forward = _Forward()
        self._untaken = 0
        self._taken: WeakSet[torch.UntypedStorage] = WeakSet()
        self._mark = object()  # under it, nodes of autograd graphs have their `_Forward`
        # what `by_rollout` gathered with a gradient and no loss was made of yet
        self._gathered: Tensor | None = None

    def __repr__(self) -> str:
        return (
            f"BalancedBatch({self.num_tokens} tokens of {self.plan.num_tokens} in {len(self.plan.lengths)} documents, "
            f"{self.plan.planner})"
        )

    @property
    def num_rows(self) -> int:
        """T: tokens and padding."""
        return len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest document, or path of a tree."""
        if isinstance(self.plan.mask, Forest):
            of = self.plan.mask.segments
            return int((of.stop - of.shift).max())
        return max(self.plan.lengths, default=0)

    @cached_property
    def in_full_segments(self) -> Tensor:
        """Whether each row is of a full segment, bool [T]."""
        full = np.zeros(self.num_rows, dtype=bool)
        if isinstance(self.plan.mask, Forest):
            of, rows = self.plan.mask.segments, self.layout()
            row, places = ranges(rows[:, Fragment.START], rows[:, Fragment.STOP])
            full[: self.num_tokens] = of.full[of.at(rows[row, Fragment.SEQ], places)]
        return torch.from_numpy(full).to(self.tokens.device)

    @cached_property
    def has_several_blocks(self) -> bool:
        """Whether a tree has several full segments."""
        trees = self.plan.mask.trees if isinstance(self.plan.mask, Forest) else ()
        return any(sum(segment.full for segment in tree) > 1 for tree in trees)

    @property
    def num_targets(self) -> Tensor:
        """Labels of the whole step, of all ranks, that count; a scalar."""
        return self._scale.num_targets

    def in_graphs(self, dtype: torch.dtype) -> None:
        """Let graphs of torch.compile hold the attention of this batch: look its plan up for all that
        layers of batches before asked for, at first for the plan's mask and tensors of `dtype`.
        """
        self.number = compiled.number_of(self)
        first: _Asked = (dtype, self.tokens.device, None, self.shape)
        for of_type, device, mask, shape in [*self._asked] or [first]:
            bound = self.bound(of_type, device, mask, shape)
            key = (mask and mask.window_size, shape.num_heads, shape.num_kv_heads, *shape.widths)
            self.rooms[key] = compiled.room_for(bound)
        for x in (self.tokens, self.position_ids, self.labels):
            compiled.mark_dynamic(x)

    def begin_forward(self) -> None:
        """Expect the attention of one more forward: `hf.inputs` were handed to a model."""
        self._begun += 1

    def count_call(self, layers: int | None, out: Tensor) -> None:
        """Count the call that made `out`, of a model with `layers`; None: of the balancer's."""
        # Inside a backward, checkpointing computes a forward again, which was counted.
        if in_backward():
            return
        layers = layers or self._dealt.layers or 0
        if not (self._calls[layers] % layers if layers else self._calls[layers]):
            self._forward = _Forward()
        self._calls[layers] += 1
        if out.grad_fn is not None:
            cast("Any", out.grad_fn).metadata[self._mark] = self._forward

    @_outside_compiled
    def check_attended(self, *values: Tensor, attended: int | None = None) -> None:
        """Refuse values of a forward whose attention did not reach the plan; `attended`: as above."""
        each = None if attended is None else at_least(0, "attended", attended)
        if each == 0:
            return
        partly: list[str] = []
        forwards = 0
        for layers, calls in self._calls.items():
            expected = each or layers or calls
            forwards += calls // expected if each or layers else max(1, self._begun)
            if calls % expected:
                partly.append(f"{calls} calls for {expected} layers")
        got = ", ".join(partly) or f"that of {forwards} forwards, and the inputs went to {self._begun}"
        if not partly and forwards >= self._begun and self._take(values, self._untaken + forwards):
            self._calls.clear()
            self._begun = 0
            return
        raise ConfigError(
            "expected attention under the batch's plan in every layer of the forward that made these values, got "
            f"{got if self._calls else 'none'}; what attends past the plan sees other documents. Call "
            "balanced_attention in every layer, or give a Transformers model attn_implementation=hf.register(). "
            "attended=N: a forward makes N calls; attended=0: no attention made the values, or one did whose values "
            "were taken before, and these were detached since, or computed under no_grad"
        )

    def _take(self, values: Sequence[Tensor], untaken: int) -> bool:
        """Whether values are further ones of a forward, or one of `untaken` lets them through."""
        memory = [each.untyped_storage() for each in values]
        forward, passed = self._forward_of(values)
        if forward is None and not any(each in self._taken for each in memory):
            if not untaken:
                return False
            # Reentrant checkpointing hides attention from the graph: then all of the graph is the
            # forward's.
            forward = self._forward if untaken == 1 else _Forward()
            for node in passed:
                node.metadata[self._mark] = forward
        if forward is not None and not forward.taken:
            untaken = max(0, untaken - 1)
            forward.taken = True
        self._untaken = untaken
        self._taken.update(memory)
        return True

    def _forward_of(self, values: Sequence[Tensor]) -> tuple[_Forward | None, set[Any]]:
        """The forward whose attention the graphs of values reach, if any, and the nodes on the way."""
        passed: set[Any] = set()
        coming: list[Any] = [each.grad_fn for each in values]
        while coming:
            node = coming.pop()
            # a parameter's node is one for all forwards
            if node is None or node in passed or "AccumulateGrad" in node.name():
                continue
            if (forward := node.metadata.get(self._mark)) is not None:
                return forward, passed
            passed.add(node)
            coming += [before for before, _ in node.next_functions]
        return None, passed

    def mean_loss(self, loss: Tensor, *, attended: int | None = None) -> Tensor:
        """The loss to call `backward` on: its gradients are those of the mean over all targets of
        the step.

        FSDP and DDP average gradients over ranks; the factor here undoes that. With several
        microbatches in a step, gradients are added up as always.

        Args:
            loss: the sum over this rank's targets (`reduction="sum"`), a scalar, fp32 or fp64: that
                of `logits.float()`.
            attended: see the class.

        Raises:
            ConfigError: not such a scalar; attention that did not reach the plan. In the backward:
                Accelerate has divided the loss by its accumulation steps.
        """
        _check_scalar(loss)
        self._check_documents()
        self.check_attended(loss, attended=attended)
        targets = self._scale.num_targets.clamp(min=1)
        mean = loss * (self._scale.num_ranks / targets).to(loss.dtype)
        _refuse_division(mean)
        return mean

    def global_loss(self, loss: Tensor, *, attended: int | None = None) -> Tensor:
        """The share of this microbatch in the step's mean loss over all ranks, to log. Collective.

        Arguments and errors as for `mean_loss`. The sum over a step's microbatches is the step's
        mean loss.
        """
        _check_scalar(loss)
        self._check_documents()
        self.check_attended(loss, attended=attended)
        total = loss.detach().double()
        if self._scale.num_ranks > 1:
            dist.all_reduce(total, group=self._scale.group)
        return total / self._scale.num_targets.clamp(min=1)

    def _check_documents(self) -> None:
        if self.rollouts is not None:
            raise ConfigError(
                "a mean over the targets of rollouts would count those that several have in common once; take "
                "weighted_nll, with the weights of the step, or by_rollout and sum_loss"
            )

    def weighted_nll(self, logits: Tensor, *, attended: int | None = None) -> Tensor:
        """The negative log likelihood of the rollouts' tokens, each times its weight; a loss to call
        `backward` on, as `sum_loss`. No collective.

        Args:
            logits: [T, V] or [1, T, V].
            attended: see the class.

        Raises:
            ConfigError: other rows; a step without weights; attention that did not reach the plan.
        """
        rows = self._rows_of(logits)
        if self.rollouts is None or not (self.others or not self.plan.lengths):
            raise ConfigError("expected a step of balancer.rollouts(rollouts, weights), got one without weights")
        self.check_attended(logits, attended=attended)
        # fp64 where the logits are; sums of half precision would be rounded.
        rows = rows if rows.dtype.itemsize >= torch.float32.itemsize else rows.float()
        nll = F.cross_entropy(rows, self.labels, reduction="none", ignore_index=IGNORED)
        weights = self.others[0] if self.others else nll.new_zeros(self.num_rows)
        return self._scale.num_ranks * (weights.to(nll.dtype) * nll).sum()

    def by_rollout(self, values: Tensor, *, attended: int | None = None) -> list[Tensor]:
        """Results of rows [n, ...] of each rollout that this rank gave, in order, along its path and
        with a gradient: at the place of a token what the row gave that predicts the next one, so
        `each[:-1]` belongs to `rollout[1:]`. Collective over the pool, and its backward too.

        Ask once a loss, with what it needs side by side ([T, k]), and take `sum_loss` of it.

        `values`: as for `gather`. ConfigError: as there; a step without rollouts; asked again before
        `sum_loss`.
        """
        if self.rollouts is None:
            raise ConfigError("expected a step of balancer.rollouts, got one of documents or trees; take gather_rows")
        if self._gathered is not None and values.requires_grad:
            raise ConfigError(
                "expected by_rollout once a loss, got a second call: ranks would wait for one another in the backward. "
                "Give it all values at once, side by side, and take sum_loss of the loss before the next one"
            )
        rows = self.gather_rows(values, attended=attended)
        if rows.requires_grad:
            self._gathered = rows
        rows = self.in_order(rows)
        index = torch.from_numpy(self.rollouts.rows).to(rows.device)
        return list(rows[index].split(list(self.rollouts.lengths)))

    def sum_loss(self, loss: Tensor | float = 0.0) -> Tensor:
        """The loss to call `backward` on, of this rank's loss of its rollouts: its gradients, once
        FSDP or DDP has averaged them, are those of the sum over all ranks.

        Every rank calls it, and the backward; one without rollouts gives 0. ConfigError: no scalar, or
        one of half precision.
        """
        if isinstance(loss, Tensor):
            _check_scalar(loss)
        rows, self._gathered = self._gathered, None
        # The backward of `by_rollout` runs on every rank, whatever its loss is made of.
        return self._scale.num_ranks * (torch.as_tensor(loss) if rows is None else loss + rows[:0].sum())

    def router_loss(self, logits: Sequence[Tensor], top_k: int, *, attended: int | None = None) -> Tensor:
        """The auxiliary loss of routers (Switch Transformer, equations 4-6; Transformers'
        `load_balancing_loss_func`) over the tokens of all ranks, as one process with all documents
        of the microbatch has it; the loss of each rank's own tokens averages to another one.

        Collective, the backward is not. Add it to `mean_loss`: its gradients, too, are right once
        FSDP or DDP has averaged them.

        Args:
            logits: of each layer's router, [T, experts]: a model's `router_logits`.
            top_k: experts of a token.
            attended: see the class.

        Raises:
            ConfigError: logits of other rows; attention that did not reach the plan.
        """
        for x in logits:
            if not isinstance(x, Tensor) or x.ndim != 2 or len(x) != self.num_rows:
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ConfigError(f"expected router logits [{self.num_rows}, experts] of each layer, got {got}")
        if not logits:
            raise ConfigError("expected the router logits of at least 1 layer, got none; set output_router_logits=True")
        self.check_attended(*logits, attended=attended)
        num_experts = logits[0].shape[1]
        own = torch.stack([x[: self.num_tokens].float().softmax(-1) for x in logits]).flatten(0, 1)
        weights = own.sum(0)
        totals = torch.stack([torch.zeros_like(weights), weights.detach(), torch.full_like(weights, len(own))]).double()
        # totals [3, experts]: tokens that chose each, sums of weights, tokens of all layers.
        chosen = own.topk(top_k, dim=-1).indices.flatten()
        totals[0].index_add_(0, chosen, torch.ones_like(chosen, dtype=totals.dtype))
        if self._scale.num_ranks > 1:
            dist.all_reduce(totals, group=self._scale.group)
        shares = totals[:2] / totals[2].clamp(min=1)
        whole = (num_experts * (shares[0] * shares[1]).sum()).float()
        # the value is the whole one; the gradient this rank's part, times the ranks of the average
        slope = (self._scale.num_ranks * num_experts * shares[0] / totals[2].clamp(min=1)).float()
        mine = (slope * weights).sum()
        return whole + (mine - mine.detach())

    def gather(self, values: Tensor, *, attended: int | None = None) -> list[Tensor]:
        """Per-token results [n, ...] of each of `documents`, back on the rank that gave them.
        Collective over the pool. For a loss on them take `gather_rows`.

        `values` [T, ...] or [1, T, ...], in the order of `tokens`, of one dtype on all ranks;
        `attended`: see the class. ConfigError: other rows; attention that did not reach the plan.
        """
        lengths = [length for _, length in self._dealt.documents]
        return list(self.gather_rows(values, attended=attended).split(lengths))

    def gather_rows(self, values: Tensor, *, attended: int | None = None) -> Tensor:
        """As `gather`, the documents one behind the other in one tensor, with a gradient.

        The backward is collective too, so every rank calls it, one that gave no document on the sum
        of its empty tensor.
        """
        rows = self._rows_of(values)
        self.check_attended(values, attended=attended)
        return exchanged(rows[: self.num_tokens], self._exchange.back, self._exchange.there)

    def to_rows(self, values: Tensor) -> Tensor:
        """Values [n, ...] of the tokens that `gather_rows` gives back, in its order and from the rank
        that it gives them to, at the rows that are computed: [T, ...], 0 at padding. Collective over
        the pool; no gradient. ConfigError: other rows.
        """
        expected = sum(length for _, length in self._dealt.documents)
        if not isinstance(values, Tensor) or not values.ndim or len(values) != expected:
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(f"expected one entry for each of {expected} tokens that this rank gave, got {got}")
        rows = self._exchange.there(values.detach())
        return torch.cat([rows, rows.new_zeros(self.num_rows - len(rows), *rows.shape[1:])])

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows of `gather_rows`, the documents in the order in which this rank gave them."""
        lengths = [length for _, length in self._dealt.documents]
        order = sorted(range(len(lengths)), key=self.documents.__getitem__)
        parts = rows.split(lengths)
        return rows if order == list(range(len(lengths))) else torch.cat([parts[at] for at in order])

    def _rows_of(self, values: Tensor) -> Tensor:
        """Values [T, ...] or [1, T, ...] as [T, ...]; ConfigError: they are neither."""
        if not isinstance(values, Tensor):
            raise ConfigError(f"expected a tensor with one entry for each row, got {type(values).__name__}")
        rows = values
        if rows.ndim and len(rows) != self.num_rows and len(rows) == 1:
            rows = rows[0]
        if not rows.ndim or len(rows) != self.num_rows:
            raise ConfigError(f"expected one entry for each of {self.num_rows} rows, got {list(values.shape)}")
        return rows

    def own_rows(self, values: Tensor) -> Tensor:
        """The rows of tokens of values [T, ...]; ConfigError: they have other rows."""
        return self._rows_of(values)[: self.num_tokens]

    def cumulative(self, values: Tensor) -> Tensor:
        """Sums [T] of integers [T] over the rows of each document up to each, wherever they lie.

        Collective over the pool. 0 at padding. ConfigError: the batch has trees.
        """
        if isinstance(self.plan.mask, Forest):
            raise ConfigError("expected documents, got trees: sums along their paths are not built")
        whole = self._exchange.back(values[: self.num_tokens])
        documents = whole.split([length for _, length in self._dealt.documents])
        sums = self._exchange.there(torch.cat([whole[:0], *(each.cumsum(0) for each in documents)]))
        return torch.nn.functional.pad(sums, (0, self.num_rows - self.num_tokens))

    @cached_property
    def _exchange(self) -> TokenExchange:
        return TokenExchange(self._dealt.lengths, [self.plan], self._dealt.pool)

    def layout(self, rank: int | None = None) -> Ints:
        """Where tokens lie: rows (document, start, stop) of a rank of the pool, default this one,
        in order. `document`: its number in the microbatch of all ranks, an index of `plan.lengths`.
        ConfigError: no such rank.
        """
        return megatron_balance.layout(self.plan, self._dealt.pool.rank if rank is None else rank)

    @property
    def shape(self) -> AttentionShape:
        """Of the heads of the balancer's model."""
        model = self._dealt.model
        return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, model.value_dim)

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """Loads and traffic of the plan, as `megatron-balance plan --json` has them."""
        return plan_statistics(self.plan, self._dealt.model)

    def imbalance(self) -> dict[str, dict[str, float]]:
        """Largest load of a rank over the mean, of `tokens` and of `attention` pairs; 1 is even.

        `as_read`: if every rank had kept its documents; `planned`: as they are dealt.
        """
        loads = {"tokens": "tokens_per_rank", "attention": "attention_pairs_per_rank"}
        return {
            "as_read": imbalance_before(self._dealt.lengths, self._dealt.pool),
            "planned": {
                name: imbalance_after(np.array([self.statistics[key]], dtype=np.float64)) for name, key in loads.items()
            },
        }

    def bound(
        self, dtype: torch.dtype, device: torch.device, mask: Mask | None = None, shape: AttentionShape | None = None
    ) -> Bound:
        """The plan looked up for this rank, for tensors of this type; made at the first call.
        `mask`: of the layer; None: that of the plan. `shape`: of the layer's heads; None: of the
        balancer's model. ConfigError: the plan was made for another mask, and not the causal one;
        heads of keys that do not divide those of queries.
        """
        plan, shape = self.plan, shape or self.shape
        self._asked[dtype, device, mask, shape] = None
        if shape.num_heads % shape.num_kv_heads:
            raise ConfigError(f"{shape.num_kv_heads} heads of keys do not divide {shape.num_heads} of queries")
        if (shape.num_heads, shape.num_kv_heads) != (plan.num_heads, plan.num_kv_heads):
            plan = replace(plan, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads)
        if mask is not None and mask != plan.mask:
            if plan.mask.window_size or plan.mask == FULL:
                raise ConfigError(
                    f"a layer attends under mask {mask.name}, and the batch was planned for {plan.mask.name} attention"
                    "; leave out Settings.mask, or give every layer that mask"
                )
            plan = under(plan, mask)
        key = (dtype, device, plan.mask, shape)
        if key not in self._bounds:
            if plan.num_heads != self.plan.num_heads or plan.num_kv_heads != self.plan.num_kv_heads:
                verify_plan(plan)
            self._bounds[key] = self._bind(plan, dtype, device, shape)
        return self._bounds[key]

    def recurrent(self, num_heads: int, halo: int) -> RecurrentBound:
        """The program of recurrent layers with so many heads of states, and of convolutions that read
        `halo` rows before a token, looked up for this rank; made at the first call. ConfigError: the
        batch has full segments, or is planned for full attention.
        """
        if self.plan.mask == FULL:
            raise ConfigError(
                "expected a batch under causal attention for a recurrent layer, got one under full attention; leave "
                "out Settings.mask"
            )
        return self._recurrent.of(num_heads, halo)


def _check_scalar(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        got = f"{list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f'expected the sum over this rank\'s targets, a scalar tensor (reduction="sum"), got {got}')
    if loss.dtype.itemsize < torch.float32.itemsize:  # its gradient, the factor, would be rounded to that type
        raise ConfigError(
            f"expected the sum over this rank's targets in fp32, got {loss.dtype}; take the loss of logits.float(), of "
            "all rows at once or in chunks of them"
        )


def _refuse_division(loss: Tensor) -> None:
    """Refuse, in the backward, a division by Accelerate's accumulation steps."""
    # The mean is over the targets of all microbatches already.
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.GradientState._shared_state or not loss.requires_grad:
        return
    steps = accelerate.GradientState().num_steps

    def check(gradient: Tensor) -> None:
        if steps > 1 and float(gradient) == float(torch.ones_like(gradient) / steps):
            raise ConfigError(
                f"expected the gradient of mean_loss's value to be 1, got 1 / {steps}: accelerator.backward divides by "
                f"gradient_accumulation_steps {steps}, and mean_loss is the step's mean already; call loss.backward(), "
                "or give Accelerator gradient_accumulation_steps=1"
            )

    loss.register_hook(check)


_Way: TypeAlias = Callable[[Tensor], Tensor]


@_outside_compiled
def exchanged(values: Tensor, way: _Way, inverse: _Way) -> Tensor:
    """`way(values)`, a collective, whose gradient is `inverse` of the output's, another one."""
    return _Exchanged.apply(values, way, inverse)


class _Exchanged(torch.autograd.Function):
    """One collective forward, its inverse on gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, way: _Way, inverse: _Way) -> Tensor:
        ctx.inverse = inverse
        return way(values)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.inverse(grad), None, None


def balanced_attention(  # noqa: PLR0913  three tensors and how to attend
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: BalancedBatch,
    scale: float | None = None,
    *,
    window: int | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    layers: int | None = None,
    own_heads: bool = False,
) -> Tensor:
    """Attention of this rank's queries within their documents, wherever the keys lie.

    Differentiable. Collective: every rank of the pool calls it in every layer, in the forward, in
    the backward, and where checkpointing computes a forward again. Under `torch.compile` it is one
    operator of the graph with `Settings(compiled=True)`; without, the graph breaks here. Rows of
    padding give zeros.

    Args:
        q: [T, H, D], or [1, T, H, D]; T as in `batch.tokens`.
        k: [T, G, D]; G divides H. Positions are in it already.
        v: [T, G, V]; V as the model's `value_dim`, D where it has none.
        batch: of the model's inputs.
        scale: of the scores; default 1 / sqrt(D).
        window: keys that a query sees, its own the last; None: all that the batch's mask shows.
        sink: [H], a logit of each head beside the keys of every query, without a value.
        softcap: what is left of a score is softcap * tanh(score / softcap); 0: all of it.
        layers: calls of this that a forward makes, where the model is another than the balancer's,
            as a reference model; the batch counts them (`BalancedBatch`).
        own_heads: let this layer have other heads, or other widths, than the balancer's model, for
            which plans are made.

    Returns:
        The output, in the shape of `q`, V wide.

    Raises:
        ConfigError: the tensors do not have the batch's rows, or other heads than the balancer's
            model, or are on several devices; a window under another mask than the causal one; a
            softcap below 0, or that no kernel here has.
    """
    if isinstance(batch, BalancedBatch) and batch.number is not None:
        room = batch.rooms.get((window, q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1]))
        if room is not None:
            how = (scale, window, float(softcap), layers, own_heads)
            return compiled.attend(batch.number, room, q, k, v, sink, how)
    return _attend(q, k, v, batch, scale, window=window, sink=sink, softcap=softcap, layers=layers, own_heads=own_heads)


@_outside_compiled
def _attend(  # noqa: PLR0913  as `balanced_attention`
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: BalancedBatch,
    scale: float | None,
    *,
    window: int | None,
    sink: Tensor | None,
    softcap: float,
    layers: int | None,
    own_heads: bool,
) -> Tensor:
    if not isinstance(batch, BalancedBatch):
        raise ConfigError(
            f"expected the BalancedBatch that the balancer returned, got {type(batch).__name__}; hand it through the "
            "model's forward to its attention"
        )
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise ConfigError(f"{name}: expected a tensor [rows, heads, head_dim], got {type(x).__name__}")
    if not q.device == k.device == v.device == batch.tokens.device:
        raise ConfigError(
            f"expected q, k and v on the batch's device {batch.tokens.device}, got {q.device}, {k.device} and "
            f"{v.device}"
        )
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) for x in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"expected q, k and v of one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    rows = [x[0] if x.ndim == 4 and len(x) == 1 else x for x in (q, k, v)]
    for name, x in zip("qkv", rows, strict=True):
        if x.ndim != 3 or len(x) != batch.num_rows:
            raise ConfigError(
                f"{name}: expected [rows, heads, head_dim] with the {batch.num_rows} rows of batch.tokens, got "
                f"{list(x.shape)}"
            )
    if not 0 <= softcap < math.inf:
        raise ConfigError(f"softcap: expected a number above 0, or 0 for none, got {softcap}")
    own = AttentionShape(rows[0].shape[1], rows[1].shape[1], rows[0].shape[2], rows[2].shape[2])
    shape = replace(own if own_heads else batch.shape, softcap=float(softcap))
    mask = None if window is None else SlidingWindow(window)
    bound = batch.bound(q.dtype, q.device, mask, shape)
    owned = [x[: bound.num_tokens] for x in rows]
    with torch.autocast(device, enabled=False):
        out = attention.balanced_attention(owned[0], owned[1], owned[2], bound, scale, hooked=True, sink=sink)
    out = F.pad(out, (0, 0, 0, 0, 0, batch.num_rows - bound.num_tokens))
    batch.count_call(layers, out)
    return out.view(*q.shape[:-1], v.shape[-1])


@_outside_compiled
def balanced_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    batch: BalancedBatch,
    *,
    alone: bool = False,
    layers: int | None = None,
) -> Tensor:
    """The causal convolution of every channel within its document, wherever the tokens before lie.

    x [T, D]; weight [D, W], the token's own tap last; bias [D]. Differentiable and collective, as
    `balanced_attention`. Rows of padding give zeros. `alone`: no recurrence follows in its layer, so
    the batch counts this call; `layers`: as there. ConfigError: other rows; as
    `BalancedBatch.recurrent`.
    """
    rows = batch.own_rows(x)
    out = causal_convolution(rows, weight, bias, batch.recurrent(0, weight.shape[1] - 1))
    out = F.pad(out, (0, 0, 0, batch.num_rows - len(rows)))
    if alone:
        batch.count_call(layers, out)
    return out


@_outside_compiled
def balanced_recurrence(
    recurrence: AffineRecurrence, batch: BalancedBatch, *inputs: Tensor, layers: int | None = None
) -> Tensor:
    """Outputs [T, H, V] of a recurrence over `inputs` [T, H, ...] within each document, whose state
    goes on from piece to piece wherever these lie (`runtime.kernels.recurrence`).

    Differentiable and collective, as `balanced_attention`; the batch counts it as a call of that.
    Rows of padding give zeros. `layers`: as there. ConfigError: as for `balanced_convolution`.
    """
    rows = [batch.own_rows(x) for x in inputs]
    out = recurrent_layer(recurrence, batch.recurrent(rows[0].shape[1], 0), *rows)
    out = F.pad(out, (0, 0, 0, 0, 0, batch.num_rows - len(out)))
    batch.count_call(layers, out)
    return out

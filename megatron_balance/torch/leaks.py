"""Do documents stay apart in a model? By what its outputs do, whatever its layers are called."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from megatron_balance.errors import ConfigError
from megatron_balance.torch.balancer import SequenceBalancer
from megatron_balance.torch.batch import BalancedBatch

LONG_MEMORY = -5.0
"""Of `A_log`, while a model is checked: as drawn, states are forgotten within a few tokens."""


@dataclass(frozen=True)
class Leaks:
    """Figures of a check, largest of all ranks, over the largest output.

    `leak`: change of a document's outputs when others change, before and behind it. `alone`: distance
    from those of the document by itself.
    """

    leak: float
    alone: float


@dataclass
class _CheckRun:
    # A forward of documents of which those were changed whose numbers have a bit: its batch, outputs
    # and, where they were asked for, what each module took and gave.
    batch: BalancedBatch
    outputs: Tensor
    modules: list[tuple[str, list[Tensor], Tensor]] = field(default_factory=list[tuple[str, list[Tensor], Tensor]])


class LeakCheck:
    """A check of `model` on all ranks of `balancer`. `forward`: outputs [T, ...] of a batch; `alone`:
    of one document [n]. Tokens are drawn from `tokens`.
    """

    def __init__(
        self,
        model: nn.Module,
        balancer: SequenceBalancer,
        forward: Callable[[BalancedBatch], Tensor],
        alone: Callable[[Tensor], Tensor],
        tokens: range,
    ) -> None:
        self.model, self.balancer, self.forward, self.alone, self.tokens = model, balancer, forward, alone, tokens
        rank, size = balancer.pool.rank, balancer.pool.size
        # One of all has pieces on several ranks under most planners.
        lengths = (5, 9, 64 * size if not rank else 6)
        draw = torch.Generator().manual_seed(rank)
        self.documents = [torch.randint(len(tokens), (n,), generator=draw) for n in lengths]
        self.numbers = range(rank * len(lengths), (rank + 1) * len(lengths))
        self.num_bits = (size * len(lengths) - 1).bit_length()

    @torch.no_grad()
    def run(self) -> Leaks:
        """Every document is held against changes of every other one. ConfigError: outputs change with
        those of another document, and in which module; they are not those of the document alone.
        """
        with ExitStack() as around:
            around.enter_context(torch.random.fork_rng())
            around.enter_context(self.balancer.of_another_form())
            around.enter_context(_long_memory(self.model))
            first = self._of()
            # Two documents differ in a bit of their numbers: each is kept while the other changes.
            changes = [(bit, kept) for bit in range(self.num_bits) for kept in (0, 1)]
            leaks = self._largest([_apart(first, self._of(change)) for change in changes])
            largest = first.outputs.abs().max().item()
            (largest,) = self._largest([largest])
            leak, epsilon = max(leaks) / largest, torch.finfo(first.outputs.dtype).eps
            # The rows of an expert, and so its rounding, depend on all documents.
            rounded = self.balancer.device.type != "cpu" or bool(self.balancer.model.num_experts)
            if leak > (64 * epsilon if rounded else 0.0):
                raise ConfigError(self._where(changes[leaks.index(max(leaks))], leak))
            by_document = self.balancer.gather(first.outputs)
            own = [self.alone(self._tokens(each)) for each in self.documents]
            (alone,) = self._largest([max(float((a - b).abs().max()) for a, b in zip(by_document, own, strict=True))])
        found = Leaks(leak, alone / largest)
        if found.alone > sqrt(epsilon) and not self.balancer.model.num_experts:
            raise ConfigError(
                f"{type(self.model).__name__}: outputs of a document are {found.alone:.1e} of the largest off those "
                "of it alone: a layer loses what comes before a piece of it. Use a model that hf.register takes"
            )
        return found

    def _tokens(self, drawn: Tensor) -> Tensor:
        return (drawn + self.tokens.start).to(self.balancer.device)

    def _of(self, change: tuple[int, int] | None = None, *, watched: bool = False) -> _CheckRun:
        documents = self.documents
        if change is not None:
            bit, kept = change
            changed = [(number >> bit & 1) != kept for number in self.numbers]
            moved = [(each + 1 + len(self.tokens) // 2) % len(self.tokens) for each in documents]
            documents = [b if is_changed else a for a, b, is_changed in zip(documents, moved, changed, strict=True)]
        tokens = [self._tokens(each).cpu() for each in documents]
        shifts = self.balancer.settings.shift_labels
        batch = self.balancer.evaluate(tokens if shifts else [(each, each) for each in tokens])
        torch.manual_seed(0)  # dropout hides the same
        seen: list[tuple[str, list[Tensor], Tensor]] = []
        with _watched(self.model, batch, seen) if watched else ExitStack():
            return _CheckRun(batch, self.forward(batch), seen)

    def _largest(self, numbers: list[float]) -> list[float]:
        return self.balancer.largest(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def _where(self, change: tuple[int, int], leak: float) -> str:
        """Name the first module that gives other rows for the same ones."""
        one, two = self._of(watched=True), self._of(change, watched=True)
        kept, found = _kept(one, two), len(one.modules)
        for at, ((_, ins, out), (_, others, other)) in enumerate(zip(one.modules, two.modules, strict=True)):
            same = all(torch.equal(a[:, kept], b[:, kept]) for a, b in zip(ins, others, strict=True))
            if same and ins and not torch.equal(out[:, kept], other[:, kept]):
                found = at
                break
        (at,) = self._largest([-found])  # of the rank that found it first
        name = one.modules[-int(at)][0] if -at < len(one.modules) else "a module that was not seen"
        return (
            f"{type(self.model).__name__}: outputs of a document change by {leak:.1e} of the largest when another "
            f"document does, first in {name}: it mixes tokens past the plan. Use a model whose layers attend through "
            "Transformers' AttentionInterface, or are recurrent and hf.register takes them"
        )


def _kept(one: _CheckRun, two: _CheckRun) -> Tensor:
    # Rows of documents that did not change: all tokens of one that did are others.
    if not torch.equal(one.batch.position_ids, two.batch.position_ids):
        raise ConfigError(
            "expected one plan for documents of the same lengths, got two; give the check another planner"
        )
    kept = one.batch.tokens == two.batch.tokens
    kept[one.batch.num_tokens :] = False
    return kept


def _apart(one: _CheckRun, two: _CheckRun) -> float:
    kept = _kept(one, two)
    return float((one.outputs[kept] - two.outputs[kept]).abs().max()) if bool(kept.any()) else 0.0


@contextmanager
def _long_memory(model: nn.Module) -> Iterator[None]:
    held = [(x, x.detach().clone()) for name, x in model.named_parameters() if name.endswith("A_log")]
    try:
        for x, _ in held:
            x.fill_(LONG_MEMORY)
        yield
    finally:
        for x, before in held:
            x.copy_(before)


@contextmanager
def _watched(model: nn.Module, batch: BalancedBatch, seen: list[tuple[str, list[Tensor], Tensor]]) -> Iterator[None]:
    """Note what modules take and give, [1, T, ...], as they end: inner ones before outer ones."""

    def of_rows(given: object) -> list[Tensor]:
        each = given if isinstance(given, tuple | list) else (given,)
        found = [x for x in each if isinstance(x, Tensor) and x.ndim > 2 and x.shape[:2] == (1, batch.num_rows)]
        return [x.detach() for x in found]

    def note(name: str, _: nn.Module, args: Any, named: dict[str, Any], out: Any) -> None:
        if rows := of_rows(out):
            seen.append((name, of_rows([*args, *named.values()]), rows[0]))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            said = f"{name} ({type(module).__name__})"
            hooks.enter_context(module.register_forward_hook(partial(note, said), with_kwargs=True))
        yield

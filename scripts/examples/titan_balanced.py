"""Balanced attention in torchtitan, without a patch: an attention module and a trainer (titan.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.protocols.module import Module  # pyright: ignore[reportMissingImports]
from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

from megatron_balance.torch import BalancedBatch, SequenceBalancer, Settings, balanced_attention


class BalancedAttention(Module):
    """Inner attention of `GQAttention`: the batch comes in the place of torchtitan's mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """No settings."""

    def __init__(self, config: Config) -> None:  # noqa: ARG002  torchtitan's signature
        super().__init__()

    def forward(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *,
        attention_masks: BalancedBatch,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention of rows [T, heads, head dim]. torchtitan knows the arguments by these names."""
        return balanced_attention(q_TNH, k_TNH, v_TNH, attention_masks, scale)


class BalancedTrainer(Trainer):
    """torchtitan's trainer; each data-parallel rank gives the documents that it read."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, and the planner's name and options."""

        planner: str = "zeppelin"
        planner_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    balancer: SequenceBalancer | None = None

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Deal a microbatch: the rows that this rank computes, their labels, positions and batch."""
        if self.balancer is None:
            config: Any = self.config
            self.balancer = make_balancer(self, config.planner, config.planner_options)
        batch = self.balancer(documents(input_dict["input"], labels, input_dict["positions"]))
        self.ntokens_seen += batch.num_tokens
        return batch.tokens, batch.labels, {"positions": batch.position_ids, "attention_masks": batch}


def make_balancer(trainer: Trainer, planner: str, options: dict[str, Any]) -> SequenceBalancer:
    """The balancer of a trainer's data-parallel ranks."""
    dims = trainer.parallel_dims
    if dims.tp_enabled or dims.pp_enabled or dims.cp_enabled:
        raise ValueError(
            "expected data parallelism alone (FSDP, HSDP): the balancer does what context parallelism does"
        )
    mesh = dims.get_mesh("batch") if dims.dp_enabled else None
    settings = Settings(shift_labels=False, device=trainer.device)
    return SequenceBalancer.for_model(sizes(trainer.model_config), planner, mesh, settings=settings, **options)


def sizes(model: Any) -> dict[str, Any]:
    """Heads and sizes of a decoder's configuration, and what else its attention says in numbers and
    words, so that the balancer refuses by name what it does not know.
    """
    attention = model.first_attention
    kinds = {type(getattr(layer, "attention", None)).__qualname__ for layer in model.layers}
    if kinds != {"GQAttention.Config"}:
        raise ValueError(f"expected layers with GQAttention alone, got {', '.join(sorted(kinds))}")
    said: dict[str, list[Any]] = {}
    for layer in model.layers:
        for name in (each.name for each in dataclasses.fields(layer.attention)):
            value, others = getattr(layer.attention, name), said.setdefault(name, [])
            if isinstance(value, (bool, int, float, str)) and value not in others:
                others.append(value)
    return {
        **{name: each if len(each) > 1 else each[0] for name, each in said.items() if each},
        "num_heads": attention.n_heads,
        "num_kv_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "num_layers": len(model.layers),
        "hidden_size": model.dim,
        "vocab_size": model.vocab_size,
    }


def documents(tokens: Tensor, labels: Tensor, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    """The documents (tokens, labels) of packed rows [T]: each begins at position 0."""
    starts = torch.nonzero(positions == 0).flatten().tolist()
    cuts = sorted({0, *starts, len(tokens)})
    lengths = [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
    return list(zip(tokens.split(lengths), labels.split(lengths), strict=True))


def balanced(config: Trainer.Config, planner: str = "zeppelin", **options: Any) -> BalancedTrainer.Config:
    """A run of torchtitan's, balanced: for a function in a `config_registry.py` of your own."""
    assert config.model_spec is not None
    for layer in config.model_spec.model.layers:  # pyright: ignore[reportAttributeAccessIssue]
        layer.attention.inner_attention = BalancedAttention.Config()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    made = BalancedTrainer.Config(**fields, planner=planner, planner_options=options)
    made.parallelism.spmd_backend = "partial_dtensor"  # the other one wants to type what a trainer feeds
    made.training.disable_cuda_graphs = True  # rows differ from step to step
    made.compile.enable = False  # torchtitan compiles whole layers as one graph; attention breaks it
    return made

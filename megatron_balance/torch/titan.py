"""torchtitan by its own plug points: an override of attention's configuration, and a trainer and a
validator whose `post_dataloading_process` deals what the ranks read.

    def llama3_8b_balanced():  # in a config_registry of your own
        return balanced(llama3_8b(), planner="zeppelin", tokens_per_rank=8192)

Written for torchtitan 0.3 (docs/titan.md).
"""

import dataclasses
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.validate import Validator
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import BaseAttention, GQAttention
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from megatron_balance.errors import ConfigError
from megatron_balance.torch.balancer import SequenceBalancer
from megatron_balance.torch.batch import BalancedBatch, balanced_attention
from megatron_balance.torch.settings import Settings

OVERRIDES = [f"{__name__}.{name}" for name in ("attention", "checkpointing")]


def _config(base: type) -> Any:
    """A class of configurations like `base`: torchtitan finds a class by that of its configuration."""
    return make_dataclass("Config", [], bases=(base,), kw_only=True, slots=True)


class TitanAttention(Module):
    """Inner attention of a layer: the batch comes in the place of torchtitan's mask."""

    Config = _config(Module.Config)

    def __init__(self, config: Module.Config) -> None:
        super().__init__()
        del config

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BalancedBatch,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention of rows [1, T, heads, width]; torchtitan knows the arguments by these names."""
        return balanced_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)


@override(target=BaseAttention.Config, description="attention across ranks by a plan")
def attention(config: BaseAttention.Config) -> BaseAttention.Config:
    """The configuration of a layer's attention, its inner one balanced."""
    if type(config) not in (GQAttention.Config, LatentAttention.Config):
        raise ConfigError(
            f"expected layers with torchtitan's GQAttention or DeepSeek-V3's attention, got "
            f"{type(config).__qualname__}, which was not tried"
        )
    inner = TitanAttention.Config(sharding_config=config.inner_attention.sharding_config)
    return dataclasses.replace(config, inner_attention=inner)


class SavingAC(SelectiveAC):
    """torchtitan's selective checkpointing, which saves what attention gave, too: computed again, it
    would be sent again.
    """

    Config = _config(SelectiveAC.Config)

    def get_save_ops(self) -> set[Any]:
        """torchtitan's, and attention."""
        return super().get_save_ops() | {torch.ops.megatron_balance.attention.default}


@override(target=SelectiveAC.Config, description="selective checkpointing that saves balanced attention")
def checkpointing(config: SelectiveAC.Config) -> SelectiveAC.Config:
    """The configuration of checkpointing, with attention among what is saved."""
    return derive(config, SavingAC.Config)


class TitanTrainer(Trainer):
    """torchtitan's trainer; each data-parallel rank gives the documents that it read."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, and the planner's name and options."""

        planner: str = "zeppelin"
        planner_options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        """Build torchtitan's trainer, then the balancer of its ranks."""
        super().__init__(config)
        dims = self.parallel_dims
        if dims.tp_enabled or dims.pp_enabled or dims.cp_enabled or dims.ep_enabled:
            raise ConfigError(
                "expected data parallelism alone (FSDP, HSDP), got tensor, pipeline, context or expert parallelism; "
                "the balancer does what context parallelism does"
            )
        mesh = dims.get_mesh("batch") if dims.dp_enabled else None
        # torchtitan's chunked loss cuts a rank's rows into equal chunks
        chunks: int = getattr(config.loss, "num_chunks", 1)
        settings = Settings(shift_labels=False, compiled=True, device=self.device, row_multiple=chunks)
        self.balancer = SequenceBalancer.for_model(
            sizes(self.model_config), config.planner, mesh, settings=settings, **config.planner_options
        )
        if config.validator.enable:
            validator: Any = self.validator
            validator.balancer = self.balancer

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Deal a microbatch: the rows that this rank computes, their labels, positions and batch."""
        batch = self.balancer(documents(input_dict, labels))
        self.ntokens_seen += batch.num_tokens
        return _arguments(batch)

    def close(self) -> None:
        """End the balancer, too."""
        self.balancer.close()
        super().close()


class TitanValidator(Validator):
    """torchtitan's validator, on the trainer's balancer."""

    Config = _config(Validator.Config)

    balancer: SequenceBalancer

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[torch.nn.Module]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Deal a microbatch that is not trained."""
        del model_parts
        return _arguments(self.balancer.evaluate(documents(input_dict, labels)))


def documents(input_dict: dict[str, Tensor], labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The documents (tokens, labels) of packed rows [B, T]: each begins at position 0, and none goes
    on in the next row. ConfigError: further inputs, as of images.
    """
    if others := input_dict.keys() - {"input", "positions"}:
        raise ConfigError(f"expected tokens and positions of a dataloader of text, got {', '.join(sorted(others))} too")
    found: list[tuple[Tensor, Tensor]] = []
    for tokens, of_tokens, positions in zip(input_dict["input"], labels, input_dict["positions"], strict=True):
        starts = torch.nonzero(positions == 0).flatten().tolist()
        cuts = sorted({0, *starts, len(tokens)})
        lengths = [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]
        found += zip(tokens.split(lengths), of_tokens.split(lengths), strict=True)
    return found


def _arguments(batch: BalancedBatch) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Rows [1, T] of a batch as a trainer hands them to its model and its loss."""
    return batch.tokens[None], batch.labels[None], {"positions": batch.position_ids[None], "attention_masks": batch}


def sizes(model: Any) -> dict[str, Any]:
    """Heads and sizes of a decoder's configuration, and what else its attention says in numbers and
    words, so that the balancer refuses by name what it does not know.
    """
    attention, said = model.first_attention, {}
    for layer in model.layers:
        for name in (each.name for each in dataclasses.fields(layer.attention)):
            value, others = getattr(layer.attention, name), said.setdefault(name, [])
            if isinstance(value, (bool, int, float, str)) and value not in others:
                others.append(value)
    kv_heads = getattr(attention, "n_kv_heads", None)
    head_dim = getattr(attention, "head_dim", None)
    return {
        **{name: each if len(each) > 1 else each[0] for name, each in said.items() if each},
        "num_heads": attention.n_heads,
        "num_kv_heads": kv_heads or attention.n_heads,
        **({} if hasattr(attention, "kv_lora_rank") else {"head_dim": head_dim or model.dim // attention.n_heads}),
        "num_layers": len(model.layers),
        "hidden_size": model.dim,
        "vocab_size": model.vocab_size,
    }


def balanced(config: Trainer.Config, planner: str = "zeppelin", **options: Any) -> TitanTrainer.Config:
    """A run of torchtitan's, balanced; `options`: of the planner, such as `tokens_per_rank`."""
    given = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    made = TitanTrainer.Config(**given, planner=planner, planner_options=options)
    made.override.imports = [*made.override.imports, *OVERRIDES]
    made.validator = derive(config.validator, TitanValidator.Config)
    made.training.disable_cuda_graphs = True  # rows differ from step to step
    made.parallelism.spmd_backend = "partial_dtensor"  # the others want to type what a trainer feeds
    return made

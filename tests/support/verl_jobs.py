"""verl's engines with plans on the ranks of a pool, and their calls on one rank.

Stand-ins call as verl 0.10.0.dev does (`tools.verl_check` holds them against its source): a dictionary
for its TensorDict, nested results, losses scaled by the ranks that FSDP averages over.
"""

import runpy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import ConfigError
from tests.support.pool import World

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
VOCABULARY, CLIP, COEFFICIENT = 64, 0.2, 0.1
STAGES = 2  # whose schedule wants as many microbatches
LENGTHS = (120, 3, 47, 9, 88, 30, 5, 61, 14, 26)


class EngineRegistry:
    engines: dict[tuple[str, str, str, str], type[Any]] = {}  # noqa: RUF012  as verl has it

    @classmethod
    def register(cls, model_type: str, backend: Any, device: Any = "cuda", vendor: Any = None) -> Any:
        def decorator(engine_class: type[Any]) -> type[Any]:
            cls.engines |= {(model_type, name, on, vendor): engine_class for name in backend for on in device}
            return engine_class

        return decorator


class Metric:
    def __init__(self, aggregation: str, value: float) -> None:
        self.aggregation, self.values = aggregation, [value]

    def extend(self, values: Any) -> None:
        self.values += values.values

    def aggregate(self) -> float:
        return sum(self.values)


class FSDPEngineWithLMHead:
    def __init__(self, model_config: Any, engine_config: Any) -> None:
        self.model_config, self.engine_config = model_config, engine_config
        self._autocast_dtype = torch.float32
        self.synced: list[bool] = []

    def initialize(self) -> None:
        self.module = self._build_module()

    def _build_module(self) -> torch.nn.Module:
        return model_of(self.model_config.hf_config)

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Any:
        self.synced.append(is_last_micro_batch)
        return nullcontext()

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        raise NotImplementedError


class MegatronEngine:
    def __init__(self, model_config: Any, engine_config: Any) -> None:
        self.model_config, self.engine_config, self.tf_config = model_config, engine_config, SimpleNamespace()
        self.module = [model_of(model_config.hf_config)]
        self.tokens: list[int] = []

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def _routed_num_tokens(self, data: Any) -> Tensor:
        return data["input_ids"].offsets()[-1]

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        raise NotImplementedError


class MegatronEngineWithLMHead(MegatronEngine):
    def forward_step(
        self, batch_iter: Any, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
    ) -> Any:
        del logits_processor_func
        batch = next(batch_iter)
        self.tokens.append(len(batch["input_ids"].values()))
        columns = zip(*results_of(model, batch["input_ids"].unbind()), strict=True)
        output = dict(zip(("log_probs", "entropy"), map(nested, map(list, columns)), strict=True))
        return output, partial(postprocess_micro_batch_func, data=batch)

    def postprocess_micro_batch_func(
        self, output: Any, data: Any, forward_only: bool, loss_function: Any, local_cp_size: Any = None
    ) -> Any:
        del forward_only, local_cp_size
        loss, metrics = torch.ones(()), {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=output, data=data, dp_group=self.get_data_parallel_group())
        told = {"loss": loss.detach().item(), "metrics": metrics, "model_output": output}
        return loss * data["num_micro_batch"], told


def forward_backward_no_pipelining(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> list[Any]:
    """Megatron's, which divides a loss by the microbatches."""
    assert (seq_length, micro_batch_size) == (1, 1)
    told: list[Any] = []
    for _ in range(num_microbatches):
        output, loss_function = forward_step_func(data_iterator, model[0])
        loss, reduced = loss_function(output)
        if not forward_only:
            (loss / num_microbatches).backward()
        told.append(reduced)
    return told


def make_batch_generator(batches: Any, vpp_size: int) -> Any:
    return iter(batches)


def assign_non_tensor(tensor_dict: dict[str, Any], **kwargs: Any) -> None:
    tensor_dict.update(kwargs)


def get_non_tensor_data(data: dict[str, Any], key: str, default: Any) -> Any:
    return data.get(key, default)


def index_select_tensor_dict(batch: dict[str, Any], indices: list[int]) -> dict[str, Any]:
    def chosen(value: Any) -> Any:
        return nested([value.unbind()[at] for at in indices]) if isinstance(value, Tensor) else value

    return {name: chosen(value) for name, value in batch.items()}


def concat_tensordict(data: list[dict[str, Any]]) -> dict[str, Any]:
    def joined(name: str, value: Any) -> Any:
        return nested([row for each in data for row in each[name].unbind()]) if isinstance(value, Tensor) else value

    return {name: joined(name, value) for name, value in data[0].items()}


def postprocess_batch_func(output_lst: Any, indices: Any, data: Any) -> dict[str, Any]:
    order = [at for own in indices for at in own]
    found: dict[str, list[Tensor]] = {}
    for output in output_lst:
        for name, values in output.get("model_output", {}).items():
            found.setdefault(name, []).extend(values.unbind())
    results = {name: nested([each[order.index(at)] for at in range(len(order))]) for name, each in found.items()}
    metrics: dict[str, Metric] = {}
    for name, told in (pair for each in output_lst for pair in each.get("metrics", {}).items()):
        if metrics.setdefault(name, told) is not told:
            metrics[name].extend(told)
    losses = [each["loss"] for each in output_lst if "loss" in each]
    return {"model_output": results, "loss": losses, "metrics": metrics}


def modules() -> dict[str, ModuleType]:
    """verl's and Megatron's modules that the scripts ask for."""
    megatron: dict[str, Any] = {
        "is_pipeline_last_stage": lambda **_: True,
        "get_virtual_pipeline_model_parallel_world_size": lambda: None,
        "get_pipeline_model_parallel_world_size": lambda: STAGES,
    }
    made: dict[str, dict[str, Any]] = {
        "megatron.core.parallel_state": megatron,
        "megatron.core.pipeline_parallel": {"get_forward_backward_func": lambda: forward_backward_no_pipelining},
        "verl.workers.engine.megatron.transformer_impl": {"MegatronEngineWithLMHead": MegatronEngineWithLMHead},
        "verl.utils.megatron.pipeline_parallel": {"make_batch_generator": make_batch_generator},
        "verl.utils.device": {"get_device_id": lambda: "cpu"},
        "verl.workers.engine.fsdp.transformer_impl": {"FSDPEngineWithLMHead": FSDPEngineWithLMHead},
        "verl.workers.engine.base": {"EngineRegistry": EngineRegistry},
        "verl.workers.engine.utils": {"postprocess_batch_func": postprocess_batch_func},
        "verl.utils.tensordict_utils": {
            each.__name__: each
            for each in (assign_non_tensor, get_non_tensor_data, index_select_tensor_dict, concat_tensordict)
        },
    }
    found: dict[str, ModuleType] = {}
    for name, members in made.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(members)
    return found


def nested(tensors: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def config() -> Any:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, max_position_embeddings=512, **sizes)


def model_of(settings: Any) -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(settings)


def samples() -> list[dict[str, Tensor]]:
    """Of each sample its tokens, those that are trained, old log-probabilities and its advantage."""
    draw = torch.Generator().manual_seed(1)
    made: list[dict[str, Tensor]] = []
    for length in LENGTHS:
        trained = torch.arange(length) >= min(2, length - 1)
        made.append(
            {
                "input_ids": torch.randint(VOCABULARY, (length,), generator=draw),
                "loss_mask": trained.long(),
                "old": torch.randn(length, generator=draw) * 0.2 - 4.1,
                "advantages": torch.randn(1, generator=draw).expand(length).contiguous(),
            }
        )
    return made


def loss_of(model_output: dict[str, Any], data: dict[str, Any], dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """Clipped ratios and entropies over the tokens of all ranks, as verl's `ppo_loss` scales them."""
    total = torch.zeros(())
    fields = (data["old"], data["advantages"], data["loss_mask"])
    outputs = (model_output["log_probs"], model_output["entropy"])
    for logp, entropy, old, advantages, trained in zip(*(each.unbind() for each in (*outputs, *fields)), strict=True):
        # The row before a token is about it.
        ratio = (logp[:-1] - old[1:]).exp()
        gain = torch.minimum(ratio * advantages[1:], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[1:])
        total = total - ((gain + COEFFICIENT * entropy[:-1]) * trained[1:]).sum()
    loss = total * data["dp_size"] / data["batch_num_tokens"]
    return loss, {"loss": Metric("sum", loss.item())}


def results_of(model: Any, samples: Any) -> list[tuple[Tensor, Tensor]]:
    """Of each sample log-probabilities and entropies."""
    rows: list[tuple[Tensor, Tensor]] = []
    for ids in samples:
        logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        own = logp[:-1].gather(1, ids[1:, None])[:, 0]
        rows.append((torch.cat([own, own.new_zeros(1)]), -(logp.exp() * logp).sum(-1)))
    return rows


def alone() -> tuple[list[tuple[Tensor, Tensor]], float, list[Tensor]]:
    """Of each sample log-probabilities and entropies; the loss and its gradients, sample by sample."""
    model, given = model_of(config()), samples()
    rows = results_of(model, [each["input_ids"] for each in given])
    output: dict[str, Any] = dict(
        zip(("log_probs", "entropy"), map(nested, map(list, zip(*rows, strict=True))), strict=True)
    )
    fields = {name: nested([each[name] for each in given]) for name in given[0]}
    tokens = sum(int(each["loss_mask"].sum()) for each in given)
    loss, _ = loss_of(output, {**fields, "dp_size": 1, "batch_num_tokens": tokens})
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [(a.detach(), b.detach()) for a, b in rows], loss.item(), gradients


def call(world: World, caps: list[int]) -> list[Any]:
    """By cap, results of this rank's samples, its losses, gradients, microbatches; the refusals."""
    register = runpy.run_path(str(EXAMPLES / "verl_balanced.py"))["register"]
    with patch.dict(sys.modules, modules()):
        register()
        engine_class = EngineRegistry.engines["language_model", "fsdp2", "cpu", "balanced"]
        found = [_call(world, engine_class, cap) for cap in caps]
        return [*found, _refusals(engine_class)]


def call_megatron(world: World, cap: int) -> Any:
    """As `call` of one cap, by verl's Megatron engine; tokens of its microbatches, refusals."""
    register = runpy.run_path(str(EXAMPLES / "verl_megatron_balanced.py"))["register"]
    with patch.dict(sys.modules, modules()):
        register()
        engine_class = EngineRegistry.engines["language_model", "megatron", "cpu", "balanced"]
        said = {"dynamic_context_parallel": False, "use_remove_padding": True}
        said |= {"context_parallel_size": 1, "expert_model_parallel_size": 1}
        config_of = SimpleNamespace(hf_config=config(), mtp=SimpleNamespace(enable=False))
        engine, data = engine_class(config_of, SimpleNamespace(**said)), _mine(world)
        data |= {"max_token_len_per_gpu": cap, "use_dynamic_bsz": True}
        output = engine.forward_backward_batch(dict(data), loss_of)
        forward = engine.forward_backward_batch(data, None, forward_only=True)
        told: list[str] = []
        for asked in ({"distillation_only": True}, {"force_group_size": 2}, {"use_dynamic_bsz": False}):
            try:
                engine.forward_backward_batch({**data, **asked}, loss_of)
            except ConfigError as error:
                told.append(str(error))
        return _given(world, engine.module[0], forward, output), engine.tokens, told


def _engine(engine_class: type[Any], sizes: int = 1) -> Any:
    made = engine_class(SimpleNamespace(hf_config=config()), SimpleNamespace(ulysses_sequence_parallel_size=sizes))
    made.initialize()
    return made


def _mine(world: World) -> dict[str, Any]:
    # Unequal numbers of samples.
    own = [each for at, each in enumerate(samples()) if max(0, at - 3) % world.size == world.rank]
    return {name: nested([each[name] for each in own]) for name in own[0]}


def _call(world: World, engine_class: type[Any], cap: int) -> Any:
    engine, data = _engine(engine_class), _mine(world)
    data |= {"max_token_len_per_gpu": cap, "temperature": 1.0, "calculate_entropy": True}
    with engine.balancer:
        forward = engine.forward_backward_batch(dict(data), None, forward_only=True)
        output = engine.forward_backward_batch(data, loss_of)
    # as many values of every rank, which verl wants
    assert output["metrics"]["loss"].values == pytest.approx([sum(output["loss"])])
    return *_given(world, engine.module, forward, output), engine.synced


def _given(world: World, module: Any, forward: Any, output: Any) -> Any:
    gradients: list[Tensor] = []
    for each in module.parameters():
        grad = torch.zeros_like(each) if each.grad is None else each.grad
        dist.all_reduce(grad)
        gradients.append(grad / world.size)
    same = all(
        torch.equal(a, b)
        for name in ("log_probs", "entropy")
        for a, b in zip(forward["model_output"][name].unbind(), output["model_output"][name].unbind(), strict=True)
    )
    results = [each.unbind() for each in (output["model_output"]["log_probs"], output["model_output"]["entropy"])]
    return list(zip(*results, strict=True)), sum(output["loss"]), gradients, same


def _refusals(engine_class: type[Any]) -> list[str]:
    told: list[str] = []
    engine = _engine(engine_class)
    for asked in ({"use_fused_kernels": True}, {"multi_modal_inputs": []}, {"temperature": torch.ones(2)}):
        try:
            engine.forward_backward_batch(dict(asked), None)
        except ConfigError as error:
            told.append(str(error))
    try:
        _engine(engine_class, 2)
    except ConfigError as error:
        told.append(str(error))
    return told

"""verl's worker, FSDP engine and losses, as installed, on gloo ranks: updates by its own engine or by
ours.

verl has no platform of CPUs; its public registries take one, and its engine for it.
"""

import importlib
import os
import sys
import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.support.pool import World
from tests.support.verl_jobs import EXAMPLES, config, model_of

STEPS, EPOCHS, SAMPLES, PROMPT, RESPONSE = 10, 2, 16, 40, 280
LENGTHS = (3, 5, 9, 14, 20, 31, 47, 60, 75, 90, 120, 150, 180, 220, 260, 300)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
OURS, THEIRS = "balanced", "cpus"
"""Vendors of engines."""


def of_verl(module: str, *names: str) -> Any:
    found = [getattr(importlib.import_module(f"verl.{module}"), name) for name in names]
    return found[0] if len(found) == 1 else found


def always(value: object) -> Any:
    return lambda *_, **__: value


def register() -> None:
    """A platform of CPUs, and verl's own engine on it."""
    base, registry = of_verl("plugin.platform", "PlatformBase", "PlatformRegistry")
    sizes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    module = SimpleNamespace(**dict.fromkeys(sizes, always(0)), mem_get_info=always((0, 1)))
    vars(module).update(get_device_name=always("CPU"), empty_cache=always(None), is_available=always(False))
    told = {"device_name": "cpu", "vendor_name": THEIRS, "device_module": module}
    said = {"current_device": torch.device("cpu"), "is_available": True, "communication_backend_name": "gloo"}
    said |= {"visible_devices_envvar": "CUDA_VISIBLE_DEVICES"}
    members: dict[str, Any] = {name: always(said.get(name)) for name in base.__abstractmethods__}
    members |= {name: property(always(value)) for name, value in told.items()}
    registry.register(platform=THEIRS)(type("Cpus", (base,), members))
    engine = of_verl("workers.engine.fsdp.transformer_impl", "FSDPEngineWithLMHead")
    on = {"backend": "fsdp2", "device": "cpu", "vendor": THEIRS}
    of_verl("workers.engine", "EngineRegistry").register(model_type="language_model", **on)(engine)


def train(world: World, vendor: str, cap: int) -> tuple[list[Tensor], list[dict[str, Any]], list[list[Tensor]]]:
    """Log-probabilities of this rank's samples, what verl logs, gradients of each update."""
    told = {"VERL_PLATFORM": THEIRS, "VERL_ENGINE_VENDOR": vendor, "WG_BACKEND": "ray", "LOCAL_RANK": "0"}
    told |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_WORLD_SIZE": str(world.size)}
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the ranks have met
    with (
        patch.dict(os.environ, told),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        tempfile.TemporaryDirectory() as folder,
    ):
        model: Any = model_of(config())
        model.save_pretrained(folder)
        register()
        return _train(world, _worker(folder, cap))


def _worker(folder: str, cap: int) -> Any:
    names = ("FSDPEngineConfig", "FSDPOptimizerConfig", "HFModelConfig", "TrainingWorkerConfig")
    engine, optimizer, model, settings = of_verl("workers.config", *names)
    worker = of_verl("workers.engine_workers", "TrainingWorker")(
        settings(
            model_type="language_model",
            model_config=model(
                path=folder,
                load_tokenizer=False,
                external_lib="verl_balanced",
                override_config={"attn_implementation": "sdpa"},
                enable_gradient_checkpointing=False,
            ),
            engine_config=engine(
                strategy="fsdp2",
                use_dynamic_bsz=True,
                max_token_len_per_gpu=cap,
                infer_max_token_len_per_gpu=cap,
                mixed_precision=dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
                use_torch_compile=False,
            ),
            optimizer_config=optimizer(optimizer="SGD", lr=0.5, weight_decay=0.0, total_training_steps=100),
            checkpoint_config=of_verl("trainer.config", "CheckpointConfig")(),
        )
    )
    worker.reset()
    return worker


def _train(world: World, worker: Any) -> tuple[list[Tensor], list[dict[str, Any]], list[list[Tensor]]]:
    tensors = importlib.import_module("verl.utils.tensordict_utils")
    padding = importlib.import_module("verl.workers.utils.padding")
    settings, loss = of_verl("workers.config", "ActorConfig"), of_verl("workers.utils.losses", "ppo_loss")
    engine, step = worker.engine, worker.engine.optimizer_step
    gradients: list[list[Tensor]] = []

    def updated() -> Any:
        grads = [each.grad for each in engine.module.parameters()]
        gradients.append([getattr(grad, "full_tensor", grad.clone)().clone() for grad in grads])
        return step()

    engine.optimizer_step = updated
    own = list(range(world.rank, SAMPLES, world.size))
    said: dict[str, Any] = {"strategy": "fsdp2", "rollout_n": 1, "use_dynamic_bsz": True, "entropy_coeff": 0.01}
    logged: list[dict[str, Any]] = []
    logps: list[Tensor] = []
    for number in range(STEPS):
        worker.set_loss_fn(partial(loss, config=settings(**said, loss_agg_mode=MODES[number % len(MODES)])))
        given = {name: each[own] for name, each in drawn(number).items()}
        drift, advantages = given.pop("drift"), given.pop("advantages")
        data = padding.left_right_2_no_padding(tensors.get_tensordict(given))
        told = {"temperature": 1.0, "global_batch_size": SAMPLES, "calculate_entropy": True, "compute_loss": False}
        tensors.assign_non_tensor(data, **told)
        found = tensors.get(worker.infer_batch(data.clone()), "log_probs")
        logps.append(padding.no_padding_2_padding(found, data))
        data["old_log_probs"], data["advantages"] = logps[-1] + drift, advantages
        told = {"mini_batch_size": SAMPLES, "epochs": EPOCHS, "dataloader_kwargs": {"shuffle": False}}
        tensors.assign_non_tensor(data, **told)
        logged.append(tensors.get(worker.train_mini_batch(data), "metrics"))
    return logps, logged, gradients


def drawn(step: int) -> dict[str, Tensor]:
    """Samples of a step as verl's rollouts are: prompts end and responses begin at one place."""
    draw, here = torch.Generator().manual_seed(step), torch.arange(PROMPT + RESPONSE)
    made: dict[str, list[Tensor]] = {}
    for at in torch.randperm(SAMPLES, generator=draw).tolist():
        ids = torch.randint(config().vocab_size, here.shape, generator=draw)
        first = PROMPT - min(1 + LENGTHS[at] // 4, 20)
        attended = ((here >= first) & (here < first + LENGTHS[at])).long()
        sample = {
            "input_ids": ids,
            "attention_mask": attended,
            "position_ids": (attended.cumsum(0) - 1).clamp(min=0),
            "prompts": ids[:PROMPT],
            "responses": ids[PROMPT:],
            "response_mask": attended[PROMPT:],
            "drift": 0.3 * torch.randn(RESPONSE, generator=draw),
            "advantages": torch.randn(1, generator=draw).expand(RESPONSE),
        }
        for name, value in sample.items():
            made.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in made.items()}

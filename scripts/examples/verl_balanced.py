"""verl's FSDP engine, with the samples of a call balanced over all data-parallel ranks (docs/rl.md).

With this folder on PYTHONPATH, verl imports the file and takes the engine by options of its own:

    VERL_ENGINE_VENDOR=balanced python -m verl.trainer.main_ppo \
        actor_rollout_ref.model.external_lib=verl_balanced ...

A call of the engine is a step of `rl.plan_step`, which every rank plans from the lengths of all:
verl cuts mini-batches on its workers, so its driver does not know a call's samples. Losses stay
verl's, each of the samples that verl gave the rank. Run on CPUs by verl 0.9.1; read: 0.10.0.dev.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance import rl
from megatron_balance.errors import ConfigError
from megatron_balance.torch import BalancedBatch, SequenceBalancer, hf

VENDOR = "balanced"
REFUSED = ("use_fused_kernels", "distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")
"""Keys of calls that verl's engine takes and this one refuses."""


def register() -> type[Any]:
    """Register the engine with verl, under `VENDOR`; its class."""
    engines = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    registry = importlib.import_module("verl.workers.engine.base").EngineRegistry
    on = {"backend": ["fsdp", "fsdp2"], "device": ["cuda", "npu", "cpu"], "vendor": VENDOR}
    return registry.register(model_type="language_model", **on)(engine_of(engines.FSDPEngineWithLMHead))


def engine_of(base: type[Any]) -> type[Any]:
    """The engine, of verl's `FSDPEngineWithLMHead`."""
    tu = importlib.import_module("verl.utils.tensordict_utils")
    together = importlib.import_module("verl.workers.engine.utils").postprocess_batch_func

    class BalancedEngine(base):
        balancer: SequenceBalancer

        def initialize(self) -> Any:
            sizes = self.engine_config.ulysses_sequence_parallel_size
            if sizes != 1:
                raise ConfigError(f"verl: ulysses_sequence_parallel_size {sizes}; plans cut samples themselves, use 1")
            made = super().initialize()
            self.balancer = SequenceBalancer.for_model(self.model_config.hf_config, mesh=self.get_data_parallel_group())
            return made

        def _build_module(self) -> Any:
            module = super()._build_module()
            module.set_attn_implementation(hf.register(module))
            return module

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
            check(data, tu)
            group, device = self.get_data_parallel_group(), self.balancer.device
            tokens = data["loss_mask"].sum().to(device)
            dist.all_reduce(tokens, group=group)
            told = {"sp_size": 1, "batch_num_tokens": tokens.item(), "dp_size": self.get_data_parallel_size()}
            tu.assign_non_tensor(data, use_dynamic_bsz=True, **told)
            samples = [each.to(device) for each in data["input_ids"].unbind()]
            numbers, step = planned(self.balancer, samples, tu.get_non_tensor_data(data, "max_token_len_per_gpu", None))
            batches = self.balancer.from_plan(step, dict(zip(numbers, samples, strict=True))).update
            outputs: list[dict[str, Any]] = []
            indices: list[list[int]] = []
            for at, batch in enumerate(batches):
                own = [number - numbers.start for number in batch.documents]
                last = at == len(batches) - 1
                syncs = nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=last)
                with torch.no_grad() if forward_only else nullcontext(), syncs:
                    results = self._results(batch, [len(samples[number]) for number in own], data)
                    loss, output = results.pop("none"), {}
                    if own:
                        output = {"model_output": results, "loss": 1.0, "metrics": {}}
                    if own and loss_function is not None:
                        given = tu.index_select_tensor_dict(data, own)
                        told_loss, output["metrics"] = loss_function(model_output=results, data=given, dp_group=group)
                        loss, output["loss"] = loss + told_loss, told_loss.detach().item()
                    if not forward_only:
                        loss.backward()  # on every rank: it sends gradients to where rows are
                output["model_output"] = {name: each.detach() for name, each in results.items()} if own else {}
                outputs.append(output)
                indices.append(own)
            output = together(output_lst=outputs, indices=indices, data=data)
            # verl wants as many values of every rank, and ranks have samples in other microbatches.
            told = {name: each for name, each in output["metrics"].items() if hasattr(each, "aggregate")}
            output["metrics"] |= {name: type(each)(each.aggregation, each.aggregate()) for name, each in told.items()}
            return output

        def _results(self, batch: BalancedBatch, lengths: list[int], data: Any) -> dict[str, Any]:
            # Nested results of this rank's samples, and `none`: a 0 with the gradients of all.
            kind = getattr(self, "_autocast_dtype", torch.bfloat16)
            computes = nullcontext() if kind == torch.float32 else torch.autocast(self.balancer.device.type, kind)
            with computes:
                logits = self.module(**hf.inputs(batch)).logits[0]
            logp = (logits.float() / tu.get_non_tensor_data(data, "temperature", 1.0)).log_softmax(-1)
            columns = {"log_probs": logp.gather(1, batch.labels.clamp(min=0)[:, None])[:, 0] * (batch.labels >= 0)}
            if tu.get_non_tensor_data(data, "calculate_entropy", False):
                columns["entropy"] = -(logp.exp() * logp).sum(-1)
            rows = batch.gather_rows(torch.stack([*columns.values()], dim=1))
            found: dict[str, Any] = {"none": rows[:0].sum()}
            for name, values in zip(columns, rows.unbind(1), strict=True):
                parts = list(values.split(lengths))
                found[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged) if lengths else values
            return found

    return BalancedEngine


def check(data: Any, tu: Any) -> None:
    """Refuse what the engine would not compute. ConfigError: names it."""
    asked = [name for name in REFUSED if tu.get_non_tensor_data(data, name, False)]
    asked += [name for name in ("multi_modal_inputs",) if name in data.keys()]  # noqa: SIM118  a TensorDict
    if isinstance(tu.get_non_tensor_data(data, "temperature", 1.0), Tensor):
        asked.append("a temperature for each sample")
    if asked:
        raise ConfigError(f"verl's engine with plans computes no {', '.join(asked)}; use verl's own for these calls")


def planned(balancer: SequenceBalancer, samples: list[Tensor], max_tokens: int | None) -> tuple[range, Any]:
    """The numbers of this rank's samples in the step of all ranks, and its plan."""
    pool = balancer.pool
    everyone: list[list[int]] = [[]] * pool.size
    dist.all_gather_object(everyone, [len(each) for each in samples], group=pool.groups.pool)
    first = sum(map(len, everyone[: pool.rank]))
    cluster = balancer.settings.cluster_of(pool, balancer.device)
    step = rl.plan_step(list(chain.from_iterable(everyone)), None, cluster, balancer.model, max_tokens=max_tokens)
    return range(first, first + len(samples)), step


if __name__ != "__main__" and importlib.util.find_spec("verl"):
    register()

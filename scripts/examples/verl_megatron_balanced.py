"""verl's Megatron engine, with the samples of a call balanced over data-parallel ranks (docs/rl.md).

With this folder on PYTHONPATH, verl imports the file and takes the engine by options of its own:

    VERL_ENGINE_VENDOR=balanced python -m verl.trainer.main_ppo \
        actor_rollout_ref.model.external_lib=verl_megatron_balanced ...

A call of the engine is a step of `rl.plan_step`, which every rank plans from the lengths of all. Whole
samples go to the ranks that the plan says, run in its microbatches by Megatron's schedule and verl's
own forward and loss, and their results return. Read, not run: verl 0.10.0.dev of 2026-08-22.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance import rl
from megatron_balance.config import load_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.torch.settings import model_of

VENDOR = "balanced"
CLUSTER = "h100"
"""The preset whose GPUs weigh attention against the rest."""
UNKNOWN = {"seq_length": 1, "micro_batch_size": 1}  # as verl's: stages tell one another the shapes
REFUSED = ("enable_routing_replay", "distillation_use_topk", "distillation_only", "multi_modal_inputs")
"""Keys of calls that verl's engine takes and this one refuses."""


def register() -> type[Any]:
    """Register the engine with verl, under `VENDOR`; its class."""
    engines = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    registry = importlib.import_module("verl.workers.engine.base").EngineRegistry
    on = {"backend": ["megatron"], "device": ["cuda", "npu", "cpu"], "vendor": VENDOR}
    return registry.register(model_type="language_model", **on)(engine_of(engines.MegatronEngineWithLMHead))


def engine_of(base: type[Any]) -> type[Any]:
    """The engine, of verl's `MegatronEngineWithLMHead`."""
    tu = importlib.import_module("verl.utils.tensordict_utils")
    together = importlib.import_module("verl.workers.engine.utils").postprocess_batch_func
    generator = importlib.import_module("verl.utils.megatron.pipeline_parallel").make_batch_generator
    device_of = importlib.import_module("verl.utils.device").get_device_id
    schedules = importlib.import_module("megatron.core.pipeline_parallel")
    mpu = importlib.import_module("megatron.core.parallel_state")
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)

    class BalancedMegatronEngine(base):
        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
            check(self, data, tu)
            group, device = self.get_data_parallel_group(), device_of()
            rank, size = dist.get_rank(group), self.get_data_parallel_size()
            lengths: list[list[int]] = [[]] * size
            dist.all_gather_object(lengths, [len(each) for each in data["input_ids"].unbind()], group=group)
            firsts = [0, *accumulate(map(len, lengths))]
            owned = [range(*each) for each in zip(firsts, firsts[1:], strict=False)]
            plan = self._planned(list(chain.from_iterable(lengths)), data["max_token_len_per_gpu"], mpu)
            mask = data["loss_mask"]
            counts = torch.stack([(mask.values() if mask.is_nested else mask).sum(), self._routed_num_tokens(data)])
            counts = counts.to(device)
            dist.all_reduce(counts, group=group)
            tu.assign_non_tensor(data, use_dynamic_bsz=True)
            told = {"batch_num_tokens": counts[0].item(), "routed_num_tokens": counts[1].item(), "dp_size": size}
            told |= {"sp_size": self.engine_config.context_parallel_size, "num_micro_batch": len(plan)}

            def rows(numbers: Sequence[int]) -> Any:
                own = [number - firsts[rank] for number in sorted(numbers) if number in owned[rank]]
                return tu.index_select_tensor_dict(data, own) if own else None

            got = exchanged([[rows(of_ranks[to]) for of_ranks in plan] for to in range(size)], group, device)
            batches = [tu.concat_tensordict([each for each in of if each is not None]) for of in zip(*got, strict=True)]
            for batch in batches:
                tu.assign_non_tensor(batch, **told)
            after = partial(self.postprocess_micro_batch_func, forward_only=forward_only, loss_function=loss_function)
            steps = {"logits_processor_func": loss_function, "postprocess_micro_batch_func": after}
            outputs = schedules.get_forward_backward_func()(
                forward_step_func=partial(self.forward_step, **steps),
                data_iterator=generator(batches, vpp_size=len(self.module)),
                model=self.module,
                num_microbatches=len(batches),
                **UNKNOWN,
                forward_only=forward_only,
            )
            if not mpu.is_pipeline_last_stage(ignore_virtual=True):
                return {}
            held = sorted(chain.from_iterable(of_ranks[rank] for of_ranks in plan))
            at = {number: place for place, number in enumerate(held)}
            indices = [[at[number] for number in sorted(of_ranks[rank])] for of_ranks in plan]
            output = together(output_lst=outputs, indices=indices, data=data)
            found = {name: [each.detach().cpu() for each in values.unbind()]
                     for name, values in output["model_output"].items()}  # fmt: skip
            back = [{n: {name: each[at[n]] for name, each in found.items()} for n in held if n in own} for own in owned]
            mine = {number: each for part in exchanged(back, group, device) for number, each in part.items()}
            output["model_output"] = {name: nested([mine[n][name].to(device) for n in owned[rank]]) for name in found}
            return output

        def _planned(self, lengths: list[int], cap: int, mpu: Any) -> list[list[list[int]]]:
            # By microbatch and data-parallel rank, the numbers of its samples, at least one.
            data, context = self.get_data_parallel_size(), self.engine_config.context_parallel_size
            interleaved = (mpu.get_virtual_pipeline_model_parallel_world_size() or 1) > 1
            multiple = self.tf_config.microbatch_group_size_per_vp_stage if interleaved else 1
            most, ranks = len(lengths) // (data * multiple) * multiple, data * context
            stages = mpu.get_pipeline_model_parallel_world_size()
            cluster = load_cluster(CLUSTER).build(num_ranks=ranks, ranks_per_node=ranks)
            meet = "step" if self.engine_config.expert_model_parallel_size == 1 else "layer"
            options = {"min_microbatches": max(1, min(stages, most)), "multiple_of": multiple, "meet": meet}
            given = lengths, None, cluster, model_of(self.model_config.hf_config)
            step = rl.plan_step(*given, max_tokens=cap, context=context, attend="context", **options)
            return rl.whole_samples(step, context)

    return BalancedMegatronEngine


def check(engine: Any, data: Any, tu: Any) -> None:
    """Refuse what the engine would not compute. ConfigError: names it."""
    config = engine.engine_config
    asked = ["dynamic_context_parallel"] if config.dynamic_context_parallel else []
    asked += [] if config.use_remove_padding else ["padded samples (use_remove_padding=False)"]
    asked += [name for name in REFUSED if name in data.keys() and tu.get_non_tensor_data(data, name, True) is not False]  # noqa: SIM118  a TensorDict
    asked += ["mtp"] if engine.model_config.mtp.enable else []
    asked += ["force_group_size"] if tu.get_non_tensor_data(data, "force_group_size", 1) != 1 else []
    asked += [] if tu.get_non_tensor_data(data, "use_dynamic_bsz", True) else ["microbatches of a fixed size"]
    if asked:
        raise ConfigError(f"verl's Megatron engine with plans computes no {', '.join(asked)}; use verl's own for these")


def exchanged(given: Sequence[Any], group: Any, device: Any) -> list[Any]:
    """Pickled objects that each rank of a group gives this one. `given`: to each of them."""
    packed = [torch.frombuffer(bytearray(pickle.dumps(each)), dtype=torch.uint8) for each in given]
    sizes = torch.tensor([len(each) for each in packed], device=device)
    counts = torch.empty_like(sizes)
    dist.all_to_all_single(counts, sizes, group=group)
    received = torch.empty(int(counts.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(packed).to(device), counts.tolist(), sizes.tolist(), group=group)
    return [pickle.loads(each.numpy().tobytes()) for each in received.cpu().split(counts.tolist())]


if __name__ != "__main__" and importlib.util.find_spec("verl"):
    register()

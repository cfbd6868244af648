"""Trainers of Transformers and TRL on the ranks of a pool that is their whole world."""

import inspect
import io
import os
import runpy
import shutil
import signal
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from datasets import Dataset, IterableDataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.library import _scoped_library
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from megatron_balance import rl
from megatron_balance.torch import balancer
from megatron_balance.torch.settings import Settings
from megatron_balance.torch.trainer import BalancedTrainer, balance
from tests.support.hybrid_jobs import Invented
from tests.support.pool import World, said

disable_progress_bars()
# Documents of a step, whatever the number of ranks.
STEP = 8
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "epoch", "step", "eval_loss")
LOGGED += ("aux_loss", "eval_accuracy", "eval_counted", "eval_entropy", "eval_mean_token_accuracy", "train_loss")
LOGGED += ("num_input_tokens_seen",)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")


@dataclass(frozen=True)
class Case:
    # `steps`: None, one epoch; `documents`: of the data; `args`: of the trainer's configuration.
    kind: str = "sft"
    steps: int | None = 4
    documents: int = 64
    evaluated: int = 0
    args: tuple[tuple[str, Any], ...] = ()
    lora: bool = False
    stream: bool = False
    sharded: bool = False
    metrics: bool = False
    planner: str = "zeppelin"
    mixed: bool = False
    max_tokens: int | None = None
    fixed: bool = False
    losses: bool = False
    experts: bool = False
    patience: int | None = None


def tokenizer() -> PreTrainedTokenizerFast:
    # Bytes, and words of chats.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", chat_template=TEMPLATE
    )


@cache  # a tenth of a case's time
def functions() -> list[tuple[str, str]]:
    # Names and sources of functions of the standard library.
    found = [each for each in vars(textwrap.TextWrapper).values() if inspect.isfunction(each)]
    found += [
        each for module in (shutil, inspect, tempfile) for _, each in inspect.getmembers(module, inspect.isfunction)
    ]
    return sorted({(each.__qualname__, inspect.getsource(each)) for each in found})


def texts(count: int) -> list[tuple[str, str]]:
    # Names and bodies of functions, short ones and a few long ones.
    draw, pairs = np.random.default_rng(0), functions()
    chosen = [pairs[at] for at in draw.permutation(len(pairs))]
    return [(name, body[: int(30 + 12 * draw.pareto(1.0))][:400]) for name, body in (chosen * 3)[:count]]


def chats(count: int, skipped: int = 0) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"Write {name}"}, {"role": "assistant", "content": body}]}
        for name, body in texts(skipped + count)[skipped:]
    ]


def model(seed: int = 0, *, experts: bool = False) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    words: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if not experts:
        return AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads, **words))
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.1}
    more = {"decoder_sparse_step": 1, "output_router_logits": True, "initializer_range": 0.2}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, **words, **routed, **more))


@contextmanager
def world_of(world: World) -> Iterator[Path]:
    # Accelerate's world, as torchrun says it, and a folder that all ranks share.
    place = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size}
    if world.size > 1:
        os.environ.update({name: str(at) for name, at in place.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    folder: list[Any] = [tempfile.mkdtemp() if world.rank == 0 else None]
    if world.size > 1:
        dist.broadcast_object_list(folder)
    try:
        yield Path(folder[0])
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        if world.rank == 0:
            shutil.rmtree(folder[0], ignore_errors=True)


def arguments(case: Case, world: World, folder: Path) -> dict[str, Any]:
    sharded = {"fsdp": True} if case.sharded and world.size > 1 else {}
    accumulate = dict(case.args).get("gradient_accumulation_steps", 1)
    return (
        {
            "output_dir": str(folder),
            "per_device_train_batch_size": STEP // world.size // (2 if accumulate > 1 else 1),
            "per_device_eval_batch_size": STEP // world.size,
            "max_steps": case.steps or -1,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "seed": 3,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
            "remove_unused_columns": True,
            "eval_strategy": "steps" if case.evaluated else "no",
            "eval_steps": 2,
            "gradient_checkpointing": False,
        }
        | sharded
        | dict(case.args)
    )


def accuracy(prediction: Any) -> dict[str, float]:
    # Of the next token, of what documents have.
    guessed, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guessed == labels)[counted].mean()), "counted": float(counted.sum())}


def rows_of(data: Sequence[dict[str, Any]], words: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    return [
        {"input_ids": cast("Any", words).apply_chat_template(each["messages"], return_dict=True)["input_ids"]}
        for each in data
    ]


class Mixed(BalancedTrainer, SFTTrainer): ...


# What trainers of samples log that is of the machine, or of one rank.
OF_MACHINE = ("runtime", "per_second", "step_time", "profiling")


def lora() -> LoraConfig:
    return LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)


def shard(case: Case, world: World) -> None:
    if case.sharded and world.size > 1:  # Accelerate shards on GPUs alone
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def built_by_samples(case: Case, world: World, folder: Path) -> Any:
    # Trainers that call their model on padded pairs, or groups.
    args = arguments(case, world, folder)
    given: dict[str, Any] = {"model": model(), "processing_class": tokenizer()}
    if case.lora:
        given["peft_config"] = lora()
    pairs = [
        {"prompt": f"Write {name}", "chosen": body, "rejected": body[::-2]}
        for name, body in texts(case.documents + case.evaluated)
    ]
    if case.kind == "kto":
        pairs = [
            {"prompt": each["prompt"], "completion": each[which], "label": which == "chosen"}
            for at, each in enumerate(pairs)
            for which in (("chosen", "rejected")[at % 2],)
        ]
    if case.fixed:  # no two prompts are the same, and some are short
        pairs = [{"prompt": f"{at:03}"[-2:] + each["prompt"][: at % 24]} for at, each in enumerate(pairs)]
    given["train_dataset"] = Dataset.from_list(pairs[: case.documents])
    if case.stream:
        given["train_dataset"] = IterableDataset.from_generator(lambda: iter(pairs[: case.documents]))
    if case.evaluated:
        given["eval_dataset"] = Dataset.from_list(pairs[case.documents :])
    match case.kind:
        case "dpo":
            reference = {} if case.lora else {"ref_model": model(1)}
            config = DPOConfig(max_length=512, **args)
            shard(case, world)
            return DPOTrainer(args=config, **reference, **given)
        case "kto":
            made = KTOTrainer(args=KTOConfig(max_length=512, **args), ref_model=model(1), **given)
            # theirs pairs the completions of a rank's batch, for the estimate of a divergence
            made.train_dataset = made.train_dataset.map(
                lambda rows: {"KL_completion_ids": rows["completion_ids"][-1:] + rows["completion_ids"][:-1]},
                batched=True,
                batch_size=2,
            )
            return made
        case "reward":
            return RewardTrainer(args=RewardConfig(max_length=512, **args), **given | {"model": scoring()})
        case _:
            config, kind = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[case.kind]
            args |= {"num_generations": 4 if case.fixed else 2, "max_completion_length": 300 if case.fixed else 24}
            args |= {"generation_kwargs": {"do_sample": False}}
            given["train_dataset"] = given["train_dataset"].select_columns("prompt")
            # theirs is read by name
            with patch("trl.trainer.grpo_trainer.create_model_from_path", lambda *_, **__: model(1)):
                made = cast("Any", kind)(args=config(**args), reward_funcs=score, **given)
            made._generate_single_turn = written if case.fixed else partial(generated, made._generate_single_turn)
            return made


def scoring() -> Any:
    config = model().config
    config.num_labels = 1
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config)


def score(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(each) % 17 / 4 for each in completion_ids]


def generated(theirs: Callable[..., Any], prompts: Sequence[Sequence[int]], *others: Any) -> Any:
    # The likeliest completions, the same on any number of ranks, every second of a group changed.
    made = theirs(prompts, *others)
    completions, *rest = made if isinstance(made, tuple) else (made,)
    changed = [
        [*each[: len(prompt) % 19], *prompt[3:20][:: at % 2 + 1]] if at % 2 else each
        for at, (each, prompt) in enumerate(zip(completions, prompts, strict=True))
    ]
    return (changed, *rest) if rest else changed


def written(prompts: Sequence[Sequence[int]], *_: Any, **__: Any) -> Any:
    # Completions by the prompts alone, each of a group another one; rollouts have 3 to 300 tokens.
    made, seen = [], Counter[tuple[int, ...]]()
    # a rank has half of a group
    half = (PartialState().process_index % 2) * 2 if PartialState().num_processes == 4 else 0
    for prompt in map(tuple, prompts):
        draw = np.random.default_rng([*prompt, half + seen[prompt]])
        seen[prompt] += 1
        length = int(np.clip(draw.lognormal(3.5, 1.5), 1, 300 - len(prompt)))
        made.append(draw.integers(len(SPECIAL), 260, length).tolist())
    return made, None


def built(case: Case, world: World, folder: Path) -> Any:
    if case.kind not in ("sft", "trainer"):
        return built_by_samples(case, world, folder)
    words = tokenizer()
    rows: Callable[..., Any] = (lambda data: data) if case.kind == "sft" else (lambda data: rows_of(data, words))
    data = rows(chats(case.documents))
    train = Dataset.from_list(data)
    given: dict[str, Any] = {"model": model(experts=case.experts), "processing_class": words, "train_dataset": train}
    if case.patience:
        given["callbacks"] = [EarlyStoppingCallback(case.patience)]
    if case.stream:
        given["train_dataset"] = IterableDataset.from_generator(lambda: iter(data))
    if case.evaluated:
        given["eval_dataset"] = Dataset.from_list(rows(chats(case.evaluated, case.documents)))
    if case.metrics:
        given["compute_metrics"] = accuracy
    if case.kind == "trainer":
        words.pad_token = words.eos_token
        args = TrainingArguments(**arguments(case, world, folder))
        return Trainer(args=args, data_collator=DataCollatorForLanguageModeling(words, mlm=False), **given)
    if case.lora:
        given["peft_config"] = lora()
    chat = {"assistant_only_loss": True, "max_length": 512, "dataset_num_proc": None}
    args = SFTConfig(**(arguments(case, world, folder) | chat | dict(case.args)))
    shard(case, world)
    if case.mixed and world.size > 1:
        return Mixed(args=args, **given, balanced={"planner": case.planner})
    return SFTTrainer(args=args, **given)


def trained(world: World, case: Case, *callbacks: TrainerCallback) -> list[dict[str, float]]:
    # What the run logs. More ranks than one are balanced.
    with world_of(world) as folder:
        trainer = built(case, world, folder)
        for each in callbacks:
            trainer.add_callback(each)
        if world.size > 1 and not case.mixed:
            balance(trainer, case.planner, losses=case.losses, max_tokens=case.max_tokens)
        trainer.train()
        assert trainer.is_fsdp_enabled == (case.sharded and world.size > 1)
        if case.kind in ("sft", "trainer"):
            return logged(trainer)
        names = (name for each in trainer.state.log_history for name in each)
        # operations are those of padding, too
        left = OF_MACHINE if "pad_to_multiple_of" in dict(case.args) else (*OF_MACHINE, "total_flos")
        kept = {name for name in names if not any(word in name for word in left)}
        return [{name: each[name] for name in each if name in kept} for each in trainer.state.log_history]


def updated(world: World, case: Case) -> tuple[list[dict[str, float]], list[list[torch.Tensor]], int, int]:
    # What a run logs, its gradients by update, plans that were made, and how many were looked up.
    gradients: list[list[torch.Tensor]] = []

    class Noted(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            gradients.append([each.grad.clone() for each in model.parameters()])

    with ExitStack() as counting:
        plan = counting.enter_context(patch.object(rl, "plan_step", wraps=rl.plan_step))
        bind = counting.enter_context(patch.object(balancer, "Binder", wraps=balancer.Binder))
        logs = trained(world, case, Noted())
        return logs, gradients, plan.call_count, bind.call_count


def all_trained(world: World, cases: dict[str, Case]) -> dict[str, list[dict[str, float]]]:
    return {name: trained(world, case) for name, case in cases.items()}


def logged(trainer: Trainer) -> list[dict[str, float]]:
    return [{name: each[name] for name in each if name in LOGGED} for each in trainer.state.log_history]


class Marked(TrainerCallback):
    # Notes, at some steps, weights and gradients of one rank alone; later the largest difference of
    # a gradient from these weights, over the largest entry of all.
    def __init__(self, marks: Sequence[int], alone: dict[int, tuple[Any, Any]] | None) -> None:
        self.marks, self.alone = marks, alone
        self.noted: dict[int, tuple[Any, Any]] = {}
        self.worst: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del args, control
        if (at := state.global_step + 1) in self.marks and self.alone is not None:
            with torch.no_grad():
                for name, parameter in given["model"].named_parameters():
                    parameter.copy_(self.alone[at][0][name.removeprefix("module.")])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del args, control
        if (at := state.global_step + 1) not in self.marks:
            return
        named = {name.removeprefix("module."): p for name, p in given["model"].named_parameters()}
        grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        if self.alone is None:
            self.noted[at] = {name: p.detach().clone() for name, p in named.items()}, grads
        else:
            right = self.alone[at][1]
            assert grads.keys() == right.keys()
            largest = max(float(each.abs().max()) for each in right.values())
            self.worst[at] = max(float((grads[name] - right[name]).abs().max()) for name in right) / largest


def gradients(world: World, case: Case, marks: Sequence[int], alone: Any = None) -> Any:
    # Of one rank alone: what `Marked` notes. Of more, balanced: how far its gradients are.
    with world_of(world) as folder:
        trainer = built(case, world, folder)
        if world.size > 1:
            balance(trainer, case.planner)
        marked = Marked(marks, alone)
        trainer.add_callback(marked)
        trainer.train()
        return marked.noted if alone is None else marked.worst


def recorded(world: World, folder: str) -> list[dict[str, float]]:
    # What a run of two accumulated microbatches a step logs; its records lie in the folder.
    args = (("gradient_accumulation_steps", 2),)
    with world_of(world) as own:
        trainer = balance(built(Case(evaluated=9, args=args), world, own), settings=Settings(log_folder=folder))
        trainer.train()
        return logged(trainer)


class Killed(TrainerCallback):
    # The end of a rank, without a word, behind a step.
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        del args, control, given
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def resumed(
    world: World, steps: int, folder: str, batch: int = 0, killed: int | None = None
) -> list[dict[str, float]] | str:
    # A balanced run of so many steps that saves its second, and goes on from it where it was saved;
    # what it logs, or the error. `killed`: the step behind which rank 1 is.
    saving = {"save_strategy": "steps", "save_steps": 2, "output_dir": folder, "save_only_model": False}
    if batch:
        saving["per_device_train_batch_size"] = batch
    with world_of(world) as other:
        trainer = balance(built(Case(steps=steps, args=tuple(saving.items())), world, other))
        if killed is not None and world.rank == 1:
            trainer.add_callback(Killed(killed))
        checkpoint = Path(folder) / "checkpoint-2"
        if error := said(trainer.train, resume_from_checkpoint=str(checkpoint) if checkpoint.exists() else None):
            return error
        return logged(trainer)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    # torch's operator of this name, which is of GPUs alone, by its CPU kernel.
    del return_debug_mask
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = on_cpu(query, key, value, dropout_p, is_causal, scale=scale)
    none = query.new_zeros(())
    return out, lse, none, none, query.shape[2], key.shape[2], none, none, none


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float, **_: Any
) -> torch.Tensor:
    # As torch's on a GPU: `flash_attention`, which context parallelism replaces by its ring.
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]


def elsewhere(sizes: ParallelismConfig) -> bool:
    # `cp_enabled` for all but TRL's guard.
    return (sizes.cp_size or 1) > 1 and "sft_trainer" not in sys._getframe(1).f_code.co_filename


def two_documents(world: World, folder: Path, first: int, packed: str, **given: Any) -> Any:
    # An SFTTrainer with two documents, packed by "bfd", "padding-free" or not, "no".
    # `parallelism_config`: of one under FSDP2.
    data = [{"input_ids": [first, *range(9, 40)]}, {"input_ids": [*range(50, 82)]}]
    data = [each | {"labels": each["input_ids"]} for each in data]
    given |= {"per_device_eval_batch_size": 1 if packed == "no" else 2, "eval_strategy": "no"}
    given |= {"packing": packed == "bfd", "padding_free": packed != "no"}
    given["max_length"] = 128 if packed == "bfd" else None
    case = Case(sharded="parallelism_config" in given)
    config = SFTConfig(**(arguments(case, world, folder) | given))
    shard(case, world)
    sets: dict[str, Any] = {"train_dataset": Dataset.from_list(data), "eval_dataset": Dataset.from_list(data)}
    return SFTTrainer(model=model(), args=config, processing_class=tokenizer(), **sets)


def share_changed(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[float]:
    return [float((a != b).any(-1).float().mean()) for a, b in zip(one, other, strict=True)]


def changed(world: World, packed: str) -> list[float]:
    # Of two documents, the share of positions whose logits change with the first token of the first.
    found: list[list[torch.Tensor]] = []
    for first in (7, 8):
        with world_of(world) as folder:
            trainer = balance(two_documents(world, folder, first, packed), "te_ring")
            batch = next(iter(trainer.get_eval_dataloader()))
            trainer.model.eval()
            with torch.no_grad():
                rows = trainer._prepare_inputs(batch)
                logits = trainer.model(**{name: rows[name] for name in rows if "labels" not in name}).logits
                held = trainer._batch
                own = [each for _, each in sorted(zip(held.documents, held.gather(logits), strict=True))]
            all_ranks: list[Any] = [None] * world.size
            dist.all_gather_object(all_ranks, own)
            found.append([each for of in all_ranks for each in of])
    return share_changed(*found)


def changed_under_theirs(world: World, packed: str) -> tuple[str, list[float], float]:
    # The same of Accelerate's own context parallelism under FSDP2: what TRL says of such a trainer,
    # the shares where its guard is out, and how far the logits are from those of one causal row.
    found: list[list[torch.Tensor]] = []
    told, apart = "", 0.0
    for first in (7, 8):
        with ExitStack() as on_cpu:
            folder = on_cpu.enter_context(world_of(world))
            library = on_cpu.enter_context(_scoped_library("aten", "IMPL"))
            library.impl("_scaled_dot_product_flash_attention", flash_attention, "CPU")
            sizes = ParallelismConfig(cp_size=world.size)
            make = partial(two_documents, world, folder, first, packed, parallelism_config=sizes)
            try:
                make()
            except ValueError as error:
                told = str(error)
            on_cpu.enter_context(patch.object(ParallelismConfig, "cp_enabled", property(elsewhere)))
            trainer = make()
            batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader())))
            seen = torch.ones(64, 64).tril().bool()[None, None]
            with torch.no_grad():
                ids, positions = batch["input_ids"].clone(), batch["position_ids"].clone()
                right = model().eval()(input_ids=ids, position_ids=positions, attention_mask=seen).logits
                made = trainer.accelerator.prepare(trainer.model, torch.optim.SGD(trainer.model.parameters()))[0].eval()
                sharded, rows = trainer._prepare_context_parallel_inputs(made, batch)
                on_cpu.enter_context(patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention))
                with sharded():
                    logits = made(**{name: rows[name] for name in rows if "labels" not in name}).logits
                    ranks = trainer.accelerator.torch_device_mesh["cp"]
                    (whole,) = context_parallel_unshard(ranks, [logits], [1])
            apart = float((whole - right).abs().max())
            found.append(list(whole[0].split(32)))
    return told, share_changed(*found), apart


def uneven(world: World) -> str:
    # What is said where the model of one rank is called once more.
    with world_of(world) as folder:
        trainer = balance(built(Case("dpo", steps=1, documents=8), world, folder))
        theirs = trainer._compute_loss

        def twice(*args: Any) -> Any:
            theirs(*args)
            return theirs(*args)

        if world.rank == 0:
            trainer._compute_loss = twice
        return said(trainer.train)


def unknown(case: Case, world: World, folder: Path, *, leaking: bool) -> Any:
    # A trainer of a model whose type is not known.
    trainer = built(case, world, folder)
    trainer.model.config.model_type = "of_mine"
    if leaking:
        layer = trainer.model.model.layers[1]
        layer.mlp = Invented(layer.mlp, backwards=False)
    return trainer


def accepted(world: World, leaking: bool) -> list[str]:
    # What `balance` says to models of a type that is not known; last `train`, to one that `balance`
    # saw on another device.
    told: list[str] = []
    for kind in ("sft", "reward"):
        with world_of(world) as folder:
            trainer = unknown(Case(kind, steps=1, documents=8), world, folder, leaking=leaking)
            told.append(said(balance, trainer, accept=["of_mine"]))
    with world_of(world) as folder:
        trainer = unknown(Case(steps=1, documents=8, sharded=True), world, folder, leaking=leaking)
        with patch.object(type(trainer.model), "device", torch.device("meta")):
            balance(trainer, accept=["of_mine"])
        return [*told, said(trainer.train)]


def example(world: World, script: str, *arguments: str) -> str:
    # What rank 0 alone prints.
    printed = io.StringIO()
    with world_of(world), patch.object(sys, "argv", [script, *arguments]), redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def documents_alone(world: World, script: str, epochs: int, batch: int) -> list[float]:
    # Losses of that example's documents, each alone, by steps of so many.
    del world
    of = runpy.run_path(script)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(of["CONFIG"], attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    for _ in range(epochs):
        data = of["documents"]()
        for step in (data[at : at + batch] for at in range(0, len(data), batch)):
            sums = [
                F.cross_entropy(model(input_ids=each[None]).logits[0, :-1], each[1:], reduction="sum") for each in step
            ]
            loss = torch.stack(sums).sum() / sum(len(each) - 1 for each in step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    return losses


class OwnLoss(SFTTrainer):
    def compute_loss(self, *args: Any, **given: Any) -> Any:
        return super().compute_loss(*args, **given)


def one_document(at: int) -> dict[str, Any]:
    return {"input_ids": [at, at + 1], "labels": [at, at + 1]}


def refused(world: World) -> dict[str, str]:
    # What `balance` says to a trainer that asks for more than it has.
    data = Dataset.from_list([one_document(at) for at in range(9)])
    told: dict[str, str] = {}
    with world_of(world) as folder:

        def sft(kind: type[SFTTrainer] = SFTTrainer, others: Any = None, **given: Any) -> Any:
            args = SFTConfig(**(arguments(Case(), world, folder) | {"eval_strategy": "no", "max_length": 32} | given))
            return kind(model=model(), args=args, processing_class=tokenizer(), train_dataset=data, **(others or {}))

        wrapped = {"packing": True, "packing_strategy": "wrapped"}
        loss = {"compute_loss_func": accuracy}
        asked: dict[str, Callable[[], Any]] = {
            "auto_find_batch_size": lambda: sft(auto_find_batch_size=True),
            "average_tokens_across_devices=False": lambda: sft(average_tokens_across_devices=False),
            "split_batches": lambda: sft(accelerator_config={"split_batches": True}),
            "Liger's kernels": lambda: sft(use_liger_kernel=True),
            "NEFTune": lambda: sft(neftune_noise_alpha=5.0),
            "label smoothing": lambda: sft(label_smoothing_factor=0.1),
            "compute_loss_func": lambda: sft(others=loss),
            "packing 'wrapped'": lambda: sft(**wrapped),
            "compute_loss of OwnLoss": lambda: sft(OwnLoss),
            "metrics of packed documents": lambda: sft(packing=True, others={"compute_metrics": accuracy}),
            "expected a Trainer": model,
            "not balanced yet": lambda: balance(sft()),
            "losses=True": sft,
        }
        for name, make in asked.items():
            told[name] = said(balance, make(), losses=name == "losses=True")
        offloading = sft()  # which is of GPUs
        offloading.args.activation_offloading = True
        told["offloaded activations"] = said(balance, offloading)
        continuous = sft()  # which is of GRPO
        continuous.args.use_transformers_continuous_batching = True
        told["continuous batching"] = said(balance, continuous)
        for name in ("cp_size", "sp_size", "tp_size"):
            sizes = SimpleNamespace(**({"cp_size": 1, "sp_size": 1, "tp_size": 1} | {name: 2}))
            trainer = sft()
            with patch.object(type(trainer.accelerator), "parallelism_config", sizes):
                told[f"{name}=2"] = said(balance, trainer)
        told["max_tokens: expected a trainer of samples"] = said(balance, sft(), max_tokens=9)
        pairs = built(Case("dpo", steps=1, documents=8), world, folder)
        told["lower per_device_train_batch_size"] = said(balance(pairs, max_tokens=120).train)
        waits = balance(sft(), "wlb_llm", tokens_per_rank=3)
        told["trains every document in its step"] = said(waits.train)
    return told

"""Trainers of Transformers and TRL, unmodified, whose documents are dealt over all ranks.

    trainer = balance(SFTTrainer(...), planner="zeppelin")
    trainer.train()

Their losses, counts, metrics and checkpoints run as they are: the model gets rows that are dealt.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from megatron_balance.errors import ConfigError, DataError
from megatron_balance.files import json_text
from megatron_balance.torch import hf, samples
from megatron_balance.torch.balancer import DEFAULTS, SequenceBalancer
from megatron_balance.torch.batch import BalancedBatch
from megatron_balance.torch.losses import LigerLoss, Losses, TokenLosses
from megatron_balance.torch.samples import dealt, unwrapped
from megatron_balance.torch.settings import Settings
from megatron_balance.workloads.rollouts import IGNORED

log = logging.getLogger(__name__)
_Trainer = TypeVar("_Trainer", bound=Trainer)
_Base = Trainer if TYPE_CHECKING else object

STATE = "balance.json"  # in a checkpoint: the balancer's state, and how many documents a step has
# What collators give, and what of it says where documents lie, which `position_ids` say too.
PER_TOKEN = ("input_ids", "labels", "attention_mask", "position_ids")
BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "seq_lengths")


def balance(
    trainer: _Trainer,
    planner: str = "zeppelin",
    *,
    settings: Settings = DEFAULTS,
    accept: Collection[str] = (),
    losses: Losses = False,
    max_tokens: int | None = None,
    **options: Any,
) -> _Trainer:
    """Balance a trainer that is built and did not train yet; it is returned.

    Transformers' `Trainer`, TRL's for SFT, DPO, GRPO, RLOO, KTO and rewards, with Accelerate's DDP or
    FSDP2. The model's attention is switched. Of the first two the collator and the data loaders are
    replaced, of the others the samples of each call of a model are dealt. Collective over the world.

    Args:
        trainer: of a causal language model.
        planner: its name (docs/planners.md). All ranks share their documents.
        settings: of the balancer; `shift_labels` is the trainer's.
        accept: see `SequenceBalancer`. Such a model is checked (`hf.check`), at the start of `train`
            if it is not on its device yet.
        losses: of Transformers' `Trainer`: compute the loss in chunks of rows, without the logits in
            memory (`torch.losses`); "liger": by Liger's kernel. TRL's trainers have such a head.
        max_tokens: of trainers of samples: most tokens of a call on a rank, proved, by plans that a
            driver would make (`rl.plan_step`); calls with the same samples then share one plan.
        options: of the planner.

    Raises:
        ConfigError: a trainer, or a setting of it, whose run would be another than that of one rank;
            a model whose documents do not stay apart.
    """
    if isinstance(trainer, BalancedTrainer):
        raise ConfigError("expected a trainer that is not balanced yet, got one that is")
    _check(trainer, losses)
    made = type(trainer)
    kept = {"__module__": made.__module__, "_losses": losses}
    trainer.__class__ = type(f"Balanced{made.__name__}", (BalancedTrainer, made), kept)
    _begin(trainer, planner, settings, accept, max_tokens, options)
    return trainer


class BalancedTrainer(_Base):
    """Mixin of a balanced trainer, in front of the trainer's class:
    `class MyTrainer(BalancedTrainer, SFTTrainer)`. `balanced`: arguments of `balance`.
    """

    balancer: SequenceBalancer
    _by_samples = False  # calls of the model are dealt, not what is read
    _remainder: samples.Remainder  # of such a trainer
    _losses: Losses = False  # that the model gives in place of logits
    _batch: BalancedBatch  # the rows of the microbatch at hand
    model: Any
    accelerator: Any
    _metrics: Any

    def __init__(self, *args: Any, balanced: Mapping[str, Any] | None = None, **given: Any) -> None:
        """Build the trainer, and balance it."""
        super().__init__(*args, **given)
        options = dict(balanced or {})
        self._losses = options.pop("losses", False)
        _check(self, self._losses)
        planner, settings = options.pop("planner", "zeppelin"), options.pop("settings", DEFAULTS)
        _begin(self, planner, settings, options.pop("accept", ()), options.pop("max_tokens", None), options)

    def train(self, *args: Any, **given: Any) -> Any:
        """Theirs; the other ranks hear of a rank that fails."""
        with self.balancer:
            return super().train(*args, **given)

    def evaluation_loop(self, *args: Any, **given: Any) -> Any:
        """As `train`."""
        with self.balancer:
            return super().evaluation_loop(*args, **given)

    def _get_dataloader(self, dataset: Any, *args: Any, **given: Any) -> Any:
        if isinstance(dataset, IterableDataset) and self.accelerator.num_processes > 1:
            if getattr(dataset, "_distributed", None) is not None:
                raise ConfigError(
                    "expected a stream that is whole on every rank, got one that was split by node already; leave out "
                    "split_dataset_by_node"
                )
            dataset = _WholeStream(dataset)
        loader = super()._get_dataloader(dataset, *args, **given)
        whole = _kind(self) in WITH_REMAINDER
        if self._by_samples and not whole:
            return loader
        # Accelerate's own, which repeats documents where the ranks' last batches differ.
        if isinstance(loader.dataset, IterableDatasetShard):
            loader.dataset.__class__ = _RemainderOfStream if whole else _EachOnce
            if whole:
                base = cast("Any", loader).base_dataloader
                base.collate_fn = partial(_of_remainder, base.collate_fn)
        elif isinstance(loader.batch_sampler, BatchSamplerShard):
            loader.batch_sampler.__class__ = _RemainderToAll if whole else _AllInStep
        return loader

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        row = super()._prepare_inputs(inputs)
        if self._by_samples:
            return row
        documents = list(zip(_documents(row, "input_ids"), _documents(row, "shift_labels"), strict=True))
        self._batch = dealt(self.balancer, documents, training=self.model.training)
        made = {**hf.inputs(self._batch, losses=self._losses)}
        del made["num_items_in_batch"]  # theirs is in step with shifted labels
        return made | dict.fromkeys(("labels", "shift_labels"), self._batch.labels[None])

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Theirs, of rows that are dealt. ConfigError: attention that did not reach the plan."""
        trained: int = getattr(self, "_total_train_tokens", 0)
        if self._by_samples:
            read, several = self.accelerator.gradient_state, self.accelerator.num_processes > 1
            # Accumulated batches are read at once: those before a remainder see the end, too.
            last = several and read.end_of_dataloader and read.remainder != 0  # -1: of a stream
            self._remainder.expected = last and _kind(self) in WITH_REMAINDER
            with _whole(self.accelerator):
                made = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if self.model.training and self._remainder.found:  # theirs counts it on every rank
                self._count_tokens(trained + int(inputs["attention_mask"].sum()))
            return made
        batch = self._batch
        count = batch.num_targets.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if self._losses:
            unwrapped(self.model).loss_function = _mean_loss
        with _whole(self.accelerator), _router_loss(self):
            found: Any = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=count)
        batch.check_attended(found[0] if return_outputs else found)
        if self.model.training and hasattr(self, "_total_train_tokens"):  # TRL's, which counts padding
            self._count_tokens(trained + batch.plan.num_tokens)
        return found

    def _count_tokens(self, trained: int) -> None:
        self._total_train_tokens = trained
        self._metrics["train"]["num_tokens"] = [trained]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens(self._counted(inputs))

    def floating_point_ops(self, inputs: Any) -> int:
        """Theirs; of a remainder once."""
        return super().floating_point_ops(self._counted(inputs))

    def _counted(self, inputs: Any) -> Any:
        """The tokens of a batch that this rank counts: a remainder's once for all ranks."""
        if "input_ids" not in inputs:
            return inputs
        ids, mask = (inputs.get(name) for name in ("input_ids", "attention_mask"))
        none = self._by_samples and self._remainder.found and self.accelerator.process_index > 0
        mask = torch.ones_like(ids) if mask is None else mask
        return {"input_ids": ids[:0], "attention_mask": mask[:0]} if none else {**inputs, "attention_mask": mask}

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Theirs; logits and labels by document, of those that this rank read."""
        if self._by_samples:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        labels = _documents(inputs, "labels")
        loss: Any
        loss, logits, _ = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss = self.accelerator.gather(loss.detach().reshape(1)).mean()
        if logits is None:
            return loss, None, None
        if not isinstance(logits, Tensor):
            raise ConfigError("expected logits alone beside the loss, got more outputs; leave them out by ignore_keys")
        batch = self._batch
        found = batch.gather(logits, attended=0)  # the loss was let through
        order = sorted(range(len(found)), key=batch.documents.__getitem__)
        rows = self.args.eval_batch_size
        return loss, _padded([found[at] for at in order], logits[0, :1], rows), _padded(labels, batch.labels[:1], rows)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            state = {"documents": self._step_documents(), "balancer": self.balancer.state_dict()}
            (folder / STATE).write_text(json_text(state))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        file = Path(checkpoint or "") / STATE
        if checkpoint is None or not file.exists():
            return
        state = json.loads(file.read_text())
        if state["documents"] != self._step_documents():
            raise ConfigError(
                f"expected steps of {state['documents']} documents, as those of {checkpoint}, got steps of "
                f"{self._step_documents()}: the place in the data would be another. Give per_device_train_batch_size "
                "and gradient_accumulation_steps to match the number of ranks"
            )
        self.balancer.load_state_dict(state["balancer"])

    def _step_documents(self) -> int:
        args = self.args
        return args.train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes


def _begin(
    trainer: Any,
    planner: str,
    settings: Settings,
    accept: Collection[str],
    max_tokens: int | None,
    options: Mapping[str, Any],
) -> None:
    """Make the balancer, and set what is behind the trainer's constructor."""
    if max_tokens is not None and _kind(trainer) not in BY_SAMPLES:
        raise ConfigError(
            f"max_tokens: expected a trainer of samples ({', '.join(BY_SAMPLES)}), got {_kind(trainer)}, whose "
            "documents a planner's own tokens_per_rank caps"
        )
    args, accelerator = trainer.args, trainer.accelerator
    settings = replace(settings, shift_labels=False, device=settings.device or args.device)
    trainer.balancer = SequenceBalancer.for_model(
        trainer.model.config, planner, accept=accept, settings=settings, **options
    )
    dropout = sorted({each.p for each in trainer.model.modules() if isinstance(each, torch.nn.Dropout) and each.p})
    if dropout:
        log.warning("dropout %s draws by rank: the run is not, number for number, that of one rank", dropout)
    accelerator.dataloader_config.dispatch_batches = False
    trainer._by_samples, scores = _kind(trainer) in BY_SAMPLES, _kind(trainer) == "RewardTrainer"
    model = unwrapped(trainer.model)
    if trainer._by_samples:  # its sums over ranks take as many samples of each
        trainer._remainder = samples.begin(trainer, scores=scores, max_tokens=max_tokens)
    else:
        model.set_attn_implementation(hf.register())
        hf.register(model)
        accelerator.even_batches = False
        trainer.data_collator = _Flat(trainer.data_collator)
    if accept and model.device.type == trainer.balancer.device.type:
        hf.check(model.base_model if scores else trainer.model, trainer.balancer)
    elif accept and scores:
        log.warning("the model is not on its device yet: have hf.check look at it when it is, since it was accepted")
    elif accept:
        trainer.add_callback(_CheckedAtStart(trainer.balancer))


class _CheckedAtStart(TrainerCallback):
    """`hf.check` of an accepted model that was not on its device at `balance`, as under FSDP2."""

    def __init__(self, balancer: SequenceBalancer) -> None:
        self._balancer = balancer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Check the model, which is sharded and on its device by now."""
        del args, state, control
        hf.check(given["model"], self._balancer)


def _mean_loss(logits: TokenLosses | LigerLoss, *_: Any, num_items_in_batch: Any, **__: Any) -> Tensor:
    """The loss of Transformers' models, of what `hf.inputs(batch, losses=...)` makes of logits."""
    return logits.loss / num_items_in_batch


def _check(trainer: Any, losses: Losses) -> None:
    """Refuse what would not be balanced, or silently be another run than that of one rank."""
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"expected a Trainer of Transformers or TRL, got {type(trainer).__name__}")
    wrong = {what: do for what, do, asked in _unlike(trainer) if asked}
    if losses and _kind(trainer) != Trainer.__name__:
        wrong[f"losses={losses}"] = "Leave it out: TRL's head does so already"
    if losses and trainer.compute_metrics is not None:
        wrong[f"losses={losses} beside compute_metrics"] = "Leave out one: metrics are of logits"
    if wrong:
        raise ConfigError(
            f"{type(trainer).__name__} asks for {', '.join(wrong)}, which balanced documents do not have. "
            f"{'; '.join(dict.fromkeys(wrong.values()))} (docs/trainers.md)"
        )


_OTHER = "Train in a loop of your own (docs/torch.md)"
_OFF = "Leave it out"


def _unlike(trainer: Any) -> Iterator[tuple[str, str, Any]]:
    """Features that a trainer may ask for in vain, what to do about each, whether this one does."""
    args, model = trainer.args, unwrapped(trainer.model)
    several, by_samples = trainer.accelerator.num_processes > 1, _kind(trainer) in BY_SAMPLES
    yield from _kinds(trainer)
    ranks = trainer.accelerator.parallelism_config
    rows = "its ranks would cut rows that are dealt already: count them in dp_shard_size, all of which share documents"
    if ranks is not None:
        yield f"cp_size={ranks.cp_size}", rows.capitalize(), ranks.cp_size > 1
        yield f"sp_size={ranks.sp_size}", rows.capitalize(), ranks.sp_size > 1
        yield f"tp_size={ranks.tp_size}", "Leave tensor parallelism to Megatron (docs/cluster.md)", ranks.tp_size > 1
    yield "DeepSpeed", "Take FSDP2 or DDP", trainer.is_deepspeed_enabled
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    yield "FSDP version 1", "Set fsdp_version 2", plugin is not None and plugin.fsdp_version != 2
    yield "nn.DataParallel", "Start one process a GPU (torchrun)", args.n_gpu > 1
    yield "auto_find_batch_size", "Set per_device_train_batch_size", args.auto_find_batch_size
    mean, own = "each rank's own mean would count", several and not args.average_tokens_across_devices
    yield "average_tokens_across_devices=False", f"Set it: {mean}", own and not by_samples
    yield "split_batches", _OFF, several and args.accelerator_config.split_batches
    yield "batch_rebalance", "Leave train_sampling_strategy", args.train_sampling_strategy == "batch_rebalance"
    yield "Liger's kernels", "Leave out use_liger_kernel", args.use_liger_kernel
    yield "NEFTune, whose noise goes by a row's length", "Leave out neftune_noise_alpha", args.neftune_noise_alpha
    inside = "a loss of your own shifts labels over the borders of pieces"
    yield "label smoothing", f"Set it to 0: it is {inside}", trainer.label_smoother is not None
    yield "compute_loss_func", f"{_OFF}: {inside}", trainer.compute_loss_func is not None
    yield "inputs for metrics", "Leave them out of include_for_metrics", "inputs" in args.include_for_metrics
    yield "offloaded activations", "Leave out activation_offloading", getattr(args, "activation_offloading", False)
    auxiliary = _has_router_loss(trainer) and (by_samples or not _router_modules(model))
    yield "the loss of routers", "Set router_aux_loss_coef=0.0, or output_router_logits=False", auxiliary
    alone = "Take a causal language model of text"
    yield "images", alone, getattr(trainer, "_is_vlm", False) or hasattr(model.config, "vision_config")
    shifts = trainer._loss_shifts_labels and trainer.model_accepts_loss_kwargs
    known = by_samples or (shifts and not getattr(trainer.data_collator, "mlm", False))
    yield f"the loss of {type(model).__name__}", alone, not known
    prompts = [each for each in getattr(trainer.model, "peft_config", {}).values() if each.is_prompt_learning]
    yield "virtual tokens of PEFT", "Take LoRA", prompts
    packing = getattr(args, "packing", False)
    evaluated = packing if getattr(args, "eval_packing", None) is None else args.eval_packing
    wrapped = getattr(args, "packing_strategy", "") == "wrapped" and (packing or evaluated)
    yield "packing 'wrapped', which keeps no borders of documents", "Take packing_strategy='bfd'", wrapped
    yield "metrics of packed documents", "Set eval_packing=False", evaluated and trainer.compute_metrics is not None


THEIRS = ("trl.", "transformers.")
BY_ROWS = ("Trainer", "SFTTrainer")
WITH_REMAINDER = ("DPOTrainer", "KTOTrainer", "RewardTrainer")  # the others' groups are whole
BY_SAMPLES = ("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer")


def _kind(trainer: Any) -> str:
    """The class of Transformers' or TRL's that a trainer is."""
    # TRL's own base stands between its trainers and Transformers'.
    others = [each for each in type(trainer).__mro__ if not issubclass(each, BalancedTrainer)]
    theirs = [each for each in others if each.__module__.startswith(THEIRS)]
    return next((each.__name__ for each in theirs if not each.__name__.startswith("_")), Trainer.__name__)


def _kinds(trainer: Any) -> Iterator[tuple[str, str, Any]]:
    """The trainer's class, as `_unlike`: one whose loss, or way to generate, is not known."""
    theirs = [each for each in type(trainer).__mro__ if each.__module__.startswith(THEIRS)]
    yield f"{_kind(trainer)}'s loss", _OTHER, _kind(trainer) not in (*BY_ROWS, *BY_SAMPLES)
    continuous = getattr(trainer.args, "use_transformers_continuous_batching", False)
    yield "continuous batching", "Leave out use_transformers_continuous_batching", continuous
    for name in ("compute_loss", "prediction_step", "training_step", "get_batch_samples"):
        owner = next(each for each in type(trainer).__mro__ if name in vars(each))
        own = owner not in theirs and owner is not BalancedTrainer
        yield (
            f"{name} of {owner.__name__}",
            "Leave that method to the trainer, or " + _OTHER[0].lower() + _OTHER[1:],
            own,
        )


class _Flat:
    """A trainer's collator, whose documents stand one behind the other in one row, without padding."""

    def __init__(self, inner: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.inner = inner

    def __call__(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """A row of `input_ids`, `labels`, `shift_labels`, and `position_ids`, which begin at 0 in each
        document. DataError: what the collator made does not say where documents lie.
        """
        given = [each for each in examples if each is not None]  # `_EachOnce` has these
        return _row(_read(self.inner(given), given) if given else [])


def _read(made: Mapping[str, Any], examples: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document of a collator's batch."""
    beyond = [name for name in made if name not in (*PER_TOKEN, *BORDERS)]
    shapes = {name: tuple(made[name].shape) for name in PER_TOKEN if isinstance(made.get(name), Tensor)}
    if beyond or not {"input_ids", "labels"} <= shapes.keys() or len(set(shapes.values())) > 1:
        raise DataError(
            f"expected {', '.join(PER_TOKEN)} [rows, tokens] of the collator, with input_ids and labels, got "
            f"{', '.join(beyond) or shapes}; a model balanced here takes tokens alone"
        )
    ids, labels, mask, positions = (cast("Any", made.get(name)) for name in PER_TOKEN)
    lengths = [len(each["input_ids"]) for each in examples if isinstance(each, Mapping) and "input_ids" in each]
    known = sum(lengths) if len(lengths) == len(examples) else None
    if mask is None and len(ids) == 1 and known is not None:  # padded at its end to a multiple
        ids, labels = ids[:, :known], labels[:, :known]
        positions = None if positions is None else positions[:, :known]
    documents: list[tuple[Tensor, Tensor]] = []
    for row in range(len(ids)):
        kept = slice(None) if mask is None else mask[row].bool()
        own = (ids[row][kept], labels[row][kept])
        if positions is None:
            documents += [own] if len(own[0]) else []
        else:
            parts = _lengths(positions[row][kept])
            documents += zip(*(each.split(parts) for each in own), strict=True)
    got = sum(len(tokens) for tokens, _ in documents)
    if got != known if known is not None else mask is None and positions is None:
        raise DataError(
            f"expected the collator to say which of {ids.numel()} tokens are padding, got {got} for documents of "
            f"{'unknown lengths' if known is None else f'{known} tokens'}; have it give attention_mask"
        )
    return documents


def _row(documents: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    none = torch.zeros(0, dtype=torch.int64)
    return {
        "input_ids": torch.cat([none, *(tokens for tokens, _ in documents)])[None],
        "labels": torch.cat([none, *(labels for _, labels in documents)])[None],
        "shift_labels": torch.cat([none, *(F.pad(labels[1:], (0, 1), value=IGNORED) for _, labels in documents)])[None],
        "position_ids": torch.cat([none, *(torch.arange(len(tokens)) for tokens, _ in documents)])[None],
    }


def _documents(row: Mapping[str, Tensor], name: str) -> tuple[Tensor, ...]:
    """The documents' parts of a row of `_row`."""
    lengths = _lengths(row["position_ids"][0])
    return row[name][0].split(lengths) if lengths else ()


def _lengths(positions: Tensor) -> list[int]:
    """Lengths of documents, which begin where a position is 0. DataError: none begins at the first."""
    starts = (positions == 0).nonzero().flatten().tolist()
    if len(positions) and starts[:1] != [0]:
        raise DataError(f"expected position_ids that begin at 0 in every document, got {positions[:3].tolist()} first")
    return [stop - start for start, stop in pairwise([*starts, len(positions)])]


def _padded(documents: Sequence[Tensor], like: Tensor, rows: int) -> Tensor:
    """Documents [n, ...] as [rows, longest, ...], like theirs: what none has is `IGNORED`."""
    made = pad_sequence([*documents, like[:0]], batch_first=True, padding_value=IGNORED)[:-1]
    made = F.pad(made, [0, 0] * (made.ndim - 2) + [0, max(0, 1 - made.shape[1])], value=IGNORED)
    return F.pad(made, [0, 0] * (made.ndim - 1) + [0, rows - len(made)], value=IGNORED)


@contextmanager
def _whole(accelerator: Any) -> Iterator[None]:
    """Have sums over ranks count all of them: theirs drop the last ranks' in a last, short batch."""
    loader = accelerator.gradient_state.active_dataloader
    kept = getattr(loader, "remainder", None)
    if loader is not None:
        loader.remainder = 0
    yield
    if loader is not None:
        loader.remainder = kept


_ROUTER_LOSS = "load_balancing_loss_func"  # as Transformers' models call it


def _has_router_loss(trainer: Any) -> bool:
    of_model = getattr(unwrapped(trainer.model).config, "output_router_logits", False)
    return bool(getattr(trainer, "aux_loss_enabled", of_model))


def _router_modules(model: Any) -> list[Any]:
    """Modules in which the loss of a model's routers is looked up: its own; TRL takes Mixtral's."""
    if not hasattr(sys.modules[type(model).__module__], _ROUTER_LOSS):
        return []
    return [sys.modules[type(model).__module__], import_module("transformers.models.mixtral.modeling_mixtral")]


@contextmanager
def _router_loss(trainer: Any) -> Iterator[None]:
    """Have the loss of routers be that of the tokens of all ranks: the mean of ranks' is another."""
    modules = dict.fromkeys(_router_modules(unwrapped(trainer.model)) if _has_router_loss(trainer) else ())
    # Transformers' `Trainer` multiplies the whole loss by it, TRL what is not of the routers.
    ranks = 1 if hasattr(trainer, "aux_loss_enabled") else trainer.accelerator.num_processes

    def of_all(logits: tuple[Tensor, ...], _: int, top_k: int = 2, *__: Any) -> Tensor:
        return trainer._batch.router_loss(logits, top_k, attended=0) / ranks  # the loss is looked at

    kept = {module: getattr(module, _ROUTER_LOSS) for module in modules}
    for module in modules:
        setattr(module, _ROUTER_LOSS, of_all)
    try:
        yield
    finally:
        for module, theirs in kept.items():
            setattr(module, _ROUTER_LOSS, theirs)


class _AllInStep(BatchSamplerShard):
    """The batches of a rank: as many on all ranks, the last short or empty where documents end."""

    def __len__(self) -> int:
        """As many as the rank with most has; whole rounds alone where the last are dropped."""
        batches = len(self.batch_sampler)
        return batches // self.num_processes if self.drop_last else -(-batches // self.num_processes)

    def __iter__(self) -> Iterator[list[Any]]:
        """Every round, this rank's batch."""
        batches = iter(self.batch_sampler)
        while held := list(islice(batches, self.num_processes)):
            if len(held) == self.num_processes or not self.drop_last:
                yield self._own(held)

    def _own(self, held: list[list[Any]]) -> list[Any]:
        """This rank's batch of a round."""
        return held[self.process_index] if self.process_index < len(held) else []


class _RemainderToAll(_AllInStep):
    """As `_AllInStep`, but where a round has not as many on each rank, all of it for every rank."""

    def _own(self, held: list[list[Any]]) -> list[Any]:
        even = len(held) == self.num_processes and len(held[-1]) == len(held[0])
        return super()._own(held) if even else [each for batch in held for each in batch]


class _WholeStream(IterableDataset[Any]):
    """A stream that every rank reads as a whole: Accelerate would hand out its files, unevenly."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def set_epoch(self, epoch: int) -> None:
        """Hand it on, where the stream takes it."""
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]


class _EachOnce(IterableDatasetShard):
    """A rank's part of a stream, batch by batch; None fills the last one up, so that all ranks have
    as many batches.
    """

    def __iter__(self) -> Iterator[Any]:
        """Every round, this rank's batch."""
        stream, whole = iter(self.dataset), self.num_processes * self.batch_size
        while held := list(islice(stream, whole)):
            first = self.process_index * self.batch_size
            own = held[first : first + self.batch_size]
            if len(held) == whole:
                yield from own
            elif not self.drop_last:
                yield from self._last(held, own)

    def _last(self, held: list[Any], own: list[Any]) -> list[Any]:
        """The items of a round that has not as many for each rank."""
        del held
        return own + [None] * (self.batch_size - len(own))


class _RemainderOfStream(_EachOnce):
    """As `_EachOnce`, but where a round has not as many for each rank, all of it, as one item, for
    every rank.
    """

    def _last(self, held: list[Any], own: list[Any]) -> list[Any]:
        del own
        return [held]


def _of_remainder(collate: Callable[[Any], Any], items: Sequence[Any]) -> Any:
    """A batch of a stream that `_RemainderOfStream` reads."""
    return collate(items[0] if isinstance(items[0], list) else items)

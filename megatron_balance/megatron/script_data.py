"""Identity of the training samples of a script's own data set (`data: script`).

Facts are of contents: a corpus is the sizes of its files and pieces of them, wherever it lies.
Which sample comes when, a data set decides by itself; so the tokens of a few samples are read, by
number, and digested. The one rank that reads them tells all others.
"""

import argparse
import hashlib
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_balance.megatron.groups import job_device
from megatron_balance.training.ledger import DataIdentity

log = logging.getLogger(__name__)

PIECES = 16
PIECE_BYTES = 4096  # of each file of a corpus, so many pieces of that size are digested, spread over it
FIRST_TOKENS = 256  # of a sample; no padding among them, of which `--sft` has another at each number of ranks
PATIENCE_S = 60.0
FILES = ("", ".idx", ".bin")
PATH_OPTIONS = ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "mock_data")


class ScriptData:
    """A script's training set. `kept`: it is read, on all ranks; `dataset`: None: not by this one."""

    def __init__(self) -> None:
        self.kept = False
        self.dataset: Any = None
        self._identity: DataIdentity | None = None

    def identity(self, args: argparse.Namespace) -> DataIdentity:
        """Identity of its samples; unknown if not kept. Collective (world) at the first call."""
        if self._identity is None:
            self._identity = agreed(self.dataset, args) if self.kept else DataIdentity()
        return self._identity


def agreed(dataset: Any, args: argparse.Namespace) -> DataIdentity:
    """Identity of a script's samples. Collective (world). `dataset`: None: not read by this rank."""
    has = torch.tensor([dist.get_rank() if dataset is not None else dist.get_world_size()], device=job_device())
    # Of the ranks that have a training set, the one of the lowest number reads it.
    dist.all_reduce(has, dist.ReduceOp.MIN)
    reader = int(has)
    told: list[DataIdentity] = [DataIdentity()]
    if reader == dist.get_world_size():
        log.warning("data: no rank has a training set of the script, so a resume with another one is not noticed")
        return told[0]
    if dist.get_rank() == reader:
        try:
            told = [_identify(dataset, args)]
        except Exception as error:  # any: the data set is somebody else's, and the other ranks wait
            log.warning(
                "data: the script's data set does not say what it is (%s: %s), so a resume with another one is not "
                "noticed",
                type(error).__name__,
                error,
            )
    dist.broadcast_object_list(told, reader)
    return told[0]


def _identify(dataset: Any, args: argparse.Namespace) -> DataIdentity:
    """Identity of a training set: its facts, and digests of some samples."""
    # A blend of Megatron's has parts (`datasets`), and each part its corpus (`dataset_path`,
    # `dataset`), the sequences that it draws from (`indices`) and its settings (`config`).
    parts = list(getattr(dataset, "datasets", None) or [dataset])
    config = getattr(parts[0], "config", None)
    facts = {
        "data set": type(parts[0]).__name__,
        "--seq-length": str(getattr(config, "sequence_length", args.seq_length)),
        "--seed": str(getattr(config, "random_seed", args.seed)),
        "order": _order(dataset, args),
    }
    weights = [float(weight) for weight in getattr(dataset, "weights", ())]
    if len(weights) > 1:
        facts["blend"] = ", ".join(f"{weight / sum(weights):.6g}" for weight in weights)
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        if not hasattr(part, "dataset_path"):
            # Of another data set the class is known, and what the command line says.
            facts |= {f"--{name.replace('_', '-')}": _of_option(getattr(args, name, None)) for name in PATH_OPTIONS}
            continue
        name = f"corpus {number}"
        facts[name] = _of_corpus(part)
        if part.dataset_path is not None:
            places[name] = str(part.dataset_path)
    return DataIdentity.of_script(facts, places, _of_samples(dataset, args, config))


def _order(dataset: Any, args: argparse.Namespace) -> str:
    if args.dataloader_type != "cyclic":
        return str(args.dataloader_type)
    replicas = parallel_state.get_data_parallel_world_size()
    by_replica = (
        f", in {replicas} parts of {args.micro_batch_size} each" if getattr(args, "data_sharding", True) else ""
    )
    return f"cyclic, {len(dataset)} samples{by_replica}"


def _of_option(value: Any) -> str:
    """An option that says data: words that are no path as they are, paths by the contents."""
    words: Sequence[Any] = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]
    return " ".join(_content(str(word)) or str(word) for word in words)


def _of_corpus(part: Any) -> str:
    low: Any = part.dataset
    lengths = getattr(low, "sequence_lengths", None)
    total = len(low) if lengths is None else len(lengths)
    known = None if part.dataset_path is None else _content(str(part.dataset_path))
    if known is None:  # made up, or behind a name that is no file here
        known = type(low).__name__
    drawn: Any = getattr(part, "indices", ())
    run = f", {len(drawn)} from {drawn[0]} to {drawn[-1]} of them" if len(drawn) else ", none of them"
    return f"{total} sequences{run}, {known}"


def _content(prefix: str) -> str | None:
    """Bytes of the files at a path or prefix, and a digest of pieces of them; None: no file there."""
    found = [path for path in (Path(f"{prefix}{end}") for end in FILES) if path.is_file()]
    digest, total = hashlib.sha256(), 0
    for path in found:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            total += size
            last = max(0, size - PIECE_BYTES)
            # Pieces spread over the file, its end among them.
            for at in dict.fromkeys(last * piece // (PIECES - 1) for piece in range(PIECES)):
                stream.seek(at)
                digest.update(stream.read(PIECE_BYTES))
    return f"{total} bytes {digest.hexdigest()[:8]}" if found else None


def _numbers(num_samples: int) -> list[int]:
    """The samples that are read: the first one, and those at powers of two."""
    powers = itertools.takewhile(lambda number: number < num_samples, (1 << power for power in itertools.count()))
    return [*range(min(num_samples, 1)), *powers]


def _of_samples(dataset: Any, args: argparse.Namespace, config: Any) -> dict[int, str]:
    """Digests of some samples' tokens, by number; none where a number does not say the tokens."""
    if args.dataloader_type == "external" or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        reason = "it is no list of samples"
    elif getattr(args, "fim_data", False):
        reason = "--fim-data draws at random"
    else:
        wanted = _numbers(len(dataset))
        pad = None
        with suppress(Exception):  # tokenizers without one raise this and that
            pad = config.tokenizer.pad
        try:
            # In a process of its own: reading changes a data set that draws at random, or that keeps
            # what it read first, as Megatron's GPTDataset does a mask.
            loader: Any = torch.utils.data.DataLoader(
                dataset,
                batch_size=None,
                # Each twice: a data set that draws at random gives others.
                sampler=wanted * 2,
                num_workers=1,
                timeout=PATIENCE_S,
                generator=torch.Generator(),
                collate_fn=_Digest(pad),
            )
            found = [str(each) for each in loader]
        except Exception as error:  # any: the data set is somebody else's
            reason = f"samples {wanted} cannot be read: {type(error).__name__}: {error}"
        else:
            if found[: len(wanted)] == found[len(wanted) :]:
                return dict(zip(wanted, found, strict=False))
            reason = "it gives other tokens each time it is read"
    log.warning("data: no samples of the script's data set are compared where a run goes on (%s)", reason)
    return {}


class _Digest:
    """Digest a sample's first tokens; of one without tokens, all that it holds, by 12 digits."""

    def __init__(self, pad: Any) -> None:
        self._pad = pad

    def __call__(self, sample: Any) -> str:
        tokens = sample.get("tokens") if isinstance(sample, Mapping) else None
        if tokens is None:
            digest = hashlib.sha256()
            for each in _leaves(sample):
                digest.update(each)
            return digest.hexdigest()[:12]
        flat = torch.as_tensor(cast("Tensor", tokens)).reshape(-1).long()
        kept = flat if self._pad is None else flat[flat != self._pad]
        return hashlib.sha256(kept[:FIRST_TOKENS].numpy().astype("<i8").tobytes()).hexdigest()[:8]


def _leaves(sample: Any) -> Iterator[bytes]:
    # Whole tensors and arrays, of which `repr` shows no more than a few.
    match sample:
        case Mapping():
            for key, value in cast("Mapping[Any, Any]", sample).items():
                yield from (repr(key).encode(), *_leaves(value))
        case list() | tuple():
            for value in cast("Sequence[Any]", sample):
                yield from _leaves(value)
        case torch.Tensor() | np.ndarray():
            yield f"{sample.dtype} {tuple(sample.shape)} {sample.tolist()}".encode()
        case _:
            yield repr(sample).encode()

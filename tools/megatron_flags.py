"""Megatron's flags that every small training of the tests and tools shares, and flags as words of a
command line.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

GPT: Mapping[str, Any] = {
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "attention-dropout": 0,
    "hidden-dropout": 0,
}
"""A GPT as the Llamas are, of any size, whose loss depends on nothing random."""

LOOP: Mapping[str, Any] = {
    "micro-batch-size": 1,
    "tokenizer-type": "NullTokenizer",
    "make-vocab-size-divisible-by": 16,
    "eval-iters": 0,
    "eval-interval": 100_000,
    "log-interval": 1,
    "num-workers": 0,
    "calculate-per-token-loss": True,
}
"""Training without evaluation, every step logged, every token of the same weight."""

LOCAL_LAYERS: Mapping[str, Any] = {
    "transformer-impl": "local",
    "no-gradient-accumulation-fusion": True,
    "no-masked-softmax-fusion": True,
    "no-rope-fusion": True,
    "no-persist-layer-norm": True,
}
"""Megatron's own layers, without Transformer Engine and apex."""


def command_line(*tables: Mapping[str, Any]) -> list[str]:
    """Words of a command line.

    Args:
        tables: values of flags, later tables winning. True: a flag without a value; a list or
            tuple: one with several; False and None leave it out.
    """
    flags = {name: value for table in tables for name, value in table.items()}
    return list(chain.from_iterable(_words(name, value) for name, value in flags.items()))


def _words(name: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, list | tuple) else [value])]

"""A process in which "cuda" means "cpu": how Megatron's own loop runs on machines without a GPU.

Loaded by `--balance-device cpu` and nothing else, before Megatron is imported. Every effect is
process-wide and lasts. Step times say nothing about balance.
"""

import collections
import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_balance.errors import ConfigError

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided"),
)
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_MARK = "_megatron_balance_cpu"


def installed() -> bool:
    """Whether "cuda" means "cpu" in this process."""
    return hasattr(torch, _MARK)


def install() -> None:
    """Make "cuda" mean "cpu" in this process, and warn. ConfigError: Megatron was imported already."""
    if installed():
        return
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "--balance-device cpu must be known before Megatron is imported; start with megatron_balance's own entry "
            "points"
        )
    # Factories and tensor methods are wrapped once; a global TorchFunctionMode does the same and
    # was measured to cost 20 % a step.
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    _replace_tensor_methods()
    _replace_cuda_module()
    # Megatron compiles small functions while it is imported; without a GPU the compiler is slower
    # than what it would speed up.
    torch.compile = _not_compiled
    # A torch built for CUDA asks the driver when a DataLoader pins memory.
    torch.accelerator.is_available = lambda: False
    # There is one generator, and Megatron says so each time.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    setattr(torch, _MARK, True)
    log.warning(
        "--balance-device cpu: in this process 'cuda' means the CPU. This is for tests and demonstrations; step times "
        "do not show balance."
    )


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return made


def _replace_tensor_methods() -> None:
    to, type_ = torch.Tensor.to, torch.Tensor.type

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return to(self, *args, **kwargs)

    def type_named_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizer tells parameters apart by names such as 'torch.cuda.FloatTensor'.
        return type_(self, *args, **kwargs) if args or kwargs else type_(self).replace("torch.", "torch.cuda.", 1)

    def itself(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    torch.Tensor.to = to_cpu
    torch.Tensor.type = type_named_cuda
    torch.Tensor.cuda = itself
    torch.Tensor.pin_memory = itself
    torch.Tensor.record_stream = lambda self, s: None  # noqa: ARG005  the method's own signature
    torch.nn.Module.cuda = itself


class _DoneStream:
    """A stream or event on which everything has happened already."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def __enter__(self) -> "_DoneStream":
        return self

    def __exit__(self, *_exc: object) -> bool:
        return False

    def elapsed_time(self, _other: object) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_args: Any) -> "_DoneStream":
        return self


class _Device(contextlib.nullcontext[None]):
    def __init__(self, _device: object = None) -> None:
        super().__init__()


class _Generators:
    def __getitem__(self, _index: int) -> torch.Generator:
        return torch.default_generator


def _replace_cuda_module() -> None:
    properties = types.SimpleNamespace(major=10, minor=0, name="cpu", total_memory=8 << 30, multi_processor_count=1)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "current_stream": _DoneStream(),
        "default_stream": _DoneStream(),
        "set_stream": None,
        "is_current_stream_capturing": False,
        # From capability 10 on Megatron asks for no CUDA_DEVICE_MAX_CONNECTIONS, which means
        # nothing here.
        "get_device_capability": (10, 0),
        "get_device_properties": properties,
        "get_device_name": "cpu",
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "device_memory_used": 0,
        "memory_stats": collections.defaultdict(int),
        "ipc_collect": None,
        "manual_seed_all": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, functools.partial(_answer, answer))
    replacements: dict[str, Any] = {
        "Stream": _DoneStream,
        "Event": _DoneStream,
        "ExternalStream": _DoneStream,
        "stream": lambda _stream: contextlib.nullcontext(),
        "device": _Device,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "get_rng_state": lambda device=None: torch.get_rng_state(),  # noqa: ARG005  the function's own signature
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),  # noqa: ARG005
        "default_generators": _Generators(),
        "_lazy_call": lambda call, **_kwargs: call(),
        "nvtx": types.SimpleNamespace(range_push=_none, range_pop=_none, mark=_none),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, replacements[name])


def _answer(answer: Any, *_args: Any, **_kwargs: Any) -> Any:
    return answer


def _none(*_args: Any) -> None: ...


def _not_compiled(model: Any = None, **_kwargs: Any) -> Any:
    """`torch.compile` that returns its argument; also as a decorator with options."""
    return model if model is not None else lambda function: function

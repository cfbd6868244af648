"""Imported once, by the server that the pool's ranks are forked from: what their jobs need."""

import gc
import importlib
import importlib.util
import os

from tests.support import one_device

# Triton reads it when it is imported, which any job may do first
os.environ["TRITON_INTERPRET"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a thread would be in the way of forks
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

NEEDED = [
    "torch._dynamo",  # by a dispatch mode
    "torch.fx.experimental.symbolic_shapes",  # by a first backward
    "tests.support.nano_batches",
    "tests.support.jobs",
    "tests.support.recurrent_jobs",
    "tests.support.routed",
]
if importlib.util.find_spec("triton") is not None:
    NEEDED += ["megatron_balance.runtime.movers.triton.mover", "triton.experimental.gluon"]
if importlib.util.find_spec("trl") is not None:  # 4 s of processor, which each rank would take
    NEEDED += ["tests.support.trainer_jobs"]
    NEEDED += ["transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"]

for name in NEEDED:
    importlib.import_module(name)
one_device.install()
# Nobody collects these, so that a collection in a rank takes no half second and its pages stay
# shared.
gc.freeze()

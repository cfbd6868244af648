"""Settings of a balancer, beside its planner, its model and its ranks."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import get_args
from weakref import WeakValueDictionary

import torch

from megatron_balance.compile.transpose import POLICIES, Policy
from megatron_balance.config import load_cluster
from megatron_balance.errors import ConfigError
from megatron_balance.ir.batch import at_least
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.mask import mask_named
from megatron_balance.ir.model import GradientWire, Model
from megatron_balance.ir.step import Layers
from megatron_balance.model_config import check, facts, num_layers, value
from megatron_balance.profiling.hardware import cluster_of_machine
from megatron_balance.runtime.kernels import KERNELS
from megatron_balance.training.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a `SequenceBalancer`; equal on all ranks. Every one has a default.

    Attributes:
        ranks_per_node: ranks of the job on a node; None: nodes are told apart by host name.
        cluster: the machine that planners count on: a `Cluster`, a preset such as "h200", or a
            YAML file; None: GPUs say what they are, and a CPU counts as an H200. Sizes are the job's.
        layers: remapping and routing around the planner; None: what its own system does.
        plan_costs: cost table of `megatron-balance profile`; None: data sheets.
        mask: of attention within a document: "causal", "full", or "window_4096" for a sliding window
            of so many keys; None: as the model has it.
        shift_labels: whether a document's labels are those of its own tokens, as Transformers has
            them, so that the label of an output is the next token's; else they are the outputs'.
        row_multiple: a rank's rows are padded to a multiple of it, for linear layers that need one.
        backward: "keep" keys and values that a rank received until the backward, or "replay": receive
            them again.
        kernel: of attention, by name, or "auto".
        gradient_wire: type that gradients of queries, keys and values travel in.
        state_wire: type that states of recurrent layers, and their gradients, travel in.
        compiled: layers are compiled by torch.compile: attention is an operator of their graphs, and
            plans are looked up when a batch is made; else graphs break there.
        device: of the batches; None: of the mesh.
        prove_every: the process that plans ahead (`SequenceBalancer.steps`) proves the plans of the
            first steps and then of every so many, while nobody waits for it; 0: of none.
        log_folder: where the first rank writes a record of every training step of the balancer, with a
            figure of each rank, for `megatron-balance report`; None: nowhere.
        trace_steps: training steps of the balancer, counted from 1, of which every rank writes a
            trace. All ranks of the job wait for one another at the beginning of each.
        trace_folder: where to; `megatron-balance trace` joins its files.
    """

    ranks_per_node: int | None = None
    cluster: str | Cluster | None = None
    layers: Layers | None = None
    plan_costs: str | Path | None = None
    mask: str | None = None
    shift_labels: bool = True
    row_multiple: int = 1
    backward: Policy = "keep"
    kernel: str = "auto"
    gradient_wire: GradientWire = "fp32"
    state_wire: GradientWire = "fp32"
    compiled: bool = False
    device: torch.device | str | None = None
    prove_every: int = 100
    log_folder: str | Path | None = None
    trace_steps: tuple[int, ...] = ()
    trace_folder: str | Path | None = None

    def __post_init__(self) -> None:
        """Check what no planner checks."""
        if self.mask is not None:
            mask_named(self.mask)
        for name, number in (("row_multiple", self.row_multiple), ("ranks_per_node", self.ranks_per_node)):
            if number is not None:
                at_least(1, name, number)
        at_least(0, "prove_every", self.prove_every)
        self._check_traces()
        for name in ("shift_labels", "compiled"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if not isinstance(self.cluster, (str, Cluster, NoneType)):
            raise ConfigError(f"cluster: expected a name, a YAML file or a Cluster, got {self.cluster!r}")
        if not isinstance(self.plan_costs, (str, Path, NoneType)):
            raise ConfigError(f"plan_costs: expected a file, got {self.plan_costs!r}")
        known = {
            "backward": POLICIES,
            **dict.fromkeys(("gradient_wire", "state_wire"), get_args(GradientWire)),
            "kernel": ("auto", *KERNELS),
        }
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: expected one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.layers is not None and not isinstance(self.layers, Layers):
            raise ConfigError(f"layers: expected a megatron_balance.ir.step.Layers, got {self.layers!r}")
        self._check_device()

    def _check_device(self) -> None:
        if self.device is not None:
            try:
                torch.device(self.device)
            except RuntimeError as error:
                raise ConfigError(f"device: {error}") from None
            except TypeError:
                raise ConfigError(f"device: expected a torch.device or its name, got {self.device!r}") from None

    def _check_traces(self) -> None:
        if not isinstance(self.trace_steps, (tuple, list)):
            raise ConfigError(f"trace_steps: expected numbers of steps, got {self.trace_steps!r}")
        for step in self.trace_steps:
            at_least(1, "trace_steps", step)
        for name in ("log_folder", "trace_folder"):
            if not isinstance(getattr(self, name), (str, Path, NoneType)):
                raise ConfigError(f"{name}: expected a folder, got {getattr(self, name)!r}")
        if self.trace_steps and self.trace_folder is None:
            raise ConfigError(f"trace_steps {list(self.trace_steps)}: give trace_folder too, where traces go")

    def cluster_of(self, pool: Pool, device: torch.device) -> Cluster:
        """The pool as planners see it. Collective over the world where the machine is read."""
        if isinstance(self.cluster, str):
            return load_cluster(self.cluster).build(num_ranks=pool.size, ranks_per_node=pool.ranks_per_node)
        if self.cluster is None:
            read = cluster_of_machine(None) if device.type == "cuda" else None
            if read is None:
                return Cluster(pool.size, pool.ranks_per_node, name="job")
            return read.build(num_ranks=pool.size, ranks_per_node=pool.ranks_per_node).with_kernel(self.kernel)
        if (self.cluster.num_ranks, self.cluster.node_size) != (pool.size, min(pool.ranks_per_node, pool.size)):
            raise ConfigError(
                f"cluster {self.cluster.name} has {self.cluster.num_ranks} ranks, {self.cluster.node_size} on a node; "
                f"the balancer's ranks are {pool.size}, {pool.ranks_per_node} on a node"
            )
        return self.cluster


# Configurations of layers that passed, by their `id` and what was accepted.
_checked: WeakValueDictionary[tuple[int, frozenset[str], bool], object] = WeakValueDictionary()


def model_of(config: object, accept: Collection[str] = ()) -> Model:
    """The model that a configuration describes: a `megatron_balance.Model`, or a configuration with
    Transformers' names, torchtitan's or GPT-2's: an object with attributes, or a mapping.

    `accept`: names that a refusal said, to go on with them (`model_config.check`). ConfigError:
    heads, or the hidden size, are not said; a model type or key not proved to attend as plans have
    it.
    """
    if isinstance(config, Model):
        return config
    dtype = value(config, "dtype")
    return Model(
        **facts(config, accept, hybrid=True), bytes_per_element=dtype.itemsize if isinstance(dtype, torch.dtype) else 2
    )


def calls_of(config: object, model: Model) -> int | None:
    """Calls under a plan that a forward makes, of the text model that a configuration says; None: it
    does not say, or is a `Model`.
    """
    if isinstance(config, Model):
        return None
    own = model.recurrent
    return num_layers(config) if own is None else own.attention_layers + own.layers


def check_layer(layer: torch.nn.Module, accept: Collection[str], *, hybrid: bool) -> None:
    """Refuse a layer that is not proved to attend as planned, of a configuration not seen before.
    `hybrid`: whether the recurrent layers beside it run under plans.
    """
    config = getattr(layer, "config", None)
    key = (id(config), frozenset(accept), hybrid)
    if config is not None and _checked.get(key) is not config:
        check(config, accept, hybrid=hybrid)
        _checked[key] = config

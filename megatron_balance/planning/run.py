"""The configuration of a run, its planner looked up in the registry: what the command line and
training load.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from pydantic import InstanceOf

from megatron_balance.config import RemapChoice, RoutingChoice, RunConfig, read_config
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.model import Model
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import PlannerChoice, choose_layers, choose_planner
from megatron_balance.strict_yaml import STRICT, checked


class Run(RunConfig):
    """A run whose planner has been chosen, with its options checked and its layers."""

    model_config = STRICT

    planner: InstanceOf[PlannerChoice] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]  models are frozen
    """The planner, its options and layers. Required in training."""


def load_config(path: str | Path, *, planner: str | None = None, cluster: str | None = None) -> Run:
    """The configuration in a YAML file; `planner` and `cluster`: names or absolute paths in place of
    its own sections.

    Raises:
        ConfigError: the file is not there, is not YAML, repeats a key, or has an unknown, missing
            or mistyped key.
    """
    instead = {"planner": planner, "cluster": cluster}
    config = read_config(path, tuple(PLANNERS), {key: name for key, name in instead.items() if name is not None})
    section, chosen = config.planner, None
    if section is not None:
        where = f"{section.source}: {section.where or 'planner'}"
        given = section.given
        if section.name in PLANNERS:
            given = checked(PLANNERS[section.name].options, given, section.source, section.where, ("name",))
        chosen = choose_planner(section.name, given, where)
        layers = choose_layers(section.name, config.routing, config.remap, config.once_per_node)
        chosen = dataclasses.replace(chosen, layers=layers)
    keys: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    keys["planner"] = chosen
    return Run(**keys)


def resolved(config: Run) -> dict[str, Any]:
    """Everything the run was told and every default it took, as plain data; written beside every
    result.
    """
    planner, cluster, model = config.planner, config.cluster, config.model
    told = (
        {"routing", "remap", "once_per_node"} if planner is not None else set[str]()
    )  # then the planner's layers say so
    body = config.model_dump(exclude={"source", "planner", "cluster", "model"} | told, exclude_none=True, mode="json")
    sections: dict[str, Any] = {}
    if planner is not None:
        sections["planner"] = {"name": planner.name, **dataclasses.asdict(planner.options)}
        layers = planner.layers
        how = RemapChoice(when=layers.remap_when, solver=layers.solver)
        sections["routing"] = RoutingChoice(when=layers.routing, pieces=layers.pieces).model_dump()
        sections["remap"] = how.model_dump() if layers.remap else False
        sections["once_per_node"] = layers.once_per_node
    if cluster is not None:
        sections["cluster"] = dict(cluster.given)
    if model is not None:
        sections["model"] = {k: v for k, v in dataclasses.asdict(model).items() if k != "gradient_wire"}  # the run's
    return {**sections, **body}


def as_yaml(facts: Cluster | Model) -> str:
    """A cluster or a model as YAML that `--cluster` and `--model` read back."""
    of_run = "gradient_wire"  # a key of the run
    keys = {key: value for key, value in dataclasses.asdict(facts).items() if value is not None and key != of_run}
    return yaml.safe_dump(keys, sort_keys=False)


def to_yaml(config: Run) -> str:
    """`resolved(config)` as YAML that `load_config` reads back."""
    return f"# Resolved from {config.source}: every default is written out.\n" + yaml.safe_dump(
        resolved(config), sort_keys=False
    )

"""A plan's layers by their masks, where not all layers of a model have the same."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megatron_balance.compile.halo import under
from megatron_balance.cost.perturbed import of_model
from megatron_balance.ir.mask import Mask
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.simulator.machine import Machine


class Masked(NamedTuple):
    """Layers under one mask: what runs there, on which machine, and their share of the layers."""

    plan: MicrobatchPlan
    machine: Machine
    share: float


def by_mask(plan: MicrobatchPlan, machine: Machine) -> list[Masked]:
    """The plan under each mask of the model's layers (`Model.mask_shares`)."""
    shares = machine.model.mask_shares
    return [Masked(under(plan, mask), under_mask(machine, mask), share) for mask, share in shares]


def under_mask(machine: Machine, mask: Mask) -> Machine:
    """The machine with a model all of whose layers have that mask."""
    model = _alike(machine.model, mask)
    return machine if model == machine.model else replace(machine, model=model, cost=of_model(machine.cost, model))


def _alike(model: Model, mask: Mask) -> Model:
    return replace(model, attention=mask.name, other_attention="", other_layers=0)

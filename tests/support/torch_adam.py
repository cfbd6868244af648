"""Lets Megatron's distributed optimizer over torch's Adam load a checkpoint, without Apex."""

# As it is, it asks for the one step that all states have before there are states, and takes that
# step for a tensor of each parameter.

import functools
from typing import Any


def install() -> None:
    # Let it load, in this process from now on.
    #
    # States of zeros are there before they are asked for, the step stays the optimizer's own, and
    # is not one tensor that each parameter adds to.
    import torch
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer: Any = distrib_optimizer.DistributedOptimizer
    inner = optimizer.state_dict

    @functools.wraps(inner)
    def state_dict(self: Any) -> Any:
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for each in group["params"]:
                    moments = {name: torch.zeros_like(each) for name in self.optimizer_state_keys}
                    self.optimizer.state[each] = {"step": torch.tensor(0.0), **moments}
        return inner(self)

    fill = optimizer._set_main_param_and_optimizer_states

    @functools.wraps(fill)
    def filled(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        fill(self, parameter, {"step": None, **tensors})

    load = optimizer.load_state_dict

    @functools.wraps(load)
    def loaded(self: Any, state: Any) -> None:
        load(self, state)
        for each in self.optimizer.state.values():
            each["step"] = each["step"].clone()

    optimizer.load_state_dict = loaded
    optimizer.state_dict, optimizer._set_main_param_and_optimizer_states = state_dict, filled

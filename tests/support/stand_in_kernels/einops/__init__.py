# type: ignore  # as much as Megatron's Mamba mixer asks for
"""einops by name, with the few rearrangements that Megatron's Mamba mixer trains with."""

_HOW = {
    "d 1 w -> d w": lambda x: x.squeeze(1),
    "l b d -> b l d": lambda x: x.transpose(0, 1),
    "b l d -> l b d": lambda x: x.transpose(0, 1),
    "(h p) -> h p": lambda x, p: x.unflatten(0, (-1, p)),
}


def rearrange(x, how, **sizes):
    return _HOW[how](x, **sizes)


def repeat(x, how, **sizes):
    raise NotImplementedError(how)

"""Prove a step's assignment: every sequence in one microbatch, whole, that holds it (docs/adr/0023).

What happens inside a microbatch is proved from its program (`compile.verify`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from megatron_balance.errors import InvalidProgramError
from megatron_balance.ir.step import Carry, Lengths, StepPlan


def verify_step(
    step: StepPlan, lengths: Lengths, before: Carry, after: Carry, max_tokens: Sequence[int] | None = None
) -> None:
    """Prove that a step trains or holds back each of its sequences, once.

    Args:
        step: a plan.
        lengths: of the sequences in tokens, as dealt.
        before: what the step was planned with, sequences that wait among it.
        after: what it carries on; the sequences held back are numbered as the next step sees them.
        max_tokens: by pipeline, the tokens that a microbatch holds; None: not limited.

    Raises:
        InvalidProgramError: names a sequence that is lost, or in two places, or cut; or a microbatch
            that holds less than is in it.
    """
    dealt = list(chain.from_iterable(lengths))
    known = dict(before.waiting) | dict(enumerate(dealt))
    trained = [seq for microbatch in step.members for part in microbatch for seq in part]
    held = [number + len(dealt) for number, _ in after.waiting]
    times = Counter([*trained, *held])
    wrong = sorted(seq for seq in times.keys() | known.keys() if times[seq] != 1 or seq not in known)
    if wrong:
        counts = ", ".join(f"s{seq} {times[seq]} times" for seq in wrong[:8])
        raise InvalidProgramError(f"expected each sequence of a step once, trained or held back; got {counts}")
    for number, length in after.waiting:
        if known[number + len(dealt)] != length:
            raise InvalidProgramError(
                f"s{number + len(dealt)} is held back with {length} tokens, and has another length"
            )
    for m, (microbatch, of) in enumerate(zip(step.members, step.plans_of, strict=True)):
        for part, at in zip(microbatch, of, strict=True):
            wanted, got = tuple(known[seq] for seq in part), step.plans[at].lengths
            if wanted != got:
                raise InvalidProgramError(
                    f"microbatch {m} has sequences of {list(wanted)} tokens, and its plan is of {list(got)}"
                )
    if max_tokens is None:
        return
    for pipeline, (own, most) in enumerate(zip(step.pipelines, max_tokens, strict=True)):
        for number, m in enumerate(own):
            tokens = sum(step.plans[at].num_tokens for at in step.plans_of[m])
            if tokens > most:
                raise InvalidProgramError(
                    f"microbatch {number} of pipeline {pipeline} has {tokens} tokens, and holds {most}"
                )

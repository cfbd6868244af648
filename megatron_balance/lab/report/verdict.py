"""Limits of a training run and suggestions, as far as its log tells: it knows times and plans, not
transfers.

What the log does not hold, no sentence claims: a step is split into waiting for a plan, computing
as the plan predicted it, and the rest.
"""

from __future__ import annotations

from megatron_balance.lab.report import words
from megatron_balance.lab.report.cases import Figures

WAITS = 0.02
"""Share of a step that waiting for plans may take before it is worth a word."""
UNEVEN = 1.1
"""Largest over mean load from which balance is worth a word."""
OFF = 0.5
"""A prediction below this share of the step says little about it."""
FOLLOWS = 0.6
"""Rank correlation from which step time is said to follow something."""
CROSSING = 0.25
"""Share of received keys and values that come from other nodes, from which routing is worth a word.
"""

NAMES = {
    "kv_tokens_received_inter_node": "keys and values received from other nodes",
    "kv_tokens_received": "keys and values received from other ranks",
    "predicted_ms": "the computing that the plan predicted",
    "num_tokens": "the number of tokens",
    "num_sequences": "the number of sequences",
    "kernel_calls": "the number of attention kernel calls",
    "remapped_tokens": "the tokens that are remapped",
    "plan_wait_ms": "waiting for the plan",
}


def limits(run: Figures) -> Figures:
    """A mean step's milliseconds by part, and a sentence on the largest."""
    means = run["means"]
    step_ms: float = means["step_ms"]
    wait = min(step_ms, means["plan_wait_ms"] or 0.0)
    predicted = min(step_ms - wait, means["predicted_ms"] or 0.0)
    uneven = _most(means, "imbalance_after")
    lost = predicted * (1 - 1 / uneven) if uneven else 0.0
    parts = {"plan_wait": wait, "imbalance": lost, "computing": predicted - lost, "rest": step_ms - wait - predicted}
    closest = max(run["follows"], key=lambda key: run["follows"][key], default=None)
    return {
        "kind": "measured",
        "step_ms": step_ms,
        "parts_ms": parts,
        "limit": max(parts, key=lambda part: parts[part]),
        "follows_most": closest,
        "sentence": _sentence(run, parts, closest),
    }


def _most(means: Figures, key: str) -> float | None:
    largest = [means[f"{key}.{part}"] for part in ("tokens", "attention") if means[f"{key}.{part}"] is not None]
    return max(largest, default=None)


def _sentence(run: Figures, parts: dict[str, float], closest: str | None) -> str:
    step_ms = sum(parts.values())
    largest = max(parts, key=lambda part: parts[part])
    share = f"{words.seconds(parts[largest] / 1e3)}, {words.percent(parts[largest] / step_ms)}"
    what = f"A step of {run['label']} took {words.seconds(step_ms / 1e3)} in the mean (measured)"
    match largest:
        case "plan_wait":
            return f"{what}, and waiting for plans limits it: {share} of it."
        case "computing" | "imbalance":
            return (
                f"{what}. Computing limits it: by the plans' predictions (simulated) "
                f"{words.percent((parts['computing'] + parts['imbalance']) / step_ms)} of it."
            )
        case _:
            if run["means"]["predicted_ms"] is None:
                return f"{what}; the log holds no prediction to hold it against." + _followed(run, closest)
            return (
                f"{what}. The plans predict {words.seconds((parts['computing'] + parts['imbalance']) / 1e3)} of "
                "computing in it "
                f"(simulated); the rest, {share} "
                "of it, is what they leave out (transfers, what surrounds the layers) or a machine that is slower "
                "than its configuration "
                "says." + _followed(run, closest)
            )


def _followed(run: Figures, closest: str | None) -> str:
    if closest is None or run["follows"][closest] < FOLLOWS:
        return ""
    agrees = f"rank correlation {run['follows'][closest]:.2f} over {words.count(run['steady_steps'], 'step')}"
    if closest == "predicted_ms":
        return f" From step to step the time follows that prediction ({agrees}): its order is right, its scale is not."
    return (
        f" From step to step the time follows {NAMES[closest]} most closely ({agrees}), which makes that the first "
        "suspect and proves "
        "nothing."
    )


def suggestions(run: Figures, split: Figures) -> list[str]:
    """Suggestions for which the log gives reason, with its figures; none of them was simulated or
    run.
    """
    means, parts, step_ms = run["means"], split["parts_ms"], split["step_ms"]
    sentences: list[str] = []
    wait = parts["plan_wait"] / step_ms
    if wait >= WAITS:
        sentences.append(
            "Plan ahead (`plan_ahead: true` in the configuration) or with a cheaper planner: steps waited "
            f"{words.seconds(parts['plan_wait'] / 1e3)} for plans in the mean, {words.percent(wait)} of a step "
            "(measured); that much could "
            "go."
        )
    uneven = _most(means, "imbalance_after")
    if uneven is not None and uneven >= UNEVEN:
        sentences.append(
            f"Balance better: the most loaded rank has {uneven:.2f} times the mean load (counted), so even loads "
            "would save up to "
            f"{words.percent(1 - 1 / uneven)} of what ranks compute. More capacity (`tokens_per_rank`) leaves a "
            "planner more choice."
        )
    crossing, received = means["kv_tokens_received_inter_node"], means["kv_tokens_received"]
    if crossing and received and crossing / received >= CROSSING:
        sentences.append(
            f"{words.percent(crossing / received)} of the received keys and values come from other nodes (counted): "
            "`routing: always` "
            "sends them over all NICs, and planners that keep sequences inside nodes send fewer."
        )
    predicted = means["predicted_ms"]
    if predicted is not None and predicted < OFF * step_ms:
        sentences.append(
            "Measure this machine with `megatron-balance profile`: the predictions (simulated) are "
            f"{words.percent(predicted / step_ms)} "
            "of the measured steps, and a cost table of its own (`plan_costs`) makes them its own."
        )
    sentences.append(_simulate(run))
    return sentences


def _simulate(run: Figures) -> str:
    config = f" --config {run['config']}" if run["config"] else ""
    ranks = f" --ranks {run['num_ranks']}" if run["num_ranks"] else ""
    tokens = run["means"]["num_tokens"]
    drawn = f" --tokens {round(tokens / (run['means']['num_microbatches'] or 1))}" if tokens else ""
    return (
        "Nothing was simulated for this page. To see by how much another planner, routing or NICs would help on "
        f"these very batches: `megatron-balance report --run {run['path']} --out next.html`; on others: "
        f"`megatron-balance report{config}{ranks} --dataset YOUR_CORPUS{drawn} --out next.html`."
    )

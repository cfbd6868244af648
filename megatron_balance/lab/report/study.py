"""A simulated comparison of planners as one JSON document: everything that its page says."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.errors import ConfigError, InfeasibleError
from megatron_balance.lab.report import advice, lanes, lengths, limits, load, placement, tries
from megatron_balance.lab.report.cases import Asked, Case, CaseProgress, Figures, PlayedCase
from megatron_balance.lab.report.standing import best_of, hold_against, runs, saving, standing
from megatron_balance.simulator.timeline import MOST_RANKS


def study(asked: Asked, progress: CaseProgress) -> Figures:
    """Compare all planners; of the baseline and the fastest other one (`shown`) also where everything
    goes, when, and what limits them. `best`: as in `compare`; None: no job can run any of them.

    Raises:
        ConfigError: the baseline cannot place the batch.
        InfeasibleError: a planner that was asked for cannot.
    """
    played, left_out = _play(asked, progress)
    base = next((each for each in played if each.name == asked.baseline), None)
    if base is None:
        raise ConfigError(f"--baseline {asked.baseline} cannot plan this batch: {left_out[asked.baseline]}")
    hold_against([each.row for each in played], base.row)
    best = _best(played, base)
    shown = [base] if best is base else [base, best]
    timelines, no_timeline = _timelines(shown, progress)
    case = best.case
    ranks_per_nic = case.machine.cluster.ranks_per_nic
    rows = sorted((each.row for each in played), key=standing)
    limiting = {each.name: limits.of(each.first_steps()) for each in progress(shown, "what limits the step")}
    tried = tries.of(asked, case.first_steps(), progress)
    memory_bytes = case.machine.cluster.memory_bytes
    return {
        "report": "simulated",
        "kind": "simulated",
        "answer": [
            *advice.answer(rows, (base.name, best.name), limiting[best.name], tried, memory_bytes),
            *([saving(best.row, base.row, asked.price) + "."] if best is not base and runs(best.row) else []),
        ],
        "asked": described(asked, case),
        "lengths": lengths.of_batches(case.batches, case.machine.model.mask),
        "rows": rows,
        "baseline": base.name,
        "best": best_of(rows),
        "shown": best.name,
        "left_out": left_out,
        "placement": {each.name: placement.of_plan(each.first_plan) for each in shown},
        "load": {each.name: load.of_plan(each.first_plan, case.machine.model, ranks_per_nic) for each in played},
        "timeline": timelines,
        "timeline_left_out": no_timeline,
        "limits": limiting,
        "try_next": {**tried, "suggestions": advice.suggestions(tried)},
    }


def _play(asked: Asked, progress: CaseProgress) -> tuple[list[PlayedCase], dict[str, str]]:
    """Steps of every planner, and the planners left out, with reasons.

    A planner that the user did not name is left out if it cannot place the batch.
    """
    played: list[PlayedCase] = []
    left_out: dict[str, str] = {}
    for case in progress(asked.cases, "planners"):
        try:
            played.append(asked.play(case))
        except InfeasibleError as error:
            if asked.explicit:
                raise
            left_out[case.choice.name] = str(error)
    return played, left_out


def _best(played: Sequence[PlayedCase], base: PlayedCase) -> PlayedCase:
    """The fastest one beside the baseline that a job can run (`runs`). Where there is none, the
    baseline if a job can run it, else the fastest that fits if any does.
    """
    others = [each for each in played if each is not base]
    if not any(runs(each.row) for each in others) and runs(base.row):
        return base
    return min(others, key=lambda each: standing(each.row), default=base)


def _timelines(shown: Sequence[PlayedCase], progress: CaseProgress) -> tuple[Figures, str]:
    case = shown[0].case
    if case.setup.transport == "sockets":
        return {}, "With --transport sockets ranks have no streams, which is what a timeline shows."
    if case.machine.num_ranks > MOST_RANKS:
        return (
            {},
            f"A timeline plays every transfer of every rank, and is made for at most {MOST_RANKS} ranks; ask for "
            "fewer with --ranks.",
        )
    made = progress(shown, "timeline")
    return {each.name: lanes.of_plan(each.first_plan, each.case.machine, each.case.setup.drawn) for each in made}, ""


def described(asked: Asked, case: Case) -> Figures:
    """The question, for people who were not there."""
    machine, setup = case.machine, case.setup
    cluster, model = machine.cluster, machine.model
    return {
        "assumed": asked.assumed or None,
        "lengths": asked.lengths,
        "planners": {each.choice.name: each.choice.options.tokens_per_rank for each in asked.cases},
        "cluster": {
            "name": cluster.name,
            "num_ranks": cluster.num_ranks,
            "gpus_per_rank": asked.gpus_per_rank,
            "num_nodes": cluster.num_nodes,
            "ranks_per_node": cluster.node_size,
            "ranks_per_nic": cluster.ranks_per_nic,
            "nic_bytes_per_s": machine.inter.bytes_per_s,
            "intra_bytes_per_s": machine.intra.bytes_per_s,
            "flops_per_s": cluster.flops_per_s,
            "memory_bytes": cluster.memory_bytes,
            "costs": asked.costs,
            "kind": "measured" if asked.costs else "published",
        },
        "model": {
            "name": model.name,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "kind": "exact",
        },
        "step": {
            "batches": case.group,
            "policy": setup.policy,
            "recompute": setup.recompute,
            "pipeline": setup.pipeline,
            "interleave": setup.interleave,
            "experts": setup.experts,
            "overlap_sync": setup.overlap_sync,
            "slow_ranks": {str(rank): factor for rank, factor in enumerate(machine.slowdown) if factor != 1},
        },
    }

"""Untied Ulysses' steps of one long sequence on 8 and 16 H100 (arXiv 2602.21196; figures of its
project page, rghadia.github.io/untied_ulysses_proj, February 2026): tokens a second, memory, and the
longest contexts that fit.

Published are its peers, Ulysses (on 16 GPUs inside nodes of 8, rings between) and zigzag rings;
heads one chunk after another, its own method, no planner of ours does. Its scripts say: bf16, FSDP2,
full recomputation with the layers' inputs in host memory, FlashAttention-3, the MLP in tiles, the
loss in chunks.

Assumed:

- What travels to and from the host, and FSDP's weights and gradients, hide behind the layers.
- States are fp32, 16 bytes a parameter, shared out over all GPUs.
- On a GPU lie one layer with its input and nothing of the MLP's inner values or of logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from megatron_balance.analysis.backward import Recomputed, Stage, StepBytes, microbatch_bytes, step_bytes
from megatron_balance.config import load_cluster, load_model
from megatron_balance.cost.analytic import AnalyticCost
from megatron_balance.cost.modules import num_parameters
from megatron_balance.ir.model import Model
from megatron_balance.ir.plan import MicrobatchPlan
from megatron_balance.lab.papers.base import Effort, Ours, SimulatedCase, paper
from megatron_balance.lab.papers.trl import MODELS, NODE, M
from megatron_balance.planners.base import StepContext
from megatron_balance.planning.choice import choose_planner
from megatron_balance.simulator.setup import Setup
from megatron_balance.simulator.step import simulate_step
from megatron_balance.workloads.distributions import K

STATE_BYTES, GIB, FULL = 16, 2**30, 80
B8, B32 = replace(load_model("llama3-8b"), name="Llama3-8B"), MODELS["Qwen3-32B"]
CONTEXTS = (128 * K, 256 * K, 512 * K, M, 2 * M, 3 * M, 4 * M, 5 * M, 6 * M, 8 * M)
# On so many GPUs, and the longest context that the page has of each system.
STEPS = ((B8, 8, 3 * M), (B32, 16, 2 * M))


@dataclass(frozen=True)
class _UPipeCase(SimulatedCase):
    """One sequence of a model on so many GPUs; its `system` is Ulysses or Ring."""

    of: Model
    num_gpus: int
    system: str
    tokens: int

    @cached_property
    def cost(self) -> AnalyticCost:
        on = load_cluster("h100").build(num_ranks=self.num_gpus, ranks_per_node=NODE).with_kernel("flash_attn_3")
        return AnalyticCost(on, self.of)

    @property
    def name(self) -> str:
        context = f"{self.tokens // M}M" if self.tokens >= M else f"{self.tokens // K}K"
        return f"{self.of.name}, {self.system}, {self.num_gpus} GPUs, {context}"

    @cached_property
    def plans(self) -> tuple[MicrobatchPlan, ...]:
        heads = "ulysses" if self.num_gpus == NODE else "usp"
        choice = choose_planner("te_ring" if self.system == "Ring" else heads, {})
        context = StepContext(self.cluster, self.model, self.cost)
        return tuple(choice.plan_step(((self.tokens,),), context)[0].plans)

    @property
    def rate(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.num_gpus / simulate_step(self.plans, self.machine, Setup("replay", "full")).step_s

    @property
    def held(self) -> StepBytes:
        """Of the GPUs, by what holds it."""
        lies = replace(self.of, num_layers=1, vocab_size=1, ffn_size=1)
        state = STATE_BYTES * num_parameters(self.of) / self.num_gpus
        stage = Stage(1, recompute=Recomputed("uniform"), state_bytes=state)
        return step_bytes([microbatch_bytes(self.plans, lies)], lies, stage)

    @property
    def peak_gib(self) -> float:
        return float(self.held.peak(0).max()) / GIB


def _cases(of: Model, num_gpus: int, system: str) -> Iterator[_UPipeCase]:
    return (_UPipeCase(of, num_gpus, system, tokens) for tokens in CONTEXTS)


def _steps(effort: Effort) -> Ours:
    for (of, num_gpus, longest), system in effort.progress(list(product(STEPS, ("Ulysses", "Ring"))), "steps"):
        yield from ((each.name, each.rate) for each in _cases(of, num_gpus, system) if each.tokens <= longest)


def _memory(effort: Effort) -> Ours:
    yield "Llama3-8B, 8 GPUs: state", _UPipeCase(B8, 8, "Ulysses", 3 * M).held.state / GIB
    charted = [(8, 3 * M), *((16, tokens) for tokens in (512 * K, 2 * M, 4 * M, 6 * M))]
    for num_gpus, tokens in effort.progress(charted, "memory"):
        case = _UPipeCase(B8, num_gpus, "Ulysses", tokens)
        yield case.name, case.peak_gib


def _longest(effort: Effort) -> Ours:
    """Of the contexts that the page has."""
    asked = [*product(((B8, 8), (B32, 16)), ("Ulysses", "Ring")), ((B8, 16), "Ulysses")]
    for (of, num_gpus), system in effort.progress(asked, "longest"):
        fitting = [each.tokens for each in _cases(of, num_gpus, system) if each.peak_gib <= FULL]
        yield f"{of.name}, {system}, {num_gpus} GPUs", max(fitting) / M


PAPER = paper(
    "upipe",
    "Untied Ulysses' longest contexts on H100 (arXiv 2602.21196, project page)",
    {"steps": _steps, "memory": _memory, "longest": _longest},
)

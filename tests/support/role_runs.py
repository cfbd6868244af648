"""Roles on real Megatron models: gradients of several strategies beside the whole model's."""

# Roles on real Megatron models: gradients of several strategies, one after another in the same
# processes, beside those of one rank with the whole model.
#
# The rank's command line begins with the strategies, separated by commas.

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_balance.analysis.change import Layouts, role_bytes
from megatron_balance.ir.model import Model
from megatron_balance.ir.strategy import Scheme, Strategy
from tests.support.megatron_run import Job, Trainer
from tests.support.role_traps import no_parallel_state, no_world_group
from tools.megatron_flags import GPT, LOCAL_LAYERS, LOOP, command_line

# Sizes that TP 2, 3 and 4 divide.
MODEL: dict[str, Any] = {**GPT, "num-layers": 4, "hidden-size": 48, "ffn-hidden-size": 96, "num-attention-heads": 12}
MODEL |= {"seq-length": 64, "max-position-embeddings": 64}
RUN: dict[str, Any] = {**LOOP, **LOCAL_LAYERS, "balance-device": "cpu", "mock-data": True, "seed": 11, "train-iters": 1}
RUN |= {"vocab-size": 90, "make-vocab-size-divisible-by": 48, "use-distributed-optimizer": True}
RUN |= {"global-batch-size": 8, "lr": 0.001}
# On four ranks, in turn; the fourth leaves a rank over.
_TWO = "tp2-pp1-cp1+tp1-pp2-cp1"
STRATEGIES = (_TWO, "tp3-pp1-cp1+tp1-pp1-cp1", "tp1-pp4-cp1", "tp1-pp1-cp1+tp2-pp1-cp1", _TWO)
# Tokens of each microbatch: TP 2, 3 and 4 divide them, as sequence parallelism wants.
LENGTHS = (36, 24, 60, 48, 12)
# How late each slot of weights, and of gradients, is sent.
LATE_S = 0.02
# Elements to which a parameter is rounded up in a role's memory.
ALIGNED = 128


class Checker:
    # This rank of Megatron's base layout, its roles, and the gradients of the whole model.
    def __init__(self, strategies: list[Strategy]) -> None:
        # Build the base as `pretrain` does, then the roles, then train the whole model alone.
        import torch.distributed as dist
        from megatron.core.enums import ModelType
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.utils import unwrap_model
        from megatron.training import pretrain
        from megatron.training.arguments import parse_and_validate_args
        from megatron.training.initialize import initialize_megatron
        from megatron.training.training import setup_model_and_optimizer

        from megatron_balance.megatron import gpt
        from megatron_balance.megatron.flags import add_balance_arguments
        from megatron_balance.megatron.roles import Roles, base_layout, named_parameters
        from megatron_balance.training.weights import Apart

        args: Any = parse_and_validate_args(extra_args_provider=add_balance_arguments)
        config, _ = gpt.start(pretrain, args)
        initialize_megatron()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        kind = ModelType.encoder_or_decoder
        self.model, optimizer, _ = setup_model_and_optimizer(kind, cfg_container=config, pg_collection=groups)
        scheme = Scheme(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
        self.layout = base_layout(self.model, optimizer, scheme)
        alone = Strategy((Scheme(),) * dist.get_world_size())
        self.strategies = (alone, *strategies)
        apart = {each: Apart(slots=True, ranks_per_node=2) for each in strategies}
        minute = timedelta(seconds=60)
        self.roles = Roles(config.model, self.layout, [alone, *strategies], minute, apart=apart, overlap=True)
        apart = {each: Apart(ranks_per_node=2) for each in strategies[:2]}
        # The first two without overlap.
        self.at_once = Roles(config.model, self.layout, list(apart), minute, apart=apart)
        named = dict(named_parameters(unwrap_model(self.model[0])))
        (shards,) = getattr(optimizer, "chained_optimizers", [optimizer])
        held = {name: each for name, each in named.items() if each in shards.model_param_gbuf_map}
        self.starts = {name: shards._get_model_param_range_map(each)["param"].start for name, each in held.items()}
        self.whole = _gathered({name: parameter.data for name, parameter in named.items()}, self.layout.parameters)
        role = self.roles.pull(alone)
        for number, tensor in role.memory.weights.items():
            tensor.copy_(self.whole[number])  # the reference owes nothing to a pull
        with no_parallel_state():
            _trained(role, range(len(LENGTHS)))
        self.wanted = {number: tensor.clone() for number, tensor in role.memory.gradients.items()}
        self.before: dict[Strategy, Any] = {}

    def step(self, strategy: Strategy) -> dict[str, Any]:
        # One step's gradients under `strategy`, beside those of the whole model.
        import torch
        import torch.distributed as dist

        names, layout = self.layout.parameters.names, self.layout
        layouts = Layouts(Strategy((layout.base.scheme,) * layout.base.replicas), self.strategies)
        model = Model(12, 12, 4, num_layers=4, hidden_size=48, ffn_size=96, vocab_size=96, bytes_per_element=4)
        at_once = None
        if strategy in self.at_once and strategy not in self.before:
            self._gradients(self.at_once, strategy)
            at_once = {number: tensor.clone() for number, tensor in layout.gradients.items()}
        self._gradients(self.roles, strategy)
        errors: dict[str, float] = {}
        for number, tensor in layout.gradients.items():
            wanted = self.wanted[number]
            errors[names[number]] = float((tensor - self._owned(wanted, number)).abs().max() / wanted.abs().max())
        before = self.before.setdefault(strategy, {number: each.clone() for number, each in layout.gradients.items()})
        return {
            "strategy": str(strategy),
            "errors": errors,
            "same_bits": all(torch.equal(each, before[number]) for number, each in layout.gradients.items()),
            "same_at_once": at_once is None
            or all(torch.equal(each, at_once[number]) for number, each in layout.gradients.items()),
            "memory": [self.roles.weights.numel(), self.roles.gradients.numel()],
            "predicted": role_bytes(layouts, model, dist.get_world_size())[dist.get_rank()],
            "whole": sum(-(-tensor.numel() // ALIGNED) * ALIGNED for tensor in self.wanted.values()),
        }

    def _gradients(self, roles: Any, strategy: Strategy) -> None:
        # Let the owners have one step's gradients; no weight is there before the pull.
        import torch

        roles.weights.fill_(torch.nan)
        for buffer in self.model[0].buffers:
            buffer.grad_data.zero_()
        role = roles.pull(strategy)
        microbatches = range(0)
        if role.seat is not None:
            microbatches = range(role.seat.pipeline, len(LENGTHS), len(strategy.pipelines))
        roles.moves.expect(len(microbatches), lambda: None)
        if microbatches:
            with no_parallel_state(), no_world_group():
                _trained(role, microbatches)
        roles.push()

    def _owned(self, whole: Any, number: int) -> Any:
        # The part of a whole gradient that this rank's optimizer owns, as Megatron cuts it.
        import torch
        import torch.distributed as dist

        tensor, parameters = self.layout.base.scheme.tensor, self.layout.parameters
        cut, blocks = int(parameters.cut[number]), int(parameters.blocks[number])
        rank = dist.get_rank() % tensor
        if cut >= 0:
            whole = torch.cat([half.chunk(tensor, cut)[rank] for half in whole.chunk(blocks, cut)], cut)
        start = self.starts[parameters.names[number]]
        return whole.reshape(-1)[start : start + self.layout.gradients[number].numel()]


def main() -> None:
    # Run one rank; prints a line of JSON for each strategy.
    import torch.distributed as dist

    from megatron_balance.patches import applied, machine

    strategies = [Strategy.parse(text) for text in sys.argv.pop(1).split(",")]
    with applied((*machine.NORM, *machine.HELPERS)):
        checker = Checker(strategies)
        _let_slots_come_late()
        for strategy in strategies:
            sys.stdout.write(f"ROLE {json.dumps(checker.step(strategy))}\n")
    dist.barrier()
    dist.destroy_process_group()


def _let_slots_come_late() -> None:
    # So that a module that does not wait for its weights computes with NaN, and an owner that does
    # not wait for gradients lacks some.
    from megatron_balance.training.weights import WeightExchange

    def late(move: Callable[..., None]) -> Callable[..., None]:
        def moved(*args: Any) -> None:
            time.sleep(LATE_S)
            move(*args)

        return moved

    WeightExchange.pull_slot, WeightExchange.push_slot = late(WeightExchange.pull_slot), late(WeightExchange.push_slot)  # type: ignore[method-assign]


def run() -> int:
    # Exit code of a rank.
    try:
        main()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def trained(
    trainer: Trainer, folder: Path, num_ranks: int, strategies: Sequence[str], base: Mapping[str, Any]
) -> list[list[dict[str, Any]]]:
    # Lines of each rank, one a strategy, on the base layout with these flags.
    argv = (",".join(strategies), *command_line(MODEL, RUN, base))
    result = trainer.run(Job("roles", num_ranks, argv, str(folder), deadline_s=300))
    failed = result.failed
    assert failed is None, f"rank {failed} ended with {result.codes[failed]}; its log ends:\n{result.tail(failed)}"
    logs = [result.log(rank).splitlines() for rank in range(num_ranks)]
    return [[json.loads(line[5:]) for line in log if line.startswith("ROLE ")] for log in logs]


def _trained(role: Any, microbatches: range) -> None:
    # Forward and backward of a role over these microbatches.
    import torch

    if not microbatches:
        return
    drawn = [(LENGTHS[number], torch.Generator().manual_seed(number)) for number in microbatches]
    tokens = [torch.randint(0, 90, (1, length), generator=g) for length, g in drawn]
    given = {"data_iterator": iter(tokens), "num_microbatches": len(microbatches)}
    role.schedule()(forward_step_func=_forward_step, **given, seq_length=max(LENGTHS), micro_batch_size=1)


def _forward_step(iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[[Any], Any]]:
    import torch

    tokens = next(iterator)
    size = tokens.shape[1]
    mask = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
    out = model(tokens, torch.arange(size)[None], mask, labels=tokens.roll(-1, 1))

    def loss(values: Any) -> Any:
        total = values.sum()
        return total, torch.tensor(size, dtype=torch.int), {"lm loss": total.detach()}

    return out, loss


def _gathered(mine: dict[str, Any], parameters: Any) -> dict[int, Any]:
    # All parameters of TP 1, from Megatron's own weights on all ranks.
    import torch
    import torch.distributed as dist
    from megatron.core import mpu

    seat = (mpu.get_tensor_model_parallel_rank(), {name: tensor.float().numpy() for name, tensor in mine.items()})
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seat)
    found: dict[int, Any] = {}
    for number, name in enumerate(parameters.names):
        cut, blocks = int(parameters.cut[number]), int(parameters.blocks[number])
        of_rank = {tp: torch.from_numpy(held[name]) for tp, held in every[::-1] if name in held}
        shards = [of_rank[tp] for tp in sorted(of_rank)]
        if cut < 0:
            found[number] = shards[0]
            continue
        halves = [torch.cat([shard.chunk(blocks, cut)[block] for shard in shards], cut) for block in range(blocks)]
        found[number] = torch.cat(halves, cut)
    return found

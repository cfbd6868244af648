"""Drivers of slime and NeMo-RL with our schedules, by their stand-ins."""

import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.errors import BalanceError
from tests.support import rl_libraries
from tests.support.rl_libraries import arguments, packed, sharded, worked

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"
SCRIPT, NEMO = (runpy.run_path(str(EXAMPLES / f"{name}_balanced.py")) for name in ("slime", "nemo_rl"))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in rl_libraries.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("BALANCE_MODEL", "llama3-8b")
    SCRIPT["register"]()
    NEMO["register"]()


def drawn(draw: random.Random, rollouts: int, longest: int) -> tuple[list[list[int]], list[int]]:
    # Rollouts of one to three samples, in any order; a sample's tokens are its number.
    numbers = [rollout for rollout in range(rollouts) for _ in range(draw.randint(1, 3))]
    draw.shuffle(numbers)
    lengths = [min(longest, 1 + int(draw.lognormvariate(3, 1))) for _ in numbers]
    return [[sample] * length for sample, length in enumerate(lengths)], numbers


@pytest.mark.parametrize("seed", range(4))
def test_workers_read_every_sample_of_full_steps_once_in_as_many_microbatches_under_the_cap(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(8):
        data, context, multiple = draw.choice([1, 2, 4]), draw.choice([1, 2]), draw.choice([1, 2])
        args = arguments(global_batch_size=draw.randint(24, 40))
        tokens, rollouts = drawn(draw, 2 * args.global_batch_size + draw.randint(0, 5), 100 * context)
        sent = sharded(args, data, context, tokens, rollouts, multiple)
        assert len({tuple(each["num_microbatches"]) for each in sent}) == 1
        assert sent[0]["global_batch_sizes"] == [args.global_batch_size] * 2
        assert all(count % multiple == 0 for count in sent[0]["num_microbatches"])
        of_steps: list[list[int]] = [[], []]
        for each in sent:
            steps, results = worked(each)
            assert results == [tokens[sample] for sample in each["partition"]]
            for own, step in zip(of_steps, steps, strict=True):
                for batch in step:
                    assert batch  # slime's workers join its samples
                    # Of each sample a context-parallel rank has two slices, all as long.
                    held = sum(len(s) if context == 1 else 2 * -(-len(s) // (2 * context)) for s in batch)
                    assert held <= args.max_tokens_per_gpu
                    own += [sample[0] for sample in batch]
        order = list(dict.fromkeys(rollouts))
        for at, own in enumerate(of_steps):
            kept = set(order[at * args.global_batch_size : (at + 1) * args.global_batch_size])
            assert sorted(own) == [sample for sample, of in enumerate(rollouts) if of in kept]


def test_slow_samples_share_a_microbatch_and_pipelines_have_as_many_as_stages() -> None:
    tokens = [[0] * length for length in (80, 80, 10, 10, 10, 10, 10, 10)]
    sent = sharded(arguments(), 2, 1, tokens, [*range(8)])
    assert sent[0]["num_microbatches"] == [2]
    assert sorted(max(map(len, step[0])) for step in (worked(each)[0][0] for each in sent)) == [80, 80]
    # Beside a slow sample the plan would put more than one, and then has none for some places.
    tokens[1] = [0] * 10
    sent = sharded(arguments(pipeline_model_parallel_size=4), 2, 1, tokens, [*range(8)])
    assert [[len(batch) for batch in step] for each in sent for step in worked(each)[0]] == [[1] * 4] * 2


def test_mixtures_of_experts_and_latents_are_weighed_as_their_arguments_say() -> None:
    latent = {"multi_latent_attention": True, "qk_head_dim": 12, "qk_pos_emb_head_dim": 4}
    made = SCRIPT["model_of"](arguments(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=24, **latent))
    assert (made.num_experts, made.experts_per_token, made.ffn_size, made.head_dim) == (8, 2, 24, 16)
    grouped = SCRIPT["model_of"](arguments(num_query_groups=1, group_query_attention=False))
    assert grouped.num_kv_heads == 2


@pytest.mark.parametrize(
    ("asked", "lengths", "said"),
    [
        ({"use_dynamic_batch_size": False}, [9] * 8, "use --use-dynamic-batch-size"),
        ({}, [9, 9, 9, 201, 9, 9, 9, 9], "sample 3 has 201 tokens, and its 2 ranks hold 100 each"),
        ({"global_batch_size": 9}, [9] * 8, "8 rollouts, and a step has global_batch_size 9"),
        ({}, [200] * 7 + [199], "8 samples for 3 microbatches on 3 ranks"),
    ],
)
def test_schedules_that_cannot_be_are_refused(asked: dict[str, Any], lengths: list[int], said: str) -> None:
    data = 3 if max(lengths) == 200 else 2
    with pytest.raises(BalanceError, match=said):
        sharded(arguments(**asked), data, 2, [[0] * length for length in lengths], [*range(8)])


@pytest.mark.parametrize("seed", range(3))
def test_nemo_rls_ranks_take_bins_in_turns_each_sample_once_under_the_cap(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        shards, size = draw.choice([1, 2, 4]), draw.choice([32, 48])
        lengths = [min(96, 1 + int(draw.lognormvariate(3, 1))) for _ in range(2 * size)]
        found = packed("balanced", 100, shards, lengths, size, 4)
        for batch in range(2):
            of_ranks = [own[batch] for own in found]
            assert len({len(own) for own in of_ranks}) == 1
            bins = [each for own in of_ranks for each in own]
            assert all(each and sum(-(-lengths[at] // 4) * 4 for at in each) <= 100 for each in bins)
            assert sorted(at for each in bins for at in each) == list(range(batch * size, (batch + 1) * size))


def test_bins_that_ranks_run_at_once_are_those_of_a_microbatch() -> None:
    found = packed("balanced", 100, 2, [10, 90, 10, 10, 10, 10, 90, 10], 8, 1)
    (slow,) = {own[0].index(each) for own in found for each in own[0] if {1, 6} & {*each}}
    assert all({1, 6} & {*own[0][slow]} for own in found)


def test_other_packers_are_nemo_rls_and_ours_needs_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Unknown packing algorithm: concatenative"):
        packed("concatenative", 100, 2, [9] * 8, 8, 1)
    with pytest.raises(BalanceError, match="sample 3 has 101 tokens"):
        packed("balanced", 100, 2, [9, 9, 9, 101], 4, 1)
    monkeypatch.delenv("BALANCE_MODEL")
    with pytest.raises(BalanceError, match="BALANCE_MODEL is not set"):
        NEMO["register"]()

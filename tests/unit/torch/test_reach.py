"""Attention that does not reach the plan, masks that no plan has, and losses that would be others."""

import copy
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_balance import Model
from megatron_balance.errors import ConfigError
from megatron_balance.model_config import unproved
from megatron_balance.torch import BalancedBatch, SequenceBalancer, Settings, balanced_attention, hf
from tests.support.torch_jobs import compiling

pytest.importorskip("torch", reason="the extra 'torch' brings it")

transformers: Any = pytest.importorskip("transformers")
LAYERS = 4
DOCUMENTS = [torch.arange(9) % 10, torch.arange(5) % 7, torch.tensor([3])]
PAST = "expected attention under the batch's plan in every layer of the forward that made these values, got "
SIZES = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def made(name: str, attention: str | None = None, **more: Any) -> Any:
    # A small model of this family, `attention` of which None is ours.
    config = getattr(transformers, f"{name}Config")(**SIZES | HEADS | more)
    config._attn_implementation = attention or hf.register()
    torch.manual_seed(0)
    kind = "ForMaskedLM" if name in ("Bert", "DebertaV2", "BigBird") else "ForCausalLM"
    return getattr(transformers, name + kind)(config).eval()


def dealt(model: Any, **settings: Any) -> BalancedBatch:
    # A batch for a model, also for one that the guard of configurations refuses.
    accept = unproved(model.config)
    return SequenceBalancer.for_model(model.config, accept=accept, settings=Settings(**settings))(DOCUMENTS)


@pytest.mark.parametrize("family", ["StableLm", "Nemotron"])
def test_a_model_that_hands_no_keywords_through_attends_under_the_batch_of_its_forward(family: str) -> None:
    model, eager = made(family), made(family, "eager")
    for one in (model, copy.deepcopy(model)):
        batch = dealt(one)
        got = torch.cat(batch.gather(one(**hf.inputs(batch)).logits[0]))
        torch.testing.assert_close(got, torch.cat([eager(each[None]).logits[0] for each in DOCUMENTS]))
    with pytest.raises(ConfigError, match="was called without a batch"):
        model(batch.tokens[None])
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    other = dealt(model)
    loss, _ = (summed(model(**hf.inputs(each)).logits[0], each) for each in (batch, other))
    with pytest.raises(ConfigError, match="under checkpointing use a model that hands keywords through"):
        batch.mean_loss(loss).backward()


def summed(logits: Tensor, batch: BalancedBatch) -> Tensor:
    return F.cross_entropy(logits.float(), batch.labels, reduction="sum")


TAKEN = {
    "mean_loss": lambda batch, **how: batch.mean_loss(torch.tensor(1.0), **how),
    "global_loss": lambda batch, **how: batch.global_loss(torch.tensor(1.0), **how),
    "gather": lambda batch, **how: batch.gather(batch.tokens.clone(), **how),
    "gather_rows": lambda batch, **how: batch.gather_rows(batch.tokens.clone(), **how),
    "router_loss": lambda batch, **how: batch.router_loss([torch.zeros(batch.num_rows, 3)], 1, **how),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_values_that_no_attention_made_are_refused_unless_one_says_so(take: Any) -> None:
    batch = SequenceBalancer("te_ring", Model(4, 2, 8))(DOCUMENTS)
    with pytest.raises(ConfigError, match=f"{PAST}none"):
        take(batch)
    take(batch, attended=0)
    with pytest.raises(ConfigError, match=f"{PAST}none"):
        take(batch)
    with pytest.raises(ConfigError, match="attended: expected a whole number of at least 0, got -1"):
        take(batch, attended=-1)
    balanced_attention(torch.zeros(15, 4, 8), torch.zeros(15, 2, 8), torch.zeros(15, 2, 8), batch)
    take(batch)
    for again in TAKEN.values():
        with pytest.raises(ConfigError, match=f"{PAST}none"):
            again(batch)


@pytest.mark.parametrize("family", ["Bloom", "CodeGen", "Llama", "DebertaV2", "BigBird"])
def test_a_model_that_attends_past_the_plan_is_refused(family: str) -> None:
    model = made(family, "sdpa" if family == "Llama" else None, **{"rotary_dim": 4} if family == "CodeGen" else {})
    batch = dealt(model)
    with pytest.raises(ConfigError, match=f"{PAST}none|computes with its attention mask, so it attends by itself"):
        batch.gather(model(**hf.inputs(batch)).logits[0])


@pytest.mark.parametrize("family", ["GPTJ", "Falcon", "GPTNeo"])
def test_a_model_with_a_table_of_attention_classes_is_refused_by_name(family: str) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "attention_types": [[["global"], 2]]} if family == "GPTNeo" else {}
    config = getattr(transformers, f"{family}Config")(**sizes or {"hidden_size": 32, "num_hidden_layers": 2})
    with pytest.raises(ConfigError, match=rf"{family}\w* takes its attention from \w+, which knows eager, .* balanced"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=hf.register())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_layers_computed_again_in_the_backward_count_once(reentrant: bool, some: bool) -> None:
    model = made("Llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for layer in model.model.layers[: 1 if some else 0]:
        layer.gradient_checkpointing = False
    batch = dealt(model)
    for _ in range(2):
        loss = summed(model(**hf.inputs(batch)).logits[0], batch)
        batch.mean_loss(loss).backward()
        batch.global_loss(loss)
    model.model.layers = model.model.layers[:3]
    with pytest.raises(ConfigError, match=f"{PAST}3 calls for 4 layers"):
        batch.mean_loss(summed(model(**hf.inputs(batch)).logits[0], batch))


def test_a_layer_of_ones_own_that_is_computed_again_counts_once() -> None:
    batch = SequenceBalancer.for_model({**HEADS, "hidden_size": 32, "num_hidden_layers": 2})(DOCUMENTS)
    x = torch.randn(15, 4, 8, requires_grad=True)

    def layer(x: Any) -> Tensor:
        return balanced_attention(x, x[:, :2], x[:, 2:], batch)

    loss = layer(checkpoint(layer, x, use_reentrant=False)).sum()
    batch.mean_loss(loss).backward()
    batch.mean_loss(layer(x).sum(), attended=1)
    with pytest.raises(ConfigError, match=f"{PAST}1 calls for 2 layers"):
        batch.mean_loss(layer(x).sum())


def test_a_reference_model_on_the_same_batch_is_counted_by_its_own_layers() -> None:
    policy, reference = made("Llama"), made("Llama", num_hidden_layers=3)
    batch = dealt(policy)
    given: Any = hf.inputs(batch)
    for order in ((policy, reference), (reference, policy)):
        with torch.no_grad():
            values = [model(**given).logits[0] for model in order]
        assert [len(each) for each in batch.gather(values[0])] == [len(each) for each in DOCUMENTS]
        batch.gather(values[1])
    x = torch.zeros(15, 4, 8)
    for _ in range(3):
        balanced_attention(x, x[:, :2], x[:, :2], batch, layers=3)
    batch.gather(x)
    forgets = made("Llama", "sdpa", num_hidden_layers=3)
    for models in ((policy, forgets), (forgets, policy)):
        with torch.no_grad():
            values = [model(**given).logits[0] for model in models]
        with pytest.raises(ConfigError, match=f"{PAST}that of 1 forwards, and the inputs went to 2"):
            batch.gather(values[0])
        batch = dealt(policy)
        given = hf.inputs(batch)
    batch.gather(policy(**given).logits[0])
    late = forgets(**given).logits[0]
    with pytest.raises(ConfigError, match=f"{PAST}none"):
        batch.gather(late)


@pytest.mark.parametrize("how", ["plain", "no_grad", "reentrant", "checkpoint", "top", "head"])
def test_further_values_of_a_forward_pass_and_those_of_a_second_model_do_not(how: str) -> None:
    # `top`, `head`: only the last layer, or none below the head, is trained.
    model, past = made("Llama").train(), made("Llama", "sdpa").train()
    if how in ("reentrant", "checkpoint"):
        for each in (model, past):
            each.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    if how in ("top", "head"):
        model.requires_grad_(False)
        for part in (model.lm_head, *model.model.layers[LAYERS - (how == "top") :]):
            part.requires_grad_()
    batch, other = dealt(model), dealt(model)
    for _ in range(2):
        with torch.no_grad() if how == "no_grad" else nullcontext():
            logits = model(**hf.inputs(batch)).logits[0]
            late = past(input_ids=batch.tokens[None]).logits[0]
        loss = summed(logits, batch)
        mean = batch.mean_loss(loss)
        if how != "no_grad":
            mean.backward()
            batch.gather(F.log_softmax(logits, -1))
            batch.gather_rows(logits)
        batch.global_loss(loss.detach())
        for wrong in (late, late.detach(), summed(late, batch)):
            with pytest.raises(ConfigError, match=f"{PAST}none.* attended=0: no attention made the values, or"):
                batch.gather(wrong) if wrong.ndim else batch.global_loss(wrong)
    with pytest.raises(ConfigError, match=f"{PAST}none"):
        batch.mean_loss(summed(model(**hf.inputs(other)).logits[0], other))


def test_each_of_several_forwards_lets_values_through_once() -> None:
    policy, reference = made("Llama"), made("Llama", num_hidden_layers=3)
    batch = dealt(policy)
    given: Any = hf.inputs(batch)
    ours = policy(**given).logits[0]
    with torch.no_grad():
        theirs = reference(**given).logits[0]
    batch.mean_loss(summed(ours, batch)).backward()
    batch.gather(theirs)
    batch.gather(ours)
    batch.gather(theirs[:, :3])
    with pytest.raises(ConfigError, match=f"{PAST}none"):
        batch.gather(theirs.exp())
    batch.gather(theirs.exp(), attended=0)


def test_calls_of_compiled_layers_and_models_are_counted_when_they_run() -> None:
    with compiling():
        model = made("Llama")
        batch, wanted = dealt(model), model(**hf.inputs(dealt(model))).logits[0]
        whole: Any = torch.compile(model, backend="eager", dynamic=True)
        for _ in range(2):
            logits = whole(**hf.inputs(batch)).logits[0]
            torch.testing.assert_close(logits, wanted)
            batch.mean_loss(summed(logits, batch)).backward()
            batch.gather(F.log_softmax(logits, -1))
        with pytest.raises(ConfigError, match=f"{PAST}none"):
            batch.gather(made("Llama", "sdpa")(input_ids=batch.tokens[None]).logits[0])
        with pytest.raises(ConfigError, match=f"{PAST}none"):
            batch.mean_loss(summed(made("Llama", "sdpa")(**hf.inputs(batch)).logits[0], batch))


def test_microbatches_and_evaluation_count_for_themselves() -> None:
    model = made("Llama")
    balancer = SequenceBalancer.for_model(model.config)
    for batches in balancer.steps([DOCUMENTS] * 4, microbatches=2):
        sums = [summed(model(**hf.inputs(batch)).logits[0], batch) for batch in batches]
        for batch, one in zip(batches, sums, strict=True):
            batch.mean_loss(one).backward()
    first, second = balancer.step([DOCUMENTS, DOCUMENTS])
    model(**hf.inputs(first))
    with pytest.raises(ConfigError, match=f"{PAST}none"):
        second.mean_loss(torch.tensor(1.0))
    batch = balancer.evaluate(DOCUMENTS)
    with torch.no_grad():
        balancer.gather(model(**hf.inputs(batch)).logits[0])


# Masks


def asked(create: str, **given: Any) -> Any:
    # The mask that a model of Transformers gets, and hands to its attention.
    config = transformers.LlamaConfig(**SIZES, **HEADS, sliding_window=3, attention_chunk_size=4)
    config._attn_implementation = hf.register()
    given = {"attention_mask": None, "past_key_values": None, "position_ids": None, **given}
    return getattr(transformers.masking_utils, create)(config, torch.zeros(1, 15, 32), **given)


def attend(batch: BalancedBatch, mask: Any, **given: Any) -> Any:
    x = torch.randn(1, 4, 15, 8)
    layer = nn.Linear(1, 1)
    return hf.attend(layer, x, x[:, :2], x[:, :2], mask, balanced=batch, **given)  # pyright: ignore[reportCallIssue]


def later(*place: Any) -> Any:
    # A mask function: place, head, query and key.
    return place[3] > 2


IDS = torch.zeros(1, 15, dtype=torch.int64)
UNION = "a union of masks, as of a prefix or of images; balanced attention is causal"


@pytest.mark.parametrize(
    ("create", "given", "complaint"),
    [
        ("create_causal_mask", {"block_sequence_ids": IDS}, "blocks that see themselves .* full segments of its trees"),
        ("create_causal_mask", {"or_mask_function": later}, UNION),
        ("create_causal_mask", {"and_mask_function": later}, "later of tests.unit.torch"),
        ("create_sliding_window_causal_mask", {"block_sequence_ids": IDS}, UNION),
        ("create_chunked_causal_mask", {}, r"attention inside chunks \(4 tokens\); .* documents of at most 4 tokens"),
        ("create_bidirectional_mask", {}, "attention that is not causal"),
        ("create_bidirectional_sliding_window_mask", {}, r"a window to both sides \(3 tokens\)"),
        ("create_causal_mask", {"attention_mask": torch.ones(1, 20)}, "a mask of 20 keys for 15 queries"),
        ("create_causal_mask", {"attention_mask": IDS}, "an attention mask that hides tokens"),
        ("create_causal_mask", {"attention_mask": torch.zeros(1, 1, 15, 15)}, "an attention mask; balanced attention"),
    ],
)
def test_a_mask_that_no_plan_has_is_refused_by_name(create: str, given: Any, complaint: str) -> None:
    batch = SequenceBalancer("te_ring", Model(4, 2, 8))(DOCUMENTS)
    with pytest.raises(ConfigError, match=rf"Linear asks for .*{complaint}"):
        attend(batch, asked(create, **given))


def test_masks_that_hide_what_the_plan_hides_are_taken() -> None:
    batch = SequenceBalancer("te_ring", Model(4, 2, 8))([torch.arange(3), torch.arange(4), *[torch.arange(2)] * 4])
    ones = {"attention_mask": torch.ones(1, 15, dtype=torch.int64)}
    assert attend(batch, asked("create_causal_mask", block_sequence_ids=IDS - 1))[0].shape == (1, 15, 4, 8)
    for create in ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"):
        for given in ({}, ones, {"position_ids": batch.position_ids[None]}):
            assert attend(batch, asked(create, **given))[0].shape == (1, 15, 4, 8)
    full = SequenceBalancer("te_ring", Model(4, 2, 8), settings=Settings(mask="full"))(DOCUMENTS)
    assert attend(full, asked("create_bidirectional_mask"))[0].shape == (1, 15, 4, 8)
    with pytest.raises(ConfigError, match="causal attention, and the batch is planned for another mask"):
        attend(full, asked("create_causal_mask"))


def test_a_window_that_only_the_mask_has_is_applied() -> None:
    # Phi-3.5-MoE hands its attention no window; two that differ are refused.
    exact = made("Phimoe", "eager", sliding_window=3, num_local_experts=2)
    model = made("Phimoe", sliding_window=3, num_local_experts=2)
    wanted = torch.cat([exact(each[None]).logits[0] for each in DOCUMENTS])
    batch = dealt(model)
    torch.testing.assert_close(model(**hf.inputs(batch)).logits[0], wanted, rtol=1e-4, atol=1e-5)
    for create, own in (("create_causal_mask", "all"), ("create_sliding_window_causal_mask", "3")):
        with pytest.raises(ConfigError, match=f"a window of 2 tokens, and in its mask of {own}; .* one sliding_window"):
            attend(batch, asked(create), sliding_window=2)


def test_a_model_that_hands_masks_to_the_one_inside_it_is_that_of_eager() -> None:
    sizes = SIZES | HEADS | {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"] * 2}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    outer: list[Any] = []
    for attention in ("eager", hf.register()):
        config = transformers.Gemma3Config(text_config=sizes, vision_config=vision)
        config._attn_implementation = config.text_config._attn_implementation = attention
        torch.manual_seed(0)
        outer.append(transformers.Gemma3ForConditionalGeneration(config).eval())
    wanted = torch.cat([outer[0](each[None]).logits[0] for each in DOCUMENTS])
    found = outer[1](**hf.inputs(dealt(outer[1]))).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_users_mask_of_ones_changes_nothing_and_zeros_or_documents_beside_the_batch_are_refused() -> None:
    model = made("Llama")
    batch = dealt(model)
    ones = torch.ones(1, 15, dtype=torch.int64)
    plain = model(**hf.inputs(batch)).logits
    assert torch.equal(model(**hf.inputs(batch), attention_mask=ones).logits, plain)
    ones[0, 3] = 0
    with pytest.raises(ConfigError, match=r"LlamaAttention asks for an attention mask that hides .* no padding"):
        model(**hf.inputs(batch), attention_mask=ones)
    for masks in ({"full_attention": None}, {}):
        with pytest.raises(ConfigError, match=r"got a dict of them\. Leave out attention_mask"):
            model(**hf.inputs(batch), attention_mask=masks)
    # Of collators without padding, right or wrong; they were passed over.
    for ends in (torch.tensor([0, 9, 14, 15], dtype=torch.int32), torch.tensor([0, 15], dtype=torch.int32)):
        said = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
        for name, each in said.items():
            with pytest.raises(ConfigError, match=f"LlamaAttention asks for {name}; .* Leave out what says where"):
                model(**hf.inputs(batch), **{name: each})


def test_every_refusal_has_its_own_hint() -> None:
    batch = SequenceBalancer("te_ring", Model(4, 2, 8))(DOCUMENTS)
    for given, hint in (
        ({"dropout": 0.1}, "Set attention_dropout=0"),
        ({"is_causal": False}, r'Give the balancer Settings\(mask="full"'),
        ({"position_bias": torch.zeros(1)}, "No kernel here has it"),
        ({"cu_seq_lens_q": torch.tensor([0, 15])}, "cu_seq_lens_q; .* Leave out what says where documents lie"),
        ({"max_length_k": 15}, "max_length_k; .* Leave out what says where documents lie"),
    ):
        with pytest.raises(ConfigError, match=hint) as told:
            attend(batch, None, **given)
        assert ("dropout" in str(told.value)) == ("dropout" in given)


# Losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_of_a_loss_is_fp32_and_a_loss_in_half_precision_is_refused(dtype: torch.dtype) -> None:
    batch = SequenceBalancer("te_ring", Model(4, 2, 8))([torch.arange(1000) % 10, torch.arange(77) % 10])
    logits = torch.randn(1077, 10, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    loss = batch.mean_loss(summed(logits, batch), attended=0)
    loss.backward()
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact, batch.labels)
    wanted.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert logits.grad is not None
    assert exact.grad is not None
    assert torch.equal(logits.grad, exact.grad.float().to(dtype)) or (
        (logits.grad.double() - exact.grad).abs().max() <= torch.finfo(dtype).eps * exact.grad.abs().max()
    )
    for take in (batch.mean_loss, batch.global_loss):
        with pytest.raises(ConfigError, match=rf"in fp32, got {dtype}; take the loss of logits.float\(\)"):
            take(F.cross_entropy(logits, batch.labels, reduction="sum"), attended=0)


@pytest.mark.parametrize(("family", "attention"), [("Llama", None), ("Llama", "sdpa"), ("Bert", None)])
def test_labels_in_the_models_forward_are_refused(family: str, attention: str | None) -> None:
    model = made(family, attention)
    batch = dealt(model, mask="full" if family == "Bert" else None)
    for labels in (batch.labels[None], batch.labels, batch.labels[None].clone()):
        with pytest.raises(ConfigError, match=r"expected no labels in the model's forward.* F.cross_entropy\(logits"):
            model(**hf.inputs(batch), labels=labels)
    tokens = torch.ones(1, 3, dtype=torch.int64)
    assert made(family, "eager")(input_ids=tokens, labels=tokens).loss > 0, "without a batch they are as ever"


def test_a_batch_without_its_positions_is_refused() -> None:
    # Its rows would be numbered: inputs of one's own making, or of a library's that drops some.
    for family in ("Llama", "Bert"):
        model = made(family)
        batch = dealt(model, mask="full" if family == "Bert" else None)
        for left_out in ({"input_ids": batch.tokens[None]}, {"input_ids": batch.tokens[None], "position_ids": None}):
            with pytest.raises(ConfigError, match=rf"{family}\w+ was called with a batch and without position_ids"):
                model(**left_out, **{hf.NAME: batch})
    model = made("Llama")
    batch = dealt(model)
    model(batch.tokens[None], position_ids=batch.position_ids[None], **{hf.NAME: batch})


def test_the_division_of_accelerate_is_refused_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class GradientState:
        # As Accelerate's: one state of all instances, empty before an Accelerator is made.
        _shared_state = frozenset({"num_steps"})
        num_steps = 4

    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(GradientState=GradientState))  # pyright: ignore
    batch = SequenceBalancer("te_ring", Model(4, 2, 8))(DOCUMENTS)
    x = torch.ones((), requires_grad=True)
    batch.mean_loss(x, attended=0).backward()
    (2 * batch.mean_loss(x, attended=0)).backward()
    with pytest.raises(ConfigError, match=r"1 / 4: accelerator.backward divides .* call loss.backward\(\), or give"):
        (batch.mean_loss(x, attended=0) / 4).backward()


def test_the_router_loss_is_that_of_transformers_and_padding_does_not_count() -> None:
    exact: Any = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    batch = SequenceBalancer("te_ring", Model(4, 2, 8), settings=Settings(row_multiple=16))(DOCUMENTS)
    logits = [torch.randn(16, 5, requires_grad=True) for _ in range(3)]
    wanted = exact(tuple(x[:15] for x in logits), 5, 2)
    gradients = torch.autograd.grad(wanted, logits)
    loss = batch.router_loss(logits, 2, attended=0)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), gradients)
    for wrong, complaint in (
        ([], "at least 1 layer, got none"),
        ([torch.zeros(15, 5)], r"\[16, experts\] .*\[15, 5\]"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            batch.router_loss(wrong, 2)


# The code of docs/torch.md runs as it stands.

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "torch.md").read_text(encoding="utf-8")
BLOCKS = {
    title.strip(): code
    for section in PAGE.split("\n## ")[1:]
    for title, _, rest in [section.partition("\n")]
    for code in re.findall(r"```python\n(.*?)```", rest, re.DOTALL)[:1]
}
TWO_HEADS, DIM, VOCABULARY = 2, 8, 16
CONFIG = Model(TWO_HEADS, TWO_HEADS, DIM)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, TWO_HEADS * DIM), nn.Linear(TWO_HEADS * DIM, VOCABULARY)
        self.qkv = nn.Linear(TWO_HEADS * DIM, 3 * TWO_HEADS * DIM)

    def forward(self, tokens: Tensor, position_ids: Tensor, balanced: BalancedBatch) -> Tensor:
        assert len(position_ids) == len(tokens)
        q, k, v = self.qkv(self.embedding(tokens)).view(-1, 3 * TWO_HEADS, DIM).chunk(3, dim=1)
        return self.head(balanced_attention(q, k, v, balanced).flatten(1))


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tiny()
    loader = [[torch.arange(n) % VOCABULARY for n in (7, 1, 12)]] * 8
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return {"config": CONFIG, "mesh": {"dp_cp": None}, "loader": loader, "model": model, "optimizer": optimizer}


def test_the_training_loop_is_under_20_lines_and_trains() -> None:
    code = BLOCKS["A training loop"]
    assert code.count("\n") < 20
    space = names()
    losses: list[float] = []
    exec(code.replace("optimizer.step()", "losses.append(loss.item()); optimizer.step()"), space | {"losses": losses})
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_several_microbatches_and_further_tensors() -> None:
    space = names()
    space["balancer"] = SequenceBalancer.for_model(CONFIG)
    space["F"] = nn.functional
    call = "model(batch.tokens, batch.position_ids, batch)"
    exec(BLOCKS["Several microbatches, plans made ahead"].replace("model(...)", call), space)
    tokens, weights = torch.arange(4), torch.rand(4)
    given = (tokens, tokens, weights, torch.rand(4, 3))
    space |= {"tokens": tokens, "labels": tokens, "weights": weights, "features": given[3]}
    space["balancer"] = SequenceBalancer.for_model(CONFIG)
    exec(BLOCKS["More tensors per token"].replace(", ...]", "]"), space)
    assert torch.equal(space["weights"], weights)
    batch = space["batch"]
    space["logits"] = space["model"](batch.tokens, batch.position_ids, batch)
    exec(BLOCKS["Results back to their documents"], space)
    assert [len(each) for each in space["log_probs"]] == [4]


def test_a_row_that_rollouts_share_has_no_table_by_their_lengths() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = made("Llama", rope_parameters=rope, max_position_embeddings=4)
    balancer = SequenceBalancer("te_ring", Model(4, 2, 8))
    assert model(**hf.inputs(balancer.rollouts([[1, 2, 3, 4], [1, 2, 5]]))).logits.shape[1] == 6
    with pytest.raises(ConfigError, match=r"above 4 tokens, and a row that rollouts .* longest path here has 5 tokens"):
        model(**hf.inputs(balancer.rollouts([[1, 2, 3, 4, 9], [1, 2, 5]])))

"""Log-probabilities, entropies and losses in chunks of rows are those of all logits at once."""

import inspect
import logging
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_balance.errors import ConfigError
from megatron_balance.torch import SequenceBalancer, hf, losses
from megatron_balance.torch.losses import token_losses
from tests.support.peak_bytes import PeakBytes
from tests.support.upstream import LIGER, parsed, signature

log = logging.getLogger(__name__)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def drawn(rows: int, vocabulary: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(rows, width, generator=g), torch.randn(vocabulary, width, generator=g) / width**0.5
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    labels[::5] = -100
    given = (hidden, head, *([torch.randn(vocabulary, generator=g)] if bias else []))
    return *(x.to(dtype).requires_grad_() for x in given), *([] if bias else [None]), labels


def of_all_logits(hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, temperature: float) -> Any:
    logs = (F.linear(hidden, head, bias) / temperature).log_softmax(-1)
    own = logs.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0.0)
    return own, -(logs.exp() * logs).sum(-1)


def apart(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("which", ["log_probs", "entropies", "both"])
def test_values_and_gradients_are_those_of_all_logits(which: str, dtype: torch.dtype) -> None:
    hidden, head, bias, labels = drawn(37, 50, 16, dtype, bias=True)
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(37, generator=g).to(dtype) for _ in range(2)]
    found = token_losses(hidden, head, labels, bias=bias, temperature=0.7, chunk=8)
    right = of_all_logits(hidden, head, bias, labels, 0.7)
    for got, wanted in zip(found, right, strict=True):
        assert apart(got, wanted) < TOLERANCE[dtype]
    kept = {"log_probs": slice(1), "entropies": slice(1, 2), "both": slice(2)}[which]
    sums: Any = [
        sum((x * w).sum() for x, w in zip(each[kept], weights[kept], strict=True)) for each in (tuple(found), right)
    ]
    grads, wanted_grads = (torch.autograd.grad(each, (hidden, head, bias)) for each in sums)
    for got, wanted in zip(grads, wanted_grads, strict=True):
        assert apart(got, wanted) < 2 * TOLERANCE[dtype]


def test_the_loss_is_that_of_cross_entropy_in_half_precision_too() -> None:
    for dtype, within in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        hidden, head, _, labels = drawn(33, 40, 16, dtype)
        loss = token_losses(hidden[None], head, labels, chunk=10).loss
        right = F.cross_entropy(F.linear(hidden, head).float(), labels, reduction="sum")
        assert loss.dtype == torch.float32
        assert float(loss) == pytest.approx(float(right), rel=1e-6)
        both = zip(*(torch.autograd.grad(each, (hidden, head)) for each in (loss, right)), strict=True)
        assert all(got.dtype == dtype and apart(got, wanted) < within for got, wanted in both)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, head, _, labels = drawn(33, 40, 16, torch.float32)
        right = F.cross_entropy(F.linear(hidden, head).float(), labels, reduction="sum")
        assert float(token_losses(hidden, head, labels).loss) == pytest.approx(float(right), rel=1e-6)
    hidden, head, _, labels = drawn(9, 40, 16, torch.float32)
    hidden.requires_grad_(False)
    token_losses(hidden, head.detach().requires_grad_(), labels).loss.backward()


@pytest.mark.parametrize("vocabulary", [8192, 32768, 131072])
def test_peak_bytes_do_not_have_the_logits(vocabulary: int) -> None:
    rows, width, chunk = 512, 16, 32
    peaks: list[int] = []
    for chunked in (True, False):
        hidden, head, _, labels = drawn(rows, vocabulary, width, torch.float32)
        with PeakBytes() as counted:
            if chunked:
                loss = token_losses(hidden, head, labels, chunk=chunk).loss
            else:
                loss = F.cross_entropy(F.linear(hidden, head), labels, reduction="sum")
            loss.backward()
        peaks.append(counted.peak)
        del loss
    log.info("%d rows, %d words: %.1f MB in chunks, %.1f MB", rows, vocabulary, *(each / 1e6 for each in peaks))
    logits, gradient = 4 * rows * vocabulary, 4 * vocabulary * width
    assert peaks[0] < gradient + 4 * logits * chunk / rows + 4 * rows * width * 2
    assert peaks[1] > 2 * logits


def liger(
    input: Tensor, weight: Tensor, target: Tensor, bias: Any = None, ce_weight: Any = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean", softcap: Any = None,
    return_z_loss: bool = False, accum_dtype: Any = None, use_token_scaling: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, chunk_mem_const: int = 1,
) -> Tensor:  # fmt: skip
    # Stands for Liger's function, which needs a GPU.
    assert ce_weight is softcap is None
    others = lse_square_scale, label_smoothing, return_z_loss, use_token_scaling
    assert not any((*others, return_token_accuracy, return_predicted_tokens))
    assert (chunk_mem_const, accum_dtype) == (1, torch.float32)
    logits = F.linear(input, weight, bias).float()
    return F.cross_entropy(logits, target, reduction=reduction, ignore_index=ignore_index)


def test_ligers_loss_is_ours_under_the_signature_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = pytest.importorskip("transformers")
    hidden, head, bias, labels = drawn(33, 40, 16, torch.float32, bias=True)
    with pytest.raises(ConfigError, match="expected tensors on a GPU, got cpu; take losses=True"):
        losses.liger_loss(hidden, head, labels)
    monkeypatch.setattr(losses, "LIGER_DEVICES", ("cpu",))
    monkeypatch.setitem(sys.modules, losses.LIGER[0], None)
    with pytest.raises(ConfigError, match="install liger-kernel, or take losses=True"):
        losses.liger_loss(hidden, head, labels)
    monkeypatch.setitem(sys.modules, losses.LIGER[0], SimpleNamespace(**{losses.LIGER[1]: liger}))
    found = losses.liger_loss(hidden[None], head, labels, bias=bias)
    of_both = [
        (each, *torch.autograd.grad(each, (hidden, head, bias)))
        for each in (found.loss, token_losses(hidden, head, labels, bias=bias).loss)
    ]
    assert all(apart(got, wanted) < 1e-6 for got, wanted in zip(*of_both, strict=True))
    with monkeypatch.context() as sharded:  # four ranks average the gradients of a head, not of hidden states
        operands = losses._operands
        sharded.setattr(losses, "_operands", lambda *given: (*operands(*given)[:3], 4))
        averaged = torch.autograd.grad(losses.liger_loss(hidden, head, labels, bias=bias).loss, (hidden, head, bias))
    assert all(
        apart(n * got, wanted) < 1e-6 for n, got, wanted in zip((1, 4, 4), averaged, of_both[1][1:], strict=True)
    )
    for name in ("log_probs", "entropies"):
        with pytest.raises(ConfigError, match="gives the loss alone"):
            getattr(found, name)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SIZES), attn_implementation=hf.register()
    )
    batch = SequenceBalancer.for_model(model.config)(DOCUMENTS)
    by_liger, ours = (model(**hf.inputs(batch, losses=each)).logits for each in ("liger", True))
    assert isinstance(by_liger, losses.LigerLoss)
    assert apart(by_liger.loss, ours.loss) < 1e-6
    with pytest.raises(ConfigError, match=r'expected True, False or "liger", got \'lion\''):
        hf.inputs(batch, losses=cast("Any", "lion"))
    real = signature(parsed(LIGER, losses.LIGER[0].replace(".", "/") + ".py"), losses.LIGER[1])
    given = [
        [(each.name, each.default, each.kind) for each in of.parameters.values()]
        for of in (inspect.signature(liger), real)
    ]
    assert given[0] == given[1]


def test_what_cannot_be_is_refused() -> None:
    hidden, head, _, labels = drawn(9, 40, 16, torch.float32)
    for given, said in (
        ((hidden, head[:, :8], labels), r"expected hidden states \[T, C\], a head \[V, C\] and labels \[T\], got"),
        ((hidden, head, labels[:3]), r"\[9, 16\], \[40, 16\] and \[3\]"),
        ((hidden.double(), head, labels), "of one type, got torch.float64 and torch.float32"),
    ):
        with pytest.raises(ConfigError, match=said):
            token_losses(*given)
    hows: Any = ({"temperature": 0.0}, {"temperature": float("nan")}, {"chunk": 0})
    for how in hows:
        with pytest.raises(ConfigError, match="a temperature and a chunk above 0"):
            token_losses(hidden, head, labels, **how)
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(token_losses(hidden, head, labels).loss, hidden, create_graph=True)


DOCUMENTS = [torch.arange(9) % 10, torch.arange(5) % 7, torch.tensor([3])]
SIZES: dict[str, Any] = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "head_dim": 8}


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_of_transformers_gives_losses_in_place_of_logits(lora: bool) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    inner = model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SIZES), attn_implementation=hf.register()
    )
    if lora:
        peft: Any = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    batch = SequenceBalancer.for_model(inner.config)(DOCUMENTS)
    logits = model(**hf.inputs(batch)).logits[0]
    found = model(**hf.inputs(batch, losses=True)).logits
    own, entropies = of_all_logits(logits, torch.eye(20), None, batch.labels, 1.0)
    assert apart(found.log_probs, own) < 1e-6
    assert apart(found.entropies, entropies) < 1e-6
    batch.mean_loss(found.loss).backward()
    # as before, where it is not asked for
    assert torch.equal(model(**hf.inputs(batch)).logits[0], logits)
    with hf.attention_of(inner, "eager"):
        assert model(input_ids=batch.tokens[None]).logits.shape == (1, 15, 20)
    # PEFT's models call the one inside by its hooks, so that a forward is checked
    given = {name: each for name, each in hf.inputs(batch).items() if name != "position_ids"}
    with pytest.raises(ConfigError, match="without position_ids, and would number the rows"):
        model(**given)


def test_a_model_that_computes_with_its_logits_is_refused() -> None:
    transformers: Any = pytest.importorskip("transformers")
    for config in (transformers.Gemma2Config(**SIZES), transformers.GraniteConfig(**SIZES, logits_scaling=2.0)):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=hf.register())
        batch = SequenceBalancer.for_model(config)(DOCUMENTS)
        with pytest.raises(ConfigError, match="computes with its logits behind its head"):
            model(**hf.inputs(batch, losses=True))

"""A balancer of one process: batches, errors, and Transformers' attention."""

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import megatron_balance
from megatron_balance import Cluster, Model
from megatron_balance.config import load_cluster
from megatron_balance.errors import BalanceError, ConfigError, InfeasibleError
from megatron_balance.ir.forest import Forest, Segment
from megatron_balance.model_config import unproved
from megatron_balance.planners import PLANNERS
from megatron_balance.planning.choice import choose_planner
from megatron_balance.profiling.hardware import Reading, cluster_of
from megatron_balance.torch import IGNORED, SequenceBalancer, Settings, balanced_attention, hf, knapformer, model_of
from megatron_balance.torch import balancer as module
from megatron_balance.torch.settings import check_layer

pytest.importorskip("torch", reason="the extra 'torch' brings it")

MODEL = Model(4, 2, 8)
WHOLE = "expected a whole number of at least 1"
DOCUMENTS = [torch.tensor([5, 6, 7]), torch.tensor([8]), [1, 2]]


def balancer(planner: str = "zeppelin", **settings: Any) -> SequenceBalancer:
    return SequenceBalancer(planner, MODEL, settings=Settings(**settings))


def wrong(value: object) -> Any:
    # A value of a type that an argument does not have.
    return value


def damaged(key: str) -> None:
    made = balancer()
    made.load_state_dict({**made.state_dict(), key: 3})


def test_a_batch_has_tokens_positions_and_labels_shifted_or_taken_as_they_are() -> None:
    batch = balancer()(DOCUMENTS)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 1, 2]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.labels.tolist() == [6, 7, IGNORED, IGNORED, 2, IGNORED]
    rows = [(document, at) for document, start, stop in batch.layout(0).tolist() for at in range(start, stop)]
    assert rows == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert batch.documents == (0, 1, 2)
    assert batch.imbalance() == {key: {"tokens": 1.0, "attention": 1.0} for key in ("as_read", "planned")}
    assert "6 tokens of 6 in 3 documents" in repr(batch)
    document = (torch.tensor([5, 6, 7]), torch.tensor([IGNORED, 60, 70]))
    assert balancer()([document]).labels.tolist() == [60, 70, IGNORED]
    assert balancer(shift_labels=False)([document]).labels.tolist() == [IGNORED, 60, 70]


def test_the_mean_loss_counts_the_targets_of_all_microbatches() -> None:
    batches = balancer().step([DOCUMENTS, [torch.arange(4)]])
    logits = [torch.randn(batch.num_rows, 10, requires_grad=True) for batch in batches]
    sums = [F.cross_entropy(x, b.labels, reduction="sum") for x, b in zip(logits, batches, strict=True)]
    for batch, summed in zip(batches, sums, strict=True):
        batch.mean_loss(summed, attended=0).backward()
    labels = torch.cat([batch.labels for batch in batches])
    whole = torch.cat(logits).detach().requires_grad_()
    mean = F.cross_entropy(whole, labels)
    mean.backward()
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([x.grad for x in logits if x.grad is not None]), whole.grad)
    shares = [float(batch.global_loss(summed, attended=0)) for batch, summed in zip(batches, sums, strict=True)]
    assert sum(shares) == pytest.approx(mean.item())


def test_without_a_cluster_gpus_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    read = cluster_of(None, [Reading("base: h100\nname: machine\nnum_ranks: 8\nnic_bytes_per_s: 25e9\n")])
    monkeypatch.setattr("megatron_balance.torch.settings.cluster_of_machine", lambda _: read)
    pool = balancer().pool
    found = Settings(kernel="flash_attn").cluster_of(pool, torch.device("cuda"))
    assert (found.name, found.num_ranks, found.nic_bytes_per_s) == ("machine", 1, 25e9)
    assert (found.flops_per_s, found.attention_kernel) == (load_cluster("h100").build().flops_per_s, "flash_attn")
    assert Settings().cluster_of(pool, torch.device("cpu")) == Cluster(1, 1, name="job")
    assert Settings(cluster="a800").cluster_of(pool, torch.device("cuda")).name == "a800"


def test_a_step_without_documents_is_a_row_of_padding() -> None:
    batch = balancer(row_multiple=4)([])
    assert (batch.num_rows, batch.num_tokens, batch.num_targets.item()) == (4, 0, 0)
    q = torch.randn(4, 4, 8, requires_grad=True)
    out = balanced_attention(q, q[:, :2], q[:, :2], batch)
    loss = F.cross_entropy(out.flatten(1), batch.labels, reduction="sum")
    batch.mean_loss(loss).backward()
    assert q.grad is not None
    assert loss.item() == q.grad.abs().sum().item() == 0


@pytest.mark.parametrize("leading", [False, True])
def test_attention_is_that_of_every_document_alone(leading: bool) -> None:
    batch = balancer()(DOCUMENTS)
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    given = [x[None] if leading else x for x in (q, k, v)]
    out = balanced_attention(given[0], given[1], given[2], batch, 0.5)
    assert out.shape == given[0].shape
    for a, b in ((0, 3), (3, 4), (4, 6)):
        alone = (x[a:b].transpose(0, 1) for x in (q, k, v))
        wanted = F.scaled_dot_product_attention(*alone, is_causal=True, scale=0.5, enable_gqa=True).transpose(0, 1)  # pyright: ignore
        torch.testing.assert_close(out.view(6, 4, 8)[a:b], wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_is_computed_again_in_the_backward(reentrant: bool) -> None:
    batch = balancer()(DOCUMENTS)
    x = torch.randn(6, 4, 8, requires_grad=True)

    def layer(x: torch.Tensor, batch: Any) -> torch.Tensor:
        return balanced_attention(x, x[:, :2], 2 * x[:, 2:], batch).square().sum()

    (wanted,) = torch.autograd.grad(layer(x, batch), x)
    counters = batch.bound(x.dtype, x.device).counters
    assert (counters.forward_calls, counters.backward_calls) == (1, 1)
    again: Any = checkpoint(layer, x, batch, use_reentrant=reentrant)
    again.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    assert (counters.forward_calls, counters.backward_calls) == (3, 2)


def test_attention_runs_in_the_type_of_autocast() -> None:
    batch = balancer()(DOCUMENTS)
    q, k = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert balanced_attention(q, k, k, batch).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"expected q, k and v of one type, got torch.float32, torch.bfloat16"):
        balanced_attention(q, k.bfloat16(), k, batch)


def test_attention_of_other_shapes_or_of_what_is_no_tensor_or_batch_or_lies_elsewhere_is_refused() -> None:
    batch, q, k = balancer()(DOCUMENTS), torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
    flat, rows = torch.zeros(6, 16), r"with the 6 rows of batch.tokens, got \[5, 4, 8\]"
    for given, complaint in (
        ((q[:5], k, k, batch), rf"q: expected \[rows, .*\] {rows}"),
        ((q, flat, flat, batch), r"k: expected \[rows, heads, head_dim\]"),
        ((torch.zeros(6, 8, 8), k, k, batch), r"q is \(6, 8, 8\), the plan gives this rank \(6, 4, 8\)"),
        ((q, k.to("meta"), k, batch), "on the batch's device cpu, got cpu, meta and cpu"),
        ((q, k, k.numpy(), batch), r"v: expected a tensor .*, got ndarray"),
        ((q, k, k, None), "expected the BalancedBatch that the balancer returned, got NoneType"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            balanced_attention(*wrong(given))


def test_tensors_per_token_may_be_of_any_type_and_of_no_width() -> None:
    tokens = torch.arange(3)
    others = (torch.rand(3) + 1j, torch.rand(3, 2).bfloat16(), torch.zeros(3, 0), torch.eye(3).bool())
    batch = balancer()([(tokens, tokens, *others)])
    for ours, theirs in zip(batch.others, others, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("make", "error", "complaint"),
    [
        (lambda: balancer("zepelin"), ConfigError, "did you mean 'zeppelin'"),
        (lambda: SequenceBalancer("zeppelin", MODEL, tokens=3), ConfigError, "SequenceBalancer: tokens: unknown key"),
        (lambda: balancer(mask="windowed"), ConfigError, "mask.* 'windowed'"),
        (lambda: balancer(backward="auto"), ConfigError, "backward: expected one of keep, replay; got 'auto'"),
        (lambda: balancer(kernel="flash"), ConfigError, "kernel: expected one of auto, plain.*; got 'flash'"),
        (lambda: balancer(gradient_wire="fp8"), ConfigError, "gradient_wire: expected one of fp32, bf16; got 'fp8'"),
        (lambda: balancer(row_multiple=0), ConfigError, "row_multiple: expected a whole number of at least 1, got 0"),
        (lambda: balancer(ranks_per_node=2.0), ConfigError, "ranks_per_node: expected a whole number.* got 2.0"),
        (lambda: balancer(prove_every=-1), ConfigError, "prove_every: expected a whole number of at least 0, got -1"),
        (lambda: balancer(layers="remap"), ConfigError, "layers: expected a .*Layers, got 'remap'"),
        (lambda: balancer(device="gpu"), ConfigError, "device: Expected one of cpu, cuda"),
        (lambda: SequenceBalancer("zeppelin", wrong({})), ConfigError, "a megatron_balance.Model, got dict"),
        (lambda: SequenceBalancer("te_ring", MODEL, wrong("dp")), ConfigError, "Mesh or a process group, got str"),
        (lambda: SequenceBalancer("flexsp", MODEL, averaged_over=wrong("a")), ConfigError, "averaged_over: .* got str"),
        (lambda: SequenceBalancer("zeppelin", MODEL, settings=wrong({})), ConfigError, "expected Settings.*got dict"),
        (lambda: knapformer.GroupBalancer("g1n1"), ConfigError, "call init_process_group"),
        (lambda: knapformer.GroupBalancer("g1n1", gamma=wrong("1")), ConfigError, "gamma: expected a number.*'1'"),
        (lambda: knapformer.GroupBalancer("g1n1", gamma=-1), ConfigError, "gamma: .* of at least 0, got -1"),
        (lambda: knapformer.GroupBalancer("g1n1", ranks_per_node=0), ConfigError, f"ranks_per_node: {WHOLE}, got 0"),
        (lambda: balancer().step([]), ConfigError, "the documents of at least 1 microbatch .*, got none"),
        (lambda: balancer()(wrong(None)), BalanceError, "expected a list of documents, got a NoneType"),
        (lambda: balancer()(wrong({"input_ids": [1]})), BalanceError, "expected a list of documents, got a dict"),
        (lambda: balancer().load_state_dict({"ranks": 1}), ConfigError, "expected the state_dict.*without ledger, "),
        (lambda: balancer()(DOCUMENTS).layout(1), ConfigError, "rank 1: expected a rank of the plan, 0 to 0"),
        (lambda: balancer()(DOCUMENTS).gather(wrong([1])), ConfigError, "one entry for each row, got list"),
        (lambda: balancer()(DOCUMENTS).mean_loss(torch.ones(6)), ConfigError, r"a scalar tensor .*, got \[6\]"),
        (lambda: balancer()(DOCUMENTS).global_loss(wrong(1.0)), ConfigError, "a scalar tensor .*, got float"),
        (lambda: balancer(cluster=Cluster(8, 4)), ConfigError, "custom has 8 ranks, 4 on a node; the balancer's ranks"),
        (lambda: SequenceBalancer("zeppelin", MODEL, tokens_per_rank=4)(DOCUMENTS), InfeasibleError, "tokens_per_rank"),
        (lambda: balancer()(DOCUMENTS).gather(torch.zeros(5)), ConfigError, r"one entry for each of 6 rows, got \[5\]"),
        (lambda: balancer().gather(torch.zeros(5)), ConfigError, "expected a batch before gather, got none"),
        (lambda: next(balancer().steps([], microbatches=0)), ConfigError, f"microbatches: {WHOLE}, got 0"),
        (lambda: next(balancer().steps([], wrong(1.5))), ConfigError, f"microbatches: {WHOLE}, got 1.5"),
        (lambda: next(balancer().flush(wrong("2"))), ConfigError, f"microbatches: {WHOLE}, got '2'"),
        (lambda: next(balancer().steps(wrong(None))), BalanceError, "expected a loader, .* got NoneType"),
        (lambda: balancer().step(wrong(3)), BalanceError, "the documents of each microbatch in a list, got int"),
        (lambda: balancer(wrong(["zeppelin"])), ConfigError, r"expected the name of a planner, got \['zeppelin'\]"),
        (lambda: balancer(shift_labels="no"), ConfigError, "shift_labels: expected True or False, got 'no'"),
        (lambda: balancer(cluster=3), ConfigError, "cluster: expected a name, a YAML file or a Cluster, got 3"),
        (lambda: balancer(plan_costs=3), ConfigError, "plan_costs: expected a file, got 3"),
        (lambda: balancer(device=[]), ConfigError, r"device: expected a torch.device or its name, got \[\]"),
        (lambda: balancer()(DOCUMENTS).mean_loss(torch.tensor(3)), ConfigError, r"a scalar tensor .* of torch.int64"),
        (lambda: balancer()(DOCUMENTS).layout(wrong("a")), ConfigError, "rank 'a': expected a rank of the plan"),
        (lambda: megatron_balance.layout(wrong(None), 0), ConfigError, "the plan of a microbatch, got NoneType"),
        (lambda: hf.inputs(wrong(None)), ConfigError, "expected the BalancedBatch .*, got NoneType"),
        (lambda: balancer().load_state_dict(wrong(None)), ConfigError, "the state_dict of a balancer, got NoneType"),
        *((partial(damaged, key), ConfigError, "is damaged") for key in ("counts", "waiting", "pending", "form")),
        (lambda: Model(wrong("4"), 4, 8), ConfigError, f"num_heads: {WHOLE}, got '4'"),
        (lambda: Model(4, wrong(2.0), 8), ConfigError, f"num_kv_heads: {WHOLE}, got 2.0"),
        (lambda: Model(4, 2, wrong(True)), ConfigError, f"head_dim: {WHOLE}, got True"),
    ],
)
def test_mistakes_are_told(make: Any, error: type[BalanceError], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        make()


def test_a_loader_that_fails_is_told() -> None:
    def loader() -> Any:
        yield DOCUMENTS
        raise OSError("disk gone")

    steps = balancer().steps(loader())
    with pytest.raises(BalanceError, match="could not read its microbatches") as told:
        list(steps)
    assert isinstance(told.value.__cause__, OSError)


def test_the_process_that_plans_ahead_proves_plans_and_a_step_says_how_many() -> None:
    made = balancer(prove_every=1)

    def loader() -> Any:
        yield from [DOCUMENTS] * 3  # and then until a proof has ended
        deadline = time.monotonic() + 60
        while made.planned is None or not made.planned.proofs.proved:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            yield DOCUMENTS

    assert len(list(made.steps(loader()))) >= 3
    assert made.planned is not None
    assert (made.planned.proofs.wrong, made.planned.proofs.left_out) == ("", 0)


def test_kernels_are_built_before_a_plan_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # whose first launch would compile them
    seen, bind = [], module.Binder.bind
    monkeypatch.setattr(module, "build_variants", lambda *_: seen.append("built"))
    monkeypatch.setattr(module.Binder, "bind", lambda *given, **how: [seen.append("bound"), bind(*given, **how)][1])
    balancer()(DOCUMENTS).bound(torch.float32, torch.device("cpu"))
    assert seen == ["built", "bound"]


def test_evaluation_holds_nothing_back() -> None:
    made = SequenceBalancer("wlb_llm", MODEL, settings=Settings(), thresholds=(3,))
    assert made([torch.arange(5), torch.arange(2)]).plan.lengths == (5, 2), "one outlier for the one microbatch"
    batches = made.step([[torch.arange(5), torch.arange(2)], []])
    assert sum(batch.plan.num_tokens for batch in batches) == 2, "it waits for another one"
    batch = made.evaluate([torch.arange(5)])
    assert (batch.plan.lengths, batch.documents) == ((5,), (0,))
    (flushed,) = made.flush()
    assert (flushed[0].plan.lengths, flushed[0].documents) == ((5,), (2,))


def test_a_state_of_other_ranks_or_a_damaged_one_is_refused_and_changes_nothing() -> None:
    state = SequenceBalancer("wlb_llm", MODEL, thresholds=(3,))
    state.step([[torch.arange(5)], []])
    saved = state.state_dict() | {"ranks": 2}
    with pytest.raises(ConfigError, match="1 documents that wait and 0 microbatches read ahead are on 2 ranks, this"):
        SequenceBalancer("wlb_llm", MODEL).load_state_dict(saved)
    with pytest.raises(ConfigError, match="expected the state of rank 0, got that of rank 1, whose documents wait"):
        SequenceBalancer("wlb_llm", MODEL).load_state_dict(state.state_dict() | {"rank": 1})
    made = balancer()
    made(DOCUMENTS)
    before = made.state_dict()
    with pytest.raises(ConfigError, match="is damaged"):
        made.load_state_dict({**before, "counts": [9, 9], "form": 3})
    assert made.state_dict() == before
    assert made([torch.arange(4)]).documents == (3,)


def test_targets_are_counted_exactly_also_beyond_what_fp32_counts() -> None:
    row = torch.zeros(1, 2, dtype=torch.int64)
    scale = SequenceBalancer("te_ring", MODEL)._loss_scale([row.expand(2**24, 2), row])
    assert scale.num_targets.item() == 2**24 + 1


def call(batch: Any, **given: Any) -> Any:
    x = torch.zeros(1, 4, 6, 8)
    layer = torch.nn.Linear(1, 1)
    return hf.attend(layer, x, x[:, :2], x[:, :2], None, balanced=batch, **given)  # pyright: ignore[reportCallIssue]


def test_an_encoder_of_transformers_attends_fully() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=10, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    wanted = [model(torch.as_tensor(each)[None]).last_hidden_state[0] for each in DOCUMENTS]
    model.set_attn_implementation(hf.register())
    batch = SequenceBalancer.for_model(config)(DOCUMENTS)
    torch.testing.assert_close(model(**hf.inputs(batch)).last_hidden_state[0], torch.cat(wanted))
    with pytest.raises(ConfigError, match="BertSelfAttention asks for attention that is not causal"):
        model(**hf.inputs(SequenceBalancer.for_model(config, settings=Settings(mask="causal"))(DOCUMENTS)))
    with pytest.raises(ConfigError, match=r"causal attention, and the batch is planned for another mask; .* is full"):
        call(batch, is_causal=True)


@pytest.mark.parametrize("family", ["Mistral", "GptOss"])
def test_windows_and_sinks_of_transformers_equal_its_own(family: str) -> None:
    # A window in all layers, for which plans are made; and in every other one, with sinks, under
    # plans made for the others.
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 10, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 3, "tie_word_embeddings": False}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0} if family == "GptOss" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **experts, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    documents = [torch.arange(9) % 10, torch.arange(5) % 7, torch.tensor([3])]
    wanted = torch.cat([model(each[None]).logits[0] for each in documents])
    wanted.square().sum().backward()
    exact = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    model.set_attn_implementation(hf.register())
    batch = SequenceBalancer.for_model(config)([each.tolist() for each in documents])
    assert batch.plan.mask.name == ("window_3" if family == "Mistral" else "causal")
    logits = model(**hf.inputs(batch)).logits[0]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    logits.square().sum().backward()
    for name, each in exact.items():
        torch.testing.assert_close(model.get_parameter(name).grad, each, rtol=1e-3, atol=1e-4)
    assert (family == "Mistral") != any(name.endswith("sinks") for name in exact)


def test_a_layer_of_another_mask_than_the_plans_is_refused() -> None:
    windowed = SequenceBalancer("te_ring", MODEL, settings=Settings(mask="window_2"))(DOCUMENTS)
    assert call(windowed, sliding_window=2)[0].shape == (1, 6, 4, 8)
    wide = SequenceBalancer("te_ring", MODEL, settings=Settings(mask="window_9"))(DOCUMENTS)
    assert call(wide, sliding_window=9)[0].shape == (1, 6, 4, 8), "the plan's window, which no document exceeds"
    for given, complaint in (
        ({"sliding_window": 1}, "a sliding window of 1 tokens; balanced attention is window_2"),
        ({"sliding_window": None}, "attention without a window; balanced attention is window_2"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            call(windowed, **given)
    full = SequenceBalancer("te_ring", MODEL, settings=Settings(mask="full"))(DOCUMENTS)
    with pytest.raises(ConfigError, match="a sliding window of 2 tokens; balanced attention is full"):
        call(full, sliding_window=2)
    x = torch.zeros(6, 4, 8)
    with pytest.raises(ConfigError, match="under mask window_2, and the batch was planned for full attention"):
        balanced_attention(x, x[:, :2], x[:, :2], full, window=2)


@pytest.mark.parametrize(
    ("kernel", "softcap", "complaint"),
    [
        ("auto", -1.0, "softcap: expected a number above 0, or 0 for none, got -1.0"),
        ("auto", float("nan"), "softcap: expected a number above 0, or 0 for none, got nan"),
        ("cpu_flash", 30.0, "kernel cpu_flash cannot cap scores softly .*; use kernel: auto"),
    ],
)
def test_soft_caps_that_no_kernel_has_are_refused(kernel: str, softcap: float, complaint: str) -> None:
    batch = SequenceBalancer("te_ring", MODEL, settings=Settings(kernel=kernel))(DOCUMENTS)
    x = torch.zeros(6, 4, 8)
    with pytest.raises(ConfigError, match=complaint):
        balanced_attention(x, x[:, :2], x[:, :2], batch, softcap=softcap)


def test_transformers_attention_runs_and_names_what_it_cannot() -> None:
    batch = balancer()(DOCUMENTS)
    assert call(batch, sliding_window=None, dropout=0.0, is_causal=True)[0].shape == (1, 6, 4, 8)
    assert call(batch, sliding_window=3)[0].shape == (1, 6, 4, 8), "a window that no document exceeds"
    for given, complaint in (
        ({"dropout": 0.1}, "Linear asks for dropout; balanced attention is causal"),
        ({"dropout": 0.1, "is_causal": False}, "dropout, attention that is not causal"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            call(batch, **given)
    with pytest.raises(ConfigError, match=r"Linear was called without a batch; call model\(\*\*hf.inputs\(batch\)\)"):
        call(None)
    assert hf.inputs(batch)["input_ids"].tolist() == [[5, 6, 7, 8, 1, 2]]
    assert SimpleNamespace(**hf.inputs(batch)).balanced is batch


# Models read from configurations of other libraries.


def test_a_configuration_of_transformers_is_read_and_of_settings_by_layer_only_heads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=200, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2
    )
    model = model_of(config)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.num_layers) == (6, 2, 16, 3)
    assert (model.hidden_size, model.ffn_size, model.gated_ffn, model.name) == (96, 200, True, "llama")
    gpt2 = model_of(transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2))
    assert (gpt2.num_heads, gpt2.num_kv_heads, gpt2.head_dim, gpt2.num_layers, gpt2.ffn_size) == (4, 4, 16, 2, 256)
    config = transformers.Gemma4TextConfig()
    assert model_of(config).head_dim == 256
    assert "gemma4_text: some layers may have other heads than 8 of 256, with 4 for keys; plans" in caplog.text
    windows = transformers.Gemma4TextConfig(per_layer_config={3: {"head_dim": 32, "sliding_window": 4}})
    with pytest.raises(ConfigError, match=r"per_layer_config: set to .*; known is head_dim, num_key_value_heads"):
        model_of(windows)


def test_names_of_torchtitan_and_mappings_are_read_and_what_is_missing_is_named() -> None:
    # Sizes may be integers of any library.
    titan = SimpleNamespace(dim=128, n_heads=8, n_kv_heads=None, n_layers=4, vocab_size=100)
    assert model_of(titan).head_dim == 16
    assert model_of({"num_heads": 8, "num_kv_heads": 2, "head_dim": 16}).hidden_size == 128
    assert model_of(MODEL) is MODEL
    model = Model(wrong(np.int64(4)), wrong(torch.tensor(2)), 8)
    assert model == MODEL
    assert type(model.num_heads) is type(model.num_kv_heads) is int
    for config, complaint in (
        ({"hidden_size": 64}, r"does not say num_heads \(num_attention_heads, n_heads, num_heads, n_head\); give"),
        ({"n_heads": 4}, r"does not say hidden_size \(hidden_size, dim"),
        ({"num_heads": 4, "num_kv_heads": 3, "head_dim": 8}, "num_kv_heads 3 does not divide num_heads 4"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            model_of(config)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BloomConfig", "bloom: attends by itself"),
        ("JambaConfig", "jamba: JambaMambaMixer of JambaModel is Mamba-1"),
        ("Llama4TextConfig", "llama4_text: "),
        ("Llama4Config", "llama4: "),
        ("MiniMaxConfig", "minimax: has layers that mix tokens"),
        ("RecurrentGemmaConfig", "recurrent_gemma: has layers that mix tokens"),
        ("T5Config", "is_encoder_decoder: "),
        ("Zamba2Config", "zamba2: "),
    ],
)
def test_a_model_that_is_not_known_to_attend_as_planned_is_refused_by_name(name: str, reason: str) -> None:
    config = getattr(pytest.importorskip("transformers"), name)()
    with pytest.raises(ConfigError, match=reason):
        model_of(config)
    model_of(config, accept=list(unproved(config)))


def test_layers_are_looked_at_where_the_balancer_saw_no_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    layer = wrong(SimpleNamespace(config=transformers.Qwen3NextConfig()))
    with pytest.raises(ConfigError, match="qwen3_next: has layers that mix tokens"):
        check_layer(layer, (), hybrid=False)
    check_layer(layer, ["qwen3_next"], hybrid=False)
    check_layer(layer, (), hybrid=True)
    with pytest.raises(ConfigError, match="qwen3_next: has layers that mix tokens"):
        check_layer(layer, (), hybrid=False)  # another balancer, which did not accept it
    check_layer(wrong(SimpleNamespace(config=transformers.LlamaConfig())), (), hybrid=False)


@pytest.mark.parametrize("planner", [*PLANNERS])
def test_a_planner_without_anything_to_do_says_so_once(planner: str, caplog: pytest.LogCaptureFixture) -> None:
    made = balancer(planner)
    for _ in range(2):
        made(DOCUMENTS)
    assert caplog.text.count(f"planner {planner} ") == 1
    eight = Cluster(8, 8)
    idle = {name: choose_planner(name, {}).idle(eight, 1) for name in PLANNERS}
    assert {name for name, said in idle.items() if said} == {"hydraulis", "wlb_llm"}
    assert choose_planner("wlb_llm", {}).idle(eight, 2) is None
    assert choose_planner("wlb_llm", {"thresholds": [9]}).idle(eight, 1) is None
    assert "as ulysses places it" in str(choose_planner("knapformer", {"topology": "node"}).idle(eight, 1))


# Rollouts and trees

ROLLOUTS = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [1]]
TREE = ([1, 2, 3, 4], [2, IGNORED, IGNORED, 9], [(1, -1, False), (2, 0, True), (1, 0, False)])


def test_rollouts_are_rows_with_one_label_each_at_positions_along_their_paths() -> None:
    batch = balancer().rollouts(ROLLOUTS, [[1, 2, 3, 4], [5, 6, 7], torch.ones(4), np.zeros(1)])
    assert isinstance(batch.plan.mask, Forest)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 6, 9, 1]
    assert batch.labels.tolist() == [6, 7, 8, IGNORED, 9, IGNORED, IGNORED]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 1, 2, 0]
    assert batch.others[0].tolist() == [2 + 6 + 1, 3 + 1, 4 + 1, 0, 7, 0, 0]
    assert batch.rollouts is not None
    assert batch.rollouts.sharing == (12, 7, 27, 16)
    back = batch.by_rollout(torch.stack([batch.tokens, batch.labels], 1), attended=0)
    assert [each[:, 0].tolist() for each in back] == ROLLOUTS
    assert all(each[:-1, 1].tolist() == rollout[1:] for each, rollout in zip(back, ROLLOUTS, strict=True))


def test_a_weighted_loss_of_rows_is_that_of_the_rollouts() -> None:
    weights = [torch.randn(len(each)).double() for each in ROLLOUTS]
    batch = balancer().rollouts(ROLLOUTS, weights)
    logits = torch.randn(1, batch.num_rows, 10, dtype=torch.float64)
    nll = F.cross_entropy(logits[0], batch.labels, reduction="none")
    of_rollouts = zip(batch.by_rollout(nll, attended=0), weights, strict=True)
    wanted = sum((each[:-1] * weight[1:]).sum() for each, weight in of_rollouts)
    torch.testing.assert_close(batch.weighted_nll(logits, attended=0), wanted)
    half = batch.weighted_nll(logits.bfloat16(), attended=0)
    assert half.dtype == torch.float32, "half precision is summed in fp32"
    nothing = balancer().rollouts([], [])
    assert nothing.weighted_nll(torch.randn(1, 10), attended=0).item() == 0
    assert nothing.sum_loss().item() == 0


def test_a_prefix_is_one_block_at_the_beginning() -> None:
    assert hf.prefix_segments([0, 0, 1]) == [Segment(2, -1, full=True), Segment(1, 0)]
    assert hf.prefix_segments([1, 2]) == [Segment(2, -1)]
    with pytest.raises(ConfigError, match="at the beginning alone, got one at 3 behind another type at 1"):
        hf.prefix_segments([0, 1, 1, 0])


def test_a_tree_attends_as_its_segments_say() -> None:
    batch = balancer().trees([TREE, ([7, 8], [8, IGNORED], [(2, -1, "causal")])])
    assert batch.labels.tolist() == [2, IGNORED, IGNORED, 9, 8, IGNORED]
    assert batch.position_ids.tolist() == [0, 1, 2, 1, 0, 1]
    shown = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()
    q, k = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
    out = balanced_attention(q, k, k, batch)
    alone = (x[:4].transpose(0, 1) for x in (q, k, k))
    wanted = F.scaled_dot_product_attention(*alone, attn_mask=shown, enable_gqa=True).transpose(0, 1)  # pyright: ignore
    torch.testing.assert_close(out[:4], wanted)


@pytest.mark.parametrize(
    ("take", "told"),
    [
        (lambda: balancer().rollouts([[1], "2"]), "rollout 1: expected token ids"),
        (lambda: balancer().rollouts(wrong(torch.ones(2, 2).long())), "expected a list of rollouts, got a Tensor"),
        (lambda: balancer().rollouts([[1, 2]], [[1.0]]), "weights of rollout 0: expected 2 finite numbers"),
        (lambda: balancer().trees([TREE[:2]]), r"tree 0: expected a tuple \(tokens, labels, segments, others"),
        (lambda: balancer().trees([(*TREE[:2], [(3, -1, False)])]), "tree 0: segments of 3 tokens, and 4 tokens"),
        (lambda: balancer().trees([(*TREE[:2], [(4, 0, False)])]), "tree 0: .*parent 0; depth first it is -1"),
        (lambda: balancer().trees([(*TREE[:2], [4])]), "tree 0: "),
        (lambda: balancer().trees([(*TREE[:2], [(4, -1, "fully")])]), 'tree 0: expected "causal", "full" or .*fully'),
        (lambda: balancer(mask="full", shift_labels=False).rollouts(ROLLOUTS), "a full mask shows siblings"),
        (lambda: balancer().rollouts(ROLLOUTS).mean_loss(torch.zeros(()), attended=0), "count those that several have"),
        (lambda: balancer().rollouts(ROLLOUTS).global_loss(torch.zeros(()), attended=0), "take weighted_nll"),
        (lambda: balancer().rollouts(ROLLOUTS).weighted_nll(torch.zeros(7, 9), attended=0), "one without weights"),
        (lambda: balancer().rollouts(ROLLOUTS).cumulative(torch.zeros(7)), "expected documents, got trees"),
        (lambda: balancer()(DOCUMENTS).by_rollout(torch.zeros(6), attended=0), "got one of documents or trees"),
        (lambda: balancer()(DOCUMENTS).weighted_nll(torch.zeros(6, 9), attended=0), "expected a step of balancer.roll"),
    ],
)
def test_what_trees_do_not_take_is_refused(take: Any, told: str) -> None:
    with pytest.raises(BalanceError, match=told):
        take()

"""The recorder of plans, programs and steps: equal where nothing changed, and it says what did."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import seams
from tools.docs_hooks import with_links
from tools.megatron_flags import command_line
from tools.reach import pretrains, words_of

pytest.importorskip("mkdocs", reason="the extra 'docs' brings it")

DOCUMENT = {"gpus": {"64k": 4}, "gpus_per_node": 2, "batches": {"mixed/64k": [[9000, 4000, 300, 20], [8000, 8000]]}}


@pytest.fixture
def recorder(monkeypatch) -> seams.Recorder:
    monkeypatch.setattr(seams, "VARIANTS", {"te_ring": ("te_ring", {}), "zeppelin": ("zeppelin", {})})
    return seams.Recorder(DOCUMENT, sample=True)


@pytest.mark.parametrize("part", ["plans", "programs"])
def test_a_record_is_equal_to_itself_and_differs_by_planner(recorder, part):
    first, again = ({key: job() for key, job in getattr(recorder, part)()} for _ in range(2))
    assert first == again
    assert list(seams.compare({part: first}, {part: again}))[seams.PARTS.index(part)] == (
        f"{part}: {len(dict(seams.flat(first)))} of {len(dict(seams.flat(first)))} equal"
    )
    causal = {key.split(" | ")[0]: value for key, value in first.items() if " | causal | " in key}
    assert causal["te_ring"] != causal["zeppelin"]
    refused = seams.said(lambda: recorder.step("zeppelin", "causal", "a800", 3, (5,)).fingerprint())
    assert refused == "ConfigError", "a refusal is recorded as its kind"


def test_what_differs_is_said(tmp_path, capsys):
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    paths[0].write_text(json.dumps({"landscape": {"a": 2.0, "b": 1.0, "c": 1.0}, "plans": {"p": {"s": "x"}}}))
    paths[1].write_text(json.dumps({"landscape": {"a": 1.0, "b": 1.0}, "plans": {"p": {"s": "y"}}}))
    assert seams.main(["compare", *map(str, paths)]) == 1
    told = capsys.readouterr().out
    assert "plans: p / s: x -> y\nplans: 0 of 1 equal\n" in told
    assert "landscape: a: 2.0 -> 1.0 (0.5000)" in told
    assert "landscape: 1 of 2 equal, mean ratio 0.7500, worst 1.0000; 1 only before, 0 only after" in told
    assert seams.main(["compare", str(paths[0]), str(paths[0])]) == 0


# Links between pages are those of the site.


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("index.md", "[tour](tour.md)", "[tour](tour.md)"),
        ("planners.md", "[README](../README.md#strategies)", "[README](readme_page.md#strategies)"),
        ("readme_page.md", "see [torch](docs/torch.md)", "see [torch](torch.md)"),
        ("reference/torch.md", "[guide](../torch.md)", "[guide](../torch.md)"),
        ("titan.md", "[code](../scripts/examples/titan_balanced.py)", "code"),
        ("readme_page.md", "[license](LICENSE)", "license"),
        ("readme_page.md", "![plot](out/plot.svg)", ""),
        ("tour.md", "[site](https://pytorch.org)", "[site](https://pytorch.org)"),
        ("tour.md", "[below](#more)", "[below](#more)"),
    ],
)
def test_a_link_leads_to_a_page_of_the_site_or_is_text(page: str, link: str, wanted: str) -> None:
    assert with_links(link, page) == wanted


# The choice of Megatron's configurations that are counted, and the command lines made of them.

ITERATIONS: dict[str, Any] = {"MODEL_ARGS": {"--train-iters": 100}}
SAMPLES: dict[str, Any] = {"MODEL_ARGS": {"--train-samples": 100}}


@pytest.mark.parametrize(
    ("name", "config", "counted"),
    [
        ("gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce", ITERATIONS, True),
        ("gpt3_mcore_te_tp1_pp2_rope_embeddings_interleaved_no_fusion", ITERATIONS, True),
        ("mixtral_8x7b_tp1pp4ep8vpp8_release", SAMPLES, True),
        ("gpt_grpo_basic_function", SAMPLES, False),
        ("gpt_dynamic_inference_tp1_pp1_583m", {"MODEL_ARGS": {}}, False),
        ("gpt_rl_tp1", ITERATIONS, False),
        ("without_steps", {"MODEL_ARGS": None}, False),
    ],
)
def test_a_configuration_is_counted_by_its_name_and_steps(name: str, config: dict[str, Any], counted: bool) -> None:
    assert pretrains(Path(name) / "model_config.yaml", config) == counted


def test_a_value_with_blanks_is_one_word_where_the_flag_takes_one() -> None:
    given = {"--swiglu": True, "--bf16": False, "--spec": "module name", "--seed": "${REPEAT}"}
    given |= {"--offload-modules": "[core_attn moe_act]", "--step-batch-size-schedule": "0:384 200B:768"}
    assert words_of({"MODEL_ARGS": given}, {"--step-batch-size-schedule"}) == [
        *("--swiglu", "--spec", "module", "name", "--seed", "1"),
        *("--offload-modules", "core_attn", "moe_act", "--step-batch-size-schedule", "0:384 200B:768"),
    ]


# Flags of Megatron as words of a command line


def test_a_flag_stands_alone_with_its_value_or_with_several_and_later_tables_win() -> None:
    flags = {"swiglu": True, "lr": 1e-3, "save-interval": None, "balance-device": False, "data-path": ["1", "text"]}
    assert command_line(flags) == ["--swiglu", "--lr", "0.001", "--data-path", "1", "text"]
    assert command_line({"seed": 1, "swiglu": True}, {"seed": 2, "swiglu": False}) == ["--seed", "2"]

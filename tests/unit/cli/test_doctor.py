"""`megatron-balance doctor`: what is missing is said with the command that mends it."""

from __future__ import annotations

import importlib.metadata

import pytest

from megatron_balance.cli import doctor


@pytest.fixture
def stack(monkeypatch):
    """The distributions this machine appears to have; torch is never started."""

    def have(torch: dict[str, object] | None = None, **versions: str) -> dict[str, doctor.Check]:
        def version(distribution: str) -> str:
            if distribution in versions:
                return versions[distribution]
            raise importlib.metadata.PackageNotFoundError(distribution)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(doctor, "_probe_torch", lambda: torch or {})
        return {check.name: check for check in doctor.examine()}

    return have


def test_nothing_installed_names_a_mend_for_every_part(stack):
    checks = stack()
    missing = [check for check in checks.values() if check.status == "missing"]
    assert {"numpy", "torch", "megatron-core", "nccl", "flash-attn", "gurobi", "psutil"} <= {
        check.name for check in missing
    }
    assert all(check.mend for check in checks.values() if check.status != "ok")


def test_before_python_312_training_needs_another_python_and_no_command_that_brings_nothing(stack, monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 11, 7))
    checks = stack()
    for part in ("python for Megatron", "torch", "gloo", "megatron-core"):
        assert checks[part].mend.startswith("python3.12 -m venv"), checks[part]
    assert "pip leaves torch and megatron-core out of [train] without a word" in checks["torch"].mend


def test_commands_are_below_the_table_whole_and_on_a_line_of_their_own(stack, run):
    checks = stack()
    said = run.printed("doctor")
    table, below = said.split("to mend what is not ok:\n")
    assert "pip install" not in table
    told = dict(line.strip().split("  ", 1) for line in below.splitlines() if line.startswith("  "))
    mends = {check.name: check.mend for check in checks.values() if check.mend}
    assert {name: command.strip() for name, command in told.items()} == mends


def test_another_megatron_is_wrong_and_the_pin_is_said(stack):
    check = stack(**{"megatron-core": "0.17.1"})["megatron-core"]
    assert (check.status, check.found, check.wanted) == ("wrong", "0.17.1", "0.19.x or 0.18.2")
    assert check.mend == "pip install --no-deps megatron-core==0.19.2"


def test_a_torch_that_does_not_import_says_why(stack):
    check = stack(torch={"error": "ImportError: libcudart.so.13: cannot open shared object file"})["torch"]
    assert check.status == "wrong"
    assert "libcudart" in check.found


def test_a_whole_cpu_stack_is_ready_to_train_but_not_on_a_gpu(stack, run):
    versions = dict.fromkeys(("numpy", "pydantic", "PyYAML", "tqdm", "rich", "psutil"), "1.0")
    checks = stack(
        torch={"torch": "2.13.0", "cuda": "13.0", "gpus": [], "gloo": True, "nccl": "2.29.7"},
        **versions,
        **{"megatron-core": "0.19.2"},
    )
    assert checks["gpu"].status == "missing"
    ready = run.json("doctor --json")["ready"]
    expected_to_train = checks["python for Megatron"].status == "ok"
    assert ready == {"plan": True, "train": expected_to_train, "train_on_gpu": False}


def test_table_shows_extras_in_brackets(stack, run):
    stack()
    assert "megatron-balance[gurobi]" in run.printed("doctor")


def test_a_configuration_gets_its_memory_and_the_decision_in_a_sentence(stack, run, tmp_path):
    stack()
    config = tmp_path / "run.yaml"
    config.write_text(
        "planner: te_ring\nmodel: llama-7b\n"
        "cluster: {base: a800, num_ranks: 16}\ndataset: {name: arxiv, tokens: 65536}\n"
    )
    code, out, _ = run("doctor", "--config", config)
    assert code == 0
    # Kept keys and values of 15 x 4k tokens are too much for 80 GB beside the model.
    assert "backward: keep in " in out
    assert " of 80.0 GB on rank 0 (all keep: " in out


def test_namespaces_are_probed_in_another_process(stack, monkeypatch):
    monkeypatch.setattr(doctor, "NAMESPACE_PROBE", "raise SystemExit('Operation not permitted')")
    check = stack()["network namespaces"]
    assert (check.status, check.found) == ("wrong", "refused: Operation not permitted")


def test_the_attention_kernels_are_listed_with_their_devices(stack):
    offered = {"plain": ["cpu", "cuda", "ok"], "flash_attn_3": ["cuda", "build it"]}
    checks = stack(torch={"torch": "2.13.0", "kernels": offered})
    assert (checks["kernel plain"].status, checks["kernel plain"].found) == ("ok", "serves cpu and cuda")
    assert (checks["kernel flash_attn_3"].status, checks["kernel flash_attn_3"].mend) == ("missing", "build it")


def test_a_kernel_that_is_there_and_broken_says_why_and_auto_says_what_it_takes(stack):
    fault = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda"
    torch = {
        "torch": "2.13.0",
        "kernels": {"flash_attn": ["cuda", "build it"]},
        "kernel_faults": {"flash_attn": fault},
        "kernel_auto": "torch_varlen",
    }
    checks = stack(torch=torch)
    broken = checks["kernel flash_attn"]
    assert (broken.status, broken.found, broken.mend) == ("wrong", fault, "build it")
    assert (checks["kernel: auto"].status, checks["kernel: auto"].found) == ("ok", "torch_varlen")
    none = stack(torch={**torch, "kernel_auto": "none: no attention kernel for torch.bfloat16"})["kernel: auto"]
    assert (none.status, none.found) == ("wrong", "none: no attention kernel for torch.bfloat16")


def test_the_probe_asks_the_registry_of_kernels():
    pytest.importorskip("torch")
    kernels = pytest.importorskip("megatron_balance.runtime.kernels").KERNELS
    probe = doctor._probe_torch()
    assert probe["kernels"] == {n: [*o.devices, "ok" if o.installed else o.mend] for n, o in kernels.items()}
    assert probe["kernel_auto"] in kernels


def test_the_configuration_knows_every_kernel():
    pytest.importorskip("torch")
    from typing import get_args

    from megatron_balance.planning.choice import Run
    from megatron_balance.runtime.kernels import KERNELS

    assert set(get_args(Run.model_fields["kernel"].annotation)) == {"auto", *KERNELS}


def test_what_differs_is_asked_of_a_folder_with_a_reviewed_megatron(run, tmp_path):
    code, _, err = run("doctor", "--patches", "--reviewed", str(tmp_path))
    assert (code, "expected a folder with megatron/core in it" in err) == (2, True)
    code, _, err = run("doctor", "--reviewed", str(tmp_path))
    assert (code, "belongs to --patches" in err) == (2, True)

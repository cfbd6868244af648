"""Hybrid models under plans: Megatron's mixers and whole training, like one rank."""

# Of kernels that need a GPU there are stand-ins (`stand_in_kernels`).

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.megatron_run import ROOT, Job, Trainer

SUPPORT = ROOT / "tests" / "support"


@pytest.fixture(scope="module")
def hybrid_trainer() -> Iterator[Trainer]:
    trainer = Trainer(path=[str(SUPPORT / "stand_in_kernels")])
    yield trainer
    trainer.close()


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_mixer_of_megatrons_equals_itself_with_each_document_alone(
    hybrid_trainer: Trainer, tmp_path: Path, tensor: int
) -> None:
    file = tmp_path / "found.json"
    argv = (str(SUPPORT / "hybrid_modules.py"), str(file), str(tensor))
    result = hybrid_trainer.run(Job("plain", 4, argv, str(tmp_path)))
    assert result.failed is None, result.tail(result.failed or 0)
    for name, by_fault in json.loads(file.read_text()).items():
        for fault, found in by_fault.items():
            worst = max(found.values())
            assert (worst > 1e-3) if fault else (worst < 2e-6), (name, fault, found)

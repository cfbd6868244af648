"""Patches: reviewed sources only, all or nothing, undone on exit."""

import dataclasses
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest

from megatron_balance.errors import PatchError
from megatron_balance.patches import Patch, Role, applied, fault_of, report, source_digest
from megatron_balance.patches.selection import every, for_job
from tests.support import upstream
from tools import megatron_versions

FOLDER = Path(__file__).resolve().parents[2] / "patches"
INSTALLED = Path(str(megatron.core.__file__)).parents[2]
NO_PATCHES = ("__init__", "report", "selection")
DENSE = {
    **dict.fromkeys(("num_experts", "mtp_num_layers", "virtual_pipeline_model_parallel_size")),
    "moe_router_load_balancing_type": "aux_loss",
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
}


def victim(value: int) -> int:
    return value + 1


def other_victim(value: int) -> int:
    return value + 2


class Owner:
    @staticmethod
    def static(value: int) -> int:
        return value + 3


def patch_of(function: object, qualname: str, digest: str | None = None, role: Role = "numbers") -> Patch:
    source = inspect.getsource(function)  # pyright: ignore[reportArgumentType]
    return Patch(
        target=f"{__name__}:{qualname}",
        wrap=lambda original: lambda value: 10 * original(value),
        role=role,
        reviewed={digest or source_digest(source): "here"},
        parameters=("value",),
        why="a test",
    )


def test_every_module_of_the_folder_is_in_the_selection_and_a_job_needs_only_what_it_uses() -> None:
    listed = {patch.target for patch in every()}
    for path in FOLDER.glob("*.py"):
        if path.stem not in NO_PATCHES:
            module = importlib.import_module(f"megatron_balance.patches.{path.stem}")
            assert {patch.target for patch in module.PATCHES} <= listed, path.stem

    def targets(*, joint: bool = False, ping_pong: bool = False, **args: object) -> str:
        chosen = for_job(SimpleNamespace(**{**DENSE, **args}), joint=joint, nano_batches=ping_pong)
        return " ".join(patch.target for patch in chosen if patch.role == "numbers")

    assert targets() == ""
    assert "router" not in targets(ping_pong=True)
    assert targets(ping_pong=True).count("megatron.core") == 4
    assert "get_tokens_per_expert" in targets(num_experts=4)
    assert "TopKRouter" in targets(num_experts=4, ping_pong=True)
    assert "multi_token_prediction" in targets(mtp_num_layers=1)
    assert "sinkhorn" not in targets(num_experts=4)
    assert targets(num_experts=4, moe_router_load_balancing_type="sinkhorn").count("sinkhorn") == 2
    by_sample = targets(num_experts=4, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"])
    assert by_sample.count("_apply_seq_aux_loss") == 1
    stages = targets(pipeline_model_parallel_size=2)
    assert "without_interleaving" in stages
    assert "with_interleaving" not in stages
    assert "with_interleaving" in targets(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert "schedules" not in targets(pipeline_model_parallel_size=2, joint=True)


@pytest.mark.parametrize("patch", every(), ids=lambda patch: patch.target)
def test_the_installed_source_is_reviewed(patch: Patch) -> None:
    assert bool(patch.reviewed) == (patch.role != "wrapped")
    if patch.role != "wrapped":
        assert "0.19" in patch.reviewed[source_digest(report._find_source(INSTALLED, patch.target))]
    assert len(patch.why) > 20


def test_a_patch_holds_inside_the_block_and_is_undone_after_it_and_when_it_fails() -> None:
    before = victim
    with applied([patch_of(victim, "victim"), patch_of(Owner.static, "Owner.static")]):
        assert victim(1) == 20
        assert Owner.static(1) == Owner().static(1) == 40
    with pytest.raises(RuntimeError, match="inside"), applied([patch_of(victim, "victim")]):
        raise RuntimeError("inside")
    assert victim is before
    assert Owner.static(1) == Owner().static(1) == 4


def test_all_sources_that_are_not_reviewed_are_refused_at_once_and_nothing_is_patched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stale = patch_of(other_victim, "other_victim", digest="0123456789ab")
    gone = Patch(target=f"{__name__}:Owner.gone", wrap=lambda original: original, why="a test")
    with pytest.raises(PatchError) as told, applied([patch_of(victim, "victim"), stale, gone]):
        pytest.fail("the block must not run")
    assert victim(1) == 2
    digest = source_digest(inspect.getsource(other_victim))
    accepted = f'accepted_sources: {{"{stale.target}": "{digest}"}}'
    for words in ("0123456789ab of here", "Owner.gone: not found", accepted):
        assert words in str(told.value)
    assert fault_of([patch_of(victim, "victim"), stale, gone]) == str(told.value), "known without patching"
    assert fault_of([stale, patch_of(victim, "victim")], {stale.target: digest}) is None
    assert not caplog.records, "who patches says what was accepted"
    with pytest.raises(PatchError, match="patched twice"), applied([patch_of(victim, "victim")] * 2):
        pytest.fail("the block must not run")


def test_an_accepted_or_observed_source_is_patched_and_told_and_an_observed_one_left_out_where_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stale = patch_of(other_victim, "other_victim", digest="0123456789ab")
    accepted = {stale.target: source_digest(inspect.getsource(other_victim))}
    with caplog.at_level("WARNING"), applied([stale, patch_of(victim, "victim")], accepted, "run.yaml") as unreviewed:
        assert other_victim(1) == 30
        assert unreviewed == (stale.target,)
    assert "run.yaml accepts it" in caplog.text
    with pytest.raises(PatchError), applied([stale], {stale.target: "0" * 12}):
        pytest.fail("another digest than the accepted one")
    caplog.clear()
    stale = patch_of(other_victim, "other_victim", digest="0123456789ab", role="observed")
    gone = Patch(target=f"{__name__}:Owner.gone", wrap=lambda original: original, role="observed", why="a test")
    with caplog.at_level("WARNING"), applied([stale, gone]) as unreviewed:
        assert other_victim(1) == 30
    assert unreviewed == ()
    assert "other_victim" in caplog.text
    assert "Owner.gone" in caplog.text


def test_a_wrapper_fits_any_source_that_takes_its_parameters() -> None:
    anything = patch_of(other_victim, "other_victim", digest="0123456789ab", role="wrapped")
    with applied([anything]):
        assert other_victim(1) == 30
    other = dataclasses.replace(anything, parameters=("values",))
    with pytest.raises(PatchError, match="expected a parameter values, it takes value"), applied([other]):
        pytest.fail("the block must not run")


def test_a_digest_is_of_the_code_not_of_its_text() -> None:
    plain = "def f(x):\n    return [x, 'a']\n"
    for same in (
        "    def f(x):\n        # why\n        return [x, 'a']\n",
        'def f(x):\n    """A docstring."""\n    return [\n        x,\n        "a",\n    ]\n',
    ):
        assert source_digest(same) == source_digest(plain)
    for other in (
        "def f(x):\n    return [x, 'b']\n",
        "def f(x=None):\n    return [x, 'a']\n",
        "@g\ndef f(x):\n    return [x, 'a']\n",
        "def f(x):\n    return (x, 'a')\n",
    ):
        assert source_digest(other) != source_digest(plain)


def test_the_report_shows_what_an_unreviewed_source_changes(tmp_path: Path) -> None:
    # Through a name that the module imports from its neighbour, as Megatron's router does.
    before, here = tmp_path / "before", tmp_path / "here"
    for root, weight in ((before, 1), (here, 2)):
        package = root / "lib" / "moe"
        package.mkdir(parents=True)
        (package / "router.py").write_text("if True:\n    from .utils import count\n")
        (package / "utils.py").write_text(f"def other():\n    pass\n\n@tag\ndef count(x):\n    return {weight} * x\n")
    digest = source_digest("@tag\ndef count(x):\n    return 1 * x\n")
    patch = Patch(target="lib.moe.router:count", wrap=lambda original: original, reviewed={digest: "1.0"}, why="a test")
    assert report.lines((patch,), before, None) == [f"reviewed    lib.moe.router:count: {digest}, as in 1.0"]
    told = report.lines((patch,), here, before)
    assert told[0].startswith("unreviewed  lib.moe.router:count")
    assert {"-    return 1 * x", "+    return 2 * x"} <= set(told)
    gone = dataclasses.replace(patch, target="lib.moe.router:lost")
    (line,) = report.lines((gone,), here, before)
    assert line.startswith("missing     lib.moe.router:lost")


# The other Megatron-core that patches are reviewed for trains like one rank of the same.

OTHER = "megatron_core-0.18.2"
# Megatron's own pipeline; layers in two nano-batches; experts: each with sources of its own.
CELLS = (("zeppelin", "pp"), ("distca", "cp"), ("te_ring", "ep"))


def test_0_18_2_trains_every_way_like_one_rank() -> None:
    root = upstream.folder(OTHER)
    assert megatron_versions.version_of(root) == OTHER.partition("-")[2]
    cells = list(megatron_versions.cells_of(root, CELLS, accept=False, always={}))
    assert [(cell["planner"], cell["layout"]) for cell in cells] == list(CELLS)
    for cell in cells:
        assert cell.get("difference", 1.0) <= megatron_versions.TOLERANCE, cell
        assert cell["steps"] == megatron_versions.STEPS
        assert cell["kv_tokens"] > 0, "attention was not cut"

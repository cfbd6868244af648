"""The prepared command of a machine that has a GPU and no network, and ranks that share one GPU."""

import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from megatron_balance.compile.halo import under
from megatron_balance.ir.mask import CAUSAL, SlidingWindow
from megatron_balance.runtime import bind
from megatron_balance.runtime.groups import single
from tests.support import by_hand
from tests.support.processes import ended
from tools.faults import rendezvous
from tools.gpu import bare, issue_order, kernels, plans, prepare, ranks, recurrent, sanitizer, shapes, sharing, syncs
from tools.gpu.ranks import Place
from tools.gpu.rows import Context

ROOT = Path(__file__).resolve().parents[3]
ALONE = Place(0, 1, "cpu", 0, "")


# Ranks that share a GPU.

SAYS = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NCCL_MULTI_RANK_GPU_ENABLE')))"
FAILS = "import os, sys, time; time.sleep(600) if os.environ['RANK'] == '0' else sys.exit(7)"


def test_a_command_runs_once_a_rank_with_neighbours_on_one_gpu(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(sharing, "refusal", lambda _: "")
    monkeypatch.setattr(sharing, "GRACE_S", 0.2)
    monkeypatch.setattr(sharing, "torchs_own", lambda: Path("none"))
    words = ["--ranks-per-gpu", "2", "--gpus", "2", "--state", str(tmp_path / "state"), "--", sys.executable, "-c"]
    assert sharing.main([*words, SAYS]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 0 4 1", "1 0 4 1", "2 1 4 1", "3 1 4 1"]
    began = time.monotonic()
    assert sharing.main([*words, FAILS]) == 7
    assert time.monotonic() - began < 20
    with pytest.raises(SystemExit):
        sharing.main(["--ranks-per-gpu", "2"])
    assert "expected a command behind --" in capfd.readouterr().err


def test_an_nccl_that_is_too_old_or_none_is_refused_by_name(monkeypatch, tmp_path):
    none = tmp_path / "libnccl.so.2"
    none.write_text("no library")
    assert f"{none}: not an NCCL library" in sharing.refusal(none)
    assert "no NCCL library found" in sharing.refusal(None)
    assert all("nvidia-nccl-cu13>=2.31" in sharing.refusal(each) for each in (none, None))
    if own := sharing.torchs_own():
        assert sharing.version(own) >= (2, 20, 0)
    for found, refused in (((2, 29, 7), True), ((2, 30, 0), False), ((3, 0, 1), False)):
        monkeypatch.setattr(sharing, "version", lambda _, found=found: found)
        said = sharing.refusal(none)
        assert bool(said) == refused
        assert not refused or f"{none} is NCCL 2.29.7; several ranks on a GPU need 2.30 or later" in said


def test_the_way_of_sharing_is_the_best_that_worked_and_without_mps_where_ranks_are_killed(tmp_path):
    context = Context("cuda", time.monotonic() + 9, ranks=4, ranks_per_gpu=4, state=tmp_path)
    with pytest.raises(RuntimeError, match="no way of sharing this GPU is known to work"):
        sharing.chosen(context)
    sharing.keep([sharing.WAYS[1], sharing.WAYS[4]], tmp_path)
    assert sharing.chosen(context) == sharing.WAYS[1]
    assert sharing.chosen(context, mps=False) == sharing.WAYS[4]
    variables = sharing.environment(sharing.WAYS[1], tmp_path, 4)
    assert variables["NCCL_MULTI_RANK_GPU_ENABLE"] == variables["NCCL_P2P_DISABLE"] == "1"
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == f"{tmp_path}/mps"
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert not [name for name in sharing.environment(sharing.WAYS[4], tmp_path, 4) if "MPS" in name]
    own = Context("cuda", time.monotonic() + 9, ranks=4, state=tmp_path)
    assert sharing.chosen(own) is None
    assert sharing.environment(None, tmp_path, 1) == {}


def answers(place: Place, how: str) -> int:
    if how == "hangs" and place.rank == 1:
        time.sleep(600)
    if how == "fails" and place.rank == 1:
        raise ValueError("of the planted kind")
    return 10 * place.rank + place.gpu + int(os.environ["LOCAL_RANK"])


@pytest.mark.dist
def test_ranks_that_fail_or_hang_are_told_from_those_that_end_well(capfd):
    context = Context("cpu", time.monotonic() + 90, ranks=2)
    assert ranks.run_ranks(answers, 2, ("ends",), context, seconds=60).results() == [0, 12]
    failed = ranks.run_ranks(answers, 2, ("fails",), context, seconds=60)
    assert (failed.codes, failed.hung, failed.well) == ([0, 1], 0, False)
    with pytest.raises(RuntimeError, match="ValueError: of the planted kind"):
        failed.results()
    hung = ranks.run_ranks(answers, 2, ("hangs",), context, seconds=2.0)
    assert (hung.codes, hung.hung) == ([0, None], 1)
    assert "in answers" in capfd.readouterr().err, "where it stands"


# What the parts look for.


def test_a_plan_is_right_to_the_rounding_of_its_type_and_a_wrong_one_is_seen(monkeypatch):
    planned = by_hand.pool("ring", (40, 9, 1), 1, heads=(4, 2))
    nano_batch = under(by_hand.pool("ring", (17, 5), 1, heads=(4, 2)), SlidingWindow(5))
    for drawn in (plans.Drawn("a", (planned,), "keep"), plans.Drawn("b", (planned, nano_batch), "replay")):
        for dtype, allowed in plans.ALLOWED.items():
            for seed in (1, 2):  # without sinks, and with
                assert 0 < plans.worst_error(ALONE, single(), drawn, dtype, seed) <= allowed
    one_key = plans.Drawn("c", (under(planned, SlidingWindow(1)),), "keep")
    assert 0 <= plans.worst_error(ALONE, single(), one_key, "float32", 1) <= plans.ALLOWED["float32"]
    attended, dense = plans._attended, plans._dense
    with monkeypatch.context() as without:
        without.setattr(plans, "_dense", lambda given, sink, _: dense(given, sink, CAUSAL))
        assert plans.worst_error(ALONE, single(), drawn, "bfloat16", 1) > plans.ALLOWED["bfloat16"], "no window"

    def dull(leaves, bounds, sink):
        return attended(leaves, bounds, sink / 2 + sink.detach() / 2)

    monkeypatch.setattr(plans, "_attended", dull)
    assert plans.worst_error(ALONE, single(), drawn, "bfloat16", 3) > plans.ALLOWED["bfloat16"], "the sink's gradient"

    def shifted(*given):
        return [out.roll(1, 0) for out in attended(*given)]

    monkeypatch.setattr(plans, "_attended", shifted)
    assert plans.worst_error(ALONE, single(), drawn, "bfloat16", 3) > plans.ALLOWED["bfloat16"]
    monkeypatch.setattr(plans, "_attended", lambda *given: [out * float("nan") for out in attended(*given)])
    assert plans.worst_error(ALONE, single(), drawn, "bfloat16", 3) == float("inf")


def test_drawn_plans_have_all_layers_and_survive_their_file(tmp_path):
    drawn = plans.draw({2: 6, 4: 6})
    assert {size: len(own) for size, own in drawn.items()} == {2: 6, 4: 6}
    assert {each.plans[0].num_ranks for each in drawn[4]} == {4}
    plans.save(drawn, tmp_path / "plans")
    assert plans.load(tmp_path / "plans") == drawn
    # of the first hundred, which `draw` takes from: policies, remaps, routing, nano-batches
    programs = [rendezvous.drawn(number) for number in range(0, 100, 2)]
    kinds = Counter((p.policy, bool(p.plans[0].moves), p.plans[0].routing is not None, len(p.plans)) for p in programs)
    assert len(kinds) > 12
    masks = Counter(type(each.plans[0].mask) for each in drawn[2] + drawn[4])
    assert masks[SlidingWindow] >= 2 <= masks[type(CAUSAL)]


def test_plans_of_a_kit_leave_other_parts_their_time_where_a_part_has_more(monkeypatch, tmp_path):
    asked = []

    def noted(_, size, given, context, *, seconds):
        asked.append((size, *given))
        return ranks.Ended([{"bad": [], "slowest_s": 0.0, "worst": 0.0, "ran": 1}], [0])

    monkeypatch.setattr(plans, "DRAWN", tmp_path / "none")
    long, short = (plans.Drawn("a", (by_hand.pool("ring", (5, each), 2),), "keep") for each in (701, 700))
    monkeypatch.setattr(plans, "draw", lambda sizes: {size: [long, short] for size in sizes})
    monkeypatch.setattr(ranks, "run_ranks", noted)
    began = time.monotonic()
    rows = list(plans.measure(Context("cpu", began + 4 * plans.BUDGET_S, ranks=2)))
    assert [row.kind for row in rows].count("measured") == 2
    ((size, given, until),) = asked
    assert (size, given) == (2, [short]), "small ones, without a GPU"
    assert began < until < time.monotonic() + plans.BUDGET_S


def test_calls_out_of_order_in_a_trace_are_counted():
    def call(at: int, name: str) -> dict:
        return {"cat": "user_annotation", "name": f"issue {name}", "ts": 10 * at, "dur": 5, "tid": 1}

    def launch(at: int, number: int, tid: int = 1) -> dict:
        return {"cat": "cuda_runtime", "ts": 10 * at + 1, "tid": tid, "args": {"correlation": number}}

    def kernel(start: int, number: int, stream: int) -> dict:
        return {"cat": "kernel", "ts": start, "args": {"correlation": number, "stream": stream}}

    calls = [call(1, "b"), call(0, "a"), call(2, "c"), {"cat": "gpu_user_annotation", "name": "issue a", "ts": 0}]
    launches = [launch(0, 7), launch(1, 8), launch(2, 9), launch(1, 99, tid=2)]
    events = [*calls, *launches, kernel(500, 99, 1)]
    in_order = {"traceEvents": [*events, kernel(100, 7, 1), kernel(110, 8, 2), kernel(105, 9, 1)]}
    assert [each["name"] for each in issue_order.issued(in_order)] == ["issue a", "issue b", "issue c"]
    assert issue_order.late_on_device(in_order) == 0
    late = {"traceEvents": [*events, kernel(100, 7, 1), kernel(110, 8, 2), kernel(95, 9, 1)]}
    assert issue_order.late_on_device(late) == 1
    with pytest.raises(RuntimeError, match="no kernel of a group call"):
        issue_order.late_on_device({"traceEvents": calls})
    assert issue_order.apart(["a", "b"], ["a", "b"]) == 0
    assert issue_order.apart(["b", "a", "c"], ["a", "b"]) == 3


SEARCHED = 'shift 2; "$@"; echo "========= Invalid __global__ read of size 16 bytes"'
ALIKE = f'echo "========= Invalid __global__ write of size 4 bytes"; echo {sanitizer.MARK}'
REFUSES = 'echo "========= Error: Device not supported. Please refer to the list of supported devices"; exit 1'


@pytest.mark.parametrize(
    ("tool", "found", "said"),
    [
        (SEARCHED, [0, 1], ["", "Invalid __global__ read of size 16 bytes"]),
        (ALIKE, [1, 0], ["Invalid __global__ write of size 4 bytes", ""]),
        (REFUSES, [None] * 2, ["compute-sanitizer: Error: Device not supported. Please refer"] * 2),
        ("exec sleep 60", [None] * 2, ["out of time"] * 2),
        ("echo broken", None, ["the launches did not end: broken"]),
        (None, [None] * 2, ["no compute-sanitizer here"] * 2),
    ],
)
def test_the_memory_checker_is_read_and_its_absence_is_a_sentence(tmp_path, monkeypatch, tool, found, said):
    monkeypatch.setattr(sanitizer, "FOLDERS", ())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if tool is not None:
        (tmp_path / sanitizer.TOOL).write_text(f"#!/bin/sh\n{tool}\n")
        (tmp_path / sanitizer.TOOL).chmod(0o755)
    elif shutil.which(sanitizer.TOOL):
        pytest.skip("it is here")
    if tool == SEARCHED and (fault := kernels.interpreter_fault()):
        pytest.skip(fault)
    seconds = 3.0 if tool == "exec sleep 60" else 120.0
    measured = sanitizer.measure(Context("cpu", time.monotonic() + seconds))
    if found is None:
        with pytest.raises(RuntimeError, match=said[0]):
            list(measured)
        return
    rows = list(measured)
    assert [row.value for row in rows] == found
    assert [row.note[: len(text)] for row, text in zip(rows, said, strict=True)] == said
    assert [row.ok for row in rows] == [None] * 2 if found == [None] * 2 else [found == [0, 1]] * 2


def test_batches_that_are_searched_for_waits_cross_powers_of_two(monkeypatch):
    # in what is shipped of their plans, which torch keeps pinned memory for
    sizes, ship = [], bind.ship
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(bind, "ship", lambda tables, *how: sizes.append(ship(tables, *how)) or sizes[-1])
        on_gpu.setattr(shapes, "bind", partial(bind.bind, mover="triton"))
        on_gpu.setitem(syncs.LENGTHS, "cpu", syncs.LENGTHS["cuda"])
        assert len({id(each.groups) for each in syncs.bound_all("cpu", single())}) == 1
    assert len({(size - 1).bit_length() for size in sizes}) == 1 + syncs.HALVED, sizes
    assert {row.ok for row in syncs.measure(Context("cpu", time.monotonic() + 60))} == {True}


# What is carried to the machine.


def fat_binary(*pieces: tuple[int, bytes]) -> bytes:
    # A container with pieces of GPU code, by architecture.
    entries = b"".join(
        struct.pack("<HHIQ", 2, 1, 64, len(code)) + bytes(12) + struct.pack("<I", sm) + bytes(32) + code
        for sm, code in pieces
    )
    return struct.pack("<IHHQ", prepare.FAT_MAGIC, 1, 16, len(entries)) + entries


def test_only_the_code_of_one_architecture_stays_in_a_library_and_nothing_moves():
    alike = struct.pack("<I", prepare.FAT_MAGIC) + b"only looks like a container, and ends"
    before = b"host code" + fat_binary((80, b"ampere"), (90, b"hopper")) + alike
    library = bytearray(before + fat_binary((100, b"blackwell")))
    whole = bytes(library)
    assert prepare.keep_architecture(library, 90) == (1, len(b"ampere") + len(b"blackwell"))
    assert bytes(library) == whole.replace(b"ampere", bytes(6)).replace(b"blackwell", bytes(9))
    with pytest.raises(ValueError, match="no GPU code of sm_90"):
        prepare.keep_architecture(bytearray(fat_binary((80, b"ampere"))), 90)


def test_a_kit_is_unpacked_once_and_again_when_it_is_another(tmp_path, monkeypatch):
    kit, work = tmp_path / "kit", tmp_path / "work"
    work.mkdir()
    assert bare.unpack(kit, work, nccl=True).startswith("no kit/ here")
    (kit / bare.WHEELS).mkdir(parents=True)
    (kit / bare.NCCL).write_bytes(lzma.compress(b"a library"))
    (kit / bare.WHEELS / "one.whl").write_bytes(b"")
    installed = []
    monkeypatch.setattr(bare.subprocess, "run", lambda words, **_: installed.append(words[-1]))
    assert bare.unpack(kit, work, nccl=True) == "NCCL, 1 wheels"
    assert (work / "libnccl.so.2").read_bytes() == b"a library"
    assert bare.unpack(kit, work, nccl=True) == "there already"
    assert installed == [str(kit / bare.WHEELS / "one.whl")]
    (kit / bare.WHEELS / "two.whl").write_bytes(b"")
    assert bare.unpack(kit, work, nccl=False) == "2 wheels"


def test_a_kit_that_is_too_large_to_be_carried_is_said(tmp_path, monkeypatch, capfd):
    for part in ("_wheels", "_nccl", "_plans"):
        monkeypatch.setattr(prepare, part, lambda *_: "made")
    assert prepare.prepare(tmp_path / "kit", compiled=False) == 0
    assert "together at most 64" in capfd.readouterr().out
    monkeypatch.setattr(prepare, "LIMIT_BYTES", 1 << 10)
    assert prepare.prepare(tmp_path / "kit", compiled=False) == 1
    assert subprocess.run(["git", "check-ignore", "-q", ".gpu/x"], cwd=ROOT, check=False).returncode == 0


# The command.


def test_a_step_of_another_call_is_a_sentence(capsys):
    with pytest.raises(SystemExit):
        bare.main(["second", "--steps", "plans"])
    assert "--steps plans: not a step of second; choose of shapes, " in capsys.readouterr().err


def test_a_kit_that_cannot_be_unpacked_is_a_row_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(bare, "KIT", tmp_path)
    (tmp_path / bare.NCCL).write_bytes(b"not compressed")
    monkeypatch.setattr(bare, "has_gpu", lambda: True)
    monkeypatch.setattr(bare.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(bare.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert bare.main(["first", "--out", str(tmp_path / "out")]) == 1
    (row,) = map(json.loads, (tmp_path / "out" / "rows.jsonl").read_text().splitlines())
    assert (row["ok"], row["note"][:9]) == (False, "LZMAError")


@pytest.mark.dist
def test_the_first_call_runs_small_without_a_gpu(tmp_path):
    # Steps of the command that fork ranks themselves, over gloo: every row is there, and is met.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PYTHON": sys.executable, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    steps = ("links", "order", "recurrent", "plans")  # the last takes what is left where a kit has many plans
    command = [str(ROOT / "tools" / "gpu" / "bare"), "first", "--steps", ",".join(steps), "--ranks", "2"]
    done = ended([*command, "--out", str(tmp_path), "--limit-s", "280"], timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    measured = {name for name, row in rows.items() if row["kind"] == "measured"}
    assert {"ranks that hang on unused communicators, each later than the last", issue_order.HOST.name} < measured
    assert {plans.WORST[2].name, plans.RAN[2].name, issue_order.CALLS.name, recurrent.WORST.name} < measured
    assert not [row for row in rows.values() if row["ok"] is False]
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.jsonl"], "no document without a GPU"

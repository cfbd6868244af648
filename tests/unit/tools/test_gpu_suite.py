"""The GPU suite's frame, and the whole of it small, without a GPU."""

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from megatron_balance.runtime.kernels import VarlenKernel, choose_kernel
from megatron_balance.runtime.kernels.base import PlainKernel, hidden
from tests.support.processes import ended
from tools.gpu import attention, bare, kernels, machine, parts, report, run, sharing
from tools.gpu.rows import Context, Figure, Row, Target

ROOT = Path(__file__).resolve().parents[3]
SPEED = Figure("speed", "TFLOP/s", Target("at least", 85), speed=True)
ERROR = Figure("error", "relative", Target("at most", 0.02))


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (Target("at least", 85), 85.0, True),
        (Target("at least", 85), 84.9, False),
        (Target("at most", 1.02), 1.03, False),
        (Target("equal", 0), 0.0, True),
        (Target("equal", 0), 1.0, False),
        (Target("at most", 1.02), math.nan, False),
        (Target("at least", 1.02), math.nan, False),
    ],
)
def test_a_value_is_held_against_its_target(target, value, met):
    row = Figure("figure", "unit", target).measured(value)
    assert (row.kind, row.ok, row.target) == ("measured", met, str(target))
    # what was left out is no failure, and what broke is
    assert (SPEED.not_measured("needs a GPU").ok, SPEED.failed("boom").ok) == (None, False)
    assert {SPEED.not_measured("").kind, SPEED.failed("").kind} == {"not measured"}
    assert Figure("plain", "ms").measured(3.0).ok is None


PART = """
import sys, time
from tools.gpu.rows import Figure, Target
BUDGET_S = 9.0
FIGURES = (Figure("first", "x", Target("at most", 1)), Figure("second", "x"), Figure("fast", "x", speed=True))
def measure(context):
    yield FIGURES[0].measured(0.5, context.device)
    {then}
    yield FIGURES[1].measured(2.0)
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    # Rows of a part that does `then` between its two figures, in a process of its own, with
    # `seconds` for it.
    popen = subprocess.Popen

    def rows(then: str, seconds: float = 30.0, device: str = "cpu", refused: str = "") -> list[Row]:
        (tmp_path / "made_up_part.py").write_text(PART.format(then=then))
        sys.modules.pop("made_up_part", None)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setitem(parts.PARTS, "syncs", "made_up_part")
        started = []
        # the part's process knows the made-up part too
        code = "from tools.gpu import parts, run; parts.PARTS['syncs'] = 'made_up_part'"

        def start(command, **kwargs):
            started.append(command)
            words = ["-c", f"{code}; raise SystemExit(run.main({command[3:]!r}))"]
            return popen([sys.executable, *words], **kwargs)

        monkeypatch.setattr(run.subprocess, "Popen", start)
        file = tmp_path / "rows.jsonl"
        file.unlink(missing_ok=True)
        context = Context(device, time.monotonic() + seconds, state=tmp_path)  # pyright: ignore[reportArgumentType]
        found = run.rows_of("syncs", context, file, refused=refused)
        assert bool(started) == (device == "cpu")
        # the file has the same, those that were not measured last
        written = {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}
        assert written == {row.name: asdict(row) for row in found}
        return found

    return rows


def test_a_part_yields_its_rows_and_keeps_those_it_had_where_it_breaks(part, capsys):
    first, second, fast = part("pass")
    assert (first.value, first.ok, first.note, second.value) == (0.5, True, "cpu", 2.0)
    assert (fast.kind, fast.ok, fast.note) == ("not measured", None, "needs a GPU")
    first, second, _ = part("raise ValueError('of the planted kind')")
    assert first.value == 0.5
    assert (second.ok, second.note) == (False, "failed: ValueError: of the planted kind")
    assert "Traceback" in capsys.readouterr().err
    part("print('why'); yield FIGURES[2].failed('one of its rows')")
    assert "syncs: rows failed; its log ends:\nwhy" in capsys.readouterr().err


HANGS = """
    import os
    if not os.fork():
        os.setpgid(0, 0)  # as a rank has it
        open({file!r}, "w").write(str(os.getpid()))
        time.sleep(600)
    time.sleep(600)
"""


def test_a_part_that_hangs_is_ended_with_its_ranks_and_its_rest_is_out_of_time(part, tmp_path):
    began = time.monotonic()
    first, second, _ = part(HANGS.format(file=str(tmp_path / "rank")).strip(), seconds=15.0)
    assert time.monotonic() - began < 30
    assert first.value == 0.5
    assert (second.kind, second.ok, second.note) == ("not measured", None, "out of time")
    rank = Path("/proc", (tmp_path / "rank").read_text(), "status")
    assert not rank.exists() or "State:\tZ" in rank.read_text(), "its rank lives on"
    # a part is begun with less than its budget, but not where it could not even start
    assert {row.note for row in part("raise SystemExit(1)", seconds=4.0, device="cuda")} == {"out of time"}
    rows = part("raise SystemExit(1)", device="cuda", refused="NCCL is too old")
    assert {(row.ok, row.note) for row in rows} == {(False, "NCCL is too old")}
    context = Context("cpu", time.monotonic() + 5, ranks=4)
    assert 0 < context.left_s() <= 5
    assert not context.on_gpu
    assert context.worlds == (2, 4)


def test_an_interpreter_that_cannot_run_is_a_sentence(monkeypatch):
    monkeypatch.setattr(kernels, "version", {"triton": "3.6.0", "numpy": "2.5.2"}.get)
    rows = list(kernels.measure(Context("cpu", time.monotonic() + 9)))
    said = "the interpreter of Triton 3.6.0 needs NumPy 2.3, here is 2.5.2"
    assert {(row.kind, row.ok, row.note) for row in rows} == {("not measured", None, said)}
    for kept in ({"triton": "3.6.0", "numpy": "2.3.5"}, {"triton": "3.7.1", "numpy": "2.5.2"}):
        monkeypatch.setattr(kernels, "version", kept.get)
        assert kernels.interpreter_fault() == ""


def test_cudnns_attention_is_asked_for_the_lengths_of_a_batch_or_says_why_not(monkeypatch):
    cpu, lengths = torch.device("cpu"), [20, 33, 7]
    kernel = choose_kernel("auto", cpu, torch.bfloat16, attention.DIM)
    rows = list(attention._cudnn(kernel, lengths, cpu))
    assert {(row.kind, row.ok) for row in rows} == {("not measured", None)}
    assert "_cudnn_attention_forward" in rows[0].note, "there is none for a CPU"
    schema = torch.ops.aten._cudnn_attention_forward.default._schema

    def formula(*given, **how):
        named = dict(zip([argument.name for argument in schema.arguments], given, strict=False)) | how
        assert (named["is_causal"], named["compute_log_sumexp"], named["return_debug_mask"]) == (True, True, False)
        assert named["cum_seq_q"].tolist() == named["cum_seq_k"].tolist() == [0, 20, 53, 60]
        assert (named["max_q"], named["max_k"]) == (33, 33)
        plain, (q, k, v) = PlainKernel(), (named[name].double() for name in ("query", "key", "value"))
        return plain.forward(plain.prepare(attention.squares(lengths), cpu), q, k, v, how["scale"])

    monkeypatch.setattr(torch.ops.aten, "_cudnn_attention_forward", formula)
    monkeypatch.setattr(attention, "gpu_s", lambda call: 1.0 if call() is not None else 0.0)
    faster, apart = attention._cudnn(kernel, lengths, cpu)
    assert faster.value == 1.0
    assert 0 < (apart.value or 0) < 0.02


def test_each_library_is_timed_on_four_kinds_of_launches(monkeypatch):
    cpu, lengths = torch.device("cpu"), [200, 330, 70, 410]
    launches = attention.batches(lengths)
    for entries in launches.values():
        sizes = zip(entries.q, entries.k, strict=True)
        pairs = sum((b - a) * (d - c) for (a, b), (c, d) in sizes)
        masked = (hidden(entries, at, cpu) for at in range(len(entries.q)))
        assert attention.num_pairs(entries) == pairs - sum(int(mask.sum()) for mask in masked if mask is not None)
    fragments, short, halves = (attention.num_pairs(launches[what]) for what in list(launches)[1:])
    assert attention.num_pairs(launches["one length"]) == pytest.approx(fragments, rel=0.01)
    assert short == 7 * 128 * 129 // 2
    assert halves == pytest.approx(fragments / 2, rel=0.01)
    ran = []
    monkeypatch.setattr(attention, "gpu_s", lambda call: ran.append(call()) or 1e-6 * len(ran))
    monkeypatch.setattr(attention, "HEADS", 4)
    monkeypatch.setattr(attention, "KV_HEADS", 2)
    rates = {("cpu_flash", phase): attention.RATES["flash_attn", phase] for phase in attention.PHASES}
    monkeypatch.setattr(attention, "ON_A_GPU", ("flash_attn", "cpu_flash"))
    monkeypatch.setattr(attention, "RATES", attention.RATES | rates)
    absent, _, *rows = attention._throughput("cpu_flash", launches, cpu)
    assert (absent.kind, absent.note) == ("not measured", "does not serve cpu tensors")
    forward = 4 * 4 * 128 * attention.num_pairs(launches["one length"]) / 1e6
    assert [row.value for row in rows[:2]] == pytest.approx([forward, 2.5 * forward / 2])
    assert [row.value for row in rows[2:]] == pytest.approx(
        [fragments / attention.num_pairs(launches["one length"]) * x for x in (1 / 3, 2 / 4)]
    )
    assert "half chunks" in rows[0].note


def test_a_block_without_work_is_timed_by_a_wider_grid_of_the_same_documents(monkeypatch):
    for name, value in {"HEADS": 4, "KV_HEADS": 2, "DOCUMENTS": 3}.items():
        monkeypatch.setattr(attention, name, value)
    seen = []
    calls = SimpleNamespace(
        forward=lambda _, q, *more: (q, more[0]), backward=lambda at, *_: seen.append(at) or at.max_k
    )
    # Blocks of a grid on 10 SMs, two times as dear as priced, beside what a launch takes.
    monkeypatch.setattr(attention, "gpu_s", lambda call: 1e-3 + call() / 128 * 3 * 4 * 1e-6 / 10)
    kernel = VarlenKernel("flash_attn_3", calls)  # pyright: ignore[reportArgumentType]
    assert attention.empty_s(kernel, 10, torch.device("cpu")) == pytest.approx(1e-6)
    assert [(at.cu_k.tolist(), at.max_k) for at in seen] == [([0, 128, 256, 384], most) for most in (128, 16384)]
    assert set(attention.EMPTY) == {"flash_attn", "flash_attn_3", "torch_varlen"}


def test_rollouts_as_trees_are_held_against_trls_tree_attention(monkeypatch):
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    cpu = torch.device("cpu")
    kernel = choose_kernel("auto", cpu, torch.bfloat16, 32)

    def formula(q, k, v, cu_q, cu_k, *_, softmax_scale, causal, **__):
        assert causal
        outs = []
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            shown = torch.ones(b - a, d - c, dtype=torch.bool).tril(int(d - c - (b - a)) - off)
            heads = (x.transpose(0, 1).double() for x in (q[a:b], k[c:d], v[c:d]))
            each = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=shown, scale=softmax_scale)
            outs.append(each.transpose(0, 1).to(q.dtype))
        return torch.cat(outs)

    found = SimpleNamespace(flash_attn_varlen_func=formula)
    monkeypatch.setattr(packing, "_flash_attn", lambda: found)
    off = 0
    assert 0 < attention.apart_from_trl(kernel, packing, cpu, 2, 32) < 0.02
    off = 30  # another mask
    assert attention.apart_from_trl(kernel, packing, cpu, 2, 32) > 0.1
    assert "needs a GPU, trl 1.16" in attention._beside_trl(kernel, cpu).note


def test_parts_fit_the_limits_together(monkeypatch):
    def budgets(names):
        return sum(run._load(name).BUDGET_S for name in names)  # pyright: ignore[reportPrivateUsage]

    for names in (parts.PARTS, parts.MANY):
        assert budgets(names) <= run.LIMIT_S["cuda"] < 480
    for call in bare.CALLS.values():
        assert budgets(call.steps) + bare.UNPACK_S + bare.CLOSE_S <= call.limit_s
    # without a GPU a part has more of what the others leave, but for those that only a GPU runs
    asked = []
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "rows_of", lambda name, *_: asked.append((name, _[-1])) or [])
    run.main(["--parts", "training,step,syncs,attention", "--json"])
    later = budgets(["attention"]), budgets(["syncs", "attention"])
    assert asked == [("training", later[1]), ("step", later[1]), ("syncs", later[0]), ("attention", 0)]
    assert [run.limit_s(50.0, free_s) for free_s in (-9.0, 0.0, 70.0, 300.0)] == [50.0, 50.0, 70.0, 200.0]
    both = [step for call in bare.CALLS.values() for step in call.steps]
    assert sorted(both) == sorted(parts.PARTS | parts.MANY)
    known = [run._load(name) for name in both]  # pyright: ignore[reportPrivateUsage]
    names = [figure.name for part in known for figure in part.FIGURES]
    assert len(names) == len(set(names))


def test_the_list_of_what_only_a_gpu_tells_has_every_step_with_its_limit():
    page = (ROOT / "docs" / "cluster.md").read_text()
    table = page.partition("| only a GPU tells |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    listed = [step for row in rows for step in re.findall(r"`(\w+)`", row[1])]
    assert listed == [step for call in bare.CALLS.values() for step in call.steps]
    limits = [int(number) for row in rows for number in row[2].partition(",")[0].split(" and ")]
    assert limits == [run._load(step).BUDGET_S for step in listed]  # pyright: ignore[reportPrivateUsage]


def test_files_are_written_on_a_gpu_only(tmp_path):
    gpu = machine.Machine("cuda", "NVIDIA H200", 141 << 30, "13.0", 16, "3.12.1", {"torch": "2.13.0", "apex": None})
    assert gpu.slug == "h200"
    assert report.of_readme(tmp_path).endswith("has never run on a GPU** |")
    rows = [SPEED.measured(90.0, "a | b"), ERROR.failed("boom")]
    document = report.document(gpu, rows, {"links": 8.3, "plans": 4.0}, "tools/gpu/bare first")
    report.write(document, tmp_path / "h200-first")
    assert json.loads((tmp_path / "h200-first.json").read_text()) == document
    table = (tmp_path / "h200-first.md").read_text()
    said = f"NVIDIA H200, {document['date']}, `tools/gpu/bare first`: 1 of 2 targets met"
    assert report.of_readme(tmp_path) == (
        f"| measured on GPUs | {said} ([h200-first](docs/measurements/h200-first.md)) |"
    )
    assert "| speed | 90 | TFLOP/s | >= 85 | met | a \\| b |" in table
    assert (
        "1 of 2 figures with a target are met, 1 of 2 were not measured; 12 s: links 8, plans 4. Not installed: apex."
        in table
    )
    cpu = SimpleNamespace(device="cpu", slug="x86-64")
    options = SimpleNamespace(out=None, gpus=4, name="suite")
    assert run._prefix(cpu, options) is None  # pyright: ignore[reportArgumentType, reportPrivateUsage]
    options.out = tmp_path
    assert run._prefix(gpu, options) == tmp_path / "h200-x4-suite"  # pyright: ignore[reportArgumentType, reportPrivateUsage]
    with pytest.raises(SystemExit, match="there is no GPU here"):
        run._prefix(cpu, options)  # pyright: ignore[reportArgumentType, reportPrivateUsage]


def test_the_readme_says_what_was_measured_on_gpus():
    assert report.of_readme(ROOT / "docs" / "measurements") in (ROOT / "README.md").read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "kernel"], "kernel: no such part"),
        (["--limit-s", "0"], "expected seconds"),
        (["--gpus", "3"], "expected 1, or 2, 4 or 8"),
        (["--ranks-per-gpu", "5"], "--ranks-per-gpu 5: expected"),
        (["--parts", "plans"], "takes several ranks: add --gpus N or --ranks-per-gpu N"),
    ],
)
def test_a_users_mistake_is_a_sentence(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_what_a_machine_cannot_do_is_a_sentence(monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: SimpleNamespace(device="cuda", gpus=1))
    with pytest.raises(SystemExit, match="--gpus 4: there are 1 here"):
        run.main(["--gpus", "4"])
    monkeypatch.setattr(sharing, "version", lambda _: (2, 29, 7))
    with pytest.raises(SystemExit, match=r"--ranks-per-gpu 4: lib.so is NCCL 2.29.7; .* need 2.30 or later"):
        run.main(["--ranks-per-gpu", "4", "--nccl", "lib.so"])


ATTENTION = {"needs a GPU", "does not serve cpu", "cpu_flash takes a call for each entry"}
ATTENTION |= {"needs a GPU, trl 1.16, and kernels-community/flash-attn3 in the cache of the package kernels"}
TRAINING = pytest.param("training", "loss of two bf16 steps", marks=pytest.mark.product)


@pytest.mark.megatron
@pytest.mark.parametrize(("part", "measured"), [("attention", ""), TRAINING])
def test_the_suite_runs_without_a_gpu(part, measured):
    # Every figure that can be measured is met, the others say why they are not there.
    pytest.importorskip("megatron.training")
    document = whole("--parts", part)
    assert document["mode"] == "interpreter"
    missing = {row["note"] for row in document["rows"] if row["kind"] == "not measured"}
    assert missing == ATTENTION if part == "attention" else missing < ATTENTION
    assert any(row["name"].startswith(measured) and row["ok"] for row in document["rows"])


def whole(*words):
    # The document of a run of the suite, which must succeed.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(ROOT / "tools" / "gpu" / "run"), "--json", *words]
    done = ended(command, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)

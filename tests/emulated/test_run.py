"""Jobs on an emulated cluster: commands, failures, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.cli import main
from tests.emulated import jobs
from tests.emulated.conftest import Emulate
from tests.support.processes import ended
from tools.emulated_cluster import RankError, Topology
from tools.megatron_flags import command_line

pytestmark = pytest.mark.dist
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SMALL = Topology(num_nodes=2, ranks_per_node=2, nics_per_node=1, nic_bits_per_s=100_000_000, intra_bits_per_s=None)
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
SYS_NICE = 1 << 23
# Seconds that a job may take to end once a rank has died.
ENDED_S = 30.0
MOST = "/proc/sys/user/max_net_namespaces"


def tool(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "tools.emulated_cluster", *map(str, words)]


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return ended(tool(*words), cwd=ROOT)


def processes_with(word: str) -> list[int]:
    # Processes whose command line has this word; forked ranks have the launcher's.
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended while we looked
            continue
    return found


def network_namespaces() -> set[str]:
    # Network namespaces that some process is in, and the named ones.
    found = set(os.listdir("/run/netns")) if Path("/run/netns").is_dir() else set[str]()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                found.add(os.readlink(folder / "ns" / "net"))
        except OSError:
            continue
    return found


@pytest.fixture
def nothing_left(permitted: None, tmp_path: Path) -> Iterator[Path]:
    # A folder for logs that names the job; afterwards no process and no namespace is left.
    before = network_namespaces()
    logs = tmp_path / "logs"
    yield logs
    assert processes_with(str(logs)) == []
    assert_no_namespace_but(before)


def assert_no_namespace_but(before: set[str]) -> None:
    # A process that has ended is in its namespace for a moment more.
    wait_until(lambda: not network_namespaces() - before, 5.0, "network namespaces are left")


@pytest.mark.parametrize("command", ["-m tests.emulated.total", "tests/emulated/total.py"])
def test_a_command_runs_on_every_rank_and_the_counters_come_at_its_end(command: str, nothing_left: Path) -> None:
    figures = nothing_left.parent / "figures.json"
    shape = ["--nodes", "2", "--ranks-per-node", "2", "--nics", "1", "--show", "3"]
    done = call("run", *shape, "--logs", nothing_left, "--json", figures, "--", *command.split(), "--flag", "value")
    assert done.returncode == 0, done.stderr
    assert "rank 3 of 4: total 6, arguments ['--flag', 'value']" in done.stdout
    assert "rank 2 of 4" not in done.stdout
    for rank in range(4):
        assert f"rank {rank} of 4: total 6" in (nothing_left / f"rank{rank}.log").read_text()
    nics = json.loads(figures.read_text())["nics"]
    assert [(nic["node"], nic["nic"]) for nic in nics] == [(0, 0), (1, 0)]
    assert nics[0]["sent"] > 0
    # connections are still being closed
    assert nics[1]["received"] == pytest.approx(nics[0]["sent"], abs=1000)
    table = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [row[:2] for row in table] == [["0", "0"], ["1", "0"]]


def test_a_rank_killed_in_the_middle_of_a_step_ends_the_job_and_is_named(nothing_left: Path) -> None:
    start = time.monotonic()
    done = call("run", "--nics", "2", "--logs", nothing_left, "--", "tests/emulated/total.py", "steps", "5", "4")
    assert time.monotonic() - start < ENDED_S
    assert done.returncode == 1
    assert "error: rank 5 (node 1, local rank 1) was killed by SIGKILL after" in done.stderr
    assert "    rank 5 begins step 4" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_stopped_leaves_nothing(number: signal.Signals, nothing_left: Path) -> None:
    words = ("--nodes", "1", "--ranks-per-node", "2", "--logs", nothing_left, "--", "tests/emulated/total.py")
    # They take SIGINT again, which a shell's background jobs ignore, and their children with them.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "preexec_fn": heed}
    with subprocess.Popen(tool("run", *words, "steps", "-1", "-1"), cwd=ROOT, **quiet) as launcher:
        try:
            log = nothing_left / "rank1.log"
            wait_until(lambda: log.exists() and "begins step 3" in log.read_text(), 60.0, "the ranks never began")
            # the launcher, its supervisor, process 1 and two ranks
            assert len(processes_with(str(nothing_left))) == 5
            launcher.send_signal(number)
            launcher.wait(timeout=10)
        finally:
            launcher.kill()
    if number == signal.SIGKILL:  # the kernel ends the others, not the launcher
        wait_until(lambda: not processes_with(str(nothing_left)), 5.0, "processes outlive their launcher")


def wait_until(holds: object, limit_s: float, otherwise: str) -> None:
    assert callable(holds)
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


def test_a_standing_cluster_serves_several_runs(permitted: None, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a cluster that stands needs root")
    tag = f"t{os.getpid()}"
    before = network_namespaces()
    try:
        assert "2 nodes x 2 ranks, 1 NICs" in call("up", "--tag", tag, "--ranks-per-node", "2", "--nics", "1").stdout
        for _ in range(2):
            done = call("run", "--tag", tag, "--logs", tmp_path, "--", "tests/emulated/total.py")
            assert "rank 0 of 4: total 6" in done.stdout, done.stderr
    finally:
        removed = call("down", "--tag", tag)
    assert "removed 7 namespaces" in removed.stdout
    assert "removed 0 namespaces" in call("down", "--tag", tag).stdout
    assert_no_namespace_but(before)
    gone = call("run", "--tag", tag, "--", "tests/emulated/total.py")
    assert gone.returncode == 2
    assert gone.stderr.startswith(f"error: no emulated cluster with the tag '{tag}' stands")


@pytest.mark.parametrize(
    ("preface", "reason"),
    [
        # A user namespace that may hold no network namespace.
        (f"echo 0 > {MOST} && exec", "this machine permits no namespaces: No space left on device"),
        ("PATH=/nonexistent exec", "ip: No such file or directory; install iproute2"),
    ],
)
def test_where_it_is_not_permitted_check_says_skip_and_run_says_why(permitted: None, preface: str, reason: str) -> None:
    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        script = f'{preface} "$0" "$@"'
        return ended(["unshare", "-Ur", "sh", "-c", script, *tool(*words)], cwd=ROOT)

    done = call("check")
    assert (done.returncode, done.stdout) == (0, "OK\n")
    checked = inside("check")
    assert checked.returncode == 77, checked.stdout + checked.stderr
    assert checked.stdout.startswith(f"SKIP: {reason}")
    refused = inside("run", "--", "tests/emulated/total.py")
    assert (refused.returncode, refused.stderr.startswith(f"error: {reason}")) == (2, True), refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("may_schedule", [False, True])
def test_ranks_have_torchruns_environment_their_nodes_name_and_no_capability(
    emulate: Emulate, may_schedule: bool
) -> None:
    result = emulate(SMALL, jobs.describe, may_schedule=may_schedule)
    assert [value["RANK"] for value in result.values] == ["0", "1", "2", "3"]
    assert [value["LOCAL_RANK"] for value in result.values] == ["0", "1", "0", "1"]
    assert [value["host"] for value in result.values] == ["n0", "n0", "n1", "n1"]
    assert {value["MASTER_ADDR"] for value in result.values} == {"10.201.0.1"}
    assert len(result.nic_bytes) == 2
    assert result.seconds < ENDED_S
    # and no capability (process 1 had some, to build the cluster), but to schedule where asked for
    own, program = result.values[0]["own"], result.values[0]["program"]
    kept = own["CapEff"] & SYS_NICE if may_schedule else 0
    assert own == {**dict.fromkeys(CAPABILITIES, 0), "CapEff": kept, "CapPrm": kept, "NoNewPrivs": 1}
    assert program == {**dict.fromkeys(CAPABILITIES, 0), "NoNewPrivs": 1}
    ours = jobs.privileges(Path("/proc/self/status").read_text())["CapEff"]
    assert result.values[0]["raised"] == (may_schedule and bool(ours & SYS_NICE))


@pytest.mark.parametrize(("code", "shown"), [(None, "ValueError: asked to fail"), (7, "failed with exit code 7")])
def test_a_failing_rank_ends_the_job_and_is_named(emulate: Emulate, code: int | None, shown: str) -> None:
    with pytest.raises(RankError, match=r"^rank 2 \(node 1, local rank 0\) failed with exit code [17] after") as raised:
        emulate(SMALL, jobs.fail_on, 2, code)
    assert shown in str(raised.value)
    assert raised.value.rank == 2
    assert "ranks 0, 1, 3 were still running" in str(raised.value)


def test_the_deadline_ends_a_job_and_shows_where_it_stands(emulate: Emulate) -> None:
    said = r"the deadline passed after \d s: rank 1 was still running[\s\S]*in hang_on"
    with pytest.raises(RankError, match=said) as raised:
        emulate(SMALL, jobs.hang_on, 1, deadline_s=4.0)
    assert raised.value.rank == 1


def test_a_rate_that_no_link_has_is_refused_where_it_is_asked_and_what_ranks_leave_is_gone(emulate: Emulate) -> None:
    before = network_namespaces()
    result = emulate(SMALL, jobs.ask_for_no_rate_and_leave_a_process_behind)
    assert result.values == ("ConfigError: nic_bits_per_s = 0: choose a rate of at least 1 bit/s",) * 4
    assert_no_namespace_but(before)


# Megatron's own loop, started as a user starts it

BYTES_PER_TOKEN = 2 * 4 * 4 * 4  # keys and values of 4 heads of 4 numbers of 4 bytes each: MODEL


@pytest.mark.megatron
@pytest.mark.usefixtures("permitted")
def test_training_runs_over_shaped_nics_and_finds_the_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.training")
    from tests.megatron.conftest import MODEL, RUN, write_corpus

    corpus = write_corpus(tmp_path / "documents", (300, 140, 40, 20, 7, 1) * 10)
    (tmp_path / "balance.yaml").write_text("planner: {name: te_ring}\n")
    flags = {"context-parallel-size": 4, "train-iters": 2, "data-path": corpus}
    ours = {"balance-config": tmp_path / "balance.yaml", "balance-log": tmp_path / "log"}
    links = ["--ranks-per-node", "2", "--intra-mbit", "800", "--deadline-s", "100"]
    files = ("--logs", tmp_path / "ranks", "--json", tmp_path / "figures.json")
    script = ("-m", "megatron_balance.pretrain_gpt", *command_line(MODEL, RUN, flags, ours))
    done = call("run", *links, *files, "--", *script)
    assert done.returncode == 0, done.stderr[-6000:]
    steps = [json.loads(line) for line in (tmp_path / "log" / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["kv_tokens_received_inter_node"] > 0 for step in steps)
    nics = json.loads((tmp_path / "figures.json").read_text())["nics"]
    assert [(nic["node"], nic["nic"]) for nic in nics] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # A lower bound: the keys and values of one layer's forward pass, which two layers, their
    # gradients and the optimizer add to.
    forward = sum(step["kv_tokens_received_inter_node"] for step in steps) * BYTES_PER_TOKEN
    assert sum(nic["received"] for nic in nics) > forward
    asked = ["report", "--run", str(tmp_path / "log"), "--planner", "zeppelin", "--out", str(tmp_path / "gain.html")]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["baseline"], {row["planner"] for row in found["rows"]}) == ("te_ring", {"te_ring", "zeppelin"})
    assert found["lengths"]["num_batches"] == sum(len(step["lengths"]) for step in steps)
    assert found["asked"]["cluster"]["num_ranks"] == 4

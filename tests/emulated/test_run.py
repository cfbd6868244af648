"""Jobs on an emulated cluster: commands, failures, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated import jobs
from tests.emulated.conftest import Emulate
from tests.support.processes import ended
from tools.emulated_cluster import RankError, Topology

pytestmark = pytest.mark.dist
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/emulated"
SMALL = Topology(num_nodes=2, ranks_per_node=2, nics_per_node=1, nic_bits_per_s=100_000_000, intra_bits_per_s=None)
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
SYS_NICE = 1 << 23
# Seconds that a job may take to end once a rank has died.
ENDED_S = 30.0


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


@pytest.mark.parametrize("command", [("-m", "tests.emulated.total"), (f"{HERE}/total.py",)], ids=["module", "script"])
def test_a_command_runs_on_every_rank_and_the_counters_come_at_its_end(
    command: tuple[str, ...], nothing_left: Path
) -> None:
    figures = nothing_left.parent / "figures.json"
    options = (
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--nics",
        "1",
        "--logs",
        nothing_left,
        "--show",
        "3",
        "--json",
        figures,
    )
    done = call("run", *options, "--", *command, "--flag", "value")
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
    done = call("run", "--nics", "2", "--logs", nothing_left, "--", f"{HERE}/steps.py", "5", "4")
    assert time.monotonic() - start < ENDED_S
    assert done.returncode == 1
    assert "error: rank 5 (node 1, local rank 1) was killed by SIGKILL after" in done.stderr
    assert "    rank 5 begins step 4" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_is_stopped_leaves_nothing(number: signal.Signals, nothing_left: Path) -> None:
    command = tool(
        "run", "--nodes", "1", "--ranks-per-node", "2", "--logs", nothing_left, "--", f"{HERE}/steps.py", "-1", "-1"
    )
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=heed_interrupts,  # noqa: PLW1509
    ) as launcher:
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


def heed_interrupts() -> None:
    # Take SIGINT again, which a shell's background jobs ignore, and their children with them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
            done = call("run", "--tag", tag, "--logs", tmp_path, "--", f"{HERE}/total.py")
            assert "rank 0 of 4: total 6" in done.stdout, done.stderr
    finally:
        removed = call("down", "--tag", tag)
    assert "removed 7 namespaces" in removed.stdout
    assert "removed 0 namespaces" in call("down", "--tag", tag).stdout
    assert_no_namespace_but(before)
    gone = call("run", "--tag", tag, "--", f"{HERE}/total.py")
    assert gone.returncode == 2
    assert gone.stderr.startswith(f"error: no emulated cluster with the tag '{tag}' stands")


@pytest.mark.parametrize(
    ("preface", "reason"),
    [
        # A user namespace that may hold no network namespace.
        (
            "echo 0 > /proc/sys/user/max_net_namespaces && exec",
            "this machine permits no namespaces: No space left on device",
        ),
        ("PATH=/nonexistent exec", "ip: No such file or directory; install iproute2"),
    ],
)
def test_where_it_is_not_permitted_check_says_skip_and_run_says_why(permitted: None, preface: str, reason: str) -> None:
    def inside(*words: str) -> subprocess.CompletedProcess[str]:
        script = f'{preface} "$0" "$@"'
        return ended(["unshare", "-Ur", "sh", "-c", script, *tool(*words)], cwd=ROOT)

    checked = inside("check")
    assert (checked.returncode, checked.stdout.startswith(f"SKIP: {reason}")) == (77, True), (
        checked.stdout + checked.stderr
    )
    refused = inside("run", "--", f"{HERE}/total.py")
    assert (refused.returncode, refused.stderr.startswith(f"error: {reason}")) == (2, True), refused.stderr
    assert refused.stderr.count("\n") == 1


def test_check_says_ok(permitted: None) -> None:
    done = call("check")
    assert (done.returncode, done.stdout) == (0, "OK\n")


@pytest.mark.parametrize("may_schedule", [False, True])
def test_ranks_have_torchruns_environment_their_nodes_host_name_and_no_other_capability(
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
    with pytest.raises(
        RankError, match=r"the deadline passed after \d s: rank 1 was still running[\s\S]*in hang_on"
    ) as raised:
        emulate(SMALL, jobs.hang_on, 1, deadline_s=1.0)
    assert raised.value.rank == 1


def test_a_rate_that_no_link_has_is_refused_in_the_rank_that_asked(emulate: Emulate) -> None:
    result = emulate(SMALL, jobs.ask_for_no_rate)
    assert result.values == ("ConfigError: nic_bits_per_s = 0: choose a rate of at least 1 bit/s",) * 4


def test_what_ranks_leave_behind_is_gone(emulate: Emulate) -> None:
    before = network_namespaces()
    emulate(SMALL, jobs.leave_a_process_behind)
    assert_no_namespace_but(before)

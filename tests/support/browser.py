"""A real browser for tests: opens a file and says what it drew, complained about and asked for."""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_balance.cli import main
from tests.support.processes import ended

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
NOT_FOUND = f"no browser on PATH ({', '.join(NAMES)}); on Debian: apt-get install chromium"
# Origins of what the browser fetches for itself, updates for instance.
_NOT_A_PAGE = "not an origin"


@dataclass(frozen=True)
class Seen:
    # `dom`: the document after its scripts; `console`: lines written there, errors among them;
    # `requests`: of the page, to any network.
    dom: str
    console: tuple[str, ...]
    requests: tuple[str, ...]


def find() -> str | None:
    # A browser that can be driven from the command line.
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def view(page: Path, scratch: Path, *flags: str) -> Seen:
    # Open a file in a browser of its own, with no way to any network, and let its scripts run.
    browser = find()
    assert browser is not None, NOT_FOUND
    log = scratch / "net.json"
    command = [
        *(browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-dev-shm-usage"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,900"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--log-net-log={log}"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # a sandbox is refused to root
        *(f"--user-data-dir={scratch / 'profile'}", "--virtual-time-budget=10000", *flags, "--dump-dom", page.as_uri()),
    ]
    done = ended(command, timeout=60)
    assert done.returncode == 0, f"{browser} ended with {done.returncode}: {done.stderr[-2000:]}"
    console = tuple(line.split("] ", 1)[1] for line in done.stderr.splitlines() if re.search(r":CONSOLE[:(]", line))
    return Seen(done.stdout, console, _requests(log))


def _requests(log: Path) -> tuple[str, ...]:
    # Of the browser's own log of its network: what the page asked for, but for files and data that
    # it holds itself.
    found: list[str] = []
    for event in json.loads(log.read_text(encoding="utf-8"))["events"]:
        params = event.get("params") or {}
        url = str(params.get("url", ""))
        of_page = params.get("initiator", _NOT_A_PAGE) != _NOT_A_PAGE
        if of_page and not url.startswith(("file:", "data:", "blob:")):
            found.append(url)
    return tuple(found)


HOSTILE = "</script><script>document.title='pwned'</script>"
PICTURE = "<img src=x onerror=document.title='pwned'>"


def make(folder: Path) -> dict[str, Path]:
    # The pages `simulated` and `trained`.
    lengths = folder / f"{PICTURE}.json"
    lengths.write_text("[9000, 1200, 700, 64]", encoding="utf-8")
    (folder / "cluster.yaml").write_text(f'base: h200\nname: "{HOSTILE}"\n', encoding="utf-8")
    (folder / "model.yaml").write_text(f'base: llama-3b\nname: "{PICTURE}"\n', encoding="utf-8")
    made = {"simulated": folder / "simulated.html", "trained": folder / "trained.html"}
    files = {"cluster": folder / "cluster.yaml", "model": folder / "model.yaml", "lengths-file": lengths}
    inputs = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    shape = ["--ranks", "8", "--ranks-per-node", "4", "--tokens-per-rank", "4000"]
    shape += ["--planner", "zeppelin", "--planner", "ulysses"]
    assert main(["report", *inputs, *shape, "--out", str(made["simulated"])]) == 0
    even = {"tokens": 1.0, "attention": 1.1}
    same = {"planner": HOSTILE, "plan_ms": 3.0, "plan_wait_ms": 1.0, "imbalance_after": even}
    same |= {"imbalance_before": {"tokens": 1.0, "attention": 1.4}}
    rising = {"step": 0, "step_ms": 100.0, "kv_tokens_received": 10.0, "predicted_ms": 50.0}
    steps = [{"loss": 6.0 - 0.1 * n, **{name: start + n for name, start in rising.items()}} for n in range(1, 13)]
    runs = [folder / PICTURE, folder / "other"]
    for run in runs:
        run.mkdir()
        (run / "steps.jsonl").write_text("".join(json.dumps(same | step) + "\n" for step in steps), encoding="utf-8")
    assert main(["report", "--steps", str(runs[0]), "--steps", str(runs[1]), "--out", str(made["trained"])]) == 0
    return made


def embedded(text: str) -> list[dict[str, Any]]:
    # The figures of a page's plots.
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])

"""A run killed and resumed by other planners, rank counts and Megatron versions: which tokens of which
document are trained, counted where the loss is, on CPUs.

    python -m tools.megatron_resuming PATH... installed [--data documents script packed]

PATH: Megatrons, oldest first, as in `tools.megatron_versions`: the five legs go from the first to the
last (0.18 cannot read what 0.19 saved). Every token of a document is the document's number, so the
labels that a loss counts name it. Each leg goes on from the last checkpoint and is killed a step
behind the one that it saves; what it trained behind it is lost with it, as it should be.

`documents` are ours. `script`: Megatron's GPTDataset, which joins documents and cuts them at samples
(`data: script`); `packed`: its SFTDataset, a sample several conversations with cu_seqlens. There the
same legs have other planners, since nothing can wait, and the files lie elsewhere from the third leg
on.

One rank that nobody killed says which documents each sample has. Exit code 0 if the labels by document
over all legs are exactly those of the first samples of that run: of as many as the legs drew, which is
fewer than it has where documents that waited took the place of samples (docs/adr/0022).
"""

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import yaml

from tests.megatron.conftest import MODEL, RUN
from tests.megatron.test_parity import two_nodes
from tests.support.megatron_run import Entry, Job, Trainer
from tests.support.numbered_data import PACKED, write_joined, write_packed
from tests.support.trained_documents import microbatches, write_numbered
from tools.megatron_flags import command_line
from tools.megatron_versions import INSTALLED, root_of, version_of

LENGTHS = (300, 140, 40, 20, 7, 1, 480, 210, 64)
NUM_DOCUMENTS = 180
"""More than the steps read, so that a document is due once at most."""
SAMPLES = 4
CONVERSATIONS = tuple(itertools.chain.from_iterable(PACKED))
LINES = 40
"""Of conversations, a sample each."""


def length_of(number: int) -> int:
    """Tokens of a document; its labels are one less."""
    return LENGTHS[number % len(LENGTHS)]


def length_of_conversation(number: int) -> int:
    """Tokens of a conversation; its labels are one less."""
    return CONVERSATIONS[number % len(CONVERSATIONS)]


WHOLE: dict[Entry, Callable[[int], int]] = {"documents": length_of, "packed": length_of_conversation}
"""By data: the tokens of a document, where none is cut at a sample."""


@dataclass(frozen=True)
class Leg:
    """A part of the run: who trains it, and the step behind which it is saved."""

    planner: dict[str, Any]
    ranks: int
    flags: dict[str, Any]
    saved: int


LEGS = (
    Leg({"name": "zeppelin", "slack": 1.0}, 4, {"context-parallel-size": 2}, 2),
    Leg({"name": "wlb_llm", "thresholds": [400]}, 2, {"context-parallel-size": 2}, 4),
    Leg({"name": "distca", "block": 32}, 4, {"context-parallel-size": 4}, 5),
    Leg({"name": "wlb_llm", "thresholds": [400]}, 2, {"context-parallel-size": 1}, 7),
    Leg({"name": "te_ring"}, 1, {"context-parallel-size": 1}, 9),
)
"""Documents wait in the checkpoints behind the second leg and behind the fourth."""
OTHER_PLANNERS: tuple[dict[str, Any], ...] = (
    LEGS[0].planner,
    {"name": "wlb_llm", "thresholds": []},
    LEGS[2].planner,
    {"name": "hydraulis"},
    LEGS[4].planner,
)
OWN_LEGS = tuple(dataclasses.replace(leg, planner=other) for leg, other in zip(LEGS, OTHER_PLANNERS, strict=True))
MOVED = 2
"""The leg from which on the files of a script's data lie elsewhere."""


class Legs:
    """Runs in a folder, on several Megatrons, of one corpus."""

    def __init__(self, folder: Path, trainers: Sequence[Trainer], data: Entry) -> None:
        self._folder, self._trainers = folder, trainers
        self._data: Entry = data
        self.legs = LEGS if data == "documents" else OWN_LEGS
        lengths = list(map(length_of, range(NUM_DOCUMENTS)))
        if data == "packed":
            self._corpus = write_packed(folder / "conversations.jsonl", LINES)
        elif data == "script":
            self._corpus = write_joined(folder / "joined", lengths, NUM_DOCUMENTS)
        else:
            self._corpus = write_numbered(folder / "documents", lengths)

    def move(self) -> None:
        """Put the files of the data elsewhere."""
        found = [path for path in self._folder.glob(f"{Path(self._corpus).name}*") if path.is_file()]
        self._corpus = str((self._folder / "moved").joinpath(Path(self._corpus).name))
        Path(self._corpus).parent.mkdir()
        for path in found:
            path.rename(Path(self._corpus).with_name(path.name))

    def run(self, name: str, at: int, leg: Leg, begun: int, *, kill: bool) -> tuple[list[Counter[int]], dict[str, Any]]:
        """Train a leg on Megatron `at`, from step `begun` on: labels by document of each microbatch of
        the steps that its checkpoint has, and the record of the last of these steps.

        Raises:
            RuntimeError: it did not end as it should; the end of a log.
        """
        folder = self._folder / name
        folder.mkdir()
        ours = self._data == "documents"
        keys: dict[str, Any] = {"planner": leg.planner, "plan_ahead": False, "sample_filling": "next_fit"}
        keys["data"] = "documents" if ours else "script"
        (folder / "balance.yaml").write_text(yaml.safe_dump({**keys, **two_nodes(max(2, leg.ranks))}))
        balance = {"balance-config": folder / "balance.yaml", "balance-log": folder / "log"}
        checkpoint = self._folder / ("checkpoint" if kill or begun else name)
        flags: dict[str, Any] = {
            "vocab-size": NUM_DOCUMENTS + 1,
            "data-path": self._corpus,
            "global-batch-size": SAMPLES,
            "train-iters": LEGS[-1].saved,
            "ckpt-format": "torch_dist",
            "save": checkpoint,
            "load": checkpoint,
            "save-interval": leg.saved,
            "exit-interval": None if kill else leg.saved,
            "sft": self._data == "packed",
        }
        killed = (str(folder / "log" / "steps.jsonl"), leg.saved - begun + 1) if kill else None
        argv = tuple(command_line(MODEL, RUN, flags, balance, leg.flags))
        job = Job(self._data, leg.ranks, argv, str(folder), deadline_s=600.0, kill_after=killed)
        result = self._trainers[at].run(job)
        if set(result.codes) != ({-SIGKILL} if kill else {0}):
            raise RuntimeError(f"{name}: ranks ended with {result.codes}\n{result.tail(result.failed or 0)}")
        steps = [json.loads(line) for line in (folder / "log" / "steps.jsonl").read_text().splitlines()]
        kept = range(begun + 1, leg.saved + 1)
        assert [step["step"] for step in steps][: len(kept)] == list(kept), f"{name}: steps {steps}"
        return microbatches(folder, kept), steps[len(kept) - 1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH")
    parser.add_argument("--data", nargs="+", choices=("documents", "script", "packed"), default=["documents"])
    args = parser.parse_args(argv)
    roots = [root_of(path) for path in args.paths or (INSTALLED,)]
    with ExitStack() as stack:
        trainers = [stack.enter_context(closing(Trainer(path=[str(root)]))) for root in roots]
        return max(resumed(data, roots, trainers) for data in args.data)


def resumed(data: Entry, roots: Sequence[Path], trainers: Sequence[Trainer]) -> int:
    """Train all legs on some data; 0 if they counted the labels that they should."""
    with tempfile.TemporaryDirectory() as name:
        legs = Legs(Path(name), trainers, data)
        samples, step = legs.run("whole", 0, legs.legs[-1], 0, kill=False)
        told = f"{len(samples)} samples, {step['run_tokens']['drawn']:,} tokens"
        print(f"{data}: one rank, {legs.legs[-1].saved} steps, nobody killed: {told}")
        print("| Megatron | planner | ranks | steps kept | labels | tokens that wait |\n|---|---|---|---|---|---|")
        found: Counter[int] = Counter()
        begun = 0
        for number, leg in enumerate(legs.legs):
            if number == MOVED and data != "documents":
                legs.move()
            at = number * len(roots) // len(legs.legs)
            part, step = legs.run(f"leg{number}", at, leg, begun, kill=leg is not legs.legs[-1])
            labels = sum(each.total() for each in part)
            cells = (version_of(roots[at]), leg.planner["name"], leg.ranks, f"{begun + 1} to {leg.saved}")
            print(f"| {' | '.join(map(str, cells))} | {labels:,} | {step['waiting_tokens']:,} |", flush=True)
            found += sum(part, Counter())
            begun = leg.saved
    return told_of(found, samples, step["run_tokens"]["drawn"], WHOLE.get(data))


def told_of(
    found: Counter[int], samples: Sequence[Counter[int]], drawn: int, whole: Callable[[int], int] | None = None
) -> int:
    """Say whether labels by document are those of the first samples; 0 if they are.

    `whole`: the tokens of each document, none of which is cut; None: some are.
    """
    first, expected = 0, Counter[int]()
    while first < len(samples) and expected.total() < found.total():
        expected += samples[first]
        first += 1
    wrong = {each: (found[each], expected[each]) for each in expected | found if found[each] != expected[each]}
    if whole is not None:
        wrong |= {each: (labels, whole(each) - 1) for each, labels in found.items() if labels != whole(each) - 1}
    print(f"{drawn:,} tokens drawn; {found.total():,} labels of {len(found)} documents counted, those of the first")
    print(f"{first} samples are {expected.total():,}; documents that differ: {wrong or 'none'}")
    return int(bool(wrong) or not found)


if __name__ == "__main__":
    sys.exit(main())

"""Train a tiny GPT with documents in three orders, seed by seed: does delaying outliers cost loss?

`python -m tools.bench.convergence --out docs/measurements`. The corpus is the demo's (sources of
this Python) up to 4 KiB, its tokens words and signs instead of bytes, so that it trains on one core
in minutes. Orders: `undelayed` as dealt; `delayed` by wlb_llm through training's own account of
documents that wait; `window8` fixed-length packing over 8 global batches, the paper's control.
Every order has the same documents (Figure 16 of WLB-LLM). Curves, a table and an SVG come out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.layers import Layers
from megatron_balance.ir.model import Model
from megatron_balance.ir.step import EMPTY
from megatron_balance.planning.step_planner import PlanSpec, StepPlanner
from megatron_balance.training.plans import Samples, StepPlans
from megatron_balance.workloads.corpus import INSTALLED, TOKEN_TYPE, build, find_files, standard_library
from megatron_balance.workloads.documents import DocumentStream
from megatron_balance.workloads.idx import read_index

ORDERS = ("undelayed", "delayed", "window8")
LONGEST = 4096
"""Bytes of the longest document; the demo has 8192, which takes a core too long here."""
VOCABULARY = 512
CONTEXT = 1024
MICROBATCHES = 4
WINDOW = 8
THRESHOLDS = (650,)
HIDDEN, HEADS, LAYERS = 32, 2, 2
LAST = 50
"""Steps at the end whose losses are compared."""

Documents = list[Tensor]
Step = list[Documents]


class Block(nn.Module):
    """Attention within documents and an MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """`x` [T, hidden] of documents one after another."""
        qkv = self.qkv(self.before(x)).view(-1, 3, HEADS, HIDDEN // HEADS)
        parts: list[Tensor] = []
        for document in qkv.split(list(lengths)):
            q, k, v = document.permute(1, 2, 0, 3)[:, None]
            parts.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
        x = x + self.out(torch.cat(parts).flatten(1))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    """A decoder of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def loss(self, documents: Documents) -> tuple[Tensor, int]:
        """Sum of the token losses of documents, and how many there are."""
        inputs, labels = [d[:-1] for d in documents], torch.cat([d[1:] for d in documents])
        lengths = [len(each) for each in inputs]
        x = self.tokens(torch.cat(inputs)) + self.positions(torch.cat([torch.arange(n) for n in lengths]))
        for block in self.blocks:
            x = block(x, lengths)
        return functional.cross_entropy(self.head(self.norm(x)), labels, reduction="sum"), len(labels)


def documents_of_corpus() -> list[Tensor]:
    """The demo's documents as numbers of words and signs; what is rare is one number."""
    with TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "stdlib")
        build(prefix, find_files([standard_library()], ".py", INSTALLED), max_bytes=LONGEST)
        lengths = read_index(prefix).document_lengths
        data = np.fromfile(f"{prefix}.bin", dtype=TOKEN_TYPE)
    texts = [bytes(part[part < 256].astype(np.uint8)) for part in np.split(data, np.cumsum(lengths)[:-1])]
    words = [re.findall(rb"\s*(?:\w+|[^\w\s]+)|\s+", text) for text in texts]
    common = [word for word, _ in Counter(w for each in words for w in each).most_common(VOCABULARY - 1)]
    number = {word: at + 1 for at, word in enumerate(common)}
    return [torch.tensor([number.get(w, 0) for w in each][:CONTEXT]) for each in words if len(each) > 1]


def planner(order: str) -> StepPlanner:
    """The planner of an order, for one rank."""
    options: dict[str, object] = {
        "undelayed": {"packing": "original"},
        "delayed": {"thresholds": THRESHOLDS, "tokens_per_rank": int(1.5 * CONTEXT)},
        "window8": {"packing": "fixed", "window": WINDOW, "context_tokens": CONTEXT, "tokens_per_rank": CONTEXT},
    }[order]
    model = Model(HEADS, HEADS, HIDDEN // HEADS, num_layers=LAYERS, hidden_size=HIDDEN, ffn_size=4 * HIDDEN)
    return StepPlanner(PlanSpec("wlb_llm", Cluster(1, 1), model, Layers(), options))


def steps(order: str, documents: list[Tensor], seed: int, count: int) -> Iterator[Step]:
    """The documents of each step by microbatch; all orders draw the same samples."""
    stream = DocumentStream(np.array([len(d) for d in documents]), CONTEXT, seed, filling="next_fit")
    if order == "window8":
        yield from _windows(stream, documents, count)
        return
    at = 0
    samples = Samples(
        lambda: at * MICROBATCHES, lambda: MICROBATCHES, 1, stream.lengths_of, 1 << 30, lambda: count - at
    )
    plans = StepPlans(planner(order), samples, lambda _: None)
    for at in range(count):
        draw = plans.draw(MICROBATCHES)
        first = at * MICROBATCHES if draw.first is None else draw.first
        drawn = [
            documents[piece.document] for n in range(first, first + draw.num_microbatches) for piece in stream.sample(n)
        ]
        planned = plans.plan(tuple(stream.lengths_of(n) for n in range(first, first + draw.num_microbatches)))
        again = {h.number: documents[stream.sample(h.sample)[h.place].document] for h in planned.recalled}
        yield [[drawn[n] if n >= 0 else again[n] for (seqs,) in [m] for n in seqs] for m in planned.step.members]
    assert not plans.end_step().held, "all that was drawn is trained"


def _windows(stream: DocumentStream, documents: list[Tensor], count: int) -> Iterator[Step]:
    """Steps of windows of 8 global batches, packed at once."""
    carry, known, window = EMPTY, dict[int, Tensor](), planner("window8")
    for begin in range(0, count, WINDOW):
        numbers = range(begin * MICROBATCHES, (begin + WINDOW) * MICROBATCHES)
        drawn = [documents[piece.document] for n in numbers for piece in stream.sample(n)]
        known.update(enumerate(drawn))
        step, carry = window.plan([stream.lengths_of(n) for n in numbers], carry)
        packed = [[known.pop(n) for (seqs,) in [m] for n in seqs] for m in step.members]
        known = {number - len(drawn): each for number, each in known.items()}
        for at in range(min(WINDOW, count - begin)):
            yield packed[at * MICROBATCHES : (at + 1) * MICROBATCHES]


def train(order: str, documents: list[Tensor], seed: int, count: int) -> list[tuple[float, int]]:
    """Loss of each step, summed over its tokens, and their number."""
    torch.manual_seed(seed)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * s / count)))
    )
    curve: list[tuple[float, int]] = []
    for step in tqdm(steps(order, documents, seed, count), total=count, desc=f"{order} {seed}", file=sys.stderr):
        optimizer.zero_grad()
        tokens = sum(len(d) - 1 for m in step for d in m)
        total = 0.0
        for microbatch in step:
            if microbatch:
                loss, _ = model.loss(microbatch)
                (loss / tokens).backward()
                total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append((total, tokens))
    return curve


def last_loss(curve: Sequence[Sequence[float]]) -> float:
    """Mean loss of a token of the last steps."""
    return sum(loss for loss, _ in curve[-LAST:]) / sum(tokens for _, tokens in curve[-LAST:])


def report(curves: dict[str, dict[int, list[tuple[float, int]]]]) -> str:
    """The table for docs, and whether the delay costs loss."""
    seeds = sorted(curves["undelayed"])
    last = {order: [last_loss(curves[order][seed]) for seed in seeds] for order in ORDERS}
    base = last["undelayed"]
    spread = max(base) - min(base)
    lines = [
        f"| order | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | paired difference, mean |",
        "|---|" + "---|" * (len(seeds) + 2),
    ]
    for order in ORDERS:
        paired = [a - b for a, b in zip(last[order], base, strict=True)]
        cells = " | ".join(f"{each:.4f}" for each in last[order])
        lines.append(f"| `{order}` | {cells} | {fmean(last[order]):.4f} | {fmean(paired):+.4f} |")
    delay = fmean(a - b for a, b in zip(last["delayed"], base, strict=True))
    verdict = "below" if abs(delay) < spread / 3 else "not below"
    lines += [
        "",
        f"Mean loss of a token over the last {LAST} of {len(curves['undelayed'][seeds[0]])} steps. The seeds of "
        f"`undelayed` spread over {spread:.4f} (standard deviation {stdev(base):.4f}); the delay's paired difference "
        f"of {delay:+.4f} is {verdict} a third of that, {spread / 3:.4f}.",
    ]
    return "\n".join(lines) + "\n"


def svg(curves: dict[str, dict[int, list[tuple[float, int]]]]) -> str:
    """The figure: mean loss over the seeds, in means of ten steps."""
    colours = {"undelayed": "#444", "delayed": "#0a7", "window8": "#c40"}
    means = {
        order: [fmean(c[i][0] / c[i][1] for c in of.values()) for i in range(len(next(iter(of.values()))))]
        for order, of in curves.items()
    }
    smooth = {order: [fmean(each[i : i + 10]) for i in range(0, len(each) - 9, 10)] for order, each in means.items()}
    low, high = min(map(min, smooth.values())), max(max(each[1:]) for each in smooth.values())
    lines: list[str] = []
    for at, (order, values) in enumerate(smooth.items()):
        points = " ".join(
            f"{50 + 560 * i / (len(values) - 1):.1f},{20 + 240 * (high - min(v, high)) / (high - low):.1f}"
            for i, v in enumerate(values)
        )
        lines.append(f'<polyline fill="none" stroke="{colours[order]}" stroke-width="1.5" points="{points}"/>')
        lines.append(f'<text x="480" y="{40 + 16 * at}" fill="{colours[order]}">{order}</text>')
    ends = "".join(f'<text x="6" y="{y}">{v:.2f}</text>' for v, y in ((high, 24), (low, 264)))
    count = len(next(iter(means.values())))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" font-family="sans-serif" font-size="12">'
        f'<rect width="640" height="300" fill="#fff"/>{ends}{"".join(lines)}'
        f'<text x="50" y="290">step 0</text><text x="570" y="290">step {count}</text></svg>\n'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is asked for; once all curves are there, print the table and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of wlb-convergence.{json,svg}")
    parser.add_argument("--work", type=Path, default=Path("out/convergence"), help="folder of single curves")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    documents = documents_of_corpus()
    curves: dict[str, dict[int, list[tuple[float, int]]]] = {order: {} for order in ORDERS}
    for seed in options.seeds:
        for order in ORDERS:
            kept = options.work / f"{order}-{seed}-{options.steps}.json"
            if not kept.exists():
                kept.write_text(json.dumps(train(order, documents, seed, options.steps)))
            curves[order][seed] = json.loads(kept.read_text())
    if len(options.seeds) > 1:
        print(report(curves))
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "wlb-convergence.svg").write_text(svg(curves))
        rounded = {o: {s: [round(a / b, 4) for a, b in c] for s, c in of.items()} for o, of in curves.items()}
        (options.out / "wlb-convergence.json").write_text(json.dumps(rounded, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Distributions of document lengths, each with its source. k = 1024 tokens.

`arxiv`, `github`, `prolong64k`: Zeppelin (arXiv 2509.21841), Table 2: the share of documents in
each bin of length. Only shares are printed: we draw uniformly inside a bin, begin the first ("<
1k") at 129 tokens, and divide each row by its sum, which is 1 but for GitHub's 0.945. (ProLong64k's
67 % of 32k to 64k is what that mix has of *tokens*; the table is taken as printed.)

`wlb`: WLB-LLM (OSDI 2025, section 2.2, Figure 3) shows a 128k job's documents without printing
numbers: most are short, the longest fill the window, and those below half of it hold over 75 % of
the tokens. The bins are our count of the 99,519 lengths that DistCA publishes for it (its
repository, distca/simulator/data/dist_wlbllm.json): even up to 6k, then a thin tail; 87 % of the
tokens are below 64k.

`wlb-skew`: a stand-in for the job of WLB-LLM's Table 2, whose imbalance the counts of `wlb` do not
reach. A Pareto from 300 tokens on, cut at the window of 128k; its exponent of 1.05 was chosen by
the table's rows that are not WLB-LLM's own: dealt whole into samples of 128k in their order, four
a global batch, a 7B model gave 1.45 (published 1.44), and fixed-length greedy packing over 1, 2, 4
and 8 batches 1.39, 1.25, 1.15, 1.07 (1.41, 1.22, 1.11, 1.08), on 192 batches and by the laws of
then; by those of today 1.42, 1.35, 1.23, 1.15, 1.06. As the paper says of its data, over
75 % of the tokens (80 %) are in documents below half the window. It was fixed before any planner of
WLB-LLM's was run on it.

`pretrain`: DistCA (section 6.1): "upsample long documents in a pretrain data distribution by
randomly filtering out documents shorter than a threshold". With its script's settings
(pretrain_llama.sh): of `wlb`, every second document below 64k, and those above four times.

`prolong`: ProLong (Gao et al., arXiv 2410.02660), which DistCA evaluates on, in its 512K stage:
tokens by the proportions of its script (train_512K.sh). Code and books are cut to one document a
sample: 40 % of the tokens in documents of 65,536 and 20 % of 524,288. The rest is web text and the
like, whose lengths the paper does not give: `commoncrawl` is assumed.

`commoncrawl`: Hydraulis (arXiv 2412.07894, section 8.1) trains on falcon-refinedweb; its Figure 1
is a picture. A lognormal from printed facts: 600 billion tokens (arXiv 2306.01116, abstract) in 968
million pages (the data set's viewer), 620 a page; and among 1.6 million tokens the longest page has
15K to 32K (Hydraulis, Appendix A.1), 22K taken in the middle, so sigma = 1.32.

`github-code`: Hydraulis' other data set, codeparrot/github-code: 115 million files, 1 TB (its
card), at the 3.1 bytes a token of StarCoder's code (783 GB, 250 billion tokens; arXiv 2305.06161),
2,800 a file. The spread is not printed; `commoncrawl`'s is assumed.

`conversation`: the conversations that Mooncake's serving recorded in an hour (github.com/kvcache-ai/
Mooncake, FAST25-release/traces/conversation_trace.jsonl, Apache 2.0): 12,031 requests, input and
output tokens together, 12,378 in the mean, at most 126,527. The bins are counts of ours between its
quantiles; a mean of 12,654 by them.

`toolagent`: the calls of tools and agents in the same release (toolagent_trace.jsonl): 23,608
requests, input tokens alone, 8,596 in the mean (its README; 182 of output beside them). The file was
not to be had; the bins are between quantiles that others counted in it, three times alike: 10 % below
1,800, 50 % below 6,345, 95 % below 26,081, 99 % below 61,623, the longest 125,546; a mean of 8,849 by
them.

`chatqa2`: conversations for fine-tuning over long contexts (nvidia/ChatQA2-Long-SFT-data, CC BY-NC
2.0, up to 128k), by the shares that MagiAttention's benchmarks draw documents with (github.com/
SandAI-org/MagiAttention, exps/attn/run_benchmark.py, Apache 2.0; its README says that they are the
set's). The bins up to 128k, which sum to 1, as printed; those above, of longer trials, are left out.
61 % are above 32k; of the blend that the set's card trains, 57 % come from its part for 128k.

`lognormal`: a median of 1,500 tokens and sigma 1.3: many short documents and a few that fill the
context. Ours, no source.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Protocol

import numpy as np

from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats

K = 1024


class Distribution(Protocol):
    """A source of document lengths, one at a time."""

    def document(self, generator: np.random.Generator) -> int:
        """Length of one document in tokens, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Bins:
    """Bin i holds lengths edges[i] + 1 to edges[i + 1], evenly; `shares` of documents, unscaled."""

    edges: tuple[int, ...]
    shares: tuple[float, ...]

    def document(self, generator: np.random.Generator) -> int:
        shares = np.array(self.shares)
        chosen = int(generator.choice(len(shares), p=shares / shares.sum()))
        return int(generator.integers(self.edges[chosen] + 1, self.edges[chosen + 1], endpoint=True))

    def quantiles(self, shares: Floats) -> Floats:
        """Lengths below which so large shares of the documents are."""
        below = np.cumsum([0.0, *self.shares])
        return np.interp(shares, below / below[-1], self.edges)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp of a normal distribution around log(median)."""

    median: float
    sigma: float

    @staticmethod
    def of_mean(mean: float, sigma: float) -> "LogNormal":
        """The lognormal with this mean: its median is mean / exp(sigma^2 / 2)."""
        return LogNormal(mean / exp(sigma**2 / 2), sigma)

    @property
    def mean(self) -> float:
        return self.median * exp(self.sigma**2 / 2)

    def document(self, generator: np.random.Generator) -> int:
        return max(1, round(generator.lognormal(log(self.median), self.sigma)))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Lengths from `least` on: (least / x) ^ exponent are longer than x; at most `most`."""

    least: int
    exponent: float
    most: int

    def document(self, generator: np.random.Generator) -> int:
        return min(self.most, int(self.least * (1.0 - generator.random()) ** (-1.0 / self.exponent)))


@dataclass(frozen=True, slots=True)
class _Mix:
    """Shares of the *tokens* in documents of fixed lengths; the rest of the tokens is `others`'."""

    fixed: tuple[tuple[int, float], ...]
    others: LogNormal

    def document(self, generator: np.random.Generator) -> int:
        rest = 1 - sum(share for _, share in self.fixed)
        documents = np.array([share / length for length, share in self.fixed] + [rest / self.others.mean])
        chosen = int(generator.choice(len(documents), p=documents / documents.sum()))
        return self.fixed[chosen][0] if chosen < len(self.fixed) else self.others.document(generator)


TABLE_2_EDGES = (128, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K)
WLB_EDGES = (0, 6 * K, 8 * K, 16 * K, 32 * K, 64 * K, 96 * K, 128 * K)
WLB_DOCUMENTS = (95101, 2057, 1031, 449, 353, 318, 210)
CONVERSATION_EDGES = (
    *(894, 1121, 1343, 2038, 3635, 5291, 7255, 9886, 13574, 18246, 27723, 40048, 66754, 85858, 101102, 126527),
)
CONVERSATIONS = (603, 604, 1201, 1202, 1203, 1204, 1202, 1203, 1203, 1203, 601, 361, 121, 60, 60)
TOOLAGENT_EDGES = (890, 1800, 4096, 6345, 8192, 16384, 26081, 32768, 61623, 125546)
TOOLAGENT_SHARES = (0.1, 0.195, 0.205, 0.283, 0.114, 0.053, 0.019, 0.021, 0.01)
PRETRAIN_KEPT, PRETRAIN_COPIES = 0.5, 4
COMMONCRAWL = LogNormal.of_mean(620, 1.32)

DISTRIBUTIONS: dict[str, Distribution] = {
    "arxiv": Bins(TABLE_2_EDGES, (0.032, 0.03, 0.08, 0.219, 0.338, 0.224, 0.077, 0.0, 0.0)),
    "github": Bins(TABLE_2_EDGES, (0.0, 0.34, 0.095, 0.104, 0.107, 0.102, 0.088, 0.064, 0.045)),
    "prolong64k": Bins(TABLE_2_EDGES, (0.231, 0.042, 0.021, 0.012, 0.013, 0.008, 0.673, 0.0, 0.0)),
    "commoncrawl": COMMONCRAWL,
    "github-code": LogNormal.of_mean(2800, 1.32),
    "wlb": Bins(WLB_EDGES, tuple(float(count) for count in WLB_DOCUMENTS)),
    "wlb-skew": Pareto(300, 1.05, 128 * K),
    "pretrain": Bins(
        WLB_EDGES,
        tuple(
            count * (PRETRAIN_COPIES if low >= 64 * K else PRETRAIN_KEPT)
            for low, count in zip(WLB_EDGES[:-1], WLB_DOCUMENTS, strict=True)
        ),
    ),
    "prolong": _Mix(((64 * K, 0.4), (512 * K, 0.2)), COMMONCRAWL),
    "conversation": Bins(CONVERSATION_EDGES, tuple(map(float, CONVERSATIONS))),
    "toolagent": Bins(TOOLAGENT_EDGES, TOOLAGENT_SHARES),
    "chatqa2": Bins((0, *TABLE_2_EDGES[2:-1]), (0.16, 0.05, 0.04, 0.06, 0.08, 0.21, 0.4)),
    "lognormal": LogNormal(1500.0, 1.3),
}

PATCH_PIXELS = 16
CLIP_FRAMES, CLIP_LATENTS = 17, 5
TEXT_TOKENS = 392
_ASPECT = (0.96, 1.04)
# Of one drawing, in all batches.
MOST_SAMPLES = 10**7
LOW_RESOLUTION = "g32b32i256f1s0"
MIXED_RESOLUTION = "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0"
# Table 1's three workloads, for 32 GPUs.
IMAGES_AND_VIDEOS = (
    "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
)
_CODE = re.compile(r"g(\d+)b(\d+)i(\d+)f(\d+)s([01])")


@dataclass(frozen=True, slots=True)
class _DataCode:
    """One stream: samples on each of `num_gpus` GPUs."""

    num_gpus: int
    samples: int
    pixels: int
    frames: int
    clip: bool

    @property
    def visual_tokens(self) -> float:
        """Tokens of one sample's picture, before the aspect factor."""
        latents = self.frames * CLIP_LATENTS / CLIP_FRAMES if self.clip else self.frames
        return (self.pixels / PATCH_PIXELS) ** 2 * latents


def is_data_code(name: str) -> bool:
    """Whether a data set's name is meant as data codes."""
    return bool(re.match(r"g\d+b\d+i", name))


def parse_codes(text: str) -> tuple[_DataCode, ...]:
    """The streams of codes joined by commas; ConfigError: they are none."""
    codes: list[_DataCode] = []
    for word in map(str.strip, text.split(",")):
        match = _CODE.fullmatch(word)
        if not match:
            form = "g{GPUs}b{samples}i{pixels}f{frames}s{0|1}, such as g8b4i256f1s0"
            raise ConfigError(f"data code {word!r}: expected {form}")
        gpus, samples, pixels, frames, clip = (int(number) for number in match.groups())
        if not (gpus and samples and frames and pixels) or pixels % PATCH_PIXELS:
            rule = f"GPUs, samples and frames are at least 1, pixels a multiple of {PATCH_PIXELS}"
            raise ConfigError(f"data code {word!r}: {rule}")
        if clip and frames % CLIP_FRAMES:
            rule = f"a clip's frames are a multiple of {CLIP_FRAMES}, which become {CLIP_LATENTS} each"
            raise ConfigError(f"data code {word!r}: {rule}")
        codes.append(_DataCode(gpus, samples, pixels, frames, bool(clip)))
    return tuple(codes)


def draw_by_gpu(text: str, batches: int, seed: int | Sequence[int]) -> list[tuple[tuple[int, ...], ...]]:
    """Batches of lengths as the loaders hand them out: [batches][GPUs][samples], in tokens."""
    codes, generator = parse_codes(text), np.random.default_rng(seed)
    samples = batches * sum(code.num_gpus * code.samples for code in codes)
    if samples > MOST_SAMPLES:
        raise ConfigError(f"data codes {text}, {batches} batches: {samples} samples, expected at most {MOST_SAMPLES}")
    return [tuple(_samples_of(code, generator) for code in codes for _ in range(code.num_gpus)) for _ in range(batches)]


def _samples_of(code: _DataCode, generator: np.random.Generator) -> tuple[int, ...]:
    visual = round(code.visual_tokens * generator.uniform(*_ASPECT))
    return tuple(visual + int(text) for text in generator.integers(0, TEXT_TOKENS, endpoint=True, size=code.samples))

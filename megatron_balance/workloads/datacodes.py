"""KnapFormer's data codes (section 4.1): what each GPU of a text-to-image or text-to-video job
loads.

A code g{G}b{B}i{R}f{F}s{S}: G GPUs, B samples on each, images of R x R pixels, F frames, S = 1 for
a video clip and 0 for images or keyframes; several codes joined by commas are one sharding group,
GPUs in order. A sample is its text and its picture as one sequence:

* text: 0 to 392 tokens, even, 196 on average;
* picture: (R / 16)^2 tokens a frame; of a clip 17 frames become 5; times a factor of 0.96 to 1.04,
  even, for all samples of a GPU's batch (buckets of aspect ratio).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.errors import ConfigError

PATCH_PIXELS = 16
CLIP_FRAMES, CLIP_LATENTS = 17, 5
TEXT_TOKENS = 392
ASPECT = (0.96, 1.04)

MOST_SAMPLES = 10**7
"""Of one drawing, in all batches."""
LOW_RESOLUTION = "g32b32i256f1s0"
MIXED_RESOLUTION = "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0"
IMAGES_AND_VIDEOS = (
    "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
)
"""Table 1's three workloads, for 32 GPUs."""

IMAGES_AND_A_LONG_CLIP = "g1b1i1024f85s1,g31b28i512f1s0"
"""Not the paper's: images of 512 x 512 pixels on 31 GPUs and a clip of five seconds on one, a quarter
of the work. Fixed before the search for topologies was written, to judge it by."""

_CODE = re.compile(r"g(\d+)b(\d+)i(\d+)f(\d+)s([01])")


@dataclass(frozen=True, slots=True)
class DataCode:
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


def parse(text: str) -> tuple[DataCode, ...]:
    """The streams of codes joined by commas.

    Raises:
        ConfigError: not data codes, or a number that cannot be.
    """
    codes: list[DataCode] = []
    for word in text.split(","):
        match = _CODE.fullmatch(word.strip())
        if not match:
            raise ConfigError(
                f"data code {word.strip()!r}: expected g{{GPUs}}b{{samples}}i{{pixels}}f{{frames}}s{{0|1}}, such as "
                "g8b4i256f1s0"
            )
        gpus, samples, pixels, frames, clip = (int(number) for number in match.groups())
        if not gpus or not samples or not frames or not pixels or pixels % PATCH_PIXELS:
            raise ConfigError(
                f"data code {word.strip()!r}: GPUs, samples and frames are at least 1, pixels a multiple of "
                f"{PATCH_PIXELS}"
            )
        if clip and frames % CLIP_FRAMES:
            raise ConfigError(
                f"data code {word.strip()!r}: a clip's frames are a multiple of {CLIP_FRAMES}, which become "
                f"{CLIP_LATENTS} each"
            )
        codes.append(DataCode(gpus, samples, pixels, frames, bool(clip)))
    return tuple(codes)


def draw_by_gpu(text: str, batches: int, seed: int | Sequence[int]) -> list[tuple[tuple[int, ...], ...]]:
    """Batches of lengths as the loaders hand them out: [batches][GPUs][samples], in tokens.

    Raises:
        ConfigError: not data codes, or more samples than `MOST_SAMPLES`.
    """
    codes, generator = parse(text), np.random.default_rng(seed)
    samples = batches * sum(code.num_gpus * code.samples for code in codes)
    if samples > MOST_SAMPLES:
        raise ConfigError(f"data codes {text}, {batches} batches: {samples} samples, expected at most {MOST_SAMPLES}")
    return [tuple(_samples(code, generator) for code in codes for _ in range(code.num_gpus)) for _ in range(batches)]


def _samples(code: DataCode, generator: np.random.Generator) -> tuple[int, ...]:
    visual = round(code.visual_tokens * generator.uniform(*ASPECT))
    return tuple(visual + int(text) for text in generator.integers(0, TEXT_TOKENS, endpoint=True, size=code.samples))

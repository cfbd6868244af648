"""Train a small diffusion transformer on pictures of different sizes, balanced over ranks.

    torchrun --standalone --nproc-per-node 4 scripts/examples/dit.py     # on CPU, with KnapFormer
    ... --topology g4n1 --checkpoint
    ... --planner zeppelin                                               # another planner

The model is FLUX's in small: double-stream blocks with weights for text and for image,
single-stream blocks, adaLN by the time of each sample, rotary positions of text, row and column, RMS
norms of queries and keys. A sample is one sequence: its caption and the patches of its picture, which
attend to one another. Pictures are PNG files of installed packages (PyTorch brings NetworkX and
SymPy), captions their names. It learns the flow from picture to noise.
"""

from __future__ import annotations

import argparse
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from megatron_balance import Model
from megatron_balance.torch import IGNORED, BalancedBatch, SequenceBalancer, Settings, balanced_attention, knapformer

HEADS, HEAD_DIM, WIDTH = 4, 16, 64
DOUBLE, SINGLE = 1, 2
PATCH, CHANNELS = 8, 3
VALUES = PATCH * PATCH * CHANNELS
PICTURES = {"networkx": "drawing/tests/baseline/*_house_*.png", "sympy": "plotting/tests/*_[ano]*.png"}
"""Packages, and their pictures."""
PALETTE = 3
"""The colour type of a PNG whose pixels are numbers of colours."""
AXES = (4, 6, 6)
"""Channels of a head that turn with the position in the text, the row and the column."""
SIDES = (2, 4, 4, 6, 8, 16)
"""Height and width of pictures in patches are drawn from these: few are long."""
MODEL = Model(HEADS, HEADS, HEAD_DIM, DOUBLE + SINGLE, WIDTH, 4 * WIDTH, gated_ffn=False, name="dit", attention="full")

Bytes = NDArray[np.uint8]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Full attention within sequences: q, k, v [T, H, D] to [T, H, D]."""


# Pictures


def read_png(path: Path) -> Tensor:
    """A PNG file of 8 bits a channel as [rows, columns, 3] from 0 to 1."""
    data, at, packed = path.read_bytes(), 8, b""
    width = height = colour = 0
    palette = torch.zeros(0, 3, dtype=torch.uint8)
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body, at = data[at + 8 : at + 8 + size], at + 12 + size
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            if depth != 8 or interlaced:
                raise ValueError(f"{path}: expected 8 bits a channel, not interlaced; got {depth} bits")
        elif kind == b"PLTE":
            palette = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(-1, 3)
        elif kind == b"IDAT":
            packed += body
    step = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    raw = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(height, 1 + width * step)
    rows = np.zeros((height + 1, width, step), dtype=np.uint8)
    for row, line in enumerate(raw):
        rows[row + 1] = unfiltered(int(line[0]), line[1:].reshape(width, step), rows[row])
    pixels = torch.from_numpy(rows[1:])
    if colour == PALETTE:
        pixels = palette[pixels[:, :, 0].long()]
    return (pixels[:, :, :3] if pixels.shape[2] > 2 else pixels[:, :, :1].expand(-1, -1, 3)).float() / 255


def unfiltered(how: int, row: Bytes, above: Bytes) -> Bytes:
    """A row [columns, bytes] of a PNG as it was before it was filtered by its neighbours to the left
    (1), above (2), by their mean (3) or the nearest of three (4).
    """
    if how <= 1:
        return row if how == 0 else np.cumsum(row, axis=0, dtype=np.uint8)
    if how == 2:
        return row + above
    made, left, corner = row.copy(), [0] * row.shape[1], [0] * row.shape[1]
    for at, (own, up) in enumerate(zip(row.tolist(), above.tolist(), strict=True)):
        for i, value in enumerate(own):
            a, b, c = left[i], up[i], corner[i]
            if how == 3:
                guess = (a + b) // 2
            else:
                guess = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            own[i] = (value + guess) % 256
        made[at], left, corner = own, own, up
    return made


@cache
def pictures() -> list[tuple[str, Tensor]]:
    """Captions and pictures of installed packages."""
    found: list[tuple[str, Tensor]] = []
    for package, names in PICTURES.items():
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            for path in sorted(Path(spec.origin).parent.glob(names)):
                found.append((path.stem.replace("_", " "), read_png(path)[::2, ::2]))
    if not found:
        raise FileNotFoundError("no picture in networkx or sympy, which PyTorch depends on; install them with tests")
    return found


# Samples


@dataclass(frozen=True)
class Rows:
    """Tokens of samples, one behind the other. `text` [T]: bytes of the caption, 0 for a patch.
    `noisy`, `target` [T, VALUES]: patches, 0 for text. `place` [T, 3]: in the text, row, column.
    `when` [T, 1]: the sample's time, 0 for the picture and 1 for noise.
    """

    text: Tensor
    noisy: Tensor
    target: Tensor
    place: Tensor
    when: Tensor

    @classmethod
    def join(cls, samples: list[Rows]) -> Rows:
        """Rows of several samples, or of none."""
        empty = Rows(torch.zeros(0, dtype=torch.int64), *(torch.zeros(0, n) for n in (VALUES, VALUES, 3, 1)))
        return cls(*(torch.cat(each) for each in zip(*(vars(one).values() for one in (empty, *samples)), strict=True)))

    def __len__(self) -> int:
        return len(self.text)


def sample(seed: int) -> Rows:
    """A piece of a picture with its caption."""
    g = torch.Generator().manual_seed(seed)
    known = pictures()
    caption, picture = known[int(torch.randint(len(known), (1,), generator=g))]
    rows, columns = (SIDES[int(i)] for i in torch.randint(len(SIDES), (2,), generator=g))
    top, left = (
        int(torch.randint(size - PATCH * side + 1, (1,), generator=g))
        for size, side in zip(picture.shape, (rows, columns), strict=False)
    )
    piece = picture[top : top + PATCH * rows, left : left + PATCH * columns]
    patches = piece.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).reshape(rows * columns, VALUES)
    when, noise = torch.rand(1, 1, generator=g), torch.randn(patches.shape, generator=g)
    words = torch.tensor(list(caption.encode()))
    grid = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), torch.arange(rows), torch.arange(columns))
    of_text = torch.zeros(len(words), VALUES)
    return Rows(
        torch.cat([words, torch.zeros(len(patches), dtype=torch.int64)]),
        torch.cat([of_text, (1 - when) * patches + when * noise]),
        torch.cat([of_text, noise - patches]),
        torch.cat([F.pad(torch.arange(len(words))[:, None], (0, 2)), grid]).float(),
        when.expand(len(words) + len(patches), 1),
    )


def samples(step: int, count: int) -> list[Rows]:
    """The samples of all ranks in a step."""
    return [sample(1000 * step + number) for number in range(count)]


# The model


def turned(x: Tensor, place: Tensor) -> Tensor:
    """Rotary positions: of each head's channels some turn with each column of `place`."""
    parts: list[Tensor] = []
    for axis, part in enumerate(x.split(AXES, dim=-1)):
        size = AXES[axis]
        angles = place[:, axis, None, None] * 1e4 ** (-torch.arange(0, size, 2) / size)
        a, b = part.unflatten(-1, (2, -1)).unbind(-2)
        parts += [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()]
    return torch.cat(parts, dim=-1)


class ByKind(NamedTuple):
    """Indices of the rows of text and of image, and of each row in both, one behind the other."""

    text: Tensor
    image: Tensor
    back: Tensor

    @classmethod
    def of(cls, is_image: Tensor) -> ByKind:
        """`is_image` [T]."""
        text, image = torch.nonzero(~is_image)[:, 0], torch.nonzero(is_image)[:, 0]
        return cls(text, image, torch.cat([text, image]).argsort())


class Streams(nn.Module):
    """A linear layer with weights of its own for text and for image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, rows: ByKind) -> Tensor:
        return torch.cat([self.text(x[rows.text]), self.image(x[rows.image])])[rows.back]


class Block(nn.Module):
    """Attention and MLP, modulated by the time (adaLN). Double-stream: text and image have weights
    of their own and attention comes first; single-stream: shared, attention and MLP side by side.
    """

    def __init__(self, *, double: bool) -> None:
        super().__init__()
        self.streams = double
        self.modulation = Streams(WIDTH, 6 * WIDTH) if double else nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        if double:
            self.qkv, self.out = Streams(WIDTH, 3 * WIDTH), Streams(WIDTH, WIDTH)
            self.up, self.down = Streams(WIDTH, 4 * WIDTH), Streams(4 * WIDTH, WIDTH)
        else:
            self.inside, self.outside = nn.Linear(WIDTH, 7 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)

    def forward(self, x: Tensor, vector: Tensor, place: Tensor, rows: ByKind, attend: Attend) -> Tensor:
        if not self.streams:
            shift, scale, gate = self.modulation(vector).chunk(3, dim=-1)
            qkv, up = self.inside(self.norm(x) * (1 + scale) + shift).split([3 * WIDTH, 4 * WIDTH], dim=-1)
            attended = self._attention(qkv, place, attend)
            return x + gate * self.outside(torch.cat([attended, F.gelu(up)], dim=-1))
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(vector, rows).chunk(6, dim=-1)
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift, rows)
        x = x + gate * self.out(self._attention(qkv, place, attend), rows)
        up = self.up(self.norm(x) * (1 + scale2) + shift2, rows)
        return x + gate2 * self.down(F.gelu(up), rows)

    def _attention(self, qkv: Tensor, place: Tensor, attend: Attend) -> Tensor:
        q, k, v = qkv.view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        q, k = turned(self.q_norm(q), place), turned(self.k_norm(k), place)
        return outside_graphs(attend, q, k, v).flatten(1)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable
def outside_graphs(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention, whose function is another one in every step: torch.compile shall not look inside."""
    return attend(q, k, v)


class Dit(nn.Module):
    """A diffusion transformer on rows of samples; `checkpointed` computes blocks twice."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.words, self.patches = nn.Embedding(256, WIDTH), nn.Linear(VALUES, WIDTH)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block(double=number < DOUBLE) for number in range(DOUBLE + SINGLE))
        self.norm, self.modulation = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, rows: Rows, attend: Attend) -> Tensor:
        is_image = rows.text == 0
        by_kind = ByKind.of(is_image)
        x = torch.where(is_image[:, None], self.patches(rows.noisy), self.words(rows.text))
        angles = 1e3 * rows.when * 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        vector = F.silu(self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)))
        for block in self.blocks:
            inputs = (x, vector, rows.place, by_kind, attend)
            x = checkpoint(block, *inputs, use_reentrant=False) if self.checkpointed else block(*inputs)
        shift, scale = self.modulation(vector).chunk(2, dim=-1)
        return self.head(self.norm(x) * (1 + scale) + shift)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full attention of one sequence."""
    return F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Full attention within each of the sequences."""
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([q[:0], *(dense(*part) for part in parts)])


# A microbatch: the sum of squared errors over the patches of this rank


def alone(model: nn.Module, drawn: list[Rows]) -> Tensor:
    """Every sample by itself, on one rank, no torch.distributed."""
    return torch.stack([squared_error(model(each, dense), each.target, each.text == 0) for each in drawn]).sum()


def with_knapformer(model: nn.Module, drawn: list[Rows], balancer: knapformer.GroupBalancer) -> Tensor:
    """Samples routed to their groups, outputs routed back for the loss (KnapFormer, section 3.5)."""
    mine = Rows.join(drawn)
    balancer.plan_routing([len(each) for each in drawn], WIDTH)
    _, noisy, (text, place, when) = balancer.route(mine.noisy, [mine.text, mine.place, mine.when])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seq_lens, q, k, v = balancer.pre_attn(q, k, v)
        return balancer.post_attn(by_sequence(q, k, v, seq_lens))[1]

    _, out = balancer.reverse_route(model(Rows(text, noisy, torch.empty(0), place, when), attend))
    return squared_error(out, mine.target, mine.text == 0)


def with_planner(model: nn.Module, drawn: list[Rows], balancer: SequenceBalancer) -> Tensor:
    """Samples placed by any planner; the loss is computed where the tokens are."""
    documents = [
        (each.text, torch.where(each.text == 0, 0, IGNORED), each.noisy, each.target, each.place, each.when)
        for each in drawn
    ]
    batch: BalancedBatch = balancer(documents)
    noisy, target, place, when = batch.others
    rows = Rows(batch.tokens, noisy, target, place, when)
    out = model(rows, lambda q, k, v: balanced_attention(q, k, v, batch))
    return squared_error(out, target, batch.labels != IGNORED)


def squared_error(out: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """Sum over the rows that count of the mean over their values."""
    return ((out.float() - target.float()).square().mean(dim=-1) * counts).sum()


def make_balancer(topology: str, planner: str) -> knapformer.GroupBalancer | SequenceBalancer:
    """KnapFormer's balancer on a topology, or the balancer of another planner."""
    if not planner:
        return knapformer.GroupBalancer(topology)
    settings = Settings(shift_labels=False)
    return SequenceBalancer.for_model(MODEL, planner=planner, settings=settings)


def train(
    rank: int, size: int, arguments: argparse.Namespace, look: Callable[[nn.Module], None] | None = None
) -> Iterator[tuple[float, float]]:
    """Losses and gradient norms by step, on this rank's part of the samples.

    `look`: is shown the model with its gradients.
    """
    torch.manual_seed(0)
    model = whole = Dit(checkpointed=arguments.checkpoint)
    if arguments.compile:
        for block in whole.blocks:
            block.compile(dynamic=True, backend=arguments.compile)
    if arguments.ddp:
        model = DistributedDataParallel(whole)
    else:
        for block in whole.blocks:
            fully_shard(block)
        fully_shard(whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    balancer = make_balancer(arguments.topology, arguments.planner)
    for step in range(arguments.steps):
        drawn = samples(step, arguments.samples)
        number = sum(int((each.text == 0).sum()) for each in drawn)  # every rank draws all, and takes some
        error = torch.zeros(())
        for part in range(arguments.accumulate):
            mine = drawn[part :: arguments.accumulate][rank::size]
            if isinstance(balancer, SequenceBalancer):
                one = with_planner(model, mine, balancer)
            else:
                one = with_knapformer(model, mine, balancer)
            (one * size / number).backward()  # FSDP and DDP average over ranks
            error += one.detach()
        if look is not None:
            look(whole)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        loss = error / number
        dist.all_reduce(loss)
        yield float(loss), float(norm)


def main() -> None:
    """Train on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="g2n1+g1n2", help="groups of ranks (KnapFormer)")
    parser.add_argument("--planner", default="", help="another planner than KnapFormer's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=12, help="of all ranks, in a step")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing of every block")
    parser.add_argument("--ddp", action="store_true", help="DDP in place of FSDP2")
    parser.add_argument("--compile", default="", metavar="BACKEND", help="torch.compile every block: inductor")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    began = time.perf_counter()
    found = list(tqdm(train(rank, size, arguments), total=arguments.steps, disable=rank > 0, unit="step"))
    if rank == 0:
        table = Table("step", "loss", "gradient norm")
        for step in sorted({0, arguments.steps // 2, arguments.steps - 1}):
            table.add_row(str(step), *(f"{value:.6f}" for value in found[step]))
        how = arguments.planner or f"KnapFormer {arguments.topology}"
        print(f"{how}, {size} ranks, {arguments.steps} steps in {time.perf_counter() - began:.1f} s")
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

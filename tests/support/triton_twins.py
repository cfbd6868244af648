"""Every launch of the Triton mover against the plain one, with TRITON_INTERPRET=1."""

# Tolerances: copies without conversion and additions of single rows are equal bit for bit. A
# conversion to bf16 or fp16 may differ in the last place, since the interpreter cuts off where the
# hardware and torch round. Sums of several rows and merges are in another order: 2e-6 of the
# largest value in fp32, and the last place of a narrower output.

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_balance.ir.program import Kind
from megatron_balance.runtime.lower.memory import AttentionShape, CallForm, layout, unpack
from megatron_balance.runtime.lower.moves import Moved, MoverCall, Site
from megatron_balance.runtime.lower.steps import Packed, RowRun
from megatron_balance.runtime.movers import choose_mover
from megatron_balance.runtime.movers.base import Mover, PlainMover, RowMove, Sent, Space
from megatron_balance.runtime.movers.triton.kernels import AddBlock
from megatron_balance.runtime.movers.triton.mover import TritonMover, _add_tables
from megatron_balance.runtime.movers.triton.variants import build

CPU = torch.device("cpu")
ONE_PLACE = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SUM_TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (rows, heads) of each buffer.
Sizes = dict[int, tuple[int, int]]
few = settings(max_examples=8, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


def packed_of(runs: list[tuple[int, list[int], int, int, int]], num_heads: int) -> Packed:
    # Runs (buffer, buffer rows, head, heads, buffer head) as packed rows; those with the same rows'
    # place share them.
    made: list[RowRun] = []
    at = 0
    for buffer, rows, head, heads, buffer_head in runs:
        consecutive = rows == list(range(rows[0], rows[0] + len(rows))) if rows else True
        start = rows[0] if rows else 0
        index = None if consecutive else np.array(rows, dtype=np.int64)
        made.append(RowRun(at, len(rows), buffer, start, start + len(rows), index, head, heads, buffer_head))
        at += len(rows)
    indices = tuple(None if run.index is None else torch.from_numpy(run.index) for run in made)
    return Packed(tuple(made), at, num_heads, indices, direct=False)


@st.composite
def packings(draw: st.DrawFn, *, distinct: bool, max_runs: int = 4) -> tuple[Packed, Sizes]:
    # `distinct`: no row and head of a buffer is
    # named twice.
    num_heads = draw(st.integers(1, 3))
    sizes = {b: (draw(st.integers(1, 21)), num_heads + draw(st.integers(0, 2))) for b in range(draw(st.integers(1, 3)))}
    runs: list[tuple[int, list[int], int, int, int]] = []
    left = {b: list(range(rows)) for b, (rows, _) in sizes.items()}
    for _ in range(draw(st.integers(1, max_runs))):
        buffer = draw(st.sampled_from(sorted(sizes)))
        if distinct:
            chosen = draw(st.lists(st.sampled_from(left[buffer]), unique=True, max_size=18)) if left[buffer] else []
            left[buffer] = [row for row in left[buffer] if row not in chosen]
        else:
            chosen = draw(st.lists(st.integers(0, sizes[buffer][0] - 1), max_size=18))
        if draw(st.booleans()):
            chosen = sorted(chosen)
        heads = draw(st.integers(1, num_heads))
        head = draw(st.integers(0, num_heads - heads))
        runs.append((buffer, chosen, head, heads, draw(st.integers(0, sizes[buffer][1] - heads))))
    return packed_of(runs, num_heads), sizes


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, strided: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if strided:  # rows with a gap between them
        return torch.randn(shape[0], shape[1] + 1, *shape[2:], generator=generator).to(dtype)[:, 1:]
    return torch.randn(shape, generator=generator).to(dtype)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = max(1e-30, float(expected.abs().max())) if expected.numel() else 1.0
    assert not expected.numel() or float((found.double() - expected.double()).abs().max()) <= tolerance * scale


def compare(results: Sequence[Sequence[Tensor]], tolerance: Callable[[torch.dtype], float]) -> None:
    # What both movers made; `tolerance`: by its type.
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found.isinf(), expected.isinf())
        close(found.masked_fill(found.isinf(), 0), expected.masked_fill(expected.isinf(), 0), tolerance(found.dtype))


def space_of(sizes: Sizes, full: tuple[int, ...], dim: int, dtype: torch.dtype, wide: torch.dtype) -> Space:
    return Space(sizes, full, dim, dtype, wide, lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype))


def block(at: Any) -> Site:
    # A place in the messages' memory.
    return Site("block", at.begin, at.strides[0])


def messages_of(carried: Sequence[tuple[Kind, int, int]], form: CallForm) -> list[tuple[Tensor, ...]]:
    # In one memory.
    size = layout(tuple(carried), form).num_bytes + 32
    return [tuple(one) for one in unpack(torch.zeros(size, dtype=torch.uint8), carried, form)]


dtypes, shapes = st.sampled_from(DTYPES), st.sampled_from([(8,), (16,), (5,), ()])
kinds = st.sampled_from([(a, b) for a in DTYPES for b in (a, torch.float32, torch.bfloat16)])


@few
@given(one=packings(distinct=False), two=packings(distinct=False), tail=shapes, kind=kinds, strided=st.booleans())
def fill(one: tuple, two: tuple, tail: tuple[int, ...], kind: tuple[torch.dtype, torch.dtype], strided: bool) -> None:
    # Queries, keys and values, say: several tensors of different heads in one call.
    results = []
    for mover in movers():
        fills = []
        for seed, (packed, sizes) in enumerate((one, two, two)):
            buffers = {b: values((*size, *tail), kind[0], 7 * seed + b, strided=strided) for b, size in sizes.items()}
            target = torch.zeros(packed.num_rows, packed.num_heads, *tail, dtype=kind[1])
            fills.append(RowMove(packed, tuple(buffers[run.buffer] for run in packed.runs), target))
        mover.fill(fills)
        results.append([f.own for f in fills])
    compare(results, lambda dtype: 0.0 if kind[0] == kind[1] else ONE_PLACE[dtype])


@few
@given(one=packings(distinct=True), two=packings(distinct=True), tail=shapes, kind=kinds)
def place(one: tuple, two: tuple, tail: tuple[int, ...], kind: tuple[torch.dtype, torch.dtype]) -> None:
    compare_placed("place", (one, two), tail, kind, 0.0 if kind[0] == kind[1] else ONE_PLACE[kind[1]])


@few
@given(one=packings(distinct=False, max_runs=6), two=packings(distinct=False), tail=shapes, dtype=dtypes)
def add(one: tuple, two: tuple, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    # Gradients: the rows of a run may repeat, and runs may overlap in some of their heads.
    compare_placed("add", (one, two), tail, (dtype, torch.float32), SUM_TOLERANCE[torch.float32])


def compare_placed(call: str, drawn: tuple, tail: tuple[int, ...], kind: tuple, tolerance: float) -> None:
    results = []
    for mover in movers():
        places, held = [], []
        for seed, (packed, sizes) in enumerate(drawn):
            buffers = {b: values((*size, *tail), kind[1], 7 * seed + b) for b, size in sizes.items()}
            source = values((packed.num_rows, packed.num_heads, *tail), kind[0], 99 + seed)
            places.append(RowMove(packed, tuple(buffers[run.buffer] for run in packed.runs), source))
            held += list(buffers.values())
        getattr(mover, call)(places)
        results.append(held)
    compare(results, lambda _: tolerance)


@few
@given(
    size=st.tuples(st.integers(1, 19), st.integers(1, 4)),
    num_parts=st.integers(1, 8),
    dim=st.sampled_from([1, 5, 16]),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
    data=st.data(),
)
def partials(size: tuple[int, int], num_parts: int, dim: int, dtype: torch.dtype, data: st.DataObject) -> None:
    # Partials of one buffer as they come: of all rows or some, of all heads or some, sent and taken
    # at the end.
    rows, heads = size
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    adds = []
    for seed in range(num_parts):
        chosen = list(range(rows))
        if not data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.integers(0, rows - 1), max_size=25))
        own_heads = heads if data.draw(st.booleans()) else data.draw(st.integers(1, heads))
        head = data.draw(st.integers(0, heads - own_heads))
        # A query of several entries of a launch is several runs there, as `regions.grouped_runs`
        # makes them with `distinct`.
        runs = [chosen] if len(set(chosen)) == len(chosen) else [[row] for row in chosen]
        packed = packed_of([(0, run, 0, own_heads, head) for run in runs], own_heads)
        out = values((packed.num_rows, own_heads, dim), dtype, seed)
        # As FlashAttention leaves it.
        lse = (3 * values((own_heads, packed.num_rows), wide, 50 + seed)).T
        adds.append((packed, out, lse))
    sent = packed_of([(0, data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9)), 0, 1, heads - 1)], 1)
    results = []
    for mover in movers():
        held = mover.partials(space_of({0: (rows, heads)}, (0,), dim, dtype, wide))
        for packed, out, lse in adds:
            held.add(packed, (True,) * len(packed.runs), out.clone(), lse.clone())
        shape = (sent.num_rows, 1)
        nothing = torch.full((*shape, dim), torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=wide)
        message = Sent(sent, *nothing)
        held.send([message])
        results.append((message.out, message.lse, *held.final()))
    compare(results, lambda found: SUM_TOLERANCE[wide] if found == wide else 2 * ONE_PLACE[dtype])


@few
@given(
    packs=st.lists(packings(distinct=True), min_size=2, max_size=10),
    widths=st.sampled_from([(5,), (8,), (16,), (16, 8), (8, 16)]),
    dtype=dtypes,
)
def shared(packs: list, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    # Messages in one memory, whose tables are made ahead: filled, placed and added in one launch
    # where rows and heads allow. Of two widths: the same rows of keys and of values.
    form = CallForm.of(AttentionShape(1, 1, widths[0], widths[-1]), dtype, "fp32")
    kind = Kind.Q if len(widths) == 1 else Kind.KV
    carried = [(kind, packed.num_rows, packed.num_heads) for packed, _ in packs]
    places = layout(tuple(carried), form).places
    moved = tuple(
        Moved(packed, (dtype, dtype, width), own=block(of))
        for (packed, _), parts in zip(packs, places, strict=True)
        for width, of in zip(widths, parts, strict=True)
    )
    dims = [width for _ in packs for width in widths]
    packs = [pack for pack in packs for _ in widths]

    def moves(buffers: Sequence[Any], messages: Sequence[Tensor]) -> list[RowMove]:
        # The rows of each pack between its buffers and its message.
        ends = zip(packs, buffers, messages, strict=True)
        return [RowMove(p, tuple(x[run.buffer] for run in p.runs), m) for (p, _), x, m in ends]

    results = []
    for mover in movers():
        mover.prepare([MoverCall(call, moved) for call in ("fill", "place", "add")], {}, form)
        messages = [x for one in messages_of(carried, form) for x in one]
        of = [
            {b: values((*size, dim), dtype, 7 * seed + b) for b, size in sizes.items()}
            for seed, ((_, sizes), dim) in enumerate(zip(packs, dims, strict=True))
        ]
        mover.fill(moves(of, messages))
        filled = [m.clone() for m in messages]
        for seed, m in enumerate(messages):
            m.copy_(values(tuple(m.shape), dtype, 99 + seed))
        placed, summed = (
            [
                [torch.full((*size, dim), start, dtype=of) for size in sizes.values()]
                for (_, sizes), dim in zip(packs, dims, strict=True)
            ]
            for start, of in ((0.0, dtype), (1.0, torch.float32))
        )
        mover.place(moves(placed, messages))
        mover.add(moves(summed, messages))
        results.append([*filled, *(x for of in (*placed, *summed) for x in of)])
    compare(results, lambda found: SUM_TOLERANCE.get(found, 0.0))


@few
@given(
    packs=st.lists(packings(distinct=False), min_size=1, max_size=6),
    fresh=st.sets(st.integers(0, 2)),
    ahead=st.booleans(),
    dtype=dtypes,
)
def sums(packs: list, fresh: set[int], ahead: bool, dtype: torch.dtype) -> None:
    # Gradients that peers send of the same rows, in one memory, added to the same buffers, of which
    # some were never written. Their table is made ahead, or in the first layer.
    form = CallForm.of(AttentionShape(1, 1, 8, 8), dtype, "fp32")
    carried = [(Kind.Q, packed.num_rows, packed.num_heads) for packed, _ in packs]
    lies = layout(tuple(carried), form).places
    size = {b: tuple(max(sizes.get(b, (1, 1))[i] for _, sizes in packs) for i in (0, 1)) for b in range(3)}
    targets = [tuple(Site(("sum", run.buffer)) for run in packed.runs) for packed, _ in packs]
    new = [tuple(i for i, run in enumerate(packed.runs) if run.buffer in fresh) for packed, _ in packs]
    moved = tuple(
        Moved(p, (dtype, torch.float32, 8), sites, block(at), tuple((i, size[p.runs[i].buffer]) for i in own))
        for (p, _), (at,), own, sites in zip(packs, lies, new, targets, strict=True)
    )
    results = []
    for mover in movers():
        if ahead:
            mover.prepare([MoverCall("add", moved)], {}, form)
        messages = [x for (x,) in messages_of(carried, form)]
        for seed, m in enumerate(messages):
            m.copy_(values(tuple(m.shape), dtype, 99 + seed))
        named = {packed.runs[i].buffer for (packed, _), own in zip(packs, new, strict=True) for i in own}
        held = [torch.full((*size[b], 8), float("nan") if b in named else 1.0) for b in range(3)]
        ends = zip(packs, messages, new, strict=True)
        mover.add([RowMove(p, tuple(held[run.buffer] for run in p.runs), m, own) for (p, _), m, own in ends])
        results.append(held)
    compare(results, SUM_TOLERANCE.__getitem__)


def added_at_once() -> None:
    # Check that gradients of the same rows, in one memory, to a fresh buffer are one launch.
    form, counts = CallForm.of(AttentionShape(2, 2, 16, 16), torch.float32, "fp32"), (3, 5, 2)
    packs = [packed_of([(0, [*range(1, 1 + n)], 0, 2, 0)], 2) for n in counts]
    carried = [(Kind.Q_GRAD, n, 2) for n in counts]
    moved = [
        Moved(p, (form.wide, form.wide, 16), (Site("sum"),), block(at), ((0, (8, 2)),))
        for p, (at,) in zip(packs, layout(tuple(carried), form).places, strict=True)
    ]
    tables = _add_tables(moved, CPU)
    assert len(tables) == 1
    assert len(tables[0].pairs) == 1
    rows = [[0] * 8 for _ in range(2)]
    for each in tables[0].blocks.tolist():
        begin, count = each[AddBlock.TARGET_LIST], each[AddBlock.COUNT]
        for row in tables[0].index[begin : begin + count].tolist():
            rows[0][row] += 1
            rows[1][row] += each[AddBlock.FRESH]
    assert rows == [[1] * 8] * 2  # each is written once, also where nothing is added


def apart() -> None:
    # Keys and values of two widths: the same rows, which lie elsewhere in the messages' memory.
    form, counts = CallForm.of(AttentionShape(2, 2, 16, 8), torch.bfloat16, "fp32"), (3, 5, 2)
    first = [sum(counts[:at]) for at in range(len(counts))]
    packs = [packed_of([(0, [*range(b, b + n)], 0, 2, 0)], 2) for b, n in zip(first, counts, strict=True)]
    carried = [(Kind.KV, n, 2) for n in counts]
    moved = tuple(
        Moved(packed, (form.dtype, form.dtype, width), (Site(name),), block(at))
        for packed, parts in zip(packs, layout(tuple(carried), form).places, strict=True)
        for name, width, at in zip("kv", form.kv_widths, parts, strict=True)
    )
    both = [values((10, 2, width), form.dtype, width) for width in form.kv_widths]
    mover = TritonMover(CPU)
    mover.prepare([MoverCall("fill", moved)], {}, form)
    messages = messages_of(carried, form)
    fills = [RowMove(p, (x,), y) for p, m in zip(packs, messages, strict=True) for x, y in zip(both, m, strict=True)]
    mover.fill(fills)
    for (begin, n), message in zip(zip(first, counts, strict=True), messages, strict=True):
        for x, y in zip(both, message, strict=True):
            assert torch.equal(x[begin : begin + n], y)


@few
@given(
    rows=st.lists(st.integers(1, 12), min_size=3, max_size=6),
    heads=st.integers(1, 3),
    num_parts=st.integers(1, 4),
    dtype=dtypes,
    data=st.data(),
)
def sent(rows: list[int], heads: int, num_parts: int, dtype: torch.dtype, data: st.DataObject) -> None:
    # Outputs of a head exchange: a buffer for each peer, partials over all of them, and a message
    # to each in one memory.
    form = CallForm.of(AttentionShape(heads, heads, 24, 16), dtype, "fp32")
    sizes = {b: (n, heads) for b, n in enumerate(rows)}
    parts = []
    for _ in range(num_parts):
        named = {b: data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n)) for b, n in enumerate(rows)}
        order = data.draw(st.permutations([b for b in named if named[b]])) or [0]
        parts.append(packed_of([(b, named[b] or [0], 0, heads, 0) for b in order], heads))
    orders = [list(range(n))[:: data.draw(st.sampled_from([1, -1]))] for n in rows]
    out = [packed_of([(b, order, 0, heads, 0)], heads) for b, order in enumerate(orders)]
    carried = [(Kind.OUT, p.num_rows, heads) for p in out]
    places = layout(tuple(carried), form).places
    ends = [Moved(p, own=block(at)) for p, both in zip(out, places, strict=True) for at in both]
    results = []
    for mover in movers():
        moves = [*(MoverCall("partial", (Moved(p),)) for p in parts), MoverCall("send", tuple(ends))]
        mover.prepare(moves, sizes, form)
        wide = torch.float32
        held = mover.partials(space_of(sizes, tuple(sizes), 16, dtype, wide))
        for seed, p in enumerate(parts):
            lse = (3 * values((heads, p.num_rows), wide, 50 + seed)).T
            held.add(p, (True,) * len(p.runs), values((p.num_rows, heads, 16), dtype, seed), lse)
        messages = messages_of(carried, form)
        made = [Sent(p, *m) for p, m in zip(out, messages, strict=True)]
        assert not isinstance(mover, TritonMover) or mover.send_table(made) is not None, "messages one by one"
        held.send(made)
        results.append([x for m in messages for x in m])
    compare(results, lambda found: SUM_TOLERANCE.get(found, 2 * ONE_PLACE[dtype]))


def empty() -> None:
    # Check that empty moves do nothing, also without a tensor to do it to.
    nothing = packed_of([(0, [], 0, 2, 0)], 2)
    for mover in movers():
        x, y = torch.zeros(0, 2, 4), torch.ones(3, 2, 4)
        mover.fill([])
        mover.fill([RowMove(nothing, (y,), x)])
        mover.place([RowMove(nothing, (y,), x)])
        mover.add([RowMove(nothing, (y,), x)])
        assert torch.equal(y, torch.ones(3, 2, 4))
        out, lse = mover.partials(space_of({0: (3, 2)}, (0,), 4, torch.bfloat16, torch.float32)).final()
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full((3, 2), -torch.inf))
        out, lse = mover.partials(space_of({0: (0, 2)}, (), 4, torch.float32, torch.float32)).final()
        assert (tuple(out.shape), tuple(lse.shape)) == ((0, 2, 4), (0, 2))


def built() -> None:
    # Check that what a job builds at its start runs on nothing: latents, and gradients in bf16.
    assert build(CPU, torch.bfloat16, AttentionShape(8, 1, 48, 32, (96, 16)), "bf16") == 16


def movers() -> tuple[Mover, Mover]:
    return choose_mover("triton", CPU), PlainMover()


def main() -> None:
    passed = {}
    for test in (fill, place, add, partials, shared, sums, added_at_once, apart, sent, empty, built):
        test()
        passed[test.__name__] = True
    print(json.dumps(passed))  # noqa: T201  read by the test that started this process


if __name__ == "__main__":
    main()

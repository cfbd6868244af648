"""Triton kernels that move rows: one launch for many tensors. Written for Hopper.

`movers.triton.mover` launches them. Every tensor is rows of heads of `dim` elements, the last two
without gaps, rows at any stride. A table of blocks, made once for a bound plan
(`movers.triton.mover`), says which rows go where, so that a launch takes no work on the host but
its arguments. Offsets are of 64 bits: rows x stride exceed 2**31 elements at 64k tokens of 256
heads of 128. No atomics: each destination row is written by one program.

Triton compiles a kernel anew for every number of tensors, type, alignment, constant, and integer
that is 1 or a multiple of 16. Here those are few and known (`movers.triton.mover.build`): a launch has
tensors of one kind, in a fixed number of places; integers are never specialised. `VEC`: elements of
16 bytes, where `dim` is a multiple, else 1. Strides come in units of it, and data begins at a
multiple of 16 bytes, so the compiler can use accesses of 16 bytes. Integers in tuples come as
`disguised` ones, which are odd and more than 1: Triton 3.7 specialises on those that are 1 or
multiples of 16, also where it is told not to.
"""

import triton
import triton.language as tl

BLOCK_ROWS = 8  # rows of one block of a table; a program moves one block by BLOCK_COLS elements


class CopyBlock:
    """Columns of a block of `copy_rows`, which reads them by number.

    A list begins there in the index; -1: rows from the row beside it on. The begins are where the
    rows' tensors lie behind the pair's, in units of 16 bytes.
    """

    WIDTH = 11
    PAIR, SOURCE_ROW, SOURCE_LIST, TARGET_ROW, TARGET_LIST, COUNT = range(6)
    SOURCE_HEAD, TARGET_HEAD, HEADS, SOURCE_BEGIN, TARGET_BEGIN = range(6, 11)


class AddBlock:
    """Columns of a block of `add_rows`, which reads them by number.

    Lists in the index: the target rows, the place of the first source of each, the number of its
    sources. A first source is a place in the list of source rows, also in the index; `BEHIND` it is
    where that row's tensor begins. Begins as in `CopyBlock`. `FRESH` 1: the target rows were never
    written, and are not read.
    """

    WIDTH = 12
    PAIR, TARGET_LIST, FIRST_LIST, NUMBER_LIST, COUNT, MOST_SOURCES = range(6)
    SOURCE_HEAD, TARGET_HEAD, HEADS, BEHIND, TARGET_BEGIN, FRESH = range(6, 12)


def disguised(value: int) -> int:
    """An integer in a tuple of a launch, which is not negative."""
    return 2 * value + 3


@triton.jit
def plain(value):
    """The integer behind a disguised one."""
    return (value - 3) >> 1


@triton.jit
def elements(heads, DIM: tl.constexpr, VEC: tl.constexpr):
    """Elements of `heads` heads; the compiler may rely on a multiple of VEC."""
    return tl.multiple_of(heads * DIM, VEC)


@triton.jit
def units(begin, pointer):
    """Elements of `pointer` in `begin` units of 16 bytes."""
    return begin.to(tl.int64) * (128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit(do_not_specialize=["source_strides", "target_strides", "blocks", "index"])
def copy_rows(  # noqa: PLR0913, PLR0917  a kernel's arguments are what it touches
    sources,
    targets,
    source_strides,
    target_strides,
    blocks,
    index,
    DIM: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """target[pair][rows, heads] = source[pair][rows, heads], converted, for every `CopyBlock`."""
    # `CopyBlock.WIDTH`, and below its columns: Triton's functions read no numbers of the module.
    block = blocks + tl.program_id(0).to(tl.int64) * 11
    pair = tl.load(block)
    source_row, source_at = tl.load(block + 1), tl.load(block + 2)
    target_row, target_at = tl.load(block + 3), tl.load(block + 4)
    count = tl.load(block + 5)
    source_head, target_head, heads = tl.load(block + 6), tl.load(block + 7), tl.load(block + 8)
    source_begin, target_begin = tl.load(block + 9), tl.load(block + 10)
    row = tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = row < count
    from_row = source_row + row
    if source_at >= 0:
        from_row = tl.load(index + source_at + row, mask=live, other=0)
    to_row = target_row + row
    if target_at >= 0:
        to_row = tl.load(index + target_at + row, mask=live, other=0)
    for i in tl.static_range(len(sources)):  # pyright: ignore[reportGeneralTypeIssues]
        if pair == i:
            mask = live[:, None] & (col < elements(heads, DIM, VEC))[None, :]
            from_col = elements(source_head, DIM, VEC) + col
            to_col = elements(target_head, DIM, VEC) + col
            source = sources[i] + units(source_begin, sources[i])
            target = targets[i] + units(target_begin, targets[i])
            moved = tl.load(
                source + from_row.to(tl.int64)[:, None] * plain(source_strides[i]) * VEC + from_col[None, :], mask=mask
            )
            place = target + to_row.to(tl.int64)[:, None] * plain(target_strides[i]) * VEC + to_col[None, :]
            tl.store(place, moved.to(targets[i].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["source_strides", "target_strides", "blocks", "index"])
def add_rows(  # noqa: PLR0913, PLR0917
    sources,
    targets,
    source_strides,
    target_strides,
    blocks,
    index,
    DIM: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """target[pair][rows, heads] += sums of source rows in the target's type, for every `AddBlock`.

    A target row is read and written once, by one program, which takes its source rows in the order
    of the table. Of a fresh one it is only written.
    """
    # `AddBlock.WIDTH`, and below its columns.
    block = blocks + tl.program_id(0).to(tl.int64) * 12
    pair = tl.load(block)
    target_at, first_at, number_at = tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    count, most = tl.load(block + 4), tl.load(block + 5)
    source_head, target_head, heads = tl.load(block + 6), tl.load(block + 7), tl.load(block + 8)
    behind, target_begin, fresh = tl.load(block + 9), tl.load(block + 10), tl.load(block + 11)
    row = tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    live = row < count
    to_row = tl.load(index + target_at + row, mask=live, other=0)
    first = tl.load(index + first_at + row, mask=live, other=0)
    number = tl.load(index + number_at + row, mask=live, other=0)
    for i in tl.static_range(len(sources)):  # pyright: ignore[reportGeneralTypeIssues]
        if pair == i:
            within = (col < elements(heads, DIM, VEC))[None, :]
            from_col = elements(source_head, DIM, VEC) + col
            to_col = elements(target_head, DIM, VEC) + col
            target = targets[i] + units(target_begin, targets[i])
            place = target + to_row.to(tl.int64)[:, None] * plain(target_strides[i]) * VEC + to_col[None, :]
            total = tl.load(place, mask=live[:, None] & within & (fresh == 0), other=0.0)
            for j in range(most):
                some = j < number
                from_row = tl.load(index + first + j, mask=some, other=0)
                begin = tl.load(index + first + behind + j, mask=some, other=0)
                source = sources[i] + units(begin, sources[i])[:, None]
                added = tl.load(
                    source + from_row.to(tl.int64)[:, None] * plain(source_strides[i]) * VEC + from_col[None, :],
                    mask=some[:, None] & within,
                    other=0.0,
                )
                total += added.to(targets[i].dtype.element_ty)
            tl.store(place, total, mask=live[:, None] & within)


# Compiled once for all rows and heads.
@triton.jit(
    do_not_specialize=[
        *("lses", "maps", "mapped", "out_rows", "out_heads", "lse_rows", "lse_heads", "first_heads", "num_heads"),
        *("own_heads", "rows", "listed", "lse", "out_stride", "lse_stride", "count", "first_row", "first_head"),
        *("out_begins", "lse_begins", "placed"),
    ]
)
def merge_rows(  # noqa: PLR0913, PLR0917
    outs,
    lses,
    maps,
    mapped,
    out_rows,
    out_heads,
    lse_rows,
    lse_heads,
    first_heads,
    num_heads,
    own_heads,
    rows,
    listed,
    out,
    lse,
    out_stride,
    lse_stride,
    count,
    first_row,
    first_head,
    out_begins,
    lse_begins,
    placed,
    DIM: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Partials of the same queries merged by LSE, written once in the type of `out`.

    Program (i, h): head h of rows [i x ROWS, ...) of the result. Row t of it is row `rows[t]` of
    the buffer where `listed` is 1, else `first_row` + t, and head h the buffer's `first_head` + h. A
    partial r has buffer row b at row `maps[r][b]` (-1: nowhere; `mapped[r]` 0: at b) and heads
    [first_heads[r], + num_heads[r]) of the buffer at `own_heads[r]`; none: the place is empty. Where
    there is no partial, the output is zero and LSE -inf. Rows of the result follow one another or,
    where `placed` is 1, row t of the output begins `out_begins[t]` units of 16 bytes behind the first,
    and its LSE `lse_begins[t]` elements.
    """
    wide = lse.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    col = tl.arange(0, COLS)
    live = row < count
    at = tl.where(listed != 0, tl.load(rows + row, mask=live & (listed != 0), other=0), first_row + row)
    held = first_head + head
    peak = tl.full([ROWS], float("-inf"), wide)
    total = tl.zeros([ROWS], wide)
    merged = tl.zeros([ROWS, COLS], wide)
    for r in tl.static_range(len(outs)):  # pyright: ignore[reportGeneralTypeIssues]
        own = held - plain(first_heads[r])
        if (own >= 0) & (own < plain(num_heads[r])):
            found = tl.load(maps[r] + at, mask=live & (plain(mapped[r]) != 0), other=-1)
            source = tl.where(plain(mapped[r]) != 0, found.to(tl.int64), at.to(tl.int64))
            here = live & (source >= 0)
            place = (own + plain(own_heads[r])).to(tl.int64)
            its = tl.load(
                lses[r] + source * plain(lse_rows[r]) + place * plain(lse_heads[r]), mask=here, other=float("-inf")
            )
            its = its.to(wide)
            part = tl.load(
                outs[r] + source[:, None] * plain(out_rows[r]) * VEC + place * plain(out_heads[r]) * VEC + col[None, :],
                mask=here[:, None] & (col < DIM)[None, :],
                other=0.0,
            )
            top = tl.maximum(peak, its)
            base = tl.where(top == float("-inf"), 0.0, top)
            kept, weight = tl.exp(peak - base), tl.exp(its - base)
            merged = merged * kept[:, None] + part.to(wide) * weight[:, None]
            total = total * kept + weight
            peak = top
    some = total > 0
    merged = merged / tl.where(some, total, 1.0)[:, None]
    out_row = row.to(tl.int64) * plain(out_stride[0]) * VEC
    lse_row = row.to(tl.int64) * plain(lse_stride[0])
    if placed != 0:
        out_row = units(tl.load(out_begins + row, mask=live, other=0), out)
        lse_row = tl.load(lse_begins + row, mask=live, other=0).to(tl.int64)
    tl.store(
        lse + lse_row + head * plain(lse_stride[1]),
        tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf")),
        mask=live,
    )
    target = out + out_row[:, None] + head.to(tl.int64) * plain(out_stride[1]) * VEC + col[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=live[:, None] & (col < DIM)[None, :])

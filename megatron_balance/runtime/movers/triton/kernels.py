"""Triton kernels that move rows: one launch for many tensors. Written for Hopper.

`movers.triton.mover` launches them. Every tensor is rows of heads of `dim` elements, the last two
without gaps, rows at any stride. A table of blocks, made once for a bound plan
(`movers.triton.mover`), says which rows go where, so that a launch takes no work on the host but
its arguments. Offsets are of 64 bits: rows x stride exceed 2**31 elements at 64k tokens of 256
heads of 128. No atomics: each destination row is written by one program.

Triton compiles a kernel anew for every number of tensors, type, alignment, constant, and integer
that is 1 or a multiple of 16. Here those are few and known (`movers.triton.variants`): a launch has
tensors of one kind, in a fixed number of places; integers are never specialised. `VEC`: elements of
16 bytes, or as many of those as divide a head's. Widths and strides come in units of it, and data
begins at a multiple of 16 bytes, so the compiler can use accesses of 16 bytes. Integers in tuples
come as `disguised` ones, which are odd and more than 1: Triton 3.7 specialises on those that are 1
or multiples of 16, also where it is told not to.
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


class MapHeader:
    """Integers in front of a row map, which `merge_rows` reads by number.

    Of the buffer's heads [`BUFFER_HEAD`, + `NUM_HEADS`) are those from `HEAD` on of the partial's
    tensors, of `ROWS` rows and `HEADS` heads. `MAPPED` 1: behind the header stands the partial's row
    of each row of the buffer, -1: nowhere. 0: rows are the buffer's, and nothing stands there.
    """

    WIDTH = 8
    BUFFER_HEAD, NUM_HEADS, HEAD, MAPPED, ROWS, HEADS = range(6)


def disguised(value: int) -> int:
    """An integer in a tuple of a launch, which is not negative."""
    return 2 * value + 3


@triton.jit
def plain(value):
    """The integer behind a disguised one."""
    return (value - 3) >> 1


@triton.jit
def chosen(values, number):
    """The value of this number in a tuple. A branch for each would be the kernel's body as often."""
    found = values[0]
    for i in tl.static_range(1, len(values)):  # pyright: ignore[reportGeneralTypeIssues]
        found = tl.where(number == i, values[i], found)
    return found


@triton.jit
def units(begin, pointer):
    """Elements of `pointer` in `begin` units of 16 bytes."""
    return begin.to(tl.int64) * (128 // pointer.dtype.element_ty.primitive_bitwidth)


@triton.jit(do_not_specialize=["source_strides", "target_strides", "blocks", "index", "width"])
def copy_rows(  # noqa: PLR0913, PLR0917  a kernel's arguments are what it touches
    sources,
    targets,
    source_strides,
    target_strides,
    blocks,
    index,
    width,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """target[pair][rows, heads] = source[pair][rows, heads], converted, for every `CopyBlock`.

    `width`: of a head, in units of VEC.
    """
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
    mask = live[:, None] & (col < heads * width * VEC)[None, :]
    from_col = source_head * width * VEC + col
    to_col = target_head * width * VEC + col
    source = chosen(sources, pair) + units(source_begin, sources[0])
    target = chosen(targets, pair) + units(target_begin, targets[0])
    from_stride, to_stride = plain(chosen(source_strides, pair)), plain(chosen(target_strides, pair))
    moved = tl.load(source + from_row.to(tl.int64)[:, None] * from_stride * VEC + from_col[None, :], mask=mask)
    place = target + to_row.to(tl.int64)[:, None] * to_stride * VEC + to_col[None, :]
    tl.store(place, moved.to(targets[0].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["source_strides", "target_strides", "blocks", "index", "width"])
def add_rows(  # noqa: PLR0913, PLR0917
    sources,
    targets,
    source_strides,
    target_strides,
    blocks,
    index,
    width,
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
    within = (col < heads * width * VEC)[None, :]
    from_col = source_head * width * VEC + col
    to_col = target_head * width * VEC + col
    source = chosen(sources, pair)
    target = chosen(targets, pair) + units(target_begin, targets[0])
    from_stride, to_stride = plain(chosen(source_strides, pair)), plain(chosen(target_strides, pair))
    place = target + to_row.to(tl.int64)[:, None] * to_stride * VEC + to_col[None, :]
    total = tl.load(place, mask=live[:, None] & within & (fresh == 0), other=0.0)
    for j in range(most):
        some = j < number
        from_row = tl.load(index + first + j, mask=some, other=0)
        begin = tl.load(index + first + behind + j, mask=some, other=0)
        at = units(begin, sources[0]) + from_row.to(tl.int64) * from_stride * VEC
        added = tl.load(source + at[:, None] + from_col[None, :], mask=some[:, None] & within, other=0.0)
        total += added.to(targets[0].dtype.element_ty)
    tl.store(place, total, mask=live[:, None] & within)


@triton.jit
def weighed(peak, total, merged, lse, part):
    """Sums of partials weighed by exp(LSE - `peak`), `total` [N] and `merged` [N, V], and one more."""
    top = tl.maximum(peak, lse)
    base = tl.where(top == float("-inf"), 0.0, top)
    kept, weight = tl.exp(peak - base), tl.exp(lse - base)
    return top, total * kept + weight, merged * kept[:, None] + part * weight[:, None]


# Compiled once for all rows and heads.
@triton.jit(
    do_not_specialize=[
        *("lses", "maps", "by_head", "num_parts", "sum_lse", "sum_heads", "rows", "listed", "lse", "out_row"),
        *("out_head", "lse_row", "lse_head", "count", "first_row", "first_head", "out_begins", "lse_begins"),
        *("placed", "width"),
    ]
)
def merge_rows(  # noqa: PLR0913, PLR0917
    outs,
    lses,
    maps,
    by_head,
    num_parts,
    sum_out,
    sum_lse,
    sum_heads,
    rows,
    listed,
    out,
    lse,
    out_row,
    out_head,
    lse_row,
    lse_head,
    count,
    first_row,
    first_head,
    out_begins,
    lse_begins,
    placed,
    width,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Partials of the same queries merged by LSE, written once in the type of `out`.

    Program (i, h): head h of rows [i x ROWS, ...) of the result. Row t of it is row `rows[t]` of
    the buffer where `listed` is 1, else `first_row` + t, and head h the buffer's `first_head` + h.
    The first is `sum_out` where `sum_heads` is not 0, with all rows and so many heads. What another
    holds, and where, is in `maps[r]` (`MapHeader`); both have no gaps, LSE by row or, where bit r of
    `by_head` is 1, by head. Where there is no partial, the output is zero and LSE -inf. `out_row` to
    `lse_head`: strides, of the output in units of VEC, as `width` of a head. Rows of the result
    follow one another or, where `placed` is 1, row t of the output begins `out_begins[t]` units of 16
    bytes behind the first, and its LSE `lse_begins[t]` elements.
    """
    wide = lse.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    col = tl.arange(0, COLS)
    live = row < count
    within = (col < width * VEC)[None, :]
    at = tl.where(listed != 0, tl.load(rows + row, mask=live & (listed != 0), other=0), first_row + row).to(tl.int64)
    held = first_head + head
    first = live & (sum_heads > 0)
    before = at * sum_heads + held
    peak = tl.load(sum_lse + before, mask=first, other=float("-inf"))
    total = tl.where(peak == float("-inf"), 0.0, 1.0).to(wide)
    merged = (
        tl.load(sum_out + before[:, None] * width * VEC + col[None, :], mask=first[:, None] & within, other=0.0)
        * total[:, None]
    )
    for r in range(num_parts):
        of_part = chosen(maps, r)
        # `MapHeader`: its columns in order.
        own = held - tl.load(of_part)
        some = live & (own >= 0) & (own < tl.load(of_part + 1))
        own += tl.load(of_part + 2)
        mapped, its_rows, its_heads = tl.load(of_part + 3), tl.load(of_part + 4), tl.load(of_part + 5)
        found = tl.load(of_part + 8 + at, mask=some & (mapped != 0), other=-1).to(tl.int64)
        source = tl.where(mapped != 0, found, at)
        here = some & (source >= 0)
        place = source * its_heads + own
        of_lse = tl.where(((by_head >> r) & 1) != 0, own.to(tl.int64) * its_rows + source, place)
        its = tl.load(chosen(lses, r) + of_lse, mask=here, other=float("-inf"))
        part = tl.load(
            chosen(outs, r) + place[:, None] * width * VEC + col[None, :], mask=here[:, None] & within, other=0.0
        )
        peak, total, merged = weighed(peak, total, merged, its.to(wide), part.to(wide))
    some = total > 0
    merged = merged / tl.where(some, total, 1.0)[:, None]
    to_row = row.to(tl.int64) * out_row * VEC
    to_lse = row.to(tl.int64) * lse_row
    if placed != 0:
        to_row = units(tl.load(out_begins + row, mask=live, other=0), out)
        to_lse = tl.load(lse_begins + row, mask=live, other=0).to(tl.int64)
    tl.store(
        lse + to_lse + head * lse_head,
        tl.where(some, peak + tl.log(tl.where(some, total, 1.0)), float("-inf")),
        mask=live,
    )
    # Triton 3.6 forgets behind a branch what rows begin at multiples of, and stores single elements.
    aligned: tl.constexpr = VEC if VEC * out.dtype.element_ty.primitive_bitwidth <= 128 else VEC // 2
    begin = tl.multiple_of(to_row[:, None] + head.to(tl.int64) * out_head * VEC, (1, aligned))
    tl.store(out + begin + col[None, :], merged.to(out.dtype.element_ty), mask=live[:, None] & within)

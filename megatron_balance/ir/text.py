"""Programs as text that parses back: `parse(text(p)) == p`. Small programs in tests and every error
message use it.

    program lengths 1024 heads 8 kv_heads 2 policy keep
    owner r0 s0[0:512)
    owner r1 s0[512:1024)
    forward
    exchange 0 p2p
      r1 <- r0 kv s0[0:512)
    attend r1
      q s0[512:1024) over s0[0:512) s0[512:1024)
    merge r1
      out s0[512:1024)

Heads are written, as `h[0:4)` behind a region, only where a region has not all of them. A routed
exchange has a line a pair of ranks with the proxies of each piece, `r4 <- r3 via r2>r6 r3>r7`. A
program with a remap says `remap_in N` behind its policy, one whose mask is not causal `mask M`
behind that. Under a forest the next lines are the trees, a segment by its tokens and the one it is
below, with `f` where it is full: `tree s0 8 3<0 4f<0`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, Generic, TypeVar, assert_never

from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.columns import Fragment, Neighbours, Pair, Route, Rows, Transfer, Value
from megatron_balance.ir.forest import Forest, Segment, checked
from megatron_balance.ir.forest import named as forest_named
from megatron_balance.ir.mask import CAUSAL, Mask, mask_named
from megatron_balance.ir.program import COLLECTIVES, KEY_SIDE, Attend, AttendGrad, Exchange, Kind, Merge, Op, Program
from megatron_balance.ir.recurrent import STATE_KINDS, Compose, RecurrentKind, RecurrentOp, RecurrentProgram

KIND_NAMES = {
    Kind.Q: "q",
    Kind.KV: "kv",
    Kind.OUT: "out",
    Kind.OUT_GRAD: "dout",
    Kind.Q_GRAD: "dq",
    Kind.KV_GRAD: "dkv",
}
_RECURRENT_NAMES: dict[int, str] = {
    RecurrentKind.ROWS: "rows",
    RecurrentKind.SUMMARY: "summary",
    RecurrentKind.ROWS_GRAD: "drows",
    RecurrentKind.SUMMARY_GRAD: "dsummary",
}
_SPAN = r"s(\d+)\[(\d+):(\d+)\)"
_HEADS = r"(?: h\[(\d+):(\d+)\))?"
_REGION = re.compile(_SPAN + _HEADS)
_TRANSFER = re.compile(r"r(\d+) <- r(\d+) (\w+) (.+)")
_NEIGHBOURS = re.compile(rf"(\w+) {_SPAN} \+ s\2\[\4:(\d+)\){_HEADS}")
_SEGMENT = re.compile(r"(\d+)(f?)(?:<(\d+))?")
_ROUTE = re.compile(r"r(\d+) <- r(\d+) via((?: r\d+>r\d+)+)")


def text(program: Program | RecurrentProgram) -> str:
    """The whole program, one header line an op and one indented line a row."""
    if isinstance(program, RecurrentProgram):
        kind, trees = "recurrent", program.trees
        facts = f"heads {program.num_heads} halo {program.halo}"
        phases = [[recurrent_lines(op, program.num_heads) for op in ops] for ops in (program.forward, program.backward)]
    else:
        kind, trees = "program", program.mask.trees if isinstance(program.mask, Forest) else ()
        heads = (program.num_heads, program.num_kv_heads)
        facts = f"heads {heads[0]} kv_heads {heads[1]} policy {program.policy or 'none'}"
        facts += f" remap_in {program.remap_in}" if program.remap_in else ""
        facts += f" mask {program.mask.name}" if program.mask != CAUSAL else ""
        phases = [[op_lines(op, *heads) for op in ops] for ops in (program.forward, program.backward)]
    lines = [" ".join([f"{kind} lengths", *map(str, program.lengths), facts])]
    lines += [" ".join([f"tree s{seq}", *map(_segment_text, tree)]) for seq, tree in enumerate(trees)]
    for rank, owned in enumerate(program.owned):
        lines.append(" ".join([f"owner r{rank}", *(f"s{s}[{a}:{b})" for s, a, b in owned)]))
    for name, ops in zip(("forward", "backward"), phases, strict=True):
        lines += [name, *chain.from_iterable(ops)]
    return "\n".join(lines) + "\n"


def op_lines(op: Op, num_heads: int, num_kv_heads: int) -> Iterator[str]:
    """Header and rows of one op."""

    def region(kind: int, seq: int, start: int, stop: int, head_start: int, head_stop: int) -> str:
        whole = num_kv_heads if kind in KEY_SIDE else num_heads
        heads = "" if (head_start, head_stop) == (0, whole) else f" h[{head_start}:{head_stop})"
        return f"s{seq}[{start}:{stop}){heads}"

    match op:
        case Exchange(exchange_id, transfers, collective, group, routes):
            yield " ".join([f"exchange {exchange_id} {collective}", *(f"r{r}" for r in group)])
            for kind, seq, start, stop, h0, h1, src, dst in transfers:
                yield f"  r{dst} <- r{src} {KIND_NAMES[Kind(kind)]} {region(kind, seq, start, stop, h0, h1)}"
            for (src, dst), pieces in groupby(routes, key=lambda row: row[Route.PAIR]):
                proxies = (f"r{row[Route.SEND_PROXY]}>r{row[Route.RECEIVE_PROXY]}" for row in pieces)
                yield f"  r{dst} <- r{src} via {' '.join(proxies)}"
        case Attend(rank, pairs) | AttendGrad(rank, pairs):
            yield f"{'attend' if isinstance(op, Attend) else 'attend_grad'} r{rank}"
            for query, rows in groupby(pairs, key=lambda row: row[Pair.QUERY]):
                keys = " ".join(region(Kind.KV, row[Pair.SEQ], *row[Pair.KEY_COLUMNS]) for row in rows)
                yield f"  q {region(Kind.Q, *query)} over {keys}"
        case Merge(rank, values):
            yield f"merge r{rank}"
            for kind, *rest in values:
                yield f"  {KIND_NAMES[Kind(kind)]} {region(kind, *rest)}"
        case _:
            assert_never(op)


def recurrent_lines(op: RecurrentOp, num_heads: int) -> Iterator[str]:
    """As `op_lines`, of recurrent layers."""

    def heads(kind: int, first: int, last: int) -> str:
        whole = num_heads if kind in STATE_KINDS else 1
        return "" if (first, last) == (0, whole) else f" h[{first}:{last})"

    def name(kind: int) -> str:  # of one that is not there, for what complains of it, its number
        return _RECURRENT_NAMES.get(kind, f"kind_{kind}")

    match op:
        case Exchange():
            yield f"exchange {op.id}"
            for kind, seq, start, stop, h0, h1, src, dst in op.transfers:
                yield f"  r{dst} <- r{src} {name(kind)} s{seq}[{start}:{stop}){heads(kind, h0, h1)}"
        case Compose():
            yield f"compose r{op.rank}"
            for kind, seq, start, middle, stop, h0, h1 in op.rows:
                both = f"s{seq}[{start}:{middle}) + s{seq}[{middle}:{stop})"
                yield f"  {name(kind)} {both}{heads(kind, h0, h1)}"
        case _:
            assert_never(op)


# More digits than any position, rank or id has; some of so many do not fit 64 bits.
_BEYOND = re.compile(r"\d{19}")


def parse(source: str) -> Program:
    """The program that `text` wrote; InvalidProgramError names the line that is not of this form."""
    return _AttentionText(source, KIND_NAMES).program()


def parse_recurrent(source: str) -> RecurrentProgram:
    """As `parse`, of recurrent layers."""
    return _RecurrentText(source, _RECURRENT_NAMES).program()


_Op = TypeVar("_Op")


class _TextParser(Generic[_Op]):
    """All that programs of both kinds have in common."""

    ops = ""  # their names, for what complains

    def __init__(self, source: str, names: Mapping[Any, str]) -> None:
        self.kinds = {name: kind for kind, name in names.items()}
        self.lines = [(n, line.rstrip()) for n, line in enumerate(source.splitlines(), 1) if line.strip()]
        if _BEYOND.search(source):
            beyond = next(each for each in self.lines if _BEYOND.search(each[1]))
            raise _wrong(*beyond, "expected numbers of at most 18 digits")

    def op(self, number: int, header: str, rows: list[tuple[int, str]]) -> _Op:
        raise NotImplementedError

    def heads(self, kind: int) -> int:
        # Heads of a region that has all of them.
        raise NotImplementedError

    def head(self, form: str, wanted: str) -> tuple[list[str], tuple[int, ...], list[list[Segment]]]:
        # What the first line says behind the lengths, these, and the trees behind it, which are taken
        # away.
        number, line = self.lines[0] if self.lines else (1, "")
        match = re.fullmatch(rf"\s*{form}", line)
        if match is None:
            raise _wrong(number, line, f"expected '{wanted}'")
        trees: list[list[Segment]] = []
        while len(self.lines) > 1 and self.lines[1][1].startswith("tree "):
            trees.append(_tree(*self.lines.pop(1), len(trees)))
        lengths, *facts = match.groups()
        return facts, tuple(map(int, lengths.split())), trees

    def phases(self) -> tuple[tuple[Rows, ...], tuple[_Op, ...], tuple[_Op, ...]]:
        # Owned rows, and the ops of both phases.
        owned: list[Rows] = []
        ops: dict[str, list[_Op]] = {"forward": [], "backward": []}
        phase = "forward"
        for number, header, rows in self.blocks():
            words = header.split()
            if rows and (words[0] == "owner" or header in ops):
                raise _wrong(*rows[0], f"a row belongs to an {self.ops}")
            if words[0] == "owner":
                if words[1:2] != [f"r{len(owned)}"]:
                    raise _wrong(number, header, f"owners are listed in order; expected r{len(owned)}")
                spans = [self.region(number, 0, word)[: Fragment.WIDTH] for word in words[2:]]
                owned.append(Rows.of(Fragment.WIDTH, spans))
            elif header in ops:
                phase = header
            else:
                ops[phase].append(self.op(number, header, rows))
        return tuple(owned), tuple(ops["forward"]), tuple(ops["backward"])

    def blocks(self) -> Iterator[tuple[int, str, list[tuple[int, str]]]]:
        at = 1
        while at < len(self.lines):
            number, header = self.lines[at]
            at += 1
            rows: list[tuple[int, str]] = []
            while at < len(self.lines) and self.lines[at][1].startswith("  "):
                rows.append((self.lines[at][0], self.lines[at][1].strip()))
                at += 1
            yield number, header.strip(), rows

    def transfers(self, rows: list[tuple[int, str]]) -> Rows:
        return Rows.of(Transfer.WIDTH, [self.transfer(*row) for row in rows])

    def transfer(self, number: int, line: str) -> tuple[int, ...]:
        match = _TRANSFER.fullmatch(line)
        if match is None or match[3] not in self.kinds:
            raise _wrong(number, line, "expected 'rD <- rS kind sN[a:b)'")
        kind = self.kinds[match[3]]
        return (kind, *self.region(number, kind, match[4]), int(match[2]), int(match[1]))

    def region(self, number: int, kind: int, line: str) -> tuple[int, int, int, int, int]:
        match = _REGION.fullmatch(line.strip())
        if match is None:
            raise _wrong(number, line, "expected a region like s0[0:8) or s0[0:8) h[0:2)")
        return int(match[1]), int(match[2]), int(match[3]), *self.span(kind, match[4], match[5])

    def span(self, kind: int, first: str | None, last: str | None) -> tuple[int, int]:
        return (int(first), int(last)) if first and last else (0, self.heads(kind))

    def rank(self, number: int, word: str) -> int:
        if not re.fullmatch(r"r\d+", word):
            raise _wrong(number, word, "expected a rank like r0")
        return int(word[1:])


class _AttentionText(_TextParser[Op]):
    ops = "exchange, attend, attend_grad or merge"
    num_heads = num_kv_heads = 0

    def program(self) -> Program:
        form = r"program lengths((?: \d+)*) heads (\d+) kv_heads (\d+) policy (\w+)(?: remap_in (\d+))?(?: mask (\w+))?"
        wanted = "program lengths ... heads H kv_heads G policy P [remap_in N] [mask M]"
        first = self.lines[:1]
        (heads, kv_heads, policy, remap_in, name), lengths, trees = self.head(form, wanted)
        mask = _mask(name, trees)
        if mask is None:
            raise _wrong(*first[0], f"expected '{wanted}'")
        self.num_heads, self.num_kv_heads = int(heads), int(kv_heads)
        return Program(
            lengths,
            self.num_heads,
            self.num_kv_heads,
            *self.phases(),
            policy=None if policy == "none" else policy,
            remap_in=int(remap_in or 0),
            mask=mask,
        )

    def heads(self, kind: int) -> int:
        return self.num_kv_heads if kind in KEY_SIDE else self.num_heads

    def op(self, number: int, header: str, rows: list[tuple[int, str]]) -> Op:
        words = header.split()
        if words[0] == "exchange" and len(words) >= 3 and words[1].isdigit() and words[2] in COLLECTIVES:
            group = tuple(self.rank(number, w) for w in words[3:])
            routes = [route for row in rows for route in _routes(row[1])]
            transfers = self.transfers([row for row in rows if not _ROUTE.fullmatch(row[1])])
            return Exchange(int(words[1]), transfers, words[2], group, Rows.of(Route.WIDTH, routes))
        if words[0] in ("attend", "attend_grad") and len(words) == 2:
            pairs = Rows.of(Pair.WIDTH, [pair for row in rows for pair in self.pairs(*row)])
            return (Attend if words[0] == "attend" else AttendGrad)(self.rank(number, words[1]), pairs)
        if words[0] == "merge" and len(words) == 2:
            return Merge(self.rank(number, words[1]), Rows.of(Value.WIDTH, [self.value(*row) for row in rows]))
        raise _wrong(number, header, f"expected owner, forward, backward, {self.ops}")

    def pairs(self, number: int, line: str) -> Iterator[tuple[int, ...]]:
        query_text, separator, keys_text = line.removeprefix("q ").partition(" over ")
        if not line.startswith("q ") or not separator:
            raise _wrong(number, line, "expected 'q sN[a:b) over sN[a:b) ...'")
        query = self.region(number, Kind.Q, query_text)
        if not re.fullmatch(rf"{_REGION.pattern}(?: {_REGION.pattern})*", keys_text):
            raise _wrong(number, line, "expected regions like s0[0:8) behind 'over'")
        for match in _REGION.finditer(keys_text):
            key = self.region(number, Kind.KV, match[0])
            if key[0] != query[0]:
                raise _wrong(number, line, "a query attends only to its own sequence")
            yield (*query, *key[1:])

    def value(self, number: int, line: str) -> tuple[int, ...]:
        name, _, rest = line.partition(" ")
        if name not in self.kinds:
            raise _wrong(number, line, f"expected one of {', '.join(self.kinds)}")
        return (self.kinds[name], *self.region(number, self.kinds[name], rest))


class _RecurrentText(_TextParser[RecurrentOp]):
    ops = "exchange or compose"
    num_heads = 0

    def program(self) -> RecurrentProgram:
        form = r"recurrent lengths((?: \d+)*) heads (\d+) halo (\d+)"
        facts, lengths, trees = self.head(form, "recurrent lengths ... heads H halo N")
        self.num_heads, halo = map(int, facts)
        return RecurrentProgram(lengths, self.num_heads, halo, *self.phases(), checked(trees))

    def heads(self, kind: int) -> int:
        return self.num_heads if kind in STATE_KINDS else 1

    def op(self, number: int, header: str, rows: list[tuple[int, str]]) -> RecurrentOp:
        match header.split():
            case ["exchange", at] if at.isdigit():
                return Exchange(int(at), self.transfers(rows))
            case ["compose", rank]:
                return Compose(self.rank(number, rank), Rows.of(Neighbours.WIDTH, [self.both(*row) for row in rows]))
            case _:
                raise _wrong(number, header, f"expected owner, forward, backward, {self.ops}")

    def both(self, number: int, line: str) -> tuple[int, ...]:
        match = _NEIGHBOURS.fullmatch(line)
        if match is None or match[1] not in self.kinds:
            raise _wrong(number, line, "expected 'kind sN[a:b) + sN[b:c)'")
        kind = self.kinds[match[1]]
        return kind, *map(int, match.group(2, 3, 4, 5)), *self.span(kind, match[6], match[7])


def _wrong(number: int, line: str, wanted: str) -> InvalidProgramError:
    return InvalidProgramError(f"program text, line {number}: {wanted}, got {line!r}")


def _tree(number: int, line: str, seq: int) -> list[Segment]:
    # The tree of a line that begins with "tree", which is that of `seq`.
    _, *words = line.split()
    matches = [_SEGMENT.fullmatch(word) for word in words[1:]]
    if words[:1] != [f"s{seq}"] or not all(matches):
        raise _wrong(number, line, f"expected 'tree s{seq} TOKENS[f][<PARENT] ...'")
    return [Segment(int(m[1]), int(m[3] or -1), bool(m[2])) for m in matches if m]


def _segment_text(segment: Segment) -> str:
    above = f"<{segment.parent}" if segment.parent >= 0 else ""
    return f"{segment.length}{'f' if segment.full else ''}{above}"


def _mask(name: str | None, trees: Sequence[Sequence[Segment]]) -> Mask | None:
    # The mask of this name; causal where there is none, None where none is called so.
    try:
        return forest_named(name or CAUSAL.name, trees) if trees else mask_named(name or CAUSAL.name)
    except ConfigError:
        return None


def _routes(line: str) -> Iterator[tuple[int, ...]]:
    # The `Route` rows of a line 'rD <- rS via rP>rQ ...'; none if it is another line.
    match = _ROUTE.fullmatch(line)
    if match is None:
        return
    for piece, proxies in enumerate(match[3].split()):
        send_proxy, receive_proxy = proxies.split(">")
        yield int(match[2]), int(match[1]), piece, int(send_proxy[1:]), int(receive_proxy[1:])

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
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import assert_never

from megatron_balance.errors import ConfigError, InvalidProgramError
from megatron_balance.ir.columns import Fragment, Pair, Route, Rows, Transfer, Value
from megatron_balance.ir.forest import Forest, Segment
from megatron_balance.ir.forest import named as forest_named
from megatron_balance.ir.mask import CAUSAL, Mask, mask_named
from megatron_balance.ir.program import COLLECTIVES, KEY_SIDE, Attend, AttendGrad, Exchange, Kind, Merge, Op, Program

KIND_NAMES = {
    Kind.Q: "q",
    Kind.KV: "kv",
    Kind.OUT: "out",
    Kind.OUT_GRAD: "dout",
    Kind.Q_GRAD: "dq",
    Kind.KV_GRAD: "dkv",
}
_KINDS = {name: kind for kind, name in KIND_NAMES.items()}
_REGION = re.compile(r"s(\d+)\[(\d+):(\d+)\)(?: h\[(\d+):(\d+)\))?")
_TRANSFER = re.compile(r"r(\d+) <- r(\d+) (\w+) (.+)")
_SEGMENT = re.compile(r"(\d+)(f?)(?:<(\d+))?")
_ROUTE = re.compile(r"r(\d+) <- r(\d+) via((?: r\d+>r\d+)+)")


def text(program: Program) -> str:
    """The whole program, one header line an op and one indented line a row."""
    heads = f"heads {program.num_heads} kv_heads {program.num_kv_heads} policy {program.policy or 'none'}"
    heads += f" remap_in {program.remap_in}" if program.remap_in else ""
    heads += f" mask {program.mask.name}" if program.mask != CAUSAL else ""
    lines = [" ".join(["program lengths", *map(str, program.lengths), heads])]
    lines += tree_lines(program.mask.trees if isinstance(program.mask, Forest) else ())
    for rank, owned in enumerate(program.owned):
        lines.append(" ".join([f"owner r{rank}", *(f"s{s}[{a}:{b})" for s, a, b in owned)]))
    for name, ops in (("forward", program.forward), ("backward", program.backward)):
        lines.append(name)
        for op in ops:
            lines += op_lines(op, program.num_heads, program.num_kv_heads)
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


# More digits than any position, rank or id has; some of so many do not fit 64 bits.
_BEYOND = re.compile(r"\d{19}")


def parse(source: str) -> Program:
    """The program that `text` wrote; InvalidProgramError names the line that is not of this form."""
    return _TextParser(source).program()


class _TextParser:
    def __init__(self, source: str) -> None:
        self.lines = [(n, line.rstrip()) for n, line in enumerate(source.splitlines(), 1) if line.strip()]
        self.num_heads = 0
        self.num_kv_heads = 0
        if _BEYOND.search(source):
            raise wrong(
                *next(each for each in self.lines if _BEYOND.search(each[1])), "expected numbers of at most 18 digits"
            )

    def program(self) -> Program:
        number, line = self.lines[0] if self.lines else (1, "")
        head = re.fullmatch(
            r"\s*program lengths((?: \d+)*) heads (\d+) kv_heads (\d+) policy (\w+)"
            r"(?: remap_in (\d+))?(?: mask (\w+))?",
            line,
        )
        trees = self.trees()
        mask = None if head is None else _mask(head[6], trees)
        if head is None or mask is None:
            raise wrong(
                number, line, "expected 'program lengths ... heads H kv_heads G policy P [remap_in N] [mask M]'"
            )
        self.num_heads, self.num_kv_heads = int(head[2]), int(head[3])
        owned: list[Rows] = []
        ops: dict[str, list[Op]] = {"forward": [], "backward": []}
        phase = "forward"
        for number, header, rows in self.blocks():
            words = header.split()
            if rows and (words[0] == "owner" or header in ops):
                raise wrong(*rows[0], "a row belongs to an exchange, attend, attend_grad or merge")
            if words[0] == "owner":
                if words[1:2] != [f"r{len(owned)}"]:
                    raise wrong(number, header, f"owners are listed in order; expected r{len(owned)}")
                spans = [self.region(number, Kind.Q, w)[: Fragment.WIDTH] for w in words[2:]]
                owned.append(Rows.of(Fragment.WIDTH, spans))
            elif header in ops:
                phase = header
            else:
                ops[phase].append(self.op(number, header, rows))
        lengths = tuple(int(w) for w in head[1].split())
        return Program(
            lengths,
            self.num_heads,
            self.num_kv_heads,
            tuple(owned),
            tuple(ops["forward"]),
            tuple(ops["backward"]),
            None if head[4] == "none" else head[4],
            int(head[5] or 0),
            mask,
        )

    def trees(self) -> list[list[Segment]]:
        # The trees behind the first line, which are taken away.
        trees: list[list[Segment]] = []
        while len(self.lines) > 1 and self.lines[1][1].startswith("tree "):
            number, line = self.lines.pop(1)
            trees.append(parse_tree(line, number, len(trees)))
        return trees

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

    def op(self, number: int, header: str, rows: list[tuple[int, str]]) -> Op:
        words = header.split()
        if words[0] == "exchange" and len(words) >= 3 and words[1].isdigit() and words[2] in COLLECTIVES:
            group = tuple(self.rank(number, w) for w in words[3:])
            routes = [route for row in rows for route in _routes(row[1])]
            transfers = [self.transfer(*row) for row in rows if not _ROUTE.fullmatch(row[1])]
            return Exchange(
                int(words[1]), Rows.of(Transfer.WIDTH, transfers), words[2], group, Rows.of(Route.WIDTH, routes)
            )
        if words[0] in ("attend", "attend_grad") and len(words) == 2:
            pairs = Rows.of(Pair.WIDTH, [pair for row in rows for pair in self.pairs(*row)])
            return (Attend if words[0] == "attend" else AttendGrad)(self.rank(number, words[1]), pairs)
        if words[0] == "merge" and len(words) == 2:
            return Merge(self.rank(number, words[1]), Rows.of(Value.WIDTH, [self.value(*row) for row in rows]))
        raise wrong(number, header, "expected owner, forward, backward, exchange, attend, attend_grad or merge")

    def transfer(self, number: int, line: str) -> tuple[int, ...]:
        match = _TRANSFER.fullmatch(line)
        if match is None or match[3] not in _KINDS:
            raise wrong(number, line, "expected 'rD <- rS kind sN[a:b)'")
        kind = _KINDS[match[3]]
        return (kind, *self.region(number, kind, match[4]), int(match[2]), int(match[1]))

    def pairs(self, number: int, line: str) -> Iterator[tuple[int, ...]]:
        query_text, separator, keys_text = line.removeprefix("q ").partition(" over ")
        if not line.startswith("q ") or not separator:
            raise wrong(number, line, "expected 'q sN[a:b) over sN[a:b) ...'")
        query = self.region(number, Kind.Q, query_text)
        if not re.fullmatch(rf"{_REGION.pattern}(?: {_REGION.pattern})*", keys_text):
            raise wrong(number, line, "expected regions like s0[0:8) behind 'over'")
        for match in _REGION.finditer(keys_text):
            key = self.region(number, Kind.KV, match[0])
            if key[0] != query[0]:
                raise wrong(number, line, "a query attends only to its own sequence")
            yield (*query, *key[1:])

    def value(self, number: int, line: str) -> tuple[int, ...]:
        name, _, rest = line.partition(" ")
        if name not in _KINDS:
            raise wrong(number, line, f"expected one of {', '.join(_KINDS)}")
        return (_KINDS[name], *self.region(number, _KINDS[name], rest))

    def region(self, number: int, kind: Kind, line: str) -> tuple[int, int, int, int, int]:
        match = _REGION.fullmatch(line.strip())
        if match is None:
            raise wrong(number, line, "expected a region like s0[0:8) or s0[0:8) h[0:2)")
        whole = self.num_kv_heads if kind in KEY_SIDE else self.num_heads
        head_start, head_stop = (int(match[4]), int(match[5])) if match[4] else (0, whole)
        return int(match[1]), int(match[2]), int(match[3]), head_start, head_stop

    def rank(self, number: int, word: str) -> int:
        if not re.fullmatch(r"r\d+", word):
            raise wrong(number, word, "expected a rank like r0")
        return int(word[1:])


def wrong(number: int, line: str, wanted: str) -> InvalidProgramError:
    """The error of a line that is not of the form."""
    return InvalidProgramError(f"program text, line {number}: {wanted}, got {line!r}")


def tree_lines(trees: Sequence[Sequence[Segment]]) -> list[str]:
    """A line for each tree: `tree s0 8 3<0 4f<0`."""
    return [" ".join([f"tree s{seq}", *map(_segment_text, tree)]) for seq, tree in enumerate(trees)]


def parse_tree(line: str, number: int, seq: int) -> list[Segment]:
    """The tree of a line that begins with "tree"; InvalidProgramError: it is not that of `seq`."""
    _, *words = line.split()
    matches = [_SEGMENT.fullmatch(word) for word in words[1:]]
    if words[:1] != [f"s{seq}"] or not all(matches):
        raise wrong(number, line, f"expected 'tree s{seq} TOKENS[f][<PARENT] ...'")
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

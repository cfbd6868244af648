"""Small programs in text, forward only, that verify: what unit tests start from."""

from dataclasses import replace

from megatron_balance.compile.join import join, split
from megatron_balance.compile.route import Nics, Passing, route
from megatron_balance.compile.transpose import transpose
from megatron_balance.ir.arrays import as_array
from megatron_balance.ir.program import Exchange, Policy, Program, RankProgram

# Two ranks; rank 1 needs the keys of rank 0 and attends once over both parts (GQA: two query heads
# share a key-value head).
PREFIX = """\
program lengths 8 heads 2 kv_heads 1 policy none
owner r0 s0[0:4)
owner r1 s0[4:8)
forward
exchange 0 p2p
  r1 <- r0 kv s0[0:4)
attend r0
  q s0[0:4) over s0[0:4)
attend r1
  q s0[4:8) over s0[0:4) s0[4:8)
backward
"""

# Rank 0 holds everything; rank 1 attends one rectangle of it and returns a partial output, which is
# merged at the owner.
DISPATCH = """\
program lengths 4 heads 1 kv_heads 1 policy none
owner r0 s0[0:4)
owner r1
forward
exchange 0 p2p
  r1 <- r0 q s0[2:4)
  r1 <- r0 kv s0[0:2)
attend r0
  q s0[0:2) over s0[0:2)
  q s0[2:4) over s0[2:4)
attend r1
  q s0[2:4) over s0[0:2)
exchange 1 p2p
  r0 <- r1 out s0[2:4)
merge r0
  out s0[2:4)
backward
"""

# Two launches on one rank, of which the second leaves a second partial output.
TWO_LAUNCHES = """\
program lengths 4 heads 1 kv_heads 1 policy none
owner r0 s0[0:4)
forward
attend r0
  q s0[0:4) over s0[2:4)
  q s0[0:2) over s0[0:2)
attend r0
  q s0[2:4) over s0[0:2)
merge r0
  out s0[2:4)
backward
"""

# Two ranks trade tokens for heads: each attends one query head over all tokens.
HEADS = """\
program lengths 3 heads 2 kv_heads 2 policy none
owner r0 s0[0:2)
owner r1 s0[2:3)
forward
exchange 0 all_to_all r0 r1
  r1 <- r0 q s0[0:2) h[1:2)
  r1 <- r0 kv s0[0:2) h[1:2)
  r0 <- r1 q s0[2:3) h[0:1)
  r0 <- r1 kv s0[2:3) h[0:1)
attend r0
  q s0[0:3) h[0:1) over s0[0:3) h[0:1)
attend r1
  q s0[0:3) h[1:2) over s0[0:3) h[1:2)
exchange 1 all_to_all r0 r1
  r0 <- r1 out s0[0:2) h[1:2)
  r1 <- r0 out s0[2:3) h[0:1)
backward
"""

# Three ranks in a chain: rank 1 passes on keys that it has used itself.
CHAIN = """\
program lengths 6 heads 1 kv_heads 1 policy none
owner r0 s0[0:2)
owner r1 s0[2:4)
owner r2 s0[4:6)
forward
attend r0
  q s0[0:2) over s0[0:2)
exchange 0 p2p
  r1 <- r0 kv s0[0:2)
attend r1
  q s0[2:4) over s0[0:2) s0[2:4)
exchange 1 p2p
  r2 <- r1 kv s0[0:2)
  r2 <- r1 kv s0[2:4)
attend r2
  q s0[4:6) over s0[0:2) s0[2:4) s0[4:6)
backward
"""

ALL = {"prefix": PREFIX, "dispatch": DISPATCH, "two_launches": TWO_LAUNCHES, "heads": HEADS, "chain": CHAIN}


def with_backward(program: Program, policy: Policy) -> Program:
    # A whole program, as parsed from text, with its backward.
    return _whole(program, [transpose(rank, policy) for rank in split(program)], policy)


def with_routes(program: Program, nics: Nics) -> Program:
    # A whole forward program, as parsed from text, with every transfer between nodes routed.
    listed = [(op.id, as_array(op.transfers)) for op in program.forward if isinstance(op, Exchange)]
    ids = frozenset(number for number, _ in listed)
    ranks = [replace(rank, queues=(("", len(rank.forward)),)) for rank in split(program)]
    return _whole(program, [route(rank, Passing(listed, ()), ids, nics) for rank in ranks], None)


def _whole(program: Program, ranks: list[RankProgram], policy: Policy | None) -> Program:
    return join(ranks, program.lengths, program.num_heads, program.num_kv_heads, policy)

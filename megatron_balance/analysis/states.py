"""The price of handing states on in recurrent layers, without their program, whose rows are as many as
pieces times ranks; the simulator and the estimate take it from here.
"""

from collections.abc import Sequence
from functools import cached_property
from math import gcd
from typing import NamedTuple

import numpy as np

from megatron_balance.analysis.machine import Machine
from megatron_balance.analysis.recurrent import STATE_BYTES, Pieces
from megatron_balance.analysis.rounds import in_step
from megatron_balance.analysis.statistics import tokens_per_rank
from megatron_balance.compile.recurrent import composers, halos, trees_of
from megatron_balance.cost.base import MachineCost
from megatron_balance.cost.modules import scan_module, summary_module
from megatron_balance.cost.parallel import all_to_all_s, group_of
from megatron_balance.errors import InfeasibleError
from megatron_balance.ir.arrays import Bools, Floats, Ints
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Placed, Transfer
from megatron_balance.ir.forest import Forest
from megatron_balance.ir.model import Model, RecurrentLayers
from megatron_balance.ir.plan import MicrobatchPlan, Zone
from megatron_balance.ir.segments import PathEnds


class _Links(NamedTuple):
    """Bytes that ranks send and receive [2, num_ranks], in their node and to others; peers alike."""

    inside: Floats
    across: Floats
    peers_inside: Ints
    peers_across: Ints

    def turned(self) -> "_Links":
        return _Links(self.inside[::-1], self.across[::-1], self.peers_inside[::-1], self.peers_across[::-1])


class _StatesCost(NamedTuple):
    """A recurrent layer, beside what `layer_s` has for its tokens: seconds of each rank forward and
    backward, of which it computes `compute_s`; bytes over each resource of the machine.
    """

    seconds: tuple[Floats, Floats]
    compute_s: tuple[Floats, Floats]
    moved: tuple[Floats, Floats]


# The last few, by identity: planner, comparison and simulator ask for the same ones.
_RECENT: list[tuple[MicrobatchPlan, Machine, _StatesCost]] = []


def states_cost(plan: MicrobatchPlan, machine: Machine) -> _StatesCost | None:
    """The price of a recurrent layer's states under a plan; None: the model has no such layer.

    Rounds are those of `compile.recurrent`: halos, summaries, states; each takes a call, a message to
    each peer, and the bytes of the busiest of a rank's links or of its NIC, in the direction that has
    more. Raises ConfigError: a tree has full segments. InfeasibleError: `by_heads`, and the plan is of
    trees, or the layer's heads cannot be dealt to a group's ranks.
    """
    if (own := machine.model.recurrent) is None:
        return None
    for known, on, found in tuple(_RECENT):
        alike = on.cluster == machine.cluster and on.by_heads == machine.by_heads
        if known is plan and alike and (on.cost is machine.cost or on.cost == machine.cost):
            return found
    found = _of_all_tokens(plan, machine, own) if machine.by_heads else _Priced(plan, machine, own).cost()
    _RECENT[:] = [(plan, machine, found), *_RECENT[:3]]
    return found


def states_of(plans: Sequence[MicrobatchPlan], machine: Machine) -> _StatesCost | None:
    """As `states_cost`, of nano-batches one after the other."""
    costs = [found for plan in plans if (found := states_cost(plan, machine)) is not None]
    if not costs:
        return None
    return _StatesCost(
        *((np.sum(a, axis=0), np.sum(b, axis=0)) for a, b in (zip(*of, strict=True) for of in zip(*costs, strict=True)))
    )


class _Priced:
    """Pieces of a plan and what each rank sends of them."""

    def __init__(self, plan: MicrobatchPlan, machine: Machine, own: RecurrentLayers) -> None:
        self.machine, self.own, self.ranks = machine, own, machine.num_ranks
        self.held, self.begins, self.ends, self.paths = Pieces.of(plan)
        self.size = self.held[:, Placed.STOP] - self.held[:, Placed.START]
        # Of each sequence: sums of the gradients of branches, one less than it has leaves.
        leaves = [len(tree) - len({segment.parent for segment in tree[1:]}) for tree in trees_of(plan)]
        self.num_sums = np.array(leaves or [1] * len(plan.lengths)) - 1

    @cached_property
    def shares(self) -> tuple[Ints, Ints, Floats]:
        """Rows (seq, rank) of the ranks that a cut sequence is on; the row of each of its pieces;
        heads that each composes.
        """
        cut = self.held[~(self.begins & self.ends)]
        own = cut[:, Placed.SEQ] * self.ranks + cut[:, Placed.RANK]
        rows, at = np.unique(own, return_inverse=True)
        table, heads = composers(self.held, self.own.state_heads), np.zeros(len(rows))
        heads[np.searchsorted(rows, table[:, 1] * self.ranks + table[:, 0])] = table[:, 3] - table[:, 2]
        return np.column_stack(np.divmod(rows, self.ranks)), at, heads

    def rounds(self) -> tuple[list[_Links], list[_Links]]:
        """Links of every round, forward and backward."""
        forward: list[_Links] = []
        backward: list[_Links] = []
        rows = halos(self.held, self.own.conv_width - 1, self.paths)
        if len(rows):
            row_bytes = self.own.channels * self.machine.model.bytes_per_element
            num_bytes = (rows[:, Transfer.STOP] - rows[:, Transfer.START]) * row_bytes
            halo = self._pairs(rows[:, Transfer.SRC], rows[:, Transfer.DST], num_bytes.astype(np.float64))
            forward.append(halo)
            backward.append(halo.turned())
        if self.own.state_heads and not (self.begins & self.ends).all():
            state = float(STATE_BYTES * self.own.key_dim * self.own.value_dim)
            summary = np.where(self.begins, state, state + STATE_BYTES * self.own.map_size)
            before, behind = (~self.begins, ~self.ends) if self.paths is None else self._handed(self.paths)
            forward += [self._of_heads(summary, ~self.ends, up=True), self._of_heads(state, before, up=False)]
            backward += [self._of_heads(state, ~self.begins, up=True), self._of_heads(state, behind, up=False)]
        return forward, backward[1:] + backward[:1] if len(rows) else backward

    def _handed(self, paths: PathEnds) -> tuple[Bools, Bools]:
        # Pieces of trees for which the state before them, and its gradient behind, is handed back.
        seq, start = self.held[:, Placed.SEQ], self.held[:, Placed.START]
        before, end = paths.before(seq, start), paths.end[paths.at(seq, start)]
        return self._once(~self.begins, 0 * start, before), self._once(~self.ends, self.held[:, Placed.STOP], end)

    def _once(self, which: Bools, start: Ints, stop: Ints) -> Bools:
        # Branches on a rank share one value of [start, stop), which may be that of a piece there.
        values = np.column_stack([self.held[:, : Placed.START], start, stop])
        number = np.unique(np.concatenate([self.held, values]), axis=0, return_inverse=True)[1].ravel()
        own, asked = np.split(number, 2)
        left, found = np.flatnonzero(which & ~np.isin(asked, own)), np.zeros(len(which), dtype=bool)
        found[left[np.unique(asked[left], return_index=True)[1]]] = True
        return found

    def _pairs(self, src: Ints, dst: Ints, num_bytes: Floats) -> _Links:
        across = self.machine.crosses(src, dst)
        pairs = np.unique(np.column_stack([src, dst]), axis=0)
        over = self.machine.crosses(*pairs.T)

        def by_rank(which: Bools) -> Floats:
            return np.array([np.bincount(end[which], num_bytes[which], self.ranks) for end in (src, dst)])

        def peers(which: Bools) -> Ints:
            return np.array([np.bincount(end[which], minlength=self.ranks) for end in pairs.T])

        return _Links(by_rank(~across), by_rank(across), peers(~over), peers(over))

    def _of_heads(self, num_bytes: Floats | float, which: Bools, *, up: bool) -> _Links:
        # Bytes a head of these pieces, to those that compose it (`up`) or from them.
        node_of = self.machine.nics.node
        pairs, at, heads = self.shares
        amount = np.bincount(at, (num_bytes * which)[~(self.begins & self.ends)], len(pairs))
        seqs, of_seq = np.unique(pairs[:, 0], return_inverse=True)
        nodes, of_node = np.unique(np.column_stack([pairs[:, 0], node_of(pairs[:, 1])]), axis=0, return_inverse=True)
        of_node = of_node.ravel()

        def others(each: Floats) -> tuple[Floats, Floats]:
            # Of a sequence's other ranks: in the node, and in others.
            here = np.bincount(of_node, each, len(nodes))[of_node]
            return here - each, np.bincount(of_seq, each, len(seqs))[of_seq] - here

        (heads_in, heads_out), (amount_in, amount_out) = others(heads), others(amount)
        rank = pairs[:, 1]

        def by_rank(pieces: Floats, composing: Floats) -> Floats:
            both = [np.bincount(rank, each, self.ranks) for each in (amount * pieces, heads * composing)]
            return np.array(both if up else both[::-1])

        inside, across = by_rank(heads_in, amount_in), by_rank(heads_out, amount_out)
        return _Links(inside, across, *self._peers(pairs, seqs, of_seq, heads > 0, amount > 0, up=up))

    def _peers(
        self, pairs: Ints, seqs: Ints, of_seq: Ints, composing: Bools, giving: Bools, *, up: bool
    ) -> tuple[Ints, Ints]:
        # Of each rank, those that it sends to and receives from, each once.
        gives, composes = (np.zeros((len(seqs), self.ranks), dtype=np.float32) for _ in range(2))
        gives[of_seq, pairs[:, 1]], composes[of_seq, pairs[:, 1]] = giving, composing
        meet = gives.T @ composes > 0
        np.fill_diagonal(meet, val=False)
        node = self.machine.nics.node(np.arange(self.ranks))
        found: list[Ints] = []
        for which in (node[:, None] == node, node[:, None] != node):
            both = [(meet & which).sum(axis=axis) for axis in (1, 0)]
            found.append(np.array(both if up else both[::-1]))
        return found[0], found[1]

    def _seconds(self, links: _Links) -> Floats:
        machine, intra, inter = self.machine, self.machine.intra, self.machine.inter
        nics = machine.nics.nic(np.arange(self.ranks))
        of_nic = _of_nics(links, machine)[:, nics]
        inside = links.peers_inside * intra.alpha_s + links.inside / intra.bytes_per_s
        across = links.peers_across * inter.alpha_s + of_nic * (links.peers_across > 0) / inter.bytes_per_s
        busy = (links.peers_inside + links.peers_across > 0).any(axis=0)
        return np.where(busy, machine.cost.call_s + np.maximum(inside, across).max(axis=0), 0.0)

    def cost(self) -> _StatesCost:
        machine, computing = self.machine, self._computing()
        seconds, moved = list[Floats](), list[Floats]()
        for own_s, rounds in zip(computing, self.rounds(), strict=True):
            of_rank, total = np.zeros(self.ranks), np.zeros(len(machine.capacity()))
            spent = own_s.copy()
            for links in rounds:
                spent += self._seconds(links)
                of_rank += (links.inside + links.across).sum(axis=0)
                total += _resources(links, machine)
            seconds.append(spent + np.array([machine.pack_s(n) for n in of_rank.tolist()]) * machine.slow())
            moved.append(total)
        return _StatesCost((seconds[0], seconds[1]), (computing[0], computing[1]), (moved[0], moved[1]))

    def _computing(self) -> list[Floats]:
        # What pieces add to the tokens' own: chunks that they do not fill, maps of those in the
        # middle, and composing them.
        machine, own, cost = self.machine, self.own, self.machine.cost
        rank, scan, summary = self.held[:, Placed.RANK], scan_module(own), summary_module(own)
        padded = (-self.size % own.chunk) * float(own.state_heads > 0)
        middle = self.size * (~self.begins & ~self.ends)
        padding, between = (np.bincount(rank, each, self.ranks) for each in (padded, middle))
        composing = [np.zeros(self.ranks)] * 2
        if own.state_heads:
            table, state = composers(self.held, own.heads), STATE_BYTES * own.key_dim * own.value_dim
            heads, seqs = table[:, 3] - table[:, 2], self.held[~self.begins & ~self.ends, Placed.SEQ]
            joins = heads * np.bincount(seqs, minlength=len(self.num_sums))[table[:, 1]]
            sums = heads * self.num_sums[table[:, 1]] * 2.0 * state
            joins = joins * float(STATE_BYTES * own.map_size + 2 * state)
            composing = [np.bincount(table[:, 0], each, self.ranks) for each in (joins, joins + sums)]
        found: list[Floats] = []
        for times in (1, 2):
            seconds = np.array([cost.scan_s(times * n * scan.flops, times * n * scan.elements) for n in padding])
            seconds += [cost.scan_s(n * summary.flops, n * summary.elements) for n in between]
            seconds += [machine.pack_s(float(n) / 2) for n in composing[times - 1]]
            found.append(seconds * machine.slow())
        return found


def _of_nics(links: _Links, machine: Machine) -> Floats:
    """Bytes that each NIC sends, and receives [2, NICs]."""
    found = np.zeros((machine.num_nics, 2))
    np.add.at(found, machine.nics.nic(np.arange(machine.num_ranks)), links.across.T)
    return found.T


def _resources(links: _Links, machine: Machine) -> Floats:
    return np.concatenate([*links.inside, *_of_nics(links, machine)])


def piece_s(model: Model, cluster: Cluster, cost: MachineCost) -> float:
    """Seconds that one more piece of a cut sequence adds on a rank to a layer that attends, with its
    part of the recurrent ones (`Model.attending`), forward and backward: the bytes of its states.
    """
    if (own := model.recurrent) is None:
        return 0.0
    # A map and four states at most; half of that, since first pieces send no map, last ones nothing,
    # and what a rank composes itself stays there.
    num_bytes = STATE_BYTES * own.state_heads * (own.map_size + 4 * own.key_dim * own.value_dim) / 2
    across = cluster.num_nodes > 1
    seconds = cost.inter_node_s(num_bytes, 0, 1 / cluster.ranks_per_nic) if across else cost.intra_node_s(num_bytes, 0)
    return own.layers / own.attention_layers * seconds


def exchanged_heads(own: RecurrentLayers) -> int:
    """The number that groups which exchange all tokens by heads must divide."""
    # Mamba-2's groups are repeated where they are fewer than ranks; a convolution has channels.
    both = own.kind in ("gated_delta", "kda")
    return gcd(own.heads, own.key_heads) if both else own.state_heads or own.channels


def _of_all_tokens(plan: MicrobatchPlan, machine: Machine, own: RecurrentLayers) -> _StatesCost:
    # In place of states, in each zone's ranks, both passes alike.
    if isinstance(plan.mask, Forest):
        raise InfeasibleError(
            "all tokens by heads: expected documents, got trees, which nobody's recurrent layers exchange so; "
            "simulate the rollouts one by one"
        )
    seconds, moved, held = np.zeros(machine.num_ranks), np.zeros(len(machine.capacity())), tokens_per_rank(plan)
    for ranks in dict.fromkeys(zone.ranks for zone in plan.zones if isinstance(zone, Zone)):
        size, at = len(ranks), list(ranks)
        if (heads := exchanged_heads(own)) % size:
            raise InfeasibleError(
                f"all tokens by heads: {heads} heads of {own.kind} layers cannot be dealt to groups of {size} ranks; "
                "use a size that divides them"
            )
        seconds[at] = np.maximum(seconds[at], by_heads_s(own, machine, float(held[at].max()), size))
        here = min(size, machine.cluster.node_size)
        width = own.channels + own.gates + own.heads * own.value_dim
        sent = np.zeros((2, machine.num_ranks))
        sent[:, at] = (
            held[at] * (width * machine.model.bytes_per_element / size) * np.array([[here - 1], [size - here]])
        )
        none = np.zeros((2, machine.num_ranks), dtype=np.int64)
        moved += _resources(_Links(sent[[0, 0]], sent[[1, 1]], none, none), machine)
    none_s = np.zeros(machine.num_ranks)
    return _StatesCost((seconds, seconds), (none_s, none_s), (moved, moved))


def by_heads_s(own: RecurrentLayers, machine: Machine, num_tokens: float, ranks: int) -> float:
    """Seconds of a recurrent layer's two all-to-alls, one way through the layer, where `ranks`
    neighbours exchange all their `num_tokens` each by heads and back, as Megatron-core does.
    """
    here = min(ranks, machine.cluster.node_size)
    row_bytes = machine.model.bytes_per_element * num_tokens
    group = group_of(machine.cluster, ranks, here, busy_nics=True)
    widths = own.channels + own.gates, own.heads * own.value_dim
    return sum(machine.cost.call_s + all_to_all_s(row_bytes * width, group) for width in widths) if ranks > 1 else 0.0


def mean_layer_s(
    attended: Floats, linear: Floats, states: _StatesCost | None, group: Ints, model: Model, *, backward: bool
) -> Floats:
    """Seconds of the mean layer of a model on each rank, in step in `group` (`rounds.coupled`).

    `attended`: of layers that attend, by their share of all; `linear`: outside attention; `states`:
    None where every layer attends.
    """
    if model.recurrent is None:
        return attended
    attention, recurrent, _ = model.layer_shares
    handed_on = 0.0 if states is None else recurrent * states.seconds[backward]
    return attended + in_step((1 - attention) * linear + handed_on, group)

"""Costs from a table that `megatron-balance profile` measured.

Inside the grid times are interpolated linearly between the four points around (DistCA, section 4.2,
does so too), along the queries in proportion to the (query, key) pairs. Linear and not logarithmic:
a kernel's time is a constant plus something for each pair, which linear interpolation meets exactly
and interpolating logarithms does not. Above the grid the time of its edge grows with the pairs, at
the rate reached there; below it the smallest time is kept, since kernels work in whole tiles.
Measured times that fall as the work grows are noise, and are raised to the largest one before them:
no plan may look better for an extra token.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from megatron_balance.cost.analytic import OPTIMIZER_BYTES, AnalyticCost
from megatron_balance.cost.base import Contention, Host, Link, MachineCost
from megatron_balance.cost.fits import fit_link, least_squares
from megatron_balance.cost.modules import head_module, layer_flops
from megatron_balance.cost.table import CostTable, Curve, Grid
from megatron_balance.errors import ConfigError
from megatron_balance.ir.arrays import Floats, Ints, Rectangles
from megatron_balance.ir.cluster import Cluster
from megatron_balance.ir.columns import Pair
from megatron_balance.ir.mask import CAUSAL, FULL, Band, Mask
from megatron_balance.ir.model import Model

# Points a doubling at which the time of a square of one run is tabulated for planners.
_RUN_STEPS = 16


class _PairGrid:
    """Times over queries and a second axis; `pairs(queries, second)`: what the mask leaves."""

    def __init__(
        self,
        q_tokens: tuple[int, ...],
        second: tuple[int, ...],
        seconds: Grid,
        pairs: Callable[[Floats, Floats], Floats],
    ) -> None:
        self._q, self._x = np.array(q_tokens, dtype=np.float64), np.array(second, dtype=np.float64)
        times = np.array(seconds)
        # Times that fall as the work grows are noise: no plan may look better for a token more.
        self._times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
        self._pairs = pairs

    def time_s(self, num_q: Floats, second: Floats) -> Floats:
        q, x = np.clip(num_q, self._q[0], self._q[-1]), np.clip(second, self._x[0], self._x[-1])
        # (i, j): the lower corner of the cell around each point.
        i = np.clip(np.searchsorted(self._q, q, side="right") - 1, 0, len(self._q) - 2)
        j = np.clip(np.searchsorted(self._x, x, side="right") - 1, 0, len(self._x) - 2)
        left, right = self._along_q(q, i, j), self._along_q(q, i, j + 1)
        share = (x - self._x[j]) / (self._x[j + 1] - self._x[j])
        inside = left + share * (right - left)
        reached = self._pairs(np.maximum(num_q, self._q[0]), np.maximum(second, self._x[0]))
        return inside * reached / self._pairs(q, x)

    def _along_q(self, q: Floats, i: Ints, j: Ints) -> Floats:
        low, high, here = (self._pairs(values, self._x[j]) for values in (self._q[i], self._q[i + 1], q))
        return self._times[i, j] + (here - low) / (high - low) * (self._times[i + 1, j] - self._times[i, j])


def _full_pairs(num_q: Floats, num_k: Floats) -> Floats:
    return num_q * num_k


def _causal_pairs(num_q: Floats, before: Floats) -> Floats:
    return num_q * before + num_q * (num_q + 1) / 2


@dataclass(frozen=True, slots=True)
class _Line:
    """Seconds a + b x, neither negative."""

    a: float
    b: float

    def time_s(self, size: float) -> float:
        # Nothing takes no time.
        return self.a + self.b * size if size else 0.0


def _fit_line(curve: Curve, what: str) -> _Line:
    # The line nearest to measured times; it rises, however little.
    b, a = least_squares([[size, 1.0] for size in curve.sizes], curve.seconds, what=what, needed=(0,))
    return _Line(a, b)


@dataclass(frozen=True, slots=True)
class MeasuredCost(MachineCost):
    """Costs of `model` on `cluster` by a measured table.

    Attention scales with the number of heads and the modules with their FLOPs, where the table's
    model has others. Links that the table has not measured are the cluster's. With tensor
    parallelism a rank of `cluster` is a whole group (`cost.parallel.wide_ranks`), which splits all
    of it evenly; what it communicates within itself, and what experts exchange, is the analytic
    model's.

    Raises ConfigError where the table was measured for another head dim.
    """

    table: CostTable
    cluster: Cluster
    model: Model
    tensor_parallel: int = 1
    exchanges: bool = False
    _grids: dict[tuple[bool, bool], _PairGrid] = field(init=False, repr=False, compare=False)
    _runs: tuple[tuple[float, ...], tuple[float, ...]] = field(init=False, repr=False, compare=False)
    _lines: dict[str, _Line] = field(init=False, repr=False, compare=False)
    _links: dict[str, Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        attention = self.table.attention
        if attention.head_dim != self.model.kernel_dim:
            raise ConfigError(
                f"the cost table of {self.table.source.device} was measured with head dim {attention.head_dim}, "
                f"{self.model.name} has {self.model.kernel_dim}; measure one with 'megatron-balance profile --model "
                f"{self.model.name}'"
            )
        axes = {False: attention.k_tokens, True: attention.before_tokens}
        times = {
            (False, False): attention.full_s,
            (False, True): attention.full_backward_s,
            (True, False): attention.causal_s,
            (True, True): attention.causal_backward_s,
        }
        counts = {False: _full_pairs, True: _causal_pairs}
        grids = {
            (causal, backward): _PairGrid(attention.q_tokens, axes[causal], grid, counts[causal])
            for (causal, backward), grid in times.items()
        }
        object.__setattr__(self, "_grids", grids)
        object.__setattr__(self, "_runs", self._tabulate_runs(grids[False, False]))
        layer, curves = self.table.layer, {"merge": self.table.merge, "pack": self.table.pack}
        curves |= {"forward": Curve(layer.tokens, layer.forward_s), "backward": Curve(layer.tokens, layer.backward_s)}
        object.__setattr__(self, "_lines", {name: _fit_line(curve, name) for name, curve in curves.items()})
        links = {link.name: fit_link(link.sizes, link.seconds) for link in self.table.links}
        object.__setattr__(self, "_links", links)

    def _tabulate_runs(self, grid: _PairGrid) -> tuple[tuple[float, ...], tuple[float, ...]]:
        # Tabulate the seconds of squares of runs: planners ask for thousands, one by one.
        attention = self.table.attention
        top = max(attention.q_tokens[-1], attention.k_tokens[-1])
        doublings = np.log2(top)
        runs = np.unique(np.round(2.0 ** (np.arange(int(doublings * _RUN_STEPS) + 1) / _RUN_STEPS)).astype(np.float64))
        runs = np.append(runs[runs < top], top)
        return tuple(runs.tolist()), tuple((grid.time_s(runs, runs) * self._head_ratio).tolist())

    @property
    def _head_ratio(self) -> float:
        return self.model.num_heads / self.table.attention.num_heads / self.tensor_parallel

    @property
    def _flops_ratio(self) -> float:
        # FLOPs of a token in the model's layer over those in the layer that was measured.
        layer, attention = self.table.layer, self.table.attention
        measured = Model(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            hidden_size=layer.hidden_size,
            ffn_size=layer.ffn_size,
            gated_ffn=layer.gated_ffn,
        )
        return layer_flops(self.model) / layer_flops(measured) / self.tensor_parallel

    @property
    def _analytic(self) -> AnalyticCost:
        return AnalyticCost(self.cluster, self.model, self.tensor_parallel, exchanges=self.exchanges)

    def attention_s(self, num_pairs: float, run_tokens: float = inf) -> float:
        runs, seconds = self._runs
        diagonal = int(self.model.mask != FULL)
        if run_tokens >= runs[-1]:
            return num_pairs * seconds[-1] / (runs[-1] * (runs[-1] + diagonal))
        at = bisect_right(runs, run_tokens)
        if at == 0:
            square_s = seconds[0]
        else:
            share = (run_tokens - runs[at - 1]) / (runs[at] - runs[at - 1])
            square_s = seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
        # run + 1: a causal square of l tokens has l (l + 1) / 2 pairs, and an extra token must not
        # take less.
        return num_pairs * square_s / (run_tokens * (run_tokens + diagonal))

    def launch_s(self, num_launches: float) -> float:
        return num_launches * (self.table.attention.launch_s + self._lines["merge"].a)

    def linear_s(self, num_tokens: float) -> float:
        analytic = self._analytic
        shared_s = analytic.tensor_parallel_s(1.0) - analytic.tensor_parallel_s(0.0)
        shared_s += analytic.experts_s(2.0) - analytic.experts_s(1.0)
        return num_tokens * (self._lines["forward"].b * self._flops_ratio + shared_s) / self.model.attending

    def experts_s(self, num_tokens: float) -> float:
        return self._analytic.experts_s(num_tokens)

    def kv_bytes(self, num_tokens: float) -> float:
        return num_tokens * self.model.kv_bytes_per_token

    def query_bytes(self, num_tokens: float) -> float:
        """The mean, where widths differ."""
        width = (self.model.head_dim + self.model.value_width) / 2
        return num_tokens * self.model.num_heads * width * self.model.bytes_per_element

    def attend_s(self, pairs: Ints, launch: Ints, num_launches: int, *, backward: bool = False) -> Floats:
        """A region neither full nor causal at its bottom right is two entries of the kernel."""
        attention = self.table.attention
        fixed = attention.backward_launch_s if backward else attention.launch_s
        heads = pairs[:, Pair.Q_HEAD_STOP] - pairs[:, Pair.Q_HEAD_START]
        heads = heads / (attention.num_heads * self.tensor_parallel)
        seconds, entries = np.zeros(num_launches), np.zeros(num_launches, dtype=bool)
        for causal, (num_q, second) in _split_masks(pairs, self.model.mask).items():
            there = np.flatnonzero(num_q)
            sizes = (each[there].astype(np.float64) for each in (num_q, second))
            times = self._grids[causal, backward].time_s(*sizes)
            seconds += np.bincount(launch[there], weights=heads[there] * times, minlength=num_launches)
            entries[launch[there]] = True
        return np.where(entries, fixed + seconds, 0.0)

    def merge_s(self, num_tokens: float) -> float:
        return self._lines["merge"].time_s(num_tokens * self._head_ratio)

    def pack_s(self, num_bytes: float) -> float:
        return self._lines["pack"].time_s(num_bytes / self.tensor_parallel)

    def layer_s(self, num_tokens: float, *, backward: bool = False) -> float:
        line = self._lines["backward" if backward else "forward"]
        own_s = line.a + line.b * num_tokens * self._flops_ratio if num_tokens else 0.0
        return own_s + self._analytic.tensor_parallel_s(num_tokens) + self._analytic.experts_s(num_tokens)

    def head_s(self, num_tokens: float, *, backward: bool = False) -> float:
        """At the rate of the layer's modules."""
        line = self._lines["backward" if backward else "forward"]
        return line.b * num_tokens * self._flops_ratio * head_module(self.model).flops / layer_flops(self.model)

    def scan_s(self, flops: float, elements: float) -> float:
        """By data sheets: no table has recurrent layers."""
        return self._analytic.scan_s(flops, elements)

    def optimizer_s(self, num_parameters: float) -> float:
        """At the rate of packing: two bytes touched for each packed."""
        return self._lines["pack"].b * num_parameters * OPTIMIZER_BYTES / 2 / self.tensor_parallel

    def link(self, *, inter_node: bool) -> Link:
        measured = self._links.get("inter_node" if inter_node else "intra_node")
        if measured is None:
            return self._analytic.link(inter_node=inter_node)
        return Link(measured.alpha_s, measured.bytes_per_s * self.tensor_parallel)

    @property
    def call_s(self) -> float:
        """Measured messages include the call."""
        return 0.0 if self._links else self._analytic.call_s

    @property
    def host(self) -> Host:
        """The cluster's, where the table has none."""
        host = self.table.host
        return self._analytic.host if host is None else Host(host.call_s, host.launch_s, host.message_s)

    @property
    def contention(self) -> Contention:
        """The cluster's, where kernels and transfers were measured one at a time."""
        beside = self.table.beside
        if beside is None:
            return self._analytic.contention
        return Contention.of_slowdowns(beside.intra_node, beside.inter_node)


def _split_masks(pairs: Ints, mask: Mask = CAUSAL) -> dict[bool, tuple[Ints, Ints]]:
    """Kernel entries of each pair of regions [n, 9]: full ones (queries, keys) and causal ones
    (queries, keys before); 0 queries: no such entry.

    Under a window the queries that it cuts keys from count as full, over as many keys as
    they see in the mean.
    """
    rectangles = Rectangles(*pairs[:, Pair.SPANS].T)
    band = mask.band(pairs[:, Pair.SEQ], rectangles.q_start, rectangles.k_start)
    shown = rectangles.trimmed(band)
    return _split_window(shown, band) if band.windowed else _split_band(shown, band)


def _split_band(shown: Rectangles, band: Band) -> dict[bool, tuple[Ints, Ints]]:
    q_start, q_stop, k_start, k_stop = shown
    # A single query over the keys up to its own is a triangle of one, so that a sequence's times
    # come from one grid from its first token.
    masked = band.causal & (k_stop > q_start + 1) | ((k_stop == q_start + 1) & (q_stop == k_stop))
    seen_whole = np.where(masked, np.maximum(q_start, k_stop), q_start)  # queries from here on see every key
    full = np.maximum(q_stop - seen_whole, 0)
    triangle = np.where(masked, k_stop - q_start, 0)
    return {False: (full, np.maximum(k_stop - k_start, 0)), True: (triangle, np.maximum(q_start - k_start, 0))}


def _split_window(shown: Rectangles, band: Band) -> dict[bool, tuple[Ints, Ints]]:
    # Up to here a query sees all keys from the first one on.
    edge = np.clip(shown.k_start + band.reach, shown.q_start, shown.q_stop)
    whole, cut = Band(band.causal), shown._replace(q_start=edge)
    split = _split_band(shown._replace(q_stop=edge).trimmed(whole), whole)
    (full, keys), num_q = split[False], np.maximum(cut.q_stop - edge, 0)
    pairs = full * keys + cut.num_pairs(band)
    full = full + num_q
    return {False: (full, -(-pairs // np.maximum(full, 1))), True: split[True]}

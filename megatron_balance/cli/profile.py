"""`megatron-balance profile`: measure this machine's kernels and links into a cost table for
planners and the simulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_balance.cli import inputs
from megatron_balance.errors import ConfigError
from megatron_balance.files import json_text

if TYPE_CHECKING:
    from megatron_balance.cost.table import CostTable
    from megatron_balance.ir.model import Model
    from megatron_balance.profiling.cost_table import ProfileOptions

DEFAULT_MODELS = {"cpu": "gpt-tiny", "cuda": "llama-7b"}
AXES = ("q_tokens", "k_tokens", "before_tokens", "layer_tokens", "pack_bytes", "message_bytes")
HELP = "measure this machine's attention kernel and links into a cost table"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=tuple(DEFAULT_MODELS), help="cpu or cuda (default: cuda where there is one)")
    whose = "whose heads, layers and element type (default: gpt-tiny on cpu, llama-7b on cuda)"
    add("--model", metavar="NAME|FILE", help=whose)
    add("--out", type=Path, metavar="FILE", help="write the cost table here")
    add("--quick", action="store_true", help="a coarse grid and few samples: seconds")
    add("--kernel", metavar="NAME", help="attention kernel (default: the fastest that serves the tensors)")
    add("--repeats", type=int, metavar="N", help="samples of a figure")
    add("--threads", type=int, metavar="N", help="threads of the CPU kernels (default: torch's)")
    add("--q-tokens", metavar="128,512,...", help="grid of attention: queries of an entry")
    add("--k-tokens", metavar="128,512,...", help="grid of attention: keys of an entry without a mask")
    add("--before-tokens", metavar="0,512,...", help="grid of attention: keys before a causal entry's first query")
    add("--layer-tokens", metavar="128,512,...", help="tokens of the layer's other modules and of merging")
    add("--pack-bytes", metavar="16384,...", help="sizes of packing")
    add("--message-bytes", metavar="1024,...", help="sizes of messages")
    links = "measure links too: the launched world's under torchrun, else gloo between two processes of this machine"
    add("--links", action="store_true", help=links)
    add("--ranks-per-node", type=int, metavar="P", help="with --links under torchrun: ranks on a node (default: all)")
    inputs.add_json(parser)


def run(args: argparse.Namespace) -> int:
    inputs.check_positive(args, "repeats", "threads", "ranks_per_node")
    inputs.check_beside(args, args.links, "--links", "ranks_per_node", "message_bytes")
    inputs.check_folder(args)
    try:
        from megatron_balance.profiling import cost_table
    except ImportError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            "profile needs torch: pip install 'megatron-balance[train]', or see 'megatron-balance doctor'"
        ) from None
    from megatron_balance.config import load_model
    from megatron_balance.cost.table import save_table

    device, options = cost_table.prepare(args.device, args.threads), _options(args)
    model = load_model(args.model or DEFAULT_MODELS[device])
    measured, first = cost_table.measure_links(device, options, args.ranks_per_node) if args.links else ((), True)
    if not first:
        return 0  # rank 0 measures the kernels and writes
    table = cost_table.profile(model, device, options, _progress, measured)
    if args.out:
        save_table(table, args.out)
    if args.json:
        print(json_text(dataclasses.asdict(table)))
    else:
        _show(table, model, args.out)
    return 0


def _options(args: argparse.Namespace) -> ProfileOptions:
    from megatron_balance.profiling.cost_table import QUICK, ProfileOptions

    told = {name: getattr(args, name) for name in (*AXES, "repeats", "kernel") if getattr(args, name) is not None}
    given: dict[str, Any] = {name: _sizes(name, each) if name in AXES else each for name, each in told.items()}
    return replace(QUICK if args.quick else ProfileOptions(), **given)


def _sizes(axis: str, text: str) -> tuple[int, ...]:
    option, lowest = f"--{axis.replace('_', '-')}", 0 if axis == "before_tokens" else 1
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: expected whole numbers such as 128,512") from None
    if len(sizes) < 2 or sizes[0] < lowest or list(sizes) != sorted(set(sizes)):
        raise ConfigError(f"{option} {text}: expected at least 2 sizes from {lowest} on, in rising order")
    return sizes


def _progress(points: Iterable[Callable[[], None]], count: int, what: str) -> Iterator[Callable[[], None]]:
    from tqdm import tqdm

    yield from tqdm(points, total=count, desc=what, unit=" points", file=sys.stderr, disable=None)


def _show(table: CostTable, model: Model, out: Path | None) -> None:
    from megatron_balance.cost.fits import fit_link, gamma_of
    from megatron_balance.cost.measured import MeasuredCost
    from megatron_balance.ir.cluster import Cluster

    source, attention = table.source, table.attention
    print(
        f"{source.device} ({source.kind}), {source.threads} threads, {source.date}, torch {source.torch}; of "
        f"{source.repeats} samples"
    )
    heads = f"{attention.num_heads} heads, {attention.num_kv_heads} of keys, head dim {attention.head_dim}"
    print(f"attention kernel {attention.kernel}, {attention.dtype}, {heads}")
    flops = model.attention_flops_per_pair * attention.q_tokens[-1]
    causal_keys = attention.before_tokens[-1] + (attention.q_tokens[-1] + 1) / 2
    for name, rows, keys in (
        ("full", (attention.full_s, attention.full_backward_s), attention.k_tokens[-1]),
        ("causal", (attention.causal_s, attention.causal_backward_s), causal_keys),
    ):
        forward, backward = (row[-1][-1] for row in rows)
        print(
            f"  {name}, largest: {flops * keys / forward / 1e9:,.1f} GFLOP/s forward; backward takes "
            f"{backward / forward:.1f} times as long"
        )
    print(f"  a launch: {1e6 * attention.launch_s:.1f} us forward, {1e6 * attention.backward_launch_s:.1f} us backward")
    print(f"merge: {table.merge.sizes[-1] / table.merge.seconds[-1] / 1e6:.2f} M tokens/s")
    print(f"pack: {table.pack.sizes[-1] / table.pack.seconds[-1] / 1e9:.2f} GB/s")
    layer = table.layer
    print(
        f"layer, {layer.tokens[-1]} tokens: {1e3 * layer.forward_s[-1]:.2f} ms forward, "
        f"{1e3 * layer.backward_s[-1]:.2f} ms backward"
    )
    gamma = gamma_of(MeasuredCost(table, Cluster(1, 1), model), model, attention.q_tokens)
    print(f"gamma, attention's share of FLOPs to time (KnapFormer, Eq. 2): {gamma:.2f}")
    for link in table.links:
        fitted = fit_link(link.sizes, link.seconds)
        print(f"{link.name} ({link.backend}): alpha {1e6 * fitted.alpha_s:.1f} us, {fitted.bytes_per_s / 1e9:.3f} GB/s")
    print(f"written to {out}" if out else "not written; --out FILE keeps it")

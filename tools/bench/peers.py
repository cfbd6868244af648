"""Our planners beside the peers', set by set, as a Markdown table.

python tools/bench/planners.py BATCHES.json --slack 1.5 --json > ours.json
python tools/bench/peers.py ours.json > docs/measurements/planners.md

A cell is attention max/mean over ranks, KV tokens a rank receives (of these from other nodes),
milliseconds of planning. The peers' figures are those of `peers.json`, on the same batches, and
were not taken in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

PEERS = Path(__file__).parent / "peers.json"
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path, help="what planners.py --json printed")
    options = parser.parse_args(argv)
    ours = json.loads(options.ours.read_text())
    for line in lines(ours, json.loads(PEERS.read_text())):
        print(line)
    return 0


def lines(ours: Row, peers: Row) -> Iterator[str]:
    """The page, line by line."""
    keys = list(dict.fromkeys(row["batches"] for row in ours["rows"]))
    yield "# Planners beside the peers'"
    yield ""
    yield (
        "Attention max/mean over ranks / KV tokens a rank receives in a layer, forward (of these from other "
        "nodes) / ms of planning."
    )
    yield (
        f"{ours['model']} on {ours['cluster']}, {len(keys)} sets of batches. Ours, measured here: CPU time of "
        "one core, median over all"
    )
    yield "batches, layers included."
    yield ""
    yield from _table(keys, ((_label(row), cells) for row, cells in _ours(ours["rows"])))
    yield ""
    yield "tokens: max/mean in the attention layout; with a remap tokens outside attention are even."
    yield ""
    yield f"{peers['what']} {peers['heads']}."
    yield ""
    yield from _table(keys, ((row["planner"], row["batches"]) for row in peers["rows"]))


def _ours(rows: Iterable[Row]) -> Iterator[tuple[Row, dict[str, Row]]]:
    """By planner and slack: its row of the first set, and its figures by set."""
    found: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        found.setdefault((row["planner"], row["slack"]), []).append(row)
    for same in found.values():
        yield same[0], {row["batches"]: {**row, "plan_ms": row["plan_ms"]["median"]} for row in same}


def _label(row: Row) -> str:
    return row["planner"] if row["slack"] is None else f"{row['planner']}, slack {row['slack']:g}"


def _table(keys: Sequence[str], rows: Iterable[tuple[str, dict[str, Row]]]) -> Iterator[str]:
    yield f"| planner | mean | {' | '.join(keys)} |"
    yield f"| --- |{' ---: |' * (len(keys) + 1)}"
    for name, cells in rows:
        yield (
            f"| {name} | {_cell(_mean(list(cells.values())))} | "
            f"{' | '.join(_cell(cells.get(key, {})) for key in keys)} |"
        )


def _mean(cells: Sequence[Row]) -> Row:
    """Means over the sets of what all of them have."""
    common = set.intersection(*(set(cell) for cell in cells)) & {
        "attention",
        "tokens",
        "kv_tokens",
        "kv_tokens_inter_node",
        "plan_ms",
    }
    return {key: fmean(cell[key] for cell in cells) for key in common}


def _cell(cell: Row) -> str:
    if not cell:
        return "-"
    parts = [f"{cell['attention']:.3f}"]
    if cell.get("tokens", 1.0) > 1.0005:
        parts[0] += f" (tokens {cell['tokens']:.2f})"
    if "kv_tokens" in cell:
        inter = f" ({cell['kv_tokens_inter_node'] / 1e3:.1f}k)" if "kv_tokens_inter_node" in cell else ""
        parts.append(f"{cell['kv_tokens'] / 1e3:.1f}k{inter}")
    if "plan_ms" in cell:
        parts.append(f"{cell['plan_ms']:.2f}")
    failed = f", failed {cell['failed']}" if "failed" in cell else ""
    return " / ".join(parts) + failed


if __name__ == "__main__":
    raise SystemExit(main())

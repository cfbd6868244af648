"""A cost table of round numbers: a constant and something for each pair, size or token."""

from megatron_balance.cost import table

Q, K, BEFORE = (16, 128, 1024), (32, 512, 4096), (0, 512, 4096)
ENTRY_S, PAIR_S, LAUNCH_S = 2e-6, 1e-9, 5e-6


def full_s(q: float, k: float) -> float:
    return ENTRY_S + PAIR_S * q * k


def causal_s(q: float, before: float) -> float:
    return ENTRY_S + PAIR_S * (q * before + q * (q + 1) / 2)


def made(links: tuple[table.LinkTable, ...] = (), beside: table.BesideTable | None = None) -> table.CostTable:
    # The table, for 8 heads of 16 and 2 of keys.
    full = tuple(tuple(full_s(q, k) for k in K) for q in Q)
    causal = tuple(tuple(causal_s(q, b) for b in BEFORE) for q in Q)
    twice = tuple(tuple(tuple(3 * s for s in row) for row in grid) for grid in (full, causal))
    attention = table.AttentionTable(
        "cpu_flash", "float32", 8, 2, 16, Q, K, BEFORE, LAUNCH_S, 2 * LAUNCH_S, full, twice[0], causal, twice[1]
    )
    layer = table.LayerTable(128, 320, True, (64, 512), (1e-5 + 64e-6, 1e-5 + 512e-6), (3e-5 + 128e-6, 3e-5 + 1024e-6))
    merge = table.Curve((64, 512), (1e-6 + 64e-8, 1e-6 + 512e-8))
    pack = table.Curve((1000, 100000), (2e-6 + 1e-7, 2e-6 + 1e-5))
    source = table.Source("a CPU", "cpu", "2026-11-20", "0.1.0", "2.13.0", 1, 5)
    return table.CostTable(table.FORMAT, source, attention, merge, pack, layer, links, beside)

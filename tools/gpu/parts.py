"""The parts of the suite in the order they run, the most important first.

`PARTS` run on one GPU, `MANY` over several.

Modules that the runner imports in processes of their own.
"""

from __future__ import annotations

PARTS: dict[str, str] = {
    "kernels": "tools.gpu.kernels",
    "attention": "tools.gpu.attention",
    "training": "tools.gpu.training",
    "ranks": "tools.gpu.ranks",
    "syncs": "tools.gpu.syncs",
    "profile": "tools.gpu.cost_table",
    "step": "tools.gpu.whole_step",
}

MANY: dict[str, str] = {"many": "tools.gpu.many"}

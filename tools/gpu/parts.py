"""The parts of the suite in the order they run: first what can be learned in no other way.

`MANY` run over several ranks, each on a GPU of its own or several on one; `PARTS` on one GPU.

Modules that the runner imports in processes of their own.
"""

MANY: dict[str, str] = {
    "links": "tools.gpu.links",
    "plans": "tools.gpu.plans",
    "pretrain": "tools.gpu.pretrain_ranks",
    "failing": "tools.gpu.failing",
    "order": "tools.gpu.issue_order",
    "fsdp2": "tools.gpu.fsdp2",
    "recurrent": "tools.gpu.recurrent",
}

PARTS: dict[str, str] = {
    "variants": "tools.gpu.variants",
    "kernels": "tools.gpu.kernels",
    "attention": "tools.gpu.attention",
    "training": "tools.gpu.training",
    "shapes": "tools.gpu.shapes",
    "syncs": "tools.gpu.syncs",
    "profile": "tools.gpu.cost_table",
    "step": "tools.gpu.whole_step",
    "sanitizer": "tools.gpu.sanitizer",
}

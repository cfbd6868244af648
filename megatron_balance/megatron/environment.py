"""Facts from the launcher (torchrun, Slurm), known before Megatron parses anything.

The only place that reads the environment.
"""

from __future__ import annotations

import os


def rank() -> int:
    """This process's global rank; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))  # noqa: TID251  torchrun's own variable, not a switch

"""Triton's kernels under NVIDIA's memory checker: no access outside of what they are given.

One that is planted is found.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from tools.gpu.rows import OUT_OF_TIME, Context, Figure, Row, Target

BUDGET_S = 25.0
FAULTS = Figure("accesses outside of their tensors, of every move and merge", "", Target("equal", 0), speed=True)
PLANTED = Figure("accesses outside found of one launch that is planted", "", Target("at least", 1), speed=True)
FIGURES = (FAULTS, PLANTED)

TOOL = "compute-sanitizer"
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
MARK = "all is launched that should be right"
FAULT = re.compile(r"^=+ Invalid .*", re.MULTILINE)
REFUSED = re.compile(r"^=+ .*not supported.*", re.MULTILINE)


def measure(context: Context) -> Iterator[Row]:
    tool = shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))
    if tool is None:
        yield from (figure.not_measured(f"no {TOOL} here") for figure in FIGURES)
        return
    # An allocation a tensor, so that what lies behind one is nobody's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--tool", "memcheck", sys.executable, "-m", "tools.gpu.sanitizer", context.device]
    try:
        said = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=max(1.0, context.left_s() - 1.0), check=False,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        yield from (figure.not_measured(OUT_OF_TIME) for figure in FIGURES)
        return
    if refused := REFUSED.search(said):
        yield from (figure.not_measured(f"{TOOL}: {refused[0].strip('= ')}") for figure in FIGURES)
        return
    right, mark, planted = said.partition(MARK)
    if not mark:
        raise RuntimeError(f"the launches did not end: {' | '.join(said.strip().splitlines()[-5:])}")
    for figure, part in ((FAULTS, right), (PLANTED, planted)):
        found = FAULT.findall(part)
        yield figure.measured(len(found), found[0].strip("= ") if found else "")


def main() -> None:
    """Launch what is searched: every move and merge, then a move of more rows than there are."""
    import numpy as np
    import torch

    from megatron_balance.runtime.movers import choose_mover
    from megatron_balance.runtime.movers.base import RowMove
    from tools.gpu import kernels

    device = torch.device(sys.argv[1])
    mover = choose_mover("triton", device)
    for case in kernels.cases(kernels.Shape(70, 5, 4, 2, 64), device):  # of variants that are built (part variants)
        case.run(mover)()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(MARK, flush=True)
    if device.type == "cuda":
        rows, short = np.arange(4096)[::-1].copy(), torch.zeros(8, 2, 64, device=device)
        packed = kernels.packed_rows(rows, 2, device)
        mover.fill([RowMove(packed, (short,), torch.zeros(len(rows), 2, 64, device=device))])
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

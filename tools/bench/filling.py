"""Empty share of samples filled with documents by next fit and by best fit, and seconds of filling.

python -m tools.bench.filling [--tokens 20m]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from megatron_balance.cli.inputs import tokens
from megatron_balance.workloads.documents import DocumentStream
from megatron_balance.workloads.lengths import draw

DATASETS = ("arxiv", "github", "prolong64k", "commoncrawl")
SEQ_LENGTHS = (8192, 32768, 131072)


def main() -> None:
    """Print a row for each data set and length of a sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=tokens, default=20_000_000, help="tokens drawn of each data set")
    total = parser.parse_args().tokens
    print("data set, sample: empty by next fit, by best fit; seconds of each")
    for name in DATASETS:
        (drawn,) = draw(name, total, 1, 0)
        for seq_length in SEQ_LENGTHS:
            empty: list[float] = []
            seconds: list[float] = []
            for filling in ("next_fit", "best_fit"):
                begin = time.perf_counter()
                stream = DocumentStream(np.array(drawn, dtype=np.int64), seq_length, 1234, filling=filling)
                empty.append(1 - stream.num_tokens / (seq_length * stream.num_samples(0)))
                seconds.append(time.perf_counter() - begin)
            print(
                f"{name}, {seq_length:,}: {empty[0]:.1%}, {empty[1]:.1%}; {seconds[0]:.2f}, {seconds[1]:.2f} s "
                f"for {len(drawn):,} documents"
            )


if __name__ == "__main__":
    main()

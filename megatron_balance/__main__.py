"""`python -m megatron_balance` is the console script `megatron-balance`."""

import sys

from megatron_balance.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""A script for `run`: all-reduces for ever, one step after another."""

# Arguments: which rank kills itself, and in which step (-1: never).

import os
import signal
import sys

import torch
import torch.distributed as dist


def main() -> None:
    killed, last = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    values = torch.zeros(1 << 18)
    step = 0
    while True:
        step += 1
        sys.stderr.write(f"rank {dist.get_rank()} begins step {step}\n")
        if dist.get_rank() == killed and step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(values)


if __name__ == "__main__":
    main()

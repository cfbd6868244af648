"""A module or script for `run`: the sum of all ranks' numbers, or all-reduces for ever (`steps`)."""

# Every rank prints the sum, with its arguments. Behind `steps`: which rank kills itself, and in which
# step (-1: never).

import os
import signal
import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    if sys.argv[1:2] == ["steps"]:
        steps(*map(int, sys.argv[2:]))
    total = torch.tensor([float(os.environ["RANK"])])
    dist.all_reduce(total)
    place = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    sys.stdout.write(f"{place}: total {total.item():g}, arguments {sys.argv[1:]}\n")
    dist.barrier()
    dist.destroy_process_group()


def steps(killed: int, last: int) -> None:
    values, step = torch.zeros(1 << 18), 0
    while True:
        step += 1
        sys.stderr.write(f"rank {dist.get_rank()} begins step {step}\n")
        if dist.get_rank() == killed and step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(values)


if __name__ == "__main__":
    main()

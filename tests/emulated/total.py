"""A module or script for `run`: every rank prints the sum of all ranks' numbers."""

import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"])])
    dist.all_reduce(total)
    sys.stdout.write(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: total {total.item():g}, arguments {sys.argv[1:]}\n"
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

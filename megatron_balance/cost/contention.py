"""Communication kernels compete with attention for a GPU's streaming multiprocessors.

A transfer is a kernel too: it holds some SMs while it runs, and before that it waits for them.
Zeppelin (section 5.4.1) names this as the cause of the bubbles of its timeline: "the inter-node
transfer phase often stalls while waiting for SM resources, since attention kernels dominate compute
capacity".
"""

from __future__ import annotations

from dataclasses import dataclass

NET_CHANNELS = 2
"""Channels, one SM each, of a transfer to another node: NCCL's default of
NCCL_NCHANNELS_PER_NET_PEER (2.14, graph/paths.cc).
"""

LINK_CHANNELS = 2
MAX_CHANNELS = 32
"""Channels of a transfer inside a node: two for each NVLink between the ranks, 32 at most (the same
file; MAXCHANNELS).
"""

NVLINK_BYTES_PER_S = 25e9
"""One NVLink of generation 3 or 4, one direction (A100 and H100 datasheets: 600 GB/s in 12 links,
900 GB/s in 18, both directions).
"""

PARTS = 1_000_000
"""Parts of a processor that is not counted in SMs: the share that transfers take was measured."""


@dataclass(frozen=True, slots=True)
class Contention:
    """SMs that transfers take of a rank's `num_sms` (0: none, as copy engines do not).

    `waits`: before that they wait until an attention kernel that fills the GPU lets go of some.
    """

    num_sms: int
    intra_sms: int
    inter_sms: int
    waits: bool = False

    @staticmethod
    def of_links(num_sms: int, intra_bytes_per_s: float, *, waits: bool = False) -> Contention:
        """SMs of NCCL's point-to-point kernels on a GPU of `num_sms`, its NVLinks
        `intra_bytes_per_s` in all, one direction.
        """
        if not num_sms:
            return Contention(0, 0, 0)
        num_links = max(1, round(intra_bytes_per_s / NVLINK_BYTES_PER_S))
        return Contention(num_sms, min(MAX_CHANNELS, LINK_CHANNELS * num_links), NET_CHANNELS, waits)

    @staticmethod
    def of_slowdowns(intra: float, inter: float) -> Contention:
        """From measured slowdowns of kernels (factors from 1) beside transfers inside the node, and
        between nodes.
        """
        taken = [round(PARTS * (1 - 1 / max(1.0, factor))) for factor in (intra, inter)]
        return Contention(PARTS, taken[0], taken[1])

    def slowdown(self, *, intra: bool, inter: bool) -> float:
        """Factor on the time of a kernel that fills the GPU while transfers inside the node,
        between nodes, or both run beside it.
        """
        taken = (self.intra_sms if intra else 0) + (self.inter_sms if inter else 0)
        return self.num_sms / (self.num_sms - taken) if taken else 1.0

    def block_s(self, kernel_s: float, num_blocks: float) -> float:
        """Seconds of one of `num_blocks` thread blocks of a kernel on its SM; 0 for a kernel that
        leaves SMs free.
        """
        return kernel_s * self.num_sms / num_blocks if num_blocks > self.num_sms else 0.0

    def wait_s(self, kernel_left_s: float, block_s: float, *, prioritised: bool) -> float:
        """Seconds until a communication kernel gets its SMs from one that fills the GPU.

        Thread blocks of a kernel are issued before those of a later one. With a stream of higher
        priority the transfer waits for a block to end, at most `block_s`; without, until the last
        blocks of the other kernel run, `block_s` before its end.
        """
        if not self.num_sms:
            return 0.0
        return min(block_s, kernel_left_s) if prioritised else max(0.0, kernel_left_s - block_s)

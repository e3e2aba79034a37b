"""How many rows there are: the one thing that dispatchers without a `Room` bring to the host.

Tensors of the meta device hold nothing that could be read. There the numbers are stated: even ones, times an imbalance.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.launching import rehearsed_wait


@dataclass(frozen=True)
class SplitSizes:
    """Reads counts; the host waits for the device.

    Attributes:
        imbalance: where nothing can be read, the rows of this rank's experts over the even share.
        part: where nothing can be read, of the choices that a dispatcher sees those that are not dropped.
    """

    imbalance: float = 1.0
    part: float = 1.0

    def total(self, counts_E: Tensor, share: float, most: int) -> int:
        """Rows of all experts here.

        Args:
            counts_E: rows of each.
            share: this rank's, if all ranks had the same number.
            most: that there can be.
        """
        if not counts_E.is_meta:
            return int(counts_E.sum())
        rehearsed_wait(counts_E)
        return self.stated(share, most)

    def exchanged(self, sent_W: Tensor, arriving_W: Tensor, share: int) -> tuple[list[int], list[int]]:
        """Rows that go to each rank, and rows that come from each.

        Args:
            sent_W: integers on the device.
            arriving_W: likewise.
            share: all rows that we send.
        """
        if not sent_W.is_meta:
            send, receive = torch.stack((sent_W, arriving_W)).tolist()
            return send, receive
        rehearsed_wait(sent_W)
        ranks = sent_W.numel()
        return _dealt(math.ceil(share * self.part), ranks), _dealt(self.stated(share, share * ranks), ranks)

    def crossing(self, counts: Tensor, choices: tuple[int, ...]) -> list[int]:
        """Tokens that come from each node, tokens that go to each, and tokens to make room for.

        Args:
            counts: all of these, on the device.
            choices: T x K of ours, which are of all nodes.
        """
        if not counts.is_meta:
            read: list[int] = counts.tolist()
            return read
        rehearsed_wait(counts)
        nodes = counts.numel() // 2
        each = math.ceil(choices[0] * part_that_crosses(nodes, choices[1]))
        return [each] * (2 * nodes) + [each * nodes]

    def stated(self, share: float, most: int) -> int:
        """Rows where nothing can be read."""
        return min(most, math.ceil(share * self.part * self.imbalance))


def part_that_crosses(nodes: int, top_k: int) -> float:
    """Of the tokens, those of whose choices at least one is on a given node, if choices know nothing of nodes."""
    return 1 - (1 - 1 / nodes) ** top_k


READ = SplitSizes()


def _dealt(rows: int, ranks: int) -> list[int]:
    """As even as whole numbers are."""
    each, more = divmod(rows, ranks)
    return [each + (rank < more) for rank in range(ranks)]

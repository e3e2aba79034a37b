"""Small JSON values between ranks. They travel as bytes; torch's `*_object` collectives would pickle them.

    exchange_json    over the group of an axis, between the steps of training
    Messages         beside training, for one thread of its own

Background work (a checkpoint that is written while training goes on) must not use the groups of training: the
collectives of a group happen in one order on all ranks, and a thread has its own. So `Messages` makes a gloo group.

A rank that is alone exchanges nothing.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import LostRankError
from penstock.parallel.axes import Axis


def exchange_json(value: Any, axis: Axis) -> list[Any]:
    """The values of all ranks of an axis on each of them, in their order.

    Args:
        value: as JSON knows it; each rank's own.
        axis: whose group is used. NCCL carries what lies on the current GPU.
    """
    if axis.group is None:
        return [value]
    device = torch.device("cuda" if dist.get_backend(axis.group) == "nccl" else "cpu")
    row, sizes = _padded(value, axis.group, axis.size, device)
    rows = [torch.empty_like(row) for _ in sizes]
    dist.all_gather(rows, row, group=axis.group)
    return [_value(row, size) for row, size in zip(rows, sizes, strict=True)]


class Messages:
    """A way to talk for the ranks of an axis. All of them make it, and make every call, in the same order.

    Args:
        axis: all ranks of the process group.
    """

    def __init__(self, axis: Axis) -> None:
        group = dist.new_group(list(axis.ranks), backend="gloo") if axis.size > 1 else None
        self._axis = replace(axis, group=group)

    @property
    def rank(self) -> int:
        """Our place on the axis."""
        return self._axis.rank

    @property
    def ranks(self) -> int:
        """Ranks on the axis."""
        return self._axis.size

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on the first rank, in their order; an empty list elsewhere.

        Args:
            value: as JSON knows it; each rank's own.

        Raises:
            LostRankError: a rank is gone.
        """
        if self._axis.group is None:
            return [value]
        with lost_ranks():
            row, sizes = _padded(value, self._axis.group, self.ranks, torch.device("cpu"))
            rows = [torch.empty_like(row) for _ in sizes] if self.rank == 0 else None
            dist.gather(row, rows, dst=self._axis.ranks[0], group=self._axis.group)
        return [_value(row, size) for row, size in zip(rows, sizes, strict=True)] if rows else []

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks on every rank, in their order. Nobody returns before all have called.

        Args:
            value: as JSON knows it; each rank's own.

        Raises:
            LostRankError: a rank is gone.
        """
        with lost_ranks():
            return exchange_json(value, self._axis)

    def from_first(self, value: Any) -> Any:
        """The first rank's value, on all ranks. Raises LostRankError if a rank is gone."""
        return self.all_gather(value if self.rank == 0 else None)[0]

    def close(self) -> None:
        """Give the group back."""
        if self._axis.group is not None and dist.is_initialized():
            dist.destroy_process_group(self._axis.group)
            self._axis = replace(self._axis, group=None)


def _padded(value: Any, group: dist.ProcessGroup, ranks: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Our bytes in a row as long as the longest of all ranks', and the sizes of all."""
    content = bytearray(json.dumps(value).encode())
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    row = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    row[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    return row.to(device), [int(size) for size in sizes]


def _value(row: Tensor, size: int) -> Any:
    return json.loads(row[:size].cpu().numpy().tobytes())


@contextmanager
def lost_ranks() -> Iterator[None]:
    """One line for a collective that fails because the connection to a rank broke, or because it did not answer.

    Gloo says so with a RuntimeError that names its own source file.

    Raises:
        LostRankError: that happened.
    """
    try:
        yield
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        if not isinstance(error, dist.DistError) and "gloo/transport" not in line:
            raise
        got = re.sub(r"^\[\S+\] ", "", line).partition(". ")[0]
        raise LostRankError("another rank has ended or does not answer", got=got) from error

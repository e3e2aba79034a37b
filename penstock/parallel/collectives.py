"""Differentiable collectives over one axis, and small JSON values between ranks. One rank returns its input.

    function        rank r gets                            its gradient travels by
    all_gather      the parts of all ranks, joined         reduce_scatter
    reduce_scatter  part r of the sum                      all_gather
    exchange_rows   rows that other ranks send to it       exchange_rows, reversed
    all_to_all      all of one dim, a part of another      all_to_all, reversed
    all_reduce      the sum; not differentiable            -

Gradients are exact for a loss that is the sum of the ranks' losses. Sums have the dtype of the tensor: a bfloat16 sum
over 8 ranks rounds up to 7 times. Parts are contiguous on the wire: dim 0 needs no copy, another dim needs one.

JSON travels as bytes; torch's `*_object` collectives would pickle it. `JsonGroup` is for a background thread, which
needs its own gloo group: the collectives of a group run in one order on all ranks.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import LostRankError
from penstock.parallel.axes import Axis

# NOTE: torch 2.13 renamed both and warns of the old names; 2.11 has only those.
gather_flat = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_flat = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

Transpose = Callable[..., Tensor]
"""(gradient, *saved tensors) -> gradient of the input."""


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join the parts of all ranks along a dim, in the order of the axis. The gradient is a reduce-scatter."""
    if axis.size == 1:
        return x
    gather, scatter = _along(axis, dim % x.ndim)
    return with_transpose(x, gather, scatter)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the ranks and take our part along a dim, which the ranks divide. The gradient is an all-gather."""
    if axis.size == 1:
        return x
    gather, scatter = _along(axis, dim % x.ndim)
    return with_transpose(x, scatter, gather)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, without gradient."""
    assert not x.requires_grad, "all_reduce has no gradient"
    if axis.size == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)  # dist.all_reduce works in place
    dist.all_reduce(total, group=axis.group)
    return total


def exchange_rows(
    x_ND: Tensor, axis: Axis, receive: Sequence[int] | None = None, send: Sequence[int] | None = None
) -> Tensor:
    """Send rows, which are in the order of their target ranks, and receive those of other ranks in order.

    x_ND has one dim or more. `receive` and `send` are rows from and to each rank; None for both if all divide evenly.
    """
    assert (receive is None) == (send is None), "give both counts or neither"
    assert send is None or sum(send) == x_ND.shape[0], f"{x_ND.shape[0]} rows to send as {send}"
    if axis.size == 1:
        return x_ND
    back = partial(_exchanged, axis=axis, receive=send, send=receive)
    return with_transpose(x_ND, partial(_exchanged, axis=axis, receive=receive, send=send), back)


def all_to_all(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """Divide `split_dim` and join `join_dim`, of which this rank has a part."""
    if axis.size == 1:
        return x
    split_dim, join_dim = split_dim % x.ndim, join_dim % x.ndim
    back = partial(_swapped, axis=axis, split_dim=join_dim, join_dim=split_dim)
    return with_transpose(x, partial(_swapped, axis=axis, split_dim=split_dim, join_dim=join_dim), back)


def _along(axis: Axis, dim: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """All-gather and reduce-scatter along a dim, each other's transpose."""
    return partial(_all_gathered, axis=axis, dim=dim), partial(_reduce_scattered, axis=axis, dim=dim)


def _parts_first(x: Tensor, parts: int, dim: int) -> Tensor:
    """Divide a dim and put the parts one after the other in memory: (parts, ..., size / parts, ...)."""
    assert x.shape[dim] % parts == 0, f"dim {dim} of {tuple(x.shape)} is not divided by {parts} ranks"
    return x.unflatten(dim, (parts, x.shape[dim] // parts)).movedim(dim, 0).contiguous()


def _joined(parts: Tensor, dim: int) -> Tensor:
    return parts.movedim(0, dim).flatten(dim, dim + 1)  # a view for dim 0, else a copy


def _all_gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    parts = x.new_empty(axis.size, *x.shape)  # one part of each rank, in the order of the axis
    gather_flat(parts.flatten(0, 1), x.contiguous(), group=axis.group)
    return _joined(parts, dim)


def _reduce_scattered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    parts = _parts_first(x, axis.size, dim)  # part r goes to rank r
    part = torch.empty_like(parts[0])
    reduce_flat(part, parts.flatten(0, 1), group=axis.group)
    return part


def _exchanged(x_ND: Tensor, axis: Axis, receive: Sequence[int] | None, send: Sequence[int] | None) -> Tensor:
    rows = x_ND.shape[0] if receive is None else sum(receive)
    received = x_ND.new_empty(rows, *x_ND.shape[1:])
    sizes = [None if counts is None else list(counts) for counts in (receive, send)]  # torch takes lists only
    dist.all_to_all_single(received, x_ND.contiguous(), sizes[0], sizes[1], group=axis.group)
    return received


def _swapped(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    sent = _parts_first(x, axis.size, split_dim)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return _joined(received, join_dim)


class _WithTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], run_back: Transpose, *saved: Tensor) -> Tensor:
        ctx.run_back = run_back
        ctx.save_for_backward(*saved)  # `x` is not saved: a linear function needs only its transpose
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return ctx.run_back(gradient, *saved), None, None, *(None for _ in saved)


def with_transpose(x: Tensor, run: Callable[[Tensor], Tensor], run_back: Transpose, *saved: Tensor) -> Tensor:
    """`run(x)` for a linear `run`, with `run_back(gradient, *saved)` as its gradient.

    Tensors that `run_back` needs belong in `saved`, so that autograd can drop or offload them.
    """
    y: Tensor = _WithTranspose.apply(x, run, run_back, *saved)
    return y


def all_gather_json(value: Any, axis: Axis) -> list[Any]:
    """The values of all ranks of an axis on each of them, in order."""
    if axis.group is None:
        return [value]
    device = torch.device("cuda" if dist.get_backend(axis.group) == "nccl" else "cpu")  # NCCL moves GPU memory only
    row, sizes = _padded(value, axis, device)
    rows = [torch.empty_like(row) for _ in sizes]
    dist.all_gather(rows, row, group=axis.group)
    return [_value(row, size) for row, size in zip(rows, sizes, strict=True)]


class JsonGroup:
    """A separate group for JSON between the ranks of an axis. All ranks make every call, in the same order."""

    def __init__(self, axis: Axis) -> None:
        ranks = list(axis.ranks)
        group = dist.new_group(ranks, timeout=axis.timeout, backend="gloo") if axis.size > 1 else None
        self._axis = replace(axis, group=group)

    @property
    def rank(self) -> int:
        return self._axis.rank

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on the first rank, in order; an empty list elsewhere. Raises LostRankError."""
        if self._axis.group is None:
            return [value]
        with lost_ranks():
            row, sizes = _padded(value, self._axis, torch.device("cpu"))
            rows = [torch.empty_like(row) for _ in sizes] if self.rank == 0 else None
            dist.gather(row, rows, dst=self._axis.ranks[0], group=self._axis.group)
        return [_value(row, size) for row, size in zip(rows, sizes, strict=True)] if rows else []

    def all_gather(self, value: Any) -> list[Any]:
        """See `all_gather_json`. A barrier. Raises LostRankError."""
        with lost_ranks():
            return all_gather_json(value, self._axis)

    def from_first(self, value: Any) -> Any:
        """The first rank's value on all ranks. Raises LostRankError."""
        return self.all_gather(value if self.rank == 0 else None)[0]

    def close(self) -> None:
        if self._axis.group is not None and dist.is_initialized():
            dist.destroy_process_group(self._axis.group)
            self._axis = replace(self._axis, group=None)


def _padded(value: Any, axis: Axis, device: torch.device) -> tuple[Tensor, list[int]]:
    """Our bytes in a row as long as the longest of all ranks', and the sizes of all."""
    content = bytearray(json.dumps(value).encode())
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(axis.size)]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=axis.group)
    row = torch.zeros(int(max(sizes)), dtype=torch.uint8)  # the host waits for the sizes here
    row[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    return row.to(device), [int(size) for size in sizes]


def _value(row: Tensor, size: int) -> Any:
    return json.loads(row[:size].cpu().numpy().tobytes())


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Turn gloo's RuntimeError of a collective whose peer is gone, which names gloo's source, into a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        if not isinstance(error, dist.DistError) and "gloo/transport" not in line:
            raise
        got = re.sub(r"^\[\S+\] ", "", line).partition(". ")[0]
        raise LostRankError("another rank has ended or does not answer", got=got) from error

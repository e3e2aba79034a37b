"""Buckets: gradients that are summed over ranks together, and weights that are gathered together.

Small messages are slow, so tensors share buckets. A bucket has one row for each rank of an axis, and a tensor is a
stripe of columns: its rows are divided evenly (`rows_of_shard`). Over 2 ranks, a tensor of 5 rows and one of 2:

    rank 0 | a0 a1 a2 | b0 |
    rank 1 | a3 a4  - | b1 |        the place of a missing row is never read

    reduce_rows    pack all rows; reduce-scatter, so that each rank has the sum of its row of the bucket
    gather_rows    pack our row; all-gather

A bucket is a range of columns and may begin and end inside a tensor, so memory is bounded. While one bucket travels the
next one is packed. All ranks of an axis pass the same shapes in the same order. The host never waits for the device.
Results do not depend on the size of buckets, except for the order in which the library adds more than two ranks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.layout.sharding import row_width
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import gather_flat, reduce_flat

BUCKET_VALUES = 40_000_000  # of a bucket
ROW_VALUES = 1_000_000  # of a row of a bucket, at least
IN_FLIGHT = 2  # buckets in memory


@dataclass(frozen=True)
class BucketEntry:
    """A tensor that travels, contiguous; `own` are the rows of this rank (`rows_of_shard`), maybe in another dtype."""

    whole: Tensor
    own: Tensor


@dataclass(frozen=True)
class Stripe:
    """Columns `first` to `end` of a tensor, at `offset` of a bucket."""

    entry: BucketEntry
    width: int  # values of the larger shards
    wide: int  # ranks that hold one of these
    narrow: int  # values of the smaller shards, of the other ranks
    first: int
    end: int
    offset: int

    def all_rows(self, bucket_RC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of bucket memory and values of the whole tensor."""
        values_N = self.entry.whole.view(-1)
        there_RC = bucket_RC[:, self.offset : self.offset + self.end - self.first]
        wide_RC = values_N[: self.wide * self.width].view(self.wide, self.width)
        yield there_RC[: self.wide], wide_RC[:, self.first : self.end]
        end = min(self.end, self.narrow)
        if end > self.first and self.wide < len(bucket_RC):
            narrow_RC = values_N[self.wide * self.width :].view(-1, self.narrow)
            yield there_RC[self.wide :, : end - self.first], narrow_RC[:, self.first : end]

    def own_row(self, row_C: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of memory in our row of the bucket and our values of the tensor."""
        end = min(self.end, self.entry.own.numel())
        if end > self.first:
            yield row_C[self.offset : self.offset + end - self.first], self.entry.own.view(-1)[self.first : end]


@torch.no_grad()
def reduce_rows(
    entries: Sequence[BucketEntry], shard: Axis, replicate: Axis, dtype: torch.dtype, values: int | None = None
) -> None:
    """Sum `whole` of each entry over `shard`, whose ranks divide the sum, and `replicate`; the result is in `own`."""
    if shard.group is not None or replicate.group is not None:
        # All ranks cut the same shapes into the same buckets, so their collectives meet in the same order.
        buckets = stripes_in_buckets(entries, shard.size, values)
        _overlap(_reduce(bucket, shard, replicate, dtype) for bucket in buckets)


@torch.no_grad()
def gather_rows(entries: Sequence[BucketEntry], shard: Axis, values: int | None = None) -> None:
    """Fill `whole` of each entry from `own` on the ranks of `shard`; all entries have one dtype."""
    _overlap(_gather(bucket, shard) for bucket in stripes_in_buckets(entries, shard.size, values))


def _reduce(bucket: list[Stripe], shard: Axis, replicate: Axis, dtype: torch.dtype) -> Iterator[None]:
    bucket_RC = empty_rows(bucket, shard.size, dtype)
    for stripe in bucket:
        for there, here in stripe.all_rows(bucket_RC):
            there.copy_(here)  # casts to the dtype of the sum
    row_C = bucket_RC[0]  # the only row if `shard` has one rank
    if shard.group is not None:
        row_C = torch.empty_like(row_C)
        work = reduce_flat(row_C, bucket_RC.view(-1), group=shard.group, async_op=True)
        yield
        work.wait()  # the current stream waits; the host waits with gloo only
    if replicate.group is not None:
        work = dist.all_reduce(row_C, group=replicate.group, async_op=True)
        yield
        work.wait()
    for stripe in bucket:
        for there, here in stripe.own_row(row_C):
            here.copy_(there)


def _gather(bucket: list[Stripe], shard: Axis) -> Iterator[None]:
    bucket_RC = empty_rows(bucket, shard.size, bucket[0].entry.whole.dtype)
    row_C = bucket_RC[shard.rank]
    for stripe in bucket:
        for there, here in stripe.own_row(row_C):
            there.copy_(here)
    work = gather_flat(bucket_RC.view(-1), row_C, group=shard.group, async_op=True)
    yield
    work.wait()
    for stripe in bucket:
        for there, here in stripe.all_rows(bucket_RC):
            here.copy_(there)


def stripes_in_buckets(entries: Sequence[BucketEntry], ranks: int, values: int | None) -> Iterator[list[Stripe]]:
    """Cut all columns into buckets of equal size; the last one is smaller."""
    columns = max(BUCKET_VALUES // ranks, ROW_VALUES) if values is None else max(values // ranks, 1)  # of a full bucket
    bucket: list[Stripe] = []
    filled = 0
    for entry in entries:
        width, wide, narrow = _widths(entry.whole, ranks)
        first = 0
        while first < width:
            end = min(width, first + columns - filled)
            bucket.append(Stripe(entry, width, wide, narrow, first, end, filled))
            filled += end - first
            first = end
            if filled == columns:
                yield bucket
                bucket, filled = [], 0
    if bucket:
        yield bucket


def _widths(tensor: Tensor, ranks: int) -> tuple[int, int, int]:
    """Values of the larger shards, the number of ranks that hold one, and values of the smaller shards."""
    row = row_width(tuple(tensor.shape))
    size, rest = divmod(tensor.numel() // max(row, 1), ranks)
    return (size + (rest > 0)) * row, rest or ranks, size * row


def empty_rows(bucket: list[Stripe], ranks: int, dtype: torch.dtype) -> Tensor:
    last = bucket[-1]
    columns = last.offset + last.end - last.first
    return torch.empty(ranks, columns, dtype=dtype, device=last.entry.whole.device)


def _overlap(transfers: Iterator[Iterator[None]]) -> None:
    """Start a bucket while those before it travel. A transfer yields when it is on its way."""
    under_way: deque[Iterator[None]] = deque()
    for transfer in transfers:
        next(transfer)
        under_way.append(transfer)
        if len(under_way) == IN_FLIGHT:
            deque(under_way.popleft(), maxlen=0)  # run to the end
    for transfer in under_way:
        deque(transfer, maxlen=0)

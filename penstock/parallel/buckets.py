"""Tensors that cross the network together: gradients that are summed over ranks, and new weights gathered from them.

Small messages are slow, so tensors travel in buckets. A bucket has one row for each rank of an axis, and a tensor's
rows are dealt out to them as FSDP2 does it, in equal chunks, rounded up. Over 2 ranks, a tensor of 5 rows and one of 2:

    rank 0 | a0 a1 a2 | b0 |        a tensor is a stripe of columns; what is missing at the end of its last row is
    rank 1 | a3 a4  - | b1 |        never read

    reduce_rows    pack all rows; reduce-scatter, so that each rank has the sum of its row of the bucket
    gather_rows    pack our row; all-gather, so that everybody has all of them

A bucket is a range of columns and may begin and end inside a tensor, so memory is bounded however large a tensor is.
Over an axis of one rank a bucket is flat and nothing is dealt out. While one bucket travels the next one is packed.
Every rank of an axis passes the same shapes in the same order. Nothing here waits for the device.

Values are the same for any size of buckets as far as PyTorch is concerned; in which order the network's library adds
more than two ranks may depend on where in a message a value stands.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.parallel.axes import Axis
from penstock.parallel.collectives import gather_flat, reduce_flat

BUCKET_VALUES = 40_000_000
"""Values of a bucket."""

ROW_VALUES = 1_000_000
"""Values of a row of a bucket, at least."""

IN_FLIGHT = 2
"""Buckets that are in memory at once."""


@dataclass(frozen=True)
class BucketEntry:
    """A tensor that travels.

    Attributes:
        whole: contiguous; all rows.
        own: those that fall to this rank (`rows_of_shard`); may be a part of `whole`, and of another dtype.
    """

    whole: Tensor
    own: Tensor


@dataclass(frozen=True)
class Stripe:
    """Columns `first` to `end` of a tensor that is dealt out in rows of `width`; they stand at `offset` in a bucket."""

    entry: BucketEntry
    width: int
    first: int
    end: int
    offset: int

    def all_rows(self, bucket_RC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Places in the bucket, and the values of the whole tensor that belong there."""
        values_N = self.entry.whole.view(-1)
        full, rest = divmod(values_N.numel(), self.width)
        there_RC = bucket_RC[:, self.offset : self.offset + self.end - self.first]
        yield there_RC[:full], values_N[: full * self.width].view(full, self.width)[:, self.first : self.end]
        end = min(self.end, rest)
        if end > self.first:
            yield there_RC[full, : end - self.first], values_N[full * self.width :][self.first : end]

    def own_row(self, row_C: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same for our row of the bucket and our rows of the tensor."""
        end = min(self.end, self.entry.own.numel())
        if end > self.first:
            yield row_C[self.offset : self.offset + end - self.first], self.entry.own.view(-1)[self.first : end]


@torch.no_grad()
def reduce_rows(
    entries: Sequence[BucketEntry], shard: Axis, replicate: Axis, dtype: torch.dtype, values: int | None = None
) -> None:
    """Sum tensors over ranks; each rank gets its own rows of the sum.

    Args:
        entries: `whole` is added up and left as it was, `own` is filled with the sum.
        shard: ranks that divide the sum. One rank alone gets all of it.
        replicate: ranks that hold the same rows: the sum goes over them too.
        dtype: in which values travel and are added.
        values: of a bucket; None for the usual size.
    """
    if shard.group is not None or replicate.group is not None:
        buckets = stripes_in_buckets(entries, shard.size, values)
        _overlap(_reduce(bucket, shard, replicate, dtype) for bucket in buckets)


@torch.no_grad()
def gather_rows(entries: Sequence[BucketEntry], shard: Axis, values: int | None = None) -> None:
    """Fill tensors from the rows that the ranks own.

    Args:
        entries: `own` is sent and `whole` is filled; values travel in the dtype of `whole`, the same for all.
        shard: ranks that own the rows.
        values: of a bucket; None for the usual size.
    """
    _overlap(_gather(bucket, shard) for bucket in stripes_in_buckets(entries, shard.size, values))


def _reduce(bucket: list[Stripe], shard: Axis, replicate: Axis, dtype: torch.dtype) -> Iterator[None]:
    bucket_RC = empty_rows(bucket, shard.size, dtype)
    for stripe in bucket:
        for there, here in stripe.all_rows(bucket_RC):
            there.copy_(here)
    row_C = bucket_RC[0]
    if shard.group is not None:
        row_C = torch.empty_like(row_C)
        work = reduce_flat(row_C, bucket_RC.view(-1), group=shard.group, async_op=True)
        yield
        work.wait()
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
    columns = max(BUCKET_VALUES // ranks, ROW_VALUES) if values is None else max(values // ranks, 1)
    bucket: list[Stripe] = []
    filled = 0
    for one in entries:
        width = _width(one.whole, ranks)
        first = 0
        while first < width:
            end = min(width, first + columns - filled)
            bucket.append(Stripe(one, width, first, end, filled))
            filled += end - first
            first = end
            if filled == columns:
                yield bucket
                bucket, filled = [], 0
    if bucket:
        yield bucket


def _width(tensor: Tensor, ranks: int) -> int:
    """Values of the largest chunk: whole rows, rounded up."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return -(-rows // ranks) * (tensor.numel() // rows) if rows else 0


def empty_rows(bucket: list[Stripe], ranks: int, dtype: torch.dtype) -> Tensor:
    """Memory for a bucket: a row for each rank, as long as its stripes together."""
    last = bucket[-1]
    columns = last.offset + last.end - last.first
    return torch.empty(ranks, columns, dtype=dtype, device=last.entry.whole.device)


def _overlap(transfers: Iterator[Iterator[None]]) -> None:
    """Send off a bucket while those before it travel. A journey yields whenever it is on the way."""
    under_way: deque[Iterator[None]] = deque()
    for transfer in transfers:
        next(transfer)
        under_way.append(transfer)
        if len(under_way) == IN_FLIGHT:
            deque(under_way.popleft(), maxlen=0)
    for transfer in under_way:
        deque(transfer, maxlen=0)

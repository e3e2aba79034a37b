"""Rows are dealt out to ranks evenly, whatever the sizes of tensors and buckets."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.layout.sharding import rows_of_shard
from penstock.parallel.axes import Axis
from penstock.parallel.buckets import BucketEntry, empty_rows, gather_rows, reduce_rows, stripes_in_buckets
from penstock.parallel.shard import by_rows
from tests.distributed.pool import Pool
from tests.parallel.test_collectives import world

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


def _rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    if not tensor.ndim:
        return tensor
    rows = by_rows(tensor)
    return rows[slice(*rows_of_shard(len(rows), rank, ranks))]


@given(SHAPES, st.integers(1, 5), st.integers(1, 200))
def test_every_value_goes_to_the_rank_that_owns_its_row_and_back(
    shapes: list[tuple[int, ...]], ranks: int, values: int
) -> None:
    shapes = [shape for shape in shapes if shape or ranks == 1]  # a scalar is not divided
    tensors = [torch.randn(shape) for shape in shapes]
    owned = [[torch.full_like(_rows(tensor, rank, ranks), torch.nan) for tensor in tensors] for rank in range(ranks)]
    filled = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    by_rank = [list(stripes_in_buckets(list(map(BucketEntry, filled, own)), ranks, values)) for own in owned]
    for number, bucket in enumerate(stripes_in_buckets(list(map(BucketEntry, tensors, tensors)), ranks, values)):
        bucket_RC = empty_rows(bucket, ranks, torch.float32)  # here of all ranks
        assert bucket_RC.numel() <= max(values, ranks)
        for stripe in bucket:
            for there, here in stripe.all_rows(bucket_RC):
                there.copy_(here)
        back_RC = torch.full_like(bucket_RC, torch.nan)  # what no rank writes stays nan and fails the comparison
        for rank in range(ranks):
            for stripe in by_rank[rank][number]:  # every rank cuts the same buckets
                for there, here in stripe.own_row(bucket_RC[rank]):
                    here.copy_(there)
                for there, here in stripe.own_row(back_RC[rank]):
                    there.copy_(here)
        for stripe in by_rank[0][number]:
            for there, here in stripe.all_rows(back_RC):
                here.copy_(there)
    for place, tensor in enumerate(tensors):
        assert torch.equal(filled[place], tensor)
        for rank in range(ranks):
            assert torch.equal(owned[rank][place], _rows(tensor, rank, ranks))


def _summed(values: int | None, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Own rows of sums of random numbers, and the whole sums gathered from them in bfloat16."""
    axis = world()
    generator = torch.Generator().manual_seed(axis.rank)
    tensors = [torch.randn(shape, generator=generator) for shape in ((5, 3), (1,), (64,), (3, 2, 4))]
    entries = [BucketEntry(tensor, _rows(tensor, axis.rank, axis.size)) for tensor in tensors]  # sums over summands
    reduce_rows(entries, axis, Axis(name="alone"), dtype, values)
    everything = [torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in tensors]
    gather_rows([BucketEntry(whole, one.own) for whole, one in zip(everything, entries, strict=True)], axis, values)
    return [one.own.clone() for one in entries], everything


def test_sums_do_not_depend_on_the_size_of_buckets_or_on_the_run(ranks: Pool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = ranks.run(2, _summed, None, dtype)
        for values in (None, 10, 1):  # default size; buckets that end inside tensors; one column for each rank
            for got, wanted in zip(ranks.run(2, _summed, values, dtype), expected, strict=True):
                for one, other in zip(got[0] + got[1], wanted[0] + wanted[1], strict=True):
                    assert torch.equal(one, other)
        for place, whole in enumerate(expected[0][1]):
            own = torch.cat([expected[rank][0][place] for rank in range(2)])
            assert torch.equal(own.bfloat16(), by_rows(whole))
            assert dtype == torch.float32 or torch.equal(own, by_rows(whole).float()), "it was added up in bfloat16"
            assert torch.equal(expected[1][1][place], whole)

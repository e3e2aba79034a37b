"""Chunks of host memory that pass through the device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.parallel.offload import ALIGNMENT, ChunkStream, host_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 7])
def test_every_chunk_comes_is_worked_on_once_and_goes_back(chunks: int) -> None:
    host = [[torch.full((5,), float(i)), torch.full((2, 3), 10.0 * i, dtype=torch.float64)] for i in range(chunks)]
    order = []  # chunks in the order of the work

    def work(index: int, tensors: list[Tensor]) -> None:
        order.append(index)
        assert [t.data_ptr() % ALIGNMENT - tensors[0].data_ptr() % ALIGNMENT for t in tensors] == [0, 0]
        tensors[0] += 1
        tensors[1] *= 2

    stream = ChunkStream(CPU)
    for _ in range(2):
        stream.run(host, work)
    stream.finish()
    assert order == [*range(chunks), *range(chunks)]
    for i, (one, other) in enumerate(host):
        assert one.tolist() == [i + 2.0] * 5 and other.unique().tolist() == [40.0 * i]


def test_two_buffers_serve_all_chunks_and_grow_with_the_largest() -> None:
    stream, places = ChunkStream(CPU), []
    stream.run([[torch.zeros(4)] for _ in range(6)], lambda _, tensors: places.append(tensors[0].data_ptr()))
    assert len(set(places)) == 2  # addresses of two buffers
    stream.run([[torch.zeros(1000)], [torch.zeros(1)]], lambda _, tensors: tensors[0].fill_(7))


@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=9))
def test_host_tensors_are_aligned_share_blocks_and_do_not_overlap(shapes: list[tuple[int, ...]]) -> None:
    tensors = host_tensors(shapes, torch.float32, CPU)
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert all(tensor.is_contiguous() and tensor.storage_offset() * 4 % ALIGNMENT == 0 for tensor in tensors)
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    assert all((tensor == index).all() for index, tensor in enumerate(tensors))


@pytest.mark.parametrize(
    "shapes",
    [
        [(1 << 16,), (3, 1 << 13), (5,)] * 40,
        [(369, 1 << 8), (738, 1 << 8), (3,)] * 26,  # A layer's experts, two of which are just more than a power of 2.
        [(1 << 16,)] * 3,
    ],
    ids=["mixed", "experts", "equal"],
)
def test_blocks_of_host_memory_are_little_larger_than_what_is_in_them(shapes: list[tuple[int, ...]]) -> None:
    assert all(tensor.is_meta for tensor in host_tensors(shapes, torch.float32, torch.device("meta")))
    tensors = host_tensors(shapes, torch.float32, CPU)
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert all(size.bit_count() == 1 for size in blocks.values()), "a size that torch does not round"  # powers of two
    assert sum(blocks.values()) < 1.05 * sum(tensor.nbytes for tensor in tensors)

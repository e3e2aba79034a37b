"""The tile table: every row of every expert is in exactly one block, for any counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import KernelError
from penstock.kernels.tile_table import ALIGNED_BLOCK, BLOCK_SIZES, TileTable, tile_table, tile_table_kernel
from tests.examples import examples
from tests.kernels.ahead_of_time import TARGETS, compile_for


def rows_of_blocks(table: TileTable, block_rows: int) -> list[tuple[int, range]]:
    """(expert, its rows) of every block, as a GEMM program reads them off the table."""
    size = BLOCK_SIZES.index(block_rows)
    owners = table.owners[size, : int(table.block_counts[size])].tolist()
    return [
        (expert, range(start + (block - first) * block_rows, min(start + (block - first + 1) * block_rows, end)))
        for block, (expert, start, end, first) in enumerate(owners)
    ]


@examples(20)
@given(counts=st.lists(st.integers(0, 600), min_size=1, max_size=9), tail=st.integers(0, 300))
def test_blocks_cover_the_rows_of_each_expert_once(device: torch.device, counts: list[int], tail: int) -> None:
    table = tile_table(torch.tensor(counts, dtype=torch.int32, device=device), sum(counts) + tail)
    for block_rows in BLOCK_SIZES:
        covered: dict[int, list[int]] = {expert: [] for expert in range(len(counts))}
        for expert, rows in rows_of_blocks(table, block_rows):
            assert 0 < len(rows) <= block_rows, f"a block of {expert} has {len(rows)} rows"
            covered[expert] += rows
        start = 0
        for expert, count in enumerate(counts):
            assert covered[expert] == list(range(start, start + count)), f"{expert=} {counts=} {block_rows=}"
            start += count


def test_starts_say_where_each_expert_and_the_tail_begin(device: torch.device) -> None:
    table = tile_table(torch.tensor([5, 0, 2], device=device), 9)
    assert table.starts_e.tolist() == [0, 5, 5, 7]


def test_aligned_starts_leave_no_block_to_two_experts(device: torch.device) -> None:
    table = tile_table(torch.tensor([5, 0, 130, 128], device=device), 300)
    assert table.aligned_e.tolist() == [0, 128, 128, 384, 512]


def test_rows_past_the_buffer_are_ignored(device: torch.device) -> None:
    table = tile_table(torch.tensor([100, 100, 100], device=device), 130)
    assert table.starts_e.tolist() == [0, 100, 130, 130]
    assert rows_of_blocks(table, 64) == [(0, range(64)), (0, range(64, 100)), (1, range(100, 130))]


def test_counts_that_are_no_vector_of_integers_are_refused(device: torch.device) -> None:
    with pytest.raises(KernelError, match="one count for each expert"):
        tile_table(torch.ones(2, 2, dtype=torch.int32, device=device), 4)
    with pytest.raises(KernelError, match="float32"):
        tile_table(torch.ones(2, device=device), 4)


@pytest.mark.often("*sm_90*", "*gfx942*")
@pytest.mark.parametrize("target", TARGETS)
def test_the_table_kernel_compiles_without_spills(target: str) -> None:
    pointers = dict.fromkeys(("counts_ptr", "starts_ptr", "aligned_ptr", "block_counts_ptr", "owners_ptr"), "*i32:16")
    numbers = dict.fromkeys(("rows", "experts", "bound"), "i32")
    constants = {"SMALLEST_BLOCK": BLOCK_SIZES[0], "ALIGNED_BLOCK": ALIGNED_BLOCK, "EXPERTS_PADDED": 256}
    compiled = compile_for(tile_table_kernel, pointers | numbers, constants, TARGETS[target], num_warps=1)
    assert compiled.spills == 0, compiled.summary

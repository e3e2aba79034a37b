"""Expert of each block of rows, computed once on the device for all grouped GEMMs of a layer.

The rows of the experts stand one after the other; `counts_e` holds the number of rows of each, on the device. A GEMM
program needs the expert of its output tile. Searching the counts in every tile would scan all experts, so one small
kernel writes a table first. With blocks of 2 rows:

    counts_e   [5, 0, 2]
    starts_e   [0, 5, 5, 7]            first row of each expert, then the first row of the tail
    block      0      1      2      3
    owner      0      0      0      2  expert
               0..5   0..5   0..5   5..7   the expert's rows
               0      0      0      3  the expert's first block

A block never holds rows of two experts, so the last block of an expert may be partly empty (blocks 2 and 3 here). The
number of blocks is known on the device only; the host knows the bound `rows // block_rows + experts`. One launch writes
an owner table for each block size, so that all passes of a layer share one `TileTable`.

Where the last experts are replicas, whose matrices are elsewhere, each product is launched twice: for the rank's own
experts, and for the replicas. Each launch has a table of its own, with all rows but only its experts.
"""

from dataclasses import dataclass, replace

from torch import Tensor, int32, int64

from penstock.base.errors import KernelError
from penstock.kernels.language import start_kernel, tl, triton

BLOCK_SIZES = (64, 128, 192, 256)  # rows of a block, with one owner table for each: multiples of the first one
ALIGNED_BLOCK = 128  # in aligned copies experts begin at multiples of this one of `BLOCK_SIZES`
OWNER_FIELDS = 4  # int32 words of an owner: expert, its first row, the row past its last, its first block


@dataclass(frozen=True)
class TileTable:
    """Rows and blocks of every expert. All int32, on the device."""

    starts_e: Tensor  # first row of each expert, then the first row of the tail
    aligned_e: Tensor  # the same where each expert's rows begin at a multiple of `ALIGNED_BLOCK`
    block_counts: Tensor  # number of blocks, one for each of `BLOCK_SIZES`
    owners: Tensor  # block size x block x OWNER_FIELDS; rows past the number of blocks hold anything
    only_last: bool = False  # of the rows past the last expert's, products set only the very last one to zero
    tail_e: Tensor | None = None  # its last entry is the first row past all experts, if it is not that of `starts_e`
    parts: "tuple[TileTable, TileTable] | None" = None  # tables of own experts and of replicas, if there are any

    @property
    def tails(self) -> Tensor:
        """A tensor whose last entry is the first row that products set to zero."""
        return self.starts_e if self.tail_e is None else self.tail_e

    def in_parts(self, counts_e: Tensor, rows: int, replicas: int) -> "TileTable":
        """This table with one for the experts without matrices of their own, which are the last `replicas`."""
        experts = counts_e.numel() - replicas
        halves = [tile_table(counts_e, rows, part) for part in (range(experts), range(experts, counts_e.numel()))]
        first, second = (replace(half, only_last=self.only_last) for half in halves)
        return replace(self, parts=(first, second))

    @property
    def used(self) -> Tensor:
        """Rows of all experts together: int32, one number."""
        return self.starts_e[-1:]


def tile_table(counts_e: Tensor, rows: int, part: range | None = None) -> TileTable:
    """Write the tables in one launch; no count is copied to the host. Expert rows past `rows` are ignored.

    With `part` the table has only these experts, numbered from 0, at the rows where they are. If others follow, there
    is no tail.
    """
    if counts_e.ndim != 1 or counts_e.numel() == 0 or counts_e.dtype not in (int32, int64):
        raise KernelError(
            "counts_e must hold one count for each expert",
            got=f"{counts_e.dtype} of shape {tuple(counts_e.shape)}",
            allowed="a vector of int32 or int64",
        )
    part = part or range(counts_e.numel())
    experts, is_last = len(part), part.stop == counts_e.numel()
    bound = rows // BLOCK_SIZES[0] + experts  # most blocks of the smallest size: each expert may have a partial one
    table = TileTable(
        starts_e=counts_e.new_empty(experts + 1, dtype=int32),
        aligned_e=counts_e.new_empty(experts + 1, dtype=int32),
        block_counts=counts_e.new_empty(len(BLOCK_SIZES), dtype=int32),
        owners=counts_e.new_empty((len(BLOCK_SIZES), bound, OWNER_FIELDS), dtype=int32),
        tail_e=None if is_last else counts_e.new_empty(experts + 1, dtype=int32),
    )
    start_kernel(
        tile_table_kernel, (experts, len(BLOCK_SIZES)),
        counts_e.contiguous(), table.starts_e, table.aligned_e, table.block_counts, table.owners, table.tail_e, rows,
        counts_e.numel(), part.start, experts, bound,
        SMALLEST_BLOCK=BLOCK_SIZES[0], ALIGNED_BLOCK=ALIGNED_BLOCK,
        EXPERTS_PADDED=triton.next_power_of_2(counts_e.numel()), num_warps=1,
    )  # fmt: skip
    return table


@triton.jit(do_not_specialize=["rows", "bound", "before"])
def tile_table_kernel(
    counts_ptr, starts_ptr, aligned_ptr, block_counts_ptr, owners_ptr, tail_ptr,  # see `TileTable`
    rows, all_experts, before, experts, bound,  # experts `before` and the following; bound: blocks of the smallest size
    SMALLEST_BLOCK: tl.constexpr, ALIGNED_BLOCK: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
):  # fmt: skip
    """Write one expert's part of the owner table for one block size."""
    expert = tl.program_id(0)
    number = before + expert  # among all experts
    size = tl.program_id(1)
    block_rows = SMALLEST_BLOCK * (size + 1)
    ids = tl.arange(0, EXPERTS_PADDED)
    counts = tl.load(counts_ptr + ids, mask=ids < all_experts, other=0).to(tl.int32)
    ends = tl.cumsum(counts, 0)
    starts = tl.minimum(ends - counts, rows)
    ends = tl.minimum(ends, rows)
    blocks = (ends - starts + block_rows - 1) // block_rows  # of each expert; the last may be partly empty

    start = tl.sum(tl.where(ids == number, starts, 0))
    end = tl.sum(tl.where(ids == number, ends, 0))
    earlier = tl.sum(tl.where(ids < before, blocks, 0))  # blocks of experts before the first one of the table
    first_block = tl.sum(tl.where(ids < number, blocks, 0)) - earlier
    past_block = first_block + tl.sum(tl.where(ids == number, blocks, 0))

    # One size writes the tables that do not depend on the size.
    if size == 0:
        tl.store(starts_ptr + expert, start)
    if block_rows == ALIGNED_BLOCK:
        tl.store(aligned_ptr + expert, (earlier + first_block) * ALIGNED_BLOCK)
    if expert == experts - 1:
        tl.store(block_counts_ptr + size, past_block)
        if size == 0:
            tl.store(starts_ptr + experts, end)
            if tail_ptr is not None:
                tl.store(tail_ptr + experts, rows)
        if block_rows == ALIGNED_BLOCK:
            tl.store(aligned_ptr + experts, (earlier + past_block) * ALIGNED_BLOCK)

    for first in range(first_block, past_block, 32):  # one warp, a block a thread
        block = first + tl.arange(0, 32)
        owner_ptr = owners_ptr + (size * bound + block) * 4
        mine = block < past_block
        tl.store(owner_ptr, expert, mask=mine)
        tl.store(owner_ptr + 1, start, mask=mine)
        tl.store(owner_ptr + 2, end, mask=mine)
        tl.store(owner_ptr + 3, first_block, mask=mine)

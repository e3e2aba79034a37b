"""Rows between the GPUs of one node, written by kernels straight into each other's memory.

    push_metadata    choices and weights of our tokens to all ranks
    push_rows        each of our rows once to each rank that holds an expert of its token
    gather_rows      rows that came, at the places of the experts                 (backward of combine)
    return_rows      for each row that came one row back, the sum over its places (combine; dispatch backward)
    sum_ranks        the rows that came back, summed for each token
    signal, wait     say that all is written; wait until everybody has said so

There is no sort, no count and no host between a row and where it goes: token t of rank r stands at row r x T + t of
every receiver. A token crosses once to each rank, not once for each expert, and what its experts on one rank give is
summed there before it travels back.

`penstock.parallel.symmetric` owns the memory and says in which order these may be called; nothing here checks that.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.symmetric_kernels import (
    gather_rows_kernel,
    push_metadata_kernel,
    push_rows_kernel,
    return_rows_kernel,
    signal_kernel,
    sum_ranks_kernel,
    wait_kernel,
)
from penstock.kernels.tuning import Launch

WORD_BYTES = 4
ROW_MULTIPLE = 16
"""Bytes that a row must be a multiple of: the widest store of one thread."""

MOST_RANKS = 31
"""Ranks of a token are bits of an int32."""


@dataclass(frozen=True, kw_only=True)
class PersistentLaunch(Launch):
    """How a kernel that walks over tiles of rows is launched; columns are words of 4 bytes, or numbers if it sums.

    Attributes:
        programs: that walk; as many multiprocessors are taken from others as there are programs, or fewer.
    """

    programs: int


PUSH_LAUNCH = PersistentLaunch(block_rows=8, block_columns=1024, warps=8, programs=32)
"""Enough rows on their way to fill the links from a few multiprocessors. Not measured yet."""

RETURN_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=8, programs=64)
"""Sums K rows for each that it sends, so it needs more programs than a push. Not measured yet."""

LOCAL_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=8, programs=1024)
"""For what reads and writes our own memory only. Not measured yet."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where the memory of every rank begins, as this rank sees it.

    Attributes:
        addresses_W: int64, on the device, multiples of 16.
        rank: our place among them.
    """

    addresses_W: Tensor
    rank: int

    @property
    def size(self) -> int:
        """Ranks, ourselves included."""
        return self.addresses_W.numel()


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where experts live: id i on the ranks from i // per_rank x parts on, as many as there are parts.

    Attributes:
        per_rank: experts of which a rank holds a part.
        parts: ranks that hold a part of the same expert.
    """

    per_rank: int
    parts: int = 1


def push_rows(
    x_TD: Tensor, experts_TK: Tensor, homes: Homes, peers: Peers, offset: int, *, launch: PersistentLaunch = PUSH_LAUNCH
) -> None:
    """Write each row once to each rank that holds one of its experts, to row rank x T + t of the section at `offset`.

    Args:
        x_TD: rows of any dtype, a multiple of 16 bytes wide; packed scales may be part of a row.
        experts_TK: expert ids; the number of experts marks a dropped slot.
        homes: of the experts.
        peers: to whom.
        offset: bytes, a multiple of 16.
        launch: rows and words at a time, and programs.

    Raises:
        KernelError: rows are not a multiple of 16 bytes.
    """
    words_TD = _words(x_TD)
    tokens, words = words_TD.shape
    push_rows_kernel[_grid(tokens, launch)](
        words_TD,
        experts_TK.contiguous(),
        peers.addresses_W,
        offset,
        peers.rank,
        tokens,
        WORDS=words,
        K=experts_TK.shape[1],
        PER_RANK=homes.per_rank,
        PARTS=homes.parts,
        W=peers.size,
        **_block(words, launch),
    )


def push_metadata(experts_TK: Tensor, weights_TK: Tensor, peers: Peers, ids_offset: int, weights_offset: int) -> None:
    """Write our choices (as int32) and weights (float32) to all ranks, T x K numbers at rank x T x K of each section.

    Args:
        experts_TK: integer expert ids.
        weights_TK: float32.
        peers: to whom.
        ids_offset: bytes, a multiple of 16.
        weights_offset: the same.
    """
    slots = experts_TK.numel()
    push_metadata_kernel[(triton.cdiv(slots, 1024),)](
        experts_TK.contiguous(),
        weights_TK.contiguous(),
        peers.addresses_W,
        ids_offset,
        weights_offset,
        peers.rank,
        slots,
        W=peers.size,
        BLOCK_R=1024,
    )


def gather_rows(
    rows_ND: Tensor, index_R: Tensor, counts_e: Tensor, *, launch: PersistentLaunch = LOCAL_LAUNCH
) -> Tensor:
    """The row of each place; places past the last expert's hold anything.

    Args:
        rows_ND: as in `push_rows`.
        index_R: int64, the row of each place.
        counts_e: int32 places of each expert.
        launch: rows and words at a time, and programs.
    """
    words_ND = _words(rows_ND)
    rows, words, experts = index_R.shape[0], words_ND.shape[1], counts_e.shape[0]
    out_RD = rows_ND.new_empty(rows, rows_ND.shape[1])
    gather_rows_kernel[_grid(rows, launch)](
        words_ND,
        index_R,
        counts_e,
        _words(out_RD),
        rows,
        WORDS=words,
        EXPERTS=experts,
        BLOCK_E=triton.next_power_of_2(experts),
        **_block(words, launch),
    )
    return out_RD


@dataclass(frozen=True, kw_only=True)
class Returned:
    """What `return_rows` sends.

    Attributes:
        rows: y_RD at the places of the experts, to be summed; or one row for each that came, N x D.
        is_summed: which of the two.
        scalars_NK: float32, or None.
    """

    rows: Tensor
    is_summed: bool
    scalars_NK: Tensor | None = None


def return_rows(
    returned: Returned,
    places_NK: Tensor,
    counts_e: Tensor,
    peers: Peers,
    offset: int,
    scalars_offset: int = 0,
    *,
    launch: PersistentLaunch = RETURN_LAUNCH,
) -> None:
    """Send a row back for each one that came: to row rank x T + t of the section of the rank that had sent it.

    Rows without a place here are not sent; scalars of all rows are.

    Args:
        returned: rows and scalars.
        places_NK: int64, N = W x T: places here of each choice of each row; those past the last expert's are elsewhere.
        counts_e: int32 places of each expert here.
        peers: to whom.
        offset: bytes, a multiple of 16.
        scalars_offset: the same.
        launch: rows and columns at a time, and programs.

    Raises:
        KernelError: rows are not a multiple of 16 bytes.
    """
    rows, scalars_NK = returned.rows.contiguous(), returned.scalars_NK
    _words(rows)
    received, top_k = places_NK.shape
    width, experts = rows.shape[1], counts_e.shape[0]
    return_rows_kernel[_grid(received, launch)](
        rows,
        places_NK,
        counts_e,
        None if scalars_NK is None else scalars_NK.contiguous(),
        peers.addresses_W,
        offset,
        scalars_offset,
        peers.rank,
        received // peers.size,
        SUMMED=returned.is_summed,
        D=width,
        K=top_k,
        EXPERTS=experts,
        W=peers.size,
        BLOCK_E=triton.next_power_of_2(experts),
        **_block(width, launch),
    )


def sum_ranks(
    parts_ND: Tensor,
    experts_TK: Tensor,
    homes: Homes,
    scalars_NK: Tensor | None = None,
    *,
    launch: PersistentLaunch = LOCAL_LAUNCH,
) -> tuple[Tensor, Tensor | None]:
    """Sum what the ranks sent back, in float32 and always in the same order.

    Args:
        parts_ND: N = W x T rows, those of rank r from r x T on; of a rank that had no expert of a token, anything.
        experts_TK: our choices, as in `push_rows`.
        homes: of the experts.
        scalars_NK: float32, or None.
        launch: rows and columns at a time, and programs.

    Returns:
        y_TD in the dtype of the parts, zero where all slots were dropped; and for each of our choices the sum of
        the scalars of the ranks that hold it, 0 for dropped slots (None without scalars).
    """
    tokens, top_k = experts_TK.shape
    width = parts_ND.shape[1]
    y_TD = parts_ND.new_empty(tokens, width)
    scalars_TK = None if scalars_NK is None else scalars_NK.new_empty(tokens, top_k)
    sum_ranks_kernel[_grid(tokens, launch)](
        parts_ND,
        scalars_NK,
        experts_TK.contiguous(),
        y_TD,
        scalars_TK,
        tokens,
        D=width,
        K=top_k,
        PER_RANK=homes.per_rank,
        PARTS=homes.parts,
        W=parts_ND.shape[0] // tokens,
        **_block(width, launch),
    )
    return y_TD, scalars_TK


def signal(peers: Peers, offset: int) -> None:
    """Count our flag up at every rank, after all that this stream did before.

    Args:
        peers: whose flags.
        offset: bytes of the channel's flags, int64, one for each rank.
    """
    width = triton.next_power_of_2(peers.size)
    signal_kernel[(1,)](peers.addresses_W, offset, peers.rank, W=peers.size, BLOCK_W=width, num_warps=1)


def wait(flags: Tensor, expected: Tensor, late: Tensor, channel: int, *, looks: int) -> None:
    """Hold this stream until every rank has signalled a channel once more.

    Args:
        flags: int64, our own flags, by channel and rank.
        expected: int64, how often each channel was waited for; counted up.
        late: int32; becomes channel + 1 if a rank does not come.
        channel: to wait for.
        looks: at the flags, before it is given up.
    """
    ranks = flags.shape[1]
    width = triton.next_power_of_2(ranks)
    wait_kernel[(1,)](flags, expected, late, channel, looks, W=ranks, BLOCK_W=width, num_warps=1)


def _words(rows: Tensor) -> Tensor:
    """The same bytes as 32-bit words."""
    rows = rows.contiguous()
    if rows.shape[1] * rows.element_size() % ROW_MULTIPLE:
        raise KernelError(
            f"rows that travel must be a multiple of {ROW_MULTIPLE} bytes wide",
            got=f"{rows.shape[1]} numbers of {rows.dtype}",
        )
    return rows.view(torch.int32)


def _grid(rows: int, launch: PersistentLaunch) -> tuple[int]:
    return (max(1, min(launch.programs, triton.cdiv(rows, launch.block_rows))),)


def _block(columns: int, launch: PersistentLaunch) -> dict[str, int]:
    block = min(launch.block_columns, triton.next_power_of_2(columns))
    return {"BLOCK_T": launch.block_rows, "BLOCK_D": block, "num_warps": launch.warps}

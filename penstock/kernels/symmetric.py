"""Rows between the GPUs of one node, written by kernels straight into each other's memory.

    push_rows        choices and weights to all ranks; each row once to each other rank that holds an expert of it
    wait             until the choices of all ranks are here
    take_rows        copy received rows out of the buffer, or to the places of the experts  (backward of combine)
    return_rows      for each received row one row back: the sum over its places (combine; dispatch backward)
    sum_ranks        sum the returned rows of each token

`push_numbers` and `take_numbers` gather a few numbers of each rank in the same way.

Nothing is sorted or counted between a row and its destination, and the host does not wait: token t of rank r has row r
x T + t at every receiver. A row crosses a link once for each rank, not once for each expert; the outputs of a token's
experts on one rank are summed there before they travel back.

Tokens travel in chunks, and flags mark finished chunks (penstock/kernels/symmetric_kernels.py). `take_rows` and
`sum_ranks` wait for a chunk just before they read it, so they can run beside the kernels that still send.

Copy engines use no multiprocessor but cannot read choices: they send all rows to all ranks in one piece. Then
`push_rows` sends choices only, `return_rows` leaves its sums in local memory, `signal` marks the copies as finished,
and `wait` waits for those of the other ranks.

`penstock.parallel.symmetric` owns the memory and decides the order of the calls; nothing here checks it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.language import ceil_div, power_of_two, start_kernel
from penstock.kernels.symmetric_kernels import (
    push_numbers_kernel,
    push_rows_kernel,
    return_rows_kernel,
    signal_kernel,
    sum_ranks_kernel,
    take_numbers_kernel,
    take_rows_kernel,
    wait_kernel,
)
from penstock.kernels.tuning import KernelLaunch

ROW_MULTIPLE = 16  # bytes, of which rows are a multiple: the widest store of one thread
MOST_RANKS = 31  # the ranks of a token are bits of an int32


@dataclass(frozen=True, kw_only=True)
class PersistentLaunch(KernelLaunch):
    """Launch of a kernel whose programs walk over tiles of rows; columns are words of 4 bytes, or numbers if it sums.

    Sending kernels must have the same `programs` on all ranks, because receivers count them; waiting kernels must leave
    room on the chip for the kernels that send.
    """

    programs: int  # at most; one for each tile if tiles are fewer

    def programs_for(self, rows: int) -> int:
        """Programs to start: at most one for each tile."""
        return max(1, min(self.programs, ceil_div(rows, self.block_rows)))


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Base addresses of all ranks' buffers as mapped on this rank: int64, on the device, multiples of 16."""

    addresses_W: Tensor
    rank: int

    @property
    def size(self) -> int:
        return self.addresses_W.numel()


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Ranks of each expert: expert i is on `parts` ranks, from rank i // per_rank * parts on."""

    per_rank: int  # experts of which a rank holds a part
    parts: int = 1  # ranks that hold a part of the same expert


class TokenChunks(NamedTuple):
    """Chunks of each rank's tokens, and those of one launch, `first` to `last` - 1: arguments of waiting kernels."""

    rows: int  # tokens of a chunk; the last of all chunks may have fewer, or none
    count: int
    first: int
    last: int

    @staticmethod
    def cut(tokens: int, count: int) -> "TokenChunks":
        """All of `count` chunks."""
        return TokenChunks(rows=ceil_div(tokens, count), count=count, first=0, last=count)


class ChannelWait(NamedTuple):
    """Flags of a channel, and the values with which a waiting kernel compares them: arguments of these kernels."""

    flags_CW: Tensor  # int64, this rank's flags of the channel, by chunk and sender
    expected: Tensor  # int64, by chunk: value of the flags after the previous transfer
    left: Tensor  # int32, by channel: programs that have finished; zero between launches
    late: Tensor  # int32 scalar; becomes channel + 1 when a rank does not arrive
    channel: int
    signals: int  # growth of a flag in one transfer: programs of the sending kernel
    looks: int  # polls before a rank is given up


class RoutingPayload(NamedTuple):
    """Choices and weights, which go to all ranks before the rows; offsets are bytes."""

    weights_TK: Tensor  # float32
    ids_offset: int  # section of the expert ids, int32; this rank writes T x K numbers at rank x T x K
    weights_offset: int  # section of the weights, laid out like the ids
    flags_offset: int  # flags of the payload; those of chunk 0 are used


class LocalPlaces(NamedTuple):
    """Places, among the rows of this rank's experts, of all ranks' choices: arguments of kernels."""

    places_NK: Tensor  # int64, N = W x T; a place past the last expert's row means that the choice has no place here
    counts_e: Tensor  # int32, rows of each expert

    @property
    def constants(self) -> dict[str, int]:
        experts = self.counts_e.shape[0]
        return {"K": self.places_NK.shape[1], "EXPERTS": experts, "BLOCK_E": power_of_two(experts)}


@dataclass(frozen=True, kw_only=True)
class ReturnPayload:
    """Rows for `return_rows`."""

    rows: Tensor  # y_RD at the places of the experts, to be summed, or N x D, one for each received row
    is_summed: bool
    scalars_R: Tensor | None = None  # float32, at the places of the experts


@dataclass(frozen=True, kw_only=True)
class CombineBuffers:
    """Returned rows on the tokens' own rank, and their sums."""

    parts_ND: Tensor  # N = W x T rows, of rank r from row r x T on, undefined where r held no expert of the token
    y_TD: Tensor  # sums, in the dtype of the parts; zero for tokens whose choices were all dropped
    scalars_NK: Tensor | None = None  # float32
    scalars_TK: Tensor | None = None  # for each choice the sum over the ranks that hold its expert, 0 for dropped ones
    own_TD: Tensor | None = None  # rows of this rank, if they are not in `parts_ND`
    rank: int = 0  # this rank, read with `own_TD`


# Enough rows in flight to fill the links. This and the three below are the fastest of those tried on two H200s.
PUSH_LAUNCH = PersistentLaunch(block_rows=8, block_columns=1024, warps=8, programs=32)
# Must keep up with the links: time after the last chunk has arrived is not overlapped.
TAKE_LAUNCH = PersistentLaunch(block_rows=8, block_columns=1024, warps=8, programs=132)
# For rows that have all arrived: limited by memory bandwidth only.
TAKE_ALL_LAUNCH = PersistentLaunch(block_rows=8, block_columns=1024, warps=8, programs=528)
# Sums K rows for each row that it sends, so it needs more programs than a push.
RETURN_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=8, programs=264)
# Like `TAKE_LAUNCH`. Half as many programs take a fifth longer (benchmarks/results/dispatch-h200x2.json).
SUM_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=4, programs=132)
SUM_ALL_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=4, programs=1056)  # all rows are here


def push_rows(
    x_TD: Tensor,
    experts_TK: Tensor,
    placement: ExpertRanks,
    peers: Peers,
    offsets: tuple[int, int],
    chunks: TokenChunks,
    choices: RoutingPayload | None = None,
    *,
    launch: PersistentLaunch = PUSH_LAUNCH,
) -> None:
    """Write each row once to each other rank that holds one of its experts, at row rank x T + t of a section.

    Rows have any dtype and may contain packed scales; they are a multiple of 16 bytes, here and in `take_rows` and
    `return_rows`. In `experts_TK` the number of experts marks a dropped choice. `offsets` are bytes, of the section (a
    multiple of 16) and of the channel's flags; `choices` is None if all ranks have the choices already.
    """
    words_TD, weights_TK = _words(x_TD), None if choices is None else choices.weights_TK.contiguous()
    to_ids, to_weights, to_flags = (0, 0, 0) if choices is None else choices[1:]
    tokens, width = words_TD.shape
    start_kernel(
        push_rows_kernel, (launch.programs_for(tokens),),
        words_TD, experts_TK.contiguous(), weights_TK, peers.addresses_W, offsets[0], to_ids, to_weights, offsets[1],
        to_flags, peers.rank, tokens, chunks.rows, chunks.first, chunks.last,
        WORDS=width, K=experts_TK.shape[1], PER_RANK=placement.per_rank, PARTS=placement.parts, BLOCK_R=1024,
        **_ranks(peers.size), **_block(width, launch),
    )  # fmt: skip


def wait(awaited: ChannelWait, needed: Tensor | None = None, *, advances: bool = True) -> None:
    """Block this stream until every rank has written the first chunk of a channel.

    `needed` is an int32 scalar on the device, the same on all ranks: if it is zero, neither this nor `signal` does
    anything. If `expected` is not advanced, `take_rows` or `sum_ranks` follows, which waits again and advances it.
    """
    flags_CW, expected, left, *rest = awaited
    start_kernel(
        wait_kernel, (1,), flags_CW, expected, left if advances else None, *rest, needed,
        **_ranks(awaited.flags_CW.shape[1]), num_warps=1,
    )  # fmt: skip


def signal(peers: Peers, flags_offset: int, needed: Tensor | None = None) -> None:
    """Set the flag of a channel's first chunk at all ranks, after all earlier work of this stream. See `wait`."""
    ranks = _ranks(peers.size)
    start_kernel(signal_kernel, (1,), peers.addresses_W, flags_offset, peers.rank, needed, **ranks, num_warps=1)


def take_rows(
    rows_ND: Tensor,
    own_TD: Tensor,
    places: LocalPlaces,
    out: Tensor,
    awaited: ChannelWait,
    chunks: TokenChunks,
    *,
    rank: int,
    is_spread: bool,
    launch: PersistentLaunch = TAKE_LAUNCH,
) -> None:
    """Copy the received rows that have a place here, as they arrive, and this rank's own, which are not pushed.

    `rows_ND` is the section of the received rows, N = W x T, and `own_TD` are the rows that this rank pushed. With
    `is_spread` a row is copied to its places in `out` (R rows), else to the row of its number (N rows); rows that are
    not written hold anything.
    """
    own_words_TD = _words(own_TD)
    tokens, width = own_words_TD.shape
    received = rows_ND.shape[0]
    start_kernel(
        take_rows_kernel, (launch.programs_for(received),),
        _words(rows_ND), own_words_TD, *places, _words(out), *awaited, rank, tokens,
        *chunks,
        WORDS=width, SPREAD=is_spread, **places.constants, **_ranks(awaited.flags_CW.shape[1]),
        **_block(width, launch),
    )  # fmt: skip


def return_rows(
    returned: ReturnPayload,
    places: LocalPlaces,
    peers: Peers,
    offsets: tuple[int, int, int],
    chunks: TokenChunks,
    *,
    staged_ND: Tensor | None = None,
    launch: PersistentLaunch = RETURN_LAUNCH,
) -> None:
    """Send one row back for each received row, to row rank x T + t of the section of the rank that had sent it.

    Rows without a place here are not sent. Scalars of all rows are, 0 for choices without a place here. `offsets` are
    bytes, of the sections of rows and of scalars (multiples of 16) and of the channel's flags. With `staged_ND` the
    rows are written there for copy engines to send (`returned.rows` itself if nothing is summed) and no flag is set;
    scalars are sent in any case.
    """
    rows, scalars_R = returned.rows.contiguous(), returned.scalars_R
    _words(rows)  # checks their width; rows that are summed keep their dtype
    received, top_k = places.places_NK.shape
    width = rows.shape[1]
    start_kernel(
        return_rows_kernel, (launch.programs_for(received),),
        rows, *places, None if scalars_R is None else scalars_R.contiguous(), staged_ND, peers.addresses_W,
        *offsets, peers.rank, received // peers.size, chunks.rows, chunks.first, chunks.last,
        ROWS=staged_ND is None or returned.is_summed, SUMMED=returned.is_summed, D=width, **places.constants,
        BLOCK_K=power_of_two(top_k), **_ranks(peers.size), **_block(width, launch),
    )  # fmt: skip


def sum_ranks(
    buffers: CombineBuffers,
    experts_TK: Tensor,
    placement: ExpertRanks,
    awaited: ChannelWait,
    chunks: TokenChunks,
    *,
    launch: PersistentLaunch = SUM_LAUNCH,
) -> None:
    """Sum the returned rows of each token as they arrive, in float32 and always in the order of the ranks."""
    tokens, top_k = experts_TK.shape
    width = buffers.y_TD.shape[1]
    own_TD = None if buffers.own_TD is None else buffers.own_TD.contiguous()
    start_kernel(
        sum_ranks_kernel, (launch.programs_for(tokens),),
        buffers.parts_ND, own_TD, buffers.rank, buffers.scalars_NK, experts_TK.contiguous(),
        buffers.y_TD, buffers.scalars_TK, *awaited, tokens, *chunks,
        D=width, K=top_k, PER_RANK=placement.per_rank, PARTS=placement.parts, **_ranks(awaited.flags_CW.shape[1]),
        **_block(width, launch),
    )  # fmt: skip


def gather_bytes(numbers: int, ranks: int) -> int:
    """Bytes of the section of a gather: two halves of all ranks' int32 numbers, each a multiple of 16 bytes."""
    return 2 * ceil_div(ranks * numbers, 4) * ROW_MULTIPLE


def push_numbers(numbers_N: Tensor, peers: Peers, expected: Tensor, offsets: tuple[int, int]) -> None:
    """Write int32 numbers to all ranks; `take_numbers` follows. `offsets` are those of the section and of the flags.

    The halves of the section take turns: to take the numbers of a gather a rank has seen those of all others, so a
    rank that is one gather ahead writes the half that no rank reads.
    """
    start_kernel(
        push_numbers_kernel, (1,), numbers_N.contiguous(), expected, peers.addresses_W, *offsets, peers.rank,
        NUMBERS=numbers_N.numel(), BLOCK_N=power_of_two(numbers_N.numel()), **_ranks(peers.size),
    )  # fmt: skip


def take_numbers(section: Tensor, out_WN: Tensor, awaited: ChannelWait) -> None:
    """Copy the int32 numbers of all ranks out of this rank's section when they are there."""
    ranks, numbers = out_WN.shape
    start_kernel(
        take_numbers_kernel, (1,), section, out_WN, *awaited,
        NUMBERS=numbers, BLOCK_N=power_of_two(numbers), **_ranks(ranks),
    )  # fmt: skip


def _words(rows: Tensor) -> Tensor:
    """The rows as 32-bit words."""
    rows = rows.contiguous()
    if rows.shape[1] * rows.element_size() % ROW_MULTIPLE:
        got = f"{rows.shape[1]} numbers of {rows.dtype}"
        raise KernelError(f"rows that travel must be a multiple of {ROW_MULTIPLE} bytes wide", got=got)
    return rows.view(torch.int32)


def _ranks(ranks: int) -> dict[str, int]:
    return {"W": ranks, "BLOCK_W": power_of_two(ranks)}


def _block(columns: int, launch: PersistentLaunch) -> dict[str, int]:
    block = min(launch.block_columns, power_of_two(columns))
    return {"BLOCK_T": launch.block_rows, "BLOCK_D": block, "num_warps": launch.warps}
